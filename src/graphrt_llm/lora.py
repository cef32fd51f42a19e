"""Adapters (LoRA): drawn at random, and applied inside graphs.

An adapter changes a linear map ``W x`` to ``W x + scaling * B (A x)``, with ``A`` [rank, in] and
``B`` [out, rank]; ``scaling`` is ``lora_alpha / rank``, or ``lora_alpha / sqrt(rank)`` with
``use_rslora``. Loaded adapters stand in memory that is allocated once, so that graphs stay valid
when one replaces another.

Source: Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rsLoRA).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import graphrt_llm.kernels.eager as eager
from graphrt_llm.kernels import AddLoRA, choose_kernels
from graphrt_llm.model_config import ModelConfig

MOST_TOKENS = 64
"""Tokens up to which one launch reads the adapters for each of them; more share products."""

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The linear maps that each stacked projection of a ``DecoderLayer`` holds, in its order."""


class Shape(NamedTuple):
    """Of one stacked projection."""

    in_features: int
    out_features: tuple[int, ...]


def projection_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The stacked projections of every layer, by name as in ``PARTS``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": Shape(hidden, (heads, kv_heads, kv_heads)),
        "attention_out": Shape(heads, (hidden,)),
        "gate_up": Shape(hidden, (inner, inner)),
        "down": Shape(inner, (hidden,)),
    }


@dataclass(frozen=True, slots=True, eq=False)
class LoRAAdapter:
    """The weights of one adapter, on the host. Made by ``load_lora`` or ``random_lora``.

    ``rank``: Rows of every ``A``.
    ``scaling``: What the product is multiplied by.
    ``factors``: (layer, name of the linear map, as ``self_attn.q_proj``) -> ``A`` [rank, in] and
      ``B`` [out, rank], floating.
    """

    rank: int
    scaling: float
    factors: Mapping[tuple[int, str], tuple[Tensor, Tensor]]


def random_lora(config: ModelConfig, *, rank: int = 8, seed: int = 0) -> LoRAAdapter:
    """An adapter of every linear map of ``config``'s layers, of the same weights for one ``seed``.

    It changes a map by about a third of its size, so that its tokens are others than the model's.
    """
    generator = torch.Generator()

    def draw(name: str, rows: int, columns: int, size: float) -> Tensor:
        generator.manual_seed(crc32(f"{seed} {name}".encode()))
        return torch.randn(rows, columns, generator=generator).mul_(size / math.sqrt(columns))

    factors = {
        (layer, part): (
            draw(f"{layer} {part} A", rank, in_features, 1.0),
            draw(f"{layer} {part} B", out, rank, 0.35),
        )
        for layer in range(config.num_layers)
        for part, in_features, out in linear_maps(config)
    }
    return LoRAAdapter(rank, 1.0, factors)


def linear_maps(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Name, in and out features of the linear maps of a layer."""
    for name, (in_features, out_features) in projection_shapes(config).items():
        for part, out in zip(PARTS[name], out_features, strict=True):
            yield part, in_features, out


class LoRAStep:
    """The adapters of one step, for all layers. Made once a step, inside its graph.

    ``token_slots`` [tokens] int64: where each token's adapter stands, -1 without one. With the
    kernel of few tokens that is all. Without it: ``slots`` [count] int64, where the adapters of the
    step stand; None: every slot, in order, which saves a copy of the weights. ``absent``
    [tokens, count, 1] bool: True where a token does not use one.
    """

    __slots__ = ("_absent", "_kernel", "_slots", "_token_slots", "_weights")

    def __init__(
        self,
        weights: LoRAWeights,
        token_slots: Tensor,
        *,
        kernel: AddLoRA | None = None,
        slots: Tensor | None = None,
        absent: Tensor | None = None,
    ) -> None:
        self._weights, self._token_slots, self._kernel = weights, token_slots, kernel
        self._slots, self._absent = slots, absent

    def add(
        self,
        projection: str,
        layer: int,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: Tensor | None = None,
    ) -> None:
        """Add to ``out`` [tokens, out_features] what each token's adapter makes of ``x``.

        ``norm`` and ``eps``: of the root mean square norm that ``x`` goes through before. ``gated``
        [tokens, inner]: gets silu(gate) * up of ``out`` and what adapters add; ``out`` is scratch
        memory then.

        By PyTorch in two products, whatever the number of adapters: all of them are applied to
        every token, and those that a token does not use are cleared in between, at ``rank`` numbers
        each.
        """
        a, b = self._weights.of(projection, layer)
        if self._kernel is not None:
            slots, ranks = self._token_slots, self._weights.ranks
            parts = self._weights.parts(projection)
            self._kernel(x, norm, eps, a, b, slots, ranks, parts, out, gated)
            return
        assert self._absent is not None
        if norm is not None:
            x = F.rms_norm(x, norm.shape, norm, eps)
        if self._slots is not None:
            a, b = a.index_select(0, self._slots), b.index_select(0, self._slots)
        down = torch.mm(x, a.flatten(0, 1).t())
        # Filled and not multiplied by 0: what another request's adapter makes may be infinite.
        down.view(*self._absent.shape[:2], -1).masked_fill_(self._absent, 0)
        out.addmm_(down, b.flatten(0, 1))
        if gated is not None:
            eager.apply_gate(out, gated)


class LoRAWeights(nn.Module):
    """The memory of ``max_loras`` adapters of rank at most ``max_rank``: it never moves.

    A stacked projection has one ``A`` [layers, max_loras, parts * max_rank, in] and one ``B``
    [layers, max_loras, parts * max_rank, out], which is zero but for each part's own block. Until
    an adapter is loaded they hold small noise, which no request reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.max_rank = max_rank
        self._shapes = projection_shapes(config)
        self._num_layers = config.num_layers
        self._kernel = choose_kernels(dtype, torch.device(device)).add_lora
        # Which adapter stands where is not kept here: graphs hold what a module remembers.
        # Buffers made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            # Not zeros: with these, the check of a first replay could see no mistake.
            noise = torch.Generator(device).manual_seed(0)
            self.every: Tensor
            self.qkv_a: Tensor
            self.register_buffer("every", torch.arange(max_loras, device=device), persistent=False)
            self.ranks: Tensor
            ranks = torch.zeros(max_loras, dtype=torch.int32, device=device)
            self.register_buffer("ranks", ranks + max_rank, persistent=False)
            for name, (in_features, out_features) in self._shapes.items():
                rows = len(out_features) * max_rank
                for factor, width in (("a", in_features), ("b", sum(out_features))):
                    shape = (config.num_layers, max_loras, rows, width)
                    memory = torch.empty(shape, dtype=dtype, device=device)
                    memory.normal_(std=0.01, generator=noise)
                    if factor == "b":
                        memory *= self._own_block(name, memory.device)
                    self.register_buffer(f"{name}_{factor}", memory, persistent=False)

    def _own_block(self, projection: str, device: torch.device) -> Tensor:
        """[rows, out] bool: True where a row of ``B`` belongs to the linear map of a column."""
        parts = torch.tensor(self.parts(projection), device=device)
        number = torch.arange(len(parts), device=device)
        rows = number.repeat_interleave(self.max_rank)
        return rows[:, None] == number.repeat_interleave(parts)

    def of(self, projection: str, layer: int) -> tuple[Tensor, Tensor]:
        """``A`` and ``B`` of all slots in one layer: [max_loras, rows, in] and [.., out]."""
        a, b = getattr(self, f"{projection}_a"), getattr(self, f"{projection}_b")
        return a[layer], b[layer]

    def parts(self, projection: str) -> tuple[int, ...]:
        """Outputs of each linear map that the projection holds."""
        return self._shapes[projection].out_features

    def begin(self, lora_slots: Tensor, active_loras: Tensor) -> LoRAStep:
        """The adapters of one step.

        ``lora_slots`` [tokens] int64: each token's slot, -1 without an adapter. ``active_loras``
        [count] int64: the slots that they use, each once; the rest ``max_loras``. A token with
        another slot has no adapter.
        """
        slots, most = None, len(self.every)
        if self._kernel is not None and len(lora_slots) <= MOST_TOKENS:
            if len(active_loras) < most:
                # As by products, so that graphs of both agree on batches with more adapters.
                is_active = (lora_slots[:, None] == active_loras).any(1)
                lora_slots = torch.where(is_active, lora_slots, -1)
            return LoRAStep(self, lora_slots, kernel=self._kernel)
        if len(active_loras) < most:
            slots = active_loras.clamp(max=most - 1)
        else:
            active_loras = self.every
        absent = lora_slots[:, None] != active_loras
        return LoRAStep(self, lora_slots, slots=slots, absent=absent[:, :, None])

    def first_overflow(self, adapter: LoRAAdapter) -> tuple[int, str] | None:
        """The first linear map whose factors are not finite in the dtype of this memory.

        Such an adapter would change other requests of its batch: 0 times infinity is not 0.
        """
        dtype = self.qkv_a.dtype
        for place, (down, up) in adapter.factors.items():
            scaled = up.double() * adapter.scaling
            if not all(factor.to(dtype).isfinite().all() for factor in (down, scaled)):
                return place
        return None

    @torch.no_grad()
    def load(self, slot: int, adapter: LoRAAdapter) -> None:
        """Copy ``adapter`` to a slot that no running request uses."""
        self.ranks[slot] = adapter.rank
        for name, shape in self._shapes.items():
            a, b = getattr(self, f"{name}_a"), getattr(self, f"{name}_b")
            packed_a, packed_b = self._pack(adapter, name, shape, a.dtype)
            a[:, slot].copy_(packed_a)
            b[:, slot].copy_(packed_b)

    def _pack(
        self, adapter: LoRAAdapter, name: str, shape: Shape, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """An adapter as a slot holds it: scaled, and zero where it has no weights."""
        rank, rows = self.max_rank, len(shape.out_features) * self.max_rank
        a = torch.zeros(self._num_layers, rows, shape.in_features, dtype=dtype)
        b = torch.zeros(self._num_layers, rows, sum(shape.out_features), dtype=dtype)
        column = 0
        for number, (part, out) in enumerate(zip(PARTS[name], shape.out_features, strict=True)):
            here = slice(number * rank, number * rank + adapter.rank)
            for layer in range(self._num_layers):
                if (layer, part) in adapter.factors:
                    down, up = adapter.factors[layer, part]
                    a[layer, here] = down.to(dtype)
                    b[layer, here, column : column + out] = (up.double().t() * adapter.scaling).to(
                        dtype
                    )
            column += out
        return a, b

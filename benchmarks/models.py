"""The two models that the cases run, on any device: a real decode step, and a small cut model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from graphrt import (
    BatchDescriptor,
    BufferSpec,
    CompilationConfig,
    Device,
    Observer,
    OutputSpec,
    Padding,
    Runtime,
    RuntimeConfig,
    break_point,
)
from graphrt_llm.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    make_attention,
    paged,
)
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import CausalLM, ModelConfig

BLOCK = 16


def decode_key(num_reqs: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens=num_reqs, num_reqs=num_reqs, uniform=True)


def decode_step_of_06b(sizes: Sequence[int], context: int, device: Device) -> DecodeStep:
    """The published shape in bfloat16, run once at each size: every kernel is loaded then."""
    step = DecodeStep(
        ModelConfig.named("qwen3-0.6b"),
        max_reqs=max(sizes),
        context=context,
        dtype=torch.bfloat16,
        device=device.torch_device,
    )
    with torch.no_grad():
        for size in sizes:
            step.prepare(size)
            step(**step.inputs(size))
    return step


class DecodeStep:
    """One token for each of up to ``max_reqs`` requests of ``context`` tokens: 8 inputs, logits.

    The decoder of graphrt_llm over its paged cache, with the attention that the engine chooses for
    few decoding requests (PyTorch's own for many), on random weights. Running a step twice writes
    the same keys and values to the same slots.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_reqs: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert context % BLOCK == 0, "a context of whole blocks"
        self.config = config
        self.max_reqs = max_reqs
        self.context = context
        self.device = device
        self.cache = KVCache(
            config,
            num_blocks=1 + max_reqs * context // BLOCK,
            block_size=BLOCK,
            dtype=dtype,
            device=device,
        )
        self.attention = decode_attention(self.cache)
        self.model = CausalLM(config, dtype=dtype, device=device)
        self.model.attention = self.attention
        fill(self.model)

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        token_requests: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        last: Tensor,
        temperature: Tensor | None = None,
    ) -> Tensor:
        attn = AttentionInputs(slot_mapping, token_requests, block_tables, seq_lens)
        logits: Tensor = self.model(ids, positions, attn, last)
        return logits if temperature is None else logits / temperature[:, None]

    def prepare(self, num_reqs: int) -> None:
        """Choose the attention formula of FULL graphs; whoever calls or captures a step does so."""
        length = self.context // 2
        live = AttentionMetadata(np.full(num_reqs, 1), np.full(num_reqs, length))
        self.attention.prepare(decode_key(num_reqs), live)

    def specs(self) -> list[BufferSpec]:
        """The 8 inputs, over the one axis ``requests``."""
        integers = ("ids", "positions", "slot_mapping", "token_requests")
        return [
            *(BufferSpec(name, ("requests",), torch.int64, Padding.zero()) for name in integers),
            BufferSpec(
                "block_tables", ("requests", self.context // BLOCK), torch.int64, Padding.zero()
            ),
            BufferSpec("seq_lens", ("requests",), torch.int64, Padding.zero()),
            BufferSpec("last", ("requests",), torch.int64, Padding.zero()),
            BufferSpec("temperature", ("requests",), torch.float32),
        ]

    def inputs(self, num_reqs: int, seed: int = 0) -> dict[str, Tensor]:
        """Valid inputs by name: every request is at the middle of its context."""
        generator = torch.Generator().manual_seed(seed)
        position = self.context // 2 - 1
        tables = 1 + torch.arange(num_reqs * self.context // BLOCK).view(num_reqs, -1)
        host = {
            "ids": torch.randint(self.config.vocab_size, (num_reqs,), generator=generator),
            "positions": torch.full((num_reqs,), position),
            "slot_mapping": tables[:, position // BLOCK] * BLOCK + position % BLOCK,
            "token_requests": torch.arange(num_reqs),
            "block_tables": tables,
            "seq_lens": torch.full((num_reqs,), position + 1),
            "last": torch.arange(num_reqs),
            "temperature": torch.full((num_reqs,), 0.7),
        }
        return {name: tensor.to(self.device) for name, tensor in host.items()}


def decode_attention(cache: KVCache) -> AttentionBackend:
    """What the engine chooses for few decoding requests; for more of them PyTorch's own."""
    rest = make_attention("sdpa", cache)
    if paged.obstacle(cache) is not None:
        return rest
    return paged.PagedAttention(rest, paged.triton_decode(cache))


@torch.no_grad()
def fill(model: CausalLM, seed: int = 0) -> None:
    """Random weights made where the model is: a CPU would take seconds."""
    generator = torch.Generator(model.embedding.device).manual_seed(seed)
    for name, shape, destination, _ in model.checkpoint_tensors():
        if name.endswith("norm.weight"):
            destination.fill_(1)
        else:
            destination.normal_(0, shape[-1] ** -0.5, generator=generator)


@break_point(name="attend", out="out")
def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
    """Causal attention among the tokens of a step: padding comes last, so nothing attends to it."""
    attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    if out is None:
        return attended.transpose(0, 1).contiguous()
    return out.copy_(attended.transpose(0, 1))


class SmallModel(nn.Module):
    """A few launch-bound decoder layers, cut at attention: ``x`` [tokens, hidden] + positions."""

    def __init__(
        self, layers: int, hidden: int, heads: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.hidden, self.heads = hidden, heads
        self.table = nn.Embedding(4096, hidden, dtype=dtype, device=device)
        linear = partial(nn.Linear, bias=False, dtype=dtype, device=device)
        self.qkv = nn.ModuleList(linear(hidden, 3 * hidden) for _ in range(layers))
        self.out = nn.ModuleList(linear(hidden, hidden) for _ in range(layers))
        self.mlp = nn.ModuleList(linear(hidden, hidden) for _ in range(layers))
        self.requires_grad_(False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.table(positions)
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp, strict=True):
            heads = qkv(F.rms_norm(x, x.shape[-1:])).view(x.shape[0], 3 * self.heads, -1)
            q, k, v = heads.transpose(0, 1).chunk(3)
            x = x + out(attend(q, k, v).reshape(x.shape))
            x = x + mlp(F.silu(F.rms_norm(x, x.shape[-1:])))
        return x

    def specs(self) -> list[BufferSpec]:
        return [
            BufferSpec("x", ("tokens", self.hidden), self.table.weight.dtype),
            BufferSpec("positions", ("tokens",), torch.int64, Padding.zero()),
        ]

    def inputs(self, num_tokens: int, seed: int = 0) -> dict[str, Tensor]:
        place = self.table.weight
        generator = torch.Generator(place.device).manual_seed(seed)
        x = torch.empty(num_tokens, self.hidden, dtype=place.dtype, device=place.device)
        positions = torch.arange(num_tokens, device=place.device)
        return {"x": x.normal_(generator=generator), "positions": positions}


@contextmanager
def small_runtime(
    device: Device,
    sizes: tuple[int, ...],
    *,
    layers: int = 8,
    hidden: int = 512,
    heads: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    observer: Observer | None = None,
) -> Iterator[tuple[Runtime, SmallModel]]:
    """A captured runtime over a ``SmallModel``, FULL for decode and PIECEWISE for the rest."""
    torch.manual_seed(0)
    model = SmallModel(layers, hidden, heads, dtype, device.torch_device)

    def example(sizes: Mapping[str, int], seed: int) -> Mapping[str, torch.Tensor]:
        return model.inputs(sizes["tokens"], seed)

    runtime = Runtime(
        model,
        inputs=model.specs(),
        outputs=OutputSpec({"": "tokens"}, "view"),
        examples=example,
        config=RuntimeConfig(
            compilation=CompilationConfig(cudagraph_capture_sizes=sizes),
            max_num_seqs=max(sizes),
            max_num_batched_tokens=max(sizes),
        ),
        device=device,
        observer=observer,
    )
    with runtime:
        runtime.capture()
        yield runtime, model

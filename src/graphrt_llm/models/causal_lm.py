"""The decoder of the Llama and Qwen3 families, written for few launches and for capture.

Tokens are flattened: there is no batch dimension. Nothing here reads the device back, no shape
depends on data, and ``forward`` keeps no tensor. Projections add to the residual stream in place,
so that no addition is a separate launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from graphrt import ubatch
from graphrt_llm.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionStep,
    attend,
    attention_operator,
)
from graphrt_llm.collectives import RankGroup
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kernels import Kernels, choose_kernels
from graphrt_llm.kernels.operators import Operators
from graphrt_llm.lora import LoRAStep, LoRAWeights
from graphrt_llm.model_config import ModelConfig
from graphrt_llm.models.experts import Experts
from graphrt_llm.models.parameters import CheckpointTensor, Device, Projection, parameter, whole

if TYPE_CHECKING:
    from graphrt.config import CompilePlan


ALIGNED = 128
"""Elements: kernels ask for aligned memory, and choose by it."""


class Scratch(NamedTuple):
    """Memory that every layer writes, one after the other, and views of it in other shapes.

    Made once a step, in one piece, because allocations are operations too; and because torch's
    allocator keeps pieces of at most 1 MiB apart: with several, a smaller key's graph would need
    memory of that kind that no larger one left it.
    """

    residual: Tensor
    """[tokens, hidden_size]"""
    rotation: Tensor
    """[tokens, 2, 1, head_dim]"""
    normed: Tensor
    """[tokens, hidden_size]"""
    heads: Tensor
    """[tokens, num_heads + 2 * num_kv_heads, head_dim]"""
    attended: Tensor
    """[tokens, num_heads, head_dim]"""
    gate_up: Tensor
    """[tokens, 2 * intermediate_size]"""
    gated: Tensor
    """[tokens, intermediate_size]"""
    qkv: Tensor
    """[tokens, (num_heads + 2 * num_kv_heads) * head_dim]: a view of ``heads``."""
    attended_rows: Tensor
    """[tokens, num_heads * head_dim]: a view of ``attended``."""

    @classmethod
    def of(cls, num_tokens: int, config: ModelConfig, like: Tensor) -> Scratch:
        """Of the dtype and device of ``like``."""
        width, inner = config.head_dim, config.intermediate_size
        shapes = (
            (num_tokens, config.hidden_size),
            (num_tokens, 2, 1, width),
            (num_tokens, config.hidden_size),
            (num_tokens, config.num_heads + 2 * config.num_kv_heads, width),
            (num_tokens, config.num_heads, width),
            (num_tokens, 2 * inner),
            (num_tokens, inner),
        )
        lengths = [math.prod(shape) for shape in shapes]
        memory = like.new_empty(sum(length + -length % ALIGNED for length in lengths))
        parts, begin = [], 0
        for shape, length in zip(shapes, lengths, strict=True):
            parts.append(memory[begin : begin + length].view(shape))
            begin += length + -length % ALIGNED
        residual, rotation, normed, heads, attended, gate_up, gated = parts
        rows = heads.flatten(1), attended.flatten(1)
        return cls(residual, rotation, normed, heads, attended, gate_up, gated, *rows)


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, each after a norm, both added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: Device,
        group: RankGroup | None,
    ) -> None:
        super().__init__()
        self.index = index
        shared = self.group = None if config.num_experts else group
        self.rank, self.world = (0, 1) if shared is None else (shared.rank, shared.world)
        # A key head that several ranks need is on each of them.
        self.kv_parts = min(self.world, config.num_kv_heads)
        config = config.part(self.world)
        self.kernels = kernels
        self.eps = config.rms_norm_eps
        self.num_heads = config.num_heads
        hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_heads * width, config.num_kv_heads * width

        def projection(in_features: int, *out_features: int, bias: bool) -> Projection:
            return Projection(in_features, *out_features, bias=bias, dtype=dtype, device=device)

        bias = config.attention_bias
        self.qkv = projection(hidden, heads, kv_heads, kv_heads, bias=bias)
        self.attention_out = projection(heads, hidden, bias=bias)
        self.experts: Experts | None = None
        if config.num_experts:
            self.experts = Experts(config, group, dtype, device)
        else:
            self.gate_up = projection(hidden, inner, inner, bias=config.mlp_bias)
            self.down = projection(inner, hidden, bias=config.mlp_bias)
        self.attention_norm = parameter((hidden,), dtype, device)
        self.mlp_norm = parameter((hidden,), dtype, device)
        # One row for each head, so that queries and keys are scaled by one multiplication.
        self.qk_norm = (
            parameter((config.num_heads + config.num_kv_heads, width), dtype, device)
            if config.has_qk_norm
            else None
        )

    def forward(
        self,
        scratch: Scratch,
        backend: AttentionBackend,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        lora: LoRAStep | None = None,
    ) -> None:
        """Update ``scratch.residual`` in place."""
        kernels = self.kernels
        residual, rotation, normed, heads, attended, gate_up, gated, qkv, attended_rows = scratch
        norm = self.attention_norm
        kernels.norm_linear(residual, norm, self.eps, *self.qkv.matrix, normed, qkv)
        if lora is not None:
            # It norms for itself, because the kernels need not write the normed rows.
            lora.add("qkv", self.index, residual, qkv, norm, self.eps)
        slots = backend.cache.slots[self.index]
        kernels.rotate_and_store(heads, self.qk_norm, self.eps, rotation, slots, attn.slot_mapping)
        attend(backend, self.index, heads, attn, shared, out=attended)
        self._add(residual, attended_rows, self.attention_out)
        if lora is not None:
            lora.add("attention_out", self.index, attended_rows, residual)

        norm = self.mlp_norm
        if self.experts is not None:
            residual.add_(self.experts(F.rms_norm(residual, norm.shape, norm, self.eps)))
            return
        matrix = self.gate_up.matrix
        if lora is None:
            kernels.norm_gate(residual, norm, self.eps, *matrix, normed, gate_up, gated)
        else:
            # Before the gate, which the kernels may apply inside the product.
            kernels.norm_linear(residual, norm, self.eps, *matrix, normed, gate_up)
            lora.add("gate_up", self.index, residual, gate_up, norm, self.eps, gated)
        self._add(residual, gated, self.down)
        if lora is not None:
            lora.add("down", self.index, gated, residual)

    def _add(self, residual: Tensor, x: Tensor, projection: Projection) -> None:
        """Add ``x`` through ``projection`` to ``residual``: of ranks that share it, all parts."""
        group, (weight, bias) = self.group, projection.matrix
        if group is None:
            self.kernels.add_linear(residual, x, weight, bias)
            return
        if group.rank:
            # The stream itself, and the bias, come from rank 0: the sum has each once, and the
            # kernels for few rows need no memory of its own.
            residual.zero_()
            bias = None
        self.kernels.add_linear(residual, x, weight, bias)
        with ubatch.communication("layer.sum", residual):
            group.all_reduce(residual)

    def functional(
        self,
        residual: Tensor,
        rotation: Tensor,
        slots: Tensor,
        attn: AttentionInputs,
        ops: Operators,
    ) -> None:
        """What ``forward`` computes, for a compiler to trace: no two values share memory.

        Attention is an operator. On a GPU in half precision plain forms differ from ``forward`` in
        rounding, because its kernels do.
        """
        num_tokens, width = residual.shape[0], slots.shape[-1]
        qkv = ops.norm_linear(residual, self.attention_norm, self.eps, *self.qkv.matrix)
        heads = qkv.view(num_tokens, -1, width)
        ops.rotate_and_store(heads, self.qk_norm, self.eps, rotation, slots, attn.slot_mapping)
        attended = heads.new_empty((num_tokens, self.num_heads, width))
        attention_operator(heads, *attn, attended, self.index)
        ops.add_linear(residual, attended.flatten(1), *self.attention_out.matrix)

        norm = self.mlp_norm
        if self.experts is not None:
            residual.add_(self.experts(F.rms_norm(residual, norm.shape, norm, self.eps)))
            return
        gated = ops.norm_gate(residual, norm, self.eps, *self.gate_up.matrix)
        ops.add_linear(residual, gated, *self.down.matrix)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        rank, world = self.rank, self.world
        names = [f"{attn}.{part}_proj" for part in "qkv"]
        for number, tensor in enumerate(self.qkv.checkpoint_tensors(*names)):
            parts = self.kv_parts if number % 3 else world
            yield tensor.shared(0, rank * parts // world, parts)
        for tensor in self.attention_out.checkpoint_tensors(f"{attn}.o_proj"):
            yield tensor.shared(1, rank, world)
        if self.experts is not None:
            yield from self.experts.checkpoint_tensors(mlp)
        else:
            names = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
            for tensor in self.gate_up.checkpoint_tensors(*names):
                yield tensor.shared(0, rank, world)
            for tensor in self.down.checkpoint_tensors(f"{mlp}.down_proj"):
                yield tensor.shared(1, rank, world)
        yield whole(f"{prefix}.input_layernorm.weight", self.attention_norm)
        yield whole(f"{prefix}.post_attention_layernorm.weight", self.mlp_norm)
        if self.qk_norm is not None:
            width = self.qk_norm.shape[1:]
            queries, keys = self.qk_norm[: self.num_heads], self.qk_norm[self.num_heads :]
            yield CheckpointTensor(f"{attn}.q_norm.weight", tuple(width), queries)
            yield CheckpointTensor(f"{attn}.k_norm.weight", tuple(width), keys)


class CausalLM(nn.Module):
    """Next-token logits of a batch of requests over a paged cache.

    Weights are undefined until ``load_safetensors`` or ``random_weights`` has filled them, and
    ``attention`` has to be set to a backend over a cache of ``config``. ``group``: the ranks that
    share its experts, or without experts the heads and the MLP of each layer; ``config`` then
    describes this rank's part. ``num_positions``: those of a
    context, and behind it one for each draft, which a step computes too, because a request at its
    end has drafts, or padding in their place, like any other; None: as many as the model has.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
        group: RankGroup | None = None,
        num_positions: int | None = None,
    ) -> None:
        super().__init__()
        world = 1 if group is None or config.num_experts else group.world
        self.config = config.part(world)
        self.group = group
        self.dtype = dtype
        self.kernels = choose_kernels(dtype, torch.device(device))
        self.attention: AttentionBackend | None = None
        self.lora: LoRAWeights | None = None
        """Memory of adapters, for an engine that serves some."""
        # Parameters made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.embedding = parameter((config.vocab_size, config.hidden_size), dtype, device)
            self.layers = nn.ModuleList(
                DecoderLayer(config, index, self.kernels, dtype, device, group)
                for index in range(config.num_layers)
            )
            self.norm = parameter((config.hidden_size,), dtype, device)
            self.lm_head = (
                self.embedding
                if config.tie_word_embeddings
                else parameter((config.vocab_size, config.hidden_size), dtype, device)
            )
            self.rotary: Tensor
            rotary = rotary_table(config, num_positions).to(device, dtype)
            self.register_buffer("rotary", rotary, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        logits_indices: Tensor,
        lora: LoRAStep | None = None,
    ) -> Tensor:
        """Logits of the tokens at ``logits_indices``, the last new one of each request, or several.

        Shapes:  ``input_ids``, ``positions`` [tokens] int64; ``logits_indices`` [requests] or
                 [requests, query_len] int64; result [..., vocab_size].
        Dtypes:  the model's, logits too: widening them would cost a pass over the vocabulary.
        ``lora``: the adapters of this step, from ``self.lora.begin``; None: no token has one.
        Effects: keys and values of all tokens are stored in the attention backend's cache.
        Errors:  ``AttentionBackendError`` without a backend.
        """
        backend = self.attention
        if backend is None:
            raise AttentionBackendError(
                "CausalLM.attention",
                expected="a backend over a KVCache",
                found="None",
                do="set model.attention = make_attention(name, cache) before the first step.",
            )
        scratch = Scratch.of(len(input_ids), self.config, self.embedding)
        torch.index_select(self.embedding, 0, input_ids, out=scratch.residual)
        torch.index_select(self.rotary, 0, positions, out=scratch.rotation)
        shared = backend.begin(positions, attn)
        for layer in self.layers:
            layer(scratch, backend, attn, shared, lora)
        last = scratch.residual.index_select(0, logits_indices.flatten())
        # With drafts there may be more of them than tokens.
        fits = len(last) <= len(scratch.normed)
        normed = scratch.normed[: len(last)] if fits else torch.empty_like(last)
        eps = self.config.rms_norm_eps
        logits = last.new_empty((last.shape[0], self.config.vocab_size))
        self.kernels.norm_linear(last, self.norm, eps, self.lm_head.t(), None, normed, logits)
        return logits if logits_indices.dim() == 1 else logits.view(*logits_indices.shape, -1)

    def is_elsewhere(self, name: str) -> bool:
        """True for a checkpoint's tensor of an expert that another rank has."""
        return self.group is not None and ".mlp.experts." in name

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Every tensor of the model under its name in a HF checkpoint, tied ones once."""
        yield whole("model.embed_tokens.weight", self.embedding)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield from layer.checkpoint_tensors(f"model.layers.{layer.index}")
        yield whole("model.norm.weight", self.norm)
        if not self.config.tie_word_embeddings:
            yield whole("lm_head.weight", self.lm_head)


class FunctionalLM(nn.Module):
    """The formula of a ``CausalLM`` over one cache, without memory that layers share.

    Shares the model's parameters. What a compiler traces: once, for any number of tokens.
    """

    def __init__(self, model: CausalLM, slots: tuple[Tensor, ...], plan: CompilePlan) -> None:
        super().__init__()
        self.model = model
        self.slots = slots
        self.operators = Operators(model.kernels, plan, slots[0].device)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionInputs, logits_indices: Tensor
    ) -> Tensor:
        """As ``CausalLM.forward``, inside a step that its attention has begun."""
        model = self.model
        residual = F.embedding(input_ids, model.embedding)
        rotation = model.rotary.index_select(0, positions)
        for layer, slots in zip(model.layers, self.slots, strict=True):
            assert isinstance(layer, DecoderLayer)
            layer.functional(residual, rotation, slots, attn, self.operators)
        last = residual.index_select(0, logits_indices.flatten())
        eps, head = model.config.rms_norm_eps, model.lm_head.t()
        logits: Tensor = self.operators.norm_linear(last, model.norm, eps, head, None)
        return logits if logits_indices.dim() == 1 else logits.view(*logits_indices.shape, -1)


class SplitLM(nn.Module):
    """A ``CausalLM`` whose formula is traced, and cut at attention.

    ``attention.begin`` reads the step's key and returns another structure for each kind of it, so
    that it runs before ``traced``, in plain Python. ``plan``: how that is compiled.

    Steps of more than ``largest_graph`` tokens, which no graph serves, run the model as it is where
    compiled code would call the same kernels: through operators, each costs the host more. 0: none
    do.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        plan: CompilePlan,
        largest_graph: int = 0,
    ) -> None:
        super().__init__()
        self.attention = AttentionStep(backend)
        self.traced = FunctionalLM(model, backend.cache.slots, plan)
        self.most_traced = largest_graph if self.traced.operators.are_all_kernels else 0

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionInputs, logits_indices: Tensor
    ) -> Tensor:
        """As ``CausalLM.forward``. The forward context's ``layers`` have ``attention``."""
        logits: Tensor
        if 0 < self.most_traced < input_ids.shape[0]:
            logits = self.traced.model(input_ids, positions, attn, logits_indices)
            return logits
        with self.attention.begun(positions, attn):
            logits = self.traced(input_ids, positions, attn, logits_indices)
        return logits


def rotary_table(config: ModelConfig, num_positions: int | None) -> Tensor:
    """[num_positions, 2, 1, head_dim]: cosines, and signed sines, in float32, on the CPU.

    ``num_positions`` None: ``max_position_embeddings``.

    The first half of the sines is negated, so that rotating is ``x * cos + swap_halves(x) * sin``.
    The axis of 1 is for heads. Always float32, because checkpoints were trained with its roundings:
    at position 100,000 an exact angle is another angle.

    Source: Su et al. 2021 (RoPE), in the half-split form of the Llama checkpoints: element ``i`` of
    a head is paired with element ``i + head_dim / 2``.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is not None:
        # 0 at the longest wavelengths, which are stretched; 1 at the shortest, which are not.
        turns = scaling.original_context * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    count = config.max_position_embeddings if num_positions is None else num_positions
    positions = torch.arange(count, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table[:, :, None]

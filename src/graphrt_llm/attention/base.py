"""The inputs of attention, the protocol of a backend, and the break point where graphs are cut.

The new tokens of a batch are flattened, request after request. Static tensors hold where each
token's keys and values go and where its request's are; a FULL graph has nothing else. The eager
segments of a PIECEWISE program, and eager steps, also have this step's lengths on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphrt import AttentionSupport, BatchDescriptor, break_point
from graphrt_llm.kv_cache import KVCache

HostInts = Sequence[int] | NDArray[np.int64]


class AttentionInputs(NamedTuple):
    """The static tensors of a step, all int64. Padding rows point at the null block.

    ``slot_mapping``: [tokens] Slot (block * block_size + offset) that a token's keys and values go
      to.
    ``token_requests``: [tokens] Row of the token's request in the next two.
    ``block_tables``: [requests, max_blocks] Blocks of a request, in order of position.
    ``seq_lens``: [requests] Tokens of a request, cached and new.
    """

    slot_mapping: Tensor
    token_requests: Tensor
    block_tables: Tensor
    seq_lens: Tensor


class AttentionMetadata(NamedTuple):
    """This step's lengths, on the host: one entry for each real request, in batch order.

    ``query_lens``: New tokens, at least 1 each.
    ``seq_lens``: Cached and new tokens.
    ``block_tables``: [requests, max_blocks] as in ``AttentionInputs``. Needed by a backend that
      plans on the host which blocks to read.
    """

    query_lens: HostInts
    seq_lens: HostInts
    block_tables: NDArray[np.int64] | None = None


class Obstacle(NamedTuple):
    """Why a backend cannot serve a cache; the parts of an error message."""

    expected: str
    found: str
    do: str


def gpu_obstacle(cache: KVCache, head_dims: Collection[int]) -> Obstacle | None:
    """Why a GPU kernel for half precision cannot serve ``cache``; None if it can."""
    device, dtype, head_dim = cache.tensor.device, cache.tensor.dtype, cache.config.head_dim
    if device.type != "cuda":
        return Obstacle("a CUDA device", f"a cache on {device.type}", "use 'sdpa'.")
    if dtype not in (torch.bfloat16, torch.float16):
        return Obstacle("bfloat16 or float16", f"a cache of {dtype}", "use 'sdpa'.")
    if head_dim not in head_dims:
        return Obstacle(f"heads of {head_dims} elements", str(head_dim), "use 'sdpa'.")
    return None


class AttentionBackend(Protocol):
    """Computes causal attention of new tokens over the paged cache that it was made with.

    A key with ``num_reqs`` belongs to a FULL graph: calls under it must be capturable and use only
    tensors, because a replay runs kernels and no Python. Any other key belongs to eager code, which
    has the step's lengths on the host. A backend whose ``support`` is ``AttentionSupport.NEVER``
    sees no key of a FULL graph.

    For each step the engine calls ``prepare``, then ``begin``, then ``forward`` for each layer; in
    a replay ``forward`` runs for the eager segments of a PIECEWISE program only. Memory that a
    graph reads may neither grow nor move. A backend is a ``graphrt.Resource``, whose optional
    methods are called too. So is ``excludes(step_info)``: the ``RuntimeMode`` members whose graphs
    cannot serve this step (FULL, where a step's own plan has other kernels, as that of cascade
    attention). One that sets ``serves_micro_batches`` prepares every part of a step that is split:
    ``prepare`` is called once, and ``graphrt.ubatch.index()`` says in ``begin`` and ``forward``
    which part they serve. ``register_attention_backend`` makes it known by name.
    """

    @property
    def support(self) -> AttentionSupport:
        """Which batches it can serve inside a FULL graph."""

    @property
    def cache(self) -> KVCache:
        """Where the model stores keys and values before it calls ``attend``."""

    @property
    def keep_alive(self) -> Sequence[Tensor]:
        """Memory of its own, allocated at construction, that kernels receive as addresses.

        Torch does not see that a graph uses it, so the runtime has to keep it alive.
        """

    def prepare(self, key: BatchDescriptor, step_info: AttentionMetadata | None) -> None:
        """Plan on the host: called before every step, graph or eager.

        ``step_info`` describes its batch; None in warm-ups and captures of ``key``, where there is
        no real batch.
        """

    def begin(self, positions: Tensor, attn: AttentionInputs) -> tuple[Tensor, ...]:
        """Tensors that all layers of a step share, computed once (inside the graph, if any)."""

    def forward(
        self,
        layer_index: int,
        heads: Tensor,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        out: Tensor,
    ) -> None:
        """Write the attention of layer ``layer_index`` to ``out``.

        Shapes:   ``heads`` [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values;
                  ``shared`` what ``begin`` returned; ``out`` [tokens, num_heads, head_dim], of the
                  dtype of ``heads``.
        Aliasing: ``out`` shares no memory with the rest. All of its rows must be written: those
                  beyond the real tokens with any finite numbers.

        Keys and values of the new tokens are in the cache already, at ``attn.slot_mapping``.
        """


class Decode(Protocol):
    """A kernel for decoding requests; see ``kernels.paged_decode.PagedDecode``."""

    @property
    def keep_alive(self) -> Sequence[Tensor]:
        """As ``AttentionBackend.keep_alive``."""

    def __call__(
        self, heads: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, out: Tensor, /
    ) -> None: ...


def _result(
    backend: AttentionBackend,
    layer_index: int,
    heads: Tensor,
    *_: object,
    out: Tensor | None = None,
) -> Tensor:
    """What ``attend`` returns, not filled: all that a PIECEWISE capture needs of it, because no
    kernel reads it then."""
    if out is not None:
        return out
    shape = (heads.shape[0], backend.cache.config.num_heads, heads.shape[2])
    return torch.empty(shape, dtype=heads.dtype, device=heads.device)


@break_point(name="attention", out="out", capture_stub=_result, stub_when="unobserved")
def attend(
    backend: AttentionBackend,
    layer_index: int,
    heads: Tensor,
    attn: AttentionInputs,
    shared: tuple[Tensor, ...] = (),
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the new tokens in one layer, each over its request up to its own position.

    Shapes:   ``heads`` [tokens, num_heads + 2 * num_kv_heads, head_dim]: a token's queries, keys
              and values; ``shared`` what ``begin`` returned; result [tokens, num_heads, head_dim],
              contiguous.
    Aliasing: the result is ``out`` where given. Rows beyond the real tokens are finite and have no
              meaning.

    The model has already stored keys and values at ``attn.slot_mapping``: that needs no plan, so it
    is part of the graph and not of the eager segment. ``heads`` is passed whole, because slicing it
    would be an operation, and some backends need no slice. A function and not a method, so that a
    PIECEWISE program is cut here for every backend.
    """
    out = _result(backend, layer_index, heads, out=out)
    backend.forward(layer_index, heads, attn, shared, out)
    return out

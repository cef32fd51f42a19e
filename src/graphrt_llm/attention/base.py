"""What attention is given, what a backend promises, and the point where graphs are cut.

A batch of requests brings its new tokens flattened, request after request. Static tensors say
where each token's keys and values go and where its request's lie; a FULL graph knows nothing else.
Between the graphs of a PIECEWISE program, and in eager steps, a backend also has this step's
lengths on the host.
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
    """The static tensors of a step, all int64. Padding rows point at the null block."""

    slot_mapping: Tensor
    """[tokens] Slot (block * block_size + offset) that a token's keys and values go to."""
    token_requests: Tensor
    """[tokens] Row of the token's request in the next two."""
    block_tables: Tensor
    """[requests, max_blocks] Blocks of a request, in order of position."""
    seq_lens: Tensor
    """[requests] Tokens of a request: those in the cache and the new ones."""


class AttentionMetadata(NamedTuple):
    """This step's lengths, on the host: one entry for each real request, in batch order."""

    query_lens: HostInts
    """New tokens, at least 1 each."""
    seq_lens: HostInts
    """Tokens in the cache and new ones."""
    block_tables: NDArray[np.int64] | None = None
    """[requests, max_blocks] as in ``AttentionInputs``. Only for a backend that plans on the host
    which blocks to read."""


class Obstacle(NamedTuple):
    """Why a backend cannot serve a cache; the parts of an error message."""

    expected: str
    found: str
    do: str


def gpu_obstacle(cache: KVCache, head_dims: Collection[int]) -> Obstacle | None:
    """What keeps a kernel for GPUs in half precision from serving ``cache``; None if nothing."""
    device, dtype, head_dim = cache.tensor.device, cache.tensor.dtype, cache.config.head_dim
    if device.type != "cuda":
        return Obstacle("a CUDA device", f"the cache lies on {device.type}", "use 'sdpa'.")
    if dtype not in (torch.bfloat16, torch.float16):
        return Obstacle("bfloat16 or float16", f"a cache of {dtype}", "use 'sdpa'.")
    if head_dim not in head_dims:
        return Obstacle(f"heads of {head_dims} elements", str(head_dim), "use 'sdpa'.")
    return None


class AttentionBackend(Protocol):
    """Computes causal attention of new tokens over the paged cache that it was made with.

    A key with ``num_reqs`` belongs to a FULL graph: what is called under it must be capturable and
    know only tensors. Any other key belongs to eager code with the step's lengths at hand.
    """

    @property
    def support(self) -> AttentionSupport:
        """What of it may stand inside a FULL graph."""

    @property
    def cache(self) -> KVCache:
        """Where the model stores keys and values before it asks for attention."""

    @property
    def holds(self) -> Sequence[Tensor]:
        """Memory of its own, from its construction on, that kernels know by address alone.

        Torch does not see that a graph uses it, so somebody has to give it to the runtime to hold.
        """

    def reserve_for_capture(self, max_key: BatchDescriptor) -> None:
        """Allocate what the largest key needs. Nothing may grow or move afterwards."""

    def prepare_for_capture(self, key: BatchDescriptor) -> None:
        """Called before each warm-up and capture of ``key``: there is no live batch."""

    def prepare_for_replay(self, key: BatchDescriptor, live: AttentionMetadata) -> None:
        """Called before every step that serves a batch, graph or eager: plan on the host here."""

    def begin(self, positions: Tensor, attn: AttentionInputs) -> tuple[Tensor, ...]:
        """What all layers of a step share, computed once, in the graph where there is one."""

    def forward(
        self,
        layer_index: int,
        heads: Tensor,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        out: Tensor,
    ) -> None:
        """Write what ``attend`` returns into ``out``."""


@break_point(name="attention", out="out")
def attend(
    backend: AttentionBackend,
    layer_index: int,
    heads: Tensor,
    attn: AttentionInputs,
    shared: tuple[Tensor, ...] = (),
    out: Tensor | None = None,
) -> Tensor:
    """One layer's attention of new tokens, each over its request up to its own position.

    Shapes:   ``heads`` [tokens, num_heads + 2 * num_kv_heads, head_dim]: a token's queries, keys
              and values; ``shared`` what ``begin`` returned; result [tokens, num_heads, head_dim],
              contiguous.
    Aliasing: the result is ``out`` where given. Rows beyond the real tokens are finite and mean
              nothing.

    Keys and values are in the cache already, at ``attn.slot_mapping``: storing them needs no plan,
    so it stands in the graph and not in the gap. What they lie in is handed over whole, because
    each part of it would be an operation, also for a backend that takes none. A function and not a
    method, so that a PIECEWISE program is cut here for every backend.
    """
    if out is None:
        shape = (heads.shape[0], backend.cache.config.num_heads, heads.shape[2])
        out = torch.empty(shape, dtype=heads.dtype, device=heads.device)
    backend.forward(layer_index, heads, attn, shared, out)
    return out


class AttentionResource:
    """A backend as the runtime prepares it: the ``Resource`` protocol of graphrt."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def reserve(self, max_key: BatchDescriptor) -> None:
        self._backend.reserve_for_capture(max_key)

    def prepare(self, key: BatchDescriptor, live: AttentionMetadata | None) -> None:
        if live is None:
            self._backend.prepare_for_capture(key)
        else:
            self._backend.prepare_for_replay(key, live)

    def freeze(self) -> None:
        """Nothing to do: a backend grows in ``reserve_for_capture`` only."""

"""Attention of few decoding requests by our own kernel; everything else by another backend.

With few requests a decode step's attention is as long as its launches: a kernel that needs no plan
of the host and no second launch to add up its parts takes 6 us on an H200, FlashInfer's two 10.
With many requests, or several new tokens, another backend has the better kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from graphrt import AttentionSupport, BatchDescriptor
from graphrt_llm.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    Obstacle,
    gpu_obstacle,
)
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache

MAX_REQUESTS = 16
"""Requests in a batch, padding included, up to which no other kernel is faster: at 16 FlashInfer's
is as fast, and has to be planned."""

HEAD_DIMS = (16, 32, 64, 128, 256)


class Decode(Protocol):
    """What ``kernels.paged_decode.PagedDecode`` is."""

    @property
    def holds(self) -> Sequence[Tensor]:
        """As ``AttentionBackend.holds``."""

    def __call__(
        self, heads: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, out: Tensor, /
    ) -> None: ...


def obstacle(cache: KVCache) -> Obstacle | None:
    """What keeps the kernel from serving ``cache``; None if nothing does."""
    found = gpu_obstacle(cache, HEAD_DIMS)
    if found is not None:
        return found
    if importlib.util.find_spec("triton") is None:
        return Obstacle("the package triton", "it is not installed", "install it, or use 'sdpa'.")
    return None


def triton_decode(cache: KVCache) -> Decode:
    """The Triton kernel, with memory for ``MAX_REQUESTS``.

    Errors: ``AttentionBackendError`` where ``obstacle`` finds one.
    """
    found = obstacle(cache)
    if found is not None:
        raise AttentionBackendError("attention backend 'paged'", **found._asdict())
    from graphrt_llm.kernels.paged_decode import PagedDecode

    return PagedDecode(cache.layers[0], cache.config.num_heads, MAX_REQUESTS)


class PagedAttention:
    """``decode`` for batches of at most ``MAX_REQUESTS`` with one token each; else ``others``.

    ``others``: a backend over the same cache. What may stand in a FULL graph is what it says.
    """

    def __init__(self, others: AttentionBackend, decode: Decode) -> None:
        self.cache = others.cache
        self._others = others
        self._decode = decode
        self._is_decode = False
        """Whether the step that was prepared last is ours."""

    @property
    def support(self) -> AttentionSupport:
        return self._others.support

    @property
    def holds(self) -> Sequence[Tensor]:
        return *self._decode.holds, *self._others.holds

    def reserve_for_capture(self, max_key: BatchDescriptor) -> None:
        self._others.reserve_for_capture(max_key)

    def prepare_for_capture(self, key: BatchDescriptor) -> None:
        # Gaps are not captured: what stands in for a PIECEWISE batch is for the others to say.
        self._is_decode = _is_decode_graph(key)
        if not self._is_decode:
            self._others.prepare_for_capture(key)

    def prepare_for_replay(self, key: BatchDescriptor, live: AttentionMetadata) -> None:
        if key.num_reqs is None:
            num_reqs = len(live.query_lens)
            self._is_decode = num_reqs <= MAX_REQUESTS and max(live.query_lens) == 1
        else:
            self._is_decode = _is_decode_graph(key)
        if not self._is_decode:
            self._others.prepare_for_replay(key, live)

    def begin(self, positions: Tensor, attn: AttentionInputs) -> tuple[Tensor, ...]:
        return () if self._is_decode else self._others.begin(positions, attn)

    def forward(
        self,
        layer_index: int,
        heads: Tensor,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        out: Tensor,
    ) -> None:
        if not self._is_decode:
            self._others.forward(layer_index, heads, attn, shared, out)
            return
        # One token a request: row i of the batch is request i. Padded rows have no length; rows
        # that are no request's are padding of a PIECEWISE graph, and have to be finite.
        layer, (_, _, tables, lengths) = self.cache.layers[layer_index], attn
        num_tokens = heads.shape[0]
        rows = min(num_tokens, lengths.shape[0], MAX_REQUESTS)
        if rows == num_tokens:
            self._decode(heads, layer, tables, lengths, out)
        else:
            self._decode(heads[:rows], layer, tables, lengths, out[:rows])
            out[rows:].zero_()


def _is_decode_graph(key: BatchDescriptor) -> bool:
    # A FULL graph of mixed batches has room for as many requests as tokens, and one request may
    # bring all of them.
    return key.uniform and key.num_reqs == key.num_tokens <= MAX_REQUESTS

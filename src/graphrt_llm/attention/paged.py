"""Attention of few decoding requests by this package's Triton kernel; other batches elsewhere.

With few requests, launches take most of the time of a decode step's attention. This kernel needs no
plan on the host and no second launch to combine its parts: 6 us on an H200, FlashInfer's two 10.
With many requests, or several new tokens each, another backend has the faster kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from graphrt import BatchDescriptor
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
"""Requests in a batch, padding included, up to which no other kernel is faster: at 16 FlashInfer is
as fast, and also needs a plan."""

HEAD_DIMS = (16, 32, 64, 128, 256)


class Decode(Protocol):
    """The kernel; see ``kernels.paged_decode.PagedDecode``."""

    @property
    def keep_alive(self) -> Sequence[Tensor]:
        """As ``AttentionBackend.keep_alive``."""

    def __call__(
        self, heads: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, out: Tensor, /
    ) -> None: ...


def obstacle(cache: KVCache) -> Obstacle | None:
    """Why the kernel cannot serve ``cache``; None if it can."""
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
    """``decode`` for batches of at most ``MAX_REQUESTS`` with one token each; else ``fallback``.

    ``fallback``: a backend over the same cache, whose ``support`` is that of the pair.
    """

    def __init__(self, fallback: AttentionBackend, decode: Decode) -> None:
        self.cache = fallback.cache
        self.support = fallback.support
        self._fallback = fallback
        self._decode = decode
        self._uses_decode = False
        """Whether the step that was prepared last runs by ``decode``."""

    @property
    def keep_alive(self) -> Sequence[Tensor]:
        return *self._decode.keep_alive, *self._fallback.keep_alive

    def prepare(self, key: BatchDescriptor, step_info: AttentionMetadata | None) -> None:
        if key.num_reqs is None and step_info is not None:
            num_reqs = len(step_info.query_lens)
            self._uses_decode = num_reqs <= MAX_REQUESTS and max(step_info.query_lens) == 1
        else:
            # Without a batch, the eager segments of a PIECEWISE key are the fallback's.
            self._uses_decode = _is_decode_graph(key)
        if not self._uses_decode:
            self._fallback.prepare(key, step_info)

    def begin(self, positions: Tensor, attn: AttentionInputs) -> tuple[Tensor, ...]:
        return () if self._uses_decode else self._fallback.begin(positions, attn)

    def forward(
        self,
        layer_index: int,
        heads: Tensor,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        out: Tensor,
    ) -> None:
        if not self._uses_decode:
            self._fallback.forward(layer_index, heads, attn, shared, out)
            return
        # One token a request: row i of the batch is request i. Padded requests have length 0; rows
        # beyond the requests are padding of a PIECEWISE graph, and have to be finite.
        layer, (_, _, tables, lengths) = self.cache.layers[layer_index], attn
        num_tokens = heads.shape[0]
        rows = min(num_tokens, lengths.shape[0], MAX_REQUESTS)
        if rows == num_tokens:
            self._decode(heads, layer, tables, lengths, out)
        else:
            self._decode(heads[:rows], layer, tables, lengths, out[:rows])
            out[rows:].zero_()


def _is_decode_graph(key: BatchDescriptor) -> bool:
    # Uniform, because one request of a mixed batch may have all of its tokens.
    return key.uniform and key.num_reqs == key.num_tokens <= MAX_REQUESTS

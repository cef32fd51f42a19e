"""Attention of decoding requests by this package's Triton kernel; other batches elsewhere.

It needs no plan on the host and no second launch to combine its parts, so that a graph of it serves
every length. Chunks of prompts are another backend's.

Us a layer of this kernel, and of FlashInfer 0.6.13 on CUDA cores and on tensor cores. H200, 8 key
heads of 128; requests x tokens, and the first 138 requests of the Azure trace:

    heads  1 x 200      16 x 200     64 x 200    200 x 200   200 x 1024     Azure
    16     5.3  9.4 10  10  12   13  21  26  29  50  49  69  212  232  216  154  231  168
    32     5.3 17   10  11  30   13  20  35  30  50  64  70  218  301  218  155  433  171

This kernel takes 5 to 10 % less since, at 1,000 tokens and more: its programs begin in another
order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from torch import Tensor

from graphrt import BatchDescriptor
from graphrt_llm.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    Decode,
    Obstacle,
    gpu_obstacle,
)
from graphrt_llm.attention.switching import SwitchingAttention
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache

MAX_REQUESTS = 16
"""Requests of a padded batch that scratch memory is made for, where no limits are given."""

HEAD_DIMS = (16, 32, 64, 128, 256)

MOST_QUERIES = 64
"""Queries of a request that share a key head, its heads times its new tokens, up to which a program
holds their results in registers."""


def obstacle(cache: KVCache) -> Obstacle | None:
    """Why the kernel cannot serve ``cache``; None if it can."""
    found = gpu_obstacle(cache, HEAD_DIMS)
    if found is not None:
        return found
    if importlib.util.find_spec("triton") is None:
        return Obstacle("the package triton", "it is not installed", "install it, or use 'sdpa'.")
    return None


def triton_decode(cache: KVCache, query_len: int = 1, most_requests: int = MAX_REQUESTS) -> Decode:
    """The Triton kernel, with memory for ``most_requests`` of ``query_len`` new tokens each.

    Errors: ``AttentionBackendError`` where ``obstacle`` finds one.
    """
    found = obstacle(cache)
    if found is not None:
        raise AttentionBackendError("attention backend 'paged'", **found._asdict())
    from graphrt_llm.kernels.paged_decode import PagedDecode

    return PagedDecode(cache.layers[0], cache.config.num_heads, most_requests, query_len)


class PagedAttention:
    """``decode`` for uniform batches of at most ``most_requests``; else ``fallback``.

    ``fallback``: a backend over the same cache, whose ``support`` is that of the pair.
    ``query_len``: new tokens of each request of a uniform batch.
    """

    def __init__(
        self,
        fallback: AttentionBackend,
        decode: Decode,
        query_len: int = 1,
        most_requests: int = MAX_REQUESTS,
    ) -> None:
        self.cache = fallback.cache
        self.switching: SwitchingAttention | None = getattr(fallback, "switching", None)
        self._most_requests = most_requests
        self._query_len = query_len
        self.support = fallback.support
        self._fallback = fallback
        self._decode = decode
        self._uses_decode = False
        """Whether the step that was prepared last runs by ``decode``."""

    @property
    def keep_alive(self) -> Sequence[Tensor]:
        return *self._decode.keep_alive, *self._fallback.keep_alive

    def prepare(self, key: BatchDescriptor, step_info: AttentionMetadata | None) -> None:
        q = self._query_len
        if key.num_reqs is None and step_info is not None:
            lens = step_info.query_lens
            self._uses_decode = len(lens) <= self._most_requests and min(lens) == max(lens) == q
        else:
            # Without a batch, the eager segments of a PIECEWISE key are the fallback's. Uniform,
            # because one request of a mixed batch may have all of its tokens.
            num_reqs = key.num_reqs or 0
            is_decode = key.uniform and num_reqs * q == key.num_tokens
            self._uses_decode = is_decode and num_reqs <= self._most_requests
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
        # Equally many tokens a request, in order. Padded requests have length 0; rows beyond the
        # requests are padding of a PIECEWISE graph, and have to be finite.
        layer, (_, _, tables, lengths) = self.cache.layers[layer_index], attn
        num_tokens, q = heads.shape[0], self._query_len
        rows = q * min(num_tokens // q, lengths.shape[0], self._most_requests)
        if rows == num_tokens:
            self._decode(heads, layer, tables, lengths, out)
        else:
            self._decode(heads[:rows], layer, tables, lengths, out[:rows])
            out[rows:].zero_()

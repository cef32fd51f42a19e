"""Attention by PyTorch's scaled dot product: any device, any dtype.

Two formulas give the same result. The *static* one, for FULL graphs, has shapes that only the key
decides: it reads each request's whole block table and masks what is beyond a token. The *host* one,
for eager code, takes the step's lengths from the host and reads no further than these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from graphrt import AttentionSupport, BatchDescriptor, ubatch
from graphrt_llm.attention.base import AttentionInputs, AttentionMetadata
from graphrt_llm.blocks import blocks_for
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache

MOST_TOGETHER = 8
"""New tokens of a request up to which it is computed with others: a copy of its whole table then
costs less than launches of its own."""


class _Chunk(NamedTuple):
    """Several new tokens of one request."""

    request: int
    """Its number in the batch."""
    start: int
    """Index of its first new token in the batch."""
    num_new: int
    num_all: int
    """Cached and new tokens."""


class _Step:
    """What a backend keeps of one step, or of one micro-batch of it. The same object in each step,
    so that what a run has left in it is seen to be reset before the next."""

    def __init__(self) -> None:
        self.key: BatchDescriptor | None = None
        self.lengths: _Lengths | None = None
        # Shared by all layers, made by the first that needs it.
        self.decodes: tuple[Tensor, Tensor] | None = None
        self.masks: dict[_Chunk, Tensor] = {}

    def begin(self, key: BatchDescriptor, lengths: _Lengths | None) -> None:
        self.key = key
        self.lengths = lengths
        self.decodes = None
        self.masks.clear()


class _Lengths(NamedTuple):
    """The lengths of a step, on the host."""

    num_decodes: int
    """Requests at the front of the batch with equally few new tokens: computed together."""
    num_new: int
    """New tokens of each of them: one, or one and its drafts."""
    longest_decode: int
    chunks: tuple[_Chunk, ...]
    num_tokens: int


class SdpaAttention:
    """``cache``: where keys and values are stored, and read by block. ``query_len``: above 1, only
    steps of requests with so many tokens each are cut into micro-batches, between two requests.

    Memory: a layer copies the blocks that it reads. The static formula reads a whole context for
    each request of a uniform batch, but for each *token* of another, which is too much memory for
    long contexts.
    """

    support: ClassVar[AttentionSupport] = AttentionSupport.ALWAYS
    keep_alive: ClassVar[Sequence[Tensor]] = ()
    serves_micro_batches: ClassVar[bool] = True

    def __init__(self, cache: KVCache, query_len: int = 1) -> None:
        self.cache = cache
        self._query_len = query_len
        self._kv_shape = (2, cache.config.num_kv_heads, cache.config.head_dim)
        self._num_groups = cache.config.num_heads // cache.config.num_kv_heads
        self._steps = [_Step()]
        """One for each micro-batch; the first one for a step that is not split."""

    def load_kernels(self) -> None:
        """Run a first prompt's kernels, for the driver to load them: 0.1 s, which a step need not
        wait for."""
        config, num_tokens = self.cache.config, 128
        num_all = config.num_heads + 2 * config.num_kv_heads
        heads = self.cache.tensor.new_zeros(num_tokens, num_all, config.head_dim)
        q, kv = heads[:, : config.num_heads], heads[:, config.num_heads :]
        chunk = _Chunk(0, 0, num_tokens, num_tokens)
        out = torch.empty_like(q)
        with _without_cudnn():
            self._attend_chunk(0, q, kv.unflatten(1, self._kv_shape[:2]), None, chunk, out)

    def prepare(self, key: BatchDescriptor, step_info: AttentionMetadata | None) -> None:
        """Without a batch: for one request that has all tokens of the key, from position 0."""
        if step_info is None:
            step_info = AttentionMetadata((key.num_tokens,), (key.num_tokens,))
        while len(self._steps) < key.num_ubatches:
            self._steps.append(_Step())
        if key.num_reqs is not None:
            for step in self._steps:
                step.begin(key, None)
            return
        parts = _of_micro_batches(step_info, key.num_ubatches, self._query_len)
        for step, part in zip(self._steps, parts, strict=False):
            step.begin(key, _measure(*part))

    def begin(self, positions: Tensor, attn: AttentionInputs) -> tuple[Tensor, ...]:
        """For the static formula: the block tables [rows, max_blocks] to read, and their mask."""
        key = self._steps[ubatch.index()].key
        if key is None:
            raise _unprepared()
        if key.num_reqs is None:
            return ()
        # A uniform batch reads each request once for all its tokens; another once per token.
        tables = attn.block_tables
        if not key.uniform:
            tables = tables.index_select(0, attn.token_requests)
        rows, max_blocks = tables.shape
        keys = torch.arange(max_blocks * self.cache.block_size, device=positions.device)
        visible = keys <= positions.view(rows, -1, 1)
        if visible.shape[1] > 1:
            visible = visible.repeat_interleave(self._num_groups, 1)
        return tables, self._additive(visible)

    def forward(
        self,
        layer_index: int,
        heads: Tensor,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        out: Tensor,
    ) -> None:
        num_heads = self.cache.config.num_heads
        q = heads[:, :num_heads]
        with _without_cudnn():
            if shared:
                tables, mask = shared
                self._attend_together(layer_index, q, tables, mask, out)
            else:
                kv = heads[:, num_heads:].unflatten(1, self._kv_shape[:2])
                self._attend_by_host_lengths(layer_index, q, kv, attn, out)

    def _attend_by_host_lengths(
        self, layer_index: int, q: Tensor, kv: Tensor, attn: AttentionInputs, out: Tensor
    ) -> None:
        step = self._steps[ubatch.index()]
        lengths = step.lengths
        if lengths is None:
            raise _unprepared()
        count, each = lengths.num_decodes, lengths.num_new
        if count:
            if step.decodes is None:
                num_blocks = blocks_for(lengths.longest_decode, self.cache.block_size)
                keys = torch.arange(num_blocks * self.cache.block_size, device=q.device)
                ends = attn.seq_lens[:count, None, None]
                if each > 1:
                    ends = ends - torch.arange(each - 1, -1, -1, device=q.device)[:, None]
                visible = keys < ends
                if each > 1:
                    visible = visible.repeat_interleave(self._num_groups, 1)
                tables = attn.block_tables[:count, :num_blocks].contiguous()
                step.decodes = tables, self._additive(visible)
            tables, mask = step.decodes
            num_rows = count * each
            self._attend_together(layer_index, q[:num_rows], tables, mask, out[:num_rows])
        for chunk in lengths.chunks:
            tokens = slice(chunk.start, chunk.start + chunk.num_new)
            self._attend_chunk(layer_index, q[tokens], kv[tokens], attn, chunk, out[tokens])
        # Padding rows of uninitialised memory, perhaps NaN, would spread through later layers.
        if lengths.num_tokens < len(out):
            out[lengths.num_tokens :].zero_()

    def _attend_together(
        self, layer_index: int, q: Tensor, tables: Tensor, mask: Tensor, out: Tensor
    ) -> None:
        """Requests that bring equally many tokens each, in one call.

        Shapes: ``tables`` [rows, num_blocks]; ``mask`` [rows, queries, num_keys], where a query is
        a head of a group for each token, or 1 if all see the same.

        Heads that share a key head are passed as several queries of it, so that no kernel needs to
        support groups, and keys and values are read once for all of them.
        """
        rows, num_keys = len(tables), mask.shape[-1]
        kv = self.cache.layers[layer_index].index_select(0, tables.flatten())
        kv = kv.view(rows, num_keys, *self._kv_shape)
        keys, values = kv.transpose(1, 3).unbind(2)
        _, num_kv_heads, width = self._kv_shape
        by_token = (rows, -1, num_kv_heads, self._num_groups, width)
        queries = q.view(by_token).transpose(1, 2)
        result = F.scaled_dot_product_attention(
            queries.reshape(rows, num_kv_heads, -1, width), keys, values, mask[:, None]
        )
        out.view(by_token).copy_(result.view(queries.shape).transpose(1, 2))

    def _attend_chunk(
        self,
        layer_index: int,
        q: Tensor,
        kv: Tensor,
        attn: AttentionInputs | None,
        chunk: _Chunk,
        out: Tensor,
    ) -> None:
        """Several tokens of one request. If none is cached, ``kv`` are all, and ``attn`` may be
        None."""
        num_new, num_all = chunk.num_new, chunk.num_all
        mask = None
        if num_new < num_all:
            assert attn is not None, "cached tokens are found by it"
            table = attn.block_tables[chunk.request, : blocks_for(num_all, self.cache.block_size)]
            kv = self.cache.layers[layer_index].index_select(0, table).flatten(0, 1)[:num_all]
            masks = self._steps[ubatch.index()].masks
            mask = masks.get(chunk)
            if mask is None:
                everything = torch.ones(num_new, num_all, dtype=torch.bool, device=q.device)
                visible = everything.tril_(num_all - num_new)
                mask = masks[chunk] = self._additive(visible)
        keys, values = kv.permute(1, 2, 0, 3).unsqueeze(2).unbind()
        # [key heads, heads of a group, tokens, width]; the group shares its keys by a stride of 0.
        groups = (-1, self._num_groups, -1, -1)
        by_token = (num_new, len(keys), self._num_groups, q.shape[-1])
        result = F.scaled_dot_product_attention(
            q.view(by_token).permute(1, 2, 0, 3),
            keys.expand(groups),
            values.expand(groups),
            mask,
            is_causal=mask is None,
        )
        out.view(by_token).copy_(result.permute(2, 0, 1, 3))

    def _additive(self, visible: Tensor) -> Tensor:
        """The mask as numbers to add, which every kernel accepts: 0, or minus infinity."""
        dtype = self.cache.tensor.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, -torch.inf
        )


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Attend by other kernels, because those of cuDNN give other bits from run to run: one query
    of 269 keys in 27 of 100 runs (cuDNN 9.19, H200), which no comparison of graphs can accept.

    Not ``torch.nn.attention.sdpa_kernel``: it takes 25 us, this 4, and each layer pays it.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def _of_micro_batches(
    info: AttentionMetadata, num_ubatches: int, query_len: int
) -> list[tuple[AttentionMetadata, int]]:
    """The lengths of each micro-batch, cut where the runtime cuts the batch, and how many of its
    requests, counted from the first, do not go on in the next one."""
    if num_ubatches == 1:
        return [(info, len(info.query_lens))]
    lens, seq_lens = [int(n) for n in info.query_lens], [int(n) for n in info.seq_lens]
    loc = [0, *accumulate(lens)]
    longest = max(lens), max(seq_lens)
    slices = ubatch.make_slices(lens, loc[-1], len(lens), num_ubatches, query_len)
    found = []
    for part in slices:
        of = ubatch.slice_metadata(part, loc, seq_lens, *longest)
        new = [end - begin for begin, end in pairwise(of.query_start_loc)]
        goes_on = loc[part.request_slice.stop] > part.token_slice.stop
        found.append((AttentionMetadata(new, of.seq_lens), len(new) - goes_on))
    return found


def _measure(step_info: AttentionMetadata, most_decodes: int) -> _Lengths:
    # Of a request that goes on, the tensors have the length at its end.
    new, all_ = np.asarray(step_info.query_lens), np.asarray(step_info.seq_lens)
    num_new = int(new[0]) if new[0] <= MOST_TOGETHER else 1
    is_other = new != num_new
    num_decodes = int(is_other.argmax()) if is_other.any() else len(new)
    num_decodes = min(num_decodes, most_decodes)
    ends = new.cumsum()
    chunks = tuple(
        _Chunk(i, int(ends[i] - new[i]), int(new[i]), int(all_[i]))
        for i in range(num_decodes, len(new))
    )
    longest = int(all_[:num_decodes].max(initial=0))
    return _Lengths(num_decodes, num_new, longest, chunks, int(ends[-1]))


def _unprepared() -> AttentionBackendError:
    return AttentionBackendError(
        "attention backend 'sdpa'",
        expected="to be prepared for the key of this step",
        found="a forward pass before that, or under another kind of key",
        do="name the backend in the runtime's resources, or call prepare yourself.",
    )

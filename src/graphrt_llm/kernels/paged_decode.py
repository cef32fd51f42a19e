"""Attention of a decoding request's new tokens over the paged cache, in one Triton launch.

A request's context is split among programs, which read it at the same time; the last of them to
finish combines the parts. The split depends on the length and, in two steps, on the number of rows:
a graph needs no plan, and a row's result is the same bits with every padding within one of these
steps. Drafts of a request are further rows of its heads, which tensor cores have room for anyway:
keys and values are read once for all.

Source: online softmax and its split over the keys, Dao 2023 (FlashAttention-2, Flash-Decoding).
"""

# Triton reads the annotations of a kernel and accepts only its own.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrt_llm.kernels.launching import Launcher


class Split(NamedTuple):
    """How a context is shared among programs."""

    most: int
    """Programs that share one request's context of one key head; a short context leaves some
    idle."""
    least: int
    """Tokens below which no context is split."""


FEW_REQUESTS, SOME_REQUESTS = 4, 16
FEW, SOME, MANY = Split(8, 128), Split(4, 128), Split(2, 256)
"""For up to ``FEW_REQUESTS``, up to ``SOME_REQUESTS``, and more, which fill the GPU without a fine
split. The fastest of 27 shapes over lengths of 200 to 4,000 tokens on an H200. Us a layer, with
rotation, of 256 and of 139 requests of the Azure trace, of 24 of 3,000 tokens and of 64 of 200:
with 4 splits 234, 175, 77, 22.4; with 2 229, 172, 73, 22.1; with none 224, 167, 79, 22.6."""
NUM_WARPS, NUM_STAGES = 4, 2
"""One tile at a time: with little memory each, more programs are there to read at once."""
TILE = 128
"""Tokens that a program reads at a time, of heads of up to 128 elements."""
MAX_TILE = 2**14
"""Elements of keys in a tile."""
MIN_DOT = 16
"""Fewest rows of a product on tensor cores; a group's heads of all new tokens are padded to it."""


def split_of(num_rows: int) -> Split:
    """That of a batch of ``num_rows`` requests."""
    return FEW if num_rows <= FEW_REQUESTS else SOME if num_rows <= SOME_REQUESTS else MANY


def _decode(
    q,
    cache,
    block_tables,
    seq_lens,
    out,
    parts,
    weights,
    finished,
    q_stride,
    table_stride,
    scale,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    QUERY_LEN: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803
    PADDED_QUERIES: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    NUM_STAGES: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    # Heads of a request side by side, then its splits: programs that run together read neighbouring
    # memory, and all those of a long request that comes first begin first. With all first splits
    # before all second ones it took 254 us where it takes 234 (256 requests of the Azure trace).
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + row).to(tl.int32)
    share = tl.cdiv(tl.maximum(tl.cdiv(length, NUM_SPLITS), LEAST), TILE) * TILE
    begin = split * share
    end = tl.minimum(begin + share, length)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # A member is a head of one new token: all heads of the first, then those of the next.
    member = tl.arange(0, PADDED_QUERIES)
    element = tl.arange(0, HEAD_DIM)
    is_member = member < QUERIES
    new = member // GROUP
    head = kv_head * GROUP + member % GROUP
    place_out = (row * QUERY_LEN + new) * NUM_KV_HEADS * GROUP + head
    target = out + place_out[:, None] * HEAD_DIM + element[None, :]
    if begin < end:
        source = q + (row * QUERY_LEN + new)[:, None] * q_stride + head[:, None] * HEAD_DIM
        query = tl.load(source + element[None, :], mask=is_member[:, None], other=0.0)
        largest = tl.full((PADDED_QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED_QUERIES,), tl.float32)
        values = tl.zeros((PADDED_QUERIES, HEAD_DIM), tl.float32)
        for start in tl.range(begin, end, TILE, num_stages=NUM_STAGES):
            token = start + tl.arange(0, TILE)
            is_token = token < end
            place = block_tables + row * table_stride + token // BLOCK_SIZE
            block = tl.load(place, mask=is_token, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + token % BLOCK_SIZE
            offset = (slot * 2 * NUM_KV_HEADS + kv_head) * HEAD_DIM
            keys = cache + offset[:, None] + element[None, :]
            k = tl.load(keys, mask=is_token[:, None], other=0.0)
            v = tl.load(keys + NUM_KV_HEADS * HEAD_DIM, mask=is_token[:, None], other=0.0)
            # The hardware computes powers of two; ``scale`` includes the change of base.
            scores = tl.dot(query, tl.trans(k)) * scale
            if QUERY_LEN == 1:
                scores = tl.where(is_token[None, :], scores, float("-inf"))
            else:
                seen = length - QUERY_LEN + 1 + new
                is_seen = is_token[None, :] & (token[None, :] < seen[:, None])
                scores = tl.where(is_seen, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            pivot = new_largest
            if QUERY_LEN > 1:
                # The first tokens may see none of a split: minus infinity less itself is no number.
                pivot = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            shrink = tl.exp2(largest - pivot)
            exponentials = tl.exp2(scores - pivot[:, None])
            total = total * shrink + tl.sum(exponentials, 1)
            values = values * shrink[:, None] + tl.dot(exponentials.to(v.dtype), v)
            largest = new_largest

        num_used = tl.cdiv(length, share)
        if num_used == 1:
            result = values / total[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=is_member[:, None])
        else:
            first = (row * NUM_KV_HEADS + kv_head) * NUM_SPLITS
            mine = parts + ((first + split) * QUERIES + member)[:, None] * HEAD_DIM
            tl.store(mine + element[None, :], values, mask=is_member[:, None])
            my_weight = weights + (first + split) * 2 * QUERIES + member
            tl.store(my_weight, largest, mask=is_member)
            tl.store(my_weight + QUERIES, total, mask=is_member)
            # All threads have stored before one of them counts this split as finished.
            tl.debug_barrier()
            counter = finished + row * NUM_KV_HEADS + kv_head
            num_before = tl.atomic_add(counter, 1, sem="acq_rel")
            if num_before == num_used - 1:
                # Parts are read with no write in between, so that all are on their way at once.
                each = tl.arange(0, NUM_SPLITS)
                their = weights + (first + each)[:, None] * 2 * QUERIES + member[None, :]
                is_part = (each < num_used)[:, None] & is_member[None, :]
                maxima = tl.load(their, mask=is_part, other=float("-inf"), cache_modifier=".cg")
                sums = tl.load(their + QUERIES, mask=is_part, other=0.0, cache_modifier=".cg")
                # Members that only fill the tile have no maximum.
                top = tl.where(is_member, tl.max(maxima, 0), 0.0)
                total = tl.sum(sums * tl.exp2(maxima - top[None, :]), 0)
                values = tl.zeros((PADDED_QUERIES, HEAD_DIM), tl.float32)
                for number in tl.static_range(NUM_SPLITS):
                    is_read = is_member & (number < num_used)
                    place = weights + (first + number) * 2 * QUERIES + member
                    maximum = tl.load(
                        place, mask=is_read, other=float("-inf"), cache_modifier=".cg"
                    )
                    part = parts + ((first + number) * QUERIES + member)[:, None] * HEAD_DIM
                    loaded = tl.load(
                        part + element[None, :],
                        mask=is_read[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    values += loaded * tl.exp2(maximum - top)[:, None]
                result = values / total[:, None]
                tl.store(target, result.to(out.dtype.element_ty), mask=is_member[:, None])
                tl.store(counter, 0)
    elif split == 0 and length == 0:
        # A padding row of uninitialised memory, perhaps NaN, would spread through later layers.
        nothing = tl.zeros((PADDED_QUERIES, HEAD_DIM), out.dtype.element_ty)
        tl.store(target, nothing, mask=is_member[:, None])


_launch_decode = Launcher(triton.jit(_decode))


class PagedDecode:
    """The kernel for up to ``max_rows`` requests over caches of one shape, and its scratch memory.

    ``cache``: [num_blocks, block_size, 2, num_kv_heads, head_dim] of one layer, as an example.
    ``query_len``: new tokens of each request. Calls share scratch memory: make them on one stream,
    or in graphs that replay on one.
    """

    def __init__(self, cache: Tensor, num_heads: int, max_rows: int, query_len: int) -> None:
        _, block_size, _, num_kv_heads, head_dim = cache.shape
        group = num_heads // num_kv_heads
        self.max_rows = max_rows
        self._num_kv_heads = num_kv_heads
        self._query_len = query_len
        self._scale = math.log2(math.e) / math.sqrt(head_dim)
        queries = group * query_len
        self._constants = (
            num_kv_heads,
            group,
            query_len,
            queries,
            max(MIN_DOT, triton.next_power_of_2(queries)),
            head_dim,
            block_size,
            min(TILE, MAX_TILE // head_dim),
            NUM_STAGES,
        )
        # Fewer requests may have more splits in all.
        counts = [count for count in (FEW_REQUESTS, SOME_REQUESTS) if count < max_rows]
        splits = [rows * split_of(rows).most for rows in (*counts, max_rows)]
        num_splits = max(splits) * num_kv_heads
        with torch.inference_mode(False):
            # Of each split: its weighted values; its largest score and the sum of its weights.
            self._parts = torch.zeros(num_splits, queries, head_dim, device=cache.device)
            self._weights = torch.zeros(num_splits, 2, queries, device=cache.device)
            # Number of finished splits; 0 again at the end of every launch.
            counters = (max_rows, num_kv_heads)
            self._finished = torch.zeros(counters, dtype=torch.int32, device=cache.device)

    @property
    def keep_alive(self) -> tuple[Tensor, ...]:
        """The scratch memory. Launches receive its addresses, so torch does not see its use."""
        return self._parts, self._weights, self._finished

    def __call__(
        self, heads: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, out: Tensor
    ) -> None:
        """Write to ``out`` the attention of each request's last tokens, each up to itself.

        Shapes: ``heads`` [requests * query_len, >= num_heads, head_dim], queries first, rows may be
                strided; ``cache`` as at construction; ``block_tables`` [>= requests, max_blocks];
                ``seq_lens`` [>= requests], new tokens included; ``out`` [requests * query_len,
                num_heads, head_dim], contiguous. A length of 0 gives zeros.
        """
        num_rows = heads.shape[0] // self._query_len
        assert num_rows <= self.max_rows, "more rows than the scratch memory has room for"
        scratch = (self._parts, self._weights, self._finished)
        split = split_of(num_rows)
        _launch_decode(
            (self._num_kv_heads, split.most, num_rows),
            (heads, cache, block_tables, seq_lens, out, *scratch),
            (heads.stride(0), block_tables.stride(0), self._scale),
            (*self._constants, *split),
            NUM_WARPS,
        )

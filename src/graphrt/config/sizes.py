"""Which sizes are captured, and to which of them a batch is padded. Unit: tokens.

Names as in the formulas: S = max_num_seqs, B = max_num_batched_tokens, q = tokens of one request
in a uniform batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LARGEST_DEFAULT = 512
LARGEST_DEFAULT_10 = 1024
"""On devices of compute capability 10.x."""


def default_maximum(
    max_num_seqs: int, query_len: int, compute_capability: tuple[int, int] | None
) -> int:
    """``min(S * q * 2, 512)``: twice the largest decode batch leaves room for mixed ones."""
    is_10 = compute_capability is not None and compute_capability[0] == 10
    return min(max_num_seqs * query_len * 2, LARGEST_DEFAULT_10 if is_10 else LARGEST_DEFAULT)


def ladder(maximum: int) -> list[int]:
    """1, 2, 4, then by 8 from 8, by 16 from 256: padding wastes at most a rung."""
    rungs = [1, 2, 4, *range(8, 256, 8), *range(256, maximum + 1, 16)]
    return [rung for rung in rungs if rung <= maximum]


def default_sizes(maximum: int, *, extra: Sequence[int]) -> tuple[int, ...]:
    """The ladder up to ``maximum``, and those of ``extra`` that are within it."""
    return tuple(sorted({*ladder(maximum), *(size for size in extra if size <= maximum)}))


def default_decode_sizes(
    limit: int, query_len: int, *, extra_requests: Sequence[int]
) -> tuple[int, ...]:
    """Multiples of q within ``limit``: the ladder counts requests, not tokens."""
    requests = {*ladder(limit // query_len), *extra_requests}
    return tuple(sorted(count * query_len for count in requests if count * query_len <= limit))


def decode_sizes_of(sizes: Sequence[int], limit: int, query_len: int) -> tuple[int, ...]:
    """A user's sizes within ``limit``, each rounded up to a multiple of q.

    One that rounding would carry past the limit becomes the largest multiple within it instead, so
    that the top of the range keeps its graph.
    """
    largest = limit // query_len * query_len
    rounded = {min(-(-size // query_len) * query_len, largest) for size in sizes if size <= limit}
    return tuple(sorted(rounded - {0}))


def padding_table(sizes: Sequence[int]) -> tuple[int, ...]:
    """``table[n]`` is the smallest of the ascending ``sizes`` that is >= n, for 0..the largest."""
    return tuple(sizes[bisect_left(sizes, n)] for n in range(sizes[-1] + 1)) if sizes else ()

"""Where a batch is cut into micro-batches, and what attention has to know of each slice.

Integers in, integers out. A request may lie in several slices, because all of them compute on one
stream, in order: the cache writes of a slice come before the reads of the next one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any, NamedTuple

from graphrt.batch import BatchDescriptor, UBatchReason, ubatch_stride
from graphrt.config import UBatchConfig
from graphrt.config.checked import MOST_TOKENS
from graphrt.errors import BatchError, ContextError, shown


class UBatchSlice(NamedTuple):
    """One micro-batch: the requests and the tokens of the padded batch that it computes."""

    request_slice: slice
    token_slice: slice


class SliceMetadata(NamedTuple):
    """What attention has to know of one slice."""

    query_start_loc: tuple[int, ...]
    """[num_reqs + 1]: the first token of each request, counted from the slice's own first."""
    seq_lens: tuple[int, ...]
    """[num_reqs]: tokens of each request that are in the cache after this slice."""
    max_query_len: int
    max_seq_len: int


def wants_split(
    num_tokens: int, uniform: bool, config: UBatchConfig, veto: UBatchReason | None = None
) -> UBatchReason | None:
    """Why a rank with ``num_tokens`` unpadded tokens does not want a split step; None: it does.

    ``veto``: what the engine has against it, such as REQUEST_DEPENDENCY. Errors: ``BatchError``
    for what is no reason.
    """
    if veto is not None and type(veto) is not UBatchReason:
        raise _wrong("unsplit", "a UBatchReason, or None", shown(veto))
    if config.num_ubatches == 1:
        return UBatchReason.DISABLED
    least = config.decode_token_threshold if uniform else config.prefill_token_threshold
    return UBatchReason.BELOW_THRESHOLD if num_tokens < least else veto


def make_slices(
    query_lens: Sequence[int],
    num_padded_tokens: int,
    num_padded_reqs: int,
    num_ubatches: int,
    query_len: int = 1,
    split_points: Sequence[int] | None = None,
) -> tuple[UBatchSlice, ...]:
    """Cut a padded batch into ``num_ubatches`` slices; the last one takes the padding.

    ``query_lens``: [num_reqs], the tokens of each real request. ``query_len``: tokens of each
    request of a uniform batch, else 1. ``split_points``: the first token of every slice but the
    first, in place of cuts at equal distances.
    Errors: ``BatchError`` for requests that do not fit the padded sizes, too few tokens to split,
    split points that leave a slice empty, and numbers that are no integers or too large.
    """
    # Checked first: there is a cut for each micro-batch.
    counts: dict[str, Any] = {
        "num_padded_tokens": num_padded_tokens,
        "num_padded_reqs": num_padded_reqs,
        "num_ubatches": num_ubatches,
        "query_len": query_len,
    }
    for name, value in counts.items():
        if not isinstance(value, Integral) or not 1 <= int(value) <= MOST_TOKENS:
            raise _wrong(name, f"an integer from 1 to {MOST_TOKENS}", shown(value))
    starts = _ends("query_lens", query_lens)
    _ends("split_points", () if split_points is None else split_points)
    num_reqs = len(query_lens)
    if min(query_lens, default=1) < 1:
        raise _wrong("query_lens", "at least 1 token for each request", str(min(query_lens)))
    if starts[-1] > num_padded_tokens or num_reqs > num_padded_reqs:
        raise _wrong(
            "query_lens",
            f"at most {num_padded_tokens} tokens and {num_padded_reqs} requests, the padded sizes",
            f"{starts[-1]} tokens and {num_reqs} requests",
        )
    if split_points is None:
        stride = ubatch_stride(num_padded_tokens, query_len, num_ubatches)
        split_points = [stride * place for place in range(1, num_ubatches)]
    cuts = [0, *split_points, num_padded_tokens]
    if len(cuts) != num_ubatches + 1 or any(end <= begin for begin, end in pairwise(cuts)):
        raise _wrong(
            f"{num_ubatches} micro-batches",
            f"{num_ubatches - 1} rising cuts inside {num_padded_tokens} tokens of {query_len} each",
            str(list(split_points)),
        )
    slices = []
    for begin, end in pairwise(cuts):
        first, after = min(bisect_right(starts, begin) - 1, num_reqs), bisect_left(starts, end)
        after = num_padded_reqs if end == num_padded_tokens else min(after, num_reqs)
        slices.append(UBatchSlice(slice(first, after), slice(begin, end)))
    return tuple(slices)


def slices_of_key(key: BatchDescriptor) -> tuple[UBatchSlice, ...]:
    """The slices that a uniform key stands for. Errors: ``ContextError`` for another key."""
    if not key.uniform or not key.num_reqs:
        raise ContextError(
            f"a step of {key}",
            expected="the slices in the forward context, because the key does not say where the "
            "requests are",
            found="ubatch_slices=None",
            do="pass ubatch_slices=make_slices(...)",
        )
    query_len = key.num_tokens // key.num_reqs
    lens = [query_len] * key.num_reqs
    return make_slices(lens, key.num_tokens, key.num_reqs, key.num_ubatches, query_len)


def slice_metadata(
    part: UBatchSlice,
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    max_query_len: int,
    max_seq_len: int,
) -> SliceMetadata:
    """The metadata of ``part``, from that of the whole padded batch, which is only read.

    ``query_start_loc``: [num_reqs + 1]; a padding request has no tokens. ``seq_lens``: [num_reqs].
    """
    (requests, tokens) = part
    first, last = tokens.start, tokens.stop
    loc = query_start_loc[requests.start : requests.stop + 1]
    own_loc = tuple(min(max(start - first, 0), last - first) for start in loc)
    own_lens = list(seq_lens[requests])
    if own_lens:
        # The rest of a request that goes on in the next slice is not in the cache yet.
        own_lens[-1] -= max(0, loc[-1] - last)
    longest = max((end - begin for begin, end in pairwise(own_loc)), default=0)
    return SliceMetadata(
        own_loc, tuple(own_lens), longest or max_query_len, max(max_seq_len, *own_lens, 0)
    )


def _ends(name: str, numbers: Any) -> list[int]:
    """0, and the sums of the first, the first two... of ``numbers``."""
    try:
        ends: list[Any] = [0, *accumulate(numbers)] if hasattr(numbers, "__len__") else [None]
    except TypeError:
        ends = [None]
    # A sum with one that is no integer is none.
    if not isinstance(ends[-1], Integral):
        raise _wrong(name, "a list of integers", shown(numbers))
    return ends


def _wrong(subject: str, expected: str, found: str) -> BatchError:
    return BatchError(subject, expected=expected, found=found, do="see what the batch holds")

"""How a batch is cut into micro-batches: worked cases, reference answers, laws."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from graphrt.batch import UBatchReason, last_ubatch_is_empty, ubatch_stride
from graphrt.config import UBatchConfig
from graphrt.errors import BatchError
from graphrt.ubatch import UBatchSlice, make_slices, slice_metadata, wants_split

Cut = list[tuple[int, int]]


def cut(*args: Any, **asked: Any) -> tuple[Cut, Cut]:
    """Token ranges and request ranges."""
    parts = make_slices(*args, **asked)
    return (
        [(part.token_slice.start, part.token_slice.stop) for part in parts],
        [(part.request_slice.start, part.request_slice.stop) for part in parts],
    )


@pytest.mark.parametrize(
    ("query_lens", "sizes", "query_len", "tokens", "requests"),
    [
        ([1] * 32, (32, 32, 2), 1, [(0, 16), (16, 32)], [(0, 16), (16, 32)]),
        ([1] * 30, (32, 32, 2), 1, [(0, 16), (16, 32)], [(0, 16), (16, 32)]),
        ([10, 20, 30], (64, 3, 2), 1, [(0, 32), (32, 64)], [(0, 3), (2, 3)]),
        ([100], (104, 1, 2), 1, [(0, 52), (52, 104)], [(0, 1), (0, 1)]),
        ([5] * 4, (20, 4, 3), 1, [(0, 6), (6, 12), (12, 20)], [(0, 2), (1, 3), (2, 4)]),
        ([3] * 5, (16, 8, 2), 1, [(0, 8), (8, 16)], [(0, 3), (2, 8)]),
        ([3] * 9, (27, 9, 2), 3, [(0, 12), (12, 27)], [(0, 4), (4, 9)]),
        ([3] * 5, (24, 8, 2), 3, [(0, 12), (12, 24)], [(0, 4), (4, 8)]),
    ],
)
def test_slices_of_worked_cases(
    query_lens: list[int], sizes: tuple[int, int, int], query_len: int, tokens: Cut, requests: Cut
) -> None:
    assert cut(query_lens, *sizes, query_len) == (tokens, requests)


def test_slices_are_those_of_the_reference(shared: Path) -> None:
    lines = (shared / "vectors" / "ubatch_slices.jsonl").read_text("utf-8").splitlines()
    for line in lines:
        case = json.loads(line)
        sizes = (case["padded_tokens"], case["padded_reqs"], case["num_ubatches"])
        found = cut(case["query_lens"], *sizes)
        expected = (case["padded_token_slices"], case["padded_request_slices"])
        assert found == tuple([tuple(part) for part in parts] for parts in expected), case
    assert len(lines) > 60


def test_last_slice_empty_is_that_of_the_reference(shared: Path) -> None:
    lines = (shared / "vectors" / "last_ubatch_empty.jsonl").read_text("utf-8").splitlines()
    for line in lines:
        case = json.loads(line)
        sizes = (case["num_tokens"], case["padded_tokens"])
        assert last_ubatch_is_empty(*sizes, 1, case["num_ubatches"]) is case["last_empty"], case


@pytest.mark.parametrize(
    ("num_tokens", "padded", "query_len", "num_ubatches", "empty"),
    [
        (16, 32, 1, 2, True),
        (17, 32, 1, 2, False),
        (20, 32, 1, 3, True),
        (21, 32, 1, 3, False),
        (12, 24, 3, 2, True),
        (13, 24, 3, 2, False),
    ],
)
def test_last_slice_empty_of_worked_cases(
    num_tokens: int, padded: int, query_len: int, num_ubatches: int, empty: bool
) -> None:
    assert last_ubatch_is_empty(num_tokens, padded, query_len, num_ubatches) is empty


@pytest.mark.parametrize(
    ("tokens", "requests", "loc", "lens", "expected_loc", "expected_lens"),
    [
        ((0, 12), (0, 2), [0, 8, 16], [32, 40], [0, 8, 12], [32, 36]),
        ((12, 16), (1, 2), [0, 8, 16], [32, 40], [0, 4], [40]),
        ((0, 4), (0, 1), [0, 8, 16], [32, 40], [0, 4], [28]),
        ((4, 16), (0, 2), [0, 8, 16], [32, 40], [0, 4, 12], [32, 40]),
        ((0, 32), (0, 3), [0, 10, 30, 60], [110, 120, 130], [0, 10, 30, 32], [110, 120, 102]),
        ((32, 64), (2, 3), [0, 10, 30, 60], [110, 120, 130], [0, 28], [130]),
        ((0, 6), (0, 2), [0, 5, 10, 15, 20], [50] * 4, [0, 5, 6], [50, 46]),
        ((6, 12), (1, 3), [0, 5, 10, 15, 20], [50] * 4, [0, 4, 6], [50, 47]),
        ((12, 20), (2, 4), [0, 5, 10, 15, 20], [50] * 4, [0, 3, 8], [50, 50]),
        ((1, 7), (1, 3), [0, 1, 2, 7], [32, 40, 48], [0, 1, 6], [40, 48]),
        ((5, 20), (1, 3), [0, 5, 12, 20, 35, 50], [60] * 5, [0, 7, 15], [60, 60]),
        ((20, 50), (3, 5), [0, 5, 12, 20, 35, 50], [60] * 5, [0, 15, 30], [60, 60]),
        ((4, 8), (4, 8), [0, 1, 2, 3, 4, 5, 6, 6, 6], [9] * 8, [0, 1, 2, 2, 2], [9] * 4),
    ],
)
def test_metadata_of_worked_cases(
    tokens: Any, requests: Any, loc: Any, lens: Any, expected_loc: Any, expected_lens: Any
) -> None:
    found = slice_metadata(UBatchSlice(slice(*requests), slice(*tokens)), loc, lens, 99, 200)
    assert found.query_start_loc == tuple(expected_loc)
    assert found.seq_lens == tuple(expected_lens)
    assert found.max_query_len == max(b - a for a, b in pairwise(expected_loc))
    assert found.max_seq_len == 200


def test_metadata_of_padding_alone_has_the_parents_maximum() -> None:
    part = UBatchSlice(slice(0, 2), slice(0, 4))
    assert slice_metadata(part, [0, 0, 0], [0, 0], 7, 5) == ((0, 0, 0), (0, 0), 7, 5)
    assert slice_metadata(part, [0, 0, 0], [8, 0], 7, 5).max_seq_len == 8


@pytest.mark.parametrize(
    ("num_tokens", "uniform", "asked", "expected"),
    [
        (64, True, {"num_ubatches": 1}, UBatchReason.DISABLED),
        (31, True, {}, UBatchReason.BELOW_THRESHOLD),
        (32, True, {}, None),
        (511, False, {}, UBatchReason.BELOW_THRESHOLD),
        (512, False, {}, None),
        (5, False, {"prefill_token_threshold": 5}, None),
    ],
)
def test_split_wanted_from_the_threshold_on(
    num_tokens: int, uniform: bool, asked: dict[str, int], expected: UBatchReason | None
) -> None:
    config = UBatchConfig(**{"num_ubatches": 2, **asked})  # type: ignore[arg-type]
    assert wants_split(num_tokens, uniform, config) is expected
    veto = UBatchReason.REQUEST_DEPENDENCY
    assert wants_split(num_tokens, uniform, config, veto) is (expected or veto)


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        (([1], 1, 1, 2), {}),
        (([3, 3], 6, 2, 3, 3), {}),
        (([4, 4], 7, 2, 2), {}),
        (([4, 4], 8, 1, 2), {}),
        (([4, 0], 8, 2, 2), {}),
        (([8], 8, 1, 2), {"split_points": [8]}),
        (([8], 8, 1, 3), {"split_points": [5, 5]}),
        (([8], 8, 1, 3), {"split_points": [5]}),
        (([8], 8, 1, 2), {"split_points": [0]}),
        (([8], 8, 1, 2**70), {}),
        (([8], 2**70, 1, 2**70), {}),
        (([8], 8, 2**70, 2), {}),
        (([8], 8, 1, 2, 0), {}),
        (([2.5, 2], 8, 2, 2), {}),
    ],
)
def test_slices_of_no_batch_are_an_error(args: Any, asked: Any) -> None:
    with pytest.raises(BatchError):
        make_slices(*args, **asked)


def test_split_points_given_are_the_cuts() -> None:
    assert cut([8, 8], 16, 2, 2, split_points=[4]) == ([(0, 4), (4, 16)], [(0, 1), (0, 2)])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    num_ubatches = draw(st.integers(2, 5))
    query_len = draw(st.integers(1, 4))
    if draw(st.booleans()):
        lens = [query_len] * draw(st.integers(num_ubatches, 40))
        padded_reqs = len(lens) + draw(st.integers(0, 5))
        return lens, padded_reqs * query_len, padded_reqs, num_ubatches, query_len
    lens = draw(st.lists(st.integers(1, 30), min_size=1, max_size=20))
    padded = max(sum(lens), num_ubatches) + draw(st.integers(0, 9))
    return lens, padded, len(lens) + draw(st.integers(0, 3)), num_ubatches, 1


@given(batch=batches())
def test_slices_joined_again_are_the_batch(batch: tuple[list[int], int, int, int, int]) -> None:
    lens, padded, num_reqs, num_ubatches, query_len = batch
    parts = make_slices(lens, padded, num_reqs, num_ubatches, query_len)
    assert len(parts) == num_ubatches
    edges = [0, *(part.token_slice.stop for part in parts)]
    assert edges[-1] == padded
    assert [part.token_slice.start for part in parts] == edges[:-1]
    stride = ubatch_stride(padded, query_len, num_ubatches)
    assert [b - a for a, b in pairwise(edges)][:-1] == [stride] * (num_ubatches - 1)
    assert parts[-1].request_slice.stop == num_reqs

    loc = [0, *accumulate(lens)]
    loc += [loc[-1]] * (num_reqs + 1 - len(loc))
    computed = [0] * num_reqs
    for part in parts:
        cached = [7 + n for n in lens] + [0] * (num_reqs - len(lens))
        found = slice_metadata(part, loc, cached, 0, 0)
        here = [end - begin for begin, end in pairwise(found.query_start_loc)]
        requests = range(*part.request_slice.indices(num_reqs))
        assert len(here) == len(found.seq_lens) == len(requests)
        for request, length, after in zip(requests, here, found.seq_lens, strict=True):
            computed[request] += length
            # What lies in the cache after this slice: 7 old tokens and those computed so far.
            if request < len(lens) and length:
                assert after == 7 + computed[request]
    assert computed == lens + [0] * (num_reqs - len(lens))
    if query_len > 1 and not last_ubatch_is_empty(sum(lens), padded, query_len, num_ubatches):
        # Uniform requests stay whole.
        assert all(a.request_slice.stop == b.request_slice.start for a, b in pairwise(parts))

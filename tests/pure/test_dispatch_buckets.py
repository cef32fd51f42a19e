"""Bucket dispatch: every axis is padded up; same decisions, reasons and laws."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from graphrt import BatchDescriptor, BucketDispatcher, CUDAGraphMode, Reason, RuntimeMode
from graphrt.dispatch import BucketKey
from graphrt.errors import BatchError, ConfigError

NONE, PIECEWISE, FULL = RuntimeMode
AXES = {"frames": [100, 50], "batch": [1, 4]}


def key(*sizes: int, variant: object = None) -> BatchDescriptor:
    return BatchDescriptor(sizes[0], variant=BucketKey(sizes, variant))


def test_every_axis_is_padded_up() -> None:
    found = BucketDispatcher(AXES)
    assert found.dispatch({"frames": 50, "batch": 4}) == (FULL, key(50, 4), Reason.HIT)
    assert found.dispatch({"batch": 2, "frames": 50}) == (FULL, key(50, 4), Reason.PADDED)
    assert found.dispatch({"frames": 51, "batch": 1}) == (FULL, key(100, 1), Reason.PADDED)


def test_bucket_keys_are_all_combinations_largest_first() -> None:
    found = BucketDispatcher(AXES, CUDAGraphMode.PIECEWISE)
    assert found.keys == tuple(
        (PIECEWISE, key(*sizes)) for sizes in ((100, 4), (50, 4), (100, 1), (50, 1))
    )
    assert found.axes == {"frames": (50, 100), "batch": (1, 4)}


def test_bucket_misses_have_reasons_and_the_unpadded_key() -> None:
    found = BucketDispatcher(AXES)
    assert found.dispatch({"frames": 101, "batch": 1}) == (NONE, key(101, 1), Reason.ABOVE_MAX)
    excluded = found.dispatch({"frames": 3, "batch": 1}, frozenset({FULL}))
    assert excluded == (NONE, key(3, 1), Reason.EXCLUDED)
    off = BucketDispatcher(AXES, CUDAGraphMode.NONE)
    assert off.keys == ()
    assert off.dispatch({"frames": 3, "batch": 1}).reason is Reason.MODE_NONE
    yet = {(FULL, key(50, 1)): Reason.NOT_CAPTURED_YET}
    part = BucketDispatcher(AXES, unavailable=yet)
    assert part.dispatch({"frames": 3, "batch": 1}).reason is Reason.NOT_CAPTURED_YET
    assert part.dispatch({"frames": 3, "batch": 2}).mode is FULL


def test_bucket_variant_is_part_of_the_key() -> None:
    found = BucketDispatcher(AXES, variant="half")
    decision = found.dispatch({"frames": 1, "batch": 1})
    assert decision.descriptor == key(50, 1, variant="half")
    assert decision.descriptor != key(50, 1)


def test_two_modes_serve_full_first_and_tell_why_full_does_not() -> None:
    both = CUDAGraphMode.FULL_AND_PIECEWISE
    asked, full, piecewise = {"frames": 50, "batch": 4}, (FULL, key(50, 4)), (PIECEWISE, key(50, 4))
    found = BucketDispatcher(AXES, both)
    assert [mode for mode, _ in found.keys] == [PIECEWISE] * 4 + [FULL] * 4
    assert found.dispatch(asked) == (*full, Reason.HIT)
    assert found.dispatch(asked, frozenset({FULL})) == (*piecewise, Reason.HIT)
    gone, yet = Reason.CAPTURE_FAILED, Reason.NOT_CAPTURED_YET
    assert BucketDispatcher(AXES, both, {full: gone}).dispatch(asked) == (*piecewise, Reason.HIT)
    neither = BucketDispatcher(AXES, both, {full: gone, piecewise: yet})
    assert neither.dispatch(asked).reason is gone
    assert neither.dispatch(asked, frozenset({FULL})).reason is yet
    assert neither.dispatch(asked, frozenset({FULL, PIECEWISE})).reason is Reason.EXCLUDED


@pytest.mark.parametrize(
    "sizes",
    [
        {"frames": 1},
        {"frames": 1, "batch": 1, "height": 1},
        {"frames": -1, "batch": 1},
        {"frames": 1.0, "batch": 1},
        {},
    ],
)
def test_sizes_that_describe_no_call_are_errors(sizes: dict[str, Any]) -> None:
    found = BucketDispatcher(AXES)
    with pytest.raises(BatchError):
        found.dispatch(sizes)


def test_unknown_bucket_exclusion_is_an_error() -> None:
    with pytest.raises(BatchError):
        BucketDispatcher(AXES).dispatch({"frames": 1000, "batch": 1}, exclude={"FULL"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axes", "mode"),
    [
        ({}, CUDAGraphMode.FULL),
        ({"frames": []}, CUDAGraphMode.FULL),
        ({"frames": [0, 1]}, CUDAGraphMode.FULL),
        ({"frames": [True]}, CUDAGraphMode.FULL),
        ({"frames": [1.5]}, CUDAGraphMode.FULL),
        (AXES, CUDAGraphMode.FULL_DECODE_ONLY),
    ],
)
def test_axes_that_cannot_be_captured_are_errors(axes: Any, mode: CUDAGraphMode) -> None:
    with pytest.raises(ConfigError):
        BucketDispatcher(axes, mode)


sizes = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@given(axes=st.lists(sizes, min_size=1, max_size=3), data=st.data())
def test_bucket_padding_is_listed_sufficient_and_minimal(
    axes: list[list[int]], data: st.DataObject
) -> None:
    named = {f"axis{place}": listed for place, listed in enumerate(axes)}
    found = BucketDispatcher(named)
    asked = {name: data.draw(st.integers(0, max(listed))) for name, listed in named.items()}
    mode, descriptor, reason = found.dispatch(asked)
    minimal = tuple(min(s for s in named[name] if s >= size) for name, size in asked.items())
    assert mode is FULL
    assert descriptor == key(*minimal)
    assert reason is (Reason.HIT if minimal == tuple(asked.values()) else Reason.PADDED)
    assert found.dispatch(asked) is found.dispatch(dict(reversed(asked.items())))

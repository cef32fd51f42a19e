"""Equal tokens, ties and differences."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from graphrt_llm.comparison import Difference, compare_tokens


def no_gap(request_id: str, index: int) -> float:
    pytest.fail("equal runs need no gap")


outputs = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 3), max_size=5))


@given(outputs)
def test_a_run_is_identical_to_itself(tokens):
    assert compare_tokens(tokens, tokens, no_gap, 0.1) == (True, 0, ())


@given(outputs, outputs, st.floats(0, 1))
def test_identical_means_every_difference_is_a_tie(here, there, gap):
    found = compare_tokens(here, there, lambda request_id, index: gap, 0.5)
    parting = {
        name
        for name in here.keys() & there.keys()
        if any(a != b for a, b in zip(here[name], there[name], strict=False))
    }
    assert found.ties == (len(parting) if gap < 0.5 else 0)
    assert found.identical == (not found.differences)
    unequal = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    assert len(found.differences) + found.ties == len(unequal)


def test_only_the_first_differing_token_is_asked_about():
    asked = []

    def gap(request_id: str, index: int) -> float:
        asked.append((request_id, index))
        return 0.01

    found = compare_tokens({"a": [1, 2, 3, 4]}, {"a": [1, 9, 9, 4, 5]}, gap, 0.02)
    assert found == (True, 1, ())
    assert asked == [("a", 1)]


@pytest.mark.parametrize("gap", [0.02, 1.0, math.inf])
def test_a_gap_that_is_not_below_the_tolerance_is_a_difference(gap: float):
    found = compare_tokens({"a": [1, 2]}, {"a": [1, 3]}, lambda *_: gap, 0.02)
    assert found == (False, 0, (Difference("a", 1, gap),))


def test_a_gap_that_is_no_number_is_a_difference():
    assert not compare_tokens({"a": [1]}, {"a": [3]}, lambda *_: math.nan, 0.02).identical


def test_missing_requests_and_missing_tokens_are_differences():
    found = compare_tokens({"a": [1], "b": [1, 2]}, {"b": [1], "c": []}, no_gap, 1.0)
    assert [(d.request_id, d.position) for d in found.differences] == [("a", 0), ("b", 1), ("c", 0)]

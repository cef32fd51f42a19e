"""Equal tokens, ties and differences."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from graphrt_llm import compare_tokens


def no_margin(request_id: str, position: int) -> float:
    pytest.fail("equal runs need no margin")


outputs = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 3), max_size=5))


@given(outputs)
def test_a_run_is_identical_to_itself(tokens):
    assert compare_tokens(tokens, tokens, no_margin, 0.1) == (True, 0, ())


@given(outputs, outputs, st.floats(0, 1))
def test_identical_means_every_difference_is_a_tie(here, there, margin):
    found = compare_tokens(here, there, lambda request_id, position: margin, 0.5)
    parting = {
        name
        for name in here.keys() & there.keys()
        if any(a != b for a, b in zip(here[name], there[name], strict=False))
    }
    assert found.ties == (len(parting) if margin < 0.5 else 0)
    assert found.identical == (not found.differences)
    unequal = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    assert len(found.differences) + found.ties == len(unequal)


def test_only_the_first_differing_token_is_asked_about():
    asked = []

    def margin(request_id: str, position: int) -> float:
        asked.append((request_id, position))
        return 0.01

    found = compare_tokens({"a": [1, 2, 3, 4]}, {"a": [1, 9, 9, 4, 5]}, margin, 0.02)
    assert found == (True, 1, ())
    assert asked == [("a", 1)]


@pytest.mark.parametrize("margin", [0.02, 1.0, math.inf, math.nan])
def test_a_margin_from_the_tolerance_on_is_a_difference(margin: float):
    found = compare_tokens({"a": [1, 2]}, {"a": [1, 3]}, lambda *_: margin, 0.02)
    assert not found.identical
    assert found.ties == 0
    assert found.differences[0][:2] == ("a", 1)
    assert found.differences[0].margin is margin


def test_missing_requests_and_missing_tokens_are_differences():
    found = compare_tokens({"a": [1], "b": [1, 2]}, {"b": [1], "c": []}, no_margin, 1.0)
    assert [(d.request_id, d.position) for d in found.differences] == [("a", 0), ("b", 1), ("c", 0)]

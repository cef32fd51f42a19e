"""Tokens over step number: a fixed number of bins, exact totals, associative merging."""

from __future__ import annotations

from itertools import pairwise
from operator import mul
from random import Random

import pytest
from hypothesis import given, strategies as st
from report_events import metrics_of

from graphrt import Reason, RuntimeMode
from graphrt.events import RanEager, Replayed
from graphrt.report import TokenSeries

NUM_BINS = 256
Steps = list[tuple[RuntimeMode, int]]


def some_steps(length: int, seed: int) -> Steps:
    source = Random(seed)
    return [(RuntimeMode(source.randrange(3)), source.randrange(8193)) for _ in range(length)]


# Lengths around each point where bins merge, and anything between; lists drawn element by element
# would hardly ever be long enough to merge once.
lengths = st.one_of(
    st.integers(0, 5 * NUM_BINS),
    st.sampled_from([NUM_BINS, 2 * NUM_BINS, 4 * NUM_BINS]).flatmap(
        lambda full: st.integers(full - 2, full + 2)
    ),
)
steps = st.builds(some_steps, lengths, st.integers(0, 1000))


def of(taken: Steps) -> TokenSeries:
    return metrics_of(
        RanEager(Reason.MODE_NONE, num_tokens, 1, False, 1.0)
        if mode is RuntimeMode.NONE
        else Replayed(mode, Reason.HIT, num_tokens, num_tokens, 1, False, 1.0)
        for mode, num_tokens in taken
    ).series


@given(steps)
def test_every_token_is_in_the_bin_of_its_step(taken: Steps) -> None:
    series = of(taken)
    width = series.steps_per_bin
    for mode in RuntimeMode:
        expected = [
            sum(n for m, n in taken[start : start + width] if m is mode)
            for start in range(0, len(taken), width)
        ]
        assert list(series.tokens[mode]) == expected


@given(steps)
def test_means_of_bins_are_over_their_own_steps(taken: Steps) -> None:
    series = of(taken)
    assert series.edges[-1] == len(taken)
    for mode in RuntimeMode:
        means = series.tokens_per_step(mode)
        assert len(means) == len(series.edges) - 1
        widths = [end - start for start, end in pairwise(series.edges)]
        assert sum(map(mul, means, widths)) == pytest.approx(sum(series.tokens[mode]))


def test_the_last_bin_may_hold_fewer_steps_and_keeps_its_mean() -> None:
    series = of([(RuntimeMode.FULL, 8)] * (NUM_BINS + 1))
    assert series.steps_per_bin == 2
    assert set(series.tokens_per_step(RuntimeMode.FULL)) == {8}


@given(steps)
def test_bins_are_few_and_no_wider_than_needed(taken: Steps) -> None:
    series = of(taken)
    assert series.num_steps == len(taken)
    assert all(len(bins) <= NUM_BINS for bins in series.tokens.values())
    assert series.steps_per_bin == 1 or series.steps_per_bin * NUM_BINS < 2 * len(taken)


@given(steps, steps, steps)
def test_merging_is_associative_commutative_and_keeps_totals(a: Steps, b: Steps, c: Steps) -> None:
    x, y, z = of(a), of(b), of(c)
    merged = x.merge(y).merge(z)
    assert merged == x.merge(y.merge(z))
    assert x.merge(y) == y.merge(x)
    assert x.merge(TokenSeries()) == x
    for mode in RuntimeMode:
        assert sum(merged.tokens[mode]) == sum(n for m, n in a + b + c if m is mode)


def test_merging_lays_step_beside_step() -> None:
    one = of([(RuntimeMode.FULL, 1), (RuntimeMode.FULL, 2)])
    other = of([(RuntimeMode.FULL, 10), (RuntimeMode.NONE, 20), (RuntimeMode.FULL, 30)])
    merged = one.merge(other)
    assert merged.num_steps == 3
    assert merged.tokens[RuntimeMode.FULL] == (11, 2, 30)
    assert merged.tokens[RuntimeMode.NONE] == (0, 20, 0)

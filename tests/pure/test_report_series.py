"""Tokens over step number: a fixed number of bins, exact totals, associative merging."""

from __future__ import annotations

from hypothesis import given, strategies as st

from graphrt.batch import RuntimeMode
from graphrt.report.series import NUM_BINS, RunningTokenSeries, TokenSeries

steps = st.lists(
    st.tuples(st.sampled_from(RuntimeMode), st.integers(0, 8192)), max_size=5 * NUM_BINS
)
Steps = list[tuple[RuntimeMode, int]]


def of(taken: Steps) -> TokenSeries:
    running = RunningTokenSeries()
    for mode, num_tokens in taken:
        running.add(mode, num_tokens)
    return running.freeze()


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

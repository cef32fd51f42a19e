"""Distributions: the stated error holds, merging loses nothing, memory is bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from report_events import exact

from graphrt.report import RELATIVE_ERROR, Histogram, RunningHistogram

LOW, HIGH = 1e-3, 1e9  # The range within which the error is promised.
samples = st.lists(exact, max_size=60)
within_range = st.floats(LOW, HIGH, exclude_min=True)


def of(values: list[float]) -> Histogram:
    running = RunningHistogram()
    for value in values:
        running.add(value)
    return running.freeze()


@given(st.lists(within_range, min_size=1, max_size=200), st.floats(0, 1))
def test_quantile_is_within_the_stated_error(values: list[float], q: float) -> None:
    exact_value = sorted(values)[math.floor(q * (len(values) - 1))]
    estimate = of(values).quantile(q)
    assert estimate is not None
    assert abs(estimate - exact_value) <= RELATIVE_ERROR * exact_value * (1 + 1e-9)


@given(samples)
def test_count_total_and_extremes_are_exact(values: list[float]) -> None:
    histogram = of(values)
    assert histogram.count == len(values)
    assert histogram.total == sum(values)
    assert histogram.minimum == min(values, default=math.inf)
    assert histogram.maximum == max(values, default=-math.inf)
    assert sum(count for _, count in histogram.buckets) == len(values)
    assert histogram.mean == (sum(values) / len(values) if values else None)


@given(samples, samples, samples)
def test_merged_histograms_equal_one_of_all_samples(
    a: list[float], b: list[float], c: list[float]
) -> None:
    together = of(a + b + c)
    assert of(a).merge(of(b)).merge(of(c)) == together
    assert of(a).merge(of(b).merge(of(c))) == together
    assert of(c).merge(of(a)).merge(of(b)) == together
    assert of(a).merge(Histogram()) == of(a)


@given(samples.filter(bool), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_with_q_and_stay_between_the_extremes(
    values: list[float], p: float, q: float
) -> None:
    histogram = of(values)
    low, high = histogram.quantile(min(p, q)), histogram.quantile(max(p, q))
    assert low is not None
    assert high is not None
    assert min(values) <= low <= high <= max(values)


def test_an_empty_histogram_has_no_quantile_and_no_mean() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram().mean is None


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_quantile_outside_0_to_1_is_an_error(q: float) -> None:
    with pytest.raises(ValueError, match="within"):
        of([1.0]).quantile(q)


@given(st.lists(st.floats(-1e300, 1e300), max_size=100))
def test_samples_outside_the_range_are_counted_too(values: list[float]) -> None:
    histogram = of(values)
    assert histogram.count == len(values)
    for q in (0.0, 0.5, 1.0):
        estimate = histogram.quantile(q)
        assert (estimate is None) == (not values)
        assert estimate is None or min(values) <= estimate <= max(values)


def test_memory_does_not_grow_with_the_samples() -> None:
    running = RunningHistogram()
    for exponent in range(-4_000, 4_000):
        running.add(10 ** (exponent / 200))
    num_buckets = len(running.freeze().buckets)
    bucket = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
    assert num_buckets == pytest.approx(math.log(HIGH / LOW) / math.log(bucket), abs=2)


@given(st.lists(within_range, max_size=100))
def test_bars_hold_the_samples_between_their_edges(values: list[float]) -> None:
    edges, shares = of(values).bars()
    assert len(edges) == len(shares) + bool(values)
    for low, high, share in zip(edges, edges[1:], shares, strict=False):
        inside = sum(low * (1 + 1e-9) < value <= high * (1 - 1e-9) for value in values)
        near = sum(low * (1 - 1e-9) < value <= high * (1 + 1e-9) for value in values)
        assert inside - 1e-6 <= share * len(values) <= near + 1e-6


@given(samples, st.lists(exact, max_size=5).map(sorted))
def test_counts_within_bounds_rise_to_all_samples(values: list[float], bounds: list[float]) -> None:
    counts = of(values).counts_within([*bounds, math.inf])
    assert counts == sorted(counts)
    assert counts[-1] == len(values)
    for bound, count in zip(bounds, counts, strict=False):
        surely = sum(value <= bound / (1 + 2.1 * RELATIVE_ERROR) for value in values)
        perhaps = sum(value <= bound * (1 + 2.1 * RELATIVE_ERROR) for value in values)
        assert surely <= count <= perhaps

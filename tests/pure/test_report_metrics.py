"""Counting events: sums agree with the events, snapshots are values, memory is bounded."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from report_events import full, metrics_of, steps

from graphrt import BatchDescriptor, Event, Reason, RuntimeMode
from graphrt.events import (
    Captured,
    CaptureFailed,
    Invalidated,
    PaddingVerified,
    RanEager,
    Replayed,
    Retired,
    Verified,
    Withdrawn,
)
from graphrt.report import Metrics, StepMetrics

KEY = BatchDescriptor(8)

seconds = st.integers(0, 1 << 20).map(lambda n: n / 1024)
count = st.integers(0, 1 << 30)
captured = st.builds(
    Captured,
    owner=st.just("model"),
    mode=st.sampled_from(RuntimeMode),
    key=st.just(KEY),
    num_graphs=count,
    num_eager=count,
    num_nodes=st.none() | count,
    seconds=seconds,
    pool_growth_bytes=count,
    exec_bytes=count,
    static_output_bytes=count,
    external_bytes=count,
)
rare = st.one_of(
    captured,
    st.builds(
        CaptureFailed,
        st.just("model"),
        st.sampled_from(RuntimeMode),
        st.just(KEY),
        st.sampled_from(["ForbiddenOperationError", "GraphMemoryError"]),
        st.just("message"),
    ),
    st.builds(Verified, st.just(RuntimeMode.FULL), st.just(KEY), st.booleans(), seconds),
    st.builds(Invalidated, st.just("model"), count, st.just(("weight",))),
    st.builds(Withdrawn, st.just("model"), count, st.just("other kernels")),
    st.builds(Retired, count, count, count),
)
streams = st.lists(steps | rare, max_size=60)


@given(streams)
def test_sums_by_mode_agree_with_the_events(events: list[Event]) -> None:
    metrics = metrics_of(events)
    for mode in RuntimeMode:
        if mode is RuntimeMode.NONE:
            mine: list[Replayed | RanEager] = [e for e in events if isinstance(e, RanEager)]
        else:
            mine = [e for e in events if isinstance(e, Replayed) and e.mode is mode]
        counts = metrics.by_mode()[mode]
        assert counts.steps == len(mine)
        assert counts.uniform_steps == sum(event.uniform for event in mine)
        assert counts.num_tokens == sum(event.num_tokens for event in mine)
        assert counts.num_padded_tokens == sum(
            event.num_padded_tokens if isinstance(event, Replayed) else event.num_tokens
            for event in mine
        )
        assert sum(metrics.series.tokens[mode]) == counts.num_tokens
        assert (mode in metrics.host_us) == bool(mine)
        if mine:
            assert metrics.host_us[mode].total == sum(event.host_us for event in mine)


@given(streams)
def test_miss_reasons_sum_to_the_eager_steps(events: list[Event]) -> None:
    metrics = metrics_of(events)
    assert metrics.miss_reasons() == Counter(e.reason for e in events if isinstance(e, RanEager))
    assert sum(metrics.miss_reasons().values()) == metrics.by_mode()[RuntimeMode.NONE].steps


@given(streams)
def test_padding_is_counted_by_captured_size(events: list[Event]) -> None:
    by_size = metrics_of(events).by_captured_size()
    assert list(by_size) == sorted(by_size)
    padding: Counter[int] = Counter()
    steps: Counter[int] = Counter()
    for event in events:
        if isinstance(event, Replayed):
            padding[event.num_padded_tokens] += event.num_padded_tokens - event.num_tokens
            steps[event.num_padded_tokens] += 1
    assert {size: counts.steps for size, counts in by_size.items()} == steps
    for size, counts in by_size.items():
        assert counts.num_padded_tokens - counts.num_tokens == padding[size]


def test_padding_percent_is_over_padded_tokens_of_all_steps() -> None:
    metrics = metrics_of([full(), RanEager(Reason.ABOVE_MAX, 6, 2, False, 10.0)])
    assert metrics.total().padding_percent == 100 * 1 / 10
    assert Metrics().total().padding_percent == 0


@given(streams)
def test_captures_failures_and_retirements_are_counted(events: list[Event]) -> None:
    metrics = metrics_of(events)
    programs = [event for event in events if isinstance(event, Captured)]
    total = metrics.captures_of_all()
    assert total.programs == len(programs)
    assert total.graphs == sum(event.num_graphs for event in programs)
    assert total.eager_segments == sum(event.num_eager for event in programs)
    assert total.seconds == sum(event.seconds for event in programs)
    assert total.graph_bytes == sum(
        event.pool_growth_bytes + event.exec_bytes for event in programs
    )
    nodes = [event.num_nodes for event in programs]
    assert total.nodes == (None if None in nodes else sum(n for n in nodes if n is not None))
    assert metrics.failures == Counter(e.error for e in events if isinstance(e, CaptureFailed))
    verified = [event for event in events if isinstance(event, Verified)]
    assert metrics.verifications.equal == sum(event.equal for event in verified)
    assert metrics.verifications.different == sum(not event.equal for event in verified)
    retired = [event for event in events if isinstance(event, Retired)]
    lifetimes = metrics.lifetimes
    assert lifetimes.retired_generations == len(retired)
    assert lifetimes.retired_programs == sum(event.num_programs for event in retired)
    assert lifetimes.freed_bytes == sum(event.freed_bytes for event in retired)
    assert lifetimes.invalidated_programs == sum(
        event.num_programs for event in events if isinstance(event, Invalidated)
    )
    withdrawn = [event.num_programs for event in events if isinstance(event, Withdrawn)]
    assert lifetimes.withdrawals == len(withdrawn)
    assert lifetimes.withdrawn_programs == sum(withdrawn)


def test_nan_difference_counts_as_infinite() -> None:
    unequal = [Verified(RuntimeMode.FULL, KEY, False, d) for d in (1.0, math.nan, 2.0)]
    assert metrics_of(unequal).verifications == (0, 3, math.inf)


def test_padded_comparison_is_counted_without_its_difference() -> None:
    padded = [PaddingVerified(RuntimeMode.FULL, KEY, equal, 0.5, 0) for equal in (True, False)]
    assert metrics_of(padded).verifications == (1, 1, 0.0)


@given(streams, streams, streams)
def test_merging_metrics_is_associative_with_a_neutral_one(
    a: list[Event], b: list[Event], c: list[Event]
) -> None:
    x, y, z = metrics_of(a), metrics_of(b), metrics_of(c)
    assert x.merge(y).merge(z) == x.merge(y.merge(z))
    assert x.merge(y) == y.merge(x)
    assert x.merge(Metrics()) == x == Metrics().merge(x)


@given(streams, streams)
def test_merged_counts_are_those_of_one_observer(a: list[Event], b: list[Event]) -> None:
    merged, together = metrics_of(a).merge(metrics_of(b)), metrics_of(a + b)
    assert merged.steps == together.steps
    assert merged.host_us == together.host_us
    assert merged.host_us_of_all() == together.host_us_of_all()
    assert merged.captures == together.captures
    assert merged.failures == together.failures


@given(streams)
def test_snapshot_is_not_changed_by_later_events(events: list[Event]) -> None:
    metrics = StepMetrics()
    for event in events:
        metrics(event)
    before = metrics.snapshot()
    copy = pickle.loads(pickle.dumps(before))
    for event in events:
        metrics(event)
    assert before == copy
    assert metrics.snapshot().failures == Counter(before.failures) + Counter(before.failures)


@pytest.mark.parametrize("num_steps", [1_000, 10_000])
def test_memory_does_not_grow_with_the_steps(num_steps: int) -> None:
    metrics = StepMetrics()
    for step in range(num_steps):
        size = 1 << step % 6
        metrics(Replayed(RuntimeMode.FULL, Reason.HIT, size, size, 1, True, 1 + step % 100))
        metrics(RanEager(Reason.ABOVE_MAX, 1_000 + step, 1, False, 1 + step % 100))
    snapshot = metrics.snapshot()
    assert snapshot.total().steps == 2 * num_steps
    assert len(snapshot.steps) == 6 + 1
    assert sum(len(histogram.buckets) for histogram in snapshot.host_us.values()) < 300

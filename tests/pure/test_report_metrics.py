"""Counting events: sums agree with the events, snapshots are values, memory is bounded."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from graphrt.batch import BatchDescriptor, MissReason, RuntimeMode
from graphrt.events import (
    Captured,
    CaptureFailed,
    Event,
    Invalidated,
    RanEager,
    Replayed,
    Retired,
    Verified,
)
from graphrt.report.metrics import Metrics, StepMetrics

SIZES = (1, 2, 4, 8, 16, 64)
KEY = BatchDescriptor(8)

host_us = st.integers(1, 1 << 30).map(lambda n: n / 1024)
seconds = st.integers(0, 1 << 20).map(lambda n: n / 1024)
replayed = st.builds(
    lambda mode, size, less, uniform, us: Replayed(
        mode,
        MissReason.PADDED if less else MissReason.HIT,
        size - min(less, size - 1),
        size,
        min(size, 8),
        uniform,
        us,
    ),
    st.sampled_from([RuntimeMode.PIECEWISE, RuntimeMode.FULL]),
    st.sampled_from(SIZES),
    st.integers(0, 8),
    st.booleans(),
    host_us,
)
ran_eager = st.builds(
    RanEager,
    st.sampled_from([reason for reason in MissReason if reason.is_miss]),
    st.integers(1, 8192),
    st.integers(1, 64),
    st.booleans(),
    host_us,
)
count = st.integers(0, 1 << 30)
captured = st.builds(
    Captured,
    owner=st.just("model"),
    mode=st.sampled_from(RuntimeMode),
    key=st.just(KEY),
    num_graphs=count,
    num_gaps=count,
    num_nodes=st.none() | count,
    seconds=seconds,
    pool_growth_bytes=count,
    exec_bytes=count,
    slot_bytes=count,
    external_bytes=count,
    display=st.booleans(),
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
    st.builds(Retired, count, count, count),
)
streams = st.lists(st.one_of(replayed, ran_eager, rare), max_size=60)


def metrics_of(events: Iterable[Event]) -> Metrics:
    metrics = StepMetrics()
    for event in events:
        metrics(event)
    return metrics.snapshot()


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
def test_miss_reasons_count_eager_steps_only_and_sum_to_them(events: list[Event]) -> None:
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
    metrics = metrics_of(
        [
            Replayed(RuntimeMode.FULL, MissReason.PADDED, 3, 4, 3, True, 10.0),
            RanEager(MissReason.ABOVE_MAX, 6, 2, False, 10.0),
        ]
    )
    assert metrics.total().padding_percent == 100 * 1 / 10
    assert Metrics().total().padding_percent == 0


@given(streams)
def test_captures_and_what_became_of_them_are_counted(events: list[Event]) -> None:
    metrics = metrics_of(events)
    programs = [event for event in events if isinstance(event, Captured)]
    total = metrics.captures_of_all()
    assert total.programs == len(programs)
    assert total.graphs == sum(event.num_graphs for event in programs)
    assert total.gaps == sum(event.num_gaps for event in programs)
    assert total.seconds == sum(event.seconds for event in programs)
    assert total.external_bytes == sum(event.external_bytes for event in programs)
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


def test_a_difference_that_is_no_number_counts_as_infinite() -> None:
    unequal = [Verified(RuntimeMode.FULL, KEY, False, d) for d in (1.0, math.nan, 2.0)]
    assert metrics_of(unequal).verifications == (0, 3, math.inf)


@given(streams, streams, streams)
def test_merging_is_associative_and_empty_metrics_change_nothing(
    a: list[Event], b: list[Event], c: list[Event]
) -> None:
    x, y, z = metrics_of(a), metrics_of(b), metrics_of(c)
    assert x.merge(y).merge(z) == x.merge(y.merge(z))
    assert x.merge(y) == y.merge(x)
    assert x.merge(Metrics()) == x == Metrics().merge(x)


@given(streams, streams)
def test_merged_counts_are_those_of_one_observer_of_both(a: list[Event], b: list[Event]) -> None:
    merged, together = metrics_of(a).merge(metrics_of(b)), metrics_of(a + b)
    assert merged.steps == together.steps
    assert merged.host_us == together.host_us
    assert merged.host_us_of_all() == together.host_us_of_all()
    assert merged.captures == together.captures
    assert merged.failures == together.failures


@given(streams)
def test_a_snapshot_is_not_touched_by_later_events(events: list[Event]) -> None:
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
        size = SIZES[step % len(SIZES)]
        metrics(Replayed(RuntimeMode.FULL, MissReason.HIT, size, size, 1, True, 1 + step % 100))
        metrics(RanEager(MissReason.ABOVE_MAX, 1_000 + step, 1, False, 1 + step % 100))
    snapshot = metrics.snapshot()
    assert snapshot.total().steps == 2 * num_steps
    assert len(snapshot.steps) == len(SIZES) + 1
    assert sum(len(histogram.buckets) for histogram in snapshot.host_us.values()) < 300

"""Events, and runs made of them, for the tests of the report."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from graphrt import BatchDescriptor, Event, Reason, RuntimeMode
from graphrt.events import Captured, RanEager, Replayed
from graphrt.report import Metrics, PolicyRun, RunningHistogram, StepMetrics

# Multiples of 1/1024 of moderate size add up exactly, so that sums do not depend on order.
exact = st.integers(1, 1 << 30).map(lambda n: n / 1024)
replayed = st.builds(
    lambda mode, size, less, uniform, us: Replayed(
        mode,
        Reason.PADDED if less else Reason.HIT,
        size - min(less, size - 1),
        size,
        min(size, 8),
        uniform,
        us,
    ),
    st.sampled_from([RuntimeMode.PIECEWISE, RuntimeMode.FULL]),
    st.sampled_from([1, 2, 4, 8, 16, 64, 8192]),
    st.integers(0, 8),
    st.booleans(),
    exact,
)
ran_eager = st.builds(
    RanEager,
    st.sampled_from([reason for reason in Reason if reason.is_miss]),
    st.integers(1, 8192),
    st.integers(1, 64),
    st.booleans(),
    exact,
)
steps = replayed | ran_eager


def eager(host_us: float = 200.0, reason: Reason = Reason.MODE_NONE) -> RanEager:
    return RanEager(reason, 6, 2, False, host_us)


def full(host_us: float = 100.0) -> Replayed:
    return Replayed(RuntimeMode.FULL, Reason.PADDED, 3, 4, 3, True, host_us)


def captured(mode: RuntimeMode, size: int, graphs: int) -> Captured:
    return Captured(
        owner="model",
        mode=mode,
        key=BatchDescriptor(size),
        num_graphs=graphs,
        num_eager=graphs - 1,
        num_nodes=40,
        seconds=0.25,
        pool_growth_bytes=1024,
        exec_bytes=512,
        static_output_bytes=256,
        external_bytes=9,
    )


def metrics_of(events: Iterable[Event]) -> Metrics:
    metrics = StepMetrics()
    for event in events:
        metrics(event)
    return metrics.snapshot()


def run_of(name: str, events: Iterable[Event]) -> PolicyRun:
    """A run whose whole steps take 50 us longer than the host's part of them."""
    events, step_us = list(events), RunningHistogram()
    for event in events:
        if isinstance(event, Replayed | RanEager):
            step_us.add(event.host_us + 50)
    return PolicyRun(
        name=name,
        metrics=metrics_of(events),
        capture_seconds=0.5,
        seconds=1.0,
        step_us=step_us.freeze(),
    )


RUNS = [
    run_of("NONE", [eager()] * 4),
    run_of(
        "FULL_AND_PIECEWISE",
        [
            captured(RuntimeMode.PIECEWISE, 16, 5),
            captured(RuntimeMode.FULL, 4, 1),
            full(),
            full(),
            full(),
            eager(reason=Reason.ABOVE_MAX),
        ],
    ),
]

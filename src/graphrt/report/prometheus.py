"""Metrics for Prometheus, computed when they are scraped: a step pays for counting only.

Needs the extra ``metrics``. Labels are members of closed sets, so the number of series is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from graphrt.errors import ConfigError, MissingExtraError
from graphrt.events import Event
from graphrt.report.metrics import Metrics, StepMetrics

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError("metrics for Prometheus", extra="metrics", found=str(error)) from error

HOST_SECONDS_BOUNDS = tuple(digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5))
"""Upper bounds of the host-time buckets: 1 us to 5 s."""


class PrometheusObserver(Collector):
    """An observer whose counts appear in ``registry``. One per registry; ranks have their own.

    Errors: ``ConfigError`` if the registry already shows these metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = StepMetrics()
        self._registry = registry
        try:
            registry.register(self)
        except ValueError as error:
            raise ConfigError(
                "PrometheusObserver",
                expected="a registry without graphrt's metrics",
                found=str(error),
                do="give all runtimes of the process one observer, or each its own registry",
            ) from error

    def __call__(self, event: Event, /) -> None:
        self._metrics(event)

    def close(self) -> None:
        """Take the metrics out of the registry."""
        self._registry.unregister(self)

    def snapshot(self) -> Metrics:
        """The same numbers as a value."""
        return self._metrics.snapshot()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, on the thread of the scrape."""
        return _families(self._metrics.snapshot())

    def describe(self) -> Iterator[Metric]:
        """The names alone: what the registry compares when it takes a collector in."""
        return _families(Metrics())


def _families(metrics: Metrics) -> Iterator[Metric]:
    yield from _steps(metrics)
    yield _host_seconds(metrics)
    yield from _captures(metrics)


def _steps(metrics: Metrics) -> Iterator[Metric]:
    steps = CounterMetricFamily(
        "graphrt_steps",
        "Steps by what they ran and why.",
        labels=("mode", "reason", "uniform"),
    )
    counted: dict[tuple[str, str, str], int] = {}
    for kind, counts in metrics.steps.items():
        labels = (kind.mode.name, kind.reason.name, str(kind.uniform).lower())
        counted[labels] = counted.get(labels, 0) + counts.steps
    for labels, value in counted.items():
        steps.add_metric(labels, value)
    yield steps

    tokens = CounterMetricFamily("graphrt_tokens", "Tokens without padding.", labels=("mode",))
    padding = CounterMetricFamily(
        "graphrt_padding_tokens", "Tokens added to fill a captured size.", labels=("mode",)
    )
    for mode, counts in metrics.by_mode().items():
        tokens.add_metric((mode.name,), counts.num_tokens)
        padding.add_metric((mode.name,), counts.num_padded_tokens - counts.num_tokens)
    yield tokens
    yield padding


def _host_seconds(metrics: Metrics) -> Metric:
    family = HistogramMetricFamily(
        "graphrt_step_host_seconds", "Host time of a step.", labels=("mode",)
    )
    bounds_us = [1e6 * bound for bound in HOST_SECONDS_BOUNDS]
    for mode, histogram in metrics.host_us.items():
        counts = histogram.counts_within([*bounds_us, math.inf])
        names = [f"{bound:g}" for bound in HOST_SECONDS_BOUNDS] + ["+Inf"]
        family.add_metric(
            (mode.name,),
            buckets=list(zip(names, counts, strict=True)),
            sum_value=histogram.total / 1e6,
        )
    return family


def _captures(metrics: Metrics) -> Iterator[Metric]:
    programs = CounterMetricFamily("graphrt_captures", "Programs captured.", labels=("mode",))
    graphs = CounterMetricFamily(
        "graphrt_captured_graphs", "Device graphs captured.", labels=("mode",)
    )
    seconds = CounterMetricFamily(
        "graphrt_capture_seconds", "Time spent in captures.", labels=("mode",)
    )
    for mode, totals in metrics.captures.items():
        programs.add_metric((mode.name,), totals.programs)
        graphs.add_metric((mode.name,), totals.graphs)
        seconds.add_metric((mode.name,), totals.seconds)
    yield from (programs, graphs, seconds)

    held = metrics.captures_of_all().graph_bytes - metrics.lifetimes.freed_bytes
    yield GaugeMetricFamily("graphrt_graph_bytes", "Memory that graphs hold.", value=held)

    failures = CounterMetricFamily(
        "graphrt_capture_failures", "Captures that failed.", labels=("error",)
    )
    for error, count in metrics.failures.items():
        failures.add_metric((error,), count)
    yield failures

    verified = CounterMetricFamily(
        "graphrt_verifications", "Replays compared with eager execution.", labels=("equal",)
    )
    verified.add_metric(("true",), metrics.verifications.equal)
    verified.add_metric(("false",), metrics.verifications.different)
    yield verified
    yield CounterMetricFamily(
        "graphrt_invalidated_programs",
        "Programs whose tensors moved.",
        value=metrics.lifetimes.invalidated_programs,
    )
    yield CounterMetricFamily(
        "graphrt_retired_programs",
        "Programs given back.",
        value=metrics.lifetimes.retired_programs,
    )

"""Metrics for Prometheus, computed when they are scraped: a step pays for counting only.

Needs the extra ``metrics`` where an observer is made. Labels are members of closed sets, so that
the series are few.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from graphrt.batch import Reason
from graphrt.errors import ConfigError, MissingExtraError
from graphrt.report.metrics import Metrics, StepMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

HOST_SECONDS_BOUNDS = tuple(digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5))
"""Upper bounds of the host-time buckets: 1 us to 5 s."""


class PrometheusObserver(StepMetrics):
    """A ``StepMetrics`` whose counts appear in ``registry``, by default the process's own.

    One per registry: give all runtimes of a process the same observer, each rank its own. Counters
    of steps, tokens, padding, host time, captures, failures and comparisons; gauges of graphs alive
    (``graphrt_graphs_alive``), of keys missing by reason (``graphrt_keys_missing``) and of bytes.
    They are computed when they are scraped, on the thread of the scrape.

    Errors: ``MissingExtraError`` without prometheus-client, the extra ``metrics``; ``ConfigError``
    if the registry already shows these metrics.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtraError(
                "metrics for Prometheus", extra="metrics", found=str(error)
            ) from error
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ConfigError(
                "PrometheusObserver",
                expected="a registry without graphrt's metrics",
                found=str(error),
                do="give all runtimes of the process one observer, or each its own registry",
            ) from error

    def close(self) -> None:
        """Take the metrics out of the registry."""
        self._registry.unregister(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, on the thread of the scrape."""
        return _families(self.snapshot())

    def describe(self) -> Iterator[Metric]:
        """The names alone: what the registry compares when it takes a collector in."""
        return _families(Metrics())


def _families(metrics: Metrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    def family(kind: Any, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Any:
        """A sample for each of ``values``, whose keys are the labels' values: one, or a tuple."""
        made = kind(f"graphrt_{name}", text, labels=labels)
        for key, value in values.items():
            made.add_metric(key if isinstance(key, tuple) else (key,), value)
        return made

    counter, gauge = partial(family, CounterMetricFamily), partial(family, GaugeMetricFamily)
    counted: Counter[tuple[str, str, str]] = Counter()
    for kind, counts in metrics.steps.items():
        counted[kind.mode.name, kind.reason.name, str(kind.uniform).lower()] += counts.steps
    yield counter("steps", "Steps by what they ran and why.", counted, "mode", "reason", "uniform")
    split = {"true": metrics.split_steps, "false": sum(metrics.unsplit_reasons.values())}
    yield counter("ubatch_steps", "Steps that could be split, by split.", split, "split")
    unsplit = {reason.name: count for reason, count in metrics.unsplit_reasons.items()}
    yield counter("unsplit_steps", "Steps that were not split, by why.", unsplit, "reason")
    modes = {mode.name: counts for mode, counts in metrics.by_mode().items()}
    tokens = {mode: counts.num_tokens for mode, counts in modes.items()}
    yield counter("tokens", "Tokens without padding.", tokens, "mode")
    padding = {mode: counts.num_padded_tokens - tokens[mode] for mode, counts in modes.items()}
    yield counter("padding_tokens", "Tokens added to fill a captured size.", padding, "mode")
    adapters = {
        (str(live), "eager" if served is None else str(served)): counts.steps
        for (live, served), counts in metrics.by_lora_count().items()
    }
    text = "Steps by adapters of the batch, and by the captured count that served it."
    yield counter("lora_steps", text, adapters, "live", "captured")

    host_seconds = HistogramMetricFamily(
        "graphrt_step_host_seconds", "Host time of a step.", labels=("mode",)
    )
    bounds_us = [*(1e6 * bound for bound in HOST_SECONDS_BOUNDS), math.inf]
    names = [*(f"{bound:g}" for bound in HOST_SECONDS_BOUNDS), "+Inf"]
    for mode, histogram in metrics.host_us.items():
        buckets = list(zip(names, histogram.counts_within(bounds_us), strict=True))
        host_seconds.add_metric((mode.name,), buckets=buckets, sum_value=histogram.total / 1e6)
    yield host_seconds

    captures = {mode.name: totals for mode, totals in metrics.captures.items()}
    for name, text, field in (
        ("captures", "Programs captured.", "programs"),
        ("captured_graphs", "Device graphs captured.", "graphs"),
        ("capture_seconds", "Time spent in captures.", "seconds"),
    ):
        values = {mode: getattr(totals, field) for mode, totals in captures.items()}
        yield counter(name, text, values, "mode")
    alive = {(): metrics.num_alive_graphs}
    yield gauge("graphs_alive", "Device graphs that exist now.", alive)
    # Every reason that a key may have: one that goes away has to become zero.
    reasons = (Reason.NOT_CAPTURED_YET, Reason.CAPTURE_FAILED, Reason.INVALIDATED)
    missing = {reason.name: metrics.missing_keys.get(reason, 0) for reason in reasons}
    yield gauge("keys_missing", "Keys that no graph serves now, by reason.", missing, "reason")
    lifetimes = metrics.lifetimes
    held = metrics.captures_of_all().graph_bytes - lifetimes.freed_bytes
    yield gauge("graph_bytes", "Memory that graphs hold.", {(): held})
    taken = metrics.memory_taken._asdict()
    yield gauge("capture_memory_bytes", "What captures took from the device.", taken, "part")
    yield counter("capture_failures", "Captures that failed.", metrics.failures, "error")
    verified = {"true": metrics.verifications.equal, "false": metrics.verifications.different}
    yield counter("verifications", "Replays compared with eager execution.", verified, "equal")
    invalid = {(): lifetimes.invalidated_programs}
    yield counter("invalidated_programs", "Programs whose tensors moved.", invalid)
    yield counter("retired_programs", "Programs given back.", {(): lifetimes.retired_programs})

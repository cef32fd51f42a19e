"""Runs of one traffic under several policies, side by side: the numbers of table, page and JSON.

Quantiles of times are estimates (see ``histogram.RELATIVE_ERROR``); everything else is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from graphrt.batch import MissReason
from graphrt.report.histogram import Histogram
from graphrt.report.metrics import Metrics

BASELINE = "NONE"
"""The run that step times are compared with: the one in which every step is eager."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRun:
    """One policy's run: its name, what was counted, and what a clock on the wall said."""

    name: str
    metrics: Metrics
    capture_seconds: float
    """Warm-ups, captures and first verified replays together."""
    seconds: float
    """Serving, without capture."""
    step_us: Histogram = field(default_factory=Histogram)
    """Time of whole steps in microseconds, until their results were on the host. Unlike host time
    it contains the device's work, which a GPU does after the runtime has returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySummary:
    """The comparable numbers of one run. Field names are public: ``as_dict`` is a JSON contract."""

    steps: int
    runtime_modes: dict[str, int]
    """Steps by what they ran; they sum to ``steps``."""
    uniform_steps: dict[str, int]
    """The share of ``runtime_modes`` that were uniform decode batches."""
    tokens_by_runtime_mode: dict[str, int]
    """Without padding."""
    miss_reasons: dict[str, int]
    """Eager steps by reason; they sum to those of mode NONE."""
    padding_percent: float
    num_graphs: int
    capture_seconds: float
    graph_bytes: int
    host_us_p50: float | None
    """None, like all that follows from it, where no step ran."""
    host_us_p99: float | None
    step_us_p50: float | None
    step_time_ratio_to_none: float | None
    """Median step time over that of the baseline: below 1 is faster. None without a baseline."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_runs(runs: Sequence[PolicyRun]) -> dict[str, PolicySummary]:
    """One summary for each run, by name and in order."""
    medians = {run.name: run.step_us.quantile(0.5) for run in runs}
    return {run.name: _summary(run, medians[run.name], medians.get(BASELINE)) for run in runs}


def eager_reasons(runs: Sequence[PolicyRun]) -> list[MissReason]:
    """Every reason for which any run had an eager step, most frequent first."""
    counts: dict[MissReason, int] = {}
    for run in runs:
        for reason, steps in run.metrics.miss_reasons().items():
            counts[reason] = counts.get(reason, 0) + steps
    return sorted(counts, key=lambda reason: -counts[reason])


def _summary(run: PolicyRun, median: float | None, baseline: float | None) -> PolicySummary:
    metrics = run.metrics
    by_mode = sorted(metrics.by_mode().items(), reverse=True)
    captured = metrics.captures_of_all()
    return PolicySummary(
        steps=metrics.total().steps,
        runtime_modes={mode.name: counts.steps for mode, counts in by_mode},
        uniform_steps={mode.name: counts.uniform_steps for mode, counts in by_mode},
        tokens_by_runtime_mode={mode.name: counts.num_tokens for mode, counts in by_mode},
        miss_reasons={reason.name: steps for reason, steps in metrics.miss_reasons().items()},
        padding_percent=metrics.total().padding_percent,
        num_graphs=captured.graphs,
        capture_seconds=run.capture_seconds,
        graph_bytes=captured.graph_bytes,
        host_us_p50=metrics.host_us_of_all().quantile(0.5),
        host_us_p99=metrics.host_us_of_all().quantile(0.99),
        step_us_p50=median,
        step_time_ratio_to_none=median / baseline if median and baseline else None,
        seconds=run.seconds,
    )

"""What a runtime did, counted as it happens, in memory that does not grow with the steps.

``StepMetrics`` is an observer: hand it to a runtime, then take ``snapshot()`` whenever the numbers
are wanted. A snapshot is a value; those of several ranks or runs ``merge`` into one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from graphrt.batch import MissReason, RuntimeMode
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
from graphrt.report.histogram import Histogram, RunningHistogram
from graphrt.report.series import RunningTokenSeries, TokenSeries


class StepKind(NamedTuple):
    """What tells one step from another: there are few kinds, however many steps."""

    mode: RuntimeMode
    num_padded_tokens: int | None
    """The captured size that served the step; None for eager steps, which have none."""
    reason: MissReason
    uniform: bool


class StepCounts(NamedTuple):
    """Sums over steps. Padding is ``num_padded_tokens - num_tokens``; eager steps have none."""

    steps: int = 0
    uniform_steps: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0

    def plus(self, other: StepCounts) -> StepCounts:
        return StepCounts(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def padding_percent(self) -> float:
        """100 (padded - real) / padded; 0 without tokens."""
        padding = self.num_padded_tokens - self.num_tokens
        return 100 * padding / self.num_padded_tokens if self.num_padded_tokens else 0.0


class CaptureTotals(NamedTuple):
    """Sums over captured programs."""

    programs: int = 0
    graphs: int = 0
    gaps: int = 0
    nodes: int | None = 0
    """None where the device did not say for every program."""
    seconds: float = 0.0
    pool_growth_bytes: int = 0
    exec_bytes: int = 0
    slot_bytes: int = 0
    external_bytes: int = 0
    """Held alive by the programs, not made by them."""

    def plus(self, other: CaptureTotals) -> CaptureTotals:
        unknown = self.nodes is None or other.nodes is None
        return CaptureTotals(
            programs=self.programs + other.programs,
            graphs=self.graphs + other.graphs,
            gaps=self.gaps + other.gaps,
            nodes=None if unknown else (self.nodes or 0) + (other.nodes or 0),
            seconds=self.seconds + other.seconds,
            pool_growth_bytes=self.pool_growth_bytes + other.pool_growth_bytes,
            exec_bytes=self.exec_bytes + other.exec_bytes,
            slot_bytes=self.slot_bytes + other.slot_bytes,
            external_bytes=self.external_bytes + other.external_bytes,
        )

    @property
    def graph_bytes(self) -> int:
        """What the programs take: pool, slots in it included, and executables."""
        return self.pool_growth_bytes + self.exec_bytes


class VerificationTotals(NamedTuple):
    """Sums over replays that were compared with eager execution."""

    equal: int = 0
    different: int = 0
    max_abs_difference: float = 0.0
    """Infinite where a comparison met something that is no number."""

    def plus(self, other: VerificationTotals) -> VerificationTotals:
        return VerificationTotals(
            self.equal + other.equal,
            self.different + other.different,
            max(self.max_abs_difference, other.max_abs_difference),
        )


class LifetimeTotals(NamedTuple):
    """Sums over what ended: programs whose externals moved, generations given back."""

    invalidated_programs: int = 0
    retired_generations: int = 0
    retired_programs: int = 0
    freed_bytes: int = 0

    def plus(self, other: LifetimeTotals) -> LifetimeTotals:
        return LifetimeTotals(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """A snapshot. The default is the empty one, which changes nothing in a merge."""

    steps: Mapping[StepKind, StepCounts] = field(default_factory=dict)
    host_us: Mapping[RuntimeMode, Histogram] = field(default_factory=dict)
    """Host time per step in microseconds, by what the step ran."""
    series: TokenSeries = field(default_factory=TokenSeries)
    captures: Mapping[RuntimeMode, CaptureTotals] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    """Captures that failed, by the name of the error."""
    verifications: VerificationTotals = field(default_factory=VerificationTotals)
    lifetimes: LifetimeTotals = field(default_factory=LifetimeTotals)

    def merge(self, other: Metrics) -> Metrics:
        """The numbers of both, as of two ranks that stepped side by side."""
        steps, host_us, captures = dict(self.steps), dict(self.host_us), dict(self.captures)
        for kind, counts in other.steps.items():
            steps[kind] = steps.get(kind, StepCounts()).plus(counts)
        for mode, histogram in other.host_us.items():
            host_us[mode] = host_us.get(mode, Histogram()).merge(histogram)
        for mode, totals in other.captures.items():
            captures[mode] = captures.get(mode, CaptureTotals()).plus(totals)
        return Metrics(
            steps=steps,
            host_us=host_us,
            series=self.series.merge(other.series),
            captures=captures,
            failures=dict(Counter(self.failures) + Counter(other.failures)),
            verifications=self.verifications.plus(other.verifications),
            lifetimes=self.lifetimes.plus(other.lifetimes),
        )

    def total(self) -> StepCounts:
        """All steps together."""
        return _sum(self.steps.values())

    def by_mode(self) -> dict[RuntimeMode, StepCounts]:
        """Steps by what they ran; every mode is there, with zeros if need be."""
        return {
            mode: _sum(counts for kind, counts in self.steps.items() if kind.mode is mode)
            for mode in RuntimeMode
        }

    def by_captured_size(self) -> dict[int, StepCounts]:
        """Graph steps by the captured size that served them, ascending."""
        found: dict[int, StepCounts] = {}
        for kind, counts in self.steps.items():
            if kind.num_padded_tokens is not None:
                before = found.get(kind.num_padded_tokens, StepCounts())
                found[kind.num_padded_tokens] = before.plus(counts)
        return dict(sorted(found.items()))

    def miss_reasons(self) -> dict[MissReason, int]:
        """Eager steps by reason, most frequent first; they sum to the steps of mode NONE."""
        found = Counter[MissReason]()
        for kind, counts in self.steps.items():
            if kind.mode is RuntimeMode.NONE:
                found[kind.reason] += counts.steps
        return dict(found.most_common())

    def host_us_of_all(self) -> Histogram:
        """Host time per step in microseconds, whatever the step ran."""
        merged = Histogram()
        for histogram in self.host_us.values():
            merged = merged.merge(histogram)
        return merged

    def captures_of_all(self) -> CaptureTotals:
        """All captured programs together."""
        total = CaptureTotals()
        for captured in self.captures.values():
            total = total.plus(captured)
        return total


class StepMetrics:
    """Counts every event it is called with.

    It runs on the step's path: a few dictionary look-ups, no list that grows, no lock. ``snapshot``
    may be called from another thread; its parts may then be one event apart.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[RuntimeMode, int | None, MissReason, bool], list[int]] = {}
        self._host_us = [RunningHistogram() for _ in RuntimeMode]
        self._series = RunningTokenSeries()
        self._captures: dict[RuntimeMode, CaptureTotals] = {}
        self._failures: dict[str, int] = {}
        self._verifications = VerificationTotals()
        self._lifetimes = LifetimeTotals()

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, Replayed):
            mode, reason, num_tokens, num_padded_tokens, _, uniform, host_us = event
            self._count_step((mode, num_padded_tokens, reason, uniform), num_tokens, host_us)
        elif isinstance(event, RanEager):
            reason, num_tokens, _, uniform, host_us = event
            self._count_step((RuntimeMode.NONE, None, reason, uniform), num_tokens, host_us)
        else:
            self._count_rare(event)

    def _count_step(
        self,
        kind: tuple[RuntimeMode, int | None, MissReason, bool],
        num_tokens: int,
        host_us: float,
    ) -> None:
        sums = self._steps.get(kind)
        if sums is None:
            self._steps[kind] = sums = [0, 0]
        sums[0] += 1
        sums[1] += num_tokens
        mode = kind[0]
        self._host_us[mode].add(host_us)
        self._series.add(mode, num_tokens)

    def _count_rare(self, event: Event) -> None:
        match event:
            case Captured():
                before = self._captures.get(event.mode, CaptureTotals())
                self._captures[event.mode] = before.plus(
                    CaptureTotals(
                        programs=1,
                        graphs=event.num_graphs,
                        gaps=event.num_gaps,
                        nodes=event.num_nodes,
                        seconds=event.seconds,
                        pool_growth_bytes=event.pool_growth_bytes,
                        exec_bytes=event.exec_bytes,
                        slot_bytes=event.slot_bytes,
                        external_bytes=event.external_bytes,
                    )
                )
            case CaptureFailed(error=error):
                self._failures[error] = self._failures.get(error, 0) + 1
            case Verified(equal=equal, max_abs_difference=difference):
                seen = math.inf if math.isnan(difference) else difference
                self._verifications = self._verifications.plus(
                    VerificationTotals(
                        equal=int(equal), different=int(not equal), max_abs_difference=seen
                    )
                )
            case Invalidated(num_programs=programs):
                self._lifetimes = self._lifetimes.plus(
                    LifetimeTotals(invalidated_programs=programs)
                )
            case Retired(num_programs=programs, freed_bytes=freed):
                self._lifetimes = self._lifetimes.plus(LifetimeTotals(0, 1, programs, freed))
            # An event of a later room has nothing to count here.

    def snapshot(self) -> Metrics:
        """The numbers so far, as a value that later events do not touch."""
        # dict() copies in one step of the interpreter: safe beside a thread that counts.
        steps = {}
        for (mode, size, reason, uniform), (num_steps, num_tokens) in dict(self._steps).items():
            steps[StepKind(mode, size, reason, uniform)] = StepCounts(
                steps=num_steps,
                uniform_steps=num_steps if uniform else 0,
                num_tokens=num_tokens,
                num_padded_tokens=num_tokens if size is None else num_steps * size,
            )
        frozen = {mode: self._host_us[mode].freeze() for mode in RuntimeMode}
        return Metrics(
            steps=steps,
            host_us={mode: histogram for mode, histogram in frozen.items() if histogram.count},
            series=self._series.freeze(),
            captures=dict(self._captures),
            failures=dict(self._failures),
            verifications=self._verifications,
            lifetimes=self._lifetimes,
        )


def _sum(counts: Iterable[StepCounts]) -> StepCounts:
    total = StepCounts()
    for each in counts:
        total = total.plus(each)
    return total

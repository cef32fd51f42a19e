"""What a runtime did, counted as it happens, in memory that does not grow with the steps.

``StepMetrics`` is an observer: give it to a runtime, then call ``snapshot()`` at any time. A
snapshot is a value; those of several ranks or runs ``merge`` into one.

Distributions are log-spaced buckets with exact totals beside them. Bucket ``i`` holds the values in
``(GAMMA**(i-1), GAMMA**i]``; the value half-way (harmonically) between its bounds is at most
``RELATIVE_ERROR`` away from every value in it. Source: DDSketch (Masson, Rim, Lee; VLDB 2019), with
a fixed range in place of collapsing buckets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple, TypeVar

from graphrt.batch import Reason, RuntimeMode, UBatchReason
from graphrt.events import (
    Captured,
    CaptureEnded,
    CaptureFailed,
    Event,
    Invalidated,
    KeysChanged,
    MemoryTaken,
    PaddingVerified,
    RanEager,
    Replayed,
    Retired,
    Verified,
    Withdrawn,
)

K = TypeVar("K")

RELATIVE_ERROR = 0.01
"""Of a quantile, against the sample of that rank, for samples within ``RANGE``."""

RANGE = (1e-3, 1e9)
"""Samples outside share the outermost bucket of their side. In microseconds: 1 ns to 1,000 s."""

GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_SCALE = 1 / math.log(GAMMA)
_BUCKETS_PER_BAR = 3
_FIRST, _LAST = (math.ceil(math.log(bound) * _SCALE) for bound in RANGE)


@dataclass(frozen=True, slots=True)
class Histogram:
    """A finished distribution, in the unit of its samples. The default is the empty one.

    ``buckets``: (bucket, samples in it), ascending, without empty buckets.
    ``count``: Of all samples.
    ``total``: Their sum.
    ``minimum``: The smallest; infinite without samples.
    ``maximum``: The largest; minus infinity without samples.
    """

    buckets: tuple[tuple[int, int], ...] = ()
    count: int = 0
    total: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """Estimate the sample of rank ``floor(q * (count - 1))``; None without samples.

        Errors: ``ValueError`` for ``q`` outside 0..1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile lies within 0..1, not {q}")
        rank = math.floor(q * (self.count - 1))
        seen = 0
        for bucket, samples in self.buckets:
            seen += samples
            if seen > rank:
                return min(max(_middle(bucket), self.minimum), self.maximum)
        return None

    def merge(self, other: Histogram) -> Histogram:
        """The distribution of both sets of samples."""
        buckets = Counter(dict(self.buckets))
        buckets.update(dict(other.buckets))
        return Histogram(
            buckets=tuple(sorted(buckets.items())),
            count=self.count + other.count,
            total=self.total + other.total,
            minimum=min(self.minimum, other.minimum),
            maximum=max(self.maximum, other.maximum),
        )

    def bars(self) -> tuple[list[float], list[float]]:
        """Edges of neighbouring bars, one more than bars, and the share of samples in each.

        Bars are 6 % wide. Empty lists without samples.
        """
        counts = Counter[int]()
        for bucket, samples in self.buckets:
            counts[bucket // _BUCKETS_PER_BAR] += samples
        if not counts:
            return [], []
        bars = range(min(counts), max(counts) + 1)
        # Bucket i ends at GAMMA**i, so the bar that begins with it begins at GAMMA**(i - 1).
        edges = [GAMMA ** (bar * _BUCKETS_PER_BAR - 1) for bar in (*bars, bars.stop)]
        return edges, [counts[bar] / self.count for bar in bars]

    def counts_within(self, bounds: Sequence[float]) -> list[int]:
        """How many samples are at most each of the ascending ``bounds``.

        A bucket that a bound cuts counts where its middle lies.
        """
        return [
            sum(samples for bucket, samples in self.buckets if _middle(bucket) <= bound)
            for bound in bounds
        ]


class RunningHistogram:
    """A distribution to which samples are added, in memory that does not grow with them."""

    __slots__ = ("_buckets", "_maximum", "_minimum", "_total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._total = 0.0
        self._minimum = math.inf
        self._maximum = -math.inf

    def add(self, value: float) -> None:
        """Count ``value``. Runs on the step's path."""
        bucket = math.ceil(math.log(value) * _SCALE) if value > 0 else _FIRST
        if not _FIRST <= bucket <= _LAST:
            bucket = min(max(bucket, _FIRST), _LAST)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self._total += value
        if value < self._minimum:
            self._minimum = value
        if value > self._maximum:
            self._maximum = value

    def freeze(self) -> Histogram:
        """The distribution so far."""
        # dict() copies in one step of the interpreter: safe beside a thread that adds.
        buckets = dict(self._buckets)
        return Histogram(
            buckets=tuple(sorted(buckets.items())),
            count=sum(buckets.values()),
            total=self._total,
            minimum=self._minimum,
            maximum=self._maximum,
        )


def _middle(bucket: int) -> float:
    """The value whose relative distance to both bounds of the bucket is ``RELATIVE_ERROR``."""
    return float(2 * GAMMA**bucket / (GAMMA + 1))


NUM_BINS = 256
_MODES = tuple(RuntimeMode)


@dataclass(frozen=True, slots=True)
class TokenSeries:
    """Tokens by runtime mode over step number, in a fixed number of bins.

    While steps are few each has its own bin; when the bins are full, neighbours merge and every bin
    then holds twice as many steps. Totals stay exact. The default is the empty series.

    ``num_steps``: Steps in the series.
    ``steps_per_bin``: A power of two; the last bin may hold fewer.
    ``tokens``: Unpadded tokens of each bin, equally many bins for each mode.
    """

    num_steps: int = 0
    steps_per_bin: int = 1
    tokens: Mapping[RuntimeMode, tuple[int, ...]] = field(
        default_factory=lambda: dict.fromkeys(_MODES, ())
    )

    @property
    def edges(self) -> tuple[int, ...]:
        """The step number at which each bin begins, and the one after the last bin's end."""
        return (*range(0, self.num_steps, self.steps_per_bin), self.num_steps)

    def tokens_per_step(self, mode: RuntimeMode) -> list[float]:
        """The mean of each bin, over all its steps."""
        bins = zip(self.tokens[mode], pairwise(self.edges), strict=True)
        return [tokens / (end - start) for tokens, (start, end) in bins]

    def merge(self, other: TokenSeries) -> TokenSeries:
        """Lay two series side by side, step n of one beside step n of the other (two ranks)."""
        steps_per_bin = max(self.steps_per_bin, other.steps_per_bin)
        mine, theirs = self._with_bins_of(steps_per_bin), other._with_bins_of(steps_per_bin)
        return TokenSeries(
            num_steps=max(self.num_steps, other.num_steps),
            steps_per_bin=steps_per_bin,
            tokens={
                mode: tuple(a + b for a, b in zip_longest(mine[mode], theirs[mode], fillvalue=0))
                for mode in _MODES
            },
        )

    def _with_bins_of(self, steps_per_bin: int) -> Mapping[RuntimeMode, Sequence[int]]:
        bins: dict[RuntimeMode, Sequence[int]] = dict(self.tokens)
        width = self.steps_per_bin
        while width < steps_per_bin:
            bins = {mode: _in_pairs(values) for mode, values in bins.items()}
            width *= 2
        return bins


class RunningTokenSeries:
    """A series to which steps are added, in memory that does not grow with them."""

    __slots__ = ("_bins", "_num_steps", "_shift")

    def __init__(self) -> None:
        self._num_steps = 0
        self._shift = 0
        self._bins: list[list[int]] = [[0] * NUM_BINS for _ in _MODES]

    def add(self, mode: RuntimeMode, num_tokens: int) -> None:
        """Count the next step. Runs on the step's path."""
        number = self._num_steps >> self._shift
        if number == NUM_BINS:
            self._bins = [_in_pairs(values) + [0] * (NUM_BINS // 2) for values in self._bins]
            self._shift += 1
            number = NUM_BINS // 2
        self._bins[mode][number] += num_tokens
        self._num_steps += 1

    def freeze(self) -> TokenSeries:
        """The series so far."""
        num_steps, shift = self._num_steps, self._shift
        used = -(-num_steps >> shift)
        return TokenSeries(
            num_steps=num_steps,
            steps_per_bin=1 << shift,
            tokens={mode: tuple(self._bins[mode][:used]) for mode in _MODES},
        )


def _in_pairs(values: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(values[::2], values[1::2], fillvalue=0)]


class StepKind(NamedTuple):
    """The facts by which steps are counted: there are few kinds, however many steps."""

    mode: RuntimeMode
    num_padded_tokens: int | None
    """The captured size that served the step; None for eager steps, which have none."""
    reason: Reason
    uniform: bool
    num_active_loras: int = 0
    num_captured_loras: int | None = None
    """The captured count of adapters that served the step; None for eager steps."""


_Kind = tuple[RuntimeMode, int | None, Reason, bool, int, int | None]
"""The fields of a ``StepKind``: a step compares a plain tuple."""


class StepCounts(NamedTuple):
    """Sums over steps.

    ``steps``: How many.
    ``uniform_steps``: Those of uniform batches.
    ``num_tokens``: Without padding.
    ``num_padded_tokens``: With it; eager steps have none.
    """

    steps: int = 0
    uniform_steps: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0

    def plus(self, other: StepCounts) -> StepCounts:
        both: StepCounts = merged(self, other)
        return both

    @property
    def padding_percent(self) -> float:
        """100 (padded - real) / padded; 0 without tokens."""
        padding = self.num_padded_tokens - self.num_tokens
        return 100 * padding / self.num_padded_tokens if self.num_padded_tokens else 0.0


class CaptureTotals(NamedTuple):
    """Sums over captured programs."""

    programs: int = 0
    graphs: int = 0
    eager_segments: int = 0
    nodes: int | None = 0
    """None where the device did not report them for every program."""
    seconds: float = 0.0
    pool_growth_bytes: int = 0
    exec_bytes: int = 0
    static_output_bytes: int = 0

    @property
    def graph_bytes(self) -> int:
        """Memory of the programs: the pool, static outputs included, and executables."""
        return self.pool_growth_bytes + self.exec_bytes


class VerificationTotals(NamedTuple):
    """Sums over replays that were compared with eager execution."""

    equal: int = 0
    different: int = 0
    max_abs_difference: float = 0.0
    """Infinite if a compared value was NaN."""

    def merge(self, other: VerificationTotals) -> VerificationTotals:
        return VerificationTotals(
            self.equal + other.equal,
            self.different + other.different,
            max(self.max_abs_difference, other.max_abs_difference),
        )


class LifetimeTotals(NamedTuple):
    """Sums over programs that were invalidated, retired or withdrawn.

    ``withdrawals``: Changes of kernels for which programs were withdrawn, perhaps none of them.
    """

    invalidated_programs: int = 0
    retired_generations: int = 0
    retired_programs: int = 0
    freed_bytes: int = 0
    withdrawals: int = 0
    withdrawn_programs: int = 0


def merged(mine: Any, other: Any) -> Any:
    """Two counts, or two collections of them, as one. None (unknown) and anything are None."""
    if isinstance(mine, Mapping):
        both = {name: merged(mine[name], other[name]) for name in mine if name in other}
        return {**mine, **other, **both}
    if hasattr(mine, "merge"):
        return mine.merge(other)
    if isinstance(mine, tuple):
        return type(mine)(*map(merged, mine, other))
    return None if mine is None or other is None else mine + other


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """A snapshot of ``StepMetrics``. The default is the empty one; merging it changes nothing.

    ``steps``: What steps did, by the facts that tell kinds of them apart.
    ``host_us``: Host time per step in microseconds, by what the step ran.
    ``series``: Tokens over time.
    ``captures``: What captures cost, by mode.
    ``failures``: Captures that failed, by the name of the error.
    ``num_alive_graphs``: Device graphs of all runners that are alive now.
    ``missing_keys``: Keys of all runners that no graph serves now, by reason.
    ``verifications``: Comparisons with eager execution.
    ``lifetimes``: What was invalidated and retired.
    ``memory_taken``: What captures took from the device, by part.
    ``split_steps``: Steps that were split into micro-batches.
    ``unsplit_reasons``: Steps that were not, by reason, where the plan splits any.
    """

    steps: Mapping[StepKind, StepCounts] = field(default_factory=dict)
    host_us: Mapping[RuntimeMode, Histogram] = field(default_factory=dict)
    series: TokenSeries = field(default_factory=TokenSeries)
    captures: Mapping[RuntimeMode, CaptureTotals] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    num_alive_graphs: int = 0
    missing_keys: Mapping[Reason, int] = field(default_factory=dict)
    verifications: VerificationTotals = field(default_factory=VerificationTotals)
    lifetimes: LifetimeTotals = field(default_factory=LifetimeTotals)
    memory_taken: MemoryTaken = field(default_factory=MemoryTaken)
    split_steps: int = 0
    unsplit_reasons: Mapping[UBatchReason, int] = field(default_factory=dict)

    def merge(self, other: Metrics) -> Metrics:
        """The numbers of both, as of two ranks that stepped side by side."""
        names = [item.name for item in fields(self)]
        return Metrics(**{n: merged(getattr(self, n), getattr(other, n)) for n in names})

    def total(self) -> StepCounts:
        """All steps together."""
        return reduce(StepCounts.plus, self.steps.values(), StepCounts())

    def _grouped(self, name_of: Callable[[StepKind], K]) -> dict[K, StepCounts]:
        found: dict[K, StepCounts] = {}
        for kind, counts in self.steps.items():
            found[name_of(kind)] = found.get(name_of(kind), StepCounts()).plus(counts)
        return found

    def by_mode(self) -> dict[RuntimeMode, StepCounts]:
        """Steps by what they ran; every mode has an entry, with zeros if it never ran."""
        none = dict.fromkeys(RuntimeMode, StepCounts())
        return none | self._grouped(lambda kind: kind.mode)

    def by_captured_size(self) -> dict[int, StepCounts]:
        """Graph steps by the captured size that served them, ascending."""
        found = self._grouped(lambda kind: kind.num_padded_tokens)
        return {size: found[size] for size in sorted(size for size in found if size is not None)}

    def by_lora_count(self) -> dict[tuple[int, int | None], StepCounts]:
        """Steps by (live, captured) count of adapters, ascending; captured is None if eager.

        Empty if no step had an adapter.
        """
        found = self._grouped(lambda kind: (kind.num_active_loras, kind.num_captured_loras))
        if not any(live for live, _ in found):
            return {}
        return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1] or 0)))

    def miss_reasons(self) -> dict[Reason, int]:
        """Eager steps by reason, most frequent first; they sum to the steps of mode NONE."""
        found = self._grouped(lambda kind: (kind.mode, kind.reason))
        eager = {why: n.steps for (mode, why), n in found.items() if mode is RuntimeMode.NONE}
        return dict(Counter(eager).most_common())

    def host_us_of_all(self) -> Histogram:
        """Host time per step in microseconds, whatever the step ran."""
        return reduce(Histogram.merge, self.host_us.values(), Histogram())

    def captures_of_all(self) -> CaptureTotals:
        """All captured programs together."""
        return reduce(merged, self.captures.values(), CaptureTotals())


class StepMetrics:
    """Counts every event it is called with.

    It runs on the step's path: a few dictionary look-ups, no list that grows, no lock. ``snapshot``
    may be called from another thread; its parts may then be one event apart.
    """

    def __init__(self) -> None:
        self._steps: dict[_Kind, list[int]] = {}
        self._host_us = [RunningHistogram() for _ in RuntimeMode]
        self._series = RunningTokenSeries()
        self._keys: dict[str, KeysChanged] = {}
        """The latest of each owner."""
        self._beside_steps = Metrics()
        """Of all events but steps, each of which is a summand."""
        self._split_steps = 0
        self._unsplit: dict[UBatchReason, int] = {}

    def __call__(self, event: Event, /) -> None:
        kind: _Kind
        if isinstance(event, Replayed):
            mode, reason, num_tokens, padded, _, uniform, host_us, live, captured, split, why = (
                event
            )
            kind = (mode, padded, reason, uniform, live, captured)
        elif isinstance(event, RanEager):
            mode = RuntimeMode.NONE
            reason, num_tokens, _, uniform, host_us, live, split, why = event
            kind = (mode, None, reason, uniform, live, None)
        elif isinstance(event, KeysChanged):
            self._keys[event.owner] = event
            return
        else:
            self._beside_steps = self._beside_steps.merge(_counted(event))
            return
        sums = self._steps.get(kind)
        if sums is None:
            self._steps[kind] = sums = [0, 0]
        sums[0] += 1
        sums[1] += num_tokens
        self._host_us[mode].add(host_us)
        self._series.add(mode, num_tokens)
        if why is not None:
            self._unsplit[why] = self._unsplit.get(why, 0) + 1
        elif split != 1:
            self._split_steps += 1

    def snapshot(self) -> Metrics:
        """The numbers so far, as a value that later events do not change."""
        # dict() copies in one step of the interpreter: safe beside a thread that counts.
        steps = {}
        for facts, (num_steps, num_tokens) in dict(self._steps).items():
            kind = StepKind(*facts)
            size, num_uniform = kind.num_padded_tokens, num_steps if kind.uniform else 0
            num_padded = num_tokens if size is None else num_steps * size
            steps[kind] = StepCounts(num_steps, num_uniform, num_tokens, num_padded)
        missing = Counter[Reason]()
        for owned in dict(self._keys).values():
            missing.update(dict(owned.missing))
        frozen = {mode: self._host_us[mode].freeze() for mode in RuntimeMode}
        return replace(
            self._beside_steps,
            steps=steps,
            host_us={mode: histogram for mode, histogram in frozen.items() if histogram.count},
            series=self._series.freeze(),
            num_alive_graphs=sum(owned.num_graphs for owned in dict(self._keys).values()),
            missing_keys=dict(missing),
            split_steps=self._split_steps,
            unsplit_reasons=dict(self._unsplit),
        )


def _counted(event: Event) -> Metrics:
    """What one event that is no step adds: nothing where it is not counted."""
    match event:
        case Captured():
            totals = CaptureTotals(
                programs=1,
                graphs=event.num_graphs,
                eager_segments=event.num_eager,
                nodes=event.num_nodes,
                seconds=event.seconds,
                pool_growth_bytes=event.pool_growth_bytes,
                exec_bytes=event.exec_bytes,
                static_output_bytes=event.static_output_bytes,
            )
            return Metrics(captures={event.mode: totals})
        case CaptureEnded(memory=taken):
            return Metrics(memory_taken=taken)
        case CaptureFailed(error=error):
            return Metrics(failures={error: 1})
        case PaddingVerified(equal=equal) | Verified(mode=RuntimeMode.NONE, equal=equal):
            # Its difference is that of two kernels, which no run in a graph adds to.
            return Metrics(verifications=VerificationTotals(int(equal), int(not equal)))
        case Verified(equal=equal, max_abs_difference=difference):
            largest = math.inf if math.isnan(difference) else difference
            return Metrics(verifications=VerificationTotals(int(equal), int(not equal), largest))
        case Invalidated(num_programs=programs):
            return Metrics(lifetimes=LifetimeTotals(programs))
        case Retired(num_programs=programs, freed_bytes=freed):
            return Metrics(lifetimes=LifetimeTotals(0, 1, programs, freed))
        case Withdrawn(num_programs=programs):
            return Metrics(lifetimes=LifetimeTotals(withdrawals=1, withdrawn_programs=programs))
    return Metrics()

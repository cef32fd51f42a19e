"""Distributions of durations in bounded memory: log-spaced buckets with exact totals beside them.

Bucket ``i`` holds the values in ``(GAMMA**(i-1), GAMMA**i]``; the value half-way (harmonically)
between its bounds is at most ``RELATIVE_ERROR`` away from every value in it. Histograms of two
ranks or two runs merge by adding buckets, with nothing lost.

Source: DDSketch (Masson, Rim, Lee; VLDB 2019), with a fixed range in place of collapsing buckets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

RELATIVE_ERROR = 0.01
"""Of a quantile, against the sample of that rank, for samples within ``RANGE``."""

RANGE = (1e-3, 1e9)
"""Samples outside share the outermost bucket of their side. In microseconds: 1 ns to 1,000 s."""

GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_SCALE = 1 / math.log(GAMMA)
_FIRST, _LAST = (math.ceil(math.log(bound) * _SCALE) for bound in RANGE)


@dataclass(frozen=True, slots=True)
class Histogram:
    """A finished distribution. The default is the empty one, which changes nothing in a merge."""

    buckets: tuple[tuple[int, int], ...] = ()
    """(bucket, samples in it), ascending, without empty buckets."""
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

    def bars(self, buckets_per_bar: int = 3) -> tuple[list[float], list[float]]:
        """Edges of neighbouring bars, one more than bars, and the share of samples in each.

        The default bars are 6 % wide. Empty lists without samples.
        """
        counts: dict[int, int] = {}
        for bucket, samples in self.buckets:
            bar = bucket // buckets_per_bar
            counts[bar] = counts.get(bar, 0) + samples
        if not counts:
            return [], []
        bars = range(min(counts), max(counts) + 1)
        # Bucket i ends at GAMMA**i, so the bar that begins with it begins at GAMMA**(i - 1).
        edges = [GAMMA ** (bar * buckets_per_bar - 1) for bar in (*bars, bars.stop)]
        return edges, [counts.get(bar, 0) / self.count for bar in bars]

    def counts_within(self, bounds: Sequence[float]) -> list[int]:
        """How many samples are at most each of the ascending ``bounds``.

        A bucket that a bound cuts counts where its middle lies.
        """
        return [
            sum(samples for bucket, samples in self.buckets if _middle(bucket) <= bound)
            for bound in bounds
        ]


class RunningHistogram:
    """A distribution that grows by one sample at a time; its memory does not grow with them."""

    __slots__ = ("_buckets", "_count", "_maximum", "_minimum", "_total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._count = 0
        self._total = 0.0
        self._minimum = math.inf
        self._maximum = -math.inf

    def add(self, value: float) -> None:
        """Count ``value``. Runs on the step's path."""
        bucket = math.ceil(math.log(value) * _SCALE) if value > 0 else _FIRST
        if not _FIRST <= bucket <= _LAST:
            bucket = min(max(bucket, _FIRST), _LAST)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self._count += 1
        self._total += value
        if value < self._minimum:
            self._minimum = value
        if value > self._maximum:
            self._maximum = value

    def freeze(self) -> Histogram:
        """The distribution so far."""
        # dict() copies in one step of the interpreter: safe beside a thread that adds.
        return Histogram(
            buckets=tuple(sorted(dict(self._buckets).items())),
            count=self._count,
            total=self._total,
            minimum=self._minimum,
            maximum=self._maximum,
        )


def _middle(bucket: int) -> float:
    """The value whose relative distance to both bounds of the bucket is ``RELATIVE_ERROR``."""
    return float(2 * GAMMA**bucket / (GAMMA + 1))

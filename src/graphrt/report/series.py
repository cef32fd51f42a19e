"""Tokens by runtime mode over step number, in a fixed number of bins.

While steps are few each has its own bin; when the bins are full, neighbours merge and every bin
stands for twice as many steps. Totals stay exact however long a run is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from graphrt.batch import RuntimeMode

NUM_BINS = 256
_MODES = tuple(RuntimeMode)


@dataclass(frozen=True, slots=True)
class TokenSeries:
    """A finished series. The default is the empty one, which changes nothing in a merge."""

    num_steps: int = 0
    steps_per_bin: int = 1
    """A power of two; the last bin may hold fewer."""
    tokens: Mapping[RuntimeMode, tuple[int, ...]] = field(
        default_factory=lambda: dict.fromkeys(_MODES, ())
    )
    """Unpadded tokens of each bin, equally many bins for each mode."""

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
    """A series that grows by one step at a time."""

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

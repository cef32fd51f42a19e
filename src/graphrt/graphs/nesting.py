"""Keeps programs of one library from running inside each other: they share the memory of a pool.

Between two graphs of a program, while an eager segment runs, that memory is live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graphrt.errors import NestedReplayError


@dataclass(slots=True, eq=False)
class ReplayInProgress:
    """Which program of a library is between its graphs, if one is.

    Programs with eager segments ask and say so at each replay. A program of a single graph asks
    once: from then on its replay is the bare launch, until ``begin`` makes it ask again.
    """

    title: str | None = None
    unasking: set[Callable[[], None]] = field(default_factory=set)
    """Of each program that asked, and now replays without asking: what makes it ask again."""

    def begin(self, title: str) -> None:
        """Say that ``title`` runs eager segments now. Errors: ``NestedReplayError``."""
        if self.title is not None:
            raise self.refusal(title)
        self.title = title
        for ask_again in self.unasking:
            ask_again()
        self.unasking.clear()

    def end(self) -> None:
        self.title = None

    def require_none(self, what: str) -> None:
        """Raise ``NestedReplayError`` if ``what`` happens inside an eager segment."""
        if self.title is not None:
            raise self.refusal(what)

    def refusal(self, what: str) -> NestedReplayError:
        return NestedReplayError(
            what,
            expected="no program of its library in the middle of a replay or capture, because "
            "all of them share memory",
            found=f"an eager segment of {self.title}",
            do="run it eagerly there (ForwardContext mode NONE), do it between two steps, or "
            "capture it with a library of its own on the same device: GraphLibrary(library.device)",
        )

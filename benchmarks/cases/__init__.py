"""The cases, by number."""

from __future__ import annotations

from benchmarks.cases import dispatch
from benchmarks.harness import Case


def all_cases() -> list[Case]:
    """Every case there is, CPU first."""
    return [*dispatch.CASES]

"""The cases, by number."""

from __future__ import annotations

from benchmarks.cases import dispatch, program, replay, wrapper
from benchmarks.harness import Case


def all_cases() -> list[Case]:
    """Every case there is, CPU first."""
    return [*dispatch.CASES, *wrapper.CASES, *program.CASES, *replay.CASES]

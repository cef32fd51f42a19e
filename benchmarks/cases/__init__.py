"""The cases, by number."""

from __future__ import annotations

from benchmarks.cases import (
    agreement,
    capture,
    compiled,
    dispatch,
    engine,
    entry,
    memory,
    never_slower,
    overlap,
    primitives,
    program,
    replay,
    serving,
    staging,
    step,
    tails,
    ubatch,
    wrapper,
)
from benchmarks.harness import Case

MODULES = (
    dispatch,
    agreement,
    step,
    wrapper,
    ubatch,
    program,
    replay,
    entry,
    primitives,
    capture,
    staging,
    memory,
    never_slower,
    overlap,
    compiled,
    tails,
    engine,
    serving,
)


def all_cases() -> list[Case]:
    """Every case there is, CPU first."""
    return [case for module in MODULES for case in module.CASES]

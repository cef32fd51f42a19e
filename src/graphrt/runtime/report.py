"""What a runtime says of itself: what is captured, what is not and why, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from graphrt.batch import BatchDescriptor, MissReason, RuntimeMode
from graphrt.config import Resolved
from graphrt.graphs import GraphMemory, Program
from graphrt.runtime.admission import Key


class CapturedGraph(NamedTuple):
    """One program of the report: what it is and what it cost."""

    mode: RuntimeMode
    key: BatchDescriptor
    state: str
    num_graphs: int
    num_gaps: int
    seconds: float
    """The capture alone; warm-ups and verification are in the report's ``capture_seconds``."""
    memory: GraphMemory


class RuntimeReport(NamedTuple):
    """What is captured, what is not and why, and what it costs."""

    device: str
    resolved: Resolved
    graphs: tuple[CapturedGraph, ...]
    missing: Mapping[Key, MissReason]
    """Keys of the plan that no graph serves now."""
    failures: Mapping[Key, str]
    capture_seconds: float
    """Warm-ups, captures and first verified replays together."""
    graph_bytes: int
    """Pools, slots in them, and executables."""


def captured_graphs(
    programs: Mapping[Key, Program], seconds: Mapping[Key, float]
) -> tuple[CapturedGraph, ...]:
    return tuple(
        CapturedGraph(
            mode=mode,
            key=key,
            state=program.state,
            num_graphs=program.num_graphs,
            num_gaps=program.num_gaps,
            seconds=seconds.get((mode, key), 0.0),
            memory=program.memory,
        )
        for (mode, key), program in programs.items()
    )

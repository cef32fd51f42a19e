"""What a runner says of itself: what is captured, what is not and why, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from graphrt.batch import BatchDescriptor, Reason, RuntimeMode
from graphrt.graphs import Entry, GraphMemory, Key


class CapturedGraph(NamedTuple):
    """One program of the report: what it is and what it cost."""

    mode: RuntimeMode
    key: BatchDescriptor
    state: str
    """``captured``, ``ready``, ``invalid`` or ``retired``; see ``Program.state``."""
    num_graphs: int
    num_eager: int
    seconds: float
    """The capture alone; warm-ups and verification are in the report's ``capture_seconds``."""
    memory: GraphMemory
    is_observed: bool
    """True if the capture learned what its graphs touch outside the pool. False: nothing has
    checked that this program writes only what is guarded or declared (``observe="always"`` has)."""
    padding: str
    """How padded batches were compared with eager runs of the batch as it is; empty if never."""


class RunnerReport(NamedTuple):
    """What is captured, what is not and why, and what it costs."""

    device: str
    graphs: tuple[CapturedGraph, ...]
    missing: Mapping[Key, Reason]
    """Keys that no graph serves now."""
    failures: Mapping[Key, str]
    capture_seconds: float
    """Warm-ups, captures and first verified replays together."""
    graph_bytes: int
    """Pools, static outputs in them, and executables of the library."""


def captured_graphs(entries: Iterable[Entry]) -> tuple[CapturedGraph, ...]:
    """One row for each entry that has a program, valid or not."""
    return tuple(
        CapturedGraph(
            mode=entry.mode,
            key=entry.key,
            state=entry.program.state,
            num_graphs=entry.program.num_graphs,
            num_eager=entry.program.num_eager,
            seconds=entry.seconds,
            memory=entry.program.memory,
            is_observed=entry.program.is_observed,
            padding=entry.padding,
        )
        for entry in entries
        if entry.program is not None
    )

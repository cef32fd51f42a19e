"""What happened, as small values; counters, tables and logs are observers of this one stream.

Fields are numbers with units and members of closed sets, so that they can be metric labels.
Names and fields are public: a change goes into the changelog.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from graphrt.batch import BatchDescriptor, MissReason, RuntimeMode


class Captured(NamedTuple):
    """A program was captured and entered the library."""

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    num_graphs: int
    num_gaps: int
    num_nodes: int | None
    seconds: float
    pool_growth_bytes: int
    exec_bytes: int
    slot_bytes: int
    external_bytes: int
    display: bool


class CaptureFailed(NamedTuple):
    """A capture failed or was over budget; the key runs eager."""

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    error: str
    message: str


class Verified(NamedTuple):
    """A replay was compared with eager execution of the same inputs."""

    mode: RuntimeMode
    key: BatchDescriptor
    equal: bool
    max_abs_difference: float


class Invalidated(NamedTuple):
    """Programs of ``owner`` became invalid because the named externals moved."""

    owner: str
    num_programs: int
    names: tuple[str, ...]


class Retired(NamedTuple):
    """A generation was retired and its memory given back."""

    generation: int
    num_programs: int
    freed_bytes: int


class Replayed(NamedTuple):
    """A step was served by a graph."""

    mode: RuntimeMode
    reason: MissReason
    num_tokens: int
    num_padded_tokens: int
    num_reqs: int
    uniform: bool
    host_us: float


class RanEager(NamedTuple):
    """A step ran eager; ``reason`` is a miss."""

    reason: MissReason
    num_tokens: int
    num_reqs: int
    uniform: bool
    host_us: float


Event = Captured | CaptureFailed | Verified | Invalidated | Retired | Replayed | RanEager


class Observer(Protocol):
    """Receives every event, in order, on the thread that caused it.

    It runs on the step's path: it must not block, and what it raises reaches the step's caller.
    """

    def __call__(self, event: Event, /) -> None: ...

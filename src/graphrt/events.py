"""Events: small values that counters, tables and logs observe, all in one stream.

Fields are numbers with units and members of closed sets, so that they can be metric labels.
Names and fields are public: a change goes into the changelog.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from graphrt.batch import BatchDescriptor, Reason, RuntimeMode


class Captured(NamedTuple):
    """A program was captured and registered in the library."""

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    num_graphs: int
    num_eager: int
    num_nodes: int | None
    seconds: float
    pool_growth_bytes: int
    exec_bytes: int
    static_output_bytes: int
    external_bytes: int


class CaptureFailed(NamedTuple):
    """A capture failed or did not fit the budget; the key runs eager."""

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


class PaddingVerified(NamedTuple):
    """A padded replay was compared with the unpadded batch, and with other rows as padding."""

    mode: RuntimeMode
    key: BatchDescriptor
    equal: bool
    max_abs_difference: float
    """From the unpadded batch, whose kernels may sum in another order."""
    num_ties: int
    """Choices that differ between elements equal within the tolerance."""


class Invalidated(NamedTuple):
    """Programs of ``owner`` became invalid because the named tensors they read have moved."""

    owner: str
    num_programs: int
    names: tuple[str, ...]


class Retired(NamedTuple):
    """A generation was retired and its memory freed."""

    generation: int
    num_programs: int
    freed_bytes: int


class Replayed(NamedTuple):
    """A step replayed a graph. ``host_us``: time the runtime took on the host."""

    mode: RuntimeMode
    reason: Reason
    num_tokens: int
    num_padded_tokens: int
    num_reqs: int
    uniform: bool
    host_us: float


class RanEager(NamedTuple):
    """A step ran eager; ``reason`` is a miss. ``host_us`` as in ``Replayed``."""

    reason: Reason
    num_tokens: int
    num_reqs: int
    uniform: bool
    host_us: float


Event = (
    Captured
    | CaptureFailed
    | Verified
    | PaddingVerified
    | Invalidated
    | Retired
    | Replayed
    | RanEager
)


class Observer(Protocol):
    """Receives every event, in order, on the thread that caused it.

    It runs within the step: it must not block, and an exception in it reaches the step's caller.
    """

    def __call__(self, event: Event, /) -> None: ...

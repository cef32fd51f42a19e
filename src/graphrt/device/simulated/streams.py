"""Logical streams: kernels run in the order they were recorded; vector clocks say what was ordered.

Each stream counts its operations. A mark is a copy of everything the stream is known to come
after; waiting for it merges that knowledge. Two accesses to the same bytes race when neither
stream knew of the other's access and one of the two wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from graphrt.errors import StreamRaceError

if TYPE_CHECKING:
    from graphrt.device.simulated.window import Window


class SimulatedStream:
    """A logical queue. Compared by identity."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.window: Window | None = None
        """The window this stream is part of, while that is open."""
        self.clock: dict[SimulatedStream, int] = {self: 0}
        """How far into each stream the next operation here is known to come after."""

    @property
    def name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"SimulatedStream({self._name!r})"

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def learn(self, clock: dict[SimulatedStream, int]) -> None:
        for stream, ticks in clock.items():
            if ticks > self.clock.get(stream, 0):
                self.clock[stream] = ticks


class SimulatedMark(NamedTuple):
    """A point in a stream."""

    stream: SimulatedStream
    clock: dict[SimulatedStream, int]
    window: Window | None


class Access(NamedTuple):
    """One recorded touch of the bytes ``start`` to ``end``."""

    start: int
    end: int
    written: bool
    operation: str
    source: str
    tick: int


class RaceDetector:
    """The accesses of one window, by stream.

    It is told nothing before the first mark of the window: until then there is one stream, and
    whatever forks later comes after it.
    """

    def __init__(self) -> None:
        self._accesses: dict[SimulatedStream, dict[tuple[int, int, bool], Access]] = {}

    def record(self, stream: SimulatedStream, access: Access) -> None:
        """Errors: ``StreamRaceError`` naming both operations."""
        for other, accesses in self._accesses.items():
            if other is stream:
                continue
            known = stream.clock.get(other, 0)
            for earlier in accesses.values():
                if (
                    earlier.tick > known
                    and earlier.start < access.end
                    and access.start < earlier.end
                    and (earlier.written or access.written)
                ):
                    raise _race(other, earlier, stream, access)
        # The latest touch of the same bytes is the one that others must come after.
        mine = self._accesses.setdefault(stream, {})
        mine[access.start, access.end, access.written] = access


def _race(
    other: SimulatedStream, earlier: Access, stream: SimulatedStream, access: Access
) -> StreamRaceError:
    def touch(one: Access, on: SimulatedStream) -> str:
        verb = "writes" if one.written else "reads"
        return f"{one.operation} {verb} them on stream {on.name!r} at {one.source}"

    start, end = max(earlier.start, access.start), min(earlier.end, access.end)
    return StreamRaceError(
        f"two streams touch the same {end - start} bytes and nothing orders them",
        expected="a mark on one stream and a wait for it on the other, between the two",
        found=f"{touch(earlier, other)}; {touch(access, stream)}",
        do=f"order the second after the first: device.order({stream.name!r}, {other.name!r}).",
    )

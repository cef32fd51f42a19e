"""Logical streams: kernels run in the order they were recorded; vector clocks say what was ordered.

Each stream counts its operations. A mark is a copy of everything the stream is known to come
after; waiting for it merges that knowledge. Two accesses to the same bytes race when neither
stream knew of the other's access and one of the two wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from graphrt.errors import UnjoinedStreamError
from graphrt.source import Source


class SimulatedStream:
    """A logical queue. Compared by identity."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.recording: RecordedStreams | None = None
        """The open recording that this stream belongs to."""
        self.clock: dict[SimulatedStream, int] = {self: 0}
        """How far into each stream the next operation here is known to come after."""

    def __repr__(self) -> str:
        return f"SimulatedStream({self.name!r})"

    def mark(self) -> SimulatedMark:
        if self.recording is not None:
            self.recording.checks_races = True
        return SimulatedMark(self, dict(self.clock), self.recording)

    def wait(self, mark: SimulatedMark) -> None:
        """Errors: ``UnjoinedStreamError`` for a mark of another recording, or of none."""
        recording = mark.recording
        if recording is not None and not recording.is_open:
            raise self._crosses(mark, f"a mark that was taken in the closed {recording.label!r}")
        if recording is not None and self.recording is None:
            recording.add(self)
        elif recording is not self.recording:
            raise self._crosses(mark, "a mark that was taken outside this recording")
        for stream, ticks in mark.clock.items():
            if ticks > self.clock.get(stream, 0):
                self.clock[stream] = ticks

    def _crosses(self, mark: SimulatedMark, found: str) -> UnjoinedStreamError:
        return UnjoinedStreamError(
            f"stream {self.name!r} waits across the edge of a recording",
            expected="marks taken and waited for inside the same recording, or both outside",
            found=f"{found}, on stream {mark.stream.name!r}",
            do="take the mark again on this side of the edge.",
        )


class SimulatedMark(NamedTuple):
    """A point in a stream."""

    stream: SimulatedStream
    clock: dict[SimulatedStream, int]
    recording: RecordedStreams | None


@dataclass(eq=False, repr=False)
class RecordedStreams:
    """The streams of one recording."""

    label: str
    stream: SimulatedStream
    is_open: bool = True
    checks_races: bool = False
    """True from the first mark on. Until then there is one stream, and no race."""
    _joined_at: dict[SimulatedStream, int] = field(default_factory=dict)
    """How far each stream was when it came in."""

    def __post_init__(self) -> None:
        self.add(self.stream)

    def add(self, stream: SimulatedStream) -> None:
        stream.recording = self
        self._joined_at[stream] = stream.clock[stream]

    def issue(self, stream: SimulatedStream, operation: str, source: Source) -> None:
        """Count one operation. ``UnjoinedStreamError`` on a stream that is not recorded."""
        if stream.recording is not self:
            raise UnjoinedStreamError(
                f"{operation} was issued on stream {stream.name!r}, which is not being recorded",
                expected=f"the capture stream {self.stream.name!r}, or one that waits for it",
                found=f"stream {stream.name!r} at {source.with_text}",
                do="fork it inside the recording: device.order(side_stream, capture_stream).",
                operation=operation,
                source=source.with_text,
            )
        stream.clock[stream] += 1

    def check_joined(self) -> None:
        """Errors: ``UnjoinedStreamError`` for work that the capture stream does not wait for."""
        for stream, ticks in self._joined_at.items():
            if stream.clock[stream] > max(ticks, self.stream.clock.get(stream, 0)):
                raise UnjoinedStreamError(
                    f"stream {stream.name!r} was not joined before the end of the recording",
                    expected=f"the capture stream {self.stream.name!r} to wait for its last work",
                    found=f"work on {stream.name!r} that nothing waits for",
                    do=f"device.order({self.stream.name!r}, {stream.name!r}) before the end.",
                )

    def close(self) -> None:
        self.is_open = False
        for stream in self._joined_at:
            stream.recording = None


class CallingThread:
    """What the calling thread does on one device: its stream, and whether it records."""

    def __init__(self) -> None:
        self.default = SimulatedStream("default")
        """The stream of a thread that has entered no other."""
        self._stream: ContextVar[SimulatedStream] = ContextVar("stream", default=self.default)
        self._recording: ContextVar[RecordedStreams | None] = ContextVar("recording", default=None)

    @property
    def stream(self) -> SimulatedStream:
        return self._stream.get()

    @contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        before = self.stream
        self._stream.set(stream)
        try:
            yield
        finally:
            self._stream.set(before)

    def is_capturing(self) -> bool:
        recording = self._recording.get()
        # A copied context still names a recording that has ended.
        return recording is not None and recording.is_open

    def set_recording(self, recording: RecordedStreams | None) -> None:
        self._recording.set(recording)

    @contextmanager
    def join(self, recording: RecordedStreams) -> Iterator[None]:
        """Work for ``recording``, on its stream unless the thread is on one that it forked."""
        before = self._recording.get()
        self._recording.set(recording)
        try:
            with self.use(self.stream if self.stream.recording is recording else recording.stream):
                yield
        finally:
            self._recording.set(before)

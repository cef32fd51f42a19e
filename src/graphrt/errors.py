"""Every error graphrt raises, and the tree they form.

::

    GraphrtError
      ConfigError, ContextError           bad configuration | matching mode without a key
      BatchError                          what was given describes no batch
      TraceError                          a traffic file that cannot be read
      MissError                           strict mode: the step would run eager
      VerificationError                   a replay and eager execution disagree
      CaptureError                        a capture did not complete
        CaptureOutsideScopeError          unseen key, no scope in the caller's context
        CaptureInProgressError            second scope or window; close with a scope open
        AmbientError                      warm-up and capture differ in stream, modes, flags
        ForbiddenOperationError           host read, data-dependent size, resize or rebind
        UnsupportedOperationError         simulated only: no fake kernel, no out_meta, no CPU double
        UnrecordedCodeError               compiled code outside an opaque node
        UnjoinedStreamError               a stream or event crosses the end of a window
        EmptyCaptureError                 nothing was recorded
        EscapedAllocationError            window memory kept by something that is no output
        LateInitError                     marked initialisation ran inside a window
        MutatedInputError                 graph writes a static buffer not declared written
        BreakError                        break point under Dynamo; wrapper inside a gap
        StateAdvancedError                a warm-up or gap changed undeclared state
        GraphMemoryError                  budget, graph count, out of memory
        CaptureFuseError                  three consecutive failures
      ReplayError
        StaleInputError                   structure, address, shape, stride or dtype changed
        UnkeyedValueError                 a host value changed that is not in the key
        BreakOutputError                  a gap's result no longer fits its slot
        InvalidProgramError               an external moved since capture
        StaleOutputError                  leased output read after the next replay
        DeviceReplayError                 the device refused or failed the launch
      StaticBufferError                   PaddingRequiredError | InputMismatchError
                                          | FrozenBufferError
      LifetimeError                       LibraryClosedError | SuspendedError | RetiredProgramError
                                          | ForkedProcessError
      StreamRaceError                     unordered access from two streams
      ReportError                         a report that cannot be written
      MissingExtraError                   an optional library that is not installed
      CommandError                        a registered command that cannot be loaded

A message has three parts: what was expected, what was found, what to do. Errors hold strings and
numbers only, never tensors, so that keeping one keeps nothing else alive. Foreign errors stay
reachable as ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from graphrt.batch import MissReason


class GraphrtError(Exception):
    """Root of the tree: a subject line and the three parts every message has."""

    def __init__(
        self, subject: str = "", *, expected: str = "", found: str = "", do: str = ""
    ) -> None:
        super().__init__(subject)
        self.subject = subject
        self.expected = expected
        self.found = found
        self.do = do

    def header(self) -> str:
        """The first line of the message."""
        return self.subject

    def __str__(self) -> str:
        parts = (("expected:", self.expected), ("found:   ", self.found), ("do:      ", self.do))
        lines = [f"  {name} {text}" for name, text in parts if text]
        return "\n".join([line for line in (self.header(),) if line] + lines)


class ConfigProblem(NamedTuple):
    """One thing wrong with a configuration."""

    field: str
    found: str
    accepted: str


class ConfigError(GraphrtError, ValueError):
    """A configuration that cannot be honoured. ``problems`` lists everything wrong with it."""

    def __init__(
        self,
        subject: str = "",
        *,
        expected: str = "",
        found: str = "",
        do: str = "",
        problems: Sequence[ConfigProblem] = (),
    ) -> None:
        super().__init__(subject, expected=expected, found=found, do=do)
        self.problems = tuple(problems)


class ContextError(GraphrtError, RuntimeError):
    """The forward context does not say what the wrapper needs."""


class BatchError(GraphrtError, ValueError):
    """What was given describes no batch."""


class TraceError(GraphrtError, ValueError):
    """A traffic file that cannot be read: names file and row (1-based, as an editor counts)."""


class MissError(GraphrtError, RuntimeError):
    """Strict mode: the step would have run eager. ``reason`` says why."""

    def __init__(
        self,
        subject: str = "",
        *,
        expected: str = "",
        found: str = "",
        do: str = "",
        reason: MissReason | None = None,
    ) -> None:
        super().__init__(subject, expected=expected, found=found, do=do)
        self.reason = reason


class VerificationError(GraphrtError, RuntimeError):
    """A replay and eager execution of the same inputs disagree."""


class CaptureError(GraphrtError, RuntimeError):
    """A capture did not complete; nothing was registered.

    The place is filled in on the way up: the device knows operation and source, the builder owner,
    mode, key and segment.
    """

    def __init__(
        self,
        subject: str = "",
        *,
        expected: str = "",
        found: str = "",
        do: str = "",
        operation: str = "",
        source: str = "",
    ) -> None:
        super().__init__(subject, expected=expected, found=found, do=do)
        self.owner = ""
        self.mode = ""
        self.key = ""
        self.segment: int | None = None
        self.operation = operation
        self.module_path = ""
        self.source = source

    def locate(
        self,
        *,
        owner: str = "",
        mode: str = "",
        key: str = "",
        segment: int | None = None,
        module_path: str = "",
    ) -> None:
        """Fill in what is not known yet. The first word wins: inner rooms know better."""
        self.owner = self.owner or owner
        self.mode = self.mode or mode
        self.key = self.key or key
        self.segment = segment if self.segment is None else self.segment
        self.module_path = self.module_path or module_path

    def header(self) -> str:
        segment = "" if self.segment is None else f"segment {self.segment}"
        place = ", ".join(
            part for part in (self.owner, self.mode, self.key, segment, self.module_path) if part
        )
        return ": ".join(part for part in (place, self.subject) if part)


class CaptureOutsideScopeError(CaptureError):
    """An unseen key was met while nothing permits a capture."""


class CaptureInProgressError(CaptureError):
    """A scope or window is already open."""


class AmbientError(CaptureError):
    """Warm-up and capture ran under different streams, modes or flags."""


class ForbiddenOperationError(CaptureError):
    """An operation a graph cannot hold: it waits for the device, or its size depends on data."""


class UnsupportedOperationError(CaptureError):
    """The simulated device cannot record this operation."""


class UnrecordedCodeError(CaptureError):
    """Compiled code ran in a window outside an opaque node: a replay would skip it."""


class UnjoinedStreamError(CaptureError):
    """A stream or event crosses the end of a window."""


class EmptyCaptureError(CaptureError):
    """Nothing was recorded."""


class EscapedAllocationError(CaptureError):
    """Memory of the window is kept by something that is no output."""


class LateInitError(CaptureError):
    """Initialisation marked with ``forbid_in_capture`` ran inside a window."""


class MutatedInputError(CaptureError):
    """The graph writes a static buffer that is not declared ``written``."""


class BreakError(CaptureError):
    """A break point, or a wrapper, stands where it cannot."""


class StateAdvancedError(CaptureError):
    """A warm-up or gap changed state that nobody declared."""


class GraphMemoryError(CaptureError, MemoryError):
    """A budget, a graph count or the device's memory is exhausted."""


class CaptureFuseError(CaptureError):
    """Three consecutive captures failed; the rest is not attempted."""


class ReplayError(GraphrtError, RuntimeError):
    """A program cannot be replayed with what it was given."""


class StaleInputError(ReplayError):
    """An input is not the one that was captured."""


class UnkeyedValueError(ReplayError):
    """A host value changed that is not part of the key."""


class BreakOutputError(ReplayError):
    """A gap returned something that does not fit its slot."""


class InvalidProgramError(ReplayError):
    """A tensor the program reads has moved since its capture."""


class StaleOutputError(ReplayError):
    """A leased output was read after the next replay."""


class DeviceReplayError(ReplayError):
    """The device refused or failed a launch. It is never repeated eagerly."""


class StaticBufferError(GraphrtError, ValueError):
    """A static buffer was declared or filled wrongly."""


class PaddingRequiredError(StaticBufferError):
    """An integer or bool buffer was declared without saying what its padding holds."""


class InputMismatchError(StaticBufferError):
    """A staged value does not fit its buffer."""


class FrozenBufferError(StaticBufferError):
    """A workspace or resource grew after it was frozen."""


class LifetimeError(GraphrtError, RuntimeError):
    """Something is used outside its lifetime."""


class LibraryClosedError(LifetimeError):
    """The library was closed."""


class SuspendedError(LifetimeError):
    """The library is suspended."""


class RetiredProgramError(LifetimeError):
    """The program's generation was retired."""


class ForkedProcessError(LifetimeError):
    """The program belongs to the parent process."""


class StreamRaceError(GraphrtError, RuntimeError):
    """Two streams touch the same bytes and nothing orders them."""


class ReportError(GraphrtError, OSError):
    """A report cannot be written where it was asked for; what was there before is untouched."""


class MissingExtraError(GraphrtError, ImportError):
    """What was asked for needs an optional library. ``extra`` is the extra that brings it."""

    def __init__(self, purpose: str, *, extra: str, found: str) -> None:
        super().__init__(
            purpose,
            expected=f"the libraries of the extra [{extra}]",
            found=found,
            do=f"pip install 'graphrt[{extra}]'",
        )
        self.extra = extra


class CommandError(GraphrtError, RuntimeError):
    """A command that another package registered cannot be loaded; the others are unaffected."""

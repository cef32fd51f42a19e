"""Every error graphrt raises, and the tree they form.

::

    GraphrtError
      ConfigError                         a configuration that is not possible
      ContextError                        the forward context has a mode but no key
      BatchError                          arguments that describe no batch
      TraceError                          a traffic file that cannot be read
      MissError                           strict mode: the step would run eager
      ReentrantStepError                  a step or capture inside a step of the same runner
      VerificationError                   a replay and eager execution disagree
      CaptureError                        a capture did not complete
        CaptureOutsideScopeError          new key, but no capture scope is open here
        CaptureInProgressError            second scope or recording; close with a scope open
        CompileDuringCaptureError         level 1 would compile inside a recording
        EnvironmentMismatchError          warm-up and capture differ in stream, modes, flags
        ForbiddenOperationError           host read, data-dependent size, resize or rebind
        UnsupportedOperationError         simulated only: no fake kernel, out_meta or CPU version
        UnrecordedCodeError               compiled code outside an opaque node
        UnjoinedStreamError               a stream or event crosses the end of a recording
        EmptyCaptureError                 nothing was recorded
        EscapedAllocationError            graph memory is held by something that is no output
        LateInitError                     marked initialisation ran during a recording
        MutatedInputError                 graph writes a static buffer not declared written
        BreakError                        break point under Dynamo; wrapper in an eager segment
        StateAdvancedError                a callable writes what nobody guards or declared
        GraphMemoryError                  budget, graph count, out of memory
        TooManyFailuresError              three consecutive failures
        PeerFailedError                   the capture or the check failed on another rank
      CompileError                        levels 1 to 3: a trace failed, or no longer fits
        GraphBreakError                   code that cannot be traced, or depends on tensor values
        ShapeGuardError                   a branch on a size that varies
        SideEffectError                   traced code assigns what replays would not
        BackendError                      what compiles a piece raised
        SplittingOpError                  a splitting op that is unknown, or not in the graph
        ContractError                     arguments or modes other than those traced
        GuardAuditError                   something that the trace read has changed
        RecompileError                    compiled code would be traced again, or run uncompiled
      ReplayError
        StaleInputError                   structure, address, shape, stride, dtype or bits changed
        UnkeyedValueError                 a host value changed that is not in the key
        BreakOutputError                  an eager segment's result does not fit its static output
        NestedReplayError                 replay or capture inside an eager segment of its library
        InvalidProgramError               a tensor the program reads has moved since its capture
        StaleOutputError                  output view read after the next replay
        DeviceReplayError                 the device failed the launch
      StaticBufferError                   PaddingRequiredError | InputMismatchError
                                          | FrozenBufferError
      LifetimeError                       LibraryClosedError | SuspendedError | RetiredProgramError
                                          | ForkedProcessError
      StreamRaceError                     unordered access from two streams
      UBatchError                         a step split into micro-batches went wrong
        UBatchBusyError                   a second thread in the same split callable
        UBatchDeadlockError               no micro-batch has handed over for too long
        InputNotSliceableError            an argument that nothing says how to cut
        OutputsDifferError                micro-batches returned what cannot be put together
      RankError                           ranks that are to act as one do not
        RankDesyncError                   ranks are in different steps or captures
        PlanMismatchError                 ranks resolved different plans
        RankTimeoutError                  a rank did not come in time
        RankLostError                     a rank, or its connection, is gone
        AgreementInFlightError            a message before the last one's result was taken
      ReportError                         a report that cannot be written
      MissingExtraError                   an optional library that is not installed
      CommandError                        a registered command that cannot be loaded

A message has three parts: what was expected, what was found, what to do. Errors hold strings and
numbers only, never tensors, so that keeping one keeps nothing else alive. Foreign errors stay
reachable as ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from reprlib import Repr
from typing import NamedTuple


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


_REPR = Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxdict = 50
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200
"""Shows values in errors: of many items 50, of a long text 200 characters."""


def shown(value: object) -> str:
    """The ``repr`` of ``value``, cut where it is long or nested deep."""
    try:
        return _REPR.repr(value)
    except ValueError:
        return "an integer of thousands of digits"


def with_notes(error: BaseException) -> str:
    """What ``error`` says, and its notes: of a micro-batch, which one raised it."""
    return "\n".join([text_of(error), *getattr(error, "__notes__", ())])


def text_of(error: BaseException) -> str:
    """What ``error`` says, which code of a user's class may fail to tell."""
    try:
        return str(error)
    except Exception as unsaid:  # noqa: BLE001  The first error is the one to report.
        return f"its text raises {type(unsaid).__name__}"


@contextmanager
def noting(doing: str) -> Iterator[None]:
    """Around a call of the user's code: its errors and those of its kernels get ``doing`` as a
    note, other ones of ours say it anyway."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, GraphrtError) or isinstance(error, DeviceReplayError):
            error.add_note(doing)
        raise


class ConfigProblem(NamedTuple):
    """One thing wrong with a configuration.

    ``field``: Where: a path, as `compilation.level`.
    ``found``: What stands there.
    ``accepted``: What may.
    """

    field: str
    found: str
    accepted: str


class ConfigError(GraphrtError, ValueError):
    """A configuration that is not possible. ``problems`` lists everything wrong with it."""

    def __init__(
        self, subject: str = "", *, problems: Sequence[ConfigProblem] = (), **parts: str
    ) -> None:
        super().__init__(subject, **parts)
        self.problems = tuple(problems)


class ContextError(GraphrtError, RuntimeError):
    """The forward context has a mode for which it has no key."""


class BatchError(GraphrtError, ValueError):
    """Arguments that describe no batch."""


class TraceError(GraphrtError, ValueError):
    """A traffic file that cannot be read: names file and row (1-based, as an editor counts)."""


class MissError(GraphrtError, RuntimeError):
    """Strict mode: the step would have run eager. ``reason``, a ``Reason``, says why."""

    def __init__(self, subject: str = "", *, reason: IntEnum | None = None, **parts: str) -> None:
        super().__init__(subject, **parts)
        self.reason = reason


class ReentrantStepError(GraphrtError, RuntimeError):
    """A step or a capture was begun inside a step of the same runner."""


class VerificationError(GraphrtError, RuntimeError):
    """A replay and eager execution of the same inputs disagree."""


class ConfigWarning(UserWarning):
    """An option that can be honoured, and does not do what it seems to."""


class SideEffectWarning(UserWarning):
    """Traced code changes a global, which eager runs do and replays do not."""


class UnverifiedWarning(UserWarning):
    """A program serves although nothing could be compared with eager execution."""


class CaptureError(GraphrtError, RuntimeError):
    """A capture did not complete; nothing was registered.

    The place is filled in while the error propagates: the device sets operation and source, the
    recorder owner, mode, key and segment.
    """

    def __init__(
        self, subject: str = "", *, operation: str = "", source: str = "", **parts: str
    ) -> None:
        super().__init__(subject, **parts)
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
        """Set what is not set yet: inner calls, which come first, know the place better."""
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
    """A key without a graph was called, and no capture scope is open in this context."""


class CaptureInProgressError(CaptureError):
    """A capture scope or a recording is already open."""


class CompileDuringCaptureError(CaptureError):
    """Code would be compiled inside a recording: run each key once before it is captured."""


class EnvironmentMismatchError(CaptureError):
    """Warm-up and capture ran with different streams, modes or flags."""


class ForbiddenOperationError(CaptureError):
    """An operation a graph cannot hold: it waits for the device, or its size depends on data."""


class UnsupportedOperationError(CaptureError):
    """The simulated device cannot record this operation."""


class UnrecordedCodeError(CaptureError):
    """Compiled code ran in a recording outside an opaque node: a replay would skip it."""


class UnjoinedStreamError(CaptureError):
    """A stream or event crosses the end of a recording."""


class EmptyCaptureError(CaptureError):
    """Nothing was recorded."""


class EscapedAllocationError(CaptureError):
    """Memory allocated in a recording is held by something that is no output."""


class LateInitError(CaptureError):
    """Initialisation marked with ``forbid_in_capture`` ran during a recording."""


class MutatedInputError(CaptureError):
    """The graph writes a static buffer that is not declared ``written``."""


class BreakError(CaptureError):
    """A break point under Dynamo, or a wrapper inside an eager segment."""


class StateAdvancedError(CaptureError):
    """The callable writes a tensor that is neither guarded nor declared: ``source`` says where."""


class GraphMemoryError(CaptureError, MemoryError):
    """A budget, a graph count or the device's memory is exhausted."""


class TooManyFailuresError(CaptureError):
    """Three consecutive captures failed; the others are not attempted."""


class PeerFailedError(CaptureError):
    """The capture, or the check of a replay, failed on another rank: it is dropped on all."""


class CompileError(GraphrtError, RuntimeError):
    """A model could not be compiled, or its compiled form no longer fits. ``source``: the line."""

    def __init__(self, subject: str = "", *, source: str = "", **parts: str) -> None:
        super().__init__(subject, **parts)
        self.source = source


class GraphBreakError(CompileError):
    """Code that cannot be traced as one graph, or whose sizes or branches depend on values."""


class ShapeGuardError(CompileError):
    """A branch on the size of an axis: one trace cannot serve every size."""


class SideEffectError(CompileError):
    """Traced code assigns an attribute or changes a container, which a replay would not do."""


class BackendError(CompileError):
    """What compiles a piece, or the whole graph, raised: see ``__cause__``."""


class SplittingOpError(CompileError, ConfigError):
    """A name in ``splitting_ops`` is no operator, or none of them is in the traced graph."""

    problems = ()


class ContractError(CompileError):
    """Compiled code was called with other arguments, or under other modes, than it was traced."""


class GuardAuditError(CompileError):
    """Something that the trace read, and holds as a constant, has changed since."""


class RecompileError(CompileError):
    """Compiled code would be traced a second time, or run uncompiled."""


class ReplayError(GraphrtError, RuntimeError):
    """A program cannot be replayed with these inputs, or at all."""


class StaleInputError(ReplayError):
    """An input is not the one that was captured."""


class UnkeyedValueError(ReplayError):
    """A host value changed that is not part of the key."""


class BreakOutputError(ReplayError):
    """An eager segment returned something that does not fit its static output."""


class NestedReplayError(ReplayError):
    """A program was used inside an eager segment of another one, with which it shares memory, or
    a runner inside the recording of another one."""


class InvalidProgramError(ReplayError):
    """A tensor the program reads has moved since its capture."""


class StaleOutputError(ReplayError):
    """An output view was read after the next replay overwrote it."""


class DeviceReplayError(ReplayError):
    """The device failed a launch. The step is not repeated eagerly."""


class StaticBufferError(GraphrtError, ValueError):
    """A static buffer was declared or filled wrongly."""


class PaddingRequiredError(StaticBufferError):
    """An integer or bool buffer was declared without saying what its padding holds."""


class InputMismatchError(StaticBufferError):
    """A staged value does not fit its buffer."""


class FrozenBufferError(StaticBufferError):
    """A workspace or resource grew after it was frozen."""


class LifetimeError(GraphrtError, RuntimeError):
    """An object is used after it was closed, suspended, retired or forked."""


class LibraryClosedError(LifetimeError):
    """The library was closed."""


class SuspendedError(LifetimeError):
    """The library is suspended."""


class RetiredProgramError(LifetimeError):
    """The program's generation was retired."""


class ForkedProcessError(LifetimeError):
    """The program belongs to the parent process."""


class StreamRaceError(GraphrtError, RuntimeError):
    """Two streams access the same bytes and no event orders them."""


class UBatchError(GraphrtError, RuntimeError):
    """A step that is split into micro-batches went wrong."""


class UBatchBusyError(UBatchError):
    """A second thread called what already runs micro-batches."""


class UBatchDeadlockError(UBatchError):
    """No micro-batch has handed over for too long. ``found`` has what each of them was doing."""


class InputNotSliceableError(UBatchError, ValueError):
    """An argument as long as the batch, of which nothing says how it is cut."""


class OutputsDifferError(UBatchError, ValueError):
    """Micro-batches returned values that cannot be put together."""


class RankError(GraphrtError, RuntimeError):
    """Ranks that are to take the same decisions do not. ``missing``: those known to be absent."""

    def __init__(self, subject: str = "", *, missing: Sequence[int] = (), **parts: str) -> None:
        super().__init__(subject, **parts)
        self.missing = tuple(missing)


class RankDesyncError(RankError):
    """Ranks are in different rounds: one captures while another serves, or one is a step ahead."""


class PlanMismatchError(RankError):
    """Ranks resolved different plans: their graphs would not fit together."""


class RankTimeoutError(RankError):
    """A rank did not come in time. ``missing``: the ranks that answered no roll-call either."""


class RankLostError(RankError):
    """A rank, or the connection to it, is gone. ``missing``: the ranks that are known to be."""


class AgreementInFlightError(RankError):
    """A message was started before the result of the last one was taken."""


class ReportError(GraphrtError, OSError):
    """A report cannot be written at the given path; an older file there is unchanged."""


class MissingExtraError(GraphrtError, ImportError):
    """An optional library is missing. ``extra`` is the extra of graphrt that installs it."""

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


def copy_error(owner: object) -> ConfigError:
    """What copying and pickling raise."""
    return ConfigError(
        f"a copy of a {type(owner).__name__}",
        expected="one object, which owns graphs or compiled code",
        found="copy, deepcopy or pickle",
        do="make another one, or copy what it was made of",
    )

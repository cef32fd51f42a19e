"""Owns every program, pool, capture stream, slot and failure record of one runtime.

Two libraries share nothing. Teardown is explicit and in generations; nothing hangs on ``__del__``.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.device.base import Device, Pool, Stream
from graphrt.errors import (
    CaptureInProgressError,
    CaptureOutsideScopeError,
    ConfigError,
    ContextError,
    ForkedProcessError,
    GraphMemoryError,
    GraphrtError,
    LibraryClosedError,
    SuspendedError,
)
from graphrt.events import CaptureFailed, Event, Invalidated, Observer, Retired
from graphrt.graphs.buffers import BufferSet
from graphrt.graphs.externals import ExternalsReport
from graphrt.graphs.failures import FailureBook, FailureRecord
from graphrt.graphs.generation import Generation, Kind
from graphrt.graphs.program import Program
from graphrt.graphs.scope import CaptureScope
from graphrt.graphs.stale import StaleCheck
from graphrt.graphs.state import Resource, StateGuard, Workspace
from graphrt.graphs.table import ProgramTable


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphBudget:
    """What the programs of a library may cost together. None: no limit."""

    max_bytes: int | None = None
    """Pools and executables."""
    max_graphs: int | None = None
    """Device graphs; the device's own limit holds too."""


class GraphLibrary:
    """The programs of one runtime. One thread at a time uses it.

    ``pool``: handle of an existing pool for the first generation. ``generators``: random
    generators that captured callables use beside the default one. ``generation_size``: programs
    of a lazy generation. ``observer`` receives ``Captured``, ``CaptureFailed``, ``Invalidated``
    and ``Retired`` events. ``before_suspend``, ``after_resume``: hooks around a suspension.
    Errors: ``ConfigError`` for a ``generation_size`` below 1.
    """

    def __init__(
        self,
        device: Device,
        *,
        pool: Any = None,
        budget: GraphBudget | None = None,
        stale_check: StaleCheck = StaleCheck.IDENTITY,
        generators: Sequence[torch.Generator] = (),
        generation_size: int = 16,
        observer: Observer | None = None,
        before_suspend: Sequence[Callable[[], None]] = (),
        after_resume: Sequence[Callable[[], None]] = (),
    ) -> None:
        if generation_size < 1:
            raise ConfigError(
                "generation_size",
                expected="an integer >= 1",
                found=repr(generation_size),
                do="correct it",
            )
        self.device = device
        self.budget = budget or GraphBudget()
        self.stale_check = stale_check
        self.generators = tuple(generators)
        self.generation_size = generation_size
        self.num_cudagraph_captured = 0
        """Device graphs of successful captures so far; never decremented."""
        self.before_suspend = list(before_suspend)
        self.after_resume = list(after_resume)
        self._generations: list[Generation] = []
        self._observer = observer
        self._has_user_pool = pool is not None
        self._tables: dict[tuple[str, RuntimeMode], ProgramTable] = {}
        self._streams: list[Stream] = []
        self._buffers: list[BufferSet] = []
        self._reserved: list[tuple[Resource, BatchDescriptor]] = []
        self._failures = FailureBook(self._report_failure)
        # One permit: taking it is one atomic list operation, so two threads cannot both have it.
        self._permits = [object()]
        self._queued: list[Generation] = []
        self._refusal: Callable[[], GraphrtError] | None = None
        self._is_closed = False
        self._num_generations = 0
        # All generations capture on it, so that warm-ups prepared the stream that is captured. Its
        # name is ours alone: two libraries on one device share no stream.
        self._stream = device.stream(f"graphrt capture {id(self):x}")
        self._current: Generation | None = self.open_generation("first", pool)
        _refuse_in_children(self)

    # -- programs

    def program(self, owner: str | Any, mode: RuntimeMode, key: BatchDescriptor) -> Program | None:
        """Return the published program of an owner (a wrapper, or its name), or None."""
        name = owner if isinstance(owner, str) else owner.owner
        table = self._tables.get((name, mode))
        return None if table is None else table.view.get(key)

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every published program, by owner and mode in order of creation, then by capture."""
        return tuple(p for table in self._tables.values() for p in table.view.values())

    def new_table(self, name: str | None, mode: RuntimeMode, default: str) -> ProgramTable:
        """Make the table of a new owner. Names are unique per mode.

        Errors: ``ConfigError`` for a ``name`` that is taken; without one, ``default`` is numbered.
        """
        if name is not None and (name, mode) in self._tables:
            raise ConfigError(
                f"owner {name!r}",
                expected="a name no other wrapper of this library and mode has",
                found=f"a second {mode.name} wrapper",
                do="choose another name, or leave it out",
            )
        owner, number = name or default, 2
        while (owner, mode) in self._tables:
            owner, number = f"{default}#{number}", number + 1
        table = self._tables[owner, mode] = ProgramTable(owner, mode, self._refuse_missing)
        return table

    def publish(self, program: Program) -> None:
        """Put a program where its owner finds it. Called by scopes."""
        self._tables[program.owner, program.mode].publish(program)

    def drop(self, programs: Sequence[Program]) -> None:
        """Undo the newest captures: withdraw and reset them. Called by scopes, never later.

        Older programs are only ever retired with their whole generation.
        """
        for program in reversed(programs):
            self._withdraw(program)
            program.retire()
            for generation in self._generations:
                if program in generation.programs:
                    generation.programs.remove(program)

    # -- capture

    def capture_scope(
        self,
        state: StateGuard | None = None,
        sinks: Sequence[torch.Tensor] = (),
        holds: Sequence[torch.Tensor] = (),
        resources: Sequence[Resource | Workspace] = (),
        warmups: int = 1,
        on_error: Literal["raise", "skip"] = "raise",
        generation: Literal["current", "new", "lazy"] = "current",
        observe: Literal["capture", "none"] = "capture",
        allow_escape: Sequence[str] = (),
    ) -> CaptureScope:
        """Return the permission to capture, a context manager; see ``CaptureScope``."""
        return CaptureScope(
            self,
            state=state,
            sinks=sinks,
            holds=holds,
            resources=resources,
            warmups=warmups,
            on_error=on_error,
            generation=generation,
            observe=observe,
            allow_escape=allow_escape,
        )

    def claim_scope(self) -> None:
        """Take the one permit, or raise why there is none. Called by scopes."""
        self._refuse_if_unusable()
        try:
            self._permits.pop()
        except IndexError:
            raise CaptureInProgressError(
                "capture scope",
                expected="one open scope per library",
                found="a scope that is open already",
                do="leave it first; captures of one library run one after another",
            ) from None

    def release_scope(self) -> None:
        """Give the permit back and do what waited for it."""
        self._permits.append(object())
        queued, self._queued = self._queued, []
        for generation in queued:
            self._retire_now(generation)

    @property
    def has_open_scope(self) -> bool:
        return not self._permits

    def register_stream(self, stream: Stream) -> Stream:
        """Declare a side stream: it is joined at each end of a segment and forked at each begin."""
        if stream not in self._streams:
            self._streams.append(stream)
        return stream

    def stream(self, name: str) -> Stream:
        """The device's persistent stream of this name, registered as a side stream."""
        return self.register_stream(self.device.stream(name))

    @property
    def side_streams(self) -> tuple[Stream, ...]:
        return tuple(self._streams)

    def add_buffers(self, buffers: BufferSet) -> None:
        """Declare static buffers: graphs may write those declared ``written``, no others.

        ``close()`` drops them.
        """
        self._buffers.append(buffers)

    def reserve(self, resource: Resource, largest: BatchDescriptor) -> None:
        """Let a resource allocate for its largest key, once: graphs hold the addresses.

        Called by scopes.
        """
        for known, key in self._reserved:
            if known is resource and key == largest:
                return
        resource.reserve(largest)
        self._reserved.append((resource, largest))

    @property
    def static_buffers(self) -> tuple[BufferSet, ...]:
        return tuple(self._buffers)

    # -- failures and budget

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """What failed or was over budget, in order; never tried again until forgotten."""
        return self._failures.records

    @property
    def failure_book(self) -> FailureBook:
        return self._failures

    def forget_failures(self) -> None:
        """Let failed keys be tried again; closes the fuse."""
        self._failures.forget()

    @property
    def charged_bytes(self) -> int:
        """Bytes of all live pools and executables: what counts against the budget."""
        return sum(generation.charged_bytes for generation in self._generations)

    @property
    def num_graphs(self) -> int:
        """Device graphs that are alive."""
        return sum(generation.num_graphs for generation in self._generations)

    def admit(self, estimate_bytes: int = 0) -> bool:
        """True if that many bytes more stay within the budget."""
        limit = self.budget.max_bytes
        return limit is None or self.charged_bytes + estimate_bytes <= limit

    def require_budget(self) -> None:
        """Raise ``GraphMemoryError`` if the byte budget is exceeded. Called by scopes."""
        if not self.admit():
            raise GraphMemoryError(
                "graph budget",
                expected=f"at most {self.budget.max_bytes} bytes of pools and executables",
                found=f"{self.charged_bytes} bytes",
                do="raise max_graph_bytes, or capture fewer or smaller keys",
            )

    def make_room(self, num_graphs: int, keep: Generation | None = None) -> None:
        """Retire lazy generations, oldest first, until ``num_graphs`` more may exist.

        Errors: ``GraphMemoryError`` if nothing is left to retire. Called outside windows.
        """
        limits = (self.budget.max_graphs, self.device.limits.max_graphs)
        limit = min((value for value in limits if value is not None), default=None)
        while limit is not None and self.num_graphs + num_graphs > limit:
            lazy = [g for g in self._generations if g.kind == "lazy" and g is not keep]
            if not any(g.num_graphs for g in lazy):
                raise GraphMemoryError(
                    "graph count",
                    expected=f"at most {limit} device graphs",
                    found=f"{self.num_graphs}, and no lazy generation to retire",
                    do="raise max_graphs, capture fewer keys, or capture in lazy generations",
                )
            self._retire_now(next(g for g in lazy if g.num_graphs))

    # -- generations

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The live generations, oldest first."""
        return tuple(self._generations)

    @property
    def graph_pool(self) -> Any:
        """Handle of the current generation's pool; None while there is none."""
        return None if self._current is None else self._current.pool.handle

    def current_generation(self) -> Generation:
        """The generation that scopes add to; opened anew if it was retired."""
        if self._current is None:
            self._current = self.open_generation("first")
        return self._current

    def lazy_generation(self) -> Generation:
        """The newest lazy generation that has room for one program more."""
        for generation in reversed(self._generations):
            if generation.kind == "lazy":
                if len(generation.programs) < self.generation_size:
                    return generation
                break
        return self.open_generation("lazy")

    def open_generation(self, kind: Kind, pool: Any = None) -> Generation:
        generation = Generation(self._num_generations, kind, self._new_pool(pool), self._stream)
        self._num_generations += 1
        self._generations.append(generation)
        return generation

    def replace_current(self, generation: Generation) -> None:
        """Make a rebuilt generation the current one; the old one is retired. Called by scopes."""
        old, self._current = self._current, generation
        generation.kind = "first"
        for program in generation.programs:
            self.publish(program)
        if old is not None:
            self.retire(old)

    def retire(self, generation: Generation | int | None = None) -> None:
        """Retire a generation (or its index), or all: its programs go, its memory is given back.

        While a scope is open this waits for its exit. In order: unpublish, wait for the device,
        drop the generated functions, reset the graphs newest first, drop slots and workspaces,
        release the pool, emit ``Retired``.
        """
        doomed = [item for item in self._generations if generation in (None, item, item.index)]
        for item in reversed(doomed):
            if self.has_open_scope:
                if item not in self._queued:
                    self._queued.append(item)
            else:
                self._retire_now(item)

    def _retire_now(self, generation: Generation) -> None:
        if generation not in self._generations:
            return
        freed_bytes = generation.charged_bytes
        num_programs = len(generation.programs)
        for program in generation.programs:
            self._withdraw(program)
        self.device.synchronize()
        for program in reversed(generation.programs):
            program.retire()
        generation.programs.clear()
        for workspace in generation.workspaces:
            workspace.thaw(generation)
        generation.workspaces.clear()
        self.device.trim()
        generation.pool.release()
        self._generations.remove(generation)
        if self._current is generation:
            self._current = None
        self.emit(Retired(generation.index, num_programs, freed_bytes))

    # -- what programs read

    def check_externals(self) -> ExternalsReport:
        """Ask of everything programs read outside the pool whether it is still the same storage.

        A copy into a weight leaves programs valid; a replaced weight makes those that read it
        ``invalid`` (on a device that cannot see all that a graph reads: every program of the
        owner). Their steps raise ``InvalidProgramError`` until they are captured again.
        """
        checked: set[int] = set()
        moved: dict[str, dict[Program, list[str]]] = {}
        for generation in self._generations:
            for program in generation.programs:
                checked.update(id(item.storage) for item in program.externals)
                knows = program.knows_externals
                names = [
                    item.name
                    for item in program.externals
                    if (item.touched or not knows) and item.has_moved()
                ]
                if names:
                    moved.setdefault(program.owner, {})[program] = names
        invalidated = []
        for owner, programs in moved.items():
            exact = all(program.knows_externals for program in programs)
            doomed = list(programs) if exact else self._of_owner(owner)
            valid = [program for program in doomed if program.is_valid]
            for program in valid:
                program.invalidate(programs.get(program) or _names_in(programs))
                invalidated.append((program.owner, program.mode, program.key))
            if valid:
                self.emit(Invalidated(owner, len(valid), _names_in(programs)))
        all_moved = dict.fromkeys(n for programs in moved.values() for n in _names_in(programs))
        return ExternalsReport(len(checked), tuple(all_moved), tuple(invalidated))

    def invalidate(self, owner: str | None = None) -> int:
        """Make every valid program of ``owner`` (of all) ``invalid`` by hand; returns how many."""
        counts: dict[str, int] = {}
        for program in self._of_owner(owner):
            if program.is_valid:
                program.invalidate()
                counts[program.owner] = counts.get(program.owner, 0) + 1
        for name, count in counts.items():
            self.emit(Invalidated(name, count, ()))
        return sum(counts.values())

    # -- suspension and end

    def suspend(self, keep_programs: bool) -> None:
        """Make replays raise ``SuspendedError`` until ``resume``, so that memory may be unmapped.

        ``keep_programs``: True only where the pool's addresses survive, so only with a pool handle
        of the user's own. Otherwise every generation is retired here, *before* memory goes, and
        the runtime captures again after ``resume``.
        """
        self._refuse_if_unusable()
        if keep_programs and not self._has_user_pool:
            raise ConfigError(
                "suspend(keep_programs=True)",
                expected="a pool handle given to the library, whose addresses survive",
                found="a pool of the library's own",
                do="pass keep_programs=False, or give the library a pool backed by virtual memory",
            )
        self._refuse_open_scope("suspend")
        for hook in self.before_suspend:
            hook()
        self.device.synchronize()
        if not keep_programs:
            self.retire()
        self._refuse_all(_suspended_error)

    def resume(self) -> ExternalsReport:
        """Let replays run again; programs whose externals moved in between become invalid."""
        if self._refusal is not _suspended_error:
            self._refuse_if_unusable()
        self._refusal = None
        for generation in self._generations:
            for program in generation.programs:
                program.accept()
        report = self.check_externals()
        for hook in self.after_resume:
            hook()
        return report

    def close(self) -> None:
        """Retire everything, newest first, and drop static buffers. Idempotent.

        Errors: ``CaptureInProgressError`` while a scope is open.
        """
        if self._is_closed:
            return
        self._refuse_open_scope("close")
        if self._refusal is not _forked_error:
            self.retire()
        for buffers in self._buffers:
            buffers.close()
        self._buffers.clear()
        self._reserved.clear()
        self.device.forget_stream(self._stream)
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and self.num_graphs:
            warnings.warn(
                f"a GraphLibrary with {self.num_graphs} graphs was never closed",
                ResourceWarning,
                stacklevel=2,
            )

    # -- inside

    def emit(self, event: Event) -> None:
        if self._observer is not None:
            self._observer(event)

    def refuse_in_child(self) -> None:
        """In a forked child every use raises ``ForkedProcessError``: the device is the parent's."""
        self._refuse_all(_forked_error)

    def _new_pool(self, handle: Any) -> Pool:
        return self.device.new_pool() if handle is None else self.device.new_pool(handle)

    def _of_owner(self, owner: str | None) -> list[Program]:
        programs = [p for generation in self._generations for p in generation.programs]
        return [p for p in programs if owner is None or p.owner == owner]

    def _withdraw(self, program: Program) -> None:
        self._tables[program.owner, program.mode].withdraw(program)

    def _report_failure(self, record: FailureRecord) -> None:
        self.emit(
            CaptureFailed(
                record.owner,
                record.mode,
                record.key,
                type(record.error).__name__,
                str(record.error),
            )
        )

    def _refuse_all(self, error: Callable[[], GraphrtError]) -> None:
        self._refusal = error
        for generation in self._generations:
            for program in generation.programs:
                program.refuse(error)

    def _refuse_if_unusable(self) -> None:
        if self._refusal is not None:
            raise self._refusal()
        if self._is_closed:
            raise LibraryClosedError(
                "graph library",
                expected="an open library",
                found="one that was closed",
                do="make a new library and capture again",
            )

    def _refuse_open_scope(self, what: str) -> None:
        if self.has_open_scope:
            raise CaptureInProgressError(
                f"{what} of a graph library",
                expected="no open capture scope",
                found="one that is open",
                do="leave the scope first",
            )

    def _refuse_missing(self, table: ProgramTable, key: BatchDescriptor | None) -> NoReturn:
        self._refuse_if_unusable()
        if key is None:
            raise ContextError(
                f"{table.owner} {table.mode.name}",
                expected="a batch descriptor in the forward context of a graph step",
                found="None",
                do="enter ForwardContext(mode, key), or mode NONE to run eager",
            )
        known = sorted(table.view, key=lambda other: abs(other.num_tokens - key.num_tokens))
        raise _unseen_key_error(table, key, known[:3])


def _names_in(programs: Mapping[Program, Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in programs.values() for name in names))


def _unseen_key_error(
    table: ProgramTable, key: BatchDescriptor, nearest: Sequence[BatchDescriptor]
) -> CaptureOutsideScopeError:
    error = CaptureOutsideScopeError(
        expected="a key that was captured: " + (", ".join(map(str, nearest)) or "none is"),
        found="an unseen key, and no capture scope in the forward context",
        do="capture it in library.capture_scope(), or dispatch only to captured keys",
    )
    error.locate(owner=table.owner, mode=table.mode.name, key=str(key))
    return error


def _suspended_error() -> SuspendedError:
    return SuspendedError(
        "graph library",
        expected="resume() before the next graph step",
        found="a suspended library",
        do="resume it, or run the step eager",
    )


def _forked_error() -> ForkedProcessError:
    return ForkedProcessError(
        "graph library",
        expected="a use in the process that captured",
        found="a forked child",
        do="make a library of its own in the child; start workers with spawn",
    )


def _refuse_in_children(library: GraphLibrary) -> None:
    """Costs nothing per step: the child's copy of every program is swapped once, at the fork."""
    reference = weakref.ref(library)

    def after_fork() -> None:
        living = reference()
        if living is not None:
            living.refuse_in_child()

    os.register_at_fork(after_in_child=after_fork)

"""Owns every program, pool and capture stream of one runtime, and the catalogue of its keys.

Two libraries share nothing. Teardown is explicit and in generations; nothing hangs on ``__del__``.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NoReturn, Self

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.config.checked import (
    check_callable,
    check_count,
    check_flags,
    check_hashable,
    check_type,
    checked_list,
)
from graphrt.context import ForwardContext
from graphrt.device import DeviceName, make_device
from graphrt.device.base import Device, Pool, Stream
from graphrt.errors import (
    CaptureInProgressError,
    CaptureOutsideScopeError,
    ConfigError,
    ContextError,
    ForkedProcessError,
    GraphMemoryError,
    GraphrtError,
    InvalidProgramError,
    LibraryClosedError,
    RankError,
    RankLostError,
    SuspendedError,
    copy_error,
    with_notes,
)
from graphrt.events import CaptureFailed, Event, Invalidated, Observer, Retired
from graphrt.externals.held import ExternalsReport, Lookup
from graphrt.gc_pause import gc_paused
from graphrt.graphs.buffers import BufferSet
from graphrt.graphs.catalog import Catalog, Entry, OwnerEntries, Programs
from graphrt.graphs.nesting import ReplayInProgress
from graphrt.graphs.program import Program
from graphrt.graphs.resources import Resource, Workspace, optional_methods
from graphrt.graphs.scope import CaptureOptions, CaptureScope
from graphrt.graphs.signature import StaleCheck
from graphrt.graphs.watch import Watch
from graphrt.source import caller_source

Kind = Literal["first", "new", "lazy"]
END_S = 5.0
"""Most seconds that a device may take to end collectives that are given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphBudget:
    """What the programs of a library may cost together. None: no limit.

    ``max_bytes``: Pools and executables.
    ``max_graphs``: Device graphs; the device's own limit holds too.
    """

    max_bytes: int | None = None
    max_graphs: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_graphs"):
            if getattr(self, name) is not None:
                check_count(f"{name} of a GraphBudget", getattr(self, name), least=0)


@dataclass(slots=True, eq=False)
class Generation:
    """Programs with one pool, retired as a whole.

    ``first`` is pinned; ``new`` takes its place when its scope ends; ``lazy`` ones are of limited
    size and go, oldest first, when the graph count is exhausted. Programs that share a pool go
    together, because evicting one crashed survivors that had baked in its cuBLAS workspace
    (PyTorch #193402, vllm-omni #6587).
    """

    index: int
    kind: Kind
    pool: Pool
    programs: list[Program] = field(default_factory=list)
    workspaces: set[Workspace] = field(default_factory=set)
    """Frozen for as long as this generation lives."""

    @property
    def num_graphs(self) -> int:
        return sum(program.num_graphs for program in self.programs)

    @property
    def charged_bytes(self) -> int:
        """What retiring this generation gives back: its pool and its executables."""
        return self.pool.bytes() + sum(program.memory.exec_bytes for program in self.programs)


class GraphLibrary:
    """The programs of one runtime. One thread at a time uses it.

    ``device``: given by name (``"auto"``, ``"cuda"``, ``"simulated"``) it is made here and closed
    with the library; given as an object it is not. ``pool``: handle of an existing pool for the
    first generation. ``generators``: random generators that captured callables use beside the
    default one. ``generation_size``: programs of a lazy generation. ``observer`` receives
    ``Captured``, ``CaptureFailed``, ``Verified``, ``Invalidated`` and ``Retired`` events, of a
    ``UBatchWrapper`` also ``RanEager``. ``before_suspend``, ``after_resume``: hooks around a
    suspension.
    Errors: ``ConfigError`` for a ``generation_size`` below 1, an unknown device, and arguments of
            another kind.
    """

    def __init__(
        self,
        device: Device | DeviceName,
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
        check_count("generation_size", generation_size)
        check_type("stale_check", stale_check, StaleCheck, "a StaleCheck")
        check_type("budget", budget, GraphBudget | None, "a GraphBudget")
        check_hashable("pool", pool)
        if observer is not None:
            check_callable("observer", observer)
        expected = "a list of torch.Generators"
        self.generators = checked_list("generators", generators, torch.Generator, expected)
        expected = "a list of callables"
        self.before_suspend = list(
            checked_list("before_suspend", before_suspend, Callable, expected)
        )
        self.after_resume = list(checked_list("after_resume", after_resume, Callable, expected))
        self._owns_device = isinstance(device, str)
        self.device = make_device(device) if isinstance(device, str) else device
        check_type(
            "device",
            self.device,
            Device,
            '"auto", "cuda", "simulated", or a device of graphrt',
            "pass a name, or CUDADevice(index) for one GPU of several",
        )
        self.budget = budget or GraphBudget()
        self.stale_check = stale_check
        self.generation_size = generation_size
        self.num_cudagraph_captured = 0
        """Device graphs of successful captures so far; never decremented."""
        self.replaying = ReplayInProgress()
        """Which program is between two of its graphs."""
        self.catalog = Catalog(self._on_failure, self.replaying)
        """Which program serves each key of each owner, or why none does."""
        self.scope: CaptureScope | None = None
        """The capture scope that is open."""
        self._generations: list[Generation] = []
        self._observer = observer
        self._has_user_pool = pool is not None
        self.side_streams: tuple[Stream, ...] = ()
        self.static_buffers: tuple[BufferSet, ...] = ()
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        """Marked, as long as they exist, when programs became invalid."""
        self._hooks = Watch("hooks")
        self._hooked_owners: set[str] = set()
        self._prepared: set[tuple[Callable[..., None], BatchDescriptor]] = set()
        """Methods of resources that were called once for a key, and are not again."""
        self._scope_lock = threading.Lock()
        self._retire_later: list[Generation] = []
        self._refusal: Callable[[], GraphrtError] | None = None
        self._most_wait_s = math.inf
        self._give_up: Callable[[RankError], None]
        self._warned_of: set[str] = set()
        """Owners of programs whose arguments no check compares all."""
        self._num_generations = 0
        # Scopes warm up and capture on it, so that warm-ups prepared what is captured on. Its
        # name is ours alone: two libraries on one device share no stream.
        try:
            self._stream = self.device.stream(f"graphrt capture {id(self):x}")
            self._open_generation("first", pool)
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise
        _refuse_in_children(self)

    @property
    def all_generators(self) -> tuple[torch.Generator, ...]:
        """Those that captured callables may use: the device's own first."""
        return (self.device.generator, *self.generators)

    @property
    def is_closed(self) -> bool:
        return self._refusal is _closed_error

    # -- programs

    def program(self, owner: str | Any, mode: RuntimeMode, key: BatchDescriptor) -> Program | None:
        """Return the published program of an owner (a wrapper, or its name), or None."""
        name: Any = owner if isinstance(owner, str) else getattr(owner, "owner", None)
        check_type("owner", name, str, "a wrapper, or the name of one's programs")
        check_type("mode", mode, RuntimeMode, "a RuntimeMode")
        check_type("key", key, BatchDescriptor, "a BatchDescriptor")
        entry = self.catalog.get(name, mode, key)
        return None if entry is None else entry.program

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every published program, by owner and mode in order of creation, then by capture."""
        return self.catalog.programs

    @property
    def failures(self) -> tuple[Entry, ...]:
        """The keys that failed or were over budget; never tried again until forgotten."""
        return self.catalog.failures

    def forget_failures(self) -> None:
        """Let failed keys be tried again, and owners that failed three times in a row."""
        self.catalog.forget_failures()

    def require_program(self, entries: OwnerEntries, key: BatchDescriptor | None) -> Program:
        """Return an owner's program of ``key``, or raise what its absence means."""
        program = entries.find(key)
        if program is not None:
            return program
        self._require_usable()
        if key is None:
            raise ContextError(
                f"{entries.owner} {entries.mode.name}",
                expected="a batch descriptor in the forward context of a graph step",
                found="None",
                do="enter ForwardContext(mode, key), or mode NONE to run eager",
            )
        known = sorted(Programs(entries), key=lambda other: abs(other.num_tokens - key.num_tokens))
        # Made elsewhere, because a local variable that holds a raised error is a cycle.
        raise _unseen_key_error(entries, key, known[:3])

    def add(self, scope: CaptureScope, generation: Generation, program: Program) -> Entry:
        """Take a captured program in, and publish or stage it. Called by captures."""
        generation.programs.append(program)
        try:
            self._warn_unchecked(program)
            # Only now is it known how many graphs the program needs.
            self.make_room(0, keep=generation)
            self.require_budget()
        except (GraphMemoryError, UserWarning):
            generation.programs.remove(program)
            program.retire()
            raise
        scope.programs.append(program)
        self.num_cudagraph_captured += program.num_graphs
        self.catalog.mark_captured(program.owner)
        if generation.kind == "new":
            entry = self.catalog.entry(program.owner, program.mode, program.key)
            entry.staged = program
            return entry
        return self.catalog.publish(program)

    def _warn_unchecked(self, program: Program) -> None:
        """Name what no check compares, once for each owner."""
        if not program.unchecked or program.owner in self._warned_of:
            return
        self._warned_of.add(program.owner)
        source = caller_source()
        warnings.warn_explicit(
            f"{program.title}: {', '.join(program.unchecked)}: kept as captured, and never "
            "compared, because only tensors, plain values and containers of them are. A replay "
            "does not see what changes inside: pass that as a tensor, or put it in the key",
            UserWarning,
            source.file or "<unknown>",
            source.line,
        )

    def drop(self, programs: Sequence[Program]) -> None:
        """Withdraw and reset programs; their generations live on, with those of other keys.

        Called by captures, of the newest, and by runners, when the device is done with them.
        """
        for program in reversed(programs):
            self.catalog.withdraw(program)
            program.retire()
            for generation in self._generations:
                if program in generation.programs:
                    generation.programs.remove(program)

    # -- capture

    def capture_scope(
        self, options: CaptureOptions | None = None, **changes: Any
    ) -> AbstractContextManager[CaptureScope]:
        """Return the permission to capture, a context manager; ``changes``: fields of the options.

        ``stream=``: an engine's own stream, which the scope warms up and records on.
        While it is entered, its thread runs on the capture stream, the garbage collector is
        paused, and the forward context carries the scope; leaving restores all of that, also after
        an error. Entering ends the validity of every output that a replay returned.

        Errors: ``ConfigError`` for wrong options, or a stream that is none of this device's; on
        entry ``CaptureInProgressError`` if a scope
        of this library is open, or anything records on this thread; ``NestedReplayError`` inside
        an eager segment.
        """
        base = CaptureOptions() if options is None else options
        name, do = "options of a capture scope", "give single options by keyword"
        check_type(name, base, CaptureOptions, "CaptureOptions", do)
        options = replace(base, **changes) if changes else base
        given = options.stream
        stream = self._stream if given is None else self.device.adopt_stream(given)
        return self._scope(options, stream)

    @contextmanager
    def _scope(self, options: CaptureOptions, stream: Stream) -> Iterator[CaptureScope]:
        self.require_no_recording("capture scope")
        if not self._scope_lock.acquire(blocking=False):
            raise CaptureInProgressError(
                "capture scope",
                expected="one open scope per library",
                found="a scope that is open already",
                do="leave it first; captures of one library run one after another",
            )
        device = self.device
        with ExitStack() as exits:
            exits.callback(self._end_scope)
            prepare = partial(self.prepare_for_capture, options.prepared)
            scope = self.scope = CaptureScope(self, device, options, stream, prepare)
            if options.generation == "new":
                exits.push(partial(self._end_rebuild, self._open_generation("new")))
            caller = device.current_stream()
            exits.enter_context(gc_paused())
            device.order(stream, caller)
            exits.callback(device.order, caller, stream)
            exits.enter_context(device.use(stream))
            device.trim()
            exits.enter_context(ForwardContext(layers=options.layers, capture_scope=scope))
            yield scope

    def _end_scope(self) -> None:
        self.scope = None
        hooked = [p for p in self.programs if p.owner in self._hooked_owners and p.is_valid]
        self._hooks.update(hooked, self.check_externals)
        self._scope_lock.release()
        doomed, self._retire_later = self._retire_later, []
        for generation in doomed:
            self._retire_now(generation)

    def _end_rebuild(self, generation: Generation, kind: Any, error: Any, trace: Any) -> None:
        """Put a rebuilt generation in the current one's place, or give it up after an error."""
        if error is not None:
            self.retire(generation)
            return
        old = self._newest("first")
        generation.kind = "first"
        for program in generation.programs:
            self.catalog.publish(program).staged = None
        if old is not None:
            self.retire(old)

    def require_no_recording(self, what: str) -> None:
        """Raise unless a capture scope may be opened here: see ``capture_scope``."""
        self._require_usable()
        self.replaying.require_none(what)
        if self.scope is None and self.device.is_capturing():
            raise CaptureInProgressError(
                what,
                expected="no open recording on this thread",
                found="one of another library, or of other code",
                do="capture before it or after it; a capture does not nest",
            )

    def generation_for(self, scope: CaptureScope) -> Generation:
        """The generation that takes the scope's next program; a full lazy one is followed."""
        asked = scope.options.generation
        kind: Kind = "first" if asked == "current" else asked
        generation = self._newest(kind)
        is_full = generation is not None and len(generation.programs) >= self.generation_size
        if generation is None or (is_full and kind == "lazy"):
            generation = self._open_generation(kind)
        if scope.has_frozen_workspaces:
            generation.workspaces.update(scope.options.workspaces)
            for workspace in generation.workspaces:
                workspace.freeze(generation)
        return generation

    def freeze_workspaces(self, scope: CaptureScope) -> None:
        """Let no workspace of the scope grow, in this generation and those that follow it."""
        scope.has_frozen_workspaces = True
        self.generation_for(scope)

    def register_stream(self, stream: Stream) -> Stream:
        """Declare a side stream: it is joined at each end of a segment and forked at each begin."""
        self._require_usable()
        if stream not in self.side_streams:
            self.side_streams += (stream,)
        return stream

    def stream(self, name: str) -> Stream:
        """The device's persistent stream of this name, registered as a side stream."""
        self._require_usable()
        check_type("stream", name, str, "a name")
        return self.register_stream(self.device.stream(name))

    def add_buffers(self, buffers: BufferSet) -> None:
        """Declare static buffers: graphs may write those declared ``written``, no others.

        ``close()`` drops them.
        """
        self._require_usable()
        self.static_buffers += (buffers,)

    def reserve(self, resources: Iterable[Resource], largest: BatchDescriptor) -> None:
        """Let resources allocate for the largest key, once: graphs hold the addresses."""
        self._call_once("reserve", resources, largest)

    def prepare_for_capture(self, resources: Iterable[Resource], key: BatchDescriptor) -> None:
        """Let resources set up what they make once for ``key``."""
        self._call_once("prepare_for_capture", resources, key)

    def _call_once(self, name: str, resources: Iterable[Resource], key: BatchDescriptor) -> None:
        self._require_usable()
        for method in optional_methods(resources, name):
            # Bound methods are equal if they are of one object.
            if (method, key) not in self._prepared:
                method(key)
                self._prepared.add((method, key))

    # -- budget

    @property
    def charged_bytes(self) -> int:
        """Bytes of all live pools and executables: what counts against the budget."""
        return sum(generation.charged_bytes for generation in self._generations)

    @property
    def num_graphs(self) -> int:
        """Device graphs that are alive."""
        return sum(generation.num_graphs for generation in self._generations)

    def fits_budget(self, estimate_bytes: int = 0) -> bool:
        """True if that many bytes more stay within the budget."""
        limit = self.budget.max_bytes
        return limit is None or self.charged_bytes + estimate_bytes <= limit

    def require_budget(self) -> None:
        """Raise ``GraphMemoryError`` if the byte budget is exceeded."""
        if not self.fits_budget():
            raise GraphMemoryError(
                "graph budget",
                expected=f"at most {self.budget.max_bytes} bytes of pools and executables",
                found=f"{self.charged_bytes} bytes",
                do=self._room_advice("raise max_graph_bytes, or capture fewer or smaller keys"),
            )

    def make_room(self, num_graphs: int, keep: Generation | None = None) -> None:
        """Retire lazy generations, oldest first, until ``num_graphs`` more may exist.

        Errors: ``GraphMemoryError`` if nothing is left to retire. Never called while recording.
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
                    do=self._room_advice(
                        "raise max_graphs, capture fewer keys, or capture in lazy generations"
                    ),
                )
            self._retire_now(next(g for g in lazy if g.num_graphs))

    def _room_advice(self, otherwise: str) -> str:
        """How to get room: what can never be replayed again stays until it is retired."""
        invalid = sum(not program.is_valid for program in self._of_owner(None))
        if not invalid:
            return otherwise
        return (
            f"call library.retire() first: {invalid} invalid programs keep their memory until then "
            f"(what shares their generation goes too); or {otherwise}"
        )

    # -- generations

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The live generations, oldest first."""
        return tuple(self._generations)

    @property
    def graph_pool(self) -> Any:
        """Handle of the current generation's pool; None while there is none."""
        current = self._newest("first")
        return None if current is None else current.pool.handle

    def _newest(self, kind: Kind) -> Generation | None:
        return next((g for g in reversed(self._generations) if g.kind == kind), None)

    def _open_generation(self, kind: Kind, handle: Any = None) -> Generation:
        self._require_usable()
        pool = self.device.new_pool() if handle is None else self.device.new_pool(handle)
        generation = Generation(self._num_generations, kind, pool)
        self._num_generations += 1
        self._generations.append(generation)
        return generation

    def retire(self, generation: Generation | int | None = None) -> None:
        """Retire a generation (or its index), or all: its programs go, its memory is given back.

        While a scope is open this waits for its exit. In order: withdraw from the catalogue, wait
        for the device, drop the generated functions, reset the graphs newest first, thaw the
        workspaces, release the pool, emit ``Retired``. Errors: ``NestedReplayError``.
        """
        self.replaying.require_none("retirement")
        doomed = [item for item in self._generations if generation in (None, item, item.index)]
        for item in reversed(doomed):
            if self.scope is None:
                self._retire_now(item)
            elif item not in self._retire_later:
                self._retire_later.append(item)

    def _retire_now(self, generation: Generation) -> None:
        if generation not in self._generations:
            return
        freed_bytes = generation.charged_bytes
        num_programs = len(generation.programs)
        for program in generation.programs:
            self.catalog.withdraw(program)
        self.synchronize()
        for program in reversed(generation.programs):
            program.retire()
        generation.programs.clear()
        for workspace in generation.workspaces:
            workspace.thaw(generation)
        generation.workspaces.clear()
        self.device.trim()
        generation.pool.release()
        self._generations.remove(generation)
        self._mark_watches()
        self.emit(Retired(generation.index, num_programs, freed_bytes))

    # -- what programs read

    def check_externals(self) -> ExternalsReport:
        """Ask of everything programs read besides their arguments whether it is what it was.

        That is every tensor and every host value that the callable's code names, wherever it is
        kept, and the objects on the way there. A copy into a weight leaves programs valid; a
        replaced weight or value makes those that read it ``invalid`` (on a device that cannot see
        all that a graph reads: every program of the owner). Their steps raise
        ``InvalidProgramError`` until they are captured again. A tensor that stands elsewhere in
        one of ``resources`` may belong to another key: programs that read it ask from then on in
        each call, for which the resource is prepared, and become ``invalid`` where it is another.
        """
        lookup = Lookup()
        moved: dict[str, dict[Program, list[str]]] = {}
        for generation in self._generations:
            for program in generation.programs:
                names = program.find_moved(lookup)
                if names:
                    moved.setdefault(program.owner, {})[program] = names
                elif program.suspected:
                    program.ask_each_time(partial(self.require_in_place, program))
        invalidated = []
        for owner, programs in moved.items():
            exact = all(program.knows_externals for program in programs)
            doomed = programs if exact else self._of_owner(owner)
            invalidated += self._invalidate(owner, doomed, programs)
        all_moved = dict.fromkeys(n for programs in moved.values() for n in _names_in(programs))
        keys = tuple((program.owner, program.mode, program.key) for program in invalidated)
        return ExternalsReport(lookup.num_checked, tuple(all_moved), keys)

    def invalidate(self, owner: str | None = None) -> int:
        """Make every valid program of ``owner`` (of all) ``invalid`` by hand; returns how many."""
        check_type("owner", owner, str | None, "the name of an owner of programs, or None: all")
        owners = dict.fromkeys(program.owner for program in self._of_owner(owner))
        return sum(len(self._invalidate(one, self._of_owner(one), {})) for one in owners)

    def require_in_place(self, program: Program) -> None:
        """Make ``program``, for whose key resources are prepared, invalid and raise
        ``InvalidProgramError`` where they have put elsewhere what it reads."""
        if names := program.find_replaced_by_resources():
            self._invalidate(program.owner, [program], {program: names})
            raise InvalidProgramError(
                program.title,
                expected="what resources own and graphs read, where it was at the capture",
                found=f"replaced by prepare(): {', '.join(names)}",
                do="let prepare() write into the tensors that it finds, of the largest size; "
                "steps run eager now, until capture() is called again",
            )

    def _invalidate(
        self, owner: str, programs: Iterable[Program], moved: Mapping[Program, Sequence[str]]
    ) -> list[Program]:
        """Make those of an owner's ``programs`` that are valid ``invalid``, and return them."""
        valid, names = [program for program in programs if program.is_valid], _names_in(moved)
        for program in valid:
            self.catalog.invalidate(program, moved.get(program) or names)
        if valid:
            self.emit(Invalidated(owner, len(valid), names))
            self._mark_watches()
        return valid

    def _mark_watches(self) -> None:
        """Let runners look again at what serves, before their next graph run."""
        for watch in self.watches:
            watch.is_marked = True

    def settle(self, programs: Iterable[Program]) -> None:
        """Leave out of what new programs read what their callable changes itself; see ``Program``.

        After their first replays were checked, and host values were put back.
        """
        lookup = Lookup()
        for program in programs:
            program.settle(lookup)

    def watch_registrations(self, owner: str) -> None:
        """Let torch's registration hooks alone make an owner's programs look before they run.

        What a wrapper has: nothing calls its library between two steps.
        """
        self._hooks.start()
        self._hooked_owners.add(owner)

    # -- suspension and end

    @property
    def has_ranks(self) -> bool:
        """True after ``limit_waits``."""
        return self._most_wait_s < math.inf

    def limit_waits(self, most_s: float, give_up: Callable[[RankError], None]) -> None:
        """Wait for the device ``most_s`` seconds at most from here on, because its collectives may
        wait for a rank that never comes. ``give_up``: ends these then, to get the device free.
        """
        self._most_wait_s, self._give_up = most_s, give_up

    def synchronize(self) -> None:
        """Wait for the device. Errors: ``RankLostError`` if that takes longer than ranks may."""
        if not self.has_ranks:
            self.device.synchronize()
        elif not self.device.ends_within(self._most_wait_s):
            error = RankLostError(
                "the device",
                expected=f"the end of its work within {self._most_wait_s:g} s",
                found="a collective that still waits for another rank",
                do="see the errors of the other ranks, and start all of them again",
            )
            self._give_up(error)
            if not self.device.ends_within(END_S):
                error.add_note(
                    "giving it up did not end it: what the device uses stays in memory until the "
                    "process exits"
                )
            try:
                raise error
            finally:
                del error  # Or it would be a cycle through its traceback.

    def suspend(self, keep_programs: bool) -> None:
        """Make replays raise ``SuspendedError`` until ``resume``, so that memory may be unmapped.

        ``keep_programs``: True only where the pool's addresses survive, so only with a pool handle
        of the user's own. Otherwise every generation is retired here, *before* memory goes, and
        the runtime captures again after ``resume``.
        """
        self._require_usable()
        check_flags("suspend", keep_programs=keep_programs)
        if keep_programs and not self._has_user_pool:
            raise ConfigError(
                "suspend(keep_programs=True)",
                expected="a pool handle given to the library, whose addresses survive",
                found="a pool of the library's own",
                do="pass keep_programs=False, or give the library a pool backed by virtual memory",
            )
        self._require_no_scope("suspend")
        for hook in self.before_suspend:
            hook()
        self.synchronize()
        if not keep_programs:
            self.retire()
        self._refuse_all(_suspended_error)

    def resume(self) -> ExternalsReport:
        """Let replays run again; programs whose externals moved in between become invalid."""
        if self._refusal is not _suspended_error:
            self._require_usable()
        self._refuse_all(None)
        report = self.check_externals()
        for hook in self.after_resume:
            hook()
        return report

    def close(self) -> None:
        """Retire everything, newest first, drop static buffers, close a device of its own.

        Idempotent.

        Errors: ``CaptureInProgressError`` while a scope is open, ``NestedReplayError``. With ranks
                ``RankLostError`` where the device does not end in time; the library is closed then,
                and keeps its graphs and their memory where the device does not end at all.
        """
        if self.is_closed:
            return
        self._require_no_scope("close")
        is_forked = self._refusal is _forked_error  # The device is the parent's.
        if not is_forked:
            try:
                self.retire()
            except RankLostError:
                self._close_late()
                raise
        self._drop_rest(owns_device=self._owns_device and not is_forked)

    def _close_late(self) -> None:
        """Close when the time for it is over: free all, or nothing where the device still runs."""
        is_idle = self.device.ends_within(0.1)
        if is_idle:
            self.retire()
        else:
            self._refuse_all(_closed_error)
            for generation in self._generations:
                # Never destroyed, not even as the process exits: that would wait for the device.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(generation))
        self._drop_rest(owns_device=self._owns_device and is_idle)

    def _drop_rest(self, *, owns_device: bool) -> None:
        self._hooks.stop()
        for buffers in self.static_buffers:
            buffers.close()
        self.static_buffers = ()
        self._prepared.clear()
        self.device.forget_stream(self._stream)
        self._refusal = _closed_error
        if owns_device:
            self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise copy_error(self)

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True) and self.num_graphs:
            warnings.warn(
                f"a GraphLibrary with {self.num_graphs} graphs was never closed",
                ResourceWarning,
                stacklevel=2,
            )

    # -- inside

    def emit(self, event: Event) -> None:
        if self._observer is not None:
            self._observer(event)

    def _of_owner(self, owner: str | None) -> list[Program]:
        programs = [p for generation in self._generations for p in generation.programs]
        return [p for p in programs if owner is None or p.owner == owner]

    def _on_failure(self, entry: Entry) -> None:
        assert entry.error is not None, "a failure has an error"
        kind = type(entry.error).__name__
        self.emit(CaptureFailed(entry.owner, entry.mode, entry.key, kind, with_notes(entry.error)))

    def _refuse_all(self, error: Callable[[], GraphrtError] | None) -> None:
        self._refusal = error
        for generation in self._generations:
            for program in generation.programs:
                program.disable(error)

    def _require_usable(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def _require_no_scope(self, what: str) -> None:
        self.replaying.require_none(f"{what} of a graph library")
        if self.scope is not None:
            raise CaptureInProgressError(
                f"{what} of a graph library",
                expected="no open capture scope",
                found="one that is open",
                do="leave the scope first",
            )


def _unseen_key_error(
    entries: OwnerEntries, key: BatchDescriptor, nearest: Sequence[BatchDescriptor]
) -> CaptureOutsideScopeError:
    error = CaptureOutsideScopeError(
        expected="a key that was captured: " + (", ".join(map(str, nearest)) or "none is"),
        found="an unseen key, and no capture scope of its library in the forward context",
        do="capture it in library.capture_scope(), or dispatch only to captured keys",
    )
    error.locate(owner=entries.owner, mode=entries.mode.name, key=str(key))
    return error


def _names_in(programs: Mapping[Program, Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in programs.values() for name in names))


def _suspended_error() -> SuspendedError:
    return SuspendedError(
        "graph library",
        expected="resume() before the next graph step",
        found="a suspended library",
        do="resume it, or run the step eager",
    )


def _closed_error() -> LibraryClosedError:
    return LibraryClosedError(
        "graph library",
        expected="an open library",
        found="one that was closed",
        do="make a new library and capture again",
    )


def _forked_error() -> ForkedProcessError:
    return ForkedProcessError(
        "graph library",
        expected="a use in the process that captured",
        found="a forked child",
        do="make a library of its own in the child; start workers with spawn",
    )


def _refuse_in_children(library: GraphLibrary) -> None:
    """In a forked child every use raises ``ForkedProcessError``: the device is the parent's.

    Costs nothing per step: the child's copy of every program is swapped once, at the fork.
    """
    reference = weakref.ref(library)

    def after_fork() -> None:
        living = reference()
        if living is not None and not living.is_closed:
            living._refuse_all(_forked_error)

    os.register_at_fork(after_in_child=after_fork)

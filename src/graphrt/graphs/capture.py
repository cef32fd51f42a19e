"""The capture scope: the explicit permission to capture, and the order in which a set of keys is.

While a scope is open its thread runs on the capture stream, the garbage collector is paused, and
the forward context carries the scope; leaving it restores all of that, also after an error.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.device.base import Block, Device
from graphrt.errors import (
    AmbientError,
    CaptureError,
    CaptureInProgressError,
    ConfigError,
    EmptyCaptureError,
    EscapedAllocationError,
    MutatedInputError,
    StateAdvancedError,
)
from graphrt.events import Captured
from graphrt.graphs.ambient import Ambient, compare_ambient, read_ambient, refuse_grad_mode
from graphrt.graphs.builder import ProgramBuilder
from graphrt.graphs.collection import CollectorPause
from graphrt.graphs.externals import (
    External,
    bytes_of,
    find_holder,
    hooked_modules,
    modules_of,
)
from graphrt.graphs.failures import FailureRecord
from graphrt.graphs.generation import Generation
from graphrt.graphs.leaves import tensors_of
from graphrt.graphs.program import GraphMemory, Program
from graphrt.graphs.stale import Signature
from graphrt.graphs.state import Resource, StateGuard, Workspace
from graphrt.graphs.table import ProgramTable

if TYPE_CHECKING:
    from graphrt.graphs.library import GraphLibrary
    from graphrt.graphs.wrapper import CUDAGraphOptions

Phase = Literal["warmup", "capture", "captured", "failed"]
Gate = Callable[["CaptureJob", Phase], bool]
"""Asked before each warm-up and capture (False skips the job) and after each capture (False drops
its programs); told of each failure. Where ranks keep step."""

Progress = Callable[[int, int, "CaptureJob"], None]


@dataclass(frozen=True, slots=True, eq=False)
class CaptureJob:
    """One key to capture: ``target(*args, **kwargs)`` in a step of ``mode`` and ``key``.

    ``make_inputs`` returns ``(args, kwargs)``; it is called anew for every warm-up and for the
    capture, and its tensors must lie where steps will find them.
    """

    target: Callable[..., Any]
    mode: RuntimeMode
    key: BatchDescriptor
    make_inputs: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]

    @property
    def owner(self) -> str:
        """Name of the target, for records: a wrapper's owner, else the callable's own name."""
        name = getattr(self.target, "owner", None) or getattr(self.target, "__qualname__", None)
        return name if isinstance(name, str) else type(self.target).__name__


class CaptureReport(NamedTuple):
    """What ``capture_all`` did."""

    programs: tuple[Program, ...]
    failures: tuple[FailureRecord, ...]
    skipped: tuple[CaptureJob, ...]
    """Jobs that a gate turned away or dropped."""
    seconds: Mapping[CaptureJob, float]
    """Warm-ups and capture of each job that was attempted."""


class CaptureScope:
    """The permission to capture into one library, as a context manager.

    ``state`` guards what warm-ups and gaps advance; ``sinks`` are tensors they may write instead.
    ``holds``: tensors every program keeps alive (known to a custom kernel only by pointer).
    ``resources``: reserved, prepared and frozen around captures; workspaces too. ``warmups``:
    eager runs per job before anything is captured. ``on_error``: ``"skip"`` keeps a
    ``FailureRecord`` and goes on. ``generation``: add to the ``"current"`` one; rebuild into a
    ``"new"`` one, published at exit, after which the current one is retired; or use ``"lazy"``
    ones of limited size. ``observe``: ``"none"`` for callables that hold compiled code, which runs
    differently under a dispatch mode. ``allow_escape``: names (``*`` and ``?`` as in a shell) of
    attributes that may keep memory of the window.

    Entering ends the validity of every output that a replay returned.
    Errors: ``CaptureInProgressError`` if a scope of this library is open.
    """

    def __init__(
        self,
        library: GraphLibrary,
        *,
        state: StateGuard | None,
        sinks: Sequence[torch.Tensor],
        holds: Sequence[torch.Tensor],
        resources: Sequence[Resource | Workspace],
        warmups: int,
        on_error: Literal["raise", "skip"],
        generation: Literal["current", "new", "lazy"],
        observe: Literal["capture", "none"],
        allow_escape: Sequence[str],
    ) -> None:
        _require_choice("on_error", on_error, ("raise", "skip"))
        _require_choice("generation", generation, ("current", "new", "lazy"))
        _require_choice("observe", observe, ("capture", "none"))
        if warmups < 0:
            raise ConfigError("warmups", expected="0 or more", found=str(warmups), do="correct it")
        self.library = library
        self.device: Device = library.device
        self.builder: ProgramBuilder | None = None
        """The builder whose window is open, where break points find it."""
        self.num_inlined = 0
        """Wrapper calls that ran inline because a window was open."""
        self._state = state
        self._sinks = tuple(sinks)
        self._holds = tuple(holds)
        self._resources = [item for item in resources if not isinstance(item, Workspace)]
        self._workspaces = [item for item in resources if isinstance(item, Workspace)]
        self._warmups = warmups
        self._on_error = on_error
        self._kind = generation
        self._observes = observe == "capture"
        self._allow_escape = tuple(allow_escape)
        self._generation: Generation | None = None
        self._staged: dict[tuple[str, RuntimeMode, BatchDescriptor], Program] = {}
        self._ambients: dict[BatchDescriptor, Ambient] = {}
        self._job: CaptureJob | None = None
        self._job_programs: list[Program] = []
        self._is_matched = False
        self._frozen = False
        # One permit for the window: taking it is one atomic list operation.
        self._permits = [object()]
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        library, device = self.library, self.device
        library.claim_scope()
        with ExitStack() as exits:
            exits.callback(library.release_scope)
            if self._kind == "new":
                self._generation = library.open_generation("new")
                exits.push(self._publish_rebuilt)
            stream = self._current_generation().stream
            caller = device.current_stream()
            exits.callback(CollectorPause.enter(self).leave, self)
            device.order(stream, caller)
            exits.callback(device.order, caller, stream)
            exits.enter_context(device.use(stream))
            device.trim()
            exits.enter_context(ForwardContext(capture_scope=self))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.__exit__(kind, error, trace)

    # -- by hand

    @contextmanager
    def step(self, mode: RuntimeMode, key: BatchDescriptor) -> Iterator[ForwardContext]:
        """Run one step: NONE to warm ``key`` up, then the mode to capture. State is the caller's.

        The modes around a warm-up are recorded and compared with those around the capture.
        """
        ambient = read_ambient(self.device)
        if mode is RuntimeMode.NONE:
            self._ambients[key] = ambient
        elif key in self._ambients:
            compare_ambient(self._ambients[key], ambient)
        with ForwardContext(mode, key, capture_scope=self) as context:
            yield context

    # -- a set of keys

    def capture_all(
        self,
        jobs: Sequence[CaptureJob],
        gate: Gate | None = None,
        progress: Progress | None = None,
        later: Iterable[BatchDescriptor] = (),
    ) -> CaptureReport:
        """Warm every job up, freeze resources and workspaces, capture every job in order.

        Order PIECEWISE before FULL, then by tokens, micro-batches and adapters, descending: the
        first capture sets the pool's high-water mark. Another order costs memory.

        ``progress(done, total, job)`` is called as each job is done with. ``later``: keys that
        other calls capture. Resources are reserved for the largest of these and the jobs' keys,
        because none may grow once a graph holds its address.
        Errors: the first failure, unless the scope skips failures.
        """
        jobs = tuple(jobs)
        run = _Run(self, gate)
        if jobs:
            largest = max((*later, *(job.key for job in jobs)), key=_extent)
            for resource in self._resources:
                self.library.reserve(resource, largest)
        for job in jobs:
            run.attempt(job, "warmup", self._warm_up)
        self._freeze()
        for done, job in enumerate(jobs, start=1):
            if run.is_alive(job):
                run.attempt(job, "capture", self._capture_job)
            if progress is not None:
                progress(done, len(jobs), job)
        return run.report()

    def _warm_up(self, job: CaptureJob) -> None:
        if self._warmups == 0:
            return
        with self._guarded_state():
            for number in range(self._warmups):
                is_last = number == self._warmups - 1
                # Libraries branch on "is this a capture": the last warm-up takes the same branch.
                answering = self.device.answering_capture() if is_last else nullcontext()
                args, kwargs = self._prepare(job)
                with answering, self.step(RuntimeMode.NONE, job.key):
                    refuse_grad_mode(self._ambients[job.key])
                    job.target(*args, **kwargs)

    def _capture_job(self, job: CaptureJob) -> None:
        self._job, self._job_programs, self._is_matched = job, [], False
        # Only gaps run at capture, and only PIECEWISE has gaps.
        can_advance = job.mode is RuntimeMode.PIECEWISE
        guarded = self._guarded_state() if can_advance else nullcontext()
        try:
            args, kwargs = self._prepare(job)
            with guarded, self.step(job.mode, job.key):
                job.target(*args, **kwargs)
            if not self._is_matched:
                raise EmptyCaptureError(
                    f"{job.owner}, {job.mode.name}, {job.key}",
                    expected=f"a call of a {job.mode.name} wrapper of this library",
                    found="none",
                    do="wrap the callable, or part of it, in a CUDAGraphWrapper of this mode",
                )
        except BaseException:
            self.library.drop(self._job_programs)
            raise
        finally:
            self._job = None

    def _prepare(self, job: CaptureJob) -> tuple[Sequence[Any], Mapping[str, Any]]:
        args, kwargs = job.make_inputs()
        for resource in self._resources:
            resource.prepare(job.key, None)
        return args, kwargs

    @contextmanager
    def _guarded_state(self) -> Iterator[None]:
        if self._state is None:
            yield
            return
        token = self._state.save()
        try:
            yield
        finally:
            self._state.restore(token)

    def _freeze(self) -> None:
        for resource in self._resources:
            resource.freeze()
        self._frozen = True
        self._freeze_workspaces()

    def _freeze_workspaces(self) -> None:
        generation = self._current_generation()
        for workspace in self._workspaces:
            workspace.freeze(generation)
            if workspace not in generation.workspaces:
                generation.workspaces.append(workspace)

    # -- one program; called by wrappers

    def find(self, table: ProgramTable, key: BatchDescriptor | None) -> Program | None:
        """Return the valid program that a call in this scope replays, if there is one."""
        if key is None:
            table.find(key)  # raises: nothing can be captured or found without a key
            raise AssertionError("a table never finds a missing key")
        if self._kind == "new":
            program = self._staged.get((table.owner, table.mode, key))
        else:
            program = table.view.get(key)
        if program is None or not program.is_valid:
            return None
        self._is_matched = True
        return program

    def capture(
        self,
        table: ProgramTable,
        key: BatchDescriptor,
        runnable: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: CUDAGraphOptions,
    ) -> Program:
        """Capture one program and register it. Errors leave no entry, graph or window behind."""
        self.library.failure_book.refuse_known(table.owner, table.mode, key)
        try:
            permit = self._permits.pop()
        except IndexError:
            raise CaptureInProgressError(
                f"{table.owner} {table.mode.name} {key}",
                expected="one capture at a time",
                found="another thread's window in this scope",
                do="capture from one thread",
            ) from None
        started = perf_counter()
        try:
            self._refuse_ambient(key)
            program, num_inlined = self._build(table, key, runnable, args, kwargs, options)
        except AmbientError as error:
            error.locate(owner=table.owner, mode=table.mode.name, key=str(key))
            raise
        except Exception as error:
            # A job's failure is counted once, by the job.
            self.library.failure_book.add(
                table.owner, table.mode, key, error, counts=self._job is None
            )
            raise
        finally:
            self.builder = None
            self._permits.append(permit)
        self.num_inlined += num_inlined
        self._register(program, options, perf_counter() - started)
        return program

    def _build(
        self,
        table: ProgramTable,
        key: BatchDescriptor,
        runnable: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: CUDAGraphOptions,
    ) -> tuple[Program, int]:
        library, device = self.library, self.device
        library.make_room(1)
        library.require_budget()
        generation = self._current_generation()
        pool = generation.pool
        live_before = set(pool.live_blocks())
        memory_before = device.memory(pool)
        builder = self.builder = ProgramBuilder(
            device=device,
            pool=pool,
            stream=generation.stream,
            owner=table.owner,
            mode=table.mode,
            key=key,
            side_streams=library.side_streams,
            generators=library.generators,
            observe=self._observes,
        )
        builder.record(runnable, args, kwargs, weak_outputs=options.weak_ref_output)
        try:
            self._refuse_escapes(builder, live_before, generation, runnable)
            modules = modules_of(runnable)
            externals = builder.externals(modules, args, kwargs, self._holds)
            self._refuse_mutations(builder, externals)
            memory_after = device.memory(pool)
            pool_growth = memory_after.pool_bytes - memory_before.pool_bytes
            driver_bytes = memory_before.free_bytes - memory_after.free_bytes
            allocator_bytes = memory_after.reserved_bytes - memory_before.reserved_bytes
            nodes = [graph.num_nodes for graph in builder.graphs]
            memory = GraphMemory(
                pool_growth_bytes=max(0, pool_growth),
                exec_bytes=max(0, driver_bytes - allocator_bytes),
                slot_bytes=builder.slot_bytes,
                external_bytes=bytes_of(externals),
                num_nodes=None if None in nodes else sum(n for n in nodes if n is not None),
            )
            program = Program(
                owner=table.owner,
                mode=table.mode,
                key=key,
                generation=generation.index,
                segments=builder.segments,
                signature=Signature.of(args, kwargs),
                outputs=builder.outputs,
                externals=externals,
                memory=memory,
                device=device,
                stale_check=library.stale_check,
                after_gap=_joining(device, library.side_streams),
                knows_externals=self._observes and device.name == "simulated",
                hooked_modules=hooked_modules(modules),
            )
            # Only now is it known how many graphs the program needs.
            generation.programs.append(program)
            try:
                library.make_room(0, keep=generation)
                library.require_budget()
            except CaptureError:
                generation.programs.remove(program)
                program.retire()
                raise
        except BaseException as error:
            builder.reset()
            if isinstance(error, CaptureError):
                error.locate(owner=table.owner, mode=table.mode.name, key=str(key))
            raise
        return program, builder.num_inlined

    def _register(self, program: Program, options: CUDAGraphOptions, seconds: float) -> None:
        library = self.library
        if self._kind == "new":
            self._staged[program.owner, program.mode, program.key] = program
        else:
            library.publish(program)
        library.num_cudagraph_captured += program.num_graphs
        library.failure_book.succeeded()
        self._is_matched = True
        self._job_programs.append(program)
        memory = program.memory
        library.emit(
            Captured(
                owner=program.owner,
                mode=program.mode,
                key=program.key,
                num_graphs=program.num_graphs,
                num_gaps=program.num_gaps,
                num_nodes=memory.num_nodes,
                seconds=seconds,
                pool_growth_bytes=memory.pool_growth_bytes,
                exec_bytes=memory.exec_bytes,
                slot_bytes=memory.slot_bytes,
                external_bytes=memory.external_bytes,
                display=options.debug_log_enable,
            )
        )

    # -- what a capture must not do

    def _refuse_ambient(self, key: BatchDescriptor) -> None:
        refuse_grad_mode(read_ambient(self.device))
        stream, current = self._current_generation().stream, self.device.current_stream()
        if current is not stream:
            raise AmbientError(
                "current stream",
                expected=f"the scope's capture stream {stream.name!r}",
                found=f"stream {current.name!r}",
                do="call the wrapper on the scope's stream; fork side streams inside the callable",
            )

    def _refuse_escapes(
        self,
        builder: ProgramBuilder,
        live_before: set[Block],
        generation: Generation,
        runnable: Callable[..., Any],
    ) -> None:
        kept = {t.untyped_storage().data_ptr() for t in tensors_of(builder.outputs)}
        kept |= builder.slot_addresses
        escaped = _escaped(generation, live_before, kept)
        if escaped:
            # A reference cycle of the callable looks the same; only here is a collection worth it.
            gc.collect()
            escaped = _escaped(generation, live_before, kept)
        for block in escaped:
            holder = find_holder(block.address, block.num_bytes, runnable)
            if any(fnmatchcase(holder, pattern) for pattern in self._allow_escape):
                continue
            place = f", allocated at {block.source}" if block.source else ""
            raise EscapedAllocationError(
                holder,
                expected="memory of the window held by outputs and slots alone",
                found=f"{block.num_bytes} bytes kept by {holder or 'an unknown holder'}{place}",
                do="allocate it before the capture, return it, or name it in allow_escape",
            )

    def _refuse_mutations(self, builder: ProgramBuilder, externals: Sequence[External]) -> None:
        written = [item for item in externals if item.written]
        static: dict[torch.UntypedStorage, str] = {}
        for buffers in self.library.static_buffers:
            for name, tensor in buffers.tensors.items():
                if buffers.specs[name].written:
                    static[tensor.untyped_storage()] = name
                elif any(item.storage is tensor.untyped_storage() for item in written):
                    raise MutatedInputError(
                        f"static buffer {name!r}",
                        expected="graphs that only read it",
                        found="a graph that writes it",
                        do="declare it written=True, or write into another tensor",
                    )
        has_run = self._warmups > 0 or builder.num_gaps > 0
        if self._job is None or self._state is not None or not has_run:
            return
        allowed = {*static, *(sink.untyped_storage() for sink in self._sinks)}
        advanced = [item.name for item in written if item.storage not in allowed]
        if advanced:
            raise StateAdvancedError(
                ", ".join(advanced),
                expected="warm-ups and gaps that leave state alone",
                found=f"{self._warmups} warm-ups and {builder.num_gaps} gaps of a callable that "
                "writes it",
                do="guard it with state=, or let inputs point at a reserved place listed in sinks=",
            )

    # -- generations

    def _current_generation(self) -> Generation:
        library = self.library
        if self._kind == "current":
            return library.current_generation()
        if self._kind == "new":
            assert self._generation is not None, "opened at entry"
            return self._generation
        previous, self._generation = self._generation, self._lazy_generation()
        if self._frozen and self._generation is not previous:
            self._freeze_workspaces()
        return self._generation

    def _lazy_generation(self) -> Generation:
        generation = self._generation
        size = self.library.generation_size
        if generation in self.library.generations and len(generation.programs) < size:
            return generation
        return self.library.lazy_generation()

    def _publish_rebuilt(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """At exit: swap the rebuilt generation in, or give it up after an error."""
        assert self._generation is not None, "opened at entry"
        if error is None:
            self.library.replace_current(self._generation)
        else:
            self.library.retire(self._generation)


class _Run:
    """One ``capture_all``: which jobs are alive, what failed, how long each took."""

    def __init__(self, scope: CaptureScope, gate: Gate | None) -> None:
        self._scope = scope
        self._gate = gate
        self._programs: list[Program] = []
        self._failures: dict[CaptureJob, FailureRecord] = {}
        self._skipped: list[CaptureJob] = []
        self._seconds: dict[CaptureJob, float] = {}

    def is_alive(self, job: CaptureJob) -> bool:
        return job not in self._failures and job not in self._skipped

    def attempt(
        self,
        job: CaptureJob,
        phase: Literal["warmup", "capture"],
        action: Callable[[CaptureJob], None],
    ) -> None:
        """Run one phase of one job; a failure is recorded, and raised unless the scope skips."""
        scope, book = self._scope, self._scope.library.failure_book
        known = book.find(job.owner, job.mode, job.key)
        if known is not None and scope._on_error == "skip":
            self._failures[job] = known
            return
        started = perf_counter()
        try:
            book.refuse_known(job.owner, job.mode, job.key)
            if not self._passes(job, phase):
                self._skipped.append(job)
                return
            action(job)
            if phase == "capture":
                self._keep_programs(job)
        except Exception as error:
            self._failures[job] = book.add(
                job.owner, job.mode, job.key, error, counts=known is None
            )
            self._passes(job, "failed")
            if scope._on_error == "raise":
                raise
            # Raises if the error left the device unusable: then there is nothing to go on with.
            scope.device.synchronize()
            _let_go(error)
        finally:
            self._seconds[job] = self._seconds.get(job, 0.0) + perf_counter() - started

    def report(self) -> CaptureReport:
        return CaptureReport(
            tuple(self._programs),
            tuple(self._failures.values()),
            tuple(self._skipped),
            MappingProxyType(self._seconds),
        )

    def _keep_programs(self, job: CaptureJob) -> None:
        programs = self._scope._job_programs
        if self._passes(job, "captured"):
            self._programs += programs
        else:
            self._scope.library.drop(programs)
            self._skipped.append(job)

    def _passes(self, job: CaptureJob, phase: Phase) -> bool:
        return self._gate is None or self._gate(job, phase)


def _let_go(error: BaseException) -> None:
    """Free the frames of a failure that is not raised: they hold tensors, hence pool memory."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def _escaped(generation: Generation, before: set[Block], kept: set[int]) -> list[Block]:
    return [
        block
        for block in generation.pool.live_blocks()
        if block not in before
        and not any(block.address <= address < block.address + block.num_bytes for address in kept)
    ]


def _joining(device: Device, streams: Sequence[Any]) -> Callable[[], None] | None:
    """Return what a replay does after each gap: wait for work the gap put on side streams."""
    if not streams:
        return None

    def join() -> None:
        current = device.current_stream()
        for side in streams:
            device.order(current, side)

    return join


def _extent(key: BatchDescriptor) -> tuple[int, int, int, int]:
    return (key.num_tokens, key.num_reqs or key.num_tokens, key.num_ubatches, key.num_active_loras)


def _require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(name, expected=" or ".join(choices), found=repr(value), do="choose one")

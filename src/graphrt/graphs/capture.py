"""Captures one program: records a call, refuses what replays would get wrong, adds up the cost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.config.checked import check_callable, check_choice, check_type
from graphrt.context import CaptureContext, current_forward_context
from graphrt.device.base import Block, Device, MemoryReading, Pool, Stream
from graphrt.errors import (
    CaptureError,
    CaptureInProgressError,
    EnvironmentMismatchError,
    EscapedAllocationError,
    MutatedInputError,
    StateAdvancedError,
)
from graphrt.events import Captured
from graphrt.externals.environment import autocast_dtype, require_no_grad, require_stream
from graphrt.externals.held import HeldTensor, Reads, bytes_of, find_holder, find_path
from graphrt.externals.host_snapshot import HostSnapshot
from graphrt.externals.places import Place
from graphrt.externals.reachable import Reach, reach
from graphrt.graphs.library import Generation, GraphLibrary
from graphrt.graphs.program import GraphMemory, Program
from graphrt.graphs.recorder import ProgramRecorder
from graphrt.graphs.resources import StateGuard
from graphrt.graphs.scope import CALL_INNER, CaptureOptions, CaptureScope
from graphrt.graphs.signature import Signature
from graphrt.graphs.writes import Write, observed_writes, storage_of
from graphrt.values import parameters_of, storage_start, tensors_of, walk


def capture_program(
    library: GraphLibrary,
    owner: str,
    mode: RuntimeMode,
    key: BatchDescriptor,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: CaptureOptions | None = None,
) -> Program:
    """Record ``fn(*args, **kwargs)`` as the program of (owner, mode, key); add it to ``library``.

    Opens a scope where the library has none open; else ``options`` default to those of the scope.
    It warms nothing up: run ``fn`` first, or use ``capture_all``. Writes to state that nobody
    declared are refused, unless ``options.checks`` is ``"none"``.

    Errors: ``ConfigError`` for arguments of another kind; ``CaptureError`` and its kin; what a
    failed capture of this key raised before, and whatever ``fn`` raises. An error leaves no
    program, graph or recording behind, and nothing that the recording assigned: attributes,
    buffers, entries of containers, variables.
    """
    check_type("library", library, GraphLibrary, "a GraphLibrary")
    check_type("owner", owner, str, "the name that its programs are found under")
    check_choice("mode", mode, (RuntimeMode.PIECEWISE, RuntimeMode.FULL))
    check_type("key", key, BatchDescriptor, "a BatchDescriptor")
    check_callable("the callable to capture", fn)
    check_type("args", args, Sequence, "a list or tuple of arguments")
    check_type("kwargs", kwargs, Mapping | None, "arguments by name")
    check_type("options", options, CaptureOptions | None, "CaptureOptions")
    scope = library.scope
    if scope is None:
        with library.capture_scope(options):
            return capture_program(library, owner, mode, key, fn, args, kwargs, options)
    options = options or scope.options
    library.replaying.require_none(f"capture of {owner} {mode.name} {key}")
    library.catalog.require_untried(owner, mode, key)
    if not scope.recording_lock.acquire(blocking=False):
        raise CaptureInProgressError(
            f"{owner} {mode.name} {key}",
            expected="one capture at a time",
            found="another thread's recording in this scope",
            do="capture from one thread",
        )
    started = perf_counter()
    written: set[torch.UntypedStorage] = set()
    try:
        require_no_grad()
        require_stream(scope.stream, library.device.current_stream())
        library.make_room(1)
        library.require_budget()
        # Asked again: to make room, the library may have retired the one just asked for.
        generation = library.generation_for(scope)
        is_observed = options.observe != "never"
        keep = keep_undeclared(library, scope, options, owner) if is_observed else None

        def keep_what_runs(tensor: torch.Tensor) -> None:
            if keep is not None and not library.device.owns(tensor):
                written.add(tensor.untyped_storage())
                keep(tensor)

        recorder = scope.recorder = ProgramRecorder(
            device=library.device,
            pool=generation.pool,
            stream=scope.stream,
            owner=owner,
            mode=mode,
            key=key,
            replaying=library.replaying,
            side_streams=library.side_streams,
            generators=library.generators,
            observe=is_observed,
            keep=keep_what_runs,
            state=options.state,
            fn=fn,
            args=args,
            kwargs=kwargs or {},
        )
        capture = _Capture(library, scope, options, generation, recorder)
        host = scope.host_of(fn)
        refuses, is_lent = capture.is_of_recording, capture.is_lent
        with host.run(is_first=options.warmups == 0, refuses=refuses, is_lent=is_lent):
            reads = capture.reads(None, host.reach)
            frozen = reads.now
            with _context(scope, mode, key):
                recorder.record(weak_outputs=options.weak_outputs)
            program = capture.make_program(reads, frozen, host)
            entry = library.add(scope, generation, program)
    except Exception as error:
        scope.kept.put_back(lambda storage, _: storage in written)
        if isinstance(error, CaptureError):
            error.locate(owner=owner, mode=mode.name, key=str(key))
        if not isinstance(error, EnvironmentMismatchError):
            library.catalog.mark_failed(owner, mode, key, error)
        raise
    finally:
        scope.recorder = None
        scope.recording_lock.release()
    entry.seconds.recording = perf_counter() - started
    library.emit(
        Captured(
            owner=owner,
            mode=mode,
            key=key,
            num_graphs=program.num_graphs,
            num_eager=program.num_eager,
            seconds=entry.seconds.recording,
            **program.memory._asdict(),
        )
    )
    return program


def _context(
    scope: CaptureScope, mode: RuntimeMode, key: BatchDescriptor
) -> AbstractContextManager[Any]:
    """The forward context of this capture, where the caller has not entered one of his own."""
    context = current_forward_context()
    is_entered = (
        context is not None
        and context.capture_scope is scope
        and context.cudagraph_runtime_mode is mode
        and context.batch_descriptor == key
    )
    return nullcontext() if is_entered else CaptureContext(mode, key, capture_scope=scope)


@dataclass(eq=False)
class _Capture:
    """One capture, begun before its recording: what it may do, and what records it."""

    library: GraphLibrary
    scope: CaptureScope
    options: CaptureOptions
    generation: Generation
    recorder: ProgramRecorder

    def __post_init__(self) -> None:
        pool = self.generation.pool
        self._live_before = set(pool.live_blocks())
        self._memory_before = self.library.device.memory(pool)
        arguments = tensors_of((self.recorder.args, self.recorder.kwargs))
        self._given = set(map(storage_of, arguments))

    def is_of_recording(self, path: str, value: Any) -> bool:
        """True for a value that the recording assigned and that holds memory of the pool: no replay
        assigns it again, and later captures reuse the memory."""
        is_allowed = _matches(path, self.options.allow_escape)
        return not is_allowed and any(map(self.library.device.owns, tensors_of(value)))

    def is_lent(self, tensor: torch.Tensor) -> bool:
        """True for a tensor of the pool or of an argument: later runs find other values there."""
        return self.library.device.owns(tensor) or storage_of(tensor) in self._given

    def reads(self, known: Reads | None, walk: Callable[[], Reach]) -> Reads:
        """What the callable reads now: of an earlier walk, where nothing was replaced since."""
        library, recorder = self.library, self.recorder
        fn = recorder.fn
        # Eager segments read afresh at each replay what they read.
        breaks = recorder.mode is RuntimeMode.FULL
        is_before = known is None  # Tensors that moved are found after the recording.
        if known is None:
            programs = (p for g in reversed(library.generations) for p in reversed(g.programs))
            own = (p.reads for p in programs if p.owner == recorder.owner and p.reads is not None)
            known = next((reads for reads in own if reads.is_of(fn, breaks=breaks)), None)
        is_known = known is not None and known.leads_to_the_same()
        if known is not None and is_known and (is_before or known.has_same_tensors()):
            return known
        buffers = [each.tensors.values() for each in library.static_buffers]
        inputs = {storage_start(tensor) for tensors in buffers for tensor in tensors} - {0}

        def is_ours(tensor: torch.Tensor) -> bool:
            # Where else a callable keeps its arguments (a context that attention reads) is its
            # matter: it sets them anew in each run, and others may use the place between two runs.
            return library.device.owns(tensor) or storage_start(tensor) in inputs

        found = Reads(fn, is_ours, self.options.prepared, breaks=breaks, reached=walk())
        if known is not None:  # Of the same callable, so that its graphs read the same.
            found.touched_of_resources = known.touched_of_resources
        return found

    def make_program(self, reads: Reads, frozen: Sequence[Place], host: HostSnapshot) -> Program:
        """Make the program of what was recorded, in no generation yet. Errors leave no graph.

        ``reads``: before the recording; ``frozen``: the values of it that were there then.
        """
        library, recorder, options = self.library, self.recorder, self.options
        try:
            self._refuse_escapes(host)
            earlier, reads = reads, self.reads(reads, partial(reach, recorder.fn))
            names = parameters_of(recorder.fn)
            externals = recorder.externals(reads, options.keep_alive, names)
            written = [item for item in externals if item.written]
            writes = recorder.writes()
            self._refuse_mutated_inputs(written, writes)
            if options.checks == "all":
                given = dict(zip(names, recorder.args, strict=False)) | dict(recorder.kwargs)
                self._refuse_advanced_state(written, writes, given)
            return Program(
                owner=recorder.owner,
                mode=recorder.mode,
                key=recorder.key,
                generation=self.generation.index,
                segments=recorder.segments,
                signature=Signature.of(recorder.args, recorder.kwargs, names),
                outputs=recorder.outputs,
                externals=externals,
                reads=reads,
                values=reads.values_since(earlier, frozen),
                memory=_cost(recorder, externals, self._memory_before),
                device=library.device,
                replaying=library.replaying,
                stale_check=library.stale_check,
                after_eager=_joining(library.device, library.side_streams),
                is_observed=recorder.observe,
                autocast=autocast_dtype(library.device.torch_device.type),
                reads_step_info=recorder.reads_step_info,
            )
        except BaseException:
            recorder.reset()
            raise

    def _refuse_escapes(self, host: HostSnapshot) -> None:
        recorder, before = self.recorder, self._live_before
        kept = set(map(storage_start, tensors_of(recorder.outputs)))
        statics = (storage() for storage in recorder.static_outputs)
        kept |= {storage.data_ptr() for storage in statics if storage is not None}
        escaped = _escaped(recorder.pool, before, kept)
        if escaped:
            # A reference cycle of the callable looks the same, and so does a list that it filled
            # and exchanged for another; only here is a collection worth it.
            host.empty_exchanged()
            gc.collect()
            escaped = _escaped(recorder.pool, before, kept)
        for block in escaped:
            holder = find_holder(block.address, block.num_bytes, recorder.fn)
            if _matches(holder, self.options.allow_escape):
                continue
            place = f", allocated at {block.source}" if block.source else ""
            opaque = {type(n.value).__name__ for n in walk(recorder.outputs) if n.kind == "opaque"}
            unseen = f", or by a {'/'.join(sorted(opaque))} in the result" if opaque else ""
            raise EscapedAllocationError(
                holder,
                expected="memory of the recording held by outputs and static outputs alone",
                found=f"{block.num_bytes} bytes kept by {holder or 'an unknown holder' + unseen}"
                f"{place}",
                do="allocate it before the capture, return it in tensors, tuples, lists, dicts and "
                "dataclasses, or delete it before the callable returns; of a weight that a hook "
                "computes in each call: prune.remove, remove_weight_norm, or "
                "torch.nn.utils.parametrize",
            )

    def _refuse_mutated_inputs(
        self, written: Sequence[HeldTensor], writes: Sequence[Write]
    ) -> None:
        storages = {item.storage for item in written}
        own = set(map(storage_of, tensors_of((self.recorder.args, self.recorder.kwargs))))
        for buffers in self.library.static_buffers:
            for name, tensor in buffers.tensors.items():
                if not buffers.specs[name].written and tensor.untyped_storage() in storages:
                    line = _line_of(tensor.untyped_storage(), writes)
                    raise MutatedInputError(
                        f"static buffer {name!r}",
                        expected="graphs that only read it",
                        found=f"a graph that writes it{line and f', at {line}'}"
                        + self.scope.told_runs,
                        do="declare it written=True, or write into another tensor"
                        if tensor.untyped_storage() in own
                        else CALL_INNER,
                        source=line,
                    )

    def _holder_of(self, item: HeldTensor) -> str:
        """Where the callable has a tensor that eager segments alone reach; empty if unknown."""
        storage = item.storage
        if storage is None:
            return ""
        return find_holder(storage.data_ptr(), storage.nbytes(), self.recorder.fn)

    def _refuse_advanced_state(
        self, written: Sequence[HeldTensor], writes: Sequence[Write], given: Mapping[str, Any]
    ) -> None:
        options = self.options
        declared = _declared(self.library, options)
        undeclared = [item for item in written if item.storage not in declared]
        if undeclared and options.state is not None:
            declared |= _guarded(options.state, self.scope)
        # A runner of another library stages anew in each of its runs.
        staged = {storage_of(write.tensor) for write in writes if write.is_staged}
        writes = [write for write in writes if not write.is_staged]
        declared |= staged - {storage_of(write.tensor) for write in writes}
        undeclared = [item for item in undeclared if item.storage not in declared]
        if not undeclared:
            return
        refused = {item.storage for item in undeclared}
        self.scope.kept.put_back(lambda storage, _: storage in refused)
        places: dict[str, str] = {}
        for item in undeclared:
            # A capture looks into no object that is an argument; the user who reads this does.
            name = item.name
            if not item.is_named:
                name = find_path(item.tensor, given) or self._holder_of(item) or name
            places.setdefault(name, _line_of(item.storage, writes))
        has_guard = options.state is not None
        guard = "the state guard leaves it out" if has_guard else "no state guard was given"
        raise StateAdvancedError(
            ", ".join(places),
            expected="a callable that writes nothing but static buffers declared written, what "
            "state= guards and what may_overwrite= names",
            found=", ".join(
                f"{name} is written" + (f" at {line}" if line else "")
                for name, line in places.items()
            )
            + f"; {guard}{self.scope.told_runs}",
            do="guard it with state=, which puts it back, or name it in may_overwrite=, if inputs "
            "point at a reserved place in it or it may hold anything after a capture"
            + (f"; {CALL_INNER}" if self.scope.runs_inside else ""),
            source=next(filter(None, places.values()), ""),
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _cost(
    recorder: ProgramRecorder, externals: Sequence[HeldTensor], before: MemoryReading
) -> GraphMemory:
    after = recorder.device.memory(recorder.pool)
    driver_bytes = before.free_bytes - after.free_bytes
    allocator_bytes = after.reserved_bytes - before.reserved_bytes
    nodes = [graph.num_nodes for graph in recorder.graphs]
    return GraphMemory(
        pool_growth_bytes=max(0, after.pool_bytes - before.pool_bytes),
        exec_bytes=max(0, driver_bytes - allocator_bytes),
        static_output_bytes=recorder.static_output_bytes,
        external_bytes=bytes_of(externals),
        num_nodes=None if None in nodes else sum(n for n in nodes if n is not None),
    )


def _joining(device: Device, streams: Sequence[Stream]) -> Callable[[], None] | None:
    """What a replay does after each eager segment: wait for its work on side streams."""
    if not streams:
        return None

    def join() -> None:
        current = device.current_stream()
        for side in streams:
            device.order(current, side)

    return join


def _escaped(pool: Pool, before: set[Block], kept: set[int]) -> list[Block]:
    return [
        block
        for block in pool.live_blocks()
        if block not in before
        and not any(block.address <= address < block.address + block.num_bytes for address in kept)
    ]


def _line_of(storage: torch.UntypedStorage | None, writes: Sequence[Write]) -> str:
    """The user's line that wrote a storage first; empty where nothing saw it."""
    lines = (one.source for one in writes if storage_of(one.tensor) is storage)
    return next(filter(None, lines), "")


def keep_undeclared(
    library: GraphLibrary, scope: CaptureScope, options: CaptureOptions, of: object
) -> Callable[[torch.Tensor], None] | None:
    """What keeps the contents of a tensor that nothing declares, before a run of ``of`` writes it;
    None for options that want no checks."""
    if options.checks == "none":
        return None
    guarded = set() if options.state is None else _guarded(options.state, scope)
    declared = cache(lambda: _declared(library, options))  # Many tensors may be, many are written.

    def keep(tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage not in guarded and storage not in declared():
            scope.kept.keep(tensor, of)

    return keep


def _declared(library: GraphLibrary, options: CaptureOptions) -> set[torch.UntypedStorage | None]:
    """The storages that options without their guard, and static buffers, declare."""
    declared = {storage_of(tensor) for tensor in options.may_overwrite}
    declared |= {workspace.storage for workspace in options.workspaces}
    for buffers in library.static_buffers:
        declared |= {
            storage_of(tensor)
            for name, tensor in buffers.tensors.items()
            if buffers.specs[name].written
        }
    return declared


def _guarded(guard: StateGuard, scope: CaptureScope) -> set[torch.UntypedStorage | None]:
    known = scope.guarded.get(id(guard))
    if known is None:
        known = scope.guarded[id(guard)] = guarded_storages(guard)
    return known


def guarded_storages(guard: StateGuard) -> set[torch.UntypedStorage | None]:
    """The storages that a guard keeps. One that does not name its tensors is watched once."""
    tensors = getattr(guard, "tensors", None)
    if tensors is not None:
        return {storage_of(tensor) for tensor in tensors_of(tensors)}
    with observed_writes() as writes:
        guard.restore(guard.save())
    return {storage_of(write.tensor) for write in writes}

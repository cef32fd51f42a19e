"""Captures one program: records a call, refuses what replays would get wrong, adds up the cost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext, current_forward_context
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
from graphrt.graphs.buffers import BufferSet
from graphrt.graphs.environment import require_no_grad, require_stream
from graphrt.graphs.held import HeldTensor, bytes_of, find_holder, modules_of
from graphrt.graphs.library import Generation, GraphLibrary
from graphrt.graphs.program import GraphMemory, Program
from graphrt.graphs.recorder import ProgramRecorder
from graphrt.graphs.scope import CaptureOptions, CaptureScope
from graphrt.graphs.signature import Signature
from graphrt.graphs.values import tensors_of


def capture_program(
    library: GraphLibrary,
    owner: str,
    mode: RuntimeMode,
    key: BatchDescriptor,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: CaptureOptions | None = None,
    *,
    check_state: bool = True,
) -> Program:
    """Record ``fn(*args, **kwargs)`` as the program of (owner, mode, key); add it to ``library``.

    Opens a scope where the library has none open; else ``options`` default to those of the scope.
    It warms nothing up: run ``fn`` first, or use ``capture_all``. ``check_state`` False: what ran
    before is the caller's business, so writes to state that nobody declared are accepted.

    Errors: ``CaptureError`` and its kin, what a failed capture of this key raised before, and
    whatever ``fn`` raises. An error leaves no program, graph or recording behind.
    """
    scope = library.scope
    if scope is None:
        with library.capture_scope(options):
            return capture_program(
                library, owner, mode, key, fn, args, kwargs, options, check_state=check_state
            )
    options = options or scope.options
    library.catalog.require_untried(owner, mode, key)
    if not scope.recording_lock.acquire(blocking=False):
        raise CaptureInProgressError(
            f"{owner} {mode.name} {key}",
            expected="one capture at a time",
            found="another thread's recording in this scope",
            do="capture from one thread",
        )
    started = perf_counter()
    try:
        require_no_grad()
        require_stream(library.generation_for(scope).stream, library.device.current_stream())
        library.make_room(1)
        library.require_budget()
        # Asked again: to make room, the library may have retired the one just asked for.
        generation = library.generation_for(scope)
        recorder = scope.recorder = ProgramRecorder(
            device=library.device,
            pool=generation.pool,
            stream=generation.stream,
            owner=owner,
            mode=mode,
            key=key,
            side_streams=library.side_streams,
            generators=library.generators,
            observe=options.observe != "never",
        )
        pool, kwargs = generation.pool, kwargs or {}
        before = set(pool.live_blocks()), library.device.memory(pool)
        with _context(scope, mode, key):
            recorder.record(fn, args, kwargs, weak_outputs=options.weak_outputs)
        program = _make_program(
            library, generation, recorder, fn, args, kwargs, options, before, check_state
        )
        entry = library.add(scope, generation, program)
    except Exception as error:
        if isinstance(error, CaptureError):
            error.locate(owner=owner, mode=mode.name, key=str(key))
        if not isinstance(error, EnvironmentMismatchError):
            library.catalog.mark_failed(owner, mode, key, error)
        raise
    finally:
        scope.recorder = None
        scope.recording_lock.release()
    entry.seconds = perf_counter() - started
    library.emit(_captured(program, entry.seconds))
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
    return nullcontext() if is_entered else ForwardContext(mode, key, capture_scope=scope)


def _make_program(
    library: GraphLibrary,
    generation: Generation,
    recorder: ProgramRecorder,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CaptureOptions,
    before: tuple[set[Block], MemoryReading],
    check_state: bool,
) -> Program:
    """Make the program of what was recorded, in no generation yet. Errors leave no graph."""
    device, pool = library.device, generation.pool
    live_before, memory_before = before
    try:
        _refuse_escapes(recorder, pool, live_before, fn, options.allow_escape)
        scope = library.scope
        earlier = [p for p in scope.programs if p.owner == recorder.owner] if scope else []
        previous = earlier[-1].externals if earlier else ()
        externals = recorder.externals(modules_of(fn), args, kwargs, options.keep_alive, previous)
        written = [item for item in externals if item.written]
        _refuse_mutated_inputs(written, library.static_buffers)
        if check_state and options.state is None:
            _refuse_advanced_state(written, library.static_buffers, options, recorder.num_eager)
        is_observed = options.observe != "never"
        return Program(
            owner=recorder.owner,
            mode=recorder.mode,
            key=recorder.key,
            generation=generation.index,
            segments=recorder.segments,
            signature=Signature.of(args, kwargs),
            outputs=recorder.outputs,
            externals=externals,
            memory=_cost(recorder, externals, memory_before, device.memory(pool)),
            device=device,
            stale_check=library.stale_check,
            after_eager=_joining(device, library.side_streams),
            is_observed=is_observed,
            knows_externals=is_observed and device.name == "simulated",
        )
    except BaseException:
        recorder.reset()
        raise


def has_undeclared(program: Program, library: GraphLibrary, options: CaptureOptions) -> bool:
    """True if a program touches a tensor that nothing names, or writes one nobody declared."""
    declared = _declared_writes(library.static_buffers, options)
    return any(
        not item.is_named
        or (item.written and options.state is None and item.storage not in declared)
        for item in program.externals
    )


def _captured(program: Program, seconds: float) -> Captured:
    memory = program.memory
    return Captured(
        owner=program.owner,
        mode=program.mode,
        key=program.key,
        num_graphs=program.num_graphs,
        num_eager=program.num_eager,
        num_nodes=memory.num_nodes,
        seconds=seconds,
        pool_growth_bytes=memory.pool_growth_bytes,
        exec_bytes=memory.exec_bytes,
        static_output_bytes=memory.static_output_bytes,
        external_bytes=memory.external_bytes,
    )


def _cost(
    recorder: ProgramRecorder,
    externals: Sequence[HeldTensor],
    before: MemoryReading,
    after: MemoryReading,
) -> GraphMemory:
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


def _refuse_escapes(
    recorder: ProgramRecorder,
    pool: Pool,
    live_before: set[Block],
    fn: Callable[..., Any],
    allowed: Sequence[str],
) -> None:
    kept = {t.untyped_storage().data_ptr() for t in tensors_of(recorder.outputs)}
    kept |= recorder.static_output_addresses
    escaped = _escaped(pool, live_before, kept)
    if escaped:
        # A reference cycle of the callable looks the same; only here is a collection worth it.
        gc.collect()
        escaped = _escaped(pool, live_before, kept)
    for block in escaped:
        holder = find_holder(block.address, block.num_bytes, fn)
        if any(fnmatchcase(holder, pattern) for pattern in allowed):
            continue
        place = f", allocated at {block.source}" if block.source else ""
        raise EscapedAllocationError(
            holder,
            expected="memory of the recording held by outputs and static outputs alone",
            found=f"{block.num_bytes} bytes kept by {holder or 'an unknown holder'}{place}",
            do="allocate it before the capture, return it, or name it in allow_escape",
        )


def _escaped(pool: Pool, before: set[Block], kept: set[int]) -> list[Block]:
    return [
        block
        for block in pool.live_blocks()
        if block not in before
        and not any(block.address <= address < block.address + block.num_bytes for address in kept)
    ]


def _refuse_mutated_inputs(written: Sequence[HeldTensor], static: Iterable[BufferSet]) -> None:
    storages = {item.storage for item in written}
    for buffers in static:
        for name, tensor in buffers.tensors.items():
            if not buffers.specs[name].written and tensor.untyped_storage() in storages:
                raise MutatedInputError(
                    f"static buffer {name!r}",
                    expected="graphs that only read it",
                    found="a graph that writes it",
                    do="declare it written=True, or write into another tensor",
                )


def _refuse_advanced_state(
    written: Sequence[HeldTensor],
    static: Iterable[BufferSet],
    options: CaptureOptions,
    num_eager: int,
) -> None:
    if options.warmups == 0 and num_eager == 0:
        return  # nothing has run yet
    declared = _declared_writes(static, options)
    advanced = [item.name for item in written if item.storage not in declared]
    if advanced:
        raise StateAdvancedError(
            ", ".join(advanced),
            expected="warm-ups and eager segments that leave state alone",
            found=f"{options.warmups} warm-ups and {num_eager} eager segments of a callable "
            "that writes it",
            do="guard it with state=, or let inputs point at a reserved place in may_overwrite=",
        )


def _declared_writes(
    static: Iterable[BufferSet], options: CaptureOptions
) -> set[torch.UntypedStorage]:
    declared = {tensor.untyped_storage() for tensor in options.may_overwrite}
    for buffers in static:
        declared |= {
            tensor.untyped_storage()
            for name, tensor in buffers.tensors.items()
            if buffers.specs[name].written
        }
    return declared

"""Captures one program: records a call, refuses what replays would get wrong, adds up the cost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from graphrt.device.base import Block, Device, MemoryReading, Pool, Stream
from graphrt.errors import (
    CaptureError,
    EscapedAllocationError,
    MutatedInputError,
    StateAdvancedError,
)
from graphrt.graphs.buffers import BufferSet
from graphrt.graphs.builder import ProgramBuilder
from graphrt.graphs.externals import (
    External,
    bytes_of,
    find_holder,
    hooked_modules,
    modules_of,
)
from graphrt.graphs.generation import Generation
from graphrt.graphs.leaves import tensors_of
from graphrt.graphs.program import GraphMemory, Program
from graphrt.graphs.stale import Signature

if TYPE_CHECKING:
    from graphrt.graphs.library import GraphLibrary


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureTerms:
    """What a scope says of every program captured in it; see ``CaptureScope``."""

    holds: tuple[torch.Tensor, ...]
    sinks: tuple[torch.Tensor, ...]
    observe: bool
    allow_escape: tuple[str, ...]
    num_warmups: int
    is_guarded: bool
    """True if what warm-ups and gaps advance is put back."""


def capture_program(
    builder: ProgramBuilder,
    library: GraphLibrary,
    generation: Generation,
    runnable: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    weak_outputs: bool,
    terms: CaptureTerms,
    by_hand: bool,
) -> Program:
    """Record ``runnable(*args, **kwargs)`` and add the program to ``generation``, unpublished.

    ``by_hand``: nobody knows what ran before, so state is the caller's. Errors leave no graph.
    """
    device, pool = library.device, generation.pool
    live_before = set(pool.live_blocks())
    memory_before = device.memory(pool)
    builder.record(runnable, args, kwargs, weak_outputs=weak_outputs)
    try:
        _refuse_escapes(builder, pool, live_before, runnable, terms.allow_escape)
        modules = modules_of(runnable)
        externals = builder.externals(modules, args, kwargs, terms.holds)
        written = [item for item in externals if item.written]
        _refuse_mutated_inputs(written, library.static_buffers)
        if not by_hand and not terms.is_guarded:
            _refuse_advanced_state(written, library.static_buffers, terms, builder.num_gaps)
        program = Program(
            owner=builder.owner,
            mode=builder.mode,
            key=builder.key,
            generation=generation.index,
            segments=builder.segments,
            signature=Signature.of(args, kwargs),
            outputs=builder.outputs,
            externals=externals,
            memory=_cost(builder, externals, memory_before, device.memory(pool)),
            device=device,
            stale_check=library.stale_check,
            after_gap=_joining(device, library.side_streams),
            knows_externals=terms.observe and device.name == "simulated",
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
            error.locate(owner=builder.owner, mode=builder.mode.name, key=str(builder.key))
        raise
    return program


def _cost(
    builder: ProgramBuilder,
    externals: Sequence[External],
    before: MemoryReading,
    after: MemoryReading,
) -> GraphMemory:
    driver_bytes = before.free_bytes - after.free_bytes
    allocator_bytes = after.reserved_bytes - before.reserved_bytes
    nodes = [graph.num_nodes for graph in builder.graphs]
    return GraphMemory(
        pool_growth_bytes=max(0, after.pool_bytes - before.pool_bytes),
        exec_bytes=max(0, driver_bytes - allocator_bytes),
        slot_bytes=builder.slot_bytes,
        external_bytes=bytes_of(externals),
        num_nodes=None if None in nodes else sum(n for n in nodes if n is not None),
    )


def _joining(device: Device, streams: Sequence[Stream]) -> Callable[[], None] | None:
    """Return what a replay does after each gap: wait for work the gap put on side streams."""
    if not streams:
        return None

    def join() -> None:
        current = device.current_stream()
        for side in streams:
            device.order(current, side)

    return join


def _refuse_escapes(
    builder: ProgramBuilder,
    pool: Pool,
    live_before: set[Block],
    runnable: Callable[..., Any],
    allowed: Sequence[str],
) -> None:
    kept = {t.untyped_storage().data_ptr() for t in tensors_of(builder.outputs)}
    kept |= builder.slot_addresses
    escaped = _escaped(pool, live_before, kept)
    if escaped:
        # A reference cycle of the callable looks the same; only here is a collection worth it.
        gc.collect()
        escaped = _escaped(pool, live_before, kept)
    for block in escaped:
        holder = find_holder(block.address, block.num_bytes, runnable)
        if any(fnmatchcase(holder, pattern) for pattern in allowed):
            continue
        place = f", allocated at {block.source}" if block.source else ""
        raise EscapedAllocationError(
            holder,
            expected="memory of the window held by outputs and slots alone",
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


def _refuse_mutated_inputs(written: Sequence[External], static: Iterable[BufferSet]) -> None:
    for buffers in static:
        for name, tensor in buffers.tensors.items():
            storage = tensor.untyped_storage()
            if not buffers.specs[name].written and any(item.storage is storage for item in written):
                raise MutatedInputError(
                    f"static buffer {name!r}",
                    expected="graphs that only read it",
                    found="a graph that writes it",
                    do="declare it written=True, or write into another tensor",
                )


def _refuse_advanced_state(
    written: Sequence[External], static: Iterable[BufferSet], terms: CaptureTerms, num_gaps: int
) -> None:
    if terms.num_warmups == 0 and num_gaps == 0:
        return  # nothing has run yet
    allowed = {sink.untyped_storage() for sink in terms.sinks}
    for buffers in static:
        allowed |= {
            tensor.untyped_storage()
            for name, tensor in buffers.tensors.items()
            if buffers.specs[name].written
        }
    advanced = [item.name for item in written if item.storage not in allowed]
    if advanced:
        raise StateAdvancedError(
            ", ".join(advanced),
            expected="warm-ups and gaps that leave state alone",
            found=f"{terms.num_warmups} warm-ups and {num_gaps} gaps of a callable that writes it",
            do="guard it with state=, or let inputs point at a reserved place listed in sinks=",
        )

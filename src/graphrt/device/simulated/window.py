"""The open window: what torch is asked to do is written to the tape instead.

Views run for real, on poisoned pool memory, because they move no data. Kernels are recorded, and
their results allocated. Functions here that call themselves are no closures: such a closure is a
cycle, and would keep the tensors of a call alive until a collection.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from graphrt.device.base import ExternalUse
from graphrt.device.simulated import refusals
from graphrt.device.simulated.kernels import Call
from graphrt.device.simulated.memory import LiveBlock, extent_bytes
from graphrt.device.simulated.operators import Operator, Traits, decompose
from graphrt.device.simulated.refusals import Place, refuse, user_place
from graphrt.device.simulated.shapes import (
    AliasOf,
    OutMeta,
    meta_of,
    signature,
    tensors_in,
)
from graphrt.device.simulated.streams import Access, RaceDetector, SimulatedStream
from graphrt.device.simulated.tape import Node, SimulatedGraph, Workspace
from graphrt.errors import (
    CaptureError,
    EmptyCaptureError,
    GraphMemoryError,
    GraphrtError,
    UnjoinedStreamError,
    UnsupportedOperationError,
)

if TYPE_CHECKING:
    from graphrt.device.simulated.device import SimulatedDevice
    from graphrt.device.simulated.memory import PoolMemory


class External:
    """Storage outside every pool that the recording touched."""

    __slots__ = ("is_baked", "kernel_touched", "tensor", "written")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.written = False
        self.kernel_touched = False
        self.is_baked = False


class Twin(NamedTuple):
    """The tape's tensor for a user's tensor: the same bytes, owning no pool memory."""

    tensor: torch.Tensor
    external: External | None


class Window:
    """What is known about the recording that is open."""

    def __init__(
        self,
        device: SimulatedDevice,
        pool: PoolMemory,
        stream: SimulatedStream,
        label: str,
        observe: bool,
    ) -> None:
        self.device = device
        self.pool = pool
        self.stream = stream
        self.label = label
        self.observe = observe
        self.is_open = True
        self.in_opaque = False
        self.nodes: list[Node] = []
        self.streams: dict[SimulatedStream, int] = {stream: stream.clock[stream]}
        """The streams that belong to the window, and how far each was when it came in."""
        self.detector: RaceDetector | None = None
        self.first_error: BaseException | None = None
        self.uses_rng = False
        self.num_allocations = 0
        self._twins: dict[Hashable, Twin] = {}
        self._externals: dict[int, External] = {}
        self._blocks: dict[LiveBlock, None] = {}
        """Allocated in this window, in order."""
        self._foreign_ranges: set[tuple[int, int]] = set()
        """Pool bytes that were filled before this window and that it touches."""
        self._calls_with_copies: list[tuple[int, tuple[LiveBlock | None, ...]]] = []
        self._workspaces: dict[SimulatedStream, Workspace] = {}
        self._owned_workspaces: list[Workspace] = []
        self.shapes = device.take_shapes()

    # The operators, as the dispatch mode hands them over.

    def handle(
        self,
        func: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reenter: Callable[[], Any],
    ) -> Any:
        """Record ``func``, or run it if it moves no data. ``reenter()``: the mode, for parts."""
        traits = self.device.traits(func)
        if traits.refusal is not None:
            raise refuse(traits.refusal)
        if traits.judged_by_arguments:
            why = refusals.refusal_of_call(func, args, kwargs)
            if why is not None:
                raise refuse(why)
        if traits.is_composite:
            with reenter():
                return decompose(func, args, kwargs)
        if traits.runs_for_real:
            self._see(args, baked=traits.bakes)
            return func(*args, **kwargs)
        return self._record(func, traits, args, kwargs)

    def _record(
        self, func: Operator, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        place = user_place()
        results, computed = self._results(func, traits, args, kwargs)
        if any(isinstance(one, AliasOf) for one in _leaves(results)):
            # The schema does not say so, but nothing new is made: a view.
            self._see(args)
            return func(*args, **kwargs) if computed is None else computed
        if any(isinstance(one, torch.device) for one in _leaves(results)):
            return func(*args, **kwargs) if computed is None else computed  # meta tensors
        stream = self._stream_for(traits.name, place)
        if not traits.only_allocates:
            self._fail_if_asked(len(self.nodes), self.device.faults.op, traits.name, place)
        if traits.takes_workspace and self.device.workspace_model:
            self._take_workspace(stream, place)
        fresh = [
            self.allocate(one, stream, place) if isinstance(one, OutMeta) else (None, None)
            for one in _leaves(results)
        ]
        tensors = [tensor for tensor, _ in fresh]
        blocks = [block for _, block in fresh]
        if computed is not None:
            places = traits.returns_written
            new = (
                computed
                if len(places) < 2
                else [one for place, one in zip(places, computed, strict=True) if place is None]
            )
            _copy_computed([one for one in tensors if one is not None], new)
        if not traits.only_allocates:
            outs = [None if one is None else self.twin(one) for one in tensors]
            self._append(func, traits, args, kwargs, outs, blocks, stream, place)
        return _rebuild(results, iter(tensors), traits, args, kwargs)

    def _results(
        self, func: Operator, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """What ``func`` returns, described; and the result itself if it had to be computed."""
        if self.device.strategy == "execute":
            return self._execute(func, traits, args, kwargs)
        if not func._schema.returns and func.namespace != "aten":
            return None, None  # A custom operator that only writes needs no fake kernel.
        try:
            key = (func, signature(args), tuple([(k, signature(v)) for k, v in kwargs.items()]))
            known = self.device.known_results.get(key)
        except TypeError:
            return self._strip_written(self.shapes.results(func, args, kwargs), traits), None
        if known is None:
            described = self.shapes.results(func, args, kwargs)
            known = (self._strip_written(described, traits),)
            self.device.known_results[key] = known
        return known[0], None

    def _execute(
        self, func: Operator, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        found: list[torch.Tensor] = []
        tensors_in((args, tuple(kwargs.values())), found)
        storages = {one.untyped_storage()._cdata for one in found}
        computed = func(*args, **kwargs)

        return self._strip_written(_described(computed, storages), traits), computed

    @staticmethod
    def _strip_written(results: Any, traits: Traits) -> Any:
        """Drop the description of results that are written arguments: they are known."""
        places = traits.returns_written
        if not any(place is not None for place in places):
            return results
        if len(places) == 1:
            return None
        return [
            None if place is not None else one for place, one in zip(places, results, strict=True)
        ]

    def _append(
        self,
        func: Operator,
        traits: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: Sequence[torch.Tensor | None],
        blocks: Sequence[LiveBlock | None],
        stream: SimulatedStream,
        place: Place,
    ) -> None:
        name = traits.name
        written = set(traits.written)
        tape_args = tuple([self._twins_in(one, at in written, name) for at, one in enumerate(args)])
        tape_kwargs = {
            key: self._twins_in(one, key in written, name) for key, one in kwargs.items()
        }
        if any(one is not None for one in outs):
            call = self.device.kernels.functional(func, tape_args, tape_kwargs, outs)
        else:
            call = self.device.kernels.mutating(func, tape_args, tape_kwargs)
        if self.detector is not None:
            self._note_accesses(stream, name, place, args, kwargs, written, outs)
        if call.copy_to:
            self._calls_with_copies.append((len(self.nodes), tuple(blocks)))
        self.uses_rng |= traits.uses_rng
        self.nodes.append(Node(call, name, str(place)))

    # Memory.

    def allocate(
        self, meta: OutMeta, stream: SimulatedStream, place: Place
    ) -> tuple[torch.Tensor, LiveBlock]:
        self._fail_if_asked(
            self.num_allocations, self.device.faults.allocation, "an allocation", place
        )
        self.num_allocations += 1
        with torch._C._InferenceMode(False):
            tensor, block = self.pool.allocate(
                meta.size, meta.stride, meta.dtype, str(place), stream
            )
        self.device.check_memory(place)
        self._blocks[block] = None
        return tensor, block

    def _take_workspace(self, stream: SimulatedStream, place: Place) -> None:
        workspace = self.device.workspaces.get(stream)
        if workspace is None:
            meta = OutMeta((self.device.workspace_bytes,), (1,), torch.uint8)
            workspace = Workspace(self.allocate(meta, stream, place)[0])
            self.device.workspaces[stream] = workspace
            self._owned_workspaces.append(workspace)
        self._workspaces[stream] = workspace

    def _see(self, args: Sequence[Any], baked: bool = False) -> None:
        """Remember the tensor objects that a view was taken of: kernels may see views only."""
        found: list[torch.Tensor] = []
        tensors_in(args, found)
        for tensor in found:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._externals and self.device.arena_at(address) is None:
                self._externals[address] = external = External(tensor)
                external.is_baked = baked

    def _twins_in(self, value: Any, written: bool, operation: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type != "cpu":
                raise _unsupported_layout(operation, value)
            return self.twin(value, written)
        if type(value) in (list, tuple):
            return type(value)([self._twins_in(one, written, operation) for one in value])
        return value

    def twin(self, tensor: torch.Tensor, written: bool = False) -> torch.Tensor:
        """The tape's tensor over the same bytes."""
        address = tensor.untyped_storage().data_ptr()
        block = self.pool.live.get(address)
        if block is not None:
            block.touches += 1
        key = (tensor.data_ptr(), address, tensor.dtype, tensor.shape, tensor.stride())
        known = self._twins.get(key)
        if known is None or tensor.is_conj() or tensor.is_neg():
            known = self._new_twin(tensor, address, block)
            self._twins[key] = known
        external = known.external
        if external is not None:
            external.kernel_touched = True
            external.written |= written
        return known.tensor

    def _new_twin(self, tensor: torch.Tensor, address: int, block: LiveBlock | None) -> Twin:
        arena = block.arena if block is not None else self.device.arena_at(address)
        with torch._C._InferenceMode(False), torch.no_grad():
            if arena is None:
                external = self._externals.get(address)
                if external is None:
                    external = self._externals[address] = External(tensor)
                return Twin(tensor.detach(), external)
            start = address + int(tensor.storage_offset()) * tensor.dtype.itemsize
            alias = arena.view(start, tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.is_conj():
                alias = alias.conj()
            if tensor.is_neg():
                alias = torch._neg_view(alias)
        if block is None or block not in self._blocks:
            end = start + extent_bytes(tensor.shape, tensor.stride(), tensor.dtype)
            self._foreign_ranges.add((start, end))
        return Twin(alias, None)

    # Streams.

    def _stream_for(self, operation: str, place: Place) -> SimulatedStream:
        stream = self.device.current_stream()
        if stream.window is not self:
            raise UnjoinedStreamError(
                f"{operation} was issued on stream {stream.name!r}, which the window does not hold",
                expected=f"the capture stream {self.stream.name!r}, or one that waits for it",
                found=f"stream {stream.name!r} at {place}: {place.text}",
                do="fork it inside the window: device.order(side_stream, capture_stream).",
                operation=operation,
                source=f"{place}: {place.text}",
            )
        stream.tick()
        return stream

    def _note_accesses(
        self,
        stream: SimulatedStream,
        operation: str,
        place: Place,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        written: set[int | str],
        outs: Sequence[torch.Tensor | None],
    ) -> None:
        assert self.detector is not None, "accesses are noted once something was marked"
        touched = [(one, at in written) for at, one in enumerate(args)]
        touched += [(one, key in written) for key, one in kwargs.items()]
        touched += [(one, True) for one in outs]
        for value, is_written in touched:
            found: list[torch.Tensor] = []
            tensors_in(value, found)
            for tensor in found:
                length = extent_bytes(tensor.shape, tensor.stride(), tensor.dtype)
                if not length:
                    continue
                start = tensor.data_ptr()
                tick = stream.clock[stream]
                self.detector.record(
                    stream,
                    Access(start, start + length, is_written, operation, str(place), tick),
                )

    # Errors, and test switches.

    def fail(self, error: GraphrtError) -> None:
        """A stream that met an error captures no more, even if the caller goes on."""
        if self.first_error is None:
            self.first_error = error
            error.found = f"{error.found}, while recording {self.label!r}"

    def _fail_if_asked(self, at: int, fault: int | None, what: str, place: Place) -> None:
        if at != fault:
            return
        error = GraphMemoryError if what == "an allocation" else CaptureError
        raise error(
            f"injected fault: {what} failed while capturing",
            expected="no fault",
            found=f"fault at {what} number {at}, at {place}: {place.text}",
            do="unset device.faults.",
            operation=what,
            source=f"{place}: {place.text}",
        )

    # The end.

    def opaque(self, fn: Callable[..., Any], args: Sequence[Any], out_meta: Any) -> Any:
        """Record ``fn(*args)`` as one node. Called with the modes disabled."""
        place = user_place()
        name = getattr(fn, "__name__", type(fn).__name__)
        computed = None
        if self.device.strategy == "execute":
            self.in_opaque = True
            try:
                computed = fn(*args)
            finally:
                self.in_opaque = False
            out_meta = computed
        elif out_meta is None:
            raise UnsupportedOperationError(
                f"opaque call of {name} without out_meta",
                expected="out_meta: tensors (meta ones too) that say what the call returns",
                found=f"none, at {place}",
                do="pass out_meta (an empty tuple if it returns None), or use strategy='execute'.",
                operation=name,
                source=f"{place}: {place.text}",
            )
        stream = self._stream_for(name, place)
        self._fail_if_asked(len(self.nodes), self.device.faults.op, name, place)
        metas: list[torch.Tensor] = []
        tensors_in(out_meta, metas)
        fresh = [self.allocate(meta_of(one), stream, place)[0] for one in metas]
        if computed is not None:
            _copy_computed(fresh, computed)
        outs = tuple([self.twin(one) for one in fresh])
        tape_args = tuple([self._twins_in(one, False, name) for one in args])
        if self.detector is not None:
            self._note_accesses(stream, name, place, args, {}, set(), outs)
        self.nodes.append(Node(Call(_Opaque(fn, outs), tape_args, {}), name, str(place)))
        return _refill(out_meta, iter(fresh))

    def finish(self, allow_empty: bool) -> SimulatedGraph:
        """Build the graph. The modes are gone, the streams still belong to the window."""
        if self.first_error is not None:
            raise self.first_error
        if self.device.faults.end:
            raise CaptureError(
                "injected fault: the end of the window failed",
                expected="no fault",
                found="device.faults.end is set",
                do="unset device.faults.",
            )
        self._check_joined()
        if not self.nodes and not allow_empty:
            raise EmptyCaptureError(
                f"{self.label}: nothing was recorded",
                expected="at least one kernel in the window",
                found="none",
                do="check that the callable does its work on this device and this stream.",
            )
        self.device.check_graph(self.label, len(self.nodes))
        self.pool.poll()
        self._drop_unread_results()
        touched = [one for one in self._externals.values() if one.kernel_touched]
        externals = (
            [ExternalUse(one.tensor, one.written) for one in touched if not one.is_baked]
            if self.observe
            else []
        )
        return SimulatedGraph(
            self.device,
            self.pool,
            self.label,
            self.nodes,
            uses_rng=self.uses_rng,
            externals=externals,
            held=[one.tensor for one in touched],
            scratch=self._scratch(),
            workspaces=list(self._workspaces.values()),
            owned_workspaces=self._owned_workspaces,
        )

    def _check_joined(self) -> None:
        for stream, ticks in self.streams.items():
            known = max(ticks, self.stream.clock.get(stream, 0))
            if stream.clock[stream] > known:
                raise UnjoinedStreamError(
                    f"stream {stream.name!r} was not joined before the end of the window",
                    expected=f"the capture stream {self.stream.name!r} to wait for its last work",
                    found=f"work on {stream.name!r} that nothing waits for",
                    do=f"device.order({self.stream.name!r}, {stream.name!r}) before the end.",
                )

    def _drop_unread_results(self) -> None:
        """Do not copy results that nobody reads: freed, and touched by their own kernel only."""
        for at, blocks in self._calls_with_copies:
            node = self.nodes[at]
            copy_to = tuple(
                [
                    None if block is not None and block.touches == 1 and block.is_dead else target
                    for target, block in zip(node.call.copy_to, blocks, strict=True)
                ]
            )
            self.nodes[at] = node._replace(call=node.call._replace(copy_to=copy_to))

    def _scratch(self) -> list[torch.Tensor]:
        """Bytes allocated in this window, apart from those another segment had filled before."""
        ranges: dict[tuple[int, int], torch.Tensor] = {}
        with torch._C._InferenceMode(False), torch.no_grad():
            for block in self._blocks:
                start, end = block.address, block.address + block.num_bytes
                if not any(low < end and start < high for low, high in self._foreign_ranges):
                    ranges[start, end] = block.arena.view(
                        start, (block.num_bytes,), (1,), torch.uint8
                    )
        return list(ranges.values())


def _described(value: Any, storages: set[int]) -> Any:
    """A computed result, as ``ShapeInference`` would describe it."""
    if isinstance(value, torch.Tensor):
        if value.untyped_storage()._cdata in storages:
            return AliasOf(0, False)
        return meta_of(value) if value.device.type == "cpu" else value.device
    if isinstance(value, (list, tuple)):
        return [_described(one, storages) for one in value]
    return value


class _Opaque:
    """An opaque call at replay: its results go where the capture said."""

    def __init__(self, fn: Callable[..., Any], outs: tuple[torch.Tensor, ...]) -> None:
        self.fn = fn
        self.outs = outs

    def __call__(self, *args: Any) -> None:
        found: list[torch.Tensor] = []
        tensors_in(self.fn(*args), found)
        for target, value in zip(self.outs, found, strict=True):
            target.copy_(value)


def _unsupported_layout(operation: str, tensor: torch.Tensor) -> UnsupportedOperationError:
    place = user_place()
    return UnsupportedOperationError(
        f"{operation} takes a tensor that the simulated device cannot hold",
        expected="strided CPU tensors",
        found=f"layout {tensor.layout} on {tensor.device}, at {place}: {place.text}",
        do="convert it before the capture.",
        operation=operation,
        source=f"{place}: {place.text}",
    )


def _leaves(results: Any) -> list[Any]:
    if type(results) is list:
        return [leaf for one in results for leaf in _leaves(one)]
    return [results]


def _copy_computed(tensors: Sequence[torch.Tensor], computed: Any) -> None:
    found: list[torch.Tensor] = []
    tensors_in(computed, found)
    if tensors:
        for target, value in zip(tensors, found, strict=True):
            target.copy_(value)


def _rebuild(
    results: Any,
    tensors: Iterator[torch.Tensor | None],
    traits: Traits,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The operator's result: fresh tensors, and written arguments in their places."""

    places = traits.returns_written
    if len(places) == 0:
        return None
    if len(places) == 1:
        return (
            _filled(results, tensors) if places[0] is None else _argument(places[0], args, kwargs)
        )
    return tuple(
        [
            _filled(one, tensors) if place is None else _argument(place, args, kwargs)
            for place, one in zip(places, results, strict=True)
        ]
    )


def _filled(result: Any, tensors: Iterator[torch.Tensor | None]) -> Any:
    # Not a closure: one that names itself is a cycle, and would keep blocks alive until a
    # collection.
    if type(result) is list:
        return [_filled(one, tensors) for one in result]
    tensor = next(tensors)
    return result if tensor is None else tensor


def _argument(place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]


def _refill(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(structure, torch.Tensor):
        return next(tensors)
    if isinstance(structure, (list, tuple)):
        filled = [_refill(one, tensors) for one in structure]
        return (
            type(structure)(*filled) if hasattr(structure, "_fields") else type(structure)(filled)
        )
    return structure

"""Races between streams: two accesses to the same bytes that nothing orders, one of them a write.

Recordings look for them from their first mark on, and eager code where ``RaceWatch`` is entered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.context import current_forward_context
from graphrt.device.simulated.forbidden_ops import Args, Kwargs
from graphrt.device.simulated.memory import extent_bytes, without_modes
from graphrt.device.simulated.ops import Operators, decompose, tensors_in
from graphrt.device.simulated.streams import CallingThread, SimulatedStream
from graphrt.device.torch_modes import is_for_parts
from graphrt.errors import StreamRaceError
from graphrt.source import Source, caller_source


class _Access(NamedTuple):
    """One operation that touches elements between the bytes ``start`` and ``end``."""

    start: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    itemsize: int
    written: bool
    operation: str
    where: str
    """Micro-batch and tag; empty outside."""
    source: Source
    tick: int

    def mask(self, low: int, high: int) -> torch.Tensor:
        """[high - low]: which of the bytes from ``low`` on it touches."""
        dims = [(n, step) for n, step in zip(self.shape, self.stride, strict=True) if step]
        sizes = [*(n for n, _ in dims), self.itemsize]
        steps = [*(step * self.itemsize for _, step in dims), 1]
        touched = torch.zeros(self.end - self.start, dtype=torch.bool)
        touched.as_strided(sizes, steps).fill_(True)
        return touched[low - self.start : high - self.start]

    @property
    def is_dense(self) -> bool:
        count = self.itemsize
        for n, step in zip(self.shape, self.stride, strict=True):
            count *= n if step else 1
        return count == self.end - self.start


class Accesses:
    """What the operations of each stream have touched so far."""

    def __init__(self) -> None:
        self._by_stream: dict[SimulatedStream, dict[Any, _Access]] = {}

    def note(
        self, value: Any, written: bool, operation: str, stream: SimulatedStream, source: Source
    ) -> None:
        """Errors: ``StreamRaceError`` naming both operations."""
        for tensor in tensors_in(value):
            shape, stride, start = tuple(tensor.shape), tensor.stride(), tensor.data_ptr()
            length = extent_bytes(shape, stride, tensor.dtype)
            if length:
                place = (start, start + length, shape, stride, tensor.dtype.itemsize, written)
                told = (operation, _micro_batch(), source)
                self._add(stream, _Access(*place, *told, stream.clock[stream]))

    def _add(self, stream: SimulatedStream, access: _Access) -> None:
        for other, accesses in self._by_stream.items():
            if other is stream:
                continue
            known = stream.clock.get(other, 0)
            for earlier in accesses.values():
                if (
                    earlier.tick > known
                    and earlier.start < access.end
                    and access.start < earlier.end
                    and (earlier.written or access.written)
                    and (shared := _num_shared(earlier, access))
                ):
                    raise _race(other, earlier, stream, access, shared)
        # The latest access to the same bytes is the one that others must come after.
        self._by_stream.setdefault(stream, {})[access[:6]] = access


def touched_by(
    args: Sequence[Any], kwargs: Kwargs, written: Collection[int | str], results: Any
) -> list[tuple[Any, bool]]:
    """What a call touches, and whether it writes it."""
    places = (*enumerate(args), *kwargs.items())
    return [*((one, place in written) for place, one in places), (results, True)]


def _num_shared(one: _Access, other: _Access) -> int:
    """Bytes that both touch. Strided tensors may lie between each other's elements."""
    low, high = max(one.start, other.start), min(one.end, other.end)
    if one.is_dense and other.is_dense:
        return high - low
    with without_modes():
        return int((one.mask(low, high) & other.mask(low, high)).sum())


def _micro_batch() -> str:
    context = current_forward_context()
    ubatch = None if context is None else context.ubatch
    if ubatch is None:
        return ""
    tag = "" if ubatch.tag is None else f"{ubatch.tag!r}, "
    return f"{tag}micro-batch {ubatch.index}, "


def _race(
    other: SimulatedStream, earlier: _Access, stream: SimulatedStream, access: _Access, shared: int
) -> StreamRaceError:
    def told(one: _Access, on: SimulatedStream) -> str:
        return f"{one.operation} ({one.where}stream {on.name!r}, at {one.source})"

    did = "wrote" if earlier.written else "reads"
    does = "writes" if access.written else "reads"
    return StreamRaceError(
        f"two streams touch the same {shared} bytes and nothing orders them",
        expected="a mark on one stream and a wait for it on the other, between the two",
        found=f"{told(access, stream)} {does} what {told(earlier, other)} {did}, and does not "
        "wait for it",
        do=f"mark {other.name!r} and wait for the mark on {stream.name!r}; in a micro-batch, use "
        "ubatch.communication, and allocate buffers before it",
    )


class RaceWatch(TorchDispatchMode):
    """Runs operations as they are, and looks for races between the streams they are issued on.

    What they touch stays allocated while it is entered: on a GPU one stream's memory would not
    become another's either.
    """

    supports_higher_order_operators = True

    def __init__(self, thread: CallingThread, operators: Operators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._thread = thread
        self._operators = operators
        self._accesses = Accesses()
        self._kept: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if is_for_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        traits = self._operators.traits(func)
        if traits.is_composite:
            with self:
                return decompose(func, args, kwargs)
        # A collective whose answer is no tensor looks like a question about metadata.
        reads_data = func.namespace == "c10d" or (
            traits.asks_metadata and self._operators.reads_data(func, args, kwargs)
        )
        result = func(*args, **kwargs)
        if not reads_data and (traits.moves_no_data or traits.only_allocates):
            return result
        places = traits.written
        if func.namespace == "c10d" and not places:
            places = _written_by_collective(func)
        self.note(touched_by(args, kwargs, places, result), traits.name)
        return result

    def note(self, touched: list[tuple[Any, bool]], operation: str) -> None:
        stream, source = self._thread.stream, caller_source()
        stream.clock[stream] += 1
        for value, written in touched:
            for tensor in tensors_in(value):
                if tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    self._kept.setdefault(storage.data_ptr(), storage)
                    self._accesses.note(tensor, written, operation, stream, source)


class _HostReads(TorchFunctionMode):
    """Tells a watch of the reads that a CPU tensor answers without the dispatcher."""

    def __init__(self, watch: RaceWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        name = _HOST_READS.get(func)
        if func is torch.Tensor.to and "cpu" in (*args[1:2], (kwargs or {}).get("device")):
            # By name: a ``torch.device`` may be the simulated one, to which nothing is copied.
            name = "Tensor.to"
        if name is not None and isinstance(args[0], torch.Tensor):
            # On a GPU, by a copy on the current stream.
            self._watch.note([(args[0], False)], name)
        return func(*args, **(kwargs or {}))


_HOST_READS = {
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.cpu: "Tensor.cpu",
}


@contextmanager
def watching_races(thread: CallingThread, operators: Operators) -> Iterator[None]:
    """Around eager code: look for races between the streams that it is issued on."""
    watch = RaceWatch(thread, operators)
    with _HostReads(watch), watch:
        yield


def _written_by_collective(func: Any) -> frozenset[int | str]:
    """Which arguments it writes: schemas of torch.distributed leave that out."""
    names = [argument.name for argument in func._schema.arguments]
    found = {at for at, name in enumerate(names) if name.startswith("output")}
    if not found and func._schema.name != "c10d::send":
        found = {at for at, name in enumerate(names) if name.startswith("tensor")}
    return frozenset(found)

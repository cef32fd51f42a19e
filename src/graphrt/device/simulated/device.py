"""The simulated device: CUDA-graph semantics on a CPU.

It records kernels and runs no Python at replay, shares a memory pool that really reuses and
poisons, and refuses what CUDA refuses. It cannot model time, real overlap, the split between host
and device memory, CUDA-only kernels, nor what threads do that never joined a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch

from graphrt.device.base import DeviceLimits, Mark as BaseMark, MemoryReading, Pool, Stream
from graphrt.device.cuda_query import answering
from graphrt.device.simulated.kernels import KernelBinder
from graphrt.device.simulated.memory import Arena, PoolMemory, SimulatedPool
from graphrt.device.simulated.modes import without_modes
from graphrt.device.simulated.operators import Traits, traits_of
from graphrt.device.simulated.recording import SimulatedRecording
from graphrt.device.simulated.refusals import Place, user_place
from graphrt.device.simulated.shapes import ShapeInference
from graphrt.device.simulated.streams import RaceDetector, SimulatedMark, SimulatedStream
from graphrt.device.simulated.tape import NODE_BYTES, SimulatedGraph, Workspace
from graphrt.device.simulated.window import Window
from graphrt.errors import (
    AmbientError,
    CaptureError,
    CaptureInProgressError,
    ConfigError,
    GraphMemoryError,
    LifetimeError,
    UnjoinedStreamError,
)

Alarm = Callable[[Callable[[], bool]], AbstractContextManager[Any]]
"""Made by whoever knows compiled code: entered while recording, it raises for a compiled call
unless the function it was given says that an opaque node runs."""


@dataclass(kw_only=True, slots=True)
class Faults:
    """Where the device shall fail, for tests. Numbers count from 0 in each window or replay."""

    op: int | None = None
    """The kernel that fails while it is recorded."""
    allocation: int | None = None
    """The allocation in a window that finds no memory."""
    end: bool = False
    """The end of a window fails."""
    replay_op: int | None = None
    """The kernel that fails at replay; those before it have run."""


class _ThreadState(NamedTuple):
    """What one thread is doing on one device."""

    stream: SimulatedStream
    window: Window | None
    answers_capture: bool


class SimulatedDevice:
    """See ``base.Device``.

    ``strategy``: "deferred" computes nothing in a window; "execute" also computes, and thereby
    changes state, which operators without a fake kernel need.
    ``poison``: "window" fills memory allocated in a window, and what is freed there, with 0xFF;
    "always" also a graph's own memory before each of its replays.
    ``strict``: a tensor made from host values in a window is an error, not a warning.
    ``driver_bytes``: what the driver reports as total; pools and 1.8 KiB a node count against it.
    ``workspace_model``: the first matrix product on a stream takes scratch memory from the pool,
    as cuBLAS does.
    """

    def __init__(
        self,
        *,
        strategy: Literal["deferred", "execute"] = "deferred",
        poison: Literal["window", "always"] = "window",
        strict: bool = False,
        faults: Faults | None = None,
        driver_bytes: int = 16 << 30,
        max_graphs: int | None = None,
        max_streams: int | None = None,
        num_sms: int = 132,
        workspace_model: bool = False,
        workspace_bytes: int = 4096,
    ) -> None:
        for field, value, accepted in (
            ("strategy", strategy, ("deferred", "execute")),
            ("poison", poison, ("window", "always")),
        ):
            if value not in accepted:
                raise ConfigError(
                    f"SimulatedDevice: {field}",
                    expected=" or ".join(map(repr, accepted)),
                    found=repr(value),
                    do="use one of them.",
                )
        self.strategy = strategy
        self.poison = poison
        self.strict = strict
        self.faults = faults if faults is not None else Faults()
        self.alarm: Alarm | None = None
        self.workspace_model = workspace_model
        self.workspace_bytes = workspace_bytes
        self.workspaces: dict[SimulatedStream, Workspace] = {}
        self.kernels = KernelBinder()
        # Made here: the first one imports for a second. More are made when threads record at once.
        self._shapes = [ShapeInference()]
        self.known_results: dict[Any, tuple[Any]] = {}
        self._limits = DeviceLimits(max_graphs=max_graphs, max_streams=max_streams, num_sms=num_sms)
        self._driver_bytes = driver_bytes
        self._traits: dict[Any, Traits] = {}
        self._pools: list[PoolMemory] = []
        self._graphs: list[SimulatedGraph] = []
        self._node_counts: dict[int, int] = {}
        """By graph. Every operation of a window asks for their sum."""
        self._default_stream = SimulatedStream("default")
        self._streams: dict[str, SimulatedStream] = {}
        self._is_closed = False
        idle = _ThreadState(self._default_stream, None, False)
        self._thread: ContextVar[_ThreadState] = ContextVar("graphrt_simulated", default=idle)

    @property
    def name(self) -> str:
        return "simulated"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def limits(self) -> DeviceLimits:
        return self._limits

    # Streams.

    def stream(self, name: str) -> SimulatedStream:
        known = self._streams.get(name)
        if known is None:
            if self._limits.max_streams is not None and len(self._streams) >= (
                self._limits.max_streams
            ):
                raise CaptureError(
                    "the device has no more streams",
                    expected=f"at most {self._limits.max_streams}",
                    found=f"one more, {name!r}",
                    do="share streams, or raise max_streams.",
                )
            known = self._streams[name] = SimulatedStream(name)
        return known

    def forget_stream(self, stream: Stream) -> None:
        if self._streams.get(stream.name) is stream:
            del self._streams[stream.name]

    def current_stream(self) -> SimulatedStream:
        return self._thread.get().stream

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = self._thread.get()
        self._thread.set(before._replace(stream=_ours(stream)))
        try:
            yield
        finally:
            self._thread.set(self._thread.get()._replace(stream=before.stream))

    def mark(self, stream: Stream) -> SimulatedMark:
        ours = _ours(stream)
        if ours.window is not None and ours.window.detector is None:
            # Whatever was recorded before comes before everything that can wait for this mark.
            ours.window.detector = RaceDetector()
        return SimulatedMark(ours, dict(ours.clock), ours.window)

    def wait(self, stream: Stream, mark: BaseMark) -> None:
        ours, point = _ours(stream), cast(SimulatedMark, mark)
        window = point.window
        if window is not None and not window.is_open:
            raise _crosses(ours, point, f"a mark that was taken in the closed {window.label!r}")
        if window is None and ours.window is not None:
            raise _crosses(ours, point, "a mark that was taken outside this window")
        if window is not None and ours.window is None:
            ours.window = window
            window.streams[ours] = ours.clock[ours]
        elif window is not ours.window:
            raise _crosses(ours, point, "a mark that belongs to another window")
        ours.learn(point.clock)

    def order(self, after: Stream, before: Stream) -> None:
        self.wait(after, self.mark(before))

    def synchronize(self, stream: Stream | None = None) -> None:
        """Everything has run already. Inside a window it is as illegal as on CUDA."""
        if self.is_capturing():
            place = user_place()
            raise CaptureError(
                "the device cannot be waited for while capturing",
                expected="no synchronisation inside a window",
                found=f"synchronize() at {place}: {place.text}",
                do="wait before the capture or after it.",
                operation="synchronize",
                source=f"{place}: {place.text}",
            )

    # Windows.

    def begin(
        self,
        pool: Pool,
        stream: Stream,
        label: str,
        generators: Sequence[torch.Generator] = (),
        observe: bool = True,
    ) -> SimulatedRecording:
        """See ``base.Device.begin``. Generators need no declaration: replays draw from them."""
        self._check_open()
        ours, memory = _ours(stream), self._memory_of(pool)
        if self.is_capturing() or memory.in_window or ours.window is not None:
            raise CaptureInProgressError(
                f"{label}: a window is open already",
                expected="no open window on this thread, this stream or this pool",
                found=f"an open window on thread, stream {ours.name!r} or pool {memory.handle}",
                do="end or abort it first.",
            )
        if self.current_stream() is not ours:
            raise AmbientError(
                f"{label}: the window would open on a stream that is not current",
                expected=f"stream {ours.name!r} to be current",
                found=f"stream {self.current_stream().name!r}",
                do="enter device.use(stream) around begin and end.",
            )
        return SimulatedRecording(Window(self, memory, ours, label, observe))

    def is_capturing(self) -> bool:
        window = self._thread.get().window
        return window is not None and window.is_open

    @contextmanager
    def answering_capture(self) -> Iterator[None]:
        before = self._thread.get().answers_capture
        self._thread.set(self._thread.get()._replace(answers_capture=True))
        try:
            with answering(self._answers_capture):
                yield
        finally:
            self._thread.set(self._thread.get()._replace(answers_capture=before))

    def _answers_capture(self) -> bool:
        return self._thread.get().answers_capture

    @contextmanager
    def inside(self, window: Window) -> Iterator[None]:
        """The calling thread works for ``window``, on its stream unless it is on one it forked."""
        before = self._thread.get()
        stream = before.stream if before.stream.window is window else window.stream
        self._thread.set(before._replace(window=window, stream=stream))
        try:
            yield
        finally:
            self._thread.set(before)

    def take_shapes(self) -> ShapeInference:
        """For one window; it comes back when the window is left."""
        try:
            return self._shapes.pop()
        except IndexError:
            return ShapeInference()

    def enter_window(self, window: Window) -> None:
        window.pool.open_window()
        window.stream.window = window
        self.workspaces.clear()
        self._thread.set(self._thread.get()._replace(window=window))

    def leave_window(self, window: Window, graph: SimulatedGraph | None) -> None:
        """Close everything that the window held. ``graph``: what came of it."""
        window.is_open = False
        # Kept by the recording, the error would be a cycle through its traceback, and hold tensors.
        window.first_error = None
        self._shapes.append(window.shapes)
        for stream in window.streams:
            stream.window = None
        # Each recording owns its workspaces: another one must not find them here.
        self.workspaces.clear()
        self._thread.set(self._thread.get()._replace(window=None))
        if graph is not None:
            self._graphs.append(graph)
            self._node_counts[id(graph)] = graph.num_nodes
        window.pool.close_window(keep=graph is not None)

    def traits(self, func: Any) -> Traits:
        known = self._traits.get(func)
        if known is None:
            known = self._traits[func] = traits_of(func)
        return known

    # Memory.

    def new_pool(self, handle: Any = None) -> SimulatedPool:
        self._check_open()
        if handle is not None:
            for known in self._pools:
                if known.handle == handle and known.num_views:
                    return SimulatedPool(known)
            raise ConfigError(
                "a pool handle that this device does not know",
                expected=f"one of {[known.handle for known in self._pools if known.num_views]}",
                found=repr(handle),
                do="take it from pool.handle of a pool that was not released.",
            )
        # Released memory stays in the list: what still points into it reads poison.
        self._pools.append(PoolMemory((0, len(self._pools) + 1)))
        return SimulatedPool(self._pools[-1])

    def alloc(
        self, pool: Pool, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        memory = self._memory_of(pool)
        place = user_place()
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            tensor, _ = memory.allocate(tuple(size), tuple(stride), dtype, str(place), None)
        self.check_memory(place)
        memory.keep()
        return tensor

    def weak_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        arena = self.arena_at(address)
        if arena is None:
            return tensor
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            flat = arena.owning(
                address - arena.address,
                storage.nbytes(),
                (storage.nbytes() // tensor.dtype.itemsize,),
                (1,),
                tensor.dtype,
            )
            return flat.as_strided_(tensor.shape, tensor.stride(), tensor.storage_offset())

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.arena_at(tensor.untyped_storage().data_ptr()) is not None

    def trim(self) -> None:
        self.workspaces.clear()

    def memory(self, pool: Pool | None = None) -> MemoryReading:
        pool_bytes = pool.bytes() if pool is not None else 0
        return MemoryReading(
            free_bytes=max(self._driver_bytes - self._used_bytes(), 0),
            total_bytes=self._driver_bytes,
            reserved_bytes=sum(arena.top for one in self._pools for arena in one.arenas),
            pool_bytes=pool_bytes,
        )

    def check_memory(self, place: Place) -> None:
        """Errors: ``GraphMemoryError`` once pools and graphs exceed what the driver has."""
        used = self._used_bytes()
        if used > self._driver_bytes:
            raise GraphMemoryError(
                "the device is out of memory",
                expected=f"at most {self._driver_bytes} bytes",
                found=f"{used} bytes after an allocation at {place}: {place.text}",
                do="capture fewer or smaller keys, largest first.",
                operation="an allocation",
                source=f"{place}: {place.text}",
            )

    def _used_bytes(self) -> int:
        """Of the driver's memory. Looks at no block: another thread may be recording."""
        reserved = sum(arena.top for pool in self._pools for arena in pool.arenas)
        return reserved + sum(list(self._node_counts.values())) * NODE_BYTES

    def check_graph(self, label: str, num_nodes: int) -> None:
        """Errors: ``GraphMemoryError`` if one more graph of ``num_nodes`` does not fit."""
        if self._limits.max_graphs is not None and len(self._graphs) >= self._limits.max_graphs:
            raise GraphMemoryError(
                f"{label}: the device holds no more graphs",
                expected=f"at most {self._limits.max_graphs} graphs",
                found=f"{len(self._graphs)} and one more",
                do="retire a generation first.",
            )
        free = self._driver_bytes - self._used_bytes()
        if num_nodes * NODE_BYTES > free:
            raise GraphMemoryError(
                f"{label}: the graph cannot be instantiated",
                expected=f"{num_nodes * NODE_BYTES} bytes for {num_nodes} nodes",
                found=f"{free} bytes free",
                do="capture fewer keys, or retire a generation first.",
            )

    def forget(self, graph: SimulatedGraph) -> None:
        """A graph was reset: it counts no more."""
        self._graphs = [one for one in self._graphs if one is not graph]
        self._node_counts.pop(id(graph), None)

    def close(self) -> None:
        if self._is_closed:
            return
        if any(pool.in_window for pool in self._pools):
            raise CaptureInProgressError(
                "the device cannot be closed while a window is open",
                expected="every recording ended or aborted",
                found="an open window",
                do="end or abort it first.",
            )
        for graph in list(self._graphs):
            graph.reset()
        for memory in self._pools:
            memory.num_views = 0
            memory.release()
        self._is_closed = True

    def arena_at(self, address: int) -> Arena | None:
        for memory in self._pools:
            arena = memory.arena_at(address) if memory.num_views else None
            if arena is not None:
                return arena
        return None

    def _memory_of(self, pool: Pool) -> PoolMemory:
        assert isinstance(pool, SimulatedPool), "a pool belongs to the device that made it"
        if pool.released or not pool.memory.num_views:
            raise LifetimeError(
                "a released pool",
                expected="a pool that was not released",
                found=f"pool {pool.handle}",
                do="make a new one: device.new_pool().",
            )
        return pool.memory

    def _check_open(self) -> None:
        if self._is_closed:
            raise LifetimeError(
                "the device is closed",
                expected="an open device",
                found="a closed one",
                do="make a new SimulatedDevice.",
            )


def _ours(stream: Stream) -> SimulatedStream:
    assert isinstance(stream, SimulatedStream), "a stream belongs to the device that made it"
    return stream


def _crosses(stream: SimulatedStream, mark: SimulatedMark, found: str) -> UnjoinedStreamError:
    return UnjoinedStreamError(
        f"stream {stream.name!r} waits across the edge of a window",
        expected="marks taken and waited for inside the same window, or both outside",
        found=f"{found}, on stream {mark.stream.name!r}",
        do="take the mark again on this side of the edge.",
    )

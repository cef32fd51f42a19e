"""The simulated device: CUDA-graph semantics on a CPU.

It records kernels and calls them one by one at replay, shares a memory pool that really reuses and
poisons, and refuses what CUDA refuses. It cannot model time, real overlap, the split between host
and device memory, CUDA-only kernels, nor what threads do that never joined a recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch.overrides import BaseTorchFunctionMode

from graphrt.config.checked import check_choice, check_flags
from graphrt.device.base import DeviceLimits, Mark, MemoryReading, Pool, Stream
from graphrt.device.simulated.graph import Faults, Shared
from graphrt.device.simulated.memory import DeviceMemory, PoolMemory, SimulatedPool, without_modes
from graphrt.device.simulated.races import watching_races
from graphrt.device.simulated.recorder import SimulatedRecording, is_recording
from graphrt.device.simulated.streams import SimulatedMark, SimulatedStream
from graphrt.device.torch_modes import report_capturing, with_bits_of
from graphrt.errors import (
    CaptureError,
    CaptureInProgressError,
    ConfigError,
    EnvironmentMismatchError,
    LifetimeError,
)
from graphrt.source import caller_source


class SimulatedDevice:
    """See ``base.Device``.

    ``poison``: "recording" fills memory allocated in a recording, and freed there, with 0xFF;
    "always" also a graph's own memory before each of its replays.
    ``strict``: a tensor made from host values in a recording is an error, not a warning.
    ``driver_bytes``: what the driver reports as total; pools and 1.8 KiB a node count against it.
    ``workspace_model``: the first matrix product on a stream takes 4 KiB of scratch memory from
    the pool, as cuBLAS does.
    """

    name = "simulated"
    torch_device = torch.device("cpu")
    generator = torch.default_generator

    def __init__(
        self,
        *,
        poison: Literal["recording", "always"] = "recording",
        strict: bool = False,
        faults: Faults | None = None,
        driver_bytes: int = 16 << 30,
        max_graphs: int | None = None,
        max_streams: int | None = None,
        num_sms: int = 132,
        workspace_model: bool = False,
    ) -> None:
        check_choice("SimulatedDevice: poison", poison, ("recording", "always"))
        check_flags("SimulatedDevice", strict=strict, workspace_model=workspace_model)
        self.faults = faults if faults is not None else Faults()
        self._memory = DeviceMemory(driver_bytes, max_graphs)
        self.shared = Shared(
            faults=self.faults,
            strict=strict,
            poisons_always=poison == "always",
            takes_workspaces=workspace_model,
            memory=self._memory,
        )
        self.limits = DeviceLimits(max_graphs=max_graphs, max_streams=max_streams, num_sms=num_sms)
        self._streams: dict[str, SimulatedStream] = {}
        self._is_closed = False
        self.ranges: deque[str] = deque(maxlen=1024)
        """Labels of the latest ranges, in the order they were entered."""

    # Streams.

    def stream(self, name: str) -> SimulatedStream:
        known = self._streams.get(name)
        if known is None:
            most = self.limits.max_streams
            if most is not None and len(self._streams) >= most:
                raise CaptureError(
                    "the device has no more streams",
                    expected=f"at most {most}",
                    found=f"one more, {name!r}",
                    do="share streams, or raise max_streams.",
                )
            known = self._streams[name] = SimulatedStream(name)
        return known

    def adopt_stream(self, stream: object) -> SimulatedStream:
        if isinstance(stream, SimulatedStream) and self._streams.get(stream.name) is stream:
            return stream
        raise ConfigError(
            "capture stream",
            expected="a stream of this device, device.stream(name), other than the default one",
            found="the default stream" if stream is self.shared.thread.default else repr(stream),
            do="pass one that this device has made",
        )

    def forget_stream(self, stream: Stream) -> None:
        if self._streams.get(stream.name) is stream:
            del self._streams[stream.name]

    def current_stream(self) -> SimulatedStream:
        return self.shared.thread.stream

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return self.shared.thread.use(_ours(stream))

    def mark(self, stream: Stream) -> SimulatedMark:
        return _ours(stream).mark()

    def wait(self, stream: Stream, mark: Mark) -> None:
        _ours(stream).wait(cast(SimulatedMark, mark))

    def order(self, after: Stream, before: Stream) -> None:
        self.wait(after, self.mark(before))

    def prepare_thread(self, streams: Sequence[Stream]) -> None:
        """It has no libraries that set anything up."""

    def record_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        address = tensor.untyped_storage().data_ptr()
        found = (pool.live.get(address) for pool in self._memory.pools)
        block = next(filter(None, found), None)
        if block is not None and block.owner is not _ours(stream):
            # Nothing is ever issued there, so nothing takes the bytes.
            block.owner = SimulatedStream(f"used on {stream.name}")

    def watch_races(self) -> AbstractContextManager[Any]:
        return watching_races(self.shared.thread, self.shared.operators)

    def synchronize(self, stream: Stream | None = None) -> None:
        """Everything has run already. Inside a recording it is as illegal as on CUDA."""
        if self.is_capturing():
            source = caller_source()
            raise CaptureError(
                "the device cannot be waited for while capturing",
                expected="no synchronisation inside a recording",
                found=f"synchronize() at {source.with_text}",
                do="wait before the capture or after it.",
                operation="synchronize",
                source=source.with_text,
            )

    def ends_within(self, seconds: float) -> bool:
        self.synchronize()
        return True

    # Recordings.

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
        if self.is_capturing() or memory.is_recording or ours.recording is not None:
            raise CaptureInProgressError(
                f"{label}: a recording is open already",
                expected="no open recording on this thread, this stream or this pool",
                found=f"an open recording on thread, stream {ours.name!r} or pool {memory.handle}",
                do="end or abort it first.",
            )
        if self.current_stream() is not ours:
            raise EnvironmentMismatchError(
                f"{label}: the recording would open on a stream that is not current",
                expected=f"stream {ours.name!r} to be current",
                found=f"stream {self.current_stream().name!r}",
                do="enter device.use(stream) around begin and end.",
            )
        return SimulatedRecording(self.shared, memory, ours, label, observe, generators)

    def is_capturing(self) -> bool:
        return self.shared.thread.is_capturing() or is_recording()

    def guard_compiled_code(self, guard: Callable[[], AbstractContextManager[Any]]) -> None:
        self.shared.compiled_code_guard = guard

    def report_capturing(self) -> AbstractContextManager[None]:
        return report_capturing()

    def modes_of_recording(self) -> AbstractContextManager[Any]:
        return BaseTorchFunctionMode()  # It calls every function as it is.

    def range(self, label: str) -> AbstractContextManager[None]:
        """No profiler sees it: the latest labels are in ``ranges``."""
        self.ranges.append(label)
        return nullcontext()

    # Memory.

    def new_pool(self, handle: Any = None) -> SimulatedPool:
        self._check_open()
        pools = self._memory.pools
        if handle is None:
            pools.append(PoolMemory((0, len(pools) + 1)))
            return SimulatedPool(pools[-1])
        known = {pool.handle: pool for pool in pools if pool.num_views}
        if handle not in known:
            raise ConfigError(
                "a pool handle that this device does not know",
                expected=f"one of {list(known)}",
                found=repr(handle),
                do="take it from pool.handle of a pool that was not released.",
            )
        return SimulatedPool(known[handle])

    def alloc(
        self, pool: Pool, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        memory = self._memory_of(pool)
        source = caller_source()
        with without_modes():
            tensor, _ = memory.allocate(
                tuple(size), tuple(stride), dtype, str(source), self.current_stream()
            )
        self._memory.check_allocation(source)
        memory.keep()
        return tensor

    def weak_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        arena = self._memory.arena_of(tensor)
        if arena is None:
            return tensor
        storage = tensor.untyped_storage()
        offset = storage.data_ptr() - arena.address
        with without_modes():
            flat = arena.owning(offset, storage.nbytes(), tensor.dtype)
            alias = flat.as_strided_(tensor.shape, tensor.stride(), tensor.storage_offset())
            return with_bits_of(alias, tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._memory.arena_of(tensor) is not None

    def trim(self) -> None:
        self.shared.workspaces.clear()

    def memory(self, pool: Pool | None = None) -> MemoryReading:
        return self._memory.reading(pool.bytes() if pool is not None else 0)

    def close(self) -> None:
        if self._is_closed:
            return
        pools = self._memory.pools
        if any(pool.is_recording for pool in pools):
            raise CaptureInProgressError(
                "the device cannot be closed while a recording is open",
                expected="every recording ended or aborted",
                found="an open recording",
                do="end or abort it first.",
            )
        for graph in list(self._memory.graphs):
            graph.reset()
        for pool in pools:
            pool.num_views = 0
            pool.release()
        self._is_closed = True

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

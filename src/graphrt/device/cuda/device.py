"""One CUDA device: its streams, its pools, and where recordings begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from graphrt.device.base import DeviceLimits, Mark, MemoryReading, Pool, Stream
from graphrt.device.cuda import private
from graphrt.device.cuda.failures import translate
from graphrt.device.cuda.pool import CUDAPool, PoolTable, storage_address
from graphrt.device.cuda.recording import CaptureState, CUDARecording
from graphrt.device.torch_modes import report_capturing, with_bits_of
from graphrt.errors import (
    CaptureError,
    CaptureInProgressError,
    ConfigError,
    EnvironmentMismatchError,
    LifetimeError,
)
from graphrt.source import caller_source
from graphrt.waits import within


@dataclass(eq=False, slots=True, repr=False)
class CUDAStream:
    """A CUDA stream and its name. Compared by identity: the device makes one per stream."""

    name: str
    torch_stream: torch.cuda.Stream

    def __repr__(self) -> str:
        return f"CUDAStream({self.name!r}, {self.torch_stream.cuda_stream:#x})"


# torch takes its streams in turn from a fixed set of this many per device and priority.
NUM_STREAMS = 32


class StreamTable:
    """The streams of one device: by name, and by handle."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._by_name: dict[str, CUDAStream] = {}
        self._by_handle: dict[int, CUDAStream] = {}
        default = torch.cuda.default_stream(device_index)
        self._default_handle = default.cuda_stream
        self._by_handle[default.cuda_stream] = CUDAStream("default", default)

    def named(self, name: str) -> CUDAStream:
        """The stream of this name, made on first use.

        Errors: ``ConfigError`` if all of torch's streams have names.
        """
        if name not in self._by_name:
            taken = {stream.torch_stream.cuda_stream for stream in self._by_name.values()}
            # Taken in turn, so that the next one may have a name already.
            for _ in range(NUM_STREAMS):
                drawn = torch.cuda.Stream(self._device_index)
                if drawn.cuda_stream not in taken:
                    break
            else:
                raise ConfigError(
                    f"stream {name!r}",
                    expected=f"at most {NUM_STREAMS} named streams",
                    found="as many, all in use",
                    do="reuse a name, or close libraries that are done with: each has a stream",
                )
            self._by_name[name] = self._by_handle[drawn.cuda_stream] = CUDAStream(name, drawn)
        return self._by_name[name]

    def forget(self, stream: CUDAStream) -> None:
        """Take the name of ``stream`` away, if it has one; the handle may get another name."""
        if self._by_name.get(stream.name) is stream:
            del self._by_name[stream.name]
            # torch gives the handle to other callers too; they must not see this name.
            del self._by_handle[stream.torch_stream.cuda_stream]

    def current(self) -> CUDAStream:
        """The calling thread's current stream; a stream that is not ours is named by handle."""
        return self.of(torch.cuda.current_stream(self._device_index))

    def of(self, stream: torch.cuda.Stream) -> CUDAStream:
        """The one object for a stream of torch's; of one that is not ours, named by handle."""
        known = self._by_handle.get(stream.cuda_stream)
        if known is None:
            known = CUDAStream(f"stream-{stream.cuda_stream:#x}", stream)
            self._by_handle[stream.cuda_stream] = known
        return known

    def is_default(self, stream: CUDAStream) -> bool:
        """Whether this is the stream on which no capture can begin."""
        return stream.torch_stream.cuda_stream == self._default_handle


class CUDADevice:
    """One CUDA device. ``debug`` labels kernels and checks inputs for life, where torch can.

    Errors: ``ConfigError`` if torch sees no such device.
    """

    name = "cuda"

    def __init__(self, index: int | None = None, *, debug: bool = False) -> None:
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = index if index is not None or not num_devices else torch.cuda.current_device()
        if index is None or not 0 <= index < num_devices:
            raise ConfigError(
                "device",
                expected="a CUDA device that torch sees",
                found=f"{num_devices} devices, torch {torch.__version__}",
                do='use the "simulated" device, or a torch built for this driver',
            )
        self.index = index
        self.debug = debug
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        num_sms = properties.multi_processor_count
        self.limits = DeviceLimits(max_graphs=None, max_streams=NUM_STREAMS, num_sms=num_sms)
        self._streams = StreamTable(index)
        self.pools = PoolTable()
        self._captures = CaptureState(index, debug, self.pools)
        self._is_closed = False

    @classmethod
    def select(cls, index: int) -> CUDADevice:
        """The device of one GPU, which becomes torch's current one."""
        device = cls(index)
        torch.cuda.set_device(index)
        return device

    @staticmethod
    def is_available() -> bool:
        """Whether torch sees a GPU."""
        return torch.cuda.is_available()

    @property
    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.torch_device.index]

    def new_pool(self, handle: Any = None) -> CUDAPool:
        """A fresh pool, or a view of the one that a ``MempoolId_t`` pair names."""
        if self._is_closed:
            raise LifetimeError(
                "new_pool", expected="an open device", found="a closed one", do="make another"
            )
        pool = CUDAPool(self.index, handle)
        self.pools.add(pool)
        return pool

    def stream(self, name: str) -> CUDAStream:
        return self._streams.named(name)

    def adopt_stream(self, stream: object) -> CUDAStream:
        theirs = stream.torch_stream if isinstance(stream, CUDAStream) else stream
        if isinstance(theirs, torch.cuda.Stream) and theirs.device_index == self.index:
            known = self._streams.of(theirs)
            if not self._streams.is_default(known):
                return known
        raise ConfigError(
            "capture stream",
            expected=f"a torch.cuda.Stream of cuda:{self.index}, other than the default one",
            found=repr(stream),
            do=f"pass torch.cuda.Stream({self.index}), or a stream of this device",
        )

    def forget_stream(self, stream: Stream) -> None:
        self._streams.forget(_own(stream))

    def current_stream(self) -> CUDAStream:
        return self._streams.current()

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return cast(AbstractContextManager[None], torch.cuda.stream(_own(stream).torch_stream))

    def mark(self, stream: Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(_own(stream).torch_stream)
        return event

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Errors: ``UnjoinedStreamError`` where one side captures and the other does not."""
        assert isinstance(mark, torch.cuda.Event), "a mark of this device"
        try:
            _own(stream).torch_stream.wait_event(mark)
        except RuntimeError as error:
            failure = translate(error, f"wait of stream {stream.name!r} for a mark")
            if isinstance(failure, CaptureError) and not failure.source:
                failure.source = caller_source().with_text
            try:
                raise failure from failure.__cause__
            finally:
                del failure  # Or it would be a cycle through its traceback.

    def order(self, after: Stream, before: Stream) -> None:
        self.wait(after, self.mark(before))

    def prepare_thread(self, streams: Sequence[Stream]) -> None:
        torch.cuda.set_device(self.index)
        for stream in streams:
            with self.use(stream):
                torch.cuda.current_blas_handle()

    def record_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(_own(stream).torch_stream)

    def watch_races(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(
        self,
        pool: Pool,
        stream: Stream,
        label: str,
        generators: Sequence[torch.Generator] = (),
        observe: bool = True,
    ) -> CUDARecording:
        own_pool, own_stream = _own_pool(pool), _own(stream)
        is_taken = any(each.pool_id == own_pool.id for each in self._captures.recordings)
        if self.is_capturing() or is_taken:
            raise CaptureInProgressError(
                label,
                expected="no open recording on this thread, stream and pool",
                found="one that is open",
                do="end or abort it first; a capture does not nest",
            )
        # To ask for torch's stream takes longer, and a PIECEWISE program has many recordings.
        handle = own_stream.torch_stream.cuda_stream
        is_current = private.is_current_stream(handle, self.index)
        if not is_current or self._streams.is_default(own_stream):
            raise EnvironmentMismatchError(
                label,
                expected=f"stream {own_stream.name!r} current, and not the default stream",
                found=f"stream {self.current_stream().name!r} current",
                do="begin the recording inside device.use(device.stream(name))",
            )
        own_pool.keep_in_use()
        return CUDARecording(
            self._captures, own_pool, own_stream.torch_stream, label, generators, observe
        )

    def is_capturing(self) -> bool:
        recording = self._captures.current.get()
        # A context that was copied during a recording may outlive it. Other code captures too:
        # torch's own graphs, or another device object of this index.
        return (recording is not None and recording.is_open) or private.is_stream_capturing()

    def guard_compiled_code(self, guard: Callable[[], AbstractContextManager[Any]]) -> None:
        pass

    def report_capturing(self) -> AbstractContextManager[None]:
        return report_capturing()

    def modes_of_recording(self) -> AbstractContextManager[Any]:
        return nullcontext()  # A recording has none that such code asks for.

    @contextmanager
    def range(self, label: str) -> Iterator[None]:
        # Not nvtx.range, which would take braces in the label as places to fill.
        torch.cuda.nvtx.range_push(label)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def alloc(
        self, pool: Pool, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """An uninitialised pool tensor, belonging to the stream that is current."""
        own = _own_pool(pool)
        self._captures.check_none_open("alloc")
        with torch.cuda.use_mem_pool(cast(Any, own), self.index), _outside_inference_mode():
            tensor = torch.empty_strided(
                tuple(size), tuple(stride), dtype=dtype, device=self.torch_device
            )
        # A pool returns no segment while it lives, so only one it has just taken is unknown.
        address = tensor.untyped_storage().data_ptr()
        if any(known.id == own.id and not known.holds(address) for known in self.pools):
            self.pools.refresh()
        return tensor

    def weak_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain tensor over the bytes of ``tensor``, if they are the pool's; else ``tensor``."""
        if not self.owns(tensor):
            return tensor
        storage = tensor.untyped_storage()
        # This is no operation of the caller's: neither the observer nor other modes shall see it.
        # Grad mode comes last, because leaving inference mode turns it on.
        with private.without_modes(), _outside_inference_mode(), _without_grad():
            bare = private.aliasing_storage(storage.data_ptr(), storage.nbytes(), tensor.device)
            alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                cast(Any, bare), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            return with_bits_of(alias, tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return False
        address = storage_address(tensor)
        return address is not None and self.pools.holds(address)

    def synchronize(self, stream: Stream | None = None) -> None:
        if stream is None:
            torch.cuda.synchronize(self.index)
        else:
            _own(stream).torch_stream.synchronize()

    def ends_within(self, seconds: float) -> bool:
        # No call of CUDA's own waits for a device and gives up.
        return bool(within(seconds, torch.cuda.synchronize, self.index))

    def trim(self) -> None:
        """Return unused cached blocks, and cuBLAS's workspaces, of every device of the GPU."""
        self._captures.check_none_open("trim")
        private.clear_blas_workspaces()
        torch.cuda.empty_cache()

    def memory(self, pool: Pool | None = None) -> MemoryReading:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
        held = torch.cuda.memory_stats_as_nested_dict(self.index)
        return MemoryReading(
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            reserved_bytes=held["reserved_bytes"]["all"]["current"],
            tensor_bytes=held["allocated_bytes"]["all"]["current"],
            pool_bytes=0 if pool is None else pool.bytes(),
        )

    def close(self) -> None:
        """Reset every graph, newest first, and release every pool. Idempotent."""
        if self._is_closed:
            return
        self._captures.check_none_open("close")
        self._is_closed = True
        torch.cuda.synchronize(self.index)
        for graph in reversed(list(self._captures.graphs.values())):
            graph.reset()
        self.pools.release()


# A mode is entered only where it changes something: a capture makes thousands of aliases, and three
# modes are a third of the cost of each.


def _outside_inference_mode() -> AbstractContextManager[Any]:
    """A tensor that is made in inference mode cannot be written outside it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _without_grad() -> AbstractContextManager[Any]:
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _own(stream: Stream) -> CUDAStream:
    assert isinstance(stream, CUDAStream), "a stream of this device"
    return stream


def _own_pool(pool: Pool) -> CUDAPool:
    assert isinstance(pool, CUDAPool), "a pool of this device"
    return pool


class VisibleDevice(NamedTuple):
    """One GPU, as a bug report names it."""

    name: str
    compute_capability: str
    """"9.0"."""
    memory_bytes: int


def visible_devices() -> list[VisibleDevice]:
    """The GPUs that torch sees; none without a driver. Errors: ``RuntimeError`` from the driver."""
    if not torch.cuda.is_available():
        return []
    seen = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [VisibleDevice(one.name, f"{one.major}.{one.minor}", one.total_memory) for one in seen]

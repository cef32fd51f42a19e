"""Streams, pools and windows of one CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch

from graphrt.device.base import (
    DeviceLimits,
    Mark,
    MemoryReading,
    Pool,
    Stream,
)
from graphrt.device.cuda import private
from graphrt.device.cuda.failures import translate, user_source
from graphrt.device.cuda.observe import OperatorPlan
from graphrt.device.cuda.pool import CUDAPool, storage_address
from graphrt.device.cuda.recording import CUDADeviceGraph, CUDARecording
from graphrt.device.cuda.streams import NUM_RING_STREAMS, CUDAMark, CUDAStream, StreamTable
from graphrt.device.cuda_query import answering
from graphrt.errors import (
    AmbientError,
    CaptureError,
    CaptureInProgressError,
    ConfigError,
    LifetimeError,
)


class CUDADevice:
    """One CUDA device. ``debug`` counts nodes and checks inputs for life, where torch can.

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
        self._torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self._limits = DeviceLimits(
            max_graphs=None,
            max_streams=NUM_RING_STREAMS,
            num_sms=properties.multi_processor_count,
        )
        self._streams = StreamTable(index)
        self._pools: list[CUDAPool] = []
        # Strong on purpose: see CUDADeviceGraph.
        self._graphs: dict[int, CUDADeviceGraph] = {}
        # What schemas say: each window meets the same few operators.
        self._plans: dict[int, OperatorPlan] = {}
        self._num_open = 0
        self._window: ContextVar[CUDARecording | None] = ContextVar("window", default=None)
        self._answers: ContextVar[bool] = ContextVar("answers", default=False)
        self._is_closed = False

    @staticmethod
    def is_available() -> bool:
        """Whether torch sees a GPU."""
        return torch.cuda.is_available()

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    @property
    def limits(self) -> DeviceLimits:
        return self._limits

    def new_pool(self, handle: Any = None) -> CUDAPool:
        """A fresh pool, or a view of the one that a ``MempoolId_t`` pair names."""
        if self._is_closed:
            raise LifetimeError(
                "new_pool", expected="an open device", found="a closed one", do="make another"
            )
        pool = CUDAPool(self.index, handle)
        self._pools = [known for known in self._pools if not known.is_released] + [pool]
        return pool

    def stream(self, name: str) -> CUDAStream:
        stream = self._streams.named(name)
        if stream is None:
            raise ConfigError(
                f"stream {name!r}",
                expected=f"at most {NUM_RING_STREAMS} named streams",
                found="as many, all in use",
                do="reuse a name, or close libraries that are done with: each has a stream",
            )
        return stream

    def forget_stream(self, stream: Stream) -> None:
        self._streams.forget(_own(stream))

    def current_stream(self) -> CUDAStream:
        return self._streams.current()

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        context: Any = torch.cuda.stream(_own(stream).torch_stream)
        return cast(AbstractContextManager[None], context)

    def mark(self, stream: Stream) -> CUDAMark:
        event = torch.cuda.Event()
        event.record(_own(stream).torch_stream)
        return CUDAMark(event)

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Errors: ``UnjoinedStreamError`` where one side captures and the other does not."""
        assert isinstance(mark, CUDAMark), "a mark of this device"
        try:
            _own(stream).torch_stream.wait_event(mark.event)
        except RuntimeError as error:
            failure = translate(error, f"wait of stream {stream.name!r} for a mark")
            if isinstance(failure, CaptureError) and not failure.source:
                failure.source = user_source().place
            try:
                raise failure from failure.__cause__
            finally:
                del failure  # Or it would be a cycle through its traceback.

    def order(self, after: Stream, before: Stream) -> None:
        self.wait(after, self.mark(before))

    def begin(
        self,
        pool: Pool,
        stream: Stream,
        label: str,
        generators: Sequence[torch.Generator] = (),
        observe: bool = True,
    ) -> CUDARecording:
        own_pool, own_stream = _own_pool(pool), _own(stream)
        is_taken = any(known.is_recording for known in self._pools if known.id == own_pool.id)
        if self.is_capturing() or private.is_stream_capturing() or is_taken:
            raise CaptureInProgressError(
                label,
                expected="no open window on this thread, stream and pool",
                found="one that is open",
                do="end or abort it first; a capture does not nest",
            )
        if self.current_stream() is not own_stream or self._streams.is_default(own_stream):
            raise AmbientError(
                label,
                expected=f"stream {own_stream.name!r} current, and not the default stream",
                found=f"stream {self.current_stream().name!r} current",
                do="open the window inside device.use(device.stream(name))",
            )
        own_pool.occupy()
        return CUDARecording(self, own_pool, own_stream, label, tuple(generators), observe)

    def is_capturing(self) -> bool:
        recording = self._window.get()
        # A context copied inside a window may outlive it.
        return recording is not None and recording.is_open

    @contextmanager
    def answering_capture(self) -> Iterator[None]:
        token = self._answers.set(True)
        try:
            with answering(self._answers.get):
                yield
        finally:
            self._answers.reset(token)

    def alloc(
        self, pool: Pool, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """An uninitialised pool tensor, belonging to the stream that is current."""
        own = _own_pool(pool)
        self._refuse_in_window("alloc")
        with torch.cuda.use_mem_pool(cast(Any, own), self.index), _outside_inference_mode():
            tensor = torch.empty_strided(
                tuple(size), tuple(stride), dtype=dtype, device=self._torch_device
            )
        # A pool that lives gives no segment back, so only a segment it has just taken is unknown.
        address = tensor.untyped_storage().data_ptr()
        for known in self._pools:
            if known.id == own.id and not known.holds(address):
                self.refresh_pools()
                break
        return tensor

    def weak_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain tensor over the bytes of ``tensor``, if they are the pool's; else ``tensor``."""
        if not self.owns(tensor):
            return tensor
        storage = tensor.untyped_storage()
        # Neither the observer nor a mode of the caller's shall take this for an operation.
        # Grad mode is asked for last: to leave inference mode turns it on.
        with private.past_modes(), _outside_inference_mode(), _without_grad():
            bare = private.aliasing_storage(storage.data_ptr(), storage.nbytes(), tensor.device)
            alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                cast(Any, bare), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            if tensor.is_conj():
                alias = alias.conj()
            return alias._neg_view() if tensor.is_neg() else alias

    def owns(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_cuda:
            return False
        address = storage_address(tensor)
        return address is not None and self.holds(address)

    def holds(self, address: int) -> bool:
        """Whether ``address`` lies in a pool of this device."""
        # Asked for every operation of a capture: a generator would cost more than the look-up.
        for pool in self._pools:  # noqa: SIM110
            if pool.holds(address):
                return True
        return False

    def refresh_pools(self) -> None:
        """Learn the address ranges anew, of views as well: another may have made the pool grow."""
        for pool in self._pools:
            pool.refresh()

    def synchronize(self, stream: Stream | None = None) -> None:
        if stream is None:
            torch.cuda.synchronize(self.index)
        else:
            _own(stream).torch_stream.synchronize()

    def trim(self) -> None:
        """Give cached unused blocks back, and cuBLAS's workspaces."""
        self._refuse_in_window("trim")
        private.clear_blas_workspaces()
        torch.cuda.empty_cache()

    def memory(self, pool: Pool | None = None) -> MemoryReading:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
        return MemoryReading(
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            reserved_bytes=torch.cuda.memory_reserved(self.index),
            pool_bytes=0 if pool is None else pool.bytes(),
        )

    def close(self) -> None:
        """Reset every graph, newest first, and release every pool. Idempotent."""
        if self._is_closed:
            return
        self._refuse_in_window("close")
        self._is_closed = True
        torch.cuda.synchronize(self.index)
        for graph in reversed(list(self._graphs.values())):
            graph.reset()
        for pool in self._pools:
            pool.release()
        self._pools = []

    def _opened(self, recording: CUDARecording) -> None:
        self._num_open += 1
        self._window.set(recording)

    def _closed(self, recording: CUDARecording) -> None:
        self._num_open -= 1
        self._window.set(None)

    @contextmanager
    def _joined(self, recording: CUDARecording) -> Iterator[None]:
        token = self._window.set(recording)
        try:
            yield
        finally:
            self._window.reset(token)

    def _refuse_in_window(self, subject: str) -> None:
        """Whatever frees or maps device memory would break the capture of any thread."""
        if self._num_open:
            raise CaptureInProgressError(
                subject,
                expected="no open window on this device",
                found=f"{self._num_open} open",
                do="do it after the window has ended",
            )


# A mode is entered only where it changes something: a capture asks for thousands of aliases, and
# three modes cost a third of each.


def _outside_inference_mode() -> AbstractContextManager[Any]:
    """A tensor born in inference mode could not be written outside it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _without_grad() -> AbstractContextManager[Any]:
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _own(stream: Stream) -> CUDAStream:
    assert isinstance(stream, CUDAStream), "a stream of this device"
    return stream


def _own_pool(pool: Pool) -> CUDAPool:
    assert isinstance(pool, CUDAPool), "a pool of this device"
    return pool

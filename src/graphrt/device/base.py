"""The device protocol: what capture and replay need from a GPU, or from its simulation.

``device/cuda/`` and ``device/simulated/`` implement it, and do not know each other. One suite of
tests, the device contract, holds both to the promises written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLimits:
    """What the device can hold. None: no known limit."""

    max_graphs: int | None
    max_streams: int | None
    num_sms: int


class MemoryReading(NamedTuple):
    """Device memory, in bytes."""

    free_bytes: int
    """As the driver sees it."""
    total_bytes: int
    reserved_bytes: int
    """Held by the allocator, used or not."""
    tensor_bytes: int
    """Of these, blocks that tensors hold."""
    pool_bytes: int
    """Held by the pool that was passed; 0 without one."""


class Block(NamedTuple):
    """A piece of pool memory with a live user tensor."""

    address: int
    num_bytes: int
    source: str
    """File, line and function that allocated it; empty where that is unknown."""


class TensorUse(NamedTuple):
    """A tensor outside every pool that a recording reads or writes."""

    tensor: torch.Tensor
    written: bool
    source: str = ""
    """The user's line that wrote it first; empty where none did, or where it is unknown."""


class Stream(Protocol):
    """A queue of device work. Compared by identity: ``device.stream(name)`` is persistent."""

    @property
    def name(self) -> str: ...


class Mark(Protocol):
    """A point in a stream: everything issued there before it was taken."""


class Pool(Protocol):
    """Memory shared by the graphs captured into it.

    Blocks freed by the last user tensor are reused within and across captures.
    """

    @property
    def handle(self) -> Any:
        """Names this pool to other libraries (CUDA: the ``MempoolId_t`` pair)."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if the storage of ``tensor`` lies in this pool."""

    def live_blocks(self) -> Sequence[Block]:
        """Blocks that a user tensor still holds, by address."""

    def bytes(self) -> int:
        """Bytes held from the device, used or not."""

    def release(self) -> None:
        """Return the memory. Only the library calls this, once every graph over it is reset."""


class DeviceGraph(Protocol):
    """One instantiated graph."""

    replay: Callable[[], None]
    """Takes no arguments. May be bound once and kept. Errors: ``DeviceReplayError``."""

    @property
    def num_nodes(self) -> int | None:
        """Kernel nodes; None where their number is unknown."""

    @property
    def uses_rng(self) -> bool: ...

    @property
    def externals(self) -> Sequence[TensorUse]:
        """Tensors outside every pool that the recording used, in order of first use.

        Empty for a recording with ``observe=False``.
        """

    def reset(self) -> None:
        """Destroy the executable. Only the library calls this. Idempotent."""


class Recording(Protocol):
    """An open recording: what is issued on its stream becomes part of a graph, and does not run."""

    def end(self, allow_empty: bool = False) -> DeviceGraph:
        """End the recording. ``EmptyCaptureError`` for zero nodes unless ``allow_empty``.

        After an error it has ended too, and the device can capture again.
        """

    def abort(self, first_error: BaseException) -> BaseException:
        """End the recording and drop it. Never raises.

        Returns ``first_error``, translated to a ``GraphrtError`` (with the foreign error as its
        cause) if it is one of the device's own; errors of the clean-up are notes on it.
        """

    def join_thread(self) -> AbstractContextManager[None]:
        """A worker thread enters it to issue work for this recording."""

    def opaque(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        out_meta: Any = None,
        written: Sequence[int] | Mapping[int, str] = (),
    ) -> Any:
        """Record ``fn(*args)`` as one node, whatever it does inside.

        ``out_meta``: tensors (any device, ``meta`` too) giving shape, stride and dtype of each
        result, in the result's structure; or a function that returns them, and ``written``. In a
        tuple, one that lies in memory of an argument is returned itself, as a view of that.
        ``written``: positions of arguments that it writes, or by position the user's line, where
        that is not the line of the call. On CUDA this is a plain call.
        """


@runtime_checkable
class Device(Protocol):
    """Streams, pools and recordings of one device."""

    @property
    def name(self) -> str:
        """``"cuda"`` or ``"simulated"``."""

    @property
    def torch_device(self) -> torch.device:
        """Where buffers live."""

    @property
    def generator(self) -> torch.Generator:
        """What kernels draw random numbers from unless they are given a generator."""

    @property
    def limits(self) -> DeviceLimits: ...

    def new_pool(self, handle: Any = None) -> Pool:
        """A fresh pool, or a view of the pool that ``handle`` names."""

    def stream(self, name: str) -> Stream:
        """The persistent, non-default stream of this name, made on first use.

        Errors: ``ConfigError`` where the device has no more streams.
        """

    def adopt_stream(self, stream: object) -> Stream:
        """The stream of this device that ``stream`` is: one that it made, or another library's own
        (CUDA: a ``torch.cuda.Stream``). It stays its maker's: nothing is named or forgotten.

        Errors: ``ConfigError`` for the default stream, on which nothing can be recorded, for a
        stream of another device, and for anything else.
        """

    def forget_stream(self, stream: Stream) -> None:
        """Free the name of ``stream`` and its place among the device's streams. Idempotent.

        What was issued on it still runs. Do not use it any longer: another name may get it.
        """

    def current_stream(self) -> Stream:
        """The stream that is current for the calling thread. Same stream, same object."""

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Make ``stream`` current for the calling thread."""

    def mark(self, stream: Stream) -> Mark:
        """Everything issued on ``stream`` so far."""

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Later work on ``stream`` waits for ``mark``, not for what was issued after ``mark``."""

    def order(self, after: Stream, before: Stream) -> None:
        """``wait(after, mark(before))``: to fork, join or hand over."""

    def prepare_thread(self, streams: Sequence[Stream]) -> None:
        """Select this device on the calling thread, and let libraries set up for each stream there
        (the BLAS handle): in a recording that the thread joins later, it is too late."""

    def record_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Work on ``stream`` uses ``tensor``, which was allocated on another one: once freed, its
        memory is not reused before that work has run, in a recording not at all."""

    def watch_races(self) -> AbstractContextManager[Any]:
        """While entered, by this thread and those that take over its modes, eager operations on
        streams that nothing orders raise ``StreamRaceError`` (on the simulated device only).

        A recording looks for races by itself.
        """

    def begin(
        self,
        pool: Pool,
        stream: Stream,
        label: str,
        generators: Sequence[torch.Generator] = (),
        observe: bool = True,
    ) -> Recording:
        """Start a recording on the calling thread; ``stream`` must be current.

        ``CaptureInProgressError`` if one is open on the thread. ``observe=False``: the graph has no
        ``externals`` (for callables with compiled code, which runs differently under a mode).
        """

    def is_capturing(self) -> bool:
        """Whether a recording is open on the calling thread, whoever has opened it."""

    def guard_compiled_code(self, guard: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter ``guard()`` around each recording that could not see the kernels of compiled code.

        It makes such code raise, because its replay would be wrong. On CUDA every kernel is
        recorded, and nothing is entered.
        """

    def report_capturing(self) -> AbstractContextManager[None]:
        """While entered, ``torch.cuda.is_current_stream_capturing()`` is true on this thread.

        Entered for the last warm-up, so that libraries take the same branches as in the capture.
        """

    def modes_of_recording(self) -> AbstractContextManager[Any]:
        """Python modes as in a recording, around an eager run that a replay is compared with.

        Code that asks whether one is active (``torch.nn.TransformerEncoderLayer``) takes the same
        branch then.
        """

    def range(self, label: str) -> AbstractContextManager[None]:
        """A range with this label around what the body issues, for a profiler (NVTX)."""

    def alloc(
        self, pool: Pool, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A pool tensor, allocated outside a recording. Never an inference tensor: writable."""

    def weak_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same bytes that keeps nothing allocated, if ``tensor`` is pool-owned.

        Any other tensor is returned itself. Never an inference tensor: eager segments write it.
        """

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies in a pool of this device that is not released."""

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for ``stream``, or for the device. No function of the hot path calls it."""

    def ends_within(self, seconds: float) -> bool:
        """Whether the device is done with all it was given, waiting for that so long at most.

        For work that may never end: a collective that another rank does not come to.
        """

    def trim(self) -> None:
        """Return unused cached blocks, and what libraries cache per stream. Once per scope."""

    def memory(self, pool: Pool | None = None) -> MemoryReading: ...

    def close(self) -> None:
        """Release what the device holds. Idempotent."""

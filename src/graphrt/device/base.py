"""The device protocol: what capture and replay need from a GPU, or from its simulation.

Two implementations are siblings behind it: ``device/cuda.py`` and ``device/simulated/``. One
contract suite holds both to the promises written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLimits:
    """What the device can hold. None: no limit that is known."""

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
    pool_bytes: int
    """Held by the pool asked about; 0 without one."""


class Block(NamedTuple):
    """A piece of pool memory with a live user tensor."""

    address: int
    num_bytes: int
    source: str
    """File, line and function that allocated it; empty where it cannot be known."""


class ExternalUse(NamedTuple):
    """A tensor that is not pool-owned and that a recording touched."""

    tensor: torch.Tensor
    written: bool


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
        """What other libraries know this pool by (CUDA: the MempoolId_t pair)."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if the storage of ``tensor`` lies in this pool."""

    def live_blocks(self) -> Sequence[Block]:
        """Blocks that a user tensor still holds, by address."""

    def bytes(self) -> int:
        """Bytes held from the device, used or not."""

    def release(self) -> None:
        """Give everything up. Only the library calls this, after every graph over it was reset."""


class DeviceGraph(Protocol):
    """One instantiated graph."""

    replay: Callable[[], None]
    """Ready-bound, without arguments. Errors: ``DeviceReplayError``."""

    @property
    def num_nodes(self) -> int | None:
        """Kernel nodes; None where it cannot be known."""

    @property
    def uses_rng(self) -> bool: ...

    @property
    def externals(self) -> Sequence[ExternalUse]:
        """Tensors outside every pool that the recording touched, in order of first touch.

        Empty when the recording did not observe.
        """

    def reset(self) -> None:
        """Destroy the executable. Only the library calls this. Idempotent."""


class Recording(Protocol):
    """An open window: what is issued on its stream is recorded, not run."""

    def end(self, allow_empty: bool = False) -> DeviceGraph:
        """Close the window. ``EmptyCaptureError`` for zero nodes unless ``allow_empty``.

        An error leaves the window closed and the device able to capture again.
        """

    def abort(self, first_error: BaseException) -> BaseException:
        """Close the window and drop what was recorded. Never raises.

        Returns ``first_error``, translated to a ``GraphrtError`` (with the foreign error as its
        cause) if it is one of the device's own; errors of the clean-up are notes on it.
        """

    def join_thread(self) -> AbstractContextManager[None]:
        """Entered by a worker thread whose work belongs to this recording."""

    def opaque(self, fn: Callable[..., Any], args: Sequence[Any], out_meta: Any = None) -> Any:
        """Record ``fn(*args)`` as one node that the recorder does not look into.

        ``out_meta``: tensors (any device, ``meta`` too) giving shape, stride and dtype of each
        result, in the result's structure. On CUDA this is a plain call.
        """


@runtime_checkable
class Device(Protocol):
    """Streams, pools and windows of one device."""

    @property
    def name(self) -> str:
        """``"cuda"`` or ``"simulated"``."""

    @property
    def torch_device(self) -> torch.device:
        """Where buffers live."""

    @property
    def limits(self) -> DeviceLimits: ...

    def new_pool(self, handle: Any = None) -> Pool:
        """A fresh pool, or a view of the pool that ``handle`` names."""

    def stream(self, name: str) -> Stream:
        """The persistent, non-default stream of this name, made on first use.

        Errors: ``ConfigError`` where the device has no more streams.
        """

    def forget_stream(self, stream: Stream) -> None:
        """Let others have what a named stream occupies; its name makes another from now on.

        Nobody may use ``stream`` any longer. What was issued on it still runs. Idempotent.
        """

    def current_stream(self) -> Stream:
        """The stream that is current for the calling thread. Same stream, same object."""

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Make ``stream`` current for the calling thread."""

    def mark(self, stream: Stream) -> Mark:
        """Name everything issued on ``stream`` so far."""

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Later work on ``stream`` waits for ``mark``, not for what was issued after it."""

    def order(self, after: Stream, before: Stream) -> None:
        """``wait(after, mark(before))``: fork, join, hand-over."""

    def begin(
        self,
        pool: Pool,
        stream: Stream,
        label: str,
        generators: Sequence[torch.Generator] = (),
        observe: bool = True,
    ) -> Recording:
        """Open a window on the calling thread; ``stream`` must be current.

        ``CaptureInProgressError`` if the thread is in one. ``observe=False`` skips learning the
        externals (for callables that hold compiled code, which runs differently under a mode).
        """

    def is_capturing(self) -> bool:
        """True inside a window of the calling thread."""

    def answering_capture(self) -> AbstractContextManager[None]:
        """While entered, libraries that ask torch whether a capture runs are told yes.

        Entered for the last warm-up, so that it takes the same branches as the capture.
        """

    def alloc(
        self, pool: Pool, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A pool tensor, allocated outside a window. As any other to inference mode: writable."""

    def weak_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same bytes that keeps nothing allocated, if ``tensor`` is pool-owned.

        Any other tensor is returned itself. Never born in inference mode: gaps write it outside.
        """

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if any pool of this device, not yet released, owns ``tensor``."""

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for ``stream``, or for the device. Never called by hot functions."""

    def trim(self) -> None:
        """Give cached unused blocks back, and what libraries cache per stream. Once per scope."""

    def memory(self, pool: Pool | None = None) -> MemoryReading: ...

    def close(self) -> None:
        """Release what the device holds. Idempotent."""

"""A pool of device memory, known by what the allocator says of it.

Nothing here runs while a window is open: a snapshot is taken when one has closed.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from graphrt.device.base import Block
from graphrt.device.cuda import private
from graphrt.device.cuda.failures import is_user_file
from graphrt.errors import LifetimeError


class CUDAPool:
    """A ``torch.cuda.MemPool``, or a view of somebody else's pool by its handle.

    A view keeps the pool from being given back while it lives, and gives up only itself.
    """

    def __init__(self, device_index: int, handle: private.PoolId | None = None) -> None:
        self._device_index = device_index
        self._memory: torch.cuda.MemPool | None = None
        if handle is None:
            with torch.cuda.device(device_index):
                self._memory = torch.cuda.MemPool()
            self._id: private.PoolId = self._memory.id
        else:
            self._id = (int(handle[0]), int(handle[1]))
            private.retain_pool(self._id, device_index)
        self.is_released = False
        self.num_graphs = 0
        """Graphs captured into it and not reset yet; kept by the recordings."""
        self.is_recording = False
        self._keeper: torch.cuda.CUDAGraph | None = None
        if self._memory is not None:
            with torch.cuda.device(device_index), torch.cuda.stream(torch.cuda.Stream()):
                self.occupy()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.refresh()

    @property
    def handle(self) -> Any:
        """The ``MempoolId_t`` pair, as ``torch.cuda.graph(pool=...)`` takes it."""
        return self._id

    @property
    def id(self) -> private.PoolId:
        """The handle under the name that ``torch.cuda.use_mem_pool`` asks for."""
        return self._id

    def occupy(self) -> None:
        """Keep the pool in use until its release, by an empty graph.

        torch counts a pool's users twice: for device memory, where the pool itself counts, and for
        pinned host memory, where only graphs do. Without this graph the second count falls to zero
        with the last real one, and the next capture into the pool fails an internal assert of the
        host allocator (seen on torch 2.11). A pool of our own does so when it is made, a view
        before its first capture: on a stream that captures nothing and is not the default one.
        """
        if self._keeper is not None:
            return
        keeper = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), private.past_modes():
            warnings.simplefilter("ignore")  # It is empty, and shall be.
            keeper.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            keeper.capture_end()
        self._keeper = keeper

    def use_count(self) -> int | None:
        """Users the allocator counts, less the keeper: graphs, and the pool. None for a view."""
        if self._memory is None:
            return None
        return self._memory.use_count() - (self._keeper is not None)

    def refresh(self) -> None:
        """Learn the address ranges anew. Called whenever the pool may have grown."""
        ranges = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in self._segments()
        )
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def holds(self, address: int) -> bool:
        """Whether ``address`` lies in the pool, as of the last ``refresh``."""
        position = bisect_right(self._starts, address) - 1
        return position >= 0 and address < self._ends[position]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of ``tensor`` lies in this pool, as of the last ``refresh``."""
        address = storage_address(tensor)
        return tensor.is_cuda and address is not None and self.holds(address)

    def live_blocks(self) -> Sequence[Block]:
        """Blocks that a tensor still holds, by address.

        ``source`` is known only while torch records memory history.
        """
        blocks = [
            Block(block["address"], block["size"], _source(block.get("frames", ())))
            for segment in self._segments()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        return sorted(blocks, key=lambda block: block.address)

    def bytes(self) -> int:
        """Bytes of the pool's segments, used or not."""
        return sum(segment["total_size"] for segment in self._segments())

    def release(self) -> None:
        """Give the memory back. Idempotent. A block that a tensor still holds stays until it goes.

        Errors: ``LifetimeError`` while a graph over the pool lives; it would launch into freed
        memory.
        """
        if self.is_released:
            return
        if self.num_graphs or self.is_recording:
            raise LifetimeError(
                f"release of pool {self._id}",
                expected="every graph over it reset",
                found=f"{self.num_graphs} graphs"
                + (" and an open window" if self.is_recording else ""),
                do="reset the graphs first; the library does so when it retires a generation",
            )
        self.is_released = True
        self._starts, self._ends = [], []
        if self._keeper is not None:
            self._keeper.reset()
            self._keeper = None
        if self._memory is None:
            private.release_pool(self._id, self._device_index)
        self._memory = None  # Its destructor gives the unused segments back to the driver.

    def _segments(self) -> list[dict[str, Any]]:
        if self.is_released:
            return []
        return private.segments_of(self._id, self._device_index)


def storage_address(tensor: torch.Tensor) -> int | None:
    """Where the storage of ``tensor`` starts; None for no bytes, or none of its own."""
    if tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # Fake, sparse and functorch tensors refuse.
        return None


def _source(frames: Sequence[dict[str, Any]]) -> str:
    for frame in frames:
        if frame["filename"].endswith(".py") and is_user_file(frame["filename"]):
            return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return ""

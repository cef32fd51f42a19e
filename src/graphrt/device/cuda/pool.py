"""Pools of device memory, and which addresses lie in them, by the allocator's own snapshot.

No snapshot is taken during a recording, but after it has ended.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from graphrt.device.base import Block
from graphrt.device.cuda import private
from graphrt.errors import LifetimeError
from graphrt.source import Source, is_user_file


class CUDAPool:
    """A ``torch.cuda.MemPool``, or a view of another owner's pool by its handle.

    While a view lives, the memory is not returned. Its release ends the view only.
    """

    def __init__(self, device_index: int, handle: private.PoolId | None = None) -> None:
        self._device_index = device_index
        self._memory: torch.cuda.MemPool | None = None
        if handle is None:
            with torch.cuda.device(device_index):
                self._memory = torch.cuda.MemPool()
            self.id: private.PoolId = self._memory.id
        else:
            self.id = (int(handle[0]), int(handle[1]))
            private.retain_pool(self.id, device_index)
        self.handle: Any = self.id
        """The same ``MempoolId_t`` pair, with torch's own type for a handle."""
        self.is_released = False
        self.num_graphs = 0
        """Graphs captured into it and not reset yet; the graphs count themselves."""
        self.is_recording = False
        self._empty_graph: torch.cuda.CUDAGraph | None = None
        if self._memory is not None:
            with torch.cuda.device(device_index), torch.cuda.stream(torch.cuda.Stream()):
                self.keep_in_use()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.refresh()

    def keep_in_use(self) -> None:
        """Keep the pool in use until its release, by an empty graph.

        torch counts a pool's users twice: for device memory, where the pool itself counts, and for
        pinned host memory, where only graphs do. Without this graph the second count falls to zero
        with the last real one, and the next capture into the pool fails an internal assert of the
        host allocator. torch 2.11 needs it; drop it when the oldest supported torch captures into a
        ``MemPool`` whose graphs were all reset.

        The current stream must not capture, and not be the default one. A pool of our own does this
        when it is made, a view before its first capture.
        """
        if self._empty_graph is not None:
            return
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), private.without_modes():
            warnings.simplefilter("ignore")  # torch warns that it is empty.
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            graph.capture_end()
        self._empty_graph = graph

    def use_count(self) -> int | None:
        """Users by the allocator's count: the real graphs, and the pool. None for a view."""
        if self._memory is None:
            return None
        return self._memory.use_count() - (self._empty_graph is not None)

    def refresh(self) -> None:
        """Read the address ranges again. Called whenever the pool may have grown."""
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
        if self._memory is None and not self.is_released:
            self.refresh()  # Its owner may have grown it.
        # A snapshot lists every block, and a capture asks twice.
        return sum(self._ends) - sum(self._starts)

    def release(self) -> None:
        """Return the memory, except blocks that a tensor still holds. Idempotent.

        Errors: ``LifetimeError`` while a graph over the pool lives: it would launch into freed
        memory.
        """
        if self.is_released:
            return
        if self.num_graphs or self.is_recording:
            raise LifetimeError(
                f"release of pool {self.id}",
                expected="every graph over it reset",
                found=f"{self.num_graphs} graphs"
                + (" and an open recording" if self.is_recording else ""),
                do="reset the graphs first; the library does so when it retires a generation",
            )
        self.is_released = True
        self._starts, self._ends = [], []
        if self._empty_graph is not None:
            self._empty_graph.reset()
            self._empty_graph = None
        if self._memory is None:
            private.release_pool(self.id, self._device_index)
        self._memory = None  # Its destructor returns the unused segments to the driver.

    def _segments(self) -> list[dict[str, Any]]:
        if self.is_released:
            return []
        return private.segments_of(self.id, self._device_index)


class PoolTable:
    """The pools of one device."""

    def __init__(self, pools: Iterable[CUDAPool] = ()) -> None:
        self._pools = list(pools)

    def __iter__(self) -> Iterator[CUDAPool]:
        return iter(self._pools)

    def add(self, pool: CUDAPool) -> None:
        """Know ``pool`` until it is released."""
        self._pools = [known for known in self._pools if not known.is_released] + [pool]

    def holds(self, address: int) -> bool:
        """Whether ``address`` lies in one of the pools."""
        # Called for every operation of a capture: a generator would cost more than the look-up.
        for pool in self._pools:  # noqa: SIM110
            if pool.holds(address):
                return True
        return False

    def refresh(self) -> None:
        """Read all address ranges again: a pool may have several views, and all have grown."""
        for pool in self._pools:
            pool.refresh()

    def release(self) -> None:
        """Release every pool."""
        for pool in self._pools:
            pool.release()
        self._pools = []


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
        file: str = frame["filename"]  # Of C++ too, where torch records those.
        if file.endswith(".py") and is_user_file(file):
            return str(Source(file, frame["line"], frame["name"]))
    return ""

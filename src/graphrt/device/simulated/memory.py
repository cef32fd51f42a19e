"""Pool memory: arenas of plain bytes, cut into blocks that live as long as a user's storage.

A block has two storages over the same bytes. The user's is the owner: its death, seen through a
weak reference to the storage itself (so views and C++ references count), frees the block. The
recorded kernels use views of the whole arena, which own nothing. Freed bytes are reused at once,
inside a graph and across graphs, and they are poisoned, so that an early free shows.

An arena reserves address space and touches it as it grows; ``bytes()`` counts what was touched.
Arenas are never handed back while something can still point into them: a dangling alias reads
poison, not freed memory.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from graphrt.device.base import Block, DeviceGraph, MemoryReading
from graphrt.device.simulated.streams import SimulatedStream
from graphrt.errors import GraphMemoryError, LifetimeError
from graphrt.source import Source

ALIGNMENT = 64
ARENA_BYTES = 8 << 20
POISON = 0xFF
"""NaN in every float, -1 in every signed integer, True in a bool."""
NODE_BYTES = 1843
"""Driver memory for each node of a graph: 1.8 KiB, measured on an H200."""


@contextmanager
def without_modes() -> Iterator[None]:
    """The thread's recorders see nothing, and tensors made are ordinary ones, while entered."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


def extent_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first element to the end of the last one; 0 without elements."""
    if 0 in size:
        return 0
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return (last + 1) * dtype.itemsize


@dataclass(eq=False, slots=True)
class LiveBlock:
    """A block that a user's storage holds."""

    arena: Arena
    offset: int
    num_bytes: int
    storage: StorageWeakRef
    source: str
    owner: SimulatedStream
    """The stream it was allocated on: freed, only that stream may reuse it, as in CUDA's pools."""

    @property
    def address(self) -> int:
        return self.arena.address + self.offset

    @property
    def is_dead(self) -> bool:
        return bool(self.storage.expired())


@dataclass(eq=False, slots=True)
class FreeRange:
    """Unused bytes of an arena. ``owner``: the one stream that may take them."""

    offset: int
    num_bytes: int
    owner: SimulatedStream

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class Arena:
    """A reserved stretch of addresses, in use up to ``top``."""

    def __init__(self, num_bytes: int) -> None:
        # Private and anonymous: a forked child gets its own copy, untouched pages cost nothing.
        self.memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.num_bytes = num_bytes
        with torch.inference_mode(False), torch.no_grad():
            self.base = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self.base.data_ptr()
        self.end = self.address + num_bytes
        self.top = 0
        self.kept_top = 0
        """What finished recordings and ``alloc`` use; ``top`` falls back to it after an abort."""
        self.free: list[FreeRange] = []
        """By offset, neighbours of one owner merged."""
        self._typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: self.base}

    def view(
        self, address: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over the bytes at ``address``, in the storage of the whole arena."""
        whole = self._typed.get(dtype)
        if whole is None:
            whole = self._typed[dtype] = self.base.view(dtype)
        return whole.as_strided(size, stride, (address - self.address) // dtype.itemsize)

    def owning(self, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with a storage of its own over ``num_bytes`` at ``offset``."""
        count = num_bytes // dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def poison(self, offset: int, num_bytes: int) -> None:
        # Not through torch: an open recording would record it.
        ctypes.memset(self.address + offset, POISON, num_bytes)

    def give_back(self, offset: int, num_bytes: int, owner: SimulatedStream) -> None:
        """Put a range among the free ones."""
        self.free.append(FreeRange(offset, num_bytes, owner))
        merged: list[FreeRange] = []
        for one in sorted(self.free, key=lambda free: free.offset):
            if merged and merged[-1].end == one.offset and merged[-1].owner is one.owner:
                merged[-1].num_bytes += one.num_bytes
            else:
                merged.append(one)
        self.free = merged

    def lower_top(self, last_live_end: int) -> None:
        """Forget bytes that only an aborted recording had used."""
        self.top = top = min(self.top, max(self.kept_top, last_live_end))
        self.free = [one for one in self.free if one.offset < top]
        for one in self.free:
            one.num_bytes = min(one.num_bytes, top - one.offset)


class PoolMemory:
    """The arenas and blocks behind a pool, however many views of it there are."""

    def __init__(self, handle: tuple[int, int]) -> None:
        self.handle = handle
        self.arenas: list[Arena] = []
        self.live: dict[int, LiveBlock] = {}
        """By address."""
        self.is_recording = False
        self.num_views = 0

    def arena_at(self, address: int) -> Arena | None:
        return next((one for one in self.arenas if one.address <= address < one.end), None)

    def bytes(self) -> int:
        self.poll()
        return sum(arena.top for arena in self.arenas)

    def release(self) -> None:
        for arena in self.arenas:
            arena.poison(0, arena.top)
            arena.top = arena.kept_top = 0
            arena.free = []
        self.live = {}

    def poison_unless_live(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Poison byte ranges of a graph that is gone, apart from what a user's tensor holds."""
        self.poll()
        live = [(start, start + block.num_bytes) for start, block in self.live.items()]
        for start, end in ranges:
            if not any(low < end and start < high for low, high in live):
                ctypes.memset(start, POISON, end - start)

    def poll(self) -> None:
        """Free the blocks whose last user tensor is gone.

        Bytes are poisoned here only inside a recording, where nothing was computed yet. Outside,
        a weak alias may still be read until something else takes the bytes.
        """
        dead = [block for block in self.live.values() if block.is_dead]
        for block in dead:
            del self.live[block.address]
            block.arena.give_back(block.offset, block.num_bytes, block.owner)
            if self.is_recording:
                block.arena.poison(block.offset, block.num_bytes)
        if dead and not self.is_recording:
            self._lower_tops()

    def _lower_tops(self) -> None:
        for arena in self.arenas:
            ends = [b.offset + b.num_bytes for b in self.live.values() if b.arena is arena]
            arena.lower_top(max(ends, default=0))

    def begin_recording(self) -> None:
        self.poll()
        self.is_recording = True

    def end_recording(self, keep: bool) -> None:
        """``keep``: it ended well, so what it used stays in use."""
        self.poll()
        self.is_recording = False
        (self.keep if keep else self._lower_tops)()

    def keep(self) -> None:
        """What is in use now stays in use."""
        for arena in self.arenas:
            arena.kept_top = arena.top

    def allocate(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        source: str,
        owner: SimulatedStream,
    ) -> tuple[torch.Tensor, LiveBlock]:
        """A tensor that owns a block. Called with no mode active and outside inference mode."""
        self.poll()
        wanted = max(extent_bytes(size, stride, dtype), 1)
        num_bytes = (wanted + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        arena, offset = self._find(num_bytes, owner)
        arena.poison(offset, num_bytes)
        tensor = arena.owning(offset, num_bytes, dtype).as_strided_(size, stride)
        storage = StorageWeakRef(tensor.untyped_storage())
        block = LiveBlock(arena, offset, num_bytes, storage, source, owner)
        self.live[block.address] = block
        return tensor, block

    def _find(self, num_bytes: int, owner: SimulatedStream) -> tuple[Arena, int]:
        """Best fit among the free ranges, else fresh bytes at the top of the last arena."""
        fitting = [
            (arena, one)
            for arena in self.arenas
            for one in arena.free
            if one.num_bytes >= num_bytes and one.owner is owner
        ]
        if not fitting:
            return self._grow(num_bytes, owner)
        arena, best = min(fitting, key=lambda found: found[1].num_bytes)
        offset = best.offset
        best.offset += num_bytes
        best.num_bytes -= num_bytes
        if not best.num_bytes:
            arena.free.remove(best)
        return arena, offset

    def _grow(self, num_bytes: int, owner: SimulatedStream) -> tuple[Arena, int]:
        if self.arenas:
            arena = self.arenas[-1]
            start = arena.top
            # A free range that touches the top is extended by the missing bytes only.
            if arena.free and arena.free[-1].end == arena.top and arena.free[-1].owner is owner:
                start = arena.free[-1].offset
            if start + num_bytes <= arena.num_bytes:
                if start != arena.top:
                    arena.free.pop()
                arena.top = start + num_bytes
                return arena, start
        arena = Arena(max(ARENA_BYTES, num_bytes))
        self.arenas.append(arena)
        arena.top = num_bytes
        return arena, 0


class SimulatedPool:
    """Memory shared by the graphs that are recorded into it. See ``base.Pool``.

    Several pools may be views of the same memory; the last one that is released gives it up.
    """

    def __init__(self, memory: PoolMemory) -> None:
        self.memory = memory
        self.handle = memory.handle
        self.released = False
        memory.num_views += 1

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return not self.released and self.memory.arena_at(address) is not None

    def live_blocks(self) -> Sequence[Block]:
        if self.released:
            return []
        self.memory.poll()
        return [
            Block(address, block.num_bytes, block.source)
            for address, block in sorted(self.memory.live.items())
        ]

    def bytes(self) -> int:
        return 0 if self.released else self.memory.bytes()

    def release(self) -> None:
        if self.released:
            return
        if self.memory.is_recording:
            raise LifetimeError(
                "a pool cannot be released while it is recorded into",
                expected="every recording ended or aborted",
                found=f"an open recording into pool {self.handle}",
                do="end or abort the recording first.",
            )
        self.released = True
        self.memory.num_views -= 1
        if not self.memory.num_views:
            self.memory.release()


class DeviceMemory:
    """The memory of one device: its pools, and what the driver keeps for its graphs."""

    def __init__(self, driver_bytes: int, max_graphs: int | None) -> None:
        self.pools: list[PoolMemory] = []
        """Released ones too: what still points into them reads poison."""
        self.graphs: dict[DeviceGraph, int] = {}
        """Those not reset, and their nodes. Every recorded operation asks for the sum."""
        self._driver_bytes = driver_bytes
        self._max_graphs = max_graphs

    def arena_at(self, address: int) -> Arena | None:
        found = (pool.arena_at(address) for pool in self.pools if pool.num_views)
        return next((arena for arena in found if arena is not None), None)

    def arena_of(self, tensor: torch.Tensor) -> Arena | None:
        is_strided = tensor.layout is torch.strided
        return self.arena_at(tensor.untyped_storage().data_ptr()) if is_strided else None

    def reading(self, pool_bytes: int) -> MemoryReading:
        return MemoryReading(
            free_bytes=max(self._driver_bytes - self._used_bytes(), 0),
            total_bytes=self._driver_bytes,
            reserved_bytes=self._reserved_bytes(),
            tensor_bytes=sum(
                block.num_bytes
                for pool in self.pools
                for block in list(pool.live.values())
                if not block.is_dead
            ),
            pool_bytes=pool_bytes,
        )

    def check_allocation(self, source: Source) -> None:
        """Errors: ``GraphMemoryError`` once pools and graphs exceed what the driver has."""
        used = self._used_bytes()
        if used > self._driver_bytes:
            raise GraphMemoryError(
                "the device is out of memory",
                expected=f"at most {self._driver_bytes} bytes",
                found=f"{used} bytes after an allocation at {source.with_text}",
                do="capture fewer or smaller keys, largest first.",
                operation="an allocation",
                source=source.with_text,
            )

    def check_graph(self, label: str, num_nodes: int) -> None:
        """Errors: ``GraphMemoryError`` if one more graph of ``num_nodes`` does not fit."""
        if self._max_graphs is not None and len(self.graphs) >= self._max_graphs:
            raise GraphMemoryError(
                f"{label}: the device holds no more graphs",
                expected=f"at most {self._max_graphs} graphs",
                found=f"{len(self.graphs)} and one more",
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

    def _reserved_bytes(self) -> int:
        # Looks at no block: another thread may be recording.
        return sum(arena.top for pool in self.pools for arena in pool.arenas)

    def _used_bytes(self) -> int:
        return self._reserved_bytes() + sum(list(self.graphs.values())) * NODE_BYTES

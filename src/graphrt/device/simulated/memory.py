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
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.device.base import Block
from graphrt.device.simulated.streams import SimulatedStream
from graphrt.errors import LifetimeError

ALIGNMENT = 64
ARENA_BYTES = 8 << 20
POISON = 0xFF
"""NaN in every float, -1 in every signed integer, True in a bool."""


def extent_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first element to the end of the last one; 0 without elements."""
    if 0 in size:
        return 0
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return (last + 1) * dtype.itemsize


class LiveBlock:
    """A block that a user's storage holds."""

    __slots__ = ("arena", "num_bytes", "offset", "owner", "source", "storage", "touches")

    def __init__(
        self, arena: Arena, offset: int, num_bytes: int, storage: StorageWeakRef, source: str
    ) -> None:
        self.arena = arena
        self.offset = offset
        self.num_bytes = num_bytes
        self.storage = storage
        self.source = source
        self.touches = 0
        """Recorded kernels that read or wrote it."""
        self.owner: SimulatedStream | None = None
        """The stream it was allocated on; freed, only that stream may reuse it in this window."""

    @property
    def address(self) -> int:
        return self.arena.address + self.offset

    @property
    def is_dead(self) -> bool:
        return bool(self.storage.expired())


class FreeRange:
    """Unused bytes of an arena. ``owner``: the one stream that may take them, None for any."""

    __slots__ = ("num_bytes", "offset", "owner")

    def __init__(self, offset: int, num_bytes: int, owner: SimulatedStream | None) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self.owner = owner


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
        """What successful windows and slots have used; ``top`` falls back to it after an abort."""
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

    def owning(
        self,
        offset: int,
        num_bytes: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """A tensor with a storage of its own over ``num_bytes`` at ``offset``."""
        count = num_bytes // dtype.itemsize
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)
        return flat.as_strided_(size, stride)

    def poison(self, offset: int, num_bytes: int) -> None:
        # Not through torch: the modes of an open window would record it.
        ctypes.memset(self.address + offset, POISON, num_bytes)

    def give_back(self, offset: int, num_bytes: int, owner: SimulatedStream | None) -> None:
        """Put a range among the free ones, merged with neighbours of the same owner."""
        free = self.free
        at = 0
        while at < len(free) and free[at].offset < offset:
            at += 1
        free.insert(at, FreeRange(offset, num_bytes, owner))
        self._merge(at)
        self._merge(at - 1)

    def _merge(self, at: int) -> None:
        if at < 0 or at + 1 >= len(self.free):
            return
        left, right = self.free[at], self.free[at + 1]
        if left.offset + left.num_bytes == right.offset and left.owner is right.owner:
            left.num_bytes += right.num_bytes
            del self.free[at + 1]

    def release_owners(self) -> None:
        """At the end of a window every stream is joined: any of them may take any range."""
        ranges = self.free
        self.free = []
        for one in ranges:
            one.owner = None
            if self.free and self.free[-1].offset + self.free[-1].num_bytes == one.offset:
                self.free[-1].num_bytes += one.num_bytes
            else:
                self.free.append(one)

    def lower_top(self, last_live_end: int) -> None:
        """Forget bytes that only an aborted window had used."""
        top = max(self.kept_top, last_live_end)
        if top >= self.top:
            return
        self.top = top
        kept = [one for one in self.free if one.offset < top]
        for one in kept:
            one.num_bytes = min(one.num_bytes, top - one.offset)
        self.free = kept


class PoolMemory:
    """The arenas and blocks behind a pool, however many views of it there are."""

    def __init__(self, handle: tuple[int, int]) -> None:
        self.handle = handle
        self.arenas: list[Arena] = []
        self.live: dict[int, LiveBlock] = {}
        """By address."""
        self.in_window = False
        self.num_views = 0

    def arena_at(self, address: int) -> Arena | None:
        for arena in self.arenas:
            if arena.address <= address < arena.end:
                return arena
        return None

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

        Bytes are poisoned here only inside a window, where nothing was computed yet. Outside, a
        weak alias may still be read until something else takes the bytes.
        """
        dead = [block for block in self.live.values() if block.is_dead]
        for block in dead:
            del self.live[block.address]
            block.arena.give_back(
                block.offset, block.num_bytes, block.owner if self.in_window else None
            )
            if self.in_window:
                block.arena.poison(block.offset, block.num_bytes)
        if dead and not self.in_window:
            self._lower_tops()

    def _lower_tops(self) -> None:
        for arena in self.arenas:
            ends = [b.offset + b.num_bytes for b in self.live.values() if b.arena is arena]
            arena.lower_top(max(ends, default=0))

    def open_window(self) -> None:
        self.poll()
        self.in_window = True

    def close_window(self, keep: bool) -> None:
        """``keep``: the window ended well, so what it used stays in use."""
        self.poll()
        self.in_window = False
        for arena in self.arenas:
            arena.release_owners()
        if keep:
            self.keep()
        else:
            self._lower_tops()

    def keep(self) -> None:
        """What is in use now stays in use: a window ended well, or a slot was allocated."""
        for arena in self.arenas:
            arena.kept_top = arena.top

    def allocate(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        source: str,
        owner: SimulatedStream | None,
    ) -> tuple[torch.Tensor, LiveBlock]:
        """A tensor that owns a block. Called with no mode active and outside inference mode."""
        self.poll()
        wanted = max(extent_bytes(size, stride, dtype), 1)
        num_bytes = (wanted + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        arena, offset = self._find(num_bytes, owner)
        arena.poison(offset, num_bytes)
        tensor = arena.owning(offset, num_bytes, size, stride, dtype)
        storage = StorageWeakRef(tensor.untyped_storage())
        block = LiveBlock(arena, offset, num_bytes, storage, source)
        block.owner = owner
        self.live[block.address] = block
        return tensor, block

    def _find(self, num_bytes: int, owner: SimulatedStream | None) -> tuple[Arena, int]:
        """Best fit among the free ranges, else fresh bytes at the top of the last arena."""
        best: FreeRange | None = None
        home: Arena | None = None
        for arena in self.arenas:
            for one in arena.free:
                fits = one.num_bytes >= num_bytes and (one.owner is None or one.owner is owner)
                if fits and (best is None or one.num_bytes < best.num_bytes):
                    best, home = one, arena
        if best is not None and home is not None:
            offset = best.offset
            best.offset += num_bytes
            best.num_bytes -= num_bytes
            if not best.num_bytes:
                home.free.remove(best)
            return home, offset
        return self._grow(num_bytes, owner)

    def _grow(self, num_bytes: int, owner: SimulatedStream | None) -> tuple[Arena, int]:
        if self.arenas:
            arena = self.arenas[-1]
            start = arena.top
            tail = arena.free[-1] if arena.free else None
            # A free range that touches the top is extended by the missing bytes only.
            if (
                tail is not None
                and tail.offset + tail.num_bytes == arena.top
                and (tail.owner is None or tail.owner is owner)
            ):
                start = tail.offset
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
        self.released = False
        memory.num_views += 1

    @property
    def handle(self) -> tuple[int, int]:
        return self.memory.handle

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
        if self.memory.in_window:
            raise LifetimeError(
                "a pool cannot be released while a window records into it",
                expected="every recording ended or aborted",
                found=f"pool {self.handle} has an open window",
                do="end or abort the recording first.",
            )
        self.released = True
        self.memory.num_views -= 1
        if not self.memory.num_views:
            self.memory.release()

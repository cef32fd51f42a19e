"""The table of running requests: one row, a seat, for each.

Scheduler and runner both work on whole columns of it, so that a decode step costs a few array
operations and not a loop over requests. A seat that is free may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphrt_llm.blocks import BlockAllocator, blocks_for
from graphrt_llm.limits import Limits


class Seats:
    """Columns of the running requests, and the blocks that they hold.

    One seat for each of ``limits.max_num_seqs``.

    ``tokens`` [num_seats, max_model_len] int64: prompt and output, row ``seat``, from 0.
    ``num_tokens``, ``num_computed`` [num_seats] int64: tokens known, and those whose keys and
    values are in the cache. ``num_at_most`` [num_seats] int64: tokens at which a request ends.
    ``block_tables`` [num_seats, max_blocks] int64: the blocks, in order
    of position; the null block beyond ``num_blocks`` [num_seats].
    """

    def __init__(self, limits: Limits) -> None:
        num_seats = limits.max_num_seqs
        self.block_size = limits.block_size
        self.allocator = BlockAllocator(limits.num_blocks)
        # Pages of a zeroed array that nobody wrote cost no memory: long contexts are free here.
        self.tokens: NDArray[np.int64] = np.zeros((num_seats, limits.max_model_len), np.int64)
        self.num_tokens: NDArray[np.int64] = np.zeros(num_seats, np.int64)
        self.num_computed: NDArray[np.int64] = np.zeros(num_seats, np.int64)
        self.num_at_most: NDArray[np.int64] = np.zeros(num_seats, np.int64)
        self.num_blocks: NDArray[np.int64] = np.zeros(num_seats, np.int64)
        self.block_tables: NDArray[np.int64] = np.zeros((num_seats, limits.max_blocks), np.int64)
        self._free = list(range(num_seats - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def fits(self, num_tokens: int) -> bool:
        """True if a seat, and blocks for ``num_tokens`` tokens, are free."""
        needed = blocks_for(num_tokens, self.block_size)
        return bool(self._free) and needed <= self.allocator.num_free

    def take(self, *parts: Sequence[int]) -> int:
        """Seat a request whose tokens are ``parts``, one after the other; nothing is computed yet.

        Errors: ``OutOfBlocksError``; nothing is taken then.
        """
        num_tokens = sum(map(len, parts))
        blocks = self.allocator.allocate(blocks_for(num_tokens, self.block_size))
        seat = self._free.pop()
        start = 0
        for part in parts:
            self.tokens[seat, start : start + len(part)] = part
            start += len(part)
        self.num_tokens[seat] = num_tokens
        self.num_computed[seat] = 0
        self.block_tables[seat, : len(blocks)] = blocks
        self.num_blocks[seat] = len(blocks)
        return seat

    def grow(self, seat: int) -> None:
        """Give ``seat`` one more block. Errors: ``OutOfBlocksError``."""
        [block] = self.allocator.allocate()
        self.block_tables[seat, self.num_blocks[seat]] = block
        self.num_blocks[seat] += 1

    def leave(self, seat: int) -> None:
        """Free ``seat`` and its blocks."""
        count = self.num_blocks[seat]
        self.allocator.free(self.block_tables[seat, :count].tolist())
        self.block_tables[seat, :count] = 0
        self.num_blocks[seat] = 0
        self._free.append(seat)

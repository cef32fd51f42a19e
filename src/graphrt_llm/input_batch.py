"""The table of running requests: one row for each.

Scheduler and runner both work on whole columns of it, so that a decode step costs a few array
operations and not a loop over requests. A free row may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphrt_llm.blocks import BlockAllocator, blocks_for
from graphrt_llm.config import Limits


class InputBatch:
    """Columns of the running requests, and the blocks that they hold.

    ``tokens`` [max_num_seqs, max_model_len + query_len - 1] int64: prompt and output of the request
    in each row, then the drafts of this step.
    ``num_tokens``, ``num_computed`` [max_num_seqs] int64: tokens known, and those whose keys and
    values are in the cache. ``max_num_tokens`` [max_num_seqs] int64: at which a request ends.
    ``block_tables`` [max_num_seqs, max_blocks] int64: the blocks, in order of position; the null
    block beyond ``num_blocks`` [max_num_seqs]. ``lora_slots`` [max_num_seqs] int64: where each
    request's adapter stands, -1 without one.
    """

    def __init__(self, limits: Limits) -> None:
        num_rows = limits.max_num_seqs
        self.block_size = limits.block_size
        self._num_drafts = limits.query_len - 1
        self.allocator = BlockAllocator(limits.num_blocks)
        # Pages of a zeroed array that are never written cost no memory: long contexts are free.
        # Drafts may follow the last token of a context.
        num_columns = limits.max_model_len + limits.query_len - 1
        self.tokens: NDArray[np.int64] = np.zeros((num_rows, num_columns), np.int64)
        self.num_tokens: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_computed: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.max_num_tokens: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_blocks: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.lora_slots: NDArray[np.int64] = np.full(num_rows, -1)
        self.block_tables: NDArray[np.int64] = np.zeros((num_rows, limits.max_blocks), np.int64)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def fits(self, num_tokens: int) -> bool:
        """True if a row, and blocks for ``num_tokens`` tokens and their drafts, are free."""
        needed = blocks_for(num_tokens + self._num_drafts, self.block_size)
        return bool(self._free_rows) and needed <= self.allocator.num_free

    def add(self, *parts: Sequence[int], max_num_tokens: int, lora_slot: int = -1) -> int:
        """Give a request a row; its tokens are ``parts``, one after the other, none computed yet.

        Errors: ``OutOfBlocksError``; nothing is taken then.
        """
        num_tokens = sum(map(len, parts))
        room = num_tokens + self._num_drafts
        blocks = self.allocator.allocate(blocks_for(room, self.block_size))
        row = self._free_rows.pop()
        start = 0
        for part in parts:
            self.tokens[row, start : start + len(part)] = part
            start += len(part)
        self.num_tokens[row] = num_tokens
        self.num_computed[row] = 0
        self.max_num_tokens[row] = max_num_tokens
        self.lora_slots[row] = lora_slot
        self.block_tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        return row

    def is_short(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the requests in ``rows`` have no room for their newest token and its drafts."""
        needed = self.num_tokens[rows] + self._num_drafts
        short: NDArray[np.bool_] = self.num_blocks[rows] * self.block_size < needed
        return short

    def add_block(self, row: int) -> None:
        """Give ``row`` one more block. Errors: ``OutOfBlocksError``."""
        [block] = self.allocator.allocate()
        self.block_tables[row, self.num_blocks[row]] = block
        self.num_blocks[row] += 1

    def remove(self, row: int) -> None:
        """Free ``row`` and its blocks."""
        count = self.num_blocks[row]
        self.allocator.free(self.block_tables[row, :count].tolist())
        self.block_tables[row, :count] = 0
        self.num_blocks[row] = 0
        self._free_rows.append(row)

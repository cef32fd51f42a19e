"""Which blocks of the paged cache are allocated.

Block 0 is the null block: padding rows of a graph write there, so it is never allocated and its
content has no meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from graphrt_llm.errors import BlockError, EngineConfigError, OutOfBlocksError

NULL_BLOCK = 0


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class BlockAllocator:
    """Allocates the blocks ``1 .. num_blocks - 1``, the longest free one first.

    The order is fixed, so that equal histories give equal blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise EngineConfigError(
                "block cache",
                expected="at least 2 blocks, one of them the null block",
                found=str(num_blocks),
            )
        self.num_blocks = num_blocks
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))
        self._is_allocated = bytearray(num_blocks)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """The free blocks, ascending."""
        return sorted(self._free)

    def allocate(self, count: int = 1) -> list[int]:
        """Take ``count`` blocks, or none at all and raise ``OutOfBlocksError``."""
        if count < 0:
            raise BlockError("allocate", expected="a count >= 0", found=str(count))
        if count > len(self._free):
            raise OutOfBlocksError(
                "block cache",
                expected=f"{count} free blocks",
                found=f"{len(self._free)} of {self.num_usable}",
                do="give the engine more blocks, or fewer and shorter requests at a time.",
            )
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._is_allocated[block] = True
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Free ``blocks``. ``BlockError``, and nothing is freed, if one is not allocated."""
        blocks = list(blocks)
        wrong = [
            block
            for block in blocks
            if not (0 < block < self.num_blocks and self._is_allocated[block])
        ]
        if wrong or len(set(blocks)) != len(blocks):
            raise BlockError(
                "free",
                expected="distinct blocks that are allocated",
                found=f"{blocks}, of which {wrong or 'some twice'}",
            )
        for block in blocks:
            self._is_allocated[block] = False
        self._free.extend(blocks)

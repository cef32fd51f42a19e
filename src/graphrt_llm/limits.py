"""What bounds every batch of an engine, and whether these bounds agree with each other."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphrt_llm.blocks import blocks_for
from graphrt_llm.errors import EngineConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Counts of requests, tokens and blocks. ``num_blocks`` includes the null block.

    Errors: ``EngineConfigError`` where cache and context could not hold the largest batch: a graph
    for it could never be filled, and was never tried before it is needed.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int

    def __post_init__(self) -> None:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise EngineConfigError(
                "max_num_batched_tokens",
                expected=f"at least max_num_seqs = {self.max_num_seqs}: each may decode one token",
                found=str(self.max_num_batched_tokens),
            )
        largest = self.largest_batch()
        if self.max_num_seqs > self.num_blocks - 1 or self.max_num_batched_tokens > largest:
            raise EngineConfigError(
                "engine limits",
                expected="a cache and a context that can hold the largest batch",
                found=f"{self.max_num_seqs} requests with {self.max_num_batched_tokens} tokens in a"
                f" step, where {self.num_blocks - 1} blocks of {self.block_size} and a context of"
                f" {self.max_model_len} hold at most {largest} tokens",
                do="give the engine more blocks, or lower max_num_seqs or max_num_batched_tokens.",
            )

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request."""
        return blocks_for(self.max_model_len, self.block_size)

    def room(self, num_reqs: int, num_blocks: int | None = None) -> NDArray[np.int64]:
        """Tokens that each of ``num_reqs`` requests can bring if they share the blocks evenly.

        ``num_blocks``: how many they share; None: all but the null block.
        """
        usable = self.num_blocks - 1 if num_blocks is None else num_blocks
        blocks = usable // num_reqs + (np.arange(num_reqs) < usable % num_reqs)
        room: NDArray[np.int64] = np.minimum(blocks * self.block_size, self.max_model_len)
        return room

    def blocks_to_bring(self, num_tokens: int, num_reqs: int) -> int:
        """The fewest blocks that let ``num_reqs`` requests bring ``num_tokens`` tokens.

        Each brings one at least, in a block of its own.
        """
        return bisect_left(
            range(self.num_blocks),
            num_tokens,
            lo=num_reqs,
            key=lambda count: int(self.room(num_reqs, count).sum()),
        )

    def largest_batch(self) -> int:
        """Tokens that fit one step of ``max_num_seqs`` requests. Sharing evenly is best."""
        return int(self.room(self.max_num_seqs).sum())

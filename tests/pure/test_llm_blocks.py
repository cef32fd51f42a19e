"""The block allocator against a model: the set of allocated blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from graphrt_llm.blocks import NULL_BLOCK, BlockAllocator, blocks_for
from graphrt_llm.errors import BlockError, EngineConfigError, OutOfBlocksError

NUM_BLOCKS = 9


class AllocatorMachine(RuleBasedStateMachine):
    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.allocated: set[int] = set()

    @rule(target=blocks, count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int):
        if count > self.allocator.num_free:
            with pytest.raises(OutOfBlocksError):
                self.allocator.allocate(count)
            return multiple()
        got = self.allocator.allocate(count)
        assert len(set(got)) == count
        assert not self.allocated & set(got)
        self.allocated |= set(got)
        return multiple(*got)

    @rule(block=consumes(blocks))
    def free(self, block: int) -> None:
        self.allocator.free([block])
        self.allocated.discard(block)
        with pytest.raises(BlockError):
            self.allocator.free([block])

    @precondition(lambda self: self.allocated)
    @rule(other=st.integers(-2, NUM_BLOCKS + 2))
    def free_with_an_unallocated_one_frees_nothing(self, other: int) -> None:
        if other in self.allocated:
            return
        with pytest.raises(BlockError):
            self.allocator.free([*self.allocated, other])

    @rule(block=blocks)
    def free_twice_in_one_call_frees_nothing(self, block: int) -> None:
        with pytest.raises(BlockError):
            self.allocator.free([block, block])

    @invariant()
    def the_null_block_is_never_allocated(self) -> None:
        assert self.allocator.num_free + len(self.allocated) == self.allocator.num_usable
        assert NULL_BLOCK not in self.allocated
        assert self.allocated <= set(range(1, NUM_BLOCKS))


TestAllocator = AllocatorMachine.TestCase


def test_equal_histories_give_equal_blocks():
    def history() -> list[int]:
        allocator = BlockAllocator(6)
        first = allocator.allocate(3)
        allocator.free([first[1]])
        return first + allocator.allocate(3)

    assert history() == history() == [1, 2, 3, 4, 5, 2]


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_cache_without_usable_blocks_is_refused(num_blocks: int):
    with pytest.raises(EngineConfigError):
        BlockAllocator(num_blocks)


def test_a_negative_count_is_refused():
    with pytest.raises(BlockError):
        BlockAllocator(4).allocate(-1)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_for_is_the_least_that_holds_the_tokens(num_tokens: int, block_size: int):
    blocks = blocks_for(num_tokens, block_size)
    assert blocks * block_size >= num_tokens
    assert (blocks - 1) * block_size < max(num_tokens, 1)

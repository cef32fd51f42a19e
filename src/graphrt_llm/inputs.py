"""The tensors a step reads: what they are, how a batch fills them, and examples that fill a key.

A batch of ``num_reqs`` requests brings ``num_tokens`` tokens, request after request. Padding rows
belong to request 0, stand at position 0 and write to the null block, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphrt import SENTINEL, BatchDescriptor, BufferSpec, Example
from graphrt_llm.attention import AttentionMetadata
from graphrt_llm.blocks import NULL_BLOCK, BlockAllocator
from graphrt_llm.errors import OutOfBlocksError
from graphrt_llm.limits import Limits
from graphrt_llm.scheduler import ScheduledBatch
from graphrt_llm.seats import Seats

Ints = NDArray[np.int64]

EXAMPLE_CONTEXT = 256
"""Tokens at most that stand before a request of an example: several blocks, and still cheap."""


def input_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """The static inputs, in the order ``forward`` is described; all int64."""
    null = SENTINEL(0)
    return (
        BufferSpec("input_ids", ("tokens",), torch.int64, null),
        BufferSpec("positions", ("tokens",), torch.int64, null),
        BufferSpec("slot_mapping", ("tokens",), torch.int64, SENTINEL(NULL_BLOCK)),
        BufferSpec("token_requests", ("tokens",), torch.int64, null),
        BufferSpec(
            "block_tables", ("requests", limits.max_blocks), torch.int64, SENTINEL(NULL_BLOCK)
        ),
        BufferSpec("seq_lens", ("requests",), torch.int64, null),
        BufferSpec("logits_indices", ("requests",), torch.int64, null),
    )


class HostInputs:
    """Host storage of one step's inputs, filled by whole-array operations.

    Pinned where the device is a GPU, so that staging does not wait. A caller must not fill it again
    before the device has read it; see ``Runner``.
    """

    def __init__(self, limits: Limits, *, pinned: bool) -> None:
        capacity = {"tokens": limits.max_num_batched_tokens, "requests": limits.max_num_seqs}
        self._block_size = limits.block_size
        self._tensors: dict[str, Tensor] = {}
        self._arrays: dict[str, Ints] = {}
        self._axis: dict[str, str] = {}
        for spec in input_specs(limits):
            shape = [capacity.get(n, 0) if isinstance(n, str) else n for n in spec.shape]
            tensor = torch.zeros(shape, dtype=spec.dtype, pin_memory=pinned)
            self._tensors[spec.name] = tensor
            self._arrays[spec.name] = tensor.numpy()
            self._axis[spec.name] = spec.axes[0]
        self._sources = torch.zeros(
            limits.max_num_batched_tokens, dtype=torch.int64, pin_memory=pinned
        )
        # Decode steps of one size come again and again: their views are made once.
        self._uniform_views: dict[int, Mapping[str, Tensor]] = {}

    def fill_from_seats(self, batch: ScheduledBatch, seats: Seats) -> Mapping[str, Tensor]:
        """The inputs of a scheduled batch: views of the host storage, of the real size."""
        owners, positions = expand(batch.starts, batch.query_lens)
        input_ids = seats.tokens[batch.seats[owners], positions]
        tables = seats.block_tables[batch.seats]
        return self.fill(batch.starts, batch.query_lens, owners, positions, input_ids, tables)

    def fill(
        self,
        starts: Ints,
        query_lens: Ints,
        owners: Ints,
        positions: Ints,
        input_ids: Ints,
        block_tables: Ints,
    ) -> Mapping[str, Tensor]:
        """As ``fill_from_seats``, from arrays: per request, then per token, then the tables."""
        num_reqs, num_tokens = len(query_lens), len(owners)
        ends, size = starts + query_lens, self._block_size
        values = _values(query_lens, ends, owners, positions, input_ids, block_tables, size)
        for name, array in values.items():
            self._arrays[name][: len(array)] = array
        if num_tokens != num_reqs:
            return self._views(num_tokens, num_reqs)
        if num_reqs not in self._uniform_views:
            self._uniform_views[num_reqs] = self._views(num_tokens, num_reqs)
        return self._uniform_views[num_reqs]

    def sources(self, num_tokens: int, tokens: Ints, rows: Sequence[int]) -> Tensor:
        """[num_tokens]: at ``tokens`` the row of another step that it comes from, -1 elsewhere."""
        sources = self._sources[:num_tokens]
        array = sources.numpy()
        array[:] = -1
        array[tokens] = rows
        return sources

    def _views(self, num_tokens: int, num_reqs: int) -> Mapping[str, Tensor]:
        size = {"tokens": num_tokens, "requests": num_reqs}
        return {name: t[: size[self._axis[name]]] for name, t in self._tensors.items()}


def _values(
    query_lens: Ints,
    ends: Ints,
    owners: Ints,
    positions: Ints,
    input_ids: Ints,
    block_tables: Ints,
    block_size: int,
) -> dict[str, Ints]:
    """One step's inputs by name, in the order of ``input_specs``."""
    blocks = block_tables[owners, positions // block_size]
    return {
        "input_ids": input_ids,
        "positions": positions,
        "slot_mapping": blocks * block_size + positions % block_size,
        "token_requests": owners,
        "block_tables": block_tables,
        "seq_lens": ends,
        "logits_indices": query_lens.cumsum() - 1,
    }


def expand(starts: Ints, query_lens: Ints) -> tuple[Ints, Ints]:
    """For each token of a batch the request that owns it, and its position in that request."""
    owners = np.repeat(np.arange(len(query_lens)), query_lens)
    first = np.cumsum(query_lens) - query_lens
    return owners, np.arange(len(owners)) + (starts - first)[owners]


class Examples:
    """Makes examples over the blocks that no request holds when one is asked for.

    They stay free until its capture is done with: nothing is scheduled meanwhile. So a capture
    between two steps writes over nothing that a request will read.
    """

    def __init__(self, limits: Limits, vocab_size: int, allocator: BlockAllocator) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._allocator = allocator
        self._num_needed: dict[BatchDescriptor, int] = {}

    def __call__(self, key: BatchDescriptor, seed: int) -> Example:
        """Errors: ``OutOfBlocksError`` where ``can_fill`` says no."""
        if not self.can_fill(key):
            raise OutOfBlocksError(
                f"an example of {key}",
                expected=f"{self._num_needed[key]} free blocks",
                found=str(self._allocator.num_free),
                do="capture it when fewer requests run.",
            )
        allocator = self._allocator
        # At the start of an engine all are free, and need not be listed for each key.
        are_all_free = allocator.num_free == allocator.num_usable
        blocks = None if are_all_free else allocator.free_blocks
        return make_example(key, seed, self._limits, self._vocab_size, blocks)

    def can_fill(self, key: BatchDescriptor) -> bool:
        """True if enough blocks are free for an example of ``key``."""
        needed = self._num_needed.get(key)
        if needed is None:
            num_reqs = _requests_of(key, self._limits)
            needed = self._limits.blocks_to_bring(key.num_tokens, num_reqs)
            self._num_needed[key] = needed
        return needed <= self._allocator.num_free


def make_example(
    key: BatchDescriptor,
    seed: int,
    limits: Limits,
    vocab_size: int,
    free_blocks: Sequence[int] | None = None,
) -> Example:
    """Random valid inputs that fill ``key``; another ``seed`` gives other lengths and contents.

    No two tokens are written to one slot, so the result does not depend on the order of writes.
    What a request reads before its own tokens is whatever the cache holds. ``free_blocks``: those
    that may be written and read; None: all.

    Aliasing: lengths and block tables are the memory of its ``live`` arrays, and of no other
              example.
    """
    rng = np.random.default_rng((seed, key.num_tokens))
    num_tokens = key.num_tokens
    num_reqs = _requests_of(key, limits)
    blocks = np.arange(1, limits.num_blocks) if free_blocks is None else np.array(free_blocks)
    spare = limits.room(num_reqs, len(blocks)) - 1
    query_lens = 1 + rng.multivariate_hypergeometric(
        spare, num_tokens - num_reqs, method="marginals"
    )

    # Own tokens start on a block, so that they need no more blocks than the request's share.
    size, longest = limits.block_size, limits.max_model_len
    most_blocks = np.minimum(longest - query_lens, EXAMPLE_CONTEXT) // size
    starts = size * rng.integers(0, most_blocks + 1)
    inside = rng.integers(0, size, num_reqs)
    starts += np.where((query_lens == 1) & (starts + inside < longest), inside, 0)

    tables = np.full((num_reqs, limits.max_blocks), NULL_BLOCK)
    ends = starts + query_lens
    num_used = -(-ends // size)
    used = tables[:, : num_used.max()]  # The context may allow many more.
    columns = np.arange(used.shape[1])
    is_used = columns < num_used[:, None]
    used[is_used] = rng.choice(blocks, is_used.sum())
    # In place of what was drawn: own blocks, of which no two tokens share a slot.
    is_own = is_used & (columns >= starts[:, None] // size)
    used[is_own] = rng.choice(blocks, is_own.sum(), replace=False)

    owners, positions = expand(starts, query_lens)
    input_ids = rng.integers(0, vocab_size, num_tokens)
    values = _values(query_lens, ends, owners, positions, input_ids, tables, size)
    tensors = {name: torch.from_numpy(array) for name, array in values.items()}
    return Example(tensors, num_tokens, num_reqs, AttentionMetadata(query_lens, ends, tables))


def _requests_of(key: BatchDescriptor, limits: Limits) -> int:
    """How many requests fill ``key``."""
    return key.num_reqs or min(key.num_tokens, limits.max_num_seqs)

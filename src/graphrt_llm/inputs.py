"""The tensors a step reads: what they are, how a batch fills them, and examples of any size.

The new tokens of a batch are laid out request after request. Padding rows belong to request 0, have
position 0 and write to the null block, which no request reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphrt import BatchDescriptor, BufferSpec, Example, Padding
from graphrt_llm.attention import AttentionMetadata
from graphrt_llm.blocks import NULL_BLOCK, BlockAllocator, blocks_for
from graphrt_llm.config import Limits
from graphrt_llm.errors import OutOfBlocksError
from graphrt_llm.input_batch import InputBatch
from graphrt_llm.scheduler import ScheduledBatch

Ints = NDArray[np.int64]

NO_ADAPTER = -1

EXAMPLE_CONTEXT = 256
"""Most cached tokens before the new ones of an example's request: several blocks, still cheap."""


def input_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """The static inputs, all int64. Those of adapters exist where ``max_loras`` permits some:

    ``lora_slots``: [tokens] where a token's adapter stands, -1 without one. ``active_loras``:
    [max_loras] the slots that they name, each once, then ``max_loras``.

    ``logits_indices``: [requests], or [requests, query_len] with speculative decoding: the last new
    tokens of each request; its first one stands for those that it has not.
    """
    indices = ("requests",) if limits.query_len == 1 else ("requests", limits.query_len)
    null = Padding.fill(0)
    any_token = Padding.fill(0, arbitrary=True)
    most = limits.max_loras
    adapters = (
        BufferSpec("lora_slots", ("tokens",), torch.int64, Padding.fill(NO_ADAPTER)),
        BufferSpec("active_loras", (most,), torch.int64, Padding.fill(most)),
    )
    return (
        BufferSpec("input_ids", ("tokens",), torch.int64, any_token),
        BufferSpec("positions", ("tokens",), torch.int64, any_token),
        BufferSpec("slot_mapping", ("tokens",), torch.int64, Padding.fill(NULL_BLOCK)),
        BufferSpec("token_requests", ("tokens",), torch.int64, null, rebase="requests"),
        BufferSpec(
            "block_tables", ("requests", limits.max_blocks), torch.int64, Padding.fill(NULL_BLOCK)
        ),
        BufferSpec("seq_lens", ("requests",), torch.int64, null),
        BufferSpec("logits_indices", indices, torch.int64, null, rebase="tokens"),
        *(adapters if most else ()),
    )


class HostInputs:
    """Host storage of one step's inputs, filled by whole-array operations.

    Pinned where the device is a GPU, so that staging does not wait. It must not be filled again
    before the device has read it; see ``Runner``.
    """

    def __init__(self, limits: Limits, *, pinned: bool) -> None:
        capacity = {"tokens": limits.max_num_batched_tokens, "requests": limits.max_num_seqs}
        self._block_size = limits.block_size
        self._max_loras = limits.max_loras
        self._query_len = limits.query_len
        self._tensors: dict[str, Tensor] = {}
        self._arrays: dict[str, Ints] = {}
        self._axis: dict[str, str] = {}
        for spec in input_specs(limits):
            shape = [capacity.get(n, 0) if isinstance(n, str) else n for n in spec.shape]
            tensor = torch.zeros(shape, dtype=spec.dtype, pin_memory=pinned)
            self._tensors[spec.name] = tensor
            self._arrays[spec.name] = tensor.numpy()
            self._axis[spec.name] = next(iter(spec.axes), "")
        self._sources = torch.zeros(
            limits.max_num_batched_tokens, dtype=torch.int64, pin_memory=pinned
        )
        # Decode steps of one size are frequent: their views are made once.
        self._uniform_views: dict[int, Mapping[str, Tensor]] = {}

    def fill(self, batch: ScheduledBatch, table: InputBatch) -> Mapping[str, Tensor]:
        """The inputs of a scheduled batch: views of the host storage, of the real size."""
        owners, positions = expand(batch.starts, batch.query_lens)
        values = _values(
            batch.query_lens,
            batch.starts + batch.query_lens,
            owners,
            positions,
            table.tokens[batch.rows[owners], positions],
            table.block_tables[batch.rows],
            self._block_size,
            self._query_len,
        )
        if self._max_loras:
            active = batch.active_loras
            values["lora_slots"] = batch.lora_slots[owners]
            unused = [self._max_loras] * (self._max_loras - len(active))
            values["active_loras"] = np.array([*active, *unused])
        for name, array in values.items():
            self._arrays[name][: len(array)] = array
        if not batch.uniform:
            return self._views(batch.num_tokens, batch.num_reqs)
        if batch.num_reqs not in self._uniform_views:
            self._uniform_views[batch.num_reqs] = self._views(batch.num_tokens, batch.num_reqs)
        return self._uniform_views[batch.num_reqs]

    def sources(self, num_tokens: int, last: Ints, indices: Sequence[int]) -> Tensor:
        """[num_tokens]: ``indices`` into the previous step's output at ``last``, -1 elsewhere."""
        sources = self._sources[:num_tokens]
        array = sources.numpy()
        array[:] = -1
        array[last] = indices
        return sources

    def _views(self, num_tokens: int, num_reqs: int) -> Mapping[str, Tensor]:
        size = {"tokens": num_tokens, "requests": num_reqs, "": self._max_loras}
        return {name: t[: size[self._axis[name]]] for name, t in self._tensors.items()}


def _values(
    query_lens: Ints,
    ends: Ints,
    owners: Ints,
    positions: Ints,
    input_ids: Ints,
    block_tables: Ints,
    block_size: int,
    query_len: int,
) -> dict[str, Ints]:
    """One step's inputs by name, in the order of ``input_specs``."""
    last = query_lens.cumsum() - 1
    if query_len > 1:
        first = last - query_lens + 1
        last = np.maximum(last[:, None] + np.arange(1 - query_len, 1), first[:, None])
    blocks = block_tables[owners, positions // block_size]
    return {
        "input_ids": input_ids,
        "positions": positions,
        "slot_mapping": blocks * block_size + positions % block_size,
        "token_requests": owners,
        "block_tables": block_tables,
        "seq_lens": ends,
        "logits_indices": last,
    }


def expand(starts: Ints, query_lens: Ints) -> tuple[Ints, Ints]:
    """For each token of a batch the request that owns it, and its position in that request."""
    owners = np.repeat(np.arange(len(query_lens)), query_lens)
    first = np.cumsum(query_lens) - query_lens
    return owners, np.arange(len(owners)) + (starts - first)[owners]


MOST_STAGED = 2**16
"""Bytes of pageable memory that a copy to a GPU takes over at once; with more it waits."""


class Examples:
    """Makes examples in free blocks only.

    Nothing is scheduled while a graph is captured, so a capture between two steps overwrites
    nothing that a request will read.

    ``pinned``: put large values into pinned memory, so that staging them does not wait for the GPU.
    """

    def __init__(
        self, limits: Limits, vocab_size: int, allocator: BlockAllocator, *, pinned: bool = False
    ) -> None:
        self._limits = limits
        self._pinned = pinned
        self._vocab_size = vocab_size
        self._allocator = allocator
        self._most_needed: dict[BatchDescriptor, int] = {}

    def can_fill(self, key: BatchDescriptor) -> bool:
        """True if enough blocks are free for an example that fills ``key``, and for any batch that
        is padded to it: fewer requests may need more blocks."""
        num_tokens = key.num_tokens
        if key not in self._most_needed:
            num_reqs = key.num_reqs or min(num_tokens, self._limits.max_num_seqs)
            longest = self._limits.max_model_len
            most = max(
                self._blocks_needed(min(n * part, num_tokens), n)
                for n in range(1, num_reqs + 1)
                for part in (self._limits.query_len, longest)
            )
            # A batch that needs more than all of them never comes.
            self._most_needed[key] = min(most, self._allocator.num_usable)
        return self._most_needed[key] <= self._allocator.num_free

    def __call__(self, sizes: Mapping[str, int], seed: int) -> Example:
        """Random valid inputs of exactly these ``sizes``: new "tokens" of so many "requests".

        If each request can have ``query_len`` tokens, it decodes; otherwise lengths are random, so
        that decodes and chunks of prompts are mixed. Another ``seed`` gives other lengths and
        contents. No two tokens are written to one slot, and no request reads what another writes,
        so the result does not depend on their order. Before its new tokens a request reads what
        the cache happens to contain.

        Aliasing: ``values`` and ``step_info`` may share the memory of lengths and block tables; no
                  other example does.
        Errors: ``OutOfBlocksError`` if too few blocks are free.
        """
        num_tokens, num_reqs, limits = sizes["tokens"], sizes["requests"], self._limits
        allocator = self._allocator
        needed = self._blocks_needed(num_tokens, num_reqs)
        if needed > allocator.num_free:
            raise OutOfBlocksError(
                f"an example of {num_tokens} tokens of {num_reqs} requests",
                expected=f"{needed} free blocks",
                found=str(allocator.num_free),
                do="capture it when fewer requests run.",
            )
        rng = np.random.default_rng((seed, num_tokens, num_reqs))
        spare = limits.room(num_reqs, allocator.num_free) - 1
        is_uniform = num_tokens == num_reqs * limits.query_len
        query_lens = 1 + rng.multivariate_hypergeometric(
            spare, num_tokens - num_reqs, method="marginals"
        )
        if is_uniform:
            query_lens[:] = limits.query_len

        # New tokens start on a block, so that they need no more blocks than the request's share.
        size, longest = limits.block_size, limits.max_model_len
        most_blocks = np.minimum(longest - query_lens, EXAMPLE_CONTEXT) // size
        starts = size * rng.integers(0, most_blocks + 1)
        # Those of equally many tokens begin anywhere in a block that leaves room for them.
        same = limits.query_len if is_uniform else 1
        inside = rng.integers(0, -same % size + 1, num_reqs)
        fits = (query_lens == same) & (starts + inside + same <= longest)
        starts += np.where(fits, inside, 0)

        tables = np.full((num_reqs, limits.max_blocks), NULL_BLOCK)
        ends = starts + query_lens
        num_used = -(-ends // size)
        used = tables[:, : num_used.max()]  # The context may allow many more.
        columns = np.arange(used.shape[1])
        is_used = columns < num_used[:, None]
        # Blocks of its own for what it writes, so that no two tokens share a slot.
        is_own = is_used & (columns >= starts[:, None] // size)
        num_own = int(is_own.sum())
        blocks = rng.permutation(self._some_free_blocks(2 * num_own, rng))
        used[is_own] = blocks[:num_own]
        # It reads what no other request writes: of two micro-batches one reads before the other
        # has written.
        is_context = is_used & ~is_own
        rest = blocks[num_own:]
        if len(rest):
            used[is_context] = rng.choice(rest, is_context.sum())
        else:
            own_first = used[np.arange(num_reqs), starts // size]
            used[is_context] = own_first[is_context.nonzero()[0]]

        owners, positions = expand(starts, query_lens)
        input_ids = rng.integers(0, self._vocab_size, num_tokens)
        q = limits.query_len
        values = _values(query_lens, ends, owners, positions, input_ids, tables, size, q)
        if limits.max_loras:
            # All adapters at once: a graph of fewer takes the first of them, in any order, which
            # are the more frequent ones, so that no graph runs without.
            order = values["active_loras"] = rng.permutation(limits.max_loras)
            slots = order[rng.integers(rng.integers(limits.max_loras, size=num_reqs) + 1)]
            slots[rng.random(num_reqs) < 0.25] = NO_ADAPTER
            slots[0] = order[0]
            values["lora_slots"] = slots[owners]
        return Example(
            {name: self._tensor(array) for name, array in values.items()},
            step_info=AttentionMetadata(query_lens, ends, tables),
        )

    def _tensor(self, array: Ints) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pinned and tensor.nbytes > MOST_STAGED else tensor

    def _some_free_blocks(self, count: int, rng: np.random.Generator) -> Ints:
        """``count`` free blocks, or all if there are fewer, spread over the cache.

        An idle engine has all blocks free: to list them, or to draw from all, would make every
        example, and so a capture, take longer the longer the context is.
        """
        allocator = self._allocator
        step = max(1, allocator.num_free // count)
        first = int(rng.integers(step))
        if allocator.num_free == allocator.num_usable:
            return np.arange(1 + first, self._limits.num_blocks, step)[:count]
        return np.array(allocator.free_blocks)[first::step][:count]

    def _blocks_needed(self, num_tokens: int, num_reqs: int) -> int:
        limits = self._limits
        needed = limits.blocks_needed(num_tokens, num_reqs)
        if num_tokens == num_reqs * limits.query_len:
            needed = max(needed, num_reqs * blocks_for(limits.query_len, limits.block_size))
        return needed

"""The static inputs of a step, against their definition written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from graphrt import BatchDescriptor
from graphrt_llm.blocks import BlockAllocator, blocks_for
from graphrt_llm.config import Limits
from graphrt_llm.errors import EngineConfigError, OutOfBlocksError
from graphrt_llm.inputs import Examples, HostInputs, input_specs
from graphrt_llm.request import Request, SamplingParams
from graphrt_llm.scheduler import Scheduler

VOCAB = 97


@st.composite
def limits(draw) -> Limits:
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(1, 30))
    max_num_seqs = draw(st.integers(1, 5))
    values = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": 1 + max_num_seqs + draw(st.integers(0, 12)),
        "query_len": draw(st.sampled_from([1, 1, 2, 4])),
        "max_loras": draw(st.integers(0, 2)),
    }
    fewest = max_num_seqs * values["query_len"]
    try:
        largest = Limits(max_num_batched_tokens=fewest, **values).largest_batch()
    except EngineConfigError:
        assume(False)
    tokens = draw(st.integers(fewest, largest))
    return Limits(max_num_batched_tokens=tokens, **values)


@settings(deadline=None)
@given(limits(), st.data())
def test_a_batch_becomes_the_inputs_its_definition_says(limits: Limits, data):
    scheduler = Scheduler(limits)
    q, num_drafts = limits.query_len, limits.query_len - 1
    in_cache = (limits.num_blocks - 1) * limits.block_size - num_drafts
    longest = min(limits.max_model_len, in_cache) - 1
    assume(longest >= 1)
    adapters = [None, *"abc"] if limits.max_loras else [None]
    for name in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=longest))
        output = longest + 1 - len(prompt)
        adapter = data.draw(st.sampled_from(adapters))
        params = SamplingParams(max_tokens=output)
        scheduler.add(Request(str(name), prompt, params, seed=0, adapter=adapter))
    host = HostInputs(limits, pinned=False)
    while (batch := scheduler.schedule()) is not None:
        values = host.fill(batch, scheduler.input_batch)
        expected: dict[str, list] = {name: [] for name in values}
        slots = scheduler.adapter_slots.adapters
        active = {slots.index(r.adapter) for r in batch.requests if r.adapter is not None}
        for row, (request, start, length) in enumerate(
            zip(batch.requests, batch.starts, batch.query_lens, strict=True)
        ):
            known = [*request.prompt_token_ids, *request.output_token_ids]
            if q > 1 and batch.num_drafts[row] >= 0:
                known += scheduler.input_batch.tokens[request.row][len(known) :].tolist()
            table = scheduler.input_batch.block_tables[request.row].tolist()
            for position in range(start, start + length):
                expected["input_ids"].append(known[position])
                expected["positions"].append(position)
                expected["token_requests"].append(row)
                block, offset = divmod(position, limits.block_size)
                expected["slot_mapping"].append(table[block] * limits.block_size + offset)
            expected["block_tables"].append(table)
            expected["seq_lens"].append(start + length)
            last = len(expected["input_ids"]) - 1
            indices = [max(last - back, last - length + 1) for back in range(q - 1, -1, -1)]
            expected["logits_indices"].append(last if q == 1 else indices)
            if limits.max_loras:
                adapter = request.adapter
                slot = -1 if adapter is None else slots.index(adapter)
                expected["lora_slots"] += [slot] * int(length)
        if limits.max_loras:
            unused = [limits.max_loras] * (limits.max_loras - len(active))
            expected["active_loras"] = [*sorted(active), *unused]
        assert {name: tensor.tolist() for name, tensor in values.items()} == expected
        scheduler.update(batch, [data.draw(st.integers(0, VOCAB - 1))] * batch.num_reqs * q)


@settings(deadline=None)
@given(limits(), st.data(), st.integers(0, 3))
def test_examples_are_batches_of_exactly_the_asked_sizes(limits: Limits, data, seed: int):
    num_tokens = data.draw(st.integers(1, limits.max_num_batched_tokens))
    num_reqs = data.draw(st.integers(1, min(num_tokens, limits.max_num_seqs)))
    examples = Examples(limits, VOCAB, BlockAllocator(limits.num_blocks))
    sizes = {"tokens": num_tokens, "requests": num_reqs}
    q, is_uniform = limits.query_len, num_tokens == num_reqs * limits.query_len
    room = limits.room(num_reqs)
    if room.sum() < num_tokens or (is_uniform and room.min() < q):
        with pytest.raises(OutOfBlocksError):
            examples(sizes, seed)
        return
    values, step_info, _ = examples(sizes, seed)
    v = {name: tensor.numpy() for name, tensor in values.items()}
    assert set(v) == {spec.name for spec in input_specs(limits)}
    assert v["block_tables"].shape == (num_reqs, limits.max_blocks)
    assert all(len(v[name]) == num_tokens for name in ("input_ids", "positions", "slot_mapping"))

    owners, positions = v["token_requests"], v["positions"]
    query_lens = np.bincount(owners, minlength=num_reqs)
    assert query_lens.min() >= 1
    assert len(query_lens) == num_reqs
    assert query_lens.tolist() == list(step_info.query_lens)
    assert v["seq_lens"].tolist() == list(step_info.seq_lens)
    assert v["seq_lens"].max() <= limits.max_model_len
    for row in range(num_reqs):
        end = v["seq_lens"][row]
        assert positions[owners == row].tolist() == list(range(end - query_lens[row], end))
        used = blocks_for(int(end), limits.block_size)
        assert (v["block_tables"][row, :used] >= 1).all()
        assert (v["block_tables"][row, :used] < limits.num_blocks).all()
        assert not v["block_tables"][row, used:].any()
    blocks, offsets = np.divmod(v["slot_mapping"], limits.block_size)
    assert (blocks == v["block_tables"][owners, positions // limits.block_size]).all()
    assert (offsets == positions % limits.block_size).all()
    assert len(set(v["slot_mapping"].tolist())) == num_tokens, "two tokens share a slot"
    indices = v["logits_indices"].reshape(num_reqs, q)
    assert (owners[indices] == np.arange(num_reqs)[:, None]).all()
    assert (indices[:, -1] == query_lens.cumsum() - 1).all()
    assert (query_lens == q).all() or not is_uniform
    if limits.max_loras:
        assert sorted(v["active_loras"]) == list(range(limits.max_loras))
        assert v["lora_slots"][0] == v["active_loras"][0], "no graph with adapters runs without"
        assert all(-1 <= slot < limits.max_loras for slot in v["lora_slots"])
        used = {(owner, slot) for owner, slot in zip(owners, v["lora_slots"], strict=True)}
        assert len(used) == num_reqs, "a request has one adapter"
    assert v["input_ids"].min() >= 0
    assert v["input_ids"].max() < VOCAB


LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=12, max_model_len=20, block_size=4, num_blocks=17
)
MIXED = {"tokens": 12, "requests": 4}


def test_another_seed_gives_another_example():
    examples = Examples(LIMITS, VOCAB, BlockAllocator(LIMITS.num_blocks))
    first, second, again = (examples(MIXED, seed).values for seed in (0, 1, 0))
    for name, value in first.items():
        assert torch.equal(value, again[name])
    changed = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert changed >= {"input_ids", "positions", "slot_mapping", "block_tables", "seq_lens"}


def test_examples_own_their_storage():
    examples = Examples(LIMITS, VOCAB, BlockAllocator(LIMITS.num_blocks))
    first = examples(MIXED, 0).values
    before = {name: value.clone() for name, value in first.items()}
    for value in examples(MIXED, 1).values.values():
        value.fill_(-1)
    assert all(torch.equal(value, before[name]) for name, value in first.items())


@given(
    num_taken=st.integers(0, 16),
    num_tokens=st.integers(1, 12),
    num_reqs=st.integers(1, 4),
    seed=st.integers(0, 1),
)
def test_examples_use_free_blocks_only(num_taken, num_tokens, num_reqs, seed):
    num_reqs = min(num_reqs, num_tokens)
    allocator = BlockAllocator(LIMITS.num_blocks)
    taken = set(allocator.allocate(num_taken))
    examples = Examples(LIMITS, VOCAB, allocator)
    key = BatchDescriptor(num_tokens, num_reqs)
    sizes = {"tokens": num_tokens, "requests": num_reqs}
    if not examples.can_fill(key):
        assert 16 - num_taken < max(-(-num_tokens // 4), num_reqs)
        with pytest.raises(OutOfBlocksError, match="free blocks"):
            examples(sizes, seed)
        return
    values, step_info, _ = examples(sizes, seed)
    tables = (values["block_tables"], step_info.block_tables)
    blocks = {block for table in tables for block in table.flatten().tolist()}
    written = {slot // 4 for slot in values["slot_mapping"].tolist()}
    assert written <= blocks - {0}
    assert not blocks & taken
    assert allocator.num_free == 16 - num_taken


@pytest.mark.parametrize(
    ("key", "num_needed"),
    [
        (BatchDescriptor(2), 2),
        (BatchDescriptor(12), 4),
        (BatchDescriptor(3, 3, uniform=True), 3),
        (BatchDescriptor(12, 1), 3),
    ],
)
def test_a_key_needs_blocks_for_all_its_requests(key, num_needed):
    """A PIECEWISE key is filled by as many requests as there can be, one token each at least."""
    allocator = BlockAllocator(LIMITS.num_blocks)
    examples = Examples(LIMITS, VOCAB, allocator)
    allocator.allocate(16 - num_needed)
    assert examples.can_fill(key)
    allocator.allocate(1)
    assert not examples.can_fill(key)


def test_fewer_requests_may_need_more_blocks():
    drafts = Limits(
        max_num_seqs=3,
        max_num_batched_tokens=15,
        max_model_len=20,
        block_size=4,
        num_blocks=9,
        query_len=5,
    )
    allocator = BlockAllocator(drafts.num_blocks)
    allocator.allocate(5)
    # Three requests fit 11 tokens into 3 blocks; two that decode 5 tokens each need 4.
    assert drafts.blocks_needed(11, 3) == 3
    assert not Examples(drafts, VOCAB, allocator).can_fill(BatchDescriptor(11, 3))
    short = Limits(
        max_num_seqs=3, max_num_batched_tokens=12, max_model_len=6, block_size=4, num_blocks=4
    )
    assert short.blocks_needed(11, 2) == 4  # The second block of a context holds two tokens.
    # Two requests never have 12 tokens in so small a cache.
    assert Examples(short, VOCAB, BlockAllocator(4)).can_fill(BatchDescriptor(12, 3))


@settings(deadline=None)
@given(limits(), st.data())
def test_blocks_for_a_key_are_enough_for_every_smaller_batch(limits, data):
    num_reqs = data.draw(st.integers(1, limits.max_num_seqs))
    most = min(limits.max_num_batched_tokens, num_reqs * limits.max_model_len)
    key = BatchDescriptor(data.draw(st.integers(num_reqs, most)), num_reqs)
    allocator = BlockAllocator(limits.num_blocks)
    examples = Examples(limits, VOCAB, allocator)
    assert examples.can_fill(key), "an idle engine can capture everything"
    while allocator.num_free and examples.can_fill(key):
        [last] = allocator.allocate(1)
    allocator.free([last])
    assert examples.can_fill(key)
    requests = data.draw(st.integers(1, num_reqs))
    most = min(key.num_tokens, requests * limits.max_model_len)
    tokens = data.draw(st.integers(requests, most))
    fits = limits.blocks_needed(tokens, requests) < limits.num_blocks
    if fits and tokens != requests * limits.query_len:
        examples({"tokens": tokens, "requests": requests}, 0)
    if requests * limits.query_len <= key.num_tokens:
        examples({"tokens": requests * limits.query_len, "requests": requests}, 0)

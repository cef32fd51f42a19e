"""The static inputs of a step, against their definition written out token by token."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given, settings, strategies as st

from graphrt import BatchDescriptor
from graphrt_llm.blocks import BlockAllocator, blocks_for
from graphrt_llm.inputs import Examples, HostInputs, input_specs, make_example
from graphrt_llm.limits import Limits
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
    }
    largest = Limits(max_num_batched_tokens=max_num_seqs, **values).largest_batch()
    assume(largest >= max_num_seqs)
    tokens = draw(st.integers(max_num_seqs, largest))
    return Limits(max_num_batched_tokens=tokens, **values)


@settings(deadline=None)
@given(limits(), st.data())
def test_a_batch_becomes_the_inputs_its_definition_says(limits: Limits, data):
    scheduler = Scheduler(limits)
    longest = min(limits.max_model_len, (limits.num_blocks - 1) * limits.block_size) - 1
    assume(longest >= 1)
    for name in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=longest))
        output = longest + 1 - len(prompt)
        scheduler.add(Request(str(name), prompt, SamplingParams(max_tokens=output), seed=0))
    host = HostInputs(limits, pinned=False)
    while (batch := scheduler.schedule()) is not None:
        values = host.fill_from_seats(batch, scheduler.seats)
        expected: dict[str, list] = {name: [] for name in values}
        for row, (request, start, length) in enumerate(
            zip(batch.requests, batch.starts, batch.query_lens, strict=True)
        ):
            known = [*request.prompt_token_ids, *request.output_token_ids]
            table = scheduler.seats.block_tables[request.seat].tolist()
            for position in range(start, start + length):
                expected["input_ids"].append(known[position])
                expected["positions"].append(position)
                expected["token_requests"].append(row)
                block, offset = divmod(position, limits.block_size)
                expected["slot_mapping"].append(table[block] * limits.block_size + offset)
            expected["block_tables"].append(table)
            expected["seq_lens"].append(start + length)
            expected["logits_indices"].append(len(expected["input_ids"]) - 1)
        assert {name: tensor.tolist() for name, tensor in values.items()} == expected
        scheduler.update(batch, [data.draw(st.integers(0, VOCAB - 1))] * batch.num_reqs)


@settings(deadline=None)
@given(limits(), st.data(), st.integers(0, 3))
def test_examples_fill_every_key_with_a_batch_that_could_be_real(limits: Limits, data, seed: int):
    num_tokens = data.draw(st.integers(1, limits.max_num_batched_tokens))
    num_reqs = min(num_tokens, limits.max_num_seqs)
    key = BatchDescriptor(num_tokens, data.draw(st.sampled_from([None, num_reqs])))
    values, tokens, reqs, live = make_example(key, seed, limits, VOCAB)
    assert (tokens, reqs) == (num_tokens, num_reqs)
    v = {name: tensor.numpy() for name, tensor in values.items()}
    assert set(v) == {spec.name for spec in input_specs(limits)}
    assert v["block_tables"].shape == (num_reqs, limits.max_blocks)
    assert all(len(v[name]) == num_tokens for name in ("input_ids", "positions", "slot_mapping"))

    owners, positions = v["token_requests"], v["positions"]
    query_lens = np.bincount(owners, minlength=num_reqs)
    assert query_lens.min() >= 1
    assert query_lens.tolist() == list(live.query_lens)
    assert v["seq_lens"].tolist() == list(live.seq_lens)
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
    assert (owners[v["logits_indices"]] == np.arange(num_reqs)).all()
    assert v["input_ids"].min() >= 0
    assert v["input_ids"].max() < VOCAB


def test_another_seed_gives_another_example_and_examples_own_their_storage():
    bounds = Limits(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4, num_blocks=65
    )
    first, second, again = (make_example(BatchDescriptor(12), s, bounds, VOCAB) for s in (0, 1, 0))
    for name, value in first.values.items():
        assert torch.equal(value, again.values[name])
    changed = {n for n, v in first.values.items() if not torch.equal(v, second.values[n])}
    assert changed >= {"input_ids", "positions", "slot_mapping", "block_tables", "seq_lens"}


def test_an_engine_that_serves_nobody_makes_the_examples_of_all_blocks():
    bounds = Limits(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4, num_blocks=65
    )
    allocator, key = BlockAllocator(bounds.num_blocks), BatchDescriptor(12)
    examples = Examples(bounds, VOCAB, allocator)
    listed = make_example(key, 0, bounds, VOCAB, allocator.free_blocks)
    held = allocator.allocate(1)
    fewer = examples(key, 0)
    allocator.free(held)
    found = examples(key, 0)
    for name, value in found.values.items():
        assert torch.equal(value, listed.values[name])
    assert not torch.equal(fewer.values["block_tables"], found.values["block_tables"])


def test_examples_outlive_the_next_one():
    bounds = Limits(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4, num_blocks=65
    )
    examples = Examples(bounds, VOCAB, BlockAllocator(bounds.num_blocks))
    first = examples(BatchDescriptor(12), 0)
    before = {name: value.clone() for name, value in first.values.items()}
    second = examples(BatchDescriptor(12), 1)
    for value in second.values.values():
        value.fill_(-1)
    assert all(torch.equal(value, before[name]) for name, value in first.values.items())


def test_uniform_keys_get_one_token_for_each_request():
    bounds = Limits(
        max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, block_size=4, num_blocks=65
    )
    example = make_example(BatchDescriptor(8, 8, uniform=True), 0, bounds, VOCAB)
    assert example.values["token_requests"].tolist() == list(range(8))

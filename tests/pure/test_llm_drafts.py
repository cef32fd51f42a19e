"""Drafts, and what the scheduler keeps of them, against token-by-token decoding; without torch."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from graphrt_llm.config import Limits
from graphrt_llm.drafts import LONGEST, ngram_drafts
from graphrt_llm.errors import EngineConfigError
from graphrt_llm.request import Request, SamplingParams
from graphrt_llm.scheduler import Scheduler

few = st.integers(0, 2)


@given(st.lists(few, min_size=1, max_size=14), st.integers(0, 5))
def test_drafts_follow_the_latest_place_alike(tokens, most):
    expected: list[int] = []
    for length in range(LONGEST, 0, -1):
        ends = [
            end
            for end in range(length, len(tokens))
            if tokens[end - length : end] == tokens[len(tokens) - length :]
        ]
        if ends:
            expected = tokens[ends[-1] : ends[-1] + most]
            break
    assert ngram_drafts(np.array(tokens), most).tolist() == expected


def next_token(tokens: list[int], vocab: int, memory: int) -> int:
    """A model: any function of what is before. A short memory makes it repeat itself."""
    return crc32(bytes(tokens[-memory:])) % vocab


@settings(deadline=None)
@given(
    q=st.integers(1, 5),
    vocab=st.integers(1, 4),
    memory=st.integers(1, 3),
    block_size=st.integers(1, 4),
    num_seqs=st.integers(1, 3),
    spare=st.integers(0, 8),
    prompts=st.lists(st.lists(few, min_size=1, max_size=8), min_size=1, max_size=5),
    data=st.data(),
)
def test_drafts_verified_give_the_tokens_of_plain_decoding(
    q, vocab, memory, block_size, num_seqs, spare, prompts, data
):
    values = {
        "max_num_seqs": num_seqs,
        "max_model_len": 16,
        "block_size": block_size,
        "num_blocks": 1 + (16 + q) // block_size + 2 * num_seqs + spare,
        "query_len": q,
    }
    try:
        largest = Limits(max_num_batched_tokens=num_seqs * q, **values).largest_batch()
    except EngineConfigError:
        assume(False)
    budget = data.draw(st.integers(num_seqs * q, largest))
    scheduler = Scheduler(Limits(max_num_batched_tokens=budget, **values))
    stop = frozenset(data.draw(st.sets(st.integers(0, vocab - 1), max_size=1)))
    expected: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        most = data.draw(st.integers(1, 16 - len(prompt)))
        request = Request(
            str(number), prompt, SamplingParams(max_tokens=most), seed=0, stop_token_ids=stop
        )
        scheduler.add(request)
        plain: list[int] = []
        while len(plain) < most and not (plain and plain[-1] in stop):
            plain.append(next_token([*prompt, *plain], vocab, memory))
        expected[str(number)] = plain
    table, served = scheduler.input_batch, {name: [] for name in expected}
    num_steps = 0
    while (batch := scheduler.schedule()) is not None:
        again = scheduler.schedule()
        assert again.query_lens.tolist() == batch.query_lens.tolist()
        assert batch.num_tokens <= budget
        assert batch.uniform == (set(batch.query_lens.tolist()) == {q})
        sampled = []
        for row, start, length in zip(batch.rows, batch.starts, batch.query_lens, strict=True):
            end = int(start + length)
            assert table.num_blocks[row] * block_size >= end, "every new token has its block"
            known = table.tokens[row, :end].tolist()
            sampled += [
                next_token(known[: max(1, end - back)], vocab, memory)
                for back in range(q - 1, -1, -1)
            ]
        for output in scheduler.update(batch, sampled):
            served[output.request_id] += output.new_token_ids
            assert len(output.new_token_ids) <= q
        num_steps += 1
        assert num_steps < 400
    assert served == expected
    assert scheduler.drafts.accepted <= scheduler.drafts.drafted <= scheduler.drafts.places
    assert table.allocator.num_free == table.allocator.num_usable


def test_drafts_accepted_save_steps():
    scheduler = Scheduler(
        Limits(
            max_num_seqs=1,
            max_num_batched_tokens=8,
            max_model_len=64,
            block_size=4,
            num_blocks=20,
            query_len=5,
        )
    )
    scheduler.add(Request("a", [1, 2, 3, 1, 2, 3], SamplingParams(max_tokens=20), seed=0))
    num_steps = 0
    while (batch := scheduler.schedule()) is not None:
        start, end = int(batch.starts[0]), int(batch.starts[0] + batch.query_lens[0])
        scheduler.update(batch, [position % 3 + 1 for position in range(end - 4, end + 1)])
        num_steps += 1
        assert start < end
    # One token after the prompt; then the three tokens since the latest place, and one more, but
    # two and one more at the end: nothing is drafted past the last token.
    assert (num_steps, *scheduler.drafts) == (1 + 5, 20, 14, 14)


def test_drafts_of_all_requests_must_fit_a_step():
    values = {"max_num_seqs": 4, "max_model_len": 16, "block_size": 4, "num_blocks": 33}
    with pytest.raises(EngineConfigError, match="num_speculative_tokens"):
        Limits(max_num_batched_tokens=15, query_len=4, **values)
    with pytest.raises(EngineConfigError, match="blocks"):
        Limits(max_num_batched_tokens=24, query_len=6, **{**values, "num_blocks": 5})

"""The scheduler against a model that computes every token from what it finds in the cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from graphrt_llm import FinishReason, SamplingParams
from graphrt_llm.blocks import blocks_for
from graphrt_llm.config import Limits
from graphrt_llm.errors import (
    EngineConfigError,
    OutOfBlocksError,
    PromptTooLongError,
    RequestError,
    UnknownRequestError,
)
from graphrt_llm.request import Request
from graphrt_llm.scheduler import ScheduledBatch, Scheduler


def make_scheduler(**limits: int) -> Scheduler:
    defaults = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return Scheduler(Limits(**defaults | limits))


def request(
    name: str, prompt: Sequence[int] | int, max_tokens: int = 4, stop: Sequence[int] = ()
) -> Request:
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, tokens, params, seed=0, stop_token_ids=frozenset(stop))


def next_token(tokens: Sequence[int]) -> int:
    """A model: the next token depends on every token so far, and on their order."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 997
    return value


class CheckedCache:
    """The KV cache as a dict slot -> token: what a request reads back must be its own tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.table = scheduler.input_batch
        self.slots: dict[tuple[int, int], int] = {}

    def slot(self, row: int, position: int) -> tuple[int, int]:
        block = int(self.table.block_tables[row, position // self.table.block_size])
        assert block != 0, "a token would be written to the null block"
        return block, position % self.table.block_size

    def run(self, batch: ScheduledBatch) -> list[int]:
        written = []
        for row, start, length in zip(batch.rows, batch.starts, batch.query_lens, strict=True):
            for position in range(start, start + length):
                written.append(self.slot(row, position))
                self.slots[written[-1]] = int(self.table.tokens[row, position])
        assert len(set(written)) == len(written), "two tokens of one step share a slot"
        sampled = []
        for row, start, length in zip(batch.rows, batch.starts, batch.query_lens, strict=True):
            seen = [self.slots[self.slot(row, position)] for position in range(start + length)]
            sampled.append(next_token(seen))
        return sampled


def check_batch(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    assert 1 <= batch.num_reqs <= scheduler.limits.max_num_seqs
    assert batch.num_tokens == sum(batch.query_lens) <= scheduler.limits.max_num_batched_tokens
    assert min(batch.query_lens) >= 1
    assert len({r.request_id for r in batch.requests}) == batch.num_reqs
    assert batch.uniform == all(length == 1 for length in batch.query_lens)
    known = [r.num_tokens for r in batch.requests]
    ends = batch.starts + batch.query_lens
    assert [bool(c) for c in batch.completes] == [e == k for e, k in zip(ends, known, strict=True)]


def check_blocks(scheduler: Scheduler) -> None:
    table, held = scheduler.input_batch, []
    for running in scheduler.running:
        held += table.block_tables[running.row, : table.num_blocks[running.row]].tolist()
        assert not table.block_tables[running.row, table.num_blocks[running.row] :].any()
    assert len(set(held)) == len(held)
    assert len(held) + table.allocator.num_free == table.allocator.num_usable
    assert len(scheduler.running) + table.num_free_rows == scheduler.limits.max_num_seqs


arrivals = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 10), st.integers(0, 12)), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals,
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 10),
    max_num_seqs=st.integers(1, 4),
    spare_tokens=st.integers(0, 12),
    abort=st.none() | st.tuples(st.integers(0, 7), st.integers(0, 15)),
)
def test_every_request_gets_its_tokens_within_every_limit(
    arrivals, block_size, spare_blocks, max_num_seqs, spare_tokens, abort
):
    largest = max(blocks_for(p + m - 1, block_size) for p, m, _ in arrivals)
    limits = {
        "num_blocks": 1 + max(largest, max_num_seqs) + spare_blocks,
        "block_size": block_size,
        "max_model_len": 32,
        "max_num_seqs": max_num_seqs,
    }
    most = Limits(max_num_batched_tokens=max_num_seqs, **limits).largest_batch()
    tokens = min(max_num_seqs + spare_tokens, most)
    scheduler = make_scheduler(max_num_batched_tokens=tokens, **limits)
    cache = CheckedCache(scheduler)
    requests = [
        request(f"r{i}", [i * 50 + j for j in range(p)], m) for i, (p, m, _) in enumerate(arrivals)
    ]
    steps_of_arrival = sorted(step for _, _, step in arrivals)
    pending = list(zip(steps_of_arrival, requests, strict=True))
    got: dict[str, list[int]] = {r.request_id: [] for r in requests}
    finished: dict[str, FinishReason] = {}

    for step in range(2000):
        while pending and pending[0][0] <= step:
            scheduler.add(pending.pop(0)[1])
        if abort is not None and abort[1] == step:
            name = f"r{abort[0]}"
            if any(r.request_id == name for r in [*scheduler.running, *scheduler.waiting]):
                output = scheduler.abort(name)
                finished[name] = output.finish_reason
            else:
                with pytest.raises(UnknownRequestError):
                    scheduler.abort(name)
        check_blocks(scheduler)
        batch = scheduler.schedule()
        order = [int(r.request_id[1:]) for r in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order), "an earlier request waits while a later one runs"
        if batch is None:
            assert not scheduler.has_unfinished()
            if not pending:
                break
            continue
        check_batch(scheduler, batch)
        if scheduler.running:
            assert scheduler.running[0] in batch.requests, "the earliest request must advance"
        for output in scheduler.update(batch, cache.run(batch)):
            assert output.request_id not in finished
            got[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                finished[output.request_id] = output.finish_reason
        check_blocks(scheduler)
    else:
        pytest.fail("requests did not finish")

    assert set(finished) == set(got)
    assert scheduler.input_batch.allocator.num_free == scheduler.input_batch.allocator.num_usable
    for r in requests:
        tokens = list(r.prompt_token_ids)
        expected = []
        for _ in range(r.params.max_tokens):
            expected.append(next_token(tokens))
            tokens.append(expected[-1])
        if finished[r.request_id] is FinishReason.ABORTED:
            assert got[r.request_id] == expected[: len(got[r.request_id])]
        else:
            assert finished[r.request_id] is FinishReason.LENGTH
            assert got[r.request_id] == expected == r.output_token_ids


def run_to_end(
    scheduler: Scheduler, cache: CheckedCache | None = None
) -> tuple[list[ScheduledBatch], dict[str, list[int]]]:
    cache, batches, tokens = cache or CheckedCache(scheduler), [], {}
    while (batch := scheduler.schedule()) is not None:
        batches.append(batch)
        for output in scheduler.update(batch, cache.run(batch)):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return batches, tokens


def test_decoding_requests_come_first_and_prompts_fill_the_rest():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(request("a", 3))
    batch = scheduler.schedule()
    scheduler.update(batch, [1])
    scheduler.add(request("b", 12))
    scheduler.add(request("c", 2))
    shapes = []
    while (batch := scheduler.schedule()) is not None and len(shapes) < 3:
        shapes.append(
            [(r.request_id, int(q)) for r, q in zip(batch.requests, batch.query_lens, strict=True)]
        )
        scheduler.update(batch, [1] * batch.num_reqs)
    assert shapes == [
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 5), ("c", 2)],
        [("b", 1), ("a", 1), ("c", 1)],  # Of those that decode, the longest first.
    ]


def test_a_one_token_last_chunk_is_uniform():
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    scheduler.add(request("a", 5))
    assert not scheduler.update(batch := scheduler.schedule(), [9])
    assert not batch.uniform
    batch = scheduler.schedule()
    assert batch.uniform
    assert batch.completes.tolist() == [True]


def test_the_latest_arrival_is_preempted_and_keeps_its_output():
    # 5 usable blocks of 2: both prompts take 2, and the first to need a third leaves none.
    scheduler = make_scheduler(
        num_blocks=6, block_size=2, max_num_seqs=2, max_num_batched_tokens=10
    )
    first, second = request("first", 4, max_tokens=6), request("second", 4, max_tokens=6)
    scheduler.add(first)
    scheduler.add(second)
    preempted = []
    cache, tokens = CheckedCache(scheduler), {"first": [], "second": []}
    while (batch := scheduler.schedule()) is not None:
        preempted += batch.preempted
        for output in scheduler.update(batch, cache.run(batch)):
            tokens[output.request_id] += output.new_token_ids
    assert set(preempted) == {"second"}
    assert first.num_preemptions == 0 < second.num_preemptions
    assert len(tokens["first"]) == len(tokens["second"]) == 6
    assert tokens["first"] == tokens["second"], "equal prompts, equal tokens"


def test_a_failed_step_is_scheduled_again():
    scheduler = make_scheduler()
    scheduler.add(request("a", 6))
    first = scheduler.schedule()
    again = scheduler.schedule()
    assert again.requests == first.requests
    assert again.query_lens.tolist() == first.query_lens.tolist()
    assert again.starts.tolist() == first.starts.tolist()


def test_no_block_and_no_other_request_is_an_error():
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_seqs=1, max_num_batched_tokens=6)
    cache = CheckedCache(scheduler)
    scheduler.add(request("a", 2, max_tokens=4))
    batch = scheduler.schedule()
    scheduler.update(batch, cache.run(batch))
    taken = scheduler.input_batch.allocator.allocate(2)
    with pytest.raises(OutOfBlocksError, match="'a'"):
        scheduler.schedule()
    scheduler.input_batch.allocator.free(taken)
    assert len(run_to_end(scheduler, cache)[1]["a"]) == 3


def test_a_stop_token_ends_the_request_and_stays_in_its_output():
    scheduler = make_scheduler()
    scheduler.add(request("a", 2, stop=[5]))
    [output] = scheduler.update(scheduler.schedule(), [5])
    assert output == ("a", (5,), FinishReason.STOP)
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [(61, 4), (64, 1), (40, 25)], ids=["both", "prompt", "output"]
)
def test_a_request_larger_than_the_context_is_refused(prompt: int, max_tokens: int):
    scheduler = make_scheduler()
    with pytest.raises(PromptTooLongError, match="context of 64"):
        scheduler.add(request("a", prompt, max_tokens))
    assert not scheduler.has_unfinished()


def test_a_request_larger_than_the_cache_is_refused():
    scheduler = make_scheduler(
        num_blocks=4, block_size=4, max_num_seqs=3, max_num_batched_tokens=12
    )
    with pytest.raises(PromptTooLongError, match="cache of 3 blocks"):
        scheduler.add(request("a", 8, max_tokens=6))
    scheduler.add(request("b", 8, max_tokens=5))
    assert len(run_to_end(scheduler)[1]["b"]) == 5


def test_empty_prompts_and_used_ids_are_refused():
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(request("a", 0))
    scheduler.add(request("a", 1))
    with pytest.raises(RequestError, match="this id"):
        scheduler.add(request("a", 1))


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 65},
        {"max_num_seqs": 17, "max_num_batched_tokens": 17},
        {"max_model_len": 3},
        {"num_blocks": 1},
    ],
    ids=str,
)
def test_limits_that_do_not_agree_are_refused(change: dict[str, int]):
    agreeing = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 16,
        "block_size": 4,
        "num_blocks": 17,
    }
    Limits(**agreeing)
    with pytest.raises(EngineConfigError):
        Limits(**agreeing | change)


def test_equal_requests_give_equal_batches():
    def shapes() -> list[tuple]:
        scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=8)
        for i, (prompt, out) in enumerate([(9, 8), (3, 5), (14, 3), (1, 9)]):
            scheduler.add(request(f"r{i}", prompt, out))
        return [
            (tuple(r.request_id for r in b.requests), tuple(b.query_lens), tuple(b.rows))
            for b in run_to_end(scheduler)[0]
        ]

    assert shapes() == shapes()


def test_scheduling_does_not_load_torch():
    code = "import sys, graphrt_llm.scheduler, graphrt_llm.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

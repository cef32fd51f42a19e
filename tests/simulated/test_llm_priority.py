"""Serving while graphs are captured one by one: the same tokens, and nobody's cache is touched."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_llm_overlap import MODES, TRAFFIC, config, prompt, serve

from graphrt import BatchDescriptor, Captured, GraphrtError, MissReason, RuntimeMode
from graphrt_llm import LLMEngine, SamplingParams
from graphrt_llm.blocks import BlockAllocator
from graphrt_llm.errors import (
    EngineConfigError,
    OutOfBlocksError,
    RequestError,
    UnknownRequestError,
)
from graphrt_llm.inputs import Examples
from graphrt_llm.limits import Limits
from graphrt_llm.request import FinishReason

BOTH = pytest.mark.parametrize("overlap", [False, True])


def by_priority(mode: str = "FULL_AND_PIECEWISE", *, overlap: bool = False, **options):
    return replace(config(mode, overlap=overlap, **options), capture="by_priority")


class Watch:
    """Follows an engine's captures, and checks that each leaves requests and blocks alone."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.cache = engine.runtime._model.model.attention.cache.tensor
        self.num_in_flight: list[int] = []
        """Launched steps with unread tokens, at each call that captured something."""
        self.num_refused = 0
        """Calls that captured nothing, although something was missing."""
        self.capture_next = engine.runtime.capture_next
        engine.runtime.capture_next = self.watched  # type: ignore[method-assign]

    def held(self) -> torch.Tensor:
        seats = self.engine.scheduler.seats
        blocks = [
            block
            for request in self.engine.scheduler.running
            for block in seats.block_tables[request.seat, : seats.num_blocks[request.seat]]
        ]
        assert len(set(blocks)) == len(blocks)
        return torch.tensor(np.array(blocks, np.int64))

    def watched(self, **options) -> int:
        allocator = self.engine.scheduler.seats.allocator
        blocks, free = self.held(), allocator.free_blocks
        assert not set(blocks.tolist()) & set(free)
        before = self.cache[:, blocks].clone()
        num_events = len(self.engine.runtime.report().graphs)
        left = self.capture_next(**options)
        assert torch.equal(self.cache[:, blocks], before), "a capture wrote over a request's cache"
        assert allocator.free_blocks == free
        if len(self.engine.runtime.report().graphs) > num_events:
            self.num_in_flight.append(len(self.engine._flights))
        else:
            self.num_refused += left > 0
        return left


def finish_capture(engine: LLMEngine) -> None:
    """Idle steps capture what is left."""
    for _ in range(len(engine.runtime.report().missing)):
        assert engine.step() == ((), 0, 0, False, None, 0)
    assert not engine.runtime.report().missing


@pytest.fixture(scope="module")
def expected():
    """Tokens and finish reasons of the traffic, served without a graph, each step waited for."""
    with LLMEngine.tiny(config(overlap=False)) as engine:
        return serve(engine, TRAFFIC)[:2]


@BOTH
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_tokens_while_it_captures(expected, mode, overlap):
    with LLMEngine.tiny(by_priority(mode, overlap=overlap)) as engine:
        watch = Watch(engine)
        tokens, reasons, num_preempted = serve(engine, TRAFFIC)
        assert (tokens, reasons) == expected
        assert num_preempted > 0, "the cache was meant to be too small"
        if mode != "NONE":
            assert len(watch.num_in_flight) > 2
            assert any(graph.state == "ready" for graph in engine.runtime.report().graphs)
        finish_capture(engine)
        # Everything serves now, and what was captured in between is as good.
        assert serve(engine, TRAFFIC)[:2] == expected


@BOTH
def test_a_graph_whose_example_finds_too_few_free_blocks_waits_and_preempts_nobody(overlap):
    params = SamplingParams(max_tokens=6)
    prompts = [prompt(index, 3) for index in range(3)]
    with LLMEngine.tiny(config(overlap=overlap)) as engine:
        served = [engine.generate([tokens], params) for tokens in prompts]
    with LLMEngine.tiny(by_priority(overlap=overlap)) as engine:
        watch, step, steps = Watch(engine), engine.step, []
        engine.step = lambda: steps.append(step()) or steps[-1]
        allocator = engine.scheduler.seats.allocator
        # Three blocks are left: two, once a request has its first. Four requests need four.
        held = allocator.allocate(13)
        assert [engine.generate([tokens], params) for tokens in prompts] == served
        graphs = [(g.mode.name, g.key.num_tokens) for g in engine.runtime.report().graphs]
        assert graphs == [("PIECEWISE", 2), ("PIECEWISE", 1), ("FULL", 1), ("FULL", 2)]
        by_reason = Counter(
            step.decision.reason.name if step.decision is not None else None for step in steps
        )
        assert by_reason["NOT_CAPTURED_YET"] == 3, "the prompts"
        assert by_reason["HIT"] == 15
        assert watch.num_refused > 0
        assert not any(step.num_preempted for step in steps)
        allocator.free(held)
        finish_capture(engine)


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_a_launched_step_outlives_the_capture_that_comes_after_it(mode):
    """Its tokens, the next step's input, lie in graph storage that a larger graph writes over."""
    params = SamplingParams(max_tokens=12)
    with LLMEngine.tiny(config(overlap=False)) as engine:
        served = engine.generate([prompt(0, 3)], params)
    with LLMEngine.tiny(by_priority(mode, overlap=True)) as engine:
        Watch(engine)
        launch, capture_next = engine._launch, engine.runtime.capture_next
        launched, was_overwritten = [], []
        engine._launch = lambda batch: launched.append(launch(batch)) or launched[-1]
        # The smallest graph first; then it serves; then a larger one is captured.
        engine._examples.can_fill = lambda key: key.num_tokens == (1 if len(launched) < 5 else 4)

        def compared(**options):
            tokens = launched[-1].unread.tokens if engine._flights else torch.zeros(0)
            before = tokens.clone()
            left = capture_next(**options)
            was_overwritten.append(not torch.equal(tokens, before))
            return left

        engine.runtime.capture_next = compared
        assert engine.generate([prompt(0, 3)], params) == served
        assert True in was_overwritten


def test_a_launched_step_s_tokens_are_copied_for_a_capture_alone():
    with LLMEngine.tiny(by_priority("FULL_DECODE_ONLY", overlap=True)) as engine:
        launch, launched, are_its_own = engine._launch, [], []

        def watched(batch):
            if engine._flights:
                tokens = engine._flights[-1].unread.tokens
                are_its_own.append(tokens is launched[-1].unread.tokens)
            launched.append(launch(batch))
            return launched[-1]

        engine._launch = watched
        allocator = engine.scheduler.seats.allocator
        held = allocator.allocate(allocator.num_free - 1)
        engine.add_request(prompt(0, 1), SamplingParams(max_tokens=30))
        for _ in range(4):
            engine.step()
        # The request has the one free block, so no graph could be captured.
        assert are_its_own == [True] * 3
        assert len(engine.runtime.report().graphs) == 0
        allocator.free(held)
        while engine.has_unfinished():
            engine.step()
        num_graphs = len(engine.runtime.report().graphs)
        assert are_its_own.count(False) > 0
        assert are_its_own.count(False) <= num_graphs


def test_a_batch_s_own_graph_comes_first_and_serves_it():
    with LLMEngine.tiny(by_priority()) as engine:
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=4))
        first, second, third = (engine.step().decision for _ in range(3))
        assert (first.mode, first.descriptor.num_tokens) == (RuntimeMode.PIECEWISE, 4)
        assert (second.mode, second.descriptor.num_tokens) == (RuntimeMode.FULL, 1)
        assert third == second
        # The third step found its graph, so the next of the plan was captured: the largest.
        sizes = [
            (graph.mode.name, graph.key.num_tokens) for graph in engine.runtime.report().graphs
        ]
        assert sizes == [("PIECEWISE", 4), ("PIECEWISE", 12), ("FULL", 1)]


@BOTH
def test_a_step_that_captured_returns_its_own_tokens(overlap):
    with LLMEngine.tiny(by_priority(overlap=overlap)) as engine:
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=20))
        num_keys = len(engine.runtime.plan.capture_order)
        counts = [len(engine.step().outputs) for _ in range(num_keys + 3)]
        # Once nothing is missing, an overlapped step returns the tokens of the one before.
        assert counts == [1] * num_keys + [0 if overlap else 1, 1, 1]


def test_an_engine_that_captures_before_serving_captures_nothing_in_a_step():
    with LLMEngine.tiny(config("FULL", overlap=False)) as engine:
        engine.generate([prompt(0, 3)])
        engine.step()
        assert not engine.runtime.report().graphs


def test_capture_takes_what_is_left_at_once():
    events = []
    with LLMEngine.tiny(by_priority(), observer=events.append) as engine:
        engine.step()
        assert not engine.capture().missing
        engine.generate([prompt(0, 3)])
        num_captured = sum(isinstance(event, Captured) for event in events)
        assert num_captured == len(engine.runtime.plan.capture_order)


def test_after_a_whole_capture_steps_overlap_from_the_first():
    with LLMEngine.tiny(by_priority(overlap=True)) as engine:
        engine.capture()
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=20))
        assert [len(engine.step().outputs) for _ in range(3)] == [0, 1, 1]


def test_another_wish_is_refused():
    with pytest.raises(EngineConfigError, match="by_priority"):
        replace(config(overlap=False), capture="sometimes")


# -- failures


@BOTH
@pytest.mark.parametrize("skips", [False, True])
def test_a_capture_that_fails_changes_no_token(expected, overlap, skips):
    wish = by_priority(overlap=overlap)
    if skips:
        wish = replace(wish, runtime=replace(wish.runtime, on_capture_error="skip"))
    with LLMEngine.tiny(wish) as engine:
        faults, step, calls = engine.runtime.device.faults, engine.step, itertools.count()

        def faulty():
            faults.end = next(calls) < 2
            if faults.end and not skips:
                with pytest.raises(GraphrtError, match="end"):
                    step()
                faults.end = False
            return step()

        engine.step = faulty
        assert serve(engine, TRAFFIC)[:2] == expected
        failed = engine.runtime.report().failures
        assert len(failed) == 2
        # Nothing that failed comes again by itself.
        for _ in range(10):
            engine.step()
        assert engine.runtime.report().missing == dict.fromkeys(failed, MissReason.CAPTURE_FAILED)
        assert not engine.capture().missing
        assert serve(engine, TRAFFIC)[:2] == expected


@BOTH
def test_preemptions_of_a_step_whose_capture_failed_are_told_by_the_next(overlap):
    with LLMEngine.tiny(by_priority(overlap=overlap)) as engine:
        add, step, requests = engine.scheduler.add, engine.step, []
        engine.scheduler.add = lambda request: requests.append(request) or add(request)

        def faulty():
            with suppress(OSError), pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "_capture_next", fails)
                return step()
            return step()

        def fails(batch):
            raise OSError("no capture")

        engine.step = faulty
        num_preempted = serve(engine, TRAFFIC)[2]
        assert num_preempted == sum(request.num_preemptions for request in requests) > 0


PREEMPTING = [prompt(index, 3) for index in range(4)], SamplingParams(max_tokens=20)
"""Prompts and parameters of requests that the cache is too small for, all together."""


def fail_once_landed(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the step fail that has booked, but not returned, the tokens of the one before."""
    step = engine.runtime.step

    def fails(*args, **options):
        if engine._landed:
            raise OSError("lost")
        return step(*args, **options)

    monkeypatch.setattr(engine.runtime, "step", fails)


def test_tokens_that_a_failed_step_did_not_return_reach_no_later_request(monkeypatch):
    with LLMEngine.tiny(config(overlap=True)) as engine:
        served = engine.generate(*PREEMPTING)
        with monkeypatch.context() as patch:
            fail_once_landed(engine, patch)
            with pytest.raises(OSError, match="lost"):
                engine.generate(*PREEMPTING)
        assert not engine.has_unfinished()
        assert engine.generate(*PREEMPTING) == served


def test_an_abort_after_a_failed_step_returns_the_tokens_that_step_did_not(monkeypatch):
    with LLMEngine.tiny(config(overlap=True)) as engine:
        add, requests = engine.scheduler.add, []
        engine.scheduler.add = lambda request: requests.append(request) or add(request)
        names = [engine.add_request(tokens, PREEMPTING[1]) for tokens in PREEMPTING[0]]
        outputs = []
        with monkeypatch.context() as patch:
            fail_once_landed(engine, patch)
            with pytest.raises(OSError, match="lost"):
                deque(map(outputs.append, iter(engine.step, None)), 0)
        returned = [o for result in outputs for o in result.outputs if o.request_id == names[0]]
        last = engine.abort(names[0])
        assert last.finish_reason is FinishReason.ABORTED
        assert last.new_token_ids
        tokens = [token for output in (*returned, last) for token in output.new_token_ids]
        assert tokens == requests[0].output_token_ids
        later = [output for _ in range(3) for output in engine.step().outputs]
        assert {output.request_id for output in later} == {*names[1:]}


@pytest.fixture
def ended_unseen(monkeypatch):
    """An engine whose only request "a" ended in a step that failed, its tokens, and those seen."""
    [tokens] = [prompt(0, 3)]
    with LLMEngine.tiny(config(overlap=False)) as engine:
        [served] = engine.generate([tokens], SamplingParams(max_tokens=12))
    stop = served[1]
    assert stop != served[0]
    with LLMEngine.tiny(by_priority(overlap=True)) as engine:
        # Its second token finds no block free, so it has to be known before the next step.
        allocator = engine.scheduler.seats.allocator
        taken = allocator.allocate(allocator.num_free - 1)
        engine.add_request(tokens, SamplingParams(max_tokens=12, stop_token_ids=(stop,)), "a")
        outputs = [output for _ in range(2) for output in engine.step().outputs]

        def fails(**options):
            raise OSError("no capture")

        with monkeypatch.context() as patch:
            patch.setattr(engine.runtime, "capture_next", fails)
            with pytest.raises(OSError, match="no capture"):
                engine.step()
        assert not engine.scheduler.has_unfinished(), "the stop token was meant to end it"
        allocator.free(taken)
        yield engine, served[:2], outputs


def test_a_last_token_that_a_failed_step_did_not_return_is_still_to_come(ended_unseen):
    engine, expected, outputs = ended_unseen
    while engine.has_unfinished():
        outputs += engine.step().outputs
    assert [token for output in outputs for token in output.new_token_ids] == expected
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_request_that_ended_unseen_can_be_aborted_and_its_id_taken_then(ended_unseen):
    engine, expected, outputs = ended_unseen
    with pytest.raises(RequestError, match="no step has returned"):
        engine.add_request([1, 2], request_id="a")
    outputs.append(engine.abort("a"))
    assert [token for output in outputs for token in output.new_token_ids] == expected
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert not engine.has_unfinished()
    with pytest.raises(UnknownRequestError):
        engine.abort("a")
    assert engine.add_request([1, 2], request_id="a") == "a"


# -- anything

requests = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt
        st.integers(1, 14),  # output
        st.booleans(),  # drawn, or greedy
        st.integers(0, 4),  # steps since the one before
    ),
    min_size=1,
    max_size=7,
)


def serve_and_abort(engine: LLMEngine, rows, goes: tuple[int, int]) -> list[tuple[str, list[int]]]:
    """Why each request ended, and its tokens; number ``goes[0]`` is aborted at step ``goes[1]``."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(rows))}
    ends = dict.fromkeys(tokens, "")
    due = number = num_added = 0
    while num_added < len(rows) or engine.has_unfinished():
        while num_added < len(rows) and due + rows[num_added][3] <= number:
            num_prompt, num_output, drawn, gap = rows[num_added]
            due += gap
            params = SamplingParams(
                max_tokens=num_output, temperature=1.0 if drawn else 0.0, seed=num_added
            )
            engine.add_request(prompt(num_added, num_prompt), params, str(num_added))
            num_added += 1
        if number == goes[1]:
            with suppress(UnknownRequestError):
                output = engine.abort(str(goes[0]))
                ends[output.request_id] = output.finish_reason.name
        for output in engine.step().outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason.name
        number += 1
    return [(ends[name], tokens[name]) for name in tokens]


@pytest.fixture(scope="module")
def captured_before():
    with LLMEngine.tiny(config("FULL_AND_PIECEWISE", overlap=False)) as engine:
        engine.capture()
        yield engine


@settings(max_examples=15, deadline=None)
@given(rows=requests, goes=st.tuples(st.integers(0, 6), st.integers(0, 12)), overlap=st.booleans())
def test_any_traffic_with_aborts_gives_the_tokens_of_graphs_captured_before(
    captured_before, rows, goes, overlap
):
    served = serve_and_abort(captured_before, rows, goes)
    with LLMEngine.tiny(by_priority(overlap=overlap)) as engine:
        Watch(engine)
        found = serve_and_abort(engine, rows, goes)
    for (end, tokens), (expected_end, expected_tokens) in zip(found, served, strict=True):
        if FinishReason.ABORTED.name in (end, expected_end):
            # Overlap returns tokens later, so an abort finds fewer, or the other way round.
            shorter = min(len(tokens), len(expected_tokens))
            assert tokens[:shorter] == expected_tokens[:shorter]
        else:
            assert (end, tokens) == (expected_end, expected_tokens)


# -- examples


LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=12, max_model_len=20, block_size=4, num_blocks=17
)
KEYS = [
    *(BatchDescriptor(size) for size in (1, 2, 4, 12)),
    *(BatchDescriptor(size, size, uniform=True) for size in (1, 3)),
]


@given(num_taken=st.integers(0, 16), key=st.sampled_from(KEYS), seed=st.integers(0, 1))
def test_examples_read_and_write_free_blocks_only(num_taken, key, seed):
    allocator = BlockAllocator(LIMITS.num_blocks)
    taken = set(allocator.allocate(num_taken))
    examples = Examples(LIMITS, 97, allocator)
    if not examples.can_fill(key):
        assert 16 - num_taken < max(-(-key.num_tokens // 4), min(key.num_tokens, 4))
        with pytest.raises(OutOfBlocksError, match="free blocks"):
            examples(key, seed)
        return
    values, num_tokens, num_reqs, live = examples(key, seed)
    assert (num_tokens, num_reqs) == (key.num_tokens, min(key.num_tokens, 4))
    blocks = {*values["block_tables"].flatten().tolist(), *live.block_tables.flatten().tolist()}
    written = {slot // 4 for slot in values["slot_mapping"].tolist()}
    assert written <= blocks - {0}
    assert not blocks & taken
    assert len(set(values["slot_mapping"].tolist())) == num_tokens
    assert allocator.num_free == 16 - num_taken

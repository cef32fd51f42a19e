"""Capturing graphs one by one while serving: the same tokens, and no request's cache changes."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from llm_traffic import (
    MODES,
    TRAFFIC,
    Arrival,
    check_same_tokens,
    engine_config,
    prompt,
    serve,
)

from graphrt import Event, Reason, RuntimeMode
from graphrt.errors import GraphrtError
from graphrt.events import Captured
from graphrt_llm import FinishReason, LLMEngine, SamplingParams
from graphrt_llm.errors import (
    RequestError,
    UnknownRequestError,
)

BOTH = pytest.mark.parametrize("overlap", [False, True])


def by_priority(mode: str = "FULL_AND_PIECEWISE", *, overlap: bool = False, **options):
    return replace(engine_config(mode, overlap=overlap, **options), capture="by_priority")


class Watch:
    """Follows an engine's captures, and checks that each leaves requests and blocks alone."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.cache = engine.attention_backend.cache.tensor
        self.num_in_flight: list[int] = []
        """Steps in flight at each call that captured something."""
        self.num_refused = 0
        """Calls that captured nothing, although something was missing."""
        self.capture_next = engine.runtime.capture_next
        engine.runtime.capture_next = self.watched  # type: ignore[method-assign]

    def held(self) -> torch.Tensor:
        table = self.engine.scheduler.input_batch
        blocks = [
            block
            for request in self.engine.scheduler.running
            for block in table.block_tables[request.row, : table.num_blocks[request.row]]
        ]
        assert len(set(blocks)) == len(blocks)
        return torch.tensor(np.array(blocks, np.int64))

    def watched(self, **options) -> int:
        allocator = self.engine.scheduler.input_batch.allocator
        blocks, free = self.held(), allocator.free_blocks
        assert not set(blocks.tolist()) & set(free)
        before = self.cache[:, blocks].clone()
        num_events = len(self.engine.runtime.report().graphs)
        num_missing = self.capture_next(**options)
        assert torch.equal(self.cache[:, blocks], before), "a capture wrote over a request's cache"
        assert allocator.free_blocks == free
        if len(self.engine.runtime.report().graphs) > num_events:
            self.num_in_flight.append(len(self.engine._in_flight))
        else:
            self.num_refused += num_missing > 0
        return num_missing


def finish_capture(engine: LLMEngine) -> None:
    """Idle steps capture the missing graphs."""
    for _ in range(len(engine.runtime.report().missing)):
        assert engine.step() == ((), 0, 0, False, None, 0, False)
    assert not engine.runtime.report().missing


def captured_sizes(events: list[Event]) -> list[tuple[str, int]]:
    """Mode and tokens of each captured graph, in order of capture."""
    return [(e.mode.name, e.key.num_tokens) for e in events if isinstance(e, Captured)]


@pytest.fixture(scope="module")
def expected():
    """Tokens and finish reasons of the traffic, served without graphs and overlap."""
    with LLMEngine.tiny(engine_config()) as engine:
        return serve(engine, TRAFFIC)[:2]


@BOTH
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_tokens_while_it_captures(expected, mode, overlap):
    with LLMEngine.tiny(by_priority(mode, overlap=overlap)) as engine:
        watch = Watch(engine)
        served = serve(engine, TRAFFIC)
        assert served[:2] == expected
        assert served.num_preempted > 0, "the cache was meant to be too small"
        if mode != "NONE":
            assert len(watch.num_in_flight) > 2
            assert any(graph.state == "ready" for graph in engine.runtime.report().graphs)
        finish_capture(engine)
        # Graphs that were captured between steps give the same tokens too.
        assert serve(engine, TRAFFIC)[:2] == expected


@BOTH
def test_a_capture_waits_for_free_blocks_and_preempts_nothing(overlap):
    params = SamplingParams(max_tokens=6)
    prompts = [prompt(index, 3) for index in range(3)]
    with LLMEngine.tiny(engine_config(overlap=overlap)) as engine:
        served = [engine.generate([tokens], params) for tokens in prompts]
    events: list[Event] = []
    with LLMEngine.tiny(by_priority(overlap=overlap), observer=events.append) as engine:
        watch, step, steps = Watch(engine), engine.step, []
        engine.step = lambda: steps.append(step()) or steps[-1]
        allocator = engine.scheduler.input_batch.allocator
        # Three blocks stay free, two once a request runs: too few for an example of four requests.
        held = allocator.allocate(13)
        assert [engine.generate([tokens], params) for tokens in prompts] == served
        small = [(mode, size) for mode in ("FULL", "PIECEWISE") for size in (1, 2)]
        assert sorted(captured_sizes(events)) == small
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
def test_tokens_in_flight_survive_a_capture(mode):
    """They are the next step's input, in graph storage that a larger graph overwrites."""
    params = SamplingParams(max_tokens=12)
    with LLMEngine.tiny(engine_config(overlap=False)) as engine:
        served = engine.generate([prompt(0, 3)], params)
    with LLMEngine.tiny(by_priority(mode, overlap=True)) as engine:
        Watch(engine)
        launch, capture_next = engine._launch, engine.runtime.capture_next
        launched, was_overwritten = [], []
        engine._launch = lambda *args: launched.append(launch(*args)) or launched[-1]
        # The smallest graph first; then it serves; then a larger one is captured.
        engine._examples.can_fill = lambda key: key.num_tokens == (1 if len(launched) < 5 else 4)

        def compared(**options):
            tokens = launched[-1].tokens if engine._in_flight else torch.zeros(0)
            before = tokens.clone()
            left = capture_next(**options)
            was_overwritten.append(not torch.equal(tokens, before))
            return left

        engine.runtime.capture_next = compared
        assert engine.generate([prompt(0, 3)], params) == served
        assert True in was_overwritten


def test_tokens_in_flight_are_copied_only_for_a_capture():
    with LLMEngine.tiny(by_priority("FULL_DECODE_ONLY", overlap=True)) as engine:
        launch, launched, are_its_own = engine._launch, [], []

        def watched(*args):
            if engine._in_flight:
                are_its_own.append(engine._in_flight[-1].tokens is launched[-1])
            step = launch(*args)
            launched.append(step.tokens)
            return step

        engine._launch = watched
        allocator = engine.scheduler.input_batch.allocator
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


def test_a_batchs_own_graph_is_captured_first_and_used():
    events: list[Event] = []
    with LLMEngine.tiny(by_priority(), observer=events.append) as engine:
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=4))
        first, second, third = (engine.step().decision for _ in range(3))
        assert (first.mode, first.descriptor.num_tokens) == (RuntimeMode.PIECEWISE, 4)
        assert (second.mode, second.descriptor.num_tokens) == (RuntimeMode.FULL, 1)
        assert third == second
        # The third step found its graph, so the next of the plan was captured: the largest.
        assert captured_sizes(events) == [("PIECEWISE", 4), ("FULL", 1), ("PIECEWISE", 12)]


@BOTH
def test_a_step_that_captured_returns_its_own_tokens(overlap):
    with LLMEngine.tiny(by_priority(overlap=overlap)) as engine:
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=20))
        num_keys = len(engine.runtime.plan.capture_order)
        counts = [len(engine.step().outputs) for _ in range(num_keys + 3)]
        # Once nothing is missing, an overlapped step returns the tokens of the one before.
        assert counts == [1] * num_keys + [0 if overlap else 1, 1, 1]


def test_capture_before_serving_captures_nothing_in_a_step():
    with LLMEngine.tiny(engine_config("FULL")) as engine:
        engine.generate([prompt(0, 3)])
        engine.step()
        assert not engine.runtime.report().graphs


def test_capture_captures_all_missing_graphs_at_once():
    events: list[Event] = []
    with LLMEngine.tiny(by_priority(), observer=events.append) as engine:
        engine.step()
        assert not engine.capture().missing
        engine.generate([prompt(0, 3)])
        assert len(captured_sizes(events)) == len(engine.runtime.plan.capture_order)


def test_after_capture_all_steps_overlap():
    with LLMEngine.tiny(by_priority(overlap=True)) as engine:
        engine.capture()
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=20))
        assert [len(engine.step().outputs) for _ in range(3)] == [0, 1, 1]


# -- failures


@BOTH
@pytest.mark.parametrize("skips", [False, True])
def test_a_capture_that_fails_changes_no_token(expected, overlap, skips):
    asked = by_priority(overlap=overlap)
    if skips:
        asked = replace(asked, runtime=replace(asked.runtime, on_capture_error="skip"))
    with LLMEngine.tiny(asked) as engine:
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
        # A failed capture is not retried by a step.
        for _ in range(10):
            engine.step()
        assert engine.runtime.report().missing == dict.fromkeys(failed, Reason.CAPTURE_FAILED)
        assert not engine.capture().missing
        assert serve(engine, TRAFFIC)[:2] == expected


@BOTH
def test_preemptions_of_a_failed_step_are_reported_by_the_next(overlap):
    with LLMEngine.tiny(by_priority(overlap=overlap)) as engine:
        add, step, requests = engine.scheduler.add, engine.step, []
        engine.scheduler.add = lambda request: requests.append(request) or add(request)

        def faulty():
            with suppress(OSError), pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "_capture_next", fails)
                return step()
            return step()

        def fails(*args):
            raise OSError("no capture")

        engine.step = faulty
        num_preempted = serve(engine, TRAFFIC).num_preempted
        assert num_preempted == sum(request.num_preemptions for request in requests) > 0


PREEMPTING = [prompt(index, 3) for index in range(4)], SamplingParams(max_tokens=20)
"""Prompts and parameters of requests that the cache is too small for, all together."""


def fail_with_unreturned_tokens(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the step fail that has stored, but not returned, the tokens of the previous one."""
    step = engine.runtime.step

    def fails(*args, **options):
        if engine._unreturned:
            raise OSError("lost")
        return step(*args, **options)

    monkeypatch.setattr(engine.runtime, "step", fails)


def test_unreturned_tokens_reach_no_later_request(monkeypatch):
    with LLMEngine.tiny(engine_config(overlap=True)) as engine:
        served = engine.generate(*PREEMPTING)
        with monkeypatch.context() as patch:
            fail_with_unreturned_tokens(engine, patch)
            with pytest.raises(OSError, match="lost"):
                engine.generate(*PREEMPTING)
        assert not engine.has_unfinished()
        assert engine.generate(*PREEMPTING) == served


def test_an_abort_returns_tokens_that_a_failed_step_did_not(monkeypatch):
    with LLMEngine.tiny(engine_config(overlap=True)) as engine:
        add, requests = engine.scheduler.add, []
        engine.scheduler.add = lambda request: requests.append(request) or add(request)
        names = [engine.add_request(tokens, PREEMPTING[1]) for tokens in PREEMPTING[0]]
        outputs = []
        with monkeypatch.context() as patch:
            fail_with_unreturned_tokens(engine, patch)
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
def ended_unreturned(monkeypatch):
    """An engine whose request "a" ended in a failed step, its tokens, and outputs so far."""
    [tokens] = [prompt(0, 3)]
    with LLMEngine.tiny(engine_config(overlap=False)) as engine:
        [served] = engine.generate([tokens], SamplingParams(max_tokens=12))
    stop = served[1]
    assert stop != served[0]
    with LLMEngine.tiny(by_priority(overlap=True)) as engine:
        # No block is free for its second token, so that token is read before the next step.
        allocator = engine.scheduler.input_batch.allocator
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


def test_a_later_step_returns_the_last_token_of_a_failed_one(ended_unreturned):
    engine, expected, outputs = ended_unreturned
    while engine.has_unfinished():
        outputs += engine.step().outputs
    assert [token for output in outputs for token in output.new_token_ids] == expected
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_request_that_ended_unreturned_keeps_its_id_busy(ended_unreturned):
    engine, expected, outputs = ended_unreturned
    with pytest.raises(RequestError, match="no step has returned"):
        engine.add_request([1, 2], request_id="a")
    outputs.append(engine.abort("a"))
    assert [token for output in outputs for token in output.new_token_ids] == expected
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert not engine.has_unfinished()
    with pytest.raises(UnknownRequestError):
        engine.abort("a")
    assert engine.add_request([1, 2], request_id="a") == "a"


# -- any traffic

rows = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt
        st.integers(1, 14),  # output
        st.sampled_from([0.0, 1.0]),  # temperature
        st.integers(0, 12),  # step of arrival
    ),
    min_size=1,
    max_size=7,
)


@pytest.fixture(scope="module")
def captured_before():
    with LLMEngine.tiny(engine_config("FULL_AND_PIECEWISE")) as engine:
        engine.capture()
        yield engine


# Each captures an engine; ``make fuzz`` serves thousands.
@settings(max_examples=8, deadline=None)
@given(rows=rows, abort=st.tuples(st.integers(0, 6), st.integers(0, 12)), overlap=st.booleans())
def test_any_traffic_with_aborts_gives_the_same_tokens(captured_before, rows, abort, overlap):
    traffic = [
        Arrival(
            step,
            prompt(index, num_prompt),
            SamplingParams(max_tokens=num_output, temperature=temperature, seed=index),
        )
        for index, (num_prompt, num_output, temperature, step) in enumerate(rows)
    ]
    expected = serve(captured_before, traffic, abort)
    with LLMEngine.tiny(by_priority(overlap=overlap)) as engine:
        Watch(engine)
        check_same_tokens(serve(engine, traffic, abort), expected)

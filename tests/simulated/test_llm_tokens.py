"""The same tokens in every mode, with and without overlap, for any traffic."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from llm_traffic import (
    MODES,
    TRAFFIC,
    Arrival,
    check_same_tokens,
    engine_config,
    prompt,
    serve,
)

from graphrt import RuntimeMode
from graphrt_llm import FinishReason, LLMEngine, SamplingParams


@pytest.fixture(scope="module")
def engines():
    """In every mode, one engine that waits for each step and one that overlaps."""
    with ExitStack() as stack:
        made = {
            (mode, overlap): stack.enter_context(
                LLMEngine.tiny(engine_config(mode, overlap=overlap))
            )
            for mode in MODES
            for overlap in (False, True)
        }
        for engine in made.values():
            engine.capture()
        yield made


@pytest.fixture(params=[(mode, overlap) for mode in MODES for overlap in (False, True)], ids=str)
def captured(request, engines):
    yield engines[request.param]
    engines[request.param].abort_all()


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The tokens of each request served alone: no batch, no preemption, no graph."""
    with LLMEngine.tiny(engine_config()) as engine:
        return [engine.generate([arrival.prompt], arrival.params)[0] for arrival in TRAFFIC]


def test_every_mode_gives_the_tokens_of_requests_alone(captured, alone):
    served = serve(captured, TRAFFIC)
    assert served.tokens == alone
    assert served.num_preempted > 0, "the cache was meant to be too small"
    assert {step.uniform for step in served.steps} == {False, True}
    policy = captured.runtime.plan.cudagraph_mode
    for step in served.steps:
        assert step.num_tokens <= 12
        assert step.num_reqs <= 4
        if step.decision is not None:
            promised = policy.decode_mode() if step.uniform else policy.mixed_mode()
            assert step.decision.mode is promised


def test_an_engine_without_captures_gives_the_same_tokens(alone):
    with LLMEngine.tiny(engine_config("FULL_AND_PIECEWISE")) as engine:
        served = serve(engine, TRAFFIC)
    assert served.tokens == alone
    assert {step.decision.reason.name for step in served.steps} == {"NOT_CAPTURED_YET"}


def test_a_stop_token_ends_requests_and_frees_their_blocks(captured, alone):
    # Each stops at a token of its own output, most of them in the middle.
    stopping, expected = [], []
    for arrival, tokens in zip(TRAFFIC, alone, strict=True):
        stop = tokens[len(tokens) // 2]
        stopping.append(arrival._replace(params=replace(arrival.params, stop_token_ids=(stop,))))
        expected.append(tokens[: tokens.index(stop) + 1])
    served = serve(captured, stopping)
    assert served.tokens == expected
    assert FinishReason.STOP in served.reasons
    allocator = captured.scheduler.input_batch.allocator
    assert allocator.num_free == allocator.num_usable


@st.composite
def traffic(draw) -> list[Arrival]:
    arrivals = []
    for index in range(draw(st.integers(1, 7))):
        stop = draw(st.none() | st.integers(0, 15))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 14)),
            temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
            top_k=draw(st.sampled_from([None, 5])),
            top_p=draw(st.sampled_from([0.8, 1.0])),
            seed=draw(st.integers(0, 2**64 - 1)),
            stop_token_ids=() if stop is None else tuple(range(stop, 512, 16)),
        )
        length = draw(st.integers(1, 34))
        arrivals.append(Arrival(draw(st.integers(0, 12)), prompt(index, length), params))
    return arrivals


# Each is served by every engine above; ``make fuzz`` serves thousands.
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traffic=traffic(), abort=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 12)))
def test_any_traffic_gives_equal_tokens_in_every_mode(engines, traffic, abort):
    expected = serve(engines["NONE", False], traffic, abort)
    for (mode, overlap), engine in engines.items():
        served = serve(engine, traffic, abort)
        check_same_tokens(served, expected)
        if not overlap:
            assert served[:2] == expected[:2], mode
            assert served.shapes == expected.shapes, mode


def test_overlapped_tokens_come_one_call_later():
    with LLMEngine.tiny(engine_config(overlap=True)) as engine:
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=2))
        first, second, third = engine.step(), engine.step(), engine.step()
        assert (first.num_tokens, len(first.outputs)) == (3, 0)
        assert (second.num_tokens, len(second.outputs)) == (1, 1)
        assert (third.num_tokens, len(third.outputs), third.decision) == (0, 1, None)
        assert third.outputs[0].finish_reason is FinishReason.LENGTH
        assert not engine.has_unfinished()


def test_an_aborted_request_gets_no_late_token():
    with LLMEngine.tiny(engine_config(overlap=True)) as engine:
        kept = engine.add_request(prompt(0, 3), SamplingParams(max_tokens=4))
        gone = engine.add_request(prompt(1, 3), SamplingParams(max_tokens=4))
        engine.step()
        engine.abort(gone)
        again = engine.add_request(prompt(2, 3), SamplingParams(max_tokens=4), gone)
        names = []
        while engine.has_unfinished():
            names += [output.request_id for output in engine.step().outputs]
        assert again == gone
        assert sorted(names) == sorted([kept] * 4 + [gone] * 4)


def test_tokens_of_an_abandoned_step_reach_no_later_request():
    with LLMEngine.tiny(engine_config(overlap=True)) as engine:
        expected = engine.generate([prompt(3, 7)], SamplingParams(max_tokens=6))
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=9))
        engine.step()
        engine.abort_all()
        assert engine.generate([prompt(3, 7)], SamplingParams(max_tokens=6)) == expected


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_is_repeated_and_changes_no_token(alone, monkeypatch, overlap, mode):
    """It fails before or after the device has run it; the caller then steps again.

    A replay that has run has overwritten graph storage, where the tokens in flight were.
    """
    with LLMEngine.tiny(engine_config(mode, overlap=overlap)) as engine:
        engine.capture()
        run, step, failures = engine.runtime.step, engine.step, []
        num_calls = 0

        def failing(*args, **kwargs):
            nonlocal num_calls
            num_calls += 1
            if num_calls % 3 == 0:
                raise ArithmeticError("before")
            result = run(*args, **kwargs)
            if num_calls % 3 == 1:
                raise KeyboardInterrupt
            return result

        def persistent():
            while True:
                try:
                    return step()
                except (ArithmeticError, KeyboardInterrupt) as error:
                    failures.append(type(error))

        monkeypatch.setattr(engine.runtime, "step", failing)
        monkeypatch.setattr(engine, "step", persistent)
        assert serve(engine, TRAFFIC[:4]).tokens == alone[:4]
        assert set(failures) == {ArithmeticError, KeyboardInterrupt}


def test_excluded_graphs_are_not_used(captured):
    assert captured.top2_margin(prompt(1, 6)) > 1e-9
    assert captured.runtime.last_decision.mode is RuntimeMode.NONE


def test_overlap_is_off_on_a_simulated_device_by_default():
    with LLMEngine.tiny(engine_config(overlap=None)) as engine:
        assert engine.runtime.device.name == "simulated"
        assert not engine.overlap

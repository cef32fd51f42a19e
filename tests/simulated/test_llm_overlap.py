"""Preparing a step while another runs changes when tokens are known, not which."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from graphrt import CompilationConfig, CUDAGraphMode, RuntimeConfig
from graphrt_llm import EngineConfig, LLMEngine, SamplingParams
from graphrt_llm.request import FinishReason

MODES = [mode.name for mode in CUDAGraphMode]


def config(mode: str = "NONE", *, overlap: bool, num_blocks: int = 17) -> EngineConfig:
    """Four requests at a time, chunks of at most 12 tokens, 16 blocks of 4 for all of them."""
    return EngineConfig(
        runtime=RuntimeConfig(
            compilation=CompilationConfig(
                cudagraph_mode=mode,
                cudagraph_capture_sizes=None if mode == "NONE" else [1, 2, 4, 12],
            ),
            max_num_seqs=4,
            max_num_batched_tokens=12,
        ),
        max_model_len=48,
        block_size=4,
        num_blocks=num_blocks,
        device="simulated",
        dtype="float64",
        overlap=overlap,
    )


def prompt(index: int, length: int) -> list[int]:
    return random.Random(index).choices(range(512), k=length)


Traffic = list[tuple[int, list[int], SamplingParams]]
"""Arrival step, prompt, parameters."""


def serve(engine: LLMEngine, traffic: Traffic) -> tuple[dict[str, list[int]], dict[str, str], int]:
    """Tokens and finish reasons by number of the request, and preemptions."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(traffic))}
    reasons: dict[str, str] = {}
    waiting = sorted(enumerate(traffic), key=lambda item: item[1][0])
    step = num_preempted = 0
    while waiting or engine.has_unfinished():
        while waiting and waiting[0][1][0] <= step:
            index, (_, tokens_in, params) = waiting.pop(0)
            engine.add_request(tokens_in, params, str(index))
        result = engine.step()
        num_preempted += result.num_preempted
        for output in result.outputs:
            assert output.request_id not in reasons, "a token after the last"
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason.name
        step += 1
        assert step < 1000, "requests do not finish"
    return tokens, reasons, num_preempted


@pytest.fixture(scope="module")
def engines():
    """In every mode, one engine that waits for each step and one that does not."""
    with ExitStack() as stack:
        made = {
            (mode, overlap): stack.enter_context(LLMEngine.tiny(config(mode, overlap=overlap)))
            for mode in MODES
            for overlap in (False, True)
        }
        for engine in made.values():
            engine.capture()
        yield made


TRAFFIC: Traffic = [
    (0, prompt(0, 5), SamplingParams(max_tokens=14)),
    (0, prompt(1, 30), SamplingParams(max_tokens=9, temperature=1.0, seed=11)),
    (2, prompt(2, 1), SamplingParams(max_tokens=20, temperature=0.8, top_k=20, seed=2)),
    (3, prompt(3, 17), SamplingParams(max_tokens=12)),
    (4, prompt(4, 3), SamplingParams(max_tokens=16, temperature=1.3, top_p=0.9, seed=5)),
    (4, prompt(5, 24), SamplingParams(max_tokens=1)),
    (9, prompt(6, 2), SamplingParams(max_tokens=18)),
]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_tokens_one_step_ahead(engines, mode):
    expected, reasons, _ = serve(engines["NONE", False], TRAFFIC)
    tokens, ahead_reasons, num_preempted = serve(engines[mode, True], TRAFFIC)
    assert tokens == expected
    assert ahead_reasons == reasons
    assert num_preempted > 0, "the cache was meant to be too small"


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_a_stop_token_ends_a_request_and_frees_its_place(engines, mode):
    tokens = serve(engines["NONE", False], TRAFFIC)[0]
    # Each stops at a token of its own output, most of them in the middle.
    middle = {index: its[len(its) // 2] for index, its in tokens.items()}
    stopping = [
        (arrival, tokens_in, replace(params, stop_token_ids=(middle[str(index)],)))
        for index, (arrival, tokens_in, params) in enumerate(TRAFFIC)
    ]
    expected, reasons, _ = serve(engines[mode, False], stopping)
    engine = engines[mode, True]
    tokens, ahead_reasons, _ = serve(engine, stopping)
    assert (tokens, ahead_reasons) == (expected, reasons)
    assert FinishReason.STOP.name in reasons.values()
    allocator = engine.scheduler.seats.allocator
    assert allocator.num_free == allocator.num_usable


requests = st.tuples(
    st.integers(0, 12),  # arrival
    st.integers(1, 20),  # prompt
    st.integers(1, 14),  # output
    st.booleans(),  # drawn, or greedy
    st.integers(0, 511),  # stop token
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(requests, min_size=1, max_size=7),
    mode=st.sampled_from(["NONE", "FULL_AND_PIECEWISE"]),
)
def test_any_traffic_gives_the_same_tokens_with_and_without(engines, rows, mode):
    traffic = [
        (
            arrival,
            prompt(index, num_prompt),
            SamplingParams(
                max_tokens=num_output,
                temperature=1.0 if drawn else 0.0,
                seed=index,
                stop_token_ids=tuple(range(stop, 512, 16)),
            ),
        )
        for index, (arrival, num_prompt, num_output, drawn, stop) in enumerate(rows)
    ]
    assert serve(engines[mode, True], traffic)[:2] == serve(engines[mode, False], traffic)[:2]


def test_tokens_come_one_call_later_and_a_last_call_brings_the_rest():
    with LLMEngine.tiny(config(overlap=True)) as engine:
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=2))
        first, second, third = engine.step(), engine.step(), engine.step()
        assert (first.num_tokens, len(first.outputs)) == (3, 0)
        assert (second.num_tokens, len(second.outputs)) == (1, 1)
        assert (third.num_tokens, len(third.outputs), third.decision) == (0, 1, None)
        assert third.outputs[0].finish_reason is FinishReason.LENGTH
        assert not engine.has_unfinished()


def test_an_aborted_request_gets_no_late_token():
    with LLMEngine.tiny(config(overlap=True)) as engine:
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


def test_what_an_abandoned_step_left_does_not_reach_the_next_requests():
    with LLMEngine.tiny(config(overlap=True)) as engine:
        expected = engine.generate([prompt(3, 7)], SamplingParams(max_tokens=6))
        engine.add_request(prompt(0, 3), SamplingParams(max_tokens=9))
        engine.step()
        engine.abort_all()
        assert engine.generate([prompt(3, 7)], SamplingParams(max_tokens=6)) == expected


def test_a_failed_step_is_repeated_and_changes_no_token(monkeypatch):
    with LLMEngine.tiny(config(overlap=True)) as engine:
        expected = serve(engine, TRAFFIC[:4])[0]
        run, calls = engine._runner.run, []

        def failing(*args, **kwargs):
            calls.append(None)
            if len(calls) % 3 == 0:
                raise RuntimeError("injected")
            return run(*args, **kwargs)

        monkeypatch.setattr(engine._runner, "run", failing)
        step, failures = engine.step, []

        def persistent():
            try:
                return step()
            except RuntimeError:
                failures.append(None)
                return step()

        monkeypatch.setattr(engine, "step", persistent)
        assert serve(engine, TRAFFIC[:4])[0] == expected
        assert failures


def test_a_simulated_device_waits_for_each_step_unless_asked():
    with LLMEngine.tiny(replace(config(overlap=False), overlap=None)) as engine:
        assert engine.runtime.device.name == "simulated"
        assert not engine.overlap

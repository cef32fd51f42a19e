"""Serving a trace: the clock, the fit to the context, and being interrupted."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from graphrt import CompilationConfig, RuntimeConfig
from graphrt.planner import TraceRequest
from graphrt_llm import EngineConfig, LLMEngine, SamplingParams, fit_to_context, serve
from graphrt_llm.errors import EngineStateError, RequestError
from graphrt_llm.serving import prompt_tokens


def engine(mode: str = "NONE") -> LLMEngine:
    return LLMEngine.tiny(
        EngineConfig(
            runtime=RuntimeConfig(
                compilation=CompilationConfig(
                    cudagraph_mode=mode,
                    cudagraph_capture_sizes=None if mode == "NONE" else [1, 2, 4, 16],
                ),
                max_num_seqs=4,
                max_num_batched_tokens=16,
            ),
            max_model_len=64,
            block_size=4,
            device="simulated",
        )
    )


TRACE = [
    TraceRequest(0.0, 30, 5),
    TraceRequest(0.05, 400, 90),
    TraceRequest(0.06, 3, 40),
    TraceRequest(9.0, 100, 20),
    TraceRequest(9.0, 7, 7),
]


@pytest.fixture(scope="module")
def served():
    steps, done = [], []
    with engine() as eager:
        result = serve(
            eager,
            TRACE,
            step_seconds=0.1,
            progress=lambda *counts: done.append(counts),
            on_step=steps.append,
        )
    return result, steps, done


def test_every_request_gets_its_tokens(served):
    result, _, done = served
    fit = fit_to_context(TRACE, 64)
    assert {i: len(t) for i, t in result.tokens.items()} == {
        i: output for i, (_, output) in enumerate(fit.lengths)
    }
    assert (result.scale, result.num_cut) == (fit.scale, fit.num_cut)
    assert done[-1] == (5, 5)
    assert [d for d, _ in done] == sorted({d for d, _ in done})


def test_the_clock_is_virtual_and_jumps_over_idle_time(served):
    result, steps, _ = served
    assert len(steps) == result.num_steps
    assert [step.number for step in steps] == list(range(len(steps)))
    clocks = [step.clock_seconds for step in steps]
    assert clocks[0] == 0
    jumps = [(a, b) for a, b in pairwise(clocks) if b - a != pytest.approx(0.1)]
    assert len(jumps) == 1
    assert jumps[0][1] == 9.0
    assert result.seconds == pytest.approx(sum(step.seconds for step in steps))
    # What arrived during the first step is in the second, not before: 3 tokens, then a full chunk.
    assert [step.result.num_tokens for step in steps[:2]] == [3, 16]


def test_every_mode_gets_the_same_batches_and_tokens(served):
    result, steps, _ = served
    with engine("FULL_AND_PIECEWISE") as graphed:
        graphed.capture()
        other_steps = []
        other = serve(graphed, TRACE, step_seconds=0.1, on_step=other_steps.append)
    assert other.tokens == result.tokens
    assert [s.result[1:4] for s in other_steps] == [s.result[1:4] for s in steps]
    assert {s.result.decision.mode.name for s in other_steps} == {"FULL", "PIECEWISE"}


def test_parameters_can_be_given_by_request(served):
    def params(index: int, num_output_tokens: int) -> SamplingParams:
        temperature = 1.0 if index == 2 else 0.0
        return SamplingParams(max_tokens=num_output_tokens, temperature=temperature)

    with engine() as eager:
        other = serve(eager, TRACE, step_seconds=0.1, params=params)
    differing = {i for i in other.tokens if other.tokens[i] != served[0].tokens[i]}
    assert differing == {2}


def test_an_interrupt_between_steps_leaves_a_usable_engine(served):
    with engine() as eager:
        num_steps = 0

        def interrupt(step) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                signal.raise_signal(signal.SIGINT)
                num_steps += 100  # reached: the signal alone stops nothing

        with pytest.raises(KeyboardInterrupt):
            serve(eager, TRACE, step_seconds=0.1, on_step=interrupt)
        assert num_steps == 103
        assert not eager.has_unfinished()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert serve(eager, TRACE, step_seconds=0.1).tokens == served[0].tokens


def test_an_interrupt_in_the_last_step_is_not_lost():
    with engine() as eager, pytest.raises(KeyboardInterrupt):
        serve(
            eager,
            [TraceRequest(0.0, 2, 1)],
            step_seconds=0.1,
            on_step=lambda step: signal.raise_signal(signal.SIGINT),
        )


def test_a_second_interrupt_acts_at_once():
    def twice(step) -> None:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("second came")

    with engine() as eager, pytest.raises(RuntimeError, match="second came"):
        serve(eager, TRACE, step_seconds=0.1, on_step=twice)


def test_a_foreign_interrupt_handler_is_left_alone():
    def handler(number, frame) -> None:
        raise LookupError

    before = signal.signal(signal.SIGINT, handler)
    try:
        with engine() as eager, pytest.raises(LookupError):
            serve(
                eager,
                TRACE,
                step_seconds=0.1,
                on_step=lambda step: signal.raise_signal(signal.SIGINT),
            )
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_empty_trace_is_served_at_once():
    with engine() as eager:
        assert serve(eager, [], step_seconds=0.1) == ({}, 0, 0.0, 1.0, 0)


def test_bad_traces_and_busy_engines_are_refused():
    with engine() as eager:
        for trace, seconds in ((TRACE[::-1], 0.1), (TRACE, 0.0), (TRACE, float("nan"))):
            with pytest.raises(RequestError):
                serve(eager, trace, step_seconds=seconds)
        eager.add_request([1])
        with pytest.raises(EngineStateError):
            serve(eager, TRACE, step_seconds=0.1)


def test_prompts_depend_on_seed_and_number_alone():
    assert prompt_tokens(1, 2, 50, 512) == prompt_tokens(1, 2, 50, 512)
    assert prompt_tokens(1, 2, 50, 512) != prompt_tokens(1, 3, 50, 512)
    assert prompt_tokens(1, 2, 50, 512) != prompt_tokens(2, 2, 50, 512)


rows = st.lists(
    st.builds(TraceRequest, st.just(0.0), st.integers(1, 100_000), st.integers(1, 3_000)),
    max_size=30,
)


@given(rows, st.integers(2, 5_000))
def test_every_length_fits_and_the_factor_is_common(trace: list[TraceRequest], max_tokens: int):
    lengths, scale, num_cut = fit_to_context(trace, max_tokens)
    assert len(lengths) == len(trace)
    assert 0 < scale <= 1
    changed = 0
    for row, (prompt, output) in zip(trace, lengths, strict=True):
        assert prompt >= 1
        assert output >= 1
        assert prompt + output <= max_tokens
        asked = (row.num_prompt_tokens, row.num_output_tokens)
        scaled = tuple(max(1, int(n * scale)) for n in asked)
        changed += scaled != (prompt, output)
    assert changed == num_cut


@given(rows)
def test_a_trace_that_fits_is_left_alone(trace: list[TraceRequest]):
    longest = max((r.num_prompt_tokens + r.num_output_tokens for r in trace), default=2)
    lengths = tuple((row.num_prompt_tokens, row.num_output_tokens) for row in trace)
    assert fit_to_context(trace, longest) == (lengths, 1.0, 0)

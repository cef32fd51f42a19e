"""Speculative decoding in the engine: the tokens and the distribution of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import llm_traffic
import pytest
import torch
from llm_adapters import record_logits
from llm_traffic import MODES, TRAFFIC, check_same_tokens, engine_config, serve

from graphrt import CompilationConfig, RuntimeConfig, RuntimeMode
from graphrt.events import PaddingVerified, RanEager, Replayed
from graphrt.planner import generate_azure_like, read_trace
from graphrt_llm import EngineConfig, LLMEngine, ModelConfig, SamplingParams, serve as serve_trace
from graphrt_llm.errors import EngineConfigError

TRACE = generate_azure_like(200, seed=3)
# Few tokens, so that texts repeat and drafts are accepted.
REPEATS = replace(ModelConfig.tiny(), vocab_size=8)


def prompt(index: int, length: int) -> list[int]:
    return [token % 8 for token in llm_traffic.prompt(index, length)]


def trace_config(mode: str, k: int) -> EngineConfig:
    sizes = None if mode == "NONE" else [8, 16, 40, 80]
    return EngineConfig(
        runtime=RuntimeConfig(
            compilation=CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=sizes),
            max_num_seqs=16,
            max_num_batched_tokens=80,
            num_speculative_tokens=k,
        ),
        max_model_len=56,
        block_size=4,
        device="simulated",
        dtype="float64",
        overlap=False,
    )


@cache
def plain() -> tuple[dict[int, tuple[int, ...]], int]:
    with LLMEngine.with_random_weights(REPEATS, trace_config("NONE", 0)) as engine:
        result = serve_trace(engine, TRACE, step_seconds=0.2)
        return result.tokens, result.num_steps


@pytest.mark.parametrize(
    ("mode", "k"),
    # Only FULL graphs have other shapes for each number of drafts.
    [(mode, k) for mode in MODES for k in ((1, 2, 4) if "FULL" in mode else (2,))],
)
def test_200_trace_requests_speculated_get_the_same_tokens(mode, k):
    expected, num_steps = plain()
    with LLMEngine.with_random_weights(REPEATS, trace_config(mode, k)) as engine:
        assert not engine.overlap
        engine.capture()
        result = serve_trace(engine, TRACE, step_seconds=0.2)
        assert result.tokens == expected
        _, drafted, accepted = engine.drafts
        assert 0 < accepted < drafted
        assert result.num_steps < num_steps


def test_published_trace_speculated_gets_the_same_tokens(shared: Path):
    trace = read_trace(shared / "traces/azure2023/AzureLLMInferenceTrace_conv.csv", limit=200)
    tokens = []
    for mode, k in (("NONE", 0), ("FULL_AND_PIECEWISE", 2)):
        with LLMEngine.with_random_weights(REPEATS, trace_config(mode, k)) as engine:
            engine.capture()
            tokens.append(serve_trace(engine, trace, step_seconds=0.2).tokens)
            assert len(tokens[-1]) == 200
    assert tokens[0] == tokens[1]
    assert engine.drafts.accepted > 0


def test_sampled_traffic_speculated_gets_the_same_tokens():
    """Each request draws with its own seed at every output token, drafted or not."""
    with LLMEngine.tiny(engine_config(num_blocks=20)) as engine:
        expected = serve(engine, TRAFFIC)
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        config = engine_config(mode, num_blocks=20, num_speculative_tokens=2)
        for abort in (None, (3, 6)):
            with LLMEngine.tiny(config) as engine:
                engine.capture()
                served = serve(engine, TRAFFIC, abort=abort)
                check_same_tokens(served, expected)
                assert served.num_preempted > 0


TWO = SamplingParams(max_tokens=3, temperature=1.0)


def test_sampled_tokens_with_drafts_keep_their_distribution():
    """Chi-square of (first, second) tokens after a prompt whose drafts are often accepted."""
    start = [1, 2, 3, 1, 2, 3, 1, 2]
    config = trace_config("FULL_AND_PIECEWISE", 2)
    joint = torch.zeros(8, 8, dtype=torch.float64)
    with LLMEngine.with_random_weights(REPEATS, trace_config("NONE", 0)) as engine:
        logits = record_logits(engine)

        def probabilities(tokens: list[int]) -> torch.Tensor:
            logits.clear()
            engine.generate(tokens, SamplingParams(max_tokens=1))
            return next(iter(logits.values()))[0].softmax(-1)

        # The first token comes of the prompt; the second and third of a step with drafts.
        first = probabilities(start)
        for a in range(8):
            second = probabilities([*start, a])
            for b in range(8):
                joint[b] += first[a] * second[b] * probabilities([*start, a, b])
    count = 4000
    observed = torch.zeros(8, 8, dtype=torch.float64)
    with LLMEngine.with_random_weights(REPEATS, config) as engine:
        engine.capture()
        params = [replace(TWO, seed=seed) for seed in range(count)]
        for _, b, c in engine.generate([start] * count, params):
            observed[b, c] += 1
        assert 0.05 < engine.drafts.acceptance_rate < 0.8
    assert torch.allclose(joint.sum(), torch.ones((), dtype=torch.float64))
    statistic = ((observed - count * joint) ** 2 / (count * joint)).sum()
    # 63 degrees of freedom: 103.4 is the quantile of 0.999.
    assert statistic < 103.4


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_drafts_behind_the_context_change_nothing(mode):
    """At its end a request has drafts at positions that the model does not have; every step is
    compared with the unpadded batch, all of its rows.
    """
    model = replace(REPEATS, max_position_embeddings=11)
    asked, params = [prompt(0, 8), prompt(1, 5)], SamplingParams(max_tokens=3)
    found = []
    for drafts, verify_every in ((0, None), (4, 1)):
        events = []
        config = RuntimeConfig(
            compilation=CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=[5, 10]),
            max_num_seqs=2,
            max_num_batched_tokens=10,
            num_speculative_tokens=drafts,
            verify_every=verify_every,
        )
        config = EngineConfig(runtime=config, block_size=8, num_blocks=65, dtype="float64")
        with LLMEngine.with_random_weights(model, config, observer=events.append) as engine:
            engine.capture()
            found.append(engine.generate(asked, params))
            assert not engine.runtime.report().missing
    assert found[0] == found[1]
    assert all(event.equal for event in events if isinstance(event, PaddingVerified))
    assert any(isinstance(event, PaddingVerified) for event in events)


def test_every_query_length_and_size_is_reached_by_a_batch():
    """Uniform and mixed batches of every size, each served by its smallest key."""
    for q in (1, 2, 3, 5):
        events = []
        config = replace(
            trace_config("FULL_AND_PIECEWISE", q - 1),
            runtime=RuntimeConfig(
                max_num_seqs=6,
                max_num_batched_tokens=32,
                num_speculative_tokens=q - 1,
            ),
        )
        with LLMEngine.with_random_weights(REPEATS, config, observer=events.append) as engine:
            plan = engine.runtime.plan
            engine.capture()
            events.clear()
            for number in range(1, 7):
                engine.generate([prompt(n, 1 + n) for n in range(number)], TWO)
            for length in range(1, 33):
                engine.generate([prompt(length, length)], SamplingParams(max_tokens=1))
            engine.add_request(prompt(0, 1), SamplingParams(max_tokens=1))
            engine.step(exclude={RuntimeMode.FULL})
            steps = [event for event in events if isinstance(event, Replayed | RanEager)]
            for step in steps:
                is_above = not step.uniform and step.num_tokens > plan.max_capture_size
                assert isinstance(step, RanEager) == is_above, step
            steps = [step for step in steps if isinstance(step, Replayed)]
            by_mode = {
                mode: {step.num_padded_tokens for step in steps if step.mode is mode}
                for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE)
            }
            assert by_mode[RuntimeMode.FULL] == set(plan.decode_capture_sizes)
            # A request with one token left computes q, so with drafts no batch has a single token.
            sizes = set(plan.capture_sizes) - ({1} if q > 1 else set())
            assert by_mode[RuntimeMode.PIECEWISE] == sizes
            assert {step.num_reqs for step in steps if step.uniform} == set(range(1, 7))


def test_speculation_and_adapters_serve_one_batch():
    load = [(prompt(n, 4), which) for n, which in enumerate([None, "0", "1", "1", "0"])]
    prompts, loras = zip(*load, strict=True)
    params = SamplingParams(max_tokens=10)
    tokens = []
    for mode, k in (("NONE", 0), ("FULL_AND_PIECEWISE", 2)):
        config = trace_config(mode, k)
        config = replace(config, runtime=replace(config.runtime, max_loras=2))
        with LLMEngine.with_random_weights(REPEATS, config) as engine:
            for number in range(2):
                engine.add_lora(str(number), seed=number)
            engine.capture()
            tokens.append(engine.generate(list(prompts), params, loras=loras))
    assert tokens[0] == tokens[1]


def test_the_margin_of_a_choice_is_the_same_with_drafts():
    margins = []
    for k in (0, 2):
        with LLMEngine.with_random_weights(REPEATS, trace_config("NONE", k)) as engine:
            margins.append([engine.top2_margin(prompt(1, n)) for n in (1, 2, 3, 9)])
    assert margins[0] == pytest.approx(margins[1])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"overlap": True}, "overlap"),
        ({"max_model_len": 2}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens"),
    ],
)
def test_speculation_that_cannot_be_is_refused(changes, named):
    config = trace_config("NONE", 2)
    k = changes.pop("num_speculative_tokens", 2)
    config = replace(config, **changes, runtime=replace(config.runtime, num_speculative_tokens=k))
    with pytest.raises(EngineConfigError, match=named):
        LLMEngine.tiny(config)

"""Modes, drafts, adapters, support levels and exclusions together: every pair of them, served."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llm_adapters import merge
from llm_traffic import prompt
from test_llm_support_levels import stand_in

from graphrt import (
    AttentionSupport,
    CompilationConfig,
    CUDAGraphDispatcher,
    Facts,
    RuntimeConfig,
    RuntimeMode,
    resolve,
)
from graphrt.errors import ConfigError
from graphrt.events import RanEager, Replayed
from graphrt_llm import (
    EngineConfig,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    random_lora,
    register_attention_backend,
)

REPLAY = runpy.run_path(str(Path(__file__).parents[1] / "pure" / "golden" / "replay.py"))
CASES: list[dict[str, Any]] = REPLAY["pairwise_cases"]()
PARAMS = SamplingParams(max_tokens=5)
# Few tokens, so that some drafts are accepted.
MODEL = replace(ModelConfig.tiny(), vocab_size=8, num_layers=1)
LOAD = [([t % 8 for t in prompt(n, 1 + 2 * n)], (None, 0, 1, 2)[n % 4]) for n in range(5)]


@cache
def register() -> None:
    for level in AttentionSupport:
        made = stand_in(level)
        register_attention_backend(
            f"level {level.name}", lambda cache, limits, made=made: made(cache)
        )


def config_of(case: dict[str, Any], **changes: Any) -> EngineConfig:
    return EngineConfig(
        runtime=RuntimeConfig(
            compilation=CompilationConfig(
                cudagraph_mode=case["mode"],
                cudagraph_capture_sizes=[7, 16],
                cudagraph_specialize_lora=case["specialize"],
            ),
            max_num_seqs=4,
            max_num_batched_tokens=20,
            num_speculative_tokens=case["q"] - 1,
            lora_capture=case["lora_capture"],
            **{"max_loras": 3, **changes},
        ),
        max_model_len=24,
        block_size=4,
        device="simulated",
        dtype="float64",
        overlap=False,
        attention_backend=f"level {case['support']}",
    )


@cache
def expected(index: int) -> list[int]:
    register()
    tokens, which = LOAD[index]
    plain = {**CASES[0], "mode": "PIECEWISE", "q": 1}
    with LLMEngine.with_random_weights(MODEL, config_of(plain, max_loras=0)) as engine:
        if which is not None:
            merge(engine, random_lora(MODEL, seed=which))
        return engine.generate(tokens, PARAMS)


def resolution(case: dict[str, Any]) -> tuple[object, ...] | None:
    """What decides the keys of ``case``; None where it is an error."""
    facts = Facts(attention_support=AttentionSupport[case["support"]])
    try:
        plan = resolve(config_of(case).runtime, facts).plan
    except ConfigError:
        return None
    return plan.cudagraph_mode, case["q"], plan.decode_capture_sizes, plan.lora_counts


def named(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_pairwise_case_serves_what_it_decides(case):
    serves_what_it_decides(case, LOAD)


def serves_what_it_decides(case: dict[str, Any], load: list[Any], **changes: Any) -> None:
    register()
    events = []
    if resolution(case) is None:
        assert (case["mode"], case["support"]) == ("FULL", "NEVER")
        with pytest.raises(ConfigError):
            LLMEngine.with_random_weights(MODEL, config_of(case))
        return
    exclude = frozenset(RuntimeMode[name] for name in case["exclude"])
    config = config_of(case, **changes)
    with LLMEngine.with_random_weights(MODEL, config, observer=events.append) as engine:
        for number in range(3):
            engine.add_lora(str(number), seed=number)
        engine.capture()
        dispatcher = CUDAGraphDispatcher(engine.runtime.plan)
        events.clear()
        tokens = {str(n): [] for n in range(len(load))}
        for n, (prompt_ids, which) in enumerate(load):
            lora = None if which is None else str(which)
            engine.add_request(prompt_ids, PARAMS, str(n), lora=lora)
        while engine.has_unfinished():
            result = engine.step(exclude=exclude)
            for output in result.outputs:
                tokens[output.request_id] += output.new_token_ids
            step = next(e for e in reversed(events) if isinstance(e, Replayed | RanEager))
            assert result.decision == dispatcher.dispatch(
                result.num_tokens, result.uniform, step.num_active_loras, exclude
            )
    assert tokens == {str(n): expected(n) for n in range(len(load))}

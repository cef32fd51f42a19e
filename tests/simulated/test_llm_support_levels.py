"""Attention support in earnest: which graphs a backend of each level gets, and what is excluded."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import ClassVar

import pytest
from llm_traffic import MODES, engine_config, prompt

from graphrt import AttentionSupport, BatchDescriptor, Reason, RuntimeMode
from graphrt.errors import ConfigError
from graphrt.events import RanEager, Replayed
from graphrt_llm import EngineConfig, LLMEngine, SamplingParams, register_attention_backend
from graphrt_llm.attention.sdpa import SdpaAttention

PARAMS = SamplingParams(max_tokens=6)
PROMPTS = [prompt(n, 3 + n) for n in range(3)]
FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE


def config_of(mode: str, q: int, backend: str = "auto") -> EngineConfig:
    config = engine_config(mode, num_speculative_tokens=q - 1)
    compilation = replace(config.runtime.compilation, cudagraph_capture_sizes=[4, 8, 12])
    runtime = replace(config.runtime, compilation=compilation)
    return replace(config, runtime=runtime, attention_backend=backend)


def stand_in(level: AttentionSupport) -> type[SdpaAttention]:
    class StandIn(SdpaAttention):
        """The formulas of ``sdpa``, which refuses the keys that its level does not permit."""

        support: ClassVar[AttentionSupport] = level

        def prepare(self, key: BatchDescriptor, step_info) -> None:
            if key.num_reqs is not None:
                assert level is not AttentionSupport.NEVER, key
                if level is not AttentionSupport.ALWAYS:
                    assert key.uniform, key
                if level is AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE:
                    assert key.num_tokens == key.num_reqs, key
            super().prepare(key, step_info)

    return StandIn


@pytest.fixture(scope="module", autouse=True)
def backends() -> None:
    for level in AttentionSupport:
        made = stand_in(level)
        register_attention_backend(
            f"support {level.name}", lambda cache, limits, made=made: made(cache)
        )


def expected_mode(mode: str, level: str, q: int) -> str:
    """What the rules say, written out."""
    if mode == "FULL" and level != "ALWAYS":
        mode = "FULL_AND_PIECEWISE"
    is_decode_full = mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    enough = {"ALWAYS", "UNIFORM_BATCH"} | ({"UNIFORM_SINGLE_TOKEN_DECODE"} if q == 1 else set())
    return "PIECEWISE" if is_decode_full and level not in enough else mode


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLMEngine.tiny(engine_config()) as engine:
        return engine.generate(PROMPTS, PARAMS)


LEVELS = [level.name for level in AttentionSupport]


@pytest.mark.parametrize(("level", "q"), list(product(LEVELS, (1, 3))))
def test_a_support_level_decides_the_modes_steps_run(level, q, expected):
    for mode in MODES[1:]:
        events = []
        config = config_of(mode, q, f"support {level}")
        if (mode, level) == ("FULL", "NEVER"):
            with pytest.raises(ConfigError, match="NEVER"):
                LLMEngine.tiny(config)
            continue
        with LLMEngine.tiny(config, observer=events.append) as engine:
            found = engine.runtime.plan.cudagraph_mode.name
            assert found == expected_mode(mode, level, q)
            changes = [
                a for a in engine.runtime.resolved.adjustments if a.field == "cudagraph_mode"
            ]
            assert bool(changes) == (found != mode)
            assert all(level in change.reason for change in changes)
            report = str(engine.capture())
            assert all(change.reason in report for change in changes)
            assert engine.generate(PROMPTS, PARAMS) == expected
            steps = [event for event in events if isinstance(event, Replayed | RanEager)]
            plan = engine.runtime.plan.cudagraph_mode
            for step in steps:
                ran = step.mode if isinstance(step, Replayed) else RuntimeMode.NONE
                wanted = plan.decode_mode() if step.uniform else plan.mixed_mode()
                assert ran is wanted, step


@pytest.mark.parametrize("q", [1, 2])
def test_a_step_runs_none_of_the_modes_it_excludes(q, expected):
    events = []
    config = config_of("FULL_AND_PIECEWISE", q)
    with LLMEngine.tiny(config, observer=events.append) as engine:
        engine.capture()
        events.clear()
        for tokens in PROMPTS:
            engine.add_request(tokens, PARAMS)
        tokens = {f"request-{n}": [] for n in range(3)}
        sets = [frozenset(), frozenset({FULL}), frozenset({FULL, PIECEWISE})]
        asked = []
        while engine.has_unfinished():
            asked.append(sets[len(asked) % 3])
            for output in engine.step(exclude=asked[-1]).outputs:
                tokens[output.request_id] += output.new_token_ids
        assert list(tokens.values()) == expected
        steps = [event for event in events if isinstance(event, Replayed | RanEager)]
        for step, exclude in zip(steps, asked, strict=True):
            if len(exclude) == 2:
                assert isinstance(step, RanEager)
                assert step.reason is Reason.EXCLUDED
            else:
                assert isinstance(step, Replayed)
                assert step.mode is (FULL if step.uniform and not exclude else PIECEWISE)


def test_cascade_attention_keeps_its_steps_out_of_full_graphs(expected):
    class Cascade(SdpaAttention):
        """Stands for a backend that shares a common prefix, once requests are long enough."""

        def excludes(self, step_info):
            return frozenset({FULL}) if min(step_info.seq_lens) >= 6 else frozenset()

    register_attention_backend("cascade", lambda cache, limits: Cascade(cache))
    events = []
    config = config_of("FULL_AND_PIECEWISE", 1, "cascade")
    with LLMEngine.tiny(config, observer=events.append) as engine:
        engine.capture()
        assert engine.generate(PROMPTS, PARAMS) == expected
        modes = [event.mode for event in events if isinstance(event, Replayed) and event.uniform]
        assert set(modes) == {FULL, PIECEWISE}
        assert modes == sorted(modes, reverse=True)

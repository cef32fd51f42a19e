"""Resolution as a whole: pure, idempotent, and strict when it is asked to be."""

from __future__ import annotations

import pickle

import config_strategies
import pytest
from hypothesis import given

from graphrt.batch import CUDAGraphMode
from graphrt.config import CompilationConfig, Facts, RuntimeConfig, resolve
from graphrt.errors import ConfigError


@given(config=config_strategies.configs(), facts=config_strategies.facts)
def test_resolving_a_resolved_config_changes_nothing(config: RuntimeConfig, facts: Facts) -> None:
    try:
        first = resolve(config, facts)
    except ConfigError:
        return
    again = resolve(first.config, facts)
    assert again.plan == first.plan
    assert again.adjustments == ()
    assert again.config == first.config
    assert resolve(config, facts) == first


@given(config=config_strategies.configs(), facts=config_strategies.facts)
def test_strict_accepts_exactly_what_loses_no_explicit_wish(
    config: RuntimeConfig, facts: Facts
) -> None:
    try:
        adjustments = resolve(config, facts).adjustments
    except ConfigError:
        return
    explicit = [
        item
        for item in adjustments
        if item.field != "cudagraph_mode" or config.compilation.cudagraph_mode is not None
    ]
    if not explicit:
        assert resolve(config, facts, strict=True) == resolve(config, facts)
        return
    with pytest.raises(ConfigError) as caught:
        resolve(config, facts, strict=True)
    assert [problem.field for problem in caught.value.problems] == [item.field for item in explicit]


def test_a_default_that_is_lowered_is_no_error_in_strict_resolution() -> None:
    facts = Facts(has_break_points=False)
    resolved = resolve(RuntimeConfig(), facts, strict=True)
    assert resolved.plan.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert len(resolved.adjustments) == 1


def test_speculation_narrows_each_and_says_so() -> None:
    config = RuntimeConfig(max_loras=4, lora_capture="each", num_speculative_tokens=1)
    resolved = resolve(config, Facts())
    assert [item[:3] for item in resolved.adjustments] == [("lora_capture", "each", "max_only")]
    assert resolved.config.lora_capture == "max_only"


def test_the_config_is_never_written() -> None:
    config = RuntimeConfig(
        compilation=CompilationConfig(cudagraph_capture_sizes=(1, 64)), max_num_batched_tokens=8
    )
    before = repr(config)
    resolve(config, Facts(attention_support="NEVER"))  # type: ignore[arg-type]
    assert repr(config) == before


def test_a_plan_is_frozen_and_can_be_sent_to_another_process() -> None:
    plan = resolve(RuntimeConfig(max_num_seqs=4, max_loras=2), Facts()).plan
    with pytest.raises(AttributeError):
        plan.query_len = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(plan)) == plan

"""Resolution as a whole: pure, idempotent, and strict when it is asked to be."""

from __future__ import annotations

import pickle

import config_strategies
import pytest
from hypothesis import given

from graphrt import CUDAGraphMode
from graphrt.config import CompilationConfig, Facts, Resolved, RuntimeConfig, resolve
from graphrt.errors import ConfigError

Case = tuple[RuntimeConfig, Facts, Resolved]


cases = config_strategies.resolutions() | config_strategies.compile_resolutions()


@given(case=cases)
def test_resolving_a_resolved_config_changes_nothing(case: Case) -> None:
    config, facts, first = case
    again = resolve(first.config, facts)
    assert (again.plan, again.compile) == (first.plan, first.compile)
    # Decode sizes follow from other options: no config contains them.
    decode = [item.effective for item in first.adjustments if item.field == "decode_capture_sizes"]
    assert [item.effective for item in again.adjustments] == decode
    assert again.config == first.config
    assert resolve(config, facts) == first


@given(case=cases)
def test_strict_raises_exactly_if_an_asked_option_changes(case: Case) -> None:
    config, facts, resolved = case
    explicit = [
        item
        for item in resolved.adjustments
        if item.asked is not None
        and (item.field != "cudagraph_mode" or config.compilation.cudagraph_mode is not None)
        and item.field != "level"
    ]
    if not explicit:
        assert resolve(config, facts, strict=True) == resolved
        return
    with pytest.raises(ConfigError) as caught:
        resolve(config, facts, strict=True)
    assert [problem.field for problem in caught.value.problems] == [item.field for item in explicit]


def test_strict_accepts_a_lowered_default() -> None:
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


def test_resolve_without_facts_limits_nothing() -> None:
    assert resolve(RuntimeConfig()) == resolve(RuntimeConfig(), Facts())


def test_resolving_a_mapping_says_what_is_wanted() -> None:
    with pytest.raises(ConfigError, match="config: a RuntimeConfig"):
        resolve({"max_num_seqs": 4})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="facts: a Facts"):
        resolve(RuntimeConfig(), {"tp_size": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config: a RuntimeConfig"):
        resolve(10**5000)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="strict: a bool"):
        resolve(RuntimeConfig(), strict="no")  # type: ignore[arg-type]

"""Options and facts: strict, frozen, and everything wrong with one of them in one error."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from graphrt import CUDAGraphMode
from graphrt.config import (
    AttentionSupport,
    CompilationConfig,
    CompilationLevel,
    Facts,
    ModeLimit,
    RuntimeConfig,
)
from graphrt.errors import ConfigError


class Compared:
    """As arrays are, it is not simply equal to something or not."""

    def __eq__(self, _: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


def problems_of(kind: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        kind(*args, **kwargs)
    return {problem.field: problem.accepted for problem in caught.value.problems}


def test_defaults_are_the_documented_ones() -> None:
    config = RuntimeConfig()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 8192)
    assert (config.max_loras, config.lora_capture) == (0, "powers_of_two")
    assert config.num_speculative_tokens == 0
    assert not config.interactivity
    assert (config.on_miss, config.on_capture_error) == ("eager", "raise")
    assert (config.verify_first_replay, config.verify_every) == (True, None)
    assert config.stale_check == "identity"
    assert (config.max_graph_bytes, config.max_graphs) == (None, None)
    inner = config.compilation
    assert (inner.level, inner.cudagraph_mode, inner.cudagraph_capture_sizes) == (None, None, None)
    assert (inner.max_cudagraph_capture_size, inner.compile_sizes) == (None, None)
    assert (inner.cudagraph_specialize_lora, inner.cudagraph_num_of_warmups) == (True, 1)


def test_names_are_accepted_in_any_case() -> None:
    named: Any = CompilationConfig(cudagraph_mode="Full", level="piecewise")  # type: ignore[arg-type]
    assert named.cudagraph_mode is CUDAGraphMode.FULL
    assert named.level is CompilationLevel.PIECEWISE
    assert CompilationConfig(level=0).level is CompilationLevel.NO_COMPILATION  # type: ignore[arg-type]
    facts = Facts(attention_support="uniform_batch")  # type: ignore[arg-type]
    assert facts.attention_support is AttentionSupport.UNIFORM_BATCH


def test_sizes_are_stored_sorted_and_once() -> None:
    found = CompilationConfig(cudagraph_capture_sizes=[8, 1, 8, 4])  # type: ignore[arg-type]
    assert found.cudagraph_capture_sizes == (1, 4, 8)


@pytest.mark.parametrize("given", ["cudagraph_capture_sizes", ["cudagraph_capture_sizes"]])
def test_compile_sizes_may_name_the_captured_ones(given: Any) -> None:
    assert CompilationConfig(compile_sizes=given).compile_sizes == ("cudagraph_capture_sizes",)


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        (CompilationConfig, "level", [4, True, 2.0, "3"]),
        (CompilationConfig, "cudagraph_mode", ["FULL_ONLY", 2]),
        (CompilationConfig, "cudagraph_capture_sizes", [8, "8"]),
        (CompilationConfig, "max_cudagraph_capture_size", [0, 8.0]),
        (CompilationConfig, "splitting_ops", [["op"], ["a::b::c"], [""], ["a b.c"], "a::b"]),
        (CompilationConfig, "compile_sizes", [[0], [True], "sizes", 8]),
        (CompilationConfig, "cudagraph_specialize_lora", [1]),
        (CompilationConfig, "cudagraph_num_of_warmups", [-1]),
        (CompilationConfig, "backend", [Compared(), 0]),
        (CompilationConfig, "cache_dir", [False, 0, [], Compared()]),
        (RuntimeConfig, "max_num_seqs", [0, True]),
        (RuntimeConfig, "max_num_batched_tokens", [-1, None]),
        (RuntimeConfig, "num_speculative_tokens", [-1]),
        (RuntimeConfig, "max_loras", [1.0]),
        (RuntimeConfig, "lora_capture", ["all"]),
        (RuntimeConfig, "on_miss", ["raise"]),
        (RuntimeConfig, "verify_every", [0, 2**63, 10**5000]),
        (RuntimeConfig, "stale_check", ["IDENTITY"]),
        (RuntimeConfig, "on_capture_error", ["eager"]),
        (RuntimeConfig, "max_graph_bytes", [0]),
        (RuntimeConfig, "max_graphs", ["3"]),
        (RuntimeConfig, "interactivity", ["yes"]),
        (RuntimeConfig, "compilation", [3]),
        (Facts, "attention_support", ["SOMETIMES", 2]),
        (Facts, "tp_size", [0, 2**63, 10**5000]),
    ],
)
def test_wrong_option_is_named_with_what_is_accepted(
    kind: Any, field: str, values: list[Any]
) -> None:
    for value in values:
        problems = problems_of(kind, **{field: value})
        assert list(problems) == [field]
        assert problems[field]


def test_all_problems_of_one_construction_are_reported_together() -> None:
    problems = problems_of(
        RuntimeConfig,
        max_loras=-1,
        max_num_seq=4,
        compilation={"levle": 3, "cudagraph_capture_sizes": [1, True, -3]},
    )
    assert set(problems) == {
        "max_loras",
        "max_num_seq",
        "compilation.levle",
        "compilation.cudagraph_capture_sizes[1]",
        "compilation.cudagraph_capture_sizes[2]",
    }
    assert "nearest is 'max_num_seqs'" in problems["max_num_seq"]
    assert "nearest is 'level'" in problems["compilation.levle"]


def test_the_message_has_a_line_for_each_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        CompilationConfig(level=9, cudagraph_num_of_warmups=-1)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "2 problems" in text
    assert "level: 9" in text
    assert "cudagraph_num_of_warmups: -1" in text
    assert caught.value.__cause__ is not None


def test_configs_take_keywords_only() -> None:
    assert problems_of(RuntimeConfig, 3) == {"argument 0": "keywords only"}


def test_what_has_no_default_must_be_given() -> None:
    assert problems_of(ModeLimit, mode="NONE") == {"reason": "a value; it has no default"}
    assert list(problems_of(ModeLimit, mode="NONE", reason="")) == ["reason"]


def test_configs_are_frozen_and_can_be_copied_with_a_change() -> None:
    config = RuntimeConfig(max_num_seqs=8)
    with pytest.raises(AttributeError):
        config.max_num_seqs = 9  # type: ignore[misc]
    assert replace(config, max_num_seqs=9) == RuntimeConfig(max_num_seqs=9)
    with pytest.raises(ConfigError):
        replace(config, max_num_seqs=0)
    assert pickle.loads(pickle.dumps(config)) == config


def test_attention_groups_are_copied_and_read_only() -> None:
    given = {"sliding": AttentionSupport.UNIFORM_BATCH}
    facts = Facts(attention_groups=given)
    given["full"] = AttentionSupport.NEVER
    assert dict(facts.attention_groups) == {"sliding": AttentionSupport.UNIFORM_BATCH}
    with pytest.raises(TypeError):
        facts.attention_groups["full"] = AttentionSupport.NEVER  # type: ignore[index]


def test_the_least_group_counts_and_is_named() -> None:
    facts = Facts(attention_groups={"full": "ALWAYS", "cross": "NEVER"})  # type: ignore[dict-item]
    support, who = facts.least_support()
    assert support is AttentionSupport.NEVER
    assert "cross" in who
    assert list(problems_of(Facts, attention_groups={"full": "SOMETIMES"})) == [
        "attention_groups.full"
    ]


def test_support_is_ordered() -> None:
    assert list(AttentionSupport) == sorted(AttentionSupport)
    assert min(AttentionSupport) is AttentionSupport.NEVER
    assert max(AttentionSupport) is AttentionSupport.ALWAYS

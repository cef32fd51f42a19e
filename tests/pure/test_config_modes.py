"""Mode resolution: every step, its reason, and that less support never gives more graph."""

from __future__ import annotations

from itertools import product
from typing import Any

import config_strategies
import pytest
from hypothesis import given, strategies as st

from graphrt import CUDAGraphMode
from graphrt.config import (
    AttentionSupport,
    CompilationConfig,
    Facts,
    ModeLimit,
    Plan,
    RuntimeConfig,
    resolve,
)
from graphrt.errors import ConfigError

FULL = CUDAGraphMode.FULL
PIECEWISE = CUDAGraphMode.PIECEWISE
DECODE = CUDAGraphMode.FULL_DECODE_ONLY
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
NONE = CUDAGraphMode.NONE
ALWAYS = AttentionSupport.ALWAYS
UNIFORM = AttentionSupport.UNIFORM_BATCH
SINGLE = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
NEVER = AttentionSupport.NEVER


def config(mode: CUDAGraphMode | None, q: int = 1, level: Any = None) -> RuntimeConfig:
    options = CompilationConfig(cudagraph_mode=mode, level=level)
    return RuntimeConfig(compilation=options, num_speculative_tokens=q - 1)


def effective(mode: CUDAGraphMode | None, q: int = 1, level: Any = None, **facts: Any) -> Any:
    return resolve(config(mode, q, level), Facts(**facts)).plan.cudagraph_mode


@pytest.mark.parametrize("level", [None, 0, 1, 2, 3])
def test_the_default_is_full_and_piecewise_at_every_level(level: int | None) -> None:
    assert effective(None, level=level, piecewise_available=True) is BOTH
    if level in (None, 0, 3):
        assert effective(None, level=level) is BOTH


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_what_is_possible_is_not_touched(mode: CUDAGraphMode) -> None:
    resolved = resolve(config(mode), Facts())
    assert resolved.plan.cudagraph_mode is mode
    assert resolved.adjustments == ()


@pytest.mark.parametrize(
    ("support", "piecewise", "expected"),
    [
        (UNIFORM, True, BOTH),
        (SINGLE, True, BOTH),
        (UNIFORM, False, DECODE),
        (SINGLE, False, DECODE),
    ],
)
def test_full_without_full_support_keeps_full_decode(
    support: AttentionSupport, piecewise: bool, expected: CUDAGraphMode
) -> None:
    assert effective(FULL, attention_support=support, piecewise_available=piecewise) is expected


def test_full_without_attention_support_names_the_group() -> None:
    groups = {"cross": NEVER, "self": ALWAYS}
    with pytest.raises(ConfigError) as caught:
        resolve(config(FULL), Facts(attention_groups=groups))
    (problem,) = caught.value.problems
    assert problem.field == "cudagraph_mode"
    assert "'cross'" in problem.found


@pytest.mark.parametrize("mode", [DECODE, BOTH])
def test_full_decode_without_any_support_becomes_piecewise(mode: CUDAGraphMode) -> None:
    assert effective(mode, attention_support=NEVER) is PIECEWISE
    assert effective(mode, attention_support=NEVER, piecewise_available=False) is NONE


def test_speculative_decode_needs_uniform_batches() -> None:
    for mode in (FULL, DECODE, BOTH):
        assert effective(mode, q=3, attention_support=SINGLE) is PIECEWISE
        assert effective(mode, q=3, attention_support=SINGLE, piecewise_available=False) is NONE
    assert effective(BOTH, q=3, attention_support=UNIFORM) is BOTH
    assert effective(BOTH, q=1, attention_support=SINGLE) is BOTH


def test_what_cannot_be_cut_runs_without_pieces() -> None:
    assert effective(PIECEWISE, has_break_points=False) is NONE
    assert effective(BOTH, has_break_points=False) is DECODE
    assert effective(PIECEWISE, level=3, splitting="other") is NONE
    assert effective(PIECEWISE, level=3, has_break_points=False) is PIECEWISE


def test_one_compiled_piece_that_holds_attention_is_a_full_graph() -> None:
    assert effective(PIECEWISE, level=3, splitting="none") is FULL
    assert effective(BOTH, level=3, splitting="none") is FULL
    assert effective(BOTH, level=3, splitting="none", attention_support=UNIFORM) is DECODE
    assert effective(BOTH, level=0, splitting="none") is BOTH
    with pytest.raises(ConfigError):
        effective(PIECEWISE, level=3, splitting="none", attention_support=NEVER)


def cut(asked: list[str] | None, known: tuple[str, ...], mode: CUDAGraphMode = BOTH) -> Plan:
    compilation = CompilationConfig(level=3, splitting_ops=asked, cudagraph_mode=mode)  # type: ignore[arg-type]
    return resolve(RuntimeConfig(compilation=compilation), Facts(attention_ops=known)).plan


def test_splitting_ops_decide_which_graphs_level_3_has() -> None:
    attention = ("llm::attention",)
    for asked, known, names, mode in (
        (None, attention, attention, BOTH),
        (["llm::attention", "a.b", "a.b"], attention, ("llm::attention", "a.b"), BOTH),
        (["a.b"], (), ("a.b",), BOTH),
        (["a.b"], attention, ("a.b",), DECODE),
        ([], attention, (), FULL),
        (None, (), (), BOTH),
    ):
        plan = cut(asked, known)
        assert (plan.splitting_ops, plan.cudagraph_mode) == (names, mode), (asked, known)


def test_splitting_ops_ask_for_level_3() -> None:
    def level(**asked: Any) -> int:
        config = RuntimeConfig(compilation=CompilationConfig(splitting_ops=["a::b"], **asked))  # type: ignore[arg-type]
        return resolve(config).plan.level

    assert level() == 3
    for lower in (0, 1, 2):
        with pytest.raises(ConfigError, match="splitting_ops: level 3"):
            level(level=lower)


def limit(mode: CUDAGraphMode) -> ModeLimit:
    return ModeLimit(mode=mode, reason=f"only {mode.name} works here")


@pytest.mark.parametrize("asked", [mode for mode in CUDAGraphMode if mode is not NONE])
def test_a_limit_permits_one_mode_and_none(asked: CUDAGraphMode) -> None:
    for only in (DECODE, PIECEWISE, NONE):
        assert effective(asked, mode_limits=[limit(only)]) is only
    assert effective(NONE, mode_limits=[limit(DECODE)]) is NONE


def test_limits_that_contradict_each_other_leave_nothing() -> None:
    assert effective(BOTH, mode_limits=[limit(DECODE), limit(PIECEWISE)]) is NONE
    assert effective(PIECEWISE, mode_limits=[limit(PIECEWISE), limit(DECODE)]) is NONE


def test_support_below_what_a_limit_permits_leaves_nothing() -> None:
    assert effective(FULL, mode_limits=[limit(DECODE)], attention_support=NEVER) is NONE


def test_every_step_is_an_adjustment_with_its_reason() -> None:
    facts = Facts(attention_support=SINGLE)
    steps = resolve(config(FULL, q=2), facts).adjustments
    assert [(step.field, step.asked, step.effective) for step in steps] == [
        ("cudagraph_mode", FULL, BOTH),
        ("cudagraph_mode", BOTH, PIECEWISE),
    ]
    assert all("UNIFORM_SINGLE_TOKEN_DECODE" in step.reason for step in steps)


def graph_of(
    mode: CUDAGraphMode, q: int, level: Any, support: AttentionSupport, **rest: Any
) -> Any:
    try:
        found = effective(mode, q, level, attention_support=support, **rest)
    except ConfigError:
        return (-1, -1)
    return found.value


@given(mode=config_strategies.modes, limits=config_strategies.limits, breaks=st.booleans())
def test_less_support_never_gives_more_graph(
    mode: CUDAGraphMode, limits: list[ModeLimit], breaks: bool
) -> None:
    for q, level, splitting in product((1, 3), (0, 3), ("attention", "other", "none")):
        facts = {"has_break_points": breaks, "splitting": splitting, "mode_limits": limits}
        graphs = [graph_of(mode, q, level, support, **facts) for support in AttentionSupport]
        assert graphs == sorted(graphs)

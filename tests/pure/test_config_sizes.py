"""Capture sizes: both lists, both tables, and what of a user's numbers is changed."""

from __future__ import annotations

from typing import Any

import config_strategies
import pytest
from hypothesis import given, strategies as st

from graphrt import CUDAGraphMode
from graphrt.config import CompilationConfig, Facts, Plan, Resolved, RuntimeConfig, resolve
from graphrt.errors import ConfigError

COMPILATION = set(CompilationConfig.__dataclass_fields__)


def resolved(capability: tuple[int, int] | None = None, **asked: Any) -> Resolved:
    inner = {name: asked.pop(name) for name in tuple(asked) if name in COMPILATION}
    config = RuntimeConfig(compilation=CompilationConfig(**inner), **asked)
    return resolve(config, Facts(compute_capability=capability))


def plan(capability: tuple[int, int] | None = None, **asked: Any) -> Plan:
    return resolved(capability, **asked).plan


def problem_of(**asked: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(**asked)
    (problem,) = caught.value.problems
    return problem.field


def test_the_default_ladder() -> None:
    sizes = plan().capture_sizes
    assert sizes == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def test_compute_capability_10_doubles_the_default_maximum() -> None:
    assert plan((10, 0), max_num_seqs=512).max_capture_size == 1024
    assert plan((9, 0), max_num_seqs=512).max_capture_size == 512
    assert plan((12, 0), max_num_seqs=512).max_capture_size == 512
    assert plan((10, 0), max_num_seqs=100).max_capture_size == 200


def test_batch_limit_and_request_limit_are_captured_too() -> None:
    assert plan(max_num_batched_tokens=100).capture_sizes[-2:] == (96, 100)
    assert 37 in plan(max_num_seqs=37).capture_sizes
    assert 37 not in plan(max_num_seqs=37, max_cudagraph_capture_size=64).capture_sizes
    assert 37 not in plan(max_num_seqs=37, num_speculative_tokens=1).capture_sizes


def test_interactivity_adds_every_small_size() -> None:
    assert plan(interactivity=True).capture_sizes[:33] == (*range(1, 33), 40)
    assert plan(interactivity=True, max_num_seqs=5).capture_sizes == tuple(range(1, 11))
    decode = plan(interactivity=True, num_speculative_tokens=2).decode_capture_sizes
    assert decode[:12] == (*range(3, 34, 3), 48)


def test_sizes_above_the_batch_limit_are_adjusted() -> None:
    found = resolved(cudagraph_capture_sizes=[1, 64, 128], max_num_batched_tokens=64)
    assert found.plan.capture_sizes == (1, 64)
    (item,) = found.adjustments
    assert (item.field, item.asked, item.effective) == (
        "cudagraph_capture_sizes",
        (1, 64, 128),
        (1, 64),
    )


def test_maximum_above_the_batch_limit_is_adjusted() -> None:
    found = resolved(max_cudagraph_capture_size=128, max_num_batched_tokens=60)
    assert found.plan.max_capture_size == 60
    assert [item[:3] for item in found.adjustments] == [("max_cudagraph_capture_size", 128, 60)]


def test_sizes_that_are_not_possible_are_errors() -> None:
    assert problem_of(cudagraph_capture_sizes=[]) == "cudagraph_capture_sizes"
    too_large = {"cudagraph_capture_sizes": [9], "max_num_batched_tokens": 8}
    assert problem_of(**too_large) == "cudagraph_capture_sizes"
    disagree = {"cudagraph_capture_sizes": [8], "max_cudagraph_capture_size": 16}
    assert problem_of(**disagree) == "max_cudagraph_capture_size"


def test_with_graphs_off_asked_sizes_are_adjusted() -> None:
    found = resolved(cudagraph_mode="NONE", cudagraph_capture_sizes=[1, 2])
    assert (found.plan.capture_sizes, found.plan.max_capture_size) == ((), 0)
    assert found.plan.capture_order == ()
    assert [item.field for item in found.adjustments] == ["cudagraph_capture_sizes"]
    assert resolved(cudagraph_mode="NONE", cudagraph_capture_sizes=[]).adjustments == ()
    (item,) = resolved(cudagraph_mode="NONE", max_cudagraph_capture_size=8).adjustments
    assert item.effective is None


def test_decode_sizes_of_a_list_are_multiples_up_to_the_top() -> None:
    asked = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16], "num_speculative_tokens": 2}
    # 16 would round to 18, past the maximum: 15 is the largest batch that can still be served.
    assert plan(**asked).decode_capture_sizes == (3, 6, 9, 15)
    assert plan(**asked).capture_sizes == (1, 2, 4, 8, 16)
    assert plan(**asked, max_num_seqs=2).decode_capture_sizes == (3, 6)
    # A size above every decode batch is no decode size, and none is made of it.
    assert plan(cudagraph_capture_sizes=[4, 16], max_num_seqs=6).decode_capture_sizes == (4,)
    assert plan(cudagraph_capture_sizes=[1, 2], num_speculative_tokens=2).decode_capture_sizes == ()


def test_default_decode_sizes_count_requests() -> None:
    assert plan(max_num_seqs=20, num_speculative_tokens=2).decode_capture_sizes == (
        3,
        6,
        12,
        24,
        48,
        60,
    )
    top = plan(max_num_seqs=20, num_speculative_tokens=2, max_cudagraph_capture_size=59)
    assert top.decode_capture_sizes == (3, 6, 12, 24, 48)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_without_a_decode_routine_there_are_no_decode_sizes(mode: str) -> None:
    assert plan(cudagraph_mode=mode).decode_capture_sizes == ()


@given(case=config_strategies.resolutions())
def test_decode_sizes_obey_their_limits(case: tuple[RuntimeConfig, Facts, Resolved]) -> None:
    config, facts, result = case
    found = result.plan
    q = found.query_len
    has_own_routine = found.cudagraph_mode in (
        CUDAGraphMode.FULL_DECODE_ONLY,
        CUDAGraphMode.FULL_AND_PIECEWISE,
    )
    for sizes in (found.capture_sizes, found.decode_capture_sizes):
        assert list(sizes) == sorted(set(sizes))
        assert all(1 <= size <= found.max_num_batched_tokens for size in sizes)
    assert bool(found.decode_capture_sizes) <= has_own_routine
    assert all(size % q == 0 for size in found.decode_capture_sizes)
    assert all(q <= size <= q * found.max_num_seqs for size in found.decode_capture_sizes)
    options = config.compilation
    asked = (options.cudagraph_capture_sizes, options.max_cudagraph_capture_size)
    if has_own_routine and asked == (None, None):
        cap = 1024 if facts.compute_capability == (10, 3) else 512
        maximum = min(found.max_num_seqs * q * 2, cap, found.max_num_batched_tokens)
        largest = q * min(found.max_num_seqs, maximum // q)
        assert (found.decode_capture_sizes or (0,))[-1] == largest


@given(st.sets(st.integers(1, 200), min_size=1))
def test_padding_is_listed_sufficient_minimal_and_monotone(sizes: set[int]) -> None:
    ascending = sorted(sizes)
    table = plan(cudagraph_capture_sizes=ascending).padding_table
    assert len(table) == ascending[-1] + 1
    assert list(table) == [min(size for size in sizes if size >= n) for n in range(len(table))]


def test_plan_has_padding_tables_of_sizes_and_adapter_counts() -> None:
    found = plan(cudagraph_capture_sizes=[3, 6], num_speculative_tokens=2, max_loras=3)
    assert found.padding_table == (3, 3, 3, 3, 6, 6, 6)
    assert found.lora_padding_table == (0, 1, 2, 3)
    assert plan(cudagraph_mode="NONE").padding_table == ()


def test_compile_sizes_must_survive_padding_and_be_reachable() -> None:
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    assert plan(**sizes, compile_sizes=[8, 4, 64]).compile_sizes == (4, 8, 64)
    assert plan(**sizes, compile_sizes="cudagraph_capture_sizes").compile_sizes == (1, 2, 4, 8)
    assert problem_of(**sizes, compile_sizes=[3]) == "compile_sizes"
    assert problem_of(**sizes, compile_sizes=[64], max_num_batched_tokens=32) == "compile_sizes"
    assert problem_of(**sizes, compile_sizes=[8], level=0) == "compile_sizes"


def test_compile_sizes_decide_an_open_level() -> None:
    assert plan().level == 0
    assert plan(compile_sizes=[8]).level == 3
    assert plan(level=2).level == 2

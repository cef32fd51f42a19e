"""Split twins in the plan, what micro-batches may not ask, and how split batches are padded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import config_strategies
import pytest
from hypothesis import assume, given, strategies as st

from graphrt import BatchDescriptor, CUDAGraphDispatcher, Reason, RuntimeMode
from graphrt.batch import UBatchReason
from graphrt.config import (
    CompilationConfig,
    Facts,
    Plan,
    RankConfig,
    Resolved,
    RuntimeConfig,
    UBatchConfig,
    resolve,
)
from graphrt.errors import ConfigError

NONE, PIECEWISE, FULL = RuntimeMode


def plan(
    mode: str = "FULL_AND_PIECEWISE", q: int = 1, num_sms: int | None = None, **asked: Any
) -> Plan:
    options = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=(24, 36, 48, 72))  # type: ignore[arg-type]
    config = RuntimeConfig(
        compilation=options,
        max_num_seqs=64,
        num_speculative_tokens=q - 1,
        ubatch={"num_ubatches": 2, **asked},  # type: ignore[arg-type]
    )
    return resolve(config, Facts(num_sms=num_sms)).plan


def split_sizes(made: Plan) -> list[int]:
    return [key.num_tokens for _, key in made.capture_order if key.num_ubatches > 1]


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({}, [48, 36]),
        ({"num_ubatches": 1}, []),
        ({"decode_token_threshold": 48}, [48]),
        ({"q": 12, "decode_token_threshold": 2}, [72, 48, 36, 24]),
        ({"q": 12, "decode_token_threshold": 4, "num_ubatches": 4}, [72, 48]),
        ({"mode": "FULL"}, []),
        ({"mode": "PIECEWISE"}, []),
    ],
)
def test_split_twins_are_the_large_uniform_keys(asked: Any, sizes: list[int]) -> None:
    made = plan(**asked)
    assert split_sizes(made) == sizes
    for mode, key in made.capture_order:
        if key.num_ubatches > 1:
            assert mode is FULL
            place = made.capture_order.index((mode, key))
            assert made.capture_order[place + 1] == (FULL, replace(key, num_ubatches=1))


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({"num_ubatches": 40}, ["decode_token_threshold"]),
        ({"prefill_token_threshold": 1}, ["prefill_token_threshold"]),
        ({"num_sms": 20}, ["num_comm_sms"]),
        ({"num_sms": 20, "num_comm_sms": 19}, []),
        ({"num_sms": 20, "num_ubatches": 1}, []),
        ({"mode": "PIECEWISE", "allow_eager": False}, ["num_ubatches"]),
        ({"decode_token_threshold": 49, "allow_eager": False}, ["num_ubatches"]),
        ({"decode_token_threshold": 48, "allow_eager": False}, []),
        ({"mode": "PIECEWISE", "prefill_token_threshold": 8193}, ["num_ubatches"]),
        ({"mode": "PIECEWISE", "prefill_token_threshold": 8192}, []),
        ({"prefill_token_threshold": 8193}, []),
    ],
)
def test_micro_batches_no_step_could_have_are_an_error(asked: Any, fields: list[str]) -> None:
    found: list[str] = []
    try:
        plan(**asked)
    except ConfigError as error:
        found = [problem.field for problem in error.problems]
    assert found == [f"ubatch.{field}" for field in fields]


def test_split_twins_count_among_the_most_keys() -> None:
    options = CompilationConfig(cudagraph_capture_sizes=tuple(range(1, 2_001)))
    config = RuntimeConfig(
        compilation=options,
        max_num_seqs=2_000,
        max_loras=15,
        lora_capture="each",
        ubatch={"num_ubatches": 2},  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match="96000 keys"):
        resolve(config)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (UBatchConfig, {"num_ubatches": 0}),
        (UBatchConfig, {"num_ubatches": 65}),
        (UBatchConfig, {"decode_token_threshold": 0}),
        (UBatchConfig, {"num_comm_sms": -1}),
        (UBatchConfig, {"ubatches": 2}),
        (RankConfig, {"step_timeout_s": 0}),
        (RankConfig, {"capture_timeout_s": float("inf")}),
        (RankConfig, {"step_timeout_s": 1e10}),
        (RankConfig, {"check_every": 0}),
        (RuntimeConfig, {"ubatch": {"num_ubatches": 0}}),
        (RuntimeConfig, {"ranks": 2}),
        (Facts, {"num_sms": 0}),
    ],
)
def test_wrong_option_of_micro_batches_is_an_error(kind: Any, asked: Any) -> None:
    with pytest.raises(ConfigError):
        kind(**asked)


def test_reasons_against_a_split_fit_one_byte_and_are_not_zero() -> None:
    assert {int(reason) for reason in UBatchReason} == set(range(1, len(UBatchReason) + 1))
    assert max(UBatchReason) < 256


def test_split_batch_is_padded_as_an_unsplit_one() -> None:
    made = plan()
    twin = next(
        item
        for item in made.capture_order
        if item[1] == BatchDescriptor(36, 36, True, num_ubatches=2)
    )
    assert CUDAGraphDispatcher(made).dispatch(30, True, num_ubatches=2) == (*twin, Reason.PADDED)
    assert CUDAGraphDispatcher(made).dispatch(36, True, num_ubatches=2) == (*twin, Reason.HIT)
    # Not the split graph of a larger size, where that of this size is missing.
    fewer = replace(made, capture_order=tuple(i for i in made.capture_order if i != twin))
    found = CUDAGraphDispatcher(fewer).dispatch(30, True, num_ubatches=2)
    assert found == (NONE, BatchDescriptor(30, num_ubatches=2), Reason.NO_KEY)
    failed = CUDAGraphDispatcher(made, {twin: Reason.CAPTURE_FAILED})
    assert failed.dispatch(30, True, num_ubatches=2).reason is Reason.CAPTURE_FAILED
    assert failed.dispatch(30, True).descriptor.num_tokens == 36
    # It serves even where the unsplit graph of its size does not.
    unsplit = (FULL, replace(twin[1], num_ubatches=1))
    lost = CUDAGraphDispatcher(made, {unsplit: Reason.CAPTURE_FAILED})
    assert lost.dispatch(30, True, num_ubatches=2).descriptor == twin[1]


def test_split_batch_without_a_split_graph_is_eager() -> None:
    found = CUDAGraphDispatcher(plan())
    reasons = [
        found.dispatch(20, True, num_ubatches=2).reason,
        found.dispatch(49, True, num_ubatches=2).reason,
        found.dispatch(36, False, num_ubatches=2).reason,
        found.dispatch(36, True, num_ubatches=3).reason,
        found.dispatch(36, True, exclude=frozenset({FULL}), num_ubatches=2).reason,
    ]
    assert [reason.name for reason in reasons] == [
        *("NO_KEY", "ABOVE_MAX", "NO_KEY", "NO_KEY", "EXCLUDED"),
    ]


@given(case=config_strategies.resolutions(), data=st.data())
def test_plan_with_twins_decides_as_one_without(
    case: tuple[RuntimeConfig, Facts, Resolved], data: st.DataObject
) -> None:
    config, facts, resolved = case
    count = data.draw(st.integers(2, 4))
    least = data.draw(st.integers(count, 60))
    assume(config.max_num_batched_tokens >= count)
    ubatch = UBatchConfig(
        num_ubatches=count, decode_token_threshold=least, prefill_token_threshold=count
    )
    made = resolve(replace(config, ubatch=ubatch), facts).plan
    keys = set(made.capture_order)
    unsplit = tuple(item for item in made.capture_order if item[1].num_ubatches == 1)
    assert replace(made, capture_order=unsplit, ubatch=config.ubatch) == resolved.plan
    split, whole = CUDAGraphDispatcher(made), CUDAGraphDispatcher(resolved.plan)
    loras = data.draw(st.integers(0, made.max_loras))
    for num_tokens in range(0, 140, 3):
        for uniform in (False, True):
            found = split.dispatch(num_tokens, uniform, loras)
            assert found == whole.dispatch(num_tokens, uniform, loras)
            twin = replace(found.descriptor, num_ubatches=count)
            decision = split.dispatch(num_tokens, uniform, loras, num_ubatches=count)
            if (found.mode, twin) in keys:
                assert decision == (FULL, twin, found.reason)
            else:
                assert decision.mode is NONE

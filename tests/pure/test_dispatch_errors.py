"""What describes no batch is a typed error, by every way in."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from graphrt.batch import BatchDescriptor, CUDAGraphMode, RuntimeMode
from graphrt.config import Facts, RuntimeConfig, resolve
from graphrt.dispatch import CUDAGraphDispatcher
from graphrt.errors import BatchError

FULL = RuntimeMode.FULL


@pytest.fixture(scope="module")
def dispatcher() -> CUDAGraphDispatcher:
    return CUDAGraphDispatcher(resolve(RuntimeConfig(max_num_seqs=8, max_loras=2), Facts()).plan)


@pytest.mark.parametrize(
    "num_tokens", [-1, -2, -16, -17, -18, -513, -100_000, 3.0, 2.5, "3", None, [3], object()]
)
@pytest.mark.parametrize("uniform", [False, True])
def test_a_token_count_is_an_integer_from_0(
    dispatcher: CUDAGraphDispatcher, num_tokens: Any, uniform: bool
) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(num_tokens, uniform)
    with pytest.raises(BatchError):
        dispatcher.dispatch(num_tokens, uniform, 1, frozenset({FULL}))


@pytest.mark.parametrize("count", [-1, -3, -4, 3, 100, 1.0, "1", None])
@pytest.mark.parametrize("num_tokens", [4, 5000])
def test_an_adapter_count_is_an_integer_up_to_the_plans_maximum(
    dispatcher: CUDAGraphDispatcher, count: Any, num_tokens: int
) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(num_tokens, True, count)
    with pytest.raises(BatchError):
        dispatcher.row(num_active_loras=count)


@pytest.mark.parametrize(
    "exclude", [{"FULL"}, "FULL", {CUDAGraphMode.FULL}, {7}, {None}, None, FULL, 0]
)
def test_only_runtime_modes_can_be_excluded(dispatcher: CUDAGraphDispatcher, exclude: Any) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(4, exclude=exclude)
    with pytest.raises(BatchError):
        dispatcher.row(exclude=exclude)


@pytest.mark.parametrize("num_ubatches", [0, -1, 1.5, "2", None])
def test_a_micro_batch_count_is_an_integer_from_1(
    dispatcher: CUDAGraphDispatcher, num_ubatches: Any
) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(4, num_ubatches=num_ubatches)


def test_an_error_says_what_was_expected_and_found(dispatcher: CUDAGraphDispatcher) -> None:
    with pytest.raises(BatchError) as caught:
        dispatcher.dispatch(-3)
    assert "num_tokens" in caught.value.subject
    assert ">= 0" in caught.value.expected
    assert "-3" in caught.value.found


@pytest.mark.parametrize("num_tokens", [numpy.int64(3), numpy.int32(3)])
def test_any_integer_type_will_do(dispatcher: CUDAGraphDispatcher, num_tokens: Any) -> None:
    assert dispatcher.dispatch(num_tokens, True) is dispatcher.dispatch(3, True)
    large = dispatcher.dispatch(numpy.int64(4000))  # type: ignore[arg-type]
    assert large is dispatcher.dispatch(4000)
    assert type(large.descriptor.num_tokens) is int


def test_an_array_is_no_token_count(dispatcher: CUDAGraphDispatcher) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(numpy.array([3, 4]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "descriptor",
    [
        BatchDescriptor(4, has_lora=True),
        BatchDescriptor(4, num_active_loras=1),
        BatchDescriptor(16, num_reqs=9),
        BatchDescriptor(-4),
        BatchDescriptor(4, num_ubatches=0),
        BatchDescriptor(4, has_lora=True, num_active_loras=3),
    ],
)
def test_a_descriptor_that_contradicts_itself_or_the_plan_is_an_error(
    dispatcher: CUDAGraphDispatcher, descriptor: BatchDescriptor
) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch_key(descriptor)


def test_beyond_the_plans_own_limit_the_answer_is_eager_and_not_kept(
    dispatcher: CUDAGraphDispatcher,
) -> None:
    decision = dispatcher.dispatch(10**9)
    assert decision.reason.name == "ABOVE_MAX"
    assert decision.descriptor.num_tokens == 10**9
    assert dispatcher.dispatch(10**9) == decision

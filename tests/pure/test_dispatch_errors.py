"""Arguments that describe no batch are typed errors, on the fast path and off it."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from graphrt import CUDAGraphDispatcher, CUDAGraphMode, RuntimeMode
from graphrt.config import Facts, RuntimeConfig, resolve
from graphrt.errors import BatchError

FULL = RuntimeMode.FULL


@pytest.fixture(scope="module")
def dispatcher() -> CUDAGraphDispatcher:
    return CUDAGraphDispatcher(resolve(RuntimeConfig(max_num_seqs=8, max_loras=2), Facts()).plan)


@pytest.mark.parametrize(
    "num_tokens",
    [-1, -2, -16, -17, -18, -513, -(10**5), 3.0, 2.5, "3", None, [3], object(), numpy.array([3])],
)
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("exclude", [frozenset(), frozenset({FULL})])
def test_token_count_that_is_no_count_is_an_error(
    dispatcher: CUDAGraphDispatcher, num_tokens: Any, uniform: bool, exclude: Any
) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(num_tokens, uniform, 1, exclude)


@pytest.mark.parametrize("count", [-1, -3, -4, 3, 100, 1.0, "1", None])
@pytest.mark.parametrize("num_tokens", [4, 5000])
def test_adapter_count_outside_the_plan_is_an_error(
    dispatcher: CUDAGraphDispatcher, count: Any, num_tokens: int
) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(num_tokens, True, count)


@pytest.mark.parametrize(
    "exclude", [{"FULL"}, "FULL", {CUDAGraphMode.FULL}, {7}, {None}, None, FULL, 0, range(10**12)]
)
def test_excluding_what_is_no_mode_is_an_error(
    dispatcher: CUDAGraphDispatcher, exclude: Any
) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(4, exclude=exclude)


@pytest.mark.parametrize("num_ubatches", [0, -1, 1.5, "2", None])
def test_micro_batch_count_below_1_is_an_error(
    dispatcher: CUDAGraphDispatcher, num_ubatches: Any
) -> None:
    with pytest.raises(BatchError):
        dispatcher.dispatch(4, num_ubatches=num_ubatches)


def test_batch_error_says_what_was_expected_and_found(dispatcher: CUDAGraphDispatcher) -> None:
    with pytest.raises(BatchError) as caught:
        dispatcher.dispatch(-3)
    assert "num_tokens" in caught.value.subject
    assert ">= 0" in caught.value.expected
    assert "-3" in caught.value.found


@pytest.mark.parametrize("kind", [numpy.int64, numpy.int32])
def test_any_integer_type_is_accepted(dispatcher: CUDAGraphDispatcher, kind: Any) -> None:
    assert dispatcher.dispatch(kind(3), True) is dispatcher.dispatch(3, True)
    large = dispatcher.dispatch(kind(4000))
    assert large is dispatcher.dispatch(4000)
    assert type(large.descriptor.num_tokens) is int


def test_beyond_the_plans_limit_decisions_are_not_kept(dispatcher: CUDAGraphDispatcher) -> None:
    decision = dispatcher.dispatch(10**9)
    assert decision.reason.name == "ABOVE_MAX"
    assert decision.descriptor.num_tokens == 10**9
    assert dispatcher.dispatch(10**9) == decision
    assert dispatcher.dispatch(10**9) is not decision

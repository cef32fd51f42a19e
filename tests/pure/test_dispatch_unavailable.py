"""A key without a graph does not serve: the next lower mode does, or the decision says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from graphrt import BatchDescriptor, CUDAGraphDispatcher, CUDAGraphMode, Reason, RuntimeMode
from graphrt.config import CompilationConfig, Facts, Plan, RuntimeConfig, resolve
from graphrt.errors import ConfigError

NONE, PIECEWISE, FULL = RuntimeMode
YET, FAILED, INVALID = Reason.NOT_CAPTURED_YET, Reason.CAPTURE_FAILED, Reason.INVALIDATED


def plan(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> Plan:
    options = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=(1, 2, 4, 8, 16))
    return resolve(RuntimeConfig(compilation=options, max_num_seqs=8), Facts()).plan


DECODE_4, MIXED_4 = (FULL, BatchDescriptor(4, 4, True)), (PIECEWISE, BatchDescriptor(4))


@pytest.mark.parametrize("why", [YET, FAILED, INVALID])
def test_missing_key_falls_to_the_lower_mode_or_says_why(why: Reason) -> None:
    found = CUDAGraphDispatcher(plan(), unavailable={DECODE_4: why})
    assert found.dispatch(3, True) == (PIECEWISE, BatchDescriptor(4), Reason.PADDED)
    assert found.dispatch(2, True).mode is FULL
    both = CUDAGraphDispatcher(plan(), unavailable={DECODE_4: why, MIXED_4: FAILED})
    assert both.dispatch(3, True) == (NONE, BatchDescriptor(3), why)
    assert both.dispatch(3) == (NONE, BatchDescriptor(3), FAILED)


def test_missing_key_is_not_replaced_by_a_larger_one() -> None:
    # More padding than planned would hide that the key is missing.
    found = CUDAGraphDispatcher(plan(CUDAGraphMode.FULL_DECODE_ONLY), unavailable={DECODE_4: YET})
    assert found.dispatch(4, True) == (NONE, BatchDescriptor(4), YET)
    assert found.dispatch(5, True).descriptor.num_tokens == 8


def test_missing_graph_is_named_before_an_excluded_one() -> None:
    found = CUDAGraphDispatcher(plan(), unavailable={DECODE_4: YET, MIXED_4: FAILED})
    assert found.dispatch(4, True, exclude=frozenset({PIECEWISE})).reason is YET
    assert found.dispatch(4, True, exclude=frozenset({FULL})).reason is FAILED
    assert found.dispatch(4, True, exclude=frozenset({FULL, PIECEWISE})).reason is Reason.EXCLUDED


def test_unavailable_mapping_is_copied() -> None:
    missing = {DECODE_4: YET}
    found = CUDAGraphDispatcher(plan(), unavailable=missing)
    missing.clear()
    assert found.dispatch(4, True, exclude=frozenset({PIECEWISE})).reason is YET


@pytest.mark.parametrize(
    "missing",
    [
        {(FULL, BatchDescriptor(5, 5, True)): YET},
        {(PIECEWISE, BatchDescriptor(4, 4, True)): YET},
        {DECODE_4: Reason.HIT},
        {DECODE_4: Reason.PADDED},
    ],
)
def test_unavailable_entry_without_meaning_is_an_error(
    missing: Mapping[Any, Reason],
) -> None:
    with pytest.raises(ConfigError):
        CUDAGraphDispatcher(plan(), unavailable=missing)


@given(data=st.data())
def test_unavailable_keys_are_never_dispatched(data: st.DataObject) -> None:
    made = plan(data.draw(st.sampled_from(CUDAGraphMode)))
    missing = {
        item: data.draw(st.sampled_from([YET, FAILED, INVALID]))
        for item in made.capture_order
        if data.draw(st.booleans())
    }
    found = CUDAGraphDispatcher(made, unavailable=missing)
    full = CUDAGraphDispatcher(made)
    for uniform in (False, True):
        for num_tokens in range(20):
            decision = found.dispatch(num_tokens, uniform)
            wanted = full.dispatch(num_tokens, uniform)
            assert decision[:2] not in missing
            assert decision.mode <= wanted.mode
            if decision.mode is not NONE:
                assert decision.descriptor.num_tokens >= num_tokens
            elif wanted.mode is not NONE:
                assert decision.reason is missing[wanted[:2]]

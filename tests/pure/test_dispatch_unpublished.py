"""What is not published does not serve: the next lower mode does, or the reason is told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, strategies as st

from graphrt.batch import BatchDescriptor, CUDAGraphMode, MissReason, RuntimeMode
from graphrt.config import CompilationConfig, Facts, Plan, RuntimeConfig, resolve
from graphrt.dispatch import CUDAGraphDispatcher
from graphrt.errors import ConfigError

NONE, PIECEWISE, FULL = RuntimeMode
YET, FAILED, INVALID = (
    MissReason.NOT_CAPTURED_YET,
    MissReason.CAPTURE_FAILED,
    MissReason.INVALIDATED,
)


def plan(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> Plan:
    wish = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=(1, 2, 4, 8, 16))
    return resolve(RuntimeConfig(compilation=wish, max_num_seqs=8), Facts()).plan


DECODE_4, MIXED_4 = (FULL, BatchDescriptor(4, 4, True)), (PIECEWISE, BatchDescriptor(4))


@pytest.mark.parametrize("why", [YET, FAILED, INVALID])
def test_the_lower_mode_serves_and_without_it_the_reason_is_told(why: MissReason) -> None:
    found = CUDAGraphDispatcher(plan(), unpublished={DECODE_4: why})
    assert found.dispatch(3, True) == (PIECEWISE, BatchDescriptor(4), MissReason.PADDED)
    assert found.dispatch(2, True).mode is FULL
    both = CUDAGraphDispatcher(plan(), unpublished={DECODE_4: why, MIXED_4: FAILED})
    assert both.dispatch(3, True) == (NONE, BatchDescriptor(3), why)
    assert both.dispatch(3) == (NONE, BatchDescriptor(3), FAILED)


def test_a_larger_graph_does_not_step_in() -> None:
    # Padding further would be a decision nobody asked for; the key's own reason is told.
    found = CUDAGraphDispatcher(plan(CUDAGraphMode.FULL_DECODE_ONLY), unpublished={DECODE_4: YET})
    assert found.dispatch(4, True) == (NONE, BatchDescriptor(4), YET)
    assert found.dispatch(5, True).descriptor.num_tokens == 8


def test_what_is_missing_is_told_before_what_is_excluded() -> None:
    found = CUDAGraphDispatcher(plan(), unpublished={DECODE_4: YET, MIXED_4: FAILED})
    assert found.dispatch(4, True, exclude=frozenset({PIECEWISE})).reason is YET
    assert found.dispatch(4, True, exclude=frozenset({FULL})).reason is FAILED
    assert found.dispatch(4, True, exclude=frozenset({FULL, PIECEWISE})).reason is (
        MissReason.EXCLUDED
    )


def test_the_mapping_is_copied() -> None:
    missing = {DECODE_4: YET}
    found = CUDAGraphDispatcher(plan(), unpublished=missing)
    missing.clear()
    assert found.dispatch(4, True, exclude=frozenset({PIECEWISE})).reason is YET


@pytest.mark.parametrize(
    "missing",
    [
        {(FULL, BatchDescriptor(5, 5, True)): YET},
        {(PIECEWISE, BatchDescriptor(4, 4, True)): YET},
        {DECODE_4: MissReason.HIT},
        {DECODE_4: MissReason.PADDED},
    ],
)
def test_an_entry_that_no_decision_could_show_is_an_error(missing: Mapping) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError):
        CUDAGraphDispatcher(plan(), unpublished=missing)


@given(data=st.data())
def test_nothing_unpublished_is_ever_handed_out(data: st.DataObject) -> None:
    made = plan(data.draw(st.sampled_from(CUDAGraphMode)))
    missing = {
        item: data.draw(st.sampled_from([YET, FAILED, INVALID]))
        for item in made.capture_order
        if data.draw(st.booleans())
    }
    found = CUDAGraphDispatcher(made, unpublished=missing)
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

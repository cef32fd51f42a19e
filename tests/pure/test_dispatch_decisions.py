"""Which graph serves a batch: the worked cases, the laws, and that decisions are shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import config_strategies
import pytest
from hypothesis import given, strategies as st

from graphrt import BatchDescriptor, CUDAGraphDispatcher, Decision, Reason, RuntimeMode
from graphrt.config import CompilationConfig, Facts, Plan, Resolved, RuntimeConfig, resolve

NONE, PIECEWISE, FULL = RuntimeMode


def plan(mode: str = "FULL_AND_PIECEWISE", sizes: Any = (1, 2, 4, 8, 16), **asked: Any) -> Plan:
    options = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)  # type: ignore[arg-type]
    return resolve(RuntimeConfig(compilation=options, **{"max_num_seqs": 8, **asked}), Facts()).plan


def dispatcher(*args: Any, **asked: Any) -> CUDAGraphDispatcher:
    return CUDAGraphDispatcher(plan(*args, **asked))


def shape(decision: Decision) -> tuple[str, int, int | None, bool, str]:
    mode, key, reason = decision
    return mode.name, key.num_tokens, key.num_reqs, key.uniform, reason.name


@pytest.mark.parametrize(
    ("mode", "num_tokens", "uniform", "expected"),
    [
        ("FULL_AND_PIECEWISE", 3, True, ("FULL", 4, 4, True, "PADDED")),
        ("FULL_AND_PIECEWISE", 4, True, ("FULL", 4, 4, True, "HIT")),
        ("FULL_AND_PIECEWISE", 3, False, ("PIECEWISE", 4, None, False, "PADDED")),
        ("FULL_AND_PIECEWISE", 9, True, ("PIECEWISE", 16, None, False, "PADDED")),
        ("FULL_AND_PIECEWISE", 17, False, ("NONE", 17, None, False, "ABOVE_MAX")),
        ("FULL", 9, False, ("FULL", 16, 8, False, "PADDED")),
        ("FULL", 9, True, ("FULL", 16, 8, False, "PADDED")),
        ("FULL", 4, True, ("FULL", 4, 4, False, "HIT")),
        ("FULL_DECODE_ONLY", 3, False, ("NONE", 3, None, False, "MODE_NONE")),
        ("FULL_DECODE_ONLY", 17, False, ("NONE", 17, None, False, "MODE_NONE")),
        ("FULL_DECODE_ONLY", 8, True, ("FULL", 8, 8, True, "HIT")),
        ("FULL_DECODE_ONLY", 9, True, ("NONE", 9, None, False, "ABOVE_MAX")),
        ("PIECEWISE", 5, True, ("PIECEWISE", 8, None, False, "PADDED")),
        ("NONE", 5, True, ("NONE", 5, None, False, "MODE_NONE")),
        ("FULL_AND_PIECEWISE", 0, True, ("FULL", 1, 1, True, "PADDED")),
    ],
)
def test_dispatch_of_worked_cases(mode: str, num_tokens: int, uniform: bool, expected: Any) -> None:
    sizes = None if mode == "NONE" else (1, 2, 4, 8, 16)
    assert shape(dispatcher(mode, sizes).dispatch(num_tokens, uniform)) == expected


def test_speculative_decode_is_padded_by_requests() -> None:
    found = dispatcher(sizes=(3, 6, 12, 24), num_speculative_tokens=2)
    assert shape(found.dispatch(9, True)) == ("FULL", 12, 4, True, "PADDED")
    assert shape(found.dispatch(7)) == ("PIECEWISE", 12, None, False, "PADDED")


@pytest.mark.parametrize(
    ("uniform", "exclude", "expected"),
    [
        (True, {FULL}, ("PIECEWISE", 4, None, False, "HIT")),
        (True, {FULL, PIECEWISE}, ("NONE", 4, None, False, "EXCLUDED")),
        (True, {PIECEWISE}, ("FULL", 4, 4, True, "HIT")),
        (False, {PIECEWISE}, ("NONE", 4, None, False, "EXCLUDED")),
        (False, {FULL}, ("PIECEWISE", 4, None, False, "HIT")),
        (True, {NONE}, ("FULL", 4, 4, True, "HIT")),
        (True, set(RuntimeMode), ("NONE", 4, None, False, "EXCLUDED")),
    ],
)
def test_excluded_modes_do_not_serve(uniform: bool, exclude: Any, expected: Any) -> None:
    assert shape(dispatcher().dispatch(4, uniform, exclude=exclude)) == expected


@pytest.mark.parametrize(
    ("mode", "num_tokens", "uniform", "exclude", "reason"),
    [
        ("FULL_AND_PIECEWISE", 17, False, {FULL, PIECEWISE}, Reason.ABOVE_MAX),
        ("FULL_AND_PIECEWISE", 9, True, {PIECEWISE}, Reason.EXCLUDED),
        ("FULL_DECODE_ONLY", 4, False, {FULL, PIECEWISE}, Reason.MODE_NONE),
        ("FULL_DECODE_ONLY", 9, True, {FULL, PIECEWISE}, Reason.ABOVE_MAX),
    ],
)
def test_reason_is_excluded_only_where_a_graph_would_fit(
    mode: str, num_tokens: int, uniform: bool, exclude: Any, reason: Reason
) -> None:
    assert dispatcher(mode).dispatch(num_tokens, uniform, exclude=exclude).reason is reason


def test_routine_without_sizes_has_no_key() -> None:
    found = dispatcher("FULL_DECODE_ONLY", (1, 2), num_speculative_tokens=2)
    assert found.dispatch(3, True).reason is Reason.NO_KEY


def test_adapters_are_rounded_up_to_a_captured_count() -> None:
    found = dispatcher(max_loras=4)
    assert found.dispatch(4, True, 3) == (FULL, BatchDescriptor(4, 4, True, True, 4), Reason.PADDED)
    assert found.dispatch(4, True, 4).reason is Reason.HIT
    assert found.dispatch(4, True, 0).descriptor == BatchDescriptor(4, 4, True)
    eager = found.dispatch(17, False, 3).descriptor
    assert (eager.has_lora, eager.num_active_loras) == (True, 3)


def test_without_specialisation_no_adapters_use_a_lora_graph() -> None:
    options = CompilationConfig(cudagraph_specialize_lora=False)
    made = resolve(RuntimeConfig(compilation=options, max_loras=4), Facts()).plan
    decision = CUDAGraphDispatcher(made).dispatch(4, True, 0)
    assert decision == (FULL, BatchDescriptor(4, 4, True, True, 1), Reason.PADDED)


def test_split_batch_needs_a_split_graph() -> None:
    decision = dispatcher().dispatch(4, True, num_ubatches=2)
    assert decision == (NONE, BatchDescriptor(4, num_ubatches=2), Reason.NO_KEY)


def test_split_graphs_serve_split_batches_only() -> None:
    made = plan()
    split = tuple((FULL, replace(key, num_ubatches=2)) for key in made.keys[FULL][:2])
    found = CUDAGraphDispatcher(replace(made, capture_order=(*made.capture_order, *split)))
    assert found.dispatch(8, True, num_ubatches=2).descriptor is split[0][1]
    assert found.dispatch(8, True).descriptor.num_ubatches == 1


@given(case=config_strategies.resolutions(), data=st.data())
def test_decisions_obey_the_laws(
    case: tuple[RuntimeConfig, Facts, Resolved], data: st.DataObject
) -> None:
    made = case[2].plan
    found = CUDAGraphDispatcher(made)
    keys = set(made.capture_order)
    uniform = data.draw(st.booleans())
    count = data.draw(st.integers(0, made.max_loras))
    exclude = data.draw(st.frozensets(st.sampled_from([PIECEWISE, FULL])))
    before = None
    for num_tokens in range(min(made.max_num_batched_tokens, 150) + 1):
        mode, key, reason = found.dispatch(num_tokens, uniform, count, exclude)
        assert mode not in exclude
        if mode is NONE:
            assert reason.is_miss
            assert key == BatchDescriptor(num_tokens, None, False, count > 0, count)
            before = None
            continue
        assert (mode, key) in keys
        sizes = made.decode_capture_sizes if key.uniform else made.capture_sizes
        # Listed, sufficient, minimal; monotone while the same list serves.
        assert key.num_tokens == min(s for s in sizes if s >= num_tokens)
        assert key.num_active_loras == min(n for n in made.lora_counts if n >= count)
        assert key.uniform <= uniform
        exact = (key.num_tokens, key.num_active_loras) == (num_tokens, count)
        assert reason is (Reason.HIT if exact else Reason.PADDED)
        if before is not None and before.uniform == key.uniform:
            assert before.num_tokens <= key.num_tokens
        before = key


@given(case=config_strategies.resolutions())
def test_every_key_is_dispatched_to_the_plans_own_object(
    case: tuple[RuntimeConfig, Facts, Resolved],
) -> None:
    found = CUDAGraphDispatcher(case[2].plan)
    for mode, key in case[2].plan.capture_order:
        decision = found.dispatch(key.num_tokens, key.uniform, key.num_active_loras)
        assert decision == (mode, key, Reason.HIT)
        assert decision.descriptor is key


def test_padded_decisions_hold_the_plans_own_key_objects() -> None:
    made = plan()
    found = CUDAGraphDispatcher(made)
    own = {id(key) for _, key in made.capture_order}
    decisions = [found.dispatch(n, uniform) for uniform in (False, True) for n in range(17)]
    assert {id(decision.descriptor) for decision in decisions} <= own


@pytest.mark.parametrize("num_tokens", [0, 3, 16, 17, 400, 8192])
@pytest.mark.parametrize(
    "arguments",
    [
        (False,),
        (True,),
        (True, 2),
        (True, 1, frozenset({FULL})),
        (False, 0, frozenset({FULL, PIECEWISE})),
        (True, 0, frozenset(), 2),
    ],
)
def test_equal_calls_share_one_decision(num_tokens: int, arguments: tuple[Any, ...]) -> None:
    found = dispatcher(max_loras=2)
    assert found.dispatch(num_tokens, *arguments) is found.dispatch(num_tokens, *arguments)


@pytest.mark.parametrize("empty", [frozenset(), set()])
def test_empty_exclusion_takes_the_fast_path(empty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dispatcher()
    shared = found.dispatch(3, True)

    def fail(*_: object) -> None:
        raise AssertionError("an empty exclusion left the fast path")

    monkeypatch.setattr(CUDAGraphDispatcher, "_decide", fail)
    assert found.dispatch(3, True, exclude=empty) is shared
    with pytest.raises(AssertionError):
        found.dispatch(3, True, exclude=frozenset({FULL}))


def test_variant_is_in_every_key() -> None:
    found = CUDAGraphDispatcher(plan(), variant="encoder")
    decision = found.dispatch(4, True)
    assert decision.descriptor == BatchDescriptor(4, 4, True, variant="encoder")
    assert found.dispatch(17).descriptor.variant == "encoder"
    assert (FULL, decision.descriptor) in found.keys


def test_full_mode_has_general_keys_only() -> None:
    found = dispatcher("FULL")
    assert {key.uniform for _, key in found.keys} == {False}
    assert all(found.dispatch(n, True) is found.dispatch(n, False) for n in range(20))

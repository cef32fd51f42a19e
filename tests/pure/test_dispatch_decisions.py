"""Which graph serves a batch: the worked cases, the laws, and that decisions are shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import config_strategies
import pytest
from hypothesis import given, strategies as st

from graphrt.batch import BatchDescriptor, CUDAGraphMode, Decision, MissReason, RuntimeMode
from graphrt.config import CompilationConfig, Facts, Plan, RuntimeConfig, resolve
from graphrt.dispatch import CUDAGraphDispatcher
from graphrt.errors import ConfigError

NONE, PIECEWISE, FULL = RuntimeMode


def plan(mode: str = "FULL_AND_PIECEWISE", sizes: Any = (1, 2, 4, 8, 16), **asked: Any) -> Plan:
    wish = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)  # type: ignore[arg-type]
    return resolve(RuntimeConfig(compilation=wish, **{"max_num_seqs": 8, **asked}), Facts()).plan


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
def test_the_worked_decisions(mode: str, num_tokens: int, uniform: bool, expected: Any) -> None:
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


def test_exclusion_is_the_reason_only_where_a_graph_was_excluded() -> None:
    found = dispatcher()
    everything = frozenset({FULL, PIECEWISE})
    assert found.dispatch(17, exclude=everything).reason is MissReason.ABOVE_MAX
    assert found.dispatch(9, True, exclude=frozenset({PIECEWISE})).reason is MissReason.EXCLUDED
    decode_only = dispatcher("FULL_DECODE_ONLY")
    assert decode_only.dispatch(4, exclude=everything).reason is MissReason.MODE_NONE
    assert decode_only.dispatch(9, True, exclude=everything).reason is MissReason.ABOVE_MAX


def test_a_routine_without_any_size_has_no_key() -> None:
    found = dispatcher("FULL_DECODE_ONLY", (1, 2), num_speculative_tokens=2)
    assert found.dispatch(3, True).reason is MissReason.NO_KEY


def test_adapters_are_rounded_up_to_a_captured_count() -> None:
    found = dispatcher(max_loras=4)
    assert shape(found.dispatch(4, True, 3))[-1] == "PADDED"
    assert found.dispatch(4, True, 3).descriptor == BatchDescriptor(4, 4, True, True, 4)
    assert found.dispatch(4, True, 4).reason is MissReason.HIT
    assert found.dispatch(4, True, 0).descriptor == BatchDescriptor(4, 4, True)
    eager = found.dispatch(17, False, 3)
    assert (eager.descriptor.has_lora, eager.descriptor.num_active_loras) == (True, 3)


def test_without_specialisation_a_plain_batch_uses_the_smallest_adapter_graph() -> None:
    wish = CompilationConfig(cudagraph_specialize_lora=False)
    made = resolve(RuntimeConfig(compilation=wish, max_loras=4), Facts()).plan
    decision = CUDAGraphDispatcher(made).dispatch(4, True, 0)
    assert decision.descriptor == BatchDescriptor(4, 4, True, True, 1)
    assert decision.reason is MissReason.PADDED


def test_a_split_batch_needs_a_split_graph() -> None:
    decision = dispatcher().dispatch(4, True, num_ubatches=2)
    assert (decision.mode, decision.reason) == (NONE, MissReason.NO_KEY)
    assert decision.descriptor == BatchDescriptor(4, num_ubatches=2)


def test_a_plan_with_split_twins_serves_split_batches_at_exactly_their_sizes() -> None:
    made = plan()
    twins = tuple((FULL, replace(key, num_ubatches=2)) for key in made.keys[FULL][:2])
    found = CUDAGraphDispatcher(replace(made, capture_order=(*made.capture_order, *twins)))
    assert found.dispatch(8, True, num_ubatches=2).descriptor is twins[0][1]
    assert found.dispatch(8, True).descriptor.num_ubatches == 1


@given(config=config_strategies.configs(), facts=config_strategies.facts, data=st.data())
def test_decisions_obey_the_laws(config: RuntimeConfig, facts: Facts, data: st.DataObject) -> None:
    try:
        made = resolve(config, facts).plan
    except ConfigError:
        return
    found = CUDAGraphDispatcher(made)
    published = set(made.capture_order)
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
        assert (mode, key) in published
        sizes = made.decode_capture_sizes if key.uniform else made.capture_sizes
        table = made.decode_padding_table if key.uniform else made.padding_table
        # Listed, sufficient, minimal; monotone while the same list serves.
        assert key.num_tokens == table[num_tokens] == min(s for s in sizes if s >= num_tokens)
        assert key.num_active_loras == min(n for n in made.lora_counts if n >= count)
        assert key.uniform <= uniform
        exact = (key.num_tokens, key.num_active_loras) == (num_tokens, count)
        assert reason is (MissReason.HIT if exact else MissReason.PADDED)
        if before is not None and before.uniform == key.uniform:
            assert before.num_tokens <= key.num_tokens
        before = key


@given(config=config_strategies.configs(), facts=config_strategies.facts)
def test_every_key_of_the_plan_is_dispatched_to_itself(config: RuntimeConfig, facts: Facts) -> None:
    try:
        made = resolve(config, facts).plan
    except ConfigError:
        return
    found = CUDAGraphDispatcher(made)
    for mode, key in made.capture_order:
        decision = found.dispatch_key(key)
        assert decision == (mode, key, MissReason.HIT)
        assert decision.descriptor is key


def test_the_plans_own_key_objects_are_handed_out() -> None:
    made = plan()
    found = CUDAGraphDispatcher(made)
    own = {id(key) for _, key in made.capture_order}
    for uniform in (False, True):
        for num_tokens in range(17):
            assert id(found.dispatch(num_tokens, uniform).descriptor) in own


@pytest.mark.parametrize("num_tokens", [0, 3, 16, 17, 400, 8192])
def test_decisions_are_shared_between_calls(num_tokens: int) -> None:
    found = dispatcher(max_loras=2)
    for arguments in (
        (False,),
        (True,),
        (True, 2),
        (True, 1, frozenset({FULL})),
        (False, 0, frozenset({FULL, PIECEWISE})),
        (True, 0, frozenset(), 2),
    ):
        assert found.dispatch(num_tokens, *arguments) is found.dispatch(num_tokens, *arguments)
    assert found.dispatch(num_tokens, exclude=set()) is found.dispatch(num_tokens)  # type: ignore[arg-type]


def test_a_held_row_is_what_dispatch_answers() -> None:
    found = dispatcher(max_loras=2, max_num_batched_tokens=40)
    for asked in (
        {},
        {"uniform": True},
        {"uniform": True, "num_active_loras": 2},
        {"exclude": frozenset({FULL})},
    ):
        row = found.row(**asked)  # type: ignore[arg-type]
        assert isinstance(row, tuple)
        assert len(row) == 41
        assert found.row(**asked) is row  # type: ignore[arg-type]
        for num_tokens, decision in enumerate(row):
            assert decision is found.dispatch(num_tokens, **asked)  # type: ignore[arg-type]


def test_a_variant_is_in_every_key() -> None:
    found = CUDAGraphDispatcher(plan(), variant="encoder")
    decision = found.dispatch(4, True)
    assert decision.descriptor == BatchDescriptor(4, 4, True, variant="encoder")
    assert found.dispatch(17).descriptor.variant == "encoder"
    assert (FULL, decision.descriptor) in found.keys
    other = found.dispatch_key(BatchDescriptor(4, 4, True))
    assert (other.mode, other.reason) == (NONE, MissReason.NO_KEY)
    assert found.dispatch_key(decision.descriptor) is decision


def test_full_mode_has_general_keys_only() -> None:
    found = dispatcher("FULL")
    assert found.row(uniform=True) == found.row(uniform=False)
    assert {key.uniform for _, key in found.keys} == {False}
    assert CUDAGraphMode.FULL.separate_routine() is False

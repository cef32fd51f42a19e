"""Keys: which exist, for which mode, and in which order they are captured."""

from __future__ import annotations

from typing import Any

import config_strategies
import pytest
from hypothesis import given

from graphrt import BatchDescriptor, CUDAGraphMode, RuntimeMode
from graphrt.config import CompilationConfig, Facts, Plan, Resolved, RuntimeConfig, resolve

PIECEWISE, FULL = RuntimeMode.PIECEWISE, RuntimeMode.FULL


def plan(mode: str, sizes: list[int] | None = None, specialize: bool = True, **asked: Any) -> Plan:
    options = CompilationConfig(
        cudagraph_mode=mode,  # type: ignore[arg-type]
        cudagraph_capture_sizes=sizes or [1, 2, 4, 8, 16],  # type: ignore[arg-type]
        cudagraph_specialize_lora=specialize,
    )
    return resolve(RuntimeConfig(compilation=options, **{"max_num_seqs": 8, **asked}), Facts()).plan


@pytest.mark.parametrize(
    ("mode", "piecewise", "full"),
    [
        ("NONE", 0, 0),
        ("PIECEWISE", 5, 0),
        ("FULL", 0, 5),
        ("FULL_DECODE_ONLY", 0, 4),
        ("FULL_AND_PIECEWISE", 5, 4),
    ],
)
def test_the_worked_key_counts(mode: str, piecewise: int, full: int) -> None:
    keys = plan(mode).keys
    assert (len(keys[PIECEWISE]), len(keys[FULL])) == (piecewise, full)


def test_piecewise_keys_forget_requests_and_full_keys_keep_them() -> None:
    keys = plan("FULL_AND_PIECEWISE", [3, 6, 12, 24], num_speculative_tokens=2).keys
    assert keys[PIECEWISE][0] == BatchDescriptor(24)
    assert keys[FULL] == tuple(BatchDescriptor(3 * n, n, True) for n in (8, 4, 2, 1))
    assert plan("FULL").keys[FULL] == tuple(
        BatchDescriptor(size, min(size, 8)) for size in (16, 8, 4, 2, 1)
    )


def test_capture_order_is_mode_then_size_then_adapters() -> None:
    order = plan("FULL_AND_PIECEWISE", [2, 4], max_loras=2).capture_order
    assert [(mode, key.num_tokens, key.num_active_loras) for mode, key in order] == [
        (mode, size, count) for mode in (PIECEWISE, FULL) for size in (4, 2) for count in (2, 1, 0)
    ]


@pytest.mark.parametrize(
    ("capture", "q", "expected"),
    [
        ("each", 1, (0, 1, 2, 3, 4, 5, 6)),
        ("each", 2, (0, 6)),
        ("powers_of_two", 1, (0, 1, 2, 4, 6)),
        ("powers_of_two", 2, (0, 1, 2, 4, 6)),
        ("max_only", 1, (0, 6)),
        ("max_only", 2, (0, 6)),
    ],
)
def test_adapter_counts(capture: str, q: int, expected: tuple[int, ...]) -> None:
    found = plan("FULL", max_loras=6, lora_capture=capture, num_speculative_tokens=q - 1)
    assert found.lora_counts == expected
    without = plan(
        "FULL", None, False, max_loras=6, lora_capture=capture, num_speculative_tokens=q - 1
    )
    assert without.lora_counts == expected[1:]
    assert {key.num_active_loras for key in found.keys[FULL]} == set(expected)
    assert all(key.has_lora == (key.num_active_loras > 0) for key in found.keys[FULL])


def test_without_adapters_specialisation_changes_nothing() -> None:
    assert plan("FULL", None, False).capture_order == plan("FULL").capture_order


@given(case=config_strategies.resolutions())
def test_keys_are_unique_and_ordered(case: tuple[RuntimeConfig, Facts, Resolved]) -> None:
    found = case[2].plan
    order = found.capture_order
    assert len(set(order)) == len(order)
    ranks = [(mode, -key.num_tokens, -key.num_active_loras) for mode, key in order]
    assert ranks == sorted(ranks)
    for mode, key in order:
        assert found.cudagraph_mode.has_mode(mode)
        if mode is PIECEWISE:
            assert key == key.relax_for_mixed_batch()
        elif key.uniform:
            assert key.num_reqs is not None
            assert key.num_reqs * found.query_len == key.num_tokens
        else:
            assert found.cudagraph_mode is CUDAGraphMode.FULL
            assert key.num_reqs == min(key.num_tokens, found.max_num_seqs)

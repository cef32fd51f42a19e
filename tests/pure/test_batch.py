"""The vocabulary: modes, keys and their text, reasons."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from graphrt import BatchDescriptor, CUDAGraphMode, Decision, Reason, RuntimeMode
from graphrt.errors import BatchError

NONE, PIECEWISE, FULL = RuntimeMode


def test_runtime_modes_are_ordered_by_how_much_graph_they_use() -> None:
    assert NONE < PIECEWISE < FULL


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (CUDAGraphMode.NONE, NONE, NONE),
        (CUDAGraphMode.PIECEWISE, PIECEWISE, PIECEWISE),
        (CUDAGraphMode.FULL, FULL, FULL),
        (CUDAGraphMode.FULL_DECODE_ONLY, FULL, NONE),
        (CUDAGraphMode.FULL_AND_PIECEWISE, FULL, PIECEWISE),
    ],
)
def test_policy_methods_follow_from_its_two_modes(
    mode: CUDAGraphMode, decode: RuntimeMode, mixed: RuntimeMode
) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.separate_routine() == (decode is not mixed)
    assert mode.max_cudagraph_mode() is decode
    assert [m for m in RuntimeMode if mode.has_mode(m)] == sorted({decode, mixed})
    assert mode.has_full_cudagraphs() == (FULL in (decode, mixed))
    assert mode.has_piecewise_cudagraphs() == (PIECEWISE in (decode, mixed))
    assert mode.requires_piecewise_compilation() == (PIECEWISE in (decode, mixed))


def test_without_piecewise_replaces_piecewise_by_none() -> None:
    assert {mode.name: mode.without_piecewise().name for mode in CUDAGraphMode} == {
        "NONE": "NONE",
        "PIECEWISE": "NONE",
        "FULL": "FULL",
        "FULL_DECODE_ONLY": "FULL_DECODE_ONLY",
        "FULL_AND_PIECEWISE": "FULL_DECODE_ONLY",
    }


@pytest.mark.parametrize(
    "text", ["full_and_piecewise", "FULL_AND_PIECEWISE", " Full_And_Piecewise"]
)
def test_a_mode_is_parsed_in_any_case(text: str) -> None:
    assert CUDAGraphMode.parse(text) is CUDAGraphMode.FULL_AND_PIECEWISE


def test_every_mode_and_reason_prints_its_name() -> None:
    for member in (*RuntimeMode, *CUDAGraphMode, *Reason):
        assert str(member) == f"{member}" == f"{member:>1}" == member.name
    assert f"{FULL:d} {FULL + 0} {FULL:>6}" == "2 2   FULL"


def test_parsing_another_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        CUDAGraphMode.parse("FULL_ONLY")
    with pytest.raises(KeyError):
        CUDAGraphMode.parse(None)  # type: ignore[arg-type]


def test_only_hit_and_padded_are_no_misses() -> None:
    assert {why for why in Reason if not why.is_miss} == {Reason.HIT, Reason.PADDED}


def test_reasons_fit_in_one_byte_and_keep_their_numbers() -> None:
    assert max(Reason) < 256
    assert [why.name for why in sorted(Reason)][:10] == [
        "HIT",
        "PADDED",
        "ABOVE_MAX",
        "MODE_NONE",
        "EXCLUDED",
        "NO_KEY",
        "LORA_NOT_CAPTURED",
        "NOT_CAPTURED_YET",
        "CAPTURE_FAILED",
        "INVALIDATED",
    ]


def test_equal_descriptors_are_one_key() -> None:
    key = BatchDescriptor(8, 8, True, variant=("a", 1))
    assert {key: 1}[BatchDescriptor(8, 8, True, variant=("a", 1))] == 1
    for other in (
        BatchDescriptor(16, 8, True, variant=("a", 1)),
        BatchDescriptor(8, 4, True, variant=("a", 1)),
        BatchDescriptor(8, 8, False, variant=("a", 1)),
        BatchDescriptor(8, 8, True, True, 1, variant=("a", 1)),
        BatchDescriptor(8, 8, True, num_ubatches=2, variant=("a", 1)),
        BatchDescriptor(8, 8, True, variant=("a", 2)),
    ):
        assert other != key


def test_a_descriptor_is_frozen_and_its_variant_must_be_hashable() -> None:
    with pytest.raises(AttributeError):
        BatchDescriptor(8).num_tokens = 9  # type: ignore[misc]
    with pytest.raises(BatchError, match="variant"):
        BatchDescriptor(8, variant=[])


@pytest.mark.parametrize("value", [None, "8", b"", [], 8.5])
@pytest.mark.parametrize("name", ["num_tokens", "num_reqs", "num_active_loras", "num_ubatches"])
def test_descriptor_with_a_count_of_another_type_names_it(name: str, value: object) -> None:
    if (name, value) == ("num_reqs", None):
        return
    with pytest.raises(BatchError, match=name):
        BatchDescriptor(**{"num_tokens": 8, name: value})  # type: ignore[arg-type]


def test_relax_for_mixed_batch_drops_requests_only() -> None:
    key = BatchDescriptor(12, 4, True, True, 2, 1, "v")
    assert key.relax_for_mixed_batch() == BatchDescriptor(12, None, False, True, 2, 1, "v")


def test_copies_are_equal_keys() -> None:
    key = BatchDescriptor(12, None, variant="v")
    assert copy.deepcopy(key) == key
    assert hash(copy.copy(key)) == hash(key)


def test_pickled_descriptor_is_found_in_another_process() -> None:
    # Hashes of strings, and of None before Python 3.12, differ from process to process.
    key = BatchDescriptor(12, None, variant="v")
    code = (
        "import pickle, sys; from graphrt.batch import BatchDescriptor;"
        f"sent = pickle.loads({pickle.dumps(key)!r});"
        "sys.exit(sent not in {BatchDescriptor(12, None, variant='v')})"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, check=False
        )
        assert done.returncode == 0


def test_a_decision_unpacks_into_mode_key_and_reason() -> None:
    mode, key, reason = Decision(FULL, BatchDescriptor(4), Reason.HIT)
    assert (mode, key.num_tokens, reason.name) == (FULL, 4, "HIT")


def test_key_text_shows_only_what_is_not_default() -> None:
    assert repr(BatchDescriptor(4)) == "BatchDescriptor(num_tokens=4)"
    text = "BatchDescriptor(num_tokens=8, num_reqs=8, uniform=True)"
    assert str(BatchDescriptor(8, 8, uniform=True)) == text


@given(
    st.builds(
        BatchDescriptor,
        st.integers(0, 9),
        st.none() | st.integers(0, 9),
        st.booleans(),
        st.booleans(),
        st.integers(0, 3),
        st.integers(1, 2),
        st.none() | st.text(max_size=3),
    )
)
def test_key_text_evaluates_to_the_key(key: BatchDescriptor) -> None:
    assert eval(repr(key)) == key

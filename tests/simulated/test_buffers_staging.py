"""Declaring, binding and staging static buffers."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt import BufferSet, BufferSpec, Padding
from graphrt.errors import (
    InputMismatchError,
    LibraryClosedError,
    PaddingRequiredError,
    StaticBufferError,
)
from lab import rows_runner

CPU = torch.device("cpu")
IDS = BufferSpec("ids", ("tokens",), torch.int64, Padding.zero())
SLOTS = BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(-1))
HIDDEN = BufferSpec("hidden", ("tokens", 3), torch.float32)
TABLE = BufferSpec("table", ("requests", 4), torch.int32, Padding.fill(-7))
POSITIONS = BufferSpec("positions", (3, "tokens"), torch.int64, Padding.zero())


def one_axis(*specs: BufferSpec, capacity: int = 8) -> BufferSet:
    return BufferSet(specs, {"tokens": capacity}, lambda key: {"tokens": key}, CPU)


def tokens_for(n: int, value: int = 1) -> dict[str, torch.Tensor]:
    return {"ids": torch.full((n,), value), "slots": torch.full((n,), value + 1)}


# --- declaration


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_spec_of_an_integer_without_padding_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(PaddingRequiredError) as raised:
        BufferSpec("slots", ("tokens",), dtype)
    assert "slots" in raised.value.subject
    assert raised.value.do


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_spec_of_integers_without_axes_is_exact(dtype: torch.dtype) -> None:
    assert not BufferSpec("ids", (2, 1), dtype).pads_narrower
    assert BufferSpec("ids", (2, 1), dtype, Padding.zero()).pads_narrower


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_spec_of_a_float_is_padded_with_zero(dtype: torch.dtype) -> None:
    assert BufferSpec("x", ("tokens",), dtype).padding == Padding.zero(arbitrary=True)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint8, -1),
        (torch.bool, -1),
        (torch.int32, 2**31),
        (torch.int64, 0.5),
        (torch.int64, float("nan")),
        (torch.float16, 1e6),
    ],
)
def test_padding_value_beyond_the_dtype_is_refused(dtype: torch.dtype, value: float) -> None:
    with pytest.raises(StaticBufferError):
        BufferSpec("x", ("tokens",), dtype, Padding.fill(value))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -1e4])
def test_padding_of_a_float_may_be_any_value(value: float) -> None:
    buffers = one_axis(BufferSpec("bias", ("tokens",), torch.float16, Padding.fill(value)))
    expected = torch.full((8,), value, dtype=torch.float16)
    torch.testing.assert_close(buffers.tensors["bias"], expected, equal_nan=True)


def test_fill_once_of_a_changing_buffer_is_refused() -> None:
    with pytest.raises(StaticBufferError):
        BufferSpec("x", ("tokens",), torch.int64, Padding.fill_once(3), written=True)
    with pytest.raises(StaticBufferError):
        BufferSpec("x", ("tokens",), torch.int64, Padding.fill_once(3), optional=True)


def test_duplicate_name_or_axis_without_capacity_is_refused() -> None:
    with pytest.raises(StaticBufferError):
        one_axis(IDS, IDS)
    with pytest.raises(StaticBufferError) as raised:
        BufferSet([IDS, TABLE], {"tokens": 8}, lambda key: {"tokens": key}, CPU)
    assert "requests" in raised.value.found


# --- binding


def test_new_buffers_hold_their_pad_value() -> None:
    buffers = one_axis(
        IDS, SLOTS, HIDDEN, BufferSpec("sink", ("tokens",), torch.int64, Padding.fill_once(5))
    )
    assert buffers.tensors["slots"].eq(-1).all()
    assert buffers.tensors["ids"].eq(0).all()
    assert buffers.tensors["hidden"].eq(0).all()
    assert buffers.tensors["sink"].eq(5).all()
    assert buffers.num_bytes == 8 * 8 * 3 + 8 * 3 * 4


def test_keys_read_prefixes_of_the_same_bytes() -> None:
    buffers = one_axis(IDS, SLOTS, HIDDEN)
    four, eight = buffers.bind(4), buffers.bind(8)
    assert buffers.bind(4) is four
    assert four.views["hidden"].shape == (4, 3)
    assert four.sizes == {"tokens": 4}
    for name, view in four.views.items():
        assert view.data_ptr() == eight.views[name].data_ptr()
        assert view.stride() == eight.views[name].stride()
    before = dict(four.views)
    for n in (3, 4, 1):
        four.stage(n, tokens_for(n) | {"hidden": torch.ones(n, 3)})
    assert all(four.views[name] is before[name] for name in before)


def test_buffers_are_on_the_given_device() -> None:
    device = SimpleNamespace(torch_device=torch.device("meta"))
    buffers = BufferSet([IDS], {"tokens": 8}, lambda key: {"tokens": key}, device)  # type: ignore[arg-type]
    assert buffers.bind(4).views["ids"].device.type == "meta"


def test_bind_beyond_capacity_or_without_an_axis_is_refused() -> None:
    buffers = one_axis(IDS)
    with pytest.raises(StaticBufferError) as raised:
        buffers.bind(9)
    assert raised.value.found == "9"
    lacking = BufferSet([IDS], {"tokens": 8}, lambda key: {"requests": key}, CPU)
    with pytest.raises(StaticBufferError):
        lacking.bind(4)


def test_buffers_of_inference_mode_are_staged_outside_it() -> None:
    with torch.inference_mode():
        buffers = one_axis(IDS, SLOTS)
        inside = buffers.bind(4)
        inside.stage(3, tokens_for(3))
    assert not any(view.is_inference() for view in inside.views.values())
    inside.stage(2, tokens_for(2))
    with torch.no_grad():
        inside.stage(1, tokens_for(1))
    with torch.inference_mode():
        inside.stage(4, tokens_for(4))
    assert inside.views["ids"].tolist() == [1, 1, 1, 1]


def test_buffers_after_close_are_refused() -> None:
    buffers = one_axis(IDS, SLOTS)
    bound = buffers.bind(4)
    bound.stage(2, tokens_for(2))
    buffers.close()
    buffers.close()
    for use in (
        lambda: buffers.bind(4),
        lambda: buffers.unpadded(4),
        lambda: bound.stage(2, tokens_for(2)),
    ):
        with pytest.raises(LibraryClosedError):
            use()


# --- staging


def test_stage_copies_real_rows_and_converts_dtypes() -> None:
    buffers = one_axis(IDS, HIDDEN)
    bound = buffers.bind(8)
    bound.stage(3, {"hidden": torch.ones(3, 3).double(), "ids": torch.arange(3, dtype=torch.int32)})
    assert bound.views["ids"].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert bound.views["hidden"].sum() == 9


def test_stage_groups_copies_by_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    real = torch._foreach_copy_

    def counting(destinations: list[torch.Tensor], *rest: object, **options: object) -> None:
        copies.append(len(destinations))
        real(destinations, *rest, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    bound = one_axis(IDS, SLOTS, HIDDEN).bind(8)
    values = tokens_for(5) | {"hidden": torch.ones(5, 3)}
    bound.stage(5, values)
    assert sorted(copies) == [1, 2]
    copies.clear()
    # One int64 source became int32: three groups, and the next step has two again.
    bound.stage(5, values | {"ids": torch.ones(5, dtype=torch.int32)})
    bound.stage(5, values)
    assert sorted(copies) == [1, 1, 1, 1, 2]
    assert bound.views["slots"].tolist() == [2] * 5 + [-1] * 3


@pytest.mark.parametrize(
    ("n", "change", "name", "found"),
    [
        (3, {"ids": torch.ones(4, dtype=torch.int64)}, "ids", "(4,)"),
        (3, {"ids": torch.ones(1, dtype=torch.int64)}, "ids", "(1,)"),  # would broadcast
        (3, {"ids": torch.tensor(1)}, "ids", "()"),
        (3, {"ids": torch.ones(3)}, "ids", "float32"),  # would lose the fraction
        (3, {"ids": [1, 2, 3]}, "ids", "list"),
        (3, {"ids": None}, "ids", "NoneType"),
        (3, {"slot": torch.ones(3, dtype=torch.int64)}, "slot", "no buffer"),
        (3, {"sink": torch.ones(8, dtype=torch.int64)}, "sink", "a value"),
        (5, {}, "tokens", "5"),
        (-1, {}, "tokens", "-1"),
        (2.5, {}, "real sizes", "2.5"),
    ],
)
def test_stage_of_a_misfit_is_refused_and_writes_nothing(
    n: int, change: dict[str, torch.Tensor], name: str, found: str
) -> None:
    sink = BufferSpec("sink", ("tokens",), torch.int64, Padding.fill_once(5))
    buffers = one_axis(IDS, SLOTS, sink)
    bound = buffers.bind(4)
    bound.stage(4, tokens_for(4))
    before = {key: tensor.clone() for key, tensor in buffers.tensors.items()}
    for _ in range(2):  # what was refused once is not taken for known
        with pytest.raises(InputMismatchError) as raised:
            bound.stage(n, tokens_for(3, 9) | change)
        assert name in raised.value.subject
        assert raised.value.expected
        assert found in raised.value.found
    assert all(torch.equal(before[key], tensor) for key, tensor in buffers.tensors.items())


class FailsAt(TorchDispatchMode):
    """Raises at one operation of those that run while it is entered."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise InterruptedError(str(func))
        return func(*args, **(kwargs or {}))


def test_stage_interrupted_anywhere_leaves_no_stale_row() -> None:
    # Two padding groups: one may have been refilled when the other is not.
    bonus = BufferSpec("bonus", ("tokens",), torch.float32, optional=True)
    table = BufferSpec("table", ("tokens", 2), torch.int32, Padding.fill(-7))
    for number in itertools.count():
        bound = one_axis(IDS, SLOTS, bonus, table).bind(8)
        ones = torch.ones(8, 2, dtype=torch.int32)
        full = tokens_for(8, 5) | {"bonus": torch.full((8,), 7.0), "table": ones}
        bound.stage(8, full)
        few = tokens_for(3) | {"bonus": torch.ones(3), "table": ones[:3, :1]}
        try:
            with FailsAt(number):
                bound.stage(3, few)
        except InterruptedError:
            if number % 2:
                bound.stage(8, full)
            bound.stage(3, few)
        else:
            assert number > 2
            return
        assert bound.views["ids"].tolist() == [1] * 3 + [0] * 5
        assert bound.views["slots"].tolist() == [2] * 3 + [-1] * 5
        assert bound.views["bonus"].tolist() == [1.0] * 3 + [0.0] * 5
        assert bound.views["table"].tolist() == [[1, -7]] * 3 + [[-7, -7]] * 5


def test_stage_names_a_missing_input_and_the_nearest_name() -> None:
    ids = torch.ones(2, dtype=torch.int64)
    bound = one_axis(IDS, SLOTS).bind(4)
    with pytest.raises(InputMismatchError) as raised:
        bound.stage(2, {"ids": ids})
    assert "slots" in raised.value.subject
    with pytest.raises(InputMismatchError) as raised:
        bound.stage(2, {"ids": ids, "slotz": ids})
    assert "'slots'" in raised.value.do


def test_stage_of_two_axes_needs_a_size_each() -> None:
    sizes = {"small": {"tokens": 4, "requests": 2}}
    buffers = BufferSet([IDS, TABLE], {"tokens": 8, "requests": 4}, sizes.__getitem__, CPU)
    bound = buffers.bind("small")
    values = {"ids": torch.ones(3, dtype=torch.int64), "table": torch.ones(1, 4, dtype=torch.int32)}
    bound.stage({"tokens": 3, "requests": 1}, values)
    assert bound.views["ids"].tolist() == [1, 1, 1, 0]
    assert bound.views["table"].tolist() == [[1] * 4, [-7] * 4]
    with pytest.raises(InputMismatchError):
        bound.stage(3, values)
    with pytest.raises(InputMismatchError) as raised:
        bound.stage({"tokens": 3}, values)
    assert "requests" in raised.value.found


def test_stage_of_one_axis_takes_a_number_or_a_dict() -> None:
    numpy = pytest.importorskip("numpy")
    bound = one_axis(IDS).bind(4)
    for n in (2, numpy.int64(2), {"tokens": 2}):
        bound.stage(n, {"ids": torch.full((2,), 3)})
        assert bound.views["ids"].tolist() == [3, 3, 0, 0]


def test_stage_of_a_source_with_grad_keeps_no_history() -> None:
    bound = one_axis(HIDDEN).bind(4)
    bound.stage(2, {"hidden": torch.ones(2, 3, requires_grad=True)})
    assert not bound.views["hidden"].requires_grad
    assert bound.views["hidden"].sum() == 6


@pytest.mark.parametrize(("first", "n"), [(0, 4), (2, 4), (4, 4), (1, 7), (7, 1)])
def test_stage_of_rows_of_the_buffers_reads_them_before_it_writes(first: int, n: int) -> None:
    bound = one_axis(HIDDEN, IDS).bind(8)
    bound.stage(8, {"hidden": torch.rand(8, 3), "ids": torch.arange(8)})
    rows = {name: bound.views[name][first : first + n] for name in ("hidden", "ids")}
    wanted = {name: value.clone() for name, value in rows.items()}
    bound.stage(n, rows)
    for name, value in wanted.items():
        assert torch.equal(bound.views[name][:n], value)
        assert not bound.views[name][n:].any()


@pytest.mark.parametrize(("where", "runs_on"), [("cpu", False), ("meta", True)])
def test_stage_waits_only_for_copies_to_the_host(
    where: str, runs_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *_, non_blocking: seen.append(non_blocking))
    device = torch.device(where)
    bound = BufferSet([IDS], {"tokens": 8}, lambda key: {"tokens": key}, device).bind(4)
    bound.stage(2, {"ids": torch.ones(2, dtype=torch.int64)})
    assert seen == [runs_on]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([Padding.fill(-7), Padding.zero(), Padding.keep()]),
)
def test_stage_of_narrower_rows_pads_the_rest(
    steps: list[tuple[int, int, int, bool]], padding: Padding
) -> None:
    table = BufferSpec("table", ("requests", 4), torch.int32, padding)
    lengths = BufferSpec("lengths", ("requests",), torch.int32, Padding.zero())
    buffers = BufferSet([table, lengths], {"requests": 4}, lambda key: {"requests": key}, CPU)
    expected = torch.full((4, 4), padding.value, dtype=torch.int32)
    for number, (n, width, size, is_eager) in enumerate(steps, start=1):
        n = min(n, size)
        bound = buffers.unpadded(n) if is_eager else buffers.bind(size)
        source = torch.full((n, width), number, dtype=torch.int32)
        bound.stage(n, {"table": source, "lengths": source.new_ones(n)})
        if padding.kind == "keep":
            expected[:n, :width] = number
        else:
            expected[:n] = padding.value
            expected[:n, :width] = number
            expected[n:] = padding.value
        assert torch.equal(buffers.tensors["table"], expected)
        assert bound.views["lengths"].tolist() == [1] * n + [0] * (len(bound.views["lengths"]) - n)


def test_stage_of_narrower_inner_axes_pads_every_dimension() -> None:
    cube = BufferSpec("cube", (2, "tokens", 3), torch.int64, Padding.fill(9))
    buffers = one_axis(cube)
    bound = buffers.bind(4)
    bound.stage(2, {"cube": torch.ones(2, 2, 3, dtype=torch.int64)})
    bound.stage(2, {"cube": torch.zeros(1, 2, 2, dtype=torch.int64)})
    rows = [[[0, 0, 9]] * 2 + [[9] * 3] * 2, [[9] * 3] * 4]
    assert bound.views["cube"].tolist() == rows
    assert buffers.real_sizes({"cube": torch.zeros(1, 2, 2, dtype=torch.int64)}) == {"tokens": 2}


@pytest.mark.parametrize("shape", [(2, 5), (2,), (2, 4, 1), (3, 4), (1, 3)])
def test_stage_of_wider_or_other_shapes_is_refused(shape: tuple[int, ...]) -> None:
    buffers = BufferSet([TABLE], {"requests": 4}, lambda key: {"requests": key}, CPU)
    with pytest.raises(InputMismatchError, match="table"):
        buffers.bind(4).stage(2, {"table": torch.ones(shape, dtype=torch.int32)})
    assert buffers.tensors["table"].eq(-7).all()


def test_stage_of_a_narrower_hidden_state_is_refused() -> None:
    buffers = one_axis(HIDDEN)
    narrow = {"hidden": torch.ones(2, 2)}
    with pytest.raises(InputMismatchError, match="hidden"):
        buffers.bind(4).stage(2, narrow)
    with pytest.raises(InputMismatchError, match="hidden"):
        buffers.real_sizes(narrow)
    padded = BufferSpec("hidden", ("tokens", 3), torch.float32, Padding.fill(5.0))
    bound = one_axis(padded).bind(4)
    bound.stage(2, narrow)
    assert bound.views["hidden"].tolist() == [[1, 1, 5]] * 2 + [[5] * 3] * 2


def test_stage_beyond_the_cache_stays_right() -> None:
    buffers = one_axis(SLOTS, capacity=1100)
    bound = buffers.bind(1100)
    for n in (*range(1100), 5):
        bound.stage(n, {"slots": torch.full((n,), 3)})
        buffers.unpadded(n)
    assert buffers.tensors["slots"].tolist() == [3] * 5 + [-1] * 1095


def test_unpadded_buffers_share_the_storage_of_keys() -> None:
    buffers = one_axis(IDS, SLOTS)
    graph = buffers.bind(8)
    graph.stage(6, tokens_for(6))
    eager = buffers.unpadded(3)
    eager.stage(3, tokens_for(3, 4))
    assert eager.views["ids"].tolist() == [4, 4, 4]
    assert eager.views["ids"].data_ptr() == graph.views["ids"].data_ptr()
    # Rows of the step before are gone, for whichever key comes next.
    assert graph.views["slots"].tolist() == [5, 5, 5, -1, -1, -1, -1, -1]
    assert buffers.unpadded(3) is eager
    with pytest.raises(InputMismatchError):
        buffers.unpadded(9)
    with pytest.raises(InputMismatchError):
        eager.stage(4, tokens_for(4))


# --- real sizes


def two_axes(*more: BufferSpec) -> BufferSet:
    capacity = {"tokens": 8, "requests": 4}
    return BufferSet([IDS, SLOTS, HIDDEN, TABLE, *more], capacity, lambda key: capacity, CPU)


def values_of(tokens: int, requests: int) -> dict[str, Any]:
    table = torch.ones(requests, 4, dtype=torch.int32)
    return tokens_for(tokens) | {"hidden": torch.ones(tokens, 3), "table": table}


def test_real_sizes_are_read_off_the_shapes() -> None:
    buffers = two_axes(POSITIONS)
    for tokens, requests in [(5, 2), (5, 2), (5, 2), (3, 0), (8, 4)]:
        values = values_of(tokens, requests)
        sizes = buffers.real_sizes(values)
        assert sizes == {"tokens": tokens, "requests": requests}
        sizes.clear()  # the caller's own
        del values["ids"], values["slots"], values["hidden"]
        values["positions"] = torch.ones(3, tokens, dtype=torch.int64)
        assert buffers.real_sizes(values) == {"tokens": tokens, "requests": requests}
    lens = two_axes(BufferSpec("lens", ("requests",), torch.int64, Padding.zero()))
    few, many = torch.ones(2), torch.ones(4)
    assert lens.real_sizes({"ids": few, "lens": many}) == {"tokens": 2, "requests": 4}
    assert lens.real_sizes({"lens": few, "ids": many}) == {"tokens": 4, "requests": 2}
    assert one_axis(IDS).real_sizes({"ids": torch.ones(7)}) == {"tokens": 7}
    assert one_axis(BufferSpec("scale", (), torch.float32)).real_sizes({}) == {}


@pytest.mark.parametrize(
    ("change", "subject", "expected", "found"),
    [
        ({"slots": torch.ones(4)}, "input 'slots', dimension 0", "'tokens' of size 5", "4"),
        ({"hidden": torch.ones(1, 3)}, "input 'hidden', dimension 0", "as in input 'ids'", "1"),
        ({"hidden": torch.ones(5, 4)}, "input 'hidden', dimension 1", "3", "4"),
        ({"hidden": torch.ones(5)}, "input 'hidden'", "2 dimensions", "1 dimensions"),
        ({"table": None}, "input 'table'", "a tensor", "NoneType"),
        ({"table": [[1] * 4]}, "input 'table'", "a tensor", "list"),
        ({"slotz": torch.ones(5)}, "input 'slotz'", "slots", "no buffer"),
        ({"sink": torch.ones(8)}, "static buffer 'sink'", "no value", "a value"),
    ],
)
def test_real_sizes_of_a_misfit_name_input_and_dimension(
    change: dict[str, Any], subject: str, expected: str, found: str
) -> None:
    buffers = two_axes(BufferSpec("sink", ("tokens",), torch.int64, Padding.fill_once(5)))
    assert buffers.real_sizes(values_of(5, 2)) == {"tokens": 5, "requests": 2}
    for _ in range(2):  # what was refused once is not taken for known
        with pytest.raises(InputMismatchError) as raised:
            buffers.real_sizes(values_of(5, 2) | change)
        assert raised.value.subject == subject
        assert expected in raised.value.expected
        assert found in raised.value.found
        assert raised.value.do


def test_real_sizes_without_a_value_for_an_axis_are_refused() -> None:
    with pytest.raises(InputMismatchError) as raised:
        two_axes().real_sizes(tokens_for(5))
    assert raised.value.subject == "axis 'requests'"
    assert "table" in raised.value.expected
    assert "ids, slots" in raised.value.found


# --- padding


def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of every fill from now on."""
    seen: list[int] = []
    real = torch.Tensor.fill_

    def counting(self: torch.Tensor, value: float) -> torch.Tensor:
        seen.append(self.numel())
        return real(self, value)

    monkeypatch.setattr(torch.Tensor, "fill_", counting)
    return seen


def test_refill_touches_each_stale_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers = one_axis(SLOTS, capacity=16)
    seen = fills(monkeypatch)
    for key, n in [(4, 3), (8, 8), (16, 9), (16, 9), (4, 2), (16, 5), (4, 4), (4, 4), (4, 0)]:
        buffers.bind(key).stage(n, {"slots": torch.ones(n, dtype=torch.int64)})
    # 9 -> 2 (through the key of 4 rows), 5 -> 4, 4 -> 0; nothing else.
    assert seen == [7, 1, 4]
    assert buffers.tensors["slots"].eq(-1).all()


def test_refill_of_two_axes_touches_each_element_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = BufferSpec("grid", ("requests", "tokens"), torch.int64, Padding.fill(-1))
    buffers = BufferSet([grid], KEYS["large"], KEYS.__getitem__, CPU)
    bound = buffers.bind("large")
    seen = fills(monkeypatch)
    for requests, tokens in [(4, 6), (2, 3), (2, 3), (5, 3), (3, 7)]:
        values = {"grid": torch.ones(requests, tokens, dtype=torch.int64)}
        bound.stage({"requests": requests, "tokens": tokens}, values)
    # 4x6 -> 2x3 leaves 2 rows of 6 and 2 rows of 3 columns; 5x3 -> 3x7 leaves 2 rows of 3.
    assert seen == [2 * 6, 2 * 3, 2 * 3]


def test_padding_keep_never_fills() -> None:
    bound = one_axis(BufferSpec("ids", ("tokens",), torch.int64, Padding.keep())).bind(4)
    bound.stage(4, {"ids": torch.arange(4)})
    bound.stage(1, {"ids": torch.tensor([9])})
    assert bound.views["ids"].tolist() == [9, 1, 2, 3]


def test_absent_optional_input_counts_as_no_rows() -> None:
    mask = BufferSpec("mask", ("tokens",), torch.bool, Padding.fill(True), optional=True)
    scale = BufferSpec("scale", (), torch.float32, Padding.fill(1.0), optional=True)
    bound = one_axis(IDS, mask, scale).bind(4)
    ids = torch.ones(3, dtype=torch.int64)
    bound.stage(
        3, {"ids": ids, "mask": torch.zeros(3, dtype=torch.bool), "scale": torch.tensor(7.0)}
    )
    assert bound.views["mask"].tolist() == [False, False, False, True]
    assert bound.views["scale"].item() == 7.0
    bound.stage(3, {"ids": ids})
    assert bound.views["mask"].all()
    assert bound.views["scale"].item() == 1.0


def test_written_buffer_is_refilled_after_each_replay() -> None:
    buffers = one_axis(BufferSpec("state", ("tokens",), torch.int64, Padding.zero(), written=True))
    bound = buffers.bind(8)
    for _ in range(2):
        bound.stage(3, {"state": torch.ones(3, dtype=torch.int64)})
        assert bound.views["state"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
        bound.views["state"].add_(5)  # the replay
    small = buffers.bind(4)
    small.stage(2, {"state": torch.ones(2, dtype=torch.int64)})
    assert buffers.tensors["state"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_bind_without_stage_marks_written_rows_dirty() -> None:
    buffers = one_axis(BufferSpec("state", ("tokens",), torch.int64, Padding.zero(), written=True))
    buffers.bind(4).stage(4, {"state": torch.ones(4, dtype=torch.int64)})
    buffers.bind(8).views["state"].add_(5)  # a warm-up
    buffers.bind(4).stage(4, {"state": torch.ones(4, dtype=torch.int64)})
    assert buffers.tensors["state"].tolist() == [1] * 4 + [0] * 4


KEYS = {
    "small": {"tokens": 3, "requests": 2},
    "wide": {"tokens": 4, "requests": 5},
    "tall": {"tokens": 7, "requests": 1},
    "large": {"tokens": 7, "requests": 5},
}
SPECS = [
    SLOTS,
    TABLE,
    POSITIONS,
    BufferSpec("block", ("requests", 2, "tokens"), torch.int32, Padding.fill(-3)),
    BufferSpec("extra", ("tokens", "requests"), torch.float32, optional=True),
    BufferSpec("state", ("requests", "tokens"), torch.int64, Padding.fill(-9), written=True),
    BufferSpec("fixed", (2,), torch.int64, Padding.zero(), optional=True),
]


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, dict[str, int], frozenset[str]]:
    key = draw(st.sampled_from(sorted(KEYS)))
    real = {axis: draw(st.integers(0, size)) for axis, size in KEYS[key].items()}
    absent = draw(st.frozensets(st.sampled_from(["extra", "fixed"])))
    return key, real, absent


@pytest.mark.parametrize("made", [torch.Tensor.to_sparse, lambda dense: dense.to("meta")])
def test_value_that_no_copy_reads_is_refused_by_name(made):
    buffers = BufferSet(
        [BufferSpec("x", ("n", 2), torch.float32)], {"n": 4}, lambda n: {"n": n}, CPU
    )
    with pytest.raises(InputMismatchError, match="'x'"):
        buffers.bind(4).stage(3, {"x": made(torch.ones(3, 2))})


@settings(deadline=None, max_examples=80)
@given(st.lists(steps(), min_size=1, max_size=8))
def test_after_any_steps_real_rows_are_right_and_others_padded(
    history: list[tuple[str, dict[str, int], frozenset[str]]],
) -> None:
    capacity = KEYS["large"]
    buffers = BufferSet(SPECS, capacity, KEYS.__getitem__, CPU)
    for step, (key, real, absent) in enumerate(history, start=1):
        values = {}
        expected = {}
        for spec in SPECS:
            shape = [real[size] if isinstance(size, str) else size for size in spec.shape]
            whole = [capacity[size] if isinstance(size, str) else size for size in spec.shape]
            expected[spec.name] = torch.full(whole, spec.policy.value, dtype=spec.dtype)
            if spec.name not in absent:
                values[spec.name] = torch.full(shape, step, dtype=spec.dtype)
                expected[spec.name][tuple(slice(0, size) for size in shape)] = step
        # Every third step runs eager: the same storage at its real sizes.
        bound = buffers.unpadded(real) if step % 3 == 0 else buffers.bind(key)
        bound.stage(real, values)
        for name, tensor in buffers.tensors.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
        bound.views["state"].fill_(100 + step)  # the replay writes what it declared


@pytest.mark.parametrize("of", ["Parameter", "Buffer"])
def test_uninitialized_value_is_refused(of) -> None:
    value = getattr(torch.nn.parameter, f"Uninitialized{of}")()
    with rows_runner(lambda x: x * 1) as runner:
        runner.capture()
        for sizes in (None, {"n": 2}, {"n": 5}):
            with pytest.raises(InputMismatchError, match="an uninitialized one"):
                runner.run({"x": value}, sizes=sizes)
    buffers = BufferSet(
        [BufferSpec("x", ("n", 4), torch.float32)],
        {"n": 2},
        lambda n: {"n": n},
        torch.device("cpu"),
    )
    with pytest.raises(InputMismatchError, match="an uninitialized one"):
        buffers.bind(2).stage(2, {"x": value})


@pytest.mark.parametrize("error", [KeyError, AttributeError, TypeError, RuntimeError, OSError])
@pytest.mark.parametrize("stages", [True, False])
def test_error_of_a_mapping_of_values_is_raised_as_it_is(
    error: type[Exception], stages: bool
) -> None:
    class Values(dict[str, torch.Tensor]):
        def values(self) -> Any:
            raise error("the loader is gone")

    buffers = one_axis(IDS)
    bound, values = buffers.bind(4), Values(ids=torch.ones(2, dtype=torch.int64))
    take = partial(bound.stage_without_grad, 2) if stages else buffers.real_sizes
    with pytest.raises(error, match="the loader is gone"):
        take(values)
    bound.stage(2, dict(values.items()))
    assert bound.views["ids"][:2].tolist() == [1, 1]

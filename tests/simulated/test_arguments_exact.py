"""Arguments: whatever differs from what was captured is refused, and nothing else is."""

from __future__ import annotations

import copy
import datetime
import re
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from graphrt import BatchDescriptor, CUDAGraphOptions, StaleCheck, break_point
from graphrt.errors import (
    BreakError,
    BreakOutputError,
    ReplayError,
    StaleInputError,
    UnkeyedValueError,
)
from graphrt.graphs.signature import Signature, generate_checker
from graphrt.values import is_host, own_copy, same_host_value, tensors_of, walk
from lab import FULL, KEY, PIECEWISE, Lab

Z = torch.tensor([1 + 2j, 3 - 1j])
UTC, PLUS_ONE = (datetime.timezone(datetime.timedelta(hours=hour)) for hour in (0, 1))
NOON = datetime.datetime(2024, 1, 1, 12, tzinfo=UTC)


class Unit(int):
    def __new__(cls, number: int, name: str) -> Unit:
        unit = super().__new__(cls, number)
        unit.name = name
        return unit

    def __getnewargs__(self) -> tuple[int, str]:
        return int(self), self.name


# Each is a value that a model may act on; no two of one line are the same.
DIFFERENT = [
    (np.int64(4), np.int64(7), np.int32(4), 4),
    (np.bool_(True), np.bool_(False), True),
    (np.float32(0.0), np.float32(-0.0), np.float64(0.0), 0.0),
    (np.datetime64("2024-01-01"), np.datetime64("2024-01-02")),
    ({4}, {7}, {4.0}, {True}, set(), frozenset({4})),
    (frozenset({(1, "a")}), frozenset({(1, "b")}), frozenset({(1.0, "a")})),
    (range(3), range(0, 3, 2), range(4)),
    (range(0), range(1, 1)),
    (slice(0, 1), slice(False, 1), slice(0, 1.0)),
    (Decimal("1.0"), Decimal("1.00"), Decimal("-0"), Decimal("0"), Decimal("nan")),
    (Fraction(1, 2), Fraction(1, 3)),
    (NOON, NOON.astimezone(PLUS_ONE), NOON.date(), NOON.time()),
    (datetime.timedelta(1), datetime.timedelta(2)),
    (PurePosixPath("a"), PurePosixPath("b"), "a"),
    (PureWindowsPath("a"), PureWindowsPath("A")),
    (Unit(4, "m"), Unit(4, "s"), Unit(5, "m"), 4),
    (uuid.UUID(int=1), uuid.UUID(int=2)),
    (re.compile("a"), re.compile("a", re.IGNORECASE)),
    (bytearray(b"a"), bytearray(b"b"), b"a"),
    (int, float),
]
EACH = [value for values in DIFFERENT for value in values]


def double(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * 2


def checker_for(level: StaleCheck, *args: Any) -> Callable[..., None]:
    signature = Signature.of(args, {})
    return generate_checker(
        level,
        args,
        {},
        by_address=lambda tensor: False,
        full_check=lambda a, k: signature.compare(a, k, "program"),
    )


def anew(value: Any) -> Any:
    """The same value as another object, where Python has such."""
    is_number = isinstance(value, int | float) and not isinstance(value, Unit)
    return type(value)(value) if is_number else copy.deepcopy(value)


@pytest.mark.parametrize("values", DIFFERENT, ids=lambda values: type(values[0]).__name__)
@pytest.mark.parametrize("level", [StaleCheck.IDENTITY, StaleCheck.POINTER])
def test_host_value_that_differs_is_refused_at_any_level(
    values: tuple[Any, ...], level: StaleCheck
) -> None:
    for captured in values:
        assert is_host(captured)
        check = checker_for(level, captured)
        for given_ in values:
            if given_ is captured:
                check((anew(captured),), {})
                continue
            with pytest.raises((UnkeyedValueError, StaleInputError)):
                check((given_,), {})


sets = st.frozensets(st.one_of(st.integers(-2, 2), st.booleans(), st.sampled_from([0.0, 1.0])))


@settings(max_examples=200, deadline=None)
@given(one=st.one_of(st.sampled_from(EACH), sets), other=st.one_of(st.sampled_from(EACH), sets))
def test_same_host_value_is_symmetric_and_survives_a_copy(one: Any, other: Any) -> None:
    assert same_host_value(one, anew(one))
    assert same_host_value(one, other) is same_host_value(other, one)
    if same_host_value(one, other):
        # A set may be iterated in another order, and Python's own values print what they are.
        assert isinstance(one, frozenset) or repr(one) == repr(other)


def test_set_is_kept_by_copy_at_capture(lab: Lab) -> None:
    wrapper, x, chosen = lab.wrap(lambda x, n: x * sum(n)), torch.ones(2), {4}
    lab.capture(wrapper, x, chosen)
    assert lab.step(wrapper, x, chosen).tolist() == [4.0, 4.0]
    chosen.add(3)
    for _ in range(2):
        with pytest.raises(UnkeyedValueError):
            lab.step(wrapper, x, chosen)
    assert lab.step(wrapper, x, {4}).tolist() == [4.0, 4.0]


def test_set_bound_to_an_eager_segment_stays_as_captured(lab: Lab) -> None:
    chosen = {4}
    eager = break_point(lambda x, n: x * sum(n))
    wrapper, x = lab.wrap(lambda x: eager(x + 0, chosen) + 0, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x)
    chosen.add(3)
    assert lab.step(wrapper, x).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(("first", "later"), [(np.int64(4), np.int64(7)), ({4}, {7})])
def test_host_result_of_an_eager_segment_may_not_change(lab: Lab, first: Any, later: Any) -> None:
    now = [first]
    eager = break_point(lambda x: (x * 1, copy.copy(now[0])))

    def model(x: Tensor) -> Tensor:
        y, number = eager(x + 1)
        return y * (sum(number) if isinstance(number, set) else int(number))

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), model(x))
    now[0] = later
    with pytest.raises(UnkeyedValueError):
        lab.step(wrapper, x)


def test_opaque_leaves_are_named_once_for_each_owner(lab: Lab) -> None:
    eager = break_point(lambda x: (x * 1, object()))
    wrapper, x = lab.wrap(lambda x, **_: eager(x)[0] + 1, PIECEWISE), torch.ones(2)
    registry = {"cache": object(), "set": {object()}, "tensors": {x}, "known": {1}}
    with pytest.warns(UserWarning, match="never compared") as caught:
        program = lab.capture(wrapper, x, registry=registry, n=np.int64(3))
    [warning] = caught
    named = ("registry['cache']", "['set']", "['tensors']", "result[1]")
    assert all(name in str(warning.message) for name in named)
    assert all(name not in str(warning.message) for name in ("known", "'n'", "result[0]"))
    assert len(program.unchecked) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lab.capture(wrapper, x, key=BatchDescriptor(4), registry=registry, n=np.int64(3))


class Rows(list):  # type: ignore[type-arg]
    scale = 2  # A class variable, which the walk through the code sees.


class Named(dict):  # type: ignore[type-arg]
    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


def test_attributes_of_a_list_or_dict_are_named_once(lab: Lab) -> None:
    wrapper, x = lab.wrap(lambda held, rows, named: held["x"] * 2), torch.ones(2)
    held, rows = Named(x=x), Rows([x])
    held.__dict__ = {"x": x, "scale": 3}
    rows.bias = x  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="never compared"):
        program = lab.capture(wrapper, held, rows, Named(x=x))
    assert program.unchecked == ("held.scale", "rows.bias")


def test_warning_that_is_an_error_leaves_no_program(lab: Lab) -> None:
    wrapper, x = lab.wrap(double), torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"args\[1\]"):
            lab.capture(wrapper, x, object())
    assert not lab.library.programs
    assert lab.library.num_graphs == 0
    lab.library.forget_failures()
    lab.capture(wrapper, x)
    assert lab.step(wrapper, x).tolist() == [2.0, 2.0]


def test_opaque_argument_of_another_class_is_looked_at_fully(lab: Lab) -> None:
    wrapper, x = lab.wrap(double), torch.ones(2)
    with pytest.warns(UserWarning, match=r"args\[1\]"):
        lab.capture(wrapper, x, object())
    for other in (object(), object()):
        lab.step(wrapper, x, other)
    for other in (None, 3, torch.ones(1), [object()]):
        with pytest.raises(ReplayError):
            lab.step(wrapper, x, other)


# -- tensors: every view of one storage is its own argument


def views_of(base: Tensor) -> dict[str, Tensor]:
    views = {
        "itself": base,
        "part": base[:1],
        "rest": base[1:],
        "transposed": base.t(),
        "flat": base.view(-1),
        "as integers": base.view(torch.int32 if base.element_size() == 4 else torch.int64),
    }
    if base.is_complex():
        views |= {
            "conjugated": base.conj(),
            "negated": base._neg_view(),
            "both": base.conj()._neg_view(),
            "imaginary": base.imag,
            "imaginary of conjugated": base.conj().imag,
        }
    return views


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("level", [StaleCheck.IDENTITY, StaleCheck.POINTER])
def test_new_view_is_accepted_if_it_is_the_same_view(dtype: torch.dtype, level: StaleCheck) -> None:
    base = torch.ones(2, 2, dtype=dtype)
    captured, given_ = views_of(base), views_of(base)
    for name, view in captured.items():
        check = checker_for(level, [view, 1.5])
        for other_name, other in given_.items():
            if name == other_name:
                check(([other, 3 / 2],), {})
            else:
                with pytest.raises(StaleInputError):
                    check(([other, 1.5],), {})


def test_new_views_of_the_same_bytes_need_no_full_check() -> None:
    bases = [torch.zeros(8) for _ in range(6)]
    missed: list[Any] = []
    args = tuple(base[:4] for base in bases)
    check = generate_checker(
        StaleCheck.IDENTITY,
        args,
        {"n": 0.5},
        by_address=lambda tensor: False,
        full_check=lambda *call: missed.append(call),
    )
    for _ in range(3):
        check(tuple(base[:4] for base in bases), {"n": 1 / 2})
    assert not missed
    check(tuple(base[1:5] for base in bases), {"n": 0.5})
    assert len(missed) == 1


def test_pool_tensor_of_other_stride_dtype_shape_is_refused(lab: Lab) -> None:
    strong = CUDAGraphOptions(weak_ref_output=False)
    first = lab.wrap(lambda x: x + 1, PIECEWISE, "first", cudagraph_options=strong)
    last = lab.wrap(lambda h: h * 1, PIECEWISE, "last")
    x = torch.arange(4.0).view(2, 2)
    with lab.library.capture_scope() as scope, scope.step(PIECEWISE, KEY):
        last(first(x))
    hidden = lab.step(first, x)
    assert torch.equal(lab.step(last, hidden), x + 1)
    for other in (hidden.t(), hidden.view(torch.int32), hidden.view(4), hidden._neg_view()):
        with pytest.raises(StaleInputError):
            lab.step(last, other)


def test_packed_tensor_over_other_parts_is_refused(lab: Lab) -> None:
    from bug_classes import Packed

    codes = [torch.ones(2, 2) for _ in range(2)]
    check = checker_for(StaleCheck.IDENTITY, packed := Packed(codes[0], codes[0]))
    check((packed,), {})
    check((Packed(codes[0], codes[0]),), {})
    with pytest.raises(StaleInputError):
        check((Packed(codes[1], codes[0]),), {})


# -- conj and neg bits


@pytest.mark.parametrize(
    "model",
    [
        lambda z: (z * 2).conj(),
        lambda z: (z * 2).conj().imag,
        lambda z: [(z * 2).conj(), (z * 3)._neg_view()],
    ],
)
def test_output_keeps_its_conj_and_neg_bits(lab: Lab, model: Callable[..., Any]) -> None:
    for mode in (FULL, PIECEWISE):
        wrapper = lab.wrap(model, mode)
        lab.capture(wrapper, Z)
        found, expected = lab.step(wrapper, Z), model(Z)
        for one, other in zip(walk(found), walk(expected), strict=True):
            if one.kind == "tensor":
                assert torch.equal(one.value, other.value)
                assert one.value.is_conj() == other.value.is_conj()
                assert one.value.is_neg() == other.value.is_neg()


@pytest.mark.parametrize("change", [torch.conj, torch._neg_view, lambda z: z.conj().imag])
def test_eager_segment_gets_and_returns_bits(lab: Lab, change: Callable[..., Any]) -> None:
    eager = break_point(lambda z, part: (part * 1, change(z * 3)))

    def model(z: Tensor) -> Tensor:
        one, other = eager(z + 1, change(z * 2))
        return one + other

    wrapper, z = lab.wrap(model, PIECEWISE), Z.clone()
    lab.capture(wrapper, z)
    z.mul_(3)
    assert torch.equal(lab.step(wrapper, z), model(z))


def test_argument_returned_with_another_bit_is_refused(lab: Lab) -> None:
    changes = [False]
    eager = break_point(lambda z: z.conj() if changes[0] else z.view(z.shape))
    wrapper = lab.wrap(lambda z: eager(z * 2) + 1, PIECEWISE)
    lab.capture(wrapper, Z)
    assert torch.equal(lab.step(wrapper, Z), Z * 2 + 1)
    changes[0] = True
    with pytest.raises(BreakOutputError):
        lab.step(wrapper, Z)


# -- under a device mode

CACHE = torch.arange(64.0).view(8, 8)
INDEX = torch.tensor([3, 1, 0, 2])


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("device", [default_device, lambda: torch.device("cpu")])
def test_replay_under_a_device_mode_is_right(lab: Lab, mode: Any, device: Any) -> None:
    eager = break_point(lambda x: CACHE[x, None] + torch.zeros(1))
    read = break_point(CACHE.__getitem__)

    def model(x: Tensor) -> Tensor:
        rows = CACHE[x] * 2 + torch.ones(8)
        return rows + eager(x + 0)[:, 0] + read(x + 0)

    wrapper, expected = lab.wrap(model, mode), model(INDEX)
    with device():
        lab.capture(wrapper, INDEX)
        assert torch.equal(lab.step(wrapper, INDEX), expected)
    assert torch.equal(lab.step(wrapper, INDEX), expected)
    with device():
        for _ in range(2):
            assert torch.equal(lab.step(wrapper, INDEX.view(4)), expected)


# -- containers


@dataclass
class Meta:
    x: Tensor
    length: InitVar[int]

    def __post_init__(self, length: int) -> None:
        self.doubled = length * 2

    @cached_property
    def rows(self) -> list[Tensor]:
        return list(self.x)


ONE, OTHER = torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("held", "found"),
    [
        ({"a": ONE, "b": OTHER}, {"b": OTHER, "a": ONE}),
        ({"m": {2: ONE}}, {"m": {2.0: ONE}}),
        (Meta(ONE, 2), Meta(ONE, 3)),
    ],
    ids=["order of a dict", "type of a key", "attribute that is no field"],
)
def test_container_that_differs_is_refused(lab: Lab, held: Any, found: Any, is_first: bool) -> None:
    wrapper = lab.wrap(lambda held: torch.stack([t * 2 for t in tensors_of(held)]))
    lab.capture(wrapper, held)
    if not is_first:
        lab.step(wrapper, held)
    with pytest.raises((StaleInputError, UnkeyedValueError)):
        lab.step(wrapper, found)
    assert lab.step(wrapper, copy.copy(held)) is not None


def test_named_arguments_and_cached_properties_are_no_difference(lab: Lab) -> None:
    wrapper = lab.wrap(lambda meta, y: meta.rows[0] * y[0])
    lab.capture(wrapper, meta=Meta(ONE, 2), y=OTHER)
    for _ in range(2):
        assert torch.equal(lab.step(wrapper, y=OTHER, meta=Meta(ONE, 2)), ONE[0] * OTHER[0])


# -- results of eager segments


def test_sparse_result_of_an_eager_segment_is_refused(lab: Lab) -> None:
    eager = break_point(lambda x: (x * 2).to_sparse())
    with pytest.raises(BreakError, match=r"layout torch\.sparse_coo"):
        lab.capture(lab.wrap(lambda x: eager(x + 1).to_dense(), PIECEWISE), torch.ones(2))


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "one twice": lambda y: (y, y),
    "its rows": lambda y: tuple(y),
    "and its transpose": lambda y: (y, y.t()),
    "and a broadcast of it": lambda y: (y[:1], y[:1].expand(3, 3)),
    "and its imaginary part": lambda y: (torch.complex(y, y), torch.ones(1)),
    "split in three": lambda y: y.chunk(3, dim=-1),
    "with an argument": lambda y: {"a": y, "b": [y[1:], y.view(-1)[2:4]]},
    "in other types": lambda y: (y, y.view(torch.int32)),
    "as bytes that begin oddly": lambda y: (
        (b := y.view(-1).view(torch.uint8).clone())[4:].view(torch.float32),
        b[1:9].view(torch.int8),
    ),
    "without elements": lambda y: (y, y[:0, :0], y[:0, :0]),
    "conjugated": lambda y: (z := torch.complex(y, y + 1), z.conj(), z.conj().imag),
}


@pytest.mark.parametrize("name", RETURNS)
def test_views_that_an_eager_segment_returns_stay_views(lab: Lab, name: str) -> None:
    eager = break_point(lambda x: RETURNS[name](x * 2))

    def model(x: Tensor) -> list[Tensor]:
        returned = eager(x + 1)
        tensors = [node.value for node in walk(returned) if node.kind == "tensor"]
        tensors[0].mul_(3)
        if tensors[-1].is_floating_point() and 0 not in tensors[-1].stride():
            tensors[-1].add_(5)
        return [tensor * 1 for tensor in tensors]

    wrapper, x = lab.wrap(model, PIECEWISE), torch.randn(3, 3)
    lab.capture(wrapper, x)
    for seed in range(2):
        x.copy_(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))
        for one, other in zip(lab.step(wrapper, x), own_copy(model(x)), strict=True):
            assert torch.equal(one, other)


def test_tensor_returned_twice_is_one_object_in_the_model(lab: Lab) -> None:
    same = []
    eager = break_point(lambda x: ((y := x * 2), y))

    def model(x: Tensor) -> Tensor:
        one, other = eager(x + 1)
        same.append(one is other)
        return one.add_(1) + other

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x)
    assert same == [True]
    assert lab.step(wrapper, x).tolist() == model(x).tolist() == [10.0, 10.0]


def test_stub_need_not_share_memory_as_the_function_does(lab: Lab) -> None:
    def stub(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(2) for _ in range(2))

    eager = break_point(capture_stub=stub)(lambda x: (x * 2).chunk(2))
    wrapper, x = lab.wrap(lambda x: torch.cat(eager(x + 1)) + 1, PIECEWISE), torch.arange(4.0)
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), (x + 1) * 2 + 1)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_results_that_share_memory_differently_are_refused(lab: Lab, first: int) -> None:
    ways = (
        lambda y: (y[:2], y[2:]),
        lambda y: (y[:2].clone(), y[2:].clone()),
        lambda y: (y[:2], y[1:3]),
    )
    now = [first]
    eager = break_point(lambda x: ways[now[0]](x * 2))
    wrapper, x = lab.wrap(lambda x: torch.cat(eager(x + 1)) + 1, PIECEWISE), torch.arange(4.0)
    lab.capture(wrapper, x)
    expected = torch.cat(ways[first]((x + 1) * 2)) + 1
    assert torch.equal(lab.step(wrapper, x), expected)
    for now[0] in {0, 1, 2} - {first}:
        with pytest.raises(BreakOutputError):
            lab.step(wrapper, x)
    now[0] = first
    assert torch.equal(lab.step(wrapper, x), expected)

"""Comparing nested results: what counts as equal, and how a difference reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

from graphrt.verify import compare

NAN = float("nan")


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Result:
    logits: torch.Tensor
    n: int


def example() -> dict[str, Any]:
    return {
        "t": torch.arange(6.0).view(2, 3),
        "nested": [Pair(torch.tensor(3), None), (Result(torch.ones(2, dtype=torch.bool), 4),)],
        "name": "x",
    }


def test_compare_of_equal_results_counts_values() -> None:
    found = compare(example(), example())
    assert found.is_equal
    assert found.max_abs_difference == 0
    assert found.num_compared == 5  # None is nothing to compare
    assert str(found) == "5 values are equal"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda r: r["t"].add_(torch.tensor([[0.0, 0, 0], [0, 0, 0.5]])), "['t']"),
        (lambda r: r["nested"][0].a.add_(1), "['nested'][0].a"),
        (lambda r: r["nested"][1][0].logits.logical_not_(), "['nested'][1][0].logits"),
        (lambda r: setattr(r["nested"][1][0], "n", 7), "['nested'][1][0].n"),
        (lambda r: r.update(t=r["t"].double()), "['t']"),
        (lambda r: r.update(t=r["t"][:1]), "['t']"),
        (lambda r: r.update(name=None), "['name']"),
        (lambda r: r.update(more=1), ""),
        (lambda r: r.pop("t"), ""),
        (lambda r: r.update(u=r.pop("t")), ""),
        (lambda r: r["nested"].append(1), "['nested']"),
        (lambda r: r.update(nested=tuple(r["nested"])), "['nested']"),
        (lambda r: r.update(t=[r["t"]]), "['t']"),
    ],
)
def test_compare_of_changed_results_names_the_place(change: Any, path: str) -> None:
    changed = example()
    change(changed)
    found = compare(example(), changed)
    assert [difference.path for difference in found.differences] == [path]
    reverse = compare(changed, example())
    assert [difference.path for difference in reverse.differences] == [path]


def test_difference_gives_size_first_index_and_values() -> None:
    expected = torch.zeros(3, 4)
    actual = expected.clone()
    actual[1, 2], actual[2, 0] = 0.5, -2.0
    (difference,) = compare(expected, actual).differences
    assert difference.first_index == (1, 2)
    assert (difference.expected, difference.found) == ("0.0", "0.5")
    assert difference.max_abs_difference == 2.0
    assert difference.num_differing == 2
    assert "[1, 2]" in str(difference)
    (scalar,) = compare(torch.tensor(1), torch.tensor(3)).differences
    assert scalar.first_index == ()
    assert scalar.max_abs_difference == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_compare_takes_any_nan_for_equal(dtype: torch.dtype) -> None:
    bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]
    poison = torch.full((2,), 0xFF if bits is torch.uint8 else -1, dtype=bits).view(dtype)
    computed = torch.full((2,), NAN).to(dtype)
    assert compare(poison, computed).is_equal
    number = compare(computed, torch.ones(2).to(dtype))
    assert not number.is_equal
    assert math.isnan(number.max_abs_difference)
    assert not compare(computed, torch.ones(2).to(dtype), tolerance=1e9).is_equal


def test_compare_wants_equal_bits_or_an_absolute_tolerance() -> None:
    assert not compare(torch.tensor(0.0), torch.tensor(-0.0)).is_equal
    one, near = torch.tensor([1.0, 5.0]), torch.tensor([1.0, 5.001])
    assert not compare(one, near).is_equal
    tolerated = compare(one, near, tolerance=0.01)
    assert tolerated.is_equal
    assert 0 < tolerated.max_abs_difference < 0.01
    assert not compare(one, near, tolerance=0.0001).is_equal
    assert not compare(torch.tensor([1]), torch.tensor([2]), tolerance=5).is_equal  # integers
    assert compare(1.0, 1.001, tolerance=0.01).is_equal
    assert not compare(torch.tensor(math.inf), torch.tensor(-math.inf), tolerance=1).is_equal
    assert compare(torch.tensor(math.inf), torch.tensor(math.inf)).is_equal


def test_difference_of_nan_makes_the_largest_unknown() -> None:
    expected = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]
    for nan_at in range(3):
        actual = [torch.full((1,), 2.0 + i) for i in range(3)]
        assert compare(expected, actual).max_abs_difference == 4.0
        actual[nan_at].fill_(NAN)
        assert math.isnan(compare(expected, actual).max_abs_difference)


SHORT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def logits(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(20, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)


@SHORT
def test_compare_of_short_floats_forgives_single_elements(dtype: torch.dtype) -> None:
    expected, tolerance = logits(dtype), {dtype: 0.1}
    actual = expected.clone()
    actual[7, 5] += 3
    assert compare(expected, actual, tolerance=tolerance).is_equal
    assert compare(expected, expected * 1.08, tolerance=tolerance).is_equal
    assert not compare(expected, expected * 1.2, tolerance=tolerance).is_equal


@SHORT
@pytest.mark.parametrize("wrong", [0.0, NAN, math.inf, "another row"])
def test_compare_of_short_floats_finds_one_wrong_row(dtype: torch.dtype, wrong: Any) -> None:
    expected, tolerance = logits(dtype), {dtype: 0.1}
    actual = expected.clone()
    actual[7] = expected[6] if wrong == "another row" else wrong
    (difference,) = compare(expected, actual, tolerance=tolerance).differences
    assert difference.first_index is not None
    assert difference.first_index[0] == 7
    assert difference.num_differing <= 1000


def test_compare_of_short_floats_takes_any_size_and_shape() -> None:
    tolerance = {torch.bfloat16: 0.1}
    huge = torch.full((3, 4), 1e30, dtype=torch.bfloat16)
    assert compare(huge, huge * 1.05, tolerance=tolerance).is_equal
    assert not compare(huge, huge * 1.5, tolerance=tolerance).is_equal
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    assert compare(one, one * 1.05, tolerance=tolerance).is_equal
    assert not compare(one, one * 1.5, tolerance=tolerance).is_equal
    zero = torch.zeros(2, dtype=torch.bfloat16)
    assert not compare(zero, zero + 1, tolerance=tolerance).is_equal


def test_compare_of_host_values_wants_equal_type_and_value() -> None:
    assert compare((1, "a", None, NAN), (1, "a", None, NAN)).is_equal
    assert not compare(1, True).is_equal
    assert not compare(1, 1.0).is_equal
    assert not compare(0.0, -0.0).is_equal


def test_compare_of_one_opaque_value_lists_it_and_of_two_tells_them_apart() -> None:
    cache = object()
    found = compare({"cache": cache}, {"cache": cache})
    assert found.is_equal
    assert found.unchecked == ("['cache']",)
    assert "['cache']: expected a object, found another" in str(
        compare({"cache": cache}, {"cache": object()})
    )
    assert not compare(cache, 1).is_equal


def test_compare_ignores_strides() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert compare(x, x.t().contiguous().t()).is_equal
    assert compare(torch.zeros(0, 3), torch.zeros(0, 3)).is_equal
    assert not compare(torch.zeros(0, 3), torch.zeros(0, 2)).is_equal
    assert not compare(torch.tensor([1 + 2j]), torch.tensor([1 + 3j])).is_equal


def test_comparison_of_many_differences_shows_few() -> None:
    found = compare(list(range(9)), list(range(1, 10)))
    assert "and 5 more" in str(found)


@given(st.lists(st.floats(width=32), min_size=1, max_size=6), st.data())
def test_compare_finds_one_changed_element(values: list[float], data: st.DataObject) -> None:
    expected = torch.tensor(values)
    assert compare(expected, expected.clone()).is_equal
    index = data.draw(st.integers(0, len(values) - 1))
    actual = expected.clone()
    actual[index] = 0.25 if values[index] != 0.25 else 0.5
    (difference,) = compare(expected, actual).differences
    assert difference.first_index == (index,)
    assert difference.num_differing == 1

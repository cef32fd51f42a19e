"""Walking, copying and comparing values: with paths and without, the same is seen."""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict, defaultdict
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch

from graphrt.values import (
    as_bits,
    map_tensors,
    own_copy,
    rebuild,
    same_host_value,
    tensors_of,
    walk,
)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    rows: Any
    names: Any = ()


class Colour(tuple[int, int], Enum):  # a host value though it is a tuple
    RED = (1, 2)


def cyclic() -> list[Any]:
    row: list[Any] = [torch.ones(1)]
    row += [row, {"again": row}]
    return row


def defaults() -> dict[str, Any]:
    table: defaultdict[str, Any] = defaultdict(list)
    table["rows"] = [torch.ones(1)]
    return table


SHARED = torch.zeros(2)

VALUES: list[Any] = [
    None,
    torch.ones(2),
    torch.nn.Parameter(torch.ones(2)),
    (1, "two", 3.0, b"4", ..., torch.float32, torch.Size([2]), Colour.RED),
    [SHARED, (SHARED, [SHARED])],
    {"a": torch.ones(1), ("b", 1): {"c": (torch.ones(2), None)}},
    OrderedDict(z=torch.ones(1), a=[torch.ones(2)]),
    Pair(torch.ones(1), Pair(SHARED, (object(), torch.ones(3)))),
    Batch([torch.ones(1), Pair(SHARED, 2)]),
    torch.ones(2, 2).max(0),
    Batch,
    object(),
    defaults(),
    cyclic(),
]


def shape_of(value: Any) -> list[Any]:
    return [(node.path, node.kind, type(node.value), node.num_children) for node in walk(value)]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_tensors_of_finds_tensors_in_the_order_of_walk(value: Any) -> None:
    expected = [node.value for node in walk(value) if isinstance(node.value, torch.Tensor)]
    found = tensors_of(value)
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_map_tensors_keeps_the_structure(value: Any) -> None:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return copies.setdefault(id(tensor), tensor.detach().clone())

    copies: dict[int, torch.Tensor] = {}
    mapped = map_tensors(value, change)
    by_path = rebuild(value, lambda _, x: change(x) if isinstance(x, torch.Tensor) else x)
    assert shape_of(mapped) == shape_of(by_path)
    assert all(
        one is other for one, other in zip(tensors_of(mapped), tensors_of(by_path), strict=True)
    )
    if isinstance(value, defaultdict):
        assert mapped["absent"] == []
        assert "absent" not in value


@pytest.mark.parametrize("value", VALUES[:-1], ids=lambda value: type(value).__name__)
def test_own_copy_shares_no_container_and_no_tensor(value: Any) -> None:
    for one, other in zip(walk(value), walk(own_copy(value)), strict=True):
        assert (one.path, one.kind) == (other.path, other.kind)
        if one.kind == "tensor":
            assert torch.equal(one.value, other.value)
            assert one.value.data_ptr() != other.value.data_ptr()
        elif one.kind == "container" and not isinstance(one.value, tuple):
            assert one.value is not other.value


def test_rebuild_gives_each_leaf_the_path_of_walk() -> None:
    for value in VALUES:
        seen: list[Any] = []
        rebuild(value, lambda path, leaf, seen=seen: seen.append((path, id(leaf))))
        leaves = [node for node in walk(value) if node.kind != "container"]
        assert seen == [(node.path, id(node.value)) for node in leaves]


NAN, OTHER_NAN = float("nan"), struct.unpack("d", struct.pack("q", -1))[0]


@pytest.mark.parametrize(
    ("one", "other", "tolerance", "is_same"),
    [
        (1, 1, None, True),
        (1, True, None, False),
        (1, 1.0, None, False),
        (1, 2, 5.0, False),
        ("a", "a", None, True),
        (0.0, -0.0, None, False),
        (0.0, -0.0, 0.1, True),
        (NAN, OTHER_NAN, None, True),
        (NAN, 1.0, 1e9, False),
        (1.0, NAN, None, False),
        (1.0, 1.001, None, False),
        (1.0, 1.001, 0.01, True),
        (1.0, 1.1, 0.01, False),
        (float("inf"), float("inf"), 0.1, True),
        (float("inf"), float("-inf"), 0.1, False),
        (complex(1, 0.0), complex(1, -0.0), None, False),
        (complex(1, NAN), complex(1, NAN), None, True),
        (1 + 1j, 1.001 + 1j, 0.01, True),
    ],
)
def test_same_host_value_compares_type_and_bits(
    one: Any, other: Any, tolerance: float | None, is_same: bool
) -> None:
    assert same_host_value(one, other, tolerance) is is_same
    assert same_host_value(other, one, tolerance) is is_same


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e5m2, torch.int64]
)
def test_as_bits_views_the_same_bytes(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2, dtype=dtype)
    bits = as_bits(tensor.t())
    assert bits.shape == (2, 3)
    assert not bits.dtype.is_floating_point
    bits.fill_(1)
    assert tensor.view(torch.uint8).any()
    assert as_bits(torch.zeros(3, dtype=torch.complex64)).shape == (3, 2)

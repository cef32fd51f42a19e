"""The two ways through a value: with paths, and without. They see the same."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch

from graphrt.graphs.leaves import map_tensors, rebuild, tensors_of, walk


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
def test_tensors_are_found_in_the_order_of_the_walk(value: Any) -> None:
    expected = [node.value for node in walk(value) if isinstance(node.value, torch.Tensor)]
    found = tensors_of(value)
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_mapping_changes_tensors_and_keeps_the_structure(value: Any) -> None:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return twins.setdefault(id(tensor), tensor.detach().clone())

    twins: dict[int, torch.Tensor] = {}
    mapped = map_tensors(value, change)
    by_path = rebuild(value, lambda _, x: change(x) if isinstance(x, torch.Tensor) else x)
    assert shape_of(mapped) == shape_of(by_path)
    assert all(
        one is other for one, other in zip(tensors_of(mapped), tensors_of(by_path), strict=True)
    )
    if isinstance(value, defaultdict):
        assert mapped["absent"] == []
        assert "absent" not in value

"""Walks the values that a callable takes and returns, copies and compares them.

A leaf is a tensor or a host value reached through tuples, lists, dicts, named tuples and
dataclasses. Anything else is *opaque*: kept by reference, never compared.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch

HOST_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    slice,
    Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)

_LEAF_TYPES = (torch.Tensor, *HOST_TYPES)
_PLAIN_LEAVES = frozenset(
    (torch.Tensor, torch.nn.Parameter, bool, int, float, complex, str, bytes, type(None))
)
_PLAIN_CONTAINERS = frozenset((tuple, list, dict))
"""Most values have one of these exact types, which a look-up tells faster than ``isinstance``."""

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Step(NamedTuple):
    """One step from a container to a child."""

    kind: Literal["item", "attribute"]
    name: Any


Path = tuple[Step, ...]

Kind = Literal["tensor", "host", "opaque", "container"]


class Node(NamedTuple):
    """One place in a structure: a leaf, or a container with its number of children."""

    path: Path
    kind: Kind
    value: Any
    num_children: int = 0


def format_path(path: Path, root: str = "") -> str:
    """Write ``path`` as one would in Python: ``kwargs['meta'].table[2]``."""
    parts = (f"[{step.name!r}]" if step.kind == "item" else f".{step.name}" for step in path)
    return root + "".join(parts)


def walk(value: Any, path: Path = (), _above: tuple[int, ...] = ()) -> Iterator[Node]:
    """Yield every container and leaf of ``value``, parents before children.

    A container that contains itself is opaque at the place where it recurs.
    """
    parts = None if id(value) in _above else _children(value)
    if parts is None:
        kind: Kind = "host" if isinstance(value, HOST_TYPES) else "opaque"
        yield Node(path, "tensor" if isinstance(value, torch.Tensor) else kind, value)
        return
    step_kind, names, children = parts
    yield Node(path, "container", value, len(children))
    for name, child in zip(names, children, strict=True):
        yield from walk(child, (*path, Step(step_kind, name)), (*_above, id(value)))


def walk_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Node]:
    """Walk the arguments of a call; paths begin with the step ``args`` or ``kwargs``."""
    return [
        *walk(args, (Step("attribute", "args"),)),
        *walk(kwargs, (Step("attribute", "kwargs"),)),
    ]


def format_call_path(path: Path) -> str:
    """Write a path of ``walk_call``: ``args[0]``, ``kwargs['meta'].table``."""
    return format_path(path[1:], root=path[0].name)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of ``value``, in the order of ``walk``."""
    found: list[torch.Tensor] = []
    _collect((value,), (), found)
    return found


def rebuild(value: Any, leaf: Callable[[Path, Any], Any]) -> Any:
    """Return a copy of the containers of ``value`` with ``leaf(path, value)`` at each leaf."""
    paths = iter([node.path for node in walk(value) if node.kind != "container"])
    return _map(value, lambda child: leaf(next(paths), child), ())


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of the containers of ``value`` with ``change`` applied to each tensor."""
    return _map(value, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, ())


def own_copy(value: Any) -> Any:
    """Return a copy of ``value`` that shares no container and no tensor with it."""
    return map_tensors(value, torch.Tensor.clone)


def same_host_value(expected: Any, found: Any, tolerance: float | None = None) -> bool:
    """True if a program that holds ``expected`` as a constant would do the same for ``found``.

    0.0 is not -0.0, but NaN is NaN whatever its bits. ``tolerance``: the largest difference of
    floats that does not count.
    """
    if expected is found:
        return True
    if type(expected) is not type(found):
        return False
    if isinstance(expected, float):
        if tolerance is not None and abs(expected - found) <= tolerance:
            return True
        if math.isnan(expected):
            return math.isnan(found)
        return expected == found and math.copysign(1, expected) == math.copysign(1, found)
    if isinstance(expected, complex):
        return same_host_value(expected.real, found.real, tolerance) and same_host_value(
            expected.imag, found.imag, tolerance
        )
    return bool(expected == found)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the same bytes as integers, one for each element (two for a complex one)."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.dtype.itemsize])


# The next two walk without paths: a capture asks for the tensors of all arguments of each eager
# segment, and outputs that are cloned or checked are copied at every step.


def _collect(values: Sequence[Any], above: tuple[int, ...], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif id(value) not in above:
            parts = _children(value)
            if parts is not None:
                _collect(parts[2], (*above, id(value)), found)


def _map(value: Any, leaf: Callable[[Any], Any], above: tuple[int, ...]) -> Any:
    parts = None if id(value) in above else _children(value)
    if parts is None:
        return leaf(value)
    _, names, children = parts
    below = (*above, id(value))
    return _copy_with(value, names, [_map(child, leaf, below) for child in children])


# How a container's children are reached, the names of the steps to them, and they, in order. A
# plain tuple, because it is made for every container at every step that clones its outputs.
_Children = tuple[Literal["item", "attribute"], Sequence[Any], Sequence[Any]]


def _children(value: Any) -> _Children | None:
    """Return what a container is made of, None for a leaf."""
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        return None
    if kind not in _PLAIN_CONTAINERS:
        # Most other values are opaque, which these few types tell faster than those of leaves.
        if not (isinstance(value, (dict, tuple, list)) or dataclasses.is_dataclass(value)):
            return None
        if isinstance(value, _LEAF_TYPES):
            return None
    if isinstance(value, dict):
        return "item", list(value), list(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names = value._fields
        return "attribute", names, [getattr(value, name) for name in names]
    if isinstance(value, tuple | list):
        return "item", range(len(value)), list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return "attribute", names, [getattr(value, name) for name in names]
    return None


def _copy_with(value: Any, names: Sequence[Any], children: list[Any]) -> Any:
    """Return a copy of the container ``value`` with these children."""
    if isinstance(value, dict):
        # A copy keeps what a subclass adds (order, default factory); its entries are replaced.
        entries = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            entries[name] = child
        return entries
    if isinstance(value, tuple):
        make = getattr(value, "_make", type(value))
        return make(children)
    if isinstance(value, list):
        return children
    copied = copy.copy(value)
    for name, child in zip(names, children, strict=True):
        # Frozen dataclasses too: the copy is ours, no caller has seen it yet.
        object.__setattr__(copied, name, child)
    return copied

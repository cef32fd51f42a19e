"""Walks the values a callable takes and returns: to their leaves, and back.

A leaf is a tensor or a host value reached through tuples, lists, dicts, named tuples and
dataclasses. Anything else is *opaque*: kept by reference, never compared.
"""

from __future__ import annotations

import copy
import dataclasses
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
"""Known by their exact type: sooner than by asking each of the types above, and most values are."""


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


def walk(value: Any, path: Path = ()) -> Iterator[Node]:
    """Yield every container and leaf of ``value``, parents before children."""
    return _walk(value, path, ())


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


def rebuild(value: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of the containers of ``value`` with ``leaf(path, value)`` at each leaf.

    A container that contains itself is opaque at the place where it recurs.
    """
    return _rebuild(value, leaf, path, ())


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of the containers of ``value`` with ``change`` applied to each tensor."""
    return _map(value, change, ())


def _walk(value: Any, path: Path, above: tuple[int, ...]) -> Iterator[Node]:
    parts = None if id(value) in above else _parts(value)
    if parts is None:
        yield Node(path, _leaf_kind(value), value)
        return
    kind, names, children = parts
    yield Node(path, "container", value, len(children))
    below = (*above, id(value))
    for name, child in zip(names, children, strict=True):
        yield from _walk(child, (*path, Step(kind, name)), below)


# The next two walk without paths: a capture asks for the tensors of every argument of every gap,
# and outputs that are cloned or leased are rebuilt at every step.


def _collect(values: Sequence[Any], above: tuple[int, ...], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) not in _PLAIN_LEAVES and id(value) not in above:
            parts = _parts(value)
            if parts is not None:
                _collect(parts[2], (*above, id(value)), found)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor], above: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    parts = None if id(value) in above else _parts(value)
    if parts is None:
        return value
    _, names, children = parts
    below = (*above, id(value))
    return _twin(value, names, [_map(child, change, below) for child in children])


def _leaf_kind(value: Any) -> Kind:
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "host" if isinstance(value, HOST_TYPES) else "opaque"


# How a container's children are reached, the names of the steps to them, and they, in order. A
# plain tuple, because it is made for every container at every step that clones its outputs.
_Parts = tuple[Literal["item", "attribute"], Sequence[Any], Sequence[Any]]


def _parts(value: Any) -> _Parts | None:
    """Return what a container is made of, None for a leaf."""
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        return None
    if kind not in _PLAIN_CONTAINERS:
        # Most other values are opaque: these few types tell, sooner than the many of leaves.
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


def _rebuild(
    value: Any, leaf: Callable[[Path, Any], Any], path: Path, above: tuple[int, ...]
) -> Any:
    parts = None if id(value) in above else _parts(value)
    if parts is None:
        return leaf(path, value)
    kind, names, children = parts
    below = (*above, id(value))
    rebuilt = [
        _rebuild(child, leaf, (*path, Step(kind, name)), below)
        for name, child in zip(names, children, strict=True)
    ]
    return _twin(value, names, rebuilt)


def _twin(value: Any, names: Sequence[Any], children: list[Any]) -> Any:
    """Return a container like ``value`` with these children."""
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
    twin = copy.copy(value)
    for name, child in zip(names, children, strict=True):
        # Frozen dataclasses too: the copy is ours, nobody has seen it yet.
        object.__setattr__(twin, name, child)
    return twin

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


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the leaves of ``value``."""
    return (node.value for node in walk(value) if node.kind == "tensor")


def rebuild(value: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of the containers of ``value`` with ``leaf(path, value)`` at each leaf.

    A container that contains itself is opaque at the place where it recurs.
    """
    return _rebuild(value, leaf, path, ())


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of the containers of ``value`` with ``change`` applied to each tensor."""
    return rebuild(value, lambda _, item: change(item) if isinstance(item, torch.Tensor) else item)


def _walk(value: Any, path: Path, above: tuple[int, ...]) -> Iterator[Node]:
    children = None if id(value) in above else _children(value)
    if children is None:
        yield Node(path, _leaf_kind(value), value)
        return
    yield Node(path, "container", value, len(children))
    for step, child in children:
        yield from _walk(child, (*path, step), (*above, id(value)))


def _leaf_kind(value: Any) -> Kind:
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "host" if isinstance(value, HOST_TYPES) else "opaque"


def _children(value: Any) -> Sequence[tuple[Step, Any]] | None:
    """Return the children of a container in their order, None for a leaf."""
    if isinstance(value, _LEAF_TYPES):
        return None
    if isinstance(value, dict):
        return [(Step("item", key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(Step("attribute", name), getattr(value, name)) for name in value._fields]
    if isinstance(value, tuple | list):
        return [(Step("item", index), child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [(Step("attribute", name), getattr(value, name)) for name in names]
    return None


def _rebuild(
    value: Any, leaf: Callable[[Path, Any], Any], path: Path, above: tuple[int, ...]
) -> Any:
    children = None if id(value) in above else _children(value)
    if children is None:
        return leaf(path, value)
    below = (*above, id(value))
    rebuilt = [_rebuild(child, leaf, (*path, step), below) for step, child in children]
    if isinstance(value, dict):
        # A copy keeps what a subclass adds (order, default factory); its entries are replaced.
        entries = copy.copy(value)
        for (step, _), child in zip(children, rebuilt, strict=True):
            entries[step.name] = child
        return entries
    if isinstance(value, tuple):
        make = getattr(value, "_make", type(value))
        return make(rebuilt)
    if isinstance(value, list):
        return rebuilt
    twin = copy.copy(value)
    for (step, _), child in zip(children, rebuilt, strict=True):
        # Frozen dataclasses too: the copy is ours, nobody has seen it yet.
        object.__setattr__(twin, step.name, child)
    return twin

"""Walks the values that a callable takes and returns, copies and compares them.

A leaf is a tensor or a host value (see ``is_host``) reached through tuples, lists, dicts, named
tuples and dataclasses. Anything else is *opaque*: kept by reference, never compared.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import inspect
import math
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import is_
from pathlib import PurePath
from types import GenericAlias, UnionType
from typing import Any, Literal, NamedTuple

import torch

_EXACT_TYPES = (
    bool,
    int,
    str,
    bytes,
    bytearray,
    type(None),
    type(...),
    type(NotImplemented),
    type,
    Enum,
    Fraction,
    uuid.UUID,
    re.Pattern,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
"""Values of one of these types that are equal are the same in every other respect too."""

_TEXT_TYPES = (
    Decimal,
    range,
    PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    GenericAlias,
    UnionType,
    torch.finfo,
    torch.iinfo,
)
"""Equal values may differ (1.0 and 1.00, empty ranges, one instant in two zones, Windows paths in
two cases); texts do not."""

HOST_TYPES = (*_EXACT_TYPES, *_TEXT_TYPES, float, complex, slice)
_MUTABLE_HOST_TYPES = (set, bytearray)

_LEAF_TYPES = (torch.Tensor, *HOST_TYPES)
_PLAIN_LEAVES = frozenset(
    (torch.Tensor, torch.nn.Parameter, bool, int, float, complex, str, bytes, type(None))
)
_PLAIN_EXACT = frozenset((bool, int, str, bytes))
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


def dotted(path: Path) -> str:
    """Write ``path`` as output specs do: ``past.1.key``; empty for the value itself."""
    return ".".join(str(step.name) for step in path)


def walk(value: Any, path: Path = (), _above: tuple[int, ...] = ()) -> Iterator[Node]:
    """Yield every container and leaf of ``value``, parents before children.

    A container that contains itself is opaque at the place where it recurs.
    """
    parts = None if id(value) in _above else _children(value)
    if parts is None:
        is_tensor = isinstance(value, torch.Tensor)
        kind: Kind = "tensor" if is_tensor else "host" if is_host(value) else "opaque"
        yield Node(path, kind, value)
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


def format_call_path(path: Path, names: Sequence[str] = ()) -> str:
    """Write a path of ``walk_call`` as the callee has it: ``x``, ``meta.table[2]``.

    ``names``: of its positional parameters, as ``parameters_of`` tells them; ``args[0]`` without.
    """
    if len(path) == 1:
        return str(path[0].name)
    first = path[1].name
    if path[0].name == "args":
        first = names[first] if first < len(names) else f"args[{first}]"
    return format_path(path[2:], root=first)


def parameters_of(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters that take positional arguments; none where it cannot be told."""
    try:
        called = fn.forward if isinstance(fn, torch.nn.Module) else fn
        parameters = inspect.signature(called).parameters.values()
    except Exception:  # noqa: BLE001  It is no Python function, or code of its own raises.
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(item.name for item in parameters if item.kind in positional)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of ``value``, in the order of ``walk``."""
    found: list[torch.Tensor] = []
    _collect((value,), (), found)
    return found


def rebuild(value: Any, leaf: Callable[[Path, Any], Any]) -> Any:
    """Return a copy of the containers of ``value`` with ``leaf(path, value)`` at each leaf."""
    if _children(value) is None:  # Most results of eager segments are one tensor.
        return leaf((), value)
    paths = iter([node.path for node in walk(value) if node.kind != "container"])
    return _map(value, lambda child: leaf(next(paths), child), ())


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of the containers of ``value`` with ``change`` applied to each leaf."""
    return _map(value, change, ())


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of the containers of ``value`` with ``change`` applied to each tensor."""
    return _map(value, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, ())


def own_copy(value: Any) -> Any:
    """Return a copy of ``value`` that shares no container and no tensor with it."""
    return map_tensors(value, torch.Tensor.clone)


def is_host(value: Any) -> bool:
    """True for a value of Python's or numpy's that a program holds as a constant.

    Numbers, texts, dates, paths, types, ranges; sets of these and of tuples of these.
    """
    if type(value) in _PLAIN_EXACT:
        return True
    if isinstance(value, slice):
        return all(map(is_host, (value.start, value.stop, value.step)))
    if isinstance(value, set | frozenset):
        return all(map(_is_hashable_host, value))
    is_plain = isinstance(value, (*HOST_TYPES, *_types_of_numpy("dtype")))
    return is_plain or _is_numpy_value(value)


def is_mutable_host(value: Any) -> bool:
    """True for a host value that its owner may change in place: it has to be kept by copy."""
    return isinstance(value, _MUTABLE_HOST_TYPES) and is_host(value)


def is_equal_only_if_same(value: Any) -> bool:
    """True for a host value that no other one of its type equals but differs from."""
    is_exact = isinstance(value, _EXACT_TYPES) and not _attributes(value)
    return is_exact or (_is_numpy_value(value) and value.dtype.kind in "biu")


def kept_host_value(value: Any) -> Any:
    """``value``, or a copy of a host value that can be changed in place."""
    return copy.copy(value) if is_mutable_host(value) else value


def _is_hashable_host(value: Any) -> bool:
    return all(map(_is_hashable_host, value)) if type(value) is tuple else is_host(value)


def _is_numpy_value(value: Any) -> bool:
    """True for a numpy scalar; not for ``numpy.void``, which may be a view of an array."""
    return isinstance(value, _types_of_numpy("generic")) and value.dtype.kind != "V"


def _types_of_numpy(name: str) -> tuple[Any, ...]:
    """A type of numpy's. Where a value is one, numpy has been imported; it is no dependency."""
    found = getattr(sys.modules.get("numpy"), name, None)
    return () if found is None else (found,)


def same_host_value(expected: Any, found: Any, tolerance: float | None = None) -> bool:
    """True if a program that holds ``expected`` as a constant would do the same for ``found``.

    0.0 is not -0.0, but NaN is NaN whatever its bits. ``tolerance``: the largest difference of
    floats that does not count.
    """
    if expected is found:
        return True
    if type(expected) is not type(found):
        return False
    if type(expected) in _PLAIN_EXACT:
        return bool(expected == found)
    if type(expected) not in _PLAIN_LEAVES:
        added, found_added = _attributes(expected), _attributes(found)
        if (added or found_added) and not same_host_value(added, found_added, tolerance):
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
    if isinstance(expected, slice):
        return same_host_value(
            (expected.start, expected.stop, expected.step),
            (found.start, found.stop, found.step),
            tolerance,
        )
    if type(expected) is tuple:
        # Mostly they are the same objects, and a call for each would cost ten times as much.
        return len(expected) == len(found) and (
            all(map(is_, expected, found))
            or all(same_host_value(*pair, tolerance) for pair in zip(expected, found, strict=True))
        )
    if isinstance(expected, set | frozenset):
        # Equal elements may differ: 1, 1.0 and True are one element.
        by_value = {item: item for item in expected}
        return len(expected) == len(found) and all(
            item in by_value and same_host_value(by_value[item], item, tolerance) for item in found
        )
    if isinstance(expected, _EXACT_TYPES) or is_equal_only_if_same(expected):
        return bool(expected == found)
    return is_host(expected) and repr(expected) == repr(found)


def _attributes(value: Any) -> tuple[tuple[str, Any], ...]:
    """What a subclass of a number or text adds to one value of it."""
    if isinstance(value, type | Enum):
        return ()
    return tuple(sorted(getattr(value, "__dict__", {}).items()))


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the same bytes as integers, one for each element (two for a complex one)."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.dtype.itemsize])


def storage_start(tensor: torch.Tensor) -> int:
    """Address of the storage; 0 where there is none, as of the zeros of forward-mode autograd."""
    is_stored = tensor.layout is torch.strided and not tensor._is_zerotensor()
    return tensor.untyped_storage().data_ptr() if is_stored else 0


def bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A view of the bytes of one storage from the first to the last that any of ``tensors`` has."""
    first = min(tensor.storage_offset() * tensor.dtype.itemsize for tensor in tensors)
    last = max(tensors, key=_end)
    flat = torch.empty(0, dtype=torch.uint8, device=last.device)
    return flat.set_(last.untyped_storage(), first, (_end(last) - first,), (1,))


def _end(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the storage to the end of the last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
    return int(last + 1) * tensor.dtype.itemsize


# The next two walk without paths: a capture asks for the tensors of all arguments of each eager
# segment, and outputs that are cloned or checked are copied at every step.


def _collect(values: Sequence[Any], above: tuple[int, ...], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) not in _PLAIN_LEAVES:
            parts = _children(value)
            if parts is not None and id(value) not in above:
                _collect(parts[2], (*above, id(value)), found)


def _map(value: Any, leaf: Callable[[Any], Any], above: tuple[int, ...]) -> Any:
    parts = _children(value)
    if parts is None or id(value) in above:
        return leaf(value)
    _, names, children = parts
    below = (*above, id(value))
    # Most children are leaves, which need no call of their own.
    changed = [
        leaf(child) if type(child) in _PLAIN_LEAVES else _map(child, leaf, below)
        for child in children
    ]
    return _copy_with(value, names, changed)


# How a container's children are reached, the names of the steps to them, and they, in order. A
# plain tuple, because it is made for every container at every step that clones its outputs.
_Children = tuple[Literal["item", "attribute"], Sequence[Any], Sequence[Any]]


def _children(value: Any) -> _Children | None:
    """Return what a container is made of, None for a leaf."""
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        return None
    if kind is tuple or kind is list:
        return "item", range(len(value)), list(value)
    if kind is dict:
        return "item", list(value), list(value.values())
    # Most other values are opaque, which these few types tell faster than those of leaves.
    if not (isinstance(value, (dict, tuple, list)) or dataclasses.is_dataclass(value)):
        return None
    if isinstance(value, _LEAF_TYPES):
        return None
    if isinstance(value, dict):
        return "item", list(value), list(value.values())
    names: Sequence[Any] | None = getattr(kind, "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return "attribute", names, [getattr(value, name) for name in names]
    if isinstance(value, tuple | list):
        return "item", range(len(value)), list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _attribute_names(value)
        return "attribute", names, [getattr(value, name) for name in names]
    return None


def _attribute_names(value: Any) -> list[str]:
    """The fields of a dataclass, and what was set besides (by ``__post_init__``, by its owner).

    Without cached properties: they follow from the rest, and appear when somebody asks.
    """
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    besides = getattr(value, "__dict__", {})
    if len(besides) > len(names) or not besides.keys() <= set(names):
        kind = type(value)
        names += [
            name
            for name in besides
            if name not in names
            and not isinstance(getattr(kind, name, None), functools.cached_property)
        ]
    return names


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

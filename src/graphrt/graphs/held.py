"""The tensors outside the pool that a program touches: held, named, and checked for moves.

A program holds the *storage* beside the tensor object, so an address cannot be reused behind its
back. While it is held, ``untyped_storage()`` of a tensor over it is one and the same object; that
identity, never an address, decides whether something moved.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, NoneType
from typing import Any, NamedTuple

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.graphs.values import walk

# What most attributes of a module are. By the exact type: asking torch whether a value is a tensor
# costs several times as much, and there are thousands.
_NO_TENSORS = frozenset(
    (NoneType, bool, int, float, str, dict, list, tuple, set, OrderedDict, FunctionType)
)
_REGISTERS = frozenset(("_parameters", "_buffers", "_modules"))
_PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Made of no other tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """One tensor outside the pool that a program keeps alive."""

    name: str
    """A module path where one is known, else where it was given, else its dtype and shape."""
    tensor: torch.Tensor
    storage: torch.UntypedStorage | None
    """None for layouts without one storage (sparse); only the tensor object is held then."""
    holder: object | None = None
    attributes: tuple[str, ...] = ()
    """Where the name is looked up again: ``holder.attributes[0].attributes[1]...``."""
    touched: bool = True
    """False: reachable from the callable by name, and the recording did not see it used."""
    written: bool = False
    is_named: bool = True
    """False: only the recording saw it, so nothing but an observation can find it."""

    def has_moved(self) -> bool:
        """True if another storage now stands behind the name, or behind the tensor object."""
        current: Any = self.tensor
        if self.holder is not None:
            current = self.holder
            for attribute in self.attributes:
                current = getattr(current, attribute, None)
        if not isinstance(current, torch.Tensor):
            return True
        if self.storage is None:
            return current is not self.tensor
        return current.untyped_storage() is not self.storage


class TensorRef(NamedTuple):
    """A tensor that a program touches or could touch; several may lie in one storage."""

    name: str
    """Empty: what it is called if nothing names its storage better is made up where needed."""
    tensor: torch.Tensor
    holder: object | None = None
    attributes: tuple[str, ...] = ()
    touched: bool = True
    written: bool = False


class ExternalsReport(NamedTuple):
    """What ``check_externals`` found."""

    num_checked: int
    moved: tuple[str, ...]
    """Names of the externals that another storage stands behind now."""
    invalidated: tuple[tuple[str, RuntimeMode, BatchDescriptor], ...]
    """(owner, mode, key) of the programs that became invalid."""

    @property
    def is_unchanged(self) -> bool:
        """True if every program is as valid as it was."""
        return not self.moved


def modules_of(target: object) -> dict[str, torch.nn.Module]:
    """Return every module reachable from a callable, by path.

    Followed: modules, wrappers (``runnable``), bound methods, partials, closures, default
    arguments, and the globals a function names.
    """
    names: dict[str, torch.nn.Module] = {}
    seen: set[int] = set()
    for prefix, root in _roots(target, "", set()):
        # As ``named_modules``, whose nested generators cost as much as the rest of a capture's
        # bookkeeping: a parent before its children, each module where it is met first.
        pending = [(prefix, root)]
        while pending:
            path, module = pending.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            names[path] = module
            if not module._modules:
                continue
            inner = f"{path}." if path else ""
            children = [
                (inner + name, child)
                for name, child in module._modules.items()
                if child is not None
            ]
            pending += reversed(children)
    return names


def tensors_of_modules(modules: Mapping[str, torch.nn.Module]) -> Iterator[TensorRef]:
    """Yield parameters, buffers and plain tensor attributes of ``modules``, by name."""
    for path, module in modules.items():
        for attributes in _attributes(module):
            for attribute, value in attributes.items():
                kind = type(value)
                if kind in _NO_TENSORS or not isinstance(value, torch.Tensor):
                    continue
                name = f"{path}.{attribute}" if path else attribute
                if kind in _PLAIN_TENSORS:
                    yield TensorRef(name, value, module, (attribute,), touched=False)
                else:
                    yield from _parts_of_packed(name, value, module, (attribute,))


def attributes_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what ``getattr`` finds on a module beside its submodules and its class."""
    for attributes in _attributes(module):
        for attribute, value in attributes.items():
            if attribute not in _REGISTERS:
                yield attribute, value


def _attributes(module: torch.nn.Module) -> tuple[Mapping[str, Any], ...]:
    return module._parameters, module._buffers, vars(module)


def hold(
    refs: Iterable[TensorRef],
    owns: Callable[[torch.Tensor], bool],
    previous: Iterable[HeldTensor] = (),
) -> list[HeldTensor]:
    """Merge ``refs`` by storage; pool-owned ones are left out. Named refs come before the others.

    The first one of a storage gives it its name; every later one adds what it knows. Two names of
    one storage (tied weights) are both kept: either may be replaced.
    ``previous``: what another program of the same callable holds. Whatever stands unchanged behind
    its name is known to lie outside the pool, which is slow to ask of hundreds of weights.
    """
    known = {(id(item.holder), item.attributes): item for item in previous if item.holder}
    kept: list[tuple[TensorRef, torch.UntypedStorage | None]] = []
    # By the id of a storage that is kept: it lives as long as these, so the id is its own.
    is_named: dict[int, bool] = {}
    touched: set[int] = set()
    written: set[int] = set()
    for item in refs:
        tensor = item.tensor
        if tensor.layout is not torch.strided:
            kept.append((item, None))
            continue
        storage = tensor.untyped_storage()
        key = id(storage)
        has_name = is_named.get(key)
        if has_name is None:
            old = known.get((id(item.holder), item.attributes))
            is_known = old is not None and old.tensor is tensor and old.storage is storage
            if not is_known and owns(tensor):
                continue
            is_named[key] = item.holder is not None
        if has_name is None or (has_name and item.holder is not None):
            kept.append((item, storage))
        if item.touched:
            touched.add(key)
        if item.written:
            written.add(key)
    externals = []
    for (name, tensor, holder, attributes, is_touched, is_written), place in kept:
        if place is not None:
            is_touched, is_written = id(place) in touched, id(place) in written
        old = known.get((id(holder), attributes))
        if (
            old is not None
            and old.tensor is tensor
            and old.storage is place
            and (old.name, old.touched, old.written) == (name, is_touched, is_written)
        ):
            externals.append(old)
            continue
        told = name or f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
        externals.append(
            HeldTensor(told, tensor, place, holder, attributes, is_touched, is_written, bool(name))
        )
    return externals


def bytes_of(externals: Iterable[HeldTensor]) -> int:
    """Bytes of the distinct storages."""
    storages = {id(item.storage): item.storage for item in externals if item.storage is not None}
    return sum(storage.nbytes() for storage in storages.values())


def find_holder(address: int, num_bytes: int, target: object) -> str:
    """Name the module attribute or closure variable that keeps these bytes; empty if unknown."""
    modules = modules_of(target)
    places = [
        (".".join(part for part in (path, attribute) if part), value)
        for path, module in modules.items()
        for attribute, value in attributes_of(module)
    ]
    for name, value in [*places, *_captured_values(target)]:
        for node in walk(value):
            if node.kind == "tensor" and address <= node.value.data_ptr() < address + num_bytes:
                return name
    return ""


def _parts_of_packed(
    name: str, tensor: torch.Tensor, holder: object, attributes: tuple[str, ...]
) -> Iterator[TensorRef]:
    """A packed tensor (a subclass made of others) stands for the tensors it is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield TensorRef(name, tensor, holder, attributes, touched=False)
        return
    inner_names, _ = flatten()
    for inner in inner_names:
        yield from _parts_of_packed(
            f"{name}.{inner}", getattr(tensor, inner), holder, (*attributes, inner)
        )


def _roots(target: object, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (prefix, module) for the outermost modules behind a callable."""
    if id(target) in seen:
        return
    seen.add(id(target))
    if isinstance(target, torch.nn.Module):
        yield prefix, target
    elif isinstance(target, functools.partial):
        for part in (target.func, *target.args, *target.keywords.values()):
            yield from _roots(part, prefix, seen)
    elif _has(target, "unwrap") and _has(target, "runnable"):
        yield from _roots(target.runnable, prefix, seen)  # type: ignore[attr-defined]  # it has one
    elif _has(target, "__func__"):
        yield from _roots(getattr(target, "__self__", None), prefix, seen)
    elif _has(target, "__code__"):
        for name, value in _captured_values(target):
            yield from _roots(value, name, seen)


def _captured_values(function: object) -> Iterator[tuple[str, Any]]:
    """Yield what a Python function carries: closure cells, defaults, globals it names."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # a variable of an outer function that was not assigned yet
    defaults = getattr(function, "__defaults__", None) or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
    yield from (getattr(function, "__kwdefaults__", None) or {}).items()
    scope = getattr(function, "__globals__", {})
    yield from ((name, scope[name]) for name in code.co_names if name in scope)


def _has(target: object, name: str) -> bool:
    """``hasattr`` for any object: one whose ``__getattr__`` raises another error has nothing."""
    try:
        return hasattr(target, name)
    except Exception:  # noqa: BLE001  A lazy proxy among a function's globals, torch.classes.x.
        return False

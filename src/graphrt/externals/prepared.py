"""What belongs to resources, and what of it the code that prepares them may set before a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch

from graphrt.externals.code_names import names_in
from graphrt.externals.places import (
    MISSING,
    Place,
    is_host_scalar,
    is_odd,
    module_of,
    parts_in,
    parts_of_partial,
    read_cell,
    read_member,
)
from graphrt.externals.reachable import MAX_OBJECTS, Walk

_PREPARING = ("reserve", "prepare_for_capture", "freeze", "prepare")
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SETTING = frozenset(("setattr", "vars", "__dict__", "__setattr__"))
"""Names by which code sets attributes whose names it computes."""


class Prepared:
    """The resources of a callable, and the plain objects and containers that they are made of."""

    def __init__(self, resources: Iterable[object]) -> None:
        resources = tuple(resources)
        self._parts = _parts_of(resources)
        methods = (getattr(item, name, None) for item in resources for name in _PREPARING)
        self._walks = [_Preparing(method) for method in methods if callable(method)]

    def owns(self, place: Place) -> bool:
        """True for a place in a resource. A module that stands in one is the model's."""
        return id(place.owner) in self._parts and not issubclass(type(place.value), torch.nn.Module)

    def may_set(self, place: Place) -> bool:
        """True for a place where a resource may set another value before a run.

        That is a variable or attribute that code of its preparation assigns, also of another object
        that this code reaches (a module), whatever is in a container that gets entries from this
        code, and of its own in any that this code names. What others set there (a scale, a flag) is
        a setting like any other.
        """
        is_owned = self.owns(place)
        if not is_owned and issubclass(type(place.value), (torch.nn.Module, torch.Tensor)):
            return False
        return any(walk.may_set(place, is_owned) for walk in self._walks)


class _Preparing:
    """What the code sets that one method of a resource reaches."""

    def __init__(self, method: object) -> None:
        self._walk = Walk(method)
        found = self._walk.follow(method)
        self._objects = objects = list(found.objects.values())  # Ids are of what lives.
        self._assigned = set(found.assigned)
        kinds: set[Any] = {type(item) for item in objects if not is_odd(type(item))}
        for kind in kinds:
            for name, setter in _setters_of(kind).items():
                if name in found.assigned:
                    of_setter = self._walk.follow(setter)
                    self._assigned |= of_setter.assigned
                    objects += of_setter.objects.values()
        self._entered = set(map(id, objects))
        functions = [item for item in objects if type(item) is FunctionType]
        read = [(each, names_in(each.__code__)) for each in functions]
        self._stored = {name for _, names in read for name in names.stored}
        self._rebound = {
            (id(box), name)
            for each, names in read
            for name in names.rebound
            for box in (each.__globals__, *_cells_of(each, name))
        }
        self._guesses = any(names.guessed for _, names in read)
        """Methods may be called whose names are computed."""
        # A class that refuses assignments names how they are made.
        self._sets_any = any(
            not _SETTING.isdisjoint((*names.globals, *names.attributes, *names.own))
            for each, names in read
            if each.__name__ != "__setattr__"
        )

    def may_set(self, place: Place, is_owned: bool) -> bool:
        kind, is_entered = type(place.owner), id(place.owner) in self._entered
        if place.kind in ("global", "cell"):
            return (id(place.owner), place.name) in self._rebound
        if issubclass(kind, _CONTAINERS) or type(place.name) is not str:
            of = place.path.removesuffix(".__len__()").removesuffix(".keys()")
            of = of.rpartition(".")[2].partition("[")[0]
            return is_entered and (is_owned or of in self._stored)
        if not is_owned:
            return is_entered and place.name in self._assigned
        is_there = place.value is not MISSING
        # Many objects lack what code sets in others: of those, the ones that this code reaches.
        if place.name in self._assigned and (is_there or is_entered):
            return True
        if is_there:
            if self._sets_any:
                return True
            # The code of a package that is not the resource's own was not read.
            if not (self._guesses or self._walk.is_foreign(module_of(kind))):
                return False
        return place.name in _assigned_by_methods(kind)  # type: ignore[arg-type]


def _cells_of(function: FunctionType, name: str) -> Iterator[object]:
    """The cell of a variable of its closure, if it has that."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return (cell for each, cell in cells if each == name)


@lru_cache(maxsize=256)
def _assigned_by_methods(kind: type) -> frozenset[str]:
    """Attributes that methods of a class set, other than while an object is made."""
    members = ((name, value) for base in kind.__mro__ for name, value in vars(base).items())
    codes = [
        value.__code__
        for name, value in members
        if type(value) is FunctionType and name not in ("__init__", "__post_init__")
    ]
    return frozenset(chain[-1] for code in codes for chain in names_in(code).assigned)


@lru_cache(maxsize=256)
def _setters_of(kind: type) -> dict[str, FunctionType]:
    """By attribute, the function that its assignment calls: of a property, or a descriptor."""
    found = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            of = type(value)
            setter = value.fset if of is property else read_member(of, "__set__")
            if type(setter) is FunctionType:
                found[name] = setter
    return found


def _parts_of(resources: Iterable[Any]) -> dict[int, Any]:
    """By id, resources and the plain objects and containers that they are made of."""
    found: dict[int, Any] = {}
    pending = deque(resources)
    while pending and len(found) < MAX_OBJECTS:
        item = pending.popleft()
        kinds = (torch.nn.Module, torch.Tensor, type)
        if id(item) in found or is_host_scalar(item) or issubclass(type(item), kinds):
            continue
        found[id(item)] = item
        pending += (part for _, part in parts_in(item))
        if issubclass(type(item), FunctionType):
            pending += (read_cell(cell, "") for cell in item.__closure__ or ())
        elif issubclass(type(item), MethodType):
            pending += (item.__func__, item.__self__)
        elif issubclass(type(item), partial):
            pending += parts_of_partial(item)
    return found

"""What belongs to resources, and what of it the code that prepares them may set before a run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import FunctionType

import torch

from graphrt.externals.code_names import names_in
from graphrt.externals.places import MISSING, Place, module_of, parts_in
from graphrt.externals.reachable import Walk

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
        """True for a place in a resource where it may set another value before a run.

        That is an attribute that code of its preparation assigns, and whatever is in a container
        that this code names. What others set there (a scale, a flag) is a setting like any other.
        """
        return self.owns(place) and any(walk.may_set(place) for walk in self._walks)


class _Preparing:
    """What the code sets that one method of a resource reaches."""

    def __init__(self, method: object) -> None:
        self._walk = Walk(method)
        found = self._walk.follow(method)
        self._assigned = found.assigned
        self._entered = {id(item) for item in found.objects.values()}
        self._objects = found.objects  # Ids are of what lives.
        functions = (item for item in found.objects.values() if type(item) is FunctionType)
        # A class that refuses assignments names how they are made.
        codes = (each.__code__ for each in functions if each.__name__ != "__setattr__")
        read = map(names_in, codes)
        self._sets_any = any(
            not _SETTING.isdisjoint((*names.globals, *names.attributes, *names.own))
            for names in read
        )

    def may_set(self, place: Place) -> bool:
        kind = type(place.owner)
        if issubclass(kind, _CONTAINERS) or type(place.name) is not str:
            return id(place.owner) in self._entered
        if place.value is not MISSING:
            if self._sets_any or place.name in self._assigned:
                return True
            # The code of a package that is not the resource's own was not read.
            if not self._walk.is_foreign(module_of(kind)):
                return False
        return place.name in _assigned_by_methods(kind)  # type: ignore[arg-type]


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


def _parts_of(resources: Iterable[object]) -> dict[int, object]:
    """By id, resources and the plain objects and containers that they are made of."""
    found: dict[int, object] = {}
    pending = list(resources)
    while pending and len(found) < 4096:
        item = pending.pop()
        if id(item) in found or issubclass(type(item), (torch.nn.Module, torch.Tensor, type)):
            continue
        found[id(item)] = item
        pending += (part for _, part in parts_in(item))
    return found

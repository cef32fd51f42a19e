"""Notices, without being asked, that something a program reads was replaced.

torch's registration hooks say that a module is about to get another parameter, buffer or submodule;
they cost a step nothing. What passes them by (``.data =``, ``.to()``, plain attributes, dict
entries, variables, host values) is looked at, a few places before each graph step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any, Literal

import torch
from torch.nn.modules import module as torch_module

from graphrt.graphs.held import HeldTensor, Probe, is_same_value, probes_of
from graphrt.graphs.program import Program
from graphrt.graphs.reachable import Place

# Fields of a ``Probe`` in a plain tuple, which is taken apart faster; without the item, because to
# take out an object that no look needs is one more cache miss, and a step has displaced them all.
_Look = tuple[Callable[[Any], Any], Any, Any, Callable[[], Any] | None, Any]

WatchMode = Literal["spread", "always", "off"]

PLACES_A_STEP = 4
"""``"spread"`` looks at so many places before each graph step, hence at all of them within
``ceil(num_places / 4)`` graph steps."""


class Watch:
    """Looks after everything that some programs read besides their arguments.

    ``"spread"``: hooks, and four places a step. ``"always"``: every place at each step.
    ``"hooks"``: hooks alone. ``"off"``: neither. Nothing here decides what moved: ``look`` says
    only that it is time to ask (``GraphLibrary.check_externals``).
    """

    def __init__(self, mode: WatchMode | Literal["hooks"]) -> None:
        self.mode = mode
        self.is_marked = False
        """True: everything is to be asked before the next graph step. Who asks makes it False."""
        self.num_places = 0
        """What ``look`` looks at in turns: address, shape and strides of each tensor, host
        values, and the objects on the way to both."""
        self._programs: tuple[Program, ...] = ()
        self._ask: Callable[[], object] | None = None
        self._modules: set[tuple[int, str | None]] = set()
        """By id and name, what the hooks may mark; the programs keep these modules alive."""
        self._known: dict[int, list[Probe]] = {}
        """By the id of what is looked at: most programs share most of it."""
        self._groups: list[list[_Look]] = []
        self._items: dict[int, list[HeldTensor | Place]] = {}
        """By the id of each group, what its looks are at."""
        self._next: Callable[[], list[_Look]] = cycle([[]]).__next__

    def start(self) -> None:
        """Hear of registrations, if this mode does. Idempotent."""
        if self.mode in ("spread", "hooks"):
            _REGISTRATIONS.add(self)

    def stop(self) -> None:
        """Look at nothing any more. Idempotent."""
        _REGISTRATIONS.remove(self)
        self.update(())

    def update(self, programs: Iterable[Program], ask: Callable[[], object] | None = None) -> None:
        """Look after ``programs``, which serve now, as they are now.

        What was marked stays so, and the turns go on where they were: a capture of other keys
        between two steps must not hide what was replaced before it.
        ``ask``: with hooks alone, what a marked program does before its next check.
        """
        self._programs, self._ask = tuple(programs), ask
        group = self._next()
        upcoming = [
            _name_of(*look[3:], item)
            for look, item in zip(group, self._items.get(id(group), ()), strict=False)
        ]
        self._modules.clear()
        self._groups, self._items, self.num_places = [], {}, 0
        if self.mode == "off":
            return
        probes = self._probes()
        self.num_places = len(probes)
        first = next((n for n, probe in enumerate(probes) if _name_of(*probe[3:]) in upcoming), 0)
        probes = probes[first:] + probes[:first]
        for start in range(0, len(probes), PLACES_A_STEP):
            part = probes[start : start + PLACES_A_STEP]
            group = [_look_of(probe) for probe in part]
            self._groups.append(group)
            self._items[id(group)] = [probe.item for probe in part]
        self._next = cycle(self._groups or [[]]).__next__

    def look(self) -> bool:
        """True if nothing was marked and the next places are as they were."""
        if self.is_marked:
            return False
        group = self._next()
        for get, name, value, detail_of, detail in group:
            if get(name) is not value or (detail_of is not None and detail_of() != detail):
                return _look_closer(group, self._items[id(group)])
        return True

    def look_at_all(self) -> bool:
        """As ``look``, at every place."""
        return not self.is_marked and all(self.look() for _ in self._groups)

    def note(self, module: torch.nn.Module, name: str) -> None:
        """A module is about to get something under this name."""
        key = id(module)
        if (key, name) in self._modules or (key, None) in self._modules:
            self.is_marked = True
            if self._ask is not None:
                for program in self._programs:
                    program.suspect(self._ask)

    def _probes(self) -> list[Probe]:
        """How each place is looked at; once for all programs, and none with hooks alone."""
        known, self._known = self._known, {}
        probes: list[Probe] = []
        for program in self._programs:
            tensors, values = program.watched()
            links = () if program.reads is None else program.reads.links
            items: list[HeldTensor | Place] = [*tensors, *values, *links]
            for item in items:
                place = item.place if isinstance(item, HeldTensor) else item
                if place is None or id(item) in self._known:
                    continue
                if issubclass(type(place.owner), torch.nn.Module):
                    self._modules.add((id(place.owner), place.name))
                looks = known.get(id(item), ())
                if not looks or looks[0].item is not item:
                    looks = [] if self.mode == "hooks" else probes_of(item)
                self._known[id(item)] = looks
                probes += looks
        return probes


def _name_of(detail_of: Callable[[], Any] | None, _: Any, item: object) -> tuple[int, object]:
    """Which look it is, among all of one ``update``."""
    return id(item), getattr(detail_of, "__name__", None)


def _look_of(probe: Probe) -> _Look:
    return probe[:5]


def _look_closer(group: list[_Look], items: list[HeldTensor | Place]) -> bool:
    """False if a place of the group holds something else. Equal things are looked at from now on:
    a number that was set to itself is another object."""
    for index, ((_, _, value, _, detail), item) in enumerate(zip(group, items, strict=True)):
        if isinstance(item, HeldTensor):
            if item.has_moved():
                return False
            probes = probes_of(item)
            same = [probe for probe in probes if type(probe.detail) is type(detail)]
            group[index] = _look_of(same[0])
        elif item.read() is not value:
            if not is_same_value(item, item.read()):
                return False
            group[index] = _look_of(probes_of(item)[0])
    return True


class _Registrations:
    """torch's registration hooks, which are the process's: there while a watch listens.

    They run before the change and only mark what the next step asks about.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._handles: list[Any] = []

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches.add(watch)
            if not self._handles:
                self._handles = [
                    torch_module.register_module_parameter_registration_hook(self._on_change),
                    torch_module.register_module_buffer_registration_hook(self._on_change),
                    torch_module.register_module_module_registration_hook(self._on_change),
                ]

    def remove(self, watch: Watch) -> None:
        with self._lock:
            self._watches.discard(watch)
            if not self._watches:
                for handle in self._handles:
                    handle.remove()
                self._handles.clear()

    def _on_change(self, module: torch.nn.Module, name: str, _: object) -> None:
        for watch in tuple(self._watches):
            watch.note(module, name)


_REGISTRATIONS = _Registrations()

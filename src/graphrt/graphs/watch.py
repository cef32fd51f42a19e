"""Notices, without being asked, that something a program reads was replaced.

torch's registration hooks say that a module is about to get another parameter, buffer or submodule;
they cost a step nothing. What passes them by (``.data =``, ``.to()``, plain attributes, dict
entries, variables, host values) is looked at, a few places before each graph step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import chain, cycle
from operator import is_
from typing import Any, Literal

import torch
from torch.nn.modules import module as torch_module

from graphrt.externals.held import HeldTensor, Probe, probes_of
from graphrt.externals.places import Place, read_member
from graphrt.gc_pause import gc_paused
from graphrt.graphs.program import Program

# Fields of four ``Probe``s in one plain tuple, without their items: to take out an object that no
# look needs is one more cache miss, and a step has displaced them all.
_Group = tuple[Any, ...]
_Item = tuple[HeldTensor | Place, int]
"""What a look is at, and which of its probes it is."""

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
        self._sources: dict[int, tuple[Any, ...]] = {}
        """By the id of each program, the program and where what it reads is listed."""
        self._listed: dict[int, HeldTensor | Place] = {}
        """By id, what these programs read."""
        self._known: dict[int, list[Probe]] = {}
        """By the id of what is looked at: most programs share most of it."""
        self._groups: list[_Group] = []
        self._items: dict[int, list[_Item]] = {}
        """By the id of each group, what its looks are at."""
        self._next: Callable[[], _Group] = cycle([_NOTHING]).__next__

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
        upcoming = {(id(item), number) for item, number in self._items.get(id(self._next()), ())}
        self._modules.clear()
        self._groups, self._items, self.num_places = [], {}, 0
        if self.mode == "off":
            return
        # The collector would visit all places again and again while they are listed.
        with gc_paused(collects=False):
            self._list_groups(upcoming)

    def _list_groups(self, upcoming: set[tuple[int, int]]) -> None:
        """``upcoming``: by id and number, the looks that come next."""
        probes = self._probes()
        self.num_places = len(probes)
        first = next(
            (n for n, (_, (item, number)) in enumerate(probes) if (id(item), number) in upcoming), 0
        )
        probes = probes[first:] + probes[:first]
        for start in range(0, len(probes), PLACES_A_STEP):
            part = probes[start : start + PLACES_A_STEP]
            group = _group_of([probe for probe, _ in part])
            self._groups.append(group)
            self._items[id(group)] = [item for _, item in part]
        self._next = cycle(self._groups or [_NOTHING]).__next__

    def look(self) -> bool:
        """True if nothing was marked and the next places are as they were."""
        if self.is_marked:
            return False
        # Written out, because a loop over four tuples takes a third longer.
        group = self._next()
        (get1, box1, name1, is1, of1, was1, get2, box2, name2, is2, of2, was2,
         get3, box3, name3, is3, of3, was3, get4, box4, name4, is4, of4, was4) = group  # fmt: skip
        return (
            get1(box1, name1) is is1
            and (of1 is None or of1(is1) == was1)
            and get2(box2, name2) is is2
            and (of2 is None or of2(is2) == was2)
            and get3(box3, name3) is is3
            and (of3 is None or of3(is3) == was3)
            and get4(box4, name4) is is4
            and (of4 is None or of4(is4) == was4)
        ) or self._look_closer(group)

    def look_at_all(self) -> bool:
        """As ``look``, at every place."""
        return not self.is_marked and all(self.look() for _ in self._groups)

    def _look_closer(self, group: _Group) -> bool:
        """False if a place of the group holds something else. Equal things are looked at from now
        on: a number that was set to itself is another object."""
        items = self._items[id(group)]
        for look, (item, _) in enumerate(items):
            get, box, name, value = group[6 * look : 6 * look + 4]
            if isinstance(item, Place) and item.kind == "type":
                # Whatever else is looked at through it has to be found again.
                if get(box, name) is not value:
                    return False
            elif item.has_moved():
                return False
        later = _group_of([probes_of(item)[number].now() for item, number in items])
        self._items[id(later)] = self._items.pop(id(group))
        # In the same turn: the group after it comes next.
        place = next(n for n, each in enumerate(self._groups) if each is group)
        self._groups = [*self._groups[place + 1 :], *self._groups[:place], later]
        self._next = cycle(self._groups).__next__
        return True

    def note(self, module: torch.nn.Module, name: str) -> None:
        """A module is about to get something under this name."""
        key = id(module)
        if (key, name) in self._modules or (key, None) in self._modules:
            self.is_marked = True
            if self._ask is not None:
                for program in self._programs:
                    program.suspect(self._ask)

    def _probes(self) -> list[tuple[Probe, _Item]]:
        """How each place is looked at; once for all programs, and none with hooks alone.

        Those of one owner follow each other, because a look costs what it displaces from the cache.
        """
        known, self._known = self._known, {}
        by_owner: dict[int, list[tuple[Probe, _Item]]] = {}
        of_classes: set[tuple[Any, ...]] = set()
        self._list_items()
        for item in self._listed.values():
            place = item.place if isinstance(item, HeldTensor) else item
            if place is None:
                continue
            if issubclass(type(place.owner), torch.nn.Module):
                self._modules.add((id(place.owner), place.name))
            looks = known.get(id(item), ())
            if not looks or looks[0].item is not item:
                looks = [] if self.mode == "hooks" else probes_of(item)
                # Where no tensor is left, the look has to find what was there.
                if not (isinstance(item, HeldTensor) and item.has_moved()):
                    looks = list(map(Probe.now, looks))
            self._known[id(item)] = looks
            found = by_owner.setdefault(id(place.owner), [])
            for number, probe in enumerate(looks):
                if probe.get is read_member:  # Many objects share their members.
                    look = id(probe.box), probe.name, probe.detail_of
                    if look in of_classes:
                        continue
                    of_classes.add(look)
                found.append((probe, (item, number)))
        if self.mode == "hooks":  # Hears of no retirement, after which these tensors may go.
            self._sources, self._listed = {}, {}
        return [look for looks in by_owner.values() for look in looks]

    def _list_items(self) -> None:
        """List what the programs read, once each.

        Where programs only came, what those read that were here is not gone through again:
        programs share most of it, and a capture between two steps adds one to many.
        """
        sources = {id(program): (program, *program.sources) for program in self._programs}
        added = [
            program
            for program in self._programs
            if not (last := self._sources.get(id(program)))
            or not all(map(is_, last, sources[id(program)]))
        ]
        if len(sources) - len(added) < len(self._sources):  # One went, or reads something else.
            self._listed, added = {}, list(self._programs)
        self._sources = sources
        seen: set[tuple[object, ...]] = set()
        for program in added:
            items: Iterable[HeldTensor | Place] = chain(
                program.watched_tensors(), program.watched_ways()
            )
            # Host values are listed once for many programs.
            _, values, reads, ignored, _ = program.sources
            if (listed := (id(values), id(reads), ignored)) not in seen:
                seen.add(listed)
                links = () if program.reads is None else program.reads.links
                items = chain(items, program.watched_values(), links)
            for item in items:
                self._listed.setdefault(id(item), item)


_EMPTY: dict[Any, Any] = {}
_NO_LOOK = (dict.get, _EMPTY, None, None, None, None)
_NOTHING: _Group = _NO_LOOK * PLACES_A_STEP


def _group_of(probes: list[Probe]) -> _Group:
    looks = [field for probe in probes for field in probe[:6]]
    return (*looks, *_NO_LOOK * (PLACES_A_STEP - len(probes)))


class _Registrations:
    """torch's registration hooks, which are the process's.

    They run before the change and only mark what the next step asks about. They stay from the
    import on, also while no watch listens, because code that Dynamo compiled depends on whether
    there are any: to come and go with a watch would compile the user's other models again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        torch_module.register_module_parameter_registration_hook(self._on_change)
        torch_module.register_module_buffer_registration_hook(self._on_change)
        torch_module.register_module_module_registration_hook(self._on_change)

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches.add(watch)

    def remove(self, watch: Watch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def _on_change(self, module: torch.nn.Module, name: str, _: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            return  # Traced code that makes a module: no program reads it.
        for watch in tuple(self._watches):
            watch.note(module, name)


_REGISTRATIONS = _Registrations()

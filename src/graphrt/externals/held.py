"""What a program reads besides its arguments: held, named, and checked for changes.

A program holds the *storage* beside the tensor object, so an address cannot be reused behind its
back. While it is held, ``untyped_storage()`` of a tensor over it is one and the same object; that
identity, never an address alone, decides whether something moved.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import compress, cycle, takewhile
from operator import attrgetter, contains, is_not, itemgetter, methodcaller, ne
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.externals.places import (
    MISSING,
    READ,
    REGISTERS,
    Place,
    attributes_of,
    base_of,
    class_of,
    contents_of,
    entries_of,
    has_plain_dict,
    is_filled,
    is_hashed_in_c,
    is_host_scalar,
    is_odd,
    is_tensor,
    keys_of,
    length_of,
    name_of,
    own_dict,
    part_of,
    parts_in,
    parts_of_partial,
    read_member,
)
from graphrt.externals.prepared import Prepared
from graphrt.externals.reachable import Reach, reach
from graphrt.externals.unwatched import Unwatched
from graphrt.values import same_host_value, walk

_FACTS = ("length", "is_filled", "contents", "keys", "entries")
"""Kinds of places that tell something of their owner, at which nothing stands."""
_PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Made of no other tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """One tensor outside the pool that a program keeps alive."""

    name: str
    """A path where one is known, else where it was given, else its dtype and shape."""
    tensor: torch.Tensor
    storage: torch.UntypedStorage | None
    """None for layouts without one storage (sparse); only the tensor object is held then."""
    place: Place | None = None
    """Where the name is looked up again."""
    parts: tuple[str, ...] = ()
    """Attributes of what stands there, of a packed tensor."""
    touched: bool = True
    """False: reachable from the callable by name, and the recording did not see it used."""
    written: bool = False
    is_named: bool = True
    """False: only the recording saw it, so nothing but an observation can find it."""
    layout: tuple[Any, ...] = ()

    def has_moved(self) -> bool:
        """True if another storage or layout now stands behind the name, or the tensor object."""
        return not self.fits(self.tensor if self.place is None else self.place.read())

    def part_of(self, value: Any) -> Any:
        """What it would be if ``value`` stood at its place."""
        for part in self.parts:
            try:
                value = getattr(value, part, None)
            except Exception:  # noqa: BLE001  User code. What cannot be read counts as moved.
                return None
        return value

    def fits(self, value: Any) -> bool:
        """True if ``value`` at its place has the storage and the layout that were captured."""
        current = self.part_of(value)
        if not is_tensor(current):
            return False
        if self.storage is None:
            return current is self.tensor
        is_plain = type(current) in _PLAIN_TENSORS
        storage = current.untyped_storage() if is_plain else _storage_of(current)
        if storage is not self.storage:
            return False
        return not self.layout or _layout(current) == self.layout


class HeldByResource(NamedTuple):
    """A tensor that a resource may set anew before each run, and that a graph reads where it was.

    ``way``: The places from the resource to it, which may lead through other objects each time.
    ``address``: Where it was at the capture.
    """

    held: HeldTensor
    way: tuple[Place, ...]
    address: int

    def was_replaced(self) -> bool:
        """True if another object stands on the way, or there, or the tensor has other memory."""
        is_other = any(place.read() is not place.value for place in self.way)
        return is_other or not self.held.fits(self.way[-1].value)

    def has_moved(self) -> bool:
        """True if other memory stands there now. Its shape may be that of each batch."""
        value = self.held.part_of(_read_by_way(self.way))
        is_strided = is_tensor(value) and value.layout is torch.strided
        return not is_strided or value.data_ptr() != self.address


class SetByResource(NamedTuple):
    """A host value that a resource may set before each run, and what it was at the capture.

    ``way``: The places from the resource to it. ``set_at``: those of them where it sets something:
    the value, an object or entry with the value in it, or both.
    """

    way: tuple[Place, ...]
    set_at: tuple[Place, ...]
    value: Any

    def is_other(self) -> bool:
        """True if another value stands there now."""
        return not same_host_value(self.value, _read_by_way(self.way))

    def accepted_with(self) -> tuple[int, ...]:
        """Equal for values that are accepted together: all in a container whose items have no
        names, because how many and which they are may differ from step to step. Each field of a
        record is accepted alone, because each may decide something else."""
        named = takewhile(_is_of_a_name, self.way)
        return (id(self.way[0].owner), *map(id, named))


class SetByResources:
    """Host values that resources may set before each run, as they were when this was made."""

    def __init__(self, items: Iterable[SetByResource]) -> None:
        self._items = tuple(items)
        # Mostly the same objects stand there, which takes a tenth of the time to tell. What is
        # below them is looked at like all that the callable reads.
        places = {id(place): place for item in self._items for place in item.set_at}.values()
        found = [_looks_at(place._replace(value=place.read()), in_turns=False) for place in places]
        self._looks = [look for looks, _ in found for look in looks]
        self._details = [detail for _, details in found for detail in details]

    def __len__(self) -> int:
        return len(self._items)

    def others(self) -> list[SetByResource]:
        """Those that are others now."""
        # Loops, because each step asks, and there are few.
        for get, box, name, value in self._looks:
            if get(box, name) is not value:
                return [item for item in self._items if item.is_other()]
        for detail_of, value, detail in self._details:
            if detail_of(value) != detail:
                return [item for item in self._items if item.is_other()]
        return []

    def without(self, others: Iterable[SetByResource]) -> SetByResources:
        """All but these and what is accepted with them."""
        known = {item.accepted_with() for item in others}
        return SetByResources(item for item in self._items if item.accepted_with() not in known)


class TensorRef(NamedTuple):
    """A tensor that a program touches or could touch; several may lie in one storage."""

    name: str
    """Empty: what it is called if nothing names its storage better is made up where needed."""
    tensor: torch.Tensor
    written: bool = False


class ExternalsReport(NamedTuple):
    """What ``check_externals`` found.

    ``num_checked``: Places and tensors that were looked at.
    ``moved``: Names of what another storage, or another value, stands behind now.
    ``invalidated``: (owner, mode, key) of the programs that became invalid.
    """

    num_checked: int
    moved: tuple[str, ...]
    invalidated: tuple[tuple[str, RuntimeMode, BatchDescriptor], ...]

    @property
    def is_unchanged(self) -> bool:
        """True if every program is as valid as it was."""
        return not self.moved


class Reads:
    """What one callable reads besides its arguments, as a walk found it.

    It is shared by the programs of the callable. ``prepared``: resources; what they set before
    each run is no change. ``breaks`` False: without what break points alone reach. ``reached``:
    what a walk has just found; None to walk now.
    """

    def __init__(
        self,
        target: object,
        owns: Callable[[torch.Tensor], bool],
        prepared: Iterable[object] = (),
        *,
        breaks: bool = True,
        reached: Reach | None = None,
    ) -> None:
        self.target = target
        self.breaks = breaks
        self._later: Reads | None = None
        found = reached or reach(target)
        found = found.lasting or found
        self._has_breaks = found.outside_breaks is not None
        if not breaks:
            found = found.outside_breaks or found
        of_resources = Prepared(prepared)
        values: list[Place] = []
        unread: list[Unwatched] = []
        links: list[Place] = []
        tensors: list[HeldTensor] = []
        owns_storage: dict[int, bool] = {}
        self._found = [
            place._replace(value=place.read()) if place.kind == "contents" else place
            for place in found.places
            if place.is_named or (is_tensor(place.value) and _is_module(place.owner))
        ]
        self._set_before_runs = list(filter(of_resources.may_set, self._found))
        """Where resources may put another value before a run."""
        self._below_these = list(self._below(self._set_before_runs))
        """Where they thereby do."""
        below = list(self._only_there(self._set_before_runs, self._below_these))
        set_by_them = set(map(id, (*self._set_before_runs, *below)))
        for place in self._found:
            value = place.value
            if is_tensor(value):
                try:
                    _hold(tensors, place, value, (), owns, owns_storage)
                except Exception as error:
                    if type(value) in _PLAIN_TENSORS:
                        raise
                    because = f"code of its class raises {type(error).__name__}"
                    unread.append(Unwatched(place.path, name_of(type(value)), because))
            elif id(place) not in set_by_them:
                (links if self._leads_on(place) else values).append(place)
        self.values = tuple(values)
        """Named host values."""
        self.tensors = tuple(tensors)
        code = [place for place in links if issubclass(type(place.value), _CODE)]
        used = _prefixes([item.name for item in tensors] + [p.path for p in (*values, *code)])
        # An object that has several paths is walked by one of them.
        shared = {id(place.value) for place in links if place.path in used}
        self.links = tuple(
            place
            for place in links
            if id(place.value) in shared or issubclass(type(place.value), _CODE)
        )
        """What leads to both: objects, containers, functions."""
        self._used = used
        self.now: Sequence[Place] = self.values
        """The host values, as of the last look for a capture."""
        self.unwatched = (*found.unwatched, *dict.fromkeys(unread))
        """What it reads and nothing compares."""
        owned = filter(of_resources.owns, self._found)
        theirs = (*below, *owned, *self._set_before_runs)
        settings = {place.path for place in (*values, *links)}
        self.prepared = frozenset(p.path for p in theirs if p.path not in settings)
        """Names of what resources own or may set before each run."""
        self._of_resources = {id(p.value): p for p in theirs}
        """By id of an object that a resource owns or sets, the place where it stands."""
        self.touched_of_resources: set[str] = set()
        """Names of what resources own and graphs of the callable are known to read."""
        self._by_resource: dict[str, HeldByResource] = {}
        boxes = [box for item in found.objects.values() for box in _boxes(item)]
        boxes += [attributes_of(kind) for kind in found.spaces if isinstance(kind, type)]
        self._boxes = [box for box in boxes if type(box) is dict]
        self._other_boxes = [box for box in boxes if type(box) is not dict]
        self._sizes = self._sizes_now()
        self._named = {_id_held(item) for item in tensors}
        self._held: dict[tuple[frozenset[int], frozenset[int]], list[HeldTensor]] = {}
        """By the ids of what is touched and written: one object for all programs, because they are
        looked at together."""

    @cached_property
    def places(self) -> dict[str, list[Place]]:
        """By path; two variables of different functions may have one name."""
        places: dict[str, list[Place]] = {}
        for place in self._found:
            places.setdefault(place.path, []).append(place)
        return places

    # Made when they are first asked: a program that is captured alone needs none of them.
    _link_columns = cached_property(lambda self: Columns(self.links))
    _value_columns = cached_property(lambda self: Columns(self.values))
    _tensor_columns = cached_property(lambda self: Columns(self.tensors))

    def held_by_resources(self, held: Iterable[HeldTensor]) -> list[HeldByResource]:
        """Those of the ``held`` that resources own and that a graph of the callable is known to
        read: of this program, or of an earlier one where this one was not observed."""
        found = []
        for item in held:
            if item.name not in self.prepared or item.storage is None or item.place is None:
                continue
            if item.touched:
                self.touched_of_resources.add(item.name)
            if item.name in self.touched_of_resources:
                found.append(HeldByResource(item, self._way_to(item.place), item.tensor.data_ptr()))
                self._by_resource[item.name] = found[-1]
        return found

    def set_by_resources(self) -> SetByResources:
        """Named host values that resources may set before each run, as they are now."""
        ways = self._ways_of_values
        return SetByResources(SetByResource(way, at, _read_by_way(way)) for way, at in ways)

    @cached_property
    def _ways_of_values(self) -> list[tuple[tuple[Place, ...], tuple[Place, ...]]]:
        """Of each that resources may set: the way to it, and where on that they set something."""
        known = set(map(id, self._set_before_runs))
        found = []
        all_places = {id(each): each for each in (*self._set_before_runs, *self._below_these)}
        for place in all_places.values():
            if not (is_tensor(place.value) or self._leads_on(place)):
                way = self._way_to(place)
                # What stands in a tuple stays.
                set_at = tuple(
                    step
                    for step in way
                    if id(step) in known and not issubclass(type(step.owner), tuple)
                )
                if set_at:
                    found.append((way, set_at))
        return found

    def _below(self, places: Iterable[Place]) -> Iterator[Place]:
        """What is in the objects that stand at these places."""
        kept = (torch.nn.Module, *_CODE)
        objects = {id(place.value) for place in places if self._leads_on(place)}
        for place in self._found:  # A parent before what was reached through it.
            if id(place.owner) in objects and not issubclass(type(place.value), kept):
                yield place
                if self._leads_on(place):
                    objects.add(id(place.value))

    def _only_there(self, places: Iterable[Place], below: Iterable[Place]) -> Iterator[Place]:
        """Those ``below`` these places in what stands nowhere else: what the model shares with a
        resource (its configuration) has settings."""
        theirs = set(map(id, (*places, *below)))
        shared = {id(p.value) for p in self._found if id(p) not in theirs and self._leads_on(p)}
        for place in below:
            if id(place.owner) not in shared:
                yield place
            elif self._leads_on(place):
                shared.add(id(place.value))

    def _way_to(self, place: Place) -> tuple[Place, ...]:
        """The places from a resource to this one, which lies in it."""
        way = [place]
        # Objects may lead to one another in a circle.
        while (above := self._of_resources.get(id(way[0].owner))) and len(way) < 32:
            way.insert(0, above)
        return tuple(way)

    def is_of(self, target: object, *, breaks: bool) -> bool:
        """True for a walk of ``target``, with what break points alone reach or without."""
        return self.target is target and (self.breaks == breaks or not self._has_breaks)

    def leads_to_the_same(self) -> bool:
        """True if another walk would find the same objects now. Updates ``now``."""
        if not self.has_same_links():
            return False
        if any(item.was_replaced() for item in self._by_resource.values()):
            return False
        self.now = self._read_values()
        changed = (p for p, was in zip(self.now, self.values, strict=True) if p is not was)
        return not any(map(self._leads_on, changed)) and self._sizes_now() == self._sizes

    def _sizes_now(self) -> list[int]:
        """How much is in everything that was followed."""
        return [*map(len, self._boxes), *map(length_of, self._other_boxes)]

    @staticmethod
    def _leads_on(place: Place) -> bool:
        """True for a tensor, and an object that has not been followed, in place of a None."""
        is_value = place.kind in _FACTS or place.value is MISSING
        return not (is_value or is_host_scalar(place.value))

    def has_same_links(self) -> bool:
        """True if every object that was followed still stands where it stood."""
        return not self._link_columns.changed()

    def has_same_tensors(self) -> bool:
        """True if every tensor stands where it stood, over the same storage in the same layout."""
        return not self._tensor_columns.changed()

    def _read_values(self) -> Sequence[Place]:
        """The host values as they are now."""
        changed = self._value_columns.changed()
        if not changed:
            return self.values
        values = list(self.values)
        for number in changed:
            place = values[number]
            values[number] = place._replace(value=place.read())
        return values

    def values_since(self, earlier: Reads, before: Sequence[Place]) -> Sequence[Place]:
        """``now``, of those that ``earlier.now`` had alike, ``before`` the recording.

        What a recording changes (a counter) or sets is none that its graph depends on.
        """
        now = self.now
        if now is before:
            return now
        if earlier is self:
            pairs = zip(now, before, strict=True)
            return [p for p, was in pairs if p is was or p.fits(was.value)]
        known = {_id_of(p): p.value for p in before}
        return [p for p in now if p.fits(known.get(_id_of(p), known))]

    def current(self) -> Reads:
        """These, or those of a new walk where an object was replaced by another."""
        if self.has_same_links():
            return self
        if self._later is None or not self._later.has_same_links():
            # Nothing new is held by what only finds out what moved.
            self._later = Reads(self.target, _owns_nothing, breaks=self.breaks)
        return self._later

    def replaced_code(self, now: Reads) -> Iterator[str]:
        """Names of functions and objects whose code is another now."""
        for place in self.links:
            found = [other.value for other in now.places.get(place.path, ())]
            # It may stay in an object whose place another took. What all objects of a class share
            # is told by the place of the object.
            is_shared = place.kind in ("type", "member")
            standing = [place.read()] if is_shared or not found else found
            if any(value is place.value for value in standing):
                continue
            # Nothing below another path of an object has a name that could tell.
            is_walked = place.path in self._used or issubclass(type(place.value), _CODE)
            if not is_walked or not any(_same_code(place.value, value) for value in found):
                yield place.path

    def hold(
        self, refs: Iterable[TensorRef], owns: Callable[[torch.Tensor], bool]
    ) -> list[HeldTensor]:
        """Everything outside the pool that a program keeps: what has a name, then ``refs``.

        ``refs`` of a storage that has a name say only that it is touched, or written. Two names of
        one storage (tied weights) are both kept: either may be replaced.
        """
        named = self._named
        touched: set[int] = set()
        written: set[int] = set()
        others: dict[int, tuple[TensorRef, torch.UntypedStorage | None]] = {}
        for ref in refs:
            tensor = ref.tensor
            storage = _storage_of(tensor)
            key = id(tensor if storage is None else storage)
            if key not in named and key not in others:
                with torch._C.DisableTorchFunctionSubclass():  # Its class may raise.
                    if storage is not None and owns(tensor):
                        continue
                others[key] = ref, storage
            touched.add(key)
            if ref.written:
                written.add(key)
        combination = frozenset(touched & named), frozenset(written & named)
        held = self._held.get(combination)
        if held is None:
            held = self._held[combination] = [
                replace(item, touched=True, written=key in written)
                if (key := _id_held(item)) in touched
                else item
                for item in self.tensors
            ]
        found = list(held)
        for key, (ref, storage) in others.items():
            tensor = ref.tensor
            told = ref.name or _told(tensor)
            found.append(
                HeldTensor(told, tensor, storage, written=key in written, is_named=bool(ref.name))
            )
        return found


class Probe(NamedTuple):
    """How one place is looked at fast: equal to what it was unless ``get(box, name) is not value``.

    Functions that all probes share, in place of bound methods of their own: a step has displaced
    whatever it does not use from the caches, so that each object on the way costs a miss.
    """

    get: Callable[[Any, Any], Any]
    box: Any
    name: Any
    value: Any
    detail_of: Callable[[Any], Any] | None
    """Of a tensor with a storage: tells its address, which changes with ``.data =`` and ``set_``,
    or its shape, or its strides. Of a container: its length, its keys, or some of its contents."""
    detail: Any
    item: HeldTensor | Place

    def now(self) -> Probe:
        """The same look, also where another object stands that is equal to what stood there."""
        value = self.get(self.box, self.name)
        return self if value is self.value else self._replace(value=value)


_Look = tuple[Callable[[Any, Any], Any], Any, Any, Any]
"""How one place is looked at: as the first fields of a ``Probe``."""
_Detail = tuple[Callable[[Any], Any], Any, Any]
"""A function, what it is asked of, and what it has to answer."""

_DETAILS: tuple[Any, ...] = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride


def _without_its_code(detail_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same of a tensor of any class, which may have methods of these names."""

    def read(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return detail_of(tensor)

    return read


_DETAILS_OF_ANY = tuple(map(_without_its_code, _DETAILS))

_MOST_FIELDS = 16
"""A dict with more entries has no fields: a request for each."""
_MOST_KEYS = 256
"""Of a dict with more, a look only counts how many they are."""


class Columns:
    """Looks at many places in one go, because a call for each would cost ten times as much."""

    def __init__(self, items: Sequence[HeldTensor | Place]) -> None:
        self._by_getter: defaultdict[Any, tuple[list[Any], list[Any], list[Any], list[int]]]
        self._by_getter = defaultdict(lambda: ([], [], [], []))
        """Boxes, names, what stands there, and which item it is."""
        self._by_detail: defaultdict[Any, tuple[list[Any], list[Any], list[int]]]
        self._by_detail = defaultdict(lambda: ([], [], []))
        """What stands there, a detail of it, and which item it is."""
        self._members: dict[tuple[int, str], list[int]] = {}
        """By id of a class and name, which items are what it has: many objects share it."""
        for number, item in enumerate(items):
            looks, details = _looks_at(item, in_turns=False)
            for get, box, name, value in looks:
                if get is read_member:
                    same = self._members.setdefault((id(box), name), [])
                    same.append(number)
                    if len(same) > 1:
                        continue
                _append(self._by_getter[get], box, name, value, number)
            for detail_of, value, detail in details:
                _append(self._by_detail[detail_of], value, detail, number)

    def changed(self) -> list[int]:
        """Which items are others now: another object, another layout of a tensor. Of items that
        share a member of a class all, where one is another."""
        found: list[int] = []
        # Mostly none is: to ask that alone leaves the numbers out of the caches.
        for get, (boxes, names, values, numbers) in self._by_getter.items():
            if any(map(is_not, map(get, boxes, names), values)):
                found += compress(numbers, map(is_not, map(get, boxes, names), values))
        for detail_of, (values, details, numbers) in self._by_detail.items():
            if any(map(ne, map(detail_of, values), details)):
                found += compress(numbers, map(ne, map(detail_of, values), details))
        if found and self._members:
            known = {same[0]: same for same in self._members.values()}
            found += [other for number in found for other in known.get(number, ())]
        return found


def _append(columns: Iterable[list[Any]], *row: Any) -> None:
    for column, value in zip(columns, row, strict=True):
        column.append(value)


def probes_of(item: HeldTensor | Place) -> list[Probe]:
    """The fast looks at what has a place, as it was when it was walked; of a tensor at address,
    shape and strides, of contents at some in each turn."""
    looks, details = _looks_at(item, in_turns=True)
    probes = [Probe(*look, None, 0, item) for look in looks]
    if not details:
        return probes
    # What stands there is looked at along with its details.
    value = details[0][1]
    look: _Look = looks[0] if looks else (tuple.__getitem__, (value,), 0, value)
    of_details = [Probe(*look, detail_of, detail, item) for detail_of, _, detail in details]
    return [*of_details, *probes[1:]]


def _looks_at(item: HeldTensor | Place, *, in_turns: bool) -> tuple[list[_Look], list[_Detail]]:
    """How what has a place is looked at: at what stands there, and at details of that."""
    tensor = item if isinstance(item, HeldTensor) else None
    place = item.place if isinstance(item, HeldTensor) else item
    assert place is not None, "only what has a place is looked up again"
    _, owner, name, kind, value, _ = place
    if kind == "contents":
        step = min(MAX_TURNS, len(value)) if in_turns else 1
        turns = [_Turns(value, first, step, in_turns) for first in range(step)]
        return [], [(turn.is_same, owner, True) for turn in turns]
    if kind == "keys":
        return [], [(tuple if type(owner) is dict else keys_of, owner, value)]
    if kind == "entries":  # Others may come: then it is asked which they are.
        keys = None if place.has_moved() else keys_of(owner)
        if keys is not None and (len(keys) > _MOST_KEYS or not {str}.issuperset(map(type, keys))):
            return [], [(length_of, owner, len(keys))]
        return [], [(tuple if type(owner) is dict else keys_of, owner, keys)]
    if kind == "length":
        box = entries_of(owner)
        # Mostly it is of a built-in type: ``len`` takes a tenth of the time.
        return [], [(len if type(box) is base_of(box) else length_of, box, value)]
    if kind == "is_filled":
        return [], [(is_filled, owner, value)]
    if tensor is not None and tensor.parts:
        return [(_part, tensor, place, tensor.tensor)], _details_of(tensor, tensor.tensor)
    if kind == "type":
        return _looks_of_type(owner, value), []
    if kind == "member":
        hiding = attributes_of(owner)
        looks: list[_Look] = [(read_member, class_of(owner), name, value)]
        if type(hiding) is dict:
            looks.append((dict.get, hiding, name, None))
        return looks, _details_of(tensor, value)
    own = own_dict(owner) if kind == "attribute" and value is MISSING and not in_turns else None
    if type(own) is dict and read_member(class_of(owner), name) is MISSING:
        # Many, because each object of a class lacks it.
        boxes = [own, *(own[each] for each in REGISTERS.values() if _is_module(owner))]
        looks = [(read_member, class_of(owner), name, MISSING)]
        return [*looks, *((contains, box, name, False) for box in boxes)], []
    get, box, name = _getter(place)
    if get is contains:
        return [(get, box, name, False)], []
    looks = [(get, box, name, value)]
    if tensor is not None and tensor.layout:
        return looks, _details_of(tensor, value)
    if get is dict.get and value is None and kind not in REGISTERS:
        # A None that is gone: a module that is assigned in its place is registered elsewhere.
        looks.append((contains, box, name, True))
    return looks, []


def _details_of(tensor: HeldTensor | None, value: Any) -> list[_Detail]:
    layout = () if tensor is None else tensor.layout
    details = _DETAILS if type(value) in _PLAIN_TENSORS else _DETAILS_OF_ANY
    return [(of, value, detail) for of, detail in zip(details, layout, strict=False)]


def _looks_of_type(owner: Any, value: object) -> list[_Look]:
    """At what every other look at an object goes through: its class, its dict and its registers."""
    if type(owner) is FunctionType:
        return [(_get_own, owner, "__code__", value)]
    looks: list[_Look] = [(_class_of, owner, None, value)]
    own = own_dict(owner)
    if type(own) is dict:
        get = _get_own if has_plain_dict(type(owner)) else _own_attributes
        looks.append((get, owner, "__dict__", own))
        if _is_module(owner):
            looks += [
                (dict.get, own, name, own[name]) for name in REGISTERS.values() if own.get(name)
            ]
    return looks


_get_own = object.__getattribute__


def _own_attributes(owner: Any, _: object) -> Any:
    """Where the class answers for ``__dict__`` as it likes."""
    return attributes_of(owner)


_class_of = object.__dict__["__class__"].__get__
"""Not what a class answers for it, which may raise."""


class _Turns:
    """Looks at some parts of contents: at all, or one at a time, because all may take long."""

    def __init__(self, contents: Any, first: int, step: int, in_turns: bool) -> None:
        self._parts = [(number, contents[number]) for number in range(first, len(contents), step)]
        self._next = cycle(self._parts).__next__
        self._all = None if in_turns else contents

    def is_same(self, owner: Any) -> bool:
        if self._all is not None:
            return same_host_value(self._all, contents_of(owner))
        number, expected = self._next()
        return same_host_value(expected, part_of(owner, number))


MAX_TURNS = 64
"""Of a buffer or a long sequence so many parts are looked at each time that all places are: 256 KiB
or 16,384 elements."""


def modules_of(target: object) -> dict[str, torch.nn.Module]:
    """Every module reachable from a callable, by path; see ``reach``."""
    objects = reach(target).objects.items()
    return {path: value for path, value in objects if _is_module(value)}


def bytes_of(externals: Iterable[HeldTensor]) -> int:
    """Bytes of the distinct storages."""
    storages = {item.storage for item in externals}
    return sum(storage.nbytes() for storage in storages if storage is not None)


def find_holder(address: int, num_bytes: int, target: object) -> str:
    """Name the attribute or variable that keeps these bytes; empty if unknown."""
    for place in reach(target).places:
        for node in walk(place.value):
            if node.kind == "tensor" and address <= node.value.data_ptr() < address + num_bytes:
                return place.path
    return ""


def find_path(tensor: torch.Tensor, roots: Mapping[str, Any]) -> str:
    """The shortest path to a tensor's storage in named objects, through attributes and containers;
    empty if there is none within 10,000 places."""
    if tensor.layout is not torch.strided:
        return ""
    storage, queue, seen = tensor.untyped_storage(), deque(roots.items()), set[int]()
    while queue and len(seen) < 10_000:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not is_tensor(value):
            queue.extend((path + step, part) for step, part in parts_in(value))
        elif value.layout is torch.strided and value.untyped_storage() is storage:
            return path
    return ""


def _id_held(item: HeldTensor) -> int:
    """The id of its storage, which it keeps; of the tensor where there is none."""
    return id(item.tensor if item.storage is None else item.storage)


def _hold(
    found: list[HeldTensor],
    place: Place,
    tensor: torch.Tensor,
    parts: tuple[str, ...],
    owns: Callable[[torch.Tensor], bool],
    owned: dict[int, bool],
) -> None:
    """Add a tensor with a name; a packed one (a subclass made of others) stands for its parts."""
    is_plain = type(tensor) in _PLAIN_TENSORS
    flatten = None if is_plain else getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for part in flatten()[0]:
            _hold(found, place, getattr(tensor, part), (*parts, part), owns, owned)
        return
    storage = tensor.untyped_storage() if is_plain and tensor.layout is torch.strided else None
    if not is_plain:
        storage = _storage_of(tensor)
    if storage is not None:
        if owned.get(id(storage)) is None:
            owned[id(storage)] = owns(tensor)
        if owned[id(storage)]:
            return
    name = ".".join((place.path, *parts))
    layout = () if storage is None else _layout(tensor)
    found.append(HeldTensor(name, tensor, storage, place, parts, touched=False, layout=layout))


_LAYOUT, _DTYPE = (torch._C.TensorBase.__dict__[name].__get__ for name in ("layout", "dtype"))


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Of a tensor of any class, without the methods of that class; None where it has none."""
    with torch._C.DisableTorchFunctionSubclass():
        is_strided = _LAYOUT(tensor) is torch.strided
        return torch.Tensor.untyped_storage(tensor) if is_strided else None


def _read_by_way(way: tuple[Place, ...]) -> Any:
    """What stands at its end now, whichever objects it leads through; of other kinds, nothing."""
    steps = list(_steps_of(way))
    return steps[-1].value if len(steps) == len(way) else MISSING


def _is_of_a_name(place: Place) -> bool:
    """True for a variable, an attribute and a field of a named tuple or of a small dict."""
    if type(place.name) is str and place.kind != "element":
        return place.kind != "item" or length_of(place.owner) <= _MOST_FIELDS
    return read_member(type(place.owner), "_fields") is not MISSING


def _steps_of(way: tuple[Place, ...]) -> Iterator[Place]:
    """The places on a way as they are now, up to an object of another kind."""
    value = way[0].owner
    for place in way:
        if type(value) is not type(place.owner):
            return
        owner, value = value, READ[place.kind](value, place.name)
        yield place._replace(owner=owner, value=value)


def _told(tensor: torch.Tensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Of a tensor of any class, without the methods of that class."""
    if type(tensor) not in _PLAIN_TENSORS:
        with torch._C.DisableTorchFunctionSubclass():
            return _layout_of_plain(tensor)
    return _layout_of_plain(tensor)


def _layout_of_plain(tensor: torch.Tensor) -> tuple[Any, ...]:
    of = torch.Tensor
    return (
        of.data_ptr(tensor),
        _one_object(of.size(tensor)),
        _one_object(of.stride(tensor)),
        _DTYPE(tensor),
        of.is_conj(tensor),
        of.is_neg(tensor),
    )


@lru_cache(maxsize=4096, typed=True)
def _one_object(value: tuple[int, ...]) -> tuple[int, ...]:
    """The same for all tensors of a shape: what a step compares with is then mostly in a cache."""
    return value


def _getter(place: Place) -> tuple[Callable[[Any, Any], Any], Any, Any]:
    """The fastest function that reads a place, and its two arguments.

    Of an entry of a dict, ``dict.get``, which does not tell a None from one that is gone; of one
    that is not there, ``contains``, which only tells that it came.
    """
    owner, name, kind = place.owner, place.name, place.kind
    boxes: Any = None
    if kind in REGISTERS:
        boxes = getattr(owner, REGISTERS[kind])
    elif kind == "attribute":
        boxes = attributes_of(owner)
    elif kind in ("item", "global"):
        boxes = owner
    elif kind == "call":
        return next, owner, None
    kind_of_name: Any = type(name)
    is_plain = not is_odd(kind_of_name) and is_hashed_in_c(kind_of_name)
    if type(boxes) is dict and is_plain and name in boxes:
        return dict.get, boxes, name
    if type(boxes) is dict and is_plain and kind == "item" and place.value is MISSING:
        return contains, boxes, name
    if issubclass(type(boxes), tuple):
        return tuple.__getitem__, boxes, name
    if type(boxes) is list:
        return _item_of_list, boxes, name
    return READ[kind], owner, name


def _item_of_list(box: list[Any], index: int) -> Any:
    return box[index] if index < len(box) else MISSING


def _part(item: HeldTensor, place: Place) -> Any:
    return item.part_of(place.read())


_WRAPPERS = (property, cached_property, staticmethod, classmethod)
_GETTERS = (attrgetter, itemgetter, methodcaller)
_IN_C = (BuiltinFunctionType, getattr(sys.modules.get("numpy"), "ufunc", BuiltinFunctionType))
_CODE = (CodeType, FunctionType, MethodType, type, partial, *_IN_C, *_GETTERS, *_WRAPPERS)


def _prefixes(names: Iterable[str]) -> set[str]:
    """Every path above the named ones."""
    found: set[str] = set()
    for name in names:
        while (cut := max(map(name.rfind, ".[("))) > 0:
            name = name[:cut]
            if name in found:
                break
            found.add(name)
    return found


def _boxes(item: Any) -> Iterator[Any]:
    """The dicts and containers whose length says that something was added or taken away."""
    kind = type(item)
    if issubclass(kind, (dict, list, set)):
        yield item
    elif issubclass(kind, torch.nn.Module):
        yield vars(item)
        if not issubclass(kind, torch.jit.ScriptModule):  # It keeps its own elsewhere.
            yield from (item._parameters, item._buffers, item._modules)
    elif not issubclass(kind, (FunctionType, type)):
        yield attributes_of(item)


def _id_of(place: Place) -> tuple[int, Any, str]:
    """The same of two walks. A key may be hashed by code of its own."""
    name = place.name
    if place.kind == "entries":  # Which keys they may be differs.
        name = ""
    return id(place.owner), name if type(name) is str else id(name), place.kind


def _is_module(item: object) -> bool:
    return issubclass(type(item), torch.nn.Module)


def _same_code(before: object, now: object) -> bool:
    """True if one object may take another's place as far as its code goes."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if type(before) is FunctionType:
        return before.__code__ is now.__code__  # type: ignore[attr-defined]  # it is one as well
    if type(before) is MethodType and type(now) is MethodType:
        return before.__self__ is now.__self__ and _same_code(before.__func__, now.__func__)
    if type(before) is partial and type(now) is partial:
        return _same_code(parts_of_partial(before)[0], parts_of_partial(now)[0])
    if issubclass(type(before), _GETTERS):
        return same_host_value(before.__reduce__(), now.__reduce__())
    return not issubclass(type(before), (type, CodeType, *_IN_C, *_WRAPPERS))


def _owns_nothing(_: torch.Tensor) -> bool:
    return False


class Found(NamedTuple):
    """What a program reads, as it is now."""

    moved: list[str]
    """Names of tensors and values that are others, and of replaced code."""
    reads: Reads
    tensors: Sequence[HeldTensor]
    values: Sequence[Place]


class Lookup:
    """Looks at each place once, for all programs that share it.

    Tensors are known by themselves and values by the sequence they are in, not by their ids: where
    something hooks the audit events of the process, each ``id`` is one.
    """

    def __init__(self) -> None:
        self._now: dict[int, Reads] = {}
        self._is_moved: dict[HeldTensor, bool] = {}
        self._values: dict[int, tuple[Sequence[Place], list[str]]] = {}
        """By id, values that programs share, and the paths of those that moved."""

    @property
    def num_checked(self) -> int:
        values = {id(place) for values, _ in self._values.values() for place in values}
        return len(self._is_moved) + len(values)

    def find(self, reads: Reads, tensors: Sequence[HeldTensor], values: Sequence[Place]) -> Found:
        """Of what a program reads: what moved, and where the rest stands now."""
        now = self._now.get(id(reads))
        if now is None:
            now = self._now[id(reads)] = reads.current()
        if now is not reads:
            return _replaced(reads, now, tensors, values)
        is_moved = self._is_moved
        # Most were looked at for another program.
        for item in tensors:
            if item not in is_moved:
                is_moved[item] = item.has_moved()
        moved = [item.name for item in tensors if is_moved[item]]
        known = self._values.get(id(values))
        if known is None:
            found = [place.path for place in values if place.has_moved()]
            known = self._values[id(values)] = values, found
        moved += known[1]
        return Found(list(dict.fromkeys(moved)), reads, tensors, values)


def _replaced(
    reads: Reads, now: Reads, tensors: Sequence[HeldTensor], values: Sequence[Place]
) -> Found:
    """What moved, after an object that leads to tensors or values was replaced."""
    kept: list[HeldTensor] = []
    same: list[Place] = []
    touched = _prefixes(item.name for item in tensors)
    held_below = _prefixes(item.name for item in reads.tensors)
    # A module that holds tensors, of which the program reads none, may be replaced.
    replaced = list(reads.replaced_code(now))
    moved = [path for path in replaced if path in touched or path not in held_below]
    below = tuple(f"{path}." for path in replaced)
    for item in tensors:
        place = item.place and _place_now(now, item.place, item.fits)
        if place is None and (item.place is not None or item.has_moved()):
            moved.append(item.name)
        else:
            kept.append(replace(item, place=place))
    for value in values:
        place = _place_now(now, value, value.fits)
        if place is not None:
            same.append(place._replace(value=value.value))
        elif not value.path.startswith(below):  # What is above it says all.
            moved.append(value.path)
    return Found(list(dict.fromkeys(moved)), now, kept, same)


def _place_now(now: Reads, place: Place, fits: Callable[[Any], bool]) -> Place | None:
    for other in now.places.get(place.path, ()):
        if fits(other.value):
            return other
    # An attribute that was absent is absent from the new walk too.
    return place if place.value is MISSING and place.path not in now.places else None

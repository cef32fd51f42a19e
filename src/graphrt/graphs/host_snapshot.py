"""What a callable remembers on the host, and how it was before warm-ups, captures and checks.

Three uses. A failed recording leaves nothing in the model: what it assigned points at memory that
is gone. What every run advances (a counter) goes back to where it was before the first warm-up,
because those runs were not the caller's. And the eager side of a comparison runs as if for the
first time, because a value memoised from the inputs of a warm-up makes eager execution wrong in
the same way as the graph. A memo itself stays, because graphs read that very tensor.
"""

from __future__ import annotations

import dis
import functools
import gc
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, chain, compress, count
from operator import is_, is_not
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Literal

import torch

from graphrt.graphs.reachable import (
    MISSING,
    Place,
    attributes_of,
    is_host_scalar,
    reach,
    read_attribute,
    read_cell,
    read_global,
)
from graphrt.graphs.values import tensors_of

# The containers of a module that hold its parts; those of hooks are the caller's business.
_REGISTERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_CONTAINERS = (dict, list, set, deque)
_NO_OBJECTS = (type, tuple, frozenset, ModuleType, BaseException)
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_CACHE = type(functools.lru_cache(lambda: None))

_ALL: Any = object()
"""In place of a key: all that a container holds."""

Kind = Literal["object", "container", "cell", "global", "class", "slot"]


class _Held:
    """One object, container or single variable: what it held first, and what it held last."""

    __slots__ = ("first", "get", "keys", "kind", "name", "path", "target", "values")

    def __init__(self, path: str, target: Any, kind: Kind, name: Any = None) -> None:
        self.path = path
        self.target = target
        """The container itself; the ``__dict__`` of an object; else what ``name`` stands in."""
        self.kind: Kind = kind
        self.name = name
        """Of a single variable or attribute; other names in ``target`` are not looked at."""
        self.get: Callable[[Any, Any], Any] | None = _GETTERS.get(kind)
        """Reads the one under ``name``, or ``MISSING``."""
        self.keys, self.values = self.first = self.read()

    def read(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What it holds now: keys (or indices) and values."""
        target = self.target
        if self.get is not None:
            value = self.get(target, self.name)
            return ((), ()) if value is MISSING else ((self.name,), (value,))
        if isinstance(target, dict):
            methods = _dict_type(target)
            return tuple(methods.keys(target)), tuple(methods.values(target))
        values = tuple(target)
        return values if isinstance(target, set) else tuple(range(len(values))), values

    def is_untouched(self) -> bool:
        """True only if it holds what it held last, in the same order."""
        target, values = self.target, self.values
        if self.get is not None:
            return self.get(target, self.name) is (values[0] if values else MISSING)
        if type(target) is dict:
            return (
                len(target) == len(values)
                and all(map(is_, target.values(), values))
                and all(map(is_, target, self.keys))
            )
        keys, now = self.read()
        if isinstance(target, set):
            return set(map(id, keys)) == set(map(id, self.keys))
        is_same = len(now) == len(values) and all(map(is_, now, values))
        return is_same and (isinstance(target, list | deque) or all(map(is_, keys, self.keys)))

    def write(self, keys: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        """Make it hold exactly these."""
        target = self.target
        if self.kind != "container":
            was, wanted = (dict(zip(*side, strict=True)) for side in (self.read(), (keys, values)))
            for key in was | wanted:
                if was.get(key, MISSING) is not wanted.get(key, MISSING):
                    self.set(key, wanted.get(key, MISSING))
        elif isinstance(target, dict):
            methods = _dict_type(target)
            methods.clear(target)
            for key, value in zip(keys, values, strict=True):
                methods.__setitem__(target, key, value)
        elif isinstance(target, list):
            list.__setitem__(target, slice(None), values)
        elif isinstance(target, set):
            set.clear(target)
            set.update(target, values)
        elif isinstance(target, deque):
            deque.clear(target)
            deque.extend(target, values)

    def set(self, key: Any, value: Any) -> None:
        """Set or, with ``MISSING``, remove one entry. Runs no code of the user's but a key's."""
        target, is_gone = self.target, value is MISSING
        if self.kind == "cell":
            if not is_gone:
                target.cell_contents = value
            elif self.read()[0]:
                del target.cell_contents
        elif self.kind in ("class", "slot"):
            methods = type if self.kind == "class" else object
            if not is_gone:
                methods.__setattr__(target, key, value)
            elif self.read()[0]:
                methods.__delattr__(target, key)
        elif isinstance(target, dict):
            # Not through setattr: a module would register what is registered already.
            methods = _dict_type(target)
            if is_gone:
                methods.pop(target, key, None)
            else:
                methods.__setitem__(target, key, value)
        elif isinstance(target, set):
            (set.discard if is_gone else set.add)(target, key)
        else:
            target[key] = value

    def name_of(self, key: Any) -> str:
        """How the user writes the place."""
        if self.kind != "object":
            return self.path
        return f"{self.path}.{key}" if self.path else str(key)


_GETTERS: Mapping[Kind, Callable[[Any, Any], Any]] = {
    "cell": read_cell,
    "global": read_global,
    "slot": read_attribute,
    "class": lambda owner, name: attributes_of(owner).get(name, MISSING),
}


def _dict_type(target: dict[Any, Any]) -> Any:
    """The class whose methods read and write it, without those of a user's subclass."""
    return OrderedDict if isinstance(target, OrderedDict) else dict


def _changed_keys(
    held: _Held,
    before: tuple[tuple[Any, ...], tuple[Any, ...]],
    now: tuple[tuple[Any, ...], tuple[Any, ...]],
) -> list[Any]:
    """The keys under which two readings differ; another order alone is no difference."""
    if not isinstance(held.target, dict | set) and held.kind == "container":
        if len(before[0]) != len(now[0]):
            return [_ALL]
        return [index for index in now[0] if before[1][index] is not now[1][index]]
    old, new = dict(zip(*before, strict=True)), dict(zip(*now, strict=True))
    keys = dict.fromkeys([*old, *new])
    return [key for key in keys if old.get(key, MISSING) is not new.get(key, MISSING)]


class _Change:
    """What one holder held, what it holds now, and the keys under which these differ."""

    __slots__ = ("before", "held", "keys", "now")

    def __init__(self, held: _Held, before: Any, now: Any) -> None:
        self.held = held
        self.before = before
        self.now = now
        self.keys = _changed_keys(held, before, now)

    @property
    def is_growth(self) -> bool:
        """True if a container got or lost entries: what is in it depends on how often it ran."""
        return self.held.kind == "container" and (
            self.keys == [_ALL] or len(self.before[0]) != len(self.now[0])
        )

    def value(self, side: Any, key: Any) -> Any:
        keys, values = side
        return values if key is _ALL else dict(zip(keys, values, strict=True)).get(key, MISSING)

    def put_back(self, keys: Iterable[Any]) -> None:
        """Put back what was there before under ``keys``."""
        chosen = list(keys)
        if len(chosen) == len(self.keys):
            self.held.write(*self.before)
        else:
            for key in chosen:
                self.held.set(key, self.value(self.before, key))


class HostSnapshot:
    """What a callable reaches on the host: now, and after each run of it.

    In it are attributes of modules and plain objects, registered parameters, buffers and
    submodules, entries of containers, closure variables, the globals that code names, class
    attributes, and ``functools`` caches. Contents of tensors are not: a ``StateGuard`` keeps those.
    While it is kept, so is everything it refers to.
    """

    def __init__(self, runnable: object) -> None:
        self.runnable = runnable
        self._dicts: list[_Held] = []
        self._named: list[_Held] = []
        """Single variables and attributes."""
        self._others: list[_Held] = []
        self._empty: list[_Held] = []
        """Containers that have held nothing so far."""
        self._empty_targets: list[Any] = []
        self._flat: tuple[list[Any], list[int], list[Any], list[Any]] | None = None
        """Targets, lengths and values of all ``_dicts``, and how each single variable is read:
        compared in one go, which is fast."""
        self._known: set[tuple[int, Any]] = set()
        self._entered: dict[int, Any] = {}
        """Objects that were walked, by id: what is set later mostly leads back to them."""
        self._home: Collection[str] = ()
        self._caches: list[tuple[_Held, Any, Any, int]] = []
        """Holder and key of each ``functools`` cache, it, and its misses so far."""
        self._ran: set[tuple[int, Any]] | None = None
        """Places that runs changed, by id of what holds them and key. None: no run was noted."""
        self._between: set[tuple[int, Any]] = set()
        """Places that changed between runs: examples and resources do that."""
        self._advancing: set[tuple[int, Any]] = set()
        """Places that a later run changed again."""
        self._is_first = False
        self._adopt("", runnable)

    # -- what is in it

    def _adopt(self, path: str, value: Any) -> None:
        """Add everything that ``value`` reaches and that is not in it yet."""
        reached = reach(value, known=self._entered, home=self._home)
        self._home = reached.home
        prefix = f"{path}." if path else ""
        for name, found in reached.objects.items():
            joined = path + name if name.startswith("[") else prefix + name
            self._add_object(joined if name else path, found)
        self._entered |= {
            id(found): found
            for found in reached.objects.values()
            if not issubclass(type(found), FunctionType)
        }
        # Two objects may have one path; the places of both are listed.
        entered = set(map(id, reached.objects.values()))
        for place in reached.places:
            self._add_place(prefix, place, entered)

    def _add_object(self, path: str, value: Any) -> None:
        # By class: an object may answer for its class as it likes, or raise.
        if issubclass(type(value), _CONTAINERS):
            self._add(path, value, "container")
        elif issubclass(type(value), FunctionType):
            for name in _stored_globals(value.__code__):
                self._add(name, value.__globals__, "global", name)
            self._add(path.removesuffix("()"), vars(value), "object")
        elif not issubclass(type(value), _NO_OBJECTS):
            own = attributes_of(value)
            if isinstance(own, dict) and own is attributes_of(value):  # Else it has no __dict__.
                self._add(path, own, "object")
                registers = _REGISTERS if issubclass(type(value), torch.nn.Module) else ()
                for name, item in own.items():
                    if name in registers:
                        self._add(path, item, "object")
                    elif type(item) in _CONTAINERS:
                        # Also where no code names it: it may be reached in another way.
                        self._add(f"{path}.{name}" if path else name, item, "container")
            kind: Any = type(value)
            for base, name in _caches_of(kind):
                self._add(f"{path}.{name}" if path else name, base, "class", name)

    def _add_place(self, prefix: str, place: Place, entered: set[int]) -> None:
        path, owner, name = prefix + place.path, place.owner, place.name
        if place.kind == "length":
            return  # What is in the container says it, where that was entered.
        if place.kind in ("cell", "global"):
            self._add(path, owner, place.kind, name)
        elif issubclass(type(owner), ModuleType):
            self._add(path, vars(owner), "global", name)
        elif place.kind == "member":
            kind = owner if issubclass(type(owner), type) else type(owner)
            base = next((one for one in kind.__mro__ if name in one.__dict__), None)
            if base is not None:
                self._add(path, base, "class", name)
        else:
            if id(owner) not in entered:
                entered.add(id(owner))
                self._add_object(path.removesuffix(f".{name}"), owner)
            if place.kind == "attribute" and _is_fixed_attribute(type(owner), name):
                self._add(path, owner, "slot", name)

    def _add(self, path: str, target: Any, kind: Kind, name: Any = None) -> None:
        known = (id(target), name)
        if known in self._known:
            return
        self._known.add(known)
        self._flat = None
        held = _Held(path, target, kind, name)
        if not held.keys and type(target) in _CONTAINERS:
            self._empty.append(held)  # Most of a module's containers.
            self._empty_targets.append(target)
            return
        self._keep(held)

    def _keep(self, held: _Held) -> None:
        is_plain = held.kind == "object" and type(held.target) is dict
        (self._named if held.get else self._dicts if is_plain else self._others).append(held)
        for key, value in zip(held.keys, held.values, strict=True):
            if type(value) is _CACHE:
                self._caches.append((held, key, value, value.cache_info().misses))

    # -- what changed

    def _touched(self) -> list[_Held]:
        """What does not hold what it held at the last ``_sync``."""
        if any(self._empty_targets):
            filled = [held for held in self._empty if held.target]
            self._empty = [held for held in self._empty if not held.target]
            self._empty_targets = [held.target for held in self._empty]
            self._flat = None
            for held in filled:
                self._keep(held)
        if self._flat is None:
            self._flat = (
                [held.target for held in self._dicts],
                [len(held.values) for held in self._dicts],
                [value for held in self._dicts for value in held.values],
                [
                    (held, held.get, held.target, held.name, (*held.values, MISSING)[0])
                    for held in self._named
                ],
            )
        targets, lengths, values, named = self._flat
        touched = [held for held in self._others if not held.is_untouched()]
        touched += [
            held for held, get, target, name, value in named if get(target, name) is not value
        ]
        if list(map(len, targets)) != lengths:
            touched += [held for held in self._dicts if not held.is_untouched()]
            return touched
        now = chain.from_iterable(map(dict.values, targets))
        places = list(compress(count(), map(is_not, now, values)))
        if places:
            # Few are: to ask each dict would cost more than to find those that hold them.
            ends = list(accumulate(lengths))
            touched += [
                self._dicts[n] for n in dict.fromkeys(bisect_right(ends, p) for p in places)
            ]
        return touched

    def _sync(self) -> list[_Change]:
        """Note what differs from the last time; return that."""
        changes = []
        for held in self._touched():
            self._flat = None
            before, now = (held.keys, held.values), held.read()
            held.keys, held.values = now
            change = _Change(held, before, now)
            changes.append(change)
            for key in change.keys:
                found = change.value(now, key)
                for value in found if key is _ALL else (found,):
                    if not (issubclass(type(value), torch.Tensor) or is_host_scalar(value)):
                        self._adopt(held.name_of(key), value)
        return changes

    def _pending(self) -> list[_Change]:
        """What differs from the last ``_sync``, which goes on to count."""
        return [_Change(held, (held.keys, held.values), held.read()) for held in self._touched()]

    def _undo(self) -> None:
        """Put everything back as it was at the last ``_sync``."""
        for held in self._touched():
            held.write(held.keys, held.values)

    def _since_first(self) -> list[_Change]:
        """What differs from the snapshot, as of the last ``_sync``."""
        return [
            _Change(held, held.first, (held.keys, held.values))
            for held in (*self._dicts, *self._named, *self._others)
            if held.first[1] is not held.values
        ]

    def changed(self, *, only_tensors: bool = False) -> tuple[str, ...]:
        """Name what runs changed since the snapshot; if none was noted, whatever changed.

        ``only_tensors``: where tensors are now.
        """
        if self._ran is None:
            self._sync()
        names = [
            change.held.name_of(key)
            for change in self._since_first()
            for key in change.keys
            if self._is_of_a_run(change.held, key)
            and not (only_tensors and not tensors_of(change.value(change.now, key)))
        ]
        names += [f"{held.name_of(key)}()" for held, key, _ in self._filled_caches()]
        return tuple(dict.fromkeys(names))

    def rebase(self) -> None:
        """Take what anything but a run has changed since the last one as it is now.

        Not so a memo that was put back and that a step of the caller's has made again.
        """
        memos = (self._ran or set()) - self._advancing
        for change in self._sync():
            held = change.held
            keys = [key for key in change.keys if (id(held.target), key) not in memos]
            if keys == [_ALL]:
                held.first = change.now
            else:
                merged = dict(zip(*held.first, strict=True))
                for key in keys:
                    value = change.value(change.now, key)
                    merged.pop(key, None) if value is MISSING else merged.update({key: value})
                held.first = tuple(merged), tuple(merged.values())

    def _is_of_a_run(self, held: _Held, key: Any) -> bool:
        return self._ran is None or (
            _is_in(self._ran, held, key) and not _is_in(self._between, held, key)
        )

    # -- runs

    @contextmanager
    def run(
        self, *, is_first: bool, refuses: Callable[[str, Any], bool] | None = None
    ) -> Iterator[None]:
        """Around one run of the callable. One that raises leaves nothing behind.

        ``is_first``: the first one for its inputs. What it sets may be a memo; what later runs
        change again is state that each run advances. ``refuses(path, value)``: values that may
        not stay where the run has put them.
        """
        if self._ran is None:
            self._ran = set()
        self._note_between()
        self._is_first = is_first
        try:
            yield
        except BaseException:
            self._note_run(self._pending())
            self._undo()
            raise
        changes = self._pending()
        self._note_run(changes)
        if refuses is not None:
            for change in changes:
                change.put_back(
                    key
                    for key in change.keys
                    if refuses(change.held.name_of(key), change.value(change.now, key))
                )
        if changes:
            self._sync()

    def _note_run(self, changes: list[_Change]) -> None:
        assert self._ran is not None, "only runs are noted"
        for change in changes:
            places = {(id(change.held.target), key) for key in change.keys}
            self._ran |= places
            if not self._is_first:
                self._advancing |= places
                if change.is_growth:
                    self._advancing.add((id(change.held.target), _ALL))

    def _note_between(self) -> None:
        for change in self._sync():
            self._between |= {(id(change.held.target), key) for key in change.keys}

    def restore_advanced(self, *, memos: bool = False) -> None:
        """Put back, as it was in the snapshot, what later runs changed again.

        ``memos``: also what the first one alone set, where no graph reads it.
        """
        if not (self._advancing or memos):
            return
        self._note_between()
        is_put_back = False
        for change in self._since_first():
            held = change.held
            keys = [
                key
                for key in change.keys
                if _is_in(self._advancing, held, key) or (memos and self._is_of_a_run(held, key))
            ]
            if is_whole := _is_in(self._advancing, held, _ALL):
                held.write(*held.first)
            else:
                change.put_back(keys)
            is_put_back = is_put_back or is_whole or bool(keys)
        if is_put_back:
            self._sync()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put back what runs changed, as it was in the snapshot; on exit, as it was on entry.

        What the body sets meanwhile is dropped. A ``functools`` cache that got an entry with a
        tensor or a float in it is replaced by an empty one meanwhile.
        """
        caches = self._filled_caches()
        self._note_between()
        try:
            for change in self._since_first():
                change.put_back([k for k in change.keys if self._is_of_a_run(change.held, k)])
            for held, key, cache in caches:
                options = cache.cache_parameters()
                held.set(key, functools.lru_cache(**options)(cache.__wrapped__))
            yield
        finally:
            self._undo()

    def _filled_caches(self) -> list[tuple[_Held, Any, Any]]:
        """``functools`` caches with a new entry that may depend on inputs, and where they stand."""
        return [
            (held, key, cache)
            for held, key, cache, misses in self._caches
            if cache.cache_info().misses > misses and _may_hold_inputs(cache)
        ]


def _is_in(places: set[tuple[int, Any]], held: _Held, key: Any) -> bool:
    place = id(held.target)
    return (place, key) in places or (place, _ALL) in places


def _may_hold_inputs(cache: Any) -> bool:
    """Whether arguments or results of a cache are tensors or floats, which inputs may have made.

    Other caches (kernels, modules, flags by name) stay as they are: to fill them twice may have
    effects of its own.
    """
    found = gc.get_referents(cache)
    found += [value for own in found if type(own) is dict for value in own.values()]
    return any(
        isinstance(value, float | complex) or tensors_of(value)
        for value in found
        if value is not cache.__wrapped__ and not isinstance(value, dict)
    )


@functools.lru_cache(maxsize=4096)
def _caches_of(kind: type) -> tuple[tuple[type, str], ...]:
    """The methods of a class and its bases that a ``functools`` cache wraps."""
    return tuple(
        (base, name)
        for base in kind.__mro__
        for name, value in base.__dict__.items()
        if type(value) is _CACHE
    )


def _is_fixed_attribute(kind: type, name: str) -> bool:
    base = next((base for base in kind.__mro__ if name in base.__dict__), None)
    # Types written in C have members too, which are read-only or made anew by each read.
    return (
        base is not None
        and "__slots__" in base.__dict__
        and type(base.__dict__[name]) is MemberDescriptorType
    )


@functools.lru_cache(maxsize=4096)
def _stored_globals(code: CodeType) -> tuple[str, ...]:
    """The names of a piece of code that assigns global variables, and of functions within it."""
    names = list(code.co_names) if _STORE_GLOBAL in code.co_code[::2] else []
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _stored_globals(inner)
    return tuple(dict.fromkeys(names))

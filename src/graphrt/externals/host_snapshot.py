"""What a callable remembers on the host, and how it was before warm-ups, captures and checks.

Three uses. A failed recording leaves nothing in the model: what it assigned points at memory that
is gone. What every run advances (a counter) goes back to where it was before the first warm-up,
because those runs were not the caller's. And the eager side of a comparison runs as if for the
first time, because a value memoised from the inputs of a warm-up makes eager execution wrong in
the same way as the graph. A memo itself stays, because graphs read that very tensor.
"""

from __future__ import annotations

import array
import ctypes
import dis
import functools
import gc
import io
import sys
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from enum import Enum
from itertools import accumulate, chain, compress, count, repeat, starmap, zip_longest
from operator import is_, is_not
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from graphrt.errors import ConfigError, VerificationError
from graphrt.externals.places import (
    CDATA,
    MISSING,
    Place,
    attributes_of,
    base_of,
    class_of,
    contents_of,
    has_keys_that_raise,
    has_plain_dict,
    is_array,
    is_host_scalar,
    is_record,
    is_tensor,
    own_dict,
    parts_in,
    plain_array,
    read_cell,
    read_context,
    read_global,
    read_script,
    same_bytes,
    slots_of,
    viewed_by,
)
from graphrt.externals.reachable import Reach, Walk, reach
from graphrt.gc_pause import gc_paused
from graphrt.values import same_host_value, tensors_of

# The containers of a module that hold its parts, and the hooks of its calls: a model that registers
# hooks in its first run, and notes that it has, must not be without the note alone.
_REGISTERS = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_CONTAINERS = (dict, list, set, deque)
_IDS_OF_CONTAINERS = frozenset(map(id, _CONTAINERS))
_IDS_OF_EMPTIES = _IDS_OF_CONTAINERS | {id(OrderedDict)}
"""To ask for a class by its id runs no code of its metaclass."""
_NO_OBJECTS = (type, ModuleType)
_NO_MEMOS = (type, ModuleType, FunctionType, BuiltinFunctionType, ReferenceType)
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_CACHE = type(functools.lru_cache(lambda: None))

_NOT_LOOKED_AT = ("default", "member", "length", "type")
"""Kinds of places that may change without being noticed here."""
_OF_THE_WHOLE = ("length", "keys", "contents", "type", "call", "memo", "target")
"""Kinds of places that say nothing beyond what their owner does."""

_MAY_BE_SET = 1 << 9
"""The flag of a class that was made by a statement: others have no attributes to set."""
_ALL: Any = object()
"""In place of a key: all that a container holds."""

Kind = Literal[
    "object",
    "container",
    "bytes",
    "cell",
    "global",
    "class",
    "members",
    "variables",
    "slot",
    "context",
    "script",
    "own",
]

MAX_ARRAY_BYTES = 1 << 20
"""What runs change in a larger array is seen only if code names the array."""
MAX_COPIED_BYTES = 64 << 20
"""Of the arrays that code names, so much is copied; of the rest it is seen that a run writes them,
which is refused, because it cannot be put back."""


class _Held:
    """One object, container or single variable: what it held first, and what it held last."""

    __slots__ = ("box", "first", "get", "kind", "last", "name", "path", "row", "target")

    def __init__(self, path: str, target: Any, kind: Kind, name: Any = None) -> None:
        self.path = path
        self.target = target
        """The container itself; the ``__dict__`` of an object; a class; else what has ``name``."""
        self.box = _dict_of(target) if kind == "members" else target
        """What is read: of all members of a class, the dict that has them."""
        self.kind: Kind = kind
        self.name = frozenset(target) if kind == "variables" else name
        """Of a single variable or attribute; other names in ``target`` are not looked at. Of a
        module, the variables that it had already, which are not looked at either."""
        self.get: Callable[[Any, Any], Any] | None = _GETTERS.get(kind)
        """Reads the one under ``name``, or ``MISSING``."""
        self.row: int | None = None
        """Its place in the columns of the snapshot."""
        self.first: dict[Any, Any] = {}
        self.last = self.first
        self.first = self.last = self.read()

    def read(self) -> dict[Any, Any]:
        """What it holds now, by key, index or element. Runs no code of the user's but a hash."""
        target = self.box
        if self.get is not None:
            value = self.get(target, self.name)
            return {} if value is MISSING else {self.name: value}
        if self.kind == "variables":
            now = dict.copy(target)
            return {k: now[k] for k in now.keys() - self.name if _is_memo(k, now[k])}
        if self.kind == "bytes":
            contents = _bytes_of(target)
            # One object for equal contents, because what is held is compared by identity.
            known = (held for held in (self.last, self.first) if held.get(_ALL) == contents)
            return next(known, {_ALL: contents})
        if issubclass(type(target), dict):
            # An ordered one has an order of its own.
            is_ordered = issubclass(type(target), OrderedDict)
            return dict(OrderedDict.items(target)) if is_ordered else dict.copy(target)
        if issubclass(type(target), set):
            return {v: v for v in _elements_of(target)}
        return dict(enumerate(_elements_of(target)))

    def is_untouched(self) -> bool:
        """True only if it holds what it held last, in the same order."""
        target, last = self.box, self.last
        if self.get is not None:
            return self.get(target, self.name) is last.get(self.name, MISSING)
        if self.kind == "variables" and not last and len(target) == len(self.name):
            return True
        if self.kind == "bytes":
            if is_array(target) and target.dtype.kind != "T":
                return same_bytes(target, last[_ALL])
            return bool(_bytes_of(target) == last[_ALL])
        if not issubclass(type(target), dict):
            # Not ``read``, whose dict takes five times as long.
            pairs = zip_longest(_elements_of(target), last.values(), fillvalue=MISSING)
            return all(starmap(is_, pairs))
        now = target if type(target) is dict and self.kind != "variables" else self.read()
        return (
            len(now) == len(last)
            and all(map(is_, now.values(), last.values()))
            and all(map(is_, now, last))
        )

    def write(self, wanted: dict[Any, Any]) -> None:
        """Make it hold exactly this. Runs no code of the user's but a hash."""
        target = self.target
        if self.kind == "container":
            # What left a weak container because its object died does not come back.
            now = self.read()
            wanted = {k: v for k, v in wanted.items() if k in now or not _is_dead(k, v)}
        if self.is_resized(wanted):
            return  # What was there is gone, and refused where no other error is raised.
        if self.kind == "bytes":
            _set_bytes(target, wanted[_ALL])
        elif issubclass(type(target), set):  # Also the one that a module keeps of its buffers.
            set.clear(target)
            set.update(target, wanted)
        elif self.kind != "container":
            was = self.read()
            for key in was | wanted:
                value = wanted.get(key, MISSING)
                if was.get(key, MISSING) is not value:
                    self._set(key, value)
        elif is_array(target):
            _set_elements(target, wanted.values())
        elif issubclass(type(target), dict):
            methods = base_of(target)
            methods.clear(target)
            for key, value in wanted.items():
                methods.__setitem__(target, key, value)
        elif isinstance(target, list):
            list.__setitem__(target, slice(None), wanted.values())
        else:
            deque.clear(target)
            deque.extend(target, wanted.values())

    def is_resized(self, wanted: dict[Any, Any]) -> bool:
        """True for an array of another size: to resize it would leave its views without memory."""
        is_of_array = self.kind == "bytes" and is_array(self.target)
        return is_of_array and len(_bytes_of(self.target)) != len(wanted[_ALL])

    def _set(self, key: Any, value: Any) -> None:
        """Set or, with ``MISSING``, remove a variable or an attribute."""
        target = self.target
        if self.kind in ("object", "global", "variables"):
            # Not through setattr: a module would register what is registered already.
            methods = base_of(target)
            if value is MISSING:
                methods.pop(target, key)
            else:
                methods.__setitem__(target, key, value)
            return
        set_to, remove = _SETTERS[self.kind]
        if value is MISSING:
            remove(target, key)
        else:
            set_to(target, key, value)

    def name_of(self, key: Any) -> str:
        """How the user writes the place."""
        if self.kind not in ("object", "members", "variables"):
            return self.path
        return f"{self.path}.{key}" if self.path else str(key)

    def change(self, before: dict[Any, Any], now: dict[Any, Any]) -> _Change:
        if self.kind == "container" and isinstance(self.target, list | deque):
            # What is added to a full deque moves the rest of it.
            is_deque = isinstance(self.target, deque)
            is_moved = is_deque and any(map(is_not, before.values(), now.values()))
            if is_moved or len(before) != len(now):
                return _Change(self, before, now, [_ALL])
        if len(before) == len(now) and all(map(is_, before, now)):
            differing = list(compress(before, map(is_not, before.values(), now.values())))
        else:
            keys = dict.fromkeys([*before, *now])
            differing = [k for k in keys if before.get(k, MISSING) is not now.get(k, MISSING)]
        return _Change(self, before, now, differing)


_FILES = (io.BytesIO, io.StringIO)
_BUFFERS = (bytearray, array.array, CDATA, *_FILES)


def _bytes_of(target: Any) -> Any:
    """The contents of an array or buffer; of a text or bytes in memory, where it is read too."""
    kind = type(target)
    if is_array(target):
        plain = plain_array(target)
        # Each look at a string of any length makes it anew.
        return tuple(plain.flat) if plain.dtype.kind == "T" else plain.tobytes()
    if issubclass(kind, CDATA):
        return ctypes.string_at(ctypes.addressof(target), ctypes.sizeof(target))
    if issubclass(kind, _FILES):
        methods = _file_type(target)
        return () if methods.closed.__get__(target) else methods.__getstate__(target)[:-1]
    return memoryview(target).tobytes()


def _elements_of(target: Any) -> Iterator[Any]:
    """Of a container that is no dict. A subclass may give other elements."""
    if is_array(target):
        return iter(plain_array(target).flat)
    elements: Iterator[Any] = base_of(target).__iter__(target)
    return elements


def _set_elements(table: Any, values: Iterable[Any]) -> None:
    flat = plain_array(table).flat
    for place, value in enumerate(values):
        flat[place] = value


def _set_bytes(target: Any, contents: Any) -> None:
    kind = type(target)
    if is_array(target) and target.dtype.kind == "T":
        _set_elements(target, contents)
    elif is_array(target):
        plain = plain_array(target)
        whole = plain.copy()
        whole.reshape(-1).view("u1").data[:] = contents
        plain[...] = whole
    elif issubclass(kind, CDATA):
        ctypes.memmove(ctypes.addressof(target), contents, len(contents))
    elif issubclass(kind, _FILES):
        methods = _file_type(target)
        if contents and not methods.closed.__get__(target):  # Nothing opens it again.
            methods.__setstate__(target, (*contents, None))
    elif issubclass(kind, array.array):
        items = array.array(target.typecode, contents)
        array.array.__setitem__(target, slice(None), items)
    else:
        bytearray.__setitem__(target, slice(None), contents)


def _num_bytes(target: Any) -> int:
    """Of an array or buffer."""
    if is_array(target):
        num_bytes: int = plain_array(target).nbytes
        return num_bytes
    if issubclass(type(target), _FILES):
        contents = _bytes_of(target)
        return len(contents[0]) if contents else 0
    return memoryview(target).nbytes


def _file_type(target: Any) -> Any:
    return io.BytesIO if issubclass(type(target), io.BytesIO) else io.StringIO


def _is_dead(*values: Any) -> bool:
    """True if one of them is a weak reference whose object is gone."""
    return any(issubclass(type(value), ReferenceType) and value() is None for value in values)


def _read_slot(owner: Any, name: str) -> Any:
    try:
        return object.__getattribute__(owner, name)  # A member of its class: no code of the user's.
    except AttributeError:
        return MISSING


def _unset(variable: ContextVar[Any], _: object) -> None:
    """Set a context variable to its default: nothing can unset it. Without one it stays."""
    with suppress(LookupError):
        variable.set(Context().run(variable.get))


def _has_default(variable: ContextVar[Any]) -> bool:
    try:
        Context().run(variable.get)
    except LookupError:
        return False
    return True


_GETTERS: Mapping[Kind, Callable[[Any, Any], Any]] = {
    "cell": read_cell,
    "global": read_global,
    "slot": _read_slot,
    "context": read_context,
    "script": read_script,
    "own": object.__getattribute__,
    "class": lambda owner, name: attributes_of(owner).get(name, MISSING),
}
_SETTERS: Mapping[Kind, tuple[Callable[..., None], Callable[..., None]]] = {
    "cell": (
        lambda cell, _, value: setattr(cell, "cell_contents", value),
        lambda cell, _: delattr(cell, "cell_contents"),
    ),
    "class": (type.__setattr__, type.__delattr__),
    "members": (type.__setattr__, type.__delattr__),
    "slot": (object.__setattr__, object.__delattr__),
    "own": (object.__setattr__, object.__delattr__),
    "context": (lambda variable, _, value: variable.set(value), _unset),
    "script": (
        lambda kept, name, value: kept.setattr(name, value),
        lambda kept, name: kept.setattr(name, None),
    ),
}


def _dict_of(kind: type) -> Any:
    """The dict behind the view that a class gives of its members, to read it like any other."""
    return gc.get_referents(attributes_of(kind))[0]


def _is_memo(name: str, value: object) -> bool:
    """True for a variable of a module that runs may have made; others are those of imports and of
    compilers, which look for them later."""
    return not (name.startswith("__") or isinstance(value, _NO_MEMOS))


class _Change(NamedTuple):
    """What one holder held, what it holds now, and the keys under which these differ.

    Another order alone is no difference; another length of a list is one of ``_ALL``.
    """

    held: _Held
    before: dict[Any, Any]
    now: dict[Any, Any]
    keys: list[Any]

    @property
    def is_growth(self) -> bool:
        """True if a container got or lost entries: what is in it depends on how often it ran."""
        return self.held.kind == "container" and len(self.before) != len(self.now)

    def value(self, key: Any) -> Any:
        """What is there now, under one of ``keys``."""
        return tuple(self.now.values()) if key is _ALL else self.now.get(key, MISSING)

    def put_back(self, keys: Collection[Any]) -> None:
        """Put back what was there before under ``keys``; the order too, if these are all."""
        if len(keys) == len(self.keys):
            self.held.write(self.before)
        elif keys:
            mixed = dict(self.now)
            for key in keys:
                _put(mixed, key, self.before.get(key, MISSING))
            self.held.write(mixed)


def _places_of(changes: Iterable[_Change]) -> Iterator[tuple[int, Any]]:
    """By id of what holds them and key."""
    return ((id(change.held.target), key) for change in changes for key in change.keys)


def _put(values: dict[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        values.pop(key, None)
    else:
        values[key] = value


class _Singles:
    """Single variables of one kind, as columns."""

    def __init__(self, get: Callable[..., Any], *more: Any) -> None:
        self._get = get
        self._more = more
        """Arguments of ``get`` after what has the variable, and its name."""
        self._held: list[_Held] = []
        self._targets: list[Any] = []
        self._names: list[Any] = []
        self._values: list[Any] = []

    def add(self, held: _Held) -> None:
        held.row = len(self._held)
        self._held.append(held)
        self._targets.append(held.target)
        self._names.append(held.name)
        self._values.append(MISSING)
        self.note(held)

    def note(self, held: _Held) -> None:
        """Take what it held last as what it holds."""
        assert held.row is not None, "it was added"
        self._values[held.row] = held.last.get(held.name, MISSING)

    def touched(self) -> Iterator[_Held]:
        now = map(self._get, self._targets, self._names, *self._more)
        return compress(self._held, map(is_not, now, self._values))


def _never(_: torch.Tensor) -> bool:
    return False


class HostSnapshot:
    """What a callable reaches on the host: now, and after each run of it.

    In it are attributes of modules and plain objects, registered parameters, buffers and
    submodules, entries of containers, closure variables, the globals that code names, class
    attributes, and ``functools`` caches. Contents of tensors are not: a ``StateGuard`` keeps those.
    While it is kept, so is everything it refers to.

    Errors: ``ConfigError`` for lazy parameters (``torch.nn.LazyLinear``), because a first run that
    is put back in part would leave a module that nothing can call.
    """

    def __init__(self, runnable: object) -> None:
        self.runnable = runnable
        # Of attributes and of elements of lists: what shows them now, lengths and values as
        # columns, which are compared in one go, because a call for each would cost ten times as
        # much.
        self._rows: list[_Held] = []
        self._views: list[Collection[Any]] = []
        self._lengths: list[int] = []
        self._values: list[Any] = []
        self._singles: Mapping[Kind, _Singles] = {
            **{kind: _Singles(get) for kind, get in _GETTERS.items()},
            "global": _Singles(dict.get, repeat(MISSING)),
        }
        """Single variables and attributes, in the same way."""
        self._others: list[_Held] = []
        """Global variables in what is no plain dict, and other containers."""
        self._empty: list[tuple[str, Any, Kind]] = []
        """Containers that have held nothing so far: most of a module's."""
        self._empty_targets: list[Any] = []
        self._known: set[tuple[int, Any]] = set()
        self._copied_bytes = 0
        self._large: list[tuple[str, Any]] = []
        """Arrays and buffers beyond ``MAX_COPIED_BYTES``, which runs may not write."""
        self._moved: dict[_Held, None] = {}
        """What did not always hold the same."""
        self._caches: list[tuple[_Held, Any, Any, int]] = []
        """Holder and key of each ``functools`` cache, it, and its misses so far."""
        self._ran: set[tuple[int, Any]] | None = None
        """Places that runs changed, by id of what holds them and key. None: no run was noted."""
        self._between: set[tuple[int, Any]] = set()
        """Places that changed between runs: examples and resources do that."""
        self._advancing: set[tuple[int, Any]] = set()
        """Places that a later run changed again."""
        self._unproven: set[tuple[int, Any]] = set()
        """Places that first runs changed, for which no program has been captured so far."""
        self.advances = False
        """Whether a number, a length of a list or a function is among them or in one of them: what
        a run computes may depend on how many ran before it. Other objects are what a run leaves
        behind of itself."""
        self._walk = Walk(runnable, enters_locals=True)
        with gc_paused(collects=False):  # It would visit all that is found again and again.
            self._reached: Reach | None = self._adopt("", runnable)
        """What the walk found, for as long as nothing of it was seen to change."""

    def reach(self) -> Reach:
        """What the callable reaches, if no run is going on: of the walk that was made already,
        where nothing has changed since."""
        found = self._reached
        # A cache that was filled meanwhile holds what a graph may read.
        is_filled = any(cache.cache_info().misses > misses for *_, cache, misses in self._caches)
        if (
            is_filled
            or found is None
            or any(place.kind in _NOT_LOOKED_AT and _is_changed(place) for place in found.places)
        ):
            return reach(self.runnable)
        return found

    # -- what is in it

    def _adopt(self, path: str, value: Any) -> Reach:
        """Add everything that ``value`` reaches and that is not in it yet."""
        reached = self._walk.follow(value, path)
        for space in reached.spaces:
            self._add_space(space)
        for name, found in reached.objects.items():
            self._add_object(name, found)
        for name in reached.assigned & {"__class__", *_OF_FUNCTIONS}:
            for path, found in reached.objects.items():
                if (type(found) is FunctionType) is (name in _OF_FUNCTIONS):
                    self._add(f"{path.removesuffix('()')}.{name}", found, "own", name)
        # Two objects may have one path; the places of both are listed.
        entered = set(map(id, reached.objects.values()))
        for path, owner, name, kind, found, _ in reached.places:
            if issubclass(type(found), torch.Tensor):
                if issubclass(type(found), UninitializedParameter | UninitializedBuffer):
                    raise ConfigError(
                        path,
                        expected="parameters and buffers that have a shape before the capture",
                        found="a lazy one, which the first call makes, and its module another one",
                        do="call the model once with real values first",
                    )
                self._add(path, attributes_of(found), "object")
            if kind in ("cell", "global", "context", "script"):
                self._add(path, owner, kind, name)
            elif kind in _OF_THE_WHOLE or (id(owner) in entered and kind != "member"):
                pass  # What is in a container says its length.
            elif kind == "member":
                of = class_of(owner)
                base = _base_with(of, name) or (of if of is owner else None)
                if base is not None and (id(base), None) not in self._known:
                    self._add(path, base, "class", name)
            elif owner is sys.modules:
                pass  # An import is the process's: to undo one would run the module once more.
            elif issubclass(type(owner), ModuleType):
                self._add(path, vars(owner), "global", name)
            else:
                entered.add(id(owner))
                self._add_object(path.removesuffix(f".{name}"), owner)
        return reached

    def _add_space(self, space: type | Mapping[str, Any]) -> None:
        """Add all members of a class, or the variables that a module gets from now on."""
        if (id(space), None) in self._known:
            return
        if not isinstance(space, type):
            self._add(str(space.get("__name__", "")), space, "variables")
        elif space.__flags__ & _MAY_BE_SET:
            path = space.__qualname__.rpartition("<locals>.")[2]
            self._add(path, space, "members")
            for name, value in attributes_of(space).items():
                if issubclass(type(value), Enum):  # One of its own objects.
                    self._add(f"{path}.{name}", attributes_of(value), "object")
                elif type(value) in _CONTAINERS and not issubclass(space, Enum):
                    self._add_object(f"{path}.{name}", value, is_named=False)

    def _add_object(self, path: str, value: Any, *, is_named: bool = True) -> None:
        # By class: an object may answer for its class as it likes, or raise.
        kind: Any = type(value)
        if issubclass(kind, _CONTAINERS):
            if has_keys_that_raise(value):  # The walk names it as not watched.
                return
            self._add(path, value, "container")
            if kind not in _CONTAINERS:  # A subclass may add attributes.
                self._add_own(path, kind, value)
        elif is_array(value):
            self._add_array(path, value, is_named=is_named)
            self._add_own(path, kind, value)
        elif issubclass(kind, _BUFFERS):
            self._add_bytes(path, value, "bytes", is_named=is_named)
            self._add_own(path, kind, value)
        elif is_record(value):
            self._add_object(path, viewed_by(value), is_named=is_named)
        elif kind is memoryview:
            with suppress(ValueError):  # One that was released.
                self._add_object(path, value.obj, is_named=is_named)
        elif kind is FunctionType:
            for name in _stored_globals(value.__code__):
                self._add(name, value.__globals__, "global", name)
            self._add(path.removesuffix("()"), vars(value), "object")
            if value.__kwdefaults__:
                self._add(path.removesuffix("()"), value.__kwdefaults__, "container")
        elif not issubclass(kind, _NO_OBJECTS):
            self._add_own(path, kind, value)

    def _add_array(self, path: str, value: Any, *, is_named: bool) -> None:
        plain = plain_array(value)
        if not plain.flags.writeable:
            self._add_object(path, viewed_by(value), is_named=is_named)
        elif plain.dtype.hasobject and plain.dtype.names:  # Each look at an element makes it anew.
            if (id(value), None) not in self._known:
                self._known.add((id(value), None))
                for name in plain.dtype.names:
                    self._add_object(f"{path}[{name!r}]", plain[name], is_named=is_named)
        elif plain.nbytes:
            has_objects = plain.dtype.hasobject and plain.dtype.kind != "T"
            of: Kind = "container" if has_objects else "bytes"
            self._add_bytes(path, value, of, is_named=is_named)

    def _add_bytes(self, path: str, value: Any, kind: Kind, *, is_named: bool) -> None:
        num_bytes = _num_bytes(value)
        if num_bytes > MAX_ARRAY_BYTES and (id(value), None) not in self._known:
            if not is_named:
                return
            self._copied_bytes += num_bytes
            if self._copied_bytes > MAX_COPIED_BYTES:
                self._known.add((id(value), None))
                if not issubclass(type(value), io.StringIO):  # Each look would copy all of it.
                    self._large.append((path, value))
                return
        self._add(path, value, kind)

    def _add_own(self, path: str, kind: type, value: Any) -> None:
        own = own_dict(value)
        if own is not None:
            self._add(path, own, "object")
            if not issubclass(kind, torch.Tensor) and has_plain_dict(kind):  # Another may be set.
                self._add(f"{path}.__dict__", value, "own", "__dict__")
            registers = _REGISTERS if issubclass(kind, torch.nn.Module) else ()
            for name in registers:
                if isinstance(own.get(name), _CONTAINERS):  # TorchScript keeps them elsewhere.
                    self._add(path, own[name], "object")
            ndarray = getattr(sys.modules.get("numpy"), "ndarray", ())
            for name, item in own.items():
                held: Any = type(item)
                is_box = id(held) in _IDS_OF_CONTAINERS or issubclass(held, ndarray)
                if is_box and name not in registers:
                    # Also where no code names it: it may be reached in another way.
                    where = f"{path}.{name}" if path else name
                    self._add_object(where, item, is_named=False)
        for base, name in _caches_of(kind):
            if (id(base), None) not in self._known:
                self._add(f"{path}.{name}" if path else name, base, "class", name)
        for name in slots_of(kind):
            self._add(f"{path}.{name}" if path else name, value, "slot", name)

    def _add(self, path: str, target: Any, kind: Kind, name: Any = None) -> None:
        known = (id(target), name)
        if known in self._known:
            return
        self._known.add(known)
        if name is None and id(type(target)) in _IDS_OF_EMPTIES and not target:
            self._empty.append((path, target, kind))
            self._empty_targets.append(target)
        else:
            self._keep(_Held(path, target, kind, name))

    def _keep(self, held: _Held) -> None:
        is_list = held.kind == "container" and type(held.target) is list
        if is_list or (held.kind in ("object", "members") and type(held.box) is dict):
            held.row = len(self._rows)
            self._rows.append(held)
            self._views.append(held.target if is_list else dict.values(held.box))
            self._lengths.append(len(held.last))
            self._values += held.last.values()
        elif held.kind in self._singles and (held.kind != "global" or type(held.target) is dict):
            self._singles[held.kind].add(held)
        else:
            self._others.append(held)
        if id(_CACHE) in map(id, map(type, held.last.values())):
            for key, value in held.last.items():
                if type(value) is _CACHE:
                    self._caches.append((held, key, value, value.cache_info().misses))

    # -- what changed

    def _touched(self) -> list[_Held]:
        """What does not hold what it held when it was last noted."""
        if any(self._empty_targets):
            empty, self._empty, self._empty_targets = self._empty, [], []
            for path, target, kind in empty:
                if target:
                    held = _Held(path, target, kind)
                    held.first = held.last = {}
                    self._keep(held)
                else:
                    self._empty.append((path, target, kind))
                    self._empty_targets.append(target)
        touched = []
        now: list[Collection[Any]] = self._views
        if list(map(len, now)) != self._lengths:
            now = list(now)
            for row, length in enumerate(self._lengths):
                if len(now[row]) != length:
                    touched.append(self._rows[row])
                    now[row] = self._rows[row].last.values()
        # Mostly nothing is: to ask that alone takes two thirds of the time.
        if any(map(is_not, chain.from_iterable(now), self._values)):
            places = compress(count(), map(is_not, chain.from_iterable(now), self._values))
            # Few are: to ask each one would cost more than to find those that hold them.
            ends = list(accumulate(self._lengths))
            rows = dict.fromkeys(bisect_right(ends, place) for place in places)
            touched += [self._rows[row] for row in rows]
        for singles in self._singles.values():
            touched += singles.touched()
        return touched + [held for held in self._others if not held.is_untouched()]

    def _pending(self) -> list[_Change]:
        """What differs from what was noted last."""
        return [held.change(held.last, held.read()) for held in self._touched()]

    def _note(self, changes: list[_Change]) -> None:
        """Take what holders hold now as what they hold."""
        if changes:
            self._reached = None
        for change in changes:
            held = change.held
            self._moved[held] = None
            held.last = change.now
            if held.row is not None and held.kind in self._singles:
                self._singles[held.kind].note(held)
            elif held.row is not None:
                if len(held.last) == self._lengths[held.row]:
                    start = sum(self._lengths[: held.row])
                    self._values[start : start + len(held.last)] = held.last.values()
                else:
                    self._lengths[held.row] = len(held.last)
                    self._values = [value for each in self._rows for value in each.last.values()]
        for change in changes:
            for key in change.keys:
                for value in change.value(key) if key is _ALL else (change.value(key),):
                    if not (issubclass(type(value), torch.Tensor) or is_host_scalar(value)):
                        self._adopt(change.held.name_of(key), value)

    def _since_first(self) -> list[_Change]:
        """What differs from the snapshot, as of what was noted last."""
        return [
            held.change(held.first, held.last)
            for held in self._moved
            if held.first is not held.last
        ]

    def changed(self, *, only_tensors: bool = False) -> tuple[str, ...]:
        """Name what runs changed since the snapshot; if none was noted, whatever changed.

        ``only_tensors``: where tensors are now.
        """
        if self._ran is None:
            self._note(self._pending())
        # A variable that is assigned by name is among those of its module as well.
        by_place = {
            (id(change.held.target), key): change.held.name_of(key)
            for change in self._since_first()
            for key in change.keys
            if self._is_of_a_run(change.held, key)
            and not (only_tensors and not tensors_of(change.value(key)))
        }
        names = list(by_place.values())
        names += [f"{held.name_of(key)}()" for held, key, _ in self._filled_caches()]
        return tuple(dict.fromkeys(names))

    def rebase(self) -> None:
        """Take what anything but a run has changed since the last one as it is now.

        Not so a memo that was put back and that a step of the caller's has made again.
        """
        memos = (self._ran or set()) - self._advancing
        changes = self._pending()
        self._note(changes)
        for change in changes:
            held = change.held
            keys = [key for key in change.keys if (id(held.target), key) not in memos]
            merged = dict(change.now if keys == [_ALL] else held.first)
            for key in keys:
                if key is not _ALL:
                    _put(merged, key, change.value(key))
            held.first = merged

    def _is_of_a_run(self, held: _Held, key: Any) -> bool:
        return self._ran is None or (
            _is_in(self._ran, held, key) and not _is_in(self._between, held, key)
        )

    # -- runs

    @contextmanager
    def run(
        self,
        *,
        is_first: bool,
        refuses: Callable[[str, Any], bool] | None = None,
        is_lent: Callable[[torch.Tensor], bool] = _never,
    ) -> Iterator[None]:
        """Around one run of the callable. One that raises leaves nothing behind.

        ``is_first``: the first one for its inputs. What it sets may be a memo; what later runs
        change again is state that each run advances. ``is_lent``: tensors in which a later run
        finds its own inputs or results, not those of this one. ``refuses(path, value)``: values
        that may not stay where the run has put them.
        """
        if self._ran is None:
            self._ran = set()
        self._note_between()
        large = [(path, value, contents_of(value)) for path, value in self._large]
        try:
            yield
        except BaseException:
            changes = self._pending()
            self._note_run(changes, is_first, is_lent)
            for change in changes:
                change.held.write(change.before)
            raise
        changes = self._pending()
        self._refuse_what_stays(changes, large)
        self._note_run(changes, is_first, is_lent)
        if is_first:
            self._unproven.update(_places_of(changes))
        if refuses is not None:
            for change in changes:
                change.put_back(
                    [
                        key
                        for key in change.keys
                        if refuses(change.held.name_of(key), change.value(key))
                    ]
                )
            changes = [change.held.change(change.before, change.held.read()) for change in changes]
        self._note(changes)

    @staticmethod
    def _refuse_what_stays(
        changes: Iterable[_Change], large: Iterable[tuple[str, Any, tuple[Any, ...]]]
    ) -> None:
        """``large``: with what they held before the run."""
        for change in changes:
            if change.held.is_resized(change.before):
                raise VerificationError(
                    change.held.path,
                    expected="an array that keeps its size",
                    found="a run resized it",
                    do="keep what grows in a list, or assign another array",
                )
        for path, value, before in large:
            if not same_host_value(before, contents_of(value)):
                raise VerificationError(
                    path,
                    expected=f"arrays of at most {MAX_COPIED_BYTES} bytes together that runs write",
                    found=f"a run wrote into one of {_num_bytes(value)} more",
                    do="keep in a tensor what runs write, or in an array of its own",
                )

    def _note_run(
        self, changes: list[_Change], is_first: bool, is_lent: Callable[[torch.Tensor], bool]
    ) -> None:
        assert self._ran is not None, "only runs are noted"
        for change in changes:
            places = set(_places_of([change]))
            self._ran |= places
            if not is_first:
                self._advancing |= places
                for key in change.keys:
                    # What something else sets before each run is not what the last one left.
                    is_set = _is_in(self._between, change.held, key)
                    lent = _never if is_set else is_lent
                    self.advances |= key is _ALL or _may_turn(change.value(key), lent)
                if change.is_growth:
                    self._advancing.add((id(change.held.target), _ALL))
                if change.held.kind == "own":  # A ``__dict__`` goes back with what it held.
                    self._advancing |= {(id(own), _ALL) for own in change.held.first.values()}

    def keep_memos(self) -> None:
        """A program was captured: what first runs set before it is a memo, unless a later run
        changes it again."""
        self._unproven.clear()

    def _note_between(self) -> None:
        changes = self._pending()
        self._note(changes)
        self._between.update(_places_of(changes))

    def restore_advanced(self, *, memos: bool = False) -> None:
        """Put back, as it was in the snapshot, what later runs changed again, and what first runs
        set without any program to follow.

        ``memos``: also what the first one alone set, where no graph reads it.
        """
        for *_, cache, misses in self._caches if memos else ():
            if not misses and _may_hold_inputs(cache):  # It was empty.
                cache.cache_clear()
        if not (self._advancing or self._unproven or memos):
            return
        self._note_between()
        changes = []
        since_first = self._since_first()
        goes_back = self._advancing | self._unproven
        # A container or object that comes back holds what it held, too.
        has_parts = any(
            _is_in(goes_back, held, key) and not _is_single(before.get(key))
            for held, before, _, keys in since_first
            for key in keys
        )
        exchanged = self._exchanged(since_first) if has_parts else set()
        for change in since_first:
            held = change.held
            change.put_back(
                [
                    key
                    for key in change.keys
                    if _is_in(goes_back, held, key)
                    or ((memos or held in exchanged) and self._is_of_a_run(held, key))
                ]
            )
            changes.append(held.change(held.last, held.read()))
        self._note(changes)
        self._unproven.clear()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put back what runs changed, as it was in the snapshot; on exit, as it was on entry.

        What the body sets meanwhile is dropped. A ``functools`` cache that got an entry with a
        tensor or a float in it is replaced by an empty one meanwhile.
        """
        caches = self._filled_caches()
        self._note_between()
        changes = self._since_first()
        self._refuse_memo_that_stays(changes)
        try:
            for change in changes:
                change.put_back([k for k in change.keys if self._is_of_a_run(change.held, k)])
            for held, key, cache in caches:
                options = cache.cache_parameters()
                held.write(held.read() | {key: functools.lru_cache(**options)(cache.__wrapped__)})
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Make everything as it was when it was last noted."""
        for held in self._touched():
            held.write(held.last)

    def undo(self) -> tuple[str, ...]:
        """As ``put_back``; ``functools`` caches that were asked for something new meanwhile are
        emptied. Returns the names of what was otherwise."""
        names: list[str] = []
        for held in self._touched():
            names += map(held.name_of, held.change(held.last, held.read()).keys)
            held.write(held.last)
        for *_, cache, misses in self._caches:
            if cache.cache_info().misses > misses:
                cache.cache_clear()
        return tuple(names)

    def _refuse_memo_that_stays(self, changes: Sequence[_Change]) -> None:
        """Errors: ``VerificationError`` for a context variable without a default that the first run
        alone has set: nothing can unset it, and eager code would read what the graph reads."""
        for change in changes:
            held = change.held
            is_memo = held.kind == "context" and not change.before and change.keys
            if not is_memo or _has_default(held.target):
                continue
            if not (isinstance(change.value(None), float) or tensors_of(change.value(None))):
                continue
            if self._is_of_a_run(held, None) and not _is_in(self._advancing, held, None):
                raise VerificationError(
                    f"context variable {held.target.name!r}",
                    expected="a default: it is set to that before eager code is compared",
                    found="none, and a tensor or float that the first warm-up set",
                    do="give it a default, ContextVar(name, default=None)",
                )

    def empty_exchanged(self) -> None:
        """Put back what the run that is going on has changed in containers and objects that it has
        exchanged for others since: only this snapshot still keeps them."""
        changes = self._pending()
        exchanged = self._exchanged(changes)
        for change in changes:
            if change.held in exchanged:
                change.held.write(change.before)
                # Each run would fill the one that it finds.
                self._advancing.update(_places_of([change]))

    def _exchanged(self, changes: Iterable[_Change]) -> set[_Held]:
        """What changed in containers and objects that the callable does not reach any more."""
        # These were in what has been replaced: to walk over that spares most walks over all.
        replaced = [
            value
            for _, before, _, keys in changes
            for value in (before.values() if _ALL in keys else map(before.get, keys))
            if not _is_single(value)
        ]
        of_replaced = HostSnapshot(replaced)._known if replaced else set()
        inside = {
            (id(change.held.target), change.held.name): change.held
            for change in changes
            if change.held.kind in ("container", "object")
        }
        inside = {known: held for known, held in inside.items() if known in of_replaced}
        reached = HostSnapshot(self.runnable)._known if inside else set()
        return {held for known, held in inside.items() if known not in reached}

    def _filled_caches(self) -> list[tuple[_Held, Any, Any]]:
        """``functools`` caches with a new entry that may depend on inputs, and where they stand."""
        return [
            (held, key, cache)
            for held, key, cache, misses in self._caches
            if cache.cache_info().misses > misses and _may_hold_inputs(cache)
        ]


def _is_changed(place: Place) -> bool:
    value = place.read()
    return value is not place.value and not (place.kind == "length" and value == place.value)


def _may_turn(value: Any, is_lent: Callable[[torch.Tensor], bool], depth: int = 3) -> bool:
    """True for a number, a function or a class, which runs may swap, for a tensor that ``is_lent``,
    and for what has one in it: a container or object that each run replaces."""
    if is_host_scalar(value) or issubclass(type(value), (FunctionType, type)):
        return True
    if is_tensor(value):
        return is_lent(value)
    if not depth:
        return False
    parts = (part for _, part in parts_in(value) if part is not None)
    return any(_may_turn(part, is_lent, depth - 1) for part in parts)


def _is_single(value: Any) -> bool:
    """True for what holds nothing else that runs change."""
    return value is None or is_tensor(value) or is_host_scalar(value)


def _is_in(places: set[tuple[int, Any]], held: _Held, key: Any) -> bool:
    place = id(held.target)
    return (place, key) in places or (place, _ALL) in places


def _may_hold_inputs(cache: Any) -> bool:
    """Whether arguments or results of a cache are tensors or floats, which inputs may have made.

    Other caches (kernels, modules, flags by name) stay as they are: to fill them twice may have
    effects of its own.
    """
    others = (cache.__wrapped__, attributes_of(cache))
    return any(
        _leads_to_inputs(found)
        for found in gc.get_referents(cache)
        if not any(found is other for other in others)
    )


def _leads_to_inputs(value: Any, depth: int = 4) -> bool:
    if is_tensor(value) or isinstance(value, float | complex):
        return True
    if not depth or issubclass(type(value), (*_NO_MEMOS, torch.nn.Module)):
        return False
    return any(_leads_to_inputs(part, depth - 1) for _, part in parts_in(value))


@functools.lru_cache(maxsize=4096)
def _caches_of(kind: type) -> tuple[tuple[type, str], ...]:
    """The methods of a class and its bases that a ``functools`` cache wraps."""
    return tuple(
        (base, name)
        for base in kind.__mro__
        for name, value in base.__dict__.items()
        if type(value) is _CACHE
    )


def _base_with(kind: type, name: str) -> type | None:
    return next((base for base in kind.__mro__ if name in base.__dict__), None)


@functools.lru_cache(maxsize=4096)
def _stored_globals(code: CodeType) -> tuple[str, ...]:
    """The names of a piece of code that assigns global variables, and of functions within it."""
    names = list(code.co_names) if _STORE_GLOBAL in code.co_code[::2] else []
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _stored_globals(inner)
    return tuple(dict.fromkeys(names))

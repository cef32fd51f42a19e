"""Everything a callable reaches, with paths: what it reads besides its arguments.

Followed are modules (parameters, buffers, submodules, attributes), bound methods, partials,
closure cells, defaults, the globals that code names, dicts, lists, tuples, sets, and the
attributes of other objects that some reached code names. Code is read, never run: no property, no
``__getattr__`` and no ``__eq__`` of the user's is called, because a walk must not change or fail a
capture. Code and objects of torch, NumPy, the standard library and graphrt are not entered, except
that the methods of a ``torch.nn`` module name attributes of that module. Of other installed
packages, the methods of their objects name what is followed; nothing else of them is read.

Context variables, ``threading.local`` and weak dictionaries and sets are followed last. Of context
variables and ``threading.local``, the watch compares the tensors and host values that they hold
directly, as the capturing thread sees them; it compares nothing behind other objects in them, and
nothing in weak containers, because other threads and later steps find other objects there.

Not found is what no code names: entries that installed packages find under computed keys, what a
``functools`` cache returned before it was emptied, what a descriptor finds under a computed name,
what lies behind a weak reference, and what is no object of the process (files, clocks).
"""

from __future__ import annotations

import builtins
import functools
import gc
import importlib.util
import operator
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Set,
    ValuesView,
)
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from threading import get_ident
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

from graphrt.config.environment import environment_entries
from graphrt.externals.code_names import Names, names_in
from graphrt.externals.environment import FLAGS
from graphrt.externals.places import (
    MAX_ITEMS,
    MISSING,
    ODD,
    REGISTERS,
    SCALARS,
    OfThread,
    Place,
    PlaceKind,
    attributes_of,
    base_of,
    class_of,
    defaults_of,
    entries_among,
    filled,
    has_contents,
    has_keys_that_raise,
    is_array,
    is_filled,
    is_foreign,
    is_host_scalar,
    is_odd,
    is_record,
    is_tensor,
    keys_of,
    length_of,
    module_of,
    name_of,
    own_dict,
    parts_of_partial,
    plain_array,
    read_attribute,
    read_cell,
    read_context,
    read_member,
    read_script,
    text_of_key,
    viewed_by,
)
from graphrt.externals.unwatched import (
    ASKED_OF_LOGGERS,
    ELSEWHERE,
    FACTS_OF_TENSORS,
    READS_ELSEWHERE,
    READS_OF_OTHERS,
    Unwatched,
    held_by,
    points_elsewhere,
    why_unread,
)
from graphrt.source import Source, is_user_file
from graphrt.values import parameters_of

MAX_OBJECTS = 200_000
"""A walk ends after so many objects."""


class Reach(NamedTuple):
    """What a walk found."""

    places: tuple[Place, ...]
    """A parent before what was reached through it."""
    objects: Mapping[str, Any]
    """Every object that was entered, by path: modules, plain objects, containers, functions."""
    outside_breaks: Reach | None
    """Without what break points alone reach; None if that is all."""
    lasting: Reach | None
    """Without what context variables, thread-local and weak containers alone lead to; None if that
    is all."""
    unwatched: tuple[Unwatched, ...] = ()
    """What it reads and what no place says."""
    spaces: tuple[type | Mapping[str, Any], ...] = ()
    """Where its code may set attributes and variables that were not there: classes with their bases
    and metaclasses, and the variables of modules. None of packages that are not its own."""
    assigned: Set[str] = frozenset()
    """Attributes that its code sets."""


def reach(target: object) -> Reach:
    """Walk everything ``target`` reaches.

    It costs about a microsecond for each place. The result keeps alive all that it names.
    """
    return Walk(target).follow(target)


_GONE_THROUGH = {
    **dict.fromkeys(("children", "named_children", "modules", "named_modules"), ("_modules",)),
    **dict.fromkeys(("parameters", "named_parameters"), ("_modules", "_parameters")),
    **dict.fromkeys(("buffers", "named_buffers"), ("_modules", "_buffers")),
    **{name: (name,) for name in ("_modules", "_parameters", "_buffers")},
}
"""Of what code goes through all of: the registers of modules that it reads."""
# What torch itself keeps on a module: registers, hooks, flags. ``training`` is a host value.
_MODULE_OWN = frozenset(vars(torch.nn.Module())) - {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_RUNS_FORWARD = (torch.nn.Module, torch.autograd.Function)
"""Classes of torch that call this method of theirs, which no code need name."""
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_OFF_THE_PATH = (
    "init new post_init repr str format dir sizeof eq ne hash del set_name init_subclass copy "
    "getstate setstate reduce reduce_ex getnewargs getnewargs_ex deepcopy replace"
)
_NOT_CALLED = frozenset(f"__{name}__" for name in _OFF_THE_PATH.split())
"""Special methods that no forward calls by an operator of the language, unless code makes an object
of the class."""
_STORING = ("__setitem__", "__delitem__")
_MAKING = ("__new__", "__init__", "__post_init__")
_FUNCTIONS = (FunctionType, classmethod, staticmethod)
_SEQUENCES = (dict, list, tuple, set, frozenset, deque)
_GETTERS_BY_NAME = (operator.attrgetter, operator.methodcaller)
_OF_EVERY_CLASS = frozenset(vars(type("", (), {"__annotations__": {}})))
_BY_NAME = frozenset(("globals", "vars"))
"""Functions that give the variables of a module."""
_ASKING = frozenset(("getattr", "hasattr", "vars", "globals"))
_OF_ANY = ("__class__", "__dict__")
_ANSWERING = ("__getattr__", "__getattribute__")
"""Methods that answer for attributes which an object has not."""
_WEAK = (WeakKeyDictionary, WeakValueDictionary, WeakSet)
_FLEETING = {ContextVar, threading.local, ReferenceType, *_WEAK}
_CACHE = type(functools.lru_cache(lambda: None))
_BREAKS = "graphrt.graphs.breaks"
_UNSEEN = object()
_TOO_MANY = f"of more than {MAX_ITEMS} elements, none is followed"
_TOO_MANY_ENTRIES = f"of more than {MAX_ITEMS} entries, only those that code names are followed"


@functools.lru_cache(maxsize=4096)
def _is_installed(package: str) -> bool:
    """True for a top-level package that was installed, rather than written beside the model: it
    lies in a folder that also has what installers record of their packages."""
    spec = getattr(sys.modules.get(package), "__spec__", None)
    places = list(getattr(spec, "submodule_search_locations", None) or ())
    if not places and spec is not None and spec.origin:
        places = [spec.origin]
    return any(next(Path(place).parent.glob("*.dist-info"), None) for place in places)


def _is_installed_file(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or not is_user_file(file)


def _package_of(value: object) -> str:
    module = getattr(value, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def _packages_of(call: Any) -> tuple[str, str]:
    """Of a callable and of the object whose method it is."""
    while isinstance(call, functools.partial):
        call = parts_of_partial(call)[0]
    return _package_of(call), _package_of(type(getattr(call, "__self__", call)))


# -- the walk


class _Class:
    """What the walk knows of one class."""

    def __init__(self, kind: type, is_others: bool) -> None:
        self.is_module = issubclass(kind, torch.nn.Module)
        self.is_foreign = is_others
        self.guessed: set[str] = set()
        """How the computed names begin that its methods ask their object for. Empty where one of
        them answers for every name: that may ask for any."""
        self.own = {"forward"} if self.is_module else set[str]()
        """Attributes that methods of the class read of their object; and the one that hides the
        method of a module that every call runs."""
        self.members: dict[str, list[Any]] = {}
        """Members of the class and its bases, by name; of a module class, up to ``nn.Module``."""
        self.members_of_slots: dict[str, Any] = {}
        meta: type = type(kind)
        of_meta = (b.__dict__ for b in meta.__mro__ if not is_foreign(module_of(b)))
        answers = [own[name] for own in of_meta for name in _ANSWERING if name in own]
        for base in kind.__mro__:
            if base is torch.nn.Module or base is object or issubclass(base, ModuleType):
                break
            if not self.is_module and is_foreign(module_of(base)):
                continue
            for name, value in base.__dict__.items():
                if type(value) is MemberDescriptorType:
                    self.members_of_slots.setdefault(name, value)
                elif not name.startswith("__") or (
                    name not in _NOT_CALLED
                    if type(value) in _FUNCTIONS
                    else name not in _OF_EVERY_CLASS and _is_data(value)
                ):
                    self.members.setdefault(name, []).append(value)
            answers += [base.__dict__[name] for name in _ANSWERING if name in base.__dict__]
        if "__getattribute__" in self.members:
            self.guessed.add("")
        asked = [names_in(value.__code__) for value in answers if type(value) is FunctionType]
        self.is_proxy = issubclass(kind, type) or any("getattr" in n.globals for n in asked)
        """Whether what is asked of its objects may be asked of others: objects of a metaclass are
        known by themselves."""
        self.answers = bool(answers) and not any(
            "setattr" in names.globals or "__dict__" in names.stored for names in asked
        )
        """Whether its objects find what they have not, and do not keep it."""
        self.data = {n: each[0] for n, each in self.members.items() if _is_data(each[0])}
        """Members that instances share as values."""
        self.hideable: dict[str, Any] = {}
        """Methods that are called on its objects, of which an attribute may hide one."""
        self.unset: set[str] = set()
        """Attributes in ``own`` that the class itself does not have."""
        self.storing = [m for name in _STORING for m in self.members.pop(name, ())]
        """What runs where code stores entries into an object of the class; emptied when read."""
        self.methods: set[int] = set()
        """Ids of functions that were read as its methods."""
        if self.is_module:
            self._note_method("forward")

    def _note_method(self, name: str) -> None:
        if name in self.members and name not in self.data:
            self.hideable[name] = self.members[name][0]

    def called(self, names: Set[str]) -> frozenset[str]:
        """Methods of these names that no attribute of an object is looked for to hide."""
        return frozenset((names & self.members.keys()) - self.data.keys() - self.hideable.keys())

    def add_own(self, name: str) -> None:
        self.own.add(name)
        if not (self.is_foreign and self.is_module):
            self._note_method(name)
        if name not in self.members and name not in self.members_of_slots:
            self.unset.add(name)


class Walk:
    """A walk by depth, in the order of definition, that can go on from what is found later.

    ``enters_locals``: also a ``threading.local`` with an ``__init__`` of its own. A thread's first
    look runs that, so it is for who looks in place of the callable's own first run.
    """

    def __init__(self, target: object, *, enters_locals: bool = False) -> None:
        self._enters_locals = enters_locals
        self._home = set(_packages_of(target))
        """Packages whose code is the callable's own: its own, those of its modules, and of what is
        called in their place or beside them."""
        self._skipped: set[str] = set()
        """Other installed packages, whose code was not read."""
        self._places: list[Place] = []
        self._objects: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}
        """By id, with the object, which lives as long as the walk."""
        self._classes: dict[type, _Class] = {}
        self._names: set[str] = set()
        self._strings: set[str | int] = set()
        self._texts: set[str] = set()
        """Of these, the texts of code that is not installed, whose registries grow as they like."""
        self._asked: dict[str, list[str]] = {}
        self._tried: dict[str, list[Any]] = {}
        self._iterated: set[str] = set()
        self._computed: set[str] = set()
        self._stored: set[str] = set()
        self._called: set[str] = set()
        self._not_called: dict[str, list[tuple[str, type]]] = {}
        """Classes of which no code has made an object so far."""
        self._guessed: dict[tuple[str, str], CodeType] = {}
        self._assigned: set[str] = set()
        self._asked_of_own: set[str] = set()
        self._asked_of_any: set[str] = set()
        """Of what objects of the class are asked by a string, and of what code does not name."""
        self._asked_of_locals: set[tuple[str, str]] = set()
        """Variable of a function and a string that may be asked of what is in it, by code that is
        not installed: there it would be too many."""
        self._gone_through: set[str] = set()
        """Registers of modules that such code goes through."""
        self._scopes: dict[int, Mapping[str, Any]] = {}
        """Variables of modules, by id."""
        self._of_others: dict[tuple[int, str], Place] = {}
        """Functions of modules of others, by the id of these."""
        self._unnamed: dict[str, list[Place]] = {}
        """Attributes that no code has named so far."""
        self._members: dict[str, list[tuple[_Class, list[Any]]]] = {}
        """Members of classes that no code has named so far."""
        self._stack: list[tuple[str, Any]] = []
        self._broken: list[Any] = []
        """What break points run."""
        self._forwards: list[tuple[_Class, list[Any]]] = []
        """Of plain classes, perhaps called where no code is read: in an operator."""
        self._fleeting: list[tuple[str, Any]] = []
        self._large: list[tuple[str, dict[Any, Any]]] = []
        self._loggers: list[tuple[str, Any]] = []
        self._variables: dict[tuple[str, str], Source] = {}
        """Of the environment: how they are asked for, the name of the key, and where. Of installed
        packages nowhere."""
        self._told: dict[Any, Unwatched] = {}
        """What code calls and cannot be compared, by name and code."""
        self._unread: dict[int, tuple[str, Any, str]] = {}
        """By id, what was met and cannot be compared: its path, it, and why."""
        self._entered: list[tuple[str, _Class]] = []
        """Objects whose class has methods that store entries, by path."""
        self._methods: list[tuple[FunctionType, _Class]] = []
        """Named, and not read yet."""
        self._num_functions = 0
        """Of which the code was read."""

    def follow(self, target: object, path: str = "") -> Reach:
        """Walk everything that ``target`` reaches and that this walk has not entered yet.

        A later target that brings no code of its own brings no places for what it has not.
        """
        if id(target) in self._seen:
            return Reach((), {}, None, None)
        num_seen = len(self._seen)
        found = self._run(path, target, is_first=not num_seen)
        if self._skipped & self._home:  # A module of a package was found after other code of it.
            for key in list(self._seen)[num_seen:]:
                del self._seen[key]
            self._classes.clear()
            found = self._run(path, target, is_first=not num_seen)
        return found

    def _run(self, path: str, target: object, *, is_first: bool) -> Reach:
        self._places, self._objects, self._unnamed, self._unread = [], {}, {}, {}
        self._skipped.clear()
        code_before = self._code_so_far()
        self._enter_all([(path, target)])
        is_known = not is_first and self._code_so_far() == code_before
        is_all = not (self._broken or self._forwards)
        if is_known and is_all and not self._fleeting:
            # A value that known code has set: what that code names elsewhere was listed before.
            places = (*self._places, *self._unnamed_attributes())
            return Reach(places, self._objects, None, None, assigned=self._assigned)
        outside = None if is_all else self._found()
        self._enter_broken()
        lasting = None
        if self._fleeting:
            own = list(self._places_of_thread())
            found = self._found(outside)
            lasting = found._replace(places=(*found.places, *own))
        while self._fleeting:
            fleeting, self._fleeting, self._stack = self._fleeting, [], []
            for where, value in fleeting:
                self._enter_fleeting(where, value)
            self._enter_all(self._stack)
            self._enter_broken()
        return self._found(outside, lasting)

    def _enter_broken(self) -> None:
        while self._broken or self._forwards:
            broken, self._broken = self._broken, []
            forwards, self._forwards = self._forwards, []
            self._stack = [("", value) for value in reversed(broken)]
            for known, members in forwards:
                self._enter_members(known, members)
            self._read_methods()
            self._enter_all(self._stack)

    def _places_of_thread(self) -> Iterator[Place]:
        """Host values and tensors that stand in context and thread-local variables themselves."""
        for path, owner in self._fleeting:
            if isinstance(owner, ContextVar):
                here = OfThread(owner, get_ident(), MISSING)
                value = here.get(None)
                if self._stands_alone(value):
                    owner = here._replace(value=value)
                    yield Place(f"{path}.get()", owner, None, "context", value)
                self._note_elsewhere(path, value)
            elif issubclass(type(owner), ReferenceType):
                target = ReferenceType.__call__(owner)
                if target is not None and id(target) not in self._seen:
                    yield Place(f"{path}()", owner, None, "target", id(target))
                    yield from self._alone_in(f"{path}()", target, attributes_of(target))
            elif not issubclass(type(owner), threading.local):
                yield from self._lasting_in(path, owner)
            elif self._may_enter(owner):
                own = threading.local.__getattribute__(owner, "__dict__")
                asked = self._asked.get(path.rpartition(".")[2], ())
                yield from self._alone_in(path, owner, own, {**own, **dict.fromkeys(asked)})

    def _lasting_in(self, path: str, owner: Any) -> Iterator[Place]:
        """Entries of a weak container that last, because something else holds their keys."""
        of_keys = owner.data if issubclass(type(owner), WeakKeyDictionary) else {}
        for ref, value in of_keys.items():
            if id(ref()) not in self._seen or not self._stands_alone(value):
                break
            yield Place(f"{path}[{type(ref()).__name__}]", of_keys, ref, "item", value)
        else:
            if of_keys:
                return
        self._leave_out(path, owner, ELSEWHERE)

    def _alone_in(
        self, path: str, owner: Any, own: Mapping[str, Any], names: Iterable[str] = ()
    ) -> Iterator[Place]:
        """What is in an object itself; the object may go, so that nothing keeps it."""
        if type(own) is not dict or is_tensor(owner):
            self._note_elsewhere(path, owner)
            return
        for name in names or (self._names | self._class_of(owner).own).intersection(own):
            value = own.get(name, MISSING)
            if self._stands_alone(value):
                yield Place(f"{path}.{name}", own, name, "item", value)
            self._note_elsewhere(f"{path}.{name}", value)

    def _note_elsewhere(self, path: str, value: object) -> None:
        if not (self._stands_alone(value) or id(value) in self._seen):
            self._leave_out(path, value, ELSEWHERE)

    @staticmethod
    def _stands_alone(value: object) -> bool:
        return value is MISSING or is_host_scalar(value) or is_tensor(value)

    def _may_enter(self, local: threading.local) -> bool:
        return self._enters_locals or type(local).__init__ is object.__init__

    def _enter_fleeting(self, path: str, value: Any) -> None:
        if isinstance(value, ContextVar):
            found = read_context(value, None)
            self._add(Place(f"{path}.get()", value, None, "context", found))
        elif issubclass(type(value), ReferenceType):
            self._stack.append((f"{path}()", ReferenceType.__call__(value)))
        elif not isinstance(value, threading.local):
            self._stack.append((path, value.data))
        elif self._may_enter(value):
            self._stack.append((path, threading.local.__getattribute__(value, "__dict__")))

    def _enter_all(self, targets: list[tuple[str, Any]]) -> None:
        stack = self._stack = targets
        while len(self._seen) < MAX_OBJECTS:
            if not stack:
                self._enter_late()
                self._name_guessed()
                if not stack:
                    break
            path, value = stack.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                first = len(stack)
                self._enter(path, value)
                self._read_methods()
                # What was found first is entered first.
                stack[first:] = reversed(stack[first:])
        for path, value in stack[:1]:
            self._leave_out(path, value, f"a walk ends after {MAX_OBJECTS} objects")

    def _found(self, outside_breaks: Reach | None = None, lasting: Reach | None = None) -> Reach:
        places = [*self._places, *self._unnamed_attributes()]
        places += [*self._methods_of_classes(), *self._of_the_process(), *self._of_others.values()]
        places += self._not_there()
        unwatched = tuple(self._told_unwatched())
        return Reach(
            tuple(places),
            dict(self._objects),
            outside_breaks,
            lasting,
            unwatched,
            tuple(self._spaces()),
            frozenset(self._assigned),
        )

    def _unnamed_attributes(self) -> Iterator[Place]:
        unnamed = (place for places in self._unnamed.values() for place in places)
        return (place for place in unnamed if place.kind != "member")

    def _code_so_far(self) -> tuple[int, ...]:
        """How many functions, names, modules and classes are known."""
        return self._num_functions, len(self._names), len(self._scopes), len(self._classes)

    def _spaces(self) -> Iterator[type | Mapping[str, Any]]:
        own = [kind for kind, known in self._classes.items() if not known.is_foreign]
        own += [type(kind) for kind in own]
        bases = dict.fromkeys(base for kind in own for base in kind.__mro__)
        yield from (kind for kind in bases if not self.is_foreign(module_of(kind)))
        yield from self._scopes.values()

    def _enter(self, path: str, value: Any) -> None:
        kind = type(value)
        if is_odd(kind) or (issubclass(kind, type) and is_odd(value)):
            self._leave_out(path, value, ODD)
        else:
            _way_into(kind)(self, path, value)  # type: ignore[arg-type]  # types are hashable

    def _enter_later(self, path: str, value: Any) -> None:
        self._fleeting.append((path, value))
        if issubclass(type(value), ReferenceType):
            kind = type(ReferenceType.__call__(value))
            if not is_odd(kind):  # What its methods read is asked before it may be entered.
                self._know(kind)

    def _enter_tensor(self, path: str, value: torch.Tensor) -> None:
        self._enter_attributes(path, value, attributes_of(value))

    def _enter_proxy(self, path: str, value: MappingProxyType[Any, Any]) -> None:
        self._stack += [(path, found) for found in gc.get_referents(value)]

    def _enter_getter(self, _: str, value: Any) -> None:
        names = value.__reduce__()[1]
        self._name({part for name in names for part in str(name).split(".")})

    def _enter_package(self, path: str, value: ModuleType) -> None:
        own = attributes_of(value)
        if not self.is_foreign(own.get("__name__")):
            self._scopes[id(own)] = own
            self._enter_attributes(path, value, own)
            self._stack.append((f"{path}.__getattr__()", own.get("__getattr__")))

    def _enter_builtin(self, path: str, value: Any) -> None:
        """Views of a dict, iterators, methods of built-in types: what they refer to."""
        if type(value) is BuiltinMethodType:
            self._stack.append((path, value.__self__))
        elif type(value) is CellType:
            where = f"{path}.cell_contents"
            self._add(Place(where, value, "cell_contents", "cell", read_cell(value, "")))
        elif issubclass(type(value), (KeysView, ValuesView, ItemsView, Iterator)):
            of = gc.get_referents(value)
            self._stack += [(path, found) for found in of if not issubclass(type(found), Iterator)]
        self._note_unread(path, value)
        self._objects.setdefault(path, value)

    def _note_unread(self, path: str, value: Any) -> None:
        because = why_unread(value)
        if because and (points_elsewhere(value) or not has_contents(value)):
            self._leave_out(path, value, because)

    def _leave_out(self, path: str, value: Any, because: str) -> None:
        """Tell that what is in a value is not compared, and why."""
        self._unread.setdefault(id(value), (path, value, because))

    def _add(self, place: Place) -> None:
        """List a place; follow what stands there."""
        self._places.append(place)
        value = place.value
        kind = type(value)
        if type(kind) is not type and is_odd(kind):  # Most are not, and a call takes its time.
            self._stack.append((place.path, value))
            return
        if value is MISSING or kind in SCALARS or id(value) in self._seen:
            return
        if issubclass(kind, Enum):
            self._know(kind)
            value = attributes_of(value).get("_value_")
        if is_tensor(value) and not attributes_of(value) and is_foreign(module_of(kind)):
            return
        if not is_host_scalar(value):
            self._stack.append((place.path, value))

    def _enter_container(self, path: str, value: Any) -> None:
        if has_keys_that_raise(value):
            self._leave_out(path, value, "a key of it raises when it is hashed")
            return
        self._objects.setdefault(path, value)
        kind, base = type(value), base_of(value)
        num_items = base.__len__(value)  # Not those of a subclass, which may count as they like.
        if num_items > MAX_ITEMS:
            if issubclass(kind, dict):
                self._large.append((path, value))
            elif not (has_contents(value) and _are_host_scalars(base.__iter__(value))):
                self._leave_out(path, value, _TOO_MANY)
            return
        if issubclass(kind, dict):
            for key, item in dict.items(value):
                self._add(Place(f"{path}[{text_of_key(key)}]", value, key, "item", item))
                # It may have attributes. What weak keys lead to, nothing may keep alive.
                if not (type(key) is str or is_host_scalar(key) or _is_weak(key)):
                    self._stack.append((f"{path}.keys()[{text_of_key(key)}]", key))
        elif issubclass(kind, (set, frozenset)):
            for item in base.__iter__(value):
                self._add(Place(f"{path}[{text_of_key(item)}]", value, item, "element", item))
        else:
            fields = kind.__dict__.get("_fields")
            if type(fields) is not tuple or len(fields) != num_items:
                fields = None
            for index, item in enumerate(base.__iter__(value)):
                step = f".{fields[index]}" if fields else f"[{index}]"
                self._add(Place(f"{path}{step}", value, index, "item", item))
        if issubclass(kind, defaultdict):
            factory = read_attribute(value, "default_factory")
            where = f"{path}.default_factory"
            self._add(Place(where, value, "default_factory", "attribute", factory))
        if module_of(kind) not in ("builtins", "collections"):
            self._enter_object(path, value)

    def _enter_array(self, path: str, value: Any) -> None:
        """The elements of an array of objects."""
        flat = plain_array(value).flat
        if len(flat) > MAX_ITEMS:
            self._leave_out(path, value, _TOO_MANY)
            return
        for index, item in enumerate(flat):
            self._add(Place(f"{path}.flat[{index}]", value, index, "item", item))

    def _enter_late(self) -> None:
        """Of containers that are too large, what the code names, and loggers that it asks. After
        the code is known."""
        if not ASKED_OF_LOGGERS.isdisjoint(self._names):
            loggers, self._loggers = self._loggers, []
            for path, value in loggers:
                self._enter_held(path, value)
        for path, value in self._large:
            self._leave_out(path, value, _TOO_MANY_ENTRIES)
            for name in self._strings:
                item = dict.get(value, name, MISSING)
                if item is not MISSING:
                    self._add(Place(f"{path}[{name!r}]", value, name, "item", item))
        self._large.clear()
        self._enter_storing()

    def _enter_storing(self) -> None:
        """The methods that store entries, of classes whose objects get some from code. Else a
        registry that others fill would pass for a memo."""
        num_stored = -1
        while num_stored != len(self._stored):
            num_stored = len(self._stored)
            for path, known in self._entered:
                if known.storing and _last(path) in self._stored:
                    storing, known.storing = known.storing, []
                    self._enter_members(known, storing)
            self._read_methods()

    def _of_the_process(self) -> Iterator[Place]:
        """Torch's flags and hooks, and variables of the environment that code names."""
        for flag, answers in FLAGS.items():
            yield Place(flag, answers, None, "call", next(answers))
        for name in _HOOKS:
            hooks = getattr(torch.nn.modules.module, f"_global{name}")
            yield _length(f"torch.nn.modules.module._global{name}", hooks, len(hooks))
        own = environment_entries()
        names = [*self._asked.get("environ", ()), *self._asked.get("getenv", ())]
        keys: dict[str, list[str]] = {key: [] for _, key in self._variables}
        for place in self._places if keys else ():
            found = keys.get(place.path.rpartition(".")[2])
            if found is not None and type(place.value) is str:
                found.append(place.value)
        for (asked, key), source in self._variables.items():
            if not keys[key] and source:
                because = "the name of the variable is computed"
                self._told[asked, source] = Unwatched(f"os.{asked}", "variable", because, source)
        names += [name for found in keys.values() for name in found]
        for name in dict.fromkeys(names):
            raw = os.fsencode(name)
            yield Place(f"os.environ[{name!r}]", own, raw, "item", own.get(raw, MISSING))

    def _not_there(self) -> Iterator[Place]:
        """What code asks for by a string, and what is not there: it may be set later. And the
        length of a dict that code goes through, or asks for computed keys."""
        yield from self._not_in_classes()
        yield from self._not_in_modules()
        yield from self._may_come()
        for path, owner in self._objects.items():
            last = _last(path)
            is_dict = issubclass(type(owner), dict)
            if issubclass(type(owner), _SEQUENCES):
                # A dict gets entries of other keys: a memo for each size; and one that makes what
                # it lacks grows when it is read.
                is_fixed = (
                    last in self._computed
                    and last not in self._stored  # A memo, which eager runs fill as well.
                    and not hasattr(type(owner), "__missing__")
                )
                is_through = last in self._iterated and last not in self._stored
                if is_dict and is_through and is_host_scalar(keys_of(owner)):
                    yield Place(f"{path}.keys()", owner, None, "keys", keys_of(owner))
                elif is_through or is_fixed or (not is_dict and last not in self._stored):
                    yield _length(path, owner, length_of(owner))
                elif last in self._iterated:  # Its code changes how much is in it.
                    where = f"{path}.__len__()"
                    yield Place(where, owner, None, "is_filled", is_filled(owner))
            if last not in self._stored and has_contents(owner):
                yield Place(f"{path}[:]", owner, None, "contents", MISSING)
            for name in (*self._asked.get(last, ()), *self._tried.get(last, ())):
                if is_dict and dict.get(owner, name, MISSING) is MISSING:
                    yield Place(f"{path}[{name!r}]", owner, name, "item", MISSING)
                elif (
                    type(name) is str
                    and _may_be_set(owner)
                    and read_attribute(owner, name) is MISSING
                ):
                    where = path.removesuffix("()")
                    yield Place(f"{where}.{name}", owner, name, "attribute", MISSING)

    def _not_in_classes(self) -> Iterator[Place]:
        """What code asks for by a string of its own class, or of what it does not name."""
        for kind, known in self._classes.items():
            missing = self._asked_of_any | known.unset.intersection(self._asked_of_own)
            for name in () if known.is_foreign else missing:
                if read_attribute(kind, name) is MISSING:
                    path = f"{kind.__qualname__}.{name}"
                    yield Place(path, kind, name, "member", MISSING)

    def _not_in_modules(self) -> Iterator[Place]:
        """Of modules and plain objects, what code asks for by a string of a variable that may hold
        any of them; and all names in registers that code goes through."""
        paths = set(map(_last, self._objects))
        asked = {s for of, s in self._asked_of_locals if of not in paths and s.isidentifier()}
        for path, owner in self._objects.items():
            known = self._classes.get(class_of(owner))
            if path and known is not None and known.is_proxy:
                last = _last(path)
                asked.update(s for s in self._asked.get(last, ()) if s.isidentifier())
        for path, owner in self._objects.items() if asked or self._gone_through else ():
            is_module = issubclass(type(owner), torch.nn.Module)
            if not is_module and is_foreign(module_of(type(owner))):
                continue
            prefix = _below(path)
            for name in asked:
                if _may_be_set(owner) and read_attribute(owner, name) is MISSING:
                    yield Place(prefix + name, owner, name, "attribute", MISSING)
            if is_module and not issubclass(type(owner), torch.jit.ScriptModule):
                own = attributes_of(owner)
                for register in self._gone_through:
                    names = own[register]
                    yield Place(f"{prefix}{register}.keys()", names, None, "keys", keys_of(names))

    def _may_come(self) -> Iterator[Place]:
        """Where entries may come that code would find: under a text that it has or reads in dicts,
        and under any name of an attribute in what is asked for those that an object has not."""
        texts = frozenset(self._texts.union(p.value for p in self._places if type(p.value) is str))
        answers = {kind: known.own for kind, known in self._classes.items() if known.answers}
        names = texts.union(self._names, *answers.values())
        answering = {p: owner for p, owner in self._objects.items() if class_of(owner) in answers}
        below = tuple(map(_below, answering))
        for path, owner in self._objects.items():
            if issubclass(type(owner), dict) and _last(path) not in self._stored:
                asked = names if path in answering or path.startswith(below) else texts
                yield _entries(path, owner, asked)
        called = {kind: known.called(self._names) for kind, known in self._classes.items()}
        for path, owner in self._objects.items():
            hidden, own = called.get(type(owner)), own_dict(owner)
            if hidden and own is not None and path not in answering:
                yield _entries(f"{_below(path)}__dict__", own, hidden)
        for path, owner in answering.items():
            if (own := own_dict(owner)) is not None:
                yield _entries(f"{_below(path)}__dict__", own, names)
                for register in own.keys() & set(REGISTERS.values()):
                    yield _entries(_below(path) + register, own[register], names)
        for base in dict.fromkeys(base for kind in answers for base in kind.__mro__):
            if not is_foreign(module_of(base)):
                yield _entries(f"{base.__qualname__}.__dict__", vars(base), names)

    def is_foreign(self, module: object) -> bool:
        """True for torch and the standard library, and for installed packages none of whose modules
        the callable has: what their code names is theirs, and there may be much of it."""
        if is_foreign(module):
            return True
        package = module.partition(".")[0] if isinstance(module, str) else ""
        if package in self._home or not _is_installed(package):
            return False
        self._skipped.add(package)
        return True

    def _enter_module(self, path: str, module: torch.nn.Module) -> None:
        self._home.add(_package_of(type(module)))
        self._objects[path] = module
        prefix, places, own = _below(path), self._places, attributes_of(module)
        called = [own["forward"]] if "forward" in own else []
        for call in (*called, *(hook for name in _HOOKS for hook in own[name].values())):
            self._home.update(_packages_of(call))
        if issubclass(type(module), torch.jit.ScriptModule):
            self._enter_script(prefix, module)
            return
        for name, value in own["_parameters"].items():
            places.append(Place(prefix + name, module, name, "parameter", value))
        for name, value in own["_buffers"].items():
            places.append(Place(prefix + name, module, name, "buffer", value))
        self._enter_attributes(path, module, own)
        if issubclass(type(module), _CONTAINERS):
            names = module._modules
            places.append(Place(f"{path}.keys()", names, None, "keys", keys_of(names)))
        for name in _HOOKS:
            hooks = own[name]
            places.append(_length(prefix + name, hooks, len(hooks)))
            for key, hook in hooks.items():
                self._add(Place(f"{prefix}{name}[{key}]", hooks, key, "item", hook))
        for name, child in module._modules.items():
            self._add(Place(prefix + name, module, name, "submodule", child))

    def _enter_script(self, prefix: str, module: Any) -> None:
        """A module of TorchScript: of its attributes, those that its code names."""
        kept = module._c
        graphs = (kept._get_method(name).graph for name in kept._method_names())
        named = [node.s("name") for graph in graphs for node in graph.findAllNodes("prim::GetAttr")]
        children = vars(module._modules)["_python_modules"]
        for name in dict.fromkeys(named):
            value = read_script(kept, name)
            if is_tensor(value) or is_host_scalar(value):
                self._places.append(Place(prefix + name, kept, name, "script", value))
            elif type(value) in (dict, list, tuple):
                because = "TorchScript gives another copy of it at each read"
                self._leave_out(prefix + name, value, because)
        for name, child in children.items():
            self._add(Place(prefix + name, children, name, "item", child))

    def _enter_object(self, path: str, value: Any) -> None:
        known = self._class_of(value)
        if is_array(value) and plain_array(value).dtype.kind == "O":
            self._enter_array(path, value)
        runnable = attributes_of(value).get("runnable") if known.is_foreign else None
        if runnable is not None:  # A wrapper of graphrt.
            self._stack.append((path, runnable))
        elif not is_foreign(module_of(type(value))):
            self._objects.setdefault(path, value)
            known.own.update(*(held_by(base) or () for base in type(value).__mro__))
            self._note_unread(path, value)
            self._enter_attributes(path, value, attributes_of(value))
        elif module_of(type(value)) == "logging":
            self._loggers.append((path, value))
        else:
            self._enter_held(path, value)
        if type(value) is _CACHE:
            self._enter_memos(path, value)
        wrapped = attributes_of(value).get("__wrapped__")
        if wrapped is not None:  # functools.lru_cache and its like
            self._stack.append((path, wrapped))
        if has_contents(value):
            self._objects.setdefault(path, value)

    def _enter_held(self, path: str, value: Any) -> None:
        """An object of torch's, NumPy's or the standard library's: what it is known to hold."""
        names = held_by(type(value))
        if is_record(value):
            self._stack.append((path, viewed_by(value)))
        if names is None:
            self._note_unread(path, value)
            return
        attributes = attributes_of(value)
        self._class_of(value).own.update(attributes if "*" in names else names)
        self._objects.setdefault(path, value)
        self._enter_attributes(path, value, attributes)

    def _enter_memos(self, path: str, cache: Any) -> None:
        """What a ``functools`` cache remembers. One of limited size forgets by itself, and does not
        tell results from arguments: of these, no host values are listed."""
        own, size = attributes_of(cache), cache.cache_info().currsize
        for found in gc.get_referents(cache):
            if found is own or found is cache.__wrapped__ or is_host_scalar(found):
                continue
            if cache.cache_parameters()["maxsize"] is None and type(found) is dict:
                for key, result in found.items():
                    self._add(Place(f"{path}()", found, key, "item", result))
            elif not (type(found) is dict and len(found) == size and _are_links(found)):
                self._add(Place(f"{path}()", cache, id(found), "memo", found))

    def _enter_attributes(self, path: str, owner: Any, attributes: Mapping[str, Any]) -> None:
        """The attributes of any object: named ones are followed, others only listed."""
        prefix = _below(path)
        kind = type(owner)
        known = self._know(kind)
        if known.storing:
            self._entered.append((path, known))
        if not issubclass(kind, (ModuleType, FunctionType)):
            self._places.append(Place(f"{prefix}__class__", owner, None, "type", kind))
        if not is_foreign(module_of(type(kind))):  # ``type(self).x`` may be its metaclass's.
            self._stack.append((f"{prefix}__class__", kind))
        self._read_methods()
        skipped = _MODULE_OWN if known.is_module else ()
        for name, value in attributes.items():
            if name not in skipped:
                self._add_attribute(known, prefix + name, owner, name, "attribute", value)
        for name, descriptor in known.members_of_slots.items():
            value = filled(descriptor, owner)
            self._add_attribute(known, prefix + name, owner, name, "attribute", value)
        for name, value in known.data.items():
            if name not in attributes:
                self._add_attribute(known, prefix + name, owner, name, "member", value)
        for name, value in known.hideable.items():
            if name not in attributes:
                self._places.append(Place(prefix + name, owner, name, "member", value))
        for name in known.unset.difference(attributes):
            if read_attribute(owner, name) is MISSING:  # Else a class of torch's has it.
                self._places.append(Place(prefix + name, owner, name, "attribute", MISSING))

    def _add_attribute(
        self, known: _Class, path: str, owner: Any, name: str, kind: PlaceKind, value: Any
    ) -> None:
        if name in self._names or name in known.own:
            self._add(Place(path, owner, name, kind, value))
        else:
            place = Place(path, owner, name, kind, value, is_named=False)
            self._unnamed.setdefault(name, []).append(place)

    def _enter_class(self, path: str, kind: type) -> None:
        """A class that code names: of its members, those that code names, and what runs where code
        makes an object of it."""
        if not self.is_foreign(kind.__dict__.get("__module__")):
            self._objects.setdefault(path, kind)
            known = self._know(kind)
            prefix = _below(path)
            last = _last(path)
            if last in self._called:
                self._enter_making(path, kind)
            else:
                self._not_called.setdefault(last, []).append((path, kind))
            for name, value in known.data.items():
                self._add_attribute(known, prefix + name, kind, name, "member", value)
            meta = type(kind)
            if meta is not type and not is_foreign(module_of(meta)):
                for name, value in self._know(meta).data.items():
                    self._add_attribute(known, prefix + name, meta, name, "member", value)

    def _enter_making(self, path: str, kind: type) -> None:
        """What runs where code makes an object of a class; modules are made before."""
        known = self._know(kind)
        is_left_out = known.is_module or _is_installed(_package_of(kind))
        for name in () if is_left_out else _MAKING:
            value = read_member(kind, name)
            if type(value) in _FUNCTIONS:
                self._places.append(Place(f"{path}.{name}", kind, name, "member", value))
            made_by = (base.__dict__.get(name) for base in kind.__mro__)
            self._enter_members(known, [each for each in made_by if type(each) in _FUNCTIONS])

    def _enter_method(self, path: str, method: MethodType) -> None:
        owner: Any = method.__self__
        function = method.__func__
        if type(function) is FunctionType:
            known = self._know(class_of(owner))
            self._seen[id(function)] = function
            self._enter_function(path, function, known)
        self._stack.append((path, owner))

    def _enter_partial(self, path: str, call: Any) -> None:
        for name in ("func", "args", "keywords"):  # Another state may be set.
            found = read_attribute(call, name)
            self._places.append(Place(_below(path) + name, call, name, "attribute", found))
        func, args, keywords = parts_of_partial(call)
        self._stack.append((path, func))
        prefix, names = _below(path), parameters_of(func)
        for index, value in enumerate(args):
            name = names[index] if index < len(names) else f"args[{index}]"
            self._add(Place(prefix + name, args, index, "item", value))
        for name, value in keywords.items():
            self._add(Place(prefix + name, keywords, name, "item", value))

    def _enter_function(self, _: str, function: FunctionType, known: _Class | None = None) -> None:
        """``known``: the class of the object that is its first argument, where that is known."""
        self._num_functions += 1
        home = function.__globals__.get("__name__")
        if home == _BREAKS:  # Its other variables are graphrt's own.
            wrapped = attributes_of(function).get("__wrapped__")
            if wrapped is not None:
                self._broken.append(wrapped)
            return
        if function.__closure__:
            for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
                value = read_cell(cell, name)
                if name == "dispatch_cache" and home == "functools":  # It follows ``registry``.
                    continue
                self._add(Place(name, cell, name, "cell", value))
                if name == "registry" and home == "functools":  # Of ``singledispatch``.
                    self._places.append(_length(f"{function.__name__}.registry", value, len(value)))
        if function.__defaults__ or function.__kwdefaults__:
            for name, value in defaults_of(function):
                self._add(Place(name, function, name, "default", value))
        names = names_in(function.__code__)
        is_others = self.is_foreign(home)
        texts = [text for text in names.strings if type(text) is str]
        if known is not None:
            self._name_own_of(function, names, known)
            if is_others and not is_foreign(home):
                counts = {chain[-1] for chain in names.assigned}
                # An object of an installed package: what its methods ask of what it holds.
                self._name(names.attributes - counts)
                self._texts.update(texts)
            if known.is_module and is_others:
                self._add_functions_of_others(names, function.__globals__)
        if is_others:
            return
        code = function.__code__
        self._objects.setdefault(f"{function.__qualname__}()", function)
        self._places.append(
            Place(f"{function.__qualname__}.__code__", function, None, "type", code)
        )
        self._scopes[id(function.__globals__)] = function.__globals__
        is_installed = _is_installed(_package_of(function))
        self._add_of_others(function, names)
        self._note_names(function, names, known, is_installed)
        self._name(names.attributes if known is not None else names.attributes | names.own)
        self._add_globals(names, function.__globals__, is_installed)
        if vars(function):
            self._enter_attributes(function.__name__, function, vars(function))

    def _note_names(
        self, function: FunctionType, names: Names, known: _Class | None, is_installed: bool
    ) -> None:
        """What its code asks for, goes through and sets, which is looked up when all is known."""
        code = function.__code__
        self._strings |= names.strings
        self._iterated |= names.iterated
        self._stored |= names.stored
        for name in names.called - self._called:
            self._called.add(name)
            for path, kind in self._not_called.pop(name, ()):
                self._enter_making(path, kind)
        self._assigned.update(chain[-1] for chain in names.assigned)
        is_asking = not _ASKING.isdisjoint(names.globals) or "__dict__" in names.attributes
        for of, absent in names.tried:
            self._tried.setdefault(of, []).append(absent)
        for of, string in names.asked:
            self._asked.setdefault(of, []).append(string)
            if is_asking:
                self._asked_of_own.add(string)
            if is_asking and of in _OF_ANY:
                self._asked_of_any.add(string)
        for of, key in names.asked_by:
            if of in ("environ", "getenv"):
                source = _source(code, names.lines.get(of, 0))
                self._variables[of, key] = Source() if is_installed else source
        if "environ" in names.iterated and not is_installed:
            source = _source(code, names.lines.get("environ", 0))
            because = "code goes through all of it"
            self._told["os.environ", code] = Unwatched("os.environ", "variables", because, source)
        # What ``__get__`` asks is asked of the objects that have it.
        num_own = 2 if function.__name__ == "__get__" else 1
        first = code.co_varnames[:num_own]  # None of a static method without arguments.
        own = {asked for asked in names.guessed if known is not None and asked[0] in first}
        if known is not None:
            known.guessed.update(begin for _, begin in own)
        self._guessed.update(dict.fromkeys(names.guessed - own, code))
        if not is_installed:  # A registry of a package grows as it likes.
            self._computed |= names.computed
            self._texts.update(text for text in names.strings if type(text) is str)
            of_others = () if known is None or known.is_proxy else first
            if is_asking:
                self._asked_of_locals.update(x for x in names.asked if x[0] not in of_others)
            for name in (names.own | names.attributes) & _GONE_THROUGH.keys():
                self._gone_through.update(_GONE_THROUGH[name])
            self._note_code(function, names)

    def _add_globals(self, names: Names, scope: dict[str, Any], is_installed: bool) -> None:
        """The variables of its module that code names, and the modules that it imports."""
        self._add_functions_of_others(names, scope)
        for name in names.globals:
            value = scope.get(name, _UNSEEN)
            if value is not _UNSEEN:
                self._add(Place(name, scope, name, "global", value))
            elif not hasattr(builtins, name):  # It may be set later.
                self._places.append(Place(name, scope, name, "global", MISSING))
        if not _BY_NAME.isdisjoint(names.globals) and not is_installed:
            asked = {name for of, name in names.asked if of == "__dict__"}
            for constant in asked | names.strings.intersection(scope).difference(names.globals):
                found = scope.get(str(constant), MISSING)
                self._add(Place(str(constant), scope, constant, "global", found))
        for name, level in names.imports:
            with suppress(ImportError):  # Outside of every package: to run it raises the same.
                package = scope.get("__package__") or ""
                path = importlib.util.resolve_name("." * level + name, package) if level else name
                self._add_loaded(path, path)
        for of, name in names.asked:
            if of == "modules":
                self._add_loaded(f"sys.modules[{name!r}]", name)

    def _add_loaded(self, path: str, name: str) -> None:
        """A module, if it has been imported."""
        if name in sys.modules:
            self._add(Place(path, sys.modules, name, "item", sys.modules[name]))

    def _add_functions_of_others(self, names: Names, scope: Mapping[str, Any]) -> None:
        """Functions of torch, NumPy and the standard library that code names by their modules:
        another attention kernel may be put in the place of one."""
        modules = [(name, scope.get(name)) for name in names.globals]
        for path, module in modules:
            if type(module) is not ModuleType:
                continue
            own = attributes_of(module)
            if not is_foreign(own.get("__name__")):
                continue
            for name in names.attributes.intersection(own):
                value = own[name]
                if type(value) is ModuleType and (f"{path}.{name}", value) not in modules:
                    modules.append((f"{path}.{name}", value))
                elif type(value) in (FunctionType, BuiltinMethodType):
                    place = Place(f"{path}.{name}", own, name, "global", value)
                    self._of_others.setdefault((id(own), name), place)

    def _add_of_others(self, function: FunctionType, names: Names) -> None:
        """Attributes that code sets on modules and classes of others, or asks them for."""
        known = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for chain in names.assigned | names.asked:
            if len(chain) == 1:
                continue
            if chain[0] in known:
                owner = read_cell(known[chain[0]], chain[0])
            else:
                owner = function.__globals__.get(chain[0], MISSING)
            for name in chain[1:-1]:
                owner = MISSING if owner is MISSING else read_attribute(owner, name)
            kind = type(owner)
            if issubclass(kind, type) and self.is_foreign(module_of(owner)):
                found = read_attribute(owner, chain[-1])
                self._add(Place(".".join(chain), owner, chain[-1], "member", found))
            elif issubclass(kind, ModuleType):
                of = attributes_of(owner)
                found = of.get(chain[-1], MISSING)
                if found is MISSING or self.is_foreign(of.get("__name__")):
                    self._add(Place(".".join(chain), of, chain[-1], "global", found))

    def _note_code(self, function: FunctionType, names: Names) -> None:
        """What it calls whose results are no places."""
        code, scope = function.__code__, function.__globals__
        called = [
            (name, because)
            for name, because in READS_ELSEWHERE.items()
            if (name in names.globals and scope.get(name, MISSING) is MISSING)
            or (name in names.attributes and not hasattr(builtins, name))
        ]
        for name in names.globals:
            value = scope.get(name, MISSING)
            if type(value) in (FunctionType, BuiltinMethodType):
                its_name = value.__name__
                if is_foreign(value.__module__) and (name, its_name) != ("getenv", "getenv"):
                    called.append((name, READS_OF_OTHERS.get(its_name, "")))
            elif type(value) is ModuleType and is_foreign(attributes_of(value).get("__name__")):
                asked = names.attributes.intersection(READS_OF_OTHERS, attributes_of(value))
                called += [(each, READS_OF_OTHERS[each]) for each in asked if each != "getenv"]
        for name, because in called:
            if not because:
                continue
            source = _source(code, names.lines.get(name, 0))
            self._told[f"{name}()", code] = Unwatched(f"{name}()", "function", because, source)
        for name in names.attributes & FACTS_OF_TENSORS.keys():
            source = _source(code, names.lines[name])
            because = FACTS_OF_TENSORS[name]
            self._told[name, code] = Unwatched(name, "attribute of a tensor", because, source)

    def _told_unwatched(self) -> Iterator[Unwatched]:
        """Everything that was met and cannot be compared, with the line that names it."""
        yield from self._told.values()
        for path, value, because in self._unread.values():
            name = path.removesuffix("()").rpartition(".")[2].partition("[")[0]
            yield Unwatched(path, name_of(type(value)), because, self._line_of(name))

    def _line_of(self, name: str) -> Source:
        for function in self._objects.values():
            if type(function) is FunctionType:
                line = names_in(function.__code__).lines.get(name)
                if line is not None:
                    return _source(function.__code__, line)
        return Source()

    # -- names

    def _class_of(self, value: object) -> _Class:
        return self._know(type(value))

    def _know(self, kind: type) -> _Class:
        known = self._classes.get(kind)
        if known is None:
            # A lazy module is a module: what its own code keeps is how it imports.
            is_others = issubclass(kind, ModuleType) or self.is_foreign(module_of(kind))
            known = self._classes[kind] = _Class(kind, is_others)
            for name, values in known.members.items():
                if name in self._names or name.startswith("__"):
                    self._enter_members(known, values)
                else:
                    self._members.setdefault(name, []).append((known, values))
            if forward := known.members.get("forward"):
                if issubclass(kind, _RUNS_FORWARD):
                    self._enter_members(known, forward)
                else:
                    self._forwards.append((known, forward))
        return known

    def _name(self, names: Set[str]) -> None:
        """Follow every attribute and member of these names."""
        for name in names - self._names:
            self._names.add(name)
            self._follow_unnamed(name, lambda _: True)
            for known, values in self._members.pop(name, ()):
                self._enter_members(known, values)

    def _follow_unnamed(self, name: str, is_meant: Callable[[Place], bool]) -> None:
        """Follow attributes that were listed before anything named them."""
        others = []
        for place in self._unnamed.pop(name, ()):
            if is_meant(place):
                self._add(place._replace(is_named=True))
            else:
                others.append(place)
        if others:
            self._unnamed[name] = others

    def _name_guessed(self) -> None:
        """Follow every attribute of what is asked for computed names. After the code is known."""
        if not (self._guessed or any(known.guessed for known in self._classes.values())):
            return
        owners = {path.rpartition(".")[2] for path in self._objects}
        of_any = {begin for asked, begin in self._guessed if begin and asked not in owners}
        proxies = {kind: known for kind, known in self._classes.items() if known.is_proxy}
        answering = {
            p.rpartition(".")[2] for p, o in self._objects.items() if class_of(o) in proxies
        }
        of_any.update(begin for asked, begin in self._guessed if begin and asked in answering)
        of_any.update(begin for known in proxies.values() for begin in known.guessed if begin)
        for (asked, begin), code in self._guessed.items():
            if not begin and asked not in owners and not _is_installed_file(code.co_filename):
                because = "the name is computed, and not known of what it is asked"
                source = _source(code, code.co_firstlineno)
                path = f"getattr({asked}, ...)"
                self._told[path, code] = Unwatched(path, "attribute", because, source)

        def is_meant(place: Place) -> bool:
            owner = place.path.removesuffix(f".{place.name}").rpartition(".")[2]
            begins = of_any | {begin for asked, begin in self._guessed if asked == owner}
            return str(place.name).startswith((*begins, *self._class_of(place.owner).guessed))

        for name in list(self._unnamed):
            self._follow_unnamed(name, is_meant)

    def _methods_of_classes(self) -> Iterator[Place]:
        """The methods that code names, as the classes have them; and what these hide of their
        bases, which ``super`` finds."""
        hidden: dict[tuple[type, str], None] = {}
        for kind, known in self._classes.items():
            for name, values in () if known.is_foreign else known.members.items():
                if not (name in self._names or name in known.own or name.startswith("__")):
                    continue
                if name not in known.data:
                    yield Place(f"{kind.__qualname__}.{name}", kind, name, "member", values[0])
                if len(values) > 1:
                    hidden.update(((base, name), None) for base in kind.__mro__[1:])
        for base, name in hidden:
            value = base.__dict__.get(name, MISSING)
            is_told = type(value) is FunctionType or not (value is MISSING or name.startswith("__"))
            if is_told and not self.is_foreign(module_of(base)):
                yield Place(f"{base.__qualname__}.{name}", base, name, "member", value)

    def _name_own_of(self, function: FunctionType, names: Names, known: _Class) -> None:
        """Follow what a method reads of its object, whichever class inherits it."""
        is_others = self.is_foreign(function.__globals__.get("__name__"))
        counts = {chain[-1] for chain in names.assigned} if is_others else set()
        self._name_own(known, names.own - counts)
        if is_others:
            return
        first = function.__code__.co_varnames[:1]
        known.guessed.update(begin for of, begin in names.guessed if of in first)
        # ``self[key] = value``, and ``super().__setitem__(key, value)``
        if not (names.stored.isdisjoint(first) and names.attributes.isdisjoint(_STORING)):
            storing, known.storing = known.storing, []
            self._enter_members(known, storing)

    def _name_own(self, known: _Class, names: Set[str]) -> None:
        """Follow the attributes and members of one class that its own methods read."""
        if known.is_proxy:
            self._name(names)
        for name in names - known.own:
            known.add_own(name)
            self._enter_members(known, known.members.get(name, ()))
            self._follow_unnamed(
                name, lambda place: self._classes.get(class_of(place.owner)) is known
            )

    def _enter_members(self, known: _Class, values: Any) -> None:
        """Read the code of methods and properties that are named."""
        for value in values:
            if type(value) in (staticmethod, classmethod):
                value = value.__func__
            elif type(value) is property:
                value = value.fget
            elif type(value) in (functools.cached_property, functools.partialmethod):
                value = value.func
            elif not self.is_foreign(module_of(type(value))) and not _is_data(value):
                known.guessed |= _guessed_by_descriptor(type(value))
                self._stack.append((type(value).__name__, value))
            if type(value) is FunctionType and id(value) not in known.methods:
                known.methods.add(id(value))
                self._methods.append((value, known))

    def _read_methods(self) -> None:
        """Read the code of the methods that were named. A loop, because they name one another."""
        while self._methods:
            function, known = self._methods.pop()
            if id(function) in self._seen:  # Another class has it too.
                self._name_own_of(function, names_in(function.__code__), known)
            else:
                self._seen[id(function)] = function
                self._enter_function("", function, known)


def _are_links(table: dict[Any, Any]) -> bool:
    """True for the dict in which a ``functools`` cache of limited size has its entries."""
    return all(name_of(type(entry)) == "_lru_list_elem" for entry in table.values())


def _guessed_by_descriptor(kind: type) -> set[str]:
    """How the computed names begin that a descriptor asks the objects for that have it."""
    get = next((base.__dict__["__get__"] for base in kind.__mro__ if "__get__" in base.__dict__), 0)
    if type(get) is not FunctionType:
        return set()
    asked = get.__code__.co_varnames[1:2]
    return {begin for owner, begin in names_in(get.__code__).guessed if owner in asked}


def _may_be_set(owner: Any) -> bool:
    """True for what may get attributes: a class, or what has a ``__dict__`` of its own."""
    return issubclass(type(owner), type) or own_dict(owner) is not None


def _is_data(member: Any) -> bool:
    """True for a member of a class that instances share as a value, not as a method."""
    kind = type(member)
    return (
        is_odd(kind)
        or kind in SCALARS
        or issubclass(kind, torch.Tensor)
        or not any("__get__" in base.__dict__ for base in kind.__mro__)
    )


def _are_host_scalars(values: Iterable[Any]) -> bool:
    values = list(values)
    kinds = {id(kind): kind for kind in map(type, values)}.values()
    is_plain = not any(map(is_odd, kinds)) and SCALARS.issuperset(kinds)
    return is_plain or all(map(is_host_scalar, values))


def _entries(path: str, owner: Mapping[str, Any], names: frozenset[str]) -> Place:
    return Place(f"{path}.keys()", owner, names, "entries", entries_among(owner, names))


def _length(path: str, owner: Any, length: int) -> Place:
    return Place(f"{path}.__len__()", owner, None, "length", length)


def _is_weak(value: Any) -> bool:
    return issubclass(type(value), ReferenceType)


def _source(code: CodeType, line: int) -> Source:
    return Source(code.co_filename, line, code.co_qualname)


def _last(path: str) -> str:
    """The variable or attribute that a path ends with."""
    return path.rpartition(".")[2].removesuffix("()")


def _below(path: str) -> str:
    return f"{path}." if path else ""


_WAYS: tuple[tuple[Any, Callable[[Walk, str, Any], None]], ...] = (
    (_SEQUENCES, Walk._enter_container),
    (torch.nn.Module, Walk._enter_module),
    (FunctionType, Walk._enter_function),
    (MethodType, Walk._enter_method),
    (functools.partial, Walk._enter_partial),
    (torch.Tensor, Walk._enter_tensor),
    (MappingProxyType, Walk._enter_proxy),
    (_GETTERS_BY_NAME, Walk._enter_getter),
    (ModuleType, Walk._enter_package),
    (type, Walk._enter_class),
)


@functools.lru_cache(maxsize=4096)
def _way_into(kind: type) -> Callable[[Walk, str, Any], None]:
    """How the walk enters what is of this class."""
    if not _FLEETING.isdisjoint(kind.__mro__):
        return Walk._enter_later
    way = next((way for kinds, way in _WAYS if issubclass(kind, kinds)), None)
    return way or (Walk._enter_builtin if module_of(kind) == "builtins" else Walk._enter_object)

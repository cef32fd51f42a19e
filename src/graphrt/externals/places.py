"""Places where a callable finds something: what stands there, read without any code of a user's."""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import io
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from pickle import PickleBuffer
from threading import get_ident
from types import (
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    WrapperDescriptorType,
)
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType

import torch

from graphrt.values import HOST_TYPES, same_host_value

PlaceKind = Literal[
    "attribute",
    "member",
    "parameter",
    "buffer",
    "submodule",
    "item",
    "element",
    "length",
    "is_filled",
    "cell",
    "global",
    "default",
    "context",
    "contents",
    "keys",
    "entries",
    "type",
    "call",
    "script",
    "memo",
    "target",
]

MAX_ITEMS = 4096
"""Of a container with more items, only those under a string that the code names are followed."""
MAX_TEXT = 1 << 20
"""A longer text in memory is not compared, because each look would copy all of it."""
_BYTES_OF_A_PART, _ITEMS_OF_A_PART = 4096, 256
_BYTES_AT_ONCE = 1 << 20
"""A copy of so many stays in the caches."""
CDATA = ctypes.c_int.__mro__[-2]
"""Of every ctypes value: numbers, arrays, structures, pointers; of no library."""


class _Missing(Enum):
    MISSING = "nothing"


MISSING = _Missing.MISSING
"""What ``Place.read`` returns where nothing stands any more."""


class Place(NamedTuple):
    """One place where a callable finds something: who owns it, under which name, and what it is.

    Compare places by ``is``, never by ``==``, which would compare tensors.
    """

    path: str
    """As one would write it: ``model.layers.0.weight``, ``cfg['scale']``; of a module or a bound
    method that is called itself, relative to it."""
    owner: Any
    """The object, module, dict, list, tuple, set or cell that holds the value; for a global, the
    dict of globals; for a default, the function."""
    name: Any
    """Attribute, key or index under which ``owner`` has it; of a set, the element; of the length of
    a container or of a module that is one, and of whether it is filled, nothing. The same of a
    ``type``, which is the class of an object or the code of a function, of ``contents``, and of the
    ``keys`` of a dict. Of ``entries``, which of some keys a dict has, these keys."""
    kind: PlaceKind
    value: Any
    """What stood there when it was walked: ``MISSING`` for an attribute that code names and that
    the object does not have."""
    is_named: bool = True
    """False: no code that was reached names this attribute, and it was not followed. Parameters,
    buffers, submodules, items, cells, globals and defaults always count as named. A ``member`` is
    an attribute that the class has and the object has not (yet)."""

    def read(self) -> Any:
        """What stands there now, or ``MISSING``. Runs no code of the user's but a key's hash."""
        return READ[self.kind](self.owner, self.name)

    def fits(self, value: Any) -> bool:
        """True if a program that was captured with what stood there would do the same with this."""
        return same_host_value(self.value, value)

    def has_moved(self) -> bool:
        """True if something else stands there now."""
        return not self.fits(self.read())


def is_array(value: Any) -> bool:
    """True for a NumPy array, whose elements are no places: of their own, they are one value."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_record(value: Any) -> bool:
    """True for one element of a NumPy array of records, which may be a view of it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.void)


def viewed_by(value: Any) -> Any:
    """What an array or a record is a view of; None if it has its own memory."""
    numpy = sys.modules["numpy"]
    kind = numpy.void if is_record(value) else numpy.ndarray
    return kind.__dict__["base"].__get__(value)


def plain_array(value: Any) -> Any:
    """The same elements without any code of a subclass."""
    ndarray = sys.modules["numpy"].ndarray
    return ndarray.view(value, ndarray)


def packed_array(value: Any) -> Any:
    """The same elements without any code of a subclass, each that is in memory once, in one
    dimension where no others lie between. Of rows that overlap, the bytes from the first to the
    last."""
    plain = plain_array(value)
    if plain.flags.c_contiguous:
        return plain.reshape(-1)
    # A dimension without a step shows the same elements again; others in the order of memory.
    plain = plain[tuple(slice(None, None if step else 1) for step in plain.strides)]
    plain = plain.transpose(sorted(range(plain.ndim), key=lambda dim: -abs(plain.strides[dim])))
    plain = plain[tuple(slice(None, None, -1 if step < 0 else 1) for step in plain.strides)]
    if plain.flags.c_contiguous:
        return plain.reshape(-1)
    steps = zip(plain.shape, plain.strides, strict=True)
    num_bytes = plain.itemsize + sum((size - 1) * step for size, step in steps)
    if plain.nbytes > num_bytes:
        numpy = sys.modules["numpy"]
        first = plain[(slice(1),) * plain.ndim].reshape(-1).view("u1")
        return numpy.lib.stride_tricks.as_strided(first, (num_bytes,), (1,), writeable=False)
    return plain


def same_bytes(value: Any, expected: bytes) -> bool:
    """True if an array has these bytes, as ``tobytes`` gives them."""
    plain = plain_array(value)
    if plain.nbytes != len(expected) or not plain.flags.c_contiguous:
        return bool(plain.tobytes() == expected)
    held, flat = memoryview(expected), plain.reshape(-1)
    count = max(1, _BYTES_AT_ONCE // plain.itemsize)
    return all(
        flat[first : first + count].tobytes()
        == held[first * plain.itemsize : (first + count) * plain.itemsize].tobytes()
        for first in range(0, plain.size, count)
    )


def _blocks_of(packed: Any) -> Iterator[bytes]:
    """Its bytes, a block at a time: to take out each part alone would take ten times as long."""
    row = packed[:1].nbytes
    if row > _BYTES_AT_ONCE and packed.ndim > 1:
        for part in packed:
            yield from _blocks_of(part)
    else:
        count = max(1, _BYTES_AT_ONCE // max(1, row))
        for first in range(0, len(packed), count):
            yield packed[first : first + count].tobytes()


def _holds_references(value: Any) -> bool:
    """True for an array whose bytes are references: to objects, or to strings of any length."""
    return bool(value.dtype.hasobject or value.dtype.kind == "T")


def has_contents(value: Any) -> bool:
    """True for what may be changed in place without any name: a buffer, or a long sequence."""
    kind = type(value)
    if issubclass(kind, (list, tuple)):
        return length_of(value) > MAX_ITEMS
    if is_array(value):
        return bool(plain_array(value).nbytes)
    if issubclass(kind, io.StringIO):
        return len(_text_of(value)) <= MAX_TEXT
    return issubclass(kind, (bytearray, array.array, memoryview, CDATA, io.BytesIO))


def _text_of(value: Any) -> str:
    try:
        return io.StringIO.getvalue(value)
    except ValueError:  # One that was closed holds nothing.
        return ""


def _view_of(value: Any) -> memoryview:
    """Its bytes. Errors: ``ValueError`` where it was released or closed."""
    is_file = issubclass(type(value), io.BytesIO)
    return io.BytesIO.getbuffer(value) if is_file else memoryview(value)


def _bytes_in(value: Any, part: slice) -> bytes:
    """Some of its bytes in the order of memory, whatever its format."""
    with _view_of(value) as view, PickleBuffer(view).raw() as raw:
        return raw[part].tobytes()


def contents_of(value: Any) -> tuple[Any, ...]:
    """What a buffer or a long sequence has: its form, then its parts, each as its hash or as it
    is. The parts that a program depends on are compared later, and need no copy."""
    form, size, step, take = _parts_of(value)
    if is_array(value) and not _holds_references(value):
        return form, *_hashes_of(packed_array(value), step)
    return form, *(take(slice(first, first + step)) for first in range(0, size, step))


def part_of(value: Any, number: int) -> Any:
    """One of ``contents_of``."""
    form, _, step, take = _parts_of(value)
    return take(slice((number - 1) * step, number * step)) if number else form


def _parts_of(value: Any) -> tuple[Any, int, int, Callable[[slice], Any]]:
    """The form of contents, of how many items they are, how many of them are one part, and what
    gives that. Runs no code of a subclass."""
    kind = type(value)
    if issubclass(kind, (list, tuple)):
        base, size = base_of(value), length_of(value)
        return size, size, _ITEMS_OF_A_PART, lambda part: tuple(base.__getitem__(value, part))
    if is_array(value):
        form: Any = (str(value.dtype), value.shape, value.strides)
        if _holds_references(value):  # One by one: NumPy copies no slice of strings without harm.
            item, places = plain_array(value).flat.__getitem__, range(int(value.size))
            return form, len(places), _ITEMS_OF_A_PART, lambda part: tuple(map(item, places[part]))
        packed = packed_array(value)
        items = packed if packed.ndim == 1 else packed.flat
        step = max(1, _BYTES_OF_A_PART // int(packed.itemsize))
        return form, packed.size, step, lambda part: hash(items[part].tobytes())
    if issubclass(kind, io.StringIO):
        text = _text_of(value)
        return len(text), len(text), _BYTES_OF_A_PART, text.__getitem__
    try:
        with _view_of(value) as view:
            form, size = (view.format, view.shape), view.nbytes
            copied = None if view.contiguous else view.tobytes()
    except ValueError:  # One that was released or closed holds nothing.
        return None, 0, 1, lambda _: None
    if copied is not None:
        return form, size, _BYTES_OF_A_PART, lambda part: hash(copied[part])
    return form, size, _BYTES_OF_A_PART, lambda part: hash(_bytes_in(value, part))


def _hashes_of(packed: Any, of_a_part: int) -> Iterator[int]:
    """Of each part of an array."""
    size, rest = of_a_part * int(packed.itemsize), b""
    for block in _blocks_of(packed):
        data = rest + block
        whole = len(data) - len(data) % size
        yield from (hash(data[start : start + size]) for start in range(0, whole, size))
        rest = data[whole:]
    if rest:
        yield hash(rest)


def is_odd(kind: type) -> bool:
    """True for a class that runs code of its metaclass when it is hashed, compared or looked at."""
    return type(kind) is not type and _is_odd_meta(type(kind))


@functools.lru_cache(maxsize=4096)
def _is_odd_meta(meta: type) -> bool:
    own = (base.__dict__ for base in meta.__mro__[: meta.__mro__.index(type)])
    return any(not _LOOKED_AT_BY.isdisjoint(names) for names in own)


_LOOKED_AT_BY = frozenset(("__hash__", "__eq__", "__getattribute__", "__mro__", "__dict__"))
ODD = "its metaclass answers for it"


def is_host_scalar(value: Any) -> bool:
    """True for values that a program holds as constants: numbers, strings, None, enums, dtypes.

    And tuples, frozensets, slices and ranges of at most 16 of them.
    """
    kind = type(value)
    if is_odd(kind):
        return False
    if kind in SCALARS:
        return True
    if kind is tuple or kind is frozenset or kind is torch.Size:
        return len(value) <= 16 and all(map(is_host_scalar, value))
    return _is_host_kind(kind)  # type: ignore[arg-type]  # types are hashable


@functools.lru_cache(maxsize=4096)
def _is_host_kind(kind: type) -> bool:
    """By class alone: a proxy may answer for its class as it likes, or raise."""
    numpy = sys.modules.get("numpy")
    kinds = HOST_TYPES if numpy is None else (*HOST_TYPES, numpy.generic, numpy.dtype)
    is_plain = is_foreign(module_of(kind)) and issubclass(kind, kinds)
    # A ``void`` may be a view of an array.
    is_void = numpy is not None and issubclass(kind, numpy.void)
    is_other = is_void or issubclass(kind, (type, bytearray))
    return issubclass(kind, (Enum, torch.dtype)) or (is_plain and not is_other)


SCALARS = frozenset(
    (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        type(...),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)

_FOREIGN = frozenset(sys.stdlib_module_names - {"__main__"}) | {
    "torch",
    "numpy",
    "triton",
    "graphrt",
}
"""Packages whose code and objects are not entered."""

REGISTERS: dict[PlaceKind, str] = {
    "parameter": "_parameters",
    "buffer": "_buffers",
    "submodule": "_modules",
}
"""Where a module keeps what is registered in it."""

# What torch itself keeps on a module: registers, hooks, flags. ``training`` is a host value.

# -- reading


def read_attribute(owner: Any, name: str) -> Any:
    attributes = attributes_of(owner)
    value = attributes.get(name, MISSING)
    if value is not MISSING:
        return value
    kind = class_of(owner)
    value = read_member(kind, name)
    if value is not MISSING:
        is_slot = type(value) is MemberDescriptorType and kind is not owner
        return filled(value, owner) if is_slot else value
    if issubclass(kind, torch.nn.Module) and kind is not owner:
        for register in REGISTERS.values():  # It was a plain attribute, or absent.
            value = getattr(owner, register).get(name, MISSING)
            if value is not MISSING:
                return value
    return MISSING


def class_of(owner: Any) -> Any:
    """The class in which an owner finds its members: its own, or itself."""
    return owner if issubclass(type(owner), type) else type(owner)


def read_member(kind: type, name: str) -> Any:
    """What the objects of a class find in it or in one of its bases."""
    for base in kind.__mro__:
        value = base.__dict__.get(name, MISSING)
        if value is not MISSING:
            return value
    return MISSING


def _read_register(register: str) -> Any:
    def read(owner: Any, name: str) -> Any:
        return getattr(owner, register).get(name, MISSING)

    return read


def _read_item(owner: Any, name: Any) -> Any:
    if issubclass(type(owner), dict):
        try:  # Not ``owner[name]``: a defaultdict would make the entry.
            return dict.get(owner, name, MISSING)
        except Exception:  # noqa: BLE001  The code of its hash may raise anything.
            return MISSING  # The callable does not find it either.
    if is_array(owner):
        flat = plain_array(owner).flat
        return flat[name] if name < len(flat) else MISSING
    base = base_of(owner)
    return base.__getitem__(owner, name) if name < base.__len__(owner) else MISSING


def _read_element(owner: Any, name: Any) -> Any:
    try:
        is_there = base_of(owner).__contains__(owner, name)
    except Exception:  # noqa: BLE001  As above.
        return MISSING
    return name if is_there else MISSING


@functools.lru_cache(maxsize=4096)
def is_hashed_in_c(kind: type) -> bool:
    """True for a class whose objects are hashed without any code of a user's."""
    if kind in SCALARS:
        return True
    found = next(base.__dict__["__hash__"] for base in kind.__mro__ if "__hash__" in base.__dict__)
    is_plain = type(found) is WrapperDescriptorType
    return is_plain and not issubclass(kind, (tuple, frozenset))  # These ask their elements.


def has_keys_that_raise(container: Any) -> bool:
    """True for a dict or set of which a key or element raises when it is hashed: by what it is
    there, nothing finds it."""
    bases: Any = (dict, set, frozenset)  # An ordered dict hashes its keys where it is gone through.
    base = next((base for base in bases if issubclass(type(container), base)), None)
    if base is None:
        return False
    kinds = {id(kind): kind for kind in map(type, base.__iter__(container))}.values()
    if not all(not is_odd(kind) and is_hashed_in_c(kind) for kind in kinds):
        try:
            deque(map(hash, base.__iter__(container)), maxlen=0)
        except Exception:  # noqa: BLE001  It is a user's.
            return True
    return False


def parts_of_partial(call: functools.partial[Any]) -> tuple[Any, Any, Any]:
    """Its function, arguments and keywords, without any code of a subclass."""
    func, args, keywords = (
        functools.partial.__dict__[name].__get__(call) for name in ("func", "args", "keywords")
    )
    return func, args, keywords


def length_of(owner: Any) -> int:
    """Of a container, without the method of a subclass, which may count as it likes, or raise."""
    return len(owner) if type(owner) is dict else int(base_of(owner).__len__(owner))


def keys_of(owner: Any) -> tuple[Any, ...]:
    """The keys of a dict in their order, without the methods of a subclass."""
    return tuple(base_of(owner).__iter__(owner))


def entries_among(owner: Any, names: frozenset[str]) -> frozenset[str]:
    """Which of these keys a dict has. Runs no code of a user's."""
    base = base_of(owner)
    if base.__len__(owner) > len(names):
        return frozenset(name for name in names if base.__contains__(owner, name))
    return names.intersection(key for key in base.__iter__(owner) if type(key) is str)


def base_of(owner: Any) -> Any:
    """The built-in container whose methods read an owner, without those of a subclass."""
    return _base_of(type(owner))  # type: ignore[arg-type]  # types are hashable


@functools.lru_cache(maxsize=4096)
def _base_of(kind: type) -> Any:
    bases = (OrderedDict, dict, list, tuple, set, frozenset, deque, MappingProxyType)
    return next(base for base in bases if issubclass(kind, base))


def module_of(kind: type) -> str:
    """The module of a class as it was made; empty where that is no name."""
    found = _MODULE_OF(kind)
    return found if isinstance(found, str) else ""


_MODULE_OF = type.__dict__["__module__"].__get__
"""Also of types written in C, which have no entry for it; without any code of a metaclass."""
name_of = type.__dict__["__name__"].__get__
"""As above."""


def text_of_key(key: Any) -> str:
    """How a path names an entry: by its key, or by the class of it."""
    return repr(key) if not is_odd(type(key)) and type(key) in SCALARS else name_of(type(key))


def entries_of(owner: Any) -> Any:
    """What the length of an owner counts: of a module that is a container, its children."""
    return owner._modules if issubclass(type(owner), torch.nn.Module) else owner


def _read_length(owner: Any, _: object) -> int:
    return length_of(entries_of(owner))


def is_filled(owner: Any) -> bool:
    """True for a container that has anything in it."""
    return length_of(owner) > 0


def read_cell(owner: CellType, _: str) -> Any:
    try:
        return owner.cell_contents
    except ValueError:  # a variable that is not assigned
        return MISSING


def read_global(owner: Mapping[str, Any], name: str) -> Any:
    return owner.get(name, MISSING)


def read_context(owner: ContextVar[Any] | OfThread, _: object) -> Any:
    return owner.get(MISSING)


def read_script(owner: Any, name: str) -> Any:
    """An attribute of a TorchScript module, which C++ keeps."""
    return owner.getattr(name) if owner.hasattr(name) else MISSING


def read_memo(owner: Any, name: int) -> Any:
    """A result that a ``functools`` cache of limited size remembers, by its id."""
    return next((found for found in gc.get_referents(owner) if id(found) == name), MISSING)


def _read_default(owner: FunctionType, name: str) -> Any:
    # Not through ``defaults_of``, because each look at each of them would list them all.
    code, defaults = owner.__code__, owner.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    if name not in positional:
        return (owner.__kwdefaults__ or {}).get(name, MISSING)
    from_end = len(positional) - positional.index(name)
    return defaults[-from_end] if from_end <= len(defaults) else MISSING


READ: Mapping[PlaceKind, Callable[[Any, Any], Any]] = {
    "attribute": read_attribute,
    "member": read_attribute,
    "parameter": _read_register("_parameters"),
    "buffer": _read_register("_buffers"),
    "submodule": _read_register("_modules"),
    "item": _read_item,
    "element": _read_element,
    "length": _read_length,
    "is_filled": lambda owner, _: is_filled(owner),
    "cell": read_cell,
    "global": read_global,
    "default": _read_default,
    "context": read_context,
    "contents": lambda owner, _: contents_of(owner),
    "keys": lambda owner, _: keys_of(owner),
    "entries": entries_among,
    "type": lambda owner, _: code_of(owner),
    "call": lambda owner, _: next(owner),
    "script": read_script,
    "memo": read_memo,
    "target": lambda owner, _: id(ReferenceType.__call__(owner)),
}
"""How each kind of place is read: asked of its owner and its name."""


class OfThread(NamedTuple):
    """A context variable as one thread has it, because others find other values."""

    variable: ContextVar[Any]
    thread: int
    value: Any

    def get(self, _: object) -> Any:
        """What it has or its default; asked in another thread, the value that is known."""
        if get_ident() != self.thread:
            return self.value
        try:
            return self.variable.get()
        except LookupError:
            return MISSING


def code_of(owner: Any) -> Any:
    """What may be replaced while an object stays: its class, the code of a function."""
    return owner.__code__ if type(owner) is FunctionType else type(owner)


def attributes_of(owner: Any) -> Mapping[str, Any]:
    """The ``__dict__`` of an object as it is, without any code of its class; empty if none."""
    kind: Any = type(owner)
    if is_odd(kind):
        return {}
    try:
        return _dict_getter(kind)(owner)
    except TypeError:  # Its class got other bases.
        found: Mapping[str, Any] = _HiddenDict.__get__(owner)
        return found


def own_dict(owner: Any) -> dict[str, Any] | None:
    """The ``__dict__`` that an object keeps; None where it has none, or makes it anew."""
    own = attributes_of(owner)
    return own if isinstance(own, dict) and own is attributes_of(owner) else None


def parts_in(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or object holds itself, with the step that leads to each."""
    kind = type(value)
    if issubclass(kind, dict):
        yield from ((f"[{text_of_key(key)}]", part) for key, part in dict.items(value))
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        parts = base_of(value).__iter__(value)
        yield from ((f"[{number}]", part) for number, part in enumerate(parts))
    if not issubclass(kind, type):
        yield from ((f".{name}", part) for name, part in attributes_of(value).items())
        for name in () if is_odd(kind) else slots_of(kind):  # type: ignore[arg-type]
            yield f".{name}", filled(read_member(kind, name), value)


@functools.lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that every object of a class has a fixed place for."""
    # Types written in C have members too, which are read-only or made anew by each read.
    return tuple(
        name
        for base in kind.__mro__
        if "__slots__" in base.__dict__
        for name, value in base.__dict__.items()
        if type(value) is MemberDescriptorType and read_member(kind, name) is value
    )


class _HiddenDict:
    """Gives the ``__dict__`` of an object whose class has another member of that name."""

    __get__ = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(
        ("PyObject_GenericGetDict", ctypes.pythonapi)
    )


_DICT_OFFSET = type.__dict__["__dictoffset__"].__get__


@functools.lru_cache(maxsize=4096)
def _dict_getter(kind: type) -> Callable[[Any], Mapping[str, Any]]:
    found = dict_descriptor(kind)
    return _no_dict if found is None else found.__get__


def _no_dict(_: object) -> dict[str, Any]:
    return {}


@functools.lru_cache(maxsize=4096)
def dict_descriptor(kind: type) -> Any:
    for base in kind.__mro__:
        found = base.__dict__.get("__dict__")
        if type(found) in (GetSetDescriptorType, MemberDescriptorType):
            return found
    return _HiddenDict if _DICT_OFFSET(kind) else None


def has_plain_dict(kind: type) -> bool:
    """False for a class that answers for ``__dict__`` as it likes, and where there is none."""
    found = next(
        (of.__dict__["__dict__"] for of in kind.__mro__ if "__dict__" in of.__dict__), None
    )
    return found is not None and found is dict_descriptor(kind)


def is_tensor(value: object) -> bool:
    # By type: ``isinstance`` asks a proxy for its class, and a lazy one may raise.
    return issubclass(type(value), torch.Tensor)


def filled(descriptor: Any, owner: object) -> Any:
    try:
        return descriptor.__get__(owner)
    except AttributeError:  # a member without a value
        return MISSING


def defaults_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(
        code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount],
        defaults,
        strict=True,
    )
    yield from (function.__kwdefaults__ or {}).items()


def is_foreign(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _FOREIGN

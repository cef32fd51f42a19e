"""What a callable reads and nothing compares between two steps: told, never passed over.

Most of what code of the standard library, NumPy and torch keeps cannot decide what a step
computes: functions, types, locks, streams, loggers that are written to. The rest is either data
that is read where it stands (``HELD_BY``), or it is listed here with its reason.
"""

from __future__ import annotations

import ctypes
import functools
import io
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from types import BuiltinMethodType, CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from graphrt.externals.places import is_foreign, module_of
from graphrt.source import Source


class Unwatched(NamedTuple):
    """One thing that a callable reads, and whose change no step notices.

    ``path``: As the callable names it: ``model.settings``, ``open()``.
    ``kind``: Its type.
    ``because``: Why nothing can be compared.
    ``source``: Where code names it; empty where that is unknown.
    """

    path: str
    kind: str
    because: str
    source: Source = Source()

    def __str__(self) -> str:
        where = f", at {self.source}" if self.source else ""
        return f"{self.path} ({self.kind}), because {self.because}{where}"


HELD_BY: Mapping[str, tuple[str, ...]] = {
    "types": (),
    "argparse": (),
    "collections": ("data", "maps"),
    "numpy": ("pyfunc", "otypes", "coeffs"),
    "numpy.polynomial": ("*",),
    "numpy.ma": ("_mask", "_fill_value"),
    "queue": ("queue",),
    "configparser": ("_sections", "_defaults", "_parser", "_name"),
    "string": ("template",),
    "threading": ("_flag", "_value"),
    "logging": ("level", "disabled", "parent", "manager", "disable"),
    "torch.distributions": ("*",),
}
"""Of modules whose objects hold what the user put into them: in which attributes, beside those
that code names; "*": in all."""

ASKED_OF_LOGGERS = frozenset(("level", "disabled", "isEnabledFor", "getEffectiveLevel"))
"""Where code names none of these, loggers only take what it writes."""

_FILES = "files are not compared"
READS_ELSEWHERE = {
    **dict.fromkeys(("open", "read_text", "read_bytes"), _FILES),
    **dict.fromkeys(("fromfile", "loadtxt", "genfromtxt"), _FILES),
    **dict.fromkeys(("exists", "is_file", "is_dir", "iterdir"), _FILES),
    **dict.fromkeys(("listdir", "scandir", "getsize", "getmtime", "glob", "rglob"), _FILES),
    "getcwd": "it is state of the process",
    **dict.fromkeys(("eval", "exec"), "what it names is in a string"),
    **dict.fromkeys(("import_module", "__import__"), "what it imports is computed"),
    "getcontext": "it is state of the interpreter",
    "__subclasses__": "which classes there are is state of the interpreter",
    "input": "it is read from the terminal",
    "globals": "which variables are taken from it is computed",
}
"""Functions whose results are no places."""

READS_OF_OTHERS = {
    **READS_ELSEWHERE,
    **dict.fromkeys(("load", "stat"), _FILES),
    **dict.fromkeys(
        ("get_num_threads", "geterr", "getrecursionlimit"), "it is state of the process"
    ),
    "getenv": "it has another name here",
}
"""Of the standard library, NumPy and torch alone, or under another name."""

FACTS_OF_TENSORS = {
    "data_ptr": "where a tensor lies is compared only if a graph reads the tensor",
    "_version": "how often a tensor was written is not compared",
}
"""What code may choose a memo by: the graph reads the memo, and not the tensor."""

_NO_DATA = (
    "abc _abc ast builtins code collections.abc concurrent contextlib copyreg dataclasses enum "
    "functools importlib _frozen_importlib _frozen_importlib_external inspect logging operator re "
    "reprlib _struct struct _thread threading traceback types typing _typing typing_extensions "
    "warnings weakref numpy torch triton graphrt"
)
_NO_DATA_IN = frozenset(_NO_DATA.split())
_DATA_IN = ("numpy.random", "numpy.lib.npyio", "torch.distributions")
"""Of what is in ``_NO_DATA``, what does hold data."""
ADVANCES = "each read advances it"
ELSEWHERE = "other threads and later steps find other objects in it"
_BECAUSE = {
    **dict.fromkeys(("_io", "io", "mmap"), _FILES),
    "sqlite3": "databases are not compared",
    **dict.fromkeys(("_random", "random", "numpy.random", "itertools"), ADVANCES),
    **dict.fromkeys(("contextvars", "_contextvars", "weakref", "_weakrefset"), ELSEWHERE),
}
_NOT_READABLE = "its contents cannot be read"
_OF_NO_CONTENTS = (BaseException, BuiltinMethodType, CodeType, FrameType, ModuleType)
_POINTERS = (
    ctypes.POINTER(ctypes.c_int).__mro__[1],
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_wchar_p,
)
_OF_C = ("method_descriptor", "getset_descriptor", "instancemethod")
_OF_PYTHON = ("__dict__", "__weakref__")
_CONTAINERS = (object, dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


def held_by(kind: type) -> tuple[str, ...] | None:
    """Attributes in which objects of a class hold data besides those that code names; "*": all.
    None if its module is not known."""
    module = module_of(kind)
    return HELD_BY.get(module if module in HELD_BY else ".".join(module.split(".")[:2]))


def points_elsewhere(value: Any) -> bool:
    """True for what has bytes of its own that are an address."""
    return issubclass(type(value), _POINTERS)


def why_unread(value: Any) -> str:
    """Why what a foreign object holds is not compared; empty if it holds nothing to compare."""
    if value is sys.stdout or value is sys.stderr or _is_written(value):
        return ""
    return _why_unread(type(value))  # type: ignore[arg-type]  # types are hashable


def _is_written(value: Any) -> bool:
    """True for a file that is open for writing alone."""
    below = getattr(value, "buffer", None) if type(value) is io.TextIOWrapper else value
    return type(below) is io.BufferedWriter


@functools.lru_cache(maxsize=4096)
def _why_unread(kind: type) -> str:
    module = module_of(kind)
    if issubclass(kind, _PROXIES):
        return "what it stands for is kept by others alone"
    if issubclass(kind, _POINTERS):
        return "what it points at is not compared"
    if module == "builtins":
        is_advanced = hasattr(kind, "__next__") or hasattr(kind, "send")
        return ADVANCES if is_advanced else ""
    if issubclass(kind, (type, *_OF_NO_CONTENTS)):
        return ""
    if not is_foreign(module):  # Its attributes are read, not what a base in C keeps.
        in_c = [base for base in kind.__mro__ if base not in _CONTAINERS and _is_in_c(base)]
        found = (
            _why_unread(base) if is_foreign(module_of(base)) else _NOT_READABLE for base in in_c
        )
        return next(filter(None, found), "")
    if module.partition(".")[0] in _NO_DATA_IN and not module.startswith(_DATA_IN):
        return ""
    top = module.partition(".")[0]
    if hasattr(kind, "__next__"):
        return ADVANCES
    return next((_BECAUSE[name] for name in (module, top) if name in _BECAUSE), _NOT_READABLE)


def _is_in_c(kind: type) -> bool:
    """True for a class that no statement of Python made: what it keeps is in no ``__dict__``."""
    members = (member for name, member in kind.__dict__.items() if name not in _OF_PYTHON)
    return any(
        type(member).__name__ in _OF_C and getattr(member, "__objclass__", kind) is kind
        for member in members
    )

"""What a piece of code reads by name, told from its bytecode. Nothing is run."""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from itertools import takewhile
from types import CodeType
from typing import Any, NamedTuple


class Names(NamedTuple):
    """What a piece of code reads by name, nested functions included. Nobody changes it later."""

    own: set[str]
    """Attributes of its first argument, of a method the object itself."""
    attributes: set[str]
    """Attributes of anything else, and strings given to ``getattr``."""
    globals: dict[str, None]
    strings: set[str | int]
    """And numbers: constants, which may be keys of a dict."""
    asked: set[tuple[str, str]]
    """A variable or attribute, and a string after it: ``getattr(self.a, "x")``, ``a.get("x")``;
    ``__class__`` of ``type(a)``, and ``__dict__`` of ``vars(a)`` and ``globals()``."""
    iterated: set[str]
    """Variables and attributes that are gone through, counted or tested for being empty."""
    computed: set[str]
    """Those that are asked for a key which is no constant, and that get no entries."""
    stored: set[str]
    """Those that get entries, or lose them."""
    guessed: set[tuple[str, str]]
    """Those of which an attribute is read whose name is no constant, and how it begins."""
    imports: dict[tuple[str, int], None]
    """What is imported when it runs, and by how many levels above its package."""
    asked_by: set[tuple[str, str]]
    """What is asked for a key that is no constant, and the variable or attribute that is the key;
    empty if it is computed."""
    lines: dict[str, int]
    """The first line that reads a global variable or an attribute."""
    assigned: set[tuple[str, ...]]
    """Attributes that are set: a global or closure variable and the names after it, the last of
    which is set; of what else has it, the last one alone."""


_LOADS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"))


_THROUGH = "len list tuple set dict sorted sum min max any all iter enumerate"
_GOES_THROUGH = frozenset(_THROUGH.split())
"""Built-in functions of which one argument is gone through or counted."""
_GOING_THROUGH = frozenset(
    ("GET_ITER", "UNARY_NOT", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
)
_WRITES_ALL = frozenset(("update", "copy", "clear", "pop", "setdefault"))
_GIVEN_BY = {"type": "__class__", "vars": "__dict__", "globals": "__dict__"}
_MAKING = frozenset(("BUILD_STRING", "BINARY_OP", "FORMAT_VALUE", "FORMAT_SIMPLE"))
_STORES = "setdefault update pop popitem clear append appendleft extend add"
_STORING = frozenset(_STORES.split())


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    steps = list(dis.get_instructions(code))
    line = code.co_firstlineno
    first = code.co_varnames[0] if code.co_argcount else None
    strings: set[str | int] = {item for item in code.co_consts if type(item) in (str, int)}
    found = Names(
        set(), set(), {}, strings, set(), set(), set(), set(), set(), {}, set(), {}, set()
    )
    aliases: dict[str, str] = {}
    previous: Any = None
    before = 0
    for index, step in enumerate(steps):
        name, value, last = step.opname, step.argval, steps[index - 1]
        line = getattr(step.positions, "lineno", None) or line
        if name in _LOADS or name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            found.lines.setdefault(value, line)
        if name in _LOADS:
            is_own = previous is not None and previous.opname.startswith("LOAD_FAST")
            loaded = previous.argval if is_own else None
            if isinstance(loaded, tuple):  # Later releases load two variables at once.
                loaded = loaded[-1]
            (found.own if is_own and loaded == first else found.attributes).add(value)
            if value == "__dict__":
                found.guessed.update(_guessed_after(steps, index, str(last.argval)))
            elif value == "getenv":
                found.asked_by.update(_keys_asked_by(steps, index, value))
            if value in _STORING:
                found.stored.add(str(last.argval))
            elif value == "get":
                of_call = [
                    s.opname
                    for s in takewhile(lambda s: "CALL" not in s.opname, steps[index + 1 :])
                ]
                if of_call[:1] != ["LOAD_CONST"] or not _MAKING.isdisjoint(of_call):
                    found.computed.add(str(last.argval))
                    found.asked_by.update(_keys_asked_by(steps, index, str(last.argval)))
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.globals[value] = None
            if value == "getenv":
                found.asked_by.update(_keys_asked_by(steps, index, value))
            elif value == "vars":
                found.guessed.update(_owner_of_vars(steps, index))
            if value == "getattr":
                found.guessed.update(_guessed_of(steps, index))
        elif name == "LOAD_CONST" and type(value) is str and previous is not None:
            found.asked.add((_asked_at(steps, before), value))
        elif name == "STORE_FAST" and last.opname.startswith("LOAD_"):
            aliases[value] = str(last.argval)
        elif name == "CONTAINS_OP":
            key = steps[_begin(steps, index - 1) - 1]
            if key.opname != "LOAD_CONST":
                found.computed.add(str(last.argval))
            elif type(key.argval) is str:
                found.asked.add((_asked_at(steps, index - 1), key.argval))
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            found.assigned.add(_chain_of(steps, index))
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            found.stored.add(_container_of(steps, index))
        elif (name == "BINARY_SUBSCR" or step.argrepr == "[]") and last.opname != "LOAD_CONST":
            if last.opname == "COPY":  # ``owner[key] += 1``
                found.stored.add(_container_of(steps, index - 2))
            else:
                container = _container_of(steps, index)
                found.computed.add(container)
                is_plain = last.opname.startswith("LOAD_") and type(last.argval) is str
                found.asked_by.add((container, last.argval if is_plain else ""))
        elif name == "IMPORT_NAME":
            found.imports[value, steps[index - 2].argval] = None
        elif name == "IMPORT_FROM":
            found.attributes.add(value)
        elif name == "MATCH_CLASS":
            found.attributes.update(last.argval)
        if _goes_through(steps, index):
            found.iterated.add(str((steps[index - 2] if last.opname == "TO_BOOL" else last).argval))
        if previous is not None and value in ("get", "items", "values", "keys"):
            if value != "get":
                found.iterated.add(str(previous.argval))
            continue  # What follows is asked of the dict.
        previous, before = step, index

    for told in (found.iterated, found.computed, found.stored):
        told.update([aliases[name] for name in told if name in aliases])
    found.guessed.update([(aliases[of], name) for of, name in found.guessed if of in aliases])
    found.computed.difference_update(found.stored)
    # What a function makes, fills and calls like something else is not that.
    num_arguments = code.co_argcount + code.co_kwonlyargcount
    made = set(code.co_varnames[num_arguments:]).difference(aliases, found.own, found.attributes)
    found.stored.difference_update(made.difference(found.globals))
    if {"getattr", "hasattr", "vars", "attrgetter"} & found.globals.keys() or (
        not {"__dict__", "attrgetter"}.isdisjoint(found.own | found.attributes)
    ):
        found.own.update(item for item in strings if type(item) is str and item.isidentifier())
        found.attributes.update(found.own)
    for inner in code.co_consts:
        if type(inner) is CodeType:
            nested = names_in(inner)
            merged: Any
            for merged, more in zip(found[1:], nested[1:], strict=True):
                merged.update(more)
            found.attributes.update(nested.own)
    return found


def _keys_asked_by(
    steps: Sequence[dis.Instruction], index: int, asked: str
) -> set[tuple[str, str]]:
    """See ``Names.asked_by``: of a function that is loaded here, and its first argument."""
    loads: list[dis.Instruction] = []
    for step in steps[index + 1 :]:
        if step.opname in _LOADS and loads:
            loads[-1] = step
        elif step.opname.startswith("LOAD_"):
            loads.append(step)
        elif step.opname not in ("PUSH_NULL", "PRECALL"):
            is_plain = bool(loads) and "CALL" in step.opname and len(loads) == step.arg
            if is_plain and loads[0].opname == "LOAD_CONST":
                return set()
            return {(asked, str(loads[0].argval) if is_plain else "")}
    return set()


def _owner_of_vars(steps: Sequence[dis.Instruction], index: int) -> set[tuple[str, str]]:
    """Whose attributes ``vars``, loaded here, gives under names that are no constants."""
    call = next((n for n in range(index, len(steps)) if steps[n].opname == "CALL"), 0)
    last = steps[call - 1 - (steps[call - 1].opname == "PRECALL")]
    return _guessed_after(steps, call, str(last.argval)) if call else set()


def _guessed_after(
    steps: Sequence[dis.Instruction], index: int, owner: str
) -> set[tuple[str, str]]:
    """What is asked of the ``__dict__`` of an owner that was just loaded."""
    key, after = steps[index + 1], steps[index + 2 : index + 3]
    is_plain = after and (after[0].opname == "BINARY_SUBSCR" or after[0].argrepr == "[]")
    if key.argval in _WRITES_ALL or (key.opname == "LOAD_CONST" and is_plain):
        return set()
    return {(owner, "")}


def _goes_through(steps: Sequence[dis.Instruction], index: int) -> bool:
    """True where a variable or attribute that was just loaded is gone through, counted or tested
    for being empty."""
    step, last = steps[index], steps[index - 1]
    if last.opname == "TO_BOOL":
        last = steps[index - 2]
    if not last.opname.startswith("LOAD_") or last.opname == "LOAD_CONST":
        return False
    if step.opname in ("PRECALL", "CALL") and step.arg == 1:
        called = steps[_begin(steps, index - 1) - 1]
        return called.opname == "LOAD_GLOBAL" and called.argval in _GOES_THROUGH
    is_test = "JUMP" in step.opname and step.opname.endswith(("_TRUE", "_FALSE"))
    return is_test or step.opname in _GOING_THROUGH


def _guessed_of(steps: Sequence[dis.Instruction], index: int) -> set[tuple[str, str]]:
    """What ``getattr``, loaded here, is asked of, and how the names begin; empty for a constant."""
    pushed, owner, end, is_plain = 0, "", 0, True
    key: list[dis.Instruction] = []
    for step in steps[index + 1 :]:
        pushed += dis.stack_effect(step.opcode, step.arg, jump=False)
        if "JUMP" in step.opname:
            is_plain = False
        if pushed < 1 or not is_plain:
            break
        if pushed == 1:  # So far it loads the owner.
            owner, key, end = str(step.argval), [], 0
        else:
            if not key and type(step.argval) is tuple and step.opname != "LOAD_CONST":
                owner = str(step.argval[0])  # Later releases load both variables at once.
            key.append(step)
            end = len(key) if pushed == 2 else end
    name = key[:end]
    if not name or (is_plain and len(name) == 1 and name[0].opname == "LOAD_CONST"):
        return set()
    return {(owner, _beginning_of(name))}


def _beginning_of(name: Sequence[dis.Instruction]) -> str:
    """What every computed name begins with, as far as that is plain: ``f"layer{number}"``."""
    first, rest = name[0], name[1:]
    is_joined = all(
        step.opname.startswith(("LOAD_", "FORMAT_"))
        or step.opname in ("BUILD_STRING", "PRECALL", "CALL")
        or step.argrepr in ("+", "%")
        for step in rest
    )
    if first.opname != "LOAD_CONST" or not rest or not is_joined or rest[0].opname in _LOADS:
        return ""
    return "".join(takewhile(lambda c: c.isalnum() or c == "_", str(first.argval)))


def _asked_at(steps: Sequence[dis.Instruction], index: int) -> str:
    """What is asked for a string: a variable or attribute that was just loaded; the class of
    something, or its attributes."""
    asked = steps[index]
    if asked.opname == "CALL":
        called = steps[_begin(steps, index)]
        return _GIVEN_BY.get(called.argval, "") if called.opname == "LOAD_GLOBAL" else ""
    return str(asked.argval)


def _chain_of(steps: Sequence[dis.Instruction], index: int) -> tuple[str, ...]:
    """See ``Names.assigned``: of the attribute that an instruction sets."""
    names = [str(steps[index].argval)]
    while index and steps[index - 1].opname in _LOADS:
        index -= 1
        names.append(str(steps[index].argval))
    root = steps[index - 1]
    if root.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
        return (names[0],)
    return (str(root.argval), *reversed(names))


def _begin(steps: Sequence[dis.Instruction], index: int) -> int:
    """Where the expression begins whose last instruction is this one."""
    pushed = 0
    while True:
        pushed += dis.stack_effect(steps[index].opcode, steps[index].arg, jump=False)
        if pushed > 0 or not index:
            return index
        index -= 1


def _container_of(steps: Sequence[dis.Instruction], index: int) -> str:
    """The variable or attribute whose entry an instruction reads or stores, the key before it."""
    first = _begin(steps, index - 1)
    loaded = steps[first].argval
    # Later releases load both variables at once; a constant tuple is a key.
    are_both = type(loaded) is tuple and steps[first].opname != "LOAD_CONST"
    return str(loaded[0] if are_both else steps[first - 1].argval)

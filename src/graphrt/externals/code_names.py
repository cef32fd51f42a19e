"""What a piece of code reads by name, told from its bytecode. Nothing is run.

A stack machine goes through the instructions once, in their order. A place of its stack holds
everything that may stand there, so that both branches count where two meet. After an instruction
that it does not know, any of the values may stand anywhere.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from types import CodeType
from typing import Any, NamedTuple, TypeAlias


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
    ``__class__`` of ``type(a)``, and ``__dict__`` of ``vars(a)`` and ``globals()``; empty, which
    is the callable itself, of what a call returns."""
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
    tried: set[tuple[str, object]]
    """A variable or attribute, and what it may lack: an attribute, because the code that reads it
    catches errors; a number or tuple that may be a key."""
    called: set[str]
    """Variables and attributes that are called: of a class, this makes an object."""
    rebound: set[str]
    """Variables of modules and closures that are assigned."""


class _Value(NamedTuple):
    """What may stand in a place of the stack."""

    name: str = "..."
    """Its variable or last attribute; of what has none, a word for reports."""
    kind: str = "made"
    """Or "local", "variable" (of a module or closure), "attribute", "constant", "null"."""
    of: _Values = ()
    """Of what it is an attribute."""
    text: object = None
    """The constant, or what a string that is made begins with."""
    at: int = -1
    """Where it is read."""


_Values: TypeAlias = tuple[_Value, ...]

_NAMED = ("local", "variable", "attribute")
_BY_TEXT = frozenset(("__dict__", "attrgetter", "methodcaller", "__getattr__", "__getattribute__"))
"""What reads attributes whose names are texts."""
_UNKNOWN = (_Value(),)
_RETURNED = _Value("...(...)")
_NULL = (_Value(kind="null"),)
"""Beside a function that is no method."""
_THROUGH = (
    "len bool list tuple set frozenset dict sorted reversed sum min max any all iter enumerate zip"
)
_GOES_THROUGH = frozenset((*_THROUGH.split(), "map", "filter"))
"""Built-in functions that go through their arguments, or count them."""
_VIEWS = ("items", "values", "keys")
_GIVES_ALL = ("getmembers", "asdict", "astuple", "dir")
"""Functions that give all attributes of what they are given."""
_WRITES_ALL = ("update", "copy", "clear", "pop", "setdefault")
_GIVEN_BY = {"type": "__class__", "vars": "__dict__", "globals": "__dict__"}
_STORES = "setdefault update pop popitem clear append appendleft extend add"
_STORING = frozenset(_STORES.split())


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    machine = _Machine(code)
    machine.run()
    found = machine.found
    if {"getattr", "hasattr", "vars", "attrgetter", "methodcaller"} & found.globals.keys() or (
        not _BY_TEXT.isdisjoint(found.own | found.attributes | found.strings)
    ):
        chains = (text.split(".") for text in found.strings if type(text) is str)
        found.own.update(n for chain in chains if all(map(str.isidentifier, chain)) for n in chain)
        found.attributes.update(found.own)
    for inner in code.co_consts:
        if type(inner) is CodeType:
            nested = names_in(inner)
            merged: Any
            for merged, more in zip(found[1:], nested[1:], strict=True):
                merged.update(more)
            found.attributes.update(nested.own)
    return found


class _Machine:
    """Goes through the instructions of one code object."""

    def __init__(self, code: CodeType) -> None:
        strings: set[str | int] = {item for item in code.co_consts if type(item) in (str, int)}
        self.found = Names(
            *(set(), set(), {}, strings, set(), set(), set(), set(), set(), {}, set(), {}, set()),
            tried=set(),
            called=set(),
            rebound=set(),
        )
        self._catches = _catches(code)
        self._code = code
        self._first = code.co_varnames[0] if code.co_argcount else None
        answers = code.co_name in ("__getattr__", "__getattribute__") and code.co_argcount == 2
        self._asked_name = code.co_varnames[1] if answers else None
        """The argument that is a name which other code asks for."""
        self._line = code.co_firstlineno
        self._stack: list[_Values] = []
        self._aliases: dict[str, list[_Value]] = {}
        """What is assigned to each local variable, the last at the end."""
        self._lookups: dict[int, _Value] = {}
        """Attributes ``get`` and ``__dict__``, and ``getenv``, by where they are read, of which no
        constant key was asked so far."""

    def run(self) -> None:
        arriving: dict[int, list[_Values]] = {}
        """The stack that jumps bring to an instruction further on."""
        is_reached = True
        for step in dis.get_instructions(self._code):
            # A handler of exceptions begins with what the instructions before it left: that is as
            # unknown as what it finds.
            came = arriving.pop(step.offset, None)
            if came is not None:
                self._stack = _joined(came, self._stack) if is_reached else came
            if step.opcode in _JUMPS and step.argval > step.offset:
                there = _moved(self._stack, dis.stack_effect(step.opcode, step.arg, jump=True))
                other = arriving.get(step.argval)
                arriving[step.argval] = there if other is None else _joined(other, there)
            _EFFECTS.get(step.opname, _Machine._anything)(self, step)
            is_reached = step.opname not in _LEAVES
        self._finish()

    def _finish(self) -> None:
        """Follow what local variables are assigned, and forget what is only made and filled."""
        code, found, aliases = self._code, self.found, self._aliases
        for lookup in self._lookups.values():
            self._note_lookup(lookup, _UNKNOWN)
        for container, key in list(found.asked_by):
            texts = (value.text for value in aliases.get(key, ()))
            found.asked.update((container, text) for text in texts if type(text) is str)
        for told in (found.iterated, found.computed, found.called):
            told.update([value.name for name in told for value in aliases.get(name, ())])
        found.stored.update([aliases[name][-1].name for name in found.stored if name in aliases])
        found.guessed.update(
            [(value.name, begin) for of, begin in found.guessed for value in aliases.get(of, ())]
        )
        found.computed.difference_update(found.stored)
        # What a function makes, fills and calls like something else is not that.
        num_arguments = code.co_argcount + code.co_kwonlyargcount
        made = set(code.co_varnames[num_arguments:]).difference(
            aliases, found.own, found.attributes, found.globals
        )
        found.stored.difference_update(made)

    # -- the stack

    def _push(self, *values: _Value) -> None:
        self._stack.append(values)

    def _pop(self, count: int) -> list[_Values]:
        """The last ``count``, the lowest first."""
        stack = self._stack
        if count > len(stack):
            stack[:0] = [_UNKNOWN] * (count - len(stack))
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return taken

    def _push_read(self, step: dis.Instruction, num_popped: int, value: _Value) -> None:
        """A value that was read, with the empty place that some instructions put beside it."""
        self._note_line(step, value.name)
        if _effect(step) + num_popped > 1:
            self._stack.append(_NULL)
        self._push(value)

    # -- what instructions do

    def _keep(self, step: dis.Instruction) -> None:
        """The stack stays, or loses its last, or gets more of what nobody names."""
        self._stack = _moved(self._stack, _effect(step))

    def _rebind(self, step: dis.Instruction) -> None:
        self.found.rebound.add(step.argval)
        self._keep(step)

    def _ignore(self, _: dis.Instruction) -> None:
        """The stack stays, whatever a release counts for it."""

    def _make(self, step: dis.Instruction) -> None:
        """Something is made of the last ones."""
        self._pop(1 - _effect(step))
        self._push(*_UNKNOWN)

    def _anything(self, step: dis.Instruction) -> None:
        """An instruction of a later release, perhaps. It may read what it names, go through what is
        on the stack, set attributes of it, ask it for any key, and call it."""
        found = self.found
        names = [name for name in _names(step) if type(name) is str]
        values = [value for values in self._stack for value in values]
        values += [owner for value in values for owner in value.of]
        values += [_Value(_GIVEN_BY[value.name]) for value in values if value.name in _GIVEN_BY]
        values += [_Value(name, "variable", text=name) for name in names]
        every = (*dict.fromkeys(values), _RETURNED)
        texts = [value.text for value in every]
        for name in names:
            found.attributes.add(name)
            found.globals[name] = None
            found.assigned.update(_chains(_Value(name, "attribute", every)))
            found.imports.update(((name, level), None) for level in texts if type(level) is int)
            self._note_line(step, name)
        self._note_asked(every, texts)
        found.iterated.update(_named(every))
        found.called.update(_named(every))
        if "__dict__" in names or any(value.name in _GIVES_ALL for value in every):
            found.guessed.update((value.name, "") for value in every)
        self._note_key(every, _UNKNOWN)
        self._hand_over([(value,) for value in every])
        self._stack = [every] * (len(self._stack) + _effect(step))

    def _note_line(self, step: dis.Instruction, name: str) -> None:
        self._line = getattr(step.positions, "lineno", None) or self._line
        self.found.lines.setdefault(name, self._line)

    def _copy(self, step: dis.Instruction) -> None:
        taken = self._pop(_argument(step))
        self._stack += [*taken, taken[0]]

    def _swap(self, step: dis.Instruction) -> None:
        first, *between, last = self._pop(_argument(step))
        self._stack += [last, *between, first]

    def _null(self, _: dis.Instruction) -> None:
        self._stack.append(_NULL)

    def _local(self, step: dis.Instruction) -> None:
        for name in _names(step):
            self._push(_Value(name, "local"))

    def _store_local(self, step: dis.Instruction) -> None:
        for number, name in enumerate(_names(step)):
            if number and step.opname.endswith("LOAD_FAST"):
                self._push(_Value(name, "local"))
                break
            if name == self._asked_name:  # Another one, from here on.
                self._asked_name = None
            for value in self._pop(1)[0]:
                if value.kind in (*_NAMED, "constant") and value.name != name:
                    self._aliases.setdefault(name, []).append(value)

    def _variable(self, step: dis.Instruction) -> None:
        name = step.argval
        num_popped = len(self._pop(step.opname.startswith("LOAD_FROM")))
        value = _Value(name, "variable", at=step.offset)
        if not step.opname.endswith("DEREF"):
            self.found.globals[name] = None
            if name == "getenv":
                self._lookups[step.offset] = value
        self._push_read(step, num_popped, value)

    def _constant(self, step: dis.Instruction) -> None:
        """It may be asked of what stands below it."""
        text = step.argval
        below = next((each for each in reversed(self._stack) if each is not _NULL), _UNKNOWN)
        for value in below:
            is_of_dict = value.kind == "attribute" and value.name in ("get", *_VIEWS)
            self._note_asked(value.of if is_of_dict else (value,), (text,))
        if type(text) is int:  # Later releases keep small ones in instructions.
            self.found.strings.add(text)
        self._push(_Value(kind="constant", text=text))

    def _attribute(self, step: dis.Instruction) -> None:
        found, name = self.found, step.argval
        num_popped = 3 if step.opname.startswith("LOAD_SUPER") else 1
        owner, *of_super = self._pop(num_popped)
        owner = _UNKNOWN if of_super else owner
        is_first = [value.kind == "local" and value.name == self._first for value in owner]
        if any(is_first):
            found.own.add(name)
        if not all(is_first):
            found.attributes.add(name)
        if self._catches:
            found.tried.update((of, name) for of in _named(owner))
        value = _Value(name, "attribute", owner, at=step.offset)
        if name in _STORING:
            found.stored.update(_named(owner))
        elif name in _VIEWS:
            found.iterated.update(_named(owner))
        elif name in ("get", "getenv", "__dict__"):
            self._lookups[step.offset] = value
        if name in _WRITES_ALL:
            self._settle(owner)
        self._push_read(step, num_popped, value)

    def _settle(self, lookup: _Values) -> None:
        """It was asked for a constant, or for nothing."""
        for value in lookup:
            self._lookups.pop(value.at, None)

    def _note_lookup(self, lookup: _Value, key: _Values) -> None:
        """A key that is no constant is asked by ``get``, ``getenv`` or of a ``__dict__``."""
        if lookup.name == "__dict__":
            self.found.guessed.update((value.name, "") for value in lookup.of)
        else:
            self._note_key(lookup.of if lookup.name == "get" else (lookup,), key)

    def _note_key(self, container: _Values, key: _Values) -> None:
        if not _is_constant(key):
            keys = {value.name if value.kind in _NAMED else "" for value in key}
            for name in _named(container):
                self.found.computed.add(name)
                self.found.asked_by.update((name, each) for each in keys)

    def _note_asked(self, container: _Values, texts: Iterable[object]) -> None:
        names = {value.name for value in container}
        if any(name.endswith("(...)") for name in names):
            names.add("")
        for text in texts:
            if type(text) is str:
                self.found.asked.update((name, text) for name in names)
            elif type(text) in (int, tuple):
                self.found.tried.update((name, text) for name in names)

    def _call(self, step: dis.Instruction) -> None:
        is_spread = step.opname == "CALL_FUNCTION_EX"
        size = 1 - _effect(step) if is_spread else _argument(step) + 2 + (step.opname == "CALL_KW")
        first, second, *args = self._pop(size)
        callee = second if first is _NULL else first
        self.found.called.update(_named(callee))
        result = []
        for value in callee:
            made = _Value(f"{value.name}(...)", at=step.offset)
            if value.kind == "variable":
                made = self._call_of_function(value, args, made)
            if value.name in _GIVES_ALL:
                self.found.guessed.update((of.name, "") for given in args[:1] for of in given)
            if value.at in self._lookups and value.name != "__dict__":
                self._settle((value,))
                self._note_lookup(value, args[0] if args and not is_spread else _UNKNOWN)
                if args and not is_spread and _is_constant(args[0]):
                    self._settle(value.of)
            result.append(made)
        self._hand_over(args)
        self._push(*result)

    def _hand_over(self, given: list[_Values]) -> None:
        """Who is given ``getattr`` or ``vars`` may call it for what is given beside it."""
        for values in given:
            if not {"getattr", "vars"}.isdisjoint(_named(values)):
                others = (value for other in given if other is not values for value in other)
                self.found.guessed.update((value.name, "") for value in others)

    def _call_of_function(self, callee: _Value, args: list[_Values], made: _Value) -> _Value:
        """What a built-in function reads of its arguments, and its result."""
        if callee.name in _GOES_THROUGH:
            self.found.iterated.update(name for given in args for name in _named(given))
        elif callee.name in _GIVEN_BY:
            made = made._replace(name=_GIVEN_BY[callee.name])
            if callee.name == "vars" and args:
                made = made._replace(of=args[0])
                self._lookups[made.at] = made
        elif callee.name == "getattr":
            owner, key = (*args, _UNKNOWN, _UNKNOWN)[:2]
            if not _is_constant(key):
                self.found.guessed.update(
                    (o.name, _begin(k))
                    for o in owner
                    for k in key
                    if o.kind in ("attribute", "variable")
                    or (k.kind, k.name) != ("local", self._asked_name)
                )
        return made

    def _operate(self, step: dis.Instruction) -> None:
        if step.argrepr == "[]":
            self._entry(step)
        elif step.argrepr in ("+", "%", "+="):
            self._join(step)
        else:
            self._make(step)

    def _join(self, step: dis.Instruction) -> None:
        """A string is made, which begins as its first part does."""
        first = self._pop(1 - _effect(step))[0]
        self._push(*(_Value(text=_begin(value)) for value in first))

    def _entry(self, step: dis.Instruction) -> None:
        container, *key = self._pop(3 if step.opname == "BINARY_SLICE" else 2)
        if len(key) == 1 and _is_constant(key[0]):
            self._settle(container)
        else:
            self._note_key(container, key[0] if len(key) == 1 else _UNKNOWN)
        self._push(*(_Value(f"{value.name}[...]") for value in container))

    def _store_entry(self, step: dis.Instruction) -> None:
        taken = self._pop(-_effect(step))
        self.found.stored.update(_named(taken[0 if len(taken) == 2 else 1]))

    def _contains(self, _: dis.Instruction) -> None:
        key, container = self._pop(2)
        self._note_key(container, key)
        texts = [value.text for value in key if value.kind != "made"]
        self._note_asked(container, texts)
        self._push(*_UNKNOWN)

    def _assign_attribute(self, step: dis.Instruction) -> None:
        owner = self._pop(-_effect(step))[-1]
        self.found.assigned.update(_chains(_Value(step.argval, "attribute", owner)))

    def _through(self, step: dis.Instruction) -> None:
        """The last one is gone through, counted or tested for being empty."""
        self.found.iterated.update(_named(self._pop(1)[0]))
        self._stack += [_UNKNOWN] * (_effect(step) + 1)

    def _import(self, step: dis.Instruction) -> None:
        level = self._pop(2)[0][0].text
        self.found.imports[step.argval, level if type(level) is int else 0] = None
        self._push(*_UNKNOWN)

    def _import_from(self, step: dis.Instruction) -> None:
        self.found.attributes.add(step.argval)
        self._push(*_UNKNOWN)

    def _match_class(self, _: dis.Instruction) -> None:
        for value in self._pop(3)[-1]:
            if type(value.text) is tuple:
                self.found.attributes.update(value.text)
        self._push(*_UNKNOWN)


def _effect(step: dis.Instruction) -> int:
    return dis.stack_effect(step.opcode, step.arg, jump=False)


def _argument(step: dis.Instruction) -> int:
    return step.arg or 0


def _names(step: dis.Instruction) -> tuple[str, ...]:
    """One, or the two of instructions of later releases."""
    names: Any = step.argval
    return names if type(names) is tuple else (names,)


def _moved(stack: list[_Values], effect: int) -> list[_Values]:
    """Without the last ones, or with more of what nobody names."""
    return [*stack[: len(stack) + min(effect, 0)], *[_UNKNOWN] * effect]


def _joined(one: list[_Values], other: list[_Values]) -> list[_Values]:
    """Everything that may stand in each place, counted from the last."""
    size = max(len(one), len(other))
    one, other = ([_UNKNOWN] * (size - len(each)) + each for each in (one, other))
    return [a if a is b else tuple(dict.fromkeys(a + b)) for a, b in zip(one, other, strict=True)]


def _named(values: Iterable[_Value]) -> list[str]:
    return [value.name for value in values if value.kind in _NAMED]


def _catches(code: CodeType) -> bool:
    """True if it goes on after an error: handlers are more than those that each ``with`` has."""
    handlers, of_with = map(code.co_code[::2].count, _HANDLERS)
    return handlers > of_with or "suppress" in code.co_names


def _is_constant(key: _Values) -> bool:
    return all(value.kind == "constant" for value in key)


def _begin(value: _Value) -> str:
    """What every name that is made of this begins with: of ``f"layer{number}"``, ``layer``."""
    text = value.text if type(value.text) is str else ""
    return "".join(takewhile(lambda letter: letter.isalnum() or letter == "_", text))


def _chains(value: _Value) -> Iterator[tuple[str, ...]]:
    """See ``Names.assigned``: of an attribute that is set."""
    for owner in value.of:
        if owner.kind == "variable":
            yield owner.name, value.name
        elif owner.kind == "attribute":
            for chain in _chains(owner):
                yield (*chain, value.name) if len(chain) > 1 else (value.name,)
        else:
            yield (value.name,)


_EFFECTS: dict[str, Callable[[_Machine, dis.Instruction], None]] = {}
"""What each instruction of Python 3.11 to 3.14 does, by its name."""
for _does, _opnames in (
    (
        _Machine._keep,
        "ASYNC_GEN_WRAP BEFORE_ASYNC_WITH BEFORE_WITH CACHE CLEANUP_THROW COPY_FREE_VARS "
        "DELETE_DEREF DELETE_FAST DELETE_GLOBAL DELETE_NAME END_ASYNC_FOR END_FOR END_SEND "
        "ENTER_EXECUTOR EXIT_INIT_CHECK EXTENDED_ARG FOR_ITER GET_ANEXT GET_LEN IMPORT_STAR "
        "INTERPRETER_EXIT JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD KW_NAMES "
        "LIST_APPEND LOAD_ASSERTION_ERROR LOAD_BUILD_CLASS LOAD_CLOSURE LOAD_COMMON_CONSTANT "
        "LOAD_LOCALS LOAD_SPECIAL MAKE_CELL MAP_ADD MATCH_MAPPING MATCH_SEQUENCE NOP NOT_TAKEN "
        "POP_EXCEPT POP_ITER POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE "
        "POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_IF_NONE "
        "POP_JUMP_IF_NOT_NONE POP_TOP PRINT_EXPR PUSH_EXC_INFO RAISE_VARARGS RERAISE RESUME "
        "RETURN_CONST RETURN_GENERATOR RETURN_VALUE SEND SETUP_ANNOTATIONS SET_ADD "
        "STORE_NAME WITH_EXCEPT_START YIELD_VALUE",
    ),
    (
        _Machine._make,
        "BUILD_CONST_KEY_MAP BUILD_INTERPOLATION BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE "
        "BUILD_TEMPLATE BUILD_TUPLE CALL_INTRINSIC_1 CALL_INTRINSIC_2 CHECK_EG_MATCH "
        "CHECK_EXC_MATCH COMPARE_OP CONVERT_VALUE FORMAT_SIMPLE FORMAT_VALUE FORMAT_WITH_SPEC "
        "GET_AITER GET_AWAITABLE IS_OP LIST_TO_TUPLE MAKE_FUNCTION MATCH_KEYS PREP_RERAISE_STAR "
        "SET_FUNCTION_ATTRIBUTE UNARY_INVERT UNARY_NEGATIVE UNARY_POSITIVE",
    ),
    (
        _Machine._through,
        "DICT_MERGE DICT_UPDATE GET_ITER GET_YIELD_FROM_ITER JUMP_IF_FALSE_OR_POP "
        "JUMP_IF_TRUE_OR_POP LIST_EXTEND POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_TRUE "
        "POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE "
        "SET_UPDATE TO_BOOL UNARY_NOT UNPACK_EX UNPACK_SEQUENCE",
    ),
    (
        _Machine._local,
        "LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW "
        "LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST",
    ),
    (_Machine._store_local, "STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST"),
    (
        _Machine._variable,
        "LOAD_CLASSDEREF LOAD_DEREF LOAD_FROM_DICT_OR_DEREF LOAD_FROM_DICT_OR_GLOBALS "
        "LOAD_GLOBAL LOAD_NAME",
    ),
    (_Machine._attribute, "LOAD_ATTR LOAD_METHOD LOAD_SUPER_ATTR LOAD_SUPER_METHOD"),
    (_Machine._constant, "LOAD_CONST LOAD_SMALL_INT"),
    (_Machine._call, "CALL CALL_FUNCTION_EX CALL_KW"),
    (_Machine._operate, "BINARY_OP"),
    (_Machine._entry, "BINARY_SLICE BINARY_SUBSCR"),
    (_Machine._store_entry, "DELETE_SUBSCR STORE_SLICE STORE_SUBSCR"),
    (_Machine._rebind, "STORE_DEREF STORE_GLOBAL"),
    (_Machine._assign_attribute, "DELETE_ATTR STORE_ATTR"),
    (_Machine._join, "BUILD_STRING"),
    (_Machine._contains, "CONTAINS_OP"),
    (_Machine._copy, "COPY"),
    (_Machine._swap, "SWAP"),
    (_Machine._null, "PUSH_NULL"),
    (_Machine._ignore, "PRECALL"),
    (_Machine._import, "IMPORT_NAME"),
    (_Machine._import_from, "IMPORT_FROM"),
    (_Machine._match_class, "MATCH_CLASS"),
):
    _EFFECTS.update(dict.fromkeys(_opnames.split(), _does))

_HANDLERS = dis.opmap["PUSH_EXC_INFO"], dis.opmap["WITH_EXCEPT_START"]
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ENDS = "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT RETURN_VALUE RETURN_CONST"
_LEAVES = frozenset((*_ENDS.split(), "RAISE_VARARGS", "RERAISE"))
"""Instructions after which the next one does not run."""

"""What code reads by name, told from its bytecode, whatever release of Python compiled it."""

from __future__ import annotations

import argparse
import dis
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType

import pytest
import torch

from graphrt.externals import code_names
from graphrt.externals.code_names import Names, names_in

MODULES = (argparse, inspect, json.decoder, textwrap, torch.nn.modules.module, torch.nn.init)


def code_of(text: str) -> CodeType:
    """Of the method whose body ``text`` is."""
    body = textwrap.indent(textwrap.dedent(text), "    ")
    source = f"def method(self, x, key, *args, **options):\n{body}\n"
    module = compile(source, "<test>", "exec", dont_inherit=True)
    return next(code for code in module.co_consts if isinstance(code, CodeType))


def names_of(text: str) -> Names:
    return names_in(code_of(text))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from codes_in(inner)


@pytest.fixture(scope="module")
def codes() -> list[CodeType]:
    """Every function of some modules, of all kinds of statements."""
    sources = [(module, inspect.getsource(module)) for module in MODULES]
    compiled = [compile(text, module.__name__, "exec") for module, text in sources]
    return [code for module in compiled for code in codes_in(module)]


@pytest.fixture(scope="module")
def users(codes: list[CodeType]) -> dict[str, list[CodeType]]:
    """By instruction, some functions that have it."""
    found: dict[str, list[CodeType]] = {}
    for code in codes:
        for opname in {step.opname for step in dis.get_instructions(code)}:
            found.setdefault(opname, []).append(code)
    return {opname: having[:: max(len(having) // 8, 1)] for opname, having in found.items()}


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("return self.a.b", "own", {"a"}),
        ("return self.a.b", "attributes", {"b"}),
        ("self.count += 1", "own", {"count"}),
        ("return (self if x else key).a", "own", {"a"}),
        ("return (self if x else key).a", "attributes", {"a"}),
        ("return super().forward", "attributes", {"forward"}),
        ("from m import name", "attributes", {"name"}),
        ("match x:\n  case Point(left=1): pass", "attributes", {"left"}),
        ("return first(second)", "globals", {"first", "second"}),
        ("import a.b", "imports", {("a.b", 0)}),
        # Asked for a constant.
        ("return x['k']", "asked", {("x", "k")}),
        ("return x.get('k', 'other')", "asked", {("x", "k")}),
        ("return 'k' in self.table", "asked", {("table", "k")}),
        ("return getattr(x, 'k')", "asked", {("x", "k")}),
        ("return type(x).get('k')", "asked", {("__class__", "k")}),
        ("return vars(x)['k']", "asked", {("__dict__", "k")}),
        ("return getattr(f(x), 'k', None)", "asked", {("", "k"), ("f(...)", "k")}),
        ("return os.environ['K'], os.getenv('L')", "asked", {("environ", "K"), ("getenv", "L")}),
        ("name = 'k'\nfor _ in x: pass\nreturn self.table[name]", "asked", {("table", "k")}),
        # Asked for another key.
        ("return self.table[key]", "computed", {"table"}),
        ("return self.table[key + 1:]", "computed", {"table"}),
        ("return self.table[key, 1]", "computed", {"table"}),
        ("return key in self.table", "computed", {"table"}),
        ("return self.table.get(key)", "computed", {"table"}),
        ("get = self.table.get\nreturn get(key)", "computed", {"table"}),
        ("t = self.table\nreturn t[key]", "computed", {"t", "table"}),
        ("return (self.one if x else self.two)[key]", "computed", {"one", "two"}),
        ("return (self.one or self.two)[key]", "computed", {"one", "two"}),
        ("t = self.one\nif x: t = self.two\nreturn t[key]", "computed", {"t", "one", "two"}),
        ("return self.table['a'], x.get('b')", "computed", set()),
        ("if key not in self.memo: self.memo[key] = x\nreturn self.memo[key]", "computed", set()),
        ("return os.getenv(key)", "asked_by", {("getenv", "key")}),
        ("return os.environ.get(self.name, 1)", "asked_by", {("environ", "name")}),
        ("return os.environ[key.lower()]", "asked_by", {("environ", "")}),
        ("return list(map(os.getenv, args))", "asked_by", {("getenv", "")}),
        # Gone through, counted or tested.
        ("for _ in self.rows: pass", "iterated", {"rows"}),
        ("return [r for r in self.rows]", "iterated", {"rows"}),
        ("return len(self.rows)", "iterated", {"rows"}),
        ("return sorted(self.rows, key=abs)", "iterated", {"rows"}),
        ("if self.rows: pass", "iterated", {"rows"}),
        ("return not self.rows", "iterated", {"rows"}),
        ("return self.rows or x", "iterated", {"rows"}),
        ("return self.rows.items()", "iterated", {"rows"}),
        ("return [*self.rows], {**self.more}, f(*self.others)", "iterated", {"rows", "more"}),
        ("a, b = self.rows", "iterated", {"rows"}),
        # Given entries.
        ("self.table[key] = x", "stored", {"table"}),
        ("self.table[key] += x", "stored", {"table"}),
        ("self.table[:key] = x", "stored", {"table"}),
        ("del self.table[key]", "stored", {"table"}),
        ("self.rows.append(x)", "stored", {"rows"}),
        ("made = {}\nmade[key] = x\nreturn made", "stored", set()),
        # Attributes under computed names.
        ("return getattr(self, key)", "guessed", {("self", "")}),
        ("return getattr(self.block, f'layer{key}')", "guessed", {("block", "layer")}),
        ("return getattr(self, 'layer_' + key)", "guessed", {("self", "layer_")}),
        ("return getattr(self, 'layer%d' % key)", "guessed", {("self", "layer")}),
        ("b = self.block\nreturn getattr(b, key)", "guessed", {("b", ""), ("block", "")}),
        ("return list(map(getattr, x, args))", "guessed", {("x", ""), ("args", "")}),
        ("return getattr(self, 'a'), getattr(x, 'a' if key else 'b')", "guessed", set()),
        ("return vars(self)[key]", "guessed", {("self", "")}),
        ("return self.__dict__", "guessed", {("self", "")}),
        ("return self.__dict__['a'], vars(x)['b']", "guessed", set()),
        ("self.__dict__.update(x)", "guessed", set()),
        # Attributes that are set.
        ("self.a = x", "assigned", {("a",)}),
        ("mod.sub.a = x", "assigned", {("mod", "sub", "a")}),
        ("mod.sub.a |= x", "assigned", {("mod", "sub", "a")}),
        ("del mod.a", "assigned", {("mod", "a")}),
    ],
)
def test_names_of_code_are_told(text: str, field: str, expected: set[object]) -> None:
    found = set(getattr(names_of(text), field))
    if field in ("asked", "globals", "iterated", "attributes", "own"):
        assert expected <= found, found
    else:
        assert expected == {name for name in found if "..." not in str(name)}


def test_names_of_nested_functions_are_told() -> None:
    found = names_of("def inner(y):\n  return y.a, self.b, [z.c for z in x]\nreturn inner")
    assert {"a", "b", "c"} <= found.own | found.attributes


def test_lines_of_names_are_told() -> None:
    found = names_of("a = x.one\nb = x.two\nreturn x.one + b + a")
    assert (found.lines["one"], found.lines["two"]) == (2, 3)


def test_every_instruction_of_this_python_is_known() -> None:
    made_by_compiler = {
        name
        for name, number in dis.opmap.items()
        if number < 256 and not name.startswith(("INSTRUMENTED_", "RESERVED"))
    }
    assert made_by_compiler <= code_names._EFFECTS.keys()


def test_stack_of_every_function_ends_as_python_counts(
    codes: list[CodeType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As deep as the compiler says at most, and never popped where nothing is."""
    popped = code_names._Machine._pop

    def checked_pop(self: code_names._Machine, count: int) -> list[code_names._Values]:
        assert count <= len(self._stack) <= self._code.co_stacksize
        return popped(self, count)

    monkeypatch.setattr(code_names._Machine, "_pop", checked_pop)
    num_told = 0
    for code in codes:
        # A handler of exceptions begins with a stack that the instructions before it do not tell.
        if not code.co_exceptiontable:
            machine = code_names._Machine(code)
            machine.run()
            assert not machine._stack, code
            num_told += 1
    assert num_told > 100


@pytest.mark.parametrize("opname", sorted(code_names._EFFECTS.keys() & dis.opmap.keys()))
def test_unknown_instruction_names_all_that_it_may_read(
    opname: str, users: dict[str, list[CodeType]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = users.get(opname, [])
    known = [names_in(code) for code in used]
    monkeypatch.delitem(code_names._EFFECTS, opname)
    names_in.cache_clear()
    try:
        for code, before in zip(used, known, strict=True):
            assert_tells_all(names_in(code), before)
    finally:
        names_in.cache_clear()


def assert_tells_all(found: Names, expected: Names) -> None:
    everything: Callable[[Names], set[object]]
    for everything in (
        lambda names: names.own | names.attributes,
        lambda names: set(names.globals),
        lambda names: set(names.lines),
        lambda names: set(names.imports),
        lambda names: {chain for chain in names.assigned if len(chain) > 1},
        lambda names: {chain[-1] for chain in names.assigned},
        lambda names: {name for name in names.iterated if "..." not in name},
        lambda names: {name for name in names.computed | names.stored if "..." not in name},
        lambda names: {name for name in names.asked if "..." not in name[0]},
        lambda names: {owner for owner, _ in names.guessed if "..." not in owner},
    ):
        assert everything(expected) <= everything(found), everything(expected) - everything(found)

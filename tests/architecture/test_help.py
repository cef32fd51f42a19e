"""What ``help()`` prints of public names: each has a docstring, and each field is in it."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import pydoc
import re
import textwrap

import pytest

import graphrt
import graphrt_llm
from graphrt import errors, events, planner, report

PUBLIC = {
    **{f"graphrt.{name}": getattr(graphrt, name) for name in graphrt.__all__},
    **{
        f"{module.__name__}.{name}": value
        for module in (errors, events, planner, report)
        for name, value in vars(module).items()
        if isinstance(value, type)
        and value.__module__.startswith(module.__name__)
        and not name.startswith("_")
        and name in getattr(module, "__all__", vars(module))
    },
    **{f"graphrt_llm.{name}": getattr(graphrt_llm, name) for name in graphrt_llm.__all__},
}
TYPES = {name: value for name, value in PUBLIC.items() if isinstance(value, type)}


def fields_of(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        names = [item.name for item in dataclasses.fields(kind)]
    elif issubclass(kind, enum.Enum):
        names = list(kind.__members__)
    else:
        names = list(getattr(kind, "_fields", ()))
    return [name for name in names if not name.startswith("_")]


def written(value: object) -> str:
    """The docstring of a class or function without what dataclasses and tuples make up."""
    text = inspect.getdoc(value) or ""
    return "" if text.startswith(f"{getattr(value, '__name__', '')}(") else text


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_has_a_docstring_that_help_prints(name: str) -> None:
    value = PUBLIC[name]
    if not (isinstance(value, type) or callable(value)):
        return  # A union of types has none.
    text = written(value)
    assert text, name
    assert text.splitlines()[0] in pydoc.plain(pydoc.render_doc(value))


@pytest.mark.parametrize("name", sorted(TYPES))
def test_public_field_is_described_where_help_prints_it(name: str) -> None:
    # What a class inherits is described by the class that has it.
    text = "\n".join(written(kind) for kind in TYPES[name].__mro__[:-1])
    quoted = " ".join(re.findall(r"``([^`]+)``", text))
    missing = [item for item in fields_of(TYPES[name]) if not re.search(rf"\b{item}\b", quoted)]
    assert not missing, f"{name}: say in the docstring of the class what these are: {missing}"


@pytest.mark.parametrize("name", sorted(name for name in TYPES if fields_of(TYPES[name])))
def test_no_field_is_described_where_help_does_not_look(name: str) -> None:
    [body] = ast.parse(textwrap.dedent(inspect.getsource(TYPES[name]))).body
    assert isinstance(body, ast.ClassDef)
    below = [
        ast.unparse(field)
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign | ast.Assign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    ]
    assert not below, f"{name}: help() does not print the text below these fields: {below}"

"""What ``graphrt_llm`` exports is what it says it exports, and says what it is."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import graphrt_llm

TREE = ast.parse(Path(graphrt_llm.__file__).read_text(encoding="utf-8"))


def test_type_checkers_see_the_same_names_as_the_interpreter() -> None:
    typed = {
        alias.asname
        for block in TREE.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(graphrt_llm.__all__)


@pytest.mark.parametrize("name", graphrt_llm.__all__)
def test_a_public_name_says_what_it_is(name: str) -> None:
    written = inspect.getdoc(getattr(graphrt_llm, name)) or ""
    assert written, name
    # What dataclasses, named tuples and enumerations write themselves says nothing.
    assert not written.startswith((f"{name}(", "An enumeration", "Create a collection")), name


def test_the_errors_are_a_public_module() -> None:
    assert issubclass(graphrt_llm.errors.EngineConfigError, ValueError)
    assert not hasattr(graphrt_llm, "no_such_name")
    assert set(graphrt_llm.__all__) <= set(dir(graphrt_llm))

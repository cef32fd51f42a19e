"""What ``graphrt`` exports is what it says it exports."""

from __future__ import annotations

import ast
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest

import graphrt
from graphrt import errors

INIT = Path(graphrt.__file__)


def test_every_public_name_resolves_to_a_member_of_its_room() -> None:
    for name in graphrt.__all__:
        value = getattr(graphrt, name)
        assert value is not None, name


def test_public_name_is_imported_with_the_collector_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphrt, "resolve", None)  # It is put back.
    monkeypatch.setattr(
        graphrt, "import_module", lambda room: SimpleNamespace(resolve=gc.isenabled())
    )
    assert graphrt.__getattr__("resolve") is False
    assert gc.isenabled()


def test_type_checkers_see_the_same_names_as_the_interpreter() -> None:
    tree = ast.parse(INIT.read_text(encoding="utf-8"))
    typed = set()
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                typed |= {alias.asname or alias.name for alias in node.names}
    assert typed == set(graphrt.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(graphrt, "no_such_name")


def test_dir_lists_the_public_names() -> None:
    assert set(graphrt.__all__) <= set(dir(graphrt))


def test_every_error_is_found_in_the_public_module() -> None:
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert raised <= set(vars(graphrt.errors))

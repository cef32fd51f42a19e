"""The error tree: one root, three parts, and the builtin a caller would catch."""

from __future__ import annotations

import builtins
import inspect
import re

import pytest

from graphrt import errors
from graphrt.errors import CaptureError, ConfigError, ConfigProblem, GraphrtError

TREE = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, Exception) and not issubclass(kind, Warning)
}


def test_every_error_has_one_root_and_ends_in_error() -> None:
    assert len(TREE) > 30
    for name, kind in TREE.items():
        assert issubclass(kind, GraphrtError), name
        assert name.endswith("Error"), name


def test_every_error_inherits_a_builtin_callers_know() -> None:
    known = {kind for kind in vars(builtins).values() if inspect.isclass(kind)} - {
        Exception,
        BaseException,
        object,
    }
    for name, kind in TREE.items():
        if kind is not GraphrtError:
            assert known & set(kind.__mro__), name


def test_the_drawn_tree_names_every_error_and_no_other() -> None:
    drawn = set(re.findall(r"\w+Error\b", errors.__doc__ or ""))
    assert drawn == set(TREE)


def test_a_message_has_its_three_parts_below_the_subject() -> None:
    error = GraphrtError("the key", expected="one", found="two", do="choose")
    assert str(error).splitlines() == [
        "the key",
        "  expected: one",
        "  found:    two",
        "  do:       choose",
    ]


def test_parts_that_are_not_given_take_no_line() -> None:
    assert str(GraphrtError("only this")) == "only this"
    assert str(GraphrtError(found="this")) == "  found:    this"


def test_config_errors_are_value_errors_and_carry_their_problems() -> None:
    problem = ConfigProblem("level", "7", "0 to 3")
    error = ConfigError("c", problems=[problem])
    assert isinstance(error, ValueError)
    assert error.problems == (problem,)


def test_locate_keeps_what_is_already_set() -> None:
    error = CaptureError("no", operation="aten::item")
    error.locate(owner="model", segment=2)
    error.locate(owner="library", mode="FULL", key="k", segment=5)
    assert error.header() == "model, FULL, k, segment 2: no"


def test_errors_are_raised_and_caught_as_their_root() -> None:
    with pytest.raises(GraphrtError):
        raise errors.TraceError("t")

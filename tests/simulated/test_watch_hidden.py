"""What code reads where no name of it stands in the callable is noticed when it is replaced."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from graphrt import Reason
from graphrt.gc_pause import frozen_heap
from lab import random_rows, rows_runner

SETTINGS = {"scale": 2.0}


@pytest.fixture(autouse=True)
def quick_collections():
    with frozen_heap():
        yield


class Parent:
    factor = 2.0

    def scaled(self, x):
        return x * 2

    @property
    def offset(self):
        return 1.0

    @classmethod
    def shifted(cls, x):
        return x + 1


class Child(Parent):
    def scaled(self, x):
        return super().scaled(x) + 1

    factor = 3.0

    def multiplied(self, x):
        return x * super().factor

    @property
    def offset(self):
        return super().offset + 1

    @classmethod
    def shifted(cls, x):
        return super().shifted(x) * 2


class Other:
    def scaled(self, x):
        return x * 3


class Rows:
    factor = 1.0

    def __init__(self, x):
        self.rows = x * SETTINGS["scale"] * self.factor


class Once:
    """One object for all."""

    known: Any = None

    def __new__(cls):
        if cls.known is None:
            cls.known = super().__new__(cls)
            cls.known.scale = 2.0
        return cls.known


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    scale: float = 2.0

    def __post_init__(self):
        self.rows = self.x * SETTINGS["scale"]


class Scaling(torch.Tensor):
    factor = 2.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) * cls.factor if func is torch.mul else result


def of_object(read: Callable[[Any], Any]) -> Callable[..., Any]:
    def make_case(monkeypatch):
        held = SimpleNamespace(inner=SimpleNamespace(scale=2.0, get=lambda: held.inner.scale))
        return lambda x: x * read(held), lambda: setattr(held.inner, "scale", 3.0)

    return make_case


def method_behind_super(monkeypatch):
    child = Child()
    other = staticmethod(lambda x: x * 5).__func__
    return child.scaled, lambda: monkeypatch.setattr(Parent, "scaled", lambda self, x: other(x))


def value_behind_super(monkeypatch):
    return Child().multiplied, lambda: monkeypatch.setattr(Parent, "factor", 5.0)


def property_behind_super(monkeypatch):
    child, other = Child(), property(lambda _: 7.0)
    return lambda x: x + child.offset, lambda: monkeypatch.setattr(Parent, "offset", other)


def class_method_behind_super(monkeypatch):
    other = classmethod(lambda _, x: x * 7)
    return Child.shifted, lambda: monkeypatch.setattr(Parent, "shifted", other)


def bases_of_a_class(monkeypatch):
    kind = type("Own", (Parent,), {})
    held = kind()
    return lambda x: held.scaled(x), lambda: setattr(kind, "__bases__", (Other,))


def made_in_the_call(monkeypatch):
    return lambda x: Rows(x).rows, lambda: monkeypatch.setitem(SETTINGS, "scale", 3.0)


def class_that_is_called_elsewhere_too(monkeypatch):
    def make(x):
        return Rows(x).rows

    def call(x):
        return make(x) if not isinstance(x, Rows) else x

    return call, lambda: monkeypatch.setattr(Rows, "factor", 4.0)


def init_replaced(monkeypatch):
    def init(self, x):
        self.rows = x * 7

    return lambda x: Rows(x).rows, lambda: monkeypatch.setattr(Rows, "__init__", init)


def object_that_new_keeps(monkeypatch):
    monkeypatch.setattr(Once, "known", None)
    Once()
    return lambda x: x * Once().scale, lambda: setattr(Once.known, "scale", 3.0)


def made_of_a_dataclass(monkeypatch):
    return lambda x: Fields(x).rows, lambda: monkeypatch.setitem(SETTINGS, "scale", 3.0)


def default_of_a_field(monkeypatch):
    change = lambda: monkeypatch.setattr(Fields.__init__, "__defaults__", (3.0,))  # noqa: E731
    return lambda x: x * Fields(x).scale, change


def class_of_a_tensor(monkeypatch):
    table = torch.ones(4).as_subclass(Scaling)
    return lambda x: torch.mul(x, table), lambda: monkeypatch.setattr(Scaling, "factor", 3.0)


def replaced(module: Any, name: str, call: Callable[[Any], Any]) -> Callable[..., Any]:
    def make_case(monkeypatch):
        before = getattr(module, name)
        return call, lambda: monkeypatch.setattr(module, name, lambda *args: before(*args) * 3)

    return make_case


def function_in_a_layer_of_torch(monkeypatch):
    before, layer = functional.linear, torch.nn.Linear(4, 4)
    other = lambda *args: before(*args) * 3  # noqa: E731
    return lambda x: layer(x), lambda: monkeypatch.setattr(functional, "linear", other)


CASES = {
    "super": method_behind_super,
    "value_behind_super": value_behind_super,
    "property_behind_super": property_behind_super,
    "class_method_behind_super": class_method_behind_super,
    "bases": bases_of_a_class,
    "init": made_in_the_call,
    "class": class_that_is_called_elsewhere_too,
    "init_replaced": init_replaced,
    "new": object_that_new_keeps,
    "post_init": made_of_a_dataclass,
    "default_of_a_field": default_of_a_field,
    "class_of_a_tensor": class_of_a_tensor,
    "function": replaced(functional, "relu", lambda x: functional.relu(x)),
    "function_of_a_module_in_a_module": replaced(
        functional, "silu", lambda x: torch.nn.functional.silu(x)
    ),
    "builtin": replaced(torch, "sigmoid", lambda x: torch.sigmoid(x)),
    "function_in_a_layer": function_in_a_layer_of_torch,
    "attrgetter": of_object(lambda held: operator.attrgetter("inner.scale")(held)),
    "methodcaller": of_object(lambda held: operator.methodcaller("get")(held.inner)),
    "getmembers": of_object(lambda held: dict(inspect.getmembers(held.inner))["scale"]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("watch", ["always", "spread"])
def test_what_code_reads_without_its_name_is_noticed(name, watch, monkeypatch) -> None:
    fn, change = CASES[name](monkeypatch)
    with rows_runner(lambda x: fn(x), watch=watch) as runner, torch.no_grad():
        runner.capture()
        for _ in range(runner.num_watched // 4 + 1):
            runner.run(random_rows({"n": 2}, 5))
            assert runner.last_decision.reason is Reason.HIT
        change()
        for _ in range(1 if watch == "always" else runner.num_watched // 4 + 1):
            out = runner.run(random_rows({"n": 2}, 5))
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, fn(**random_rows({"n": 2}, 5)))


def whole_environment(x):
    return x * float(dict(os.environ).get("GRAPHRT_TESTS_SCALE", "2"))


def classes_there_are(x):
    return x * len(Parent.__subclasses__())


@pytest.mark.parametrize(
    ("fn", "path"), [(whole_environment, "os.environ"), (classes_there_are, "__subclasses__()")]
)
def test_state_of_the_process_that_code_goes_through_is_named(fn, path) -> None:
    with rows_runner(fn) as runner:
        runner.capture()
        assert [item.path for item in runner.report().unwatched] == [path]

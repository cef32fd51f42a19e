"""A tensor that gets other memory is noticed, of whichever class it is and wherever it stands.

So is a variable or weak reference that gives another one."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
from test_watch_later import require_hit, require_noticed

from graphrt.gc_pause import frozen_heap


@pytest.fixture(autouse=True)
def quick_collections():
    with frozen_heap():
        yield


class Described(torch.nn.Parameter):
    """As engines describe how a weight is loaded."""

    def __new__(cls, data):
        return super().__new__(cls, data, requires_grad=False)


class Own(torch.Tensor):
    """A class that torch's functions ask first."""


class Packed(torch.Tensor):
    """Made of another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [each.inner if isinstance(each, Packed) else each for each in args]
        return function(*args, **(kwargs or {}))


KINDS = {
    "plain": lambda: torch.ones(4),
    "parameter": lambda: torch.nn.Parameter(torch.ones(4), requires_grad=False),
    "described": lambda: Described(torch.ones(4)),
    "own": lambda: torch.ones(4).as_subclass(Own),
    "packed": lambda: Packed(torch.ones(4)),
}


def of_module(tensor):
    model = torch.nn.Module()
    if isinstance(tensor, torch.nn.Parameter):
        model.register_parameter("weight", tensor)
    else:
        model.register_buffer("weight", tensor)
    return model


def of_class(tensor):
    return type("Holder", (), {"weight": tensor})()


def of_base(tensor):
    base = type("Base", (torch.nn.Module,), {"weight": tensor})
    return type("Holder", (base,), {})()


PLACES = {
    "module": of_module,
    "object": lambda tensor: SimpleNamespace(weight=tensor),
    "class": of_class,
    "base": of_base,
}


def plain(tensor):
    return tensor.inner if isinstance(tensor, Packed) else tensor


def set_data(tensor):
    plain(tensor).data = torch.full((4,), 3.0)


def set_storage(tensor):
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.set_(plain(tensor), torch.full((4,), 3.0))


@pytest.mark.parametrize("watch", ["spread", "always"])
@pytest.mark.parametrize("change", [set_data, set_storage])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_that_gets_other_memory_is_noticed(kind, place, change, watch) -> None:
    tensor = KINDS[kind]()
    owner = PLACES[place](tensor)

    def fn(x):
        return (x * owner.weight).as_subclass(torch.Tensor)

    require_noticed(fn, lambda: change(tensor), watch=watch)


@pytest.mark.parametrize("kind", ["described", "own"])
def test_tensor_of_a_class_that_is_written_in_place_is_a_hit(kind) -> None:
    tensor = KINDS[kind]()

    def write():
        with torch._C.DisableTorchFunctionSubclass():
            tensor.fill_(3.0)

    require_hit(lambda x: (x * tensor).as_subclass(torch.Tensor), write)


def test_weight_that_hides_one_of_its_class_is_noticed() -> None:
    owner = of_class(torch.ones(4))
    require_noticed(lambda x: x * owner.weight, lambda: setattr(owner, "weight", torch.ones(4) * 3))


def set_to(value):
    variable = ContextVar("variable")
    variable.set(value)
    return variable


class Kept:
    def __init__(self, scale):
        self.scale = scale

    def given(self):
        return self.scale

    @property
    def twice(self):
        return self.given() * 2


KEPT = Kept(2.0), Kept(3.0)
GIVERS = {
    "number": (lambda box, x: x * box.give.get(), [set_to(number) for number in (2.0, 3.0)]),
    "weight": (
        lambda box, x: x * box.give.get(),
        [set_to(torch.full((4,), number)) for number in (2.0, 3.0)],
    ),
    "reference": (lambda box, x: x * box.give().scale, list(map(weakref.ref, KEPT))),
}


@pytest.mark.parametrize("name", GIVERS)
def test_variable_or_weak_reference_in_place_of_another_is_noticed(name) -> None:
    read, (before, after) = GIVERS[name]
    box = SimpleNamespace(give=before)
    require_noticed(lambda x: read(box, x), lambda: setattr(box, "give", after))


@pytest.mark.parametrize("value", [3.0, torch.full((4,), 3.0)])
@pytest.mark.parametrize("read", [lambda kept: kept.given(), lambda kept: kept.twice])
def test_what_methods_read_behind_a_weak_reference_is_noticed(read, value) -> None:
    kept = Kept(value * 2)
    reference = weakref.ref(kept)
    require_noticed(lambda x: x * read(reference()), lambda: setattr(kept, "scale", value))

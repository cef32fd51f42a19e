"""What is registered later under a name that a callable looks up is noticed; a memo that the
callable fills itself is none of that."""

from __future__ import annotations

from collections import UserDict
from collections.abc import MutableMapping

import numpy as np
import pytest
import torch
from test_watch_later import require_hit, require_noticed, rounds

from graphrt import Reason
from graphrt.gc_pause import frozen_heap
from lab import random_rows, rows_runner


@pytest.fixture(autouse=True)
def quick_collections():
    with frozen_heap():
        yield


def double(x):
    return x * 2


def triple(x):
    return x * 3


class Local(MutableMapping):
    shared = {"double": double}  # noqa: RUF012  Shared on purpose.

    def __init__(self) -> None:
        self.local = {}

    def __getitem__(self, key):
        return self.local[key] if key in self.local else self.shared[key]

    def __setitem__(self, key, value):
        self.local.update({key: value})

    def __delitem__(self, key):
        del self.local[key]

    def __iter__(self):
        return iter({**self.shared, **self.local})

    def __len__(self):
        return len({**self.shared, **self.local})


class Other(Local):
    """Has the methods of another class that is walked first."""


class Nested(UserDict):
    def __setitem__(self, key, value):
        self.data[key] = value


class Registering:
    def __init__(self) -> None:
        self.entries = {"double": double}

    def register(self, name):
        def keep(function):
            self.entries[name] = function
            return function

        return keep

    def __getitem__(self, key):
        return self.entries[key]


def filled():
    found = Local()
    found["triple"] = triple
    return found


REGISTRIES = {
    "local": (Local, lambda found: found.__setitem__("double", triple)),
    "filled": (filled, lambda found: found.__setitem__("double", triple)),
    "nested": (lambda: Nested(double=double), lambda found: found.__setitem__("double", triple)),
    "registering": (Registering, lambda found: found.register("double")(triple)),
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_registry_that_gets_another_entry_is_noticed(name) -> None:
    make, change = REGISTRIES[name]
    found = make()
    require_noticed(lambda x: found["double"](x), lambda: change(found))


class Registry(type):
    """Its classes are registries themselves."""

    def __getitem__(cls, key):
        return cls.entries[key]

    @property
    def default(cls):
        return cls.first

    def named(cls):
        return cls.entries["double"]

    def __class_getitem__(cls, key):
        return cls.kinds[key]

    kinds = {"double": double}  # noqa: RUF012  Shared on purpose.


OF_CLASSES = {
    "entry": (lambda own, x: own["double"](x), lambda own: own.entries.update(double=triple)),
    "entries": (
        lambda own, x: own["double"](x),
        lambda own: setattr(own, "entries", {"double": triple}),
    ),
    "property": (lambda own, x: own.default(x), lambda own: setattr(own, "first", triple)),
    "method": (lambda own, x: own.named()(x), lambda own: own.entries.update(double=triple)),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_registry_that_is_a_class_is_watched(name) -> None:
    read, change = OF_CLASSES[name]
    own = Registry("Own", (), {"entries": {"double": double}, "first": staticmethod(double)})
    require_noticed(lambda x: read(own, x), lambda: change(own))


def test_registry_that_a_class_is_asked_for_is_watched(monkeypatch) -> None:
    def change():
        monkeypatch.setitem(Registry.kinds, "double", triple)

    require_noticed(lambda x: Registry["double"](x), change)


def test_registry_of_a_class_that_shares_methods_is_noticed() -> None:
    first, second = Local(), Other()
    require_noticed(
        lambda x: first["double"](second["double"](x)), lambda: second.update(double=triple)
    )


def test_entry_of_a_registry_that_is_deleted_is_noticed() -> None:
    found = Local()
    found["double"] = triple
    require_noticed(lambda x: found["double"](x), lambda: found.pop("double"))


class Memo:
    def __init__(self) -> None:
        self.made = {}

    def __getitem__(self, key):
        return self.made[key]

    def __contains__(self, key):
        return key in self.made

    def __setitem__(self, key, value):
        self.made[key] = value


class OwnMemo(Memo):
    def find(self, key):
        if key not in self:
            self[key] = 2.0
        return self[key]


@pytest.mark.parametrize("kind", [Memo, OwnMemo])
def test_memo_with_methods_that_eager_runs_fill_stays_a_hit(kind) -> None:
    memo = kind()

    def by_hand(x):
        if x.shape[0] not in memo:
            memo[x.shape[0]] = 2.0
        return x * memo[x.shape[0]]

    def by_method(x):
        return x * memo.find(x.shape[0])

    fn = by_method if kind is OwnMemo else by_hand
    require_hit(fn, lambda: fn(torch.ones(7, 4)))


@pytest.mark.parametrize(
    "make", [np.polynomial.Polynomial, np.polynomial.Chebyshev, np.poly1d], ids=lambda m: m.__name__
)
def test_polynomial_replaced_by_another_is_noticed(make) -> None:
    found = {"curve": make([1.0, 2.0])}
    require_noticed(
        lambda x: x * float(found["curve"](3.0)), lambda: found.update(curve=make([1.0, 5.0]))
    )


class NoLayout(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "layout" in repr(func) or getattr(func, "__self__", None) is torch.Tensor.layout:
            raise RuntimeError("no layout")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensor_whose_class_raises_for_its_layout_is_captured() -> None:
    weight = torch.full((4,), 3.0).as_subclass(NoLayout)
    with rows_runner(lambda x: (x + weight).as_subclass(torch.Tensor)) as runner, torch.no_grad():
        runner.capture()
        assert torch.equal(rounds(runner), random_rows({"n": 2}, 5)["x"] + 3)
        assert runner.last_decision.reason is Reason.HIT

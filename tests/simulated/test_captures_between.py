"""What changes between two captures of one scope: a later program reads what is there then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from graphrt import BatchDescriptor
from graphrt.externals import HostSnapshot
from graphrt.graphs import Watch
from lab import FULL, Lab, random_rows, rows_runner

KEYS = [BatchDescriptor(size) for size in (4, 3, 2)]
FACTOR = 2.0


class Config:
    def __init__(self) -> None:
        self.scale = 2.0
        self.unread = 0
        self.offset = 30.0


class Slotted:
    __slots__ = ("shift",)

    def __init__(self) -> None:
        self.shift = 3.0


class Layer(torch.nn.Module):
    gain = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.bias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight * self.gain
        return y if self.bias is None else y + self.bias


class OtherLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 10


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()
        self.layers = torch.nn.ModuleList([Layer()])
        self.config = Config()
        self.slotted = Slotted()
        self.numbers = [1.0, 2.0]
        self.table = {"a": 1.0, "b": 1.0}
        self.pair = (self.config, 4.0)

    def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
        y = self.inner(x) * self.config.scale + self.slotted.shift + self.numbers[1] * by
        for layer in self.layers:
            y = layer(y)
        if self.table.get("a") is not None:
            y = y + self.table["a"]
        return y * FACTOR + self.pair[1] + self._added()

    def _added(self) -> float:
        return getattr(self, "added", 0.0) + getattr(self.config, "offset", 0.0)


def _rename(model: Any) -> None:
    """The same value under another key, at the same place in the order."""
    value = model.table.pop("b")
    del model.table["a"]
    model.table.update(c=value, b=value)


def _rename_attribute(model: Any) -> None:
    own = vars(model.config)
    own["other"] = own.pop("offset")  # The values are the same ones, in the same order.


def _no_gain(model: Any) -> None:
    model.inner.gain = 7.0  # Hides that of the class.


def _class_gain(_: Any) -> None:
    Layer.gain = 2.5


def _factor(_: Any) -> None:
    vars(sys.modules[__name__])["FACTOR"] = 3.0


def _default(_: Any) -> None:
    Model.forward.__defaults__ = (6.0,)


def _hook(model: Any) -> None:
    model.inner.register_forward_hook(lambda module, args, out: out + 100)


def _dict(model: Any) -> None:
    model.config.__dict__ = {"scale": 9.0, "unread": 0, "offset": 1.0}


def _register(model: Any) -> None:
    object.__setattr__(model.inner, "_parameters", {"weight": torch.nn.Parameter(torch.zeros(4))})


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda m: setattr(m.config, "scale", 3.0),
    "rename of an attribute": _rename_attribute,
    "slot": lambda m: setattr(m.slotted, "shift", 5.0),
    "item of a list": lambda m: m.numbers.__setitem__(1, 8.0),
    "item of a dict": lambda m: m.table.__setitem__("a", 8.0),
    "key of a dict": lambda m: m.table.__delitem__("a"),
    "rename of a key": _rename,
    "object": lambda m: setattr(m, "config", Config.__new__(Config)) or _dict(m),
    "class of an object": lambda m: setattr(m.inner, "__class__", OtherLayer),
    "attribute over that of a class": _no_gain,
    "attribute of a class": _class_gain,
    "parameter": lambda m: setattr(m.inner, "weight", torch.nn.Parameter(torch.zeros(4))),
    "parameter in place of none": lambda m: setattr(m.inner, "bias", torch.ones(4)),
    "module": lambda m: m.layers.__setitem__(0, OtherLayer()),
    "one module more": lambda m: m.layers.append(OtherLayer()),
    "dict of an object": _dict,
    "register of a module": _register,
    "hook": _hook,
    "variable of a module": _factor,
    "default": _default,
    "attribute that was not there": lambda m: setattr(m, "added", 20.0),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    Layer.gain = 1.5
    vars(sys.modules[__name__])["FACTOR"] = 2.0
    Model.forward.__defaults__ = (1.0,)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize(
    ("is_beside", "first", "has_scopes"),
    [(False, 1, False), (True, 2, False), (False, 2, True)],
    ids=["early", "late, beside what nothing reads", "scopes"],
)
def test_change_between_two_captures_is_in_the_second(
    lab: Lab, change: Callable[[Any], object], is_beside: bool, first: int, has_scopes: bool
) -> None:
    model, x = Model(), torch.randn(4, 4)
    wrapper = lab.wrap(model)
    with ExitStack() as opened:
        for number, key in enumerate(KEYS):
            if has_scopes:
                opened.close()
            if has_scopes or not number:
                scope = opened.enter_context(lab.library.capture_scope())
            if is_beside and number:
                model.config.unread = number
            if number == first:
                change(model)
            with scope.step(FULL, key):
                wrapper(x[: key.num_tokens])
    rows = x[:2]
    assert torch.equal(lab.step(wrapper, rows, key=KEYS[2]), model(rows))
    found = lab.library.check_externals()
    assert {key for _, _, key in found.invalidated} == set(KEYS[:first])


class Memo(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.offset is None:
            self.offset = 2.0
        return x + self.offset


def test_memo_that_a_recording_sets_leaves_its_program_ready(lab: Lab) -> None:
    x = torch.randn(4, 4)
    wrapper = lab.wrap(Memo())
    with lab.library.capture_scope() as scope:
        for key in KEYS:
            with scope.step(FULL, key):
                wrapper(x[: key.num_tokens])
    assert lab.library.check_externals().is_unchanged
    assert torch.equal(lab.step(wrapper, x, key=KEYS[0]), x + 2)


def test_import_in_a_function_replaced_between_two_captures_is_seen(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by(factor: float) -> ModuleType:
        module = ModuleType("graphrt_test_factors")
        module.__dict__["FACTOR"] = factor
        return module

    def forward(x: Tensor) -> Any:
        import graphrt_test_factors  # type: ignore[import-not-found]

        return x * graphrt_test_factors.FACTOR

    x = torch.randn(4, 4)
    wrapper = lab.wrap(forward)
    with lab.library.capture_scope() as scope:
        for key, factor in zip(KEYS, (2.0, 2.0, 3.0), strict=True):
            monkeypatch.setitem(sys.modules, "graphrt_test_factors", by(factor))
            with scope.step(FULL, key):
                wrapper(x[: key.num_tokens])
    assert torch.equal(lab.step(wrapper, x[:2], key=KEYS[2]), x[:2] * 3)
    assert KEYS[2] not in {key for _, _, key in lab.library.check_externals().invalidated}


@pytest.mark.parametrize("is_of_class", [False, True], ids=["object", "class"])
def test_attribute_of_a_computed_name_that_appears_between_two_captures_is_watched(
    lab: Lab, is_of_class: bool
) -> None:
    class Powers:
        def of(self, size: int) -> float:
            return float(getattr(self, f"power_{size}", 1.0))

    class Powered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.powers = Powers()
            vars(self.powers)["power_9"] = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.powers.of(x.shape[0])

    model, x = Powered(), torch.randn(4, 4)
    owner: Any = Powers if is_of_class else model.powers
    wrapper = lab.wrap(model)
    with lab.library.capture_scope() as scope:
        for key in KEYS:
            if key == KEYS[2]:
                owner.power_2 = 3.0
            with scope.step(FULL, key):
                wrapper(x[: key.num_tokens])
    assert torch.equal(lab.step(wrapper, x[:2], key=KEYS[2]), x[:2] * 3)
    assert lab.library.check_externals().is_unchanged
    owner.power_2 = 4.0
    assert KEYS[2] in {key for _, _, key in lab.library.check_externals().invalidated}


def test_class_that_a_run_makes_is_looked_at_in_later_runs() -> None:
    class Making(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.counter is None:
                self.counter = type("Counter", (), {"count": 0, "__module__": __name__})()
            kind = type(self.counter)
            kind.count += 1
            return x

    model, x = Making(), torch.ones(2)
    before = HostSnapshot(model)
    for is_first in (True, False):
        with before.run(is_first=is_first):
            model(x)
    assert "Counter.count" in before.changed()


@pytest.mark.parametrize("how", ["one by one", "and once more", "at once"])
@pytest.mark.parametrize("changed", ["power_4", "power_2", "power_1", "shift"])
def test_change_after_captures_is_noticed_by_the_key_that_reads_it(changed: str, how: str) -> None:
    class Model(torch.nn.Module):
        shift = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * float(getattr(self, f"power_{x.shape[0]}", 1.0)) + self.shift

    model, sizes = Model(), (4, 2, 1)

    def rows(sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
        setattr(model, f"power_{sizes['n']}", float(sizes["n"]))  # Read from this key on.
        return random_rows(sizes, seed)

    with rows_runner(model, sizes, examples=rows, watch="always", verify="off") as runner:
        while how != "at once" and runner.capture_next():
            pass
        if how == "and once more":
            runner.withdraw([runner.key(n=2)], "to be captured again")
            runner.capture_next()
        if how == "at once":
            runner.capture()
        setattr(model, changed, 10.0)
        for size in sizes * 2:
            x = torch.rand(size, 4)
            assert torch.equal(runner.run({"x": x}), model(x)), runner.last_decision


def test_places_of_programs_that_went_are_not_looked_at_any_more() -> None:
    def pop(model: Model) -> Model:
        model.layers.pop(-1)
        return model

    model = Model()
    model.layers.append(Layer())
    found = []
    for change in (lambda: model, lambda: pop(model)):
        with rows_runner(change(), (4, 2), watch="always", verify="off") as runner:
            runner.capture()
            found.append(runner.num_watched)
    more, fewer = found
    model.layers.append(Layer())
    with rows_runner(model, (4, 2), watch="always", verify="off") as runner:
        runner.capture()
        assert runner.num_watched == more > fewer
        pop(model)
        runner.capture()
        assert runner.num_watched == fewer


@pytest.mark.parametrize("changed", [0, 1])
def test_host_values_of_all_programs_that_came_at_once_are_looked_at(
    lab: Lab, changed: int
) -> None:
    models = [Model(), Model()]
    programs = [lab.capture(lab.wrap(model), torch.ones(2, 4)) for model in models]
    watch = Watch("always")
    watch.update(programs)
    assert watch.look_at_all()
    models[changed].config.scale += 1
    assert not watch.look_at_all()

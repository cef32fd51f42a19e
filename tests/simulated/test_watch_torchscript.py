"""TorchScript modules are captured, and what they read is watched: C++ keeps it, not Python."""

from __future__ import annotations

import io
import math

import pytest
import torch

from graphrt import Reason
from graphrt.errors import VerificationError
from graphrt.gc_pause import frozen_heap
from lab import random_rows, rows_runner

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def quick_collections():
    with frozen_heap():
        yield


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.shift


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * 2


class Counting(Counted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


class Holder(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def loaded(model):
    kept = io.BytesIO()
    torch.jit.save(torch.jit.script(model), kept)
    kept.seek(0)
    return torch.jit.load(kept)


def frozen(model):
    return torch.jit.freeze(torch.jit.script(model.eval()))


MADE = {
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, torch.ones(2, 4)),
    "load": loaded,
    "freeze": frozen,
}
CHANGES = {
    "m.inner.weight": lambda m: setattr(m.inner, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "m.inner.bias": lambda m: setattr(m.inner.bias, "data", torch.ones(4)),
    "m.shift": lambda m: setattr(m, "shift", torch.zeros(4)),
    "m.scale": lambda m: setattr(m, "scale", 3.0),
}


@pytest.mark.parametrize("place", ["itself", "submodule", "closure"])
@pytest.mark.parametrize("how", MADE)
def test_torchscript_module_captured_is_a_hit(how, place) -> None:
    m = MADE[how](Scaled())
    given = {"itself": m, "submodule": Holder(m), "closure": lambda x: m(x)}[place]
    with rows_runner(given, (2, 4)) as runner, torch.no_grad():
        runner.capture()
        for _ in range(runner.num_watched // 4 + 2):
            out = runner.run(random_rows({"n": 2}, 5))
            assert runner.last_decision.reason is Reason.HIT
        assert torch.allclose(out, m(random_rows({"n": 2}, 5)["x"]))


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (how, name)
        for how in ("script", "trace", "load")
        for name in CHANGES
        if (how, name) != ("trace", "m.scale")  # A trace holds numbers as constants.
    ],
)
def test_torchscript_attribute_replaced_is_noticed(how, name) -> None:
    m = MADE[how](Scaled())
    with rows_runner(lambda x: m(x), (2, 4)) as runner, torch.no_grad():
        runner.capture()
        CHANGES[name](m)
        for _ in range(math.ceil(runner.num_watched / 4)):
            out = runner.run(random_rows({"n": 2}, 5))
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.allclose(out, m(random_rows({"n": 2}, 5)["x"]))
        assert name in runner.explain(runner.keys[0])


def test_torchscript_counter_is_put_back() -> None:
    m = torch.jit.script(Counted())
    with rows_runner(m, (2, 4)) as runner, torch.no_grad():
        runner.capture()
        assert m.count == 0
        runner.run(random_rows({"n": 2}, 5))
        assert runner.last_decision.reason is Reason.HIT


def test_torchscript_counter_that_outputs_need_is_refused() -> None:
    m = torch.jit.script(Counting())
    with rows_runner(m, (2, 4)) as runner, torch.no_grad():
        with pytest.raises(VerificationError, match="host value"):
            runner.capture()
        assert m.count == 0


def test_list_of_a_torchscript_module_is_told() -> None:
    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [2.0]

        def forward(self, x):
            return x * self.scales[0]

    scripted = torch.jit.script(Listed())
    with rows_runner(lambda x: scripted(x)) as runner, torch.no_grad():
        runner.capture()
        assert [found.path for found in runner.report().unwatched] == ["scripted.scales"]

"""TorchScript modules are captured, and what they read is watched: C++ keeps it, not Python."""

from __future__ import annotations

import io
import math

import pytest
import torch

from graphrt import BufferSpec, CUDAGraphRunner, OutputSpec, Reason
from graphrt.errors import VerificationError
from graphrt.graphs import frozen_heap

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


def example(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(sizes["n"], 4, generator=generator)}


def make(fn):
    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("x", ("n", 4), torch.float32)],
        outputs=OutputSpec({"": "n"}),
        sizes={"n": [2, 4]},
        examples=example,
        device="simulated",
    )


@pytest.mark.parametrize("place", ["itself", "submodule", "closure"])
@pytest.mark.parametrize("how", MADE)
def test_torchscript_module_captured_is_a_hit(how, place) -> None:
    m = MADE[how](Scaled())
    given = {"itself": m, "submodule": Holder(m), "closure": lambda x: m(x)}[place]
    with make(given) as runner, torch.no_grad():
        runner.capture()
        for _ in range(runner.num_watched // 4 + 2):
            out = runner.run(example({"n": 2}, 5))
            assert runner.last_decision.reason is Reason.HIT
        assert torch.allclose(out, m(example({"n": 2}, 5)["x"]))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("how", ["script", "trace", "load"])
def test_torchscript_attribute_replaced_is_noticed(how, name) -> None:
    if how == "trace" and name == "m.scale":
        pytest.skip("a trace holds numbers as constants")
    m = MADE[how](Scaled())
    with make(lambda x: m(x)) as runner, torch.no_grad():
        runner.capture()
        CHANGES[name](m)
        for _ in range(math.ceil(runner.num_watched / 4)):
            out = runner.run(example({"n": 2}, 5))
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.allclose(out, m(example({"n": 2}, 5)["x"]))
        assert name in runner.explain(runner.keys[0])


def test_torchscript_counter_is_put_back() -> None:
    m = torch.jit.script(Counted())
    with make(m) as runner, torch.no_grad():
        runner.capture()
        assert m.count == 0
        runner.run(example({"n": 2}, 5))
        assert runner.last_decision.reason is Reason.HIT


def test_torchscript_counter_that_outputs_need_is_refused() -> None:
    m = torch.jit.script(Counting())
    with make(m) as runner, torch.no_grad():
        with pytest.raises(VerificationError, match="host value"):
            runner.capture()
        assert m.count == 0

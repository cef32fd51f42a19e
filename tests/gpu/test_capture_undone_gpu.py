"""What a capture leaves on a GPU: no undeclared write, no number drawn from a generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphrt import BufferSpec, CUDAGraphRunner, OutputSpec
from graphrt.device.cuda import CUDADevice
from graphrt.errors import GraphrtError, StateAdvancedError


def make(fn: Callable[..., Any], device: CUDADevice, **options: Any) -> CUDAGraphRunner:
    def examples(sizes: Any, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        return {"x": torch.randn(sizes["n"], 4, device="cuda", generator=generator)}

    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("x", ("n", 4), torch.float32)],
        outputs=OutputSpec({"": "n"}),
        sizes={"n": [2, 4, 8, 16]},
        examples=examples,
        device=device,
        **options,
    )


def states() -> list[Any]:
    of_cuda = torch.cuda.get_rng_state()
    return [random.getstate(), torch.get_rng_state().tolist(), of_cuda.tolist()]


@pytest.mark.parametrize("observe", ["ends", "always"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_write_refused_is_put_back_on_the_device(
    device: CUDADevice, on_error: Any, observe: Any
) -> None:
    cell = torch.arange(4.0, device="cuda")

    def step(x: Tensor) -> Tensor:
        cell[1:3].add_(1)
        return x + cell

    with make(step, device, on_capture_error=on_error, observe=observe) as runner:
        if on_error == "raise":
            with pytest.raises(StateAdvancedError):
                runner.capture()
        else:
            runner.capture()
    assert cell.tolist() == [0, 1, 2, 3]


def test_warm_up_on_the_device_compiles(device: CUDADevice) -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    inner = torch.compile(lambda x: x * 2, backend=backend, dynamic=True)

    def step(x: Tensor) -> Tensor:
        y: Tensor = inner(x + 1)
        return y + 1

    with make(step, device) as runner:
        runner.capture()
        assert compiled
        num_compiled = len(compiled)
        x = torch.ones(4, 4, device="cuda")
        assert runner.run({"x": x}).tolist() == [[5.0] * 4] * 4
        with torch.no_grad():
            assert torch.equal(step(x), runner.run({"x": x}))
        assert len(compiled) == num_compiled


@pytest.mark.parametrize("fails", [False, True])
def test_generators_stand_where_they_stood_on_the_device(device: CUDADevice, fails: bool) -> None:
    def step(x: Tensor) -> Tensor:
        drawn = x + torch.rand_like(x)
        return x.nonzero() if fails else drawn

    torch.manual_seed(7)
    torch.rand(3, device="cuda")
    before = states()
    with make(step, device) as runner:
        if fails:
            with pytest.raises(GraphrtError):
                runner.capture()
        else:
            runner.capture()
        assert states() == before


def test_replays_draw_fresh_numbers_after_the_generator_was_put_back(device: CUDADevice) -> None:
    def step(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    x = torch.zeros(16, 4, device="cuda")
    with make(step, device) as runner:
        torch.manual_seed(11)
        torch.rand(5, device="cuda")
        runner.capture()
        replayed = [runner.run({"x": x}).clone() for _ in range(4)]
    torch.manual_seed(11)
    torch.rand(5, device="cuda")
    eager = [step(x) for _ in range(4)]
    assert all(map(torch.equal, replayed, eager))
    assert not torch.equal(replayed[0], replayed[1])

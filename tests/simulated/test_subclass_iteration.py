"""What a container holds is what its own type says, whatever its class gives to a loop."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from graphrt import BufferSpec, CUDAGraphRunner, OutputSpec
from graphrt.graphs import frozen_heap


def example(sizes: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(sizes["n"], 4, generator=generator)}


def make(fn: Any) -> CUDAGraphRunner:
    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("x", ("n", 4), torch.float32)],
        outputs=OutputSpec({"": "n"}),
        sizes={"n": [2]},
        examples=example,
        device="simulated",
    )


def count(kept: Any) -> None:
    kept[0] = list.__getitem__(kept, 0) + 1


@pytest.mark.parametrize(
    ("base", "run"),
    [
        (list, count),
        (set, lambda kept: kept.add(7.0)),
        (deque, lambda kept: kept.append(7.0)),
    ],
)
def test_container_that_loops_otherwise_stays_as_it_was(base: Any, run: Any) -> None:
    def tens(self: Any) -> Any:
        return (value * 10 for value in base.__iter__(self))

    kept = type("Tens", (base,), {"__iter__": tens})((1.0, 2.0))

    def fn(x: torch.Tensor) -> torch.Tensor:
        run(kept)
        return x * 2

    with frozen_heap(), make(fn) as runner, torch.no_grad():
        runner.capture()
    assert set(base.__iter__(kept)) - {7.0} == {1.0, 2.0}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_list_of_a_torchscript_module_is_told() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [2.0]

        def forward(self, x):
            return x * self.scales[0]

    scripted = torch.jit.script(Scaled())
    with frozen_heap(), make(lambda x: scripted(x)) as runner, torch.no_grad():
        runner.capture()
        assert [found.path for found in runner.report().unwatched] == ["scripted.scales"]

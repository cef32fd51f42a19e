"""C-wrapper: what graphrt's Python adds to a step that replays."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.harness import Case, Row, difference, row, time_host
from graphrt import (
    BatchDescriptor,
    CUDAGraphWrapper,
    ForwardContext,
    GraphLibrary,
    RuntimeMode,
    SimulatedDevice,
    StaleCheck,
)

INNER = 200
KEY = BatchDescriptor(num_tokens=4)


def add_all(*tensors: torch.Tensor) -> torch.Tensor:
    total = tensors[0] + 1
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def captured(library: GraphLibrary, inputs: Sequence[torch.Tensor]) -> CUDAGraphWrapper:
    """A FULL wrapper over ``add_all``, captured and checked once."""
    wrapper = CUDAGraphWrapper(add_all, library, RuntimeMode.FULL, name=f"add {len(inputs)}")
    with torch.no_grad(), library.capture_scope() as scope:
        for mode in (RuntimeMode.NONE, RuntimeMode.FULL):
            with scope.step(mode, KEY):
                wrapper(*inputs)
    with ForwardContext(RuntimeMode.FULL, KEY):
        found = wrapper(*inputs)
    assert torch.equal(found, add_all(*inputs)), "replay must equal eager before it is timed"
    return wrapper


def stub() -> None:
    return None


def step() -> Sequence[Row]:
    """Enter a context and call the wrapper, 4 inputs, IDENTITY; less a bare stub replay."""
    device = SimulatedDevice()
    library = GraphLibrary(device, stale_check=StaleCheck.IDENTITY)
    inputs = [torch.ones(4) for _ in range(4)]
    wrapper = captured(library, inputs)
    wrapper.concrete_cudagraph_entries[KEY].replay = stub
    full = RuntimeMode.FULL
    a, b, c, d = inputs

    def whole_step() -> None:
        for _ in range(INNER):
            with ForwardContext(full, KEY):
                wrapper(a, b, c, d)

    def bare() -> None:
        for _ in range(INNER):
            stub()

    def wrapper_only() -> None:
        with ForwardContext(full, KEY):
            for _ in range(INNER):
                wrapper(a, b, c, d)

    arms = {"step": whole_step, "wrapper": wrapper_only, "stub replay": bare}
    samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
    library.close()
    device.close()
    return [
        row(
            f"C-wrapper-{name}",
            [value / 1000 for value in difference(samples, arm, "stub replay")],
            target=target,
            unit="us",
            samples=samples,
            inputs=4,
            stale_check="identity",
            timed=timed,
        )
        for name, arm, target, timed in (
            ("step", "step", 1.0, "enter context + wrapper call, less a stub replay"),
            ("call", "wrapper", 1.0, "wrapper call alone, less a stub replay"),
        )
    ]


def stale_check() -> Sequence[Row]:
    """The slope of the generated checker from 1 to 32 unchanged tensors."""
    device = SimulatedDevice()
    library = GraphLibrary(device, stale_check=StaleCheck.IDENTITY)
    few, many = 1, 32
    checks = {}
    for count in (few, many):
        inputs = tuple(torch.ones(4) for _ in range(count))
        checks[count] = captured(library, inputs).concrete_cudagraph_entries[KEY].check, inputs

    def arm(count: int) -> object:
        check, inputs = checks[count]
        nothing: dict[str, object] = {}

        def run() -> None:
            for _ in range(INNER):
                check(inputs, nothing)

        return run

    _, tensors = checks[many]

    def pointers() -> None:
        for _ in range(INNER):
            for tensor in tensors:
                tensor.data_ptr()

    arms = {"1 tensor": arm(few), "32 tensors": arm(many), "data_ptr of 32": pointers}
    samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))  # type: ignore[arg-type]
    library.close()
    device.close()
    slope = [value / (many - few) for value in difference(samples, "32 tensors", "1 tensor")]
    return [
        row(
            "C-wrapper-stale",
            slope,
            target=10.0,
            unit="ns",
            samples=samples,
            timed="generated checker: (32 tensors - 1 tensor) / 31",
            data_ptr_ns=min(samples["data_ptr of 32"]) / many,
        )
    ]


CASES = [
    Case("C-wrapper", "context and wrapper call over a stub replay", step),
    Case("C-wrapper-stale", "stale check, nanoseconds a tensor", stale_check),
]

"""G1: a replay through the library, against a bare ``CUDAGraph.replay()`` of the same chain."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.baselines import hand_capture, poison, require_equal
from benchmarks.harness import (
    Case,
    Row,
    cuda_device,
    medians,
    ratio,
    row,
    time_gpu,
    time_launch,
)
from graphrt import (
    BatchDescriptor,
    CUDAGraphWrapper,
    Device,
    ForwardContext,
    GraphLibrary,
    RuntimeMode,
)

NODES = (10, 100, 1000)
KEY = BatchDescriptor(num_tokens=1)
HEAD_START_US = 3000.0
BLOCKS = 25


@contextmanager
def arms_of(num_nodes: int, device: Device) -> Iterator[dict[str, Callable[[], object]]]:
    """Four ways to replay a chain of ``num_nodes`` small kernels; each was compared with eager.

    ``bare again`` is a second capture by hand: what it differs by from the first is noise.
    """
    x = torch.randn(1024, device=device.torch_device)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_nodes):
            x = x * 1.0009765625
        return x

    with torch.no_grad(), GraphLibrary(device) as library:
        expected = chain(x).clone()
        bare = hand_capture(lambda: chain(x), device)
        again = hand_capture(lambda: chain(x), device)
        wrapper = CUDAGraphWrapper(chain, library, RuntimeMode.FULL, name=f"{num_nodes} nodes")
        with library.capture_scope() as scope:
            for mode in (RuntimeMode.NONE, RuntimeMode.FULL):
                with scope.step(mode, KEY):
                    wrapper(x)
        program = wrapper.concrete_cudagraph_entries[KEY]
        full = RuntimeMode.FULL

        def through_wrapper() -> None:
            with ForwardContext(full, KEY):
                wrapper(x)

        through_wrapper()  # The first call checks everything and installs what later calls run.
        arms: dict[str, Callable[[], object]] = {
            "bare": bare.replay,
            "wrapper": through_wrapper,
            "program": program.replay,
            "bare again": again.replay,
        }
        outputs = (bare.outputs, program.outputs, program.outputs, again.outputs)
        for (name, arm), output in zip(arms.items(), outputs, strict=True):
            poison(output)
            arm()
            require_equal(output, expected, f"G1 {name}, {num_nodes} nodes")
        try:
            yield arms
        finally:
            device.synchronize()
            bare.reset()
            again.reset()


def replay_overhead() -> Sequence[Row]:
    with cuda_device() as device:
        return [item for num_nodes in NODES for item in measure(num_nodes, device)]


def measure(num_nodes: int, device: Device) -> list[Row]:
    is_long = num_nodes > 100
    with arms_of(num_nodes, device) as arms:
        # All launches of a block fit the queue, and the GPU starts when they are in it.
        repeats = 60 if is_long else 200
        gpu = time_gpu(arms, blocks=BLOCKS, repeats=repeats, head_start_us=HEAD_START_US)
        host = time_launch(
            arms,
            launches=16 if is_long else 64,
            bursts=3 if is_long else 9,
            blocks=BLOCKS,
            synchronize=device.synchronize,
        )
    rows = []
    for kind, samples, target, timed in (
        ("gpu", gpu, 1.005, "ms a replay between events, launches queued ahead"),
        ("host", host, 1.5, "ns to launch, queue empty at first"),
    ):
        for suffix, arm in (("", "wrapper"), ("-program", "program")):
            rows.append(
                row(
                    f"G1-{kind}{suffix}-{num_nodes}",
                    ratio(samples, arm, "bare"),
                    target=target,
                    unit="ratio",
                    samples=samples,
                    timed=timed,
                    medians=medians(samples),
                    noise=statistics.median(ratio(samples, "bare again", "bare")),
                )
            )
    return rows


CASES = [Case("G1", "replay through the library over a bare replay", replay_overhead)]

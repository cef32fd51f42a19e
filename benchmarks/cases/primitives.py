"""G1: a replay through the library, against a bare ``CUDAGraph.replay()`` of the same chain.

Where its memory lies decides some percent of a replay's time. So every block captures all arms
anew, in alternating order, and a lucky place is one sample among others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.baselines import HandCaptured, hand_capture, poison, require_equal
from benchmarks.harness import (
    Case,
    Row,
    Samples,
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
BLOCKS = 11
"""Each with captures of its own."""
INNER_BLOCKS = 3
"""Interleaved blocks of each; their median is one sample."""
SPACER_BYTES = 2**19
"""Of one spacer; torch takes four of them from the driver at once, as it does small blocks."""


@contextmanager
def arms_of(
    num_nodes: int, device: Device, *, is_reversed: bool = False
) -> Iterator[dict[str, Callable[[], object]]]:
    """Four ways to replay a chain of ``num_nodes`` small kernels; each was compared with eager.

    ``bare again`` is a second capture by hand: what it differs by from the first is noise.
    ``is_reversed``: capture in the opposite order, and return the arms in it.
    """
    x = torch.randn(1024, device=device.torch_device)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_nodes):
            x = x * 1.0009765625
        return x

    with torch.no_grad(), GraphLibrary(device) as library:
        expected = chain(x).clone()
        wrapper = CUDAGraphWrapper(chain, library, RuntimeMode.FULL, name=f"{num_nodes} nodes")
        by_hand: dict[str, HandCaptured] = {}

        def capture_by_hand(name: str) -> None:
            by_hand[name] = hand_capture(lambda: chain(x), device)

        def capture_in_library() -> None:
            with library.capture_scope() as scope:
                for mode in (RuntimeMode.NONE, RuntimeMode.FULL):
                    with scope.step(mode, KEY):
                        wrapper(x)

        captures: list[Callable[[], None]] = [
            partial(capture_by_hand, "bare"),
            capture_in_library,
            partial(capture_by_hand, "bare again"),
        ]
        for capture in reversed(captures) if is_reversed else captures:
            capture()
        bare, again = by_hand["bare"], by_hand["bare again"]
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
            yield dict(reversed(arms.items())) if is_reversed else arms
        finally:
            device.synchronize()
            bare.reset()
            again.reset()


def replay_overhead() -> Sequence[Row]:
    with cuda_device() as device:
        return [item for num_nodes in NODES for item in measure(num_nodes, device)]


def measure(num_nodes: int, device: Device) -> list[Row]:
    is_long = num_nodes > 100
    gpu: Samples = {}
    host: Samples = {}
    spacers: list[torch.Tensor] = []
    for block in range(BLOCKS):
        # They stay alive where the last block's graphs were: those of this one lie elsewhere.
        torch.cuda.empty_cache()
        spacers += [
            torch.empty(SPACER_BYTES, dtype=torch.uint8, device=device.torch_device)
            for _ in range(4 * (1 + block % 3))
        ]
        with arms_of(num_nodes, device, is_reversed=block % 2 == 1) as arms:
            # All launches of a block fit the queue, and the GPU starts when they are in it.
            found = time_gpu(
                arms,
                blocks=INNER_BLOCKS,
                repeats=40 if is_long else 150,
                head_start_us=HEAD_START_US,
            )
            for name, figure in medians(found).items():
                gpu.setdefault(name, []).append(figure)
            found = time_launch(
                arms,
                launches=16 if is_long else 64,
                bursts=3 if is_long else 9,
                blocks=INNER_BLOCKS,
                synchronize=device.synchronize,
            )
            for name, figure in medians(found).items():
                host.setdefault(name, []).append(figure)
    rows = []
    for kind, samples, target, timed in (
        ("gpu", gpu, 1.005, "ms a replay between events, launches queued ahead"),
        ("host", host, 1.5, "ns to launch, queue empty at first"),
    ):
        noise = ratio(samples, "bare again", "bare")
        for suffix, arm in (("", "wrapper"), ("-program", "program")):
            rows.append(
                row(
                    f"G1-{kind}{suffix}-{num_nodes}",
                    ratio(samples, arm, "bare"),
                    target=target,
                    unit="ratio",
                    samples=samples,
                    timed=f"{timed}; every arm captured anew in each block",
                    medians=medians(samples),
                    noise=statistics.median(noise),
                    noise_spread=(min(noise), max(noise)),
                )
            )
    return rows


CASES = [Case("G1", "replay through the library over a bare replay", replay_overhead)]

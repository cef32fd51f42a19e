"""G6: what a capture costs beside one eager forward, and how a large heap changes that."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Literal, NamedTuple

import torch

from benchmarks.baselines import hand_capture, poison, require_equal
from benchmarks.harness import Case, Row, Samples, cuda_device, medians, ratio, row
from benchmarks.models import DecodeStep, decode_key
from graphrt import CUDAGraphWrapper, Device, ForwardContext, GraphLibrary, RuntimeMode
from graphrt_llm.models import ModelConfig

SIZES = (16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1)
CONTEXT = 64
NUM_OBJECTS = 1_000_000
BLOCKS = 7


class Times(NamedTuple):
    """Milliseconds a graph."""

    capture: float
    """Median of the captures in an open scope."""
    scope: float
    """The whole scope, entering and leaving included, spread over its graphs; no warm-ups."""


def timed(action: Callable[[], object], device: Device) -> float:
    """Milliseconds of one call, from an idle device to an idle device."""
    device.synchronize()
    started = perf_counter_ns()
    action()
    device.synchronize()
    return (perf_counter_ns() - started) / 1e6


def eager(step: DecodeStep, sizes: Sequence[int], device: Device) -> float:
    figures = []
    for size in sizes:
        step.prepare(size)
        figures.append(timed(partial(step, **step.inputs(size)), device))
    return statistics.median(figures)


def by_hand(step: DecodeStep, sizes: Sequence[int], device: Device) -> float:
    """``torch.cuda.graph`` as documented, one after another; it waits and trims each time."""
    figures, captured = [], []
    for size in sizes:
        step.prepare(size)
        call = partial(step, **step.inputs(size))

        def one(call: Callable[[], torch.Tensor] = call) -> None:
            captured.append(hand_capture(call, device, warmups=0))

        figures.append(timed(one, device))
    for graph in captured:
        graph.reset()
    return statistics.median(figures)


def through_library(
    wrapper: CUDAGraphWrapper,
    step: DecodeStep,
    sizes: Sequence[int],
    observe: Literal["capture", "none"] = "capture",
    compare: bool = False,
) -> Times:
    """Capture every size in one scope, then retire all; with ``compare``, replay each before."""
    library, device = wrapper.library, wrapper.library.device
    inputs = {size: step.inputs(size) for size in sizes}
    figures = []
    device.synchronize()
    started = perf_counter_ns()
    with library.capture_scope(observe=observe) as scope:
        for size in sizes:
            step.prepare(size)
            with scope.step(RuntimeMode.FULL, decode_key(size)):
                figures.append(timed(partial(wrapper, **inputs[size]), device))
    device.synchronize()
    whole = (perf_counter_ns() - started) / 1e6 / len(sizes)
    if compare:
        for size in sizes:
            step.prepare(size)
            expected = step(**inputs[size])
            key = decode_key(size)
            poison(wrapper.concrete_cudagraph_entries[key].outputs)
            with ForwardContext(RuntimeMode.FULL, key):
                require_equal(wrapper(**inputs[size]), expected, f"G6 {key}")
    library.retire()
    return Times(statistics.median(figures), whole)


def heap_of(num_objects: int) -> list[object]:
    """Live objects that the collector has to visit."""
    return [[number] for number in range(num_objects)]


def measure(step: DecodeStep, sizes: Sequence[int], device: Device, blocks: int) -> Samples:
    """Milliseconds a graph of every arm, one figure a block. The collector is on: the subject."""
    arms = ("eager", "torch.cuda.graph", "library", "library, unobserved", "library, large heap")
    samples: Samples = {name: [] for name in (*arms, "scope", "scope, large heap")}
    with GraphLibrary(device) as library:
        wrapper = CUDAGraphWrapper(step, library, RuntimeMode.FULL, name="decode")
        through_library(wrapper, step, sizes, compare=True)
        through_library(wrapper, step, sizes, "none", compare=True)
        for _ in range(blocks):
            samples["eager"].append(eager(step, sizes, device))
            samples["torch.cuda.graph"].append(by_hand(step, sizes, device))
            plain = through_library(wrapper, step, sizes)
            samples["library"].append(plain.capture)
            samples["scope"].append(plain.scope)
            unobserved = through_library(wrapper, step, sizes, "none")
            samples["library, unobserved"].append(unobserved.capture)
            heap = heap_of(NUM_OBJECTS)
            crowded = through_library(wrapper, step, sizes)
            del heap
            samples["library, large heap"].append(crowded.capture)
            samples["scope, large heap"].append(crowded.scope)
    return samples


def captures() -> Sequence[Row]:
    with cuda_device() as device, torch.no_grad():
        step = DecodeStep(
            ModelConfig.named("qwen3-0.6b"),
            max_reqs=max(SIZES),
            context=CONTEXT,
            dtype=torch.bfloat16,
            device=device.torch_device,
        )
        for size in SIZES:  # Every kernel is loaded before anything is timed.
            step.prepare(size)
            step(**step.inputs(size))
        samples = measure(step, SIZES, device, BLOCKS)
    rows = []
    for metric, over, under, target in (
        ("G6", "library", "eager", 1.5),
        ("G6-unobserved", "library, unobserved", "eager", 1.5),
        ("G6-heap", "library, large heap", "library", 1.2),
        ("G6-heap-scope", "scope, large heap", "scope", 1.2),
    ):
        rows.append(
            row(
                metric,
                ratio(samples, over, under),
                target=target,
                unit="ratio",
                samples=samples,
                timed=f"{over} over {under}, ms a graph",
                shape="qwen3-0.6b decode",
                sizes=SIZES,
                num_objects=NUM_OBJECTS,
                medians_ms=medians(samples),
            )
        )
    return rows


CASES = [Case("G6", "capture time per graph over eager; with a large heap", captures)]

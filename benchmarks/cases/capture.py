"""G6: what a capture costs beside one eager forward, and how a large heap changes that.

Observing a capture slows it, so the default policy observes some of them. ``G6`` is that policy,
``G6-always`` and ``G6-never`` observe all and none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Literal, NamedTuple

import torch
from torch import nn

from benchmarks.baselines import hand_capture, poison, require_equal
from benchmarks.harness import Case, Row, Samples, cuda_device, medians, ratio, rounds, row
from benchmarks.models import DecodeStep, decode_key, decode_step_of_06b
from graphrt import (
    CaptureJob,
    CaptureOptions,
    Device,
    ForwardContext,
    GraphLibrary,
    RuntimeMode,
    capture_all,
)

SIZES = (16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1)
CONTEXT = 64
NUM_OBJECTS = 1_000_000
BLOCKS = 7
FULL = RuntimeMode.FULL
Observe = Literal["ends", "always", "never"] | None
POLICIES: tuple[Observe, ...] = (None, "always", "never")


class Times(NamedTuple):
    """Milliseconds a graph."""

    capture: float
    """Mean of the captures in an open scope: which of them are observed is part of the figure."""
    scope: float
    """The whole scope, entering and leaving included, spread over its graphs; no warm-ups."""
    num_observed: int
    """Captures that learned what their graphs touch outside the pool."""


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
    return statistics.mean(figures)


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
    return statistics.mean(figures)


class Decode(nn.Module):
    """A decode step as a module: a capture finds what a callable reads through modules."""

    def __init__(self, step: DecodeStep) -> None:
        super().__init__()
        self.model = step.model
        self.step = step

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.step(**inputs)


def through_library(
    library: GraphLibrary,
    decode: Decode,
    sizes: Sequence[int],
    observe: Observe = None,
    compare: bool = False,
) -> Times:
    """Capture every size in one scope, then retire all; with ``compare``, replay each before."""
    step, device = decode.step, library.device
    inputs = {size: step.inputs(size) for size in sizes}

    def make_inputs(size: int) -> tuple[tuple[()], dict[str, torch.Tensor]]:
        step.prepare(size)
        return (), inputs[size]

    jobs = [
        CaptureJob(decode, FULL, decode_key(size), partial(make_inputs, size=size), owner="decode")
        for size in sizes
    ]
    options = CaptureOptions(
        observe=observe,
        warmups=0,
        may_overwrite=[step.cache.tensor],
        keep_alive=[step.cache.tensor, *step.attention.keep_alive],
    )
    whole = timed(lambda: capture_all(library, jobs, options), device)
    entries = [library.catalog.entry("decode", FULL, job.key) for job in jobs]
    programs = [entry.program for entry in entries if entry.program is not None]
    assert len(programs) == len(sizes), "every size was captured"
    num_observed = sum(program.is_observed for program in programs)
    if compare:
        for size, program in zip(sizes, programs, strict=True):
            step.prepare(size)
            expected = step(**inputs[size])
            poison(program.outputs)
            with ForwardContext(FULL, program.key):
                require_equal(program(**inputs[size]), expected, f"G6 {program.key}")
    library.retire()
    return Times(
        statistics.mean(entry.seconds.recording * 1000 for entry in entries),
        whole / len(sizes),
        num_observed,
    )


def heap_of(num_objects: int) -> list[object]:
    """Live objects that the collector has to visit."""
    return [[number] for number in range(num_objects)]


def measure(
    step: DecodeStep, sizes: Sequence[int], device: Device, blocks: int
) -> tuple[Samples, dict[str, int]]:
    """Milliseconds a graph of every arm, one figure a block, and how many captures each observed.

    The collector is on: it is a subject.
    """
    samples: Samples = {}
    num_observed: dict[str, int] = {}
    decode = Decode(step)
    with GraphLibrary(device) as library:

        def capture(name: str, observe: Observe = None) -> None:
            times = through_library(library, decode, sizes, observe)
            samples.setdefault(name, []).append(times.capture)
            samples.setdefault(f"scope, {name}", []).append(times.scope)
            num_observed[name] = times.num_observed

        def with_large_heap() -> None:
            heap = heap_of(NUM_OBJECTS)
            capture("large heap")
            del heap

        def add(name: str, arm: Callable[..., float]) -> None:
            samples.setdefault(name, []).append(arm(step, sizes, device))

        arms: dict[str, Callable[[], object]] = {
            "eager": partial(add, "eager", eager),
            "torch.cuda.graph": partial(add, "torch.cuda.graph", by_hand),
            "default": partial(capture, "default"),
            "always": partial(capture, "always", "always"),
            "never": partial(capture, "never", "never"),
            "large heap": with_large_heap,
        }
        for policy in POLICIES:
            through_library(library, decode, sizes, policy, compare=True)
        for _, arm in rounds(arms, blocks):
            arm()
    return samples, num_observed


def parts_of(step: DecodeStep, sizes: Sequence[int], device: Device) -> dict[str, dict[str, float]]:
    """Host milliseconds a graph of each part: by hand, and of a capture under each policy."""
    from benchmarks import parts  # It imports this module.

    named: dict[str, dict[str, float]] = {}
    for found in parts.capture_parts(step, sizes, device, blocks=1):
        named.setdefault(found.arm, {})[found.metric.removeprefix("G6-part-")] = round(found.ms, 3)
    return named


def captures() -> Sequence[Row]:
    with cuda_device() as device, torch.no_grad():
        step = decode_step_of_06b(SIZES, CONTEXT, device)
        samples, num_observed = measure(step, SIZES, device, BLOCKS)
        named = parts_of(step, SIZES, device)
    rows = []
    for metric, over, under, target in (
        ("G6", "default", "eager", 1.5),
        ("G6-always", "always", "eager", 1.5),
        ("G6-never", "never", "eager", 1.5),
        ("G6-heap", "large heap", "default", 1.2),
        ("G6-heap-scope", "scope, large heap", "scope, default", 1.2),
    ):
        rows.append(
            row(
                metric,
                ratio(samples, over, under),
                target=target,
                unit="ratio",
                samples=samples,
                timed=f"{over} over {under}, mean ms a graph of one scope",
                shape="qwen3-0.6b decode",
                sizes=SIZES,
                num_objects=NUM_OBJECTS,
                num_observed=num_observed,
                medians_ms=medians(samples),
                parts_ms=named,
            )
        )
    return rows


CASES = [Case("G6", "capture time per graph over eager; with a large heap", captures)]

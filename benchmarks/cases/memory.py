"""G8: what each further captured size costs, against the executables of captures by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.baselines import HandCaptured, hand_capture, poison, require_equal
from benchmarks.cases.engine import engine_of
from benchmarks.harness import CannotRunError, Case, Row, cuda_device, medians, ratio, row
from benchmarks.models import DecodeStep, decode_key, decode_step_of_06b
from graphrt import CUDAGraphWrapper, Device, ForwardContext, GraphLibrary, RuntimeMode
from graphrt.runner.report import CaptureMemory

SIZES = (*range(256, 0, -8), 4, 2, 1)
CONTEXT = 32
ROUNDS = 5
SHAPES = ("qwen3-0.6b", "llama3-8b")
STARTS = 2


class Cost(NamedTuple):
    """Bytes of all sizes but the first, together."""

    taken: int
    """Less free memory, as the driver sees it: executables and whatever the pool grew."""
    executables: int
    """``taken`` less what torch's allocator reserved meanwhile."""
    pool_growth: int


def reading(device: Device) -> tuple[int, int]:
    device.synchronize()
    memory = device.memory()
    return memory.free_bytes, memory.reserved_bytes


def cost(before: tuple[int, int], after: tuple[int, int], pool_growth: int) -> Cost:
    taken, reserved = before[0] - after[0], after[1] - before[1]
    return Cost(taken, taken - reserved, pool_growth)


def by_library(step: DecodeStep, sizes: Sequence[int], device: Device) -> tuple[GraphLibrary, Cost]:
    """Capture ``sizes`` in order; the library is left open, or the next round reuses its memory."""
    library = GraphLibrary(device)
    wrapper = CUDAGraphWrapper(step, library, RuntimeMode.FULL, name="decode")
    inputs = {size: step.inputs(size) for size in sizes}
    with library.capture_scope(may_overwrite=[step.cache.tensor]) as scope:
        for number, size in enumerate(sizes):
            step.prepare(size)
            with scope.step(RuntimeMode.NONE, decode_key(size)):
                wrapper(**inputs[size])
            if number == 1:
                before = reading(device)
            with scope.step(RuntimeMode.FULL, decode_key(size)):
                wrapper(**inputs[size])
        after = reading(device)
    programs = [wrapper.concrete_cudagraph_entries[decode_key(size)] for size in sizes]
    for size, program in zip(sizes, programs, strict=True):
        step.prepare(size)
        expected = step(**inputs[size])
        poison(program.outputs)
        with ForwardContext(RuntimeMode.FULL, program.key):
            require_equal(wrapper(**inputs[size]), expected, f"G8 {program.key}")
    growth = sum(program.memory.pool_growth_bytes for program in programs[1:])
    return library, cost(before, after, growth)


def by_hand(
    step: DecodeStep, sizes: Sequence[int], device: Device
) -> tuple[list[HandCaptured], Cost]:
    """The same sizes by ``torch.cuda.graph`` into one pool, outputs dropped but for their graph."""
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for number, size in enumerate(sizes):
        step.prepare(size)
        call = partial(step, **step.inputs(size))
        if number == 1:
            torch.cuda.empty_cache()
            before = reading(device)
        graph = hand_capture(call, device, pool=pool, warmups=0)
        graphs.append(graph._replace(outputs=None))
    torch.cuda.empty_cache()
    return graphs, cost(before, reading(device), 0)


def graph_memory() -> Sequence[Row]:
    libraries: list[GraphLibrary] = []
    graphs: list[HandCaptured] = []
    samples: dict[str, list[float]] = {"library": [], "by hand": [], "by hand, taken": []}
    growth: list[float] = []
    extra = len(SIZES) - 1
    with cuda_device() as device, torch.no_grad():
        step = decode_step_of_06b(SIZES, CONTEXT, device)
        for number in range(ROUNDS + 1):
            # All of a round stay alive: freed executables would be given to the next round.
            library, ours = by_library(step, SIZES, device)
            captured, theirs = by_hand(step, SIZES, device)
            libraries.append(library)
            graphs += captured
            if number:  # The first round also pays what the driver allocates once.
                samples["library"].append(ours.taken / extra)
                samples["by hand"].append(theirs.executables / extra)
                samples["by hand, taken"].append(theirs.taken / extra)
                growth.append(float(ours.pool_growth))
        for library in libraries:
            library.close()
        for graph in graphs:
            graph.reset()
    if min(samples["by hand"]) <= 0:
        raise CannotRunError(f"the driver reports no memory for executables: {samples}")
    shared = {"shape": "qwen3-0.6b decode", "sizes": SIZES, "medians_bytes": medians(samples)}
    return [
        row(
            "G8",
            ratio(samples, "library", "by hand"),
            target=1.05,
            unit="ratio",
            samples=samples,
            timed="driver bytes per extra size, over the executable of a capture by hand",
            **shared,
        ),
        row(
            "G8-pool",
            growth,
            target=0.0,
            unit="bytes",
            samples={"pool growth": growth},
            timed="pool growth of all sizes after the largest",
            **shared,
        ),
    ]


def driver_memory() -> Sequence[Row]:
    """Starts with default sizes: how much of what the driver lost the report names, at which cost.

    The second start of a shape finds its kernels loaded, so that it takes less past the allocator.
    """
    rows = []
    for shape in SHAPES:
        named, cost, growth, parts = [], [], [], []
        for _ in range(STARTS):
            with cuda_device(), engine_of(shape) as engine, reading_seconds() as seconds:
                before = torch.cuda.mem_get_info()[0]
                started = perf_counter()
                report = engine.capture()
                took = perf_counter() - started
                lost = before - torch.cuda.mem_get_info()[0]
                taken = engine.runtime.report().memory_taken
            named.append(1 - abs(lost - (taken.total - taken.rest)) / lost)
            cost.append(sum(seconds) / took)
            # All share one pool, and the first that is captured needs the most of it.
            grown = [graph.memory.pool_growth_bytes for graph in report.graphs]
            growth.append(float(sum(grown) - max(grown)))
            parts.append(taken._asdict())
        by_key = {
            f"{graph.mode.name} {graph.key.num_tokens}": graph.memory.pool_growth_bytes
            for graph in report.graphs
            if graph.memory.pool_growth_bytes
        }
        shared = {"shape": shape, "keys": len(report.graphs), "growth_bytes": by_key}
        rows += [
            row(
                f"G8-driver-{shape.rpartition('-')[2]}",
                named,
                target=0.95,
                unit="share",
                higher_is_better=True,
                samples={"named": named},
                counted="bytes that the report gives a part, of what free memory fell by",
                parts_bytes=parts,
                **shared,
            ),
            row(
                f"G8-driver-{shape.rpartition('-')[2]}-growth",
                growth,
                target=0.0,
                unit="bytes",
                samples={"growth": growth},
                counted="pool growth of every key but the one that needs the most",
                **shared,
            ),
            row(
                f"G8-driver-{shape.rpartition('-')[2]}-cost",
                cost,
                target=0.01,
                unit="share",
                samples={"cost": cost},
                timed="s of reading memory, of the s of a capture",
                **shared,
            ),
        ]
    return rows


@contextmanager
def reading_seconds() -> Iterator[list[float]]:
    """What each call that reads memory for the report takes, while entered."""
    seconds: list[float] = []

    def timed(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = perf_counter()
            try:
                return fn(*args)
            finally:
                seconds.append(perf_counter() - started)

        return call

    with ExitStack() as patches:
        for name in ("__init__", "ended", "taken"):
            wrapped = timed(getattr(CaptureMemory, name))
            patches.enter_context(mock.patch.object(CaptureMemory, name, wrapped))
        yield seconds


CASES = [
    Case("G8", "graph memory per extra size over its executable", graph_memory),
    Case("G8-driver", "share of what captures take from the driver that is named", driver_memory),
]

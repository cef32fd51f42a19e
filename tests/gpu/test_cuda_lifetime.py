"""Graphs and pools are destroyed by a call, outside recordings, never by the collector."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from device_contract import Bench
from graphrt.device.cuda import CUDADevice
from graphrt.errors import CaptureInProgressError, DeviceReplayError, LifetimeError


@pytest.fixture
def bench(device: CUDADevice) -> Bench:
    return Bench(device, device.new_pool())


def test_collection_in_a_recording_destroys_no_graph(
    bench: Bench,
) -> None:
    x = bench.full((8,), 1.0)
    lost, _ = bench.record(lambda: x + 1)
    bench.graphs.clear()
    cycle: list[Any] = [lost]
    cycle.append(cycle)
    torch_graph = weakref.ref(lost._graph)  # type: ignore[attr-defined]
    del lost, cycle

    def body() -> torch.Tensor:
        y = x * 3
        gc.collect()
        return y + 1

    graph, out = bench.record(body)
    assert torch_graph() is not None
    bench.replay(graph)
    assert out.tolist() == [4.0] * 8


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda bench, graph: graph.reset(),
        lambda bench, graph: bench.device.trim(),
        lambda bench, graph: bench.device.close(),
        lambda bench, graph: bench.device.alloc(bench.pool, (4,), (1,), torch.float32),
    ],
    ids=["reset", "trim", "close", "alloc"],
)
def test_call_that_would_break_the_capture_raises(
    bench: Bench, forbidden: Callable[[Bench, Any], Any]
) -> None:
    x = bench.full((8,), 1.0)
    earlier, _ = bench.record(lambda: x + 1)

    def body() -> torch.Tensor:
        y = x * 3
        with pytest.raises(CaptureInProgressError):
            forbidden(bench, earlier)
        return y + 1

    graph, out = bench.record(body)
    bench.replay(graph)
    assert out.tolist() == [4.0] * 8


def test_second_device_of_the_gpu_sees_the_first_one_record(bench: Bench) -> None:
    x = bench.full((64, 64), 1.0)
    twin = CUDADevice(bench.device.index)

    def body() -> torch.Tensor:
        y = x @ x  # Its workspace of cuBLAS must last until the recording has ended.
        for forbidden in (twin.trim, twin.close):
            with pytest.raises(CaptureInProgressError):
                forbidden()
        assert twin.is_capturing()
        return y @ x

    graph, out = bench.record(body)
    bench.replay(graph)
    assert out.eq(64.0**2).all()
    assert not twin.is_capturing()
    twin.trim()
    twin.close()


def test_pool_with_graphs_cannot_be_released(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    graph, out = bench.record(lambda: x + 1)
    with pytest.raises(LifetimeError, match="1 graphs"):
        bench.pool.release()
    bench.replay(graph)
    assert out.tolist() == [2.0] * 8


def test_output_outlives_its_graph_and_its_pool(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    graph, out = bench.record(lambda: x + 1)
    bench.replay(graph)
    bench.retire()
    bench.pool.release()
    bench.device.trim()
    assert out.tolist() == [2.0] * 8


def test_launch_bound_before_a_reset_raises_a_replay_error(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    graph, _ = bench.record(lambda: x + 1)
    bench.replay(graph)
    bound = graph.replay
    bench.retire()
    with pytest.raises(DeviceReplayError) as caught:
        bound()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_graph_launches_on_any_stream(bench: Bench) -> None:
    x = bench.full((1 << 16,), 1.0)
    graph, out = bench.record(lambda: x + 1)
    other = bench.device.stream("other")
    bench.device.synchronize()
    for value in (5.0, 6.0, 7.0):
        with bench.device.use(other):
            x.fill_(value)
            graph.replay()
        bench.device.synchronize(other)
        assert out.eq(value + 1).all()


def test_replay_never_synchronises(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    graph, out = bench.record(lambda: torch.rand_like(x) + x)
    bench.replay(graph)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It is a prototype, says torch.
            torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.ge(1.0).all()


SCRIPTS = {
    "nothing closed": "graph, out = record(); graph.replay()",
    "a capture that failed": (
        "recording = d.begin(pool, d.stream('capture'), 'case')\n"
        "try: (x + 1).sum().item()\n"
        "except RuntimeError as error: recording.abort(error)"
    ),
    "a device in a cycle": "ring = [d, pool, record()]; ring.append(ring); del d, pool, ring",
}

PROLOGUE = """
import torch
from graphrt.device.cuda import CUDADevice
d = CUDADevice()
pool = d.new_pool()
x = torch.ones(8, device="cuda")
torch.cuda.synchronize()
torch.cuda.set_stream(d.stream("capture").torch_stream)
def record():
    recording = d.begin(pool, d.stream("capture"), "case")
    out = x + 1
    return recording.end(), out
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """One for each script, all at once: nearly all of their time goes into importing torch."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PROLOGUE + script], stderr=subprocess.PIPE, text=True
                )
            )
            for name, script in SCRIPTS.items()
        }


@pytest.mark.parametrize("name", SCRIPTS)
def test_process_that_closes_nothing_ends_cleanly(
    processes: dict[str, subprocess.Popen[str]], name: str
) -> None:
    _, errors = processes[name].communicate()
    assert processes[name].returncode == 0, errors

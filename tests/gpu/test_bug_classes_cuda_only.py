"""The part of the known bug classes that only CUDA has: raw pointers, cuBLAS, a driver, a fork."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from trends import check_no_trend

from device_contract import LARGE, Bench as RecordingBench
from graphrt import BatchDescriptor, CaptureJob, GraphBudget, RuntimeMode, break_point, capture_all
from graphrt.device.cuda import CUDADevice
from graphrt.errors import DeviceReplayError
from graphrt.gc_pause import frozen_heap
from lab import FULL, KEY, PIECEWISE, Lab

BLOCK = 1024


@pytest.fixture(autouse=True)
def _no_grad(device: CUDADevice) -> Iterator[None]:
    with frozen_heap(), torch.no_grad():
        yield


@pytest.fixture
def lab(device: CUDADevice) -> Iterator[Lab]:
    lab = Lab(device)
    yield lab
    lab.library.close()


def _add_hidden(x, hidden_address, out, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hidden = hidden_address.to(tl.pointer_type(tl.float32))
    tl.store(out + at, tl.load(x + at) + tl.load(hidden + at))


_add_hidden_kernel: Any = triton.jit(_add_hidden)


@pytest.mark.parametrize("is_held", [True, False])
def test_1_tensor_known_by_pointer_needs_keep_alive(lab: Lab, is_held: bool) -> None:
    x, hidden = lab.full((LARGE,), 1.0), lab.full((LARGE,), 3.0)
    address = hidden.data_ptr()

    def add_hidden(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _add_hidden_kernel[(LARGE // BLOCK,)](x, address, out, BLOCK=BLOCK)
        return out

    wrapper = lab.wrap_and_capture(add_hidden, x, scope={"keep_alive": [hidden] if is_held else []})
    assert lab.step(wrapper, x).eq(4).all()
    del hidden
    others = [lab.full((LARGE,), -9.0) for _ in range(16)]
    # No recording can see it, so without the word its memory soon is somebody else's.
    assert (address in {other.data_ptr() for other in others}) is not is_held
    assert lab.step(wrapper, x).eq(4 if is_held else -8).all()


@pytest.mark.skipif(
    "check_input_liveness" not in inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters,
    reason="this torch does not check whether inputs live",
)
def test_1_debug_device_replay_of_a_dead_input_raises() -> None:
    device = CUDADevice(debug=True)
    lab = RecordingBench(device, device.new_pool())
    owner = {"x": lab.full((LARGE,), 1.0)}
    # Unobserved, so that nothing of ours keeps it.
    graph, out = lab.record(lambda: owner["x"] * 2, observe=False)
    lab.replay(graph)
    assert out.eq(2).all()
    owner.clear()
    with pytest.raises(DeviceReplayError, match="dead tensor"):
        lab.replay(graph)
    device.close()


def test_8_survivor_uses_no_memory_of_a_retired_graph(
    device: CUDADevice,
) -> None:
    """Graphs of one stream share cuBLAS's workspace unless each recording makes its own."""
    lab = Lab(device, budget=GraphBudget(max_graphs=2), generation_size=1)
    depth, width = 8192, 64
    weight = (lab.random(depth, width) / depth**0.5).to(torch.bfloat16)
    inputs = {n: lab.random(n, depth, seed=n).to(torch.bfloat16) for n in (8, 16, 32)}
    wrapper = lab.wrap(lambda x: x @ weight)
    for n, x in inputs.items():
        lab.wrap_and_capture(wrapper, x, key=BatchDescriptor(n), scope={"generation": "lazy"})
    survivors = [key.num_tokens for key in wrapper.concrete_cudagraph_entries]
    assert survivors == [16, 32]
    device.trim()
    ballast = [lab.full((LARGE,), float("nan")) for _ in range(32)]
    for _ in range(3):
        for n in survivors:
            x = inputs[n].normal_()
            assert torch.equal(lab.step(wrapper, x, key=BatchDescriptor(n)), x @ weight)
    assert all(block.isnan().all() for block in ballast), "a replay wrote into freed memory"
    lab.library.close()


@pytest.mark.parametrize(("mode", "num_nodes"), [(FULL, 3), (PIECEWISE, 2)])
@pytest.mark.parametrize("debug", [False, True])
def test_15_programs_count_their_nodes(mode: RuntimeMode, num_nodes: int, debug: bool) -> None:
    device = CUDADevice(debug=debug)
    lab = Lab(device)
    eager = break_point(lambda x: x.neg())
    x = lab.full((64,), 1.0)
    wrapper = lab.wrap_and_capture(lambda x: eager(x + 1) * 2, x, mode=mode)
    assert wrapper.concrete_cudagraph_entries[KEY].memory.num_nodes == num_nodes
    assert lab.step(wrapper, x).eq(-4).all()
    lab.library.close()
    device.close()


FORK = """
import os, warnings
import torch
from graphrt import BatchDescriptor, CUDAGraphWrapper, ForwardContext
from graphrt.errors import ForkedProcessError
from graphrt import GraphLibrary, RuntimeMode
from graphrt.device.cuda import CUDADevice

device = CUDADevice()
library = GraphLibrary(device)
wrapper = CUDAGraphWrapper(lambda x: x + 1, library, RuntimeMode.FULL)
key, x = BatchDescriptor(8), torch.ones(8, device="cuda")

def step():
    with ForwardContext(RuntimeMode.FULL, key):
        return wrapper(x)

def capture():
    with library.capture_scope() as scope, scope.step(RuntimeMode.FULL, key):
        wrapper(x)

with torch.no_grad():
    capture()
    program = wrapper.concrete_cudagraph_entries[key]
    step()
    reader, writer = os.pipe()
    warnings.simplefilter("ignore")  # That other threads exist is not this test's worry.
    child = os.fork()
    if child == 0:
        for use in (step, program.replay, lambda: program(x), capture):
            try:
                use()
            except ForkedProcessError:
                os.write(writer, b"refused ")
            except BaseException as error:
                os.write(writer, repr(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        print(answers.read())
    x.fill_(5)
    assert step().eq(6).all()
library.close()
device.close()
"""


def test_15_fork_child_is_refused_and_parent_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * 4


def test_20_captures_and_retirements_leak_no_driver_memory(
    lab: Lab,
) -> None:
    device, weight = lab.device, lab.random(256, 256)
    inputs = {n: lab.random(n, 256, seed=n) for n in (256, 128, 64)}

    def one_round() -> None:
        wrapper = lab.wrap(lambda x: torch.relu(x @ weight) + 1)
        jobs = [
            CaptureJob(wrapper, wrapper.runtime_mode, BatchDescriptor(n), lambda x=x: ((x,), {}))
            for n, x in inputs.items()
        ]
        with lab.library.capture_scope() as scope:
            capture_all(scope.library, jobs)
        for n, x in inputs.items():
            lab.step(wrapper, x, key=BatchDescriptor(n))
        lab.library.retire()
        device.trim()

    check_no_trend(device, one_round)

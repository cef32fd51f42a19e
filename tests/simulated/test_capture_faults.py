"""A capture that fails anywhere leaves nothing behind, and shows its first error."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from graphrt import (
    BatchDescriptor,
    CUDAGraphWrapper,
    RuntimeMode,
    SimulatedDevice,
    TensorStateGuard,
    break_point,
    capture_all,
)
from graphrt.device.simulated import Faults
from graphrt.errors import (
    CaptureError,
    DeviceReplayError,
    ForbiddenOperationError,
    GraphrtError,
    StreamRaceError,
)
from lab import FULL, KEY, PIECEWISE, Lab, rows_runner

OTHER = BatchDescriptor(4)


@break_point
def eager(x: Tensor) -> Tensor:
    return x * 2


def model(x: Tensor) -> Tensor:
    return torch.relu(eager(x + 1) - 3)


def snapshot(lab: Lab) -> tuple[object, ...]:
    [generation] = lab.library.generations
    return (
        generation.pool.bytes(),
        tuple(generation.pool.live_blocks()),
        sum(program.memory.exec_bytes for program in generation.programs),
        lab.library.num_graphs,
        lab.library.num_cudagraph_captured,
        lab.device.current_stream(),
        lab.device.is_capturing(),
        lab.library.scope is not None,
        gc.isenabled(),
    )


def fail_and_recover(lab: Lab, wrapper: CUDAGraphWrapper, faults: Faults) -> GraphrtError:
    """Capture under ``faults``; then everything must be as before, and work."""
    x = torch.randn(4)
    before = snapshot(lab)
    lab.device.faults.op, lab.device.faults.allocation = faults.op, faults.allocation
    lab.device.faults.end = faults.end
    try:
        with pytest.raises(GraphrtError) as caught:
            lab.capture(wrapper, x)
        error = caught.value
        del caught
    finally:
        lab.device.faults.op = lab.device.faults.allocation = None
        lab.device.faults.end = False
    # The traceback holds the frames of the capture, and they its tensors.
    error.__traceback__ = None
    gc.collect()
    # What an earlier segment of the failed program filled stays with the pool, for the next one.
    first = 1 if wrapper.runtime_mode is PIECEWISE else 0
    pool_of = slice(first, None)
    assert snapshot(lab)[pool_of] == before[pool_of]
    assert not wrapper.concrete_cudagraph_entries
    assert torch.equal(wrapper(x), torch.relu((x + 1) * 2 - 3))
    lab.capture(wrapper, x, key=OTHER)
    assert torch.equal(lab.step(wrapper, x, key=OTHER), model(x))
    lab.library.forget_failures()
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), model(x))
    return error


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize(
    "faults",
    [
        *[Faults(op=k) for k in range(2)],
        *[Faults(allocation=k) for k in range(2)],
        Faults(end=True),
    ],
    ids=str,
)
def test_capture_fault_anywhere_leaves_nothing_behind(
    lab: Lab, mode: RuntimeMode, faults: Faults
) -> None:
    error = fail_and_recover(lab, lab.wrap(model, mode, name="model"), faults)
    assert isinstance(error, CaptureError)
    assert "injected" in str(error)
    assert (error.owner, error.mode) == ("model", mode.name)


@pytest.mark.parametrize("at", range(3))
def test_capture_fault_at_each_kernel_of_a_recording_is_typed(lab: Lab, at: int) -> None:
    error = fail_and_recover(lab, lab.wrap(model), Faults(op=at))
    assert isinstance(error, CaptureError)
    assert error.source


def test_capture_after_out_of_memory_works(lab: Lab) -> None:
    with Lab(SimulatedDevice(driver_bytes=1 << 16)) as small:
        wrapper = small.wrap(lambda x: x + 1)
        big, x = torch.ones(1 << 15), torch.ones(4)
        with pytest.raises(CaptureError):
            small.capture(wrapper, big)
        small.capture(wrapper, x, key=OTHER)
        assert torch.equal(small.step(wrapper, x, key=OTHER), x + 1)


def test_capture_error_that_the_model_swallows_is_raised(lab: Lab) -> None:
    def swallows(x: Tensor) -> Tensor:
        try:
            x.sum().item()
        except ForbiddenOperationError:
            x = x + 1
        return x + 1

    with pytest.raises(ForbiddenOperationError, match="item") as caught:
        lab.capture(lab.wrap(swallows), torch.ones(2))
    assert caught.value.segment == 0
    assert "test_capture_faults.py" in caught.value.source


def test_forbidden_operation_names_module_and_line(lab: Lab) -> None:
    class Router(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * int(x.sum().item())

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = Router()

        def forward(self, x: Tensor) -> Tensor:
            return self.router(x + 1)

    layers = torch.nn.Sequential(Block(), torch.nn.Identity())
    with pytest.raises(ForbiddenOperationError) as caught:
        lab.capture(lab.wrap(layers, name="decoder"), torch.ones(2))
    error = caught.value
    assert (error.owner, error.mode, error.module_path) == ("decoder", "FULL", "0.router")
    assert "num_tokens=8" in error.key
    assert "test_capture_faults.py" in error.source


@pytest.mark.parametrize("side_reads", [True, False])
def test_capture_read_of_another_stream_unjoined_is_a_race(lab: Lab, side_reads: bool) -> None:
    side = lab.library.stream("side")

    def fork() -> None:
        lab.device.order(side, lab.device.current_stream())

    def side_reads_early(x: Tensor) -> Tensor:
        fork()
        y = x * 2
        with lab.device.use(side):
            z = y + 1
        lab.device.order(lab.device.current_stream(), side)
        return z + y

    def main_reads_early(x: Tensor) -> Tensor:
        y = x * 2
        fork()
        with lab.device.use(side):
            z = y + 1
        return z * 2

    with pytest.raises(StreamRaceError):
        lab.capture(lab.wrap(side_reads_early if side_reads else main_reads_early), torch.ones(2))


def test_replay_fault_after_a_state_write_is_not_repeated(lab: Lab) -> None:
    calls = []
    state = torch.zeros(2)

    def advances(x: Tensor) -> Tensor:
        calls.append(1)
        state.add_(x)
        return state * 2

    wrapper, x = lab.wrap(advances), torch.ones(2)
    program = lab.capture(wrapper, x, scope={"checks": "none"})
    lab.step(wrapper, x)
    assert torch.equal(state, torch.ones(2))
    lab.device.faults.replay_op = 1
    with pytest.raises(DeviceReplayError):
        lab.step(wrapper, x)
    lab.device.faults.replay_op = None
    assert torch.equal(state, torch.full((2,), 2.0))
    assert torch.equal(lab.step(wrapper, x), torch.full((2,), 6.0))
    assert len(calls) == 1
    assert program.state == "ready"
    assert lab.library.program(wrapper, FULL, KEY) is program


def test_capture_failure_destroys_earlier_segments(lab: Lab) -> None:
    @break_point
    def raises(x: Tensor) -> None:
        raise ValueError("in the eager segment")

    def fails(x: Tensor) -> Tensor:
        y = x + 1
        raises(y)
        return y

    free = lab.device.memory().free_bytes + lab.library.generations[0].pool.bytes()
    with pytest.raises(ValueError, match="in the eager segment"):
        lab.capture(lab.wrap(fails, PIECEWISE), torch.ones(2))
    gc.collect()
    assert lab.device.memory().free_bytes + lab.library.generations[0].pool.bytes() == free


def test_capture_failure_skipped_keeps_no_pool_memory(lab: Lab) -> None:
    def model(x: Tensor) -> Tensor:
        y = x + 1
        return y * y.sum().item() if len(x) == 64 else y

    wrapper = lab.wrap(model)
    with lab.library.capture_scope(on_error="skip", warmups=0) as scope:
        capture_all(scope.library, [lab.job(wrapper, torch.ones(64))])
        assert not lab.library.generations[0].pool.live_blocks()


class FailsToRestore(TensorStateGuard):
    def restore(self, token: list[Tensor]) -> None:
        super().restore(token)
        raise OSError("the state is gone")


def test_state_guard_that_fails_after_a_recording_leaves_no_graph(lab: Lab) -> None:
    guard = FailsToRestore([torch.zeros(4)])
    x = torch.randn(4)
    free = lab.device.memory().free_bytes
    with pytest.raises(OSError, match="the state is gone") as caught:
        lab.capture(lab.wrap(model, PIECEWISE), x, scope={"state": guard})
    caught.value.__traceback__ = None
    del caught
    lab.library.retire()
    assert lab.device.memory().free_bytes == free


class UnsayableError(Exception):
    """Of a class that can neither be copied nor shown."""

    def __init__(self, number: str) -> None:
        super().__init__("no number")
        self.number = int(number)

    def __str__(self) -> str:
        raise KeyError("no text")


def test_error_that_cannot_be_copied_or_shown_is_recorded() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise UnsayableError("1")

    with rows_runner(fails, on_capture_error="skip") as runner:
        (failure,) = runner.capture().failures.values()
        assert "UnsayableError: its text raises KeyError" in failure
        assert failure in str(runner.report())
        assert "its text raises KeyError" in runner.explain(runner.keys[0])

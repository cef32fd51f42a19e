"""A capture that fails anywhere leaves nothing behind, and shows its first error."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from graph_lab import FULL, KEY, PIECEWISE, Lab
from torch import Tensor

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.device.simulated import Faults, SimulatedDevice
from graphrt.errors import (
    CaptureError,
    DeviceReplayError,
    EmptyCaptureError,
    ForbiddenOperationError,
    GraphrtError,
    StreamRaceError,
    UnjoinedStreamError,
)
from graphrt.graphs import CUDAGraphWrapper, break_point

OTHER = BatchDescriptor(4)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@break_point
def gap(x: Tensor) -> Tensor:
    return x * 2


def model(x: Tensor) -> Tensor:
    return torch.relu(gap(x + 1) - 3)


def snapshot(lab: Lab) -> tuple[object, ...]:
    [generation] = lab.library.generations
    return (
        generation.pool.bytes(),
        tuple(generation.pool.live_blocks()),
        generation.exec_bytes,
        lab.library.num_graphs,
        lab.library.num_cudagraph_captured,
        lab.device.current_stream(),
        lab.device.is_capturing(),
        lab.library.has_open_scope,
        gc.isenabled(),
    )


def fail_and_recover(lab: Lab, wrapper: CUDAGraphWrapper, faults: Faults) -> GraphrtError:
    """Capture under ``faults``; then everything must be as before, and work."""
    mode, x = wrapper.runtime_mode, torch.randn(4)
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
    assert torch.equal(lab.step(wrapper, x, mode=mode, key=OTHER), model(x))
    lab.library.forget_failures()
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x, mode=mode), model(x))
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
def test_bug_class_12_a_fault_anywhere_leaves_nothing_behind(
    lab: Lab, mode: RuntimeMode, faults: Faults
) -> None:
    error = fail_and_recover(lab, lab.wrap(model, mode, name="model"), faults)
    assert isinstance(error, CaptureError)
    assert "injected" in str(error)
    assert (error.owner, error.mode) == ("model", mode.name)


@pytest.mark.parametrize("at", range(3))
def test_bug_class_12_a_fault_at_each_kernel_of_one_window(lab: Lab, at: int) -> None:
    error = fail_and_recover(lab, lab.wrap(model), Faults(op=at))
    assert isinstance(error, CaptureError)
    assert error.source


def test_bug_class_12_out_of_memory_is_not_the_end(lab: Lab) -> None:
    with Lab(SimulatedDevice(driver_bytes=1 << 16)) as small:
        wrapper = small.wrap(lambda x: x + 1)
        big, x = torch.ones(1 << 15), torch.ones(4)
        with pytest.raises(CaptureError):
            small.capture(wrapper, big)
        small.capture(wrapper, x, key=OTHER)
        assert torch.equal(small.step(wrapper, x, key=OTHER), x + 1)


def test_bug_class_12_the_first_error_is_raised_or_the_cause(lab: Lab) -> None:
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


def test_a_forbidden_operation_names_module_and_line(lab: Lab) -> None:
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


def test_bug_class_15_nothing_recorded_is_an_error(lab: Lab) -> None:
    wrapper = lab.wrap(lambda x: x)
    with pytest.raises(EmptyCaptureError):
        lab.capture(wrapper, torch.ones(2))
    assert not wrapper.concrete_cudagraph_entries


def test_bug_class_15_the_first_replay_does_not_show_what_capture_left(lab: Lab) -> None:
    wrapper, x = lab.wrap(lambda x: x * 2), torch.ones(3)
    program = lab.capture(wrapper, x)
    assert program.outputs.isnan().all()
    assert torch.equal(lab.step(wrapper, x), x * 2)


def test_bug_class_16_a_registered_stream_is_joined_and_forked_at_a_gap(lab: Lab) -> None:
    side = lab.library.stream("side")
    main_of = lab.device.current_stream
    seen: list[float] = []

    @break_point
    def cut(x: Tensor) -> None:
        seen.append(x.sum().item())

    def forked(x: Tensor) -> Tensor:
        y = x * 2
        with lab.device.use(side):
            lab.device.order(side, stream := lab.device.stream(side.name))
            assert stream is side
            z = y + 1
        cut(y)
        with lab.device.use(side):
            w = z * 3
        lab.device.order(main_of(), side)
        return w + y

    def setup(x: Tensor) -> Tensor:
        lab.device.order(side, main_of())
        return forked(x)

    wrapper, x = lab.wrap(setup, PIECEWISE), torch.ones(2)
    with pytest.raises(StreamRaceError):
        # Forked before y was written: nothing orders the side stream after it.
        lab.capture(wrapper, x)

    def ordered(x: Tensor) -> Tensor:
        y = x * 2
        lab.device.order(side, main_of())
        with lab.device.use(side):
            z = y + 1
        cut(y)
        with lab.device.use(side):
            w = z * 3
        lab.device.order(main_of(), side)
        return w + y

    wrapper = lab.wrap(ordered, PIECEWISE)
    program = lab.capture(wrapper, x)
    assert program.num_graphs == 2
    for value in (1.0, 4.0):
        x.fill_(value)
        out = lab.step(wrapper, x, mode=PIECEWISE)
        assert out[0].item() == (value * 2 + 1) * 3 + value * 2
    assert seen[-1] == 16


def test_bug_class_16_an_unregistered_stream_must_be_joined_by_its_user(lab: Lab) -> None:
    side = lab.device.stream("private")

    def forgets(x: Tensor) -> Tensor:
        y = x * 2
        lab.device.order(side, lab.device.current_stream())
        with lab.device.use(side):
            y + 1
        return y

    wrapper = lab.wrap(forgets)
    with pytest.raises(UnjoinedStreamError):
        lab.capture(wrapper, torch.ones(2))
    lab.library.forget_failures()
    lab.library.register_stream(side)
    lab.capture(wrapper, torch.ones(2))


def test_bug_class_16_reading_side_stream_work_without_a_join_is_a_race(lab: Lab) -> None:
    side = lab.library.stream("side")

    def races(x: Tensor) -> Tensor:
        y = x * 2
        lab.device.order(side, lab.device.current_stream())
        with lab.device.use(side):
            z = y + 1
        return z * 2

    with pytest.raises(StreamRaceError):
        lab.capture(lab.wrap(races), torch.ones(2))


def test_bug_class_24_a_fault_after_a_state_write_is_never_repeated_eagerly(lab: Lab) -> None:
    calls = []
    state = torch.zeros(2)

    def advances(x: Tensor) -> Tensor:
        calls.append(1)
        state.add_(x)
        return state * 2

    wrapper, x = lab.wrap(advances), torch.ones(2)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x)
    assert torch.equal(state, torch.ones(2))
    lab.device.faults.replay_op = 1
    with pytest.raises(DeviceReplayError):
        lab.step(wrapper, x)
    lab.device.faults.replay_op = None
    assert torch.equal(state, torch.full((2,), 2.0))
    assert len(calls) == 1
    assert program.state == "ready"
    assert lab.library.program(wrapper, FULL, KEY) is program


def test_bug_class_12_graphs_of_earlier_segments_are_destroyed(lab: Lab) -> None:
    @break_point
    def raises(x: Tensor) -> None:
        raise ValueError("in the gap")

    def fails(x: Tensor) -> Tensor:
        y = x + 1
        raises(y)
        return y

    free = lab.device.memory().free_bytes + lab.library.generations[0].pool.bytes()
    with pytest.raises(ValueError, match="in the gap"):
        lab.capture(lab.wrap(fails, PIECEWISE), torch.ones(2))
    gc.collect()
    assert lab.device.memory().free_bytes + lab.library.generations[0].pool.bytes() == free


def test_bug_class_12_a_skipped_failure_keeps_no_pool_memory_for_the_next_job(lab: Lab) -> None:
    def model(x: Tensor) -> Tensor:
        y = x + 1
        return y * y.sum().item() if len(x) == 64 else y

    wrapper = lab.wrap(model)
    with lab.library.capture_scope(on_error="skip", warmups=0) as scope:
        scope.capture_all([lab.job(wrapper, torch.ones(64))])
        assert not lab.library.generations[0].pool.live_blocks()

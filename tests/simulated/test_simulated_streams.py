"""Logical streams: what is ordered, what races, what must not cross the end of a recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from simulated_recording import record

from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import (
    CaptureError,
    CaptureInProgressError,
    EnvironmentMismatchError,
    StreamRaceError,
    UnjoinedStreamError,
    UnsupportedOperationError,
)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


class Streams:
    """The capture stream and one side stream of a device."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.capture, self.side = device.stream("capture"), device.stream("side")

    def fork(self) -> None:
        self.device.order(self.side, self.capture)

    def join(self) -> None:
        self.device.order(self.capture, self.side)

    def on_side(self) -> AbstractContextManager[None]:
        return self.device.use(self.side)


@pytest.mark.parametrize(
    "kind", ["read after write", "write after read", "write after write", "write by out after read"]
)
def test_unordered_accesses_to_the_same_bytes_race(device: SimulatedDevice, kind: str) -> None:
    streams, x, state = Streams(device), torch.ones(4), torch.zeros(4)

    def body() -> None:
        streams.fork()
        with streams.on_side():
            if kind.endswith("after read"):
                x.add(state)
            else:
                state.add_(x)
        if kind == "read after write":
            state + 1
        elif kind == "write by out after read":
            torch.mul(x, 2, out=state)
        else:
            state.mul_(2)
        streams.join()

    with pytest.raises(StreamRaceError) as caught:
        record(device, device.new_pool(), body)
    found = caught.value.found
    assert "aten::add" in found
    assert ("aten::mul" in found) == (kind != "read after write")
    assert "'side'" in found
    assert "'capture'" in found
    assert found.count("test_simulated_streams.py") == 2


def test_two_reads_and_two_slices_are_no_race(device: SimulatedDevice) -> None:
    streams, x, state = Streams(device), torch.ones(4), torch.zeros(8)

    def body() -> torch.Tensor:
        streams.fork()
        with streams.on_side():
            state[:4].copy_(x)
        state[4:].copy_(x * 2)
        streams.join()
        return state + 0

    graph, out = record(device, device.new_pool(), body)
    graph.replay()
    assert out.tolist() == [1.0] * 4 + [2.0] * 4


def test_a_mark_covers_what_came_before_it_only(device: SimulatedDevice) -> None:
    streams, state = Streams(device), torch.zeros(4)

    def early() -> None:
        state.add_(1)
        mark = device.mark(streams.capture)
        state.clone()  # After the mark; reading beside a reader is fine.
        device.wait(streams.side, mark)
        with streams.on_side():
            state.clone()
        streams.join()

    def late() -> None:
        mark = device.mark(streams.capture)
        state.add_(1)  # After the mark: the side stream does not wait for it.
        device.wait(streams.side, mark)
        with streams.on_side():
            state.clone()
        streams.join()

    pool = device.new_pool()
    record(device, pool, early)
    with pytest.raises(StreamRaceError):
        record(device, pool, late)
    record(device, pool, early)


def test_order_passes_through_a_third_stream(device: SimulatedDevice) -> None:
    streams, state, third = Streams(device), torch.zeros(4), device.stream("third")

    def body() -> None:
        streams.fork()
        with streams.on_side():
            state.add_(1)
        device.order(third, streams.side)
        with device.use(third):
            state.mul_(2)
        device.order(streams.capture, third)
        state.sub_(1)

    graph, _ = record(device, device.new_pool(), body)
    graph.replay()
    assert state.tolist() == [1.0] * 4


def test_memory_freed_on_a_stream_is_not_reused_on_another(
    device: SimulatedDevice,
) -> None:
    streams, x, pool = Streams(device), torch.ones(64), device.new_pool()

    def body() -> torch.Tensor:
        streams.fork()
        with streams.on_side():
            y = x + 1
            del y
        z = x * 2  # On CUDA this block is another one: the side stream may still write the first.
        streams.join()
        return z

    record(device, pool, body)
    assert pool.bytes() == 2 * x.nbytes
    # The block of the side stream stays that stream's, also in later recordings.
    _, kept = record(device, pool, lambda: (x + 1, x + 2))
    assert pool.bytes() == 3 * x.nbytes
    del kept
    record(device, pool, body)
    assert pool.bytes() == 3 * x.nbytes


def test_block_freed_while_another_stream_reads_it_races(device: SimulatedDevice) -> None:
    streams, x = Streams(device), torch.ones(64)

    def body() -> torch.Tensor:
        y = x + 1
        streams.fork()
        with streams.on_side():
            z = y * 2
        del y  # Its bytes go back to the capture stream while the side stream reads them.
        w = x + 3
        streams.join()
        return z + w

    with pytest.raises(StreamRaceError):
        record(device, device.new_pool(), body)


def test_only_a_stream_with_work_has_to_be_joined(device: SimulatedDevice) -> None:
    streams, x, pool = Streams(device), torch.ones(4), device.new_pool()

    def forked(works: bool) -> torch.Tensor:
        streams.fork()
        with streams.on_side() if works else nullcontext():
            return x + 1

    for _ in range(2):
        with pytest.raises(UnjoinedStreamError, match="'side'"):
            record(device, pool, lambda: forked(True))
    record(device, pool, lambda: forked(False))


def test_work_on_a_stream_that_is_not_recorded_is_an_error(device: SimulatedDevice) -> None:
    streams, x = Streams(device), torch.ones(4)

    def stray() -> torch.Tensor:
        with streams.on_side():
            return x + 1

    with pytest.raises(UnjoinedStreamError) as caught:
        record(device, device.new_pool(), stray)
    assert "stray: return x + 1" in caught.value.source


def test_mark_does_not_cross_the_edge_of_a_recording(device: SimulatedDevice) -> None:
    streams, x, pool = Streams(device), torch.ones(4), device.new_pool()
    marks: list[Any] = [device.mark(streams.side)]

    def waits_for_outside() -> torch.Tensor:
        device.wait(streams.capture, marks[0])
        return x + 1

    with pytest.raises(UnjoinedStreamError):
        record(device, pool, waits_for_outside)

    def marks_inside() -> torch.Tensor:
        y = x + 1
        marks.append(device.mark(streams.capture))
        return y

    record(device, pool, marks_inside)
    with pytest.raises(UnjoinedStreamError):
        device.wait(streams.side, marks[1])
    device.wait(streams.side, marks[0])


def test_open_recording_refuses_a_second_and_synchronize(device: SimulatedDevice) -> None:
    pool, capture, x = device.new_pool(), device.stream("capture"), torch.ones(2)
    with pytest.raises(EnvironmentMismatchError):
        device.begin(pool, capture, "elsewhere")
    with device.use(capture):
        recording = device.begin(pool, capture, "first")
        with pytest.raises(CaptureInProgressError):
            device.begin(device.new_pool(), capture, "second")
        with pytest.raises(CaptureInProgressError):
            device.close()
        with pytest.raises(CaptureError, match="synchronize"):
            device.synchronize()
        out = x + 1
        graph = recording.end()
        with pytest.raises(CaptureError, match="closed already"):
            recording.end()
        error = ValueError("late")
        assert recording.abort(error) is error
    graph.replay()
    assert out.tolist() == [2.0, 2.0]


def test_streams_are_persistent_and_limited() -> None:
    device = SimulatedDevice(max_streams=1)
    one = device.stream("one")
    assert device.stream("one") is one
    assert one is not device.current_stream()
    with pytest.raises(CaptureError):
        device.stream("two")
    device.close()


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("work"), st.integers(0, 2), st.integers(0, 3), st.booleans()),
            st.tuples(st.just("order"), st.integers(0, 2), st.integers(0, 2), st.booleans()),
        ),
        max_size=12,
    )
)
def test_race_is_found_iff_no_orders_connect_two_accesses(steps: list[Any]) -> None:
    """Against a plain model: every operation, and the set of those known to come before it."""
    device = SimulatedDevice()
    streams = [device.stream(name) for name in ("capture", "a", "b")]
    state = torch.zeros(4)
    before: list[set[int]] = [set(), set(), set()]
    done: list[tuple[int, bool]] = []
    races = False

    def body() -> None:
        nonlocal races
        for side in (1, 2):
            device.order(streams[side], streams[0])
        for kind, stream, other, writes in steps:
            if kind == "order":
                if stream != other:
                    device.order(streams[stream], streams[other])
                    before[stream] |= before[other]
                continue
            races |= any(
                at not in before[stream] and cell == other and (wrote or writes)
                for at, (cell, wrote) in enumerate(done)
            )
            before[stream] = before[stream] | {len(done)}
            done.append((other, writes))
            with device.use(streams[stream]):
                if writes:
                    state[other].fill_(1.0)
                else:
                    state[other].sum()
        for side in (1, 2):
            device.order(streams[0], streams[side])
        state.sum()

    try:
        record(device, device.new_pool(), body)
        found = False
    except StreamRaceError:
        found = True
    assert found == races
    device.close()


def exchange(received: torch.Tensor, sent: torch.Tensor) -> None:
    dist.all_to_all_single(received, sent)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("touch", ["sent.add_(1)", "received + 1", "received.zero_()"])
def test_collective_races_with_what_it_moves(
    device: SimulatedDevice, alone: None, touch: str, waits: bool
) -> None:
    streams, sent, received = Streams(device), torch.ones(4), torch.zeros(4)
    caught = nullcontext() if waits else pytest.raises(StreamRaceError, match="alltoall")
    with device.watch_races(), caught, device.use(streams.capture):
        with streams.on_side():
            exchange(received, sent)
        if waits:
            streams.join()
        exec(touch, {"sent": sent, "received": received})


def test_value_read_by_the_host_races(device: SimulatedDevice) -> None:
    streams, x = Streams(device), torch.ones(4)
    with device.watch_races(), device.use(streams.capture):
        with streams.on_side():
            x.add_(1)
        assert len(x) == 4
        with pytest.raises(StreamRaceError):
            x[0].item()


def test_plain_collective_is_not_recorded_in_part(device: SimulatedDevice, alone: None) -> None:
    sent, received = torch.ones(4), torch.zeros(4)
    with pytest.raises(UnsupportedOperationError, match="alltoall"):
        record(device, device.new_pool(), lambda: exchange(received, sent))

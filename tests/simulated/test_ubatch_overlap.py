"""What overlaps: missing waits, legal orders, receive hooks, and how long a schedule is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from simulated_recording import record
from tests.lab import FULL, NONE, Lab
from tests.ubatch_models import WIDTH, Layers, uniform_key

from graphrt import ForwardContext, SimulatedDevice, ubatch
from graphrt.config import UBatchConfig
from graphrt.errors import StreamRaceError
from graphrt.ubatch import SplitCallable, make_slices

CONFIG = UBatchConfig(num_ubatches=2, decode_token_threshold=2, prefill_token_threshold=2)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@contextmanager
def cut(lab: Lab, fn: Callable[..., Any]) -> Iterator[SplitCallable]:
    split = SplitCallable(fn, lab.device, CONFIG, input_axes={"x": 0})
    yield split
    lab.library.close()
    split.close()


def eager(split: SplitCallable, num_ubatches: int, x: torch.Tensor) -> Any:
    key = uniform_key(len(x), num_ubatches)
    slices = make_slices([1] * len(x), len(x), len(x), num_ubatches)
    with ForwardContext(NONE, key, ubatch_slices=slices):
        return split(x)


def graph(lab: Lab, split: SplitCallable, num_ubatches: int, x: torch.Tensor) -> Any:
    wrapper = lab.wrap(split)
    return lab.capture(wrapper, x, key=uniform_key(len(x), num_ubatches))


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("without", ["fork", "join"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_missing_wait_is_found_with_both_operations(
    lab: Lab, num_ubatches: int, layer: int, without: str, is_captured: bool
) -> None:
    x, model = lab.random(12, WIDTH), Layers(3, without, layer)
    with cut(lab, model) as split, pytest.raises(StreamRaceError) as caught:
        _ = graph(lab, split, num_ubatches, x) if is_captured else eager(split, num_ubatches, x)
    found = caught.value.found
    assert "aten::copy_" in found
    if not is_captured:  # Else what it writes may be memory that another operation has given up.
        assert ("aten::tanh" if without == "fork" else "aten::add") in found
    assert "micro-batch 0, stream" in found
    assert found.count("ubatch_models.py") == 2


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        np.asarray,
        torch.Tensor.cpu,
        lambda x: x[0, 0].item(),
        lambda x: x.to("cpu"),
        lambda x: x.to(device="cpu"),
    ],
    ids=["tolist", "numpy", "asarray", "cpu", "item", "to", "to device"],
)
def test_host_that_reads_what_it_does_not_wait_for_is_found(
    lab: Lab, read: Callable[[torch.Tensor], Any], waits: bool
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        ubatch.switch_to_comm()
        received.copy_(x)
        ubatch.switch_to_compute(sync=waits)
        read(received)
        return x

    refused = nullcontext() if waits else pytest.raises(StreamRaceError, match="copy_")
    with cut(lab, fn) as split, refused:
        eager(split, 2, lab.random(4, WIDTH))


def test_race_names_the_tag_of_the_communication(lab: Lab) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        send, received = x * 2, torch.empty_like(x)
        with ubatch.communication("layer3.dispatch", send):
            received.copy_(send)
            ubatch.switch_to_compute(sync=False)
            send.mul_(3)  # A write after the read, which nothing orders.
            ubatch.switch_to_comm()
        return received

    with cut(lab, fn) as split, pytest.raises(StreamRaceError) as caught:
        eager(split, 2, lab.random(8, WIDTH))
    assert "'layer3.dispatch', micro-batch 0, stream" in caught.value.found
    assert "aten::mul_" in caught.value.found
    assert "reads" in caught.value.found


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_reused_under_a_transfer_is_a_race(lab: Lab, is_kept: bool) -> None:
    """Freed before the transfer that reads it is waited for, it becomes a sibling's."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        send, received = torch.tanh(x), torch.empty_like(x)
        with ubatch.communication("layer", *([send] if is_kept else [])):
            received.copy_(send)
            del send
        return received * 2

    refused: AbstractContextManager[Any] = nullcontext()
    if not is_kept:
        refused = pytest.raises(StreamRaceError)
    with cut(lab, fn) as split, refused:
        graph(lab, split, 2, lab.random(8, WIDTH))


@pytest.mark.parametrize("is_captured", [False, True])
def test_work_left_on_comm_is_joined_at_the_end(lab: Lab, is_captured: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ubatch.switch_to_comm()
        out.copy_(x)
        return out  # The caller puts the parts together on the compute stream.

    x = lab.random(8, WIDTH)
    with cut(lab, fn) as split:
        if is_captured:
            program = graph(lab, split, 2, x)
            with ForwardContext(FULL, program.key):
                found = program(x).clone()
        else:
            found = eager(split, 2, x)
    assert torch.equal(found, x)


def test_columns_of_one_tensor_are_no_race() -> None:
    device = SimulatedDevice()
    table, column = torch.zeros(3, 8), torch.ones(3, 4)
    side = device.stream("side")

    def body(start: int) -> Callable[[], None]:
        def run() -> None:
            capture = device.current_stream()
            device.order(side, capture)
            with device.use(side):
                table[:, :4].copy_(column)
            table[:, start : start + 4].copy_(column)
            device.order(capture, side)

        return run

    record(device, device.new_pool(), body(4))
    with pytest.raises(StreamRaceError) as caught:
        record(device, device.new_pool(), body(3))
    assert "the same 12 bytes" in str(caught.value)
    device.close()


def test_straddling_requests_cache_is_written_before_it_is_read(lab: Lab) -> None:
    """All slices compute on one stream, so that each reads what those before it have written."""
    caches = torch.zeros(2, 12, WIDTH)

    def fn(x: torch.Tensor) -> torch.Tensor:
        at = ubatch.token_offset()
        for cache in caches:
            cache[at : at + len(x)].copy_(x)
            with ubatch.communication("layer"):
                pass
            x = x + cache[: at + len(x)].sum(0)
        return x

    x = lab.random(12, WIDTH)
    with cut(lab, fn) as split:
        found = eager(split, 3, x)
    first = x + torch.cat([x[:end].sum(0).expand(4, WIDTH) for end in (4, 8, 12)])
    second = first + torch.cat([first[:end].sum(0).expand(4, WIDTH) for end in (4, 8, 12)])
    torch.testing.assert_close(found, second)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 4))
def test_every_legal_replay_order_gives_the_same(seed: int, num_ubatches: int) -> None:
    with Lab() as lab, cut(lab, Layers(3)) as split:
        x = lab.random(12, WIDTH)
        program = graph(lab, split, num_ubatches, x)
        x.copy_(lab.random(12, WIDTH, seed=1))
        expected = torch.cat([Layers(3)(part) for part in x.chunk(num_ubatches)])
        lab.device.faults.replay_order = seed
        recorded = program.segments[0].graph
        ran = [call.operation for call in recorded._shuffled(seed)]
        assert sorted(ran) == sorted(call.operation for call in recorded.calls)
        with ForwardContext(FULL, program.key):
            assert torch.equal(program(x), expected)


def test_replay_orders_differ_by_seed(lab: Lab) -> None:
    with cut(lab, Layers(3)) as split:
        recorded = graph(lab, split, 2, lab.random(12, WIDTH)).segments[0].graph
        orders = {tuple(map(id, recorded._shuffled(seed))) for seed in range(8)}
        assert len(orders) > 1


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("depth", [4, 16])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_schedule_overlaps_all_but_the_ends(
    lab: Lab, num_ubatches: int, depth: int, ratio: float
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for layer in range(depth):
            send, received = torch.tanh(x), torch.empty_like(x)
            with ubatch.communication(str(layer), send):
                received.copy_(send)
            x = received
        return x

    costs = {"aten::tanh": 1.0, "aten::copy_": ratio}
    with cut(lab, fn) as split:
        program = graph(lab, split, num_ubatches, lab.random(12, WIDTH))
        found = program.segments[0].graph.schedule_length(lambda name: costs.get(name, 0.0))
    compute = depth * num_ubatches
    communication = compute * ratio
    efficiency = (compute + communication - found) / min(compute, communication)
    assert efficiency == pytest.approx(1 - 1 / (num_ubatches * depth), rel=0.01)


@pytest.mark.parametrize("who", ["next", "self", "end", "nobody else"])
def test_receive_hook_runs_exactly_once_before_its_owner_goes_on(lab: Lab, who: str) -> None:
    ran: list[str] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        me = ubatch.index()
        if me == 0:
            ubatch.register_recv_hook(lambda: ran.append("hook"))
            if who == "nobody else":
                return x * 1
            ubatch.yield_("sent")
            ran.append("0 goes on")
        elif who == "next":
            ubatch.run_recv_hook()
            ubatch.run_recv_hook()
            ran.append("1 received")
            ubatch.yield_("received")
        elif who == "self":
            ubatch.yield_("computed")
        return x * 1

    with cut(lab, fn) as split:
        eager(split, 2, lab.random(8, WIDTH))
    assert ran.count("hook") == 1
    if who == "next":
        assert ran == ["hook", "1 received", "0 goes on"]
    elif who != "nobody else":
        assert ran == ["hook", "0 goes on"]


def test_calls_outside_a_micro_batch_do_nothing() -> None:
    done: list[str] = []

    class Work:
        def wait(self) -> None:
            done.append("waited")

    with ubatch.communication("outside", torch.ones(1)) as c:
        c.wait_for(Work())
        c.wait_for(None)
        c.hand_to_compute(torch.ones(1))
        done.append("issued")
    ubatch.register_recv_hook(lambda: done.append("received"))
    ubatch.run_recv_hook()
    ubatch.yield_("nothing")
    ubatch.switch_to_comm()
    ubatch.switch_to_compute()
    ubatch.yield_and_switch_to_comm("nothing")
    ubatch.yield_and_switch_to_compute("nothing")
    assert ubatch.compute_mark() is None
    assert done == ["issued", "waited", "received"]


def test_block_that_raises_hands_nothing_over(lab: Lab) -> None:
    ran: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        if ubatch.index() == 0:
            try:
                with ubatch.communication("broken") as c:
                    c.wait_for(None)
                    raise KeyError
            except KeyError:
                ran.append(lab.device.current_stream().name)
        ran.append(ubatch.index())
        return x * 1

    with cut(lab, fn) as split:
        eager(split, 2, lab.random(8, WIDTH))
    assert ran == [lab.device.current_stream().name, 0, 1]


def test_mark_of_compute_does_not_wait_for_communication(lab: Lab) -> None:
    marks: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with ubatch.communication("layer"):
            y.clone()
            marks.append(ubatch.compute_mark())
        return y

    with cut(lab, fn) as split:
        eager(split, 2, lab.random(8, WIDTH))
    assert {mark.stream for mark in marks} == {lab.device.current_stream()}


def test_memory_born_on_comm_is_handed_to_compute(lab: Lab) -> None:
    """Else the next transfer takes the bytes that compute still reads."""

    def fn(is_handed: bool) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> Any:
            send = torch.tanh(x)
            with ubatch.communication("first", send) as c:
                born = send + 1
                if is_handed:
                    c.hand_to_compute(born)
            total = born * 2
            del born
            ubatch.switch_to_comm(sync=False)
            other = send + 3
            ubatch.switch_to_compute()
            return total, other

        return run

    x = lab.random(8, WIDTH)
    split = SplitCallable(fn(True), lab.device, CONFIG, input_axes={"x": 0})
    graph(lab, split, 2, x)
    broken = SplitCallable(fn(False), lab.device, CONFIG, input_axes={"x": 0})
    with pytest.raises(StreamRaceError):
        graph(lab, broken, 2, x)
    lab.library.close()
    split.close()
    broken.close()

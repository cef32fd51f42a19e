"""Opaque nodes, the alarm on compiled code, and executing while recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from simulated_recording import leaves, record, same

from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import ForbiddenOperationError, UnrecordedCodeError, UnsupportedOperationError

MODES = [torch.no_grad, torch.inference_mode]


def with_recording(device: SimulatedDevice, body: Callable[[Any], Any]) -> tuple[Any, Any]:
    stream = device.stream("capture")
    with torch.no_grad(), device.use(stream):
        recording = device.begin(device.new_pool(), stream, "case")
        try:
            result = body(recording)
        except BaseException as error:
            recording.abort(error)
            raise
        return recording.end(), result


@pytest.mark.parametrize("strategy", ["deferred", "execute"])
def test_an_opaque_call_is_one_node_that_may_do_anything(strategy: Any) -> None:
    device = SimulatedDevice(strategy=strategy)
    x, calls = torch.ones(2, 3), []

    def host_work(values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(values.sum().item())  # Not looked into: host reads are its own affair.
        return values * scale, values.sum(0)

    meta = (torch.empty(2, 3, device="meta"), torch.empty(3, device="meta"))

    def body(recording: Any) -> torch.Tensor:
        scaled, total = recording.opaque(host_work, (x + 1, 10.0), meta)
        assert scaled.shape == (2, 3)
        return scaled + total

    graph, out = with_recording(device, body)
    assert graph.num_nodes == 3
    assert len(calls) == (0 if strategy == "deferred" else 1)
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [[(value + 1) * 12.0] * 3] * 2
    assert calls[-2:] == [12.0, 30.0]
    assert [use.tensor is x for use in graph.externals] == [True]
    device.close()


def test_an_opaque_call_keeps_the_layout_and_structure_of_its_description() -> None:
    device = SimulatedDevice()
    x = torch.randn(3, 4)
    meta = {"out": None, "layout": torch.empty_strided((4, 3), (1, 4), device="meta")}["layout"]
    graph, out = with_recording(device, lambda r: r.opaque(lambda v: v.t() * 2, (x,), [meta])[0])
    graph.replay()
    assert same(out, x.t() * 2)
    graph, nothing = with_recording(device, lambda r: r.opaque(x.add_, (1.0,), ()))
    assert nothing == ()
    device.close()


def test_a_deferred_opaque_call_needs_a_description() -> None:
    device = SimulatedDevice()
    with pytest.raises(UnsupportedOperationError, match="out_meta"):
        with_recording(device, lambda r: r.opaque(torch.neg, (torch.ones(2),)))
    device.close()


def test_the_alarm_is_entered_while_recording_and_knows_of_opaque_calls() -> None:
    device = SimulatedDevice(strategy="execute")
    x, entered = torch.ones(2), []
    permitted: list[Callable[[], bool]] = []

    @contextmanager
    def alarm(is_permitted: Callable[[], bool]) -> Iterator[None]:
        entered.append("in")
        permitted.append(is_permitted)
        yield
        entered.append("out")

    def compiled(values: torch.Tensor) -> torch.Tensor:
        if entered[-1] == "in" and not permitted[-1]():
            raise UnrecordedCodeError("compiled code outside an opaque node")
        return values * 2

    device.alarm = alarm
    graph, out = with_recording(device, lambda r: r.opaque(compiled, (x,)) + 1)
    assert entered == ["in", "out"]
    graph.replay()
    assert out.tolist() == [3.0, 3.0]
    with pytest.raises(UnrecordedCodeError):
        with_recording(device, lambda r: compiled(x))
    assert entered == ["in", "out"] * 2
    device.close()


def test_an_alarm_that_cannot_be_installed_leaves_no_window_open() -> None:
    device = SimulatedDevice()

    def alarm(is_permitted: Callable[[], bool]) -> Any:
        raise RuntimeError("no alarm")

    device.alarm = alarm
    with pytest.raises(RuntimeError, match="no alarm"):
        record(device, device.new_pool(), lambda: torch.ones(2))
    device.alarm = None
    assert not device.is_capturing()
    record(device, device.new_pool(), lambda: torch.ones(2))
    device.close()


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "functional": lambda x, i: (x @ x.t() + 1, x.topk(2), x.softmax(-1), x.to(torch.float64)),
    "views": lambda x, i: ((x * 2).t()[1:], x.view(-1), (x + 1).reshape(2, -1).chunk(2, 1)),
    "in place": lambda x, i: (x * 1).add_(2).clamp_(0, 2),
    "index": lambda x, i: (x[i], torch.zeros(4, 4).index_copy_(0, i, x), x.gather(0, i[None])),
    "linear": lambda x, i: torch.nn.functional.linear(x[None], x, x[0]),
    "foreach": lambda x, i: torch._foreach_mul([x, x + 1], 2.0),
    "factories": lambda x, i: (
        torch.arange(4),
        torch.zeros(2),
        torch.full((2,), 3.0),
        x.new_ones(2),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_executing_computes_while_recording_and_replays_the_same(name: str, mode: Any) -> None:
    device = SimulatedDevice(strategy="execute")
    operation = OPERATIONS[name]
    x, i = torch.randn(4, 4), torch.randperm(4)
    graph, result = record(device, device.new_pool(), lambda: operation(x, i), mode)
    with mode():
        assert all(map(same, leaves(result), leaves(operation(x, i))))
    for _ in range(2):
        x.copy_(torch.randn(4, 4))
        i.copy_(torch.randperm(4))
        graph.replay()
        with mode():
            assert all(map(same, leaves(result), leaves(operation(x, i))))
    with pytest.raises(ForbiddenOperationError):
        record(device, device.new_pool(), lambda: x.sum().item())
    device.close()


def test_executing_advances_state_which_deferring_does_not() -> None:
    for strategy, expected in (("deferred", 0.0), ("execute", 1.0)):
        device = SimulatedDevice(strategy=strategy)  # type: ignore[arg-type]  # both are literals
        counter = torch.zeros(1)
        graph, _ = record(device, device.new_pool(), lambda c=counter: c.add_(1))
        assert counter.item() == expected
        graph.replay()
        assert counter.item() == expected + 1
        device.close()

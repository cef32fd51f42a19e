"""Opaque nodes, and the guard that whoever knows compiled code may install."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from simulated_recording import record, same

from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import UnrecordedCodeError, UnsupportedOperationError


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


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


def test_opaque_call_is_one_node_that_may_read_the_host(device: SimulatedDevice) -> None:
    x, calls = torch.ones(2, 3), []

    def host_work(values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(values.sum().item())
        return values * scale, values.sum(0)

    meta = (torch.empty(2, 3, device="meta"), torch.empty(3, device="meta"))

    def body(recording: Any) -> torch.Tensor:
        scaled, total = recording.opaque(host_work, (x + 1, 10.0), meta)
        assert scaled.shape == (2, 3)
        return scaled + total

    graph, out = with_recording(device, body)
    assert (graph.num_nodes, calls) == (3, [])
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [[(value + 1) * 12.0] * 3] * 2
    assert calls == [12.0, 30.0]
    assert [use.tensor is x for use in graph.externals] == [True]


class Parts(NamedTuple):
    doubled: torch.Tensor
    rest: list[Any]


def test_opaque_result_has_the_structure_of_out_meta(device: SimulatedDevice) -> None:
    x = torch.randn(3, 4)
    meta = Parts(torch.empty_strided((4, 3), (1, 4), device="meta"), [None, torch.empty(3, 4)])
    call = lambda v: Parts(v.t() * 2, [None, v + 1])  # noqa: E731
    graph, out = with_recording(device, lambda r: r.opaque(call, (x,), meta))
    graph.replay()
    assert same(out.doubled, x.t() * 2)
    assert same(out.rest[1], x + 1)
    assert out.rest[0] is None


def test_opaque_call_with_empty_out_meta_returns_nothing(device: SimulatedDevice) -> None:
    x = torch.zeros(2)
    graph, nothing = with_recording(device, lambda r: r.opaque(x.add_, (1.0,), ()))
    assert nothing == ()
    graph.replay()
    assert x.tolist() == [1.0, 1.0]


def test_opaque_call_without_out_meta_is_unsupported(device: SimulatedDevice) -> None:
    with pytest.raises(UnsupportedOperationError, match="out_meta"):
        with_recording(device, lambda r: r.opaque(torch.neg, (torch.ones(2),)))


def test_compiled_code_guard_is_entered_while_recording(device: SimulatedDevice) -> None:
    x, entered = torch.ones(2), []

    @contextmanager
    def guard() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    def compiled(values: torch.Tensor) -> torch.Tensor:
        if entered[-1] == "in":
            raise UnrecordedCodeError("compiled code outside an opaque node")
        return values * 2

    device.shared.compiled_code_guard = guard
    meta = torch.empty(2, device="meta")
    graph, out = with_recording(device, lambda r: r.opaque(compiled, (x,), meta) + 1)
    assert entered == ["in", "out"]
    graph.replay()
    assert out.tolist() == [3.0, 3.0]
    with pytest.raises(UnrecordedCodeError):
        with_recording(device, lambda r: compiled(x))
    assert entered == ["in", "out"] * 2


def test_guard_that_cannot_be_entered_leaves_nothing_open(device: SimulatedDevice) -> None:
    def guard() -> Any:
        raise RuntimeError("no guard")

    device.shared.compiled_code_guard = guard
    with pytest.raises(RuntimeError, match="no guard"):
        record(device, device.new_pool(), lambda: torch.ones(2))
    device.shared.compiled_code_guard = None
    assert not device.is_capturing()
    record(device, device.new_pool(), lambda: torch.ones(2))

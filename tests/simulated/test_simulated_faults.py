"""Injected faults: wherever a capture or replay fails, the device is as it was before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_recording import record

from graphrt.device.simulated import Faults, SimulatedDevice
from graphrt.errors import (
    CaptureError,
    ConfigError,
    DeviceReplayError,
    GraphMemoryError,
    RetiredProgramError,
)


def network(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ x) + 1
    cache.add_(y.sum(0))
    values, _ = y.topk(2)
    return torch.cat([values, y.softmax(-1)], 1) * 2


def same_as_before(device: SimulatedDevice, pool: Any, x: torch.Tensor, expected: int) -> None:
    """Eager is right, another capture works, pool and graphs are at their baseline."""
    assert not device.is_capturing()
    assert pool.bytes() == expected
    assert torch.equal(x + 1, x.clone().add_(1))
    graph, out = record(device, pool, lambda: x - 1)
    graph.replay()
    assert torch.equal(out, x - 1)
    graph.reset()


def count_allocations(x: torch.Tensor, cache: torch.Tensor) -> tuple[int, int]:
    device = SimulatedDevice()
    recorded = record(device, device.new_pool(), lambda: network(x, cache))[0]
    operations = recorded.num_nodes
    device.faults.allocation = 0
    failures = 0
    while True:
        try:
            record(device, device.new_pool(), lambda: network(x, cache))
        except GraphMemoryError:
            failures += 1
            device.faults.allocation += 1
        else:
            return operations, failures


@pytest.mark.parametrize("kind", ["op", "allocation", "end"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fault_while_recording_leaves_the_device_usable(kind: str, mode: Any) -> None:
    x, cache = torch.randn(8, 8), torch.zeros(8)
    operations, allocations = count_allocations(x, cache)
    device = SimulatedDevice(faults=Faults())
    pool = device.new_pool()
    kept, held = record(device, pool, lambda: x * 3, mode)
    record(device, pool, lambda: x + 2, mode)[0].reset()
    baseline = pool.bytes()
    places = {"op": range(operations), "allocation": range(allocations), "end": [True]}[kind]
    error = GraphMemoryError if kind == "allocation" else CaptureError
    assert len(places) > (0 if kind == "end" else 5)
    for place in places:
        setattr(device.faults, kind, place)
        with pytest.raises(error) as caught:
            record(device, pool, lambda: network(x, cache), mode)
        assert kind == "end" or "in network" in caught.value.source
        del caught
        setattr(device.faults, kind, Faults().__getattribute__(kind))
        same_as_before(device, pool, x, baseline)
        assert not cache.any()
        kept.replay()
        assert torch.equal(held, x * 3)
    graph, out = record(device, pool, lambda: network(x, cache), mode)
    graph.replay()
    expected_cache = torch.zeros(8)
    with mode():
        assert torch.equal(out, network(x, expected_cache))
    assert torch.equal(cache, expected_cache)
    device.close()


def test_fault_at_replay_runs_only_the_calls_before_it() -> None:
    device = SimulatedDevice()
    x, counts = torch.ones(4), torch.zeros(3)

    def count() -> torch.Tensor:
        for at in range(3):
            counts[at].add_(1)
        return x * 2

    graph, _ = record(device, device.new_pool(), count)
    graph.replay()
    device.faults.replay_op = 1
    with pytest.raises(DeviceReplayError) as caught:
        graph.replay()
    assert counts.tolist() == [2.0, 1.0, 1.0]
    assert "aten::add_" in str(caught.value)
    assert "test_simulated_faults.py" in str(caught.value)
    device.faults.replay_op = None
    graph.replay()
    assert counts.tolist() == [3.0, 2.0, 2.0]
    device.close()


def test_kernel_that_fails_at_replay_is_named() -> None:
    device = SimulatedDevice()
    table, at = torch.ones(4, 2), torch.tensor([1])
    graph, _ = record(device, device.new_pool(), lambda: (table * 2).index_select(0, at) + 1)
    at.fill_(9)
    with pytest.raises(DeviceReplayError, match="index_select") as caught:
        graph.replay()
    assert isinstance(caught.value.__cause__, IndexError)
    at.fill_(0)
    graph.replay()
    device.close()


def test_graph_beyond_the_limit_is_refused() -> None:
    device = SimulatedDevice(max_graphs=2)
    pool, x = device.new_pool(), torch.ones(2)
    first, _ = record(device, pool, lambda: x + 1)
    record(device, pool, lambda: x + 2)
    with pytest.raises(GraphMemoryError):
        record(device, pool, lambda: x + 3)
    first.reset()
    graph, out = record(device, pool, lambda: x + 4)
    graph.replay()
    assert out.tolist() == [5.0, 5.0]
    assert device.limits.max_graphs == 2
    device.close()


def test_workspace_belongs_to_one_recording() -> None:
    device = SimulatedDevice(workspace_model=True)
    pool, x = device.new_pool(), torch.randn(4, 4)
    first, _ = record(device, pool, lambda: x @ x)
    taken = pool.bytes()
    second, out = record(device, pool, lambda: (x @ x) @ x)
    assert pool.bytes() >= taken + 4096
    first.replay()
    first.reset()
    second.replay()
    assert torch.equal(out, (x @ x) @ x)
    device.close()


def test_replay_after_its_workspace_is_gone_is_refused() -> None:
    """What happens to an engine whose recordings share what a library keeps for a stream."""
    device = SimulatedDevice(workspace_model=True)
    pool, x = device.new_pool(), torch.randn(4, 4)
    first, _ = record(device, pool, lambda: x @ x)
    (workspace,) = first.owned_workspaces
    stream = device.stream("capture")

    def share() -> torch.Tensor:
        device.shared.workspaces[stream] = workspace
        return x @ x

    second, _ = record(device, pool, share)
    second.replay()
    first.reset()
    with pytest.raises(RetiredProgramError, match="scratch"):
        second.replay()
    device.close()


def test_unknown_poison_is_an_error() -> None:
    make: Callable[..., SimulatedDevice] = SimulatedDevice
    with pytest.raises(ConfigError) as caught:
        make(poison="never")
    assert caught.value.found == "'never'"

"""Memory: what a pool says of itself, that it is returned, and that graphs own their workspace."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from trends import check_no_trend

from device_contract import LARGE, Bench
from graphrt.device.cuda import CUDADevice, private
from graphrt.errors import GraphMemoryError


@pytest.fixture
def bench(device: CUDADevice) -> Bench:
    return Bench(device, device.new_pool())


def test_rounds_of_capture_and_retirement_do_not_grow(device: CUDADevice) -> None:
    x = torch.ones(256, 256, device=device.torch_device)

    def one_round() -> None:
        bench = Bench(device, device.new_pool())
        for size in (256, 128, 64):
            graph, out = bench.record(lambda size=size: torch.relu(x[:size] @ x) + 1)
            bench.replay(graph)
            del out
        bench.retire()
        bench.pool.release()
        device.trim()

    check_no_trend(device, one_round)


def test_released_pool_returns_to_the_driver(device: CUDADevice) -> None:
    before = device.memory()
    bench = Bench(device, device.new_pool())
    x = bench.full((LARGE,), 1.0)
    _, out = bench.record(lambda value: [value + i for i in range(8)], x)
    held = device.memory(bench.pool)
    assert held.pool_bytes >= 8 * x.nbytes
    assert held.reserved_bytes >= before.reserved_bytes + held.pool_bytes
    del out, x
    bench.retire()
    bench.pool.release()
    device.trim()
    assert device.memory().reserved_bytes == before.reserved_bytes


def test_users_of_a_pool_are_its_graphs_and_itself(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    pool: Any = bench.pool
    assert pool.use_count() == 1
    for expected in (2, 3):
        bench.record(lambda: x + 1)
        assert pool.use_count() == expected
    bench.retire()
    assert pool.use_count() == 1


def test_static_output_does_not_lie_in_a_live_block(bench: Bench) -> None:
    x = bench.full((LARGE,), 1.0)
    graph, out = bench.record(lambda: x + 1)
    with bench.device.use(bench.device.stream("capture")):
        static = bench.device.alloc(bench.pool, (LARGE,), (1,), torch.float32)
    assert {block.address for block in bench.pool.live_blocks()} == {
        out.data_ptr(),
        static.data_ptr(),
    }
    static.fill_(7.0)
    bench.replay(graph)
    assert static.eq(7.0).all()
    second, total = bench.record(torch.add, static, out)
    bench.replay(graph)
    bench.replay(second)
    assert total.eq(9.0).all()
    static_address = static.data_ptr()
    del static, total
    assert static_address not in {block.address for block in bench.pool.live_blocks()}


def test_each_graph_owns_its_blas_workspace(bench: Bench) -> None:
    # A workspace shared between recordings is freed with the first of them (PyTorch #193402).
    x = torch.randn(512, 512, device=bench.device.torch_device, dtype=torch.bfloat16)
    other = Bench(bench.device, bench.device.new_pool())
    first, _ = other.record(lambda: x @ x)
    second, out = bench.record(lambda: x @ x)
    other.replay(first)
    del _
    other.retire()
    other.pool.release()
    bench.device.trim()
    ballast = [torch.full((LARGE,), float("nan"), device=x.device) for _ in range(32)]
    x.copy_(torch.randn(512, 512))
    bench.replay(second)
    assert torch.equal(out, x @ x)
    assert all(block.isnan().all() for block in ballast), "a replay wrote into freed memory"


def test_out_of_memory_in_a_recording_leaves_nothing(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    bench.check_usable()
    bench.retire()
    free_bytes = bench.device.memory().total_bytes

    def body() -> torch.Tensor:
        y = x + 1
        return torch.empty(2 * free_bytes, dtype=torch.uint8, device=x.device), y

    before = bench.device.memory(bench.pool)
    for _ in range(3):
        with pytest.raises(GraphMemoryError) as caught:
            bench.record(body)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert caught.value.source.startswith(__file__)
        del caught
    pool: Any = bench.pool
    assert pool.use_count() == 1
    assert bench.device.memory(bench.pool).pool_bytes == before.pool_bytes
    bench.check_usable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_weak_alias_needs_no_private_constructor(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    x = bench.tensor([[1, 0, 1], [0, 1, 1]], dtype)
    graph, out = bench.record(lambda: x.clone().t()[1:])
    bench.replay(graph)
    aliases = [bench.device.weak_alias(out)]
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    aliases.append(bench.device.weak_alias(out))
    for alias in aliases:
        assert alias.data_ptr() == out.data_ptr()
        assert (alias.shape, alias.stride(), alias.dtype) == (out.shape, out.stride(), dtype)
        assert torch.equal(alias, out)
    del out, alias
    gc.collect()
    assert list(bench.pool.live_blocks()) == []


def test_weak_alias_of_a_lazy_conjugate_is_one(bench: Bench) -> None:
    x = bench.tensor([1 + 2j, 3 - 4j], torch.complex64)
    graph, out = bench.record(lambda: (x * 2).conj())
    alias = bench.device.weak_alias(out)
    bench.replay(graph)
    assert torch.equal(alias, out)
    assert alias.tolist() == [2 - 4j, 6 + 8j]


def test_live_block_names_its_line_with_memory_history(bench: Bench) -> None:
    x = bench.full((LARGE,), 1.0)
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        _, _out = bench.record(lambda: x + 1)
        (block,) = bench.pool.live_blocks()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert __file__ in block.source


def test_pool_of_another_owner_is_captured_into(device: CUDADevice) -> None:
    handle = torch.cuda.graph_pool_handle()
    bench = Bench(device, device.new_pool(handle))
    with device.use(device.stream("capture")):
        static = device.alloc(bench.pool, (8,), (1,), torch.float32)
    static.fill_(2.0)
    graph, out = bench.record(torch.mul, static, 3)
    bench.replay(graph)
    assert bench.pool.handle == handle
    assert device.owns(out)
    assert out.tolist() == [6.0] * 8
    foreign = torch.cuda.CUDAGraph()
    with torch.cuda.graph(foreign, pool=handle):
        doubled = static * 2
    foreign.replay()
    device.synchronize()
    assert doubled.tolist() == [4.0] * 8
    del static, out, doubled
    bench.retire()
    bench.pool.release()
    foreign.reset()


def test_snapshot_of_a_pool_drops_no_reference_to_its_id(device: CUDADevice) -> None:
    """A number above 256 would be freed while the pool still holds it."""
    number = int("987654321")
    before = sys.getrefcount(number)
    for _ in range(5):
        assert private.segments_of((0, number), device.index) == []
    assert sys.getrefcount(number) == before

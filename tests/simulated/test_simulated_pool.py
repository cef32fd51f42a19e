"""Pool memory of the simulated device: reuse, poison, liveness."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from simulated_recording import record

from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import CaptureError, GraphMemoryError, LifetimeError

ALIGNMENT = 64


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


def layers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = torch.relu(x @ weight) + x
    return x


def capture_sizes(device: SimulatedDevice, sizes: list[int], *, shared: bool) -> int:
    """Capture a small network for each size; bytes of all pools after it."""
    buffer = torch.randn(64, 8)
    weights = [torch.randn(8, 8) for _ in range(3)]
    pools, kept = [device.new_pool()], []
    for size in sizes:
        pool = pools[0] if shared else device.new_pool()
        pools.append(pool)
        graph, out = record(device, pool, lambda n=size: layers(buffer[:n], weights))
        alias = device.weak_alias(out)
        del out
        graph.replay()
        expected = layers(buffer[:size], weights)
        assert torch.equal(alias, expected)
        kept.append((graph, alias, expected))
    for graph, alias, expected in kept:  # In any order, each right until the next one runs.
        graph.replay()
        assert torch.equal(alias, expected)
    return sum(pool.bytes() for pool in set(pools))


def test_shared_pool_is_no_larger_than_its_largest_graph(device: SimulatedDevice) -> None:
    sizes = [64, 32, 16, 8, 1]
    alone = capture_sizes(device, [64], shared=True)
    assert capture_sizes(device, sizes, shared=True) == alone
    # The other way round works too, and costs more.
    assert capture_sizes(device, sizes[::-1], shared=True) >= alone
    assert capture_sizes(device, sizes, shared=False) > 1.8 * alone


def test_chain_of_temporaries_takes_two_blocks(device: SimulatedDevice) -> None:
    x = torch.ones(64)
    pool = device.new_pool()

    def chain() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = y + 1
        return y

    graph, out = record(device, pool, chain)
    assert pool.bytes() == 2 * x.nbytes
    graph.replay()
    assert out.tolist() == [51.0] * 64


def test_view_keeps_its_block_and_a_weak_alias_does_not(device: SimulatedDevice) -> None:
    x, pool = torch.ones(64), device.new_pool()
    graph, view = record(device, pool, lambda: (x + 1).view(8, 8)[1:, 2])
    record(device, pool, lambda: x * 5)
    assert len(pool.live_blocks()) == 1
    alias = device.weak_alias(view)
    assert alias.untyped_storage().nbytes() == view.untyped_storage().nbytes()
    graph.replay()
    assert view.tolist() == alias.tolist() == [2.0] * 7
    del view
    assert list(pool.live_blocks()) == []


def test_block_is_freed_without_a_collection(device: SimulatedDevice) -> None:
    """Nothing of a recording, shape inference included, may hold tensors in a cycle."""
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    gc.collect()
    gc.disable()
    try:
        for mode in (torch.no_grad, torch.inference_mode):
            pool = device.new_pool()
            _, out = record(
                device,
                pool,
                lambda: torch.nn.functional.linear((x @ w).softmax(-1), w).topk(2),
                mode,
            )
            assert len(pool.live_blocks()) == 2
            del out
            assert list(pool.live_blocks()) == []
    finally:
        gc.enable()


POISONED = {
    torch.float32: lambda t: t.isnan().all(),
    torch.float64: lambda t: t.isnan().all(),
    torch.bfloat16: lambda t: t.isnan().all(),
    torch.float16: lambda t: t.isnan().all(),
    torch.int64: lambda t: t.eq(-1).all(),
    torch.int8: lambda t: t.eq(-1).all(),
    torch.uint8: lambda t: t.eq(255).all(),
    torch.bool: lambda t: t.view(torch.uint8).eq(255).all(),
}


@pytest.mark.parametrize("dtype", POISONED)
def test_results_are_poison_until_the_first_replay(
    device: SimulatedDevice, dtype: torch.dtype
) -> None:
    x = torch.zeros(10)
    graph, out = record(
        device, device.new_pool(), lambda: (x.to(dtype), torch.empty_like(x), x + 1)
    )
    cast = out[0] if dtype is not x.dtype else out[1]
    assert POISONED[dtype](cast)
    graph.replay()
    assert dtype is x.dtype or not cast.any()


def test_memory_freed_in_a_recording_is_poisoned(device: SimulatedDevice) -> None:
    x, aliases = torch.ones(16), []

    def forgets() -> None:
        y = x + 1
        aliases.append(device.weak_alias(y))
        ctypes.memset(y.data_ptr(), 0, y.nbytes)  # It was poison before as well.

    record(device, device.new_pool(), forgets)
    assert aliases[0].isnan().all()


def test_kept_error_keeps_no_tensors(device: SimulatedDevice) -> None:
    x, pool = torch.ones(16), device.new_pool()
    kept: list[BaseException] = []
    for refused in (
        lambda: (x * 2).sum().item(),
        lambda: (x * 2).nonzero(),
        lambda: (x * 2) + (x * 3),
    ):
        try:
            record(device, pool, refused)
        except CaptureError as error:
            kept.append(error)
        device.faults.op = 2
    assert len(kept) == 3
    assert list(pool.live_blocks()) == []
    assert pool.bytes() == 0


def test_reset_poisons_what_no_tensor_holds(device: SimulatedDevice) -> None:
    x, pool = torch.ones(16), device.new_pool()
    first, released = record(device, pool, lambda: x + 1)
    alias = device.weak_alias(released)
    second, held = record(device, pool, lambda: x + 2)
    first.replay()
    second.replay()
    del released
    second.reset()
    assert held.tolist() == [3.0] * 16
    first.reset()
    assert alias.isnan().all()
    assert held.tolist() == [3.0] * 16


def test_released_pool_reads_poison_and_owns_nothing(device: SimulatedDevice) -> None:
    x, pool = torch.ones(16), device.new_pool()
    graph, out = record(device, pool, lambda: x + 1)
    graph.replay()
    graph.reset()
    pool.release()
    pool.release()
    assert out.isnan().all()
    assert not device.owns(out)
    assert not pool.owns(out)
    assert pool.bytes() == 0
    with pytest.raises(LifetimeError):
        record(device, pool, lambda: x + 1)


def test_poison_always_shows_what_a_replay_does_not_write() -> None:
    device = SimulatedDevice(poison="always")
    x, pool = torch.ones(4), device.new_pool()

    def partly() -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty(4)
        y[:2] = x[:2]
        return y, x + 1

    graph, (partial, whole) = record(device, pool, partly)
    for _ in range(2):
        graph.replay()
        assert partial.isnan().tolist() == [False, False, True, True]
        assert whole.tolist() == [2.0] * 4
        partial.fill_(7.0)
    device.close()


def test_poison_always_spares_what_another_segment_filled() -> None:
    device = SimulatedDevice(poison="always")
    x, pool = torch.ones(4), device.new_pool()
    first, between = record(device, pool, lambda: x + 1)
    static = device.alloc(pool, (4,), (1,), torch.float32)
    filled = device.weak_alias(static)

    def consume() -> torch.Tensor:
        nonlocal between, static
        total = between + static
        del between, static  # Their bytes are free for the rest of this recording.
        return (total * 2 + 1) * x

    second, out = record(device, pool, consume)
    kept = device.weak_alias(out)
    for value in (1.0, 3.0):
        x.fill_(value)
        first.replay()
        filled.fill_(10.0)
        second.replay()
        assert kept.tolist() == [((value + 11) * 2 + 1) * value] * 4
    device.close()


def test_alloc_in_inference_mode_makes_a_normal_tensor(device: SimulatedDevice) -> None:
    pool = device.new_pool()
    with torch.inference_mode():
        static = device.alloc(pool, (2, 3), (1, 2), torch.bfloat16)
    assert (static.shape, static.stride(), static.dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert not static.is_inference()
    assert pool.owns(static)
    (block,) = pool.live_blocks()
    assert (block.address, block.num_bytes) == (static.data_ptr(), ALIGNMENT)
    assert "test_simulated_pool" in block.source


def test_memory_counts_pools_and_nodes() -> None:
    device = SimulatedDevice(driver_bytes=1 << 20)
    x, pool = torch.ones(1024), device.new_pool()
    before = device.memory(pool)
    assert before == (1 << 20, 1 << 20, 0, 0, 0)
    graph, _out = record(device, pool, lambda: x + 1)
    after = device.memory(pool)
    assert after.pool_bytes == after.reserved_bytes == 4096
    assert after.free_bytes == (1 << 20) - 4096 - 1843
    graph.reset()
    assert device.memory(pool).free_bytes == (1 << 20) - 4096
    pool.release()
    assert device.memory().free_bytes == 1 << 20
    device.close()


def test_driver_out_of_memory_is_an_error_with_its_line() -> None:
    device = SimulatedDevice(driver_bytes=64 << 10)
    pool, x = device.new_pool(), torch.ones(8 << 10)
    with pytest.raises(GraphMemoryError) as caught:
        record(device, pool, lambda: [x + i for i in range(9)])
    assert "test_simulated_pool" in caught.value.source
    del caught
    with pytest.raises(GraphMemoryError):
        device.alloc(pool, (1 << 20,), (1,), torch.float32)
    small = torch.ones(8)
    with pytest.raises(GraphMemoryError):  # 40 nodes of 1.8 KiB
        record(device, pool, lambda: [small.add_(1) for _ in range(40)])
    graph, out = record(device, pool, lambda: small + 1)
    graph.replay()
    assert out.tolist() == [2.0] * 8
    assert pool.bytes() == ALIGNMENT
    device.close()


def test_free_range_at_the_top_is_extended(device: SimulatedDevice) -> None:
    pool = device.new_pool()
    device.alloc(pool, (ALIGNMENT,), (1,), torch.uint8)
    kept = device.alloc(pool, (2 * ALIGNMENT,), (1,), torch.uint8)
    assert pool.bytes() == kept.nbytes


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), min_size=1, max_size=60),
    recorded=st.booleans(),
)
def test_blocks_never_overlap_and_are_found_again(steps: list[Any], recorded: bool) -> None:
    device = SimulatedDevice()
    pool, x = device.new_pool(), torch.ones(1)

    def allocate(num_bytes: int) -> torch.Tensor:
        if recorded:
            return torch.empty(num_bytes, dtype=torch.uint8)
        return device.alloc(pool, (num_bytes,), (1,), torch.uint8)

    def body() -> None:
        held: list[torch.Tensor] = []
        for drop, num_bytes in steps:
            if drop and held:
                del held[drop % len(held)]
            held.append(allocate(num_bytes))
            blocks = [(block.address, block.num_bytes) for block in pool.live_blocks()]
            assert sorted(one.data_ptr() for one in held) == [address for address, _ in blocks]
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(blocks))
            assert all(address % ALIGNMENT == 0 for address, _ in blocks)
        held.clear()
        # Everything is one free range again.
        most = pool.bytes()
        everything = allocate(most)
        assert [block.num_bytes for block in pool.live_blocks()] == [most]
        assert pool.bytes() == most
        del everything
        if recorded:
            x.add_(1)

    if recorded:
        record(device, pool, body)
    else:
        body()
    device.close()


def test_pool_asked_while_recording_records_nothing(device: SimulatedDevice) -> None:
    x, pool = torch.ones(16), device.new_pool()

    def curious() -> torch.Tensor:
        y = x + 1
        del y
        assert pool.bytes() == 64
        assert list(pool.live_blocks()) == []
        device.memory(pool)
        static = device.alloc(pool, (3,), (1,), torch.float32)
        assert device.owns(device.weak_alias(static))
        return x * 2

    graph, out = record(device, pool, curious)
    assert graph.num_nodes == 2
    graph.replay()
    assert out.tolist() == [2.0] * 16

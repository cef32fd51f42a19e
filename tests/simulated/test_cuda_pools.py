"""What a CUDA pool knows of its memory, over a fake of torch's allocator."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from graphrt.device.cuda import CUDAPool, private

MIB = 2**20


class Allocator:
    """The segments of one pool, and how often they were listed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_snapshots = 0

    def segments_of(self, pool: private.PoolId, device_index: int) -> list[dict[str, int]]:
        self.num_snapshots += 1
        return [
            {"address": 1024 * MIB * (1 + number), "total_size": size}
            for number, size in enumerate(self.sizes)
        ]


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator()
    memory = SimpleNamespace(id=(0, 1), use_count=lambda: 1)
    monkeypatch.setattr(private, "segments_of", found.segments_of)
    monkeypatch.setattr(private, "retain_pool", lambda pool, index: None)
    monkeypatch.setattr(private, "release_pool", lambda pool, index: None)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: memory)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(CUDAPool, "keep_in_use", lambda self: None)
    return found


def test_pool_of_its_own_tells_its_bytes_from_what_it_read_last(allocator):
    pool = CUDAPool(0)
    assert pool.bytes() == 0
    allocator.sizes = [2 * MIB, 20 * MIB]
    pool.refresh()
    read = allocator.num_snapshots
    assert [pool.bytes(), pool.bytes()] == [22 * MIB] * 2
    assert allocator.num_snapshots == read
    pool.release()
    assert pool.bytes() == 0


def test_view_of_a_pool_reads_what_its_owner_has_made_of_it(allocator):
    view = CUDAPool(0, (0, 7))
    allocator.sizes = [2 * MIB]
    assert view.bytes() == 2 * MIB
    assert view.holds(1024 * MIB + 5)
    view.release()
    assert view.bytes() == 0

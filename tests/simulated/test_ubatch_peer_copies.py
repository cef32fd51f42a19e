"""Exchanges by copies into the memory of other GPUs: here two ranks of one process on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from graphrt import BatchDescriptor, RuntimeMode
from graphrt.errors import ConfigError, StateAdvancedError
from graphrt.ubatch import PeerCopies
from lab import NONE, Lab


class Handle:
    """Memory of two ranks, and how often both have met."""

    def __init__(self, memories: list[torch.Tensor]) -> None:
        self.memories = memories
        self.channels: list[int] = []

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        assert self.memories[rank].shape == shape
        return self.memories[rank]

    def barrier(self, channel: int) -> None:
        self.channels.append(channel)


def pair(monkeypatch: pytest.MonkeyPatch, most: int = 8) -> tuple[list[PeerCopies], Handle]:
    memories = [torch.zeros(2, 2, 2, most) for _ in range(2)]
    handle, given = Handle(memories), iter(memories)
    monkeypatch.setattr(symmetric, "empty", lambda *shape, **_: next(given))
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, group: handle)
    made = []
    for rank in range(2):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
        made.append(PeerCopies(most, torch.float32, "cpu", num_ubatches=2, group=group))
    return made, handle


def test_parts_arrive_by_rank_and_are_left_by_the_next_turn(monkeypatch: Any) -> None:
    ranks, handle = pair(monkeypatch)
    kept = []
    for turn in range(4):
        sent = [torch.arange(12.0).view(2, 3, 2) + 100 * rank + 1000 * turn for rank in range(2)]
        received = [copies.all_to_all(own, turn) for copies, own in zip(ranks, sent, strict=True)]
        kept.append((received, sent))
        for found, expected in kept[-2:]:
            for rank in range(2):
                for other in range(2):
                    assert torch.equal(found[rank][other], expected[other][rank])
    assert handle.channels == [0] * 8


def test_parts_that_do_not_fit_are_refused(monkeypatch: Any) -> None:
    (first, _), _ = pair(monkeypatch)
    for wrong in (
        torch.zeros(3, 4),
        torch.zeros(2, 9),
        torch.zeros(2, 4, dtype=torch.float64),
        torch.zeros(4, 2).t(),
    ):
        with pytest.raises(ConfigError, match="2 parts of at most 8"):
            first.all_to_all(wrong, 0)


def test_odd_number_of_exchanges_in_a_step_is_refused(monkeypatch: Any) -> None:
    (first, _), _ = pair(monkeypatch)
    sent = torch.zeros(2, 4)
    for turn in (0, 1, 2):
        first.all_to_all(sent, turn)
    with pytest.raises(ConfigError, match="turn 0 right after another even one"):
        first.all_to_all(sent, 0)
    first.all_to_all(sent, 0)


def test_memory_of_others_is_declared_by_its_workspaces(monkeypatch: Any) -> None:
    (first, _), _ = pair(monkeypatch)
    with Lab() as lab:

        def model(x: torch.Tensor) -> torch.Tensor:
            return torch.cat(first.all_to_all(torch.stack(first.all_to_all(x.view(2, -1), 0)), 1))

        x, key = torch.ones(8), BatchDescriptor(8)
        wrapper = lab.wrap(model)
        for resources in ((), first.workspaces):
            try:
                with lab.library.capture_scope(resources=resources) as scope:
                    for mode in (NONE, RuntimeMode.FULL):
                        with scope.step(mode, key):
                            wrapper(x)
            except StateAdvancedError:
                assert not resources
                lab.library.forget_failures()
        assert key in wrapper.concrete_cudagraph_entries


def test_ranks_without_memory_in_common_are_refused() -> None:
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    with pytest.raises(ConfigError, match="NCCL"):
        PeerCopies(8, torch.float32, "cpu", group=group)

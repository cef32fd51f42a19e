"""Rows between the GPUs of one machine by copies, which leave the multiprocessors to the products.

Behind products of matrices this hides nearly whole, where collectives of NCCL take multiprocessors
from them. It stands on a part of torch that may change: ``torch.distributed._symmetric_memory``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphrt.errors import ConfigError
from graphrt.graphs import Workspace
from graphrt.ubatch.communication import index


class PeerCopies:
    """Exchanges parts between ranks by copies into memory of the others that is mapped here.

    All ranks make it together, alike, before any capture. ``most``: elements of the largest part
    for one rank. ``group``: of torch.distributed, one GPU a rank; None: all ranks.
    ``num_ubatches``: of which each has memory of its own.

    Errors: ``ConfigError`` where the GPUs cannot map each other's memory.
    """

    def __init__(
        self,
        most: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        num_ubatches: int = 1,
        group: Any = None,
    ) -> None:
        try:
            import torch.distributed as dist
            import torch.distributed._symmetric_memory as symmetric

            group = group or dist.group.WORLD
            self.rank, self.world = group.rank(), group.size()
            # For each micro-batch two, in turns: another rank may still read the one before.
            shape = (num_ubatches, 2, self.world, most)
            self._memory = symmetric.empty(*shape, dtype=dtype, device=torch.device(device))
            self._handle: Any = symmetric.rendezvous(self._memory, group)
        except (ImportError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                "PeerCopies",
                expected="a group of ranks whose GPUs map each other's memory",
                found=f"{type(error).__name__}: {error}",
                do="exchange over NCCL there",
            ) from error
        self._places: list[int | None] = [None] * num_ubatches
        """Of each micro-batch: which of its two memories the latest exchange took."""
        self._theirs = {
            rank: self._handle.get_buffer(rank, shape, dtype)
            for rank in range(self.world)
            if rank != self.rank
        }
        self.workspaces = [_Mapped(self._memory), *map(_Mapped, self._theirs.values())]
        """What exchanges write, here and on the other GPUs: ``resources`` of a capture. No
        ``may_overwrite``, because comparing it would read what others write meanwhile."""

    def all_to_all(self, sent: Tensor, turn: int) -> list[Tensor]:
        """Send ``sent[r]`` to rank r; what rank r sent here, by rank.

        In a ``communication`` block, on every rank alike. ``turn``: counts the exchanges of a step,
        an even number of them.
        Shapes: ``sent`` [world, *part], contiguous; each result [*part].
        Aliasing: of the own part a view of ``sent``, else of memory that others overwrite once this
        rank has begun the next exchange of this micro-batch: read it before.
        Errors: ``ConfigError`` for what does not fit into the memory, and for an even turn after an
                even one, or an odd after an odd: both would share memory.
        """
        number, place, part = index(), turn % 2, sent.shape[1:]
        count = part.numel()
        num_ubatches, _, _, most = self._memory.shape
        fits = sent.dtype is self._memory.dtype and len(sent) == self.world and count <= most
        if not fits or number >= num_ubatches or not sent.is_contiguous():
            raise ConfigError(
                "PeerCopies.all_to_all",
                expected=f"contiguous {self._memory.dtype}, {self.world} parts of at most {most} "
                f"elements, in one of {num_ubatches} micro-batches",
                found=f"{sent.dtype} of shape {list(sent.shape)} and strides {sent.stride()}, in "
                f"micro-batch {number}",
                do="make PeerCopies for the largest part, with dtype= and num_ubatches= as here",
            )
        before, self._places[number] = self._places[number], None
        if place == before:
            raise ConfigError(
                "PeerCopies.all_to_all",
                expected="an even number of exchanges in each step, with turn= from 0 on",
                found=f"turn {turn} right after another {'odd' if place else 'even'} one of "
                f"micro-batch {number}",
                do="count turns on all ranks alike, and exchange once more in a step with an odd "
                "number; behind a step that failed this is raised once",
            )
        self._places[number] = place
        for rank, memory in self._theirs.items():
            memory[number, place, self.rank, :count].copy_(sent[rank].view(-1))
        # All have written; and have read what the next exchange but one overwrites.
        self._handle.barrier(channel=number)
        received = self._memory[number, place, :, :count]
        return [
            sent[rank] if rank == self.rank else received[rank].view(part)
            for rank in range(self.world)
        ]


class _Mapped(Workspace):
    """Scratch that is there already."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__("memory of peer copies", memory.device)
        self._bytes = memory

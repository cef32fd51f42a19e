"""The engine's door to torch.distributed: what ranks exchange in a layer, as operators of torch.

Operators, so that a graph can hold them and a compiler need not look inside. Registered through
``Library``: a call costs a tenth of what a custom operator in Python does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class RankGroup:
    """The ranks that share a model, of the default process group.

    ``number``: by which the operators find it. ``close`` has to be called before the process group
    is destroyed.
    """

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world = rank, world
        self.group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
        self.number = max(_groups, default=0) + 1
        _groups[self.number] = self
        # Communicators are built by the first call, which may not be inside a capture.
        row = torch.zeros((world, 1), device=device)
        self.all_to_all(torch.empty_like(row), row, [1] * world, [1] * world)
        self.all_reduce(row)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_rows: Sequence[int],
        sent_rows: Sequence[int],
    ) -> None:
        """Send rows of ``sent`` to each rank, and receive some from each; both lie by rank.

        Shapes: ``received`` [sum(received_rows), width], ``sent`` [sum(sent_rows), width].
        """
        torch.ops.graphrt_llm.all_to_all(
            received, sent, list(received_rows), list(sent_rows), self.number
        )

    def all_reduce(self, x: Tensor) -> None:
        """Add up ``x``, contiguous and of one shape on every rank, in place: equal bits on all."""
        torch.ops.graphrt_llm.all_reduce(x, self.number)

    def close(self) -> None:
        """Destroy the group. Idempotent."""
        if _groups.pop(self.number, None) is not None:
            group, self.group = self.group, None
            dist.destroy_process_group(group)


_groups: dict[int, RankGroup] = {}


def _all_to_all(
    received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int], group: int
) -> None:
    dist.all_to_all_single(received, sent, received_rows, sent_rows, group=_groups[group].group)


def _all_reduce(x: Tensor, group: int) -> None:
    dist.all_reduce(x, group=_groups[group].group)


_library = torch.library.Library("graphrt_llm", "FRAGMENT")
_library.define(
    "all_to_all(Tensor(a!) received, Tensor sent, int[] received_rows, int[] sent_rows, int group)"
    " -> ()"
)
_library.define("all_reduce(Tensor(a!) x, int group) -> ()")
for _name, _run in (("all_to_all", _all_to_all), ("all_reduce", _all_reduce)):
    _library.impl(_name, _run, "CPU")
    _library.impl(_name, _run, "CUDA")
    _library.impl(_name, lambda *args: None, "Meta")

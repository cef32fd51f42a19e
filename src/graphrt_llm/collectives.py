"""The engine's door to torch.distributed: rows that ranks exchange, as an operator of torch.

An operator, so that a graph can hold it and a compiler need not look inside. Registered through
``Library``: a call costs a tenth of what a custom operator in Python does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ExpertGroup:
    """The ranks that share the experts of a model, of the default process group.

    ``number``: by which the operator finds it. ``close`` has to be called before the process group
    is destroyed.
    """

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world = rank, world
        self.group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
        self.number = max(_groups, default=0) + 1
        _groups[self.number] = self
        # Communicators are built by the first call, which may not be inside a capture.
        self.all_to_all(torch.zeros((world, 1), device=device), [1] * world, [1] * world)

    def all_to_all(
        self, sent: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]
    ) -> Tensor:
        """Rows for each rank in, rows of each rank out, both by rank.

        Shapes: ``sent`` [sum(sent_rows), width], result [sum(received_rows), width], new.
        """
        result: Tensor = torch.ops.graphrt_llm.all_to_all(
            sent, list(sent_rows), list(received_rows), self.number
        )
        return result

    def close(self) -> None:
        """Destroy the group. Idempotent."""
        if _groups.pop(self.number, None) is not None:
            group, self.group = self.group, None
            dist.destroy_process_group(group)


_groups: dict[int, ExpertGroup] = {}


def _all_to_all(sent: Tensor, sent_rows: list[int], received_rows: list[int], group: int) -> Tensor:
    received = sent.new_empty((sum(received_rows), sent.shape[1]))
    dist.all_to_all_single(received, sent, received_rows, sent_rows, group=_groups[group].group)
    return received


def _shape(sent: Tensor, sent_rows: list[int], received_rows: list[int], group: int) -> Tensor:
    return sent.new_empty((sum(received_rows), sent.shape[1]))


_library = torch.library.Library("graphrt_llm", "FRAGMENT")
_library.define(
    "all_to_all(Tensor sent, int[] sent_rows, int[] received_rows, int group) -> Tensor"
)
_library.impl("all_to_all", _all_to_all, "CPU")
_library.impl("all_to_all", _all_to_all, "CUDA")
_library.impl("all_to_all", _shape, "Meta")

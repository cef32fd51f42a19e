"""The feed-forward part of Qwen3-MoE: each token takes a few experts, weighted by a router.

Shapes depend on the number of tokens alone, so that a graph holds it: every expert computes every
row that it is given, and those that did not choose it count nothing. Plain on purpose: no token is
dropped, and no size depends on data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import graphrt_llm.kernels.eager as eager
from graphrt import get_forward_context, ubatch
from graphrt_llm.collectives import RankGroup
from graphrt_llm.model_config import ModelConfig
from graphrt_llm.models.parameters import CheckpointTensor, Device, Projection


class Experts(nn.Module):
    """A router, and the experts that this rank has: all of them where ``group`` is None."""

    def __init__(
        self, config: ModelConfig, group: RankGroup | None, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        rank, world = (0, 1) if group is None else (group.rank, group.world)
        each = config.num_experts // world
        self.numbers = range(rank * each, (rank + 1) * each)
        """Of the experts that are here."""
        self.group = group
        self.per_token, self.normalizes = config.num_experts_per_tok, config.norm_topk_prob

        def projections(make: Callable[[], Projection]) -> list[Projection]:
            return [make() for _ in self.numbers]

        def projection(in_features: int, *out_features: int) -> Projection:
            return Projection(in_features, *out_features, bias=False, dtype=dtype, device=device)

        self.router = projection(hidden, config.num_experts)
        self.gate_up = nn.ModuleList(projections(lambda: projection(hidden, inner, inner)))
        self.down = nn.ModuleList(projections(lambda: projection(inner, hidden)))

    def forward(self, rows: Tensor) -> Tensor:
        """[tokens, hidden_size] in, a new tensor of this shape out."""
        weights = self._weights(rows)
        if self.group is None:
            return self._of_experts(rows, weights)
        return self._of_all_ranks(self.group, rows, weights)

    def _weights(self, rows: Tensor) -> Tensor:
        """[tokens, num_experts]: 0 for the experts that a token does not take."""
        logits = eager.linear(rows, *self.router.matrix)
        wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
        chances = logits.softmax(-1, dtype=wide)
        largest, taken = chances.topk(self.per_token, -1)
        if self.normalizes:
            largest = largest / largest.sum(-1, keepdim=True)
        return torch.zeros_like(chances).scatter(1, taken, largest).to(rows.dtype)

    def _of_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the experts here, in ascending order; ``weights`` [rows, experts]."""
        total: Tensor | None = None
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            assert isinstance(gate_up, Projection) and isinstance(down, Projection)  # noqa: PT018
            gate, up = eager.linear(rows, *gate_up.matrix).chunk(2, -1)
            weight = weights[:, number, None]
            part = eager.linear(F.silu(gate) * up, *down.matrix) * weight
            # Filled and not multiplied by 0: an expert may overflow for a row that it does not get.
            part = part.masked_fill(weight == 0, 0)
            total = part if total is None else total + part
        assert total is not None, "every rank has an expert"
        return total

    def _of_all_ranks(self, group: RankGroup, rows: Tensor, weights: Tensor) -> Tensor:
        """Send each row to the ranks of its experts and add up what they return, by rank."""
        num_tokens, width = rows.shape
        world = group.world
        by_rank = weights.view(num_tokens, world, -1).transpose(0, 1)
        is_taken = (by_rank != 0).any(-1, keepdim=True)
        message = torch.cat((rows * is_taken, by_rank), -1).flatten(0, 1)
        own = [num_tokens] * world
        context = get_forward_context()
        # Eager and unpadded, each rank brings a size of its own; else all have the same.
        across = None if context is None else context.num_tokens_across_ranks
        theirs = own if across is None else list(across)
        received = message.new_empty((sum(theirs), message.shape[1]))
        with ubatch.communication("experts.dispatch", message):
            group.all_to_all(received, message, theirs, own)
        computed = self._of_experts(received[:, :width], received[:, width:])
        returned = rows.new_empty((sum(own), width))
        with ubatch.communication("experts.combine", computed):
            group.all_to_all(returned, computed, own, theirs)
        parts = returned.view(world, num_tokens, width).unbind()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        yield from self.router.checkpoint_tensors(f"{prefix}.gate")
        for number, gate_up, down in zip(self.numbers, self.gate_up, self.down, strict=True):
            assert isinstance(gate_up, Projection) and isinstance(down, Projection)  # noqa: PT018
            name = f"{prefix}.experts.{number}"
            yield from gate_up.checkpoint_tensors(f"{name}.gate_proj", f"{name}.up_proj")
            yield from down.checkpoint_tensors(f"{name}.down_proj")

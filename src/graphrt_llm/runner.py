"""Runs scheduled batches: inputs in, one call of the runtime, logits out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from graphrt import Runtime, RuntimeMode
from graphrt_llm.attention import AttentionInputs, AttentionMetadata
from graphrt_llm.inputs import HostInputs
from graphrt_llm.limits import Limits
from graphrt_llm.scheduler import ScheduledBatch
from graphrt_llm.seats import Seats

EVERY_GRAPH = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})


class NamedInputs(nn.Module):
    """The model as the runtime calls it: one keyword for each static input.

    A module, because the runtime finds the parameters that its graphs read through modules.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        *,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        token_requests: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        logits_indices: Tensor,
    ) -> Tensor:
        """Logits [requests, vocab_size] of each request's last token."""
        attention = AttentionInputs(slot_mapping, token_requests, block_tables, seq_lens)
        logits: Tensor = self.model(input_ids, positions, attention, logits_indices)
        return logits


class Runner:
    """Binds a runtime to the host storage of its inputs."""

    def __init__(self, runtime: Runtime, limits: Limits, *, pinned: bool) -> None:
        self._runtime = runtime
        self._inputs = HostInputs(limits, pinned=pinned)

    def run(
        self,
        batch: ScheduledBatch,
        seats: Seats,
        exclude: frozenset[RuntimeMode] = frozenset(),
    ) -> Any:
        """Logits [num_reqs, vocab_size] of ``batch``; the next step overwrites them."""
        return self._runtime.step(
            self._inputs.fill_from_seats(batch, seats),
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            uniform=batch.uniform,
            exclude=exclude,
            live=AttentionMetadata(batch.query_lens, batch.starts + batch.query_lens),
        )

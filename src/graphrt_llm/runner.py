"""Runs scheduled batches: inputs in, one call of the runtime, logits and greedy tokens out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from graphrt import Runtime, RuntimeMode
from graphrt_llm.attention import AttentionInputs, AttentionMetadata
from graphrt_llm.inputs import HostInputs
from graphrt_llm.limits import Limits
from graphrt_llm.scheduler import ScheduledBatch
from graphrt_llm.seats import Seats

EVERY_GRAPH = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})


class StepOutputs(NamedTuple):
    """What the model says of each request's last token; the next step overwrites it."""

    logits: Tensor
    """[requests, vocab_size]"""
    tokens: Tensor
    """[requests] int64: the most likely token, the lowest id among equals."""


class Unread(NamedTuple):
    """A step that was launched and whose tokens the host does not know yet."""

    batch: ScheduledBatch
    tokens: Tensor
    """[num_reqs] int64, on the device."""


class NamedInputs(nn.Module):
    """The model as the runtime calls it: one keyword for each static input.

    The greedy choice stands in the graph with the rest: most requests want nothing else.

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
    ) -> StepOutputs:
        attention = AttentionInputs(slot_mapping, token_requests, block_tables, seq_lens)
        logits: Tensor = self.model(input_ids, positions, attention, logits_indices)
        return StepOutputs(logits, logits.argmax(-1))


class Runner:
    """Binds a runtime to the host storage of its inputs.

    There are two such storages, because the device may still read those of the step before. Hence
    a step's tokens must have been read when the step after the next one is run.
    """

    def __init__(self, runtime: Runtime, limits: Limits, *, pinned: bool) -> None:
        self._runtime = runtime
        self._inputs = itertools.cycle([HostInputs(limits, pinned=pinned) for _ in range(2)])

    def run(
        self,
        batch: ScheduledBatch,
        seats: Seats,
        exclude: frozenset[RuntimeMode] = frozenset(),
        before: Unread | None = None,
    ) -> StepOutputs:
        """Run ``batch``; the next step overwrites what it returns.

        ``before``: the step before, if its tokens are not in ``seats`` yet. They are taken from
        the device, where they are.
        """
        inputs = next(self._inputs)
        values = inputs.fill_from_seats(batch, seats)
        if before is not None:
            values = _with_tokens_of(before, batch, values, inputs)
        outputs: StepOutputs = self._runtime.step(
            values,
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            uniform=batch.uniform,
            exclude=exclude,
            live=AttentionMetadata(
                batch.query_lens,
                batch.starts + batch.query_lens,
                seats.block_tables[batch.seats],
            ),
        )
        return outputs


def _with_tokens_of(
    before: Unread, batch: ScheduledBatch, values: Mapping[str, Tensor], inputs: HostInputs
) -> Mapping[str, Tensor]:
    """``values``, with the inputs that ``before`` sampled in the places kept for them.

    Of a request that goes on, that is its one token in ``batch``.
    """
    if batch.requests == before.batch.requests and before.batch.completes.all():
        # A decode step like the one before: its output is the input as it is.
        return {**values, "input_ids": before.tokens}
    row_of = {
        request: row
        for row, request in enumerate(before.batch.requests)
        if before.batch.completes[row]
    }
    last = np.cumsum(batch.query_lens) - 1
    rows = [row_of.get(request, -1) for request in batch.requests]
    if max(rows) < 0:
        return values
    device = before.tokens.device
    sources = inputs.sources(batch.num_tokens, last, rows).to(device, non_blocking=True)
    known = values["input_ids"].to(device, non_blocking=True)
    sampled = before.tokens.index_select(0, sources.clamp(min=0))
    return {**values, "input_ids": sampled.where(sources >= 0, known)}

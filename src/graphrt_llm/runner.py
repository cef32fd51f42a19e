"""Runs scheduled batches: inputs in, one call of the runtime, logits and greedy tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from graphrt import Runtime, RuntimeMode, UBatchReason, get_forward_context
from graphrt_llm.attention import AttentionInputs, AttentionMetadata
from graphrt_llm.collectives import RankGroup
from graphrt_llm.config import Limits
from graphrt_llm.input_batch import InputBatch
from graphrt_llm.inputs import HostInputs
from graphrt_llm.kernels import EAGER, Kernels
from graphrt_llm.scheduler import ScheduledBatch

EVERY_GRAPH = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})


class StepOutputs(NamedTuple):
    """The model's result for each request's last token; the next step overwrites it.

    With speculative decoding, for its last ``query_len`` tokens: a dimension behind the first.
    """

    logits: Tensor
    """[requests, vocab_size]"""
    tokens: Tensor
    """[requests] int64: the most likely token, the lowest id among equals."""


class LaunchedStep:
    """A step whose tokens are on their way to the host.

    ``tokens``: [num_reqs] int64, on the device. Their copy to the host starts at once, on a CPU
    too: they may be graph storage, which the next step overwrites. ``storage``: which of the two
    host storages of inputs and of sampling parameters the device reads until then. ``group``: the
    ranks that the step meets in its layers.
    """

    def __init__(
        self, batch: ScheduledBatch, tokens: Tensor, storage: int, group: RankGroup | None
    ) -> None:
        self.batch = batch
        self.tokens = tokens
        self.storage = storage
        self._group = group
        self._copied: torch.Event | None = None
        if tokens.device.type == "cpu":
            self._host = tokens.clone()
        else:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._copied = torch.Event(tokens.device)
            self._copied.record()

    def wait(self) -> list[int]:
        """The tokens, once the device has computed and copied them. Errors: ``RankLostError``."""
        if self._copied is not None:
            if self._group is None:
                self._copied.synchronize()
            else:
                self._group.wait_for(self._copied)
        token_ids: list[int] = self._host.tolist()
        return token_ids


class NamedInputs(nn.Module):
    """The model as the runtime calls it: one keyword for each static input.

    The greedy choice is part of the graph, because most requests want no other. A module, because
    the runtime finds the parameters that its graphs read through modules.
    """

    def __init__(self, model: nn.Module, kernels: Kernels = EAGER) -> None:
        super().__init__()
        self.model = model
        self._argmax = kernels.argmax

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
        lora_slots: Tensor | None = None,
        active_loras: Tensor | None = None,
    ) -> StepOutputs:
        attention = AttentionInputs(slot_mapping, token_requests, block_tables, seq_lens)
        inputs = (input_ids, positions, attention, logits_indices)
        logits: Tensor
        if lora_slots is None or active_loras is None or not (count := _num_adapters()):
            logits = self.model(*inputs)
        else:
            weights: Any = self.model.lora
            adapters = weights.begin(lora_slots, active_loras[:count])
            logits = self.model(*inputs, adapters)
        return StepOutputs(logits, self._argmax(logits))


def _num_adapters() -> int:
    """How many adapters the key of this step has."""
    context = get_forward_context()
    key = None if context is None else context.batch_descriptor
    return 0 if key is None else key.num_active_loras


class Runner:
    """Binds a runtime to the host storage of its inputs.

    There are two such storages, because the device may still read that of the previous step. A step
    takes the one that the step in flight has not, so that a launch that fails takes none.
    """

    def __init__(
        self,
        runtime: Runtime,
        limits: Limits,
        *,
        pinned: bool,
        excludes: Callable[[AttentionMetadata], frozenset[RuntimeMode]] | None,
    ) -> None:
        self._runtime = runtime
        self._query_len = limits.query_len
        self._excludes = excludes
        self._inputs = [HostInputs(limits, pinned=pinned) for _ in range(2)]

    def run(
        self,
        batch: ScheduledBatch,
        table: InputBatch,
        exclude: frozenset[RuntimeMode] = frozenset(),
        previous: LaunchedStep | None = None,
        storage: int = 0,
    ) -> StepOutputs:
        """Run ``batch``; the next step overwrites what it returns.

        ``previous``: the step before, if its tokens are not in ``table`` yet. They are then taken
        from the device. ``storage``: the host storage to fill, 0 or 1; the device must have read
        it.
        """
        inputs = self._inputs[storage]
        values = inputs.fill(batch, table)
        if previous is not None:
            values = _with_sampled(previous, batch, values, inputs)
        step_info = AttentionMetadata(
            batch.query_lens,
            batch.starts + batch.query_lens,
            table.block_tables[batch.rows],
        )
        if self._excludes is not None:
            exclude |= self._excludes(step_info)
        # Cut inside a request, its drafts would be in two micro-batches, and its logits in one.
        is_cut_inside = self._query_len > 1 and not batch.uniform
        outputs: StepOutputs = self._runtime.step(
            values,
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            uniform=batch.uniform,
            num_active_loras=len(batch.active_loras),
            exclude=exclude,
            step_info=step_info,
            query_lens=batch.query_lens,
            unsplit=UBatchReason.ENGINE_DECLINED if is_cut_inside else None,
        )
        return outputs


def _with_sampled(
    previous: LaunchedStep,
    batch: ScheduledBatch,
    values: Mapping[str, Tensor],
    inputs: HostInputs,
) -> Mapping[str, Tensor]:
    """``values``, with the tokens that ``previous`` sampled as ``input_ids`` of their requests.

    Such a token is the last new one, and the only one, of its request in ``batch``.
    """
    if batch.requests == previous.batch.requests and previous.batch.completes.all():
        # Decode after decode of the same requests: the output is the input as it is.
        return {**values, "input_ids": previous.tokens}
    index_of = {
        request: index
        for index, request in enumerate(previous.batch.requests)
        if previous.batch.completes[index]
    }
    last = np.cumsum(batch.query_lens) - 1
    indices = [index_of.get(request, -1) for request in batch.requests]
    if max(indices) < 0:
        return values
    device = previous.tokens.device
    sources = inputs.sources(batch.num_tokens, last, indices).to(device, non_blocking=True)
    known = values["input_ids"].to(device, non_blocking=True)
    sampled = previous.tokens.index_select(0, sources.clamp(min=0))
    return {**values, "input_ids": sampled.where(sources >= 0, known)}

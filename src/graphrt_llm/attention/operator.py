"""Attention as an operator of torch: where a compiler cuts the model that it has traced.

A traced graph calls operators on tensors, so that the backend, and what its ``begin`` returned in
this step, are found in the forward context. Where the graph is cut, ``attention`` itself is called
in place of the operator: it is plain Python, and cuts a PIECEWISE capture as a break point does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from graphrt import get_forward_context
from graphrt_llm.attention.base import AttentionBackend, AttentionInputs, attend
from graphrt_llm.errors import AttentionBackendError

ATTENTION_OP = "graphrt_llm::attention"
LAYER = "attention"
"""The name in ``ForwardContext.layers`` of the model's ``AttentionStep``."""


class AttentionStep:
    """What the operator uses: a backend, and what the backend's layers share in this step."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.shared: tuple[Tensor, ...] = ()

    @contextmanager
    def begun(self, positions: Tensor, attn: AttentionInputs) -> Iterator[None]:
        """While entered, ``shared`` is what ``backend.begin`` returned."""
        self.shared = self.backend.begin(positions, attn)
        try:
            yield
        finally:
            # Memory of a graph that is being captured: only what it returns may be kept.
            self.shared = ()


def attention(
    heads: Tensor,
    slot_mapping: Tensor,
    token_requests: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    layer_index: int,
) -> None:
    """``attend``, with the backend of the forward context. Shapes: as there; all int64 but heads.

    Errors: ``AttentionBackendError`` where the forward context has no ``AttentionStep``.
    """
    context = get_forward_context()
    step = None if context is None or context.layers is None else context.layers.get(LAYER)
    if not isinstance(step, AttentionStep):
        raise AttentionBackendError(
            ATTENTION_OP,
            expected=f"an AttentionStep in ForwardContext.layers[{LAYER!r}]",
            found=type(step).__name__,
            do="give Runtime(layers=...) the model's, or enter a forward context that has it.",
        )
    inputs = AttentionInputs(slot_mapping, token_requests, block_tables, seq_lens)
    attend(step.backend, layer_index, heads, inputs, step.shared, out=out)


operator = torch.library.custom_op(ATTENTION_OP, mutates_args=("out",))(attention)
operator.register_fake(lambda *args, **kwargs: None)

"""Attention over the paged cache: one protocol, and its backends by name."""

from graphrt_llm.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    attend,
)
from graphrt_llm.attention.operator import (
    ATTENTION_OP,
    LAYER,
    AttentionStep,
    attention,
    operator as attention_operator,
)
from graphrt_llm.attention.registry import (
    AttentionChoice,
    AttentionFactory,
    attention_backends,
    choose_attention,
    make_attention,
    make_cold_attention,
    register_attention_backend,
)
from graphrt_llm.attention.switching import Switch, SwitchingAttention

__all__ = [
    "ATTENTION_OP",
    "LAYER",
    "AttentionBackend",
    "AttentionChoice",
    "AttentionFactory",
    "AttentionInputs",
    "AttentionMetadata",
    "AttentionStep",
    "Switch",
    "SwitchingAttention",
    "attend",
    "attention",
    "attention_backends",
    "attention_operator",
    "choose_attention",
    "make_attention",
    "make_cold_attention",
    "register_attention_backend",
]

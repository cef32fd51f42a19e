"""Attention over the paged cache: one protocol, and its backends by name."""

from graphrt_llm.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    attend,
)
from graphrt_llm.attention.registry import (
    AttentionChoice,
    AttentionFactory,
    attention_backends,
    choose_attention,
    make_attention,
    register_attention_backend,
)

__all__ = [
    "AttentionBackend",
    "AttentionChoice",
    "AttentionFactory",
    "AttentionInputs",
    "AttentionMetadata",
    "attend",
    "attention_backends",
    "choose_attention",
    "make_attention",
    "register_attention_backend",
]

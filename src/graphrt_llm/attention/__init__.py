"""Attention over the paged cache: one protocol, and its backends by name."""

from graphrt_llm.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    AttentionResource,
    attend,
)
from graphrt_llm.attention.registry import (
    AUTO,
    BACKENDS,
    AttentionChoice,
    choose_attention,
    make_attention,
)

__all__ = [
    "AUTO",
    "BACKENDS",
    "AttentionBackend",
    "AttentionChoice",
    "AttentionInputs",
    "AttentionMetadata",
    "AttentionResource",
    "attend",
    "choose_attention",
    "make_attention",
]

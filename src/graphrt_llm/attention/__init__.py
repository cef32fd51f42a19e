"""Attention over the paged cache: one protocol, several backends, looked up by name."""

from graphrt_llm.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    AttentionResource,
    attend,
)
from graphrt_llm.attention.registry import BACKENDS, make_attention

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionInputs",
    "AttentionMetadata",
    "AttentionResource",
    "attend",
    "make_attention",
]

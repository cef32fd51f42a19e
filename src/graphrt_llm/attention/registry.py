"""The backends that exist, by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from graphrt_llm.attention import flashinfer
from graphrt_llm.attention.base import AttentionBackend
from graphrt_llm.attention.flashinfer import FlashInferAttention
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.limits import Limits

BACKENDS: Mapping[str, Callable[[KVCache, Limits | None], AttentionBackend]] = MappingProxyType(
    {"sdpa": lambda cache, limits: SdpaAttention(cache), "flashinfer": FlashInferAttention}
)

AUTO = "auto"


class AttentionChoice(NamedTuple):
    """A backend's name, and why it was taken."""

    name: str
    reason: str


def choose_attention(wish: str, cache: KVCache) -> AttentionChoice:
    """``wish``, or for ``"auto"`` FlashInfer where it can serve ``cache`` and else sdpa."""
    if wish != AUTO:
        return AttentionChoice(wish, "asked for")
    obstacle = flashinfer.obstacle(cache)
    if obstacle is None:
        return AttentionChoice("flashinfer", "the fastest that serves this cache")
    return AttentionChoice("sdpa", f"flashinfer needs {obstacle.expected}, found: {obstacle.found}")


def make_attention(name: str, cache: KVCache, limits: Limits | None = None) -> AttentionBackend:
    """The backend known as ``name``, over ``cache``.

    ``limits`` bound the batches; a backend that plans on the host needs them.
    Errors: ``AttentionBackendError`` for an unknown name, and where the backend cannot serve.
    """
    make = BACKENDS.get(name)
    if make is None:
        raise AttentionBackendError(
            f"attention backend {name!r}",
            expected=f"one of {', '.join(BACKENDS)}",
            found=repr(name),
        )
    return make(cache, limits)

"""The backends that exist, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from graphrt_llm.attention.base import AttentionBackend
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache

BACKENDS: Mapping[str, Callable[[KVCache], AttentionBackend]] = MappingProxyType(
    {"sdpa": SdpaAttention}
)


def make_attention(name: str, cache: KVCache) -> AttentionBackend:
    """The backend known as ``name``, over ``cache``. Errors: ``AttentionBackendError``."""
    make = BACKENDS.get(name)
    if make is None:
        raise AttentionBackendError(
            f"attention backend {name!r}",
            expected=f"one of {', '.join(BACKENDS)}",
            found=repr(name),
        )
    return make(cache)

"""The backends that exist, by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import graphrt_llm.attention.flashinfer as flashinfer
import graphrt_llm.attention.paged as paged
from graphrt_llm.attention.base import AttentionBackend
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.config import Limits
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache


def _make_paged(cache: KVCache, limits: Limits | None) -> AttentionBackend:
    decode = paged.triton_decode(cache)
    fallback = make_attention(_for_any_batch(cache).name, cache, limits)
    return paged.PagedAttention(fallback, decode)


BACKENDS: Mapping[str, Callable[[KVCache, Limits | None], AttentionBackend]] = MappingProxyType(
    {
        "sdpa": lambda cache, limits: SdpaAttention(cache),
        "flashinfer": flashinfer.FlashInferAttention,
        "paged": _make_paged,
    }
)

AUTO = "auto"


class AttentionChoice(NamedTuple):
    """A backend's name, and why it was chosen."""

    name: str
    reason: str


def choose_attention(asked: str, cache: KVCache) -> AttentionChoice:
    """``asked``, or for ``"auto"`` the fastest that can serve ``cache``.

    That is ``paged`` for few decoding requests, with flashinfer, or else sdpa, for other batches.
    """
    if asked != AUTO:
        return AttentionChoice(asked, "asked for")
    general = _for_any_batch(cache)
    if paged.obstacle(cache) is not None:
        return general
    most = paged.MAX_REQUESTS
    return AttentionChoice(
        "paged", f"the fastest for up to {most} requests; else {general.name}: {general.reason}"
    )


def _for_any_batch(cache: KVCache) -> AttentionChoice:
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

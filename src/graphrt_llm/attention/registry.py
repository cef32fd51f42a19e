"""The backends that exist, by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from graphrt_llm.attention import flashinfer, paged
from graphrt_llm.attention.base import AttentionBackend
from graphrt_llm.attention.flashinfer import FlashInferAttention
from graphrt_llm.attention.paged import PagedAttention, triton_decode
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.limits import Limits


def _make_paged(cache: KVCache, limits: Limits | None) -> PagedAttention:
    decode = triton_decode(cache)
    return PagedAttention(make_attention(_for_any_batch(cache).name, cache, limits), decode)


BACKENDS: Mapping[str, Callable[[KVCache, Limits | None], AttentionBackend]] = MappingProxyType(
    {
        "sdpa": lambda cache, limits: SdpaAttention(cache),
        "flashinfer": FlashInferAttention,
        "paged": _make_paged,
    }
)

AUTO = "auto"


class AttentionChoice(NamedTuple):
    """A backend's name, and why it was taken."""

    name: str
    reason: str


def choose_attention(wish: str, cache: KVCache) -> AttentionChoice:
    """``wish``, or for ``"auto"`` the fastest that can serve ``cache``.

    That is our own kernel for few decoding requests, and FlashInfer, or else sdpa, for the rest.
    """
    if wish != AUTO:
        return AttentionChoice(wish, "asked for")
    rest = _for_any_batch(cache)
    if paged.obstacle(cache) is not None:
        return rest
    return AttentionChoice(
        "paged",
        f"the fastest for up to {paged.MAX_REQUESTS} requests; else {rest.name}: {rest.reason}",
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

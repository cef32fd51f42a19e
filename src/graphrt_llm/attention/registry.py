"""The backends that exist, by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import graphrt_llm.attention.flashinfer as flashinfer
import graphrt_llm.attention.paged as paged
from graphrt_llm.attention.base import AttentionBackend, Decode
from graphrt_llm.attention.building import LoadedLater, flashinfer_build, missing_modules
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.attention.switching import Build, SwitchingAttention
from graphrt_llm.config import Limits
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache

AttentionFactory = Callable[[KVCache, Limits | None], AttentionBackend]
"""Makes a backend over a cache, for batches within the limits; None: of any size."""

AUTO = "auto"


def _make_paged(cache: KVCache, limits: Limits | None) -> AttentionBackend:
    found = paged.obstacle(cache)
    if found is not None:
        raise AttentionBackendError("attention backend 'paged'", **found._asdict())
    name = _for_any_batch(cache).name

    def rest(decode: Decode | None) -> AttentionBackend:
        if name == "flashinfer":
            return flashinfer.FlashInferAttention(cache, limits, decode=decode)
        return make_attention(name, cache, limits)

    return _over(rest, cache, limits)


# State of the process, as names of plug-ins are. Entries are added whole and never change.
_FACTORIES: dict[str, AttentionFactory] = {
    "sdpa": lambda cache, limits: SdpaAttention(cache, limits.query_len if limits else 1),
    "flashinfer": flashinfer.FlashInferAttention,
    "paged": _make_paged,
}


def attention_backends() -> tuple[str, ...]:
    """The names that ``EngineConfig.attention_backend`` can take, beside ``auto``."""
    return tuple(_FACTORIES)


def register_attention_backend(name: str, factory: AttentionFactory) -> None:
    """Make ``EngineConfig(attention_backend=name)`` serve with what ``factory`` returns.

    ``factory(cache, limits)`` is called once for each engine, when its weights are loaded; it
    returns an ``AttentionBackend`` over ``cache``, or raises ``AttentionBackendError`` if it cannot
    serve that cache. A name belongs to the process and is never chosen by ``auto``.

    Errors: ``AttentionBackendError`` for a name that is taken, reserved or empty, and for a factory
    that cannot be called.
    """
    known = (AUTO, *_FACTORIES)
    if not isinstance(name, str) or not name or name in known:
        raise AttentionBackendError(
            f"attention backend {name!r}",
            expected=f"a name other than {', '.join(known)}",
            found=repr(name),
            do="register it once, under a name of its own.",
        )
    if not callable(factory):
        raise AttentionBackendError(
            f"attention backend {name!r}",
            expected="factory(cache, limits), which returns an AttentionBackend",
            found=repr(factory),
        )
    _FACTORIES[name] = factory


class AttentionChoice(NamedTuple):
    """A backend's name, and why it was chosen.

    ``name``: Under which it is registered.
    ``reason``: In words.
    """

    name: str
    reason: str


def choose_attention(asked: str, cache: KVCache) -> AttentionChoice:
    """``asked``, or for ``"auto"`` the fastest of this package's that can serve ``cache``.

    That is ``paged`` for decoding requests, with flashinfer, or else sdpa, for other batches.
    """
    if asked != AUTO:
        return AttentionChoice(asked, "asked for")
    general = _for_any_batch(cache)
    if paged.obstacle(cache) is not None:
        return general
    reason = f"the fastest for decode; else {general.name}: {general.reason}"
    return AttentionChoice("paged", reason)


def _for_any_batch(cache: KVCache) -> AttentionChoice:
    obstacle = flashinfer.obstacle(cache)
    if obstacle is None:
        return AttentionChoice("flashinfer", "the fastest that serves this cache")
    return AttentionChoice("sdpa", f"flashinfer needs {obstacle.expected}, found: {obstacle.found}")


def make_cold_attention(cache: KVCache, limits: Limits, *, waits: bool) -> AttentionBackend | None:
    """``paged`` over FlashInfer, which serves before FlashInfer is imported and built.

    This package's kernel serves decode all the time; other batches sdpa until then, or with
    ``waits`` the kernels ``fa2``, which take a fraction of the time to build. None where one of
    the two cannot serve, or who ``waits`` has nothing to build.
    """
    if paged.obstacle(cache) is not None or flashinfer.obstacle(cache) is not None:
        return None
    modules = [module for module in missing_modules(cache) if module[0] != "fa2"] if waits else []
    if waits and not modules:
        return None

    def rest(decode: Decode | None) -> AttentionBackend:
        first: AttentionBackend
        build: Build
        if waits:
            first = flashinfer.FlashInferAttention(cache, limits, "fa2", decode)
            build = flashinfer_build(modules)
        else:
            first, build = SdpaAttention(cache, limits.query_len), LoadedLater(cache)
        later = flashinfer.FlashInferAttention(cache, limits, decode=decode)
        return SwitchingAttention(first, later, build)

    return _over(rest, cache, limits)


def _over(
    rest: Callable[[Decode | None], AttentionBackend], cache: KVCache, limits: Limits | None
) -> AttentionBackend:
    """This package's kernel for decoding requests, and what ``rest`` makes beside it."""
    config = cache.config
    query_len = 1 if limits is None else limits.query_len
    most = paged.MAX_REQUESTS if limits is None else limits.max_num_seqs
    if query_len * config.num_heads > paged.MOST_QUERIES * config.num_kv_heads:
        return rest(None)
    decode = paged.triton_decode(cache, query_len, most)
    return paged.PagedAttention(rest(decode), decode, query_len, most)


_MEMBERS = tuple(name for name in vars(AttentionBackend) if not name.startswith("_"))


def make_attention(name: str, cache: KVCache, limits: Limits | None = None) -> AttentionBackend:
    """The backend known as ``name``, over ``cache``.

    ``limits`` bound the batches; a backend that plans on the host needs them.
    Errors: ``AttentionBackendError`` for an unknown name, where the backend cannot serve, and where
    a factory returned what is no ``AttentionBackend``.
    """
    factory = _FACTORIES.get(name) if isinstance(name, str) else None
    if factory is None:
        raise AttentionBackendError(
            f"attention backend {name!r}",
            expected=f"one of {', '.join(_FACTORIES)}",
            found=repr(name),
            do="register it with register_attention_backend(name, factory), or use 'sdpa'.",
        )
    backend = factory(cache, limits)
    absent = [member for member in _MEMBERS if not hasattr(backend, member)]
    if absent:
        raise AttentionBackendError(
            f"attention backend {name!r}",
            expected=f"an AttentionBackend with {', '.join(_MEMBERS)}",
            found=f"a {type(backend).__name__} without {', '.join(absent)}",
        )
    return backend

"""The forward context: the decision of this step, carried to wrappers, break points and opaque ops.

It lives in the one ContextVar of the package. A new thread starts with none, so permission to
capture never leaks into it; a worker that should have it runs in a copy of its caller's context.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any

from graphrt.batch import BatchDescriptor, RuntimeMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ForwardContext:
    """What wrappers trust: the mode and key of this step. Used once, as a context manager.

    A context entered inside another inherits its ``capture_scope``. Compiled code never reads it.
    """

    __slots__ = (
        "_token",
        "attn_metadata",
        "batch_descriptor",
        "capture_scope",
        "cudagraph_runtime_mode",
        "layers",
        "num_tokens_across_ranks",
        "slot_mapping",
        "ubatch",
        "ubatch_slices",
    )

    def __init__(
        self,
        cudagraph_runtime_mode: RuntimeMode = RuntimeMode.NONE,
        batch_descriptor: BatchDescriptor | None = None,
        *,
        attn_metadata: Any = None,
        slot_mapping: Any = None,
        layers: Mapping[str, Any] | None = None,
        num_tokens_across_ranks: tuple[int, ...] | None = None,
        ubatch_slices: Sequence[Any] | None = None,
        ubatch: Any = None,
        capture_scope: Any = None,
    ) -> None:
        self.cudagraph_runtime_mode = cudagraph_runtime_mode
        self.batch_descriptor = batch_descriptor
        self.attn_metadata = attn_metadata
        self.slot_mapping = slot_mapping
        self.layers = layers
        self.num_tokens_across_ranks = num_tokens_across_ranks
        self.ubatch_slices = ubatch_slices
        self.ubatch = ubatch
        self.capture_scope = capture_scope
        self._token: Token[ForwardContext | None] | None = None

    def __enter__(self) -> ForwardContext:
        if self.capture_scope is None:
            outer = _current.get()
            if outer is not None:
                self.capture_scope = outer.capture_scope
        self._token = _current.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._token is not None, "a ForwardContext is left only after it was entered"
        _current.reset(self._token)
        self._token = None


_current: ContextVar[ForwardContext | None] = ContextVar("graphrt_forward_context", default=None)

# Bound once: wrappers call it on every step, and an attribute look-up there is a third of the cost.
current_forward_context = _current.get


def get_forward_context() -> ForwardContext | None:
    """Return the context of the step that is running in this thread, or None."""
    return _current.get()

"""The forward context: the decision of this step, for wrappers, break points and opaque ops.

It is held in the package's one ContextVar. A new thread starts without it, so that code there does
not capture by accident; a worker that needs it runs in a copy of its caller's context.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.errors import ContextError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(slots=True, eq=False, repr=False)
class ForwardContext:
    """The mode and key of this step, and what attention needs. Entered once, with ``with``.

    A context entered inside another inherits its ``capture_scope``, its ``layers`` where it has
    none, and its ``breaks=False``. Compiled code never reads it.

    ``cudagraph_runtime_mode``: What wrappers of this mode replay in; NONE: nothing.
    ``batch_descriptor``: The key of the step.
    ``attn_metadata``: The step's ``step_info``, whatever that is.
    ``slot_mapping``: Where attention stores keys and values.
    ``layers``: Objects by name that operators find here.
    ``num_tokens_across_ranks``: The size of each rank's batch; None where a rank decides alone.
    ``ubatch_slices``: Where the step is cut into micro-batches. ``ubatch``: The one that runs.
    ``capture_scope``: The permission to capture, and the recorder.
    ``breaks``: False: break points are plain calls.
    """

    # Not keyword-only: defaults of such parameters are looked up in a dict at every call.
    cudagraph_runtime_mode: RuntimeMode = RuntimeMode.NONE
    batch_descriptor: BatchDescriptor | None = None
    attn_metadata: Any = None
    slot_mapping: Any = None
    layers: Mapping[str, Any] | None = None
    num_tokens_across_ranks: tuple[int, ...] | None = None
    ubatch_slices: Sequence[Any] | None = None
    ubatch: Any = None
    capture_scope: Any = None
    breaks: bool = True
    _token: Token[ForwardContext | None] = field(init=False)

    def derive(self, **changes: Any) -> ForwardContext:
        """Return a context, not entered yet, that differs from this one in ``changes``."""
        copy = type(self)()
        for name in ForwardContext.__slots__:
            if name != "_token":
                setattr(copy, name, changes.pop(name) if name in changes else getattr(self, name))
        if changes:
            raise TypeError(f"a forward context has no {', '.join(changes)}")
        return copy

    def of_micro_batch(self, ubatch: Any, num_tokens: int) -> ForwardContext:
        """The context of one micro-batch: mode NONE, and its part of what attention needs.

        ``attn_metadata`` and ``slot_mapping``: of a list or tuple the member of its index, else
        what they are; an empty mapping is None. Ranks cut alike, so they have as many tokens.
        Errors: ``ContextError`` for a list that has not one member for each micro-batch.
        """
        part = self.derive(
            cudagraph_runtime_mode=RuntimeMode.NONE, ubatch_slices=None, ubatch=ubatch
        )
        part.attn_metadata = _member("attn_metadata", self._metadata, ubatch)
        mapping = _member("slot_mapping", self.slot_mapping, ubatch)
        part.slot_mapping = None if isinstance(mapping, dict) and not mapping else mapping
        if self.num_tokens_across_ranks is not None:
            part.num_tokens_across_ranks = (num_tokens,) * len(self.num_tokens_across_ranks)
        return part

    @property
    def _metadata(self) -> Any:
        return self.attn_metadata

    def __enter__(self) -> ForwardContext:
        outer = current_forward_context()
        if outer is not None:
            if self.capture_scope is None:
                self.capture_scope = outer.capture_scope
            if self.layers is None:
                self.layers = outer.layers
            if not outer.breaks:
                self.breaks = False
        self._token = _enter(self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _leave(self._token)


class CaptureContext(ForwardContext):
    """The context of one capture, which notes whether a graph could hold what it says.

    ``capture_scope.recorder`` learns of each read of ``attn_metadata`` outside eager segments.
    """

    __slots__ = ("_step_info",)

    @property
    def attn_metadata(self) -> Any:
        recorder = getattr(self.capture_scope, "recorder", None)
        if recorder is not None and not recorder.in_eager:
            recorder.reads_step_info = True
        return self._step_info

    @attn_metadata.setter
    def attn_metadata(self, value: Any) -> None:
        self._step_info = value

    @property
    def _metadata(self) -> Any:
        return self._step_info

    def derive(self, **changes: Any) -> ForwardContext:
        return super().derive(**{"attn_metadata": self._step_info, **changes})


def _member(name: str, value: Any, ubatch: Any) -> Any:
    if type(value) not in (list, tuple):
        return value
    if len(value) != ubatch.count:
        raise ContextError(
            f"{name} of a step that is split into {ubatch.count} micro-batches",
            expected="one value for each micro-batch, or one that is no list or tuple",
            found=f"{len(value)} values",
            do="prepare it for each slice",
        )
    return value[ubatch.index]


_current: ContextVar[ForwardContext | None] = ContextVar("graphrt_forward_context", default=None)

# Bound once: wrappers call it on every step, and an attribute look-up there is a third of the cost.
current_forward_context = _current.get
_enter = _current.set
_leave = _current.reset


def get_forward_context() -> ForwardContext | None:
    """Return the context of the step that is running in this thread, or None."""
    return _current.get()

"""What a device changes in torch for a while: the modes of a thread, and one query of libraries.

A recording may end deep in the caller's code (at a break point), below a mode of the caller's that
stays: so a mode is left from wherever it is in the stack.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import unwrap
from typing import Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    handle_torch_function,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Mode = TorchDispatchMode | TorchFunctionMode

# Where a dispatch mode saves, when it is entered, torch's flags for "some mode is active".
_SAVED_FLAGS = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)


# What ``torch.no_grad()`` calls. Entering and leaving that object takes a microsecond, which is a
# tenth of a step; these two calls take a tenth of a microsecond.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""For any kind of device. ``torch.is_autocast_enabled(kind)`` reads a string first."""


def wait_for_pinned(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the current device if some memory is pinned: the device still writes it when its
    turn comes, while the host reads and writes it at once."""
    if any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors):
        torch.accelerator.synchronize()


class LookingMode(TorchDispatchMode):
    """Base of modes that run every operation unchanged.

    Without the guard of Dynamo that torch puts around each dispatch: to make it, torch imports its
    compiler, which takes seconds. Dynamo is told once for each class to leave it alone; else it
    would compile what a mode does inside a function that is compiled.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            dynamo: Any = torch._C._dynamo.eval_frame
            skip = dynamo._FrameAction.SKIP
            # The first: of this frame; the second: of those that it calls.
            strategy = dynamo._FrameExecStrategy(skip, skip)
            dynamo.set_code_exec_strategy(cls.__torch_dispatch__.__code__, strategy)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class OfRecording:
    """Base of the modes of an open recording: a thread that joins it gets modes of its own."""


def modes_of_thread() -> tuple[Mode, ...]:
    """The calling thread's function modes, then its dispatch modes, but for those of recordings."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return tuple(mode for mode in modes if not isinstance(mode, OfRecording))


def enter(mode: Mode) -> None:
    """Put ``mode`` on top of the calling thread's stack."""
    # The base class's own step, whatever the mode adds: it keeps torch's flags in agreement with
    # the stack.
    _base(mode).__enter__(mode)


def leave(mode: Mode) -> None:
    """Take ``mode`` out of the calling thread's stack; those above it stay, in their order.

    A mode that an interrupt kept from being entered is not there.
    """
    stack: Callable[[], list[Any]] = (
        _get_current_dispatch_mode_stack
        if isinstance(mode, TorchDispatchMode)
        else _get_current_function_mode_stack
    )
    if not any(entered is mode for entered in stack()):
        return
    above: list[Mode] = []
    while stack()[-1] is not mode:
        above.append(stack()[-1])
        _base(above[-1]).__exit__(above[-1], None, None, None)
    if len(stack()) == 1:
        # The flags are the process's, the stack is the thread's. What ``mode`` saved may be about
        # another thread's mode that was left since; put back, it would stay set for good, and
        # ``torch.compile`` reads it.
        for name in _SAVED_FLAGS:
            saved = getattr(mode, name, None)
            if saved:
                saved[-1] = False
    _base(mode).__exit__(mode, None, None, None)
    for other in reversed(above):
        enter(other)


def _base(mode: Mode) -> Any:
    return TorchDispatchMode if isinstance(mode, TorchDispatchMode) else TorchFunctionMode


def is_for_parts(types: Collection[type]) -> bool:
    """Whether an operation takes tensors that are made of others, such as packed weights.

    A mode that answers ``NotImplemented`` sees what they do with their parts; otherwise it would
    see a tensor without storage, and never the parts.
    """
    return bool(types) and any(hasattr(kind, "__tensor_flatten__") for kind in types)


_KEEP_STATISTICS = frozenset(
    {"aten::batch_norm", "aten::_batch_norm_impl_index", "aten::instance_norm"}
    | {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
    | {"aten::batch_norm_update_stats", "aten::batch_norm_gather_stats"}
    | {"aten::batch_norm_gather_stats_with_counts"}
)


def hidden_writes(schema: Any) -> Callable[[Sequence[Any]], Sequence[int]] | None:
    """What says, of the arguments of a call, where those are that an operator writes although its
    ``schema`` does not tell: running statistics in training, and what ranks send each other in
    place. None for other operators."""
    if schema.name.startswith("c10d::") and schema.name.endswith("_"):
        return lambda args: (0,)  # Outputs come first; monitored_barrier_ alone writes nothing.
    if schema.name not in _KEEP_STATISTICS:
        return None
    names = [argument.name for argument in schema.arguments]
    mean = names.index("running_mean")  # The variance comes next.
    flags = [at for at, name in enumerate(names) if name in ("training", "use_input_stats")]
    first, last = (flags[0], flags[0] + 1) if flags else (0, 0)
    return lambda args: range(mean, min(mean + 2, len(args))) if all(args[first:last]) else ()


def with_bits_of(alias: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``alias``, over the bytes of ``tensor``, with its conj and neg bits."""
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


class _ShownFunctions:
    """Replaces functions of torch while some thread is in ``shown_to_modes``.

    A thread without a function mode gets torch's own answer. There is one object for the process,
    because torch's functions are the process's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_scopes: Counter[tuple[Any, str]] = Counter()
        self._originals: dict[tuple[Any, str], Any] = {}

    @contextmanager
    def scope(self, functions: Sequence[tuple[Any, str]]) -> Iterator[None]:
        """While entered, function modes see these functions (module and name), which torch shows
        none.

        Only under their present names: who has imported a function itself calls it unseen.
        """
        with self._lock:
            for place in functions:
                if not self._num_scopes[place]:
                    original = self._originals[place] = getattr(*place)
                    setattr(*place, _overridable(original))
                self._num_scopes[place] += 1
        try:
            yield
        finally:
            with self._lock:
                for place in functions:
                    self._num_scopes[place] -= 1
                    if not self._num_scopes[place]:
                        setattr(*place, self._originals.pop(place))


def _overridable(original: Any) -> Any:
    # Of torch.manual_seed Dynamo makes another function when it is imported.
    own = unwrap(original)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(own, (), *args, **kwargs)
        return original(*args, **kwargs)

    return call


shown_to_modes = _ShownFunctions().scope


class _CaptureQuery:
    """Replaces torch's function while some thread is in ``report_capturing``.

    There is one for the process, because torch's function is the process's.

    torch has no way to set the answer of its own function, up to 2.13 at least; drop this when the
    oldest supported torch has one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_scopes: Counter[int] = Counter()
        """Open scopes of each thread that has any."""
        self._original: Callable[[], bool] = torch.cuda.is_current_stream_capturing

    def __call__(self) -> bool:
        return self.is_told_here() or self._original()

    def is_told_here(self) -> bool:
        """Whether the calling thread is in ``report_capturing``."""
        return threading.get_ident() in self._num_scopes

    @contextmanager
    def scope(self) -> Iterator[None]:
        """While entered, ``torch.cuda.is_current_stream_capturing()`` is true on the calling
        thread.

        Libraries branch on that function: some skip reads on the host only while a capture runs. A
        warm-up must take the same branch, and so must a device that captures without CUDA. Any
        number of threads may be inside at once; other threads get torch's own answer.
        """
        thread = threading.get_ident()
        with self._lock:
            current = torch.cuda.is_current_stream_capturing
            # It may be this object already, outside every scope: if somebody saved torch's function
            # inside a scope, and put it back after.
            if not self._num_scopes and current is not self:
                self._original = current
                torch.cuda.is_current_stream_capturing = self
            self._num_scopes[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_scopes[thread] -= 1
                if not self._num_scopes[thread]:
                    del self._num_scopes[thread]
                if not self._num_scopes:
                    torch.cuda.is_current_stream_capturing = self._original


_capture_query = _CaptureQuery()
report_capturing = _capture_query.scope
reports_capturing = _capture_query.is_told_here

"""Enters a mode of torch's on the calling thread, and leaves it from wherever it then stands.

A window may end deep in the caller's code (at a break point), inside a mode of the caller's that
stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Mode = TorchDispatchMode | TorchFunctionMode

# What a dispatch mode puts back when it is left: torch's word on whether *any* mode is active.
_SAVED_FLAGS = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)


def enter(mode: Mode) -> None:
    """Put ``mode`` on top of the calling thread's stack."""
    # The base class's own step, whatever the mode adds: it keeps torch's flags in agreement with
    # the stack.
    _base(mode).__enter__(mode)


def leave(mode: Mode) -> None:
    """Take ``mode`` out of the calling thread's stack; those above it stay, in their order."""
    stack: Callable[[], list[Any]] = (
        _get_current_dispatch_mode_stack
        if isinstance(mode, TorchDispatchMode)
        else _get_current_function_mode_stack
    )
    above: list[Mode] = []
    while stack()[-1] is not mode:
        above.append(stack()[-1])
        _base(above[-1]).__exit__(above[-1], None, None, None)
    if len(stack()) == 1:
        _forget_other_threads(mode)
    _base(mode).__exit__(mode, None, None, None)
    for other in reversed(above):
        enter(other)


def is_for_parts(types: Collection[type]) -> bool:
    """Whether an operation takes tensors that are made of others, such as packed weights.

    A mode that answers ``NotImplemented`` sees what they do with their parts; otherwise it would
    see a tensor without storage, and never the parts.
    """
    return bool(types) and any(hasattr(kind, "__tensor_flatten__") for kind in types)


def _forget_other_threads(mode: Mode) -> None:
    """Let the last mode of this thread put back that none is active.

    The flags are the process's, the stack is the thread's: what ``mode`` saved may tell of a mode
    that another thread has left since, and would stay set for good. ``torch.compile`` asks them.
    """
    for name in _SAVED_FLAGS:
        saved = getattr(mode, name, None)
        if saved:
            saved[-1] = False


def _base(mode: Mode) -> Any:
    return TorchDispatchMode if isinstance(mode, TorchDispatchMode) else TorchFunctionMode

"""The two modes that stand between the user's code and torch while a window is open.

The dispatch mode sees every operator. The function mode sees the calls that Python answers without
asking the dispatcher, such as ``tolist``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphrt.device.mode_stack import enter, is_for_parts, leave
from graphrt.device.simulated import refusals
from graphrt.device.simulated.refusals import Why, refuse, user_place
from graphrt.device.simulated.window import Window
from graphrt.errors import ForbiddenOperationError, GraphrtError


class DispatchRecorder(TorchDispatchMode):
    """Every operator of the thread it is entered in."""

    def __init__(self, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.window = window

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_for_parts(types):
            return NotImplemented
        window = self.window
        try:
            with torch._C.DisableTorchFunction():
                return window.handle(func, args, kwargs or {}, lambda: self)
        except GraphrtError as error:
            window.fail(error)
            # Our own frames would keep the tensors of this call alive with the error.
            del args, kwargs
            raise error.with_traceback(None)  # noqa: B904  # the cause is set already


class FunctionRecorder(TorchFunctionMode):
    """The calls that Python answers without asking the dispatcher."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        judge = _JUDGES.get(func)
        try:
            if judge is not None:
                judge(self.window, func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        except ForbiddenOperationError as error:
            del args, kwargs  # As above.
            raise error.with_traceback(None)  # noqa: B904


def _refuse_in(window: Window, why: Why) -> None:
    error = refuse(why)
    window.fail(error)
    raise error


def _judge_plain(window: Window, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    _refuse_in(window, refusals.BY_FUNCTION[func])


def _judge_cpu(window: Window, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    # Born in the window, so certainly on the device. Of other tensors the simulation cannot know.
    with torch._C.DisableTorchFunction():
        if window.device.owns(args[0]):
            _refuse_in(window, refusals.CPU)


# A plain tensor pickles itself without asking anybody; the first thing to be seen is that this
# function takes its storage. Where it has another name, only subclasses and parameters are seen.
_REDUCES = getattr(getattr(torch.Tensor, "_reduce_ex_internal", None), "__code__", None)


def _judge_storage(window: Window, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):
        if frame is None:
            return
        if frame.f_code is _REDUCES:
            _refuse_in(window, refusals.PICKLING)
        frame = frame.f_back


def _judge_split(window: Window, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    sections = [*args[1:2], *[kwargs[k] for k in kwargs if k != "dim"]]
    if any(isinstance(one, torch.Tensor) for one in sections):
        _refuse_in(window, refusals.TENSOR_SPLIT)


def _judge_baked(window: Window, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, torch.Tensor):
        return
    if window.device.strict:
        _refuse_in(window, refusals.BAKED_TENSOR)
    place = user_place()
    why = refusals.BAKED_TENSOR
    warnings.warn_explicit(
        f"{why.operation} while capturing: {why.why}, at {place}: {place.text}",
        UserWarning,
        place.file or "<unknown>",
        place.line,
    )


_JUDGES: Mapping[Any, Callable[[Window, Any, tuple[Any, ...], Any], None]] = MappingProxyType(
    {
        **dict.fromkeys(refusals.BY_FUNCTION, _judge_plain),
        torch.Tensor.cpu: _judge_cpu,
        torch.Tensor.untyped_storage: _judge_storage,
        torch.tensor_split: _judge_split,
        torch.Tensor.tensor_split: _judge_split,
        torch.tensor: _judge_baked,
        torch.as_tensor: _judge_baked,
    }
)


@contextmanager
def on_stack(mode: TorchDispatchMode | TorchFunctionMode) -> Iterator[None]:
    """Enter ``mode``, and leave it again from wherever it then stands in the stack of modes."""
    enter(mode)
    try:
        yield
    finally:
        leave(mode)


@contextmanager
def without_modes() -> Iterator[None]:
    """The calling thread's recorders see nothing while this is entered."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield

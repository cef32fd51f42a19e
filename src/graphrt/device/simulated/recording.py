"""A window's two ends, and what may happen to it in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from graphrt.device.simulated.modes import (
    DispatchRecorder,
    FunctionRecorder,
    on_stack,
    without_modes,
)
from graphrt.device.simulated.tape import SimulatedGraph
from graphrt.device.simulated.window import Window
from graphrt.errors import CaptureError, GraphrtError


class SimulatedRecording:
    """An open window. See ``base.Recording``."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._modes = ExitStack()
        window.device.enter_window(window)
        try:
            self._modes.enter_context(self._recording())
        except BaseException:
            window.device.leave_window(window, None)
            raise

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """The modes of one thread."""
        window = self._window
        with ExitStack() as stack:
            stack.enter_context(window.device.answering_capture())
            if window.device.alarm is not None:
                stack.enter_context(window.device.alarm(lambda: window.in_opaque))
            stack.enter_context(on_stack(DispatchRecorder(window)))
            stack.enter_context(on_stack(FunctionRecorder(window)))
            yield

    def end(self, allow_empty: bool = False) -> SimulatedGraph:
        window = self._window
        if not window.is_open:
            raise CaptureError(
                f"{window.label}: the window is closed already",
                expected="an open window",
                found="one that was ended or aborted",
                do="begin a new recording.",
            )
        self._modes.close()
        graph = None
        try:
            graph = window.finish(allow_empty)
        finally:
            window.device.leave_window(window, graph)
        return graph

    def abort(self, first_error: BaseException) -> BaseException:
        window = self._window
        if window.is_open:
            self._modes.close()
            window.device.leave_window(window, None)
        return first_error

    @contextmanager
    def join_thread(self) -> Iterator[None]:
        window = self._window
        with window.device.inside(window), self._recording():
            yield

    def opaque(self, fn: Callable[..., Any], args: Sequence[Any], out_meta: Any = None) -> Any:
        window = self._window
        try:
            with without_modes():
                return window.opaque(fn, args, out_meta)
        except GraphrtError as error:
            window.fail(error)
            raise

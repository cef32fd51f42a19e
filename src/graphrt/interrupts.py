"""Signals. Ctrl-C between steps, because an interrupt in the middle of one leaves half of its state
written.

In the middle of a capture it is worse: torch's modes are pushed and popped by Python code, and an
interrupt between the two leaves a process that records for ever, or aborts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Delay the first Ctrl-C until the yielded function is called; the second acts at once.

    The yielded function raises ``KeyboardInterrupt`` if an interrupt has arrived. Does nothing if
    another handler is installed, or outside the main thread, where no interrupt arrives.
    """
    default = signal.default_int_handler
    with _noted(signal.SIGINT, default, lambda: signal.signal(signal.SIGINT, default)) as arrived:

        def check() -> None:
            if arrived():
                raise KeyboardInterrupt

        yield check


@contextmanager
def termination_noted() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM in place of ending by it; the yielded function says whether it has arrived.

    For a process that has to end others first. Does nothing if another handler is installed, or
    outside the main thread.
    """
    with _noted(signal.SIGTERM, signal.SIG_DFL, lambda: None) as arrived:
        yield arrived


@contextmanager
def _noted(
    number: signal.Signals, default: Any, then: Callable[[], object]
) -> Iterator[Callable[[], bool]]:
    """Note this signal where ``default`` handles it, then call ``then``."""
    has_arrived = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_arrived
        has_arrived = True
        then()

    is_main = threading.current_thread() is threading.main_thread()  # No other may set handlers.
    is_noted = is_main and signal.getsignal(number) == default
    if is_noted:
        signal.signal(number, note)
    try:
        yield lambda: has_arrived
    finally:
        if is_noted:
            signal.signal(number, default)

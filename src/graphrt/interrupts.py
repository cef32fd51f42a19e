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


@contextmanager
def interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Delay the first Ctrl-C until the yielded function is called; the second acts at once.

    The yielded function raises ``KeyboardInterrupt`` if an interrupt has arrived. Does nothing if
    another handler is installed, or outside the main thread, where no interrupt arrives.
    """
    arrived = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check() -> None:
        if arrived:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    try:
        signal.signal(signal.SIGINT, remember)
    except ValueError:
        # Only the main thread may set handlers.
        yield check
        return
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def termination_noted() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM in place of ending by it; the yielded function says whether it has arrived.

    For a process that has to end others first. Does nothing if another handler is installed, or
    outside the main thread.
    """
    arrived = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True

    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, remember)
        try:
            yield lambda: arrived
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    else:
        yield lambda: arrived

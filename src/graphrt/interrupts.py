"""Ctrl-C between steps: an interrupt in the middle of one would leave it half booked.

In the middle of a capture it would do worse: torch's modes are pushed and popped by Python code,
and an interrupt between the two leaves a process that records for ever, or aborts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Hold the first Ctrl-C back until the yielded function is called; the second acts at once.

    Does nothing where somebody else handles the signal, or outside the main thread, where no
    interrupt arrives.
    """
    came = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check() -> None:
        if came:
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

"""Waiting no longer than so long, for what has no time-out of its own."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any


def within(seconds: float, call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``call(*arguments)``, alone in a list; nothing, if it takes longer. Errors: those of it.

    It runs in a thread, "graphrt waits", which is left behind then.
    """
    returned: list[Any] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            returned.append(call(*arguments))
        except Exception as error:  # noqa: BLE001  Raised again by whoever waits.
            raised.append(error)

    thread = Thread(target=run, name="graphrt waits", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised.pop()
    return returned

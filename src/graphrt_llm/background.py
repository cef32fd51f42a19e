"""Work that a start need not wait for, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Begin ``call`` in a thread, and return what will have its result, or its error.

    The process ends only after it; ``call`` sees that it ends by ``threading.main_thread()``, which
    is no longer alive then. No pool, because Python joins the threads of pools before that.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  Raised again by whoever asks for the result.
            future.set_exception(error)

    Thread(target=run, name="graphrt_llm").start()
    return future

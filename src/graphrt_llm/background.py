"""Work that a start need not wait for, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Begin ``call`` in a thread, and return what will have its result, or its error.

    The process ends only after it.
    """
    thread = ThreadPoolExecutor(1, "graphrt_llm")
    try:
        return thread.submit(call)
    finally:
        thread.shutdown(wait=False)

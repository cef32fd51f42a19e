"""Keeps Python's garbage collector out of captures, and leaves it exactly as it was.

A collection inside a window may destroy a graph or a tensor there; one before each capture, on a
large heap, was most of the start-up time of engines that did so. The heap is collected and frozen
once per scope instead (vLLM #54646: 12 s -> 2 s) and thawed at the end, because a heap that stays
frozen cost throughput (vLLM #24128).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

# CPython 3.12 alone moves what is immortal (some 400 objects of the interpreter's own) to where
# frozen objects are, at any collection; whoever freezes the heap moves thousands.
MOST_IMMORTAL = 2000 if sys.version_info[:2] == (3, 12) else 0


def is_heap_frozen() -> bool:
    """Whether somebody has called ``gc.freeze`` and not thawed since."""
    return gc.get_freeze_count() > MOST_IMMORTAL


@contextmanager
def old_heap_aside() -> Iterator[None]:
    """Keep what lives now out of the collections of the scopes opened inside.

    For scopes between two steps: collecting the heap of a process that has torch loaded takes
    longer than capturing a key does. Garbage from before is in no window's way, because frozen
    objects are never collected; garbage from inside is collected as ever. Does nothing where
    somebody froze objects already, for thawing is all or nothing.
    """
    if is_heap_frozen():
        yield
        return
    if gc.isenabled():  # Else the process chooses when to collect.
        # To thaw is to make old, and the old are seldom looked at: what has died since the last
        # time goes while it is young, or a series of calls would pile it up.
        gc.collect(1)
    aside = _Aside()
    gc.callbacks.append(aside)
    try:
        gc.freeze()  # Inside, so that a Ctrl-C that comes in it leaves no frozen heap behind.
        yield
    finally:
        gc.callbacks.remove(aside)
        gc.unfreeze()


class _Aside:
    """Stands in ``gc.callbacks``, doing nothing, while the old heap is frozen.

    It saves a pause the count of the frozen objects, which walks over all of them.
    """

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        return None


class CollectorPause:
    """A pause of the collector, shared by every scope of the process that is open.

    The collector is the process's, so scopes of two threads must agree on one pause. It stands in
    ``gc.callbacks`` (as a callback that does nothing), the one list that is the collector's own:
    appending and removing are atomic, and whoever stands first is the pause in force. Where one
    scope leaves while another one enters, the worst that can happen is a collection in a window.
    """

    def __init__(self) -> None:
        self._scopes: list[object] = []
        self._was_enabled = False
        self._froze = False
        # Taken by whoever ends the pause, so that nobody ends it twice: the next may have begun.
        self._ends = [object()]

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        return None

    @classmethod
    def enter(cls, scope: object) -> Self:
        """Pause the collector until ``scope``, and every other scope, has left the pause."""
        while True:
            pause = cls()
            gc.callbacks.append(pause)
            first = next(item for item in gc.callbacks if isinstance(item, cls))
            first._scopes.append(scope)
            if first is pause:
                pause._begin()
                return pause
            gc.callbacks.remove(pause)
            if first in gc.callbacks:
                return first

    def leave(self, scope: object) -> None:
        """Undo ``enter``; the last scope out collects and restores the collector's state.

        Collected is what the scopes made: what lived before was collected on entry, and to walk
        over a large heap once more takes longer than some captures. What of it died in a scope
        goes with the process's own collections.
        """
        self._scopes.remove(scope)
        if self._scopes or self not in gc.callbacks:
            return
        try:
            gc.collect()
        finally:
            # Another thread's scope may have joined meanwhile, or joined and left.
            if not self._scopes:
                self._end()

    def _end(self) -> None:
        try:
            self._ends.pop()
        except IndexError:
            return
        if self._froze:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        # Last, so that the next pause finds the state restored.
        gc.callbacks.remove(self)

    def _begin(self) -> None:
        gc.collect()
        self._was_enabled = gc.isenabled()
        # Thawing is all or nothing: objects that the caller froze must stay frozen.
        is_aside = any(isinstance(item, _Aside) for item in gc.callbacks)
        self._froze = not is_aside and not is_heap_frozen()
        if self._froze:
            gc.freeze()
        gc.disable()

"""Keeps Python's garbage collector out of captures, and restores it afterwards.

A collection during a capture may destroy a graph or a tensor in its recording; one before each
capture, on a large heap, was most of the start-up time of engines that did so. The heap is
collected and frozen once per scope instead (vLLM #54646: 12 s -> 2 s) and thawed at the end,
because a heap that stays frozen cost throughput (vLLM #24128).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# CPython 3.12 alone moves what is immortal (some 400 objects of the interpreter's own) to where
# frozen objects are, at any collection; whoever freezes the heap moves thousands.
MOST_IMMORTAL = 2000 if sys.version_info[:2] == (3, 12) else 0


def is_heap_frozen() -> bool:
    """Whether ``gc.freeze`` was called, and ``gc.unfreeze`` not since. Visits what is frozen."""
    return gc.get_freeze_count() > MOST_IMMORTAL


def all_objects() -> list[object]:
    """Those that the collector knows; of a frozen heap too, of which Python tells none. What lives
    then is frozen with it."""
    is_frozen = is_heap_frozen()
    if is_frozen:
        gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        if is_frozen:
            gc.freeze()


@contextmanager
def gc_paused(*, collects: bool = True, ages: bool = False) -> Iterator[None]:
    """Collect and freeze the heap and keep the collector off until every such scope has left.

    The last one out collects what the scopes made and restores the collector. What lived before
    was collected on entry: to visit a large heap once more takes longer than some captures do.

    ``collects`` False: the collector is off, no more. ``ages``: what lives then counts as old. For
    imports and traces: what they make lives on, and collections in between and after visit it again
    and again, which is a third of the time of large ones.
    """
    is_counted = False
    try:
        with _collector.lock:
            _collector.num_scopes += 1
            is_counted = True
            _collector.collects |= collects
            if not _collector.is_paused:
                _collector.pause()
        yield
        if ages and not (_collector.keeps_heap_frozen or is_heap_frozen()):
            try:
                gc.freeze()
            finally:
                gc.unfreeze()
    finally:
        if is_counted:
            with _collector.lock:
                _collector.num_scopes -= 1
                if not _collector.num_scopes:
                    _collector.resume()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep what lives now out of the collections of the scopes opened inside.

    For scopes between two steps: collecting the heap of a process that has torch loaded takes
    longer than capturing a key does. Frozen garbage is never collected, so it disturbs no capture;
    garbage from inside is collected as ever. Does nothing where the heap is frozen already, because
    thawing is all or nothing.
    """
    is_owner = False
    try:
        with _collector.lock:
            if not _collector.keeps_heap_frozen and not is_heap_frozen():
                is_owner = _collector.keeps_heap_frozen = True
        if is_owner:
            if gc.isenabled():  # Else the process chooses when to collect.
                # Thawed objects count as old, and the old are seldom collected: what has died
                # since the last time goes while it is young, or a series of calls would pile it up.
                gc.collect(1)
            gc.freeze()
        yield
    finally:
        if is_owner:
            gc.unfreeze()
            _collector.keeps_heap_frozen = False


class _Collector:
    """How many open scopes need the collector off, and what it was before the first of them.

    Guarded by ``lock``, because the collector is process-wide; reentrant, because a collection runs
    finalisers, and those may open scopes of their own.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.num_scopes = 0
        self.is_paused = False
        self.keeps_heap_frozen = False
        """True inside ``frozen_heap``. It saves a scope the count of all that is frozen."""
        self._was_enabled = False
        self.collects = False
        """Whether a scope that is open, or was since the pause began, asked for it."""
        self._froze = False

    def pause(self) -> None:
        self.is_paused = True
        self._was_enabled = gc.isenabled()
        self._froze = False
        if self.collects:
            gc.collect()
        # Thawing is all or nothing: objects that the caller froze must stay frozen.
        if self.collects and not self.keeps_heap_frozen and not is_heap_frozen():
            self._froze = True
            gc.freeze()
        gc.disable()

    def resume(self) -> None:
        try:
            if self.collects:
                gc.collect()
        finally:
            # A finaliser may have opened a scope that is still open.
            if not self.num_scopes:
                self.is_paused = self.collects = False
                if self._froze:
                    gc.unfreeze()
                if self._was_enabled:
                    gc.enable()


_collector = _Collector()

"""Who is told how far a capture is: a callable of the user's, or a bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from graphrt.batch import BatchDescriptor
from graphrt.report import ProgressBars

Progress = Callable[[int, int, BatchDescriptor], None]
"""``progress(done, total, key)``, called after each capture and each first replay."""


@contextmanager
def shown(progress: Progress | bool | None, name: str) -> Iterator[Progress | None]:
    """The callable to tell; for True one that draws, while this is entered."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield None
        return
    with ProgressBars() as bars:
        bars.show(f"{name}: capture", 0, None)  # Warm-ups come first, and are not counted.
        yield lambda done, total, key: bars.show(f"{name}: capture", done, total)

"""Progress bars on stderr, drawn where somebody asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from graphrt.batch import BatchDescriptor

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[int, int, BatchDescriptor], None]
"""``progress(done, total, key)``, called after each capture and each first replay."""


class ProgressBars:
    """Named bars, drawn while it is entered, on ``console`` or else on stderr.

    Where stderr is no terminal, only their last state is written.
    """

    def __init__(self, console: Console | None = None) -> None:
        # Imported where bars are drawn: rich is slow to import.
        from rich import progress
        from rich.console import Console

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=Console(stderr=True) if console is None else console,
            # Each refresh delays the step or the capture that runs at that moment.
            refresh_per_second=4,
        )
        self._tasks: dict[str, progress.TaskID] = {}

    def show(self, name: str, done: int, total: int | None) -> None:
        """Draw the bar of this name, a new one at first. ``total`` None: not known yet."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(task, completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._progress.stop()


@contextmanager
def shown(progress: Progress | bool | None, name: str) -> Iterator[Progress | None]:
    """The callable to tell; for True one that draws a bar on stderr, while this is entered."""
    if progress is not True:
        yield None if progress is False else progress
        return
    with ProgressBars() as bars:
        bars.show(f"{name}: capture", 0, None)  # Warm-ups come first, and are not counted.
        yield lambda done, total, key: bars.show(f"{name}: capture", done, total)

"""Progress bars of a comparison: for each policy one for its capture, one for its serving."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from graphrt import CUDAGraphMode


class Bars:
    """Draws on ``console`` while it is entered."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            # Each refresh delays the step that runs at that moment.
            refresh_per_second=4,
        )
        self._tasks: dict[tuple[CUDAGraphMode, str], TaskID] = {}

    def capturing(self, mode: CUDAGraphMode, done: int, total: int) -> None:
        if total:
            self._show(mode, "capture", done, total)

    def serving(self, mode: CUDAGraphMode, done: int, total: int) -> None:
        self._show(mode, "serve", done, total)

    def _show(self, mode: CUDAGraphMode, phase: str, done: int, total: int) -> None:
        task = self._tasks.get((mode, phase))
        if task is None:
            task = self._progress.add_task(f"{mode.name:<18} {phase:<7}", total=total)
            self._tasks[mode, phase] = task
        self._progress.update(task, completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

"""Progress bars of a comparison: for each policy one for its capture, one for its serving."""

from __future__ import annotations

from graphrt import CUDAGraphMode, ProgressBars


class Bars(ProgressBars):
    """Draws on ``console`` while it is entered."""

    def capturing(self, mode: CUDAGraphMode, done: int, total: int) -> None:
        if total:
            self.show(f"{mode.name:<18} capture", done, total)

    def serving(self, mode: CUDAGraphMode, done: int, total: int) -> None:
        self.show(f"{mode.name:<18} serve  ", done, total)

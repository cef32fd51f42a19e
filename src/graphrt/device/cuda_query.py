"""The answer to "is this stream being captured?" that libraries get from torch.

Libraries branch on it: some skip host reads only while a capture runs. They ask torch's own
function, so a device that captures without CUDA has to answer there. The function is replaced only
while somebody has something to answer, and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class _Answer:
    """Stands in for ``is_current_stream_capturing`` while at least one device answers."""

    def __init__(self, original: Callable[[], bool]) -> None:
        self.original = original
        self.speakers: list[Callable[[], bool]] = []

    def __call__(self) -> bool:
        return any(speaks() for speaks in tuple(self.speakers)) or self.original()


@contextmanager
def answering(speaks: Callable[[], bool]) -> Iterator[None]:
    """While entered, torch says that a capture runs wherever ``speaks()`` is true.

    ``speaks`` decides per thread; other threads get the original answer. Several may be entered at
    once, by several devices and threads.
    """
    answer = _join(speaks)
    try:
        yield
    finally:
        answer.speakers.remove(speaks)
        if not answer.speakers:
            torch.cuda.is_current_stream_capturing = answer.original
            if answer.speakers:
                # Another thread joined between the two lines above: keep answering for it.
                torch.cuda.is_current_stream_capturing = answer


def _join(speaks: Callable[[], bool]) -> _Answer:
    while True:
        current = torch.cuda.is_current_stream_capturing
        answer = current if isinstance(current, _Answer) else _Answer(current)
        answer.speakers.append(speaks)
        if answer is not current:
            torch.cuda.is_current_stream_capturing = answer
        if torch.cuda.is_current_stream_capturing is answer:
            return answer
        # The last one of another thread left in between and put the original back.
        answer.speakers.remove(speaks)

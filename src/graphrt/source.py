"""The user's line: where, in code that is neither graphrt's nor torch's, something happened.

Errors and reports name this line, because the innermost frames are always graphrt's own.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from functools import lru_cache
from importlib.util import find_spec
from time import time
from types import FrameType, TracebackType
from typing import NamedTuple

_GRAPHRT = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_TRACED = "<eval_with_key"
_GENERATED = ("<graphrt", "<frozen", _TRACED)
IMPORTED_AT = time()
"""Seconds of the epoch: what this process runs of a file that changed later is another text."""
TRACED_LINES = "traced_lines"
"""The attribute of a module of ``torch.fx`` that says for lines of its code which were traced."""


class Source(NamedTuple):
    """One line of the user's code. Empty, and false, where there is none."""

    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def text(self) -> str:
        """The line itself, stripped; empty where its file cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    @property
    def with_text(self) -> str:
        """``file:line in function: text``."""
        return f"{self}: {self.text}" if self.text else str(self)

    def __bool__(self) -> bool:
        return bool(self.file)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.file else ""


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether code of ``file`` is neither graphrt's, torch's, the standard library's nor generated.

    ``<stdin>`` and notebook cells are the user's.
    """
    if file.startswith((_GRAPHRT, _torch_folder(), *_GENERATED)):
        return False
    # Installed packages may lie inside the folder of the standard library.
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file


def caller_source(frame: FrameType | None = None) -> Source:
    """The innermost user line of ``frame`` and its callers, by default those of this call.

    Of code that ``torch.fx`` wrote of a traced model: the line that was traced.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            return Source(code.co_filename, frame.f_lineno, code.co_qualname)
        if code.co_filename.startswith(_TRACED):
            lines: dict[int, Source] = getattr(frame.f_locals.get("self"), TRACED_LINES, {})
            if found := lines.get(frame.f_lineno):
                return found
        frame = frame.f_back
    return Source()


def traceback_source(trace: TracebackType | None) -> Source:
    """The innermost user line of a traceback: where the user's code led to an error."""
    found = Source()
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = Source(code.co_filename, trace.tb_lineno, code.co_qualname)
        trace = trace.tb_next
    return found


@lru_cache(maxsize=1)
def _torch_folder() -> str:
    # Found without an import, because this module is used where torch is not loaded.
    spec = find_spec("torch")
    places = (spec.submodule_search_locations if spec else None) or ["<no torch>"]
    return os.path.abspath(places[0]) + os.sep

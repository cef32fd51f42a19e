"""Errors of CUDA and torch become graphrt's here; everybody else's pass unchanged.

The codes of stream capture are 900 to 908. torch carries them in ``AcceleratorError.error_code``;
where an error comes without one, it is known by the driver's text, which has not changed since
captures exist.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch

import graphrt
from graphrt.errors import (
    CaptureError,
    DeviceReplayError,
    ForbiddenOperationError,
    GraphMemoryError,
    GraphrtError,
    UnjoinedStreamError,
)


class _Meaning(NamedTuple):
    kind: type[CaptureError]
    text: str
    expected: str
    do: str


_NO_WAIT = "no operation that waits for the device, or allocates past torch, inside a window"
_JOINED = "streams that fork from the capture stream and join it before the window ends"
_SAME_THREAD = "the window ended on the stream and thread that opened it"
_MEMORY = "enough device memory"

_KEEP_ON_DEVICE = (
    "keep the value on the device, move the operation out of the captured function, "
    "or declare the function that holds it a break point and use PIECEWISE"
)
_ORDER = (
    "order the side stream after the capture stream before its first use (fork), "
    "and the capture stream after it before the window ends (join)"
)
_RETURN = "open and end a window in one function, on one thread and one stream"
_LESS = "capture fewer or smaller sizes, or give the KV cache less memory"

OUT_OF_MEMORY = 2
FORBIDDEN = 900
ECHO = 901
UNJOINED = 904

_BY_CODE = {
    OUT_OF_MEMORY: _Meaning(GraphMemoryError, "out of memory", _MEMORY, _LESS),
    FORBIDDEN: _Meaning(
        ForbiddenOperationError,
        "operation not permitted when stream is capturing",
        _NO_WAIT,
        _KEEP_ON_DEVICE,
    ),
    ECHO: _Meaning(
        CaptureError,
        "operation failed due to a previous error during capture",
        "no failed operation inside a window",
        "do not catch errors inside the captured function: the first one says what is wrong",
    ),
    902: _Meaning(
        UnjoinedStreamError,
        "operation would result in a merge of separate capture sequences",
        _JOINED,
        _ORDER,
    ),
    903: _Meaning(
        CaptureError,
        "capture was not ended in the same stream as it began",
        _SAME_THREAD,
        _RETURN,
    ),
    UNJOINED: _Meaning(UnjoinedStreamError, "capturing stream has unjoined work", _JOINED, _ORDER),
    905: _Meaning(
        UnjoinedStreamError,
        "dependency created on uncaptured work in another stream",
        _JOINED,
        _ORDER,
    ),
    906: _Meaning(
        ForbiddenOperationError,
        "operation would make the legacy stream depend on a capturing blocking stream",
        "no work on the default stream inside a window",
        _KEEP_ON_DEVICE,
    ),
    907: _Meaning(
        UnjoinedStreamError,
        "operation not permitted on an event last recorded in a capturing stream",
        _JOINED,
        _ORDER,
    ),
    908: _Meaning(
        CaptureError,
        "attempt to terminate a thread-local capture sequence from another thread",
        _SAME_THREAD,
        _RETURN,
    ),
}

_UNDECLARED_GENERATOR = _Meaning(
    ForbiddenOperationError,
    "",
    "random numbers from the default generator, or from one declared to the recording",
    "declare the generator where the library is made (generators=...)",
)

# torch's own refusals come as plain RuntimeErrors.
_REFUSED_BY_TORCH = re.compile(r"during CUDA graph capture")
_REFUSED_GENERATOR = re.compile(r"CUDA generator (used during capture|not in capture mode)")
# How torch quotes runtime and driver, and how Triton does, which launches past torch.
_DRIVER_PREFIXES = ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: ")
_LIBRARY_STATUS = re.compile(
    "|".join((r"\bCU[A-Z]+_STATUS_[A-Z_]+", *map(re.escape, _DRIVER_PREFIXES)))
)


def error_code(error: BaseException) -> int | None:
    """The CUDA runtime's code of ``error``; None if it is no device error that has one."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if not isinstance(error, RuntimeError) or isinstance(error, GraphrtError):
        return None
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return code
    text = str(error)
    if any(prefix in text for prefix in _DRIVER_PREFIXES):
        for known, meaning in _BY_CODE.items():
            if meaning.text in text:
                return known
    refused = _REFUSED_BY_TORCH.search(text) or _REFUSED_GENERATOR.search(text)
    return FORBIDDEN if refused else None


def translate(error: BaseException, operation: str = "") -> BaseException:
    """``error`` as a ``CaptureError`` with ``error`` as its cause, if it is the device's own.

    ``operation``: what failed, where that is known better than from the source line. Which window
    it was, the builder adds: it knows owner, mode and key.
    Anything else, errors of graphrt among it, is returned itself.
    """
    code = error_code(error)
    text = str(error)
    if code is None and not (
        isinstance(error, RuntimeError)
        and not isinstance(error, GraphrtError)
        and _LIBRARY_STATUS.search(text)
    ):
        return error
    undeclared = _REFUSED_GENERATOR.search(text) is not None
    meaning = _UNDECLARED_GENERATOR if undeclared else _BY_CODE.get(code or 0)
    kind = meaning.kind if meaning else CaptureError
    source = user_source(error)
    reason = text.strip().partition("\n")[0]
    for prefix in _DRIVER_PREFIXES:
        reason = reason.removeprefix(prefix)
    what = operation or source.line
    where = f", at {source.place}" if source.place else ""
    if kind is ForbiddenOperationError:
        subject = f"operation {what} is not permitted while capturing: {reason}{where}"
    else:
        subject = f"{reason}{where}"
    translated = kind(
        subject,
        expected=meaning.expected if meaning else "every operation of the window to succeed",
        found=what or reason,
        do=meaning.do if meaning else "see the cause; nothing of this window was kept",
        operation=what or reason,
        source=source.place,
    )
    translated.__cause__ = error
    return translated


def replay_failure(error: BaseException, label: str) -> DeviceReplayError:
    """The launch of ``label`` failed. What ran before in the step may already have been written."""
    failed = DeviceReplayError(
        f"replay of {label}",
        expected="the device to accept the launch",
        found=str(error).strip().partition("\n")[0],
        do="see the cause; state may be half written, so do not run the step again eagerly",
    )
    failed.__cause__ = error
    return failed


_OURS = tuple(
    os.path.dirname(os.path.abspath(package.__file__ or "")) + os.sep
    for package in (torch, graphrt)
)


def is_user_file(filename: str) -> bool:
    """Whether a frame of this file is neither torch's, nor graphrt's, nor generated."""
    return not filename.startswith(("<", *_OURS))


class Source(NamedTuple):
    """A line of the user's: ``file:number in function: line``, and the line alone."""

    place: str
    line: str


def user_source(error: BaseException | None = None) -> Source:
    """The innermost line outside torch and graphrt; empty if there is none.

    Looked for in the traceback of ``error``; without one, among the callers.
    """
    for frame, number in _frames(error):
        code = frame.f_code
        if is_user_file(code.co_filename):
            line = linecache.getline(code.co_filename, number).strip()
            place = f"{code.co_filename}:{number} in {code.co_qualname}"
            return Source(f"{place}: {line}" if line else place, line)
    return Source("", "")


def _frames(error: BaseException | None) -> Iterator[tuple[FrameType, int]]:
    """Frames with their line, innermost first."""
    if error is not None:
        found = []
        trace = error.__traceback__
        while trace is not None:
            found.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        yield from reversed(found)
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back

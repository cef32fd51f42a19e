"""Errors of CUDA and torch become graphrt's here; all others pass unchanged.

The codes of stream capture are 900 to 908. torch carries them in ``AcceleratorError.error_code``;
an error without a code is recognised by the driver's text, which has not changed since captures
exist.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from graphrt.errors import (
    CaptureError,
    DeviceReplayError,
    ForbiddenOperationError,
    GraphMemoryError,
    GraphrtError,
    UnjoinedStreamError,
)
from graphrt.source import traceback_source


class _Meaning(NamedTuple):
    kind: type[CaptureError]
    expected: str
    do: str


_KEEP_ON_DEVICE = (
    "keep the value on the device, move the operation out of the captured function, "
    "or declare the function that holds it a break point and use PIECEWISE"
)
_FORBIDDEN = _Meaning(
    ForbiddenOperationError,
    "no operation in a capture that waits for the device, or allocates past torch",
    _KEEP_ON_DEVICE,
)
_DEFAULT_STREAM = _Meaning(
    ForbiddenOperationError, "no work on the default stream in a capture", _KEEP_ON_DEVICE
)
_UNDECLARED_GENERATOR = _Meaning(
    ForbiddenOperationError,
    "random numbers from the default generator, or from one declared to the recording",
    "declare the generator where the library is made (generators=...)",
)
_RESEEDED = _Meaning(
    ForbiddenOperationError,
    "no other seed while capturing, because no replay would set it",
    "seed before the capture, or between two replays",
)
_UNJOINED = _Meaning(
    UnjoinedStreamError,
    "streams that fork from the capture stream and join it before the capture ends",
    "order the side stream after the capture stream before its first use (fork), "
    "and the capture stream after it before the capture ends (join)",
)
_OTHER_THREAD = _Meaning(
    CaptureError,
    "the capture ended on the stream and thread that began it",
    "begin and end a capture in one function, on one thread and one stream",
)
_FOLLOWS_ANOTHER = _Meaning(
    CaptureError,
    "no failed operation in a capture",
    "do not catch errors inside the captured function: the first one says what is wrong",
)
_MEMORY = _Meaning(
    GraphMemoryError,
    "enough device memory",
    "capture fewer or smaller sizes, or give the KV cache less memory",
)
_UNKNOWN = _Meaning(
    CaptureError,
    "every operation of the capture to succeed",
    "see the cause; nothing of this capture was kept",
)

OUT_OF_MEMORY = 2
FORBIDDEN = 900
FOLLOWS_ANOTHER = 901

_BY_CODE = {
    OUT_OF_MEMORY: ("out of memory", _MEMORY),
    FORBIDDEN: ("operation not permitted when stream is capturing", _FORBIDDEN),
    FOLLOWS_ANOTHER: ("operation failed due to a previous error during capture", _FOLLOWS_ANOTHER),
    902: ("operation would result in a merge of separate capture sequences", _UNJOINED),
    903: ("capture was not ended in the same stream as it began", _OTHER_THREAD),
    904: ("capturing stream has unjoined work", _UNJOINED),
    905: ("dependency created on uncaptured work in another stream", _UNJOINED),
    906: (
        "operation would make the legacy stream depend on a capturing blocking stream",
        _DEFAULT_STREAM,
    ),
    907: ("operation not permitted on an event last recorded in a capturing stream", _UNJOINED),
    908: (
        "attempt to terminate a thread-local capture sequence from another thread",
        _OTHER_THREAD,
    ),
}

# What torch itself forbids is a plain RuntimeError.
_FORBIDDEN_BY_TORCH = re.compile(r"during CUDA graph capture")
_GENERATOR = re.compile(r"CUDA generator (used during capture|not in capture mode)")
_SEED = re.compile(r"set_current_seed can be called during stream capture")
# How torch quotes runtime and driver, and how Triton does, which launches past torch.
_DRIVER_PREFIXES = ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: ")
# How Thrust and CUB do, which some operators of torch call.
_RUNTIME_NAME = re.compile(r"\bcudaError[A-Z]\w*: ")
_LIBRARY_STATUS = re.compile(r"\bCU[A-Z]+_STATUS_[A-Z_]+")


def error_code(error: BaseException) -> int | None:
    """The CUDA runtime's code of ``error``: 0 if it is unknown, None if it is no device error."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if not isinstance(error, RuntimeError) or isinstance(error, GraphrtError):
        return None
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return code
    text = str(error)
    is_quoted = _RUNTIME_NAME.search(text) or any(prefix in text for prefix in _DRIVER_PREFIXES)
    for known, (driver_text, _) in _BY_CODE.items():
        if is_quoted and driver_text in text:
            return known
    if any(pattern.search(text) for pattern in (_FORBIDDEN_BY_TORCH, _GENERATOR, _SEED)):
        return FORBIDDEN
    return 0 if is_quoted or _LIBRARY_STATUS.search(text) else None


def translate(error: BaseException, operation: str = "") -> BaseException:
    """``error`` as a ``CaptureError`` with ``error`` as its cause, if it is the device's own.

    Any other error, graphrt's included, is returned itself.

    ``operation``: what failed; without it, the source line is quoted. The caller adds which capture
    it was: it knows owner, mode and key.
    """
    code = error_code(error)
    if code is None:
        return error
    text = str(error)
    if _GENERATOR.search(text):
        meaning = _UNDECLARED_GENERATOR
    elif _SEED.search(text):
        meaning = _RESEEDED
    else:
        _, meaning = _BY_CODE.get(code, ("", _UNKNOWN))
    source = traceback_source(error.__traceback__)
    reason = text.strip().partition("\n")[0]
    for prefix in _DRIVER_PREFIXES:
        reason = reason.removeprefix(prefix)
    what = operation or source.text
    subject = f"{reason}, at {source.with_text}" if source else reason
    if meaning.kind is ForbiddenOperationError:
        subject = f"operation {what} is not permitted while capturing: {subject}"
    translated = meaning.kind(
        subject,
        expected=meaning.expected,
        found=what or reason,
        do=meaning.do,
        operation=what or reason,
        source=source.with_text,
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

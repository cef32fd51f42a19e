"""What failed to capture, remembered so that it is not tried again at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.errors import CaptureError, CaptureFuseError

FUSE_LENGTH = 3


class FailureRecord(NamedTuple):
    """A key that failed or was over budget, and why. ``error`` holds no traceback, no tensor."""

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    error: Exception


class FailureBook:
    """The failures of a library, and the fuse that three in a row open."""

    def __init__(self, report: Callable[[FailureRecord], None]) -> None:
        self._records: dict[tuple[str, RuntimeMode, BatchDescriptor], FailureRecord] = {}
        self._in_a_row = 0
        self._report = report

    @property
    def records(self) -> tuple[FailureRecord, ...]:
        return tuple(self._records.values())

    @property
    def fuse_is_open(self) -> bool:
        return self._in_a_row >= FUSE_LENGTH

    def find(self, owner: str, mode: RuntimeMode, key: BatchDescriptor) -> FailureRecord | None:
        return self._records.get((owner, mode, key))

    def refuse_known(self, owner: str, mode: RuntimeMode, key: BatchDescriptor) -> None:
        """Raise what ``key`` failed with, or ``CaptureFuseError`` while the fuse is open."""
        record = self._records.get((owner, mode, key))
        if record is not None:
            # A copy: raising hangs a traceback, and with it frames and tensors, on the object.
            raise detached(record.error)
        if self.fuse_is_open:
            raise self.fuse_error(owner, mode, key)

    def add(
        self,
        owner: str,
        mode: RuntimeMode,
        key: BatchDescriptor,
        error: Exception,
        *,
        counts: bool = True,
    ) -> FailureRecord:
        """Remember a failure; the first one of a key stays."""
        record = self._records.get((owner, mode, key))
        if record is None:
            record = FailureRecord(owner, mode, key, detached(error))
            self._records[owner, mode, key] = record
            self._report(record)
        self._in_a_row += counts
        return record

    def succeeded(self) -> None:
        self._in_a_row = 0

    def forget(self) -> None:
        self._records.clear()
        self._in_a_row = 0

    @staticmethod
    def fuse_error(owner: str, mode: RuntimeMode, key: BatchDescriptor) -> CaptureFuseError:
        error = CaptureFuseError(
            expected="captures that succeed",
            found=f"{FUSE_LENGTH} consecutive failures; this key was not attempted",
            do="read library.failures for the first cause, then library.forget_failures()",
        )
        error.locate(owner=owner, mode=mode.name, key=str(key))
        return error


def detached(error: BaseException) -> Exception:
    """Return a copy of ``error`` without traceback: it keeps no frame, hence no tensor, alive."""
    try:
        twin = copy.copy(error)
    except TypeError:  # its constructor cannot be called with its ``args``
        twin = None
    if not isinstance(twin, Exception):
        twin = CaptureError(f"{type(error).__name__}: {error}")
    twin.__traceback__ = None
    twin.__context__ = None
    twin.__cause__ = None if error.__cause__ is None else detached(error.__cause__)
    return twin

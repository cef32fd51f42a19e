"""Captures a set of keys: warms every one up, freezes what graphs hold, captures them in order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.errors import EmptyCaptureError
from graphrt.graphs.ambient import read_ambient, refuse_grad_mode
from graphrt.graphs.failures import FailureRecord
from graphrt.graphs.program import Program
from graphrt.graphs.state import Resource, StateGuard

if TYPE_CHECKING:
    from graphrt.graphs.scope import CaptureScope

Phase = Literal["warmup", "capture", "captured", "failed"]
Gate = Callable[["CaptureJob", Phase], bool]
"""Asked before each warm-up and capture (False skips the job) and after each capture (False drops
its programs); told of each failure. Where ranks keep step."""

Progress = Callable[[int, int, "CaptureJob"], None]


@dataclass(frozen=True, slots=True, eq=False)
class CaptureJob:
    """One key to capture: ``target(*args, **kwargs)`` in a step of ``mode`` and ``key``.

    ``make_inputs`` returns ``(args, kwargs)``; it is called anew for every warm-up and for the
    capture, and its tensors must lie where steps will find them.
    """

    target: Callable[..., Any]
    mode: RuntimeMode
    key: BatchDescriptor
    make_inputs: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]

    @property
    def owner(self) -> str:
        """Name of the target, for records: a wrapper's owner, else the callable's own name."""
        name = getattr(self.target, "owner", None) or getattr(self.target, "__qualname__", None)
        return name if isinstance(name, str) else type(self.target).__name__


class CaptureReport(NamedTuple):
    """What ``capture_all`` did."""

    programs: tuple[Program, ...]
    failures: tuple[FailureRecord, ...]
    skipped: tuple[CaptureJob, ...]
    """Jobs that a gate turned away or dropped."""
    seconds: Mapping[CaptureJob, float]
    """Warm-ups and capture of each job that was attempted."""


class CaptureRun:
    """One ``capture_all``: which jobs are alive, what failed, how long each took."""

    def __init__(
        self,
        scope: CaptureScope,
        gate: Gate | None,
        *,
        state: StateGuard | None,
        resources: Sequence[Resource],
        warmups: int,
        on_error: Literal["raise", "skip"],
    ) -> None:
        self._scope = scope
        self._library = scope.library
        self._device = scope.device
        self._gate = gate
        self._state = state
        self._resources = resources
        self._warmups = warmups
        self._on_error = on_error
        self._programs: list[Program] = []
        self._failures: dict[CaptureJob, FailureRecord] = {}
        self._skipped: list[CaptureJob] = []
        self._seconds: dict[CaptureJob, float] = {}

    def capture_all(
        self,
        jobs: Sequence[CaptureJob],
        progress: Progress | None,
        later: Iterable[BatchDescriptor],
    ) -> CaptureReport:
        """See ``CaptureScope.capture_all``."""
        if jobs:
            largest = max((*later, *(job.key for job in jobs)), key=_extent)
            for resource in self._resources:
                self._library.reserve(resource, largest)
        for job in jobs:
            self._attempt(job, "warmup", self._warm_up)
        for resource in self._resources:
            resource.freeze()
        self._scope.destination.freeze_workspaces()
        for done, job in enumerate(jobs, start=1):
            if job not in self._failures and job not in self._skipped:
                self._attempt(job, "capture", self._capture)
            if progress is not None:
                progress(done, len(jobs), job)
        return CaptureReport(
            tuple(self._programs),
            tuple(self._failures.values()),
            tuple(self._skipped),
            MappingProxyType(self._seconds),
        )

    def _attempt(
        self,
        job: CaptureJob,
        phase: Literal["warmup", "capture"],
        action: Callable[[CaptureJob], None],
    ) -> None:
        """Run one phase of one job; a failure is recorded, and raised unless the scope skips."""
        book = self._library.failure_book
        known = book.find(job.owner, job.mode, job.key)
        if known is not None and self._on_error == "skip":
            self._failures[job] = known
            return
        started = perf_counter()
        try:
            book.refuse_known(job.owner, job.mode, job.key)
            if self._passes(job, phase):
                action(job)
            else:
                self._skipped.append(job)
        except Exception as error:
            self._failures[job] = book.add(
                job.owner, job.mode, job.key, error, counts=known is None
            )
            self._passes(job, "failed")
            if self._on_error == "raise":
                raise
            # Raises if the error left the device unusable: then there is nothing to go on with.
            self._device.synchronize()
            _let_go(error)
        finally:
            self._seconds[job] = self._seconds.get(job, 0.0) + perf_counter() - started

    def _warm_up(self, job: CaptureJob) -> None:
        if self._warmups == 0:
            return
        with _guarded(self._state):
            for number in range(self._warmups):
                is_last = number == self._warmups - 1
                # Libraries branch on "is this a capture": the last warm-up takes the same branch.
                answering = self._device.answering_capture() if is_last else nullcontext()
                args, kwargs = self._prepare(job)
                with answering, self._scope.step(RuntimeMode.NONE, job.key):
                    refuse_grad_mode(read_ambient(self._device))
                    job.target(*args, **kwargs)

    def _capture(self, job: CaptureJob) -> None:
        programs = self._record(job)
        if self._passes(job, "captured"):
            self._programs += programs
        else:
            self._library.drop(programs)
            self._skipped.append(job)

    def _record(self, job: CaptureJob) -> Sequence[Program]:
        """Return the programs that one job captured; an error undoes those it had."""
        # Only gaps run at capture, and only PIECEWISE has gaps.
        state = self._state if job.mode is RuntimeMode.PIECEWISE else None
        with self._scope.noting_calls() as calls:
            try:
                args, kwargs = self._prepare(job)
                with _guarded(state), self._scope.step(job.mode, job.key):
                    job.target(*args, **kwargs)
                if not calls.is_matched:
                    raise EmptyCaptureError(
                        f"{job.owner}, {job.mode.name}, {job.key}",
                        expected=f"a call of a {job.mode.name} wrapper of this library",
                        found="none",
                        do="wrap the callable, or part of it, in a CUDAGraphWrapper of this mode",
                    )
            except BaseException:
                self._library.drop(calls.captured)
                raise
        return calls.captured

    def _prepare(self, job: CaptureJob) -> tuple[Sequence[Any], Mapping[str, Any]]:
        args, kwargs = job.make_inputs()
        for resource in self._resources:
            resource.prepare(job.key, None)
        return args, kwargs

    def _passes(self, job: CaptureJob, phase: Phase) -> bool:
        return self._gate is None or self._gate(job, phase)


@contextmanager
def _guarded(state: StateGuard | None) -> Iterator[None]:
    if state is None:
        yield
        return
    token = state.save()
    try:
        yield
    finally:
        state.restore(token)


def _let_go(error: BaseException) -> None:
    """Free the frames of a failure that is not raised: they hold tensors, hence pool memory."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def _extent(key: BatchDescriptor) -> tuple[int, int, int, int]:
    return (key.num_tokens, key.num_reqs or key.num_tokens, key.num_ubatches, key.num_active_loras)

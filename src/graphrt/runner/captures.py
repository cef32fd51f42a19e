"""The captures of one runner: what goes first, with other ranks, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from graphrt.batch import BatchDescriptor, Reason
from graphrt.errors import CaptureInProgressError
from graphrt.events import CaptureBegan, CaptureEnded, MemoryTaken, Observer
from graphrt.graphs import CaptureOptions, Entry, GraphLibrary, HostSnapshot, too_many_failures
from graphrt.interrupts import interrupted_between_steps
from graphrt.parallel import Lockstep
from graphrt.report import Progress
from graphrt.runner.executor import Executor
from graphrt.runner.jobs import CaptureJob, capture_all
from graphrt.runner.keys import RunnerKeys, missing_text, no_examples_error
from graphrt.runner.report import CaptureMemory, DeviceMemory

Capture = Callable[[Sequence[Entry], CaptureOptions, Progress | None], None]


class Captures:
    """Captures keys of one runner, all at once or in parts, and counts what that takes.

    It does not hold the runner, so that a closed one gives its memory back at once.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        library: GraphLibrary,
        keys: RunnerKeys,
        executor: Executor,
        *,
        lockstep: Lockstep | None,
    ) -> None:
        self.seconds = 0.0
        self.memory: tuple[DeviceMemory, DeviceMemory] | None = None
        """Before the first capture, and after the last one that ended without an error."""
        self.memory_taken = MemoryTaken()
        self._fn = fn
        self._name = name
        self._library = library
        self._keys = keys
        self._executor = executor
        self._lockstep = lockstep
        self._host: HostSnapshot | None = None
        """What ``fn`` remembered on the host before the first part of a capture."""
        self._num_captured = 0
        """Graphs that the library had captured by then."""

    @contextmanager
    def part(
        self,
        check: Callable[[HostSnapshot, Entry], None],
        refresh: Callable[[], None],
        emit: Observer,
    ) -> Iterator[Capture]:
        """Around every capture: time it, hold Ctrl-C back, dispatch to what it captured.

        Yields ``_capture``, with what ``fn`` remembered before the first warm-up, of an earlier
        part too. What something else has changed since counts as it is now. ``check(host, entry)``
        compares a first replay, given what was remembered; ``refresh()`` dispatches to what is
        ready now.
        """
        if self._executor.examples is None:
            raise no_examples_error()
        if self._library.scope is not None:
            raise CaptureInProgressError(
                f"capture of {self._name}",
                expected="no open capture scope, because the runner opens one with its own options",
                found="one that is open",
                do="leave the scope first",
            )
        self._library.require_no_recording(f"capture of {self._name}")
        started = perf_counter()
        self._executor.outputs.expire()
        if self._host is None:
            self._host = HostSnapshot(self._fn)
            self._num_captured = self._library.num_cudagraph_captured
        else:
            self._host.rebase()
        try:
            together: AbstractContextManager[None] = nullcontext()
            if self._lockstep is not None:
                together = self._lockstep.capturing(lambda: missing_text(self._keys.missing()))
            with interrupted_between_steps() as check_interrupt, torch.no_grad(), together:
                compare = partial(check, self._host)
                yield partial(self._capture, compare, emit, self._host, check_interrupt)
        finally:
            self.seconds += perf_counter() - started
            refresh()

    def forget_host(self) -> None:
        """No other part follows: the next warm-up is the first one."""
        self._host = None

    def choose(
        self, wanted: Sequence[Entry], options: CaptureOptions
    ) -> tuple[Sequence[Entry], CaptureOptions]:
        """What to capture, and whether beside the programs that serve or in their place.

        No program is freed alone, so one that can never serve again costs its memory until its
        whole generation goes. Memory comes first where none serves, service where one does.
        """
        self._invalidate_with_others()
        missing = [entry for entry in wanted if entry.reason is not Reason.HIT]
        generations = self._library.generations
        owners = {program.owner for generation in generations for program in generation.programs}
        has_invalid = any(e.program is not None and not e.program.is_valid for e in wanted)
        if not has_invalid or owners != {self._name}:
            # A generation goes as a whole: with it would go what serves another runner.
            return missing, replace(options, generation="current")
        entries = self._keys.entries.values()
        if any(entry.reason is Reason.HIT for entry in entries):
            # What takes the old generation's place has to serve what that one serves.
            again = [e for e in entries if e in wanted or e.valid_program is not None]
            return again, replace(options, generation="new")
        for generation in generations:
            if generation.programs:
                self._library.retire(generation)
        return missing, replace(options, generation="current")

    def _invalidate_with_others(self) -> None:
        """Invalidate the programs that another rank has none of: all capture the same keys."""
        if self._lockstep is None:
            return
        entries = tuple(self._keys.entries.values())
        serves = self._lockstep.served_by_all([e.reason is Reason.HIT for e in entries])
        for entry, is_everywhere in zip(entries, serves, strict=True):
            if entry.reason is Reason.HIT and not is_everywhere and entry.program is not None:
                self._library.catalog.invalidate(entry.program, ("something on another rank",))

    def recheck(self, chosen: Sequence[Entry]) -> list[Entry]:
        """Invalidate what an interrupt left unchecked and reads what has moved since; return what
        of ``chosen`` is still to be captured, in capture order."""
        for entry in chosen:
            program = entry.valid_program
            if program is not None and (names := program.find_moved()):
                self._library.catalog.invalidate(program, names)
        return [entry for entry in self._keys.pending() if entry in chosen]

    def fail_the_rest(self) -> bool:
        """After three failures in a row, mark every other key as failed; True if it marked any."""
        catalog, pending = self._library.catalog, self._keys.pending()
        if not pending or not catalog.has_given_up(self._name):
            return False
        for entry in pending:
            error = too_many_failures(entry.owner, entry.mode, entry.key)
            catalog.mark_failed(entry.owner, entry.mode, entry.key, error)
        return True

    def _capture(
        self,
        check: Callable[[Entry], None],
        emit: Observer,
        host: HostSnapshot,
        check_interrupt: Callable[[], None],
        entries: Sequence[Entry],
        options: CaptureOptions,
        progress: Progress | None,
    ) -> None:
        """Capture ``entries`` in one scope, and check each first replay after it."""
        if entries:
            emit(CaptureBegan(self._name, len(entries)))
        started, memory, taken = perf_counter(), CaptureMemory(self._library), MemoryTaken()
        done, total = 0, 2 * len(entries)

        def tick(key: BatchDescriptor) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total, key)
            check_interrupt()

        def gate(job: CaptureJob, phase: str) -> bool:
            if phase == "warmup":
                check_interrupt()
            return self._lockstep is None or self._lockstep.gate(job, phase)

        jobs = [
            CaptureJob(
                self._fn,
                entry.mode,
                entry.key,
                partial(self._executor.example_inputs, entry.key),
                owner=self._name,
                check=check,
                checked=lambda entry: tick(entry.key),
            )
            for entry in entries
        ]
        known = self._keys.entries
        try:
            capture_all(
                self._library,
                jobs,
                options,
                gate=gate,
                progress=lambda number, total, job: tick(job.key),
                later=[key for _, key in known],
                host=host,
                ended=memory.ended,
            )
            if not self._keys.pending():
                # Comparisons leave the allocator with gigabytes that no later capture needs. While
                # another thread records on this GPU, nothing can be given back.
                with suppress(CaptureInProgressError):
                    self._library.device.trim()
            after, taken = memory.taken()
            self.memory = (self.memory or (memory.before,))[0], after
            self.memory_taken = self.memory_taken.plus(taken)
        finally:
            if self._library.num_cudagraph_captured == self._num_captured:
                # No graph reads what the runs have set, and what others change is theirs.
                host.restore_advanced(memos=True)
                self._host = None
            self._executor.forget_examples()
            if entries:
                num_served = sum(entry.reason is Reason.HIT for entry in known.values())
                seconds = perf_counter() - started
                emit(CaptureEnded(self._name, len(entries), num_served, seconds, taken))

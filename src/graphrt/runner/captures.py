"""The captures of one runner: what goes first, with other ranks, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Literal

import torch

from graphrt.batch import BatchDescriptor, Reason
from graphrt.errors import CaptureInProgressError
from graphrt.events import CaptureBegan, CaptureEnded, MemoryTaken
from graphrt.externals import HostSnapshot
from graphrt.graphs import Entry, GraphLibrary, too_many_failures
from graphrt.interrupts import interrupted_between_steps
from graphrt.report import Progress
from graphrt.runner.comparisons import Comparisons
from graphrt.runner.jobs import CaptureJob, capture_all
from graphrt.runner.keys import RunnerKeys, missing_text, no_examples_error
from graphrt.runner.report import CaptureMemory, DeviceMemory

GenerationName = Literal["current", "new"]
Capture = Callable[[Sequence[Entry], GenerationName, Progress | None], None]


@dataclass(eq=False)
class Captures:
    """Captures keys of one runner, all at once or in parts, and counts what that takes.

    It does not hold the runner, so that a closed one gives its memory back at once.
    """

    keys: RunnerKeys
    comparisons: Comparisons
    seconds: float = 0.0
    memory: tuple[DeviceMemory, DeviceMemory] | None = None
    """Before the first capture, and after the last one that ended without an error."""
    memory_taken: MemoryTaken = field(default_factory=MemoryTaken)
    host: HostSnapshot | None = None
    """What the callable remembered before the first part of a capture; None: no other part follows,
    and the next warm-up is the first one."""
    _num_captured: int = 0
    """Graphs that the library had captured by then."""

    @property
    def library(self) -> GraphLibrary:
        return self.comparisons.executor.library

    @contextmanager
    def part(self, refresh: Callable[[], None]) -> Iterator[Capture]:
        """Around every capture: time it, hold Ctrl-C back, and ``refresh()`` what serves.

        Yields ``_capture``, with what the callable remembered before the first warm-up, of an
        earlier part too. What something else has changed since counts as it is now.
        """
        executor, library = self.comparisons.executor, self.library
        lockstep, subject = self.comparisons.lockstep, f"capture of {self.keys.owner}"
        if executor.examples is None:
            raise no_examples_error()
        if library.scope is not None:
            raise CaptureInProgressError(
                subject,
                expected="no open capture scope, because the runner opens one with its own options",
                found="one that is open",
                do="leave the scope first",
            )
        library.require_no_recording(subject)
        started = perf_counter()
        executor.outputs.expire()
        if self.host is None:
            self.host = HostSnapshot(executor.fn)
            self._num_captured = library.num_cudagraph_captured
        else:
            self.host.rebase()
        try:
            together: AbstractContextManager[None] = nullcontext()
            if lockstep is not None:
                together = lockstep.capturing(lambda: missing_text(self.keys.missing()))
            with interrupted_between_steps() as check_interrupt, torch.no_grad(), together:
                yield partial(self._capture, self.host, check_interrupt)
        finally:
            self.seconds += perf_counter() - started
            refresh()

    def choose(self, wanted: Sequence[Entry]) -> tuple[Sequence[Entry], GenerationName]:
        """What to capture, and whether beside the programs that serve or in their place.

        No program is freed alone, so one that can never serve again costs its memory until its
        whole generation goes. Memory comes first where none serves, service where one does.
        """
        self._invalidate_with_others()
        missing = [entry for entry in wanted if entry.reason is not Reason.HIT]
        generations = self.library.generations
        owners = {program.owner for generation in generations for program in generation.programs}
        has_invalid = any(e.program is not None and not e.program.is_valid for e in wanted)
        if not has_invalid or owners != {self.keys.owner}:
            # A generation goes as a whole: with it would go what serves another runner.
            return missing, "current"
        entries = self.keys.entries.values()
        if any(entry.reason is Reason.HIT for entry in entries):
            # What takes the old generation's place has to serve what that one serves.
            again = [e for e in entries if e in wanted or e.valid_program is not None]
            return again, "new"
        for generation in generations:
            if generation.programs:
                self.library.retire(generation)
        return missing, "current"

    def _invalidate_with_others(self) -> None:
        """Invalidate the programs that another rank has none of: all capture the same keys."""
        lockstep, entries = self.comparisons.lockstep, tuple(self.keys.entries.values())
        if lockstep is None:
            return
        serves = lockstep.served_by_all([e.reason is Reason.HIT for e in entries])
        for entry, is_everywhere in zip(entries, serves, strict=True):
            if entry.reason is Reason.HIT and not is_everywhere and entry.program is not None:
                self.library.catalog.invalidate(entry.program, ("something on another rank",))

    def recheck(self, chosen: Sequence[Entry]) -> list[Entry]:
        """Invalidate what an interrupt left unchecked and reads what has moved since; return what
        of ``chosen`` is still to be captured, in capture order."""
        for entry in chosen:
            program = entry.valid_program
            if program is not None and (names := program.find_moved()):
                self.library.catalog.invalidate(program, names)
        return [entry for entry in self.keys.pending() if entry in chosen]

    def fail_the_rest(self) -> bool:
        """After three failures in a row, mark every other key as failed; True if it marked any."""
        catalog, pending = self.library.catalog, self.keys.pending()
        if not pending or not catalog.has_given_up(self.keys.owner):
            return False
        for entry in pending:
            error = too_many_failures(entry.owner, entry.mode, entry.key)
            catalog.mark_failed(entry.owner, entry.mode, entry.key, error)
        return True

    def _capture(
        self,
        host: HostSnapshot,
        check_interrupt: Callable[[], None],
        entries: Sequence[Entry],
        generation: GenerationName,
        progress: Progress | None,
    ) -> None:
        """Capture ``entries`` in one scope, and check each first replay after it."""
        known, owner, comparisons = self.keys.entries, self.keys.owner, self.comparisons
        executor, lockstep, emit = comparisons.executor, comparisons.lockstep, comparisons.observer
        if entries:
            emit(CaptureBegan(owner, len(entries)))
        started, memory, taken = perf_counter(), CaptureMemory(self.library), MemoryTaken()
        done, total = 0, 2 * len(entries)
        put_rows_back = comparisons.keep_rows()

        def tick(key: BatchDescriptor) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total, key)
            check_interrupt()

        def gate(job: CaptureJob, phase: str) -> bool:
            if phase == "warmup":
                check_interrupt()
            return lockstep is None or lockstep.gate(job, phase)

        jobs = [
            CaptureJob(
                executor.fn,
                entry.mode,
                entry.key,
                partial(executor.example_inputs, entry.key),
                owner=owner,
                check=partial(comparisons.first_replay, host),
                checked=lambda entry: tick(entry.key),
            )
            for entry in entries
        ]
        try:
            capture_all(
                self.library,
                jobs,
                replace(executor.options, generation=generation),
                gate=gate,
                progress=lambda number, total, job: tick(job.key),
                later=[key for _, key in known],
                host=host,
                ended=memory.ended,
            )
            if not self.keys.pending():
                # Comparisons leave the allocator with gigabytes that no later capture needs. While
                # another thread records on this GPU, nothing can be given back.
                with suppress(CaptureInProgressError):
                    self.library.device.trim()
            after, taken = memory.taken()
            self.memory = (self.memory or (memory.before,))[0], after
            self.memory_taken = self.memory_taken.plus(taken)
        finally:
            if self.library.num_cudagraph_captured == self._num_captured:
                # No graph reads what the runs have set, and what others change is theirs.
                host.restore_advanced(memos=True)
                self.host = None
            # What a failed one was made with may belong to others by the next.
            executor.captured_with.clear()
            if entries:
                num_served = sum(entry.reason is Reason.HIT for entry in known.values())
                seconds = perf_counter() - started
                emit(CaptureEnded(owner, len(entries), num_served, seconds, taken))
                if not any(entry.valid_program for entry in known.values()):
                    put_rows_back()

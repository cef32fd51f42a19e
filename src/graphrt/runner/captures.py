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
from graphrt.graphs import Entry, HostSnapshot, too_many_failures
from graphrt.interrupts import interrupted_between_steps
from graphrt.parallel import Lockstep
from graphrt.report import Progress
from graphrt.runner.executor import Executor
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

    name: str
    keys: RunnerKeys
    executor: Executor
    lockstep: Lockstep | None
    seconds: float = 0.0
    memory: tuple[DeviceMemory, DeviceMemory] | None = None
    """Before the first capture, and after the last one that ended without an error."""
    memory_taken: MemoryTaken = field(default_factory=MemoryTaken)
    _host: HostSnapshot | None = None
    """What the callable remembered on the host before the first part of a capture."""
    _num_captured: int = 0
    """Graphs that the library had captured by then."""

    @contextmanager
    def part(
        self, check: Callable[[HostSnapshot, Entry], None], refresh: Callable[[], None]
    ) -> Iterator[Capture]:
        """Around every capture: time it, hold Ctrl-C back, dispatch to what it captured.

        Yields ``_capture``, with what the callable remembered before the first warm-up, of an
        earlier part too. What something else has changed since counts as it is now.
        ``check(host, entry)`` compares a first replay, given what was remembered; ``refresh()``
        dispatches to what is ready now.
        """
        if self.executor.examples is None:
            raise no_examples_error()
        if self.executor.library.scope is not None:
            raise CaptureInProgressError(
                f"capture of {self.name}",
                expected="no open capture scope, because the runner opens one with its own options",
                found="one that is open",
                do="leave the scope first",
            )
        self.executor.library.require_no_recording(f"capture of {self.name}")
        started = perf_counter()
        self.executor.outputs.expire()
        if self._host is None:
            self._host = HostSnapshot(self.executor.fn)
            self._num_captured = self.executor.library.num_cudagraph_captured
        else:
            self._host.rebase()
        try:
            together: AbstractContextManager[None] = nullcontext()
            if self.lockstep is not None:
                together = self.lockstep.capturing(lambda: missing_text(self.keys.missing()))
            with interrupted_between_steps() as check_interrupt, torch.no_grad(), together:
                compare = partial(check, self._host)
                yield partial(self._capture, compare, self._host, check_interrupt)
        finally:
            self.seconds += perf_counter() - started
            refresh()

    def forget_host(self) -> None:
        """No other part follows: the next warm-up is the first one."""
        self._host = None

    def choose(self, wanted: Sequence[Entry]) -> tuple[Sequence[Entry], GenerationName]:
        """What to capture, and whether beside the programs that serve or in their place.

        No program is freed alone, so one that can never serve again costs its memory until its
        whole generation goes. Memory comes first where none serves, service where one does.
        """
        self._invalidate_with_others()
        missing = [entry for entry in wanted if entry.reason is not Reason.HIT]
        generations = self.executor.library.generations
        owners = {program.owner for generation in generations for program in generation.programs}
        has_invalid = any(e.program is not None and not e.program.is_valid for e in wanted)
        if not has_invalid or owners != {self.name}:
            # A generation goes as a whole: with it would go what serves another runner.
            return missing, "current"
        entries = self.keys.entries.values()
        if any(entry.reason is Reason.HIT for entry in entries):
            # What takes the old generation's place has to serve what that one serves.
            again = [e for e in entries if e in wanted or e.valid_program is not None]
            return again, "new"
        for generation in generations:
            if generation.programs:
                self.executor.library.retire(generation)
        return missing, "current"

    def _invalidate_with_others(self) -> None:
        """Invalidate the programs that another rank has none of: all capture the same keys."""
        if self.lockstep is None:
            return
        entries = tuple(self.keys.entries.values())
        serves = self.lockstep.served_by_all([e.reason is Reason.HIT for e in entries])
        for entry, is_everywhere in zip(entries, serves, strict=True):
            if entry.reason is Reason.HIT and not is_everywhere and entry.program is not None:
                self.executor.library.catalog.invalidate(
                    entry.program, ("something on another rank",)
                )

    def recheck(self, chosen: Sequence[Entry]) -> list[Entry]:
        """Invalidate what an interrupt left unchecked and reads what has moved since; return what
        of ``chosen`` is still to be captured, in capture order."""
        for entry in chosen:
            program = entry.valid_program
            if program is not None and (names := program.find_moved()):
                self.executor.library.catalog.invalidate(program, names)
        return [entry for entry in self.keys.pending() if entry in chosen]

    def fail_the_rest(self) -> bool:
        """After three failures in a row, mark every other key as failed; True if it marked any."""
        catalog, pending = self.executor.library.catalog, self.keys.pending()
        if not pending or not catalog.has_given_up(self.name):
            return False
        for entry in pending:
            error = too_many_failures(entry.owner, entry.mode, entry.key)
            catalog.mark_failed(entry.owner, entry.mode, entry.key, error)
        return True

    def _capture(
        self,
        check: Callable[[Entry], None],
        host: HostSnapshot,
        check_interrupt: Callable[[], None],
        entries: Sequence[Entry],
        generation: GenerationName,
        progress: Progress | None,
    ) -> None:
        """Capture ``entries`` in one scope, and check each first replay after it."""
        if entries:
            self.executor.emit(CaptureBegan(self.name, len(entries)))
        started, memory, taken = perf_counter(), CaptureMemory(self.executor.library), MemoryTaken()
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
            return self.lockstep is None or self.lockstep.gate(job, phase)

        jobs = [
            CaptureJob(
                self.executor.fn,
                entry.mode,
                entry.key,
                partial(self.executor.example_inputs, entry.key),
                owner=self.name,
                check=check,
                checked=lambda entry: tick(entry.key),
            )
            for entry in entries
        ]
        known = self.keys.entries
        try:
            capture_all(
                self.executor.library,
                jobs,
                replace(self.executor.options, generation=generation),
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
                    self.executor.library.device.trim()
            after, taken = memory.taken()
            self.memory = (self.memory or (memory.before,))[0], after
            self.memory_taken = self.memory_taken.plus(taken)
        finally:
            if self.executor.library.num_cudagraph_captured == self._num_captured:
                # No graph reads what the runs have set, and what others change is theirs.
                host.restore_advanced(memos=True)
                self._host = None
            self.executor.forget_examples()
            if entries:
                num_served = sum(entry.reason is Reason.HIT for entry in known.values())
                seconds = perf_counter() - started
                self.executor.emit(
                    CaptureEnded(self.name, len(entries), num_served, seconds, taken)
                )

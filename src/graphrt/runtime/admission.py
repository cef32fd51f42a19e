"""Which programs may serve: those whose first replay was right. Every other key says why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphrt.batch import BatchDescriptor, MissReason, RuntimeMode
from graphrt.config import Plan
from graphrt.events import CaptureFailed, Observer
from graphrt.graphs import CUDAGraphWrapper, FailureRecord, Program

Key = tuple[RuntimeMode, BatchDescriptor]


class Admissions:
    """What became of the keys of ``plan``, whose programs the ``wrappers`` find."""

    def __init__(
        self,
        plan: Plan,
        wrappers: Mapping[RuntimeMode, CUDAGraphWrapper],
        observer: Observer | None,
    ) -> None:
        self.failures: dict[Key, str] = {}
        self._plan = plan
        self._wrappers = wrappers
        self._observer = observer
        self._admitted: dict[Key, Program] = {}

    def programs(self) -> dict[Key, Program]:
        """Every program, valid or not, admitted or not."""
        return {
            (mode, key): program
            for mode, wrapper in self._wrappers.items()
            for key, program in wrapper.concrete_cudagraph_entries.items()
        }

    def valid_program(self, mode: RuntimeMode, key: BatchDescriptor) -> Program | None:
        program = self._wrappers[mode].concrete_cudagraph_entries.get(key)
        return program if program is not None and program.is_valid else None

    def is_admitted(self, program: Program) -> bool:
        return self._admitted.get((program.mode, program.key)) is program

    def admit(self, program: Program) -> None:
        """Let a program serve: its first replay was right."""
        self._admitted[program.mode, program.key] = program

    def reject(self, mode: RuntimeMode, key: BatchDescriptor, error: Exception) -> None:
        """Let a program never serve (again), and say so."""
        wrapper = self._wrappers[mode]
        wrapper.concrete_cudagraph_entries[key].invalidate()
        self.failures[mode, key] = str(error)
        if self._observer is not None:
            self._observer(
                CaptureFailed(wrapper.owner, mode, key, type(error).__name__, str(error))
            )

    def note_failure(self, record: FailureRecord) -> None:
        """A capture failed: its key has no program."""
        self.failures[record.mode, record.key] = str(record.error)

    def forget_failures(self, keys: Iterable[Key]) -> None:
        for item in keys:
            self.failures.pop(item, None)

    def missing(self) -> dict[Key, MissReason]:
        """Every key of the plan that no program may serve, and why."""
        missing: dict[Key, MissReason] = {}
        for mode, key in self._plan.capture_order:
            program = self._wrappers[mode].concrete_cudagraph_entries.get(key)
            if program is not None and program.is_valid and self.is_admitted(program):
                continue
            if (mode, key) in self.failures:
                missing[mode, key] = MissReason.CAPTURE_FAILED
            elif program is None or program.is_valid:
                missing[mode, key] = MissReason.NOT_CAPTURED_YET
            else:
                missing[mode, key] = MissReason.INVALIDATED
        return missing

    def clear(self) -> None:
        """Let go of the programs."""
        self._admitted.clear()

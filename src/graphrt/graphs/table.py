"""The programs of one owner in one mode, by key: what a wrapper looks its step up in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.graphs.program import Program

_NO_KEY = object()


class ProgramTable:
    """Key -> program, with a memo of the last key that was found.

    The memo compares by identity: a dispatcher hands out the same key object for the same batch
    shape. It is cleared whenever the table changes.
    """

    __slots__ = ("_on_missing", "_programs", "memo_key", "memo_program", "mode", "owner", "view")

    memo_program: Program

    def __init__(
        self,
        owner: str,
        mode: RuntimeMode,
        on_missing: Callable[[ProgramTable, BatchDescriptor | None], NoReturn],
    ) -> None:
        self.owner = owner
        self.mode = mode
        self._programs: dict[BatchDescriptor, Program] = {}
        self.view: Mapping[BatchDescriptor, Program] = MappingProxyType(self._programs)
        self._on_missing = on_missing
        self.memo_key: object = _NO_KEY

    def find(self, key: BatchDescriptor | None) -> Program:
        """Return the program of ``key``, or raise what its absence means."""
        program = None if key is None else self._programs.get(key)
        if program is None:
            self._on_missing(self, key)
        self.memo_program = program
        self.memo_key = key
        return program

    def publish(self, program: Program) -> None:
        self._programs[program.key] = program
        self._forget_memo()

    def withdraw(self, program: Program) -> None:
        """Remove ``program``, unless another one of its key has taken its place."""
        if self._programs.get(program.key) is program:
            del self._programs[program.key]
        self._forget_memo()

    def _forget_memo(self) -> None:
        self.memo_key = _NO_KEY
        if hasattr(self, "memo_program"):
            del self.memo_program

"""Where the programs of a scope go: into the current generation, a rebuilt one, or lazy ones."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.graphs.generation import Generation
from graphrt.graphs.program import Program
from graphrt.graphs.state import Workspace
from graphrt.graphs.table import ProgramTable

if TYPE_CHECKING:
    from graphrt.graphs.library import GraphLibrary


class Destination:
    """The generation that takes the next program, and where that program is found.

    ``kind``: the ``"current"`` and the ``"lazy"`` generations are the library's, and everybody
    finds their programs at once. A ``"new"`` one is opened at entry; only this scope finds what is
    in it until the exit, which puts it in the current one's place, or gives it up after an error.
    """

    def __init__(
        self,
        library: GraphLibrary,
        kind: Literal["current", "new", "lazy"],
        workspaces: Sequence[Workspace],
    ) -> None:
        self._library = library
        self._kind = kind
        self._workspaces = tuple(workspaces)
        self._has_frozen = False
        self._generation: Generation | None = None
        self._staged: dict[tuple[str, RuntimeMode, BatchDescriptor], Program] = {}

    def __enter__(self) -> Self:
        if self._kind == "new":
            self._generation = self._library.open_generation("new")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._kind != "new":
            return
        assert self._generation is not None, "opened at entry"
        if error is None:
            self._library.replace_current(self._generation)
        else:
            self._library.retire(self._generation)

    def generation(self) -> Generation:
        """The generation that takes the next program; a lazy one that is full is followed."""
        if self._kind == "current":
            return self._library.current_generation()
        if self._kind == "lazy" and not self._has_room():
            self._generation = self._library.lazy_generation()
            if self._has_frozen:
                self._freeze_in(self._generation)
        assert self._generation is not None, "opened at entry"
        return self._generation

    def freeze_workspaces(self) -> None:
        """Let no workspace grow, in this generation and those that follow it."""
        self._has_frozen = True
        self._freeze_in(self.generation())

    def find(self, table: ProgramTable, key: BatchDescriptor) -> Program | None:
        """Return the valid program that this scope replays for ``key``, if there is one."""
        if self._kind == "new":
            program = self._staged.get((table.owner, table.mode, key))
        else:
            program = table.view.get(key)
        return program if program is not None and program.is_valid else None

    def publish(self, program: Program) -> None:
        """Put a program of the generation where it is found."""
        if self._kind == "new":
            self._staged[program.owner, program.mode, program.key] = program
        else:
            self._library.publish(program)

    def _has_room(self) -> bool:
        library, generation = self._library, self._generation
        return (
            generation in library.generations and len(generation.programs) < library.generation_size
        )

    def _freeze_in(self, generation: Generation) -> None:
        for workspace in self._workspaces:
            workspace.freeze(generation)
            if workspace not in generation.workspaces:
                generation.workspaces.append(workspace)

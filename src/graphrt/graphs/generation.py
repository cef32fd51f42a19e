"""A generation: a set of programs with one pool and one capture stream, retired as a whole.

Single eviction in a shared pool crashed survivors that had baked in another graph's cuBLAS
workspace (PyTorch #193402, vllm-omni #6587).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from graphrt.device.base import Pool, Stream
from graphrt.graphs.program import Program
from graphrt.graphs.state import Workspace

Kind = Literal["first", "new", "lazy"]


@dataclass(slots=True, eq=False)
class Generation:
    """``first`` is pinned; ``new`` replaces the current one at its scope's exit; ``lazy`` ones are
    of limited size and go, oldest first, when the graph count is exhausted."""

    index: int
    kind: Kind
    pool: Pool
    stream: Stream
    programs: list[Program] = field(default_factory=list)
    workspaces: list[Workspace] = field(default_factory=list)
    """Frozen for as long as this generation lives."""

    @property
    def num_graphs(self) -> int:
        return sum(program.num_graphs for program in self.programs)

    @property
    def exec_bytes(self) -> int:
        return sum(program.memory.exec_bytes for program in self.programs)

    @property
    def charged_bytes(self) -> int:
        """What retiring this generation gives back: its pool and its executables."""
        return self.pool.bytes() + self.exec_bytes

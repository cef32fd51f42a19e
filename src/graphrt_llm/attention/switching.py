"""Attention by one backend until another one can serve, whose kernels are built meanwhile.

No step waits: a build runs in other processes, and the switch falls between two steps. A FULL graph
runs the kernels that it was captured with, so those of the first backend have to be withdrawn with
the switch, and captured anew; eager code, also between the graphs of a PIECEWISE program, changes
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from graphrt import AttentionSupport, BatchDescriptor
from graphrt_llm.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
)
from graphrt_llm.errors import AttentionBackendError


class Build(Protocol):
    """Kernels that are being built elsewhere."""

    def poll(self) -> str | None:
        """None while it goes on; then what went wrong, or an empty text, always the same. It may
        import what it needs, once, and never waits for a build."""

    def close(self) -> None:
        """End it, if it still goes on. Idempotent."""


class Switch(NamedTuple):
    """How a build ended.

    ``keys``: Of FULL graphs that must not be replayed again: their kernels are not those of the
      backend that serves now.
    ``failure``: Why the first backend goes on serving; empty if the other one serves now.
    """

    keys: tuple[BatchDescriptor, ...]
    failure: str


class SwitchingAttention:
    """``first`` until ``build`` has ended, then ``later``; both over one cache.

    ``later`` is not called before: it may import and allocate where it is made, but compile nothing
    until its first ``prepare``. ``first`` has to support what ``later`` does, and both share no
    tensors between layers in eager code: a PIECEWISE program made them inside a graph, and would go
    on with those of ``first``. A backend that passes batches on to this one has it as ``switching``
    too, where an engine looks for it.
    """

    def __init__(self, first: AttentionBackend, later: AttentionBackend, build: Build) -> None:
        self.cache = later.cache
        self.support: AttentionSupport = later.support
        self.keep_alive: Sequence[Tensor] = (*first.keep_alive, *later.keep_alive)
        self._serving = first
        self._later = later
        self._build = build
        self._captured: dict[BatchDescriptor, None] = {}
        """The keys of FULL graphs that were captured."""
        self._is_eager = self._is_built = False

    @property
    def switching(self) -> SwitchingAttention:
        return self

    def poll(self) -> Switch | None:
        """Between two steps: serve with ``later`` from now on if it is built.

        None while the build goes on; what is returned then is the end of it.
        """
        failure = self._build.poll()
        if failure is None:
            return None
        if failure:
            return Switch((), failure)
        self._is_built = True
        return Switch(tuple(self._captured), "")

    def close(self) -> None:
        """End the build, if it still goes on."""
        self._build.close()

    def prepare(self, key: BatchDescriptor, step_info: AttentionMetadata | None) -> None:
        if key.num_reqs is not None and step_info is None:
            self._captured[key] = None
        self._is_eager = key.num_reqs is None
        if self._is_built:  # Set here: no graph may hold which one it is.
            self._serving = self._later
        self._serving.prepare(key, step_info)

    def begin(self, positions: Tensor, attn: AttentionInputs) -> tuple[Tensor, ...]:
        shared = self._serving.begin(positions, attn)
        if shared and self._is_eager:
            raise AttentionBackendError(
                "SwitchingAttention",
                expected="backends whose begin() returns () for eager code",
                found=f"{len(shared)} tensors from {type(self._serving).__name__}",
                do="compute them in forward(), or make the engine with one backend.",
            )
        return shared

    def forward(
        self,
        layer_index: int,
        heads: Tensor,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        out: Tensor,
    ) -> None:
        self._serving.forward(layer_index, heads, attn, shared, out)

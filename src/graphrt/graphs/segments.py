"""What a program is made of: device graphs, and gaps that run eagerly between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graphrt.device.base import DeviceGraph
from graphrt.errors import BreakOutputError, UnkeyedValueError
from graphrt.graphs.leaves import Path, format_path, walk
from graphrt.graphs.stale import same_host_value


@dataclass(frozen=True, slots=True)
class GraphSegment:
    """One device graph."""

    graph: DeviceGraph


@dataclass(frozen=True, slots=True)
class Returned:
    """One leaf of what a gap returned at capture, and what a replay must return there."""

    path: Path
    kind: Literal["slot", "passed", "host", "opaque"]
    """slot: a tensor, copied into pool memory that the next graph reads; passed: an argument, or a
    view of one; host: a value the model's Python has already acted on."""
    value: Any
    """slot, passed: a tensor over the bytes the next graph reads; host: the value."""


@dataclass(frozen=True, slots=True)
class EagerSegment:
    """A gap: ``fn(*args, **kwargs)`` runs at every replay, where capture met the break point."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    returned: tuple[Returned, ...]
    site: str
    """Module path, file and line of the break point."""
    writes_out: bool
    """True if ``fn`` gets its slot under a keyword and may return nothing."""

    @property
    def slots(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose bytes the next graphs read; each replay overwrites them."""
        return tuple(leaf.value for leaf in self.returned if leaf.kind == "slot")

    def store(self, result: Any) -> None:
        """Copy what a replay returned into the slots.

        Errors: ``BreakOutputError`` for another structure, shape or dtype; ``UnkeyedValueError``
        for another host value.
        """
        if result is None and self.writes_out:
            return
        leaves = [node for node in walk(result) if node.kind != "container"]
        if [leaf.path for leaf in leaves] != [leaf.path for leaf in self.returned]:
            raise self._misfit("the structure returned at capture", f"{type(result).__name__}")
        for expected, found in zip(self.returned, leaves, strict=True):
            self._store_leaf(expected, found.value)

    def _store_leaf(self, expected: Returned, found: Any) -> None:
        place = format_path(expected.path, root="result")
        value = expected.value
        if expected.kind == "host" and not same_host_value(value, found):
            raise UnkeyedValueError(
                f"gap {self.site}: {place}",
                expected=f"{value!r}, the value the model acted on at capture",
                found=repr(found),
                do="put it in the key's `variant` or return a tensor",
            )
        if expected.kind in ("host", "opaque") or found is value:
            return
        if not isinstance(found, torch.Tensor):
            raise self._misfit(f"{place}: a tensor", type(found).__name__)
        if found.shape != value.shape or found.dtype is not value.dtype:
            raise self._misfit(
                f"{place}: {value.dtype} of shape {tuple(value.shape)}",
                f"{found.dtype} of shape {tuple(found.shape)}",
            )
        if expected.kind == "slot":
            # Detached: a step outside no_grad must not tie its history to the slot.
            value.copy_(found.detach())
        elif found.data_ptr() != value.data_ptr() or found.stride() != value.stride():
            raise self._misfit(f"{place}: the argument it returned at capture", "another tensor")

    def _misfit(self, expected: str, found: str) -> BreakOutputError:
        return BreakOutputError(
            f"gap {self.site}",
            expected=expected,
            found=found,
            do="return the same shapes at every step of a key, or capture again",
        )


Segment = GraphSegment | EagerSegment

"""How far static buffers may differ from their padding, and what makes the padding true again.

Everything outside a *dirty* box holds the pad value. Staging fewer rows fills exactly what the
box loses, so no element is filled twice and nothing is done while sizes do not shrink.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphrt.graphs.bufferspec import BufferSpec

Box = tuple[int, ...]
"""The leading part of something: its extent in every dimension, or along every axis."""

_Zeros = list[list[torch.Tensor]]
_Fills = list[tuple[torch.Tensor, float | int | bool]]

# Views are cached per real size. Two axes make many pairs; past this many a cache starts anew.
_MAX_CACHED = 1024


class Buffer:
    """One allocation and its cached views."""

    __slots__ = ("spec", "tensor", "views")

    def __init__(self, spec: BufferSpec, capacity: Mapping[str, int], device: torch.device) -> None:
        self.spec = spec
        shape = self.box(capacity)
        self.tensor = torch.full(shape, spec.policy.value, dtype=spec.dtype, device=device)
        self.views: dict[Box, torch.Tensor] = {}

    def box(self, sizes: Mapping[str, int]) -> Box:
        """The shape at these sizes."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.spec.shape)

    def view(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """The prefix at these sizes; the same object as long as it stays cached."""
        box = self.box(sizes)
        view = self.views.get(box)
        if view is None:
            view = self.tensor[tuple(slice(0, size) for size in box)]
            remember(self.views, box, view)
        return view

    def difference(self, dirty: Box, real: Box) -> list[torch.Tensor]:
        """Views of what lies in the box ``dirty`` and not in ``real``; no element twice."""
        views = []
        inside: list[slice] = []
        for dim, (was, now) in enumerate(zip(dirty, real, strict=True)):
            if was > now:
                rest = (slice(0, size) for size in dirty[dim + 1 :])
                views.append(self.tensor[(*inside, slice(now, was), *rest)])
            inside.append(slice(0, min(was, now)))
        return views


class Tail:
    """Buffers whose real sizes always change together, and how far they may differ from padding.

    ``dirty`` is a size for each of ``axes``: outside that box every buffer holds its pad value.
    None: they hold it everywhere.
    """

    __slots__ = ("axes", "buffers", "dirty", "fills", "name", "written")

    def __init__(self, axes: tuple[str, ...], name: str | None, written: bool) -> None:
        self.axes = axes
        self.name = name
        self.written = written
        self.buffers: list[Buffer] = []
        self.dirty: Box | None = None
        # (dirty, real) -> the zeros by dtype, and the other fills. Empty while nothing shrinks.
        self.fills: dict[tuple[Box, Box | None], tuple[_Zeros, _Fills]] = {}

    def sizes(self, sizes: Mapping[str, int]) -> Box:
        """Those of this tail's axes, in order."""
        return tuple(sizes[axis] for axis in self.axes)

    def clean(self, dirty: Box, real: Box | None) -> None:
        """Write the pad value wherever ``dirty`` reaches beyond ``real``."""
        fills = self.fills.get((dirty, real))
        if fills is None:
            fills = self._fills(dirty, real)
            remember(self.fills, (dirty, real), fills)
        zeros, others = fills
        for views in zeros:
            torch._foreach_zero_(views)
        for view, value in others:
            view.fill_(value)

    def _fills(self, dirty: Box, real: Box | None) -> tuple[_Zeros, _Fills]:
        zeros: dict[torch.dtype, list[torch.Tensor]] = {}
        others: _Fills = []
        was = dict(zip(self.axes, dirty, strict=True))
        for buffer in self.buffers:
            if real is None:
                views = [buffer.view(was)]
            else:
                now = dict(zip(self.axes, real, strict=True))
                views = buffer.difference(buffer.box(was), buffer.box(now))
            if buffer.spec.policy.value == 0:
                zeros.setdefault(buffer.spec.dtype, []).extend(views)
            else:
                others.extend((view, buffer.spec.policy.value) for view in views)
        return [views for views in zeros.values() if views], others


def group_tails(buffers: Iterable[Buffer]) -> list[Tail]:
    """Group the padded buffers by what decides their real sizes: axes, absence, replays."""
    tails: dict[tuple[Any, ...], Tail] = {}
    for buffer in buffers:
        spec = buffer.spec
        if spec.policy.kind not in ("keep", "fill_once"):
            axes = tuple(dict.fromkeys(spec.axes))
            name = spec.name if spec.optional else None
            tail = tails.setdefault((axes, name, spec.written), Tail(axes, name, spec.written))
            tail.buffers.append(buffer)
    return list(tails.values())


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep ``value``; a full cache is emptied, because what it holds is cheap to make again."""
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value

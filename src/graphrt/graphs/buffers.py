"""Static input buffers: where a program reads, and how a step gets its inputs there.

A buffer is allocated once at the largest size and never moves; every key reads a prefix of it, so
all keys share the same bytes. The rows between the real and the padded size hold what the spec
declares, and staging keeps that true with as few fills as the sizes of consecutive steps allow.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import torch

from graphrt.device.base import Device
from graphrt.errors import (
    InputMismatchError,
    LibraryClosedError,
    StaticBufferError,
)
from graphrt.graphs.bufferspec import BufferSpec
from graphrt.graphs.tails import Box, Buffer, Tail, group_tails, remember

Sizes = int | Mapping[str, int]
"""Real sizes of a step: a number where the specs use one axis, else axis -> number."""

_layout = operator.attrgetter("shape", "dtype", "device")


class _Plan:
    """How the inputs of one set of names are staged at one combination of real sizes."""

    __slots__ = ("buffers", "destinations", "groups", "layout", "repeatable", "tails")

    def __init__(
        self,
        buffers: tuple[Buffer, ...],
        destinations: list[torch.Tensor],
        tails: list[tuple[Tail, Box | None, Box | None]],
    ) -> None:
        self.buffers = buffers
        self.destinations = destinations
        # (tail, its real sizes in this step, its dirty sizes after the replay).
        self.tails = tails
        # True if staging this plan twice in a row leaves nothing to fill the second time.
        self.repeatable = all(real == after for _, real, after in tails)
        # Shape, dtype and device of each source as last seen, and the copies that suit them.
        self.layout: list[tuple[Any, ...]] = []
        self.groups: list[tuple[list[torch.Tensor], list[int] | None]] = []


class BoundBuffers:
    """The buffers as one key sees them: padded views to capture, and a way to fill them.

    ``views`` is name -> padded view, always the same objects. ``sizes`` is axis -> padded size.
    """

    __slots__ = ("_owner", "_plans", "key", "sizes", "views")

    def __init__(self, owner: BufferSet, key: Hashable, sizes: Mapping[str, int]) -> None:
        self._owner = owner
        self._plans: dict[tuple[Any, tuple[str, ...]], _Plan] = {}
        self.key = key
        self.sizes = MappingProxyType(dict(sizes))
        self.views = {name: buffer.view(sizes) for name, buffer in owner._buffers.items()}

    def stage(self, n: Sizes, values: Mapping[str, torch.Tensor]) -> None:
        """Copy one step's inputs into the buffers and make the padding true.

        Shapes:   each value has its spec's shape with the *real* sizes ``n`` (at most the padded
                  ones); its dtype may be any that converts without changing kind.
        Aliasing: the values are read on the current stream. Host tensors are copied without
                  waiting: pin them, and do not rewrite them before an event of yours says so.
        Errors:   ``InputMismatchError`` before anything is written.
        """
        owner = self._owner
        names = tuple(values)
        plan = self._plans.get((owner._real_sizes(n), names))
        if plan is None:
            plan = self._plan(n, names)
        sources = list(values.values())
        try:
            layout = list(map(_layout, sources))
        except AttributeError:
            layout = []
        if layout != plan.layout or len(layout) != len(sources):
            self._regroup(plan, sources)

        if owner._settled is not plan:
            owner._settled = None  # An error between two tails leaves neither plan's sizes behind.
            for tail, real, after in plan.tails:
                dirty = tail.dirty
                if dirty != real and dirty is not None:
                    tail.clean(dirty, real)
                tail.dirty = after
            owner._settled = plan if plan.repeatable else None

        if torch.is_grad_enabled():
            # A source that requires grad would make the buffer part of its graph.
            with torch.no_grad():
                self._copy(plan, sources)
        else:
            self._copy(plan, sources)

    @property
    def specs(self) -> Mapping[str, BufferSpec]:
        """Name -> spec, of all buffers."""
        return self._owner.specs

    def padding(self, n: Sizes) -> dict[str, list[torch.Tensor]]:
        """Name -> views of what lies between the real sizes ``n`` and the padded ones."""
        self._owner._require_open()
        real = self._owner._checked_sizes(n, self.sizes, str(self.key))
        return {
            name: buffer.difference(buffer.box(self.sizes), buffer.box(real))
            for name, buffer in self._owner._buffers.items()
        }

    def _copy(self, plan: _Plan, sources: list[torch.Tensor]) -> None:
        non_blocking = self._owner._non_blocking
        for destinations, positions in plan.groups:
            chosen = sources if positions is None else [sources[i] for i in positions]
            torch._foreach_copy_(destinations, chosen, non_blocking=non_blocking)

    def _plan(self, n: Sizes, names: tuple[str, ...]) -> _Plan:
        """First sight of these real sizes with these names: check both, build the views."""
        owner = self._owner
        owner._require_open()
        real = owner._checked_sizes(n, self.sizes, str(self.key))
        self._check_names(names)
        tails: list[tuple[Tail, Box | None, Box | None]] = []
        for tail in owner._tails:
            box = tail.sizes(real) if tail.name is None or tail.name in names else None
            # The replay that follows writes every padded row.
            tails.append((tail, box, tail.sizes(self.sizes) if tail.written else box))
        buffers = tuple(owner._buffers[name] for name in names)
        plan = _Plan(buffers, [buffer.view(real) for buffer in buffers], tails)
        remember(self._plans, (owner._real_sizes(n), names), plan)
        return plan

    def _check_names(self, names: tuple[str, ...]) -> None:
        specs = self._owner.specs
        for name in names:
            if name not in specs:
                near = get_close_matches(str(name), specs, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "declare a BufferSpec for it"
                raise _mismatch(f"input {name!r}", f"one of {', '.join(specs)}", "no buffer", hint)
            if specs[name].policy.kind == "fill_once":
                raise _mismatch(
                    f"static buffer {name!r}",
                    "no value: it was filled once, at allocation",
                    "a value",
                    "leave it out, or declare another padding",
                )
        missing = [
            name
            for name, spec in specs.items()
            if name not in names and not spec.optional and spec.policy.kind != "fill_once"
        ]
        if missing:
            raise _mismatch(
                f"static buffer {missing[0]!r}",
                f"values for {', '.join(missing)}",
                f"values for {', '.join(names) or 'nothing'}",
                "give every input, or declare it optional",
            )

    def _regroup(self, plan: _Plan, sources: list[torch.Tensor]) -> None:
        """Check sources of a layout not seen last time, and group their copies."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, (buffer, view, source) in enumerate(
            zip(plan.buffers, plan.destinations, sources, strict=True)
        ):
            subject = f"static buffer {buffer.spec.name!r}"
            if not isinstance(source, torch.Tensor):
                raise _mismatch(
                    subject,
                    f"a tensor of shape {tuple(view.shape)}, {view.dtype}",
                    type(source).__name__,
                    "leave an absent optional input out" if source is None else "",
                )
            # A shape that merely broadcasts would be copied in silence.
            if source.shape != view.shape:
                raise _mismatch(
                    subject,
                    f"shape {tuple(view.shape)} from {buffer.spec.shape} at the real sizes",
                    f"shape {tuple(source.shape)}",
                )
            if not torch.can_cast(source.dtype, view.dtype):
                raise _mismatch(
                    subject,
                    f"{view.dtype}, or a dtype that converts to it without changing kind",
                    str(source.dtype),
                )
            # A destination with gaps would make CUDA copy its whole group one by one.
            kind = (view.dtype, source.dtype, source.device, view.is_contiguous())
            groups.setdefault(kind, []).append(i)
        if len(groups) == 1:
            plan.groups = [(plan.destinations, None)]
        else:
            plan.groups = [
                ([plan.destinations[i] for i in positions], positions)
                for positions in groups.values()
            ]
        plan.layout = list(map(_layout, sources))


class BufferSet:
    """Every static input of a callable, allocated once and shared by all keys.

    ``capacity``: axis -> largest padded size. ``axis_sizes(key)``: axis -> padded size of that
    key. ``device``: where the buffers live. One thread at a time uses a set.

    Errors: ``StaticBufferError`` for a duplicate name or an axis without capacity.
    """

    def __init__(
        self,
        specs: Iterable[BufferSpec],
        capacity: Mapping[str, int],
        axis_sizes: Callable[[Any], Mapping[str, int]],
        device: Device | torch.device,
    ) -> None:
        specs = tuple(specs)
        self.specs: Mapping[str, BufferSpec] = MappingProxyType({s.name: s for s in specs})
        self.axes = tuple(dict.fromkeys(axis for spec in specs for axis in spec.axes))
        self.capacity: Mapping[str, int] = MappingProxyType(dict(capacity))
        if len(self.specs) != len(specs):
            raise StaticBufferError(
                "static buffers",
                expected="one spec for each name",
                found=", ".join(spec.name for spec in specs),
                do="rename one of them",
            )
        self._require_axes(self.capacity, "capacity")
        torch_device = device if isinstance(device, torch.device) else device.torch_device
        # A buffer born in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._buffers = {spec.name: Buffer(spec, self.capacity, torch_device) for spec in specs}
        self._axis_sizes = axis_sizes
        # Only a copy *to* a GPU may run on: whoever reads a host buffer does not wait for it.
        self._non_blocking = torch_device.type != "cpu"
        self._tails = group_tails(self._buffers.values())
        self._written = [tail for tail in self._tails if tail.written]
        self._bound: dict[Hashable, BoundBuffers] = {}
        self._live: dict[Any, BoundBuffers] = {}
        self._settled: _Plan | None = None
        self._closed = False
        self._pick: Callable[[Mapping[str, int]], Any] = (
            operator.itemgetter(*self.axes) if self.axes else lambda sizes: ()
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> the whole buffer at capacity."""
        return {name: buffer.tensor for name, buffer in self._buffers.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for all buffers."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def bind(self, key: Hashable) -> BoundBuffers:
        """The buffers as ``key`` sees them. The same key gives the same object.

        Binding announces a run over the padded views, staged or not, so rows that the graph
        writes count as dirty from here on.
        """
        bound = self._bound.get(key)
        if bound is None:
            self._require_open()
            sizes = self._axis_sizes(key)
            self._require_axes(sizes, f"axis_sizes({key})")
            for axis in self.axes:
                if not 0 <= sizes[axis] <= self.capacity[axis]:
                    raise StaticBufferError(
                        f"axis {axis!r} of {key}",
                        expected=f"a padded size of 0 to {self.capacity[axis]}, the capacity",
                        found=str(sizes[axis]),
                        do="declare the largest size of every axis as its capacity",
                    )
            bound = self._bound[key] = BoundBuffers(self, key, sizes)
        if self._written:
            self._soil(bound)
        return bound

    def live(self, sizes: Sizes) -> BoundBuffers:
        """The buffers at exactly these real sizes, unpadded: what an eager step reads.

        Its ``stage`` takes the same sizes and writes the same storage as that of every key.
        """
        real = self._real_sizes(sizes)
        live = self._live.get(real)
        if live is None:
            self._require_open()
            checked = self._checked_sizes(sizes, self.capacity, "an eager step")
            live = BoundBuffers(self, "an eager step", checked)
            remember(self._live, real, live)
        if self._written:
            self._soil(live)
        return live

    def close(self) -> None:
        """Drop the buffers. Views that callers hold keep their bytes. Idempotent."""
        self._closed = True
        for bound in (*self._bound.values(), *self._live.values()):
            bound._plans.clear()
            bound.views.clear()
        self._bound.clear()
        self._live.clear()
        self._buffers.clear()
        self._tails.clear()
        self._written.clear()
        self._settled = None

    def _soil(self, bound: BoundBuffers) -> None:
        """The callable is about to write every row of its written buffers at these sizes."""
        self._settled = None
        for tail in self._written:
            sizes = tail.sizes(bound.sizes)
            tail.dirty = sizes if tail.dirty is None else tuple(map(max, tail.dirty, sizes))

    def _real_sizes(self, n: Sizes) -> Any:
        """``n`` as a dictionary key: a number for one axis, else a tuple in axis order."""
        if isinstance(n, int) and len(self.axes) < 2:
            return n
        axes = f"a size for each of {', '.join(self.axes)}"
        if isinstance(n, int):
            raise _mismatch("real sizes", axes, f"the number {n}", "pass a dict axis -> real size")
        try:
            return self._pick(n)
        except KeyError as missing:
            raise _mismatch("real sizes", axes, f"none for {missing}") from None
        except (TypeError, IndexError):
            # No mapping: a NumPy integer is as good as an int, anything else is a mistake.
            return self._real_sizes(_whole_number("real sizes", n))

    def _checked_sizes(self, n: Sizes, limits: Mapping[str, int], of: str) -> dict[str, int]:
        given = n if isinstance(n, Mapping) else dict.fromkeys(self.axes, n)
        real = {axis: _whole_number(f"axis {axis!r}", given[axis]) for axis in self.axes}
        for axis, size in real.items():
            if not 0 <= size <= limits[axis]:
                raise InputMismatchError(
                    f"axis {axis!r} of {of}",
                    expected=f"a real size of 0 to {limits[axis]}",
                    found=str(size),
                    do="stage through the key that the dispatcher chose for this size",
                )
        return real

    def _require_axes(self, sizes: Mapping[str, int], what: str) -> None:
        missing = [axis for axis in self.axes if axis not in sizes]
        if missing:
            raise StaticBufferError(
                what,
                expected=f"a size for each of {', '.join(self.axes)}",
                found=f"none for {', '.join(missing)}",
                do="name every axis that a spec uses",
            )

    def _require_open(self) -> None:
        if self._closed:
            raise LibraryClosedError(
                "static buffers",
                expected="an open library",
                found="buffers that were dropped with it",
                do="make a new BufferSet",
            )


def _whole_number(subject: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _mismatch(subject, "a whole number of rows", repr(value)) from None


def _mismatch(subject: str, expected: str, found: str, do: str = "") -> InputMismatchError:
    return InputMismatchError(
        subject, expected=expected, found=found, do=do or "stage what the spec declares"
    )

"""Static input buffers: where a program reads, and how a step gets its inputs there.

A buffer is allocated once at the largest size and never moves; every key reads a prefix of it, so
all keys share the same bytes. The rows between the real and the padded size hold what the spec
declares. Staging tracks which padded rows hold stale data and refills only those.
"""

from __future__ import annotations

import operator
import sys
from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from graphrt.config.checked import check_callable, check_hashable, check_type, checked_list
from graphrt.device.base import Device
from graphrt.device.torch_modes import set_grad_enabled
from graphrt.errors import InputMismatchError, LibraryClosedError, StaticBufferError, shown
from graphrt.graphs.bufferspec import Box, Buffer, BufferSpec, PaddingGroup, group_padding, remember

Sizes = int | Mapping[str, int]
"""Real sizes of a step: a number where the specs use one axis, else axis -> number."""

_shape = operator.attrgetter("shape")
# Not the device itself, which is slower to read and to compare: a source that moved to another GPU
# is copied one by one, and as correctly.
_layout = operator.attrgetter("shape", "dtype", "is_cpu")
_start_of = torch.Tensor.data_ptr


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
        """Copy one step's inputs into the buffers and refill padded rows that hold stale data.

        Shapes:   each value has its spec's shape with the *real* sizes ``n`` (at most the padded
                  ones), or with the padded size along an axis that the caller has padded. Along
                  dimensions of a fixed size it may be narrower, see ``BufferSpec``. Its dtype may
                  be any that converts without changing kind.
        Aliasing: the values are read on the current stream. Host tensors are copied without
                  waiting: pin them, and do not rewrite them before an event of yours says so.
                  Values that lie in these buffers are copied first.
        Errors:   ``InputMismatchError`` before anything is written.
        """
        bounds = self._owner._bounds
        try:
            inside = [bisect(bounds, start) % 2 for start in map(_start_of, values.values())]
        except (AttributeError, TypeError, ValueError, RuntimeError):  # None, or without memory.
            inside = []
        if 1 in inside:  # To refill padding, or to copy other rows, would overwrite them unread.
            pairs = zip(values.items(), inside, strict=True)
            values = {name: value.clone() if is_in else value for (name, value), is_in in pairs}
        if not torch.is_grad_enabled():
            self.stage_without_grad(n, values)
            return
        # A source that requires grad would make the buffer part of its graph.
        set_grad_enabled(False)
        try:
            self.stage_without_grad(n, values)
        finally:
            set_grad_enabled(True)

    def stage_without_grad(self, n: Sizes, values: Mapping[str, torch.Tensor]) -> None:
        """As ``stage``, for callers that have gradients off: a step asks for that once."""
        owner = self._owner
        try:
            sources = list(values.values())  # First, because an iterator may not end.
            names = tuple(values)
            plan = self._plans[n if type(n) is int else owner._pick(n), names]
        except (LookupError, TypeError, AttributeError, RuntimeError):
            _require_mapping(values)
            sources, names = list(values.values()), tuple(values)
            plan = self._find_plan(n, names)
        try:
            layout = list(map(_layout, sources))
        except (AttributeError, RuntimeError):  # No tensor, or a nested one.
            plan.group_copies(sources)  # Says which.
            layout = []
        if layout != plan.layout:
            plan = self._fit(plan, n, names, sources)

        if owner._clean_for is not plan:
            owner._clean_for = None  # An error between two groups leaves neither plan's sizes.
            for group, real, after in plan.padding:
                dirty = group.dirty
                if dirty != real and dirty is not None:
                    group.refill(dirty, real)
                group.dirty = after
            for view, pad in plan.rests:
                view.fill_(pad)
            owner._clean_for = plan if plan.is_repeatable else None

        non_blocking = owner._non_blocking
        for destinations, pick in plan.groups:
            chosen = sources if pick is None else pick(sources)
            try:
                torch._foreach_copy_(destinations, chosen, non_blocking=non_blocking)
            except RuntimeError:
                owner._clean_for = None
                plan.group_copies(sources)  # Says what is wrong with a source, a sparse one say.
                raise

    @property
    def specs(self) -> Mapping[str, BufferSpec]:
        """Name -> spec, of all buffers."""
        return self._owner.specs

    def sizes_of(self, values: Mapping[str, torch.Tensor], n: Sizes) -> dict[str, int]:
        """The sizes of ``values``: the real ones ``n``, but the padded one along each axis that
        the caller has padded in all of them."""
        _require_mapping(values)
        found: dict[str, set[int]] = {}
        for name, value in values.items():
            declared = self.specs[name].shape if name in self.specs else ()
            for axis, size in zip(declared, getattr(value, "shape", ()), strict=False):
                if isinstance(axis, str):
                    found.setdefault(axis, set()).add(size)
        return {
            axis: self.sizes[axis] if found.get(axis) == {self.sizes[axis]} else real
            for axis, real in self._owner._checked_sizes(n, self.sizes, str(self.key)).items()
        }

    def padding(self, n: Sizes) -> dict[str, list[torch.Tensor]]:
        """Name -> views of what lies between the real sizes ``n`` and the padded ones."""
        self._owner._require_open()
        real = self._owner._checked_sizes(n, self.sizes, str(self.key))
        return {
            name: buffer.difference(buffer.box(self.sizes), buffer.box(real))
            for name, buffer in self._owner._buffers.items()
        }

    def real_views(self, n: Sizes) -> dict[str, torch.Tensor]:
        """Name -> view of the first ``n`` rows, the real ones."""
        real = self._owner._checked_sizes(n, self.sizes, str(self.key))
        return {name: buffer.view(real) for name, buffer in self._owner._buffers.items()}

    def _find_plan(self, n: Sizes, names: tuple[str, ...]) -> _Plan:
        """Check real sizes and names seen for the first time, and build the views for them."""
        owner = self._owner
        owner._require_open()
        place = owner._real_sizes(n), names
        plan = self._plans.get(place)
        if plan is None:
            real = owner._checked_sizes(n, self.sizes, str(self.key))
            owner.require_inputs(names)
            plan = self._make_plan(real, names)
            remember(self._plans, place, plan)
        return plan

    def _make_plan(self, real: Mapping[str, int], names: tuple[str, ...]) -> _Plan:
        owner = self._owner
        padding: list[tuple[PaddingGroup, Box | None, Box | None]] = []
        for group in owner._padding:
            box = group.box(real) if group.name is None or group.name in names else None
            # The replay that follows writes every padded row.
            padding.append((group, box, group.box(self.sizes) if group.written else box))
        return _Plan([owner._buffers[name] for name in names], real, padding)

    def _fit(
        self, plan: _Plan, n: Sizes, names: tuple[str, ...], sources: list[torch.Tensor]
    ) -> _Plan:
        """Check sources of a layout not seen last time; return the plan that copies them."""
        sizes = self.sizes_of(dict(zip(names, sources, strict=True)), n)
        if sizes == plan.sizes:
            self._owner._clean_for = None  # What narrower sources leave has to be filled.
            plan.group_copies(sources)
            return plan
        plan = self._make_plan(sizes, names)
        plan.group_copies(sources)
        remember(self._plans, (self._owner._real_sizes(n), names), plan)
        return plan


class BufferSet:
    """Every static input of a callable, allocated once and shared by all keys.

    ``capacity``: axis -> largest padded size. ``axis_sizes(key)``: axis -> padded size of that
    key. ``device``: where the buffers are. One thread at a time uses a set.

    Errors: ``StaticBufferError`` for a duplicate name or an axis without capacity; ``ConfigError``
            for arguments of another kind.
    """

    def __init__(
        self,
        specs: Iterable[BufferSpec],
        capacity: Mapping[str, int],
        axis_sizes: Callable[[Any], Mapping[str, int]],
        device: Device | torch.device,
    ) -> None:
        specs = checked_list("specs", specs, BufferSpec, "a list of BufferSpecs")
        check_type(
            "capacity", capacity, Mapping, "the largest sizes by axis, such as {'tokens': 8}"
        )
        check_callable("axis_sizes", axis_sizes)
        torch_device: Any = getattr(device, "torch_device", device)
        expected, do = "a torch.device, or a device of graphrt", 'pass torch.device("cpu")'
        check_type("device", torch_device, torch.device, expected, do)
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
        # A buffer born in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._buffers = {spec.name: Buffer(spec, self.capacity, torch_device) for spec in specs}
        self._axis_sizes = axis_sizes
        # Only a copy *to* a GPU may run on: whoever reads a host buffer does not wait for it.
        self._non_blocking = torch_device.type != "cpu"
        self._padding = group_padding(self._buffers.values())
        storages = [buffer.tensor.untyped_storage() for buffer in self._buffers.values()]
        ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages)
        self._bounds = [bound for begin, end in ranges if begin < end for bound in (begin, end)]
        """Where the memory of each buffer begins and ends, in order."""
        self._written = [group for group in self._padding if group.written]
        self._bound: dict[Hashable, BoundBuffers] = {}
        self._unpadded: dict[Any, BoundBuffers] = {}
        # Names and shapes of values -> the real sizes that they have.
        self._sizes_of_shapes: dict[tuple[Any, ...], dict[str, int]] = {}
        # The plan that may be staged now without refilling anything.
        self._clean_for: _Plan | None = None
        self._closed = False
        self._pick: Callable[[Any], Any] = (
            operator.itemgetter(*self.axes) if self.axes else lambda sizes: ()
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> the whole buffer at capacity."""
        return {name: buffer.tensor for name, buffer in self._buffers.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def bind(self, key: Hashable) -> BoundBuffers:
        """The buffers at the padded sizes of ``key``; one key always gives the same object.

        Binding announces a run over the padded views, staged or not, so rows that the graph
        writes count as dirty from here on.
        """
        try:
            bound = self._bound.get(key)
        except TypeError:
            check_hashable("key of static buffers", key)
            raise
        if bound is None:
            self._require_open()
            sizes = self._axis_sizes(key)
            check_type(f"axis_sizes({shown(key)})", sizes, Mapping, "a mapping of sizes by axis")
            self._require_axes(sizes, f"axis_sizes({key})")
            for axis in self.axes:
                size = whole_number(f"axis {axis!r} of {key}", sizes[axis])
                if not 0 <= size <= self.capacity[axis]:
                    raise StaticBufferError(
                        f"axis {axis!r} of {key}",
                        expected=f"a padded size of 0 to {self.capacity[axis]}, the capacity",
                        found=shown(size),
                        do="declare the largest size of every axis as its capacity",
                    )
            bound = self._bound[key] = BoundBuffers(self, key, sizes)
        return self._mark_dirty(bound)

    def unpadded(self, sizes: Sizes) -> BoundBuffers:
        """The buffers at exactly these real sizes, unpadded: what an eager step reads.

        Its ``stage`` takes the same sizes and writes the same storage as that of every key.
        """
        real = self._real_sizes(sizes)
        unpadded = self._unpadded.get(real)
        if unpadded is None:
            self._require_open()
            checked = self._checked_sizes(sizes, self.capacity, "an eager step")
            unpadded = BoundBuffers(self, "an eager step", checked)
            remember(self._unpadded, real, unpadded)
        return self._mark_dirty(unpadded)

    def real_sizes(self, values: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Read the real size of every axis off the shapes of ``values``.

        Inputs may be absent, as long as each axis is in the shape of one that is given.
        Errors: ``InputMismatchError`` for an unknown name, for a shape that is not its spec's, for
                two inputs that disagree about an axis, and for an axis of no given input.
        """
        try:
            shapes = tuple(map(_shape, values.values()))  # First, because iterators may not end.
            place = (*values, *shapes)
            return self._sizes_of_shapes[place].copy()
        except (KeyError, AttributeError, TypeError, RuntimeError):
            # A tensor has values() too, which raises the last of these.
            sizes = self._read_sizes(values)
            place = (*values, *map(_shape, values.values()))
        remember(self._sizes_of_shapes, place, sizes)
        return sizes.copy()

    def close(self) -> None:
        """Drop the buffers. Views that callers hold keep their bytes. Idempotent."""
        self._closed = True
        for bound in (*self._bound.values(), *self._unpadded.values()):
            bound._plans.clear()
            bound.views.clear()
        self._bound.clear()
        self._unpadded.clear()
        self._buffers.clear()
        self._padding.clear()
        self._written.clear()
        self._clean_for = None

    def _mark_dirty(self, bound: BoundBuffers) -> BoundBuffers:
        """The callable is about to write every row of its written buffers at these sizes."""
        for group in self._written:
            self._clean_for = None
            group.mark_dirty(bound.sizes)
        return bound

    def _read_sizes(self, values: Mapping[str, torch.Tensor]) -> dict[str, int]:
        _require_mapping(values)
        self._require_known(values)
        read: dict[str, tuple[int, str]] = {}  # axis -> its size, and where that was read
        for name, value in values.items():
            declared = self.specs[name].shape
            require_tensor(f"input {name!r}", value, f"a tensor of shape {declared}")
            if value.dim() != len(declared):
                raise _mismatch(
                    f"input {name!r}",
                    f"{len(declared)} dimensions, {declared}",
                    f"{value.dim()} dimensions, {tuple(value.shape)}",
                )
            for dim, (size, found) in enumerate(zip(declared, value.shape, strict=True)):
                place = f"input {name!r}, dimension {dim}"
                if isinstance(size, int):
                    if found > size or (found < size and not self.specs[name].pads_narrower):
                        raise _mismatch(place, f"{size}, from its spec {declared}", str(found))
                    continue
                expected, source = read.setdefault(size, (found, place))
                if found != expected:
                    raise _mismatch(
                        place,
                        f"axis {size!r} of size {expected}, as in {source}",
                        str(found),
                        "give inputs of one batch, each of its real size",
                    )
        for axis in self.axes:
            if axis not in read:
                names = [name for name, spec in self.specs.items() if axis in spec.axes]
                raise _mismatch(
                    f"axis {axis!r}",
                    f"a value for {' or '.join(names)}, whose shape has this axis",
                    f"values for {', '.join(values) or 'nothing'}",
                    "give one of these inputs, or say the real sizes",
                )
        return {axis: read[axis][0] for axis in self.axes}

    def _real_sizes(self, n: Sizes) -> Any:
        """``n`` as a dictionary key: a number for one axis, else a tuple in axis order."""
        if isinstance(n, int) and len(self.axes) < 2:
            return n
        axes = f"a size for each of {', '.join(self.axes)}"
        if isinstance(n, int):
            raise _mismatch("real sizes", axes, f"the number {n}", "pass a dict axis -> real size")
        try:
            real = self._pick(n)
            hash(real)
        except KeyError as missing:
            raise _mismatch("real sizes", axes, f"none for {missing}") from None
        except (TypeError, IndexError):
            given: Any = n
            if isinstance(given, Mapping):  # Of a size that cannot be hashed.
                return tuple(self._checked_sizes(given, self.capacity, "a step").values())
            # A NumPy integer is as good as an int, anything else is a mistake.
            return self._real_sizes(whole_number("real sizes", given))
        return real

    def _checked_sizes(self, n: Sizes, limits: Mapping[str, int], of: str) -> dict[str, int]:
        given = n if isinstance(n, Mapping) else dict.fromkeys(self.axes, n)
        self._require_axes(given, f"real sizes of {of}")
        real = {axis: whole_number(f"axis {axis!r}", given[axis]) for axis in self.axes}
        for axis, size in real.items():
            if not 0 <= size <= limits[axis]:
                raise InputMismatchError(
                    f"axis {axis!r} of {of}",
                    expected=f"a real size of 0 to {limits[axis]}",
                    found=shown(size),
                    do="stage through the key that the dispatcher chose for this size",
                )
        return real

    def require_inputs(self, names: tuple[str, ...]) -> None:
        """Refuse names that no buffer has, and a step without an input that is not optional.

        Errors: ``InputMismatchError``.
        """
        self._require_known(names)
        missing = [
            name
            for name, spec in self.specs.items()
            if name not in names and not spec.optional and spec.policy.kind != "fill_once"
        ]
        if missing:
            raise _mismatch(
                f"static buffer {missing[0]!r}",
                f"values for {', '.join(missing)}",
                f"values for {', '.join(names) or 'nothing'}",
                "give every input, or declare it optional",
            )

    def _require_known(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.specs:
                near = get_close_matches(name, self.specs, n=1) if isinstance(name, str) else []
                hint = f"did you mean {near[0]!r}?" if near else "declare a BufferSpec for it"
                expected = f"one of {', '.join(self.specs)}"
                raise _mismatch(f"input {shown(name)}", expected, "no buffer", hint)
            if self.specs[name].policy.kind == "fill_once":
                raise _mismatch(
                    f"static buffer {name!r}",
                    "no value: it was filled once, at allocation",
                    "a value",
                    "leave it out, or declare another padding",
                )

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


@dataclass(eq=False)
class _Plan:
    """How the inputs of one set of names are staged at one combination of real sizes."""

    buffers: list[Buffer]
    sizes: Mapping[str, int]
    padding: list[tuple[PaddingGroup, Box | None, Box | None]]
    """(group, its real sizes in this step, its dirty sizes after the replay)."""

    def __post_init__(self) -> None:
        self.views = [buffer.view(self.sizes) for buffer in self.buffers]
        # True if staging this plan twice in a row leaves nothing to fill the second time.
        self.is_repeatable = all(real == after for _, real, after in self.padding)
        # What ``_layout`` read off each source last time, and the copies that suit it.
        self.layout: list[tuple[Any, ...]] | None = None
        self.groups: list[tuple[list[torch.Tensor], operator.itemgetter[Any] | None]] = []
        # What narrower sources leave of the real rows, and what it holds.
        self.rests: list[tuple[torch.Tensor, float | int | bool]] = []

    def group_copies(self, sources: list[torch.Tensor]) -> None:
        """Check sources of a layout not seen last time, and group their copies."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        destinations: list[torch.Tensor] = []
        rests: list[tuple[torch.Tensor, float | int | bool]] = []
        for i, (buffer, view, source) in enumerate(
            zip(self.buffers, self.views, sources, strict=True)
        ):
            subject = f"static buffer {buffer.spec.name!r}"
            require_tensor(subject, source, f"a tensor of shape {tuple(view.shape)}, {view.dtype}")
            # A shape that merely broadcasts would be copied in silence.
            if source.shape != view.shape:
                if not buffer.spec.is_narrower(source.shape, view.shape):
                    raise _mismatch(
                        subject,
                        f"shape {tuple(view.shape)} from {buffer.spec.shape} at the real sizes",
                        f"shape {tuple(source.shape)}",
                    )
                if buffer.spec.policy.kind != "keep":
                    for rest in buffer.difference(tuple(view.shape), tuple(source.shape)):
                        rests.append((rest, buffer.spec.policy.value))
                view = view[tuple(slice(0, size) for size in source.shape)]
            destinations.append(view)
            if not torch.can_cast(source.dtype, view.dtype):
                raise _mismatch(
                    subject,
                    f"{view.dtype}, or a dtype that converts to it without changing kind",
                    str(source.dtype),
                )
            # A strided target would make CUDA copy its whole group one by one.
            kind = (view.dtype, source.dtype, source.device, view.is_contiguous())
            groups.setdefault(kind, []).append(i)
        if len(groups) == 1:
            self.groups = [(destinations, None)]
        else:
            self.groups = [
                ([destinations[i] for i in positions], _pick_items(positions))
                for positions in groups.values()
            ]
        self.rests = rests
        self.layout = list(map(_layout, sources))


def is_staging() -> bool:
    """True in what ``stage`` calls: asked by who observes writes, so that no step notes it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not BoundBuffers.stage_without_grad.__code__:
        frame = frame.f_back
    return frame is not None


def _pick_items(positions: list[int]) -> operator.itemgetter[Any]:
    # Of one position an itemgetter gives the item itself, of a slice a list.
    first = positions[0]
    return operator.itemgetter(*(positions if len(positions) > 1 else [slice(first, first + 1)]))


def _require_mapping(values: object) -> None:
    if not isinstance(values, Mapping):
        raise _mismatch("values", "tensors by input name", type(values).__name__, "pass a dict")


def require_tensor(subject: str, value: Any, expected: str) -> None:
    """Errors: ``InputMismatchError`` for what is no tensor, and one without strides or data."""
    if not isinstance(value, torch.Tensor):
        do = "leave an absent optional input out" if value is None else ""
        raise _mismatch(subject, expected, type(value).__name__, do)
    is_dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
    if not is_dense or value.is_meta or is_lazy(value):
        nested = "a nested tensor, " * value.is_nested + "an uninitialized one, " * is_lazy(value)
        found = f"{nested}{value.layout} on {value.device}, {value.dtype}"
        do = "pad it (torch.nested.to_padded_tensor), with a mask of what is real as another input"
        expected = "a dense tensor that has data"
        raise _mismatch(subject, expected, found, do if value.is_nested else "")


def whole_number(subject: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _mismatch(subject, "a whole number of rows", shown(value)) from None


def _mismatch(subject: str, expected: str, found: str, do: str = "") -> InputMismatchError:
    return InputMismatchError(
        subject, expected=expected, found=found, do=do or "pass what its BufferSpec declares"
    )

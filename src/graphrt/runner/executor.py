"""The ways to run a callable: as the replay of a ready graph, or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.device.torch_modes import is_any_autocast_enabled
from graphrt.errors import InputMismatchError, UnkeyedValueError
from graphrt.externals import autocast_dtype, autocast_error
from graphrt.graphs import (
    BoundBuffers,
    BufferSet,
    BufferSpec,
    CaptureOptions,
    Entry,
    GraphLibrary,
    OutputSpec,
    Program,
    StaleCheck,
)
from graphrt.graphs.buffers import require_tensor
from graphrt.runner.examples import (
    Example,
    Examples,
    Sizes,
    Values,
    as_example,
    examples_like,
    make_example,
    of_example,
)
from graphrt.runner.keys import (
    KeySpace,
    batch_key,
    check_axes,
    check_parameters,
    check_specs,
    check_written_rows,
    make_key,
)
from graphrt.ubatch import slices_of_key
from graphrt.values import (
    kept_host_value,
    map_leaves,
    map_tensors,
    own_copy,
    same_host_value,
    storage_start,
    tensors_of,
    walk,
)

Inputs = Sequence[BufferSpec] | Callable[[BatchDescriptor], Sequence[BufferSpec]]


class Call(NamedTuple):
    """One call: what is run, and how large it really is."""

    values: Values
    """By input name."""
    sizes: Sizes
    """The real sizes, which outputs are cut to."""
    staged: Sizes
    """The sizes of ``values``: other than ``sizes`` where the caller has padded them."""
    step_info: Any = None
    """What ``Resource.prepare`` and the forward context get."""
    ubatch_slices: Sequence[Any] | None = None
    """Where an eager run is cut into micro-batches."""


RunOtherwise: TypeAlias = Callable[["ReadyGraph", Call], Any]
"""Runs a call for which resources have set host values that no comparison has seen."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGraph:
    """What the replay of one key needs, looked up once.

    No tuple: a step reads seven of its attributes, and those of a tuple cost several times as much.
    """

    mode: RuntimeMode
    key: BatchDescriptor
    entry: Entry
    """Where runs are counted."""
    bound: BoundBuffers
    program: Program
    unpad: Callable[[Sizes], Any]
    has_eager: bool
    check: Callable[[Any], RunOtherwise | None] | None
    """Called with ``step_info`` before each replay, where there is something to compare: every
    address (``StaleCheck.POINTER``), the autocast dtype, what the capture read of ``step_info``,
    what resources were seen to replace, or set. Returns what to call where only that can tell."""

    def lacks_check(self) -> bool:
        """True if it was made before there was something to compare."""
        return self.check is None and bool(self.program.suspected)


@dataclass(kw_only=True, eq=False)
class Executor:
    """Static buffers, outputs and resources of ``fn``. Each run ends the outputs of the one before.

    ``inputs``: specs, or ``key -> specs``. Where an axis stands behind dimension 0, or specs depend
    on the key, each key gets contiguous buffers of its own.
    ``written_rows``: tensor -> name of the input that indexes the rows of it that a run writes.
    ``declared``: how outputs are cut.
    """

    fn: Callable[..., Any]
    library: GraphLibrary
    inputs: InitVar[Inputs]
    declared: InitVar[OutputSpec]
    space: KeySpace
    examples: Examples | None
    options: CaptureOptions
    written_rows: Mapping[torch.Tensor, str]
    is_padded: Callable[[Sizes, Sizes], bool] = lambda real, found: False
    """Whether a batch of ``real`` sizes, padded to a key, is as large as ``found``."""
    run_otherwise: RunOtherwise | None = None
    """None: such a call is replayed."""
    num_tokens_across_ranks: tuple[int, ...] | None = None
    """What the forward context of an eager run says: each rank's own size."""

    def __post_init__(self, inputs: Inputs, declared: OutputSpec) -> None:
        # A copy: outputs of two runners that were given one spec must not expire each other's.
        self.outputs = OutputSpec(declared.axes, declared.policy, chosen_from=declared.chosen_from)
        check_axes(declared, self.space.capacity)
        self._replaying, self._layers = self.library.replaying, self.options.layers
        self.has_step_info = False
        """True once an example came with ``step_info``."""
        self.has_constant_info = False
        self._constant_info: dict[BatchDescriptor, Any] = {}
        """By key: what the captured example said that every step says."""
        self.captured_with: dict[BatchDescriptor, Any] = {}
        """By key: copies of the example that was captured, until its program is checked."""
        self._resources = tuple(self.options.prepared)
        self._device_type = self.library.device.torch_device.type
        # Eager outputs have their real size where it is an axis; other lengths are cut off.
        lengths = [length for dims in declared.axes.values() for length in dims.values()]
        self._hands_eager_out = declared.policy == "view" and not any(map(callable, lengths))
        self._expire = self.outputs.expire if declared.policy == "checked_view" else None
        self._of_key: dict[BatchDescriptor, BufferSet] = {}
        self._inputs = inputs
        self.shared: BufferSet | None = None
        """What all keys have views of; None where each has buffers of its own."""
        if callable(inputs):
            return  # The first use asks for the specs of a key.
        check_written_rows(self.written_rows, inputs)
        # A prefix along an inner axis is not contiguous.
        if not any(axis in spec.shape[1:] for spec in inputs for axis in spec.axes):
            sizes_of, device = self.space.axis_sizes, self.library.device
            self.shared = BufferSet(inputs, self.space.capacity, sizes_of, device)
        self._reader  # noqa: B018  Refuses what no buffers can be made of.
        check_parameters(self.fn, inputs)

    @cached_property
    def _reader(self) -> BufferSet:
        """Reads real sizes off values. It has no bytes where each key has buffers of its own."""
        if self.shared is not None:
            return self.shared
        specs = self._specs(make_key(self.space.capacity))
        none = dict.fromkeys(self.space.capacity, 0)
        return BufferSet(specs, none, lambda _: none, self.library.device)

    def register(self) -> None:
        """Let graphs of the library write the shared buffers that are declared ``written``."""
        if self.shared is not None:
            self.library.add_buffers(self.shared)

    def real_sizes(self, values: Values) -> dict[str, int]:
        """The real size of every axis, read off ``values``. Errors: ``InputMismatchError``."""
        return self._reader.real_sizes(values)

    def use_examples_like(self, like: Example | Values) -> None:
        """Capture and check with the rows of one real batch from here on.

        Errors: ``InputMismatchError`` for what is no batch of these inputs.
        """
        self.captured_with.clear()
        example, buffers = as_example(like), self._reader
        buffers.require_inputs(tuple(example.values))
        for name, value in example.values.items():
            require_tensor(f"like: input {name!r}", value, "a tensor")
        shapes = {name: spec.shape for name, spec in buffers.specs.items()}
        # Seeds 0 and 1 take no rows beyond these of a batch that is larger than every key.
        sizes = {
            axis: min(size, self.space.capacity[axis] + 1)
            for axis, size in buffers.real_sizes(example.values).items()
        }
        self.examples = examples_like(example, sizes, shapes)

    def _specs(self, key: BatchDescriptor) -> Sequence[BufferSpec]:
        inputs = self._inputs
        return check_specs(inputs(key)) if callable(inputs) else inputs

    def bind(self, key: BatchDescriptor) -> BoundBuffers:
        """The padded views of ``key``."""
        if self.shared is not None:
            return self.shared.bind(key)
        buffers = self._of_key.get(key)
        if buffers is None:
            sizes, specs = self.space.axis_sizes(key), self._specs(key)
            check_written_rows(self.written_rows, specs)
            buffers = BufferSet(specs, sizes, lambda _: sizes, self.library.device)
            self._of_key[key] = buffers
            self.library.add_buffers(buffers)
        return buffers.bind(key)

    def make_ready(self, entry: Entry) -> ReadyGraph:
        """Look up what replays of a captured key need."""
        program = entry.program
        assert program is not None, "only what was captured is made ready"
        bound = self.bind(entry.key)
        if program.state == "captured":
            program.check((), bound.views)  # The first check lets it replay.
        cut = self.outputs.bind(program, bound.sizes).unpad
        unpad: Callable[[Sizes], Any] = cut
        is_in = _is_in(bound)
        if self.outputs.policy != "clone" and any(map(is_in, tensors_of(program.outputs))):
            # Rows of it may be values of the next run, and staging would overwrite them before it
            # reads them.
            def unpad(sizes: Sizes) -> Any:
                return map_tensors(cut(sizes), lambda one: one.clone() if is_in(one) else one)

        check = self._check_of(program, bound)
        mode, key, has_eager = entry.mode, entry.key, program.has_eager
        return ReadyGraph(mode, key, entry, bound, program, unpad, has_eager, check)

    def _check_of(
        self, program: Program, bound: BoundBuffers
    ) -> Callable[[Any], RunOtherwise | None] | None:
        """What is compared before each replay beside what costs nothing; None if that is all."""
        is_pointer = self.library.stale_check is StaleCheck.POINTER
        never_informed = program.reads_step_info and not self.has_step_info
        is_constant = program.reads_step_info and program.key in self._constant_info
        has_set = self.run_otherwise is not None and bool(program.set_by_resources)
        is_suspect = bool(program.suspected) or has_set
        if not (is_pointer or never_informed or is_constant or program.autocast or is_suspect):
            return None
        constant = self._constant_info.get(program.key)

        def check(step_info: Any) -> RunOtherwise | None:
            may_be_other = program.autocast is not None or is_any_autocast_enabled()
            if may_be_other and autocast_dtype(self._device_type) is not program.autocast:
                raise autocast_error(program.key, program.autocast)
            if never_informed and step_info is not None:
                raise UnkeyedValueError(
                    f"{program.title}: step_info",
                    expected="None, as in every example: the callable read it outside eager "
                    "segments, so the graph holds what it did without",
                    found="a value",
                    do="give examples a step_info that differs by seed, or read it in an eager "
                    "segment",
                )
            if is_constant and not _is_same_info(constant, step_info):
                raise UnkeyedValueError(
                    f"{program.title}: step_info",
                    expected=f"{constant!r}, as in the example, because its constant_info=True "
                    "says that every step has the same, and the graph holds it",
                    found=repr(step_info),
                    do="vary it with the seed of the example, and read in an eager segment what "
                    "changes from step to step",
                )
            if program.suspected:
                self.library.require_in_place(program)
            if is_pointer:
                program.check((), bound.views)
            return self.run_otherwise if program.set_by_resources.others() else None

        return check

    def replay(
        self, ready: ReadyGraph, values: Values, sizes: Sizes, staged: Sizes, step_info: Any
    ) -> Any:
        """Stage, prepare, replay, unpad: the arguments are those of a ``Call``. Under no_grad."""
        if self._replaying.title is not None:
            raise self._replaying.refusal(ready.program.title)
        ready.bound.stage_without_grad(staged, values)
        expire, program, unpad = self._expire, ready.program, ready.unpad
        for resource in self._resources:
            resource.prepare(ready.key, step_info)
        check = ready.check
        if check is not None:
            run_otherwise = check(step_info)
            if run_otherwise is not None:
                return run_otherwise(ready, Call(values, sizes, staged, step_info))
        elif is_any_autocast_enabled() and torch.is_autocast_enabled(self._device_type):
            raise autocast_error(ready.key, None)
        if expire is not None:  # Now, because values may be outputs of the run before.
            expire()
        if ready.has_eager:
            with ForwardContext(ready.mode, ready.key, step_info, None, self._layers):
                program.replay()
        else:
            program.replay()
        return unpad(sizes)

    def eager(self, key: BatchDescriptor, call: Call) -> Any:
        """Run ``fn`` itself, on tensors that no other run gets: it may keep and return them.

        ``key``: the batch itself; of an input that depends on the key, the spec for these sizes.
        """
        values, _, staged, step_info, slices = call
        try:
            views = self.own_views(key, staged, values)
        except InputMismatchError:
            padded = self._sizes_padded_to(values, staged)
            if padded is None or slices is not None:  # Slices are of the real size.
                raise
            key, staged = batch_key(key, padded), padded
            views = self.own_views(key, staged, values)
        if self._expire is not None:
            self._expire()
        self.prepare(key, step_info)
        return self.run_eagerly(key, views, call._replace(staged=staged))

    def eager_as_padded(self, ready: ReadyGraph, call: Call) -> Any:
        """Run ``fn`` itself on what is staged and prepared for a replay, at the sizes of its graph.

        So it meets other ranks, which replay, in collectives of the same sizes in the same order.
        """
        key = ready.key
        if self._expire is not None:
            self._expire()
        with torch.inference_mode(False):  # Born in it, they could not be written outside it.
            views = {name: view.clone() for name, view in ready.bound.views.items()}
        slices = slices_of_key(key) if key.num_ubatches > 1 else None
        context = self.context(RuntimeMode.NONE, key, call.step_info, slices)
        with torch.no_grad(), context:
            return self.outputs.bind(self.fn(**views)).unpad(call.sizes)

    def own_views(self, key: BatchDescriptor, sizes: Sizes, values: Values) -> Values:
        """``values`` as ``fn`` takes them, at exactly these sizes, in memory that is not reused."""
        capacity = self.space.capacity
        fits = all(sizes.get(axis, 0) <= size for axis, size in capacity.items())
        if self.shared is None or not fits:
            bound = self.unpadded(key, sizes)
            bound.stage(sizes, values)
            return bound.views
        # To stage in the shared buffers and copy takes a tenth of the time of new buffers.
        bound = self.shared.unpadded(sizes)
        bound.stage(sizes, values)
        with torch.inference_mode(False):  # Born in it, they could not be written outside it.
            return {name: view.clone() for name, view in bound.views.items()}

    def run_eagerly(self, key: BatchDescriptor, views: Values, call: Call) -> Any:
        """Run ``fn`` on ``views`` of a call that is staged."""
        _, sizes, staged, info, slices = call
        across, layers = self.num_tokens_across_ranks, self._layers
        with (
            torch.no_grad(),
            ForwardContext(RuntimeMode.NONE, key, info, None, layers, across, slices),
        ):
            outputs = self.fn(**views)
        if not self._hands_eager_out or staged is not sizes:
            # Of a padded call those alone: an axis of no value is padded to whatever the key says.
            padded = {axis: size for axis, size in staged.items() if size != sizes[axis]}
            outputs = self.outputs.bind(outputs, padded or sizes).unpad(sizes)
        return outputs

    def padding_of(self, key: BatchDescriptor, sizes: Sizes) -> dict[str, torch.Tensor]:
        """Rows of padding in place of a batch of ``sizes``, which are all 0 or none."""
        values = {}
        for spec in self._specs(key):
            if spec.policy.kind != "fill_once" and not spec.optional:
                shape = [0 if isinstance(size, str) else size for size in spec.shape]
                values[spec.name] = torch.empty(shape, dtype=spec.dtype)
        if not any(sizes.values()):
            return values
        bound = self.unpadded(key, sizes)
        bound.stage(dict.fromkeys(sizes, 0), values)
        return {name: bound.views[name].clone() for name in values}

    def context(
        self,
        mode: RuntimeMode,
        key: BatchDescriptor,
        step_info: Any,
        slices: Sequence[Any] | None = None,
    ) -> ForwardContext:
        return ForwardContext(mode, key, step_info, None, self._layers, None, slices)

    def _sizes_padded_to(self, values: Values, real: Sizes) -> Sizes | None:
        """The sizes of ``values`` if the caller has padded them from ``real`` to those of a key."""
        try:
            read = self.real_sizes(values)
        except InputMismatchError:
            return None
        found = {axis: read.get(axis, real[axis]) for axis in self.space.capacity}
        return found if found != dict(real) and self.is_padded(real, found) else None

    def unpadded(self, key: BatchDescriptor, sizes: Sizes) -> BoundBuffers:
        """New buffers of exactly these sizes."""
        specs = self._specs(key)
        return BufferSet(specs, sizes, lambda _: sizes, self.library.device).bind(key)

    def stage(self, key: BatchDescriptor, bound: BoundBuffers, call: Call) -> None:
        """Put a call in place, as a run of ``key``."""
        bound.stage(call.staged, call.values)
        self.prepare(key, call.step_info)

    def prepare(self, key: BatchDescriptor, step_info: Any) -> None:
        for resource in self._resources:
            resource.prepare(key, step_info)

    # -- examples

    def example_inputs(
        self, key: BatchDescriptor, seed: int
    ) -> tuple[tuple[()], dict[str, torch.Tensor]]:
        """Stage an example that fills ``key`` and return the arguments that read it."""
        bound = self.bind(key)
        kept = self.captured_with.get(key) if seed == 0 else None
        if kept is None:
            call = self.example(key, seed)
            kept = dict(call.values), call.step_info
        with of_example():
            bound.stage(self.space.axis_sizes(key), kept[0])
        if seed == 0 and key not in self.captured_with:  # The capture takes that of the warm-up.
            self.captured_with[key] = own_copy(kept)
            self._constant_info.pop(key, None)
            if self.has_constant_info:
                self._constant_info[key] = map_leaves(kept[1], kept_host_value)
        return (), bound.views

    def example(self, key: BatchDescriptor, seed: int) -> Call:
        return self.example_call(self.space.axis_sizes(key), seed)

    def example_call(self, sizes: Sizes, seed: int) -> Call:
        assert self.examples is not None, "runners without examples capture nothing"
        example = make_example(self.examples, sizes, seed)
        self.has_step_info = self.has_step_info or example.step_info is not None
        self.has_constant_info = example.constant_info
        return Call(example.values, sizes, sizes, example.step_info)


class ProfiledExecutor(Executor):
    """Puts a range with mode and key around each replay and eager run, for a profiler.

    A class of its own, so that nothing asks for it in a step where it is off.
    """

    def replay(
        self, ready: ReadyGraph, values: Values, sizes: Sizes, staged: Sizes, step_info: Any
    ) -> Any:
        with self.library.device.range(f"{ready.mode.name} {ready.key}"):
            return super().replay(ready, values, sizes, staged, step_info)

    def eager(self, key: BatchDescriptor, call: Call) -> Any:
        with self.library.device.range(f"NONE {key}"):
            return super().eager(key, call)


def _is_in(bound: BoundBuffers) -> Callable[[torch.Tensor], bool]:
    held = set(map(storage_start, bound.views.values())) - {0}
    return lambda tensor: storage_start(tensor) in held


def _is_same_info(constant: Any, found: Any) -> bool:
    """True if a step says the host values that the example said, in the same containers.

    What tensors hold, and objects that nothing looks into, is not compared. In plain Python for
    what mostly comes, because a step asks.
    """
    kind = type(constant)
    if kind is not type(found):
        return False
    if kind is dict:
        return constant.keys() == found.keys() and all(
            _is_same_info(value, found[name]) for name, value in constant.items()
        )
    if kind is int or kind is str:
        return bool(constant == found)
    left, right = list(walk(constant)), list(walk(found))
    return len(left) == len(right) and all(
        one.path == other.path
        and one.kind == other.kind
        and (one.kind != "host" or same_host_value(one.value, other.value))
        for one, other in zip(left, right, strict=True)
    )

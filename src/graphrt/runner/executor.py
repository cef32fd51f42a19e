"""The ways to run a callable: as the replay of a ready graph, eagerly, or as both, compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from graphrt.batch import REQUESTS, TOKENS, BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.device.torch_modes import is_any_autocast_enabled
from graphrt.errors import (
    ConfigError,
    GraphrtError,
    InputMismatchError,
    UnkeyedValueError,
    VerificationError,
    noting,
    shown,
)
from graphrt.events import Event, Observer
from graphrt.graphs import (
    BoundBuffers,
    BufferSet,
    BufferSpec,
    CaptureOptions,
    Entry,
    GraphLibrary,
    HostSnapshot,
    OutputSpec,
    Program,
    StaleCheck,
    autocast_dtype,
    autocast_error,
)
from graphrt.graphs.buffers import require_tensor
from graphrt.graphs.capture import guarded_storages
from graphrt.graphs.values import (
    dotted,
    format_path,
    kept_host_value,
    map_leaves,
    map_tensors,
    own_copy,
    same_host_value,
    tensors_of,
    walk,
)
from graphrt.graphs.writes import storage_of
from graphrt.runner.examples import Example, Examples, Sizes, Values, as_example, examples_like
from graphrt.runner.keys import (
    KeySpace,
    batch_key,
    check_axes,
    check_parameters,
    check_specs,
    check_written_rows,
    make_key,
)
from graphrt.verify import (
    Comparison,
    RunState,
    Verification,
    WrittenRows,
    check_cut,
    check_padding,
    check_replay,
    compare,
    noted_eager_segments,
    require_compared,
    require_other_example,
    require_varied_for_memos,
    varied_padding,
    warn_unverified,
)

Varying = Sequence[tuple[torch.Tensor, int, str]]
"""Tensor, dimension, axis."""
Inputs = Sequence[BufferSpec] | Callable[[BatchDescriptor], Sequence[BufferSpec]]


TIMED_ROUNDS, TIMED_REPLAYS = 3, 2
MAX_COMPARED_BYTES = 1 << 26
"""Tensors of ``may_overwrite`` without written rows are compared whole up to this size together."""


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
    has_autocast: bool
    check: Callable[[Any], None] | None
    """Called with ``step_info`` before each replay, where there is something to compare: every
    address (``StaleCheck.POINTER``), the autocast dtype, what the capture read of ``step_info``."""


@dataclass(kw_only=True, eq=False)
class Executor:
    """Static buffers, outputs and resources of ``fn``. Each run ends the outputs of the one before.

    ``inputs``: specs, or ``key -> specs``. Where an axis stands behind dimension 0, or specs depend
    on the key, each key gets contiguous buffers of its own.
    ``written_rows``: tensor -> name of the input that indexes the rows of it that a run writes.
    ``declared``: how outputs are cut.
    ``reads_padding``: why results are meant to depend on the padding; empty if they are not.
    """

    fn: Callable[..., Any]
    library: GraphLibrary
    inputs: InitVar[Inputs]
    declared: InitVar[OutputSpec]
    space: KeySpace
    examples: Examples | None
    options: CaptureOptions
    tolerance: float | None
    observer: Observer | None
    written_rows: Mapping[torch.Tensor, str]
    reads_padding: str
    is_strict: bool
    wait_for_ranks: Callable[[], None] | None
    """Before each run that a comparison makes, and after the last one; None without ranks."""
    is_padded: Callable[[Sizes, Sizes], bool] = lambda real, found: False
    """Whether a batch of ``real`` sizes, padded to a key, is as large as ``found``."""
    num_tokens_across_ranks: tuple[int, ...] | None = None
    """What the forward context of an eager run says: each rank's own size."""

    def __post_init__(self, inputs: Inputs, declared: OutputSpec) -> None:
        # A copy: outputs of two runners that were given one spec must not expire each other's.
        self.outputs = OutputSpec(declared.axes, declared.policy, chosen_from=declared.chosen_from)
        check_axes(declared, self.space.capacity)
        self._replaying, self._layers = self.library.replaying, self.options.layers
        device = self.library.device
        self._device_kind = device.torch_device.type
        self._generators = (device.generator, *self.library.generators)
        self._has_step_info = False
        """True once an example came with ``step_info``."""
        self._has_constant_info = False
        self._constant_info: dict[BatchDescriptor, Any] = {}
        """By key: what the captured example said that every step says."""
        self._captured_with: dict[BatchDescriptor, Any] = {}
        """By key: copies of the example that was captured, until its program is checked."""
        self._resources = tuple(self.options.prepared)
        # Eager outputs have their real size where it is an axis; other lengths are cut off.
        lengths = [length for dims in declared.axes.values() for length in dims.values()]
        self._hands_eager_out = declared.policy == "view" and not any(map(callable, lengths))
        self._expire = self.outputs.expire if declared.policy == "checked_view" else None
        self._of_key: dict[BatchDescriptor, BufferSet] = {}
        self._inputs = inputs
        self._reader: BufferSet | None = None
        """Reads real sizes off values. It has no bytes where each key has buffers of its own."""
        self._shared: BufferSet | None = None
        if callable(inputs):
            return  # The first use asks for the specs of a key.
        check_written_rows(self.written_rows, inputs)
        if any(axis in spec.shape[1:] for spec in inputs for axis in spec.axes):
            # A prefix along an inner axis is not contiguous.
            self._reader = self._empty_buffers(inputs)
        else:
            self._shared = BufferSet(inputs, self.space.capacity, self.space.axis_sizes, device)
            self._reader = self._shared
        check_parameters(self.fn, inputs)

    def emit(self, event: Event) -> None:
        if self.observer is not None:
            self.observer(event)

    def register(self) -> None:
        """Let graphs of the library write the shared buffers that are declared ``written``."""
        if self._shared is not None:
            self.library.add_buffers(self._shared)

    def real_sizes(self, values: Values) -> dict[str, int]:
        """The real size of every axis, read off ``values``. Errors: ``InputMismatchError``."""
        return self._buffers_to_read().real_sizes(values)

    def use_examples_like(self, like: Example | Values) -> None:
        """Capture and check with the rows of one real batch from here on.

        Errors: ``InputMismatchError`` for what is no batch of these inputs.
        """
        self._captured_with.clear()
        example, buffers = as_example(like), self._buffers_to_read()
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

    def forget_examples(self) -> None:
        """What a failed or interrupted capture was made with may belong to others by the next."""
        self._captured_with.clear()

    def _specs(self, key: BatchDescriptor) -> Sequence[BufferSpec]:
        inputs = self._inputs
        return check_specs(inputs(key)) if callable(inputs) else inputs

    def _buffers_to_read(self) -> BufferSet:
        if self._reader is None:
            self._reader = self._empty_buffers(self._specs(make_key(self.space.capacity)))
        return self._reader

    def _empty_buffers(self, specs: Sequence[BufferSpec]) -> BufferSet:
        none = dict.fromkeys(self.space.capacity, 0)
        return BufferSet(specs, none, lambda _: none, self.library.device)

    def bind(self, key: BatchDescriptor) -> BoundBuffers:
        """The padded views of ``key``."""
        if self._shared is not None:
            return self._shared.bind(key)
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
        cut = self.outputs.bind(program.outputs, bound.sizes).unpad
        unpad: Callable[[Sizes], Any] = cut
        if self.outputs.policy != "clone" and any(map(_is_in(bound), tensors_of(program.outputs))):

            def unpad(sizes: Sizes) -> Any:
                return self._apart(cut(sizes), bound)

        check = self._check_of(program, bound)
        mode, key, has_autocast = entry.mode, entry.key, program.autocast is not None
        return ReadyGraph(
            mode, key, entry, bound, program, unpad, program.has_eager, has_autocast, check
        )

    def _apart(self, outputs: Any, bound: BoundBuffers) -> Any:
        """``outputs`` with copies of what lies in static buffers: rows of it may be values of the
        next run, and staging would overwrite them before it reads them."""
        if self.outputs.policy == "clone":
            return outputs
        is_in = _is_in(bound)
        return map_tensors(outputs, lambda one: one.clone() if is_in(one) else one)

    def _check_of(self, program: Program, bound: BoundBuffers) -> Callable[[Any], None] | None:
        """What is compared before each replay beside what costs nothing; None if that is all."""
        is_pointer = self.library.stale_check is StaleCheck.POINTER
        never_informed = program.reads_step_info and not self._has_step_info
        is_constant = program.reads_step_info and program.key in self._constant_info
        if not (is_pointer or never_informed or is_constant or program.autocast):
            return None
        constant = self._constant_info.get(program.key)

        def check(step_info: Any) -> None:
            if autocast_dtype(self._device_kind) is not program.autocast:
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
            if is_pointer:
                program.check((), bound.views)

        return check

    def replay(
        self, ready: ReadyGraph, values: Values, sizes: Sizes, staged: Sizes, step_info: Any
    ) -> Any:
        """Stage, prepare, replay, unpad: the arguments are those of a ``Call``. Under no_grad."""
        if self._replaying.title is not None:
            raise self._replaying.refusal(ready.program.title)
        ready.bound.stage_without_grad(staged, values)
        if self._expire is not None:  # Now, because values may be outputs of the run before.
            self._expire()
        for resource in self._resources:
            resource.prepare(ready.key, step_info)
        if (ready.has_autocast or is_any_autocast_enabled()) and (
            torch.is_autocast_enabled(self._device_kind) is not ready.has_autocast
        ):
            raise autocast_error(ready.key, ready.program.autocast)
        if ready.check is not None:
            ready.check(step_info)
        if ready.has_eager:
            with ForwardContext(ready.mode, ready.key, step_info, None, self._layers):
                ready.program.replay()
        else:
            ready.program.replay()
        return ready.unpad(sizes)

    def eager(self, key: BatchDescriptor, call: Call) -> Any:
        """Run ``fn`` itself, in the shared buffers where the values fit, else in new ones.

        ``key``: the batch itself; of an input that depends on the key, the spec for these sizes.
        """
        values, _, staged, step_info, slices = call
        bound = self._unpadded(key, staged)
        try:
            bound.stage(staged, values)
        except InputMismatchError:
            padded = self._sizes_padded_to(values, staged)
            if padded is None or slices is not None:  # Slices are of the real size.
                raise
            key, staged = batch_key(key, padded), padded
            bound = self._unpadded(key, staged)
            bound.stage(staged, values)
        if self._expire is not None:
            self._expire()
        for resource in self._resources:
            resource.prepare(key, step_info)
        return self._run_eagerly(key, bound, call._replace(staged=staged))

    def _run_eagerly(self, key: BatchDescriptor, bound: BoundBuffers, call: Call) -> Any:
        """Run ``fn`` on a call that is staged."""
        _, sizes, staged, info, slices = call
        across, layers = self.num_tokens_across_ranks, self._layers
        with (
            torch.no_grad(),
            ForwardContext(RuntimeMode.NONE, key, info, None, layers, across, slices),
        ):
            outputs = self.fn(**bound.views)
        if not self._hands_eager_out or staged is not sizes:
            outputs = self.outputs.bind(outputs).unpad(sizes)
        return self._apart(outputs, bound)

    def compare_cut(self, key: BatchDescriptor, call: Call) -> tuple[Any, GraphrtError | None]:
        """Run one call whole and in micro-batches. See ``check_cut``."""
        # A value may be an output of the run before, which runs may write.
        call = call._replace(values=own_copy(dict(call.values)))
        if self._expire is not None:
            self._expire()
        bound = self._unpadded(key, call.staged)
        whole, _ = self._overwritten()
        state = self._run_state(bound, call, bound.views, (), None, whole)
        may_write = {
            storage_of(tensor)
            for tensor in (
                *(bound.views[name] for name in call.values if name in bound.views),
                *state.tensors.values(),
                *(written.tensor for written in state.rows.values()),
                *whole,
            )
        }
        may_write |= {workspace.storage for workspace in self.options.workspaces}
        if self.options.state is not None:
            may_write |= guarded_storages(self.options.state)

        # Floats, and what may hold any valid value.
        names = [
            name
            for name in call.values
            if (spec := bound.specs[name]).policy.arbitrary
            and (spec.dtype.is_floating_point or spec.policy.kind != "keep")
        ]
        assert call.ubatch_slices is not None, "only cut calls are compared"
        *_, before, last = call.ubatch_slices
        start = last.token_slice.start
        # A request that is cut inside belongs to both.
        others = {TOKENS: start, REQUESTS: before.request_slice.stop}
        first, axes = {TOKENS: start, REQUESTS: last.request_slice.start}, self.outputs.axes

        def first_rows(outputs: Any) -> Any:
            nodes = walk(self.outputs.bind(outputs).unpad(first))
            return {path: node.value for node in nodes if (path := dotted(node.path)) in axes}

        def run(key: BatchDescriptor) -> Any:
            slices = None if key.num_ubatches == 1 else call.ubatch_slices
            return self._run_eagerly(key, bound, call._replace(ubatch_slices=slices))

        return check_cut(
            key=key,
            stage=lambda key: self._stage(key, bound, call),
            run=run,
            runnable=self.fn,
            state=state,
            may_write=may_write,
            varied=partial(varied_padding, bound, others, names, by_real=True) if names else None,
            first_rows=first_rows,
            observes=self.options.observe != "never",
            chosen_from=self.outputs.chosen_from,
            tolerance=self.tolerance,
            observer=self.observer,
        )

    def no_values(self, key: BatchDescriptor) -> dict[str, torch.Tensor]:
        """Values of a batch without rows, for the buffers of ``key``."""
        values = {}
        for spec in self._specs(key):
            if spec.policy.kind != "fill_once" and not spec.optional:
                shape = [0 if isinstance(size, str) else size for size in spec.shape]
                values[spec.name] = torch.empty(shape, dtype=spec.dtype)
        return values

    def padding_of(self, key: BatchDescriptor, sizes: Sizes) -> dict[str, torch.Tensor]:
        """Rows of padding in place of a batch of ``sizes``."""
        bound, values = self._unpadded(key, sizes), self.no_values(key)
        bound.stage(dict.fromkeys(sizes, 0), values)
        return {name: bound.views[name].clone() for name in values}

    def _context(self, mode: RuntimeMode, key: BatchDescriptor, step_info: Any) -> ForwardContext:
        return ForwardContext(mode, key, step_info, None, self._layers)

    def _sizes_padded_to(self, values: Values, real: Sizes) -> Sizes | None:
        """The sizes of ``values`` if the caller has padded them from ``real`` to those of a key."""
        try:
            read = self.real_sizes(values)
        except InputMismatchError:
            return None
        found = {axis: read.get(axis, real[axis]) for axis in self.space.capacity}
        return found if found != dict(real) and self.is_padded(real, found) else None

    def _unpadded(self, key: BatchDescriptor, sizes: Sizes) -> BoundBuffers:
        """Buffers of exactly these sizes: the shared ones where they are large enough."""
        if self._shared is not None and all(
            sizes.get(axis, 0) <= size for axis, size in self.space.capacity.items()
        ):
            return self._shared.unpadded(sizes)
        specs = self._specs(key)
        return BufferSet(specs, sizes, lambda _: sizes, self.library.device).bind(key)

    # -- verification

    def compare(
        self,
        ready: ReadyGraph,
        call: Call,
        before_warmup: HostSnapshot | None = None,
        num_runs: int = 1,
    ) -> Verification:
        """Run one call eagerly and as a replay from the same state; raise if they differ.

        Eager means ``fn`` itself on the key's *padded* views: padding is not bit-neutral, because
        another number of rows may choose another kernel. Resources are prepared once.
        """
        values, sizes, staged, step_info, _ = call
        key, bound = ready.key, ready.bound
        self.outputs.expire()
        self._stage(key, bound, call)

        # Each run stages again: the one before may have written buffers.
        def run_eager() -> Any:
            bound.stage(staged, values)
            return self._eager_compared(key, bound, sizes, step_info)

        def run_replay() -> Any:
            bound.stage(staged, values)
            return self._replay_compared(ready, sizes, step_info)

        whole, _ = self._overwritten()
        return check_replay(
            mode=ready.mode,
            key=key,
            run_eager=run_eager,
            run_replay=run_replay,
            state=self._run_state(bound, call, bound.views, whole, before_warmup),
            runnable=self.fn,
            before_warmup=before_warmup,
            tolerance=self.tolerance,
            find_moved=ready.program.find_moved,
            observer=self.observer,
            num_runs=num_runs,
            can_repeat=self.wait_for_ranks is None,
        )

    def compare_padding(
        self,
        ready: ReadyGraph,
        call: Call,
        before_warmup: HostSnapshot | None = None,
        others: Values | None = None,
    ) -> tuple[Any, dict[str, Comparison]]:
        """Run one call as a padded replay and on the batch as it is; raise if real rows differ.

        Resources are prepared for the key and for the batch. See ``check_padding``.
        """
        sizes, step_info = call.sizes, call.step_info
        key, bound = ready.key, ready.bound
        self.outputs.expire()
        unpadded_key = batch_key(key, sizes)
        real = bound.real_views(sizes)

        def run_unpadded() -> Any:
            unpadded = self._unpadded(unpadded_key, sizes)
            self._stage(unpadded_key, unpadded, call)
            outputs = self._eager_compared(unpadded_key, unpadded, sizes, step_info)
            if self._shared is None:
                # Written in buffers of its own, compared where replays write.
                for name, view in real.items():
                    if bound.specs[name].written:
                        view.copy_(unpadded.views[name])
            return outputs

        # Not compared as state is, because rows of padding may be written to a place of their own.
        scratch = self._overwritten()[0] if before_warmup is not None else ()
        return check_padding(
            mode=ready.mode,
            key=key,
            bound=bound,
            sizes=sizes,
            stage=lambda: self._stage(key, bound, call),
            replay=lambda: self._replay_compared(ready, sizes, step_info),
            run_unpadded=run_unpadded if call.staged == sizes else None,
            state=self._run_state(bound, call, real, (), before_warmup, scratch),
            reads_padding=self.reads_padding,
            chosen_from=self.outputs.chosen_from,
            tolerance=self.tolerance,
            before_warmup=before_warmup,
            observer=self.observer,
            can_repeat=self.wait_for_ranks is None,
            others=others or {},
        )

    def _stage(self, key: BatchDescriptor, bound: BoundBuffers, call: Call) -> None:
        """Put a call in place, as a run of ``key``."""
        bound.stage(call.staged, call.values)
        for resource in self._resources:
            resource.prepare(key, call.step_info)

    def _meet_ranks(self) -> None:
        if self.wait_for_ranks is not None:
            self.wait_for_ranks()

    def _eager_compared(
        self, key: BatchDescriptor, bound: BoundBuffers, sizes: Sizes, step_info: Any
    ) -> Any:
        self._meet_ranks()
        modes = self.library.device.modes_of_recording()
        with torch.no_grad(), self._context(RuntimeMode.NONE, key, step_info), modes:
            return self.outputs.bind(self.fn(**bound.views)).unpad(sizes)

    def _replay_compared(self, ready: ReadyGraph, sizes: Sizes, step_info: Any) -> Any:
        self._meet_ranks()
        with torch.no_grad(), self._context(ready.mode, ready.key, step_info):
            ready.program(**ready.bound.views)
        # Before results are read: that never ends where a rank failed before it replayed.
        self._meet_ranks()
        return ready.unpad(sizes)

    def _overwritten(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What runs may overwrite without saying which rows: to compare whole, or not at all."""
        whole: list[torch.Tensor] = []
        left: list[torch.Tensor] = []
        room = MAX_COMPARED_BYTES
        for tensor in self.options.may_overwrite:
            if tensor in self.written_rows:
                continue
            room -= tensor.nbytes
            (whole if room >= 0 else left).append(tensor)
        return whole, left

    def _run_state(
        self,
        bound: BoundBuffers,
        call: Call,
        views: Values,
        overwritten: Sequence[torch.Tensor],
        before_warmup: HostSnapshot | None,
        scratch: Sequence[torch.Tensor] = (),
    ) -> RunState:
        """Everything that a compared run may write. ``views``: what is real of the buffers."""
        specs = bound.specs
        tensors = {f"buffer {name}": view for name, view in views.items() if specs[name].written}
        tensors |= _numbered(overwritten)
        rows = {}
        for number, (tensor, name) in enumerate(self.written_rows.items()):
            if name not in call.values:
                continue  # Optional, and not in this batch.
            real = [
                slice(call.sizes[size] if isinstance(size, str) else size)
                for size in specs[name].shape
            ]
            # Picked where the values are, because a GPU says by a wait how many are valid.
            index = call.values[name][tuple(real)].flatten().to(torch.int64)
            valid = index[(index >= 0) & (index < tensor.shape[0])]
            written = WrittenRows(tensor, valid.to(tensor.device, non_blocking=True))
            rows[f"rows {name} of may_overwrite {number}"] = written
        return RunState(
            self.options.state,
            tensors,
            rows,
            self._generators,
            scratch=_numbered(scratch),
            poisons=before_warmup is not None,
            wait=self._wait_for([*tensors.values(), *scratch]),
        )

    def _wait_for(self, written: Iterable[torch.Tensor]) -> Callable[[], None] | None:
        """The wait of a ``RunState``: a GPU copies to pinned memory when its turn comes."""
        device, guarded = self.library.device, getattr(self.options.state, "tensors", ())
        on_host = any(t.device.type == "cpu" for t in [*written, *tensors_of(guarded)])
        return self.library.synchronize if on_host and device.torch_device.type != "cpu" else None

    def check_first_replay(
        self, before_warmup: HostSnapshot | None, num_runs: int, entry: Entry
    ) -> None:
        """Play a new program once, on inputs other than those it was captured with.

        Compares it with eager if a snapshot is given: ``num_runs`` runs in succession of a batch
        that fills the key, and batches that are padded to it. State stays as it was.
        """
        ready, call = self.make_ready(entry), self._example(entry.key, 1)
        captured = self._captured_with.get(entry.key)
        whole, left = self._overwritten()
        with self._state_kept(whole) as restore:
            if before_warmup is None:
                with noted_eager_segments():
                    self.replay(ready, call.values, call.sizes, call.staged, call.step_info)
                return
            generators = RunState(generators=self._generators)
            before = generators.save()
            subject = f"{entry.mode.name}, {entry.key}"
            reads_info = ready.program.reads_step_info and not self._has_constant_info
            if captured is not None:
                require_other_example(subject, captured, (dict(call.values), call.step_info))
                if reads_info:
                    _require_other_info(entry, captured[1], call.step_info)
            with _of_example(), noting(f"in the check of the first replay of {subject}"):
                verification = self.compare(ready, call, before_warmup, num_runs)
            if captured is not None:
                require_varied_for_memos(
                    subject, captured[0], dict(call.values), before_warmup, is_strict=self.is_strict
                )
            ready.program.is_compared = require_compared(
                subject, verification, left, is_strict=self.is_strict
            )
            if reads_info and self._has_step_info:
                # The capture found none: one example may say what the callable does without.
                self.compare(ready, self._example(entry.key, 0), before_warmup)
            if self.options.warmups == 0:
                # The capture was the first run of all: a third one shows what counts runs, and
                # inputs other than before show what a first run kept of its own.
                for seed in (0, 1):
                    self.compare(ready, self._example(entry.key, seed))
            compared: list[str] = []
            unlike: dict[str, Comparison] = {}
            for sizes in self._sizes_to_pad(entry):
                # A batch of these sizes may have the rows that the full one left in scratch.
                restore()
                doing = f"in the check of {subject} with a batch of sizes {dict(sizes)}, unpadded"
                with _of_example(), noting(doing):
                    unlike |= self.compare_padding(
                        ready, self._call(sizes, 1), before_warmup, captured and captured[0]
                    )[1]
                compared.append(" and ".join(f"{size} {axis}" for axis, size in sizes.items()))
            entry.padding = self._describe_padding(compared, generators.drew_random(before))
            if compared and left:
                entry.padding += f"; without {len(left)} of may_overwrite, too large without rows"
            if unlike:
                told = "; ".join(
                    f"{name} is left otherwise by a padded replay: {outcome}"
                    for name, outcome in unlike.items()
                )
                # Rows of padding may have fallen on real ones; or it is scratch.
                warn_unverified(
                    subject,
                    expected="what the batch alone writes there, unless it is scratch that no "
                    "later run reads",
                    found=told,
                    do="let padded rows point at a place of their own; may_overwrite={tensor: "
                    "'input that indexes its rows'} compares the real rows",
                    is_strict=self.is_strict,
                )
                entry.padding += f"; {told}"

    @contextmanager
    def _state_kept(self, overwritten: Sequence[torch.Tensor] = ()) -> Iterator[Callable[[], None]]:
        """Put everything back at the end, and whenever the yielded function is called."""
        tensors, wait = _numbered(overwritten), self._wait_for(overwritten)
        state = RunState(self.options.state, tensors, generators=self._generators, wait=wait)
        restore = partial(state.restore, state.save())
        try:
            yield restore
        finally:
            restore()

    def time_replays(self, entries: Sequence[Entry], wait: Callable[[], None]) -> list[int]:
        """Nanoseconds of a replay of each, on an example: the least of several, taken in turns.

        ``wait`` until the device is done. State stays as it was.
        """
        least = [sys.maxsize] * len(entries)
        with self._state_kept():
            calls = [(self.make_ready(entry), self._example(entry.key, 1)) for entry in entries]
            for _ in range(TIMED_ROUNDS):
                for number, (ready, call) in enumerate(calls):
                    self.replay(ready, call.values, call.sizes, call.staged, call.step_info)
                    wait()
                    started = perf_counter_ns()
                    for _ in range(TIMED_REPLAYS):
                        ready.program.replay()
                    wait()
                    took = (perf_counter_ns() - started) // TIMED_REPLAYS
                    least[number] = min(least[number], took)
        return least

    def _sizes_to_pad(self, entry: Entry) -> list[Sizes]:
        """Real sizes of batches padded to a key: of the one that missed it, else the smallest.

        Along an axis that the one that missed it fills, the smallest as well.
        """
        padded = self.space.axis_sizes(entry.key)
        smallest = [s for s in self.space.smaller_sizes(entry.mode, entry.key) if s != padded]
        if not smallest and entry.key.num_ubatches > 1:
            # Without padding: only this compares micro-batches with the batch as a whole.
            smallest = [padded]
        missed = entry.missed_sizes
        if missed is None or missed == padded or missed.keys() != padded.keys():
            return smallest
        full = {axis for axis, size in missed.items() if size == padded[axis]}
        return [missed, *(s for s in smallest if any(s[axis] < padded[axis] for axis in full))]

    def _describe_padding(self, compared: Sequence[str], drew_random: bool) -> str:
        if not compared:
            return "no batch is padded to this key"
        why = f"reads padding: {self.reads_padding}; " if self.reads_padding else ""
        random = "; draws random numbers: without the unpadded batch" if drew_random else ""
        return f"{why}compared with {', '.join(compared)}{random}"

    # -- examples

    def trace(self, sizes: Sizes, run: Callable[[Callable[[], Any], Varying], None]) -> None:
        """Give ``run`` a call of ``fn`` on an example of ``sizes``, as in an eager step, and the
        dimensions of its inputs that vary. State stays as it was."""
        with self._state_kept():
            key, call = BatchDescriptor(next(iter(sizes.values()))), self._call(sizes, 0)
            bound = self._unpadded(key, sizes)
            self._stage(key, bound, call)
            # Tensors of their own, because what they are marked with stays on them.
            views = {name: view.view_as(view) for name, view in bound.views.items()}
            varying = [
                (view, dim, axis)
                for name, view in views.items()
                for dim, axis in enumerate(bound.specs[name].shape)
                if isinstance(axis, str)
            ]
            with torch.no_grad(), self._context(RuntimeMode.NONE, key, call.step_info):
                run(partial(self.fn, **views), varying)

    def example_inputs(
        self, key: BatchDescriptor, seed: int
    ) -> tuple[tuple[()], dict[str, torch.Tensor]]:
        """Stage an example that fills ``key`` and return the arguments that read it."""
        bound = self.bind(key)
        kept = self._captured_with.get(key) if seed == 0 else None
        if kept is None:
            call = self._example(key, seed)
            kept = dict(call.values), call.step_info
        with _of_example():
            bound.stage(self.space.axis_sizes(key), kept[0])
        if seed == 0 and key not in self._captured_with:  # The capture takes that of the warm-up.
            self._captured_with[key] = own_copy(kept)
            self._constant_info.pop(key, None)
            if self._has_constant_info:
                self._constant_info[key] = map_leaves(kept[1], kept_host_value)
        return (), bound.views

    def _example(self, key: BatchDescriptor, seed: int) -> Call:
        return self._call(self.space.axis_sizes(key), seed)

    def _call(self, sizes: Sizes, seed: int) -> Call:
        assert self.examples is not None, "runners without examples capture nothing"
        made = self.examples(sizes, seed)
        example = made if isinstance(made, Example) else Example(made)
        if not isinstance(example.values, Mapping):
            raise ConfigError(
                f"examples({dict(sizes)}, {seed})",
                expected="an Example, or values by input name",
                found=shown(made),
                do="return {name: tensor} for every input",
            )
        self._has_step_info = self._has_step_info or example.step_info is not None
        self._has_constant_info = example.constant_info
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
    held = {view.untyped_storage().data_ptr() for view in bound.views.values()}

    def is_in(tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and storage.data_ptr() in held

    return is_in


def _numbered(overwritten: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"may_overwrite {number}": tensor for number, tensor in enumerate(overwritten)}


@contextmanager
def _of_example() -> Iterator[None]:
    """Around the staging of an example: say what to do if it does not fit."""
    try:
        yield
    except InputMismatchError as error:
        error.subject = f"an example: {error.subject}"
        error.do = (
            "let examples(sizes, seed) return every input, of exactly the sizes it is asked for: "
            "those of a key, and smaller ones, which check the padding"
        )
        raise


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


def _require_other_info(entry: Entry, captured: Any, step_info: Any) -> None:
    """Refuse a graph that holds what ``step_info`` said, where examples say the same in any part:
    nobody knows which parts the callable read."""
    both = [
        {node.path: node for node in walk(value) if node.kind != "container"}
        for value in (captured, step_info)
    ]
    same = [
        f"step_info{format_path(path)}"
        for path in dict.fromkeys([*both[0], *both[1]])
        if not (path in both[0] and path in both[1])
        or both[1][path].kind == "opaque"
        or compare(both[0][path].value, both[1][path].value).is_equal
    ]
    if same and not (captured is None and step_info is None):
        raise VerificationError(
            f"{entry.mode.name}, {entry.key}: step_info, read by the callable outside eager "
            "segments",
            expected="other values for each seed in all parts, because the graph holds those of "
            "the capture",
            found=f"the same for seeds 0 and 1, in one alone, or opaque: {', '.join(same)}",
            do="vary them with the seed; read them in an eager segment or pass a tensor if they "
            "change from step to step; Example(..., constant_info=True) if they never do",
        )

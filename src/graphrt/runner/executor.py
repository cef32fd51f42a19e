"""The ways to run a callable: as the replay of a ready graph, eagerly, or as both, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.errors import ConfigError
from graphrt.events import Observer
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
from graphrt.runner.keys import make_key
from graphrt.verify import HostSnapshot, check_replay

Sizes = Mapping[str, int]
Values = Mapping[str, torch.Tensor]
Inputs = Sequence[BufferSpec] | Callable[[BatchDescriptor], Sequence[BufferSpec]]


class Example(NamedTuple):
    """Valid inputs of given real sizes: what warm-up, capture and verification run on."""

    values: Values
    """By input name."""
    step_info: Any = None
    """What ``Resource.prepare`` gets when the example runs for real (verification)."""


Examples = Callable[[Sizes, int], Example | Values]


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


class ReadyGraph(NamedTuple):
    """What the replay of one key needs, looked up once."""

    mode: RuntimeMode
    key: BatchDescriptor
    bound: BoundBuffers
    program: Program
    unpad: Callable[[Sizes], Any]
    has_eager: bool
    check: Callable[[], None] | None
    """Compares every address before each replay; only with ``StaleCheck.POINTER``."""


class Executor:
    """Static buffers, outputs and resources of ``fn``. Each run ends the outputs of the one before.

    ``inputs``: specs, or ``key -> specs``. Where an axis stands behind dimension 0, or specs depend
    on the key, each key gets contiguous buffers of its own.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        library: GraphLibrary,
        inputs: Inputs,
        outputs: OutputSpec,
        capacity: Sizes,
        axis_sizes: Callable[[BatchDescriptor], Sizes],
        examples: Examples | None,
        options: CaptureOptions,
        tolerance: float | None,
        observer: Observer | None,
    ) -> None:
        if outputs.axes is None:
            raise ConfigError(
                "outputs of a runner",
                expected="declared axes",
                found="OutputSpec(None)",
                do="name the padded dimension of each output; {} if none is",
            )
        self.fn = fn
        self.axis_sizes = axis_sizes
        # A copy: outputs of two runners that were given one spec must not expire each other's.
        self.outputs = OutputSpec(outputs.axes, outputs.policy)
        self._library = library
        self._capacity = capacity
        self._examples = examples
        self._state = options.state
        self._resources = tuple(options.prepared)
        self._tolerance = tolerance
        self._observer = observer
        # Eager outputs have their real size where it is an axis, and may be views of static buffers
        # as graph outputs are of graph storage. A length of another kind is cut off here too.
        lengths = [length for dims in outputs.axes.values() for length in dims.values()]
        self._hands_eager_out = outputs.policy == "view" and not any(map(callable, lengths))
        self._expire = self.outputs.expire if outputs.policy == "checked_view" else None
        self._of_key: dict[BatchDescriptor, BufferSet] = {}
        self._specs = inputs if callable(inputs) else partial(_same, tuple(inputs))
        self._reader: BufferSet | None = None
        """Reads real sizes off values. It has no bytes where each key has buffers of its own."""
        self._shared: BufferSet | None = None
        if callable(inputs):
            return  # The first use asks for the specs of a key.
        if any(axis in spec.shape[1:] for spec in inputs for axis in spec.axes):
            # A prefix along an inner axis is not contiguous.
            self._reader = self._empty_buffers(inputs)
        else:
            self._reader = self._shared = BufferSet(inputs, capacity, axis_sizes, library.device)

    def register(self) -> None:
        """Let graphs of the library write the shared buffers that are declared ``written``."""
        if self._shared is not None:
            self._library.add_buffers(self._shared)

    def real_sizes(self, values: Values) -> dict[str, int]:
        """The real size of every axis, read off ``values``. Errors: ``InputMismatchError``."""
        if self._reader is None:
            self._reader = self._empty_buffers(self._specs(make_key(self._capacity)))
        return self._reader.real_sizes(values)

    def _empty_buffers(self, specs: Sequence[BufferSpec]) -> BufferSet:
        none = dict.fromkeys(self._capacity, 0)
        return BufferSet(specs, none, lambda _: none, self._library.device)

    def bind(self, key: BatchDescriptor) -> BoundBuffers:
        """The padded views of ``key``."""
        if self._shared is not None:
            return self._shared.bind(key)
        buffers = self._of_key.get(key)
        if buffers is None:
            sizes = self.axis_sizes(key)
            buffers = BufferSet(self._specs(key), sizes, lambda _: sizes, self._library.device)
            self._of_key[key] = buffers
            self._library.add_buffers(buffers)
        return buffers.bind(key)

    def make_ready(self, entry: Entry) -> ReadyGraph:
        """Look up what replays of a captured key need."""
        program = entry.program
        assert program is not None, "only what was captured is made ready"
        bound = self.bind(entry.key)
        if program.state == "captured":
            program.check((), bound.views)  # The first check lets it replay.
        is_checked = self._library.stale_check is StaleCheck.POINTER
        return ReadyGraph(
            entry.mode,
            entry.key,
            bound,
            program,
            self.outputs.bind(program.outputs).unpad,
            program.num_eager > 0,
            (lambda: program.check((), bound.views)) if is_checked else None,
        )

    def replay(
        self, ready: ReadyGraph, values: Values, sizes: Sizes, staged: Sizes, step_info: Any
    ) -> Any:
        """Stage, prepare, replay, unpad: the arguments are those of a ``Call``."""
        if self._expire is not None:
            self._expire()
        ready.bound.stage(staged, values)
        for resource in self._resources:
            resource.prepare(ready.key, step_info)
        if ready.check is not None:
            ready.check()
        if ready.has_eager:
            with ForwardContext(ready.mode, ready.key, step_info):
                ready.program.replay()
        else:
            ready.program.replay()
        return ready.unpad(sizes)

    def eager(self, key: BatchDescriptor, call: Call) -> Any:
        """Run ``fn`` itself, in the shared buffers where the values fit, else in new ones.

        ``key``: the batch itself; of an input that depends on the key, the spec for these sizes.
        """
        values, sizes, staged, step_info = call
        if self._expire is not None:
            self._expire()
        if self._shared is not None and all(
            staged.get(axis, 0) <= size for axis, size in self._capacity.items()
        ):
            bound = self._shared.unpadded(staged)
        else:
            specs = self._specs(key)
            bound = BufferSet(specs, staged, lambda _: staged, self._library.device).bind(key)
        bound.stage(staged, values)
        for resource in self._resources:
            resource.prepare(key, step_info)
        with torch.no_grad(), ForwardContext(RuntimeMode.NONE, key, attn_metadata=step_info):
            outputs = self.fn(**bound.views)
        if self._hands_eager_out and staged is sizes:
            return outputs
        return self.outputs.bind(outputs).unpad(sizes)

    def compare(
        self, ready: ReadyGraph, call: Call, before_warmup: HostSnapshot | None = None
    ) -> Any:
        """Run one call eagerly and as a replay from the same state; raise if they differ.

        Eager means ``fn`` itself on the key's *padded* views: padding is not bit-neutral, because
        another number of rows may choose another kernel. Resources are prepared once.
        """
        values, sizes, staged, step_info = call
        key, bound = ready.key, ready.bound
        self.outputs.expire()
        bound.stage(staged, values)
        for resource in self._resources:
            resource.prepare(key, step_info)

        def run_eager() -> Any:
            with torch.no_grad(), ForwardContext(RuntimeMode.NONE, key, attn_metadata=step_info):
                return self.outputs.bind(self.fn(**bound.views)).unpad(sizes)

        def run_replay() -> Any:
            bound.stage(staged, values)  # Again: the eager run may write buffers.
            with torch.no_grad(), ForwardContext(ready.mode, key, attn_metadata=step_info):
                ready.program(**bound.views)
            return ready.unpad(sizes)

        return check_replay(
            mode=ready.mode,
            key=key,
            run_eager=run_eager,
            run_replay=run_replay,
            state=self._state,
            runnable=self.fn,
            before_warmup=before_warmup,
            tolerance=self._tolerance,
            observer=self._observer,
        ).outputs

    def example_inputs(
        self, key: BatchDescriptor, seed: int
    ) -> tuple[tuple[()], dict[str, torch.Tensor]]:
        """Stage an example that fills ``key`` and return the arguments that read it."""
        example = self._example(key, seed)
        bound = self.bind(key)
        bound.stage(example.sizes, example.values)
        return (), bound.views

    def check_first_replay(self, before_warmup: HostSnapshot | None, entry: Entry) -> None:
        """Play a new program once, on inputs other than those it was captured with.

        Compares it with eager if a snapshot is given. State stays as it was.
        """
        ready, call = self.make_ready(entry), self._example(entry.key, 1)
        saved = None if self._state is None else self._state.save()
        try:
            if before_warmup is None:
                self.replay(ready, *call)
            else:
                self.compare(ready, call, before_warmup)
        finally:
            if self._state is not None:
                self._state.restore(saved)

    def _example(self, key: BatchDescriptor, seed: int) -> Call:
        assert self._examples is not None, "runners without examples capture nothing"
        sizes = self.axis_sizes(key)
        made = self._examples(sizes, seed)
        values, step_info = made if isinstance(made, Example) else (made, None)
        return Call(values, sizes, sizes, step_info)


def _same(specs: Sequence[BufferSpec], key: BatchDescriptor) -> Sequence[BufferSpec]:
    return specs

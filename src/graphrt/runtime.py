"""The runtime: where config, plan, buffers, graphs, dispatch and verification meet for an engine.

An engine hands over a model, the tensors it reads, and facts; it gets back ``capture()``,
``step()`` and ``close()``. Everything here joins rooms; each rule lives in the room it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from time import perf_counter, perf_counter_ns
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, Self

import torch

from graphrt.batch import BatchDescriptor, Decision, MissReason, RuntimeMode
from graphrt.config import Facts, Resolved, RuntimeConfig, resolve
from graphrt.context import ForwardContext
from graphrt.device import DeviceName, make_device
from graphrt.device.base import Device
from graphrt.dispatch import CapturePriority, CUDAGraphDispatcher
from graphrt.errors import (
    BatchError,
    ConfigError,
    LibraryClosedError,
    MissError,
    VerificationError,
)
from graphrt.events import Captured, CaptureFailed, Event, Observer, RanEager, Replayed
from graphrt.graphs import (
    BoundBuffers,
    BufferSet,
    BufferSpec,
    CaptureJob,
    CUDAGraphWrapper,
    ExternalsReport,
    GraphBudget,
    GraphLibrary,
    GraphMemory,
    OutputSpec,
    Program,
    Resource,
    StaleCheck,
    StateGuard,
)
from graphrt.graphs.collection import old_heap_aside
from graphrt.interrupts import interrupted_between_steps
from graphrt.verify.hoststate import HostState
from graphrt.verify.replaycheck import check_replay

TOKENS = "tokens"
REQUESTS = "requests"
"""The two axes of an engine's batch; every ``BufferSpec`` of a runtime uses these names."""

_NOTHING: frozenset[RuntimeMode] = frozenset()

Key = tuple[RuntimeMode, BatchDescriptor]
Progress = Callable[[int, int, BatchDescriptor], None]
"""``progress(done, total, key)``, called after each capture and each first replay."""


class Example(NamedTuple):
    """Valid inputs that fill a key: what warm-up, capture and verification run on."""

    values: Mapping[str, torch.Tensor]
    """By input name, of the key's full size."""
    num_tokens: int
    num_reqs: int
    live: Any = None
    """What ``Resource.prepare`` gets when the example runs for real (verification)."""


class CapturedGraph(NamedTuple):
    """One program of the report: what it is and what it cost."""

    mode: RuntimeMode
    key: BatchDescriptor
    state: str
    num_graphs: int
    num_gaps: int
    seconds: float
    """The capture alone; warm-ups and verification are in the report's ``capture_seconds``."""
    memory: GraphMemory


class RuntimeReport(NamedTuple):
    """What is captured, what is not and why, and what it costs."""

    device: str
    resolved: Resolved
    graphs: tuple[CapturedGraph, ...]
    missing: Mapping[Key, MissReason]
    """Keys of the plan that no graph serves now."""
    failures: Mapping[Key, str]
    capture_seconds: float
    """Warm-ups, captures and first verified replays together."""
    graph_bytes: int
    """Pools, slots in them, and executables."""


class Runtime:
    """Serves a model's steps through captured graphs.

    ``model`` is called with keyword arguments named as ``inputs``: views of static buffers, padded
    to the key in graphs, of the real size in eager steps. It runs under ``torch.no_grad``.
    ``outputs`` says which of its outputs' dimensions are padded.

    ``examples(key, seed)`` gives valid inputs that fill the key, different for each seed: seed 0 is
    captured, seed 1 verified. ``resources`` are prepared once before every step, a compared one
    (``verify_every``) too: its eager run and its replay are one step. ``state`` guards what a
    warm-up or verification would advance; ``sinks`` are tensors that both may overwrite where the
    examples point (a KV cache). Without a guard, a compared step runs the model twice on the same
    state. ``holds``: tensors that kernels know by address alone, which every graph keeps alive.
    ``observer`` gets every event. ``verify_tolerance`` None means bit-equal; a tolerance is for
    kernels that sum in another order inside a graph.

    A ``device`` given by name is made and closed by the runtime; one given as an object is not.
    Not thread-safe; two runtimes never share anything.
    Errors: ``ConfigError`` for what cannot be honoured.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        inputs: Sequence[BufferSpec],
        outputs: OutputSpec,
        examples: Callable[[BatchDescriptor, int], Example],
        config: RuntimeConfig | None = None,
        device: Device | DeviceName = "auto",
        facts: Facts | None = None,
        resources: Sequence[Resource] = (),
        state: StateGuard | None = None,
        sinks: Sequence[torch.Tensor] = (),
        holds: Sequence[torch.Tensor] = (),
        observer: Observer | None = None,
        verify_tolerance: float | None = None,
    ) -> None:
        self.config = RuntimeConfig() if config is None else config
        self.resolved = resolve(self.config, Facts() if facts is None else facts)
        self.plan = self.resolved.plan
        self.last_decision: Decision | None = None

        self._model = model
        self._examples = examples
        self._resources = tuple(resources)
        self._state = state
        self._sinks = tuple(sinks)
        self._holds = tuple(holds)
        self._observer = observer
        self._verify_tolerance = verify_tolerance
        self._verify_every = self.config.verify_every or 0
        self._until_verify = self._verify_every
        self._strict = self.config.on_miss == "strict"
        self._query_len = self.plan.query_len
        if outputs.axes is None:
            raise ConfigError(
                "outputs of a runtime",
                expected="declared axes",
                found="OutputSpec(None)",
                do="name the padded dimension of each output; {} if none is",
            )
        # A copy: leases of two runtimes that were given one spec must not end each other.
        self._outputs = OutputSpec(outputs.axes, outputs.policy)
        # Eager outputs have their real size where it is an axis, and may be views of static buffers
        # as graph outputs are of graph storage. Another length or policy holds for them too.
        lengths = [length for dims in outputs.axes.values() for length in dims.values()]
        self._is_eager_as_is = outputs.policy == "view" and not any(map(callable, lengths))

        self._seconds: dict[Key, float] = {}
        self._failures: dict[Key, str] = {}
        self._missing: dict[Key, MissReason] = {}
        self._admitted: dict[Key, Program] = {}
        self._priority = CapturePriority(self.plan)
        self._parts: _Parts | None = None
        self._launches: dict[RuntimeMode, dict[BatchDescriptor, _Launch]] = {}
        self._capture_seconds = 0.0
        self._is_closed = False

        self._owns_device = isinstance(device, str)
        self.device = make_device(device) if isinstance(device, str) else device
        try:
            self._make_storage(inputs)
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise
        self._publish()

    def _make_storage(self, inputs: Sequence[BufferSpec]) -> None:
        """Make what lives on the device: static buffers, the library, and a wrapper per mode."""
        self._buffers = BufferSet(
            inputs,
            capacity={TOKENS: self.plan.max_num_batched_tokens, REQUESTS: self.plan.max_num_seqs},
            axis_sizes=self._axis_sizes,
            device=self.device,
        )
        self.library = GraphLibrary(
            self.device,
            budget=GraphBudget(
                max_bytes=self.config.max_graph_bytes, max_graphs=self.config.max_graphs
            ),
            stale_check=StaleCheck[self.config.stale_check.upper()],
            observer=self._on_graph_event,
        )
        self.library.add_buffers(self._buffers)
        self._wrappers = {
            RuntimeMode.PIECEWISE: CUDAGraphWrapper(
                self._model, self.library, RuntimeMode.PIECEWISE, name="model.pieces"
            ),
            RuntimeMode.FULL: CUDAGraphWrapper(
                self._model, self.library, RuntimeMode.FULL, name="model"
            ),
        }

    def _on_graph_event(self, event: Event) -> None:
        if isinstance(event, Captured):
            self._seconds[event.mode, event.key] = event.seconds
        if self._observer is not None:
            self._observer(event)

    # -- start ---------------------------------------------------------------------------------

    def capture(
        self, progress: Progress | None = None, *, keys: Iterable[Key] | None = None
    ) -> RuntimeReport:
        """Capture every key of the plan that no graph serves yet, and verify each first replay.

        ``keys``: capture no others now, in capture order. A small key captured before a large one
        costs pool memory, as the report shows, and changes no result.

        A program is published to dispatch only after its first replay, on inputs other than those
        it was captured with, equalled eager execution. Steps before that run eager
        (``NOT_CAPTURED_YET``). May be called again: after an error, an interrupt, or when tensors
        that programs read have moved; then every key is captured anew, because graphs that share
        a pool go together. Those that still serve go on until the new ones take their place.

        Ctrl-C takes effect between two keys, where nothing is half recorded; a second one, at once.

        Aliasing: ends the validity of every output that a step returned.
        Errors:   the first failure is raised, ``VerificationError`` included, unless the config
                  says ``on_capture_error="skip"``; either way what was captured serves.
                  ``ConfigError`` for what is no key of the plan; ``LibraryClosedError`` after
                  ``close()``.
        """
        self._require_open()
        wanted = frozenset(self.plan.capture_order if keys is None else self._priority.own(keys))
        with self._capturing() as check_interrupt:
            # Programs over a tensor that has moved unnoticed are to be captured anew as well.
            self.library.check_externals()
            generation, chosen = self._what_to_capture(wanted)
            self.library.forget_failures()
            for item in wanted:
                self._failures.pop(item, None)
            self._capture(chosen, generation, _Ticker(progress, 2 * len(chosen), check_interrupt))
        return self.report()

    def capture_next(
        self,
        at_most: int = 1,
        *,
        first: Key | None = None,
        allow: Callable[[BatchDescriptor], bool] | None = None,
    ) -> int:
        """Capture the next ``at_most`` keys, between two steps; return how many are left.

        Left are the keys of the plan that are ``NOT_CAPTURED_YET``. What failed or was invalidated
        comes again with ``capture()`` alone. Priority: ``first`` (see ``key_for``), then what
        steps missed, most often before less often, then capture order. ``allow(key)`` False
        leaves a key to a later call, and its steps eager.

        Programs that serve go on, and nobody asks here whether a tensor they read has moved. As in
        ``capture()``, a key serves only after its first replay was right; outputs of steps end;
        errors are raised or, with ``on_capture_error="skip"``, kept, and after three in a row no
        other key is tried. A scope's collections leave the old heap out, so that the call
        takes about as long as a warm-up, a capture and a comparison with eager. If the model's host
        state changes between two parts, later verifications start from a new picture of it, in
        which a memo of an earlier warm-up counts as state.

        Errors: as ``capture()``; ``ConfigError`` for an ``at_most`` below 1.
        """
        self._require_open()
        if type(at_most) is not int or at_most < 1:
            raise ConfigError(
                "at_most", expected="an integer >= 1", found=repr(at_most), do="correct it"
            )
        keys = self._priority.order(first)
        allowed = (item for item in keys if allow is None or allow(item[1]))
        chosen = list(islice(allowed, at_most))
        if chosen:
            in_order = [item for item in self.plan.capture_order if item in chosen]
            try:
                # In this order, Ctrl-C is held back where the heap is put aside and thawed.
                with self._capturing() as check_interrupt, old_heap_aside():
                    ticker = _Ticker(None, 2 * len(in_order), check_interrupt)
                    self._capture(in_order, "current", ticker)
            finally:
                self._refuse_after_fuse()
        return len(self._priority.left)

    def key_for(
        self,
        num_tokens: int,
        *,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = _NOTHING,
    ) -> Key | None:
        """The key whose graph such a step takes, or would take if none were left to capture.

        None: it runs eager for another reason. Errors: ``BatchError`` for what is no batch.
        """
        return self._priority.key_for(num_tokens, uniform, num_active_loras, exclude)

    @contextmanager
    def _capturing(self) -> Iterator[Callable[[], None]]:
        """Around every capture: time it, hold Ctrl-C back, publish what came of it."""
        started = perf_counter()
        try:
            with interrupted_between_steps() as check_interrupt, torch.no_grad():
                yield check_interrupt
        finally:
            self._capture_seconds += perf_counter() - started
            self._publish()

    def _capture(
        self, keys: Sequence[Key], generation: Literal["current", "new"], tell: _Ticker
    ) -> None:
        before_warmup = self._state_before_warmup()
        self._outputs.expire()
        try:
            try:
                self._capture_all(keys, generation, tell)
            except Exception:
                # The others serve all the same, and none of them may hide the first failure.
                self._admit_all(keys, before_warmup, tell, on_error="skip")
                raise
            self._admit_all(keys, before_warmup, tell, self.config.on_capture_error)
        finally:
            if before_warmup is not None:
                self._parts = _Parts(before_warmup, HostState(self._model))

    def _state_before_warmup(self) -> HostState | None:
        """What the model remembered before the first warm-up, be it of an earlier part.

        Where something else has changed it since, only a new picture tells that from a warm-up.
        """
        if not self.config.verify_first_replay:
            return None
        if self._parts is not None and not self._parts.after.changed():
            return self._parts.before
        return HostState(self._model)

    def _refuse_after_fuse(self) -> None:
        """Where three captures in a row have failed, the keys that are left fail untried."""
        book, left = self.library.failure_book, self._priority.left
        if book.fuse_is_open and left:
            for mode, key in left:
                owner = self._wrappers[mode].owner
                record = book.add(owner, mode, key, book.fuse_error(owner, mode, key))
                self._failures[mode, key] = str(record.error)
            self._publish()

    def _what_to_capture(
        self, wanted: frozenset[Key]
    ) -> tuple[Literal["current", "new"], Sequence[Key]]:
        """Which of the keys to capture, and whether beside what serves or in its place.

        No program is freed alone, so one that can never serve again costs its memory until its
        whole generation goes. Memory comes first where none serves, service where one does.
        """
        programs = {
            (mode, key): program
            for mode, wrapper in self._wrappers.items()
            for key, program in wrapper.concrete_cudagraph_entries.items()
        }
        in_order = self.plan.capture_order
        if all(program.is_valid for item, program in programs.items() if item in wanted):
            missing = wanted & self._missing.keys()
            return "current", [item for item in in_order if item in missing]
        if self._launches:
            # What takes the place of the old generation has to serve what that one serves.
            valid = {item for item, program in programs.items() if program.is_valid}
            return "new", [item for item in in_order if item in wanted or item in valid]
        for generation in {program.generation for program in programs.values()}:
            self.library.retire(generation)
        return "current", [item for item in in_order if item in wanted]

    def _capture_all(
        self, keys: Sequence[Key], generation: Literal["current", "new"], tell: _Ticker
    ) -> None:
        jobs = []
        for mode, key in keys:
            if generation == "current" and self._valid_program(mode, key) is not None:
                tell(key)  # An interrupt came between its capture and its first replay.
            else:
                inputs = partial(self._example_call, key, seed=0)
                jobs.append(CaptureJob(self._wrappers[mode], mode, key, inputs))
        if not jobs:
            return

        def before_warmup(job: CaptureJob, phase: str) -> bool:
            if phase == "warmup":
                tell.check_interrupt()
            return True

        try:
            with self.library.capture_scope(
                state=self._state,
                sinks=self._sinks,
                holds=self._holds,
                resources=self._resources,
                warmups=self.config.compilation.cudagraph_num_of_warmups,
                on_error=self.config.on_capture_error,
                generation=generation,
            ) as scope:
                scope.capture_all(
                    jobs,
                    gate=before_warmup,
                    progress=lambda done, total, job: tell(job.key),
                    later=[key for _, key in self.plan.capture_order],
                )
        finally:
            for record in self.library.failures:
                self._failures[record.mode, record.key] = str(record.error)

    def _valid_program(self, mode: RuntimeMode, key: BatchDescriptor) -> Program | None:
        program = self._wrappers[mode].concrete_cudagraph_entries.get(key)
        return program if program is not None and program.is_valid else None

    def _admit_all(
        self,
        keys: Sequence[Key],
        before_warmup: HostState | None,
        tell: _Ticker,
        on_error: Literal["raise", "skip"],
    ) -> None:
        """Let new programs serve whose first replay is right; the keys of the others have failed.

        The first error is raised only when the remaining ones were tried.
        """
        for number, (mode, key) in enumerate(keys, start=1):
            program = self._valid_program(mode, key)
            try:
                if program is not None and self._admitted.get((mode, key)) is not program:
                    self._first_replay(mode, key, before_warmup)
                    self._admitted[mode, key] = program
            except Exception as error:
                self._reject(mode, key, error)
                # Raises if the error left the device unusable: there is nothing to go on with.
                self.device.synchronize()
                tell(key)
                if on_error == "raise":
                    self._admit_all(keys[number:], before_warmup, tell, on_error="skip")
                    raise
            else:
                tell(key)

    def _reject(self, mode: RuntimeMode, key: BatchDescriptor, error: Exception) -> None:
        """Let a program never serve (again), and say so."""
        wrapper = self._wrappers[mode]
        wrapper.concrete_cudagraph_entries[key].invalidate()
        self._failures[mode, key] = str(error)
        if self._observer is not None:
            self._observer(
                CaptureFailed(wrapper.owner, mode, key, type(error).__name__, str(error))
            )

    def _first_replay(
        self, mode: RuntimeMode, key: BatchDescriptor, before_warmup: HostState | None
    ) -> None:
        """Play a new program once, on inputs other than those it was captured with."""
        example = self._examples(key, 1)
        sizes = {TOKENS: example.num_tokens, REQUESTS: example.num_reqs}
        launch = self._launch(mode, key)
        saved = None if self._state is None else self._state.save()
        try:
            if before_warmup is None:
                self._replay(launch, sizes, example.values, example.live)
            else:
                self._verified(launch, sizes, example.values, example.live, before_warmup)
        finally:
            if self._state is not None:
                self._state.restore(saved)

    def _example_call(self, key: BatchDescriptor, seed: int) -> tuple[tuple[()], dict[str, Any]]:
        """Stage an example and return the call that reads it."""
        example = self._examples(key, seed)
        bound = self._buffers.bind(key)
        bound.stage({TOKENS: example.num_tokens, REQUESTS: example.num_reqs}, example.values)
        return (), bound.views

    # -- step ----------------------------------------------------------------------------------

    def step(
        self,
        values: Mapping[str, torch.Tensor],
        *,
        num_tokens: int,
        num_reqs: int,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = _NOTHING,
        live: Any = None,
    ) -> Any:
        """Run one batch through the graph that fits it, or eagerly with a counted reason.

        Shapes:   each value has the real size along its buffer's axes ("tokens": ``num_tokens``,
                  "requests": ``num_reqs``); the result is sliced to those sizes.
        Aliasing: with the output policy "view" the result is graph storage: the next step
                  overwrites it. Clone to keep.
        Errors:   ``BatchError`` for what is no batch, ``InputMismatchError`` for values that do not
                  fit, ``MissError`` in strict mode, ``VerificationError`` where a sampled
                  comparison with eager differs: that program serves no more (``CAPTURE_FAILED``).
                  A failed replay is never repeated eagerly.
        """
        started = perf_counter_ns()
        if uniform and num_tokens != num_reqs * self._query_len:
            self._refuse_uniform(num_tokens, num_reqs)
        decision = self._dispatch(num_tokens, uniform, num_active_loras, exclude)
        self.last_decision = decision
        mode, key, reason = decision
        sizes = {TOKENS: num_tokens, REQUESTS: num_reqs}
        if mode is RuntimeMode.NONE:
            if reason is MissReason.NOT_CAPTURED_YET:
                self._priority.note_miss(num_tokens, uniform, num_active_loras, exclude)
            outputs = self._step_eager(decision, sizes, values, live)
            if self._observer is not None:
                host_us = (perf_counter_ns() - started) / 1000
                self._observer(RanEager(reason, num_tokens, num_reqs, uniform, host_us))
            return outputs

        launch = self._launches[mode][key]
        if self._verify_every:
            outputs = self._replay_sampled(launch, sizes, values, live)
        else:
            outputs = self._replay(launch, sizes, values, live)
        if self._observer is not None:
            host_us = (perf_counter_ns() - started) / 1000
            self._observer(
                Replayed(mode, reason, num_tokens, key.num_tokens, num_reqs, uniform, host_us)
            )
        return outputs

    def _replay(
        self, launch: _Launch, sizes: Mapping[str, int], values: Mapping[str, Any], live: Any
    ) -> Any:
        mode, key, bound, take, wrapper = launch
        self._outputs.expire()
        bound.stage(sizes, values)
        for resource in self._resources:
            resource.prepare(key, live)
        with ForwardContext(mode, key, attn_metadata=live):
            if torch.is_grad_enabled():
                # Gaps run the model's Python; what they return must not grow a graph of its own.
                with torch.no_grad():
                    wrapper(**bound.views)
            else:
                wrapper(**bound.views)
        return take(sizes)

    def _step_eager(
        self,
        decision: Decision,
        sizes: Mapping[str, int],
        values: Mapping[str, Any],
        live: Any,
    ) -> Any:
        key, reason = decision.descriptor, decision.reason
        if self._strict:
            raise MissError(
                f"a step of {sizes[TOKENS]} tokens and {sizes[REQUESTS]} requests",
                expected="a captured graph for every step (on_miss='strict')",
                found=f"none serves it: {reason.name}",
                do="capture a size that holds it, or set on_miss='eager'. The step did not run",
                reason=reason,
            )
        bound = self._buffers.live(sizes)
        self._outputs.expire()
        bound.stage(sizes, values)
        for resource in self._resources:
            resource.prepare(key, live)
        with torch.no_grad(), ForwardContext(RuntimeMode.NONE, key, attn_metadata=live):
            outputs = self._model(**bound.views)
        if self._is_eager_as_is:
            return outputs
        return self._outputs.bind(outputs).take(sizes)

    def _refuse_uniform(self, num_tokens: int, num_reqs: int) -> NoReturn:
        raise BatchError(
            f"a uniform step of {num_tokens} tokens",
            expected=f"num_tokens == num_reqs * {self._query_len}",
            found=f"num_reqs = {num_reqs}",
            do="pass uniform=True only where every request brings exactly that many tokens",
        )

    # -- verification --------------------------------------------------------------------------

    def _replay_sampled(
        self, launch: _Launch, sizes: Mapping[str, int], values: Mapping[str, Any], live: Any
    ) -> Any:
        """Replay; every ``verify_every``-th time also run eagerly first and compare real rows."""
        self._until_verify -= 1
        if self._until_verify > 0:
            return self._replay(launch, sizes, values, live)
        self._until_verify = self._verify_every
        try:
            return self._verified(launch, sizes, values, live)
        except VerificationError as error:
            self._reject(launch.mode, launch.key, error)
            self._publish()
            raise

    def _verified(
        self,
        launch: _Launch,
        sizes: Mapping[str, int],
        values: Mapping[str, Any],
        live: Any,
        before_warmup: HostState | None = None,
    ) -> Any:
        """Run one step eagerly and as a replay from the same state; raise if they differ.

        Eager means the model itself on the key's *padded* views: padding is not bit-neutral,
        because another number of rows may choose another kernel. Resources are prepared once.
        """
        mode, key, bound, take, wrapper = launch
        self._outputs.expire()
        bound.stage(sizes, values)
        for resource in self._resources:
            resource.prepare(key, live)

        def run_eager() -> Any:
            with torch.no_grad(), ForwardContext(RuntimeMode.NONE, key, attn_metadata=live):
                return self._outputs.bind(self._model(**bound.views)).take(sizes)

        def run_replay() -> Any:
            bound.stage(sizes, values)  # Again: the eager run may write buffers.
            with torch.no_grad(), ForwardContext(mode, key, attn_metadata=live):
                wrapper(**bound.views)
            return take(sizes)

        return check_replay(
            mode=mode,
            key=key,
            run_eager=run_eager,
            run_replay=run_replay,
            state=self._state,
            runnable=self._model,
            before_warmup=before_warmup,
            tolerance=self._verify_tolerance,
            observer=self._observer,
        ).outputs

    # -- what is published ---------------------------------------------------------------------

    def _launch(self, mode: RuntimeMode, key: BatchDescriptor) -> _Launch:
        wrapper = self._wrappers[mode]
        outputs = wrapper.concrete_cudagraph_entries[key].outputs
        take = self._outputs.bind(outputs).take
        return _Launch(mode, key, self._buffers.bind(key), take, wrapper)

    def _publish(self) -> None:
        """Give dispatch exactly the programs that are ready; every other key says why not."""
        launches: dict[RuntimeMode, dict[BatchDescriptor, _Launch]] = {}
        missing: dict[Key, MissReason] = {}
        for mode, key in self.plan.capture_order:
            program = self._wrappers[mode].concrete_cudagraph_entries.get(key)
            is_admitted = program is not None and self._admitted.get((mode, key)) is program
            if program is not None and program.is_valid and is_admitted:
                launches.setdefault(mode, {})[key] = self._launch(mode, key)
            elif (mode, key) in self._failures:
                missing[mode, key] = MissReason.CAPTURE_FAILED
            elif program is None or program.is_valid:
                missing[mode, key] = MissReason.NOT_CAPTURED_YET
            else:
                missing[mode, key] = MissReason.INVALIDATED
        self._launches = launches
        self._missing = missing
        self._priority.publish(missing)
        if not self._priority.left:
            self._parts = None
        self.dispatcher = CUDAGraphDispatcher(self.plan, unpublished=missing)
        self._dispatch: Callable[..., Decision] = self.dispatcher.dispatch

    def check_externals(self) -> ExternalsReport:
        """Ask whether a tensor that programs read has moved (weights replaced, not copied into).

        Programs that read one become invalid: their steps run eager (``INVALIDATED``) until
        ``capture()`` is called again.
        """
        self._require_open()
        report = self.library.check_externals()
        self._publish()
        return report

    def report(self) -> RuntimeReport:
        """What is captured, what is not and why, and what it costs."""
        graphs = []
        for mode, wrapper in self._wrappers.items():
            for key, program in wrapper.concrete_cudagraph_entries.items():
                graphs.append(
                    CapturedGraph(
                        mode=mode,
                        key=key,
                        state=program.state,
                        num_graphs=program.num_graphs,
                        num_gaps=program.num_gaps,
                        seconds=self._seconds.get((mode, key), 0.0),
                        memory=program.memory,
                    )
                )
        return RuntimeReport(
            device=self.device.name,
            resolved=self.resolved,
            graphs=tuple(graphs),
            missing=MappingProxyType(dict(self._missing)),
            failures=MappingProxyType(dict(self._failures)),
            capture_seconds=self._capture_seconds,
            graph_bytes=self.library.charged_bytes,
        )

    def _axis_sizes(self, key: BatchDescriptor) -> Mapping[str, int]:
        # Pieces do not depend on requests, their static inputs still have a size: the most a batch
        # of that many tokens can bring.
        num_reqs = key.num_reqs
        if num_reqs is None:
            num_reqs = min(key.num_tokens, self.plan.max_num_seqs)
        return {TOKENS: key.num_tokens, REQUESTS: num_reqs}

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Retire every program, drop the buffers, release the device if this runtime made it.

        Idempotent. A step after it raises ``LibraryClosedError``.
        Errors: ``CaptureInProgressError`` while a capture scope of its library is open.
        """
        self.library.close()
        self._is_closed = True
        self._outputs.expire()
        self._launches = {}
        self._admitted = {}
        self._parts = None
        self._dispatch = self._dispatch_closed
        if self._owns_device:
            self.device.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise LibraryClosedError(
                "runtime",
                expected="an open runtime",
                found="a use after close()",
                do="make a new Runtime",
            )

    def _dispatch_closed(self, *_: object) -> NoReturn:
        self._require_open()
        raise AssertionError("only a closed runtime dispatches here")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Launch(NamedTuple):
    """What one key's replay needs, looked up once."""

    mode: RuntimeMode
    key: BatchDescriptor
    bound: BoundBuffers
    take: Callable[[Mapping[str, int]], Any]
    wrapper: CUDAGraphWrapper


class _Parts(NamedTuple):
    """What the model remembered before and after the parts of a capture so far."""

    before: HostState
    after: HostState


class _Ticker:
    """Counts progress for a caller who may not care, and lets an interrupt in between two keys."""

    def __init__(
        self, progress: Progress | None, total: int, check_interrupt: Callable[[], None]
    ) -> None:
        self.check_interrupt = check_interrupt
        self._progress = progress
        self._total = total
        self._done = 0

    def __call__(self, key: BatchDescriptor) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total, key)
        self.check_interrupt()

"""What an engine holds: puts the parts together, says when to capture, sends each step its way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from time import perf_counter, perf_counter_ns
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self

import torch

from graphrt.batch import BatchDescriptor, Decision, MissReason, RuntimeMode
from graphrt.config import Facts, RuntimeConfig, resolve
from graphrt.device import DeviceName, make_device
from graphrt.device.base import Device
from graphrt.dispatch import CapturePriority, CUDAGraphDispatcher
from graphrt.errors import VerificationError
from graphrt.events import Captured, Event, Observer, RanEager, Replayed
from graphrt.graphs import (
    BufferSet,
    BufferSpec,
    CUDAGraphWrapper,
    ExternalsReport,
    GraphBudget,
    GraphLibrary,
    OutputSpec,
    Resource,
    StaleCheck,
    StateGuard,
)
from graphrt.graphs.collection import old_heap_aside
from graphrt.interrupts import interrupted_between_steps
from graphrt.runtime import refusals
from graphrt.runtime.admission import Admissions, Key
from graphrt.runtime.capturing import Capturer, Example, Progress
from graphrt.runtime.report import RuntimeReport, captured_graphs
from graphrt.runtime.steps import REQUESTS, TOKENS, Launch, Steps, axis_sizes

_NOTHING: frozenset[RuntimeMode] = frozenset()


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
        self._observer = observer
        resources, sinks, holds = tuple(resources), tuple(sinks), tuple(holds)
        self._verify_every = self.config.verify_every or 0
        self._until_verify = self._verify_every
        self._strict = self.config.on_miss == "strict"
        self._query_len = self.plan.query_len
        if outputs.axes is None:
            raise refusals.undeclared_outputs()
        # A copy: leases of two runtimes that were given one spec must not end each other.
        outputs = OutputSpec(outputs.axes, outputs.policy)

        self._seconds: dict[Key, float] = {}
        self._capture_seconds = 0.0
        self._priority = CapturePriority(self.plan)
        self._is_closed = False

        self._owns_device = isinstance(device, str)
        self.device = make_device(device) if isinstance(device, str) else device
        try:
            self._make_storage(inputs)
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise
        self._steps = Steps(
            model, self._buffers, outputs, resources, state, verify_tolerance, observer
        )
        # Looked up here, not in every step.
        self._replay = self._steps.replay
        self._admissions = Admissions(self.plan, self._wrappers, observer)
        self._capturer = Capturer(
            self.config,
            self.plan,
            self.library,
            self._wrappers,
            self._steps,
            self._admissions,
            examples=examples,
            sinks=sinks,
            holds=holds,
        )
        self._publish()

    def _make_storage(self, inputs: Sequence[BufferSpec]) -> None:
        """Make what lives on the device: static buffers, the library, and a wrapper per mode."""
        self._buffers = BufferSet(
            inputs,
            capacity={TOKENS: self.plan.max_num_batched_tokens, REQUESTS: self.plan.max_num_seqs},
            axis_sizes=partial(axis_sizes, max_num_seqs=self.plan.max_num_seqs),
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

    # -- start

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
            self._capturer.capture(wanted, self._missing, progress, check_interrupt)
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
            raise refusals.not_a_number_of_keys(at_most)
        keys = self._priority.order(first)
        allowed = (item for item in keys if allow is None or allow(item[1]))
        chosen = list(islice(allowed, at_most))
        if chosen:
            in_order = [item for item in self.plan.capture_order if item in chosen]
            try:
                # In this order, Ctrl-C is held back where the heap is put aside and thawed.
                with self._capturing() as check_interrupt, old_heap_aside():
                    self._capturer.add(in_order, check_interrupt)
            finally:
                if self.library.failure_book.fuse_is_open and self._priority.left:
                    self._capturer.refuse(self._priority.left)
                    self._publish()
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

    # -- step

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
            raise refusals.not_uniform(num_tokens, num_reqs, self._query_len)
        decision = self._dispatch(num_tokens, uniform, num_active_loras, exclude)
        self.last_decision = decision
        mode, key, reason = decision
        sizes = {TOKENS: num_tokens, REQUESTS: num_reqs}
        if mode is RuntimeMode.NONE:
            if reason is MissReason.NOT_CAPTURED_YET:
                self._priority.note_miss(num_tokens, uniform, num_active_loras, exclude)
            if self._strict:
                raise refusals.missed(reason, num_tokens, num_reqs)
            outputs = self._steps.eager(key, sizes, values, live)
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

    def _replay_sampled(
        self, launch: Launch, sizes: Mapping[str, int], values: Mapping[str, Any], live: Any
    ) -> Any:
        """Replay; every ``verify_every``-th time also run eagerly first and compare real rows."""
        self._until_verify -= 1
        if self._until_verify > 0:
            return self._replay(launch, sizes, values, live)
        self._until_verify = self._verify_every
        try:
            return self._steps.verified(launch, sizes, values, live)
        except VerificationError as error:
            self._admissions.reject(launch.mode, launch.key, error)
            self._publish()
            raise

    # -- what is published

    def _publish(self) -> None:
        """Give dispatch exactly the programs that are ready; every other key says why not."""
        missing = self._admissions.missing()
        launches: dict[RuntimeMode, dict[BatchDescriptor, Launch]] = {}
        for mode, key in self.plan.capture_order:
            if (mode, key) not in missing:
                launch = self._steps.launch(self._wrappers[mode], key)
                launches.setdefault(mode, {})[key] = launch
        self._launches = launches
        self._missing = missing
        self._priority.publish(missing)
        if not self._priority.left:
            self._capturer.forget_parts()
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
        return RuntimeReport(
            device=self.device.name,
            resolved=self.resolved,
            graphs=captured_graphs(self._admissions.programs(), self._seconds),
            missing=MappingProxyType(dict(self._missing)),
            failures=MappingProxyType(dict(self._admissions.failures)),
            capture_seconds=self._capture_seconds,
            graph_bytes=self.library.charged_bytes,
        )

    # -- end

    def close(self) -> None:
        """Retire every program, drop the buffers, release the device if this runtime made it.

        Idempotent. A step after it raises ``LibraryClosedError``.
        Errors: ``CaptureInProgressError`` while a capture scope of its library is open.
        """
        self.library.close()
        self._is_closed = True
        self._steps.outputs.expire()
        self._launches = {}
        self._admissions.clear()
        self._capturer.forget_parts()
        self._dispatch = self._dispatch_closed
        if self._owns_device:
            self.device.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise refusals.closed()

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

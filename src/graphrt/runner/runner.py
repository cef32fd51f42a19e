"""The core: buffers, capture, first-replay check, run, reasons and events of one callable."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, islice
from time import perf_counter_ns
from typing import Any, Literal, NoReturn, Self

import torch
from torch import is_grad_enabled

from graphrt.batch import BatchDescriptor, Decision, Reason, RuntimeMode
from graphrt.config.checked import (
    check_callable,
    check_choice,
    check_count,
    check_hashable,
    check_number,
    check_type,
    checked_list,
)
from graphrt.context import current_forward_context
from graphrt.device import DeviceName
from graphrt.device.base import Device
from graphrt.device.torch_modes import set_grad_enabled
from graphrt.dispatch import NOTHING, BucketKey, ordered_sizes
from graphrt.errors import (
    BatchError,
    ConfigError,
    ReentrantStepError,
    VerificationError,
    copy_error,
    shown as shown_value,
)
from graphrt.events import (
    CaptureFailed,
    Event,
    Invalidated,
    KeysChanged,
    Observer,
    RanEager,
    Replayed,
    Withdrawn,
)
from graphrt.externals import ExternalsReport
from graphrt.externals.held import bytes_of
from graphrt.gc_pause import frozen_heap
from graphrt.graphs import (
    BufferSpec,
    CaptureOptions,
    GraphLibrary,
    Key,
    OutputSpec,
    Resource,
    StateGuard,
    Watch,
    WatchMode,
    Workspace,
)
from graphrt.graphs.buffers import require_tensor
from graphrt.parallel import Lockstep
from graphrt.report import Progress, StepMetrics, shown
from graphrt.runner.captures import Captures
from graphrt.runner.comparisons import Comparisons, Varying
from graphrt.runner.examples import Example, Examples, Sizes, Values, make_example
from graphrt.runner.executor import Call, Executor, Inputs, ProfiledExecutor, ReadyGraph
from graphrt.runner.keys import (
    BY_AXIS,
    Dispatcher,
    KeySpace,
    NoDispatcher,
    RunnerKeys,
    batch_key,
    check_specs,
    closed_error,
    in_order,
    key_space,
    make_key,
    miss_error,
    no_examples_error,
    require_decision,
)
from graphrt.runner.report import (
    Misses,
    RunnerReport,
    Subject,
    above_largest,
    captured_graphs,
    explain_entry,
    failure_text,
    replaced,
)
from graphrt.source import caller_source
from graphrt.verify import explain

# CPython 3.11 looks a member up through a Python property; a run has no time for that.
_EAGER = RuntimeMode.NONE

_FIXED = {"calls": 1}
"""The size along an axis that no input has: where all calls have the same shapes."""


def _ignore_event(event: Event) -> None:
    """The observer where there is none."""


class CUDAGraphRunner:
    """Serves calls of ``fn`` through captured graphs, for any named axes.

    ``fn`` is called with keyword arguments named as ``inputs``: views of static buffers, padded to
    the key, in graphs; copies of the real size, which it may keep, in eager runs. It runs under
    ``torch.no_grad``.
    ``inputs``: a spec for each, or ``key -> specs``. Where an axis stands behind dimension 0, or
    specs depend on the key, each key has contiguous buffers of its own. None: every call has the
    shapes and dtypes of ``examples``, which then says all that there is to say of inputs.
    ``outputs``: which dimensions of the outputs are padded; None: none, as all shapes are fixed.
    ``sizes``: axis -> padded sizes; there is a key for every combination. None: keys are the
    caller's, see ``key``, with sizes up to ``capacity`` (default: the largest of ``sizes``). With
    neither, and no axis in ``inputs``, there is one key: all calls have the same shapes.
    ``modes``: ``"FULL"``, ``"PIECEWISE"`` or both; the first that has a graph serves, FULL first.
    ``examples(sizes, seed)``: valid inputs of exactly these real sizes, an ``Example`` or values by
    name, different for each seed: seed 0 is captured, seed 1 checked. None: ``capture(like=...)``
    makes them of one real batch; until then all runs are eager.
    ``library``: where the programs go; None: one of its own on ``device``, both closed with it. A
    ``device`` given as an object is not closed. Runners of one library end each other's outputs.
    ``state`` guards what a run advances; ``may_overwrite``: tensors that warm-ups and checks may
    write where the examples point, with the rows that a run writes where they are large:
    ``{cache: "slot_mapping"}`` names the input that indexes rows of ``cache``, and these are
    compared. No run may write others, which is seen in up to 64 MiB of such tensors. A tensor whose
    rows a run reads and writes, with a row meant for padding, is given to both.
    ``keep_alive``: tensors that kernels know by address alone. ``resources`` are prepared before
    every run; a compared one prepares them again, so ``prepare`` must not advance anything.
    ``verify``: ``"first"`` compares each first replay with eager: a batch that fills the key bit
    for bit, then batches that are padded to it with the same batch unpadded, and with other rows
    as padding (``check_padding``); ``"off"`` plays it only. ``verify_every``: also compare one run
    in so many, these two in turns; padded integers are those of the sample before, where they are
    declared arbitrary, else the run's own. ``verify_tolerance`` None: bit-equal.
    ``reads_padding``: why real rows depend on padding on purpose (a scale of the whole batch).
    ``on_miss``: run eager, or raise ``MissError`` (``"strict"``).
    ``watch``: how it is noticed that something was replaced that graphs read besides their inputs
    (weights, attributes, variables, host values). ``"spread"``: registrations in modules at once,
    the rest four places before each graph run; ``"always"``: everything before each; ``"off"``:
    only when ``check_externals`` asks. ``num_watched`` says how many places there are.
    ``nvtx``: put a range with mode and key around each graph or eager run, for Nsight Systems.
    ``layers``: what operators and eager segments find in the forward context under that name.
    ``space``: for an engine with keys of its own, in place of ``modes``, ``sizes`` and
    ``capacity``: which keys there are, and what makes the decisions that ``execute`` is given.
    ``lockstep``: captures and compares together with other ranks, whose engine decides with them.

    Not thread-safe: a run or capture that begins before another one has ended, inside it or on
    another thread, raises ``ReentrantStepError``.
    Errors: ``ConfigError`` for what cannot be honoured.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        inputs: Inputs | None = None,
        outputs: OutputSpec | None = None,
        sizes: Mapping[str, Sequence[int]] | None = None,
        capacity: Sizes | None = None,
        modes: Sequence[str] = ("FULL",),
        examples: Examples | None = None,
        device: Device | DeviceName = "auto",
        library: GraphLibrary | None = None,
        state: StateGuard | None = None,
        may_overwrite: Sequence[torch.Tensor] | Mapping[torch.Tensor, str] = (),
        keep_alive: Sequence[torch.Tensor] = (),
        resources: Sequence[Resource | Workspace] = (),
        verify: Literal["first", "off"] = "first",
        verify_every: int | None = None,
        verify_tolerance: float | None = None,
        reads_padding: str = "",
        watch: WatchMode = "spread",
        on_miss: Literal["eager", "strict"] = "eager",
        on_capture_error: Literal["raise", "skip"] = "raise",
        warmups: int = 1,
        observe: Literal["ends", "always", "never"] | None = None,
        observer: Observer | None = None,
        nvtx: bool = False,
        name: str | None = None,
        layers: Mapping[str, Any] | None = None,
        space: KeySpace | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        check_choice("verify", verify, ("first", "off"))
        check_choice("on_miss", on_miss, ("eager", "strict"))
        check_choice("watch", watch, ("spread", "always", "off"))
        if verify_tolerance is not None:
            check_number("verify_tolerance", verify_tolerance)
        if verify_every is not None:
            check_count("verify_every", verify_every)
        check_callable("the callable of a runner", fn)
        for which, given in (("examples", examples), ("observer", observer)):
            if given is not None:
                check_callable(which, given)
        check_type("name", name, str | None, "a text")
        check_type("reads_padding", reads_padding, str, "why results depend on padding, in words")
        check_type("library", library, GraphLibrary | None, "a GraphLibrary")
        check_type("space", space, KeySpace | None, "a KeySpace")
        check_type("lockstep", lockstep, Lockstep | None, "a Lockstep")
        check_type("nvtx", nvtx, bool, "True or False")
        for which, each in (("sizes", sizes), ("capacity", capacity)):
            check_type(which, each, Mapping | None, BY_AXIS, "name the axis")
        if library is not None:
            check_choice("device of a runner in a library", device, ("auto", library.device))
        has_keys = bool(sizes or capacity or space)
        inputs, outputs, self._fixed = _declared(inputs, outputs, examples, has_keys=has_keys)
        if self._fixed:
            sizes = {axis: [size] for axis, size in self._fixed.items()}
        space = space or key_space(modes, sizes, capacity)
        options = CaptureOptions(
            state=state,
            may_overwrite=may_overwrite,  # Of a mapping its keys.
            keep_alive=keep_alive,
            resources=resources,
            warmups=warmups,
            on_error=on_capture_error,
            observe=observe,
            layers=layers,
        )

        self.fn, self._space = fn, space
        self._observer = _ignore_event if observer is None else observer
        self.capacity = space.capacity
        """Axis -> the largest padded size, in the order of a key's sizes."""
        self._owns_library = library is None
        self.library = library or GraphLibrary(device, observer=observer)
        self.device = self.library.device
        self.name = name or str(getattr(fn, "__qualname__", type(fn).__qualname__))
        """The owner of the programs in the library."""
        with ExitStack() as on_error:
            if self._owns_library:
                on_error.callback(self.library.close)
            self._executor = (ProfiledExecutor if nvtx else Executor)(
                fn=fn,
                library=self.library,
                inputs=inputs,
                declared=outputs,
                space=space,
                examples=examples,
                options=options,
                written_rows=may_overwrite if isinstance(may_overwrite, Mapping) else {},
            )
            for mode in space.modes:
                self.name = self.library.catalog.add_owner(name, mode, self.name).owner
            self._executor.register()
            on_error.pop_all()
        self._keys = RunnerKeys(self.library.catalog, self.name, space)
        self._executor.is_padded = self._keys.is_padded
        self._comparisons = Comparisons(
            executor=self._executor,
            lockstep=lockstep,
            observer=self._observer,
            verifies=verify == "first",
            tolerance=verify_tolerance,
            reads_padding=reads_padding,
            is_strict=on_miss == "strict",
        )
        if verify == "first":  # Ranks compare together, so that one alone cannot.
            both = partial(self._compare, is_prepared=True)
            self._executor.run_otherwise = both if lockstep is None else self._run_unreplayed
        self._captures = Captures(self._keys, self._comparisons)
        self._watch = Watch(watch)
        self._watch.start()
        self.library.watches.add(self._watch)
        self._look = self._watch.look_at_all if watch == "always" else self._watch.look

        self._has_own_examples = examples is not None
        self._verify_every, self._run_numbers = verify_every, count(1)
        # Empty during a run. To pop asks and takes in one, so that no other thread comes between;
        # a lock would take five times as long.
        self._turn, self._is_closed = [True], False
        self.last_decision: Decision | None = None
        self.split_failure: Mapping[Key, str] = {}
        """The call that was not cut rightly into micro-batches, and why: from then on none is."""
        self._misses: dict[Reason, Misses] = {}
        self._set_otherwise: dict[str, None] = {}
        """Names of what resources have set to what no example had, and one rank cannot compare."""
        self._ready: dict[RuntimeMode, dict[int, ReadyGraph]] = {mode: {} for mode in RuntimeMode}
        """By mode, and by the id of the key object, which the graph holds."""
        self._prospects: Dispatcher | None = None
        """Dispatches as if everything were captured. Made when it is asked for."""
        self._refresh()

    # -- keys

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every key with its mode, in capture order."""
        return tuple(self._keys.entries)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.capacity)

    def key(self, *, variant: object = None, **sizes: int) -> BatchDescriptor:
        """The key of these padded sizes, one for each axis.

        Errors: ``BatchError`` for a missing or unknown axis, or a size beyond the capacity;
                ``ConfigError`` for a ``variant`` that cannot be hashed.
        """
        check_hashable("variant", variant)
        return make_key(in_order(self.capacity, sizes, "padded"), variant)

    def real_sizes(self, values: Values) -> dict[str, int]:
        """The size of each axis, read off the shapes of ``values``.

        Errors: ``InputMismatchError`` for an unknown name, a shape that is not its spec's, inputs
                that disagree, and an axis of no given input.
        """
        self.require_open()
        return {**self._fixed, **self._executor.real_sizes(values)}

    # -- capture

    def capture(
        self,
        keys: Iterable[Key | BatchDescriptor] | None = None,
        *,
        like: Example | Values | None = None,
        progress: Progress | bool | None = None,
    ) -> RunnerReport:
        """Capture every key that no graph serves yet, and check each first replay.

        ``keys``: capture no others now, in capture order; a bare descriptor means every mode. A
        small key captured before a large one costs pool memory, as the report shows.
        ``progress``: a callable, or True for a bar on stderr.

        ``like``: one real batch, of any sizes >= 1, in place of ``examples``, for this capture and
        those that follow: tensors by input name, or an ``Example`` with the ``step_info`` that its
        steps have, which is passed as it is. Its rows are repeated or cut to the sizes of each key,
        and rotated by the seed, so that contents stay valid where rows do not depend on each other.
        Give ``examples`` where values count rows of the same batch (lengths) or point at them
        (token -> request), several rows belong together (the tokens of a prompt), or ``step_info``
        has to agree with the sizes.

        A program may be dispatched to only after its first replay, on inputs other than those it
        was captured with, equalled eager execution. Runs before that are eager
        (``NOT_CAPTURED_YET``). May be called again: after an error, an interrupt, or when tensors
        that programs read have moved; then every key is captured anew, because graphs that share
        a pool go together. Those that still serve go on until the new ones take their place.

        Ctrl-C takes effect between two keys, where nothing is half recorded; a second one, at once.

        Aliasing: ends the validity of every output that a run returned.
        Errors:   the first failure is raised, ``VerificationError`` included, unless failures are
                  skipped; either way what was captured serves. ``ConfigError`` for what is no key,
                  without examples, and for ``like`` beside ``examples``; ``InputMismatchError`` for
                  ``like`` that is no batch of these inputs; ``CaptureInProgressError`` while a
                  scope of the library is open; ``LibraryClosedError`` after ``close()``.
        """
        self._require_idle("capture")
        wanted = self._keys.select(keys)
        if like is not None:
            if self._has_own_examples:
                raise ConfigError(
                    "capture(like=...)",
                    expected="a real batch, or examples(sizes, seed), which makes batches",
                    found="both",
                    do="leave one of them out",
                )
            self._executor.use_examples_like(like)
        if not isinstance(progress, bool | None):
            check_callable("progress", progress)
        with (
            self._one_at_a_time("capture"),
            self._captures.part(self._refresh) as capture,
            shown(progress, self.name) as tell,
        ):
            # Programs over a tensor that has moved unnoticed are to be captured anew as well.
            self._invalidate_replaced()
            chosen, generation = self._captures.choose(wanted)
            self.library.catalog.forget_failures((e.owner, e.mode, e.key) for e in wanted)
            self._forget_cuts()
            self._set_otherwise.clear()  # Other examples may set it.
            capture(chosen, generation, tell)
        return self.report()

    def capture_next(
        self,
        at_most: int = 1,
        *,
        first: Key | None = None,
        allow: Callable[[BatchDescriptor], bool] | None = None,
    ) -> int:
        """Capture the next ``at_most`` keys, between two runs; return how many remain.

        Those are the keys that are ``NOT_CAPTURED_YET``; what failed or was invalidated is left to
        ``capture()``. Priority: ``first``, then what runs missed, most often before less often,
        then capture order. ``allow(key)`` False leaves a key to a later call, and its runs eager.

        Programs that serve go on, and no check asks here whether a tensor they read has moved. As
        in ``capture()``, a key serves only after its first replay was right; outputs of runs end;
        errors are raised or, with ``on_capture_error="skip"``, kept, and after three in a row no
        other key is tried. Collections leave the old heap out, so that the call takes about as
        long as a warm-up, a capture and a comparison with eager. What anything but these changes of
        the model's Python attributes between two calls counts as the model's own state.

        Errors: as ``capture()``; ``ConfigError`` for an ``at_most`` below 1.
        """
        self._require_idle("capture_next")
        self._require_alone("capture_next")
        check_count("at_most", at_most)
        if allow is not None:
            check_callable("allow", allow)
        wanted = self._keys.select([first]) if first is not None else []
        order = [entry for entry in wanted if entry.reason is Reason.NOT_CAPTURED_YET]
        order += [entry for entry in self._keys.by_misses() if entry not in order]
        chosen = list(islice((e for e in order if allow is None or allow(e.key)), at_most))
        if chosen:
            try:
                # In this order, Ctrl-C is held back where the heap is frozen and thawed.
                part = self._captures.part(self._refresh)
                with self._one_at_a_time("capture_next"), part as capture, frozen_heap():
                    capture(self._captures.recheck(chosen), "current", None)
            finally:
                if self._captures.fail_the_rest():
                    self._refresh()
        return len(self._keys.pending())

    def withdraw(self, keys: Iterable[Key | BatchDescriptor], reason: str) -> int:
        """Drop the programs of ``keys``; return how many there were. Call it between two runs.

        For a change on the host that ``watch`` cannot see: the model calls other kernels from now
        on. Runs of these keys are eager (``NOT_CAPTURED_YET``) until ``capture`` or
        ``capture_next`` captures them again. Waits for the device and frees the graphs; later
        captures reuse their memory in the pool. Keys whose capture failed may be tried again too.
        Emits ``Withdrawn`` with ``reason``, also for none.

        Aliasing: ends the validity of every output that a run returned.
        Errors:   ``ConfigError`` with ``lockstep``, and for what is no key.
        """
        self._require_idle("withdraw")
        self._require_alone("withdraw")
        check_type("reason", reason, str, "why the keys are withdrawn, in words")
        chosen = self._keys.select(keys)
        programs = [entry.program for entry in chosen if entry.program is not None]
        if programs:
            with self._one_at_a_time("withdraw"):
                self._executor.outputs.expire()
                self.device.synchronize()
                self.library.drop(programs)
        # Other kernels may succeed where those before failed.
        self.library.catalog.forget_failures((e.owner, e.mode, e.key) for e in chosen)
        self._forget_cuts()
        self._observer(Withdrawn(self.name, len(programs), reason))
        self._refresh()
        return len(programs)

    def time_replays(self, keys: Sequence[Key]) -> list[int]:
        """Nanoseconds that a replay of each of these ready keys takes on an example, host and
        device together; of several ranks, which all call this, on the slowest.

        Ends the outputs of runs. State stays as it was.

        Errors: ``ConfigError`` for what is no key of this runner with its mode; ``BatchError`` for
                one that no graph serves now.
        """
        self._require_idle("time_replays")
        entries = [
            self._find_ready(Decision(entry.mode, entry.key, Reason.HIT)).entry
            for key in checked_list("keys", keys, tuple, "keys of this runner, each with its mode")
            for entry in self._keys.select([key])
        ]
        with self._one_at_a_time("time_replays"), torch.no_grad():
            times = self._comparisons.time_replays(entries)
        lockstep = self._comparisons.lockstep
        return times if lockstep is None else lockstep.slowest(times)

    def trace(
        self,
        sizes: Sizes,
        run: Callable[[Callable[[], Any], Varying], None],
        like: Example | Values | None = None,
    ) -> None:
        """Give ``run`` one eager call of ``fn`` on an example of ``sizes``, before any other run.

        ``run(call, varying)``: ``varying`` lists tensor, dimension and axis of the inputs.
        Errors: ``ConfigError`` without examples and ``like``; what the call raises.
        """
        self._require_idle("trace")
        if like is not None:
            self._executor.use_examples_like(like)
        if self._executor.examples is None:
            raise no_examples_error()
        self._comparisons.trace(sizes, run)

    # -- run

    def decide(self, sizes: Sizes, exclude: frozenset[RuntimeMode] = NOTHING) -> Decision:
        """Which key serves a call of these real sizes, and why.

        ``exclude``: modes that may not serve it. Errors: ``BatchError`` for a missing or unknown
        axis; ``ConfigError`` where the keys are the caller's; ``LibraryClosedError`` if closed.
        """
        decision = self.dispatcher.dispatch(sizes, exclude)
        mode, key, _ = decision
        if mode is not RuntimeMode.NONE and not self._ready[mode][id(key)].program.is_valid:
            # Another user of the library has found out that a tensor moved, or retired programs.
            self._refresh()
            decision = self.dispatcher.dispatch(sizes, exclude)
        return decision

    def run(
        self,
        values: Values,
        *,
        key: BatchDescriptor | None = None,
        decision: Decision | None = None,
        sizes: Sizes | None = None,
        step_info: Any = None,
    ) -> Any:
        """Run one call through the graph that fits it, or eagerly with a counted reason.

        Shapes:   each value has the real size along its axes; with ``key``, the padded one, because
                  the caller has padded. ``sizes``: the real sizes, which outputs are cut to; by
                  default those of the values. Along an axis where the caller has padded to the size
                  of the key that ``decide(sizes)`` says, values may have that size as well. Along
                  other dimensions integers, and what declares a padding, may be narrower than
                  their spec: the rest is padding.
        ``decision``: what ``decide`` or a dispatcher of the caller's said, in place of ``key``. A
                  decision that no graph is captured for is counted by the caller: ``note_miss``.
        Aliasing: with the output policy "view" the result is graph storage: the next run
                  overwrites it. Clone to keep.
        Errors:   ``BatchError`` for what is no batch, or a decision that is out of date,
                  ``InputMismatchError`` for values that do not fit, ``MissError`` in strict mode,
                  ``LibraryClosedError`` after ``close()``, ``VerificationError`` where a compared
                  run differs from eager: that program is not replayed again (``CAPTURE_FAILED``). A
                  failed replay is never repeated eagerly.
        """
        self.require_open()
        started = perf_counter_ns()
        staged = None
        if key is not None:
            if decision is not None:
                raise BatchError(
                    "run(key=..., decision=...)",
                    expected="a key, or a decision, which has one",
                    found="both",
                    do="pass one of them",
                )
            staged = self._space.axis_sizes(key)
            sizes = staged if sizes is None else in_order(staged, sizes, "real")
            decision = self._keys.decide(key, sizes, is_exact=sizes == staged)
        elif sizes is None:
            sizes = self.real_sizes(values)
        if decision is not None:
            require_decision(decision)
            ordered_sizes(sizes, self.capacity)
        else:
            decision = self.decide(sizes)
            if decision.reason is Reason.NOT_CAPTURED_YET:
                self.note_miss(sizes, real_sizes=sizes)
        outputs = self.execute(decision, sizes, values, step_info, staged)
        if self._observer is not _ignore_event:
            mode, served, reason = self.last_decision or decision
            host_us = (perf_counter_ns() - started) / 1000
            num_tokens, shape = sizes[self.axes[0]], (sizes.get("requests", 0), served.uniform)
            self.tell(
                RanEager(reason, num_tokens, *shape, host_us)
                if mode is RuntimeMode.NONE
                else Replayed(mode, reason, num_tokens, served.num_tokens, *shape, host_us)
            )
        return outputs

    def tell(self, event: Replayed | RanEager) -> None:
        """Give the observer the event of a run, as a part of that run: another one inside it would
        overwrite outputs that the caller has not got yet."""
        turn, is_refused = self._turn, False
        try:
            try:
                turn.pop()
            except IndexError:
                is_refused = True
                raise self._reentrant_error("the event of a run") from None
            self._observer(event)
        finally:
            if not is_refused:
                turn[:] = (True,)

    def execute(
        self,
        decision: Decision,
        sizes: Sizes,
        values: Values,
        step_info: Any = None,
        staged: Sizes | None = None,
        ubatch_slices: Sequence[Any] | None = None,
    ) -> Any:
        """Run what was decided: the part of ``run`` that an engine with its own dispatcher calls.

        It emits no event. ``sizes``: the real sizes. ``staged``: those of ``values``, where the
        caller has padded them. ``ubatch_slices``: where an eager run is cut, for a callable that
        cuts itself. Shapes, aliasing, errors: as ``run``.
        """
        try:
            mode, key, reason = decision
        except (TypeError, ValueError):
            require_decision(decision)
            raise
        # In variables: to call what an attribute of the object holds takes longer in place.
        has_grad, turn, look = is_grad_enabled(), self._turn, self._look
        is_refused = False
        try:  # From here on: Ctrl-C is noticed where the call of a builtin ends, as that of pop.
            try:
                turn.pop()
            except IndexError:
                is_refused = True
                raise self._reentrant_error("run") from None
            context = current_forward_context()
            if context is not None and context.capture_scope is not None:
                context.capture_scope.note_run(self.name)
            if mode is not _EAGER and not look():
                mode, key, reason = decision = self._decide_again(decision, staged or sizes)
            self.last_decision = decision
            if has_grad:
                # What is staged, and what eager segments return, must not grow a graph of its own.
                set_grad_enabled(False)
            if mode is _EAGER:
                self.require_open()
                require_decision(decision)
                self._misses.setdefault(reason, Misses()).add(sizes)
                if self._comparisons.is_strict:
                    above = above_largest(sizes, self._keys.largest())
                    raise miss_error(reason, sizes, "; ".join(above))
                call = Call(values, sizes, staged or sizes, step_info, ubatch_slices)
                if ubatch_slices is not None and self._comparisons.verifies:
                    return self._cut(decision, call)
                return self._executor.eager(key, call)
            # By identity, as the dispatcher hands keys out: their hash is Python, and slow.
            try:
                ready = self._ready[mode].get(id(key))
            except (KeyError, TypeError):  # No mode.
                ready = None
            if ready is None:
                ready = self._find_ready(decision)
            ready.entry.hits += 1
            if self._verify_every and not next(self._run_numbers) % self._verify_every:
                return self._compare(ready, Call(values, sizes, staged or sizes, step_info))
            return self._executor.replay(ready, values, sizes, staged or sizes, step_info)
        finally:
            if not is_refused:
                turn[:] = (True,)
            if has_grad:
                set_grad_enabled(True)

    def look_before_deciding(self) -> Callable[[], None]:
        """From here on, look at what graphs read when the returned function is called, in place of
        before each graph run: ranks decide together, so that no rank may change its mind later."""
        look, self._look = self._look, lambda: True

        def refresh() -> None:
            if not look():
                self.check_externals()

        return refresh

    def tell_ranks(self, num_tokens_across_ranks: tuple[int, ...] | None) -> None:
        """What the forward context of the next eager run says of the ranks' sizes."""
        self._executor.num_tokens_across_ranks = num_tokens_across_ranks

    def execute_padding(self, decision: Decision, step_info: Any = None) -> None:
        """Run what was decided without a batch, in padding alone: one row of it if eager."""
        sizes = dict.fromkeys(self.axes, int(decision.mode is _EAGER))
        values = self._executor.padding_of(decision.descriptor, sizes)
        self.execute(decision, sizes, values, step_info)

    def _decide_again(self, decision: Decision, staged: Sizes) -> Decision:
        """Look at everything; ``decision``, or an eager one where its program is invalid now, or
        was retired by another user of the library."""
        self.check_externals()
        mode, key, _ = decision
        entry = self._keys.entries.get((mode, key))
        if entry is None or entry.reason is Reason.HIT:
            return decision
        return Decision(RuntimeMode.NONE, batch_key(key, staged), entry.reason)

    def _compare(self, ready: ReadyGraph, call: Call, *, is_prepared: bool = False) -> Any:
        """Also run eagerly, on the padded views and on the batch as it is in turns.

        A program that differs is never replayed again. Nor is any, where there are other ranks,
        whose comparison raised: the others have heard of it, and drop theirs.
        """
        try:
            return self._comparisons.sample(ready, call, is_prepared=is_prepared)
        except Exception as error:
            if self._comparisons.lockstep is None and not isinstance(error, VerificationError):
                raise
            self.library.catalog.mark_wrong(self._keys.entries[ready.mode, ready.key], error)
            self._refresh()
            # The next graph run asks whether anything has moved.
            self._watch.is_marked = self._watch.mode != "off"
            raise

    def _run_unreplayed(self, ready: ReadyGraph, call: Call) -> Any:
        """Run a call eagerly in place of its graph, because resources have set for it what no
        example had: the graph may hold what they had set then."""
        ready.entry.hits -= 1
        reason, sizes = Reason.INVALIDATED, call.sizes
        self.last_decision = Decision(_EAGER, ready.key, reason)
        self._misses.setdefault(reason, Misses()).add(sizes)
        names = ready.program.find_set_otherwise()
        if not self._set_otherwise.keys() >= set(names):
            self._set_otherwise.update(dict.fromkeys(names))
            self._observer(Invalidated(self.name, 0, tuple(names)))
        if self._comparisons.is_strict:
            raise miss_error(reason, sizes, f"no example had {', '.join(names)}")
        return self._executor.eager_as_padded(ready, call)

    def _cut(self, decision: Decision, call: Call) -> Any:
        """Run a call in micro-batches. Where a comparison finds that they differ from the whole
        batch, the result is that of the whole batch, and ``split_failure`` says why."""
        key = decision.descriptor
        every = self._verify_every
        is_due = every is not None and not next(self._run_numbers) % every
        outputs, error = self._comparisons.run_cut(key, call, is_due=is_due)
        if error is not None:
            why = failure_text(error)
            self.split_failure = {(_EAGER, key): why}
            self.last_decision = decision._replace(descriptor=replace(key, num_ubatches=1))
            self._observer(CaptureFailed(self.name, _EAGER, key, type(error).__name__, why))
        return outputs

    def _forget_cuts(self) -> None:
        self._comparisons.right_cuts.clear()
        self.split_failure = {}

    def _find_ready(self, decision: Decision) -> ReadyGraph:
        """The graph of a decision whose key equals a key of this runner but is another object."""
        self.require_open()
        require_decision(decision)
        mode, key, _ = decision
        entry = self._keys.entries.get((mode, key))
        ready = None if entry is None else self._ready[mode].get(id(entry.key))
        if ready is None:
            raise BatchError(
                f"a decision for {mode.name}, {key}",
                expected="a key that a graph of this runner serves now",
                found="no such key" if entry is None else entry.reason.name,
                do="decide again: captures and invalidations change what serves",
            )
        return ready

    # -- what may be dispatched to

    def note_miss(self, *args: Any, real_sizes: Sizes | None = None, **kwargs: Any) -> None:
        """Count a call that ran eager because its key is not captured yet: the more misses, the
        earlier ``capture_next`` captures the key.

        Takes ``dispatch``'s arguments. ``real_sizes``: of the call, which the check of the key's
        first replay pads; by default it pads the smallest.
        """
        item = self.key_for(*args, **kwargs)
        if item is not None:
            self.library.catalog.note_miss(self._keys.entries[item], real_sizes)

    def key_for(self, *args: Any, **kwargs: Any) -> Key | None:
        """The key that serves such a call once all are captured; None if it runs eager even then.

        Takes the dispatcher's arguments. Errors: ``BatchError`` for what is no batch;
        ``LibraryClosedError`` after ``close()``.
        """
        self.require_open()
        if self._prospects is None:
            others = {
                item: entry.reason
                for item, entry in self._keys.entries.items()
                if entry.reason not in (Reason.HIT, Reason.NOT_CAPTURED_YET)
            }
            self._prospects = self._space.make_dispatcher(unavailable=others)
        mode, key, _ = self._prospects.dispatch(*args, **kwargs)
        return None if mode is RuntimeMode.NONE else (mode, key)

    def missing(self) -> dict[Key, Reason]:
        """Why no program serves a key, for each key that none serves."""
        return self._keys.missing()

    def _refresh(self) -> None:
        """Dispatch to exactly the programs that are ready; every other key says why not."""
        ready: dict[RuntimeMode, dict[int, ReadyGraph]] = {mode: {} for mode in RuntimeMode}
        for (mode, _), entry in self._keys.entries.items():
            if entry.reason is Reason.HIT:
                known = self._ready[mode].get(id(entry.key))
                if known is None or known.program is not entry.program or known.lacks_check():
                    known = self._executor.make_ready(entry)
                ready[mode][id(entry.key)] = known
        self._prospects = None
        if not self._keys.pending():
            self._captures.host = None
        self.dispatcher: Dispatcher = self._space.make_dispatcher(unavailable=self.missing())
        for mode, key in self.dispatcher.keys:
            entry = self._keys.entries[mode, key]
            if entry.reason is Reason.HIT:
                ready[mode][id(key)] = ready[mode][id(entry.key)]
        self._ready = ready
        serving = {id(g.program): g.program for each in ready.values() for g in each.values()}
        self._watch.update(serving.values())
        if (changed := self._keys.changed()) is not None:
            self._observer(changed)

    @property
    def num_watched(self) -> int:
        """Places that ``watch`` looks at in turns: ``"spread"`` has seen all of them within
        ``ceil(num_watched / 4)`` graph runs, ``"always"`` looks at all before each."""
        return self._watch.num_places

    # -- looking back

    def check_externals(self) -> ExternalsReport:
        """Ask whether anything that programs read was replaced (weights not copied into, a value).

        Programs that read one become invalid: their runs are eager (``INVALIDATED``) until
        ``capture()`` is called again.
        """
        self.require_open()
        report = self._invalidate_replaced()
        self._refresh()
        return report

    def _invalidate_replaced(self) -> ExternalsReport:
        """Invalidate the programs that read what was replaced; ``_refresh`` has to follow."""
        report = self.library.check_externals()
        self._watch.is_marked = False
        return report

    def report(self) -> RunnerReport:
        """What is captured, what is not and why, and what it costs: ``print`` shows a table."""
        entries = [
            entry
            for mode in reversed(self._space.modes)
            for entry in self.library.catalog.of_owner(self.name, mode).by_key.values()
        ]
        programs = [entry.program for entry in entries if entry.program is not None]
        failures = {
            item: failure_text(entry.error)
            for item, entry in self._keys.entries.items()
            if entry.error is not None
        }
        counted = self._observer.snapshot() if isinstance(self._observer, StepMetrics) else None
        return RunnerReport(
            device=self.device.name,
            graphs=captured_graphs(entries, self._space.axis_sizes, counted),
            missing=dict(self.missing()),
            failures={**failures, **self.split_failure},
            misses={why: found.copy() for why, found in self._misses.items()},
            largest=dict(self._keys.largest()),
            capture_seconds=self._captures.seconds,
            missing_seconds=sum(e.seconds.total for e in entries if e.program is None),
            graph_bytes=self.library.charged_bytes,
            held_bytes=bytes_of(held for program in programs for held in program.externals),
            unwatched=tuple(dict.fromkeys(item for p in programs for item in p.unwatched)),
            memory=self._captures.memory,
            memory_taken=self._captures.memory_taken,
        )

    def explain(self, subject: Subject | None = None) -> str:
        """What the runner knows of ``subject``, in words; None: of the last run.

        ``subject``: a decision; a key, or ``(mode, key)``; a program or a report.
        """
        subject = self.last_decision if subject is None else subject
        if subject is None:
            return "Nothing has run yet."
        if isinstance(subject, Decision):
            return "\n".join(self._explain_decision(subject))
        if not isinstance(subject, BatchDescriptor | tuple):
            return explain(subject)
        found = [entry for item, entry in self._keys.entries.items() if subject in (item, item[1])]
        if not found:
            return f"{explain(subject)}\nNo key of this runner: see `keys`."
        return "\n".join(line for entry in found for line in explain_entry(entry))

    def _explain_decision(self, decision: Decision) -> Iterator[str]:
        mode, key, reason = decision
        yield explain(decision)
        served = self._keys.entries.get((mode, key))
        if served is not None and served.padding:
            yield f"Its padding: {served.padding}."
        if reason is Reason.ABOVE_MAX:
            sizes = key.variant.sizes if isinstance(key.variant, BucketKey) else (key.num_tokens,)
            real = dict(zip(self.axes, sizes, strict=False))
            yield from (f"{line}." for line in above_largest(real, self._keys.largest()))
        if reason in self._misses:
            yield f"So far: {self._misses[reason]}."
        concerned = [entry for entry in self._keys.entries.values() if entry.reason is reason]
        if reason is Reason.CAPTURE_FAILED:
            for entry in concerned:
                yield from explain_entry(entry)
        if reason is Reason.INVALIDATED:
            for moved, number in Counter(map(replaced, concerned)).items():
                keys = "1 key" if number == 1 else f"{number} keys"
                yield f"Replaced since the capture: {moved} (read by {keys})."
            if self._set_otherwise:
                names = ", ".join(self._set_otherwise)
                yield (
                    f"Set by resources to what no example had: {names}. Give examples a step_info "
                    "that sets it, or ranks a verify_every, by which they compare together."
                )

    # -- end

    def close(self) -> None:
        """End: a run after it raises ``LibraryClosedError``. Idempotent.

        A library or device that the runner made is closed; its programs in a library that it was
        given stay until their generation is retired.
        Errors: ``CaptureInProgressError`` while a capture scope of its own library is open.
        """
        if self._owns_library:
            self.library.close()
        was_closed, self._is_closed = self._is_closed, True
        self._watch.stop()
        self._executor.outputs.expire()
        self._executor.run_otherwise = None  # It refers to this runner.
        self._ready = {mode: {} for mode in RuntimeMode}
        self._captures.host = None
        self.dispatcher = NoDispatcher(closed_error)
        if not was_closed:
            self._observer(KeysChanged(self.name, 0, ()))  # Last: an observer may raise.

    def require_open(self) -> None:
        """Errors: ``LibraryClosedError`` after ``close()``."""
        if self._is_closed:
            raise closed_error()

    def _require_idle(self, what: str) -> None:
        self.require_open()
        if not self._turn:
            raise self._reentrant_error(what)

    def _reentrant_error(self, what: str) -> ReentrantStepError:
        return ReentrantStepError(
            f"{what} inside a run of the same runner, {self.name!r}",
            expected="one run at a time, because all share the static buffers and outputs",
            found="a call from the callable, a resource or an observer of a run or capture "
            f"that has not ended{self._where_else()}",
            do="call it after that, or give the inner callable a runner of its own; let threads "
            "take turns with a lock around the whole step",
        )

    def _where_else(self) -> str:
        """The places of this thread and of the one whose run has not ended, if that is another."""
        methods = ("execute", "capture", "capture_next", "time_replays")
        turns = {getattr(type(self), name).__code__ for name in methods}
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident == threading.get_ident():
                continue
            for outer, _ in traceback.walk_stack(frame):
                if outer.f_code in turns and outer.f_locals.get("self") is self:
                    return (
                        f"; or from another thread: here {threading.current_thread().name!r} at "
                        f"{caller_source()}, there {names.get(ident)!r} at {caller_source(frame)}"
                    )
        return ", or from another thread"

    @contextmanager
    def _one_at_a_time(self, what: str) -> Iterator[None]:
        """Refuse runs and captures meanwhile: inside this one, or of another thread."""
        is_refused = False
        try:
            try:
                self._turn.pop()
            except IndexError:
                is_refused = True
                raise self._reentrant_error(what) from None
            yield
        finally:
            if not is_refused:
                self._turn[:] = (True,)

    def _require_alone(self, what: str) -> None:
        if self._comparisons.lockstep is not None:
            raise ConfigError(
                f"{what} of one rank among several",
                expected="captures that all ranks make together: each has missed other keys",
                found=f"a call of {what}",
                do="call capture() on every rank",
            )

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise copy_error(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _declared(
    inputs: Inputs | None,
    outputs: OutputSpec | None,
    examples: Examples | None,
    *,
    has_keys: bool,
) -> tuple[Inputs, OutputSpec, Sizes]:
    """The specs of inputs and outputs; and the sizes of all calls, where these are the same."""
    if inputs is None:
        if examples is None or has_keys:
            raise ConfigError(
                "inputs=None",
                expected="examples(sizes, seed), whose shapes and dtypes all calls have",
                found="sizes, capacity or a dispatcher"
                if has_keys
                else "neither inputs nor examples",
                do="declare a BufferSpec for each input",
            )
        values = make_example(examples, _FIXED, 0).values
        for name, value in values.items():
            require_tensor(f"an example: input {shown_value(name)}", value, "a tensor")
        inputs = [BufferSpec(name, tuple(v.shape), v.dtype) for name, v in values.items()]
    is_fixed = False
    if not callable(inputs):
        inputs = check_specs(inputs)
        is_fixed = not has_keys and not any(spec.axes for spec in inputs)
    if is_fixed:
        outputs = outputs or OutputSpec({})
    expected = 'an OutputSpec, such as OutputSpec({"": "tokens"}), because sizes differ'
    do = "name the padded dimension of each output; {} if none is"
    check_type("outputs", outputs, OutputSpec, expected, do)
    assert outputs is not None, "told above"
    return inputs, outputs, _FIXED if is_fixed else {}

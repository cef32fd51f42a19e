"""The runtime of an engine: a plan of modes and sizes, dispatch by tokens and requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from graphrt.batch import (
    REQUESTS,
    TOKENS,
    BatchDescriptor,
    CUDAGraphMode,
    Decision,
    Reason,
    RuntimeMode,
    UBatchReason,
    ubatch_stride,
)
from graphrt.config import (
    CompilationConfig,
    CompilationLevel,
    Facts,
    Plan,
    Resolved,
    RuntimeConfig,
    resolve,
)
from graphrt.config.checked import MOST_SIZES, check_type, config_error
from graphrt.config.unbuilt import misplaced_attention, unbuilt
from graphrt.device import DeviceName
from graphrt.device.base import Device
from graphrt.dispatch import NOTHING, CUDAGraphDispatcher, check_count, check_uniform
from graphrt.errors import (
    BatchError,
    ConfigError,
    ConfigProblem,
    InputMismatchError,
    StaticBufferError,
    copy_error,
    shown,
)
from graphrt.events import Observer, RanEager, Replayed
from graphrt.externals import ExternalsReport
from graphrt.gc_pause import gc_paused
from graphrt.graphs import (
    BufferSpec,
    GraphBudget,
    GraphLibrary,
    Key,
    OutputSpec,
    Resource,
    StaleCheck,
    StateGuard,
)
from graphrt.parallel import Exchange, Lockstep, SettledStep
from graphrt.runner import CUDAGraphRunner, Example, Progress, RunnerReport, Subject
from graphrt.runner.examples import Examples
from graphrt.runner.keys import KeySpace, check_specs, size_to_compare
from graphrt.runtime.ranks import RankedSteps, agree_on_facts, check_rank_config
from graphrt.runtime.splitting import SplitSteps
from graphrt.ubatch import SMControl, wants_split
from graphrt.ubatch.split import sm_pair

if TYPE_CHECKING:
    from graphrt.compile import CompileReport
    from graphrt.runtime.compiling import CompiledPart

_FIELDS = {
    "mode": "compilation.cudagraph_mode",
    "sizes": "compilation.cudagraph_capture_sizes",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
"""The options that a ``Runtime`` takes without a config, and the field that each stands for."""

# CPython 3.11 looks a member up through a Python property; a step has no time for that.
_EAGER, _NOT_CAPTURED_YET = RuntimeMode.NONE, Reason.NOT_CAPTURED_YET


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeReport(RunnerReport):
    """What was resolved, what is captured, what is not and why, and what it costs.

    ``print`` shows it as a table. Its other fields are those of ``graphrt.runner.RunnerReport``.

    ``resolved``: The plan, and each option that could not be used as asked.
    ``compile``: What levels 1 to 3 compiled; None at level 0, and before they did.
    ``split_ms``: Milliseconds of a replay in micro-batches, and of its unsplit form, where they
      were compared (``UBatchConfig.auto_off``): a size that is not faster is not split.
    """

    resolved: Resolved
    compile: CompileReport | None = None
    split_ms: Mapping[BatchDescriptor, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"Policy {self.resolved.plan.cudagraph_mode}"]
        lines += [
            f"  {item.field}: {item.effective} instead of {item.asked}, because {item.reason}"
            for item in self.resolved.adjustments
        ]
        if self.split_ms:
            slower = sum(split >= unsplit for split, unsplit in self.split_ms.values())
            lines.append(
                f"Micro-batches: {len(self.split_ms) - slower} sizes are split, {slower} are not, "
                "because that was no faster"
            )
        found = self.compile
        if found is not None:
            lines.append(
                f"Compiled by {found.backend}: {len(found.pieces)} pieces, {found.num_compiled} "
                f"compiled, {found.num_unique} unique; {found.num_compiles} compiles, "
                f"{found.num_loaded} from the cache, {found.compilation_time:.2f} s"
            )
            if found.is_trace_kept:
                lines.append("  traced by an earlier process")
            elif found.why_traced:
                lines.append(f"  traced here: {found.why_traced}")
            lines += [f"  {note}" for note in found.notes]
        return "\n".join([*lines, "", RunnerReport.__str__(self)])


class Runtime:
    """Serves a model's steps through captured graphs.

    ``mode`` (a ``CUDAGraphMode`` or its name), ``sizes`` (``cudagraph_capture_sizes``, in tokens),
    ``max_num_seqs`` and ``max_num_batched_tokens`` are the common options; ``config`` has all, and
    is given instead of them.

    ``model`` is called with keyword arguments named as ``inputs``: views of static buffers, padded
    to the key, in graphs; copies of the real size, which it may keep, in eager steps. It runs under
    ``torch.no_grad``.
    ``inputs`` know the axes "tokens" and "requests"; ``CUDAGraphRunner`` takes any axes.
    ``outputs`` says which of its outputs' dimensions are padded.

    ``examples(sizes, seed)`` gives valid inputs of exactly these sizes, ``{"tokens": n,
    "requests": r}``, different for each seed: seed 0 is captured, seed 1 verified. A uniform decode
    batch comes as ``tokens == requests * query_len``. None: ``capture(like=...)`` makes them of one
    real batch. ``resources`` are prepared once before every
    step, a compared one (``verify_every``) too: its eager run and its replay are one step.
    ``state`` guards what a warm-up or verification would advance; ``may_overwrite``: tensors that
    both may overwrite where the examples point (a KV cache). Without a guard, a compared step runs
    the model twice on the same state. ``keep_alive``: tensors that kernels know by address alone.
    ``layers``: objects by name that operators and eager segments find in the forward context.
    ``compile_part``: the module inside ``model`` that is compiled; None: ``model``. Its
    ``forward`` is replaced until ``close()``; what the model does around it stays plain Python.
    ``op_impls``: Python functions to call in place of splitting ops, where the graph is cut: they
    may be break points themselves; of ``torch.library.custom_op`` its own is called. Both are for a
    compiler, and refused where the level asked for has none. The model is traced here, or by
    ``capture(like=...)`` without ``examples``, in an eager run of the largest key's example.
    ``sm_control``: divides the multiprocessors while a step in micro-batches is issued. With these
    (``config.ubatch``) ``inputs`` are one list for all keys, and those whose values are places in
    the batch say so (``BufferSpec.rebase``).
    ``ranks``: the exchange with the other ranks of a data-parallel engine, each of which makes such
    a runtime: they capture together and take one decision for each step, so that collectives inside
    the model always meet. A rank without work calls ``step_idle``. ``ranks`` is the engine's to
    close, after the runtime. The examples of all ranks have the same sizes; values that an engine
    has padded by itself are refused where the ranks pad further.
    ``observer`` gets every event. ``verify_tolerance`` None means bit-equal; a tolerance is for
    kernels that sum in another order inside a graph.

    A ``device`` given by name is made and closed by the runtime; one given as an object is not.
    Not thread-safe; two runtimes never share anything.
    Errors: ``ConfigError`` for what cannot be honoured, an option beside ``config`` included;
    ``StaticBufferError`` for an input over another axis; at level 3 ``CompileError`` and those
    below it, and ``BreakError`` for a break point in what is traced.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        inputs: Sequence[BufferSpec],
        outputs: OutputSpec,
        examples: Examples | None = None,
        mode: CUDAGraphMode | str | None = None,
        sizes: Sequence[int] | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        config: RuntimeConfig | None = None,
        device: Device | DeviceName = "auto",
        facts: Facts | None = None,
        resources: Sequence[Resource] = (),
        state: StateGuard | None = None,
        may_overwrite: Sequence[torch.Tensor] | Mapping[torch.Tensor, str] = (),
        keep_alive: Sequence[torch.Tensor] = (),
        observer: Observer | None = None,
        verify_tolerance: float | None = None,
        reads_padding: str = "",
        layers: Mapping[str, Any] | None = None,
        compile_part: torch.nn.Module | None = None,
        op_impls: Mapping[str, Callable[..., Any]] | None = None,
        sm_control: SMControl | None = None,
        ranks: Exchange | None = None,
    ) -> None:
        flat = dict(zip(_FIELDS, (mode, sizes, max_num_seqs, max_num_batched_tokens), strict=True))
        config, resolved = _resolve(config, flat, facts)
        check_type("ranks", ranks, Exchange | None, "an exchange, as InProcessExchange")
        check_rank_config(config.ranks, ranks is not None)
        if ranks is not None:
            config, facts = agree_on_facts(ranks, config, facts)
            resolved = resolve(config, facts)
        _check_built(resolved, model, compile_part=compile_part, op_impls=op_impls)
        if not callable(inputs):
            inputs = check_specs(inputs)
            _check_axes(inputs)
        self.config, self.resolved, self.plan = config, resolved, resolved.plan
        self._observer, self._query_len, plan = observer, resolved.plan.query_len, resolved.plan
        self._ends = ExitStack()
        """Of what may end only after the library."""
        fn, is_unobserved = model, False
        self._compiled: CompiledPart | None = None
        if plan.level is not CompilationLevel.NO_COMPILATION:
            with gc_paused(collects=False, ages=True):
                from graphrt.runtime.compiling import CompiledPart  # Here: it takes seconds.

                rank = None if ranks is None else ranks.rank
                made = CompiledPart(resolved, model, inputs, compile_part, op_impls, observer, rank)
            self._compiled, fn = made, made.entry
            self._ends.callback(made.restore)
        self.library = GraphLibrary(
            device,
            budget=GraphBudget(max_bytes=config.max_graph_bytes, max_graphs=config.max_graphs),
            stale_check=StaleCheck[config.stale_check.upper()],
            observer=observer if self._compiled is None else self._compiled.hearing(observer),
        )
        self.device = self.library.device
        try:
            lockstep = None
            if ranks is not None:
                lockstep = Lockstep(ranks, config.ranks)
                self.library.limit_waits(config.ranks.step_timeout_s, ranks.give_up)
            if self._compiled is not None:
                is_unobserved = self._compiled.guard(self.device)
            self._split: SplitSteps | None = None
            if plan.ubatch.num_ubatches > 1:
                may_miss = config.on_miss == "eager"
                self._split = SplitSteps(
                    fn, self.device, plan, inputs, outputs, sm_control, may_miss=may_miss
                )
                fn = self._split.callable
                self._ends.callback(fn.close)
            self.runner = CUDAGraphRunner(
                fn,
                inputs=inputs,
                outputs=outputs,
                examples=examples,
                library=self.library,
                state=state,
                may_overwrite=may_overwrite,
                keep_alive=keep_alive,
                resources=resources,
                verify="first" if config.verify_first_replay else "off",
                verify_every=config.verify_every,
                verify_tolerance=verify_tolerance,
                reads_padding=reads_padding,
                layers=layers,
                watch=config.watch,
                observe="never" if is_unobserved else None,
                on_miss=config.on_miss,
                on_capture_error=config.on_capture_error,
                warmups=config.compilation.cudagraph_num_of_warmups,
                observer=observer,
                nvtx=config.nvtx,
                name="model",
                space=_key_space(plan),
                lockstep=lockstep,
            )
            self._execute = self.runner.execute
            self._ranks: RankedSteps | None = None
            if lockstep is not None:
                sms = sm_pair(sm_control, plan.ubatch.num_comm_sms, self.device.limits.num_sms)
                self._ranks = RankedSteps(lockstep, self.runner, resolved, sms)
                self._execute = self._ranks.noting_drops(self._execute)
            if self._compiled is not None:
                self._compiled.install()
                if examples is not None:
                    self._trace(self._compiled)
        except BaseException:
            with self._ends:
                self.library.close()
            raise

    @property
    def dispatcher(self) -> CUDAGraphDispatcher:
        """What steps are decided by: a new one after each change of what serves.

        Errors: ``LibraryClosedError`` after ``close()``.
        """
        self.runner.require_open()
        dispatcher = self.runner.dispatcher
        assert isinstance(dispatcher, CUDAGraphDispatcher), "made by the key space of the plan"
        return dispatcher

    @property
    def last_decision(self) -> Decision | None:
        """What the latest step was decided to be."""
        return self.runner.last_decision

    def capture(
        self,
        progress: Progress | bool | None = None,
        *,
        like: Example | Mapping[str, torch.Tensor] | None = None,
        keys: Iterable[Key] | None = None,
    ) -> RuntimeReport:
        """Capture every key of the plan that no graph serves yet, and verify each first replay.

        ``like``: one real batch in place of ``examples``, whose rows are repeated and cut to each
        size, for a model whose rows do not depend on each other (decode). When it does not fit, and
        all else: see ``CUDAGraphRunner.capture``.
        ``progress``: a callable, or True for a bar on stderr.
        Errors: the first failure, unless the config says ``on_capture_error="skip"``;
        ``ConfigError`` for what is no key of the plan, without examples, and for ``like`` beside
        them; ``InputMismatchError`` for ``like`` that is no batch of the inputs.
        """
        if self._compiled is not None and self._compiled.report is None and like is not None:
            self._trace(self._compiled, like)
        self._audit()
        try:
            self.runner.capture(keys, like=like, progress=progress)
        finally:
            if self._ranks is not None:
                self._ranks.note_captured()
        self._compare_split_times()
        return self.report()

    def capture_next(
        self,
        at_most: int = 1,
        *,
        first: Key | None = None,
        allow: Callable[[BatchDescriptor], bool] | None = None,
    ) -> int:
        """Capture the next ``at_most`` keys, between two steps; return how many remain.

        See ``CUDAGraphRunner.capture_next``; for ``first`` see ``key_for``.
        """
        self._audit()
        remaining = self.runner.capture_next(at_most, first=first, allow=allow)
        self._compare_split_times()
        return remaining

    def _compare_split_times(self) -> None:
        if self._split is not None:
            unprofitable = self._split.compare_times(self.runner)
            if self._ranks is not None:
                self._ranks.leave_unsplit(unprofitable)

    def withdraw(self, keys: Iterable[Key | BatchDescriptor], reason: str) -> int:
        """Drop the graphs of ``keys``. See ``CUDAGraphRunner.withdraw``."""
        num_withdrawn = self.runner.withdraw(keys, reason)
        if self._split is not None:
            self._split.forget_times(key for _, key in self.runner.missing())
        return num_withdrawn

    def key_for(
        self,
        num_tokens: int,
        *,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = NOTHING,
    ) -> Key | None:
        """The key whose graph such a step takes, or would take if all were captured.

        None: it runs eager for another reason. Errors: ``BatchError`` for what is no batch.
        """
        return self.runner.key_for(num_tokens, uniform, num_active_loras, exclude)

    def step(
        self,
        values: Mapping[str, torch.Tensor],
        *,
        num_tokens: int | None = None,
        num_reqs: int | None = None,
        uniform: bool | None = None,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = NOTHING,
        step_info: Any = None,
        query_lens: Iterable[int] | None = None,
        unsplit: UBatchReason | None = None,
    ) -> Any:
        """Run one batch through the graph that fits it, or eagerly with a counted reason.

        ``num_tokens``, ``num_reqs``: the real sizes; None: those of the values. Without an input
        over "requests" each row is a request, as far as ``max_num_seqs`` permits.
        ``uniform``: every request brings exactly ``query_len`` tokens. None: it follows from the
        sizes where that is 1, else it is False, because with speculation only the engine knows.
        ``query_lens``: the tokens of each request, in order; without them, a batch that is not
        uniform is not cut into micro-batches where inputs or outputs have a row for each request.
        A batch that is cut eagerly comes unpadded. ``unsplit``: why the engine does not want it
        cut; None: it may be. A cut step's ``step_info`` reaches the micro-batches as
        ``ForwardContext.of_micro_batch`` says.

        Shapes:   each value has the real size along its buffer's axes ("tokens": ``num_tokens``,
                  "requests": ``num_reqs``), or the padded size of the key that serves the step,
                  where an engine has padded by itself: then ``num_tokens`` and ``num_reqs`` say the
                  real sizes. The result is cut to these.
        Aliasing: with the output policy "view" the result is graph storage: the next step
                  overwrites it. By default ("clone") it is the caller's own.
        Errors:   ``BatchError`` for what is no batch, ``InputMismatchError`` for values that do not
                  fit, ``MissError`` in strict mode, ``VerificationError`` where a sampled
                  comparison with eager differs: that program is not replayed again
                  (``CAPTURE_FAILED``). A failed replay is never repeated eagerly.
        """
        observer = self._observer
        started = 0 if observer is None else perf_counter_ns()
        if num_tokens is None or num_reqs is None:
            num_tokens, num_reqs = self._read(values, num_tokens, num_reqs, uniform)
        if not (type(num_reqs) is type(num_tokens) is int and 1 <= num_reqs <= num_tokens):
            _check_requests(num_tokens, num_reqs)
        if uniform is None:
            uniform = num_reqs == num_tokens and self._query_len == 1
        elif type(uniform) is not bool:
            uniform = check_uniform(uniform)  # type: ignore[unreachable]  # who has no types
        if uniform and num_tokens != num_reqs * self._query_len:
            raise BatchError(
                f"a uniform step of {num_tokens} tokens",
                expected=f"num_tokens == num_reqs * {self._query_len}",
                found=f"num_reqs = {num_reqs}",
                do="pass uniform=True only where every request brings exactly that many tokens",
            )
        runner = self.runner
        slices = why = None
        if self._ranks is not None:
            vote = wants_split(num_tokens, uniform, self.plan.ubatch, unsplit)
            decision = self._ranks.decide(num_tokens, uniform, num_active_loras, exclude, vote)
            if self._split is not None and decision.descriptor.num_ubatches == 1:
                why = self._ranks.last_unsplit
        elif self._split is None:
            decision = runner.dispatcher.dispatch(num_tokens, uniform, num_active_loras, exclude)
        else:
            batch = (num_tokens, uniform, num_active_loras, exclude)
            decision, slices, why = self._split.decide(runner, batch, num_reqs, query_lens, unsplit)
        mode, key, reason = decision
        sizes = {TOKENS: num_tokens, REQUESTS: num_reqs}
        if reason is _NOT_CAPTURED_YET:
            batch = (num_tokens, uniform, num_active_loras, exclude)
            runner.note_miss(*batch, key.num_ubatches, real_sizes=sizes)
        # In a variable: to call what an attribute of the object holds takes longer in place.
        execute = self._execute
        outputs = execute(decision, sizes, values, step_info, None, slices)
        if observer is not None:
            host_us = (perf_counter_ns() - started) / 1000
            # Other than decided, where the step found out that something had been replaced.
            mode, key, reason = runner.last_decision or decision
            if why is None and self._split is not None and key.num_ubatches == 1:
                failed = bool(runner.split_failure)
                why = UBatchReason.SPLIT_FAILED if failed else UBatchReason.NO_FULL_GRAPH
            shape = (num_reqs, uniform, host_us, num_active_loras)
            served = (key.num_active_loras, key.num_ubatches, why)
            runner.tell(
                RanEager(reason, num_tokens, *shape, key.num_ubatches, why)
                if mode is _EAGER
                else Replayed(mode, reason, num_tokens, key.num_tokens, *shape, *served)
            )
        return outputs

    def step_idle(self, step_info: Any = None) -> bool:
        """Take part in a step of the other ranks without a batch; False if no rank has one.

        A rank of ``ranks`` calls it in place of ``step``. It replays padding alone, or runs one
        token of padding eagerly, so that it is there in each collective. ``step_info``: what
        resources are prepared with.

        Errors: ``ConfigError`` without ranks, ``RankError``, those of ``step``.
        """
        if self._ranks is None:
            raise ConfigError(
                "step_idle",
                expected="a runtime of several ranks: Runtime(ranks=...)",
                found="one that decides alone",
                do="step when there is a batch",
            )
        decision = self._ranks.decide_idle()
        if decision is not None:
            self._ranks.noting_drops(self.runner.execute_padding)(decision, step_info)
        return decision is not None

    def tell_batch(self, digest: int) -> None:
        """Say what the next steps compute, where ranks see one batch (``RankConfig.same_batch``).

        ``digest``: of requests and tokens. Where it is another one on another rank, the next step
        of each ends with ``RankDesyncError``. Without such ranks nothing reads it.
        """
        if self._ranks is not None:
            self._ranks.batch_digest = digest

    @property
    def last_settled(self) -> SettledStep | None:
        """What the ranks' votes of the latest step came to; None without ranks, or if all idled."""
        return None if self._ranks is None else self._ranks.last

    def _read(
        self,
        values: Mapping[str, torch.Tensor],
        num_tokens: int | None,
        num_reqs: int | None,
        uniform: bool | None,
    ) -> tuple[int, int]:
        """The sizes of a step as far as they were not given, read off its values."""
        read = self.runner.real_sizes(values)
        for name, axis, said in (
            ("num_tokens", TOKENS, num_tokens),
            ("num_reqs", REQUESTS, num_reqs),
        ):
            # Of one axis alone, an engine that has padded has said all that it has to.
            is_both = said is not None and axis in read and len(read) > 1
            if is_both and not _is_size(said, read[axis]):
                raise InputMismatchError(
                    f"{name} = {shown(said)}",
                    expected=f"the size of axis {axis!r} in the values",
                    found=f"{read[axis]}",
                    do="leave it out, or say both num_tokens and num_reqs if you have padded",
                )
        if num_tokens is None:
            num_tokens = read.get(TOKENS)
        if num_tokens is None:
            raise BatchError(
                "num_tokens",
                expected="a number, because no input has the axis 'tokens'",
                found="None",
                do="pass num_tokens",
            )
        if num_reqs is None:
            num_reqs = read.get(REQUESTS)
        if num_reqs is None:
            num_tokens = check_count("num_tokens", num_tokens, least=0)
            is_uniform = uniform is not None and check_uniform(uniform)
            most = num_tokens // self._query_len if is_uniform else self.plan.max_num_seqs
            num_reqs = min(num_tokens, most)
        return num_tokens, num_reqs

    def check_externals(self) -> ExternalsReport:
        """Ask whether anything that programs read was replaced (weights not copied into, a value).

        Programs that read one become invalid: their steps run eager (``INVALIDATED``) until
        ``capture()`` is called again.
        Errors: ``GuardAuditError`` if what was replaced is a constant of the compiled code.
        """
        self._audit()
        return self.runner.check_externals()

    def explain(self, subject: Subject | None = None) -> str:
        """What the runtime knows of ``subject``, in words; None: of the last step.

        ``subject``: a decision; a key, or ``(mode, key)``; a program or a report.
        """
        return self.runner.explain(subject)

    def report(self) -> RuntimeReport:
        """What is captured, what is not and why, and what it costs: ``print`` shows a table."""
        found = self.runner.report()
        known = {item.name: getattr(found, item.name) for item in fields(found)}
        compiled = None if self._compiled is None else self._compiled.report
        times = {} if self._split is None else dict(self._split.times_ms)
        return RuntimeReport(resolved=self.resolved, compile=compiled, split_ms=times, **known)

    def _trace(
        self, compiled: CompiledPart, like: Example | Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Compile for the largest key, or for the largest batch where there is none."""
        plan = self.plan
        sizes: Mapping[str, int] = {TOKENS: plan.max_num_seqs, REQUESTS: plan.max_num_seqs}
        if plan.capture_order:
            sizes = _axis_sizes(plan.capture_order[0][1], plan.max_num_seqs)
        compiled.trace(self.runner, sizes, like)

    def _audit(self) -> None:
        if self._compiled is not None:
            self._compiled.audit()

    def close(self) -> None:
        """Retire every program, drop the buffers, release the device if this runtime made it.

        Idempotent. A step after it raises ``LibraryClosedError``.
        Errors: ``CaptureInProgressError`` while a capture scope of its library is open. With ranks
                ``RankLostError`` where the device waits for another rank longer than
                ``RankConfig.step_timeout_s``; the runtime is closed then.
        """
        try:
            self.library.close()
        finally:
            if self.library.is_closed:
                self.runner.close()
                self._ends.close()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise copy_error(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _resolve(
    config: RuntimeConfig | None, flat: Mapping[str, Any], facts: Facts | None
) -> tuple[RuntimeConfig, Resolved]:
    """The config of ``config`` or of the ``flat`` options that are not None, and its plan.

    Errors: ``ConfigError``, in the words of whoever asked.
    """
    for name, given, kind in (("config", config, RuntimeConfig), ("facts", facts, Facts)):
        check_type(name, given, kind | None, kind.__name__, "pass one, or nothing")
    asked = {name: value for name, value in flat.items() if value is not None}
    if config is not None:
        if asked:
            raise ConfigError(
                f"{', '.join(asked)} beside config",
                expected="each option once: as an argument, or as a field of the config",
                found=", ".join(
                    f"{name}={asked[name]!r} and config.{_FIELDS[name]}" for name in asked
                ),
                do="leave config out, or put all options into it",
            )
        return config, resolve(config, facts)
    try:
        sizes = asked.pop("sizes", None)
        compilation = CompilationConfig(
            cudagraph_mode=asked.pop("mode", None),
            # One more than may be, so that as many are refused without being listed.
            cudagraph_capture_sizes=tuple(sizes[: MOST_SIZES + 1])
            if isinstance(sizes, range)
            else sizes,
        )
        config = RuntimeConfig(compilation=compilation, **asked)
        return config, resolve(config, facts)
    except ConfigError as error:
        problems = [item._replace(field=_as_asked(item.field)) for item in error.problems]
        raise config_error("Runtime", problems) from error


def _check_built(resolved: Resolved, model: Callable[..., Any], **arguments: object) -> None:
    """Errors: ``ConfigError`` for what can be planned, and is not built yet; for ``arguments`` that
    no compiler reads, because the level has none; and for rules of custom operators that ``model``
    has not."""
    plan = resolved.plan
    problems = [*unbuilt(resolved.compile), *misplaced_attention(resolved.compile)]
    # TORCH_COMPILE_DISABLE switches off what the same code would do without it.
    is_asked = not any(field == "level" for field, *_ in resolved.adjustments)
    for name, least in (("compile_part", 1), ("op_impls", 2)):
        if arguments[name] is not None and plan.level < least and is_asked:
            found = f"given, at level {int(plan.level)}"
            problems.append(ConfigProblem(name, found, f"None, or level {least} or above"))
    is_cut = any(mode is RuntimeMode.PIECEWISE for mode, _ in plan.capture_order)
    if plan.level is CompilationLevel.PIECEWISE and plan.ubatch.num_ubatches > 1:
        found = f"{plan.ubatch.num_ubatches}, at level 3"
        problems.append(ConfigProblem("ubatch.num_ubatches", found, "1 at level 3, or level 0"))
    if plan.level is CompilationLevel.PIECEWISE and is_cut and not plan.splitting_ops:
        accepted = "names, or attention_ops in the facts: where PIECEWISE graphs end"
        problems.append(ConfigProblem("compilation.splitting_ops", "None", accepted))
    if problems:
        raise config_error("Runtime", problems)
    if resolved.compile.custom_ops or "graphrt.compile.custom_ops" in sys.modules:
        from graphrt.compile import check_custom_ops  # Here, because few models have any.

        check_custom_ops(resolved.compile, model)


def _as_asked(field: str) -> str:
    for name, known in _FIELDS.items():
        field = field.replace(known.removeprefix("compilation."), name)
    return field


def _check_axes(inputs: Sequence[BufferSpec]) -> None:
    """Errors: ``StaticBufferError`` for an axis other than tokens and requests."""
    for spec in inputs:
        for axis in spec.axes:
            if axis not in (TOKENS, REQUESTS):
                raise StaticBufferError(
                    f"axis {axis!r} of input {spec.name!r}",
                    expected=f"{TOKENS!r} or {REQUESTS!r}, the axes that a Runtime knows",
                    found=repr(axis),
                    do="rename it, or use CUDAGraphRunner, which takes any axes",
                )


def _is_size(said: object, size: int) -> bool:
    try:
        return bool(said == size)
    except Exception:  # noqa: BLE001  A tensor of several elements, say.
        return False


def _check_requests(num_tokens: int, num_reqs: int) -> None:
    """Errors: ``BatchError`` for what is no number of requests that bring so many tokens."""
    tokens = check_count("num_tokens", num_tokens, least=0)
    found = check_count("num_reqs", num_reqs, least=min(tokens, 1))
    if found > tokens:
        raise BatchError(
            f"num_reqs = {found}",
            expected=f"at most num_tokens = {tokens}, because each request brings a token",
            found=str(found),
            do="count the requests of this batch",
        )


def _key_space(plan: Plan) -> KeySpace:
    return KeySpace(
        (RuntimeMode.FULL, RuntimeMode.PIECEWISE),
        {TOKENS: plan.max_num_batched_tokens, REQUESTS: plan.max_num_seqs},
        partial(CUDAGraphDispatcher, plan),
        partial(_axis_sizes, max_num_seqs=plan.max_num_seqs),
        partial(_smaller_sizes, plan),
        may_grow=False,
    )


def _axis_sizes(key: BatchDescriptor, max_num_seqs: int) -> Mapping[str, int]:
    """The padded sizes of a key's static inputs."""
    # Pieces do not depend on requests, their static inputs still have a size: the most a batch
    # of that many tokens can bring.
    num_reqs = key.num_reqs
    if num_reqs is None:
        num_reqs = min(key.num_tokens, max_num_seqs)
    return {TOKENS: key.num_tokens, REQUESTS: num_reqs}


def _smaller_sizes(plan: Plan, mode: RuntimeMode, key: BatchDescriptor) -> list[Mapping[str, int]]:
    """The batch that is compared as padded to a key, about the smallest that dispatch sends to it;
    one that fills it where every batch does."""
    # A split batch is padded as an unsplit one.
    kind = (mode, key.uniform, key.num_active_loras)
    below = [
        other.num_tokens
        for at, other in plan.capture_order
        if (at, other.uniform, other.num_active_loras) == kind and other.num_tokens < key.num_tokens
    ]
    smallest = max(below, default=0) + 1
    if key.num_ubatches > 1:
        # Its last micro-batch is not empty, and it is large enough to be split.
        stride = ubatch_stride(key.num_tokens, plan.query_len, key.num_ubatches)
        least = stride * (key.num_ubatches - 1) + 1
        smallest = max(smallest, least, plan.ubatch.decode_token_threshold)
    if key.uniform:
        least, most = -(-smallest // plan.query_len), key.num_tokens // plan.query_len
        num_reqs = size_to_compare(least, most)
        return [{TOKENS: num_reqs * plan.query_len, REQUESTS: num_reqs}]
    smallest = size_to_compare(smallest, key.num_tokens)
    # As many tokens a request as in the batch that fills the key, so that none gets too long; or
    # one request less, where there is none.
    padded = _axis_sizes(key, plan.max_num_seqs)
    num_reqs = -(-smallest * padded[REQUESTS] // padded[TOKENS])
    if num_reqs == padded[REQUESTS] > 1:
        num_reqs -= 1
    return [{TOKENS: smallest, REQUESTS: num_reqs}]

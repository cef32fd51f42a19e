"""The runtime of an engine: a plan of modes and sizes, dispatch by tokens and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from graphrt.batch import BatchDescriptor, Decision, Reason, RuntimeMode
from graphrt.config import Facts, Plan, Resolved, RuntimeConfig, resolve
from graphrt.device import DeviceName, make_device
from graphrt.device.base import Device
from graphrt.dispatch import CUDAGraphDispatcher, check_count
from graphrt.errors import BatchError
from graphrt.events import Observer, RanEager, Replayed
from graphrt.graphs import (
    BufferSpec,
    ExternalsReport,
    GraphBudget,
    GraphLibrary,
    Key,
    OutputSpec,
    Resource,
    StaleCheck,
    StateGuard,
)
from graphrt.runner import CapturedGraph, CUDAGraphRunner, Example, Progress

TOKENS = "tokens"
REQUESTS = "requests"
"""The two axes of an engine's batch; every ``BufferSpec`` of a runtime uses these names."""

_NONE: frozenset[RuntimeMode] = frozenset()
# CPython 3.11 looks a member up through a Python property; a step has no time for that.
_EAGER, _NOT_CAPTURED_YET = RuntimeMode.NONE, Reason.NOT_CAPTURED_YET


class RuntimeReport(NamedTuple):
    """What was resolved, what is captured, what is not and why, and what it costs."""

    device: str
    resolved: Resolved
    graphs: tuple[CapturedGraph, ...]
    missing: Mapping[Key, Reason]
    """Keys of the plan that no graph serves now."""
    failures: Mapping[Key, str]
    capture_seconds: float
    """Warm-ups, captures and first verified replays together."""
    graph_bytes: int
    """Pools, static outputs in them, and executables."""


class Runtime:
    """Serves a model's steps through captured graphs.

    ``model`` is called with keyword arguments named as ``inputs``: views of static buffers, padded
    to the key in graphs, of the real size in eager steps. It runs under ``torch.no_grad``.
    ``outputs`` says which of its outputs' dimensions are padded.

    ``examples(sizes, seed)`` gives valid inputs of exactly these sizes, ``{"tokens": n,
    "requests": r}``, different for each seed: seed 0 is captured, seed 1 verified. A uniform decode
    batch comes as ``tokens == requests * query_len``. ``resources`` are prepared once before every
    step, a compared one (``verify_every``) too: its eager run and its replay are one step.
    ``state`` guards what a warm-up or verification would advance; ``may_overwrite``: tensors that
    both may overwrite where the examples point (a KV cache). Without a guard, a compared step runs
    the model twice on the same state. ``keep_alive``: tensors that kernels know by address alone.
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
        examples: Callable[[Mapping[str, int], int], Example | Mapping[str, torch.Tensor]],
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
    ) -> None:
        config = self.config = RuntimeConfig() if config is None else config
        self.resolved = resolve(config, Facts() if facts is None else facts)
        plan = self.plan = self.resolved.plan
        self._observer = observer
        self._query_len = plan.query_len
        self._owns_device = isinstance(device, str)
        self.device = make_device(device) if isinstance(device, str) else device
        try:
            self.library = GraphLibrary(
                self.device,
                budget=GraphBudget(max_bytes=config.max_graph_bytes, max_graphs=config.max_graphs),
                stale_check=StaleCheck[config.stale_check.upper()],
                observer=observer,
            )
            self.runner = CUDAGraphRunner(
                model,
                inputs=inputs,
                outputs=outputs,
                capacity={TOKENS: plan.max_num_batched_tokens, REQUESTS: plan.max_num_seqs},
                modes=("PIECEWISE", "FULL"),
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
                watch=config.watch,
                on_miss=config.on_miss,
                on_capture_error=config.on_capture_error,
                warmups=config.compilation.cudagraph_num_of_warmups,
                observer=observer,
                name="model",
                dispatcher=partial(CUDAGraphDispatcher, plan),
                axis_sizes=partial(_axis_sizes, max_num_seqs=plan.max_num_seqs),
                smaller_sizes=partial(_smaller_sizes, plan),
            )
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise
        self._execute = self.runner.execute

    @property
    def dispatcher(self) -> CUDAGraphDispatcher:
        """What steps are decided by: a new one after each change of what serves.

        Errors: ``LibraryClosedError`` after ``close()``.
        """
        dispatcher = self.runner.dispatcher
        if not isinstance(dispatcher, CUDAGraphDispatcher):
            dispatcher.dispatch(0)  # It raises, because a closed runner has no dispatcher.
            raise AssertionError("only a closed runtime has another dispatcher")
        return dispatcher

    @property
    def last_decision(self) -> Decision | None:
        """What the latest step was decided to be."""
        return self.runner.last_decision

    def capture(
        self, progress: Progress | None = None, *, keys: Iterable[Key] | None = None
    ) -> RuntimeReport:
        """Capture every key of the plan that no graph serves yet, and verify each first replay.

        See ``CUDAGraphRunner.capture``. Errors: the first failure, unless the config says
        ``on_capture_error="skip"``; ``ConfigError`` for what is no key of the plan.
        """
        self.runner.capture(keys, progress=progress)
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
        return self.runner.capture_next(at_most, first=first, allow=allow)

    def key_for(
        self,
        num_tokens: int,
        *,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = _NONE,
    ) -> Key | None:
        """The key whose graph such a step takes, or would take if all were captured.

        None: it runs eager for another reason. Errors: ``BatchError`` for what is no batch.
        """
        return self.runner.key_for(num_tokens, uniform, num_active_loras, exclude)

    def step(
        self,
        values: Mapping[str, torch.Tensor],
        *,
        num_tokens: int,
        num_reqs: int,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = _NONE,
        step_info: Any = None,
    ) -> Any:
        """Run one batch through the graph that fits it, or eagerly with a counted reason.

        Shapes:   each value has the real size along its buffer's axes ("tokens": ``num_tokens``,
                  "requests": ``num_reqs``); the result is cut to those sizes.
        Aliasing: with the output policy "view" the result is graph storage: the next step
                  overwrites it. Clone to keep.
        Errors:   ``BatchError`` for what is no batch, ``InputMismatchError`` for values that do not
                  fit, ``MissError`` in strict mode, ``VerificationError`` where a sampled
                  comparison with eager differs: that program is not replayed again
                  (``CAPTURE_FAILED``). A failed replay is never repeated eagerly.
        """
        observer = self._observer
        started = 0 if observer is None else perf_counter_ns()
        if not (type(num_reqs) is type(num_tokens) is int and 1 <= num_reqs <= num_tokens):
            _check_requests(num_tokens, num_reqs)
        if uniform and num_tokens != num_reqs * self._query_len:
            raise BatchError(
                f"a uniform step of {num_tokens} tokens",
                expected=f"num_tokens == num_reqs * {self._query_len}",
                found=f"num_reqs = {num_reqs}",
                do="pass uniform=True only where every request brings exactly that many tokens",
            )
        runner = self.runner
        decision = runner.dispatcher.dispatch(num_tokens, uniform, num_active_loras, exclude)
        mode, key, reason = decision
        if reason is _NOT_CAPTURED_YET:
            sizes = {TOKENS: num_tokens, REQUESTS: num_reqs}
            runner.note_miss(num_tokens, uniform, num_active_loras, exclude, real_sizes=sizes)
        outputs = self._execute(
            decision, {TOKENS: num_tokens, REQUESTS: num_reqs}, values, step_info
        )
        if observer is not None:
            host_us = (perf_counter_ns() - started) / 1000
            # Other than decided, where the step found out that something had been replaced.
            mode, key, reason = runner.last_decision or decision
            observer(
                RanEager(reason, num_tokens, num_reqs, uniform, host_us)
                if mode is _EAGER
                else Replayed(mode, reason, num_tokens, key.num_tokens, num_reqs, uniform, host_us)
            )
        return outputs

    def check_externals(self) -> ExternalsReport:
        """Ask whether anything that programs read was replaced (weights not copied into, a value).

        Programs that read one become invalid: their steps run eager (``INVALIDATED``) until
        ``capture()`` is called again.
        """
        return self.runner.check_externals()

    def explain(self, decision: Decision | None = None) -> str:
        """Why a step ran as it did, in words: of ``decision``, or of the last one."""
        return self.runner.explain(decision)

    def report(self) -> RuntimeReport:
        """What is captured, what is not and why, and what it costs."""
        return RuntimeReport(resolved=self.resolved, **self.runner.report()._asdict())

    def close(self) -> None:
        """Retire every program, drop the buffers, release the device if this runtime made it.

        Idempotent. A step after it raises ``LibraryClosedError``.
        Errors: ``CaptureInProgressError`` while a capture scope of its library is open.
        """
        self.library.close()
        self.runner.close()
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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


def _axis_sizes(key: BatchDescriptor, max_num_seqs: int) -> Mapping[str, int]:
    """The padded sizes of a key's static inputs."""
    # Pieces do not depend on requests, their static inputs still have a size: the most a batch
    # of that many tokens can bring.
    num_reqs = key.num_reqs
    if num_reqs is None:
        num_reqs = min(key.num_tokens, max_num_seqs)
    return {TOKENS: key.num_tokens, REQUESTS: num_reqs}


def _smaller_sizes(plan: Plan, mode: RuntimeMode, key: BatchDescriptor) -> list[Mapping[str, int]]:
    """The smallest batch that dispatch pads to a key; none if every batch fills it."""
    kind = (mode, key.uniform, key.num_active_loras, key.num_ubatches)
    below = [
        other.num_tokens
        for at, other in plan.capture_order
        if (at, other.uniform, other.num_active_loras, other.num_ubatches) == kind
        and other.num_tokens < key.num_tokens
    ]
    smallest = max(below, default=0) + 1
    if key.uniform:
        num_reqs = -(-smallest // plan.query_len)
        return [{TOKENS: num_reqs * plan.query_len, REQUESTS: num_reqs}]
    # As many tokens a request as in the batch that fills the key, so that none gets too long; or
    # one request less, where there is none.
    padded = _axis_sizes(key, plan.max_num_seqs)
    num_reqs = -(-smallest * padded[REQUESTS] // padded[TOKENS])
    if num_reqs == padded[REQUESTS] > 1:
        num_reqs -= 1
    return [{TOKENS: smallest, REQUESTS: num_reqs}]

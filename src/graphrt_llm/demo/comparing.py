"""Serves one traffic under several policies, an engine each, and compares the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol

from graphrt import (
    CUDAGraphMode,
    Observer,
    PolicyRun,
    RunningHistogram,
    RuntimeReport,
    StepMetrics,
    TraceRequest,
)
from graphrt_llm.comparison import TokenComparison, compare_tokens
from graphrt_llm.engine import LLMEngine
from graphrt_llm.serving import fit_to_context, prompt_tokens, serve

TIE_TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 0.06, "bfloat16": 0.25}
"""Logits this close may change places where padding changes the order of a sum: some spacings of
the dtype at the logits' size. None is met in float64 in practice."""

MakeEngine = Callable[[CUDAGraphMode, Observer], LLMEngine]


class Phases(Protocol):
    """Follows a comparison. ``total`` may be 0: a policy without graphs captures nothing."""

    def capturing(self, mode: CUDAGraphMode, done: int, total: int) -> None: ...

    def serving(self, mode: CUDAGraphMode, done: int, total: int) -> None: ...


class Load(NamedTuple):
    """What every policy serves."""

    requests: Sequence[TraceRequest]
    """In order of arrival."""
    step_seconds: float
    """Virtual time of a step."""
    seed: int
    """Of the prompts' tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one policy did."""

    run: PolicyRun
    tokens: Mapping[int, tuple[int, ...]]
    """Output tokens by number of the request."""
    comparison: TokenComparison
    """With the first policy's tokens."""
    runtime: RuntimeReport
    max_request_tokens: int
    scale: float
    """What the traffic's lengths were multiplied by to fit the context."""
    num_cut: int
    """Requests that were cut because they did not fit even so."""


def compare_policies(
    modes: Sequence[CUDAGraphMode],
    make_engine: MakeEngine,
    load: Load,
    *,
    tie_tolerance: float,
    phases: Phases,
) -> list[Outcome]:
    """Serve ``load`` under each of ``modes``; the first one's tokens are the reference.

    Engines live one after the other, so that memory holds one model and one cache.
    Errors: those of ``make_engine``, ``LLMEngine.capture`` and ``serve``.
    """
    outcomes: list[Outcome] = []
    for mode in modes:
        metrics = StepMetrics()
        with make_engine(mode, metrics) as engine:
            reference = outcomes[0].tokens if outcomes else None
            outcomes.append(
                _serve_policy(mode, engine, metrics, load, reference, tie_tolerance, phases)
            )
    return outcomes


def _serve_policy(
    mode: CUDAGraphMode,
    engine: LLMEngine,
    metrics: StepMetrics,
    load: Load,
    reference: Mapping[int, tuple[int, ...]] | None,
    tie_tolerance: float,
    phases: Phases,
) -> Outcome:
    phases.capturing(mode, 0, 0)
    started = perf_counter()
    runtime = engine.capture(lambda done, total, key: phases.capturing(mode, done, total))
    capture_seconds = perf_counter() - started

    phases.serving(mode, 0, len(load.requests))
    step_us = RunningHistogram()
    result = serve(
        engine,
        load.requests,
        step_seconds=load.step_seconds,
        seed=load.seed,
        progress=partial(phases.serving, mode),
        on_step=lambda step: step_us.add(1e6 * step.seconds),
    )
    # The comparison below may step the engine again, and those steps are not the traffic's.
    snapshot = metrics.snapshot()

    fit = fit_to_context(load.requests, engine.max_request_tokens)
    expected = result.tokens if reference is None else reference

    def gap(request: int, index: int) -> float:
        length = fit.lengths[request][0]
        prompt = prompt_tokens(load.seed, request, length, engine.vocab_size)
        return engine.top2_gap([*prompt, *expected[request][:index]])

    return Outcome(
        run=PolicyRun(
            name=mode.name,
            metrics=snapshot,
            capture_seconds=capture_seconds if snapshot.captures else 0.0,
            seconds=result.seconds,
            step_us=step_us.freeze(),
        ),
        tokens=result.tokens,
        comparison=compare_tokens(expected, result.tokens, gap, tie_tolerance),
        runtime=runtime,
        max_request_tokens=engine.max_request_tokens,
        scale=result.scale,
        num_cut=result.num_cut,
    )

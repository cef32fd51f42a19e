"""Serves one traffic under several policies, one engine each, and compares the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from graphrt import CUDAGraphMode, Observer, ProgressBars, RuntimeReport, StepMetrics
from graphrt.planner import TraceRequest
from graphrt.report import PolicyRun, RunningHistogram
from graphrt_llm.comparison import TokenComparison, compare_tokens
from graphrt_llm.engine import LLMEngine
from graphrt_llm.scheduler import DraftCounts
from graphrt_llm.serving import fit_to_context, prompt_tokens, serve

TIE_TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 0.06, "bfloat16": 0.25}
"""By how much padding, which changes the order of sums, may change logits of a model of a few
layers: some spacings of the dtype at the logits' size. In float64 no choice is that close in
practice."""


def tie_tolerance(dtype: str, num_layers: int) -> float:
    """The margin of two logits below which another choice is a tie.

    Errors of layers add up like steps of a random walk. Random weights of 28 layers in bfloat16 are
    0.27 off from float64 in the difference of the two largest logits (standard deviation; 0.93 at
    most of 1,504 rows, H200), with drafts or without; batches of 8 and of 32 requests differ after
    a few tokens, without any graph. Such tokens prove little, and those of a trained model do.
    """
    return TIE_TOLERANCE[dtype] * math.sqrt(max(num_layers, 4) / 4)


MakeEngine = Callable[[CUDAGraphMode, Observer], LLMEngine]
Policy = tuple[str, CUDAGraphMode, MakeEngine]
"""What one run of the traffic is called, and what serves it."""


class Phases(Protocol):
    """Progress of a comparison. ``total`` is 0 for the captures of a policy without graphs."""

    def capturing(self, mode: CUDAGraphMode, done: int, total: int) -> None: ...

    def serving(self, mode: CUDAGraphMode, done: int, total: int) -> None: ...


class Bars(ProgressBars):
    """Draws them on ``console`` while it is entered: one bar for the captures of each policy, one
    for what it serves."""

    def capturing(self, mode: CUDAGraphMode, done: int, total: int) -> None:
        if total:
            self.show(f"{mode.name:<18} capture", done, total)

    def serving(self, mode: CUDAGraphMode, done: int, total: int) -> None:
        self.show(f"{mode.name:<18} serve  ", done, total)


class Load(NamedTuple):
    """The traffic that every policy serves."""

    requests: Sequence[TraceRequest]
    """In order of arrival."""
    step_seconds: float
    """Virtual time of a step."""
    seed: int
    """Of the prompts."""
    loras: tuple[str, ...] = ()
    """The adapters that requests name, in turns; every so many requests one has none."""

    def lora_of(self, index: int) -> str | None:
        """The adapter of a request, by its number."""
        return (None, *self.loras)[index % (len(self.loras) + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one policy."""

    run: PolicyRun
    tokens: Mapping[int, tuple[int, ...]]
    """Output tokens by number of the request."""
    comparison: TokenComparison
    """With the tokens of the first policy."""
    runtime: RuntimeReport
    max_request_tokens: int
    scale: float
    """Factor that made the traffic's lengths fit the context."""
    num_cut: int
    """Requests that were still too long after scaling, and were cut."""
    drafts: DraftCounts
    """What was drafted, with speculative decoding."""


def compare_policies(
    policies: Sequence[Policy], load: Load, *, tie_tolerance: float, phases: Phases
) -> list[Outcome]:
    """Serve ``load`` under each of ``policies``; the first one's tokens are the reference.

    One engine exists at a time, so that memory holds one model and one cache.
    Errors: those of the engines' makers, ``LLMEngine.capture`` and ``serve``.
    """
    outcomes: list[Outcome] = []
    for name, mode, make in policies:
        metrics = StepMetrics()
        with make(mode, metrics) as engine:
            reference = outcomes[0].tokens if outcomes else None
            outcomes.append(
                _serve_policy(name, mode, engine, metrics, load, reference, tie_tolerance, phases)
            )
    return outcomes


def _serve_policy(
    name: str,
    mode: CUDAGraphMode,
    engine: LLMEngine,
    metrics: StepMetrics,
    load: Load,
    reference: Mapping[int, tuple[int, ...]] | None,
    tie_tolerance: float,
    phases: Phases,
) -> Outcome:
    phases.capturing(mode, 0, 0)
    runtime = engine.capture(lambda done, total, key: phases.capturing(mode, done, total))

    phases.serving(mode, 0, len(load.requests))
    step_us = RunningHistogram()
    result = serve(
        engine,
        load.requests,
        step_seconds=load.step_seconds,
        seed=load.seed,
        lora_of=load.lora_of,
        progress=partial(phases.serving, mode),
        on_step=lambda step: step_us.add(1e6 * step.seconds),
    )
    # Taken before the comparison, which may step the engine again.
    snapshot, drafts = metrics.snapshot(), engine.drafts

    fit = fit_to_context(load.requests, engine.max_request_tokens)
    expected = result.tokens if reference is None else reference

    def margin(request: int, position: int) -> float:
        if engine.world > 1:
            return math.inf  # Nobody computes it: ranks run together only.
        length = fit.lengths[request][0]
        prompt = prompt_tokens(load.seed, request, length, engine.vocab_size)
        known = [*prompt, *expected[request][:position]]
        return engine.top2_margin(known, load.lora_of(request))

    return Outcome(
        run=PolicyRun(
            name=name,
            metrics=snapshot,
            capture_seconds=runtime.capture_seconds if snapshot.captures else 0.0,
            seconds=result.seconds,
            step_us=step_us.freeze(),
        ),
        tokens=result.tokens,
        comparison=compare_tokens(expected, result.tokens, margin, tie_tolerance),
        runtime=runtime,
        max_request_tokens=engine.max_request_tokens,
        scale=result.scale,
        num_cut=result.num_cut,
        drafts=drafts,
    )

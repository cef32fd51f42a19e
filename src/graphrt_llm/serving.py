"""Serves a traffic trace by a virtual clock: nothing waits, and every mode gets the same batches.

Each step takes the same virtual time, whatever its real time: which requests are in a batch then
depends on the trace alone. Prompts are random tokens, seeded by the number of the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from graphrt import interrupted_between_steps
from graphrt.planner import TraceRequest
from graphrt_llm.engine import LLMEngine, StepResult
from graphrt_llm.errors import EngineStateError, RequestError
from graphrt_llm.request import SamplingParams


class Fit(NamedTuple):
    """A trace's lengths, scaled to fit a context."""

    lengths: tuple[tuple[int, int], ...]
    """Prompt and output tokens of each request."""
    scale: float
    """What every length was multiplied by; 1 if the trace fits as it is."""
    num_cut: int
    """Requests still too long after scaling, whose output and then prompt were cut."""


class ServeStep(NamedTuple):
    """One step, as ``on_step`` receives it.

    ``number``: Steps before it.
    ``clock_seconds``: Virtual time at its start.
    ``seconds``: Real time of scheduling, running, sampling and reading the tokens.
    ``result``: What the engine returned.
    """

    number: int
    clock_seconds: float
    seconds: float
    result: StepResult


class ServeResult(NamedTuple):
    """The result of ``serve``.

    ``tokens``: Output tokens by number of the request.
    ``num_steps``: Steps of the engine.
    ``seconds``: Real time of all steps.
    ``scale``: What every length was multiplied by, to fit the context.
    ``num_cut``: Requests that were cut, because they were too long all the same.
    """

    tokens: dict[int, tuple[int, ...]]
    num_steps: int
    seconds: float
    scale: float
    num_cut: int


def fit_to_context(requests: Sequence[TraceRequest], max_tokens: int) -> Fit:
    """Scale all lengths by one factor, so that 99 of 100 requests fit ``max_tokens``.

    One factor keeps the trace's shape: long requests stay longer than short ones. The longest 1 %
    would make it so small that all others became alike, so they are cut instead.
    """
    if not requests:
        return Fit((), 1.0, 0)
    totals = sorted(r.num_prompt_tokens + r.num_output_tokens for r in requests)
    scale = min(1.0, max_tokens / totals[math.ceil(0.99 * len(totals)) - 1])
    lengths, num_cut = [], 0
    for request in requests:
        prompt = max(1, int(request.num_prompt_tokens * scale))
        output = max(1, int(request.num_output_tokens * scale))
        if prompt + output > max_tokens:
            num_cut += 1
            output = min(output, max(1, max_tokens - prompt))
            prompt = min(prompt, max_tokens - output)
        lengths.append((prompt, output))
    return Fit(tuple(lengths), scale, num_cut)


def prompt_tokens(seed: int, index: int, length: int, vocab_size: int) -> list[int]:
    """The prompt of request ``index``: the same for every engine with this vocabulary."""
    tokens: list[int] = (
        np.random.default_rng((seed, index)).integers(vocab_size, size=length).tolist()
    )
    return tokens


def serve(
    engine: LLMEngine,
    requests: Sequence[TraceRequest],
    *,
    step_seconds: float,
    seed: int = 0,
    params: Callable[[int, int], SamplingParams] | None = None,
    lora_of: Callable[[int], str | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_step: Callable[[ServeStep], None] | None = None,
) -> ServeResult:
    """Serve ``requests``, in order of arrival, and return every output token.

    ``step_seconds`` is the virtual time of a step; where the engine has nothing to do, the clock
    jumps to the next arrival. ``params(index, num_output_tokens)`` gives a request's sampling
    parameters; the default is greedy for exactly that many tokens. ``lora_of(index)`` names its
    adapter; the default is none. ``progress(done, total)`` follows each step in which requests
    finished, ``on_step`` each step.

    Of an engine with several ranks each is given all requests, and serves every ``world``-th of
    them; ``progress`` counts these, and ``tokens`` are theirs. Idle ranks step with the others.

    An interrupt (Ctrl-C) takes effect between two steps; a second one, at once. If serving ends
    early for any reason, its requests are aborted and the engine can be used again or closed.

    Errors: ``EngineStateError`` if the engine is busy; ``RequestError`` for a step time that is not
    positive or arrivals out of order; those of ``LLMEngine``.
    """
    if engine.has_unfinished():
        raise EngineStateError("serve", expected="an idle engine", found="unfinished requests")
    arrivals = [request.arrival_s for request in requests]
    if not step_seconds > 0 or arrivals != sorted(arrivals):
        raise RequestError(
            "serve",
            expected="a step time above 0, and requests in order of arrival",
            found=f"step_seconds = {step_seconds}, {len(arrivals)} requests",
        )
    params = _greedy_for if params is None else params
    fit = fit_to_context(requests, engine.max_request_tokens)
    own = range(engine.rank, len(requests), engine.world)
    names = {index: f"trace-{index}" for index in own}
    tokens: dict[str, list[int]] = {name: [] for name in names.values()}
    num_seen = num_done = num_steps = 0
    clock = seconds = 0.0
    is_idle, goes_on = True, bool(requests)
    try:
        with interrupted_between_steps() as check_interrupt:
            while goes_on:
                check_interrupt()
                if is_idle and num_seen < len(requests):
                    clock = max(clock, arrivals[num_seen])
                while num_seen < len(requests) and arrivals[num_seen] <= clock:
                    if num_seen in names:
                        num_prompt, num_output = fit.lengths[num_seen]
                        engine.add_request(
                            prompt_tokens(seed, num_seen, num_prompt, engine.vocab_size),
                            params(num_seen, num_output),
                            names[num_seen],
                            lora=None if lora_of is None else lora_of(num_seen),
                        )
                    num_seen += 1

                started = perf_counter()
                result = engine.step()
                took = perf_counter() - started
                for output in result.outputs:
                    tokens[output.request_id] += output.new_token_ids
                num_finished = sum(output.finish_reason is not None for output in result.outputs)
                num_done += num_finished
                if progress is not None and num_finished:
                    progress(num_done, len(own))
                if on_step is not None:
                    on_step(ServeStep(num_steps, clock, took, result))
                num_steps += 1
                seconds += took
                clock += step_seconds
                # Alone, a rank knows that the next step would be idle.
                is_idle = result.all_idle if engine.world > 1 else not engine.has_unfinished()
                goes_on = num_seen < len(requests) or not is_idle
            check_interrupt()
    finally:
        engine.abort_all()
    by_number = {index: tuple(tokens[name]) for index, name in names.items()}
    return ServeResult(by_number, num_steps, seconds, fit.scale, fit.num_cut)


def _greedy_for(index: int, num_output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)

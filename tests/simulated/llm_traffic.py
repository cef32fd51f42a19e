"""Engines and traffic that the engine's tests share: prompts, arrivals, and serving to the end."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any, NamedTuple

from graphrt import CompilationConfig, CUDAGraphMode, RuntimeConfig
from graphrt_llm import EngineConfig, FinishReason, LLMEngine, SamplingParams, StepResult
from graphrt_llm.errors import UnknownRequestError

MODES = [mode.name for mode in CUDAGraphMode]


def engine_config(
    mode: str = "NONE",
    *,
    overlap: bool | None = False,
    num_blocks: int | None = 17,
    seed: int = 0,
    **runtime: Any,
) -> EngineConfig:
    """Four requests at a time, chunks of at most 12 tokens, 16 blocks of 4 for all of them."""
    return EngineConfig(
        runtime=RuntimeConfig(
            compilation=CompilationConfig(
                cudagraph_mode=mode,
                cudagraph_capture_sizes=None if mode == "NONE" else [1, 2, 4, 12],
            ),
            max_num_seqs=4,
            max_num_batched_tokens=12,
            **runtime,
        ),
        max_model_len=48,
        block_size=4,
        num_blocks=num_blocks,
        device="simulated",
        dtype="float64",
        overlap=overlap,
        seed=seed,
    )


def prompt(index: int, length: int) -> list[int]:
    return random.Random(index).choices(range(512), k=length)


class Arrival(NamedTuple):
    """A request and the step before which it is added."""

    step: int
    prompt: list[int]
    params: SamplingParams


# Long and short, one longer than a step, greedy and sampled, more than the cache holds at once.
TRAFFIC = [
    Arrival(0, prompt(0, 5), SamplingParams(max_tokens=14)),
    Arrival(0, prompt(1, 30), SamplingParams(max_tokens=9, temperature=1.0, seed=11)),
    Arrival(2, prompt(2, 1), SamplingParams(max_tokens=20, temperature=0.8, top_k=20, seed=2)),
    Arrival(3, prompt(3, 17), SamplingParams(max_tokens=12)),
    Arrival(4, prompt(4, 3), SamplingParams(max_tokens=16, temperature=1.3, top_p=0.9, seed=5)),
    Arrival(4, prompt(5, 24), SamplingParams(max_tokens=1)),
    Arrival(9, prompt(6, 2), SamplingParams(max_tokens=18)),
]


class Served(NamedTuple):
    tokens: list[list[int]]
    """Output tokens of each request."""
    reasons: list[FinishReason | None]
    steps: list[StepResult]

    @property
    def shapes(self) -> list[tuple[int, int, bool]]:
        return [(step.num_tokens, step.num_reqs, step.uniform) for step in self.steps]

    @property
    def num_preempted(self) -> int:
        return sum(step.num_preempted for step in self.steps)


def serve(
    engine: LLMEngine, traffic: list[Arrival], abort: tuple[int, int] | None = None
) -> Served:
    """Serve ``traffic``; ``abort``: a request and the step before which it is aborted."""
    tokens: list[list[int]] = [[] for _ in traffic]
    reasons: list[FinishReason | None] = [None for _ in traffic]
    waiting = sorted(enumerate(traffic), key=lambda item: item[1].step)
    steps: list[StepResult] = []
    while waiting or engine.has_unfinished():
        while waiting and waiting[0][1].step <= len(steps):
            index, arrival = waiting.pop(0)
            engine.add_request(arrival.prompt, arrival.params, str(index))
        outputs = []
        if abort is not None and abort[1] == len(steps):
            with suppress(UnknownRequestError):
                outputs.append(engine.abort(str(abort[0])))
        steps.append(engine.step())
        for output in (*outputs, *steps[-1].outputs):
            index = int(output.request_id)
            assert reasons[index] is None, "a token after the last"
            tokens[index] += output.new_token_ids
            reasons[index] = output.finish_reason
        assert len(steps) < 1000, "requests do not finish"
    return Served(tokens, reasons, steps)


def check_same_tokens(served: Served, expected: Served) -> None:
    """Equal tokens and reasons; of an aborted request, whose tokens may come later, a prefix."""
    for tokens, reason, expected_tokens, expected_reason in zip(
        *served[:2], *expected[:2], strict=True
    ):
        if FinishReason.ABORTED in (reason, expected_reason):
            shorter = min(len(tokens), len(expected_tokens))
            assert tokens[:shorter] == expected_tokens[:shorter]
        else:
            assert (tokens, reason) == (expected_tokens, expected_reason)

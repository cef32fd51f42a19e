"""G3-serve, G5-cold: whole services, and starts on a machine that has compiled nothing.

A start is measured in a process of its own: with empty folders for what compilers keep, or with
those of this machine, which an earlier start has filled. Such processes are forked from one that
has imported all that this module does, which is not timed.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch

from benchmarks.cases.engine import (
    CONTEXT,
    LONG_CONTEXT,
    NUM_PROMPT,
    engine_of,
    first_graphed_token,
    serve,
    step_ms,
)
from benchmarks.harness import (
    REPOSITORY,
    CannotRunError,
    Case,
    Row,
    Samples,
    cuda_device,
    quiet,
    ratio,
    row,
)
from graphrt import StepMetrics
from graphrt.planner import TraceRequest, read_trace
from graphrt_llm import LLMEngine, SamplingParams
from graphrt_llm.config import CaptureWhen
from graphrt_llm.serving import prompt_tokens

TRACE = REPOSITORY.parent / "shared/traces/azure2023/AzureLLMInferenceTrace_conv.csv"
NUM_REQUESTS = 300
SERVE_BLOCKS = 3
PREFILL = (64, 1024)
"""Requests, and tokens of each prompt."""

ANCHOR_TRACE = 75_400
ANCHORS_PREFILL = {"qwen3-0.6b": 423_000, "llama3-8b": 43_400}
"""Tokens a second of vLLM 0.25.1, its default mode, on an H200. Measured before, not in the same
run."""

DECODE_MS = {
    "qwen3-0.6b": {1: 0.89, 16: 1.30, 64: 1.75, 200: 2.75},
    "llama3-8b": {16: 4.82},
}
"""To reach on an H200 by a decode step at the default context; by shape, and requests at once."""
DECODE_BLOCKS = 5
MODES = ("NONE", "PIECEWISE", "FULL", None)
NUM_COMPARED = 64
"""Output tokens of each request that are compared between the modes."""

WARM_STARTS = 5
"""To the first token, by which they end."""
KEYS_BLOCKS = 2
"""Of starts that capture every key, at two contexts in turns."""
MOST_SECONDS = 180
"""Of one start: several times what all compilers need."""


def tokens_a_second(engine: LLMEngine, requests: Sequence[tuple[Sequence[int], int]]) -> float:
    """Prompt and output tokens of ``requests`` (prompt, output tokens), all queued at once."""
    for prompt, num_output in requests:
        engine.add_request(prompt, SamplingParams(max_tokens=num_output, ignore_eos=True))
    total = sum(len(prompt) + num_output for prompt, num_output in requests)
    torch.cuda.synchronize()
    started = perf_counter()
    num_returned = 0
    while engine.has_unfinished():
        num_returned += sum(len(output.new_token_ids) for output in engine.step().outputs)
    seconds = perf_counter() - started
    assert num_returned == sum(num_output for _, num_output in requests)
    return total / seconds


def from_trace(
    trace: Sequence[TraceRequest], context: int, vocab_size: int
) -> list[tuple[list[int], int]]:
    """Random prompts of the trace's lengths, cut where prompt and output exceed the context."""
    found = []
    for index, request in enumerate(trace):
        num_output = min(request.num_output_tokens, context - 1)
        num_prompt = min(request.num_prompt_tokens, context - num_output)
        found.append((prompt_tokens(0, index, num_prompt, vocab_size), num_output))
    return found


def whole_services() -> Sequence[Row]:
    if not TRACE.is_file():
        raise CannotRunError(f"it needs the trace {TRACE}")
    trace = read_trace(TRACE, NUM_REQUESTS)
    rows: list[Row] = []
    with cuda_device():
        rows.append(equal_tokens("qwen3-0.6b"))
        for shape, anchor in ANCHORS_PREFILL.items():
            rows += decode_rows(shape)
            with engine_of(shape, context=LONG_CONTEXT) as engine:
                engine.capture()
                if shape == "qwen3-0.6b":
                    requests = from_trace(trace, LONG_CONTEXT, engine.vocab_size)
                    rows.append(service_row("G3-serve", engine, requests, 1.2, ANCHOR_TRACE))
                rng = np.random.default_rng(1)
                prompts = rng.integers(engine.vocab_size, size=PREFILL).tolist()
                requests = [(prompt, 1) for prompt in prompts]
                name = f"G3-serve-prefill-{shape.rpartition('-')[2]}"
                rows.append(service_row(name, engine, requests, 1.0, anchor))
    return rows


def equal_tokens(shape: str) -> Row:
    """Of requests that are served at once in numbers that are captured sizes, their prompts in one
    step, so that all modes compute the same batches: how many get the tokens of no graphs."""
    served: dict[str, list[list[int]]] = {}
    sizes = sorted({*DECODE_MS[shape], NUM_PROMPT})  # One prompt alone has a graph too.
    for mode in MODES:
        with engine_of(shape, mode, sizes=sizes) as engine:
            engine.capture()
            tokens = served[mode or "default"] = []
            for count in DECODE_MS[shape]:
                length = min(NUM_PROMPT, engine.limits.max_num_batched_tokens // count)
                rng = np.random.default_rng(count)
                prompts = rng.integers(engine.vocab_size, size=(count, length)).tolist()
                params = SamplingParams(max_tokens=NUM_COMPARED, ignore_eos=True)
                tokens += engine.generate(prompts, params)
    shares = {
        mode: statistics.fmean(map(list.__eq__, tokens, served["NONE"]))
        for mode, tokens in served.items()
    }
    return row(
        "G3-serve-tokens",
        [min(shares.values())],
        target=1.0,
        unit="share",
        higher_is_better=True,
        samples={mode: [share] for mode, share in shares.items()},
        counted="requests whose tokens are all those of the mode NONE; bfloat16",
        requests=list(DECODE_MS[shape]),
        output_tokens=NUM_COMPARED,
    )


def decode_rows(shape: str) -> Sequence[Row]:
    with engine_of(shape) as engine:
        engine.capture()
        rows = []
        for num_reqs, target in DECODE_MS[shape].items():
            step_ms(engine, num_reqs, 0)
            with quiet():
                times = [step_ms(engine, num_reqs, 1 + block) for block in range(DECODE_BLOCKS)]
            rows.append(
                row(
                    f"G3-serve-decode-{shape.rpartition('-')[2]}-{num_reqs}",
                    times,
                    target=target,
                    unit="ms",
                    samples={"step": times},
                    attention=engine.attention.name,
                    overlap=engine.overlap,
                )
            )
    return rows


def service_row(
    metric: str,
    engine: LLMEngine,
    requests: Sequence[tuple[Sequence[int], int]],
    target: float,
    anchor: int,
) -> Row:
    """The first service is not timed: it loads kernels and fills the allocator's cache."""
    tokens_a_second(engine, requests)
    served = [tokens_a_second(engine, requests) for _ in range(SERVE_BLOCKS)]
    return row(
        metric,
        [figure / anchor for figure in served],
        target=target,
        unit="ratio",
        higher_is_better=True,
        samples={"tokens a second": served},
        timed="wall clock of all steps, every request queued before the first; collector on",
        anchor=anchor,
        tokens_a_second=statistics.median(served),
        requests=len(requests),
        tokens=sum(len(prompt) + num_output for prompt, num_output in requests),
        attention=engine.attention.name,
    )


def one_start(context: int, capture: str) -> dict[str, Any]:
    """Seconds of a start, from before the engine is made; imports and the device are there.

    ``first_token``: by priority, to the first graphed token. ``by_priority``: then, idle, until
    every key is captured with the attention backend that serves in the end. ``before_serving``:
    until every key is captured.
    """
    torch.cuda.synchronize()
    metrics, started = StepMetrics(), perf_counter()
    when: CaptureWhen = "before_serving" if capture == "before_serving" else "by_priority"
    with engine_of(
        "qwen3-0.6b", context=context, capture=when, observer=metrics, is_first=True
    ) as engine:
        found: dict[str, Any] = {"engine": perf_counter() - started}
        if capture == "before_serving":
            engine.capture()
        else:
            first_graphed_token(engine, seed=0)
            found["first token"] = perf_counter() - started
            found["attention at first token"] = engine.attention.reason
            if capture == "first_token":
                return found
            before = serve(engine, 1, 16, seed=1)
            while engine.is_building or engine.runtime.report().missing:
                engine.step()
                # Compilers use the same processors, and an idle step may do nothing.
                sleep(0.001)
            after = serve(engine, 1, 16, seed=1)
            found["tokens before and after are equal"] = before == after
        found["every key"] = perf_counter() - started
        found["attention"] = engine.attention.reason
        found["switches"] = metrics.snapshot().lifetimes.withdrawals
        found["keys"] = len(engine.runtime.report().graphs)
    return found


def start_of_its_own(context: int, capture: str, caches: Path | None = None) -> Mapping[str, Any]:
    """``one_start`` in a process that keeps what it compiles in ``caches``; None: where all do."""
    folders = {}
    if caches is not None:
        folders = {
            "FLASHINFER_WORKSPACE_BASE": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "CUDA_CACHE_PATH": str(caches / "cuda"),
        }
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload([__name__])
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=_send_start, args=(theirs, folders, context, capture))
    process.start()
    theirs.close()
    try:
        if not ours.poll(MOST_SECONDS):
            raise TimeoutError(f"a start took more than {MOST_SECONDS} s")
        found: Mapping[str, Any] = ours.recv()  # An ``EOFError`` if it failed: it has said why.
        return found
    finally:
        process.join(10)
        process.kill()


def _send_start(pipe: Connection, folders: Mapping[str, str], context: int, capture: str) -> None:
    os.environ.update(folders)
    torch.cuda.init()
    pipe.send(one_start(context, capture))


def cold_starts() -> Iterator[Row]:
    with cuda_device():
        pass  # Fails here, with a reason, where there is none; starts have devices of their own.
    timed = "s from before the engine is made, weights drawn; one process each: to "

    def starts_row(
        suffix: str,
        target: float,
        what: str,
        starts: Sequence[Mapping[str, Any]],
        **config: object,
    ) -> Row:
        figures = [start[what] for start in starts]
        return row(
            f"G5-cold{suffix}",
            figures,
            target=target,
            unit="s",
            samples={what: figures},
            timed=timed + what,
            context=CONTEXT,
            parts=dict(starts[-1]),
            **config,
        )

    with tempfile.TemporaryDirectory() as folder:
        cold = start_of_its_own(CONTEXT, "first_token", Path(folder))
    yield starts_row("", 10.0, "first token", [cold])
    # Not timed: it fills this machine's caches, where they are empty.
    filling = start_of_its_own(CONTEXT, "by_priority")
    warm = [start_of_its_own(CONTEXT, "first_token") for _ in range(WARM_STARTS)]
    yield starts_row("-warm", 1.0, "first token", warm, start_before=dict(filling))
    keys: dict[int, list[Mapping[str, Any]]] = {CONTEXT: [], LONG_CONTEXT: []}
    for _ in range(KEYS_BLOCKS):
        for context, starts in keys.items():
            starts.append(start_of_its_own(context, "before_serving"))
    yield starts_row("-keys", 3.0, "every key", keys[CONTEXT])
    samples: Samples = {
        f"context {context}": [start["every key"] for start in starts]
        for context, starts in keys.items()
    }
    yield row(
        f"G5-cold-keys-{LONG_CONTEXT}",
        ratio(samples, f"context {LONG_CONTEXT}", f"context {CONTEXT}"),
        target=1.1,
        unit="ratio",
        samples=samples,
        timed=f"{timed}every key, context {LONG_CONTEXT} over {CONTEXT}",
        parts=dict(keys[LONG_CONTEXT][-1]),
    )


CASES = [
    Case("G3-serve", "the Azure trace at once, prefill, decode steps; 0.6B and 8B", whole_services),
    Case("G5-cold", "starts with nothing cached, and with warm caches", cold_starts),
]

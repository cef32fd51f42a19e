"""G2, G4, G5: the engine's decode step, in earnest: prompts, paged cache, scheduling, sampling.

A step's time is a difference: serving prompts of 128 tokens with 144 output tokens each, less the
same with 16, over the 128 steps between. What both share, prompts and the start, falls out.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks.baselines import poison, require_equal
from benchmarks.harness import (
    Case,
    Row,
    Samples,
    cuda_device,
    medians,
    need_bytecode,
    quiet,
    ratio,
    rounds,
    row,
    time_gpu,
)
from graphrt import (
    CompilationConfig,
    ForwardContext,
    Observer,
    Program,
    RuntimeConfig,
    RuntimeMode,
    RuntimeReport,
)
from graphrt.runner.comparisons import Comparisons
from graphrt_llm import EngineConfig, LLMEngine, SamplingParams
from graphrt_llm.config import CaptureWhen, DType
from graphrt_llm.models import CausalLM, ModelConfig

if TYPE_CHECKING:
    from graphrt.compile.compilation import CompileReport

NUM_PROMPT, SHORT, LONG = 128, 16, 144
BLOCKS = 9
COMPILED_BLOCKS = 8
"""Of each order in which the two engines are made."""
PREFILLS = (512, 2048)
FEW_REQS = (1, 16)
"""In float32, whose attention has no fast kernel: 64 and 200 requests take minutes."""
NUM_BLOCKS = 8192
"""Of each cache where two engines share a GPU: in float32 the first one's default leaves no room
for the second."""
START_BLOCKS = 3
"""Of G5, whose blocks take many seconds each."""
CONTEXT, LONG_CONTEXT = 2048, 4352
DEFAULT_SEQS = RuntimeConfig().max_num_seqs
SEVEN_SIZES = (1, 2, 4, 8, 16, 64, 256)
NUM_REPLAYS = 5
"""Queued in one go for their GPU time: more would not fit the queue."""

ANCHORS_MS = {1: 1.62, 16: 1.61, 64: 2.26, 200: 3.83}
"""By requests at once: a step of vLLM 0.25.1, its default mode, on an H200. Measured before, not in
the same run."""


@contextmanager
def engine_of(
    shape: str,
    mode: str | None = None,
    *,
    context: int = CONTEXT,
    max_num_seqs: int = DEFAULT_SEQS,
    sizes: Sequence[int] | None = None,
    capture: CaptureWhen = "before_serving",
    level: Any = None,
    dtype: DType = "bfloat16",
    num_blocks: int | None = None,
    observer: Observer | None = None,
    is_first: bool = False,
) -> Iterator[LLMEngine]:
    """An engine of the named shape whose graphs are not captured yet.

    All else is what a user gets who says nothing: sizes, requests, tokens of a step, the cache.
    ``is_first``: of its process.
    """
    config = EngineConfig(
        runtime=RuntimeConfig(
            compilation=CompilationConfig(
                level=level,
                cudagraph_mode=mode,
                cudagraph_capture_sizes=None if sizes is None else tuple(sizes),
            ),
            max_num_seqs=max_num_seqs,
        ),
        max_model_len=context,
        dtype=dtype,
        num_blocks=num_blocks,
        load_format="dummy",
        device="cuda",
        capture=capture,
    )
    if not is_first:
        # The cache takes a share of the free memory: what an earlier engine left is given back.
        gc.collect()
        torch.cuda.empty_cache()
    model = ModelConfig.named(shape)
    with LLMEngine.with_random_weights(model, config, observer=observer) as engine:
        while engine.is_building and capture == "before_serving":
            sleep(0.01)
            engine.step()
        yield engine


def serve(engine: LLMEngine, num_reqs: int, num_output: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(engine.vocab_size, size=(num_reqs, NUM_PROMPT)).tolist()
    return engine.generate(prompts, SamplingParams(max_tokens=num_output, ignore_eos=True))


def step_ms(engine: LLMEngine, num_reqs: int, seed: int) -> float:
    """Milliseconds of a decode step of ``num_reqs`` requests."""
    seconds = {}
    for num_output in (SHORT, LONG):
        torch.cuda.synchronize()
        started = perf_counter()
        outputs = serve(engine, num_reqs, num_output, seed)
        seconds[num_output] = perf_counter() - started
        assert [len(tokens) for tokens in outputs] == [num_output] * num_reqs
    return (seconds[LONG] - seconds[SHORT]) * 1000 / (LONG - SHORT)


def decode_steps() -> Sequence[Row]:
    rows = []
    with cuda_device(), engine_of("qwen3-0.6b") as engine:
        engine.capture()
        arms = {num_reqs: partial(step_ms, engine, num_reqs) for num_reqs in ANCHORS_MS}
        for num_reqs, arm in arms.items():
            arm(seed=0)
            with quiet():
                times = [arm(seed=1 + block) for block in range(BLOCKS)]
            rows.append(
                row(
                    f"G4-0.6b-{num_reqs}",
                    times,
                    target=ANCHORS_MS[num_reqs],
                    unit="ms",
                    samples={"step": times},
                    attention=engine.attention.name,
                    overlap=engine.overlap,
                )
            )
    return rows


def prefill_ms(engine: LLMEngine, num_tokens: int, seed: int) -> float:
    """Milliseconds of one step with ``num_tokens`` tokens of prompts, and of asking for it."""
    torch.cuda.synchronize()
    started = perf_counter()
    outputs = serve(engine, num_tokens // NUM_PROMPT, 1, seed)
    seconds = perf_counter() - started
    assert [len(tokens) for tokens in outputs] == [1] * (num_tokens // NUM_PROMPT)
    return seconds * 1000


def compiled_over_breaks(dtype: DType = "bfloat16", suffix: str = "") -> Sequence[Row]:
    """Steps of the same requests: pieces compiled by Inductor, over plain break points.

    Decode steps, and prefill ones: of 512 tokens in graphs, of 2048 without. In float32 fewer.
    """
    is_float32 = dtype == "float32"
    num_reqs = FEW_REQS if is_float32 else tuple(ANCHORS_MS)
    prefills = PREFILLS[:1] if is_float32 else PREFILLS
    steps: dict[str, Callable[..., float]] = {
        **{f"{n}": partial(step_ms, num_reqs=n, seed=1) for n in num_reqs},
        **{f"prefill-{n}": partial(prefill_ms, num_tokens=n, seed=1) for n in prefills},
    }
    levels: dict[str, int | None] = {"breaks": None, "compiled": 3}
    made = partial(
        engine_of, "qwen3-0.6b", sizes=(*num_reqs, prefills[0]), dtype=dtype, num_blocks=NUM_BLOCKS
    )
    samples: dict[str, Samples] = {name: {label: [] for label in levels} for name in steps}

    def measure(labels: Sequence[str]) -> CompileReport:
        with ExitStack() as stack:
            engines = {label: stack.enter_context(made(level=levels[label])) for label in labels}
            for engine in engines.values():
                engine.capture()
            report = engines["compiled"].runtime.report().compile
            assert report is not None, "level 3 compiles"
            for name, step in steps.items():
                arms: dict[str, Callable[[], object]] = {
                    label: partial(step, engine) for label, engine in engines.items()
                }
                for arm in arms.values():
                    arm()
                with quiet():
                    for label, arm in rounds(arms, COMPILED_BLOCKS):
                        samples[name][label].append(float(arm()))  # type: ignore[arg-type]
            return report

    with cuda_device():
        # Each is made first once: neither has the better place in the memory.
        report = measure(list(levels))
        measure(list(reversed(levels)))
    return [
        row(
            f"G2-compiled{suffix}-{name}",
            ratio(measured, "compiled", "breaks"),
            target=1.0,
            unit="ratio",
            samples=measured,
            medians_ms=medians(measured),
            pieces=len(report.pieces),
            unique=report.num_unique,
            ranges=[str(sizes) for sizes in report.ranges],
            compile_seconds=report.compilation_time,
            loaded=report.num_loaded,
        )
        for name, measured in samples.items()
    ]


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return 2 * source.nbytes / best


def weight_bytes(config: ModelConfig) -> int:
    """What a step has to read: every parameter, of an embedding table on its own only its row."""
    model = CausalLM(config, torch.bfloat16, "meta")
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if config.tie_word_embeddings else total - model.embedding.nbytes


def against_weights() -> Sequence[Row]:
    with cuda_device():
        floor_ms = weight_bytes(ModelConfig.named("llama3-8b")) / copy_bandwidth() * 1000
        with engine_of("llama3-8b", max_num_seqs=16, sizes=[1, 2, 4, 16, 128]) as engine:
            engine.capture()
            step_ms(engine, 1, seed=0)
            with quiet():
                times = [step_ms(engine, 1, seed=1 + block) for block in range(BLOCKS)]
            return [
                row(
                    "G4-8b",
                    [time / floor_ms for time in times],
                    target=1.20,
                    unit="ratio",
                    samples={"step ms": times},
                    floor_ms=floor_ms,
                    attention=engine.attention.name,
                )
            ]


@contextmanager
def last_program(engine: LLMEngine, num_reqs: int) -> Iterator[Program]:
    """The program of a decode step of ``num_reqs`` requests, ready to be replayed by itself.

    It is as the last step of a real service left it: inputs staged, attention planned, the step's
    context entered. Its replay was compared with that step.
    """
    runtime = engine.runtime
    steps: list[tuple[Any, dict[str, Any]]] = []
    step = runtime.step

    def recorded(values: Any, **options: Any) -> Any:
        steps.append((values, options))
        return step(values, **options)

    with mock.patch.object(runtime, "step", recorded):
        serve(engine, num_reqs, SHORT, seed=0)
    values, options = steps[-1]
    expected = step(values, **options).logits.clone()
    assert runtime.last_decision is not None, "a step leaves its decision"
    mode, key, _ = runtime.last_decision
    program = runtime.library.program(runtime.runner.name, mode, key)
    assert program is not None, f"a graph serves {num_reqs} requests"
    with torch.no_grad(), ForwardContext(mode, key, options["step_info"]):
        poison(program.outputs.logits)
        program.replay()
        require_equal(program.outputs.logits[:num_reqs], expected, f"replay of {program.title}")
        yield program


def host_ms(program: Program, synchronize: Callable[[], object], blocks: int) -> list[float]:
    """Milliseconds of host time of one replay, the device idle when it begins; one median a block.

    The collector is on.
    """
    figures = []
    for _ in range(blocks):
        singles = []
        for _ in range(25):
            synchronize()
            started = perf_counter()
            program.replay()
            singles.append((perf_counter() - started) * 1000)
        figures.append(statistics.median(singles))
    synchronize()
    return figures


def piecewise_over_full() -> Sequence[Row]:
    """As a user has it: default sizes, a context of 2048, the collector on."""
    with (
        cuda_device(),
        engine_of("qwen3-0.6b", "PIECEWISE") as cut,
        engine_of("qwen3-0.6b") as whole,
    ):
        engines = {"PIECEWISE": cut, "FULL": whole}
        for engine in engines.values():
            engine.capture()
        served = {name: serve(engine, 1, LONG, seed=0) for name, engine in engines.items()}
        modes = [
            engine.runtime.last_decision and engine.runtime.last_decision.mode.name
            for engine in engines.values()
        ]
        assert modes == list(engines), f"served by {modes}"
        pairs = enumerate(zip(*(tokens[0] for tokens in served.values()), strict=True))
        differing = next((index for index, (one, other) in pairs if one != other), None)
        samples: Samples = {name: [] for name in engines}
        arms: dict[str, Callable[[], object]] = {
            name: partial(step_ms, engine, 1, 1) for name, engine in engines.items()
        }
        for name, arm in rounds(arms, BLOCKS):
            samples[name].append(float(arm()))  # type: ignore[arg-type]
        config = {
            "context": CONTEXT,
            "sizes": len(cut.runtime.plan.capture_sizes),
            "num_blocks": {name: engine.limits.num_blocks for name, engine in engines.items()},
            "attention": cut.attention.name,
        }
        return [
            row(
                "G2",
                ratio(samples, "PIECEWISE", "FULL"),
                target=1.10,
                unit="ratio",
                samples=samples,
                timed="ms of a decode step, (144 - 16 tokens) of wall clock over 128; collector on",
                # Another kernel in the eager segments may decide a tie otherwise; None is no
                # difference.
                first_different_token=differing,
                **config,
                **medians(samples),
            ),
            host_over_gpu(cut, config),
        ]


def host_over_gpu(engine: LLMEngine, config: dict[str, Any]) -> Row:
    """How much of the GPU's time the host needs to launch a program: its margin."""
    with last_program(engine, 1) as program:
        host = host_ms(program, torch.cuda.synchronize, BLOCKS)
        # So long that all replays are queued when the first begins, on a host half as fast too.
        head_start_us = 2 * NUM_REPLAYS * statistics.median(host) * 1000
        gpu = time_gpu(
            {"replay": program.replay},
            blocks=BLOCKS,
            repeats=NUM_REPLAYS,
            head_start_us=head_start_us,
        )
        samples = {"host": host, "gpu": gpu["replay"]}
        return row(
            "G2-host",
            ratio(samples, "host", "gpu"),
            target=0.6,
            unit="ratio",
            samples=samples,
            timed="ms of perf_counter around one program.replay() after a synchronize, over ms a"
            f" replay between events of {NUM_REPLAYS} replays that were queued behind a busy GPU",
            num_graphs=program.num_graphs,
            num_eager=program.num_eager,
            **config,
            **medians(samples),
        )


def first_graphed_token(engine: LLMEngine, seed: int) -> None:
    """Serve one request until a graph has computed a token of it; the engine is idle again then."""
    prompt = np.random.default_rng(seed).integers(engine.vocab_size, size=NUM_PROMPT).tolist()
    engine.add_request(prompt, SamplingParams(max_tokens=SHORT, ignore_eos=True))
    was_graphed = False
    while engine.has_unfinished():
        step = engine.step()
        was_graphed |= step.decision is not None and step.decision.mode is not RuntimeMode.NONE
        if was_graphed and step.outputs:
            engine.abort_all()
            return
    raise AssertionError(f"no step ran in a graph: {engine.runtime.report().failures}")


class Start(NamedTuple):
    """Seconds of one start, every key captured before the first request."""

    engine: float
    """Engine and weights, which are no part of the figure."""
    capture: float
    total: float
    """From the engine to the first token of a graph."""
    report: RuntimeReport


@contextmanager
def unpadded() -> Iterator[None]:
    """While entered, no first replay is compared with a batch that is padded to its key."""
    with mock.patch.object(Comparisons, "_sizes_to_pad", return_value=[]):
        yield


def start_with_every_key(context: int, seed: int) -> Start:
    torch.cuda.synchronize()
    began = perf_counter()
    with engine_of("qwen3-0.6b", context=context) as engine:
        made = perf_counter()
        report = engine.capture()
        captured = perf_counter()
        first_graphed_token(engine, seed)
        return Start(made - began, captured - made, perf_counter() - made, report)


def start_by_priority(seed: int, *, captures_all: bool) -> dict[str, float]:
    """Seconds to the first graphed token, its own graph captured first; then, idle, the rest."""
    with engine_of("qwen3-0.6b", capture="by_priority") as engine:
        made = perf_counter()
        first_graphed_token(engine, seed)
        found = {
            "first token by priority": perf_counter() - made,
            "keys at first token": len(engine.runtime.report().graphs),
        }
        if captures_all:
            for _ in engine.runtime.report().missing:
                engine.step()  # Idle: a graph each.
            found["every key by priority"] = perf_counter() - made
            assert not engine.runtime.report().missing, "an idle step captures a graph"
        return found


def start() -> Sequence[Row]:
    """From an engine to the first token that a graph computed: with and without the comparison of
    padded batches in turns, at two contexts, and by priority."""
    samples: Samples = {}
    reports: dict[int, RuntimeReport] = {}

    def every_key(suffix: str, context: int, compares: bool) -> None:
        with nullcontext() if compares else unpadded():
            found = start_with_every_key(context, seed=len(samples))
        reports[context] = found.report
        for what, figure in (
            ("start", found.total),
            ("capture", found.capture),
            ("engine and weights", found.engine),
        ):
            samples.setdefault(what + suffix, []).append(figure)

    def by_priority() -> None:
        is_first = "first token by priority" not in samples
        # Once is enough for what is not the target.
        found = start_by_priority(seed=len(samples), captures_all=is_first)
        for name, figure in found.items():
            samples.setdefault(name, []).append(figure)

    arms: dict[str, Callable[[], object]] = {
        "start": partial(every_key, "", CONTEXT, False),
        "padded": partial(every_key, ", padded comparison", CONTEXT, True),
        "long": partial(every_key, f", context {LONG_CONTEXT}", LONG_CONTEXT, False),
        "priority": by_priority,
    }
    with cuda_device():
        for arm in arms.values():  # Compiles what the attention library and Triton keep.
            arm()
        samples.clear()
        for _, arm in rounds(arms, START_BLOCKS):
            arm()
    num_first = int(samples.pop("keys at first token")[-1])
    config = {
        f"{what}{'' if context == CONTEXT else f'_{context}'}": figure
        for context, report in reports.items()
        for what, figure in {
            "num_keys": len(report.graphs),
            "num_graphs": sum(graph.num_graphs for graph in report.graphs),
            "num_observed": sum(graph.is_observed for graph in report.graphs),
        }.items()
    }
    timed = "s from the engine to its first graphed token, capture() before; collector on"
    return [
        row(
            "G5",
            samples["start"],
            target=3.0,
            unit="s",
            samples=samples,
            timed=f"{timed}; first replays are not compared with unpadded batches",
            context=CONTEXT,
            **config,
            **medians(samples),
        ),
        row(
            "G5-padded",
            samples["start, padded comparison"],
            target=max(1.1 * statistics.median(samples["start"]), 3.0),
            unit="s",
            samples=samples,
            timed=f"{timed}; as a user has it: first replays are compared with unpadded batches",
            context=CONTEXT,
        ),
        row(
            "G5-padded-ratio",
            ratio(samples, "start, padded comparison", "start"),
            target=max(1.1, 3.0 / statistics.median(samples["start"])),
            unit="ratio",
            samples=samples,
            timed=f"{timed}; with the comparison of padded batches over without, in turns",
            context=CONTEXT,
        ),
        row(
            f"G5-{LONG_CONTEXT}",
            ratio(samples, f"start, context {LONG_CONTEXT}", "start"),
            target=1.1,
            unit="ratio",
            samples=samples,
            timed=f"{timed}; context {LONG_CONTEXT} over {CONTEXT}",
            **config,
        ),
        row(
            "G5-priority",
            ratio(samples, "first token by priority", "start"),
            target=0.10,
            unit="ratio",
            samples=samples,
            timed="s to the first graphed token, capturing by priority over capturing all before",
            keys_at_first_token=num_first,
            **medians(samples),
        ),
    ]


WARM_STARTS = 4
"""After each cold one: they vary by a fifth."""

START_COMPILED = """
from benchmarks.cases.engine import SEVEN_SIZES, perf_counter, engine_of, first_graphed_token
began = perf_counter()
with engine_of("qwen3-0.6b", level=3, sizes=SEVEN_SIZES, is_first=True) as engine:
    engine.capture()
    first_graphed_token(engine, 0)
    seconds = perf_counter() - began
    found = engine.runtime.report().compile
print(seconds, found.num_compiles, found.num_loaded)
"""


def compiled_starts() -> Sequence[Row]:
    """Level 3 in processes of their own: an empty cache of compiled code, then the same one."""
    need_bytecode()
    samples: Samples = {}
    counts: dict[str, tuple[int, ...]] = {}
    with cuda_device(), engine_of("qwen3-0.6b", sizes=SEVEN_SIZES):
        pass  # nvcc builds the attention library's kernels, which belong to none of these starts.
    gc.collect()
    torch.cuda.empty_cache()
    in_turns = ("cold", *["warm"] * WARM_STARTS)
    # The first start of all writes the bytecode of the imports, and counts for nothing.
    for arms in (("imports",), in_turns, in_turns):
        with tempfile.TemporaryDirectory() as folder:
            caches = {"GRAPHRT_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            for arm in arms:
                told = subprocess.run(
                    [sys.executable, "-c", START_COMPILED],
                    env=os.environ | caches,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                ).stdout.split()
                samples.setdefault(arm, []).append(float(told[-3]))
                counts[arm] = tuple(map(int, told[-2:]))
    del samples["imports"], counts["imports"]
    assert counts["warm"][0] == 0, "the second start compiles nothing"
    return [
        row(
            "G5-compiled",
            [warm / samples["cold"][at // WARM_STARTS] for at, warm in enumerate(samples["warm"])],
            target=0.25,
            unit="ratio",
            samples=samples,
            timed="s from nothing, weights included, to the first graphed token: warm over cold",
            compiles_and_loads=counts,
            sizes=SEVEN_SIZES,
            **medians(samples),
        )
    ]


CASES = [
    Case(
        "G2",
        "PIECEWISE over FULL, engine step, 0.6B, 1 request; its host time",
        piecewise_over_full,
    ),
    Case("G4", "engine decode step, 0.6B, 1 to 200 requests", decode_steps),
    Case("G4-8b", "engine decode step over the weights' floor, 8B, 1 request", against_weights),
    Case(
        "G2-compiled",
        "0.6B decode and prefill step, compiled pieces over break points",
        compiled_over_breaks,
    ),
    Case(
        "G2-compiled-float32",
        "the same in float32, where the engine's own kernels do not serve",
        partial(compiled_over_breaks, "float32", "-float32"),
    ),
    Case("G5-compiled", "start at level 3, warm cache over an empty one", compiled_starts),
    Case("G5", "start to the first graphed token, 0.6B, two contexts, by priority", start),
]

"""G2, G4, G5: the engine's decode step, in earnest: prompts, paged cache, scheduling, sampling.

A step's time is a difference: serving prompts of 128 tokens with 144 output tokens each, less the
same with 16, over the 128 steps between. What both share, prompts and the start, falls out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from unittest import mock

import numpy as np
import torch

from benchmarks.harness import Case, Row, Samples, cuda_device, medians, quiet, ratio, rounds, row
from benchmarks.models import fill
from graphrt import CompilationConfig, RuntimeConfig, RuntimeMode
from graphrt_llm import EngineConfig, LLMEngine, SamplingParams
from graphrt_llm.config import CaptureWhen
from graphrt_llm.models import CausalLM, ModelConfig

NUM_PROMPT, SHORT, LONG = 128, 16, 144
BLOCKS = 5
START_BLOCKS = 3
"""Of G5, whose blocks take many seconds each."""
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 200, 256, 512]

ANCHORS_MS = {1: 1.62, 16: 1.61, 64: 2.26, 200: 3.83}
"""By requests at once: a step of vLLM 0.25.1, its default mode, on an H200. Measured before, not in
the same run."""


@contextmanager
def engine_of(
    shape: str,
    mode: str = "FULL_AND_PIECEWISE",
    *,
    max_num_seqs: int,
    sizes: Sequence[int] | None = SIZES,
    overlap: bool | None = None,
    capture: CaptureWhen = "before_serving",
) -> Iterator[LLMEngine]:
    """An engine of the named shape in bfloat16 whose graphs are not captured yet."""
    most = 8192
    config = EngineConfig(
        runtime=RuntimeConfig(
            compilation=CompilationConfig(
                cudagraph_mode=mode,
                cudagraph_capture_sizes=None if sizes is None else list(sizes),
            ),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=most,
        ),
        max_model_len=512,
        num_blocks=1 + max(max_num_seqs, most // 512) * 512 // 16,
        dtype="bfloat16",
        load_format="dummy",
        device="cuda",
        overlap=overlap,
        capture=capture,
    )
    # Seeded weights come from the CPU, minutes for the large shape; what they are plays no part.
    with mock.patch("graphrt_llm.assembly.random_weights", lambda model, seed: fill(model)):
        engine = LLMEngine.with_random_weights(ModelConfig.named(shape), config)
    with engine:
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
    with cuda_device(), engine_of("qwen3-0.6b", max_num_seqs=200) as engine:
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
                    target=1.30,
                    unit="ratio",
                    samples={"step ms": times},
                    floor_ms=floor_ms,
                    attention=engine.attention.name,
                )
            ]


def piecewise_over_full() -> Sequence[Row]:
    sizes = [1, 2, 4, 16, 128]
    with (
        cuda_device(),
        engine_of("qwen3-0.6b", "PIECEWISE", max_num_seqs=16, sizes=sizes) as cut,
        engine_of("qwen3-0.6b", "FULL_AND_PIECEWISE", max_num_seqs=16, sizes=sizes) as whole,
    ):
        engines = {"PIECEWISE": cut, "FULL": whole}
        for engine in engines.values():
            engine.capture()
        served = {name: serve(engine, 1, LONG, seed=0) for name, engine in engines.items()}
        pairs = enumerate(zip(*(tokens[0] for tokens in served.values()), strict=True))
        differing = next((index for index, (one, other) in pairs if one != other), None)
        samples: Samples = {name: [] for name in engines}
        arms: dict[str, Callable[[], object]] = {
            name: partial(step_ms, engine, 1, 1) for name, engine in engines.items()
        }
        with quiet():
            for name, arm in rounds(arms, BLOCKS):
                samples[name].append(float(arm()))  # type: ignore[arg-type]
        return [
            row(
                "G2",
                ratio(samples, "PIECEWISE", "FULL"),
                target=1.10,
                unit="ratio",
                samples=samples,
                attention=cut.attention.name,
                # Another kernel in the gaps may decide a tie otherwise; None is no difference.
                first_different_token=differing,
                **medians(samples),
            )
        ]


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


def start() -> Sequence[Row]:
    """From an engine to the first token that a graph computed: every key captured before, or none.

    The second engine of a block captures by priority: its own graph first, then, idle, the rest.
    """
    samples: Samples = {
        "start": [],
        "capture": [],
        "engine and weights": [],
        "first token by priority": [],
        "every key by priority": [],
    }
    num_graphs = num_first = 0
    with cuda_device():
        # The first round compiles what the attention library and Triton keep for later ones.
        for block in range(1 + START_BLOCKS):
            torch.cuda.synchronize()
            began = perf_counter()
            with engine_of("qwen3-0.6b", max_num_seqs=256, sizes=None) as engine:
                made = perf_counter()
                report = engine.capture()
                captured = perf_counter()
                serve(engine, 1, 2, seed=block)
                ended = perf_counter()
            if block:
                samples["engine and weights"].append(made - began)
                samples["capture"].append(captured - made)
                samples["start"].append(ended - made)
            num_graphs = sum(graph.num_graphs for graph in report.graphs)
            with engine_of(
                "qwen3-0.6b", max_num_seqs=256, sizes=None, capture="by_priority"
            ) as engine:
                made = perf_counter()
                first_graphed_token(engine, seed=block)
                served = perf_counter()
                num_first = len(engine.runtime.report().graphs)
                if block == START_BLOCKS:  # Once is enough for what is not the target.
                    for _ in engine.runtime.report().missing:
                        engine.step()  # Idle: a graph each.
                    samples["every key by priority"].append(perf_counter() - made)
                    assert not engine.runtime.report().missing, "an idle step captures a graph"
            if block:
                samples["first token by priority"].append(served - made)
    return [
        row(
            "G5",
            samples["start"],
            target=3.0,
            unit="s",
            samples=samples,
            num_keys=len(report.graphs),
            num_graphs=num_graphs,
        ),
        row(
            "G5-priority",
            ratio(samples, "first token by priority", "start"),
            target=0.10,
            unit="ratio",
            samples=samples,
            keys_at_first_token=num_first,
            **medians(samples),
        ),
    ]


CASES = [
    Case("G2", "PIECEWISE over FULL, engine step, 0.6B, 1 request", piecewise_over_full),
    Case("G4", "engine decode step, 0.6B, 1 to 200 requests", decode_steps),
    Case("G4-8b", "engine decode step over the weights' floor, 8B, 1 request", against_weights),
    Case("G5", "start to the first graphed token, 0.6B, every key, and by priority", start),
]

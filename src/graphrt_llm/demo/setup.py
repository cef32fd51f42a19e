"""Turns the command's options into traffic and engines, and reports every bad option.

Nothing is computed or written before all options are known to be good.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from graphrt import (
    CompilationConfig,
    CUDAGraphMode,
    Exchange,
    Observer,
    RuntimeConfig,
    check_report_path,
    generate_azure_like,
    read_trace,
)
from graphrt_llm.config import DeviceName, DType, EngineConfig, LoadFormat
from graphrt_llm.demo.compare import UNCOMPILED, UNSPLIT, Load, MakeEngine, tie_tolerance
from graphrt_llm.demo.report import Setting
from graphrt_llm.engine import LLMEngine
from graphrt_llm.model_config import ModelConfig

CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112)
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 128
"""Above the largest captured size: a full step of prompts runs eager, so that the report shows a
miss with its reason."""

STEP_SECONDS = 0.07
"""Virtual. With the arrivals of Azure's conversation trace, batches then hold 1 to 10 requests."""

LONGEST_CONTEXT = 1024
"""Also for models with a longer one: the demo's cache fits every device."""


class Options(NamedTuple):
    """The options of the command line."""

    trace: Path | None
    model: Path | None
    load_format: LoadFormat
    num_requests: int
    modes: tuple[CUDAGraphMode, ...]
    device: DeviceName
    dtype: DType | None
    report: Path | None
    seed: int
    level: int = 0
    """Of compilation."""
    loras: int = 0
    """Random adapters."""
    speculate: int = 0
    """Drafts of a request in a step."""
    ubatches: int = 1
    """Micro-batches of a step that is large enough to be split."""
    expert_parallel: bool = False
    tensor_parallel: bool = False


class Prepared(NamedTuple):
    """Everything a comparison needs."""

    setting: Setting
    load: Load
    make_engine: MakeEngine
    make_plain: tuple[str, MakeEngine] | None
    """Name and engine of what a compiled run, or one in micro-batches, is compared with."""
    tie_tolerance: float
    report: Path | None


def prepare(options: Options, ranks: Exchange | None = None) -> Prepared:
    """Read the trace and the model's description, and check where a report goes.

    ``ranks``: for engines that share the traffic.

    Errors: ``TraceError``, ``ModelConfigError``, ``ReportError``, ``MissingExtraError``.
    """
    report = None if options.report is None else check_report_path(options.report)
    if options.trace is None:
        requests = generate_azure_like(options.num_requests, seed=options.seed)
        trace = "a seeded generator (statistics of the Azure 2023 conversation trace)"
    else:
        requests = read_trace(options.trace, limit=options.num_requests)
        trace = str(options.trace)

    # EngineConfig checks the dtype, which a checkpoint may name freely.
    dtype: Any
    if options.model is None:
        described = ModelConfig.named("tiny-moe" if options.expert_parallel else "tiny")
        model = "the built-in tiny model with random weights"
        dtype = options.dtype or "float64"
    else:
        described = ModelConfig.from_directory(options.model)
        random = " with random weights" if options.load_format == "dummy" else ""
        model = f"{options.model}{random}"
        dtype = options.dtype or described.checkpoint_dtype or "float32"
    config = EngineConfig(
        runtime=RuntimeConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_loras=options.loras,
            num_speculative_tokens=options.speculate,
        ),
        max_model_len=min(described.max_position_embeddings, LONGEST_CONTEXT),
        dtype=dtype,
        load_format=options.load_format,
        device=options.device,
        seed=options.seed,
        expert_parallel=options.expert_parallel,
        tensor_parallel=options.tensor_parallel,
    )

    loras = tuple(f"adapter-{number}" for number in range(options.loras))

    def make_engine(
        mode: CUDAGraphMode,
        observer: Observer,
        level: int = options.level,
        ubatches: int = options.ubatches,
    ) -> LLMEngine:
        sizes: tuple[int, ...] | None = None if mode is CUDAGraphMode.NONE else CAPTURE_SIZES
        if mode is CUDAGraphMode.FULL_DECODE_ONLY:
            # Larger ones would serve nothing: such a batch has a token of each request.
            most = MAX_NUM_SEQS * (1 + options.speculate)
            sizes = tuple(size for size in CAPTURE_SIZES if size <= most)
        wanted: Any = level
        compilation = CompilationConfig(
            level=wanted, cudagraph_mode=mode, cudagraph_capture_sizes=sizes
        )
        runtime = replace(config.runtime, compilation=compilation)
        if ubatches > 1:
            # Far below what pays: the demo's batches are small, and it is about the tokens.
            split: Any = {
                "num_ubatches": ubatches,
                "decode_token_threshold": ubatches,
                "prefill_token_threshold": 8 * ubatches,
                "auto_off": False,
            }
            runtime = replace(runtime, ubatch=split)
        asked = replace(config, runtime=runtime)
        if options.model is None:
            engine = LLMEngine.with_random_weights(described, asked, observer=observer, ranks=ranks)
        else:
            engine = LLMEngine.from_model_dir(options.model, asked, observer=observer, ranks=ranks)
        for number, name in enumerate(loras):
            engine.add_lora(name, seed=number)
        return engine

    make_plain: tuple[str, MakeEngine] | None = None
    if options.level or options.ubatches > 1:
        name = UNCOMPILED if options.level else UNSPLIT
        make_plain = name, partial(make_engine, level=0, ubatches=1)

    return Prepared(
        setting=Setting(trace, len(requests), model, dtype, options.seed, STEP_SECONDS),
        load=Load(requests, STEP_SECONDS, options.seed, loras),
        make_engine=make_engine,
        make_plain=make_plain,
        tie_tolerance=tie_tolerance(dtype, described.num_layers),
        report=report,
    )

"""The command's options, checked, and the files that they name.

Loads without torch, so that a wrong option is refused in less than a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from graphrt import CompilationConfig, CUDAGraphMode, RuntimeConfig, resolve
from graphrt.planner import TraceRequest, generate_azure_like, read_trace
from graphrt.report import check_report_path
from graphrt_llm.config import DeviceName, DType, EngineConfig, LoadFormat
from graphrt_llm.errors import EngineConfigError
from graphrt_llm.model_config import ModelConfig

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
    num_ranks: int = 1
    """Processes that share the traffic."""


class Inputs(NamedTuple):
    """What was asked, and what the files say."""

    options: Options
    requests: list[TraceRequest]
    trace: str
    """Where they come from, in words."""
    described: ModelConfig
    model: str
    """In words, too."""
    config: EngineConfig
    report: Path | None


def read_inputs(options: Options) -> Inputs:
    """Read the trace and the model's description, and check where a report goes.

    Errors: ``TraceError``, ``ModelConfigError``, ``EngineConfigError``, ``ConfigError``,
    ``ReportError``, ``MissingExtraError``.
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
    if options.num_ranks == 1 and (options.expert_parallel or options.tensor_parallel):
        raise EngineConfigError(
            "--tensor-parallel" if options.tensor_parallel else "--expert-parallel",
            expected="several ranks, because they share the model",
            found="one rank",
            do="add --ranks 2, or leave it out",
        )
    if options.tensor_parallel:
        described.part(options.num_ranks)  # Refused here before processes are started.
    # Here, and not once the uncompiled engine has served all of the traffic.
    level: Any = options.level
    resolve(RuntimeConfig(compilation=CompilationConfig(level=level)))
    return Inputs(options, requests, trace, described, model, config, report)

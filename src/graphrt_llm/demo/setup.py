"""Turns what the command was given into traffic and engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from graphrt import CompilationConfig, CUDAGraphMode, Exchange, Observer
from graphrt_llm.demo.compare import Load, Policy, tie_tolerance
from graphrt_llm.demo.inputs import MAX_NUM_SEQS, STEP_SECONDS, Inputs
from graphrt_llm.engine import LLMEngine

CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112)


class Prepared(NamedTuple):
    """Everything a comparison needs."""

    load: Load
    policies: Sequence[Policy]
    tie_tolerance: float


def prepare(inputs: Inputs, ranks: Exchange | None = None) -> Prepared:
    """How each policy's engine is made. ``ranks``: for engines that share the traffic."""
    options, described, config = inputs.options, inputs.described, inputs.config
    assert config.dtype is not None, "read_inputs names one"
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

    policies: list[Policy] = [(mode.name, mode, make_engine) for mode in options.modes]
    if options.level or options.ubatches > 1:
        name = "UNCOMPILED" if options.level else "UNSPLIT"
        policies.insert(0, (name, CUDAGraphMode.NONE, partial(make_engine, level=0, ubatches=1)))
    return Prepared(
        load=Load(inputs.requests, STEP_SECONDS, options.seed, loras),
        policies=policies,
        tie_tolerance=tie_tolerance(config.dtype, described.num_layers),
    )

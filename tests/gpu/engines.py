"""Engines for the tests on a GPU, and how their tokens are compared."""

from __future__ import annotations

import importlib.util
import random
import warnings
from typing import Any

import pytest

from graphrt import CompilationConfig, Observer, RuntimeConfig
from graphrt_llm import EngineConfig, LLMEngine, SamplingParams, TokenComparison, compare_tokens
from graphrt_llm.demo.compare import TIE_TOLERANCE
from graphrt_llm.models import ModelConfig

HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
if HAS_FLASHINFER:
    # Importing it warns about its own dependencies.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import flashinfer  # noqa: F401

needs_flashinfer = pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer is not installed")
BACKENDS = ["paged", "sdpa", pytest.param("flashinfer", marks=needs_flashinfer)]

SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_layers": 4,
    "num_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
QWEN = ModelConfig(architecture="Qwen3ForCausalLM", num_kv_heads=4, **SMALL)
"""Two query heads per key head."""
LLAMA = ModelConfig(architecture="LlamaForCausalLM", num_kv_heads=2, **SMALL)
"""Four query heads per key head."""


def engine_config(
    mode: str,
    *,
    backend: str = "auto",
    dtype: str = "bfloat16",
    sizes: tuple[int, ...] = (1, 2, 4, 8, 64),
    overlap: bool | None = None,
    max_model_len: int = 256,
    max_num_seqs: int = 8,
    **runtime: Any,
) -> EngineConfig:
    return EngineConfig(
        runtime=RuntimeConfig(
            compilation=CompilationConfig(
                cudagraph_mode=mode,
                cudagraph_capture_sizes=None if mode == "NONE" else list(sizes),
            ),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=128,
            **runtime,
        ),
        max_model_len=max_model_len,
        dtype=dtype,  # type: ignore[arg-type]
        load_format="dummy",
        device="cuda",
        attention_backend=backend,
        overlap=overlap,
    )


def make_engine(
    model: ModelConfig, mode: str, *, observer: Observer | None = None, **options: Any
) -> LLMEngine:
    config = engine_config(mode, **options)
    engine = LLMEngine.with_random_weights(model, config, observer=observer)
    engine.capture()
    return engine


def prompts(count: int, vocab_size: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(count)
    return [rng.choices(range(vocab_size), k=rng.randint(1, longest)) for _ in range(count)]


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)


def compare(
    reference: LLMEngine,
    asked: list[list[int]],
    expected: list[list[int]],
    found: list[list[int]],
    dtype: str,
) -> TokenComparison:
    """By ``compare_tokens``; ``reference`` computes the margin where tokens differ."""

    def margin(index: int, position: int) -> float:
        return reference.top2_margin([*asked[index], *expected[index][:position]])

    return compare_tokens(
        dict(enumerate(expected)), dict(enumerate(found)), margin, TIE_TOLERANCE[dtype]
    )

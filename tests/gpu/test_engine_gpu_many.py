"""Sixty-four requests of the 0.6B shape: one set of greedy tokens in every mode, but for ties."""

from __future__ import annotations

import random

import pytest
from engines import compare

from graphrt import CompilationConfig, RuntimeConfig
from graphrt_llm import EngineConfig, LLMEngine, SamplingParams
from graphrt_llm.models import ModelConfig

NUM_REQUESTS = 64

pytestmark = pytest.mark.filterwarnings("ignore:::flashinfer.*")


def engine(mode: str) -> LLMEngine:
    sizes = None if mode == "NONE" else [1, 2, 4, 8, 16, 32, 48, 64, 256, 1024, 2048]
    made = LLMEngine.with_random_weights(
        ModelConfig.named("qwen3-0.6b"),
        EngineConfig(
            runtime=RuntimeConfig(
                compilation=CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=sizes),
                max_num_seqs=NUM_REQUESTS,
                max_num_batched_tokens=2048,
            ),
            max_model_len=512,
            dtype="bfloat16",
            load_format="dummy",
            device="cuda",
        ),
    )
    made.capture()
    return made


def test_greedy_tokens_are_equal_in_every_mode_but_for_ties() -> None:
    rng = random.Random(0)
    vocab = ModelConfig.named("qwen3-0.6b").vocab_size
    asked = [rng.choices(range(vocab), k=rng.randint(16, 200)) for _ in range(NUM_REQUESTS)]
    params = [SamplingParams(max_tokens=rng.randint(128, 256), ignore_eos=True) for _ in asked]
    with engine("NONE") as reference:
        expected = reference.generate(asked, params)
        for mode in ("PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
            with engine(mode) as made:
                found = made.generate(asked, params)
            result = compare(reference, asked, expected, found, "bfloat16")
            num_tokens = sum(map(len, expected))
            print(f"{mode}: {result.ties} of {NUM_REQUESTS} tied, {num_tokens} tokens")
            assert result.identical, (mode, result.differences)

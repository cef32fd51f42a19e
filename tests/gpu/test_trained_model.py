"""A model trained for some seconds, whose choices are clear: tokens are equal, not nearly so.

transformers trains it and writes the checkpoint, and says what follows each prompt; the engine must
say the same in every mode, with every attention, alone and in padded batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import pytest
import torch
from engines import BACKENDS, engine_config

from graphrt_llm import LLMEngine, SamplingParams
from trained_model import Continuation, Plan, continue_greedily, save, train

# Training cannot do without it, and the rest of the lane can.
pytest.importorskip("transformers", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore:::flashinfer.*")

PLAN = Plan(
    hidden_size=256,
    num_layers=4,
    head_dim=128,
    numbers=11,
    letters=32,
    pairs=8,
    longest=5,
    length=96,
    batch=128,
    steps=1000,
    rate=0.003,
)
NUM_OUTPUT = 32
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT)
PROMPTS = PLAN.prompts(64, seed=2, longest=PLAN.length - NUM_OUTPUT)
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]


class Trained(NamedTuple):
    directory: Path
    dtype: str
    expected: Continuation

    def engine(self, mode: str, **options: Any) -> LLMEngine:
        config = engine_config(mode, dtype=self.dtype, max_model_len=PLAN.length, **options)
        config = replace(config, load_format="safetensors")
        engine = LLMEngine.from_model_dir(self.directory, config)
        engine.capture()
        return engine


@pytest.fixture(scope="module", params=["Qwen3", "Llama"])
def by_dtype(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Trained]:
    """One trained model, as a checkpoint of each dtype, and what transformers makes of it."""
    torch.cuda.synchronize()
    started = perf_counter()
    model = train(request.param, PLAN, "cuda")
    torch.cuda.synchronize()
    print(f"{request.param}: {PLAN.steps} steps in {perf_counter() - started:.1f} s")
    made = {}
    for dtype in ("bfloat16", "float32"):
        directory = tmp_path_factory.mktemp(f"{request.param}-{dtype}")
        read = save(model, directory, getattr(torch, dtype))
        made[dtype] = Trained(directory, dtype, continue_greedily(read, PROMPTS, NUM_OUTPUT))
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_leaves_clear_choices(by_dtype, dtype):
    expected = by_dtype[dtype].expected
    below = {tolerance: expected.share_below(tolerance) for tolerance in (0.25, 1.0)}
    print(f"{dtype}: margins {expected.quantiles()}, shares of tokens below {below}")
    assert below[0.25] < 0.005
    assert below[1.0] < 0.02
    assert len(set(map(tuple, expected.tokens))) > 40, "the texts differ"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_gives_the_tokens_of_transformers(by_dtype, backend, mode):
    trained = by_dtype["bfloat16"]
    with trained.engine(mode, backend=backend) as engine:
        assert engine.overlap
        found = engine.generate(PROMPTS, GREEDY)
        assert not engine.runtime.report().missing
    trained.expected.check(found, "bfloat16", f"{backend}, {mode}")


@pytest.mark.parametrize("mode", MODES)
def test_float32_gives_the_tokens_of_transformers(by_dtype, mode):
    trained = by_dtype["float32"]
    with trained.engine(mode, overlap=False) as engine:
        found = engine.generate(PROMPTS, GREEDY)
    trained.expected.check(found, "float32", mode)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_of_many_requests_change_no_token(by_dtype, backend, k):
    """Where random weights leave choices to rounding, these do not: other tokens are mistakes."""
    trained, most = by_dtype["bfloat16"], 128 // (1 + k)
    with trained.engine(
        "FULL_AND_PIECEWISE",
        backend=backend,
        num_speculative_tokens=k,
        max_num_seqs=most,
        sizes=tuple((1 + k) * count for count in (1, 4, 16, most)),
    ) as engine:
        found = engine.generate(PROMPTS, GREEDY)
        print(f"{backend}, k = {k}: {engine.drafts}, {engine.drafts.acceptance_rate:.1%}")
        assert engine.drafts.acceptance_rate > 0.5, "texts follow from what was before"
        assert not engine.runtime.report().missing
    trained.expected.check(found, "bfloat16", f"{backend}, {k} drafts")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_alone_and_among_others_gives_equal_tokens(by_dtype, backend):
    """One request in a graph of one, three in a graph of four, five in a graph of eight."""
    trained = by_dtype["bfloat16"]
    some = Continuation(trained.expected.tokens[:15], trained.expected.margins[:15])
    with trained.engine("FULL_AND_PIECEWISE", backend=backend) as engine:
        for size in (1, 3, 5):
            groups = [PROMPTS[start : start + size] for start in range(0, 15, size)]
            found = [tokens for group in groups for tokens in engine.generate(group, GREEDY)]
            some.check(found, "bfloat16", f"{backend}, {size} at once")

"""A model whose choices are clear: every mode and every batch gives the tokens of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from llm_traffic import MODES, engine_config

from graphrt_llm import LLMEngine, SamplingParams
from trained_model import Continuation, Plan, continue_greedily, save, train

PLAN = Plan(
    hidden_size=48,
    num_layers=2,
    head_dim=16,
    numbers=5,
    letters=8,
    pairs=3,
    longest=4,
    length=32,
    batch=32,
    steps=400,
    rate=0.01,
)
NUM_OUTPUT = 16
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT)
PROMPTS = PLAN.prompts(32, seed=2, longest=PLAN.length - NUM_OUTPUT)


class Trained(NamedTuple):
    directory: Path
    dtype: str
    expected: Continuation

    def engine(self, mode: str, **options: int) -> LLMEngine:
        config = replace(engine_config(mode, num_blocks=41, **options), dtype=self.dtype)
        engine = LLMEngine.from_model_dir(self.directory, config)
        engine.capture()
        return engine


@pytest.fixture(scope="module")
def by_dtype(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trained]:
    """One trained model, as a checkpoint of each dtype, and what transformers makes of it."""
    model = train("Qwen3", PLAN)
    made = {}
    for dtype in ("float32", "bfloat16"):
        directory = tmp_path_factory.mktemp(dtype)
        read = save(model, directory, getattr(torch, dtype))
        made[dtype] = Trained(directory, dtype, continue_greedily(read, PROMPTS, NUM_OUTPUT))
    return made


@pytest.fixture(params=["float32", "bfloat16"])
def trained(by_dtype: Mapping[str, Trained], request: pytest.FixtureRequest) -> Trained:
    return by_dtype[request.param]


def test_training_leaves_clear_choices(trained):
    print(f"{trained.dtype}: margins {trained.expected.quantiles()}")
    assert trained.expected.share_below(1.0) < 0.02
    assert len(set(map(tuple, trained.expected.tokens))) > 20, "the texts differ"


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_transformers(trained, mode):
    with trained.engine(mode) as engine:
        trained.expected.check(engine.generate(PROMPTS, GREEDY), trained.dtype, mode)
        assert not engine.runtime.report().missing


def test_drafts_are_accepted_and_change_no_token(trained):
    with trained.engine("FULL_AND_PIECEWISE", num_speculative_tokens=2) as engine:
        found = engine.generate(PROMPTS, GREEDY)
        assert engine.drafts.acceptance_rate > 0.5, "texts follow from what was before"
    trained.expected.check(found, trained.dtype, "2 drafts")


def test_a_prompt_alone_and_among_others_gives_equal_tokens(trained):
    """One request in a graph of one, and three in a graph of four."""
    with trained.engine("FULL_AND_PIECEWISE") as engine:
        for size in (1, 3):
            groups = [PROMPTS[start : start + size] for start in range(0, 12, size)]
            found = [tokens for group in groups for tokens in engine.generate(group, GREEDY)]
            some = Continuation(trained.expected.tokens[:12], trained.expected.margins[:12])
            some.check(found, trained.dtype, f"{size} at once")

"""Qwen3-MoE in one process: the same tokens under every policy, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt import CompilationConfig, InProcessExchange
from graphrt_llm import LLMEngine, SamplingParams
from graphrt_llm.assembly import TINY_CONFIG
from graphrt_llm.errors import EngineConfigError, ModelConfigError
from graphrt_llm.model_config import ModelConfig
from graphrt_llm.models.experts import Experts

MOE = ModelConfig.named("tiny-moe")
PROMPTS = [[1, 2, 3], [4] * 20, [5, 6]]


def tokens(**asked: Any) -> list[list[int]]:
    compilation = CompilationConfig(cudagraph_capture_sizes=(1, 2, 4, 32), **asked)
    config = replace(TINY_CONFIG, runtime=replace(TINY_CONFIG.runtime, compilation=compilation))
    with LLMEngine.with_random_weights(MOE, config) as engine:
        assert not engine.capture().missing
        return engine.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))


def test_every_policy_gives_the_same_tokens() -> None:
    with LLMEngine.with_random_weights(MOE, TINY_CONFIG) as engine:
        expected = engine.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))
    assert len({token for each in expected for token in each}) > 4
    assert tokens(cudagraph_mode="FULL") == expected
    assert tokens(cudagraph_mode="FULL_AND_PIECEWISE") == expected


def test_compiled_experts_give_the_same_tokens() -> None:
    assert tokens(level=3) == tokens(cudagraph_mode="FULL_DECODE_ONLY")


def test_an_expert_that_overflows_changes_only_its_rows() -> None:
    torch.manual_seed(0)
    experts = Experts(MOE, None, torch.float16, "cpu")
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape) / parameter.shape[0] ** 0.5)
    rows = torch.randn(16, MOE.hidden_size).half()
    expected, gets_first = experts(rows), experts._weights(rows)[:, 0] != 0
    experts.down[0].weight.fill_(6e4)
    found = experts(rows)
    assert not found[gets_first].isfinite().all()
    assert 0 < gets_first.sum() < 16
    assert torch.equal(found[~gets_first], expected[~gets_first])


@pytest.mark.parametrize(
    "changes",
    [{"num_experts": 0}, {"num_experts_per_tok": 9}, {"architecture": "Qwen3ForCausalLM"}],
)
def test_experts_that_fit_no_model_are_refused(changes: Any) -> None:
    with pytest.raises(ModelConfigError, match="num_experts"):
        replace(MOE, **changes)


def test_layers_without_experts_are_refused(tmp_path: Path) -> None:
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    assert ModelConfig.from_directory(tmp_path).num_experts == 2
    file.write_text(json.dumps({**fields, "mlp_only_layers": [1]}))
    with pytest.raises(ModelConfigError, match="mlp_only_layers"):
        ModelConfig.from_directory(tmp_path)


def test_experts_that_cannot_be_shared_are_refused() -> None:
    asked = replace(TINY_CONFIG, expert_parallel=True)
    with pytest.raises(EngineConfigError, match="expert_parallel"):
        LLMEngine.with_random_weights(MOE, asked)
    ranks = InProcessExchange(1).ranks[0]
    with pytest.raises(EngineConfigError, match="expert_parallel"):
        LLMEngine.tiny(asked, ranks=ranks)
    with pytest.raises(EngineConfigError, match="before_serving"):
        LLMEngine.tiny(replace(TINY_CONFIG, capture="by_priority"), ranks=ranks)

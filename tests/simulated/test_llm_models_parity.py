"""Logits equal those of HF transformers for the same checkpoint on disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_paged import key_of, make_step, shuffled_tables

from graphrt_llm.attention import make_attention
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.weights import load_safetensors

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that the positions cover stretched, blended and unchanged wavelengths.
    "original_max_position_embeddings": 32,
}
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-wide-heads": ("Llama", {"head_dim": 32, "rms_norm_eps": 1e-3}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, **MOE}),
    "qwen3-moe-normalized": ("Qwen3Moe", {"head_dim": 16, **MOE, "norm_topk_prob": True}),
    "qwen3-theta": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}


def make_hf_model(family: str, fields: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        # Importing it warns about its own dependencies.
        warnings.simplefilter("ignore", DeprecationWarning)
        import transformers

        config = getattr(transformers, f"{family}Config")(**{**SHAPE, **fields})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and norms too: those that transformers starts with hide mistakes.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str, max_shard_size: str) -> None:
    hf_model = make_hf_model(*CASES[case])
    hf_model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    is_sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert is_sharded == (max_shard_size == "40KB")

    model = CausalLM(ModelConfig.from_directory(tmp_path))
    load_safetensors(model, tmp_path)

    block_size, max_blocks, num_requests = 4, 16, 3
    num_blocks = 1 + num_requests * max_blocks
    generator = torch.Generator().manual_seed(1)
    lengths = [41, 17, 60]
    tokens = [torch.randint(0, SHAPE["vocab_size"], (n,), generator=generator) for n in lengths]
    with torch.no_grad():
        expected = [hf_model(t[None]).logits[0] for t in tokens]

    tables = shuffled_tables(num_requests, max_blocks, num_blocks, generator)
    # Prompts in chunks, decodes among them, then decodes alone; a whole prompt in one step too.
    plan = [
        [(0, 0, 11), (1, 0, 16)],
        [(1, 16, 1), (0, 11, 29), (2, 0, 30)],
        [(0, 40, 1), (2, 30, 29)],
        [(2, 59, 1)],
    ]
    for formula in ("static", "host"):
        cache = KVCache(
            model.config, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32
        )
        model.attention = make_attention("sdpa", cache)
        for spans in plan:
            rows = [row for row, _, _ in spans]
            step = make_step(
                [(before, new) for _, before, new in spans],
                tables[rows],
                block_size,
                pad_tokens=2,
                pad_requests=1,
            )
            ids = [tokens[row][before : before + new] for row, before, new in spans]
            input_ids = torch.cat((*ids, torch.zeros(2, dtype=torch.int64)))
            # Every token's logits, not only the last ones.
            every = torch.arange(step.num_tokens)
            with torch.no_grad():
                model.attention.prepare(key_of(step, formula), step.metadata)
                got = model(input_ids, step.positions, step.attn, every)
            wanted = torch.cat([expected[row][b : b + n] for row, b, n in spans])
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert expected[0].std() > 0.1, "logits that are all alike prove nothing"

"""Ranks that share every layer: which weights each has, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from graphrt import InProcessExchange
from graphrt.errors import RankLostError
from graphrt_llm import LLMEngine
from graphrt_llm.assembly import TINY_CONFIG
from graphrt_llm.collectives import RankGroup
from graphrt_llm.demo.ranks import all_identical
from graphrt_llm.errors import EngineConfigError, ModelConfigError, TensorShapeError
from graphrt_llm.model_config import ModelConfig
from graphrt_llm.models import CausalLM
from graphrt_llm.weights import load_safetensors, random_weights

TINY = replace(ModelConfig.tiny(), attention_bias=True, mlp_bias=True)
QWEN = replace(TINY, architecture="Qwen3ForCausalLM", attention_bias=False, mlp_bias=False)


def rank_of(world: int, rank: int, config: ModelConfig) -> CausalLM:
    group: Any = SimpleNamespace(rank=rank, world=world)
    return CausalLM(config, torch.float64, group=group)


def stored(model: CausalLM) -> dict[str, torch.Tensor]:
    return {
        tensor.name: tensor.destination.expand(tensor.destination.shape).clone()
        for tensor in model.checkpoint_tensors()
    }


@pytest.mark.parametrize("config", [TINY, QWEN], ids=["biases", "qk-norm"])
@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_all_ranks_are_the_weights(world: int, config: ModelConfig) -> None:
    whole = CausalLM(config, torch.float64)
    random_weights(whole, seed=3)
    expected, found = stored(whole), []
    for rank in range(world):
        model = rank_of(world, rank, config)
        random_weights(model, seed=3)
        found.append(stored(model))
    for name, tensor in expected.items():
        parts = [each[name] for each in found]
        if name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")):
            # Of the two key heads each is on every second of four ranks.
            parts = parts[:: world // 2]
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            assert all(torch.equal(part[0], tensor[0]) for part in parts)
        elif parts[0].shape == tensor.shape:
            assert all(torch.equal(part, tensor) for part in parts)
        else:
            across = int(name.endswith(("o_proj.weight", "down_proj.weight")))
            assert torch.equal(torch.cat(parts, across), tensor), name


def test_checkpoint_is_read_in_parts(tmp_path: Path) -> None:
    whole = CausalLM(TINY, torch.float64)
    random_weights(whole, seed=3)
    save_file(stored(whole), tmp_path / "model.safetensors")
    for rank in range(2):
        expected, found = (rank_of(2, rank, TINY) for _ in range(2))
        random_weights(expected, seed=3)
        load_safetensors(found, tmp_path)
        for name, tensor in stored(expected).items():
            assert torch.equal(stored(found)[name], tensor), name
    other = replace(TINY, intermediate_size=64)
    with pytest.raises(TensorShapeError, match="mlp"):
        load_safetensors(rank_of(2, 0, other), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"num_heads": 6, "num_kv_heads": 6}, {"intermediate_size": 126}, {"num_kv_heads": 1}],
)
def test_what_ranks_do_not_divide_is_refused(changes: Any) -> None:
    config = replace(TINY, **changes)
    if changes == {"num_kv_heads": 1}:
        assert config.part(4).num_kv_heads == 1
    else:
        with pytest.raises(ModelConfigError, match="1 of 4 ranks"):
            config.part(4)


@pytest.mark.parametrize(
    "asked",
    [
        {"expert_parallel": True},
        {"runtime": replace(TINY_CONFIG.runtime, max_loras=1)},
        {"runtime": replace(TINY_CONFIG.runtime, compilation={"level": 3})},
        {"capture": "by_priority"},
    ],
)
def test_what_shared_layers_cannot_have_is_refused(asked: Any) -> None:
    config = replace(TINY_CONFIG, tensor_parallel=True, **asked)
    (ranks,) = InProcessExchange(1).ranks
    with pytest.raises(EngineConfigError, match=r"tensor_parallel|before_serving"):
        LLMEngine.tiny(config, ranks=ranks)
    moe = ModelConfig.named("tiny-moe")
    plain = replace(TINY_CONFIG, tensor_parallel=True)
    with pytest.raises(EngineConfigError, match="tensor_parallel"):
        LLMEngine.with_random_weights(moe, plain, ranks=ranks)
    with pytest.raises(EngineConfigError, match="tensor_parallel"):
        LLMEngine.tiny(plain)


def test_ranks_with_other_tokens_of_a_request_are_not_identical() -> None:
    def part(**tokens: list[int]) -> dict[str, Any]:
        return {"tokens_identical": True, "tokens": tokens}

    assert all_identical([part(a=[1]), part(b=[2])])
    assert all_identical([part(a=[1]), part(a=[1])])
    assert not all_identical([part(a=[1]), part(a=[2])])


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_step_that_never_ends_on_the_device_ends_in_the_time_out() -> None:
    """As on a GPU, where a collective in a graph waits for a rank that is gone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (ranks,) = InProcessExchange(1).ranks
        group = RankGroup(0, 1, torch.device("cpu"), 60, ranks)
        answers = iter([False, False, True])
        group.wait_for(SimpleNamespace(query=lambda: next(answers)))  # type: ignore[arg-type]
        never: Any = SimpleNamespace(query=lambda: False)
        with group.limited(0.01), pytest.raises(RankLostError, match=r"within 0\.01 s"):
            group.wait_for(never)
        # No step may follow, because what the device has ended is worth nothing.
        with pytest.raises(RankLostError, match=r"within 0\.01 s"):
            ranks.start([0])
        group.close()
    finally:
        dist.destroy_process_group()


def test_group_that_a_rank_does_not_join_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_comes(**_: Any) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(dist, "new_group", nobody_comes)
    with pytest.raises(RankLostError, match="connection refused"):
        RankGroup(0, 2, torch.device("cpu"))

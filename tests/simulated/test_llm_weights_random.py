"""Random weights: equal for equal seeds, and greedy texts that vary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llm_paged import key_of, make_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt_llm.attention import make_attention
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.weights import random_weights

TINY = ModelConfig.tiny()
CONFIGS = {
    "tiny": TINY,
    "tied": replace(TINY, tie_word_embeddings=True),
    "qwen3": replace(TINY, architecture="Qwen3ForCausalLM"),
}


def generate(model: CausalLM, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """``count`` greedy tokens and the logits they were chosen by."""
    cache = KVCache(model.config, num_blocks=17, block_size=16, dtype=model.dtype)
    model.attention = make_attention("sdpa", cache)
    tables = torch.arange(1, 17)[None]
    tokens, logits = list(prompt), []
    before = 0
    for _ in range(count):
        step = make_step([(before, len(tokens) - before)], tables, 16)
        model.attention.prepare(key_of(step, "host"), step.metadata)
        new = torch.tensor(tokens[before:])
        logits.append(model(new, step.positions, step.attn, step.logits_indices)[0])
        before = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(logits)


def test_the_same_seed_gives_the_same_weights_in_every_dtype() -> None:
    models = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        models[dtype] = CausalLM(TINY, dtype)
        random_weights(models[dtype], seed=7)
    again, another = CausalLM(TINY), CausalLM(TINY)
    random_weights(again, seed=7)
    random_weights(another, seed=8)
    for name, exact in models[torch.float64].named_parameters():
        for dtype, model in models.items():
            assert torch.equal(model.get_parameter(name), exact.to(dtype))
        assert torch.equal(again.get_parameter(name), exact.float())
        assert not torch.equal(another.get_parameter(name), exact.float())


class OnlyOn(TorchDispatchMode):
    """Refuses operations on tensors of another device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.num_drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (*args, result):
            assert not isinstance(value, Tensor) or value.device.type == self.device, func
        self.num_drawn += func is torch.ops.aten.randn.generator
        return result


def test_weights_are_drawn_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ``meta``, which runs no kernel: torch has no generator for it, so one is lent."""
    model = CausalLM(TINY, device="meta")
    asked: list[torch.device] = []

    class Lent(torch.Generator):
        def __new__(cls, device: torch.device) -> Lent:
            asked.append(device)
            return super().__new__(cls)

    monkeypatch.setattr(torch, "Generator", Lent)
    with OnlyOn("meta") as operations:
        random_weights(model, seed=0)
    assert asked == [torch.device("meta")]
    assert operations.num_drawn == len(list(model.checkpoint_tensors()))


def test_every_weight_is_filled() -> None:
    model = CausalLM(replace(CONFIGS["qwen3"], attention_bias=True, mlp_bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    random_weights(model, seed=0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_vary_and_depend_on_the_whole_context(name: str) -> None:
    model = CausalLM(CONFIGS[name], torch.float64)
    random_weights(model, seed=0)
    prompt = [5, 17, 300, 41, 9, 77, 20, 3]
    tokens, logits = generate(model, prompt, 48)
    assert len(set(tokens)) > 24
    assert 0.3 < float(logits.std()) < 3
    # In float64, rounding is 1e-12 at most: a top token this far ahead does not flip.
    top = logits.topk(2).values
    assert float((top[:, 0] - top[:, 1]).min()) > 1e-6
    # Another first token changes what comes much later.
    others, _ = generate(model, [6, *prompt[1:]], 48)
    assert others != tokens

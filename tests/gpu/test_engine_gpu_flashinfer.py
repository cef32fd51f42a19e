"""FlashInfer against PyTorch's attention, and with growing sequences."""

from __future__ import annotations

import pytest
import torch
from engines import LLAMA, QWEN, greedy, make_engine, needs_flashinfer, prompts

from graphrt import BatchDescriptor, RuntimeMode
from graphrt_llm.attention import flashinfer, make_attention
from graphrt_llm.blocks import BlockAllocator
from graphrt_llm.config import Limits
from graphrt_llm.inputs import Examples
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import CausalLM
from graphrt_llm.runner import NamedInputs
from graphrt_llm.weights import random_weights

pytestmark = [needs_flashinfer, pytest.mark.filterwarnings("ignore:::flashinfer.*")]

LIMITS = Limits(
    max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512, block_size=16, num_blocks=257
)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


BF16, FP16 = torch.bfloat16, torch.float16
CASES = [
    (QWEN, BF16, "captured decode"),
    (QWEN, BF16, "eager decode"),
    (QWEN, BF16, "chunks"),
    (QWEN, BF16, "decodes and chunks"),
    (LLAMA, BF16, "captured decode"),
    (LLAMA, BF16, "eager decode"),
    (LLAMA, BF16, "chunks"),
    (LLAMA, BF16, "decodes and chunks"),
    # One case of another dtype, because each dtype is a further compilation.
    (QWEN, FP16, "captured decode"),
]
"""Groups of 2 and of 4 heads."""


@pytest.mark.parametrize(("model_config", "dtype", "kind"), CASES)
def test_logits_are_those_of_sdpa(model_config, dtype, kind, monkeypatch):
    monkeypatch.setattr(flashinfer, "DECODES_APART", 1)
    cache = KVCache(model_config, num_blocks=257, block_size=16, dtype=dtype, device="cuda")
    model = CausalLM(model_config, dtype=dtype, device="cuda")
    random_weights(model, seed=0)
    decode = BatchDescriptor(8, 8, uniform=True)
    key = {
        "captured decode": decode,
        "eager decode": BatchDescriptor(8),
        "decodes and chunks": BatchDescriptor(14),
    }.get(kind, BatchDescriptor(96))
    backend = make_attention("flashinfer", cache, LIMITS)
    sdpa = make_attention("sdpa", cache)
    if kind == "captured decode":
        backend.prepare(decode, None)
    allocator = BlockAllocator(LIMITS.num_blocks)
    examples = Examples(LIMITS, model_config.vocab_size, allocator)
    for seed in range(5):
        example = examples({"tokens": key.num_tokens, "requests": LIMITS.max_num_seqs}, seed)
        values = {name: value.cuda() for name, value in example.values.items()}
        cache.tensor.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        before = cache.tensor.clone()
        results = []
        for one in (sdpa, backend):
            cache.tensor.copy_(before)
            model.attention = one
            one.prepare(key, example.step_info)
            with torch.no_grad():
                results.append(NamedInputs(model)(**values).logits)
        assert results[0].isfinite().all()
        error = relative(results[1], results[0])
        print(f"{kind} {dtype} seed {seed}: {error:.2e}")
        assert error < (6e-2 if dtype == torch.bfloat16 else 8e-3)


@pytest.mark.parametrize("model_config", [QWEN, LLAMA], ids=["groups of 2", "groups of 4"])
def test_a_growing_sequence_equals_eager_at_every_step(model_config):
    """Bug class 4: a replay with an old plan differs as soon as a block is added.

    60 steps that add 4 blocks, each compared with eager bit for bit.
    """
    with make_engine(model_config, "FULL_AND_PIECEWISE", backend="flashinfer", verify_every=1) as e:
        e.add_request(prompts(1, model_config.vocab_size)[0], greedy(62))
        for asked in prompts(2, model_config.vocab_size):
            e.add_request(asked, greedy(60))
        modes = []
        while e.has_unfinished():
            result = e.step()
            if result.decision is not None:
                modes.append(result.decision.mode)
        assert modes.count(RuntimeMode.FULL) >= 50


def test_a_replay_with_a_stale_plan_gives_other_tokens():
    """Proves that the test above can fail."""
    with make_engine(QWEN, "FULL_AND_PIECEWISE", backend="flashinfer", overlap=False) as engine:
        asked = prompts(1, QWEN.vocab_size)[0] + list(range(40))
        expected = engine.generate([asked], greedy(40))
        backend = engine.attention_backend
        prepare = backend._prepare
        engine.add_request(asked, greedy(40))
        tokens = list(engine.step().outputs[0].new_token_ids)
        tokens += engine.step().outputs[0].new_token_ids
        backend._prepare = lambda *args: None
        while engine.has_unfinished():
            tokens += engine.step().outputs[0].new_token_ids
        backend._prepare = prepare
        assert tokens != expected[0]

"""The kernel that adds adapters, against PyTorch's products in float64."""

from __future__ import annotations

import pytest
import torch
from engines import LLAMA, QWEN

from graphrt_llm.lora import MOST_TOKENS, LoRAWeights, projection_shapes, random_lora

CUDA = torch.device("cuda")
MAX_LORAS = 5


def both(model, dtype, max_rank=16) -> tuple[LoRAWeights, LoRAWeights]:
    """The same adapters for the kernel and, in float64, for PyTorch: in all slots but the last."""
    made = []
    for kind in (dtype, torch.float64):
        weights = LoRAWeights(
            model, max_loras=MAX_LORAS, max_rank=max_rank, dtype=kind, device=CUDA
        )
        for slot, rank in enumerate([16, 1, max_rank, 7]):
            weights.load(slot, random_lora(model, rank=rank, seed=slot))
        made.append(weights)
    assert made[0]._kernel is not None
    assert made[1]._kernel is None
    return made[0], made[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, MOST_TOKENS, MOST_TOKENS + 1])
@pytest.mark.parametrize("max_rank", [16, 20])
@pytest.mark.parametrize("model", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_adapters_of_few_tokens_add_what_products_add(model, max_rank, tokens, dtype):
    torch.manual_seed(0)
    found, exact = both(model, dtype, max_rank)
    slots = torch.randint(-1, MAX_LORAS - 1, (tokens,), device=CUDA)
    slots[0] = tokens % 4
    active = torch.arange(MAX_LORAS, device=CUDA)
    steps = found.begin(slots, active), exact.begin(slots, active)
    for name, (width, parts) in projection_shapes(model).items():
        has_norm, inner = name in ("qkv", "gate_up"), parts[0] if name == "gate_up" else 0
        x = torch.randn(tokens, width, device=CUDA).to(dtype)
        out = torch.randn(tokens, sum(parts), device=CUDA).to(dtype)
        norm = torch.randn(width, device=CUDA).to(dtype) if has_norm else None
        results = []
        for step, kind in zip(steps, (dtype, torch.float64), strict=True):
            written = out.to(kind, copy=True)
            gated = torch.full((tokens, inner), torch.nan, dtype=kind, device=CUDA)
            step.add(
                name,
                1,
                x.to(kind),
                written,
                None if norm is None else norm.to(kind),
                1e-6,
                gated if inner else None,
            )
            results.append(gated if inner else written)
        unused = slots < 0
        if not inner:
            assert torch.equal(results[0][unused], out[unused])
        eps = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(results[0].double(), results[1], rtol=eps, atol=2 * eps)


def test_an_adapter_that_overflows_changes_no_other_token():
    found, _ = both(QWEN, torch.float16)
    x = torch.randn(3, 1024, device=CUDA).half()
    x[1] = 6e4
    out = torch.zeros(3, 512, device=CUDA).half()
    found.down_a[:, 1] = 6e4
    found.begin(torch.tensor([0, 1, -1], device=CUDA), found.every).add("down", 0, x, out)
    assert not out[1].isfinite().all()
    alone = torch.zeros(1, 512, device=CUDA).half()
    found.begin(torch.tensor([0], device=CUDA), found.every).add("down", 0, x[:1], alone)
    assert torch.equal(out[0], alone[0])
    assert out[2].eq(0).all()

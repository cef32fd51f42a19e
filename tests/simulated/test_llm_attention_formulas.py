"""Both formulas of the sdpa backend against dense attention."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from llm_paged import attention, dense, key_of, make_step, shuffled_tables
from torch import Tensor

from graphrt_llm.attention import make_attention
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import ModelConfig


def config_of(num_kv_heads: int, groups: int, head_dim: int, num_layers: int = 1) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=num_layers,
        num_heads=num_kv_heads * groups,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
    )


lengths = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.one_of(
        lengths,
        # Decode batches, and uniform ones of several tokens, are cases of their own.
        lengths.map(lambda spans: [(before, 1) for before, _ in spans]),
        st.tuples(lengths, st.integers(1, 3)).map(lambda both: [(b, both[1]) for b, _ in both[0]]),
    ),
    block_size=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_every_formula_agrees_with_dense_attention(
    spans: list[tuple[int, int]],
    block_size: int,
    num_kv_heads: int,
    groups: int,
    head_dim: int,
    padding: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    max_blocks = -(-18 // block_size)
    num_blocks = len(spans) * max_blocks + 1
    cache = KVCache(
        config_of(num_kv_heads, groups, head_dim),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=torch.float64,
    )
    tables = shuffled_tables(len(spans), max_blocks, num_blocks, generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sequences = [normal(before + new, 2, num_kv_heads, head_dim) for before, new in spans]
    # Garbage everywhere else: reading any of it changes the result.
    cache.tensor.copy_(normal(*cache.tensor.shape))
    for row, (before, _) in enumerate(spans):
        for position in range(before):
            block = tables[row, position // block_size]
            cache.layers[0][block, position % block_size] = sequences[row][position]
    clean = cache.tensor.clone()

    new_lengths = {new for _, new in spans}
    formulas = ["host", "static"] + ["uniform"] * (len(new_lengths) == 1)
    num_tokens = sum(new for _, new in spans)
    q = normal(num_tokens, num_kv_heads * groups, head_dim)
    kv = torch.cat([s[before:] for s, (before, _) in zip(sequences, spans, strict=True)])
    parts = q.split([new for _, new in spans])
    expected = torch.cat(
        [dense(part, *s.unbind(1)) for part, s in zip(parts, sequences, strict=True)]
    )
    for formula in formulas:
        cache.tensor.copy_(clean)
        new = new_lengths.copy().pop()
        step = make_step(
            spans,
            tables,
            block_size,
            pad_tokens=padding * (new if formula == "uniform" else 1),
            pad_requests=padding,
        )
        num_padding = len(step.positions) - num_tokens
        backend = make_attention("sdpa", cache)
        backend.prepare(key_of(step, formula), step.metadata)
        shared = backend.begin(step.positions, step.attn)
        # The static formula reads a table per token, of a uniform batch only one per request.
        num_tables = {"host": 0, "static": len(step.positions), "uniform": len(spans) + padding}
        assert (len(shared[0]) if shared else 0) == num_tables[formula]
        padded_q = torch.cat((q, normal(num_padding, *q.shape[1:])))
        padded_kv = torch.cat((kv, normal(num_padding, *kv.shape[1:])))
        garbage = torch.full_like(padded_q, torch.nan)
        out = attention(backend, 0, padded_q, padded_kv, step.attn, shared, out=garbage)
        assert out is garbage
        torch.testing.assert_close(out[:num_tokens], expected, rtol=0, atol=1e-10)
        assert out.isfinite().all()
        # What was stored is exactly the new tokens, in their slots, and the null block.
        slots = cache.slots[0]
        assert torch.equal(slots[step.attn.slot_mapping[:num_tokens]], kv)
        untouched = torch.ones(len(slots), dtype=torch.bool)
        untouched[step.attn.slot_mapping] = False
        assert torch.equal(slots[untouched], clean[0].flatten(0, 1)[untouched])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("formula", ["static", "host"])
def test_every_dtype_computes_in_itself(dtype: torch.dtype, formula: str) -> None:
    cache = KVCache(config_of(2, 2, 8), num_blocks=9, block_size=4, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    tables = shuffled_tables(2, 4, 9, generator)
    step = make_step([(0, 5), (0, 1)], tables, 4, pad_tokens=2)
    q = torch.randn(8, 4, 8, generator=generator, dtype=torch.float64)
    kv = torch.randn(8, 2, 2, 8, generator=generator, dtype=torch.float64)
    backend = make_attention("sdpa", cache)
    backend.prepare(key_of(step, formula), step.metadata)
    shared = backend.begin(step.positions, step.attn)
    out = attention(backend, 0, q.to(dtype), kv.to(dtype), step.attn, shared)
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = dense(q[:5], kv[:5, 0], kv[:5, 1])
    # Inputs, weights and sums are rounded to the dtype.
    torch.testing.assert_close(out[:5].double(), expected, rtol=0, atol=12 * torch.finfo(dtype).eps)


def test_layers_of_one_step_are_independent() -> None:
    cache = KVCache(
        config_of(1, 1, 2, num_layers=2), num_blocks=3, block_size=2, dtype=torch.float64
    )
    step = make_step([(0, 2)], torch.tensor([[2]]), 2)
    backend = make_attention("sdpa", cache)
    backend.prepare(key_of(step, "host"), step.metadata)
    ones = torch.ones(2, 1, 2, dtype=torch.float64)
    first = attention(backend, 0, ones, torch.stack((ones, ones), 1), step.attn)
    second = attention(backend, 1, ones, torch.stack((ones, 3 * ones), 1), step.attn)
    assert torch.equal(first, ones)
    assert torch.equal(second, 3 * ones)
    assert torch.equal(cache.layers[0][2, :, 1], ones)
    assert torch.equal(cache.layers[1][2, :, 1], 3 * ones)


def num_tensors() -> int:
    gc.collect()
    return sum(type(thing) is Tensor for thing in gc.get_objects())


def test_a_new_step_drops_tensors_of_the_last_one() -> None:
    cache = KVCache(config_of(1, 1, 2), num_blocks=9, block_size=2, dtype=torch.float64)
    tables = torch.arange(1, 9).view(2, 4)
    backend = make_attention("sdpa", cache)
    kept = set()
    for spans in ([(1, 1), (3, 2)], [(5, 1), (2, 3)], [(4, 1), (1, 6)]):
        step = make_step(spans, tables, 2)
        tokens = step.num_tokens
        generator = torch.Generator().manual_seed(tokens)
        q = torch.randn(tokens, 1, 2, generator=generator, dtype=torch.float64)
        kv = torch.randn(tokens, 2, 1, 2, generator=generator, dtype=torch.float64)
        results = []
        for formula in ("host", "static"):
            backend.prepare(key_of(step, formula), step.metadata)
            shared = backend.begin(step.positions, step.attn)
            results.append(attention(backend, 0, q, kv, step.attn, shared))
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)
        kept.add(num_tensors())
    assert len(kept) == 1


def test_kernels_are_loaded_without_a_trace_in_the_cache() -> None:
    cache = KVCache(config_of(2, 2, 8), num_blocks=3, block_size=2, dtype=torch.bfloat16)
    cache.tensor.fill_(2.0)
    SdpaAttention(cache).load_kernels()
    assert (cache.tensor == 2.0).all()


def test_attention_never_runs_by_kernels_whose_bits_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def noting(*args: Any, **options: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(seen) == 3:
            raise MemoryError("no memory for scores")
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    cache = KVCache(config_of(2, 2, 8), num_blocks=9, block_size=4, dtype=torch.float32)
    step = make_step([(2, 1), (0, 5)], shuffled_tables(2, 4, 9, torch.Generator()), 4)
    backend = make_attention("sdpa", cache)
    backend.prepare(key_of(step, "host"), step.metadata)
    inputs = torch.zeros(6, 4, 8), torch.zeros(6, 2, 2, 8), step.attn, ()
    attention(backend, 0, *inputs)
    with pytest.raises(MemoryError):
        attention(backend, 0, *inputs)
    assert seen == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled()

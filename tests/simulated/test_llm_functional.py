"""The formula that a compiler traces is that of the engine, bit for bit, from one trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from llm_paged import Step, key_of, make_step, shuffled_tables

from graphrt import BatchDescriptor, ForwardContext, RuntimeConfig, RuntimeMode, resolve
from graphrt_llm.attention import LAYER, attention_operator, make_attention
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import CausalLM, ModelConfig, SplitLM
from graphrt_llm.weights import random_weights

PLAN = resolve(RuntimeConfig()).compile
BLOCK_SIZE, MAX_BLOCKS, NUM_REQUESTS = 4, 8, 4
NUM_BLOCKS = 1 + NUM_REQUESTS * MAX_BLOCKS
CASES = {
    "llama": {},
    "llama-biases-tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "attention_bias": True},
}
spans = st.lists(
    st.tuples(st.integers(0, 15), st.integers(1, 16)), min_size=1, max_size=NUM_REQUESTS
)


def make_model(case: str) -> CausalLM:
    model = CausalLM(replace(ModelConfig.tiny(), **CASES[case]), torch.float64)
    random_weights(model, seed=0)
    return model.eval()


def make_batch(lengths: list[tuple[int, int]], seed: int) -> tuple[Step, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tables = shuffled_tables(NUM_REQUESTS, MAX_BLOCKS, NUM_BLOCKS, generator)
    step = make_step(lengths, tables[: len(lengths)], BLOCK_SIZE)
    return step, torch.randint(0, 512, (step.num_tokens,), generator=generator)


def make_cache(model: CausalLM, seed: int = 0) -> KVCache:
    cache = KVCache(model.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float64)
    cache.tensor.normal_(generator=torch.Generator().manual_seed(seed))
    return cache


def run(
    model: torch.nn.Module, backend: object, step: Step, ids: torch.Tensor, key: BatchDescriptor
) -> torch.Tensor:
    layers = {LAYER: getattr(model, "attention", None)}
    backend.prepare(key, step.metadata)
    with torch.no_grad(), ForwardContext(RuntimeMode.NONE, key, layers=layers):
        return model(ids, step.positions, step.attn, step.logits_indices)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("formula", ["static", "host"])
@settings(max_examples=15, deadline=None)
@given(lengths=spans, seed=st.integers(0, 9))
def test_functional_layers_run_give_the_engines_bits(
    case: str, formula: str, lengths: list[tuple[int, int]], seed: int
) -> None:
    model = make_model(case)
    step, ids = make_batch(lengths, seed)
    key = key_of(step, formula)
    caches, logits = [make_cache(model, seed) for _ in range(2)], []
    for cache, is_split in zip(caches, (False, True), strict=True):
        backend = model.attention = make_attention("sdpa", cache)
        ran = SplitLM(model, backend, PLAN) if is_split else model
        logits.append(run(ran, backend, step, ids, key))
    assert torch.equal(*logits)
    assert torch.equal(caches[0].tensor, caches[1].tensor)


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_functional_model_traced_once_serves_every_size(case: str) -> None:
    import torch._dynamo.decorators as dynamo

    model = make_model(case)
    backend = make_attention("sdpa", make_cache(model))
    split, graphs = SplitLM(model, backend, PLAN), []

    def note(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    plain = split.traced.forward
    compiled = torch.compile(plain, backend=note, fullgraph=True)
    for lengths in ([(3, 5), (0, 1)], [(0, 1)], [(9, 16)] * 4, [(5, 1), (7, 1)]):
        step, ids = make_batch(lengths, 1)
        inputs = (ids, step.positions, *step.attn[:2])
        for tensor, axis in [(t, "tokens") for t in inputs] + [
            (t, "requests") for t in (*step.attn[2:], step.logits_indices)
        ]:
            dynamo.mark_unbacked(tensor, 0, shape_id=axis)
        expected = []
        for forward in (plain, compiled):
            split.traced.forward = forward
            expected.append(run(split, backend, step, ids, key_of(step, "host")))
        assert torch.equal(*expected)
    assert len(graphs) == 1
    calls = [
        n for n in graphs[0].graph.nodes if n.target is torch.ops.graphrt_llm.attention.default
    ]
    assert len(calls) == model.config.num_layers


def test_attention_operator_without_a_step_names_the_layers() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    for layers in (None, {}, {LAYER: "other"}):
        with (
            ForwardContext(layers=layers),
            pytest.raises(AttentionBackendError, match="in ForwardContext"),
        ):
            attention_operator(torch.empty(0), empty, empty, empty, empty, torch.empty(0), 0)
    with pytest.raises(AttentionBackendError, match="NoneType"):
        attention_operator(torch.empty(0), empty, empty, empty, empty, torch.empty(0), 0)


def test_split_model_that_fails_keeps_no_shared_tensor() -> None:
    model = make_model("llama")
    backend = make_attention("sdpa", make_cache(model))
    split = SplitLM(model, backend, PLAN)
    step, ids = make_batch([(0, 3)], 0)
    backend.prepare(key_of(step, "static"), step.metadata)
    with pytest.raises(AttentionBackendError):  # No forward context.
        split(ids, step.positions, step.attn, step.logits_indices)
    assert split.attention.shared == ()

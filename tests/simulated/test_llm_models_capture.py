"""The forward pass is fit for capture: few operations, static shapes, nothing left behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from llm_paged import Step, key_of, make_step, shuffled_tables
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt import RuntimeConfig, RuntimeMode
from graphrt_llm import EngineConfig, LLMEngine
from graphrt_llm.assembly import assemble
from graphrt_llm.attention import make_attention
from graphrt_llm.errors import AttentionBackendError, EngineConfigError
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.weights import random_weights

VIEWS = {
    "view",
    "t",
    "transpose",
    "slice",
    "split",
    "unbind",
    "expand",
    "unsqueeze",
    "_unsafe_view",
}


class CountOperations(TorchDispatchMode):
    """Counts what does work or allocates; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name not in VIEWS:
            self.counts[name] += 1
            if isinstance(result, torch.Tensor):
                self.shapes.append((name, tuple(result.shape)))
        return result


def make_model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> CausalLM:
    model = CausalLM(config, dtype)
    random_weights(model, seed=0)
    cache = KVCache(config, num_blocks=33, block_size=4, dtype=dtype)
    model.attention = make_attention("sdpa", cache)
    return model


def run(model: CausalLM, step: Step, formula: str) -> tuple[torch.Tensor, CountOperations]:
    assert model.attention is not None
    model.attention.prepare(key_of(step, formula), step.metadata)
    ids = torch.arange(len(step.positions)) % model.config.vocab_size
    with torch.no_grad(), CountOperations() as operations:
        logits = model(ids, step.positions, step.attn, step.logits_indices)
    return logits, operations


def decode_step(seq_lens: list[int], **padding: int) -> Step:
    tables = shuffled_tables(4, 8, 33, torch.Generator().manual_seed(0))
    return make_step([(n - 1, 1) for n in seq_lens], tables, 4, **padding)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_captured_model_is_cut_at_each_attention(architecture: Any) -> None:
    """Capture verifies every program: its replay equals eager on the same padded rows."""
    config = replace(ModelConfig.tiny(), architecture=architecture)
    runtime = RuntimeConfig(max_num_seqs=4, max_num_batched_tokens=16)
    parts = assemble(config, EngineConfig(runtime=runtime, dtype="float64", load_format="dummy"))
    with LLMEngine(parts) as engine:
        graphs = engine.capture().graphs
    cuts = {(graph.mode, graph.num_graphs, graph.num_eager) for graph in graphs}
    assert cuts == {(RuntimeMode.PIECEWISE, 3, 2), (RuntimeMode.FULL, 1, 0)}
    assert {graph.state for graph in graphs} == {"ready"}


FORBIDDEN = {"_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero"}


@pytest.mark.parametrize("formula", ["static", "uniform", "host"])
def test_no_operation_reads_the_device_back(formula: str) -> None:
    _, operations = run(make_model(ModelConfig.tiny()), decode_step([5, 9, 2]), formula)
    assert not FORBIDDEN & operations.counts.keys()


@pytest.mark.parametrize("formula", ["static", "uniform"])
def test_the_static_formula_ignores_lengths(formula: str) -> None:
    model = make_model(ModelConfig.tiny())
    _, short = run(model, decode_step([1, 2, 3]), formula)
    _, long = run(model, decode_step([30, 32, 17]), formula)
    assert short.shapes == long.shapes


@pytest.mark.parametrize(
    ("architecture", "most"), [("LlamaForCausalLM", 26), ("Qwen3ForCausalLM", 32)]
)
def test_a_layer_is_few_operations(architecture: Any, most: int) -> None:
    """Norms count as what a CPU makes of them; a GPU runs each as one kernel."""
    counts = []
    for num_layers in (1, 2):
        config = replace(ModelConfig.tiny(), architecture=architecture, num_layers=num_layers)
        _, operations = run(make_model(config), decode_step([5, 9, 2]), "uniform")
        counts.append(operations.counts.total())
    assert counts[1] - counts[0] <= most


def test_decoding_requests_are_attended_together() -> None:
    model = make_model(ModelConfig.tiny())
    tables = shuffled_tables(4, 8, 33, torch.Generator().manual_seed(0))
    # Three that decode and a chunk: two calls in each of the two layers.
    step = make_step([(4, 1), (8, 1), (1, 1), (3, 4)], tables, 4)
    _, operations = run(model, step, "host")
    calls = [n for name, n in operations.counts.items() if "scaled_dot_product" in name]
    assert calls == [4]


def test_forward_leaves_no_tensor_behind() -> None:
    model = make_model(ModelConfig.tiny())
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    run(model, decode_step([5, 9, 2]), "static")
    assert [set(vars(module)) for module in model.modules()] == attributes
    for name, tensor in model.state_dict().items():
        address, content = before[name]
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, content)


@pytest.mark.parametrize("formula", ["static", "uniform", "host"])
def test_padding_changes_no_real_row_and_no_real_slot(formula: str) -> None:
    results = []
    for padding in (0, 1, 5):
        model = make_model(ModelConfig.tiny())
        step = decode_step([5, 9, 2], pad_tokens=padding, pad_requests=padding)
        logits, _ = run(model, step, formula)
        assert logits.isfinite().all()
        cache = model.attention.cache.tensor  # type: ignore[union-attr]
        results.append((logits[:3], cache[:, 1:].clone()))
    for logits, cache in results[1:]:
        # A matrix product of another height may sum in another order.
        torch.testing.assert_close(logits, results[0][0], rtol=0, atol=1e-11)
        torch.testing.assert_close(cache, results[0][1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_have_the_models_dtype_and_precision(dtype: torch.dtype) -> None:
    exact, _ = run(make_model(ModelConfig.tiny()), decode_step([5, 9, 2]), "host")
    for formula in ("static", "host"):
        model = make_model(ModelConfig.tiny(), dtype)
        logits, _ = run(model, decode_step([5, 9, 2]), formula)
        assert logits.dtype == dtype
        # Logits have a deviation of 1; they come from two layers of rounded products.
        assert (logits.double() - exact).abs().max() < 20 * torch.finfo(dtype).eps


def test_a_model_without_attention_is_refused() -> None:
    model = make_model(ModelConfig.tiny())
    step = decode_step([5])
    model.attention = None
    with pytest.raises(AttentionBackendError) as caught:
        model(torch.zeros(1, dtype=torch.int64), step.positions, step.attn, step.logits_indices)
    assert "make_attention" in caught.value.do


def test_a_cache_counts_its_bytes_and_refuses_to_be_empty() -> None:
    config = ModelConfig.tiny()
    cache = KVCache(config, num_blocks=3, block_size=4, dtype=torch.bfloat16)
    assert cache.num_bytes == 3 * KVCache.bytes_per_block(config, 4, torch.bfloat16)
    assert cache.tensor.shape == (2, 3, 4, 2, 2, 16)
    cache.slots[1][5] = 1
    assert cache.layers[1][1, 1].eq(1).all()
    assert cache.tensor.count_nonzero() == 2 * 2 * 16
    for num_blocks, block_size in ((1, 4), (3, 0)):
        with pytest.raises(EngineConfigError):
            KVCache(config, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32)


def test_models_and_caches_made_in_inference_mode_are_writable() -> None:
    with torch.inference_mode():
        model = make_model(ModelConfig.tiny())
    # Writing to an inference tensor outside inference mode would be an error.
    random_weights(model, seed=0)
    logits, _ = run(model, decode_step([5, 9, 2]), "host")
    assert not logits.is_inference()

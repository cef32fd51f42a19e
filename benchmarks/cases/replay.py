"""C-replay: CPU replay of a Llama decode step, against eager PyTorch. Says nothing of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.harness import Case, Row, ratio, row, time_host
from graphrt import (
    BatchDescriptor,
    CUDAGraphWrapper,
    ForwardContext,
    GraphLibrary,
    RuntimeMode,
    SimulatedDevice,
)
from graphrt_llm.attention import AttentionInputs, AttentionMetadata, make_attention
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.weights import random_weights

BATCH = 4
CONTEXT = 64
BLOCK = 16

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=CONTEXT,
)


def decode_step() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """A decode step of 4 requests over the paged cache, and the tensors it writes."""
    device = torch.device("cpu")
    cache = KVCache(
        CONFIG,
        num_blocks=1 + BATCH * CONTEXT // BLOCK,
        block_size=BLOCK,
        dtype=torch.float32,
        device=device,
    )
    attention = make_attention("sdpa", cache)
    model = CausalLM(CONFIG, dtype=torch.float32, device=device)
    model.attention = attention
    random_weights(model, seed=0)
    key = BatchDescriptor(num_tokens=BATCH, num_reqs=BATCH, uniform=True)
    length = CONTEXT // 2
    attention.prepare_for_replay(key, AttentionMetadata(np.full(BATCH, 1), np.full(BATCH, length)))
    blocks = torch.arange(1, 1 + BATCH * CONTEXT // BLOCK).view(BATCH, -1)
    inputs = AttentionInputs(
        slot_mapping=blocks[:, (length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK,
        token_requests=torch.arange(BATCH),
        block_tables=blocks,
        seq_lens=torch.full((BATCH,), length),
    )
    ids = torch.arange(BATCH)
    positions = torch.full((BATCH,), length - 1)
    last = torch.arange(BATCH)
    return lambda: model(ids, positions, inputs, last), [cache.tensor]


def against_eager() -> Sequence[Row]:
    step, state = decode_step()
    device = SimulatedDevice()
    library = GraphLibrary(device)
    wrapper = CUDAGraphWrapper(step, library, RuntimeMode.FULL, name="decode")
    key = BatchDescriptor(num_tokens=BATCH, num_reqs=BATCH, uniform=True)
    with torch.no_grad():
        expected = step().clone()
        with library.capture_scope(sinks=state) as scope:
            for mode in (RuntimeMode.NONE, RuntimeMode.FULL):
                with scope.step(mode, key):
                    wrapper()
        with ForwardContext(RuntimeMode.FULL, key):
            assert torch.equal(wrapper(), expected), "replay must equal eager bit for bit"
    replay = wrapper.concrete_cudagraph_entries[key].replay

    def eager_no_grad() -> None:
        with torch.no_grad():
            step()

    def eager_inference() -> None:
        with torch.inference_mode():
            step()

    arms = {
        "eager no_grad": eager_no_grad,
        "eager inference_mode": eager_inference,
        "replay": replay,
    }
    samples = time_host(arms, block_ms=100)
    library.close()
    device.close()
    shape = {"layers": 4, "hidden": 64, "batch": BATCH, "context": CONTEXT, "threads": 1}
    return [
        row(
            metric,
            ratio(samples, arm, "replay"),
            target=2.0,
            unit="ratio",
            higher_is_better=True,
            samples=samples,
            **shape,
        )
        for metric, arm in (
            ("C-replay", "eager no_grad"),
            ("C-replay-inference", "eager inference_mode"),
        )
    ]


CASES = [Case("C-replay", "CPU replay of a 4-layer Llama decode over eager", against_eager)]

"""When a backend is prepared, and which calls it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llm_paged import attention, key_of, make_step

from graphrt import AttentionSupport, BatchDescriptor
from graphrt_llm.attention import (
    AttentionMetadata,
    attention_backends,
    make_attention,
)
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import ModelConfig


def tiny_cache() -> KVCache:
    return KVCache(ModelConfig.tiny(), num_blocks=5, block_size=4, dtype=torch.float64)


def test_an_unknown_backend_error_lists_the_known_ones() -> None:
    with pytest.raises(AttentionBackendError) as caught:
        make_attention("quantum", tiny_cache())
    assert caught.value.found == "'quantum'"
    assert all(name in caught.value.expected for name in attention_backends())


def test_sdpa_supports_every_graph() -> None:
    assert make_attention("sdpa", tiny_cache()).support is AttentionSupport.ALWAYS


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_piecewise_keys_are_prepared_without_a_batch(num_tokens: int) -> None:
    """40 tokens are more than a request's blocks hold; a piecewise key allows that."""
    backend = make_attention("sdpa", tiny_cache())
    backend.prepare(BatchDescriptor(num_tokens), None)
    step = make_step([(0, 1)], torch.tensor([[1, 2]]), 4, pad_tokens=num_tokens - 1)
    q = torch.zeros(num_tokens, 4, 16, dtype=torch.float64)
    kv = torch.zeros(num_tokens, 2, 2, 16, dtype=torch.float64)
    assert backend.begin(step.positions, step.attn) == ()
    out = attention(backend, 0, q, kv, step.attn)
    assert torch.equal(out, q)


def test_a_step_that_was_not_prepared_is_refused() -> None:
    backend = make_attention("sdpa", tiny_cache())
    step = make_step([(0, 1)], torch.tensor([[1, 2]]), 4)
    with pytest.raises(AttentionBackendError):
        backend.begin(step.positions, step.attn)
    backend.prepare(key_of(step, "static"), step.metadata)
    q = torch.zeros(1, 4, 16, dtype=torch.float64)
    kv = torch.zeros(1, 2, 2, 16, dtype=torch.float64)
    # Without the tensors of ``begin`` this is the host formula, and a FULL key has no host lengths.
    with pytest.raises(AttentionBackendError):
        attention(backend, 0, q, kv, step.attn)


def test_lengths_may_be_arrays() -> None:
    backend = make_attention("sdpa", tiny_cache())
    step = make_step([(3, 1), (0, 3)], torch.tensor([[1, 2], [3, 4]]), 4)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, 16, generator=generator, dtype=torch.float64)
    kv = torch.randn(4, 2, 2, 16, generator=generator, dtype=torch.float64)
    results = []
    arrays = AttentionMetadata(*(np.array(lengths) for lengths in step.metadata[:2]))
    for metadata in (step.metadata, arrays):
        backend.prepare(BatchDescriptor(4), metadata)
        results.append(attention(backend, 0, q, kv, step.attn))
    assert torch.equal(*results)

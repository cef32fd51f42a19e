"""Which batches run the kernel for decoding requests, and which the fallback backend."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import AttentionSupport, BatchDescriptor, CUDAGraphMode
from graphrt_llm import LLMEngine, SamplingParams, assembly
from graphrt_llm.attention import (
    AttentionInputs,
    AttentionMetadata,
    choose_attention,
    make_attention,
    paged,
)
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import ModelConfig
from lab import Tally

CONFIG = ModelConfig.tiny()


class Recorder:
    """A fallback backend and a kernel that record their calls."""

    support = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self) -> None:
        self.cache = KVCache(CONFIG, num_blocks=8, block_size=4, dtype=torch.float32)
        self.calls: list[str] = []

    def prepare(self, key: BatchDescriptor, step_info: AttentionMetadata | None) -> None:
        self.calls.append("capture" if step_info is None else "replay")

    def begin(self, positions: Any, attn: Any) -> tuple[torch.Tensor, ...]:
        self.calls.append("begin")
        return ()

    def forward(self, layer: int, heads: Any, attn: Any, shared: Any, out: Any) -> None:
        self.calls.append("forward")
        out.fill_(2)

    def decode(self, heads: Any, layer: Any, tables: Any, lengths: Any, out: Any) -> None:
        self.calls.append(f"decode {len(heads)}")
        out.fill_(1)


def lengths(*query_lens: int) -> AttentionMetadata:
    return AttentionMetadata(np.array(query_lens), np.array(query_lens) + 3)


def run(backend: paged.PagedAttention, num_rows: int, num_requests: int) -> torch.Tensor:
    num_heads = CONFIG.num_heads + 2 * CONFIG.num_kv_heads
    heads = torch.zeros(num_rows, num_heads, CONFIG.head_dim)
    attn = AttentionInputs(*(torch.zeros(num_requests, dtype=torch.int64) for _ in range(4)))
    out = torch.full((num_rows, CONFIG.num_heads, CONFIG.head_dim), torch.nan)
    shared = backend.begin(attn.seq_lens, attn)
    backend.forward(0, heads, attn, shared, out)
    return out


DECODE = BatchDescriptor(8, num_reqs=8, uniform=True)
LARGEST = BatchDescriptor(paged.MAX_REQUESTS, num_reqs=paged.MAX_REQUESTS, uniform=True)
TOO_LARGE = BatchDescriptor(paged.MAX_REQUESTS + 1, num_reqs=paged.MAX_REQUESTS + 1, uniform=True)
MIXED = BatchDescriptor(8, num_reqs=8)
"""A FULL graph of any batch of up to 8 tokens: of as many requests, or of one."""
PIECE = BatchDescriptor(64)


@pytest.mark.parametrize("key", [DECODE, LARGEST])
def test_decode_graphs_of_few_requests_run_the_kernel(key):
    recorder = Recorder()
    backend = paged.PagedAttention(recorder, recorder.decode)
    backend.prepare(key, None)
    assert run(backend, key.num_tokens, key.num_tokens).eq(1).all()
    backend.prepare(key, lengths(1, 1))
    run(backend, key.num_tokens, key.num_tokens)
    assert recorder.calls == [f"decode {key.num_tokens}"] * 2


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        (TOO_LARGE, lengths(*[1] * paged.MAX_REQUESTS)),
        (BatchDescriptor(8, num_reqs=4, uniform=True), lengths(2, 2)),
        (MIXED, lengths(7, 1)),
        (MIXED, lengths(*[1] * 8)),
        (PIECE, lengths(1, 1, 9)),
        (PIECE, lengths(*[1] * (paged.MAX_REQUESTS + 1))),
    ],
)
def test_every_other_batch_runs_the_fallback(key, batch):
    recorder = Recorder()
    backend = paged.PagedAttention(recorder, recorder.decode)
    backend.prepare(key, None)
    backend.prepare(key, batch)
    assert run(backend, key.num_tokens, 4).eq(2).all()
    assert recorder.calls == ["capture", "replay", "begin", "forward"]


def test_eager_decodes_of_few_requests_run_the_kernel():
    recorder = Recorder()
    backend = paged.PagedAttention(recorder, recorder.decode)
    backend.prepare(PIECE, None)
    backend.prepare(PIECE, lengths(1, 1, 1))
    out = run(backend, 64, 32)
    assert recorder.calls == ["capture", f"decode {paged.MAX_REQUESTS}"]
    assert out[: paged.MAX_REQUESTS].eq(1).all()
    assert out[paged.MAX_REQUESTS :].eq(0).all()


def test_rows_beyond_the_requests_are_zeroed():
    recorder = Recorder()
    backend = paged.PagedAttention(recorder, recorder.decode)
    backend.prepare(PIECE, lengths(1, 1, 1))
    out = run(backend, 64, 4)
    assert recorder.calls == ["decode 4"]
    assert out[4:].eq(0).all()


@pytest.mark.parametrize(
    ("key", "batch", "runs"),
    [
        (BatchDescriptor(24, num_reqs=8, uniform=True), None, 24),
        (BatchDescriptor(24, num_reqs=8, uniform=True), lengths(3, 3), 24),
        (BatchDescriptor(64), lengths(3, 3), 3 * paged.MAX_REQUESTS),
        (BatchDescriptor(51, num_reqs=17, uniform=True), lengths(3), 0),
        (BatchDescriptor(24, num_reqs=8), lengths(3, 3), 0),
        (BatchDescriptor(64), lengths(3, 1), 0),
        (BatchDescriptor(64), lengths(1, 1), 0),
        (BatchDescriptor(64), None, 0),
    ],
)
def test_uniform_batches_with_drafts_run_the_kernel(key, batch, runs):
    """As many tokens of each request as it was made for, and of no other number."""
    recorder = Recorder()
    backend = paged.PagedAttention(recorder, recorder.decode, query_len=3)
    backend.prepare(key, batch)
    out = run(backend, key.num_tokens, key.num_reqs or 32)
    assert [call for call in recorder.calls if "decode" in call] == [f"decode {runs}"] * bool(runs)
    assert out[:runs].eq(1).all()
    assert out[runs:].eq(0 if runs else 2).all()


def test_kernel_and_fallback_alternate_between_steps():
    recorder = Recorder()
    backend = paged.PagedAttention(recorder, recorder.decode)
    backend.prepare(PIECE, lengths(1))
    backend.prepare(PIECE, lengths(5))
    run(backend, 64, 32)
    backend.prepare(PIECE, lengths(1))
    run(backend, 64, 32)
    assert recorder.calls == ["replay", "begin", "forward", f"decode {paged.MAX_REQUESTS}"]


def test_support_and_cache_are_the_fallbacks():
    recorder = Recorder()
    backend = paged.PagedAttention(recorder, recorder.decode)
    assert backend.support is recorder.support
    assert backend.cache is recorder.cache


def test_paged_without_a_gpu_is_refused_and_not_chosen():
    cache = KVCache(CONFIG, num_blocks=8, block_size=4, dtype=torch.bfloat16)
    assert paged.obstacle(cache) is not None
    with pytest.raises(AttentionBackendError, match="CUDA"):
        paged.triton_decode(cache)
    assert choose_attention("auto", cache).name == "sdpa"


def by_formula(
    heads: torch.Tensor,
    layer: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    query_len: int,
) -> None:
    """What the kernel computes, in shapes that a graph can hold."""
    q = heads[:, : out.shape[1]]
    requests = torch.arange(len(q)) // query_len
    keys, values = layer[tables[requests]].flatten(1, 2).unbind(2)
    group = q.shape[1] // keys.shape[2]
    keys, values = (part.repeat_interleave(group, 2) for part in (keys, values))
    ends = lengths[requests] - query_len + 1 + torch.arange(len(q)) % query_len
    is_token = torch.arange(keys.shape[1]) < ends[:, None, None]
    scores = torch.einsum("nhd,nthd->nht", q, keys) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~is_token, -1e9).softmax(-1) * is_token
    out.copy_(torch.einsum("nht,nthd->nhd", weights, values))


class Formula:
    """As the kernel, with scratch memory that no operation of torch touches."""

    def __init__(self, query_len: int = 1) -> None:
        self.query_len = query_len
        self.keep_alive = (torch.zeros(3), torch.zeros(5))
        self.decoded = Tally()

    def __call__(self, heads: torch.Tensor, *inputs: torch.Tensor) -> None:
        self.decoded.append(len(heads))
        by_formula(heads, *inputs, self.query_len)


def use_paged(monkeypatch: pytest.MonkeyPatch, decode: Formula) -> None:
    """Let engines be made with ``decode`` instead of the kernel, which needs a GPU."""
    monkeypatch.setattr(
        assembly,
        "make_attention",
        lambda name, cache, limits: paged.PagedAttention(
            make_attention("sdpa", cache), decode, decode.query_len
        ),
    )


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_every_policy_gives_the_tokens_of_the_fallback(mode, query_len, monkeypatch):
    config = assembly.TINY_CONFIG
    compilation = replace(config.runtime.compilation, cudagraph_mode=mode)
    runtime = replace(config.runtime, compilation=compilation, num_speculative_tokens=query_len - 1)
    config = replace(config, runtime=runtime)
    decode = Formula(query_len)

    def served() -> list[list[int]]:
        with LLMEngine.tiny(config) as engine:
            engine.capture()
            return engine.generate([[1, 2, 3, 4, 5], [7, 8], [3]], SamplingParams(max_tokens=6))

    expected = served()
    use_paged(monkeypatch, decode)
    assert served() == expected
    # In the FULL policy graphs are those of mixed batches, which the fallback serves.
    assert decode.decoded or mode is CUDAGraphMode.FULL


def test_every_graph_keeps_memory_that_kernels_get_by_address(monkeypatch):
    decode = Formula()
    use_paged(monkeypatch, decode)
    with LLMEngine.tiny() as engine:
        engine.capture()
        cache = engine.attention_backend.cache.tensor
        for program in engine.runtime.library.programs:
            kept = {id(item.storage) for item in program.externals}
            assert kept >= {id(held.untyped_storage()) for held in (cache, *decode.keep_alive)}


def test_keep_alive_includes_the_fallbacks_memory():
    recorder = Recorder()
    recorder.keep_alive = (torch.zeros(1),)
    decode = Formula()
    backend = paged.PagedAttention(recorder, decode)
    assert [*backend.keep_alive] == [*decode.keep_alive, *recorder.keep_alive]
    assert not make_attention("sdpa", recorder.cache).keep_alive

"""Which batches the backend for few decoding requests takes, and what it leaves to the other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import AttentionSupport, BatchDescriptor, CUDAGraphMode
from graphrt_llm import LLMEngine, SamplingParams, assembly
from graphrt_llm.attention import AttentionInputs, AttentionMetadata, choose_attention
from graphrt_llm.attention.paged import MAX_REQUESTS, PagedAttention, obstacle, triton_decode
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import ModelConfig

CONFIG = ModelConfig.tiny()


class Recorded:
    """Two backends that only say who was asked for what."""

    support = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self) -> None:
        self.cache = KVCache(CONFIG, num_blocks=8, block_size=4, dtype=torch.float32)
        self.calls: list[str] = []

    def reserve_for_capture(self, max_key: BatchDescriptor) -> None:
        self.calls.append("reserve")

    def prepare_for_capture(self, key: BatchDescriptor) -> None:
        self.calls.append("capture")

    def prepare_for_replay(self, key: BatchDescriptor, live: AttentionMetadata) -> None:
        self.calls.append("replay")

    def begin(self, positions: Any, attn: Any) -> tuple[torch.Tensor, ...]:
        self.calls.append("begin")
        return ()

    def forward(self, layer: int, heads: Any, attn: Any, shared: Any, out: Any) -> None:
        self.calls.append("forward")
        out.fill_(2)

    def decode(self, heads: Any, layer: Any, tables: Any, lengths: Any, out: Any) -> None:
        self.calls.append(f"decode {len(heads)}")
        out.fill_(1)


def live(*query_lens: int) -> AttentionMetadata:
    return AttentionMetadata(np.array(query_lens), np.array(query_lens) + 3)


def run(backend: PagedAttention, num_rows: int, num_requests: int) -> torch.Tensor:
    num_heads = CONFIG.num_heads + 2 * CONFIG.num_kv_heads
    heads = torch.zeros(num_rows, num_heads, CONFIG.head_dim)
    attn = AttentionInputs(*(torch.zeros(num_requests, dtype=torch.int64) for _ in range(4)))
    out = torch.full((num_rows, CONFIG.num_heads, CONFIG.head_dim), torch.nan)
    shared = backend.begin(attn.seq_lens, attn)
    backend.forward(0, heads, attn, shared, out)
    return out


DECODE = BatchDescriptor(8, num_reqs=8, uniform=True)
LARGEST = BatchDescriptor(MAX_REQUESTS, num_reqs=MAX_REQUESTS, uniform=True)
TOO_LARGE = BatchDescriptor(MAX_REQUESTS + 1, num_reqs=MAX_REQUESTS + 1, uniform=True)
MIXED = BatchDescriptor(8, num_reqs=8)
"""A FULL graph of any batch of up to 8 tokens: of as many requests, or of one."""
PIECE = BatchDescriptor(64)


@pytest.mark.parametrize("key", [DECODE, LARGEST])
def test_full_decode_graphs_of_few_requests_are_ours_and_need_no_plan(key):
    others = Recorded()
    backend = PagedAttention(others, others.decode)
    backend.prepare_for_capture(key)
    assert run(backend, key.num_tokens, key.num_tokens).eq(1).all()
    backend.prepare_for_replay(key, live(1, 1))
    run(backend, key.num_tokens, key.num_tokens)
    assert others.calls == [f"decode {key.num_tokens}"] * 2


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        (TOO_LARGE, live(*[1] * MAX_REQUESTS)),
        (BatchDescriptor(8, num_reqs=4, uniform=True), live(2, 2)),
        (MIXED, live(7, 1)),
        (MIXED, live(*[1] * 8)),
        (PIECE, live(1, 1, 9)),
        (PIECE, live(*[1] * (MAX_REQUESTS + 1))),
    ],
)
def test_every_other_batch_is_the_other_backend_s(key, batch):
    others = Recorded()
    backend = PagedAttention(others, others.decode)
    backend.prepare_for_capture(key)
    backend.prepare_for_replay(key, batch)
    assert run(backend, key.num_tokens, 4).eq(2).all()
    assert others.calls == ["capture", "replay", "begin", "forward"]


def test_gaps_and_eager_steps_of_few_decoding_requests_are_ours():
    others = Recorded()
    backend = PagedAttention(others, others.decode)
    backend.prepare_for_capture(PIECE)
    backend.prepare_for_replay(PIECE, live(1, 1, 1))
    out = run(backend, 64, 32)
    assert others.calls == ["capture", f"decode {MAX_REQUESTS}"]
    assert out[:MAX_REQUESTS].eq(1).all()
    assert out[MAX_REQUESTS:].eq(0).all(), "rows of no request are finite"


def test_rows_beyond_the_requests_of_a_graph_have_no_length_to_read():
    others = Recorded()
    backend = PagedAttention(others, others.decode)
    backend.prepare_for_replay(PIECE, live(1, 1, 1))
    out = run(backend, 64, 4)
    assert others.calls == ["decode 4"]
    assert out[4:].eq(0).all()


def test_a_step_that_is_not_ours_follows_one_that_is():
    others = Recorded()
    backend = PagedAttention(others, others.decode)
    backend.prepare_for_replay(PIECE, live(1))
    backend.prepare_for_replay(PIECE, live(5))
    run(backend, 64, 32)
    backend.prepare_for_replay(PIECE, live(1))
    run(backend, 64, 32)
    assert others.calls == ["replay", "begin", "forward", f"decode {MAX_REQUESTS}"]


def test_support_cache_and_reservation_are_the_other_backend_s():
    others = Recorded()
    backend = PagedAttention(others, others.decode)
    assert backend.support is others.support
    assert backend.cache is others.cache
    backend.reserve_for_capture(PIECE)
    assert others.calls == ["reserve"]


def test_without_a_gpu_it_is_refused_and_not_chosen():
    cache = KVCache(CONFIG, num_blocks=8, block_size=4, dtype=torch.bfloat16)
    assert obstacle(cache) is not None
    with pytest.raises(AttentionBackendError, match="CUDA"):
        triton_decode(cache)
    assert choose_attention("auto", cache).name == "sdpa"
    assert SdpaAttention(cache).support is AttentionSupport.ALWAYS


def by_formula(
    heads: torch.Tensor,
    layer: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """What the kernel computes, in shapes that a graph can hold."""
    q = heads[:, : out.shape[1]]
    keys, values = layer[tables[: len(q)]].flatten(1, 2).unbind(2)
    group = q.shape[1] // keys.shape[2]
    keys, values = (part.repeat_interleave(group, 2) for part in (keys, values))
    is_token = torch.arange(keys.shape[1]) < lengths[: len(q), None, None]
    scores = torch.einsum("nhd,nthd->nht", q, keys) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~is_token, -1e9).softmax(-1) * is_token
    out.copy_(torch.einsum("nht,nthd->nhd", weights, values))


class Formula:
    """As the kernel, with scratch memory that no operation of torch ever touches."""

    def __init__(self) -> None:
        self.holds = (torch.zeros(3), torch.zeros(5))
        self.decoded: list[int] = []

    def __call__(self, heads: torch.Tensor, *others: torch.Tensor) -> None:
        self.decoded.append(len(heads))
        by_formula(heads, *others)


def use_paged(monkeypatch: pytest.MonkeyPatch, decode: Formula) -> None:
    """Let engines be made with ``decode``, where they would find no kernel without a GPU."""
    monkeypatch.setattr(
        assembly,
        "make_attention",
        lambda name, cache, limits: PagedAttention(SdpaAttention(cache), decode),
    )


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_under_every_policy_an_engine_gives_the_other_backend_s_tokens(mode, monkeypatch):
    wish = assembly.TINY_CONFIG
    compilation = replace(wish.runtime.compilation, cudagraph_mode=mode)
    wish = replace(wish, runtime=replace(wish.runtime, compilation=compilation))
    decode = Formula()

    def served() -> list[list[int]]:
        with LLMEngine.tiny(wish) as engine:
            engine.capture()
            return engine.generate([[1, 2, 3, 4, 5], [7, 8], [3]], SamplingParams(max_tokens=6))

    expected = served()
    use_paged(monkeypatch, decode)
    assert served() == expected
    # FULL graphs of mixed batches are all that this policy has.
    assert bool(decode.decoded) is (mode is not CUDAGraphMode.FULL)


def test_every_graph_keeps_what_kernels_know_by_address_alone(monkeypatch):
    decode = Formula()
    use_paged(monkeypatch, decode)
    with LLMEngine.tiny() as engine:
        engine.capture()
        cache = engine.runtime._model.model.attention.cache.tensor
        for program in engine.runtime.library.programs:
            kept = {id(item.storage) for item in program.externals}
            assert kept >= {id(held.untyped_storage()) for held in (cache, *decode.holds)}


def test_what_a_backend_holds_is_its_own_and_the_other_s():
    others = Recorded()
    others.holds = (torch.zeros(1),)
    decode = Formula()
    assert [*PagedAttention(others, decode).holds] == [*decode.holds, *others.holds]
    assert not SdpaAttention(others.cache).holds

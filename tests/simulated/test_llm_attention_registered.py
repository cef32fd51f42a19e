"""An attention backend from outside: registered by name, it serves in every mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from llm_traffic import MODES, TRAFFIC, engine_config, serve
from torch import Tensor

from graphrt import AttentionSupport, BatchDescriptor
from graphrt.errors import StateAdvancedError
from graphrt_llm import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    KVCache,
    Limits,
    LLMEngine,
    register_attention_backend,
)
from graphrt_llm.errors import AttentionBackendError


class PlainAttention:
    """One formula for every batch: each token against its request's whole block table."""

    support = AttentionSupport.ALWAYS
    keep_alive: Sequence[Tensor] = ()

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def prepare(self, key: BatchDescriptor, step_info: AttentionMetadata | None) -> None:
        assert step_info is None or len(step_info.query_lens) == len(step_info.seq_lens)

    def begin(self, positions: Tensor, attn: AttentionInputs) -> tuple[Tensor, ...]:
        tables = attn.block_tables.index_select(0, attn.token_requests)
        keys = torch.arange(tables.shape[1] * self.cache.block_size)
        return tables, keys <= positions[:, None]

    def forward(
        self,
        layer_index: int,
        heads: Tensor,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        out: Tensor,
    ) -> None:
        tables, visible = shared
        num_heads = self.cache.config.num_heads
        groups = num_heads // self.cache.config.num_kv_heads
        kv = self.cache.layers[layer_index].index_select(0, tables.flatten())
        kv = kv.view(len(tables), -1, *kv.shape[2:]).repeat_interleave(groups, 3)
        keys, values = kv.unbind(2)  # [tokens, keys, heads, width]
        queries = heads[:, :num_heads] * heads.shape[-1] ** -0.5
        scores = torch.einsum("thw,tkhw->thk", queries, keys)
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        out.copy_(torch.einsum("thk,tkhw->thw", weights, values))


MADE: list[Limits | None] = []


@pytest.fixture(scope="module")
def plain() -> str:
    def factory(cache: KVCache, limits: Limits | None) -> AttentionBackend:
        MADE.append(limits)
        return PlainAttention(cache)

    register_attention_backend("plain", factory)
    return "plain"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_registered_backend_serves_in_every_mode(plain, mode, overlap):
    with LLMEngine.tiny(engine_config()) as engine:
        expected = serve(engine, TRAFFIC)
    config = replace(engine_config(mode, overlap=overlap), attention_backend=plain)
    with LLMEngine.tiny(config) as engine:
        engine.capture()
        assert not engine.runtime.report().missing
        assert serve(engine, TRAFFIC).tokens == expected.tokens
        assert engine.attention == ("plain", "asked for")
        assert isinstance(engine.attention_backend, PlainAttention)
        assert MADE[-1] is engine.limits


class CountingAttention(PlainAttention):
    """Counts its calls in a tensor that nothing declares."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self.num_calls = torch.zeros((), dtype=torch.int64)

    def forward(self, *args: Any) -> None:
        self.num_calls.add_(1)
        super().forward(*args)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_what_a_backend_writes_undeclared_is_refused_in_every_mode(mode):
    name, made = f"counting {mode}", []

    def factory(cache: KVCache, limits: Limits | None) -> AttentionBackend:
        made.append(CountingAttention(cache))
        return made[-1]

    register_attention_backend(name, factory)
    config = replace(engine_config(mode), attention_backend=name)
    with (
        LLMEngine.tiny(config) as engine,
        pytest.raises(StateAdvancedError, match="num_calls"),
    ):
        engine.capture()
    assert made[-1].num_calls == 0


def test_an_unknown_name_lists_the_registered_ones(plain):
    with pytest.raises(AttentionBackendError) as raised:
        LLMEngine.tiny(replace(engine_config(), attention_backend="plane"))
    assert all(name in raised.value.expected for name in ("sdpa", "flashinfer", "paged", "plain"))
    assert "register_attention_backend" in raised.value.do


@pytest.mark.parametrize("name", ["plain", "sdpa", "auto", "", None])
def test_a_name_that_cannot_be_given_is_refused(plain, name):
    with pytest.raises(AttentionBackendError) as raised:
        register_attention_backend(name, lambda cache, limits: PlainAttention(cache))
    assert "plain" in raised.value.expected


def test_a_factory_that_makes_no_backend_is_refused():
    with pytest.raises(AttentionBackendError, match="factory"):
        register_attention_backend("nothing", PlainAttention.support)  # type: ignore[arg-type]
    made: Any = type("Half", (), {"support": AttentionSupport.NEVER, "begin": None})
    register_attention_backend("half", lambda cache, limits: made())
    with pytest.raises(AttentionBackendError) as raised:
        LLMEngine.tiny(replace(engine_config(), attention_backend="half"))
    assert "forward" in raised.value.found
    assert "begin" not in raised.value.found

"""How much memory the cache takes by default, and what is said where there is too little."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from llm_traffic import engine_config

from graphrt import RuntimeConfig, SimulatedDevice
from graphrt.errors import ConfigError
from graphrt_llm import EngineConfig, LLMEngine, ModelConfig
from graphrt_llm.assembly import GRAPH_BYTES, SIMULATED_BYTES
from graphrt_llm.blocks import blocks_for

MIB = 2**20
TINY = ModelConfig.tiny()
BLOCK_BYTES = TINY.num_layers * 4 * 2 * TINY.num_kv_heads * TINY.head_dim * 8
"""Of a block of 4 tokens in float64."""


def num_blocks(free: int, mode: str = "FULL", **changes: object) -> int:
    """Of an engine of at most 4 requests of 48 tokens on a device with ``free`` bytes."""
    config = replace(engine_config(mode, num_blocks=None), **changes)
    with pytest.MonkeyPatch.context() as patch:
        device = SimulatedDevice(driver_bytes=free)
        patch.setattr("graphrt_llm.assembly.make_device", lambda name, index: device)
        patch.setattr("graphrt_llm.assembly.SIMULATED_BYTES", free)
        with LLMEngine.with_random_weights(TINY, config) as engine:
            assert engine.attention_backend.cache.num_blocks == engine.limits.num_blocks
            return engine.limits.num_blocks


@settings(max_examples=20, deadline=None)
@given(
    num_bytes=st.integers(13 * BLOCK_BYTES, 60 * BLOCK_BYTES),
    share=st.sampled_from([0.5, 0.9, 1.0]),
    mode=st.sampled_from(["NONE", "FULL"]),
)
def test_the_cache_takes_its_share_less_room_for_graphs(num_bytes, share, mode):
    room = GRAPH_BYTES if mode == "FULL" else 0
    free = int((num_bytes + room) / share) + 1
    found = num_blocks(free, mode, gpu_memory_utilization=share)
    full = 1 + 4 * blocks_for(48, 4)
    assert found == min(full, int((free * share - room) // BLOCK_BYTES))


def test_no_more_blocks_than_requests_can_use_are_taken():
    assert num_blocks(2**40) == 1 + 4 * 12


def test_no_more_blocks_than_can_be_counted_are_taken(monkeypatch):
    monkeypatch.setattr("graphrt_llm.assembly.MOST_BLOCKS", 20)
    assert num_blocks(2**40) == 20


def test_too_little_memory_for_one_request_names_the_numbers():
    free = GRAPH_BYTES + 12 * BLOCK_BYTES
    with pytest.raises(ConfigError) as raised:
        num_blocks(free, gpu_memory_utilization=1.0)
    error = raised.value
    assert "EngineConfig.num_blocks" in str(error)
    assert f"{13 * BLOCK_BYTES / MIB:.1f} MiB" in error.expected
    assert "48 tokens" in error.expected
    assert f"{12 * BLOCK_BYTES / MIB:.1f} MiB" in error.found
    assert f"{free / MIB:,.1f} MiB" in error.found
    assert "1,024.0 MiB for graphs" in error.found
    assert "gpu_memory_utilization" in error.do


def test_blocks_that_are_named_need_no_measurement():
    assert num_blocks(1, num_blocks=17) == 17


def test_a_large_context_is_bounded_on_the_simulated_device():
    long = replace(TINY, max_position_embeddings=2**17)
    config = EngineConfig(
        runtime=RuntimeConfig(max_num_seqs=64, compilation={"cudagraph_mode": "NONE"}),
        dtype="float64",
        device="simulated",
    )
    with LLMEngine.with_random_weights(long, config) as engine:
        cache = engine.attention_backend.cache
        assert 0.89 * SIMULATED_BYTES < cache.num_bytes <= 0.9 * SIMULATED_BYTES

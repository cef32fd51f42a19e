"""An engine whose steps are split into micro-batches serves the tokens of one that splits none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import typer
from llm_traffic import TRAFFIC, check_same_tokens, engine_config, serve
from tests.lab import Lab
from typer.testing import CliRunner

from graphrt import StepMetrics, UBatchReason, ubatch
from graphrt_llm import LLMEngine
from graphrt_llm.attention import register_attention_backend
from graphrt_llm.attention.base import AttentionInputs
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.demo.command import demo
from graphrt_llm.errors import EngineConfigError

SPLIT = {"num_ubatches": 2, "decode_token_threshold": 2, "prefill_token_threshold": 6}


class Yielding(SdpaAttention):
    """Communicates after the attention of each layer, so that micro-batches interleave."""

    def forward(
        self,
        layer_index: int,
        heads: torch.Tensor,
        attn: AttentionInputs,
        shared: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        super().forward(layer_index, heads, attn, shared, out)
        with ubatch.communication(f"layer{layer_index}", out):
            out.copy_(out.clone())


class Unsplit(SdpaAttention):
    serves_micro_batches = False


register_attention_backend(
    "yielding", lambda cache, limits: Yielding(cache, query_len=limits.query_len)
)
register_attention_backend("unsplit", lambda cache, limits: Unsplit(cache))


def served(mode: str, backend: str, metrics: StepMetrics, **runtime: Any) -> Any:
    config = engine_config(mode, num_blocks=None, **runtime)
    object.__setattr__(config, "attention_backend", backend)
    with Lab(), LLMEngine.tiny(config, observer=metrics) as engine:
        engine.capture()
        return serve(engine, TRAFFIC)


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_split_engine_serves_the_same_tokens(mode: str, num_ubatches: int) -> None:
    split = {**SPLIT, "num_ubatches": num_ubatches, "decode_token_threshold": num_ubatches}
    metrics = StepMetrics()
    found = served(mode, "yielding", metrics, ubatch=split)
    assert metrics.snapshot().split_steps > 5
    check_same_tokens(found, served("NONE", "sdpa", StepMetrics()))


def test_backend_without_a_state_for_each_part_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="attention_backend"):
        served("NONE", "unsplit", StepMetrics(), ubatch=SPLIT)
    assert served("NONE", "unsplit", StepMetrics()).tokens


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_steps_with_drafts_are_split_between_requests(mode: str) -> None:
    metrics = StepMetrics()
    found = served(mode, "yielding", metrics, ubatch=SPLIT, num_speculative_tokens=2)
    counted = metrics.snapshot()
    assert counted.split_steps > 2
    assert counted.unsplit_reasons[UBatchReason.ENGINE_DECLINED] > 0
    check_same_tokens(found, served("NONE", "sdpa", StepMetrics()))


def test_demo_splits_steps_and_compares_the_tokens() -> None:
    app = typer.Typer()
    app.command()(demo)
    options = "--device simulated --requests 4 --ubatches 2 --modes FULL_DECODE_ONLY --json"
    result = CliRunner().invoke(app, [*options.split(), "--report", "none"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tokens_identical"]
    assert found["modes"]["UNSPLIT"]["split_steps"] == 0
    assert found["modes"]["FULL_DECODE_ONLY"]["split_steps"] > 0
    assert "unsplit_reasons" in found["modes"]["FULL_DECODE_ONLY"]

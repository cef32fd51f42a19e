"""Twenty thousand steps of real traffic: memory does not grow, and no compared step differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import QWEN, make_engine

from graphrt import StepMetrics
from graphrt.planner import read_trace
from graphrt_llm import SamplingParams, ServeStep, serve

NUM_STEPS = 20_000
SETTLED = 1_000
EVERY = 200

pytestmark = pytest.mark.filterwarnings("ignore:::flashinfer.*")


class EnoughStepsError(Exception):
    """Ends the serving."""


def test_twenty_thousand_steps_leak_nothing_and_equal_eager(shared: Path) -> None:
    trace = read_trace(shared / "traces" / "azure2023" / "AzureLLMInferenceTrace_conv.csv")
    allocated: list[int] = []
    reserved: list[int] = []
    sizes: set[int] = set()

    def watch(step: ServeStep) -> None:
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
        sizes.add(step.result.num_tokens)
        if len(allocated) == NUM_STEPS:
            raise EnoughStepsError

    metrics = StepMetrics()
    with make_engine(
        QWEN, "FULL_AND_PIECEWISE", observer=metrics, verify_every=EVERY, max_model_len=256
    ) as engine:
        # What is taken and captured when another attention backend serves is no leak.
        while engine.is_building:
            engine.generate([1, 2, 3], SamplingParams(max_tokens=8))
        engine.capture()
        captured = engine.runtime.library.num_cudagraph_captured
        with pytest.raises(EnoughStepsError):
            serve(engine, trace, step_seconds=0.05, on_step=watch)
        assert engine.runtime.library.num_cudagraph_captured == captured

    assert len(sizes) > 50, "batches of many sizes"
    last = (NUM_STEPS - SETTLED) // 4
    assert max(allocated[-last:]) <= max(allocated[SETTLED:-last])
    # Comparisons, one step in 200, are of batches of many sizes: their blocks fragment a little.
    assert max(reserved[SETTLED:]) <= 1.1 * reserved[SETTLED]
    verified = metrics.snapshot().verifications
    assert verified.different == 0
    assert verified.equal >= 0.8 * NUM_STEPS / EVERY
    print(
        f"{NUM_STEPS} steps, {verified.equal} compared; bytes: {max(allocated)} allocated, "
        f"{reserved[SETTLED]} reserved at first, {reserved[-1]} at last"
    )

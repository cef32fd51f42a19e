"""C-replay: CPU replay of a Llama decode step, against eager PyTorch. Says nothing of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.baselines import require_equal
from benchmarks.harness import Case, Row, medians, ratio, row, time_host
from benchmarks.models import DecodeStep, decode_key
from graphrt import CUDAGraphWrapper, ForwardContext, GraphLibrary, RuntimeMode, SimulatedDevice
from graphrt_llm.models import ModelConfig

BATCH = 4
CONTEXT = 64

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


def against_eager() -> Sequence[Row]:
    device = SimulatedDevice()
    model = DecodeStep(
        CONFIG,
        max_reqs=BATCH,
        context=CONTEXT,
        dtype=torch.float32,
        device=device.torch_device,
    )
    model.prepare(BATCH)
    inputs = model.inputs(BATCH)
    del inputs["temperature"]  # The case is the model's step, without what sampling adds.
    step = partial(model, **inputs)
    library = GraphLibrary(device)
    wrapper = CUDAGraphWrapper(step, library, RuntimeMode.FULL, name="decode")
    key = decode_key(BATCH)
    with torch.no_grad():
        expected = step().clone()
        with library.capture_scope(may_overwrite=[model.cache.tensor]) as scope:
            for mode in (RuntimeMode.NONE, RuntimeMode.FULL):
                with scope.step(mode, key):
                    wrapper()
        with ForwardContext(RuntimeMode.FULL, key):
            require_equal(wrapper(), expected, "C-replay")
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
            ratio(samples, "replay", arm),
            target=1.0,
            unit="ratio",
            samples=samples,
            timed=f"replay over {arm}, ns of host time",
            medians_ns=medians(samples),
            **shape,
        )
        for metric, arm in (
            ("C-replay", "eager no_grad"),
            ("C-replay-inference", "eager inference_mode"),
        )
    ]


CASES = [Case("C-replay", "CPU replay of a 4-layer Llama decode over eager", against_eager)]

"""G7: what staging 8 inputs adds to the replay of a decode step, for one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.baselines import hand_capture, poison, require_equal
from benchmarks.harness import (
    Case,
    Row,
    cuda_device,
    medians,
    ratio,
    row,
    time_gpu,
    time_launch,
    time_wall,
)
from benchmarks.models import DecodeStep, decode_key
from graphrt import BufferSet, CUDAGraphWrapper, Device, ForwardContext, GraphLibrary, RuntimeMode
from graphrt_llm.models import ModelConfig

MAX_REQS = 8
CONTEXT = 128


@contextmanager
def arms_of(
    config: ModelConfig, dtype: torch.dtype, device: Device
) -> Iterator[dict[str, Callable[[], object]]]:
    """Ways to get 8 inputs into a captured step and replay it; each was compared with eager.

    The program's key has room for 8 requests and the step brings 1, so every way has to slice.
    """
    place = device.torch_device
    step = DecodeStep(config, max_reqs=MAX_REQS, context=CONTEXT, dtype=dtype, device=place)
    step.prepare(1)
    key = decode_key(1)
    with torch.no_grad(), GraphLibrary(device) as library:
        buffers = BufferSet(
            step.specs(), {"requests": MAX_REQS}, lambda key: {"requests": key.num_reqs}, device
        )
        library.add_buffers(buffers)
        bound = buffers.bind(key)
        values = step.inputs(1, seed=1)
        pinned = {
            name: tensor.cpu().pin_memory() if place.type == "cuda" else tensor
            for name, tensor in values.items()
        }
        bound.stage(1, values)
        expected = step(**values).clone()

        wrapper = CUDAGraphWrapper(step, library, RuntimeMode.FULL, name="decode")
        with library.capture_scope(may_overwrite=[step.cache.tensor]) as scope:
            for mode in (RuntimeMode.NONE, RuntimeMode.FULL):
                with scope.step(mode, key):
                    wrapper(**bound.views)
        program = wrapper.concrete_cudagraph_entries[key]
        with ForwardContext(RuntimeMode.FULL, key):
            wrapper(**bound.views)
        replay = program.replay

        whole = {name: torch.zeros_like(tensor) for name, tensor in buffers.tensors.items()}
        hand_views = {name: tensor[:1] for name, tensor in whole.items()}
        for name, view in hand_views.items():
            view.copy_(values[name])
        hand = hand_capture(lambda: step(**hand_views), device)

        def staged() -> None:
            bound.stage(1, values)
            replay()

        def staged_from_host() -> None:
            bound.stage(1, pinned)
            replay()

        def sliced() -> None:
            for name, value in values.items():
                whole[name][:1].copy_(value)
            hand.replay()

        def prebuilt() -> None:
            for name, value in values.items():
                hand_views[name].copy_(value)
            hand.replay()

        arms: dict[str, Callable[[], object]] = {
            "replay": replay,
            "stage + replay": staged,
            "stage from pinned host + replay": staged_from_host,
            "8 slice+copy + bare replay": sliced,
            "8 copies into views + bare replay": prebuilt,
            "bare replay": hand.replay,
        }
        for name, arm in arms.items():
            output = hand.outputs if "bare" in name else program.outputs
            poison(output)
            arm()
            require_equal(output, expected, f"G7 {name}")
        if place.type == "cuda":
            graphed = torch.cuda.make_graphed_callables(
                step, tuple(step.inputs(1, seed=2).values()), num_warmup_iters=3
            )
            arguments = tuple(values.values())
            require_equal(graphed(*arguments), expected, "G7 make_graphed_callables")
            arms["make_graphed_callables"] = lambda: graphed(*arguments)
        try:
            yield arms
        finally:
            device.synchronize()
            hand.reset()


def staging() -> Sequence[Row]:
    with (
        cuda_device() as device,
        arms_of(ModelConfig.named("qwen3-0.6b"), torch.bfloat16, device) as arms,
        torch.no_grad(),
    ):
        wait = device.synchronize
        gpu = time_gpu(arms, blocks=15, repeats=30)
        latency = time_wall(arms, blocks=15, repeats=30, synchronize=wait, each=True)
        host = time_launch(arms, launches=16, bursts=3, synchronize=wait)
    host_us = {name: value / 1000 for name, value in medians(host).items()}
    return [
        row(
            metric,
            ratio(samples, "stage + replay", "replay"),
            target=1.03,
            unit="ratio",
            samples=samples,
            timed=timed,
            shape="qwen3-0.6b, 1 request",
            medians_ms=medians(samples),
            host_us=host_us,
        )
        for metric, samples, timed in (
            ("G7", gpu, "ms between events, host launching ahead; sources on the GPU"),
            ("G7-latency", latency, "ms of wall clock, waiting for the GPU after every step"),
        )
    ]


CASES = [Case("G7", "staging 8 inputs and replay over replay, 0.6B decode, 1 request", staging)]

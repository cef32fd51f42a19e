"""G12: the tail of host step time, in a process with a million live Python objects."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter_ns

from benchmarks.baselines import hand_capture, require_equal
from benchmarks.harness import Case, Row, Samples, cuda_device, percentile, row
from benchmarks.models import SmallModel, small_runtime
from graphrt import Device, Runtime, StepMetrics

NUM_REQS = 8
NUM_OBJECTS = 1_000_000
NUM_STEPS = 10_000
ROUNDS = 5


def arms_of(
    runtime: Runtime, model: SmallModel, device: Device
) -> tuple[dict[str, Callable[[], object]], Callable[[], None]]:
    """A step of the runtime, and copies and a replay by hand; their outputs were compared."""
    values = model.inputs(NUM_REQS, seed=1)

    def step() -> object:
        return runtime.step(values, num_tokens=NUM_REQS, num_reqs=NUM_REQS, uniform=True)

    static = model.inputs(NUM_REQS, seed=2)
    hand = hand_capture(lambda: model(**static), device)

    def copies_and_replay() -> object:
        for name, value in values.items():
            static[name].copy_(value)
        hand.replay()
        return hand.outputs

    require_equal(copies_and_replay(), step(), "G12")  # type: ignore[arg-type]
    return {"step": step, "copies and bare replay": copies_and_replay}, hand.reset


def host_times(
    arms: dict[str, Callable[[], object]], num_steps: int, synchronize: Callable[[], object]
) -> Samples:
    """Host microseconds of every single call, arms alternating; the device is idle before each.

    The collector is on, as in a server: its pauses are what the tail would show.
    """
    for arm in arms.values():
        for _ in range(200):
            arm()
    samples: Samples = {name: [] for name in arms}
    for _ in range(num_steps):
        for name, arm in arms.items():
            synchronize()
            started = perf_counter_ns()
            arm()
            samples[name].append((perf_counter_ns() - started) / 1000)
    synchronize()
    return samples


def tails() -> Sequence[Row]:
    heap = [[number] for number in range(NUM_OBJECTS)]
    ratios: list[float] = []
    told: dict[str, list[dict[str, float]]] = {}
    with (
        cuda_device() as device,
        small_runtime(device, (NUM_REQS,), observer=StepMetrics()) as (runtime, model),
    ):
        arms, reset = arms_of(runtime, model, device)
        for _ in range(ROUNDS):
            samples = host_times(arms, NUM_STEPS, device.synchronize)
            for name, figures in samples.items():
                shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
                told.setdefault(name, []).append(
                    {label: percentile(figures, share) for label, share in shares.items()}
                )
            ratios.append(told["step"][-1]["p99.9"] / told["step"][-1]["p50"])
        reset()
    assert len(heap) == NUM_OBJECTS, "alive to the end"
    return [
        row(
            "G12",
            ratios,
            target=1.5,
            unit="ratio",
            # Of the last round; to a hundredth of a microsecond, or the file would be all digits.
            samples={name: [round(us, 2) for us in figures] for name, figures in samples.items()},
            timed="host us of Runtime.step, collector on, device idle before; p99.9 over p50",
            num_steps=NUM_STEPS,
            num_objects=NUM_OBJECTS,
            # What the machine itself gives: the same ratio of the arm without a runtime.
            by_hand=statistics.median(
                figures["p99.9"] / figures["p50"] for figures in told["copies and bare replay"]
            ),
            rounds_us=told,
        )
    ]


CASES = [Case("G12", "p99.9 over p50 of host step time with a large heap", tails)]

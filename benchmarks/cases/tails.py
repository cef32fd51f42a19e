"""G12: the tail of host step time, in a process with a million live Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from benchmarks.baselines import hand_capture, poison, require_equal
from benchmarks.harness import Case, Row, Samples, cuda_device, percentile, ratio, rounds, row
from benchmarks.models import SmallModel, decode_key, small_runtime
from graphrt import BufferSet, Device, Runtime, RuntimeMode, StepMetrics

NUM_REQS = 8
NUM_OBJECTS = 1_000_000
NUM_STEPS = 10_000
ROUNDS = 5


def arms_of(
    runtime: Runtime, model: SmallModel, device: Device
) -> tuple[dict[str, Callable[[], object]], Callable[[], None]]:
    """A step of the runtime, and the same staging and a bare replay by hand, after a comparison."""
    values = model.inputs(NUM_REQS, seed=1)
    sizes = {"tokens": NUM_REQS, "requests": NUM_REQS}

    def step() -> object:
        return runtime.step(values, num_tokens=NUM_REQS, num_reqs=NUM_REQS, uniform=True)

    buffers = BufferSet(model.specs(), sizes, lambda _: sizes, device)
    bound = buffers.bind(decode_key(NUM_REQS))
    bound.stage(sizes, model.inputs(NUM_REQS, seed=2))
    hand = hand_capture(lambda: model(**bound.views), device)

    def by_hand() -> object:
        bound.stage(sizes, values)
        hand.replay()
        return hand.outputs

    poison(hand.outputs)
    require_equal(by_hand(), step(), "G12")  # type: ignore[arg-type]
    mode = runtime.last_decision and runtime.last_decision.mode
    assert mode is RuntimeMode.FULL, "both arms replay one graph"
    return {"step": step, "by hand": by_hand}, hand.reset


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
    for name, arm in rounds(arms, num_steps):
        synchronize()
        started = perf_counter_ns()
        arm()
        samples[name].append((perf_counter_ns() - started) / 1000)
    synchronize()
    return samples


def tails() -> Sequence[Row]:
    heap = [[number] for number in range(NUM_OBJECTS)]
    over_median: Samples = {}
    rounds_us: dict[str, list[dict[str, float]]] = {}
    with (
        cuda_device() as device,
        small_runtime(device, (NUM_REQS,), observer=StepMetrics()) as (runtime, model),
    ):
        arms, reset = arms_of(runtime, model, device)
        for _ in range(ROUNDS):
            samples = host_times(arms, NUM_STEPS, device.synchronize)
            for name, figures in samples.items():
                shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
                found = {label: percentile(figures, share) for label, share in shares.items()}
                rounds_us.setdefault(name, []).append(found)
                over_median.setdefault(name, []).append(found["p99.9"] / found["p50"])
        reset()
    assert len(heap) == NUM_OBJECTS, "alive to the end"
    return [
        row(
            "G12",
            ratio(over_median, "step", "by hand"),
            target=1.05,
            unit="ratio",
            # Of the last round; to a hundredth of a microsecond, or the file would be all digits.
            samples={name: [round(us, 2) for us in figures] for name, figures in samples.items()},
            timed="p99.9 over p50 of the host us of Runtime.step, over the same ratio of the same"
            " staging and a bare replay by hand; steps alternate, collector on, device idle before",
            num_steps=NUM_STEPS,
            num_objects=NUM_OBJECTS,
            p999_over_p50=over_median,
            rounds_us=rounds_us,
        )
    ]


CASES = [Case("G12", "tail of host step time with a large heap, over that by hand", tails)]

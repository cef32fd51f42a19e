"""G9: the mode that dispatch chooses is never slower than another, for any captured key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.baselines import require_equal
from benchmarks.harness import Case, Row, Samples, cuda_device, medians, row, time_wall
from benchmarks.models import SmallModel, small_runtime
from graphrt import BatchDescriptor, Runtime, RuntimeMode

SIZES = (1, 8, 32, 128, 512)
EXCLUDED = (
    frozenset[RuntimeMode](),
    frozenset({RuntimeMode.FULL}),
    frozenset({RuntimeMode.FULL, RuntimeMode.PIECEWISE}),
)


class KeyArms(NamedTuple):
    """Steps that fill one captured key, by the mode that serves them; dispatch chose ``chosen``."""

    key: BatchDescriptor
    chosen: str
    arms: dict[str, Callable[[], object]]


def arms_of(runtime: Runtime, model: SmallModel, key: BatchDescriptor) -> KeyArms:
    """The modes that can serve a batch of exactly this key; their outputs were compared."""
    step = partial(
        runtime.step,
        model.inputs(key.num_tokens),
        num_tokens=key.num_tokens,
        num_reqs=key.num_tokens if key.uniform else 1,
        uniform=key.uniform,
    )
    arms: dict[str, Callable[[], object]] = {}
    chosen, expected = "", torch.empty(0)
    for exclude in EXCLUDED:
        output = step(exclude=exclude).clone()
        decision = runtime.last_decision
        assert decision is not None, "a step leaves its decision"
        mode = decision.mode.name
        if not chosen:
            chosen, expected = mode, output
        require_equal(output, expected, f"G9 {key}, {mode}")
        arms.setdefault(mode, partial(step, exclude=exclude))
    return KeyArms(key, chosen, arms)


def never_slower() -> Sequence[Row]:
    samples: Samples = {}
    worst: list[float] = [0.0]
    by_key: dict[str, dict[str, float | str]] = {}
    with cuda_device() as device, small_runtime(device, SIZES) as (runtime, model):
        for _, key in runtime.plan.capture_order:
            _, chosen, arms = arms_of(runtime, model, key)
            found = time_wall(
                arms, blocks=11, repeats=20, synchronize=device.synchronize, each=True
            )
            typical = medians(found)
            best = min(typical, key=lambda mode: typical[mode])
            ratios = [a / b for a, b in zip(found[chosen], found[best], strict=True)]
            name = f"{'decode' if key.uniform else 'mixed'} {key.num_tokens}"
            by_key[name] = {"chosen": chosen, "best": best, **typical}
            samples |= {f"{name}, {mode}": figures for mode, figures in found.items()}
            worst = max(worst, ratios, key=lambda values: sorted(values)[len(values) // 2])
    return [
        row(
            "G9",
            worst,
            target=1.02,
            unit="ratio",
            samples=samples,
            timed="ms of wall clock of a step of exactly the key's size; the worst key's ratio",
            by_key=by_key,
        )
    ]


CASES = [Case("G9", "chosen mode over the best mode, worst captured key", never_slower)]

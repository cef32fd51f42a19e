"""C-dispatch: one look-up, against an empty method that takes the same arguments."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Case, Row, difference, ratio, row, time_host
from graphrt.batch import RuntimeMode
from graphrt.config import CompilationConfig, Facts, RuntimeConfig, resolve
from graphrt.dispatch import CUDAGraphDispatcher

INNER = 1000


class Empty:
    """What a call costs when nothing is decided."""

    def dispatch(
        self,
        num_tokens: int,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = frozenset(),
        num_ubatches: int = 1,
    ) -> None:
        return None


def lookups() -> Sequence[Row]:
    plan = resolve(RuntimeConfig(), Facts()).plan
    dispatcher = CUDAGraphDispatcher(plan)
    assert dispatcher.dispatch(3, True).descriptor.num_tokens == 4

    # The timed region is a loop of INNER calls; an empty loop of the same length is subtracted.
    def hit() -> None:
        call = dispatcher.dispatch
        for _ in range(INNER):
            call(77, True)

    # As Runtime.step calls it: all by position, with the caller's own empty set.
    def as_a_step() -> None:
        call = dispatcher.dispatch
        for _ in range(INNER):
            call(77, True, 0, frozenset())

    def fresh_set() -> None:
        for _ in range(INNER):
            frozenset()  # noqa: B018

    def empty() -> None:
        call = Empty().dispatch
        for _ in range(INNER):
            call(77, True)

    def held() -> None:
        held_row = [dispatcher.dispatch(num_tokens, True) for num_tokens in range(78)]
        for _ in range(INNER):
            held_row[77]

    def loop() -> None:
        for _ in range(INNER):
            pass

    arms = {
        "dispatch": hit,
        "as a step": as_a_step,
        "fresh empty set": fresh_set,
        "empty method": empty,
        "held row": held,
        "loop": loop,
    }
    samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
    net = {
        name: difference(samples, name, "loop") for name in ("dispatch", "empty method", "held row")
    }
    net["as a step"] = difference(samples, "as a step", "fresh empty set")
    us = {name: [value / 1000 for value in values] for name, values in net.items()}
    config = {
        "num_sizes": len(plan.capture_sizes),
        "timed": f"{INNER} calls in a loop, less the loop",
    }
    return [
        row("C-dispatch-hit", us["dispatch"], target=0.12, unit="us", samples=samples, **config),
        row(
            "C-dispatch-step",
            us["as a step"],
            target=0.12,
            unit="us",
            samples=samples,
            num_sizes=len(plan.capture_sizes),
            timed=f"{INNER} calls dispatch(77, True, 0, frozenset()), less making that set",
        ),
        row(
            "C-dispatch-ratio",
            ratio(net, "dispatch", "empty method"),
            target=3.0,
            unit="ratio",
            samples=samples,
            **config,
        ),
        row("C-dispatch-row", us["held row"], target=0.01, unit="us", samples=samples, **config),
    ]


def planning() -> Sequence[Row]:
    config = RuntimeConfig(compilation=CompilationConfig(), max_loras=10, lora_capture="each")

    def build() -> None:
        CUDAGraphDispatcher(resolve(config, Facts()).plan)

    plan = resolve(config, Facts()).plan
    samples = time_host({"resolve and build": build}, block_ms=100)
    ms = [value / 1e6 for value in samples["resolve and build"]]
    return [
        row(
            "C-dispatch-plan",
            ms,
            target=50.0,
            unit="ms",
            samples=samples,
            num_sizes=len(plan.capture_sizes),
            num_keys={mode.name: len(keys) for mode, keys in plan.keys.items()},
        )
    ]


CASES = [
    Case("C-dispatch", "dispatch() and a held row, against an empty method", lookups),
    Case("C-dispatch-plan", "resolve and build the tables, 51 sizes x 11 LoRA cases", planning),
]

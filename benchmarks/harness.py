"""One harness: arms interleaved in blocks, medians with spread, rows in one form.

A case compares its outputs before it times anything and says what the timed region holds. A figure
is a ratio or a difference inside one run; the samples of every arm are kept beside it.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

BLOCKS = 9
"""Interleaved blocks of a comparison; the median of an odd number is a sample."""

REPOSITORY = Path(__file__).resolve().parent.parent


class CannotRunError(Exception):
    """The case needs something this machine does not have. It writes no row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure: the form of results on disk, field by field."""

    metric: str
    value: float
    target: float
    unit: str
    higher_is_better: bool = False
    spread: tuple[float, float]
    config: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def is_reached(self) -> bool:
        return self.value >= self.target if self.higher_is_better else self.value <= self.target


@dataclass(frozen=True, slots=True)
class Case:
    """A numbered case. ``run`` returns one row a figure, or raises ``CannotRunError``."""

    number: str
    title: str
    run: Callable[[], Sequence[Row]]


@contextmanager
def quiet() -> Iterator[None]:
    """No collection while timing: a pause would land in whichever arm is running."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def time_host(
    arms: Mapping[str, Callable[[], object]],
    *,
    blocks: int = BLOCKS,
    block_ms: float = 20.0,
    per_call: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Host nanoseconds a call of each arm, one figure a block, arms interleaved.

    ``per_call``: how many repetitions one call of an arm stands for (an arm that loops inside).
    """
    repeats: dict[str, int] = {}
    with quiet():
        for name, arm in arms.items():
            arm()
            started = perf_counter_ns()
            arm()
            once = max(perf_counter_ns() - started, 50)
            repeats[name] = max(1, int(block_ms * 1e6 / once))
            for _ in range(min(repeats[name], 200)):
                arm()
        samples: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(blocks):
            for name, arm in arms.items():
                count = range(repeats[name])
                started = perf_counter_ns()
                for _ in count:
                    arm()
                elapsed = perf_counter_ns() - started
                inner = (per_call or {}).get(name, 1)
                samples[name].append(elapsed / repeats[name] / inner)
    return samples


def time_gpu(
    arms: Mapping[str, Callable[[], object]],
    *,
    blocks: int = BLOCKS,
    repeats: int = 50,
    warmup: int = 10,
) -> dict[str, list[float]]:
    """GPU milliseconds a call of each arm by device events, one figure a block, interleaved."""
    for arm in arms.values():
        for _ in range(warmup):
            arm()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in arms}
    with quiet():
        for _ in range(blocks):
            for name, arm in arms.items():
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                start.record()
                for _ in range(repeats):
                    arm()
                end.record()
                torch.cuda.synchronize()
                samples[name].append(start.elapsed_time(end) / repeats)
    return samples


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """``over / under`` block by block: both were measured next to each other."""
    return [a / b for a, b in zip(samples[over], samples[under], strict=True)]


def difference(samples: Mapping[str, Sequence[float]], of: str, less: str) -> list[float]:
    """``of - less`` block by block."""
    return [a - b for a, b in zip(samples[of], samples[less], strict=True)]


def row(
    metric: str,
    values: Sequence[float],
    *,
    target: float,
    unit: str,
    samples: Mapping[str, Sequence[float]],
    higher_is_better: bool = False,
    **config: Any,
) -> Row:
    """A row whose value is the median of ``values`` and whose spread is their extremes."""
    return Row(
        metric=metric,
        value=statistics.median(values),
        target=target,
        unit=unit,
        higher_is_better=higher_is_better,
        spread=(min(values), max(values)),
        config=config,
        samples={name: list(figures) for name, figures in samples.items()},
    )


def machine() -> dict[str, str]:
    """What a result must carry: device, torch, commit (and whether the tree was clean)."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"CPU {platform.machine()}, {torch.get_num_threads()} thread(s)"
    return {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def as_json(rows: Sequence[Row]) -> str:
    """Rows with the machine they ran on, as the results are kept."""
    where = machine()
    return json.dumps([asdict(item) | where for item in rows], indent=1) + "\n"

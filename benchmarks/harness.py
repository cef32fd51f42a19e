"""One harness: arms interleaved in blocks, medians with spread, rows in one form.

A case compares its outputs before it times anything and says what the timed region holds. A figure
is a ratio or a difference inside one run; the samples of every arm are kept beside it.

torch is imported where something is measured: rows, tables and comparisons need none.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt import Device

BLOCKS = 9
"""Interleaved blocks of a comparison; the median of an odd number is a sample."""

SLICES = 5
"""Of a block of host time."""

REPOSITORY = Path(__file__).resolve().parent.parent

Arms = Mapping[str, Callable[[], object]]
Samples = dict[str, list[float]]
"""Arm -> one figure a block."""


class CannotRunError(Exception):
    """The case needs something this machine does not have. It writes no row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure: the form of results on disk, field by field."""

    metric: str
    value: float
    target: float | None
    """None: a price that is told, and that nothing bounds."""
    unit: str
    higher_is_better: bool = False
    spread: tuple[float, float]
    config: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def is_reached(self) -> bool:
        if self.target is None:
            return True
        return self.value >= self.target if self.higher_is_better else self.value <= self.target


@dataclass(frozen=True, slots=True)
class Case:
    """A numbered case. ``run`` gives one row a figure, perhaps one by one, or raises
    ``CannotRunError``."""

    number: str
    title: str
    run: Callable[[], Iterable[Row]]


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


def rounds(arms: Arms, blocks: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each arm once a block, every second block backwards: a drift then favours no arm."""
    items = list(arms.items())
    for block in range(blocks):
        yield from items if block % 2 == 0 else reversed(items)


def time_host(
    arms: Arms,
    *,
    blocks: int = BLOCKS,
    block_ms: float = 20.0,
    per_call: Mapping[str, int] | None = None,
) -> Samples:
    """Host nanoseconds a call of each arm, one figure a block, arms interleaved.

    A block is cut into slices and the fastest counts, for every arm alike: on a machine that others
    use too, the slower ones tell what somebody else took.

    ``per_call``: how many repetitions one call of an arm stands for (an arm that loops inside).
    For arms that launch device work use ``time_launch``: a full queue would make the host wait.
    """
    repeats: dict[str, int] = {}
    samples: Samples = {name: [] for name in arms}
    with quiet():
        for name, arm in arms.items():
            arm()
            started = perf_counter_ns()
            arm()
            once = max(perf_counter_ns() - started, 50)
            repeats[name] = max(1, int(block_ms * 1e6 / SLICES / once))
            for _ in range(min(repeats[name], 200)):
                arm()
        for name, arm in rounds(arms, blocks):
            count = range(repeats[name])
            slices = []
            for _ in range(SLICES):
                started = perf_counter_ns()
                for _ in count:
                    arm()
                slices.append(perf_counter_ns() - started)
            inner = (per_call or {}).get(name, 1)
            samples[name].append(min(slices) / repeats[name] / inner)
    return samples


def time_launch(
    arms: Arms,
    *,
    launches: int = 32,
    bursts: int = 5,
    blocks: int = BLOCKS,
    synchronize: Callable[[], object],
) -> Samples:
    """Host nanoseconds that each arm takes to *launch* its work, one figure a block.

    The device is idle when a burst begins and the queue never fills, so nothing waits for it. The
    figure of a block is the median of its bursts.
    """
    for arm in arms.values():
        for _ in range(launches):
            arm()
        synchronize()
    samples: Samples = {name: [] for name in arms}
    with quiet():
        for name, arm in rounds(arms, blocks):
            figures = []
            for _ in range(bursts):
                synchronize()
                started = perf_counter_ns()
                for _ in range(launches):
                    arm()
                figures.append((perf_counter_ns() - started) / launches)
            synchronize()
            samples[name].append(statistics.median(figures))
    return samples


def time_gpu(
    arms: Arms,
    *,
    blocks: int = BLOCKS,
    repeats: int = 50,
    warmup: int = 10,
    head_start_us: float = 0.0,
) -> Samples:
    """GPU milliseconds a call of each arm by device events, one figure a block, interleaved.

    ``head_start_us``: keep the GPU busy that long before the first event, so that all launches of a
    block are queued when it begins and the figure is the device's work, however slow the host. At
    most some hundred launches fit the queue. 0: what a host that keeps launching gets.
    """
    import torch

    for arm in arms.values():
        for _ in range(warmup):
            arm()
    torch.cuda.synchronize()
    samples: Samples = {name: [] for name in arms}
    with quiet():
        for name, arm in rounds(arms, blocks):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            if head_start_us:
                torch.cuda._sleep(int(head_start_us * 2000))  # Cycles, at about 2 GHz.
            start.record()
            for _ in range(repeats):
                arm()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) / repeats)
    return samples


def time_wall(
    arms: Arms,
    *,
    blocks: int = BLOCKS,
    repeats: int = 20,
    warmup: int = 5,
    synchronize: Callable[[], object],
    each: bool = False,
    before: Callable[[], object] | None = None,
) -> Samples:
    """Milliseconds of wall clock a call of each arm, one figure a block, interleaved.

    Host and device together: ``synchronize`` ends a block, or with ``each`` every call, as a loop
    that reads its result back does. ``before`` runs ahead of each block, outside the clock.
    """
    wait = synchronize if each else _nothing

    def block(arm: Callable[[], object], count: int) -> float:
        if before is not None:
            before()
        synchronize()
        started = perf_counter_ns()
        for _ in range(count):
            arm()
            wait()
        synchronize()
        return (perf_counter_ns() - started) / 1e6 / count

    for arm in arms.values():
        block(arm, warmup)
    samples: Samples = {name: [] for name in arms}
    with quiet():
        for name, arm in rounds(arms, blocks):
            samples[name].append(block(arm, repeats))
    return samples


def _nothing() -> None:
    return None


def ratio(samples: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """``over / under`` block by block: both were measured next to each other."""
    return [a / b for a, b in zip(samples[over], samples[under], strict=True)]


def difference(samples: Mapping[str, Sequence[float]], of: str, less: str) -> list[float]:
    """``of - less`` block by block."""
    return [a - b for a, b in zip(samples[of], samples[less], strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each arm, for a row's config: what a reader wants beside a ratio."""
    return {name: statistics.median(values) for name, values in samples.items()}


def row(
    metric: str,
    values: Sequence[float],
    *,
    target: float | None,
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


def need_bytecode() -> None:
    """Errors: ``CannotRunError`` where Python writes none: each start compiles its imports anew."""
    if sys.dont_write_bytecode:
        raise CannotRunError(
            "it needs bytecode: unset PYTHONDONTWRITEBYTECODE, and set PYTHONPYCACHEPREFIX to a "
            "folder where installed packages have none"
        )


@contextmanager
def cuda_device() -> Iterator[Device]:
    """A CUDA device of graphrt, closed at the end. Errors: ``CannotRunError`` without a GPU."""
    import torch

    from graphrt import make_device

    if not torch.cuda.is_available():
        raise CannotRunError(f"it needs a CUDA device, and torch {torch.__version__} sees none")
    device = make_device("cuda")
    try:
        yield device
    finally:
        device.close()


def machine(commit: str | None = None) -> dict[str, str]:
    """What a result must carry: device and host, driver, torch, python, commit (and changes to it).

    ``commit``: what to record where the tree is a copy without its history.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    host = f"{_processor()}, {torch.get_num_threads()} thread(s)"
    return {
        "device": torch.cuda.get_device_name() if has_gpu else host,
        "host": host,
        "driver": _driver() if has_gpu else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or _commit(),
    }


def _processor() -> str:
    """The model and number of CPUs, where Linux tells; else their architecture."""
    name = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"CPU {name} x {os.cpu_count()}"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:  # Without the tool the result says so; it is not worth losing the figures for.
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def as_json(rows: Sequence[Row], where: Mapping[str, str]) -> str:
    """Rows with the machine they ran on, as results are kept: samples on one line an arm."""
    texts = (_row_as_json(asdict(item) | dict(_place(item, where))) for item in rows)
    return "[" + ",".join(f"\n {text}" for text in texts) + "\n]\n"


def _place(item: Row, where: Mapping[str, str]) -> Mapping[str, str]:
    """A CPU case ran on the host, whatever else is in the machine."""
    is_of_cpu = item.metric.startswith("C-") and "host" in where
    return {**where, "device": where["host"]} if is_of_cpu else where


def _row_as_json(fields: Mapping[str, Any]) -> str:
    lines = []
    for name, value in fields.items():
        text = json.dumps(value)
        if name == "samples":
            arms = (
                f"\n   {json.dumps(arm)}: {json.dumps(figures)}" for arm, figures in value.items()
            )
            text = "{" + ",".join(arms) + "}"
        lines.append(f'"{name}": {text}')
    return "{" + ",\n  ".join(lines) + "}"

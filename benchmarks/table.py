"""The table of targets in ``README.md``, made from the kept results. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
RESULTS = HERE / "results"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


class Target(NamedTuple):
    number: str
    what: str
    target: str


TARGETS = (
    Target(
        "G1",
        "replay through the library over a bare `CUDAGraph.replay()`, 10 / 100 / 1000 nodes",
        "GPU <= 1.005x, host <= 1.5x",
    ),
    Target(
        "G2",
        "PIECEWISE (breaks, no compiler) over FULL, 0.6B shape, 1 request, default settings;"
        " host time of the program over its GPU time",
        "<= 1.10x; <= 0.6x",
    ),
    Target(
        "G3",
        "FULL_AND_PIECEWISE engine step over vLLM's on one shape, 1 / 16 / 64 / 200 requests",
        "0.6B <= 0.80x, 8B <= 0.95x",
    ),
    Target(
        "G3-serve",
        "tokens/s over vLLM's: the first 300 requests of the Azure trace queued at once; prefill of"
        " 64 x 1024 tokens, 0.6B and 8B; share of equal tokens in all modes; ms of decode steps",
        ">= 1.2x; >= 1.0x; 1; 8B at 16 <= 4.82, 0.6B at 1 / 16 / 64 / 200"
        " <= 0.89 / 1.30 / 1.75 / 2.75",
    ),
    Target("G4", "decode step over the time to read its weights, 8B shape, 1 request", "<= 1.20x"),
    Target(
        "G5",
        "start to first graphed token, no compiler, weights excluded, context 2048; also comparing"
        " padded batches; at context 4352 over the first; by priority over it",
        "<= 3 s; <= 1.1x or 3 s; <= 1.1x; <= 10 %",
    ),
    Target(
        "G5-cold",
        "start in a new process to the first graphed token, nothing cached; caches warm; every key"
        " captured, context 2048; at context 4352 over that",
        "<= 10 s; <= 1 s; <= 3 s; <= 1.1x",
    ),
    Target(
        "G6",
        "capture time per graph over one eager forward; with 1,000,000 live objects over without",
        "<= 1.5x; <= 1.2x",
    ),
    Target("G7", "input staging + replay over replay, 8 inputs, 1 request", "<= 1.03x"),
    Target(
        "G8",
        "graph memory per extra size over its executable bytes; pool growth for smaller sizes;"
        " share named of what a start takes from the driver; s of reading memory over a start",
        "<= 1.05x; 0; >= 0.95; <= 1 %",
    ),
    Target("G9", "chosen mode over the best of all modes, for each captured key", "<= 1.02x"),
    Target(
        "G10",
        'over `torch.compile(mode="reduce-overhead")`, HF Llama and Qwen3 decode: step, cold start;'
        " captures after the start when shapes vary",
        "<= 0.75x, <= 0.2x; 0",
    ),
    Target("G11", "overlap efficiency of two micro-batches on 2 GPUs", ">= 0.85"),
    Target(
        "G12",
        "p99.9 over p50 of host step time, 10,000 steps, 1,000,000-object heap, over the same"
        " ratio by hand",
        "<= 1.05x",
    ),
    Target(
        "C-dispatch",
        "one look-up, also as a step calls it; over an empty method; a held row; resolve and build"
        " the tables",
        "<= 0.12 us; <= 3x; <= 0.01 us; <= 50 ms",
    ),
    Target(
        "C-step",
        "a whole `Runtime.step` over a stub replay over the same parts called by hand; what"
        " looking for replaced weights adds to it",
        "<= 1.15x; <= 0.6 us",
    ),
    Target(
        "C-wrapper",
        "context + wrapper call over a stub replay; stale check per tensor",
        "<= 1.0 us; <= 10 ns",
    ),
    Target(
        "C-program",
        "PIECEWISE program over its callables, per segment; an eager segment whose result is"
        " copied, over its function",
        "<= 60 ns; <= 1.5 us",
    ),
    Target(
        "C-replay",
        "CPU replay of a 4-layer Llama decode over eager: not slower",
        "<= 1.0x",
    ),
    Target("C-agreement", "rank agreement over one all-reduce; 8 messages reduced", "<= 0.65x"),
    Target("C-ubatch", "hand-over between micro-batches over a bare ping-pong", "<= 1.3x"),
    Target("C-compile-entry", "entry of the stitched function, compared with Dynamo's guards", ""),
    Target(
        "C-compile-start",
        "the first result of a process that finds compiled code on disk, over one that compiles"
        " it with Inductor on the CPU: 4 layers, 32 layers; whole processes",
        "<= 0.25x; <= 0.30x",
    ),
)


class Result(NamedTuple):
    """The newest row of a metric, and the file it is in."""

    row: Mapping[str, Any]
    file: str


def newest(results: Path) -> dict[str, Result]:
    """Metric -> its row in the newest file that has it. File names begin with their date."""
    found: dict[str, Result] = {}
    for path in sorted(results.glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8")):
            found[row["metric"]] = Result(row, path.name)
    return found


def number_of(metric: str) -> str | None:
    """The number that a metric belongs to; None for one without a target."""
    numbers = [target.number for target in TARGETS if f"{metric}-".startswith(f"{target.number}-")]
    return max(numbers, key=len, default=None)


def render(results: Path) -> str:
    """The table as Markdown: one line a metric, or one that says it was not run."""
    latest = newest(results)
    lines = [
        "| # | what | target | metric | value | spread | reached | device, date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, what, target in TARGETS:
        metrics = [metric for metric in latest if number_of(metric) == number]
        if not metrics:
            lines.append(f"| {number} | {what} | {target} | | not run yet | | | |")
        head = f"{number} | {what} | {target}"
        for metric in sorted(metrics, key=_natural):
            lines.append(f"| {head} | {_figures(metric, latest[metric])} |")
            head = " | | "
    return "\n".join(lines) + "\n"


def _figures(metric: str, result: Result) -> str:
    row = result.row
    value, target, unit = row["value"], row["target"], row["unit"]
    bound = ">=" if row["higher_is_better"] else "<="
    low, high = row["spread"]
    suffix = "x" if unit == "ratio" else f" {unit}"
    if target is None:
        verdict = "no target"
    elif value >= target if row["higher_is_better"] else value <= target:
        verdict = "yes"
    else:
        verdict = f"**no** ({bound} {target:g})"
    date = "-".join(result.file.split("-")[:3])
    return (
        f"`{metric}` | {value:.4g}{suffix} | {low:.4g} to {high:.4g} | {verdict} | "
        f"{row['device']}, [{date}](results/{result.file})"
    )


def _natural(metric: str) -> list[tuple[int, str]]:
    """Sort 10 before 100 before 1000, and words by themselves."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in metric.split("-")]


def write_into_readme() -> None:
    text = README.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    README.write_text(head + BEGIN + render(RESULTS) + END + tail, encoding="utf-8")

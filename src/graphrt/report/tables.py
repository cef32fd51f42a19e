"""Tables of runs: once as text cells, for the page, and from those as ``rich`` renderables.

Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from graphrt.batch import MissReason, RuntimeMode
from graphrt.report.summary import PolicyRun, eager_reasons, summarize_runs

ABSENT = "-"

EXPLANATIONS = {
    MissReason.HIT: "a graph of exactly this size",
    MissReason.PADDED: "a graph of a larger size",
    MissReason.ABOVE_MAX: "the batch is larger than the largest captured size",
    MissReason.MODE_NONE: "the policy gives this kind of batch no graph",
    MissReason.EXCLUDED: "the caller excluded every mode that could have served it",
    MissReason.NO_KEY: "no key of the plan describes the batch",
    MissReason.LORA_NOT_CAPTURED: "no graph for this number of adapters",
    MissReason.NOT_CAPTURED_YET: "the graph is planned but not captured yet",
    MissReason.CAPTURE_FAILED: "the capture failed, or its program failed verification",
    MissReason.INVALIDATED: "a tensor that the graph reads has moved since its capture",
    MissReason.RANKS_DISAGREE: "the data-parallel ranks settled on a lesser mode",
    MissReason.UBATCH_ABORTED: "a split step was called off and no unsplit graph exists",
}
"""Every reason in words, for readers of a report."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """One line: a name and one cell for each column. ``is_part`` rows break up the one above."""

    name: str
    cells: tuple[str, ...]
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as text, before anyone decides what it looks like."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[TextRow, ...]
    note: str = ""
    is_numeric: bool = True
    """Cells are numbers: they align to the right."""


def comparison(runs: Sequence[PolicyRun]) -> TextTable:
    """What each run did with the same traffic: one column a run."""
    summaries = list(summarize_runs(runs).values())
    counts = [run.metrics.by_mode() for run in runs]
    totals = [run.metrics.total() for run in runs]
    reasons = eager_reasons(runs)
    modes = [
        mode
        for mode in sorted(RuntimeMode, reverse=True)
        if any(by_mode[mode].steps for by_mode in counts)
    ]

    def row(name: str, cells: Sequence[str], is_part: bool = False) -> TextRow:
        return TextRow(name, tuple(cells), is_part)

    rows = [row("steps", [f"{total.steps:,}" for total in totals])]
    for mode in modes:
        shares = [
            _share(by_mode[mode].steps, total.steps)
            for by_mode, total in zip(counts, totals, strict=True)
        ]
        rows.append(row(_mode_name(mode), shares, is_part=True))
    rows.append(row("tokens", [f"{total.num_tokens:,}" for total in totals]))
    for mode in modes:
        shares = [
            _share(by_mode[mode].num_tokens, total.num_tokens)
            for by_mode, total in zip(counts, totals, strict=True)
        ]
        rows.append(row(_mode_name(mode), shares, is_part=True))
    rows.append(row("padding", [f"{summary.padding_percent:.1f} %" for summary in summaries]))
    rows.append(
        row(
            "eager steps",
            [f"{summary.runtime_modes[RuntimeMode.NONE.name]:,}" for summary in summaries],
        )
    )
    for reason in reasons:
        cells = [_count(summary.miss_reasons.get(reason.name, 0)) for summary in summaries]
        rows.append(row(reason.name, cells, is_part=True))
    rows += [
        row("graphs", [_count(summary.num_graphs) for summary in summaries]),
        row("graph memory", [size_text(summary.graph_bytes) for summary in summaries]),
        row("capture", [seconds_text(summary.capture_seconds) for summary in summaries]),
        row("host time, median", [time_text(s.host_us_p50) for s in summaries]),
        row("p99", [time_text(s.host_us_p99) for s in summaries], is_part=True),
        row("step time, median", [time_text(s.step_us_p50) for s in summaries]),
        row("step time / NONE", [_ratio(s.step_time_ratio_to_none) for s in summaries]),
        row("serving", [seconds_text(summary.seconds) for summary in summaries]),
    ]
    return TextTable(
        title="The same traffic under each policy",
        columns=tuple(run.name for run in runs),
        rows=tuple(rows),
        note="Shares are of steps and of unpadded tokens. Host time: what the runtime takes for a "
        "step. Step time: until the step's results are on the host, scheduling and sampling "
        "included; its ratio to NONE is below 1 where the policy is faster.",
    )


def captures(runs: Sequence[PolicyRun]) -> TextTable:
    """What was captured for each policy and runtime mode, and what it cost: one row each."""
    rows = []
    for run in runs:
        for mode, totals in sorted(run.metrics.captures.items(), reverse=True):
            cells = (
                mode.name,
                f"{totals.programs:,}",
                f"{totals.graphs:,}",
                ABSENT if totals.nodes is None else f"{totals.nodes:,}",
                size_text(totals.graph_bytes),
                seconds_text(totals.seconds),
            )
            rows.append(TextRow(run.name, cells))
    return TextTable(
        title="Captures",
        columns=("mode", "programs", "graphs", "nodes", "memory", "seconds"),
        rows=tuple(rows),
        note="A program is what one key replays: one graph, or several with eager gaps between. "
        "Memory: pool, slots in it included, and executables.",
    )


def misses(runs: Sequence[PolicyRun]) -> TextTable:
    """Each reason for which a step of these runs was eager, in words."""
    rows = [TextRow(reason.name, (EXPLANATIONS[reason],)) for reason in eager_reasons(runs)]
    return TextTable(
        title="Why steps ran eager", columns=("meaning",), rows=tuple(rows), is_numeric=False
    )


def as_rich(grid: TextTable) -> Table:
    """The grid as a renderable for a ``rich`` console; 80 columns hold four policies."""
    table = Table(
        title=Text(grid.title, style="bold"),
        caption=Text(grid.note, style="dim") if grid.note else None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("", no_wrap=True)
    for column in grid.columns:
        table.add_column(Text(column), justify="right" if grid.is_numeric else "left")
    for row in grid.rows:
        name = Text(f"  {row.name}" if row.is_part else row.name, style="dim" * row.is_part)
        table.add_row(name, *map(Text, row.cells))
    return table


def comparison_table(runs: Sequence[PolicyRun]) -> Table:
    """``comparison`` for a terminal."""
    return as_rich(comparison(runs))


def capture_table(runs: Sequence[PolicyRun]) -> Table:
    """``captures`` for a terminal."""
    return as_rich(captures(runs))


def miss_table(runs: Sequence[PolicyRun]) -> Table:
    """``misses`` for a terminal."""
    return as_rich(misses(runs))


def size_text(num_bytes: int) -> str:
    """Binary units, three digits: ``1.50 MiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} B" if num_bytes else ABSENT
    size = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000 or unit == "GiB":
            break
    return f"{_three_digits(size)} {unit}"


def time_text(host_us: float | None) -> str:
    """Microseconds as a person reads them: ``87.1 us``, ``3.20 ms``."""
    if host_us is None:
        return ABSENT
    if host_us < 1e3:
        return f"{_three_digits(host_us)} us"
    if host_us < 1e6:
        return f"{_three_digits(host_us / 1e3)} ms"
    return f"{_three_digits(host_us / 1e6)} s"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds else ABSENT


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _mode_name(mode: RuntimeMode) -> str:
    return "NONE (eager)" if mode is RuntimeMode.NONE else mode.name


def _count(number: int) -> str:
    return f"{number:,}" if number else ABSENT


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if part else ABSENT


def _ratio(ratio: float | None) -> str:
    return ABSENT if ratio is None else f"{ratio:.2f}"

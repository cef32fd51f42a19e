"""Runs of one traffic under several policies, side by side: as numbers, and as tables of text.

A table is text cells first; the page and the terminal (``rich``) both show those. Quantiles of
times are estimates (see ``RELATIVE_ERROR``); everything else is exact. Nothing here prints.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any

from graphrt.batch import Reason, RuntimeMode
from graphrt.report.metrics import Histogram, Metrics

if TYPE_CHECKING:
    from rich.table import Table

BASELINE = "NONE"
"""The run that step times are compared with: the one in which every step is eager."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRun:
    """One policy's run: its name, what was counted, and how long it took.

    ``name``: Of the policy, as tables show it.
    ``metrics``: What was counted.
    ``capture_seconds``: Warm-ups, captures and first verified replays together.
    ``seconds``: Serving, without capture.
    ``step_us``: Time of whole steps in microseconds, until their results were on the host. Unlike
      host time it contains the device's work, which a GPU does after the runtime has returned.
    """

    name: str
    metrics: Metrics
    capture_seconds: float
    seconds: float
    step_us: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySummary:
    """The comparable numbers of one run. Field names are public: ``as_dict`` is a JSON contract."""

    steps: int
    runtime_modes: dict[str, int]
    """Steps by what they ran; they sum to ``steps``."""
    uniform_steps: dict[str, int]
    """The share of ``runtime_modes`` that were uniform decode batches."""
    tokens_by_runtime_mode: dict[str, int]
    """Without padding."""
    miss_reasons: dict[str, int]
    """Eager steps by reason; they sum to those of mode NONE."""
    split_steps: int
    """Steps that were split into micro-batches."""
    unsplit_reasons: dict[str, int]
    """Steps that were not, by reason; empty where the plan splits none."""
    padding_percent: float
    num_graphs: int
    capture_seconds: float
    graph_bytes: int
    memory_taken: dict[str, int]
    """What captures took from the device, in bytes by part."""
    host_us_p50: float | None
    """None, like all that follows from it, where no step ran."""
    host_us_p99: float | None
    step_us_p50: float | None
    step_time_ratio_to_none: float | None
    """Median step time over that of the baseline: below 1 is faster. None without a baseline."""
    seconds: float
    lora_steps: dict[str, dict[str, int]] = field(default_factory=dict)
    """Steps by live count of adapters, then by the captured one, or "eager"; empty without."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_runs(runs: Sequence[PolicyRun]) -> dict[str, PolicySummary]:
    """One summary for each run, by name and in order."""
    medians = {run.name: run.step_us.quantile(0.5) for run in runs}
    baseline = medians.get(BASELINE)
    return {run.name: _summary(run, medians[run.name], baseline) for run in runs}


def eager_reasons(runs: Sequence[PolicyRun]) -> list[Reason]:
    """Every reason for which any run had an eager step, most frequent first."""
    counts = Counter[Reason]()
    for run in runs:
        counts.update(run.metrics.miss_reasons())
    return [reason for reason, _ in counts.most_common()]


def _summary(run: PolicyRun, median: float | None, baseline: float | None) -> PolicySummary:
    metrics = run.metrics
    by_mode = sorted(metrics.by_mode().items(), reverse=True)
    captured = metrics.captures_of_all()
    lora_steps: dict[str, dict[str, int]] = {}
    for (live, served), counts in metrics.by_lora_count().items():
        by_captured = lora_steps.setdefault(str(live), {})
        by_captured["eager" if served is None else str(served)] = counts.steps
    return PolicySummary(
        steps=metrics.total().steps,
        runtime_modes={mode.name: counts.steps for mode, counts in by_mode},
        uniform_steps={mode.name: counts.uniform_steps for mode, counts in by_mode},
        tokens_by_runtime_mode={mode.name: counts.num_tokens for mode, counts in by_mode},
        miss_reasons={reason.name: steps for reason, steps in metrics.miss_reasons().items()},
        split_steps=metrics.split_steps,
        unsplit_reasons={why.name: steps for why, steps in metrics.unsplit_reasons.items()},
        padding_percent=metrics.total().padding_percent,
        num_graphs=captured.graphs,
        capture_seconds=run.capture_seconds,
        graph_bytes=captured.graph_bytes,
        memory_taken=metrics.memory_taken._asdict(),
        host_us_p50=metrics.host_us_of_all().quantile(0.5),
        host_us_p99=metrics.host_us_of_all().quantile(0.99),
        step_us_p50=median,
        step_time_ratio_to_none=median / baseline if median and baseline else None,
        seconds=run.seconds,
        lora_steps=lora_steps,
    )


ABSENT = "-"


@dataclass(frozen=True, slots=True)
class TextRow:
    """One line: a name and one cell for each column. ``is_part`` rows break up the one above.

    ``name``: The first cell.
    ``cells``: The others, one for each column.
    """

    name: str
    cells: tuple[str, ...]
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as text: ``print`` shows it plain, a ``rich`` console with its styles. 80 columns
    hold four policies.

    A narrower console gets long names on several lines: ``FULL_AND_`` above ``PIECEWISE``.

    ``title``: The heading.
    ``columns``: Names of the columns after the first.
    ``rows``: The lines.
    ``note``: What a reader has to know; below the table.
    ``is_numeric``: Cells are numbers: they align to the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[TextRow, ...]
    note: str = ""
    is_numeric: bool = True

    def __str__(self) -> str:
        """Plain text, each column as wide as its widest cell."""
        lines = [("", *self.columns)] if any(self.columns) else []
        lines += [("  " * row.is_part + row.name, *row.cells) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self.title, *(self._line(cells, widths) for cells in lines)]
        return "\n".join([*text, *(fill(self.note, 100).splitlines() if self.note else ())])

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [cells[0].ljust(widths[0])]
        for cell, width in zip(cells[1:], widths[1:], strict=True):
            padded.append(cell.rjust(width) if self.is_numeric else cell.ljust(width))
        return "  ".join(padded).rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Table]:
        # Imported where a table is printed: rich is slow to import.
        from rich.measure import Measurement

        table = self._as_rich(is_narrow=False)
        widest = Measurement.get(console, options.update(width=10_000), table).maximum
        yield table if widest <= options.max_width else self._as_rich(is_narrow=True)

    def _as_rich(self, *, is_narrow: bool) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(self.title, style="bold"),
            caption=Text(self.note, style="dim") if self.note else None,
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            padding=(0, 0 if is_narrow else 1),
            show_header=any(self.columns),
        )
        fitted = _in_lines if is_narrow else str
        table.add_column("", no_wrap=True)
        for number, column in enumerate(map(fitted, self.columns)):
            texts = (column, *(fitted(row.cells[number]) for row in self.rows))
            longest = max(len(word) for text in texts for word in (text.split() or [""]))
            table.add_column(
                Text(column),
                justify="right" if self.is_numeric else "left",
                overflow="fold",
                # The name of a mode is never cut or broken; a path may be.
                min_width=min(longest, len(RuntimeMode.PIECEWISE.name)),
            )
        for row in self.rows:
            name = f"  {row.name}" if row.is_part else fitted(row.name)
            cells = [Text(fitted(cell)) for cell in row.cells]
            table.add_row(Text(name, style="dim" * row.is_part), *cells)
        return table


def _in_lines(text: str) -> str:
    """``text`` with a line break after underscores, where a word of it is long."""
    return re.sub(r"\S{13,}", lambda word: word[0].replace("_", "_\n"), text)


def comparison_table(runs: Sequence[PolicyRun]) -> TextTable:
    """What each run did with the same traffic: one column a run."""
    summaries = list(summarize_runs(runs).values())
    rows: list[TextRow] = []

    def add(name: str, cells: Iterable[str], is_part: bool = False) -> None:
        rows.append(TextRow(name, tuple(cells), is_part))

    def add_with_shares(name: str, by_mode: Sequence[Mapping[str, int]]) -> None:
        add(name, (f"{sum(counts.values()):,}" for counts in by_mode))
        for mode in sorted(RuntimeMode, reverse=True):
            if any(summary.runtime_modes[mode.name] for summary in summaries):
                cells = [_share(counts[mode.name], sum(counts.values())) for counts in by_mode]
                add("NONE (eager)" if mode is RuntimeMode.NONE else mode.name, cells, is_part=True)

    add_with_shares("steps", [summary.runtime_modes for summary in summaries])
    add_with_shares("tokens", [summary.tokens_by_runtime_mode for summary in summaries])
    add("padding", (f"{summary.padding_percent:.1f} %" for summary in summaries))
    add("eager steps", (f"{summary.runtime_modes['NONE']:,}" for summary in summaries))
    for reason in eager_reasons(runs):
        cells = (_count(summary.miss_reasons.get(reason.name, 0)) for summary in summaries)
        add(reason.name, cells, is_part=True)
    unsplit = {name for summary in summaries for name in summary.unsplit_reasons}
    if unsplit or any(summary.split_steps for summary in summaries):
        add("split steps", (_count(summary.split_steps) for summary in summaries))
    for name in sorted(unsplit):
        cells = (_count(summary.unsplit_reasons.get(name, 0)) for summary in summaries)
        add(f"not split: {name}", cells, is_part=True)
    add("graphs", (_count(summary.num_graphs) for summary in summaries))
    add("graph memory", (size_text(summary.graph_bytes) for summary in summaries))
    add("capture", (_seconds(summary.capture_seconds) for summary in summaries))
    add("host time, median", (time_text(summary.host_us_p50) for summary in summaries))
    add("p99", (time_text(summary.host_us_p99) for summary in summaries), is_part=True)
    add("step time, median", (time_text(summary.step_us_p50) for summary in summaries))
    ratios = (summary.step_time_ratio_to_none for summary in summaries)
    add("step time / NONE", (ABSENT if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    add("serving", (_seconds(summary.seconds) for summary in summaries))
    return TextTable(
        title="The same traffic under each policy",
        columns=tuple(run.name for run in runs),
        rows=tuple(rows),
        note="Shares are of steps and of unpadded tokens. Host time: what the runtime takes for a "
        "step. Step time: until the step's results are on the host, scheduling and sampling "
        "included; its ratio to NONE is below 1 where the policy is faster.",
    )


def capture_table(runs: Sequence[PolicyRun]) -> TextTable:
    """What was captured for each policy and runtime mode, and its memory: one row each.

    Without times, because those of single captures leave out warm-ups and checks: the time of a
    whole capture is in ``comparison_table``.
    """
    rows = []
    for run in runs:
        for mode, totals in sorted(run.metrics.captures.items(), reverse=True):
            cells = (
                mode.name,
                f"{totals.programs:,}",
                f"{totals.graphs:,}",
                ABSENT if totals.nodes is None else f"{totals.nodes:,}",
                size_text(totals.graph_bytes),
            )
            rows.append(TextRow(run.name, cells))
    return TextTable(
        title="Captures",
        columns=("mode", "programs", "graphs", "nodes", "memory"),
        rows=tuple(rows),
        note="A program is what one key replays: one graph, or several with eager segments "
        "between. Memory: the pool, static outputs included, and executables.",
    )


def miss_table(runs: Sequence[PolicyRun]) -> TextTable:
    """Each reason for which a step of these runs was eager, in words."""
    rows = [TextRow(reason.name, (reason.meaning,)) for reason in eager_reasons(runs)]
    return TextTable(
        title="Why steps ran eager", columns=("meaning",), rows=tuple(rows), is_numeric=False
    )


def lora_table(runs: Sequence[PolicyRun]) -> TextTable:
    """How many adapters steps had, and the captured count that served them; no rows without."""
    rows = []
    for run in runs:
        for (live, captured), counts in run.metrics.by_lora_count().items():
            served = "eager" if captured is None else str(captured)
            cells = (str(live), served, f"{counts.steps:,}")
            rows.append(TextRow(run.name, cells))
    return TextTable(
        title="Adapters of a step",
        columns=("live", "captured", "steps"),
        rows=tuple(rows),
        note="A step is served by the smallest captured count that its adapters fit.",
    )


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


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds else ABSENT


def _count(number: int) -> str:
    return f"{number:,}" if number else ABSENT


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if part else ABSENT

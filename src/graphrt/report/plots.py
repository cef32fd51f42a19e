"""Plots of runs as SVG text: one panel a run, the same axes throughout, one colour a meaning.

Needs matplotlib, from the extra ``report``. Figures are built without pyplot, so no state of the
process changes but the style settings, for the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from math import log10
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from graphrt.batch import RuntimeMode
from graphrt.report.tables import PolicyRun, eager_reasons, time_text

MODE_COLORS = {
    RuntimeMode.FULL: "#0b5c8e",
    RuntimeMode.PIECEWISE: "#6fb3d9",
    RuntimeMode.NONE: "#e3a13b",
}
"""Blue is graph, amber is eager: they differ in lightness too."""

_INK = "#24292f"
_FAINT = "#8c959f"
_PADDING = "#c9d1d9"
_RUN_COLORS = ("#e3a13b", "#6fb3d9", "#3a9a6f", "#0b5c8e", "#b5608f", "#7a6fc0")

_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": _FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.size": 9,
    "grid.color": "#eaeef2",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "graphrt",
    "text.color": _INK,
    "xtick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.color": _FAINT,
    "ytick.labelcolor": _INK,
}

WIDE, NARROW = 9.6, 3.8
"""Inches: of a page, and of a telephone, where panels stand below each other."""


def tokens_over_time(runs: Sequence[PolicyRun], width: float = WIDE) -> str:
    """Unpadded tokens of each step, stacked by what the step ran; bins average over steps."""

    columns = 2 if width == WIDE else 1

    def draw(figure: Figure) -> None:
        panels = _panels(figure, len(runs), columns)
        for panel, run in zip(panels, runs, strict=True):
            series = run.metrics.series
            base = [0.0] * (len(series.edges) - 1)
            for mode, color in MODE_COLORS.items():
                means = series.tokens_per_step(mode)
                top = [below + mean for below, mean in zip(base, means, strict=True)]
                if any(means):
                    panel.stairs(
                        top,
                        series.edges,
                        baseline=base,
                        fill=True,
                        color=color,
                        linewidth=0,
                        label=mode.name,
                    )
                base = top
            panel.set_title(run.name)
        _label_outer(panels, "step", "tokens a step", columns)
        ran = {kind.mode for run in runs for kind in run.metrics.steps}
        modes = [mode for mode in MODE_COLORS if mode in ran]
        names = ["NONE (eager)" if mode is RuntimeMode.NONE else mode.name for mode in modes]
        _legend(figure, [Patch(color=MODE_COLORS[mode], linewidth=0) for mode in modes], names)

    return _svg(draw, width, height=1.1 + 1.75 * _rows(len(runs), columns))


def padding_by_size(runs: Sequence[PolicyRun], width: float = WIDE) -> str:
    """Tokens that each captured size carried, and what it added to fill up."""

    columns = 3 if width == WIDE else 1
    counted = [(run.name, run.metrics.by_captured_size()) for run in runs]
    counted = [(name, by_size) for name, by_size in counted if by_size]
    sizes = sorted({size for _, by_size in counted for size in by_size})

    def draw(figure: Figure) -> None:
        panels = _panels(figure, len(counted), columns)
        for panel, (name, by_size) in zip(panels, counted, strict=True):
            places = [sizes.index(size) for size in by_size]
            real = [counts.num_tokens for counts in by_size.values()]
            added = [counts.num_padded_tokens - counts.num_tokens for counts in by_size.values()]
            panel.bar(places, real, width=0.7, color=MODE_COLORS[RuntimeMode.FULL], label="tokens")
            panel.bar(places, added, width=0.7, bottom=real, color=_PADDING, label="padding")
            panel.set_title(name)
            panel.set_xticks(range(len(sizes)), [str(size) for size in sizes])
            if len(sizes) > 8:
                panel.tick_params(axis="x", labelrotation=90, labelsize=8)
        _label_outer(panels, "captured size (tokens)", "tokens", columns)
        _legend(figure, *panels[0].get_legend_handles_labels())

    return _svg(draw, width, height=0.8 + 1.9 * _rows(len(counted), columns))


def miss_reasons(runs: Sequence[PolicyRun], width: float = WIDE) -> str:
    """Eager steps by reason, for each run."""
    reasons = eager_reasons(runs)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        height = 0.8 / max(1, len(runs))
        for row, run in enumerate(runs):
            counts = run.metrics.miss_reasons()
            shown = [counts.get(reason, 0) for reason in reasons]
            places = [place + row * height for place in range(len(reasons))]
            bars = axes.barh(
                places, shown, height=0.86 * height, color=_color_of(run, runs), label=run.name
            )
            labels = [f"{count:,}" if count else "" for count in shown]
            axes.bar_label(bars, labels, padding=3, fontsize=8, color=_INK)
        middle = 0.4 - height / 2
        axes.set_yticks(
            [place + middle for place in range(len(reasons))], [r.name for r in reasons]
        )
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.margins(x=0.08)
        axes.set_xlabel("eager steps")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, *axes.get_legend_handles_labels())

    return _svg(draw, width, height=1.2 + 0.22 * max(1, len(reasons)) * (len(runs) + 1))


def host_times(runs: Sequence[PolicyRun], width: float = WIDE) -> str:
    """Distribution of host time a step, on one logarithmic axis, with each run's median."""

    def draw(figure: Figure) -> None:
        timed = [run for run in runs if run.metrics.host_us]
        panels = _panels(figure, len(timed), 1, shares_y=False)
        histograms = [run.metrics.host_us_of_all() for run in timed]
        bounds = [edge for histogram in histograms for edge in histogram.bars()[0]]
        # More labels would run into each other.
        is_long = bool(bounds) and log10(max(bounds) / min(bounds)) > width / 2
        for panel, run, histogram in zip(panels, timed, histograms, strict=True):
            color = _color_of(run, runs)
            edges, shares = histogram.bars()
            panel.stairs(shares, edges, fill=True, color=color, alpha=0.85, linewidth=0)
            median, p99 = histogram.quantile(0.5), histogram.quantile(0.99)
            assert median is not None, "a run with host times has a median"
            panel.axvline(median, color=_INK, linewidth=1)
            below = "   " if width == WIDE else "\n"
            panel.set_title(f"{run.name}{below}median {time_text(median)}, p99 {time_text(p99)}")
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1,) if is_long else (1, 2, 5)))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_yticks([])
            panel.spines["left"].set_visible(False)
        panels[-1].set_xlabel("host time a step (logarithmic)")
        figure.supylabel("share of steps", fontsize=9)

    each = 1.05 if width == WIDE else 1.25
    return _svg(draw, width, height=0.9 + each * max(1, len(runs)))


def _svg(draw: Callable[[Figure], None], width: float, height: float) -> str:
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        text = StringIO()
        # Without the metadata the same numbers give the same bytes.
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _rows(count: int, columns: int) -> int:
    return max(1, -(-count // columns))


def _panels(figure: Figure, count: int, columns: int, shares_y: bool = True) -> list[Axes]:
    """``count`` panels, one or more, with the same axes, row by row; one fills the width."""
    columns = min(columns, count)
    rows = _rows(count, columns)
    grid = figure.subplots(rows, columns, sharex=True, sharey=shares_y, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    for spare in panels[count:]:
        spare.remove()
    return panels[:count]


def _label_outer(panels: Sequence[Axes], x: str, y: str, columns: int) -> None:
    for number, panel in enumerate(panels):
        if number + columns >= len(panels):
            panel.set_xlabel(x)
            panel.tick_params(labelbottom=True)
        if number % columns == 0:
            panel.set_ylabel(y)


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    if handles:
        columns = len(labels) if figure.get_figwidth() == WIDE else 2
        figure.legend(handles, labels, loc="outside upper right", ncols=columns, fontsize=8.5)


def _color_of(run: PolicyRun, runs: Sequence[PolicyRun]) -> str:
    names = [each.name for each in runs]
    return _RUN_COLORS[names.index(run.name) % len(_RUN_COLORS)]


def _tick(host_us: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms"), (1, "us")):
        if host_us >= size:
            return f"{host_us / size:g} {unit}"
    return f"{host_us * 1e3:g} ns"

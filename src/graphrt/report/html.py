"""One self-contained HTML page about runs of one traffic: tables, plots, configuration.

The page loads nothing: no script, no font, no link. Needs the extra ``report``.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from graphrt.errors import MissingExtraError
from graphrt.report import plots
from graphrt.report.page import ReportPage
from graphrt.report.summary import PolicyRun
from graphrt.report.tables import captures, comparison, misses

try:
    from jinja2 import Environment, StrictUndefined
except ImportError as error:
    raise MissingExtraError("the HTML report", extra="report", found=str(error)) from error


class Plot(NamedTuple):
    title: str
    caption: str
    data: str
    """SVG in base64: as an image of its own, its ids cannot meet those of another plot."""


def render_report(page: ReportPage) -> str:
    """The page as text."""
    template = files("graphrt.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    text = environment.from_string(template).render(
        page=page,
        comparison=comparison(page.runs),
        plots=list(_plots(page.runs)),
        tables=[misses(page.runs), captures(page.runs), *page.tables],
    )
    return text


def _plots(runs: Sequence[PolicyRun]) -> list[Plot]:
    shown = [
        (
            "Tokens by what each step ran",
            "Unpadded tokens a step, in the order of the steps. Long runs show averages of "
            "neighbouring steps.",
            plots.tokens_over_time,
            any(run.metrics.steps for run in runs),
        ),
        (
            "Host time a step",
            "How long the host was busy with a step, as shares of a run's steps. The dark line "
            "is the median.",
            plots.host_times,
            any(run.metrics.host_us for run in runs),
        ),
        (
            "Padding by captured size",
            "Tokens that each captured size carried, and the padding that filled it up. Eager "
            "steps have no padding and are not shown.",
            plots.padding_by_size,
            any(run.metrics.by_captured_size() for run in runs),
        ),
        (
            "Eager steps by reason",
            "A step that no graph serves always has a reason.",
            plots.miss_reasons,
            any(run.metrics.miss_reasons() for run in runs),
        ),
    ]
    return [
        Plot(title, caption, base64.b64encode(draw(runs).encode()).decode())
        for title, caption, draw, has_data in shown
        if has_data
    ]

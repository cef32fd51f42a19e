"""One self-contained HTML page about runs of one traffic: tables, plots, configuration.

The page loads nothing: no script, no font, no link. Needs the extra ``report``.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from graphrt.errors import MissingExtraError, ReportError
from graphrt.files import checked_path
from graphrt.report.tables import (
    PolicyRun,
    TextTable,
    capture_table,
    comparison_table,
    lora_table,
    miss_table,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportPage:
    """The contents of the page. All text is escaped.

    ``title``: The heading.
    ``lead``: What was run, on what, in a sentence or two.
    ``findings``: What a reader must not miss.
    ``runs``: What is compared: one column, panel or row for each.
    ``tables``: Further tables: configuration, plan, adjustments. Those without rows are left out.
    """

    title: str
    lead: str
    findings: Sequence[str] = ()
    runs: Sequence[PolicyRun]
    tables: Sequence[TextTable] = ()


class _Plot(NamedTuple):
    title: str
    caption: str
    wide: str
    """SVG in base64: as an image of its own, its ids cannot meet those of another plot."""
    narrow: str
    """The same for a narrow screen."""


def write_report(path: Path, page: ReportPage) -> Path:
    """Render ``page``, put it at ``path`` in one move, and return the path without links.

    Errors: ``ReportError`` where it cannot be written; what was at ``path`` is then untouched.
    ``MissingExtraError`` without matplotlib and jinja2.
    """
    place = check_report_path(path)
    text = render_report(page)
    # In the same folder, because only a move within one file system is atomic.
    unfinished = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
        unfinished.replace(place)
    except OSError as error:
        raise _not_writable(path, str(error)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return place


def check_report_path(path: Path) -> Path:
    """Return ``path`` without links if a report can be written there; for use before the work.

    Errors: ``ReportError``; ``MissingExtraError`` without matplotlib and jinja2.
    """
    _check_libraries()
    path = checked_path("report", path, ReportError)
    try:
        place = path.expanduser().resolve()
        if not place.parent.is_dir():
            found = f"no folder {place.parent}"
        # A device or pipe would be replaced by the move, not written to.
        elif place.exists() and not place.is_file():
            found = f"{place} is no regular file"
        elif not os.access(place.parent, os.W_OK | os.X_OK):
            found = f"no permission to write in {place.parent}"
        else:
            return place
    except (OSError, RuntimeError) as error:
        raise _not_writable(path, str(error)) from error
    raise _not_writable(path, found)


def render_report(page: ReportPage) -> str:
    """The page as text. Errors: ``MissingExtraError`` without matplotlib and jinja2."""
    _check_libraries()
    from jinja2 import Environment, StrictUndefined

    template = files("graphrt.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    text: str = environment.from_string(template).render(
        page=page,
        comparison=comparison_table(page.runs),
        plots=_plots(page.runs),
        tables=[
            miss_table(page.runs),
            lora_table(page.runs),
            capture_table(page.runs),
            *page.tables,
        ],
    )
    return text


def _check_libraries() -> None:
    try:
        import jinja2  # noqa: F401

        import graphrt.report.plots  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the HTML report", extra="report", found=str(error)) from error


def _plots(runs: Sequence[PolicyRun]) -> list[_Plot]:
    from graphrt.report import plots

    def encoded(svg: str) -> str:
        return base64.b64encode(svg.encode()).decode()

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
        _Plot(title, caption, encoded(draw(runs)), encoded(draw(runs, plots.NARROW)))
        for title, caption, draw, has_data in shown
        if has_data
    ]


def _not_writable(path: Path, found: str) -> ReportError:
    return ReportError(
        f"report {path}",
        expected="a path in a folder that exists and can be written to",
        found=found,
        do="name another file",
    )

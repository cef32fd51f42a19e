"""The report page: what it says, and how it gets to its path whole or not at all.

Needs the extra ``report`` when it is checked, rendered or written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphrt.errors import ReportError
from graphrt.report.summary import PolicyRun
from graphrt.report.tables import TextTable


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportPage:
    """What the page says. All text is escaped."""

    title: str
    lead: str
    """What was run, on what, in a sentence or two."""
    findings: Sequence[str] = ()
    """What a reader must not miss."""
    runs: Sequence[PolicyRun]
    tables: Sequence[TextTable] = ()
    """Further tables: configuration, plan, adjustments. Those without rows are left out."""


def write_report(path: Path, page: ReportPage) -> Path:
    """Render ``page``, put it at ``path`` in one move, and return the path it has now.

    Errors: ``ReportError`` where it cannot be written; what was at ``path`` is then untouched.
    ``MissingExtraError`` without matplotlib and jinja2.
    """
    from graphrt.report.html import render_report

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
    import graphrt.report.html  # noqa: F401  the libraries are missed here or nowhere

    try:
        place = path.expanduser().resolve()
        if not place.parent.is_dir():
            raise _not_writable(path, f"no folder {place.parent}")
        # A device or pipe would be replaced by the move, not written to.
        if place.exists() and not place.is_file():
            raise _not_writable(path, f"{place} is no regular file")
        if not os.access(place.parent, os.W_OK | os.X_OK):
            raise _not_writable(path, f"no permission to write in {place.parent}")
    except (OSError, RuntimeError) as error:
        if isinstance(error, ReportError):
            raise
        raise _not_writable(path, str(error)) from error
    return place


def _not_writable(path: Path, found: str) -> ReportError:
    return ReportError(
        f"report {path}",
        expected="a path in a folder that exists and can be written to",
        found=found,
        do="name another file",
    )

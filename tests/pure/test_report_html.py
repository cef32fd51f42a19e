"""The page: self-contained, escaped, whole or not there at all."""

from __future__ import annotations

import base64
import os
import re
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from hypothesis import example, given, settings, strategies as st
from report_events import RUNS, eager, run_of, steps

from graphrt import Event
from graphrt.errors import MissingExtraError, ReportError
from graphrt.report import (
    ReportPage,
    TextRow,
    TextTable,
    check_report_path,
    render_report,
    write_report,
)

EAGER = eager()
PAGE = ReportPage(title="A run", lead="Two policies.", runs=RUNS)
BARE = replace(PAGE, runs=[])
"""Without plots, which take most of the time."""


@cache
def rendered() -> str:
    return render_report(PAGE)


class Parts(HTMLParser):
    """Every tag with its attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "source"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def images(page: str, wanted: str = "img") -> list[ElementTree.Element]:
    found = []
    for tag, attributes in Parts(page).tags:
        if tag == wanted:
            kind, data = (attributes.get("src") or attributes["srcset"] or "").split(",", 1)
            assert kind == "data:image/svg+xml;base64"
            found.append(ElementTree.fromstring(base64.b64decode(data)))
    return found


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    page = rendered()
    parts = Parts(page)
    assert not parts.open
    assert {tag for tag, _ in parts.tags}.isdisjoint({"script", "link", "iframe", "object"})
    for _, attributes in parts.tags:
        assert "href" not in attributes
        assert (attributes.get("src") or "data:").startswith("data:")
    assert not re.search(r"url\(|@import", page)
    for svg in images(page):
        for element in svg.iter():
            for name, value in element.attrib.items():
                assert not name.endswith("href") or value.startswith("#")


def test_the_page_shows_tables_and_four_plots() -> None:
    page = rendered()
    text = Parts(page).text
    assert len(images(page)) == 4
    for words in (
        "FULL_AND_PIECEWISE",
        "ABOVE_MAX",
        "step time / NONE",
        "Captures",
        "Two policies.",
    ):
        assert words in text
    assert "larger than the largest captured size" in text


def test_every_plot_has_a_form_for_narrow_screens() -> None:
    page = rendered()
    wide, narrow = images(page), images(page, "source")
    assert len(narrow) == len(wide)
    for plot in narrow:
        assert float((plot.get("width") or "").removesuffix("pt")) < 280
    assert page.count("max-width: 600px") == len(narrow) + 1


def test_narrow_time_axis_of_many_decades_has_few_labels() -> None:
    from graphrt.report.plots import NARROW, WIDE, host_times

    long, short = ([run_of("NONE", map(eager, times))] for times in ([90, 9e4], [90, 900]))
    drawn = [host_times(runs, width) for runs, width in ((long, WIDE), (short, NARROW))]
    assert all("<!-- 200 us -->" in svg for svg in drawn)
    narrow = host_times(long, NARROW)
    assert "<!-- 1 ms -->" in narrow
    assert "<!-- 200 us -->" not in narrow


def test_cells_of_words_name_their_column() -> None:
    table = TextTable("Plan", ("<sizes>",), (TextRow("FULL", ("1, 2, 4",)),), is_numeric=False)
    page = render_report(replace(BARE, tables=[table]))
    assert '<td data-column="&lt;sizes&gt;">1, 2, 4</td>' in page
    assert '<table class="words">' in page


def test_all_text_is_escaped() -> None:
    evil = "<script>alert(1)</script>&\"'"
    page = ReportPage(
        title=evil,
        lead=evil,
        findings=[evil],
        runs=[run_of(evil, [EAGER])],
        tables=[TextTable(evil, (evil,), (TextRow(evil, (evil,)),), evil, is_numeric=False)],
    )
    text = render_report(page)
    assert "<script" not in text
    assert Parts(text).text.count(evil) >= 8


def test_plots_without_data_and_tables_without_rows_are_left_out() -> None:
    eager_only = render_report(ReportPage(title="t", lead="l", runs=[run_of("NONE", [EAGER])]))
    assert len(images(eager_only)) == 3
    assert "Captures" not in Parts(eager_only).text
    assert images(render_report(ReportPage(title="t", lead="l", runs=[run_of("NONE", [])]))) == []
    assert images(render_report(ReportPage(title="t", lead="l", runs=[]))) == []


# Few, because each is eight plots, of a panel a run. The colours are fewer than seven runs.
@settings(max_examples=2, deadline=None)
@given(st.lists(st.lists(steps, max_size=20), min_size=1, max_size=3))
@example([*[[]] * 6, [EAGER]])
def test_any_runs_can_be_drawn(runs: list[list[Event]]) -> None:
    page = render_report(
        ReportPage(
            title="t", lead="l", runs=[run_of(f"run {n}", run) for n, run in enumerate(runs)]
        )
    )
    assert len(images(page)) <= 4


def test_page_does_not_grow_with_the_steps() -> None:
    short, long = (
        render_report(ReportPage(title="t", lead="l", runs=[run_of("NONE", [EAGER] * num_steps)]))
        for num_steps in (400, 40_000)
    )
    assert len(long) < 1.5 * len(short)


def test_write_report_replaces_the_file_and_prints_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    assert write_report(path, PAGE) == path.resolve()
    assert os.listdir(tmp_path) == ["report.html"]
    assert capsys.readouterr() == ("", "")
    # Drawn twice: the same numbers give the same bytes.
    assert path.read_text(encoding="utf-8") == rendered()


def test_report_is_written_through_a_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link.html", tmp_path / "target.html"
    link.symlink_to(target)
    assert write_report(link, BARE) == target.resolve()
    assert link.is_symlink()
    assert target.is_file()


def no_folder(folder: Path) -> Path:
    return folder / "missing" / "report.html"


def a_folder(folder: Path) -> Path:
    return folder


def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def a_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "report.html"


@pytest.mark.parametrize("place", [no_folder, a_folder, a_pipe, a_loop, below_a_file])
def test_unusable_report_path_is_an_error_before_any_work(place, tmp_path: Path) -> None:
    path = place(tmp_path)
    with pytest.raises(ReportError) as raised:
        check_report_path(path)
    assert str(path) in str(raised.value)
    assert isinstance(raised.value, OSError)


def test_folder_without_permission_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Root may write everywhere, so the refusal is simulated.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ReportError, match="permission"):
        write_report(tmp_path / "report.html", PAGE)


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_failed_write_keeps_the_old_page_and_leaves_no_file(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(Path, "replace", fail)
    expected = ReportError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_report(path, BARE)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_report_without_its_libraries_names_the_extra_at_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "graphrt.report.plots", raising=False)
    monkeypatch.delattr("graphrt.report.plots", raising=False)
    with pytest.raises(MissingExtraError, match=r"graphrt\[report\]") as raised:
        check_report_path(tmp_path / "report.html")
    assert raised.value.extra == "report"
    with pytest.raises(MissingExtraError):
        write_report(tmp_path / "report.html", PAGE)
    assert os.listdir(tmp_path) == []

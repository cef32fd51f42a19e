"""Every program of the documentation runs, and prints what the page shows below it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import graphrt
import graphrt_llm
from graphrt.config import CompilationConfig, PassConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md") if "```python" in page.read_text("utf-8"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A fence of another name is a fragment: a command line, a part of a file.
KINDS = {"python", "output", "text"}


@pytest.mark.parametrize("page", PAGES)
def test_programs_of_a_page_print_what_it_shows(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs of one page run in order and share their names, as a reader types them."""
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert {kind for kind, _ in blocks} <= KINDS
    names: dict[str, object] = {"__name__": page}
    for number, (kind, text) in enumerate(blocks):
        if kind != "python":
            continue
        exec(compile(text, f"{page}, block {number}", "exec"), names)
        shown = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
        assert capsys.readouterr().out == (shown[1] if shown[0] == "output" else "")


def test_the_reference_has_every_public_name_once() -> None:
    named = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text("utf-8"), re.MULTILINE)
    public = [f"graphrt.{name}" for name in graphrt.__all__ if name != "GraphrtError"]
    public += [f"graphrt_llm.{name}" for name in graphrt_llm.__all__]
    assert len(named) == len(set(named))
    # Others are types of what public names return.
    others = set(named) - {*public, "graphrt.errors", "graphrt_llm.errors"}
    assert set(public) <= set(named)
    assert all(name.count(".") == 2 for name in others), others


def test_every_option_of_compiling_is_in_the_tables() -> None:
    page = (DOCS / "compiling.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| (`\w[^|]*)\|([^|]*)\|([^|]*)\|", re.MULTILINE)
    rows = {
        name: (default.strip(), code.strip())
        for names, default, code in row.findall(page)
        for name in re.findall(r"`(\w+)`", names)
    }
    for kind in (CompilationConfig, PassConfig):
        for item in fields(kind):
            default, code = rows[item.name]
            shown = repr(item.default).replace("'", '"')
            assert default == (f"`{shown}`" if item.name != "pass_config" else ""), item.name
            if kind is CompilationConfig:
                assert (code == "x") is (item.metadata["affects"] == "graph"), item.name


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS).as_posix()}\n" in navigation, page


def test_every_miss_is_in_the_table_of_misses() -> None:
    page = (DOCS / "misses.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert rows == [reason.name for reason in graphrt.Reason if reason.is_miss]

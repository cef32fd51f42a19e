"""The README's first program prints what the README says it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def test_readme_program_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = README.read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert found, "the README shows a program and, right below it, its output"
    program, output = found.groups()
    exec(compile(program, str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == output


def test_readme_first_screen_is_at_most_forty_lines() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert lines.index("## By task") <= 40


def test_readme_has_every_example_and_no_dead_link() -> None:
    links = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", README.read_text(encoding="utf-8"))
    examples = {f"examples/{path.name}" for path in README.parent.glob("examples/[0-9]*.py")}
    assert examples <= {file for file, _ in links}
    for file, anchor in links:
        text = (README.parent / file).read_text(encoding="utf-8")
        headings = [
            title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)", text, re.M)
        ]
        assert not anchor or anchor in headings, (file, anchor)

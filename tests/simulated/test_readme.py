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


def test_readme_first_screen_is_at_most_forty_four_lines() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    first_screen = lines[: lines.index("## What it does")]
    assert len(first_screen) <= 44

"""Every example runs and prints what its docstring shows."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphrt.externals.held import Reads
from graphrt.externals.unwatched import Unwatched

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("[0-9]*.py"))


def shown(example: Path) -> list[str]:
    """The lines after ``Output::`` in the docstring, without their indentation."""
    docstring = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8")))
    assert docstring is not None
    _, output = docstring.split("Output::\n\n")
    return [line.removeprefix("    ") for line in output.splitlines()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_prints_what_it_shows(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(example.parent))  # As ``python examples/...`` does.
    unwatched: list[Unwatched] = []
    make = Reads.__init__

    def note(self: Reads, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        unwatched.extend(self.unwatched)

    monkeypatch.setattr(Reads, "__init__", note)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == shown(example)
    # An ordinary model reads nothing that cannot be compared.
    assert not unwatched


def test_examples_are_numbered_without_a_gap() -> None:
    numbers = [int(path.name.split("_")[0]) for path in EXAMPLES]
    assert numbers == list(range(1, len(EXAMPLES) + 1))
    assert len(EXAMPLES) >= 6


def test_resolving_and_dispatching_load_no_torch() -> None:
    code = f"""
import runpy, sys
runpy.run_path({str(EXAMPLES[0])!r}, run_name="__main__")
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == 0

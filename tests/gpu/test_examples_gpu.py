"""The clients among the examples on CUDA: their outputs equal eager ones there, too."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("number", ["07", "08", "09", "10", "11", "12", "13"])
def test_example_equals_eager_on_a_gpu(number, capsys, monkeypatch):
    if number == "10":
        pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(next(EXAMPLES.glob(f"{number}_*.py"))), run_name="__main__")
    told = [line for line in capsys.readouterr().out.splitlines() if "equal to" in line]
    assert told
    assert all(line.endswith("True") for line in told)

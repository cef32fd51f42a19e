"""Two results side by side: what is called better, worse, missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import compare

SCRIPT = Path(compare.__file__)


def result(value: float, spread: float = 0.01, **fields: Any) -> dict[str, Any]:
    return {
        "metric": "G1",
        "value": value,
        "target": 1.0,
        "unit": "ratio",
        "higher_is_better": False,
        "spread": [value - spread, value + spread],
        "device": "H200",
        "torch": "2.11",
        "commit": "abc",
        **fields,
    }


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (result(0.5), result(0.501), []),
        (result(0.5), result(0.4), ["better"]),
        (result(0.5), result(0.6), ["WORSE"]),
        (result(0.5, 0.2), result(0.6), []),
        (result(0.9), result(1.1), ["WORSE", "target now MISSED"]),
        (result(1.1), result(0.9), ["better", "target now reached"]),
        (result(1.1), result(1.11), ["target missed"]),
        (result(1.1, target=None), result(1.2, target=None), ["WORSE"]),
        (result(0.5), result(0.5, device="CPU"), ["ANOTHER DEVICE"]),
        (result(0.5), result(0.5, target=2.0), ["another target or unit"]),
        (
            result(2.0, higher_is_better=True),
            result(3.0, higher_is_better=True),
            ["better"],
        ),
        (
            result(3.0, higher_is_better=True),
            result(2.0, higher_is_better=True),
            ["WORSE"],
        ),
    ],
)
def test_flags(old: dict[str, Any], new: dict[str, Any], expected: list[str]) -> None:
    assert compare.flags(old, new) == expected


def test_metric_of_one_file_is_shown_and_zero_has_no_ratio() -> None:
    lines = compare.compare(
        {"a": result(1.0), "zero": result(0.0)}, {"zero": result(0.0), "b": result(2.0)}
    )
    assert [(line[0], line[4], line[-1]) for line in lines] == [
        ("a", "", "only in old"),
        ("zero", "-", ""),
        ("b", "", "only in new"),
    ]


def test_the_script_runs_alone_and_prints_a_table(tmp_path: Path) -> None:
    for name, value in (("old", 2.0), ("new", 1.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps([result(value)]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), "old.json", "new.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "old: H200, 2.11, abc",
        "new: H200, 2.11, abc",
        "metric  old  new  unit   new/old  spreads  flags",
        "G1      2    1    ratio  0.500    apart    better, target now reached",
    ]


@pytest.mark.parametrize("text", ["", "{}x", '[{"value": 1}]', '["G1"]'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match="expected a list of rows"):
        compare.read(path)

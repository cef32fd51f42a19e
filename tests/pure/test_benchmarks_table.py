"""The table of targets says what the kept results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.table import BEGIN, END, README, RESULTS, TARGETS, number_of, render

FIELDS = {
    "metric",
    "value",
    "target",
    "unit",
    "higher_is_better",
    "spread",
    "device",
    "torch",
    "commit",
    "config",
    "samples",
}


def keep(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(rows), encoding="utf-8")


def kept(metric: str, value: float, **fields: Any) -> dict[str, Any]:
    return {
        "metric": metric,
        "value": value,
        "target": 1.5,
        "unit": "ratio",
        "higher_is_better": False,
        "spread": [value, value],
        "device": "H200",
        **fields,
    }


def line_of(table: str, metric: str) -> str:
    (line,) = (line for line in table.splitlines() if f"`{metric}`" in line)
    return line


def test_committed_table_is_made_from_the_kept_results() -> None:
    text = README.read_text(encoding="utf-8")
    committed = text.partition(BEGIN)[2].partition(END)[0]
    assert committed == render(RESULTS), "run: python -m benchmarks --write-table"


def test_kept_results_follow_the_contract() -> None:
    for path in RESULTS.glob("*.json"):
        for row in json.loads(path.read_text(encoding="utf-8")):
            assert row.keys() >= FIELDS, path.name
            assert number_of(row["metric"]) is not None, row["metric"]
            low, high = row["spread"]
            assert low <= row["value"] <= high, row["metric"]


def test_every_target_has_a_line_before_anything_ran(tmp_path: Path) -> None:
    lines = render(tmp_path).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {t.number}" for t in TARGETS]
    assert all("not run yet" in line for line in lines)


def test_the_newest_result_of_each_metric_counts(tmp_path: Path) -> None:
    keep(tmp_path, "2026-01-02-000000-gpu.json", kept("G1-host-10", 1.2))
    keep(tmp_path, "2026-01-01-000000-gpu.json", kept("G1-host-10", 9.0), kept("G7", 1.1))
    table = render(tmp_path)
    assert "1.2x" in line_of(table, "G1-host-10")
    assert "[2026-01-02](results/2026-01-02-000000-gpu.json)" in line_of(table, "G1-host-10")
    assert "[2026-01-01](results/2026-01-01-000000-gpu.json)" in line_of(table, "G7")


def test_a_missed_target_is_told_with_its_bound(tmp_path: Path) -> None:
    keep(
        tmp_path,
        "2026-01-01-000000-cpu.json",
        kept("G7", 1.6),
        kept("C-replay", 1.6, higher_is_better=True),
    )
    assert "**no** (<= 1.5)" in line_of(render(tmp_path), "G7")
    assert "| yes |" in line_of(render(tmp_path), "C-replay")


@pytest.mark.parametrize(
    ("metric", "number"),
    [
        ("G1", "G1"),
        ("G1-host-10", "G1"),
        ("G10-llama-1b-step", "G10"),
        ("C-dispatch-plan", "C-dispatch"),
        ("G13", None),
        ("C-dispatcher", None),
    ],
)
def test_a_metric_belongs_to_its_number(metric: str, number: str | None) -> None:
    assert number_of(metric) == number


def test_metrics_of_a_number_stand_in_natural_order(tmp_path: Path) -> None:
    keep(tmp_path, "2026-01-01-1-gpu.json", *(kept(f"G1-host-{n}", 1.0) for n in (1000, 10, 100)))
    table = render(tmp_path)
    order = [table.index(f"`G1-host-{number}`") for number in (10, 100, 1000)]
    assert order == sorted(order)

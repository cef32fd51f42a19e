"""Runs side by side: the JSON contract's sums, and tables that say what the numbers say."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from hypothesis import given, strategies as st
from report_events import RUNS, captured, eager, full, run_of, steps
from rich.console import Console

from graphrt import Event, Reason, RuntimeMode
from graphrt.batch import UBatchReason
from graphrt.events import MemoryTaken
from graphrt.report import (
    Metrics,
    PolicyRun,
    TextRow,
    TextTable,
    capture_table,
    comparison_table,
    eager_reasons,
    miss_table,
    size_text,
    summarize_runs,
    time_text,
)

ABSENT = "-"


def printed(renderable: object, width: int = 80) -> str:
    file = StringIO()
    Console(file=file, width=width).print(renderable)
    return file.getvalue()


def cells(grid: TextTable, name: str) -> tuple[str, ...]:
    [row] = [row for row in grid.rows if row.name == name]
    return row.cells


@given(st.lists(steps, max_size=30))
def test_summary_adds_up(events: list[Event]) -> None:
    summary = summarize_runs([run_of("PIECEWISE", events)])["PIECEWISE"]
    assert set(summary.runtime_modes) == {"FULL", "PIECEWISE", "NONE"}
    assert sum(summary.runtime_modes.values()) == summary.steps == len(events)
    assert sum(summary.miss_reasons.values()) == summary.runtime_modes["NONE"]
    assert all(
        summary.uniform_steps[mode] <= steps for mode, steps in summary.runtime_modes.items()
    )
    assert sum(summary.tokens_by_runtime_mode.values()) == sum(e.num_tokens for e in events)
    assert 0 <= summary.padding_percent < 100
    assert (summary.host_us_p50 is None) == (not events)
    assert json.loads(json.dumps(summary.as_dict(), allow_nan=False)) == summary.as_dict()


def test_the_json_fields_are_those_of_the_contract() -> None:
    summary = summarize_runs(RUNS)["FULL_AND_PIECEWISE"].as_dict()
    assert summary.pop("host_us_p50") == pytest.approx(100, rel=0.01)
    assert summary.pop("host_us_p99") == pytest.approx(100, rel=0.01)
    assert summary.pop("step_us_p50") == pytest.approx(150, rel=0.01)
    assert summary.pop("step_time_ratio_to_none") == pytest.approx(150 / 250, rel=0.02)
    assert summary == {
        "steps": 4,
        "runtime_modes": {"FULL": 3, "PIECEWISE": 0, "NONE": 1},
        "uniform_steps": {"FULL": 3, "PIECEWISE": 0, "NONE": 0},
        "tokens_by_runtime_mode": {"FULL": 9, "PIECEWISE": 0, "NONE": 6},
        "miss_reasons": {"ABOVE_MAX": 1},
        "split_steps": 0,
        "unsplit_reasons": {},
        "padding_percent": 100 * 3 / 18,
        "num_graphs": 6,
        "capture_seconds": 0.5,
        "graph_bytes": 2 * 1536,
        "memory_taken": MemoryTaken()._asdict(),
        "seconds": 1.0,
        "lora_steps": {},
    }


def test_split_steps_are_shown_where_a_plan_splits_any() -> None:
    why = UBatchReason.BELOW_THRESHOLD
    events = [full(), full()._replace(num_ubatches=2), eager()._replace(ubatch_reason=why)]
    shown = comparison_table([run_of("FULL", events), run_of("NONE", [eager()])])
    assert cells(shown, "split steps") == ("1", "-")
    assert cells(shown, "not split: BELOW_THRESHOLD") == ("1", "-")
    assert "split" not in str(comparison_table([run_of("NONE", [eager()])]))


def test_step_time_ratio_needs_a_baseline_with_steps() -> None:
    assert summarize_runs(RUNS)["NONE"].step_time_ratio_to_none == 1
    assert summarize_runs(RUNS[1:])["FULL_AND_PIECEWISE"].step_time_ratio_to_none is None
    still = PolicyRun(name="FULL", metrics=Metrics(), capture_seconds=0, seconds=0)
    assert summarize_runs([RUNS[0], still])["FULL"].step_time_ratio_to_none is None
    idle = PolicyRun(name="NONE", metrics=Metrics(), capture_seconds=0, seconds=0)
    assert summarize_runs([idle, RUNS[1]])["FULL_AND_PIECEWISE"].step_time_ratio_to_none is None


def test_p50_and_p99_are_of_all_steps() -> None:
    events: list[Event] = [*[full(100.0)] * 60, *[eager(900.0)] * 38, full(5000.0), full(5000.0)]
    summary = summarize_runs([run_of("FULL", events)])["FULL"]
    assert summary.host_us_p50 == pytest.approx(100, rel=0.01)
    assert summary.host_us_p99 == pytest.approx(5000, rel=0.01)


def test_reasons_of_all_runs_come_most_frequent_first() -> None:
    assert eager_reasons(RUNS) == [Reason.MODE_NONE, Reason.ABOVE_MAX]
    assert eager_reasons([]) == []


def test_the_comparison_says_what_was_counted() -> None:
    grid = comparison_table(RUNS)
    assert grid.columns == ("NONE", "FULL_AND_PIECEWISE")
    assert cells(grid, "steps") == ("4", "4")
    assert [row.cells for row in grid.rows if row.name == "FULL"] == [
        (ABSENT, "75.0 %"),
        (ABSENT, "60.0 %"),
    ]
    assert [row.cells for row in grid.rows if row.name == "NONE (eager)"] == [
        ("100.0 %", "25.0 %"),
        ("100.0 %", "40.0 %"),
    ]
    assert cells(grid, "padding") == ("0.0 %", "16.7 %")
    assert cells(grid, "eager steps") == ("4", "1")
    assert cells(grid, "MODE_NONE") == ("4", ABSENT)
    assert cells(grid, "ABOVE_MAX") == (ABSENT, "1")
    assert cells(grid, "graphs") == (ABSENT, "6")
    assert cells(grid, "step time / NONE") == ("1.00", "0.60")
    assert all(len(row.cells) == 2 for row in grid.rows)
    assert [row.name for row in grid.rows if row.is_part] == [
        *["FULL", "NONE (eager)"] * 2,
        "MODE_NONE",
        "ABOVE_MAX",
        "p99",
    ]


def test_captures_have_a_row_for_each_mode_that_captured() -> None:
    grid = capture_table(RUNS)
    assert [(row.name, *row.cells[:4]) for row in grid.rows] == [
        ("FULL_AND_PIECEWISE", "FULL", "1", "1", "40"),
        ("FULL_AND_PIECEWISE", "PIECEWISE", "1", "5", "40"),
    ]
    assert grid.rows[0].cells[4:] == ("1.50 KiB",)


def test_four_policies_fit_a_terminal_of_80_columns() -> None:
    names = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    runs = [
        run_of(name, [captured(RuntimeMode.PIECEWISE, 8, 3), full(), eager()]) for name in names
    ]
    for table in (comparison_table(runs), capture_table(runs), miss_table(runs)):
        text = printed(table)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80
    assert all(name in printed(comparison_table(runs)) for name in names)


def test_sixty_columns_cut_no_name_of_a_policy() -> None:
    names = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    runs = [
        run_of(name, [captured(RuntimeMode.PIECEWISE, 8, 3), full(), eager()]) for name in names
    ]
    for table in (comparison_table(runs), capture_table(runs)):
        text = printed(table, width=60)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 60
        for part in ("NONE", "PIECEWISE", "FULL_", "DECODE_", "ONLY", "AND_"):
            assert part in text.split()


def test_markup_in_names_is_shown_literally() -> None:
    assert "[red]x" in printed(comparison_table([run_of("[red]x", [eager()])]))
    grid = TextTable("[b]title", ("[i]column",), (TextRow("[u]row", ("[s]cell",)),), "[dim]note")
    text = printed(grid)
    assert all(part in text for part in ("[b]title", "[i]column", "[u]row", "[s]cell", "[dim]note"))


def test_every_miss_is_explained() -> None:
    misses = [reason for reason in Reason if reason.is_miss]
    table = miss_table([run_of("NONE", [eager(reason=reason) for reason in misses])])
    assert [row.name for row in table.rows] == [reason.name for reason in misses]
    assert len({row.cells for row in table.rows}) == len(misses)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, ABSENT),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (15 * 1024**2 + 300, "15.0 MiB"),
        (1023 * 1024, "1.00 MiB"),
        (5000 * 1024**3, "5000 GiB"),
    ],
)
def test_sizes_have_binary_units(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("host_us", "text"),
    [(None, ABSENT), (0.5, "0.50 us"), (87.12, "87.1 us"), (3200, "3.20 ms"), (2.5e6, "2.50 s")],
)
def test_times_have_readable_units(host_us: float | None, text: str) -> None:
    assert time_text(host_us) == text

"""Decision replay: a refactor decides what was decided before, byte for byte."""

from __future__ import annotations

import runpy
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent / "golden"


def test_golden_trace_gives_the_same_decisions() -> None:
    replay = runpy.run_path(str(GOLDEN / "replay.py"))["replay"]
    text = replay()
    expected = (GOLDEN / "decisions.jsonl").read_text(encoding="utf-8")
    # Line by line first: a difference is then one readable line, not two long texts.
    for found, wanted in zip(text.splitlines(), expected.splitlines(), strict=False):
        assert found == wanted
    assert text == expected


def test_golden_decisions_hold_hits_and_ordinary_misses() -> None:
    text = (GOLDEN / "decisions.jsonl").read_text(encoding="utf-8")
    for word in ("HIT", "PADDED", "ABOVE_MAX", "MODE_NONE", "FULL", "PIECEWISE"):
        assert f'"{word}"' in text

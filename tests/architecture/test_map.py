"""ARCHITECTURE.md is the map of the house: it names every file once built, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from capture_trace import trace_capture
from test_hot_path import GOLDEN

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "graphrt"
# Faces of rooms say what the room exports.
FACES = ("__init__.py", "__main__.py")


def _path_of(name: str, end: str) -> list[str]:
    """The files that a path to read names, in order, from ``*name*`` to ``end``."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return re.findall(r"`(\w+/\w+\.py)`", text.partition(f"*{name}*,")[2].partition(end)[0])


def test_path_of_a_step_is_what_a_step_runs() -> None:
    generated = ["graphs/program.py"]  # A replay of one graph is the device's own.
    named = [place for place in _path_of("A step", "\n\n") if place not in generated]
    assert named == [call.partition(" ")[0] for call in GOLDEN["FULL"]]


def test_path_of_a_capture_is_what_a_capture_runs() -> None:
    assert _path_of("A capture", "What was recorded") == list(trace_capture().files)


def _named_files() -> set[str]:
    """The files of the table "Where is it?", those after the first of a row in its folder too."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("## Where is it?")[2].partition("## Doors")[0]
    named: set[str] = set()
    for row in table.splitlines():
        folder = ""
        for path in re.findall(r"`([\w/]+\.py)`", row):
            is_elsewhere = "/" in path or not (SOURCE / folder / path).is_file()
            folder = path.rpartition("/")[0] if is_elsewhere else folder
            named.add(path if is_elsewhere else f"{folder}/{path}".lstrip("/"))
    return named


def test_map_names_every_file() -> None:
    files = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    missing = {place for place in files if not place.endswith(FACES)} - _named_files()
    assert not missing, f"files that ARCHITECTURE.md does not name: {sorted(missing)}"


def test_map_names_no_missing_file() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
    places = {*_named_files(), *re.findall(r"`([\w]+/[\w/]+\.py)`", text)}
    missing = {p for p in places if not ((SOURCE / p).exists() or (REPOSITORY / p).exists())}
    assert not missing, f"ARCHITECTURE.md names files that are not there: {sorted(missing)}"

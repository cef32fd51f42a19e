"""The repository speaks of itself alone: no machine, no registry host, no result without a file."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".cfg", ".txt", ".html", ""}
FORBIDDEN = [
    re.compile(r"/(?:home|root|work|Users)/[a-z]"),
    re.compile(r"\b(?:pypi|files\.pythonhosted|download\.pytorch|registry\.npmjs)\.org\b"),
]


def tracked_files() -> list[Path]:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs a git checkout: only git says which files belong to the repository")
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), "ls-files"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [REPOSITORY / line for line in done.stdout.splitlines()]


def test_no_file_names_a_machine_path_or_a_registry_host() -> None:
    strays = []
    tracked = tracked_files()
    assert Path(__file__) in tracked
    for path in tracked:
        if path.suffix not in TEXT or not path.is_file() or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if any(pattern.search(line) for pattern in FORBIDDEN):
                strays.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:80]}")
    assert strays == []


def test_performance_claims_of_the_readme_are_in_their_results() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    # A claim reads: **1.43 us** ([C-wrapper](benchmarks/results/FILE.json))
    claims = re.findall(
        r"\*\*([\d.]+) [^*]+\*\* \(\[([\w.-]+)\]\((benchmarks/results/[^)]+\.json)\)", readme
    )
    links = set(re.findall(r"benchmarks/results/[^)\s]+\.json", readme))
    assert links == {place for _, _, place in claims}, "a result is linked without a claim"
    for figure, metric, place in claims:
        rows = json.loads((REPOSITORY / place).read_text(encoding="utf-8"))
        values = [row["value"] for row in rows if row["metric"] == metric]
        digits = len(figure.partition(".")[2])
        assert figure in {f"{value:.{digits}f}" for value in values}, (metric, figure, values)

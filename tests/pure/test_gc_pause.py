"""The cases of the collector, in a process of their own: in a heap that holds torch, each of their
collections takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).resolve().parent.parent / "gc_pause_cases.py"


def test_cases_of_the_collector_pass_in_a_small_heap() -> None:
    options = ["-q", "-p", "no:cacheprovider", "--noconftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CASES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

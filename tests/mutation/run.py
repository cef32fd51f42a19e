"""Apply each mutant to a copy of ``src`` and run its tests, which must fail: ``make mutants``.

    python tests/mutation/run.py [words of names ...]

Exits 1 if a mutant survives or no longer applies. Minutes long, so it is no part of ``make test``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import MUTANTS, Mutant

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 600
FAILED = 1  # pytest's exit status for "tests failed"; 2 to 5 say that they did not run.


def run_tests(copy: Path, tests: Collection[str], seconds: int = SECONDS) -> int:
    """Run ``tests`` (below tests/) against the sources in ``copy``; 1 if one failed or hung."""
    sources = os.pathsep.join([str(copy), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": sources, "PYTHONDONTWRITEBYTECODE": "1"}
    check = f"import graphrt, sys; sys.exit(not graphrt.__file__.startswith({str(copy)!r}))"
    assert not subprocess.run(
        [sys.executable, "-c", check], env=environment, check=False
    ).returncode
    files = [str(REPOSITORY / "tests" / name) for name in tests]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *files],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return FAILED
    if done.returncode > FAILED:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode


def outcome(mutant: Mutant) -> str:
    """``killed``, ``survived``, or why neither can be said."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_sources(folder)
        path = copy / mutant.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return f"does not apply: its text occurs {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        status = run_tests(copy, mutant.tests.split())
    return {0: "survived", FAILED: "killed"}.get(
        status, f"does not apply: pytest's status {status}"
    )


def copy_sources(folder: str) -> Path:
    copy = Path(folder) / "src"
    return shutil.copytree(REPOSITORY / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))


def main(words: Collection[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    if not chosen:
        print(f"no mutant's name has all of these words: {' '.join(words)}")
        return 1
    # A test that fails by itself would kill every mutant.
    every = sorted({name for mutant in chosen for name in mutant.tests.split()})
    with tempfile.TemporaryDirectory() as folder:
        if run_tests(copy_sources(folder), every, seconds=len(every) * SECONDS):
            print("the tests fail without any mutant")
            return 1
    num_killed = 0
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        for mutant, result in zip(chosen, workers.map(outcome, chosen), strict=True):
            num_killed += result == "killed"
            print(f"{result:9} {mutant.name}", flush=True)
    print(f"{num_killed} of {len(chosen)} killed")
    return num_killed != len(chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

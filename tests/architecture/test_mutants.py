"""Every mutant still applies: its text is in its file once, and its tests exist."""

from __future__ import annotations

import runpy
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MUTANTS = runpy.run_path(str(TESTS / "mutation" / "mutants.py"))["MUTANTS"]


def test_mutant_applies_to_exactly_one_place() -> None:
    wrong = [
        f"{mutant.name}: {count} places in {mutant.file}"
        for mutant in MUTANTS
        for count in [(TESTS.parent / "src" / mutant.file).read_text("utf-8").count(mutant.old)]
        if count != 1 or mutant.old == mutant.new
    ]
    assert not wrong, "change the mutant with its line, or delete it with the rule it broke"


def test_mutants_name_tests_that_exist() -> None:
    named = {name for mutant in MUTANTS for name in mutant.tests.split()}
    assert [name for name in sorted(named) if not (TESTS / name).is_file()] == []
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))

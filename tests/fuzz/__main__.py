"""``python -m tests.fuzz``: many random cases, one line of counts, 0 if nothing was found."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from graphrt.errors import ConfigError
from graphrt.gc_pause import frozen_heap

from . import engine, runner
from .common import Case, Counts, Problem, interruptible

FAMILIES: dict[str, ModuleType] = {"engine": engine, "runner": runner}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first case; others follow from it")
    parser.add_argument("--engine-steps", type=int, default=50_000)
    parser.add_argument("--runner-steps", type=int, default=10_000)
    parser.add_argument("--only", choices=FAMILIES)
    parser.add_argument("--case", type=int, metavar="SEED", help="run this case alone, verbosely")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they are")
    parser.add_argument(
        "--wrong",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also, in every third case, a model that reads its padding or remembers a value",
    )
    asked = parser.parse_args(arguments)
    fields = dict(_field(item) for item in asked.set)
    chosen = [asked.only] if asked.only else list(FAMILIES)
    counts = Counts()
    with interruptible(), engine.touching(), torch_loaded(chosen), frozen_heap():
        if asked.case is not None:
            for name in chosen:
                case = {**make(name, asked.case, asked.wrong), **fields}
                _show(name, case)
                _check(name, case, counts, print, shrinks=False)
        else:
            steps = {"engine": asked.engine_steps, "runner": asked.runner_steps}
            for name in chosen:
                search(
                    name,
                    asked.seed,
                    steps[name],
                    counts,
                    fields,
                    shrinks=not asked.no_shrink,
                    has_wrong=asked.wrong,
                )
    print(counts.line(asked.seed if asked.case is None else asked.case))
    return 0 if counts.is_clean else 1


def make(name: str, seed: int, wrong: bool) -> Case:
    """The case of a seed; only runners have wrong ones."""
    case: Case = runner.make_case(seed, wrong=wrong) if name == "runner" else engine.make_case(seed)
    return case


@contextmanager
def torch_loaded(names: list[str]) -> Iterator[None]:
    """Run a case of each family first: what torch loads late would be collected over and over."""
    for name in names:
        _find(name, FAMILIES[name].make_case(0), Counts(), lambda text: None)
    yield


def search(
    name: str,
    seed: int,
    num_steps: int,
    counts: Counts,
    fields: Case | None = None,
    *,
    shrinks: bool = False,
    has_wrong: bool = True,
) -> None:
    """Run cases ``seed * 1_000_000``, and so on, until they have taken ``num_steps`` steps."""
    number = seed * 1_000_000
    while getattr(counts, f"{name}_steps") < num_steps:
        case = {**make(name, number, has_wrong and number % 3 == 0), **(fields or {})}
        _check(name, case, counts, lambda text: None, shrinks=shrinks)
        number += 1


def _check(
    name: str, case: Case, counts: Counts, say: Callable[[str], None], *, shrinks: bool
) -> None:
    counts.cases += 1
    problem = _find(name, case, counts, say)
    if problem is None:
        return
    setattr(counts, problem.kind, getattr(counts, problem.kind) + 1)
    if shrinks:
        case, problem = shrink(name, case, problem)
    print(f"\n{problem}\n")
    if problem.__cause__ is not None:
        traceback.print_exception(problem.__cause__)
    _show(name, case)


def _find(name: str, case: Case, counts: Counts, say: Callable[[str], None]) -> Problem | None:
    try:
        FAMILIES[name].run_case(case, counts, say)
    except Problem as problem:
        return problem
    return None


def shrink(name: str, case: Case, problem: Problem) -> tuple[Case, Problem]:
    """Try simpler values, field by field, as long as the same kind of problem stays."""
    tries = 0
    is_smaller = True
    while is_smaller and tries < 150:
        is_smaller = False
        for simpler in FAMILIES[name].simplify(case):
            tries += 1
            try:
                found = _find(name, simpler, Counts(), lambda text: None)
            except (ConfigError, ValueError):
                continue  # No valid configuration.
            if found is not None and found.kind == problem.kind:
                case, problem, is_smaller = simpler, found, True
                break
    return case, problem


def _show(name: str, case: Case) -> None:
    """Print a case, and the command that runs it alone."""
    original = FAMILIES[name].make_case(
        case["seed"], **({"wrong": True} if case.get("wrong") else {})
    )
    changed = " ".join(
        f"--set {shlex.quote(f'{field}={value!r}')}"
        for field, value in case.items()
        if original.get(field) != value
    )
    print(f"{name} case: {case}")
    wrong = "" if case.get("wrong") else " --no-wrong"
    print(f"python -m tests.fuzz --only {name} --case {case['seed']}{wrong} {changed}".rstrip())


def _field(item: str) -> tuple[str, Any]:
    name, _, value = item.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

"""Random cases one after another: which they are, what each finds, and how it gets simpler."""

from __future__ import annotations

import ast
import shlex
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any

from graphrt.errors import ConfigError
from graphrt.gc_pause import frozen_heap

from . import engine, runner
from .common import Case, Counts, Problem, interruptible

FAMILIES: dict[str, ModuleType] = {"engine": engine, "runner": runner}


def run_one(asked: Namespace) -> Counts:
    """Run the case that was asked for."""
    counts = Counts()
    for name in families(asked):
        case = {**make(name, asked.case, asked.wrong), **dict(map(_field, asked.set))}
        with fuzzing([name]):
            _show(name, case)
            _check(name, case, counts, print, shrinks=False)
    return counts


def run_share(asked: Namespace, process: int) -> Counts:
    """Run the cases of one process: of N every Nth, until it has its share of the steps."""
    counts = Counts()
    steps = {"engine": asked.engine_steps, "runner": asked.runner_steps}
    with fuzzing(families(asked)):
        for name in families(asked):
            search(
                name,
                asked.seed,
                -(-steps[name] // asked.processes),
                counts,
                dict(map(_field, asked.set)),
                shrinks=not asked.no_shrink,
                has_wrong=asked.wrong,
                numbers=count(process, asked.processes),
            )
    return counts


def families(asked: Namespace) -> list[str]:
    return [asked.only] if asked.only else list(FAMILIES)


@contextmanager
def fuzzing(names: list[str]) -> Iterator[None]:
    with interruptible(), engine.touching(), torch_loaded(names), frozen_heap():
        yield


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
    numbers: Iterable[int] | None = None,
) -> None:
    """Run cases ``seed * 1_000_000``, and so on, until they have taken ``num_steps`` steps.

    ``numbers``: which of them; all by default.
    """
    for number in count() if numbers is None else numbers:
        if getattr(counts, f"{name}_steps") >= num_steps:
            return
        of = seed * 1_000_000 + number
        case = {**make(name, of, has_wrong and of % 3 == 0), **(fields or {})}
        _check(name, case, counts, lambda text: None, shrinks=shrinks)


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

"""A short run of the fuzzer, and that it finds what it is there for. The long one: make fuzz."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest

from fuzz import engine, runner, search as searching
from fuzz.__main__ import main
from fuzz.common import Counts, Problem, interruptible
from fuzz.search import FAMILIES, run_share, search, shrink
from graphrt.gc_pause import frozen_heap


@pytest.fixture(autouse=True)
def _fuzzing() -> Iterator[None]:
    with interruptible(), engine.touching(), frozen_heap():
        yield


# Enough for every kind of case that is asked for below; ``make fuzz`` takes far more.
@pytest.mark.parametrize(("name", "num_steps"), [("engine", 200), ("runner", 800)])
def test_random_cases_served_find_nothing(name, num_steps, capsys):
    counts = Counts()
    search(name, 7, num_steps, counts)
    assert counts.is_clean, capsys.readouterr().out
    assert getattr(counts, f"{name}_steps") >= num_steps
    assert counts.faults > 0
    assert counts.eager
    assert name == "engine" or counts.refused


@pytest.mark.parametrize("name", FAMILIES)
def test_case_of_one_seed_made_twice_is_the_same(name):
    made = [FAMILIES[name].make_case(5) for _ in range(2)]
    assert made[0] == made[1]
    counts = [Counts(), Counts()]
    for case, its in zip(made, counts, strict=True):
        FAMILIES[name].run_case(case, its)
    assert counts[0] == counts[1]


SMALL: dict[str, object] = {"runtime": None, "dtype": "float64", "width": 2, "num_runs": 1}
ONCE_WRONG = {
    # Without warm-ups, a graph made anew what eager execution keeps of its first input.
    (9000153, True): {
        **SMALL,
        "ops": [
            ["pooled_rows"],
            ["in_place_ops"],
            ["eager_host"],
            ["in_place_ops"],
            ["wrong_rows"],
        ],
        "sizes": {"rows": [13]},
        "modes": ["PIECEWISE"],
        "warmups": 0,
    },
    # Rows that one run reads and then writes, beside a row for the padding.
    (5000074, False): {
        **SMALL,
        "ops": [["recall"], ["scatter"]],
        "sizes": {"rows": [10]},
        "modes": ["FULL"],
    },
    # A run that noticed what was replaced, and whose observer then failed.
    (1000228, False): {
        **SMALL,
        "ops": [["stacked"]],
        "outputs": "single",
        "policy": "clone",
        "poison": "recording",
        "capture": "all",
        "specs_by_key": False,
        "on_capture_error": "raise",
        "padding": "zero",
        "arbitrary_index": False,
        "observe": None,
        "num_runs": 51,
        "interrupts": False,
        "keeps": False,
    },
}


@pytest.mark.parametrize(("named", "changes"), ONCE_WRONG.items())
def test_case_that_was_wrong_once_finds_nothing(named, changes):
    seed, wrong = named
    counts = Counts()
    runner.run_case({**runner.make_case(seed, wrong), **changes}, counts)
    assert counts.is_clean
    assert counts.refused == wrong


def test_model_that_answers_wrongly_is_found_and_shrunk():
    """The callable itself reads its padding, declared as if it did not."""
    case = {
        **runner.make_case(3),
        "runtime": None,
        "dtype": "float64",
        "ops": [["double"], ["divided_by_rows"], ["negate"]],
        "sizes": {"rows": [4]},
        "capture": "all",
        "keys_of_caller": False,
        "verify_first_replay": False,
        "verify_every": None,
        "on_miss": "eager",
        "weights": 0.0,
        "reopen": 0.0,
    }
    with pytest.raises(Problem) as caught:
        runner.run_case(case, Counts())
    assert caught.value.kind == "wrong"
    simpler, problem = shrink("runner", case, caught.value)
    assert problem.kind == "wrong"
    assert simpler["ops"] == [["divided_by_rows"]]
    assert not simpler["strided"]


def test_case_alone_run_prints_its_seed_and_values(capsys):
    assert main(["--only", "runner", "--case", "4", "--set", "num_runs=3"]) == 0
    printed = capsys.readouterr().out
    assert "--case 4 --set num_runs=3" in printed
    assert "runner steps, 0 wrong, 0 unexplained eager, 0 leaks" in printed.splitlines()[-1]


def test_cases_of_a_seed_are_shared_out_among_processes(monkeypatch):
    seeds: list[int] = []

    def note(name, case, counts, say, **options):
        seeds.append(case["seed"])
        counts.engine_steps += 10
        counts.eager["NO_KEY"] = counts.eager.get("NO_KEY", 0) + 1

    monkeypatch.setattr(searching, "_check", note)
    asked = Namespace(
        no_shrink=True,
        seed=2,
        engine_steps=60,
        processes=3,
        only="engine",
        runner_steps=0,
        set=[],
        wrong=True,
    )
    total = sum((run_share(asked, process) for process in range(3)), Counts())
    assert sorted(seeds) == list(range(2_000_000, 2_000_006))
    assert (total.engine_steps, total.eager) == (60, {"NO_KEY": 6})

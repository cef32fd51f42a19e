"""Policies on one traffic: which graph serves which step, and whether the tokens are the same."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from graphrt import CUDAGraphMode, Observer, Reason, RuntimeMode
from graphrt_llm import LLMEngine
from graphrt_llm.demo.compare import (
    TIE_TOLERANCE,
    MakeEngine,
    Outcome,
    Policy,
    compare_policies,
    tie_tolerance,
)
from graphrt_llm.demo.inputs import MAX_NUM_SEQS, Inputs, Options, read_inputs
from graphrt_llm.demo.report import are_identical, as_json, as_page, findings
from graphrt_llm.demo.setup import CAPTURE_SIZES, Prepared, prepare
from graphrt_llm.errors import EngineStateError

ALL = (
    CUDAGraphMode.NONE,
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
)


class Phases:
    """Keeps the last progress of each phase."""

    def __init__(self) -> None:
        self.captured: dict[CUDAGraphMode, tuple[int, int]] = {}
        self.served: dict[CUDAGraphMode, tuple[int, int]] = {}

    def capturing(self, mode: CUDAGraphMode, done: int, total: int) -> None:
        self.captured[mode] = (done, total)

    def serving(self, mode: CUDAGraphMode, done: int, total: int) -> None:
        self.served[mode] = (done, total)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    asked = Options(None, None, "safetensors", 25, ALL, "simulated", None, None, seed=3)
    return read_inputs(asked)


@pytest.fixture(scope="module")
def prepared(inputs: Inputs) -> Prepared:
    return prepare(inputs)


def compared(prepared: Prepared, modes: Sequence[CUDAGraphMode], phases: Phases) -> list[Outcome]:
    policies = [policy for policy in prepared.policies if policy[1] in modes]
    return compare_policies(
        policies, prepared.load, tie_tolerance=prepared.tie_tolerance, phases=phases
    )


def made_by(make_engine: MakeEngine) -> list[Policy]:
    return [(mode.name, mode, make_engine) for mode in ALL]


@pytest.fixture(scope="module")
def phases() -> Phases:
    return Phases()


@pytest.fixture(scope="module")
def outcomes(prepared: Prepared, phases: Phases) -> dict[CUDAGraphMode, Outcome]:
    return dict(zip(ALL, compared(prepared, ALL, phases), strict=True))


def test_all_policies_produce_the_same_tokens(
    outcomes: dict[CUDAGraphMode, Outcome], prepared: Prepared
) -> None:
    assert are_identical(list(outcomes.values()))
    for outcome in outcomes.values():
        assert outcome.comparison == (True, 0, ())
        assert len(outcome.tokens) == len(prepared.load.requests)
        assert all(outcome.tokens.values())


def test_every_policy_gets_the_same_batches(outcomes: dict[CUDAGraphMode, Outcome]) -> None:
    totals = {outcome.run.metrics.total()[:3] for outcome in outcomes.values()}
    assert len(totals) == 1
    eager = outcomes[CUDAGraphMode.NONE].run.metrics
    assert eager.by_mode()[RuntimeMode.NONE] == eager.total()


def test_full_and_piecewise_misses_only_steps_above_its_sizes(
    outcomes: dict[CUDAGraphMode, Outcome],
) -> None:
    steps = outcomes[CUDAGraphMode.FULL_AND_PIECEWISE].run.metrics.steps
    modes_and_reasons = {(kind.mode, kind.uniform) for kind in steps}
    # A decode batch holds at most MAX_NUM_SEQS tokens, so it always lies within the sizes.
    assert CAPTURE_SIZES[-1] > MAX_NUM_SEQS
    assert modes_and_reasons == {
        (RuntimeMode.FULL, True),
        (RuntimeMode.PIECEWISE, False),
        (RuntimeMode.NONE, False),
    }
    reasons = {kind.reason for kind in steps if kind.mode is RuntimeMode.NONE}
    assert reasons == {Reason.ABOVE_MAX}


def test_every_policy_runs_in_the_modes_it_promises(outcomes: dict[CUDAGraphMode, Outcome]) -> None:
    for mode, outcome in outcomes.items():
        for kind in outcome.run.metrics.steps:
            promised = mode.decode_mode() if kind.uniform else mode.mixed_mode()
            if kind.mode is RuntimeMode.NONE:
                missed = Reason.ABOVE_MAX if promised else Reason.MODE_NONE
                assert kind.reason is missed
            else:
                assert kind.mode is promised
                assert kind.reason in {Reason.HIT, Reason.PADDED}


def test_captures_are_counted(outcomes: dict[CUDAGraphMode, Outcome]) -> None:
    for outcome in outcomes.values():
        keys = outcome.runtime.resolved.plan.keys
        captures = outcome.run.metrics.captures
        assert {mode: totals.programs for mode, totals in captures.items()} == {
            mode: len(its_keys) for mode, its_keys in keys.items() if its_keys
        }
        assert outcome.run.capture_seconds == (outcome.runtime.capture_seconds if captures else 0)
        totals = outcome.run.metrics.captures_of_all()
        assert totals.graph_bytes == outcome.runtime.graph_bytes
        assert (outcome.run.capture_seconds > 0) == (totals.programs > 0)
        assert not outcome.run.metrics.failures
        assert not outcome.run.metrics.verifications.different


def test_progress_reaches_the_end(phases: Phases, outcomes: object, prepared: Prepared) -> None:
    num_requests = len(prepared.load.requests)
    assert phases.served == dict.fromkeys(ALL, (num_requests, num_requests))
    for done, total in phases.captured.values():
        assert done == total
    assert phases.captured[CUDAGraphMode.FULL_AND_PIECEWISE][1] > 0


def test_the_json_object_holds_the_contract(
    outcomes: dict[CUDAGraphMode, Outcome], inputs: Inputs
) -> None:
    printed = as_json(inputs, list(outcomes.values()), Path("r.html"))
    assert printed["device"] == "simulated"
    assert printed["num_requests"] == 25
    assert printed["tokens_identical"] is True
    assert printed["ties"] == 0
    assert list(printed["modes"]) == [mode.name for mode in ALL]
    for summary in printed["modes"].values():
        assert sum(summary["runtime_modes"].values()) == summary["steps"]
        assert sum(summary["miss_reasons"].values()) == summary["runtime_modes"]["NONE"]
        assert summary["seconds"] > 0
        assert summary["step_time_ratio_to_none"] > 0


def test_the_page_shows_plan_and_scaling(
    outcomes: dict[CUDAGraphMode, Outcome], inputs: Inputs
) -> None:
    page = as_page(inputs, list(outcomes.values()))
    plan, padding, pieces, adjustments, failures, _ = page.tables
    assert all(row.cells[1:] == ("-", "-") for row in padding.rows)  # No adapters, no drafts.
    assert not pieces.rows  # Level 0.
    assert [row.name for row in plan.rows] == [mode.name for mode in ALL]
    assert adjustments.rows == failures.rows == ()
    assert any("multiplied by" in finding for finding in page.findings)


def test_a_single_policy_is_compared_with_nothing(
    prepared: Prepared, outcomes: dict[CUDAGraphMode, Outcome]
) -> None:
    [alone] = compared(prepared, ALL[3:], Phases())
    assert alone.tokens == outcomes[CUDAGraphMode.NONE].tokens
    assert alone.comparison.identical
    assert "no other policy" in findings([alone])[0]


def other_weights(prepared: Prepared) -> Prepared:
    """The same, but every policy with graphs gets a model with other weights."""
    asked = Options(None, None, "safetensors", 5, ALL, "simulated", None, None, seed=4)
    strange = prepare(read_inputs(asked))

    def make_engine(mode: CUDAGraphMode, observer: Observer) -> LLMEngine:
        (_, _, make), *_ = (prepared if mode is CUDAGraphMode.NONE else strange).policies
        return make(mode, observer)

    return prepared._replace(
        policies=made_by(make_engine),
        load=prepared.load._replace(requests=prepared.load.requests[:5]),
    )


def test_other_tokens_are_found_and_named(prepared: Prepared) -> None:
    modes = (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)
    [none, full] = compared(other_weights(prepared), modes, Phases())
    assert not are_identical([none, full])
    sentences = findings([none, full])
    assert "DIFFER" in sentences[0]
    first = full.comparison.differences[0]
    assert sentences[1].startswith(
        f"FULL_DECODE_ONLY: request {first.request_id} differs from NONE at output token "
        f"{first.position}, "
    )
    assert first.margin > prepared.tie_tolerance
    # The engine ran further steps for the margins, which are not counted.
    assert none.run.metrics.total()[:3] == full.run.metrics.total()[:3]


def test_differences_below_the_tolerance_are_ties(prepared: Prepared) -> None:
    modes = (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)
    lenient = other_weights(prepared)._replace(tie_tolerance=math.inf)
    outcomes = compared(lenient, modes, Phases())
    assert are_identical(outcomes)
    assert outcomes[1].comparison.ties > 0
    assert "ties" in findings(outcomes)[0]


def test_the_tolerance_grows_with_the_errors_of_layers() -> None:
    assert tie_tolerance("float64", 2) == tie_tolerance("float64", 4) == TIE_TOLERANCE["float64"]
    assert 0.47 < tie_tolerance("bfloat16", 28) == pytest.approx(0.66, abs=0.01)


def test_an_interrupt_closes_the_engine(prepared: Prepared) -> None:
    made: list[LLMEngine] = []

    def make_engine(mode: CUDAGraphMode, observer: Observer) -> LLMEngine:
        made.append(prepared.policies[0][2](mode, observer))
        return made[-1]

    class Impatient(Phases):
        def serving(self, mode: CUDAGraphMode, done: int, total: int) -> None:
            if done:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        compared(prepared._replace(policies=made_by(make_engine)), ALL, Impatient())
    [engine] = made
    with pytest.raises(EngineStateError, match="closed"):
        engine.step()

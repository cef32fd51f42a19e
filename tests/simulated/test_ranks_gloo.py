"""Several ranks, one process each over gloo: they capture, decide, fail and leave together."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from ranks_lab import Ended, all_said, launcher

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

SCENARIOS = (
    "wires",
    "steps",
    "warm-up fails and is skipped",
    "comparison fails and is skipped",
    "warm-up fails and is raised",
    "comparison fails and is raised",
    "interrupted",
    "micro-batch fails",
    "resource sets for pieces",
    "resource sets for micro-batches",
    "mismatch",
    "sampled comparison raises",
    "engines",
    "experts",
    "micro-batches",
    "tensor parallel",
)


def launch(scenario: str, world: int = 2, timeout_s: float = 300) -> list[Ended]:
    return launcher().launch(scenario, world, timeout_s)


@cache
def healthy() -> list[list[Any]]:
    """One launch of two ranks for all scenarios after which they live; both end with status 0."""
    return all_said(launch(",".join(SCENARIOS)))


def said_in(scenario: str) -> list[list[dict[str, Any]]]:
    """What each rank said in one scenario."""
    found = []
    for said in healthy():
        starts = [n for n, line in enumerate(said) if "scenario" in line] + [len(said)]
        number = next(n for n in starts if said[n] == {"scenario": scenario})
        found.append(said[number + 1 : starts[starts.index(number) + 1]])
    return found


def steps(name: str) -> list[tuple[Any, ...]]:
    """Mode, size and reason of one step on each rank."""
    lines = [next(line for line in said if line["name"] == name) for said in said_in("steps")]
    return [(line["mode"], line["tokens"], line["reason"]) for line in lines]


def test_both_wires_and_a_rank_late_in_time_agree() -> None:
    assert said_in("wires") == [[{"ok": True}], [{"ok": True}]]


def test_unequal_batches_take_one_graph() -> None:
    both = [("PIECEWISE", 8, "HIT"), ("PIECEWISE", 8, "PADDED")]
    assert steps("padded to the larger") == both
    assert steps("one alone would be smaller") == [("PIECEWISE", 8, "PADDED")] * 2


def test_idle_rank_is_there_in_every_collective() -> None:
    assert steps("rank 1 idle") == [("PIECEWISE", 4, "HIT"), ("PIECEWISE", 4, "PADDED")]
    beside = steps("eager beside an idle one")
    assert beside == [("NONE", 1, "RANKS_DISAGREE"), ("NONE", 9, "ABOVE_MAX")]
    assert [said[5] for said in said_in("steps")] == [{"name": "all idle", "idle": True}] * 2


def test_eager_step_has_each_ranks_own_size() -> None:
    found = steps("too large on rank 0")
    assert found == [("NONE", 12, "ABOVE_MAX"), ("NONE", 3, "RANKS_DISAGREE")]
    first, second = (said[3] for said in said_in("steps"))
    assert first["across"] == second["across"] == [12, 3]
    assert second["because"] == ["ABOVE_MAX", 0]


def test_replaced_weight_of_one_rank_makes_all_eager() -> None:
    found = steps("replaced")
    assert found == [("NONE", 4, "RANKS_DISAGREE"), ("NONE", 4, "INVALIDATED")]
    assert steps("captured again") == [("PIECEWISE", 4, "HIT")] * 2


@pytest.mark.parametrize("phase", ["warm-up", "comparison"])
def test_failure_of_one_rank_drops_the_key_on_all(phase: str) -> None:
    for rank, said in enumerate(said_in(f"{phase} fails and is skipped")):
        told, missed, served = said
        assert told["missing"] == {"4": "CAPTURE_FAILED"}
        error = "ValueError" if phase == "warm-up" else "VerificationError"
        assert (f"a failure on rank 1: {error}" in told["failures"]["4"]) is (rank == 0)
        assert (missed["mode"], missed["reason"]) == ("NONE", "CAPTURE_FAILED")
        assert (served["mode"], served["tokens"]) == ("PIECEWISE", 8)


def test_failed_micro_batch_of_one_rank_drops_the_key_on_all() -> None:
    for rank, (told, whole, of_4, split, of_2) in enumerate(said_in("micro-batch fails")):
        assert told["missing"] == ["4 / 2"]
        assert "in micro-batch 1 of 2" in told["failures"][0]
        assert ("a failure on rank 1: ValueError" in told["failures"][0]) is (rank == 0)
        assert (whole["mode"], of_4) == ("FULL", {"ubatches": 1})
        assert (split["mode"], of_2) == ("FULL", {"ubatches": 2})


@pytest.mark.parametrize(
    ("form", "mode", "ubatches"), [("pieces", "PIECEWISE", 1), ("micro-batches", "FULL", 2)]
)
def test_rank_whose_resource_sets_another_value_meets_the_others_eagerly(
    form: str, mode: str, ubatches: int
) -> None:
    replaying, setting = (
        [tuple(line.values()) for line in said] for said in said_in(f"resource sets for {form}")
    )
    served, missed = (mode, "HIT", ubatches), ("NONE", "INVALIDATED", ubatches)
    assert replaying == [served] * 4
    assert setting == [served, missed] * 2


def test_failure_that_is_raised_ends_the_capture_of_all() -> None:
    first, second = said_in("warm-up fails and is raised")
    assert (first[0]["error"], second[0]["error"]) == ("PeerFailedError", "ValueError")
    assert "a failure on rank 1: ValueError: this rank cannot" in first[0]["text"]
    first, second = said_in("comparison fails and is raised")
    assert (first[0]["error"], second[0]["error"]) == ("PeerFailedError", "VerificationError")
    assert first[1]["missing"] == second[1]["missing"] == {"4": "CAPTURE_FAILED"}


def test_device_left_in_a_collective_ends_the_capture_of_all() -> None:
    first, second = ([*map(dict, said[1:])] for said in all_said(launch("left waiting")))
    assert [line.get("error") for told in first for line in told.values()] == [
        "RankLostError",
        "RankLostError",
        None,
    ]
    assert "stays in memory until the process exits" in first[0]["capture"]["text"]
    assert first[1]["close"]["s"] < 5
    assert "rank 0 left it: RankLostError: the device" in second[0]["capture"]["text"]
    assert set(second[1]["close"]) == {"s"}


def test_failed_step_of_one_rank_gives_no_other_wrong_results() -> None:
    errors = [
        [told.get("error") for line in said[1:] for told in line.values()]
        for said in all_said(launch("left waiting in a step"))
    ]
    lost = ["RankLostError"] * 2
    assert errors[0] == [None, None, None, None, *lost]
    assert errors[1] == ["ValueError", None, None, "ValueError", *lost]


def test_interrupt_of_one_rank_interrupts_all() -> None:
    for stopped, kept, done in said_in("interrupted"):
        assert stopped["error"] == "KeyboardInterrupt"
        assert kept["num_missing"] == 3
        assert (done["num_missing"], done["mode"], done["tokens"]) == (0, "PIECEWISE", 4)


def test_unequal_plans_name_the_first_line_that_differs() -> None:
    for (told,) in said_in("mismatch"):
        assert told["error"] == "PlanMismatchError"
        assert "(num_tokens=4) on rank 0;" in told["text"]
        assert "(num_tokens=2) on rank 1" in told["text"]


def test_sampled_comparison_of_one_rank_raises_on_all() -> None:
    first, second = said_in("sampled comparison raises")
    for rank, said in enumerate((first, second)):
        served = [said[0], said[3]]
        assert [(line["mode"], line["tokens"]) for line in served] == [("PIECEWISE", 2)] * 2
        assert [said[n]["reason"] for n in (2, 5)] == ["CAPTURE_FAILED"] * 2, rank
    for n, error in ((1, "ValueError"), (4, "InputMismatchError")):
        assert (first[n]["error"], second[n]["error"]) == ("PeerFailedError", error)
        assert f"a failure on rank 1: {error}" in first[n]["text"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_ranks_take_kept_traces_alone_or_together() -> None:
    first, second = all_said(launch("compiled"))
    kept = [[line["is_kept"] for line in said if "name" in line] for said in (first, second)]
    assert kept == [[False, True, True], [False, True, False]], (first, second)
    for said in (first, second):
        assert [line["modes"] for line in said if "name" in line] == [["PIECEWISE"] * 2] * 3


def test_ranks_of_an_engine_give_the_tokens_of_one() -> None:
    for rank, said in enumerate(said_in("engines")):
        shared = {"same": True, "ranks": [rank, 2]}
        assert said == [{"overlap": False, **shared}, {"overlap": True, **shared}]


def test_ranks_that_share_experts_give_the_tokens_of_one() -> None:
    for first, *modes in said_in("experts"):
        assert first["largest"] < 1e-12
        assert [line["mode"] for line in modes] == [
            "NONE",
            "FULL_DECODE_ONLY",
            "FULL_AND_PIECEWISE",
        ]
        assert all(line["same"] and not line["missing"] for line in modes)


def test_ranks_that_share_experts_split_their_steps() -> None:
    for eager, graphs, unsplit in said_in("micro-batches"):
        assert (eager["same"], eager["split"]) == (True, 0)
        assert (graphs["same"], graphs["split"]) == (True, 8)
        assert unsplit == {"same": True, "split": 0, "reasons": ["NOT_PROFITABLE", "NO_FULL_GRAPH"]}


def test_ranks_that_share_layers_give_the_tokens_of_one() -> None:
    for said in said_in("tensor parallel"):
        assert all(line["largest"] < 1e-12 for line in said[:2])
        runs = {line.pop("name"): line for line in said[2:-1]}
        assert all(line["same"] and not line["missing"] for line in runs.values())
        assert [name for name, line in runs.items() if not line["replayed"]] == ["eager"]
        assert [name for name, line in runs.items() if line["split"]] == ["split"]
        assert [name for name, line in runs.items() if line["spared"]] == ["unchecked"]
        assert all(line["margin"] for line in runs.values())


def test_ranks_that_share_layers_with_other_batches_all_raise() -> None:
    for said, tokens in zip(said_in("tensor parallel"), (3, 23), strict=True):
        assert said[-1]["error"] == "RankDesyncError"
        assert f"(here: {tokens} tokens)" in said[-1]["notes"][0]


def test_ranks_that_share_layers_notice_what_one_does() -> None:
    noticed = [
        {"seed": "EngineConfigError"},
        {"blocks": "EngineConfigError", "groups": 0},
        {"later": "RankDesyncError"},
        {"tokens": "RankDesyncError"},
        {"abort": "RankDesyncError"},
        {"step": "RankDesyncError"},
        {"same": True},
    ]
    (_, *first), (_, *second) = all_said(launch("apart"))
    assert first == [*noticed, {"layer": "RankLostError"}]
    assert second == [*noticed, {"layer": "ValueError"}]


def said_at_the_end(ended: Ended) -> list[Any]:
    assert ended.status == 0, ended.stderr
    return ended.said[1:]


def test_rank_that_comes_too_late_is_named() -> None:
    first, second = launch("late")
    (told,) = said_at_the_end(first)
    assert (told["error"], told["missing"]) == ("RankTimeoutError", [1])
    (told,) = said_at_the_end(second)
    assert told["error"] == "RankLostError"


def test_rank_that_dies_is_named_within_five_seconds() -> None:
    first, second = launch("dies")
    assert second.status == 3
    *refused, told, again, closed, store = said_at_the_end(first)
    assert refused == [{"timeout": "ConfigError"}] * 2
    assert (told["error"], told["missing"]) == ("RankLostError", [1])
    assert told["s"] < 5
    assert again == {"again": "RankLostError"}
    # Closed, it still says so, and keeps nothing of what the error has ended.
    assert closed == {"kept": False, "again": "RankLostError"}
    assert store == {"post": "RankLostError", "read": "RankLostError"}


def test_rank_with_the_store_that_is_stopped_is_named() -> None:
    _, second = launch("stopped", timeout_s=90)
    told, another = said_at_the_end(second)
    assert (told["error"], told["missing"]) == ("RankLostError", [0])
    assert "no answer within" in told["text"]
    assert another["another"]["error"] == "RankLostError"


def test_four_ranks_take_500_random_steps_together() -> None:
    found = [said[1]["modes"] for said in all_said(launch("many", world=4))]
    assert [sum(modes.values()) for modes in found] == [500] * 4
    graphs = [{k: n for k, n in modes.items() if k[:4] in ("FULL", "PIEC")} for modes in found]
    assert graphs == [graphs[0]] * 4
    assert {"PIECEWISE 8", "FULL 4"} <= set(graphs[0])

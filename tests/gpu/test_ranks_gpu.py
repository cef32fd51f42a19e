"""Two ranks on two GPUs: messages over NCCL, and its collectives inside graphs."""

from __future__ import annotations

import pytest
import torch

from ranks_lab import all_said, launch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_two_gpus_agree_and_replay_their_collective() -> None:
    for rank, said in enumerate(
        all_said(launch("tests/ranks_script.py", "on gpus", timeout_s=240))
    ):
        assert said[1:4] == [{"wires": True}, {"missing": []}, {"hits": True}]
        own = "NONE INVALIDATED" if rank else "FULL HIT"
        assert said[4] == {"set_by_resource": [own]}
        dropped, missed, served = said[5:]
        assert set(dropped["missing"]) == {"4 CAPTURE_FAILED"}
        assert ("a failure on rank 1: ValueError" in dropped["failures"][0]) is (rank == 0)
        assert (missed, served) == ({"mode": "NONE"}, {"mode": "FULL"})


def test_two_gpus_that_share_a_model_give_the_tokens_of_one() -> None:
    for said in all_said(launch("tests/ranks_script.py", "engines on gpus", timeout_s=240)):
        assert [line["name"] for line in said[1:]] == ["experts"] * 2 + ["layers"] * 2
        assert [line["is_split"] for line in said[1:]] == [False, True] * 2
        for line in said[1:]:
            assert line["same"]
            assert not line["missing"]
            assert line["modes"] == ["FULL", "PIECEWISE"]


def test_failed_warm_up_of_one_rank_leaves_none_waiting() -> None:
    first, second = all_said(launch("tests/ranks_script.py", "left in a warm-up", timeout_s=120))
    told = first[1]["capture"]
    assert (told["error"], told["s"] < 14) == ("RankLostError", True)
    assert "a collective that still waits for another rank" in told["text"]
    assert "giving it up did not end it" not in told["text"]
    assert second[1]["capture"]["error"] == "RankLostError"
    assert "rank 0 left it: RankLostError" in second[1]["capture"]["text"]
    for said in (first, second):
        assert set(said[2]["close"]) == {"s"}


def test_failed_step_of_one_rank_gives_no_other_wrong_results() -> None:
    errors = [
        [told.get("error") for line in said[1:] for told in line.values()]
        for said in all_said(launch("tests/ranks_script.py", "failed step on gpus", timeout_s=120))
    ]
    assert errors == [[None, "RankLostError", None], ["ValueError", "RankLostError", None]]


@pytest.mark.parametrize(
    ("scenario", "steps", "close"),
    [
        ("left in a step", ["RankLostError"], None),
        ("left in a step read later", [None, "RankTimeoutError"], "RankLostError"),
        ("left in a step never read", [None], "RankLostError"),
    ],
)
def test_rank_left_alone_in_a_graph_ends_in_its_time_out(
    scenario: str, steps: list[str | None], close: str | None
) -> None:
    first, _ = all_said(launch("tests/ranks_script.py", scenario, timeout_s=120))
    assert first[1] == {"served": True}
    assert [line["step"].get("error") for line in first[2:-1]] == steps
    assert first[-1]["close"].get("error") == close
    assert all(told["s"] < 14 for line in first[2:] for told in line.values())

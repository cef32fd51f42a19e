"""A runtime with ranks, alone: what it refuses, and steps of a world of one."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt import Reason, RuntimeConfig
from graphrt.errors import ConfigError, LibraryClosedError, MissError, RankLostError
from graphrt.events import Invalidated, RanEager
from graphrt.parallel import NUM_WORDS, InProcessExchange, Lockstep, launch_ranks
from graphrt.parallel.exchange import _Storage
from graphrt.runner.comparisons import Comparisons
from graphrt.runtime import ranks
from lab import FULL, NONE, PIECEWISE, BusyDevice, RuntimeLab, assert_equal, values


def alone() -> RuntimeLab:
    return RuntimeLab(ranks=InProcessExchange(1).ranks[0])


def test_rank_alone_serves_as_a_runtime_without_ranks() -> None:
    with alone() as lab, RuntimeLab() as other:
        for each in (lab, other):
            each.runtime.capture()
        for num_tokens, num_reqs in ((3, 3), (8, 2), (12, 4)):
            assert_equal(lab.step(num_tokens, num_reqs), other.step(num_tokens, num_reqs))
            assert lab.runtime.last_decision == other.runtime.last_decision
        lab.step(3, 3, uniform=True)
        assert lab.runtime.last_decision.mode is FULL
        assert lab.runtime.last_settled.decision == lab.runtime.last_decision


def test_ranks_of_one_batch_compare_it_as_often_as_asked() -> None:
    (rank,) = InProcessExchange(1).ranks
    asked = {"ranks": {"same_batch": True, "check_every": 3}}
    with RuntimeLab(ranks=rank, asked=asked) as lab:
        lab.runtime.capture()
        rounds = []
        for _ in range(7):
            before = rank.num_rounds
            lab.step(3, 3)
            rounds.append(rank.num_rounds - before)
        assert rounds == [0, 0, 1, 0, 0, 1, 0]
        assert lab.runtime.step_idle() is False
        assert rank.num_rounds == before + 1


def test_rank_with_other_graphs_never_decides_by_itself() -> None:
    (rank,) = InProcessExchange(1).ranks
    asked = {"ranks": {"same_batch": True, "check_every": 9}}
    with RuntimeLab(ranks=rank, asked=asked) as lab:
        lab.runtime.capture()
        lab.model.weight = type(lab.model.weight)(lab.model.weight.detach() + 1)
        for _ in range(2):
            before = rank.num_rounds
            lab.step(3, 3)
            assert rank.num_rounds == before + 1


def test_comparison_meets_the_others_before_it_reads_results(monkeypatch) -> None:
    done, meet, replay = [], Lockstep._capture_round, Comparisons._replay_compared

    def met(self, phase, *more, **also):
        done.append(phase.name)
        return meet(self, phase, *more, **also)

    def replayed(*args):
        start = len(done)
        outputs = replay(*args)
        # What is read behind a replay never comes where another rank did not run it.
        assert done[start:] == ["COMPARE", "COMPARE"]
        done.append("REPLAYED")
        return outputs

    monkeypatch.setattr(Lockstep, "_capture_round", met)
    monkeypatch.setattr(Comparisons, "_replay_compared", replayed)
    with alone() as lab:
        lab.runtime.capture()
    assert "REPLAYED" in done


def test_runtime_whose_device_waits_for_a_rank_is_closed() -> None:
    device, (rank,) = BusyDevice(), InProcessExchange(1).ranks
    with RuntimeLab(ranks=rank, device=device) as lab:
        lab.runtime.capture()
        device.answers = (False,)
        with pytest.raises(RankLostError, match="still waits for another rank"):
            lab.runtime.close()
        lab.runtime.close()
        with pytest.raises(RankLostError):
            rank.start([0])
        with pytest.raises(LibraryClosedError):
            lab.runtime.dispatcher  # noqa: B018  It raises.


def test_rank_alone_without_a_batch_does_not_run() -> None:
    with alone() as lab:
        lab.runtime.capture()
        calls = lab.model.num_calls
        assert lab.runtime.step_idle() is False
        assert lab.model.num_calls == calls
        assert lab.runtime.last_settled is None


def test_rank_tells_the_others_that_it_excludes_piecewise(monkeypatch) -> None:
    votes, agree = [], Lockstep.agree
    monkeypatch.setattr(
        Lockstep,
        "agree",
        lambda self, vote, *more, **also: (votes.append(vote), agree(self, vote, *more, **also))[1],
    )
    with alone() as lab:
        lab.runtime.capture()
        for exclude in (frozenset(), frozenset({FULL}), frozenset({PIECEWISE})):
            lab.step(3, 3, uniform=True, exclude=exclude)
    assert [vote.takes_piecewise for vote in votes] == [True, True, False]
    assert lab.runtime.last_decision.mode is FULL


def test_replaced_weight_is_noticed_before_the_decision() -> None:
    with alone() as lab:
        lab.runtime.capture()
        lab.model.weight = type(lab.model.weight)(lab.model.weight.detach() + 1)
        lab.step(3, 3)
        assert lab.runtime.last_decision[::2] == (NONE, Reason.INVALIDATED)
        lab.runtime.capture()
        lab.step(3, 3)
        assert lab.runtime.last_decision.mode is not NONE


def test_one_graph_less_than_the_others_makes_every_step_eager() -> None:
    with alone() as lab:
        lab.runtime.capture()
        catalog = lab.runtime.library.catalog
        entry = next(e for e in catalog if e.key.num_tokens == 8)
        catalog.invalidate(entry.program, ("a weight of this rank alone",))
        lab.runtime.check_externals()
        lab.step(3, 2)
        assert lab.runtime.last_decision[::2] == (NONE, Reason.INVALIDATED)
        lab.runtime.capture()
        lab.step(3, 2)
        assert lab.runtime.last_decision.mode is not NONE


@pytest.mark.parametrize(
    "other",
    [
        {"compilation": {"custom_ops": ("none",)}},
        {"compilation": {"cudagraph_num_of_warmups": 3}},
        {"verify_every": 7},
        {"verify_first_replay": False},
        {"on_miss": "strict"},
        {"on_capture_error": "skip"},
    ],
)
def test_ranks_that_run_otherwise_have_other_plans(monkeypatch, other) -> None:
    texts = []
    monkeypatch.setattr(Lockstep, "require_same_plan", lambda _, text: texts.append(text))
    for asked in ({}, other):
        with RuntimeLab(asked=asked, ranks=InProcessExchange(1).ranks[0]):
            pass
    assert texts[0] != texts[1]


def test_ranks_with_other_multiprocessors_have_other_plans(monkeypatch) -> None:
    texts = []
    monkeypatch.setattr(Lockstep, "require_same_plan", lambda _, text: texts.append(text))
    for most in (None, 8):
        control: Any = SimpleNamespace(max_comm_sms=lambda most=most: most)
        with RuntimeLab(ranks=InProcessExchange(1).ranks[0], sm_control=control):
            pass
    assert "SMs of communication and computation = (20, 112)" in texts[0]
    assert "(8, 124)" in texts[1]


@pytest.mark.parametrize(
    ("own", "other", "agreed"),
    [
        ((100, 7), (60, None), (60, 7)),
        ((None, None), (None, 3), (None, 3)),
        ((60, 3), (100, 7), (60, 3)),
        ((2**63 - 1, None), (None, 2**63 - 1), (None, None)),
    ],
)
def test_ranks_agree_on_the_least_room_for_graphs(
    monkeypatch, own: Any, other: Any, agreed: Any
) -> None:
    told: list[list[int]] = []

    def agree(exchange: Any, numbers: list[int], timeout_s: float) -> list[int]:
        told.append(numbers)
        return [min(pair) for pair in zip(numbers, told[0], strict=True)]

    monkeypatch.setattr(ranks, "agree_least", agree)
    (exchange,) = InProcessExchange(1).ranks
    for num_bytes, num_graphs in (other, own):
        config = RuntimeConfig(max_graph_bytes=num_bytes, max_graphs=num_graphs)
        found, _ = ranks.agree_on_facts(exchange, config, None)
    assert (found.max_graph_bytes, found.max_graphs) == agreed
    assert max(map(max, told)) < 2**62


def test_what_one_rank_may_not_do_is_refused() -> None:
    with alone() as lab, pytest.raises(ConfigError, match="one rank among several"):
        lab.runtime.capture_next()
    with RuntimeLab() as lab, pytest.raises(ConfigError, match="step_idle"):
        lab.runtime.step_idle()
    for asked in ({"ranks": {"step_timeout_s": 5}}, {"ranks": {"check_every": 5}}):
        with pytest.raises(ConfigError, match="ranks"):
            RuntimeLab(asked=asked)
    with pytest.raises(ConfigError, match="check_every"):
        RuntimeLab(ranks=InProcessExchange(1).ranks[0], asked=asked)


class LateWork:
    """Ends just as a wait for it gives up."""

    def __init__(self, error: RuntimeError | None) -> None:
        self.error, self.num_waits = error, 0

    def wait(self, *timeout: Any) -> None:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return True


def test_message_that_comes_as_the_wait_ends_is_taken() -> None:
    storage = _Storage(NUM_WORDS, 2, is_on_device=False)
    assert storage.wait(LateWork(None), 0.1)
    with pytest.raises(RuntimeError, match="broken"):
        storage.wait(LateWork(RuntimeError("broken")), 0.1)


def test_termination_of_the_launcher_ends_its_ranks() -> None:
    # In one write, so that the lines of two ranks do not mix.
    rank = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
    launcher = (
        f"from graphrt import launch_ranks; raise SystemExit(launch_ranks(2, ['-c', {rank!r}]))"
    )
    started = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    ranks = [int(started.stdout.readline()) for _ in range(2)]
    started.terminate()
    assert started.wait(timeout=30) == 143
    started.stdout.close()
    for each in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


def test_rank_that_cannot_be_started_ends_the_others(monkeypatch) -> None:
    started: list[Any] = []

    class Second(subprocess.Popen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if started:
                raise OSError("no memory for another process")
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Second)
    with pytest.raises(OSError, match="another process"):
        launch_ranks(2, ["-c", "import time; time.sleep(60)"])
    assert started[0].wait(timeout=30) < 0


class Scaled:
    """A callable and its resource: rows times a number that is set for each batch."""

    def __init__(self, bound: float = 9.0) -> None:
        self.number, self.bound = 1.0, bound

    def prepare(self, key: Any, step_info: float | None) -> None:
        self.number = 1.0 if step_info is None else step_info

    def __call__(self, *, x: Any, ids: Any, lens: Any) -> dict[str, Any]:
        rows = x * min(self.number, self.bound) + ids[:, None]
        return {"rows": rows, "lens": lens * 2}


class Echo(Scaled):
    """Returns its input where it leaves it as it is."""

    def __call__(self, *, x: Any, ids: Any, lens: Any) -> dict[str, Any]:
        return {"rows": x if self.number else x * 2, "lens": lens * 2}


def with_resource(
    mode: str, bound: float = 9.0, kind: type[Scaled] = Scaled, **asked: Any
) -> RuntimeLab:
    model, (rank,) = kind(bound), InProcessExchange(1).ranks
    return RuntimeLab(mode, model=model, resources=[model], ranks=rank, asked=asked)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_value_that_prepare_sets_and_no_example_had_runs_eager_between_ranks(mode: str) -> None:
    with with_resource(mode) as lab:
        lab.runtime.capture()
        lab.events.clear()
        given = values(3, 3)
        for number in (1.0, 5.0, 5.0, 1.0):
            out = lab.step(3, 3, step_info=number)
            assert torch.equal(out["rows"], given["x"] * number + given["ids"][:, None])
            reason = "PADDED" if number == 1.0 else "INVALIDATED"
            assert lab.runtime.last_decision.reason.name == reason
        told = [each for each in lab.events if isinstance(each, Invalidated)]
        assert [(each.num_programs, each.names) for each in told] == [(0, ("number",))]
        missed = [each.reason.name for each in lab.events if isinstance(each, RanEager)]
        assert missed == ["INVALIDATED"] * 2
        assert sum(graph.hits for graph in lab.runtime.report().graphs) == 2
        lab.step(3, 3, step_info=5.0)
        told_of_it = lab.runtime.explain(lab.runtime.last_decision)
        assert "Set by resources to what no example had: number." in told_of_it
        lab.runtime.capture()
        assert "Set by resources" not in lab.runtime.explain(lab.runtime.last_decision)


def test_outputs_of_a_step_that_ran_in_place_of_a_graph_stay_with_the_caller() -> None:
    with with_resource("FULL", kind=Echo) as lab:
        lab.runtime.capture()
        first = lab.step(3, 3, step_info=5.0)["rows"]
        kept = first.clone()
        lab.step(4, 4, seed=1)
        assert torch.equal(first, kept)


def test_value_that_prepare_sets_is_an_error_between_ranks_where_misses_are() -> None:
    with with_resource("FULL", on_miss="strict") as lab:
        lab.runtime.capture()
        with pytest.raises(MissError, match="number") as raised:
            lab.step(3, 3, step_info=5.0)
        assert raised.value.reason is Reason.INVALIDATED
        lab.step(3, 3)
        assert lab.runtime.last_decision.mode is FULL


def test_value_that_prepare_sets_is_trusted_once_ranks_have_compared_it() -> None:
    with with_resource("FULL", bound=1.0, verify_every=2) as lab:
        lab.runtime.capture()
        reasons = []
        for _ in range(3):
            lab.step(3, 3, step_info=5.0)
            reasons.append(lab.runtime.last_decision.reason.name)
        assert reasons == ["INVALIDATED", "PADDED", "PADDED"]

"""The rounds of ranks, seen from one of them; with several processes: tests of ranks over gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.config import RankConfig
from graphrt.errors import (
    PeerFailedError,
    RankDesyncError,
    RankLostError,
    RankTimeoutError,
)
from graphrt.parallel import (
    InProcessExchange,
    Lockstep,
    Phase,
    RankVote,
    Round,
    SplitRules,
    agree_least,
    decide,
    make_tag,
    pack,
)
from graphrt.parallel.agreement import FAILED, merge, pack_capture, read_capture

JOB: Any = SimpleNamespace(mode=RuntimeMode.FULL, key=BatchDescriptor(8))


class Told:
    """An exchange of two ranks whose other one answers what a test says."""

    rank, world, num_rounds, tells_sizes = 0, 2, 0, True

    def __init__(self, **texts: str) -> None:
        self.texts = texts
        self.answer: dict[str, Any] = {}
        self.sent: list[Any] = []

    def start(self, words: Any, **about: Any) -> Any:
        self.sent.append(words)
        self.num_rounds += 1
        other = list(words)
        if self.answer:
            tag = make_tag(Round.CAPTURE, 0, self.num_rounds - 1)
            _, _, phase, _, subject, *_ = words
            told = {"phase": Phase(phase), "subject": subject, "tag": tag, **self.answer}
            other = list(pack_capture(1, told.pop("phase"), told.pop("subject"), **told))
        merged = merge([words, other])
        return SimpleNamespace(result=lambda: merged, num_tokens_across_ranks=None)

    def post(self, name: str, text: str) -> None:
        self.texts[name] = text

    def read(self, name: str) -> str | None:
        return self.texts.get(name, "told")


def opened(**answer: Any) -> tuple[Told, Lockstep]:
    """A lockstep inside a capture; the other rank gives this answer to the next rounds."""
    exchange = Told()
    lockstep = Lockstep(exchange, RankConfig())  # type: ignore[arg-type]
    lockstep.capturing(lambda: "").__enter__()
    exchange.answer = answer
    return exchange, lockstep


@pytest.mark.parametrize("phase", ["warmup", "warmed", "capture", "captured"])
def test_failure_of_another_rank_fails_the_job_here(phase: str) -> None:
    _, lockstep = opened(failed=True)
    with pytest.raises(PeerFailedError, match="a failure on rank 1: told"):
        lockstep.gate(JOB, phase)
    # Told of its own failure, which the others know, it sends nothing more.
    exchange = lockstep.exchange
    num_rounds = exchange.num_rounds
    lockstep.gate(JOB, "failed")
    assert exchange.num_rounds == num_rounds


def test_failure_here_is_sent_where_the_others_wait() -> None:
    exchange, lockstep = opened()
    lockstep.gate(JOB, "capture")
    lockstep.gate(JOB, "failed")
    assert read_capture(exchange.sent[-1]).failed == 0
    assert exchange.sent[-1][2] == Phase.CAPTURED
    lockstep.gate(JOB, "warmup")
    lockstep.gate(JOB, "failed")
    assert read_capture(exchange.sent[-1]).failed == 0
    assert exchange.sent[-1][2] == Phase.WARMED


@pytest.mark.parametrize(("left", "error"), [(1, RankLostError), (2, KeyboardInterrupt)])
def test_rank_that_leaves_ends_the_capture_of_all(left: int, error: type[Exception]) -> None:
    _, lockstep = opened(phase=None, left=left)
    with pytest.raises(error, match="rank 1"):
        lockstep.gate(JOB, "warmup")


@pytest.mark.parametrize("answer", [{"subject": 5}, {"phase": Phase.COMPARE}])
def test_rank_at_another_key_is_an_error(answer: Any) -> None:
    _, lockstep = opened(**answer)
    with pytest.raises(RankDesyncError):
        lockstep.gate(JOB, "warmup")


def test_error_in_a_capture_is_told_to_the_others() -> None:
    exchange = Told()
    lockstep = Lockstep(exchange, RankConfig())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mine"), lockstep.capturing(lambda: ""):
        raise ValueError("mine")
    assert read_capture(exchange.sent[-1]).left == (1, 0)
    assert exchange.texts["left 0 by 0"] == "ValueError: mine"


def test_comparison_fails_on_all_ranks_or_none() -> None:
    exchange, lockstep = opened()

    def run() -> None:
        lockstep.before_run()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), lockstep.comparing(JOB):
        run()
    assert [words[2] for words in exchange.sent[-2:]] == [Phase.COMPARE, Phase.COMPARED]
    assert read_capture(exchange.sent[-1]).failed == 0
    exchange.answer = {"failed": True}
    with pytest.raises(PeerFailedError), lockstep.comparing(JOB):
        pass
    num_rounds = exchange.num_rounds
    lockstep.before_run()  # Outside a comparison nobody waits.
    assert exchange.num_rounds == num_rounds


def test_missing_rank_is_named_with_its_last_round() -> None:
    ranks = InProcessExchange(2).ranks
    ranks[1].post("round of 1", "WARMUP of FULL, 8 tokens")
    with (
        pytest.raises(RankTimeoutError) as caught,
        Lockstep(ranks[0], RankConfig()).capturing(lambda: ""),
    ):
        pass
    assert caught.value.missing == (1,)
    assert caught.value.__notes__ == ["rank 1 was last at: WARMUP of FULL, 8 tokens"]


def test_failed_step_of_a_rank_has_all_wait_and_vote_again() -> None:
    class Other(Told):
        last = 0

        def start(self, words: Any, **about: Any) -> Any:
            pending = super().start(words, **about)
            merged = [*pending.result()[:-1], max(words[-1], self.last)]
            self.last = 0
            return SimpleNamespace(result=lambda: merged, num_tokens_across_ranks=None)

    vote, waited = RankVote(0, 5, 8), []
    exchange = Other()
    lockstep = Lockstep(exchange, RankConfig())  # type: ignore[arg-type]
    for here, there in ((True, 0), (False, FAILED | 1), (True, FAILED | 1)):
        lockstep.is_unfinished, exchange.last = here, there
        agreed = lockstep.agree(vote, SplitRules(), wait=lambda: waited.append(1))
        assert agreed == decide(pack(vote), SplitRules())
    assert len(waited) == 3
    assert len(exchange.sent) == 6
    lockstep.is_unfinished = True
    with pytest.raises(RankLostError):
        lockstep.agree(vote, SplitRules(), wait=lost)
    assert lockstep.is_unfinished  # The others do not vote again either.


def lost() -> None:
    raise RankLostError("the device", expected="", found="", do="")


def test_least_of_each_number_is_agreed() -> None:
    class Other(Told):
        def start(self, words: Any, **about: Any) -> Any:
            merged = merge([words, [*words[:2], -3, -9, *words[4:]]])
            return SimpleNamespace(result=lambda: merged)

    assert agree_least(Other(), [5, 7]) == [3, 7]  # type: ignore[arg-type]

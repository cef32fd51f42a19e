"""Ranks of one process exchange messages: what comes back, and each way to use one wrongly."""

from __future__ import annotations

import random

import pytest

from graphrt.batch import RuntimeMode
from graphrt.errors import AgreementInFlightError, ConfigError, RankLostError, RankTimeoutError
from graphrt.parallel import (
    InProcessExchange,
    RankVote,
    Round,
    SplitRules,
    agree,
    decide,
    make_tag,
    pack,
)


@pytest.mark.parametrize(("world", "rounds"), [(1, 3), (2, 50), (64, 1000), (1024, 2)])
def test_every_rank_gets_the_largest_of_each_word(world: int, rounds: int) -> None:
    ranks = InProcessExchange(world).ranks
    source = random.Random(world)
    for number in range(rounds):
        votes = [
            RankVote.idle(rank)
            if source.random() < 0.2
            else RankVote(rank, 1 + rank % 7, 8, RuntimeMode(source.randrange(1, 3)), miss_reason=2)  # type: ignore[arg-type]
            for rank in range(world)
        ]
        tag = make_tag(Round.STEP, 0, number)
        pending = [each.start(pack(v, tag)) for each, v in zip(ranks, votes, strict=True)]
        expected = agree(votes, SplitRules(), tag)
        order = source.sample(pending, world)
        assert all(decide(each.result(), SplitRules()) == expected for each in order[:20])
        for each in order[20:]:
            each.result()
        tokens = tuple(vote.num_tokens_unpadded for vote in votes)
        assert pending[0].num_tokens_across_ranks == tokens
        assert ranks[0].num_rounds == number + 1


def test_rank_that_has_not_started_is_named() -> None:
    ranks = InProcessExchange(4).ranks
    pending = [ranks[rank].start([1, 2]) for rank in (0, 2)]
    with pytest.raises(RankTimeoutError, match="rank 0, a round") as caught:
        pending[0].result()
    assert caught.value.missing == (1, 3)
    assert "nothing from ranks 1, 3" in str(caught.value)
    with pytest.raises(RankTimeoutError):
        ranks[0].start([1, 2])


def test_message_before_the_last_result_is_refused() -> None:
    (rank,) = InProcessExchange(1).ranks
    pending = rank.start([3])
    with pytest.raises(AgreementInFlightError):
        rank.start([4])
    assert list(pending.result()) == [3]
    assert list(rank.start([4]).result()) == [4]


def test_text_left_by_a_rank_is_read_by_the_others() -> None:
    first, second = InProcessExchange(2).ranks
    assert second.read("why") is None
    first.post("why", "because")
    assert second.read("why") == "because"


def test_closed_exchange_starts_nothing() -> None:
    (rank,) = InProcessExchange(1).ranks
    rank.close()
    with pytest.raises(RankLostError, match="a closed exchange"):
        rank.start([1])
    with pytest.raises(ConfigError):
        InProcessExchange(0)

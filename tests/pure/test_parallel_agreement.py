"""Ranks agree: worked cases, and that their order changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, strategies as st

from graphrt import BatchDescriptor, CUDAGraphDispatcher, Decision, Reason, RuntimeMode
from graphrt.batch import UBatchReason
from graphrt.config import CompilationConfig, Plan, RuntimeConfig, resolve
from graphrt.errors import BatchError, PlanMismatchError, RankDesyncError
from graphrt.parallel import (
    NUM_WORDS,
    Agreement,
    RankVote,
    Round,
    SettledStep,
    SplitRules,
    agree,
    check_plans,
    decide,
    make_tag,
    merge,
    pack,
    plan_hash,
    plan_text,
    settle,
)

NONE, PIECEWISE, FULL = RuntimeMode
MISS, UB = Reason, UBatchReason


@cache
def plan(
    query_len: int = 1,
    num_ubatches: int = 2,
    threshold: int = 512,
    max_loras: int = 4,
    **ubatch: Any,
) -> Plan:
    sizes = [1, 2, 4, 8, 16, 24, 32, 64, 128] if query_len > 1 else None
    return resolve(
        RuntimeConfig(
            compilation=CompilationConfig(cudagraph_capture_sizes=sizes),  # type: ignore[arg-type]
            num_speculative_tokens=query_len - 1,
            max_loras=max_loras,
            ubatch={"num_ubatches": num_ubatches, "prefill_token_threshold": threshold, **ubatch},  # type: ignore[arg-type]
        )
    ).plan


def vote(rank: int, real: int, padded: int, mode: RuntimeMode, **asked: Any) -> RankVote:
    if mode is NONE:
        asked.setdefault("miss_reason", Reason.ABOVE_MAX)
    return RankVote(rank, real, padded, mode, **asked)


def settled(made: Plan, *votes: RankVote) -> tuple[Agreement, list[SettledStep]]:
    rules, dispatch = SplitRules.of(made), CUDAGraphDispatcher(made).dispatch
    agreement = agree(votes, rules)
    steps = [settle(agreement, vote, dispatch, rules) for vote in votes]
    return agreement, [step for step in steps if step is not None]


def shapes(steps: list[SettledStep]) -> list[tuple[RuntimeMode, int, int]]:
    decisions = [step.decision for step in steps]
    return [(d.mode, d.descriptor.num_tokens, d.descriptor.num_ubatches) for d in decisions]


UNIFORM = {"uniform": True}


@pytest.mark.parametrize(
    ("votes", "expected", "unsplit"),
    [
        (((30, 32, FULL), (16, 16, FULL)), (FULL, 32, 1), (UB.BELOW_THRESHOLD, 1)),
        (((64, 64, FULL), (40, 40, FULL)), (FULL, 64, 2), None),
        (((64, 64, FULL), (32, 32, FULL)), (FULL, 64, 1), (UB.LAST_SLICE_EMPTY, 1)),
    ],
)
def test_uniform_ranks_agree_as_worked_out(votes: Any, expected: Any, unsplit: Any) -> None:
    made = [vote(rank, *asked, uniform=True) for rank, asked in enumerate(votes)]
    agreement, steps = settled(plan(), *made)
    assert shapes(steps) == [expected] * 2
    assert agreement.uniform
    assert agreement.unsplit_because == unsplit
    assert {step.unsplit_because for step in steps} == {unsplit}


def test_large_mixed_ranks_are_split_eagerly_at_one_size() -> None:
    _, steps = settled(plan(), vote(0, 600, 600, NONE), vote(1, 700, 700, NONE))
    assert shapes(steps) == [(NONE, 700, 2)] * 2
    assert steps[0].decision.reason is Reason.ABOVE_MAX
    _, steps = settled(plan(), vote(0, 600, 600, NONE), vote(1, 600, 640, PIECEWISE))
    assert shapes(steps) == [(NONE, 640, 2)] * 2
    assert steps[1].decision.reason is Reason.RANKS_DISAGREE
    assert steps[1].eager_because == (Reason.ABOVE_MAX, 0)
    _, steps = settled(plan(allow_eager=False), vote(0, 600, 600, NONE), vote(1, 700, 700, NONE))
    assert shapes(steps) == [(NONE, 600, 1), (NONE, 700, 1)]
    assert steps[0].unsplit_because == (UB.NO_FULL_GRAPH, None)


def test_eager_rank_makes_all_eager_at_their_own_sizes() -> None:
    _, steps = settled(plan(), vote(0, 600, 600, NONE), vote(1, 5, 8, FULL, uniform=True))
    assert shapes(steps) == [(NONE, 600, 1), (NONE, 5, 1)]
    assert [step.decision.reason for step in steps] == [Reason.ABOVE_MAX, Reason.RANKS_DISAGREE]
    assert [step.eager_because for step in steps] == [None, (Reason.ABOVE_MAX, 0)]


def test_mixed_rank_makes_all_mixed_at_a_larger_size() -> None:
    votes = vote(0, 18, 18, FULL, uniform=True), vote(1, 13, 16, PIECEWISE)
    agreement, steps = settled(plan(query_len=3), *votes)
    assert (agreement.num_tokens_padded, agreement.uniform) == (18, False)
    assert shapes(steps) == [(PIECEWISE, 24, 1)] * 2


def test_mode_above_the_agreed_one_does_not_serve() -> None:
    votes = vote(0, 8, 8, FULL, uniform=True), vote(1, 8, 8, PIECEWISE, uniform=True)
    assert shapes(settled(plan(), *votes)[1]) == [(PIECEWISE, 8, 1)] * 2


def test_idle_rank_replays_padding() -> None:
    agreement, steps = settled(plan(), RankVote.idle(0), vote(1, 20, 24, FULL, uniform=True))
    assert shapes(steps) == [(FULL, 24, 1)] * 2
    assert agreement.unsplit_because == (UB.PEER_IDLE, 0)
    assert (agreement.min_num_tokens, agreement.min_rank) == (0, 0)


def test_idle_rank_beside_an_eager_one_runs_one_token() -> None:
    _, steps = settled(plan(), RankVote.idle(0), vote(1, 600, 600, NONE))
    assert shapes(steps) == [(NONE, 1, 1), (NONE, 600, 1)]


def test_idle_rank_without_the_others_graphs_makes_all_eager() -> None:
    idle = RankVote.idle(0)._replace(runtime_mode=NONE, miss_reason=Reason.INVALIDATED)
    agreement, steps = settled(plan(), idle, vote(1, 20, 24, FULL, uniform=True))
    assert shapes(steps) == [(NONE, 1, 1), (NONE, 20, 1)]
    assert steps[1].eager_because == (Reason.INVALIDATED, 0)
    assert not agreement.idle
    assert settled(plan(), idle, RankVote.idle(1))[0].idle


def test_ranks_all_idle_do_not_run() -> None:
    agreement, steps = settled(plan(), RankVote.idle(0), RankVote.idle(1))
    assert agreement.idle
    assert steps == []


def test_adapters_agreed_are_the_most_of_any_rank() -> None:
    votes = [vote(rank, 8, 8, FULL, uniform=True, num_active_loras=3 * rank) for rank in (0, 1)]
    agreement, steps = settled(plan(), *votes)
    assert agreement.num_active_loras == 3
    assert {step.decision.descriptor.num_active_loras for step in steps} == {4}


def test_eager_split_with_an_empty_half_is_not_made() -> None:
    votes = vote(0, 128, 128, NONE), vote(1, 512, 512, NONE)
    _, steps = settled(plan(threshold=128), *votes)
    assert {step.unsplit_because for step in steps} == {(UB.LAST_SLICE_EMPTY, 0)}


def test_size_that_is_slower_in_micro_batches_is_not_split() -> None:
    made = plan()
    dispatch = CUDAGraphDispatcher(made).dispatch
    key = dispatch(64, True, 0, frozenset(), 2).descriptor
    votes = [vote(rank, 64, 64, FULL, uniform=True) for rank in (0, 1)]
    rules = SplitRules.of(made)._replace(unprofitable=frozenset([key]), prefill_token_threshold=2)
    step = settle(agree(votes, rules), votes[0], dispatch, rules)
    assert step is not None
    assert shapes([step]) == [(FULL, 64, 1)]
    assert step.unsplit_because == (UB.NOT_PROFITABLE, None)


def test_threshold_is_that_of_the_agreed_uniformity() -> None:
    votes = vote(0, 64, 64, FULL, uniform=True), vote(1, 600, 600, PIECEWISE)
    assert agree(votes, SplitRules(2)).unsplit_because == (UB.BELOW_THRESHOLD, 0)


def test_mixed_batch_is_cut_between_any_two_tokens() -> None:
    rules = SplitRules(2, query_len=3, decode_token_threshold=2, prefill_token_threshold=4)
    assert agree([vote(0, 5, 5, PIECEWISE)], rules).num_ubatches == 2
    uniform = agree([vote(0, 3, 5, FULL, uniform=True)], rules)
    assert uniform.unsplit_because == (UB.TOO_FEW_TOKENS, 0)


def test_objection_of_one_rank_leaves_the_step_whole() -> None:
    votes = [vote(rank, 64, 64, FULL, uniform=True) for rank in range(3)]
    votes[1] = votes[1]._replace(ubatch_reason=UB.REQUEST_DEPENDENCY)
    agreement = agree(votes, SplitRules(2))
    assert agreement.unsplit_because == (UB.REQUEST_DEPENDENCY, 1)
    assert agree(votes[:1], SplitRules(1)).unsplit_because == (UB.DISABLED, 0)
    assert agree([vote(0, 32, 32, FULL, uniform=True)], SplitRules(64)).unsplit_because == (
        UB.TOO_FEW_TOKENS,
        0,
    )


@pytest.mark.parametrize("threshold", [32, 512])
def test_split_without_its_graph_goes_on_unsplit(threshold: int) -> None:
    made = plan(threshold=threshold)
    kept = tuple(item for item in made.capture_order if item[1].num_ubatches == 1)
    votes = [vote(rank, 64, 64, FULL, uniform=True) for rank in range(2)]
    _, steps = settled(replace(made, capture_order=kept), *votes)
    is_eager = threshold == 32
    assert shapes(steps) == [(NONE, 64, 2) if is_eager else (FULL, 64, 1)] * 2
    assert steps[0].unsplit_because == (None if is_eager else (UB.NO_FULL_GRAPH, None))
    assert steps[0].decision.reason is (Reason.NO_KEY if is_eager else Reason.HIT)


def test_graph_split_at_a_larger_size_must_not_be_empty() -> None:
    """A dispatcher that finds a larger size than agreed, at which the last half is empty."""

    def dispatch(
        tokens: int, uniform: bool, loras: int, exclude: Any, num_ubatches: int
    ) -> Decision:
        if FULL in exclude:
            return Decision(NONE, BatchDescriptor(tokens), Reason.EXCLUDED)
        return Decision(FULL, BatchDescriptor(128, num_ubatches=num_ubatches), Reason.PADDED)

    votes = [vote(rank, 60, 64, FULL, uniform=True) for rank in range(2)]
    rules = SplitRules(2)
    found = settle(agree(votes, rules), votes[0], dispatch, rules)
    assert found is not None
    assert (found.decision.mode, found.decision.descriptor.num_ubatches) == (FULL, 1)
    assert found.unsplit_because == (UB.LAST_SLICE_EMPTY, 1)


def test_mode_agreed_without_a_key_is_eager_for_a_reason() -> None:
    made = resolve(RuntimeConfig(compilation={"cudagraph_mode": "FULL_DECODE_ONLY"})).plan  # type: ignore[arg-type]
    votes = vote(0, 8, 8, FULL, uniform=True), vote(1, 5, 8, PIECEWISE)
    _, steps = settled(made, *votes)
    assert shapes(steps) == [(NONE, 8, 1), (NONE, 5, 1)]
    assert steps[0].decision.reason is Reason.RANKS_DISAGREE
    assert steps[0].eager_because == (Reason.MODE_NONE, 1)


def test_rank_that_excludes_piecewise_keeps_all_from_it() -> None:
    refuses = vote(1, 8, 8, FULL, uniform=True, takes_piecewise=False)
    agreement, steps = settled(plan(), vote(0, 8, 8, FULL, uniform=True), refuses)
    assert shapes(steps) == [(FULL, 8, 1)] * 2
    assert agreement.refuses_piecewise == 1
    agreement, steps = settled(plan(), vote(0, 8, 8, PIECEWISE), refuses)
    assert shapes(steps) == [(NONE, 8, 1)] * 2
    assert [step.eager_because for step in steps] == [(Reason.EXCLUDED, 1)] * 2
    # Of unequal kind the agreed batch is mixed, and has no FULL graph.
    _, steps = settled(plan(), vote(0, 8, 8, FULL), refuses)
    assert shapes(steps) == [(NONE, 8, 1)] * 2


def test_ranks_in_different_rounds_are_an_error() -> None:
    tags = make_tag(Round.STEP, 1, 7), make_tag(Round.CAPTURE, 1, 7)
    words = merge([pack(vote(0, 8, 8, FULL), tag) for tag in tags])
    with pytest.raises(RankDesyncError) as caught:
        decide(words, SplitRules())
    assert "STEP round 7 of generation 1" in caught.value.found
    assert "CAPTURE round 7" in caught.value.found
    assert decide(pack(vote(0, 8, 8, FULL), tags[0]), SplitRules()).runtime_mode is FULL


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 2**20},
        {"rank": -1},
        {"num_tokens_unpadded": 0},
        {"num_tokens_unpadded": 9},
        {"num_tokens_unpadded": -1},
        {"num_tokens_padded": 2**42},
        {"variant": 2**16},
        {"num_active_loras": -1},
        {"runtime_mode": NONE},
    ],
)
def test_vote_that_does_not_fit_is_an_error(changes: Any) -> None:
    with pytest.raises(BatchError):
        pack(vote(0, 8, 8, FULL)._replace(**changes))
    with pytest.raises(BatchError):
        pack(vote(0, 8, 8, FULL), -1)


votes_of_any_rank = st.builds(
    lambda real, pad, mode, uniform, variant, loras, reason, objection, takes, idle: (
        RankVote.idle(0)
        if idle
        else RankVote(0, real, real + pad, mode, uniform, variant, loras, reason, objection, takes)
    ),
    st.integers(1, 700),
    st.integers(0, 40),
    st.sampled_from(RuntimeMode),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 4),
    st.sampled_from([reason for reason in Reason if reason.is_miss]),
    st.none() | st.sampled_from(UBatchReason),
    st.booleans(),
    st.booleans(),
)
worlds = st.lists(votes_of_any_rank, min_size=1, max_size=6).map(
    lambda votes: [vote._replace(rank=rank) for rank, vote in enumerate(votes)]
)
rules_of_any_plan = st.builds(
    SplitRules,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(4, 40),
    st.integers(4, 600),
    unprofitable=st.just(frozenset()),
)


def unnamed(agreement: Agreement) -> Agreement:
    """Without the names of ranks."""
    eager, unsplit = agreement.eager_because, agreement.unsplit_because
    return agreement._replace(
        min_rank=0,
        eager_because=eager and (eager[0], 0),
        unsplit_because=unsplit and (unsplit[0], 0),
        refuses_piecewise=None if agreement.refuses_piecewise is None else 0,
    )


@given(votes=worlds, rules=rules_of_any_plan, data=st.data())
def test_agreement_is_read_off_the_votes(
    votes: list[RankVote], rules: SplitRules, data: st.DataObject
) -> None:
    busy = [vote for vote in votes if vote.num_tokens_unpadded]
    found = agree(votes, rules)
    assert all(-(2**63) <= word < 2**63 for vote in votes for word in pack(vote, 2**62 - 1))
    assert len(pack(votes[0])) == NUM_WORDS
    assert found.idle is (not busy)
    assert (found.refuses_piecewise is None) is all(vote.takes_piecewise for vote in votes)
    assert found.min_num_tokens == min(vote.num_tokens_unpadded for vote in votes)
    if busy:
        kinds = {(vote.uniform, vote.variant) for vote in busy}
        assert (found.uniform, found.variant) == (kinds.pop() if len(kinds) == 1 else (False, 0))
        assert found.num_tokens_padded == max(vote.num_tokens_padded for vote in busy)
        lowest = min(vote.runtime_mode for vote in busy)
        is_refused = lowest is PIECEWISE and found.refuses_piecewise is not None
        assert found.runtime_mode is (NONE if is_refused else lowest)
        assert found.num_active_loras == max(vote.num_active_loras for vote in busy)
    if found.eager_because:
        reason, rank = found.eager_because
        if reason is Reason.EXCLUDED and not votes[rank].takes_piecewise:
            assert found.runtime_mode is NONE
        else:
            told = votes[rank].runtime_mode, votes[rank].miss_reason
            assert told == (found.runtime_mode, reason)
    if found.num_ubatches > 1:
        assert all(vote.ubatch_reason is None for vote in votes)

    # Their order changes the names of ranks only.
    order = data.draw(st.permutations(votes))
    moved = [vote._replace(rank=rank) for rank, vote in enumerate(order)]
    assert unnamed(agree(moved, rules)) == unnamed(found)
    # An idle rank more changes the fewest tokens and the split only.
    more = unnamed(agree([*votes, RankVote.idle(len(votes))], rules))
    split = {"min_num_tokens": 0, "num_ubatches": 1, "unsplit_because": None}
    assert more._replace(**split) == unnamed(found)._replace(**split)


def random_vote(
    rank: int, source: random.Random, dispatcher: CUDAGraphDispatcher, made: Plan, odd: float
) -> RankVote:
    """What a rank with a random batch votes, from its own dispatch; ``odd``: share of odd ones."""

    def is_odd() -> bool:
        return source.random() < odd

    if is_odd():
        return RankVote.idle(rank)
    q = made.query_len
    uniform = not is_odd()
    tokens = source.randrange(34 * q, 64 * q, q) if uniform else source.randrange(1, 128)
    tokens = source.randrange(q, 900, q) if is_odd() else tokens
    loras = source.randrange(made.max_loras + 1)
    takes_piecewise = not is_odd()
    excluded = frozenset() if takes_piecewise else frozenset({PIECEWISE})
    local = dispatcher.dispatch(tokens, uniform, loras, excluded)
    return RankVote(
        rank,
        tokens,
        local.descriptor.num_tokens,
        local.mode,
        uniform,
        int(is_odd()),
        loras,
        local.reason,
        UB.ENGINE_DECLINED if is_odd() else None,
        takes_piecewise,
    )


@pytest.mark.parametrize(("world", "rounds"), [(2, 1000), (4, 10_000), (64, 1000), (1024, 20)])
def test_random_rounds_give_every_rank_one_decision(world: int, rounds: int) -> None:
    made = plan(query_len=2, threshold=64)
    rules = SplitRules.of(made)
    dispatchers = [CUDAGraphDispatcher(made, variant=variant) for variant in ("a", "b")]
    source = random.Random(world)
    seen = set()
    for number in range(rounds):
        tag = make_tag(Round.STEP, 0, number)
        odd = source.choice([0, 0.1 / world, 0.5 / world, 0.1, 0.9])
        votes = [random_vote(rank, source, dispatchers[0], made, odd) for rank in range(world)]
        words = merge([pack(vote, tag) for vote in votes])
        settled = set()
        for vote in votes:
            agreement = decide(words, rules)
            step = settle(agreement, vote, dispatchers[agreement.variant].dispatch, rules)
            if step is None:
                settled.add((agreement.idle, 0))
                continue
            mode, key, reason = step.decision
            if mode is NONE and key.num_ubatches == 1:
                # Eager ranks have sizes of their own, and all of them know why.
                assert key.num_tokens == max(vote.num_tokens_unpadded, 1)
                assert reason.is_miss
                settled.add((NONE, key.num_ubatches))
            else:
                settled.add((mode, key))  # type: ignore[arg-type]
                assert key.num_tokens >= vote.num_tokens_unpadded
            if vote.runtime_mode is NONE:
                assert mode is NONE
                assert reason is vote.miss_reason
        assert len(settled) == 1
        seen |= {(mode, getattr(key, "num_ubatches", key)) for mode, key in settled}
    if rounds >= 1000:
        assert seen >= {(FULL, 1), (FULL, 2), (PIECEWISE, 1), (NONE, 1), (NONE, 2)}


def test_plan_hash_differs_where_a_plan_does() -> None:
    first, second = plan(), plan(threshold=64)
    texts = [plan_text(first), plan_text(second)]
    assert plan_hash(texts[0]) == plan_hash(plan_text(resolve_again(first)))
    assert plan_hash(texts[0]) != plan_hash(texts[1])
    assert 0 <= plan_hash(texts[0]) < 2**62
    check_plans([texts[0]] * 3)
    with pytest.raises(PlanMismatchError) as caught:
        check_plans([texts[0], texts[1], texts[0]])
    assert caught.value.found == (
        "ubatch.prefill_token_threshold = 512 on ranks 0, 2; "
        "ubatch.prefill_token_threshold = 64 on rank 1"
    )
    with pytest.raises(PlanMismatchError) as caught:
        check_plans([plan_text(first, {"torch": "2.12"}), plan_text(first, {"torch": "2.13"})])
    assert "2.13 on rank 1" in caught.value.found
    fewer = replace(first, capture_order=first.capture_order[:-1])
    with pytest.raises(PlanMismatchError) as caught:
        check_plans([texts[0], plan_text(fewer)])
    assert "(nothing) on rank 1" in caught.value.found


def resolve_again(made: Plan) -> Plan:
    return replace(
        made, capture_order=tuple((mode, replace(key)) for mode, key in made.capture_order)
    )

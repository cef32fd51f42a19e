"""What ranks would agree on while they serve a trace together: in this process, without a device.

Every step takes equally long and all ranks take it together, as expert-parallel ranks do. Requests
go to the ranks in turn. Each rank serves its own first come, first served: one token (with
speculation: q tokens, all accepted) of each request that decodes, then chunks of prompts up to the
token limit.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any

from graphrt.batch import Decision, RuntimeMode
from graphrt.config import Plan
from graphrt.dispatch import CUDAGraphDispatcher
from graphrt.errors import TraceError
from graphrt.parallel import RankVote, Round, SplitRules, decide, make_tag, merge, pack, settle
from graphrt.planner import TraceRequest
from graphrt.ubatch import wants_split

NONE = RuntimeMode.NONE
RULES = {
    "agreed": "agreed",
    "alone": "each for itself",
    "eager_apart": "eager ranks apart",
    "pad_eager": "pad eager steps too",
}
"""By name: what is done, what ranks without collectives could do, and what others do instead."""
COUNTS = (
    "split_steps",
    "eager_by_one_rank",
    "busy_rank_steps",
    "eager_rank_steps_lowered",
    "divergent_rank_steps",
    "real_tokens",
    "padding_by_slowest_rank",
    "padding_of_idle_ranks",
)

MOST_STEPS = 10**6
"""Of one request."""


class Rank:
    """The requests of one rank, and what it wants of each step."""

    def __init__(self, place: int, plan: Plan, dispatch: Callable[..., Decision]) -> None:
        self.waiting: deque[list[int]] = deque()
        """Prompt tokens left, and output tokens, of each."""
        self._place, self._ubatch, self._dispatch = place, plan.ubatch, dispatch
        self._query_len, self._max_tokens = plan.query_len, plan.max_num_batched_tokens
        self._most = max(1, min(plan.max_num_seqs, self._max_tokens // self._query_len))
        self._decoding = 0
        self._ends: dict[int, int] = defaultdict(int)
        """Step -> how many requests do not decode any more from it on."""

    def vote(self, number: int) -> RankVote:
        """Take the batch of this step, and vote for what serves it alone."""
        if self._ends:
            self._decoding -= self._ends.pop(number, 0)
        running, waiting = self._decoding, self.waiting
        tokens = running * self._query_len
        uniform = True
        while waiting and running < self._most and tokens < self._max_tokens:
            uniform = False
            request = waiting[0]
            chunk = min(request[0], self._max_tokens - tokens)
            tokens += chunk
            request[0] -= chunk
            if not request[0]:
                waiting.popleft()
                running += 1
                # The end of the prompt gives the first token, the other ones follow.
                self._ends[number + 1 + ceil((request[1] - 1) / self._query_len)] += 1
        self._decoding = running
        if not tokens:
            return RankVote.idle(self._place)
        mode, key, reason = self._dispatch(tokens, uniform)
        objection = wants_split(tokens, uniform, self._ubatch)
        return RankVote(self._place, tokens, key.num_tokens, mode, uniform, 0, 0, reason, objection)


def _votes(
    trace: Sequence[TraceRequest], ranks: Sequence[Rank], step_s: float, speed: float
) -> Iterator[list[RankVote]]:
    """Of all ranks, for each step in which one has work."""
    number = arrived = 0
    while True:
        while arrived < len(trace) and trace[arrived].arrival_s <= number * step_s * speed:
            request = trace[arrived]
            sizes = [request.num_prompt_tokens, request.num_output_tokens]
            ranks[arrived % len(ranks)].waiting.append(sizes)
            arrived += 1
        votes = [rank.vote(number) for rank in ranks]
        number += 1
        if any(vote.num_tokens_unpadded for vote in votes):
            yield votes
        elif arrived == len(trace):
            return
        else:  # Nothing happens before the next request arrives.
            number = max(number, ceil(trace[arrived].arrival_s / (step_s * speed)))


def simulate_ranks(
    trace: Sequence[TraceRequest], plan: Plan, num_ranks: int, step_s: float, speed: float
) -> dict[str, Any]:
    """Serve ``trace``, ``speed`` times as fast as it was, and count what the ranks agree on.

    Errors: ``TraceError`` for a request that alone would take more than a million steps.
    """
    longest = max(
        request.num_prompt_tokens // plan.max_num_batched_tokens
        + request.num_output_tokens // plan.query_len
        for request in trace
    )
    if longest > MOST_STEPS:
        raise TraceError(
            "simulate-ranks",
            expected=f"requests of at most {MOST_STEPS} steps",
            found=f"one of {longest} steps",
            do="cut its prompt or its output",
        )
    dispatch, rules = CUDAGraphDispatcher(plan).dispatch, SplitRules.of(plan)
    ranks = [Rank(place, plan, dispatch) for place in range(num_ranks)]
    # Of all ranks together, by step; then of each rank that has work.
    steps, eager, unsplit = Counter[str](), Counter[str](), Counter[str]()
    modes = {rule: Counter[RuntimeMode]() for rule in RULES}
    padding = Counter[str]()
    num = Counter[str]()
    for number, votes in enumerate(_votes(trace, ranks, step_s, speed)):
        tag = make_tag(Round.STEP, 0, number)
        words = [pack(vote, tag) for vote in votes]
        agreement = decide(merge(words), rules)
        settled = [step for vote in votes if (step := settle(agreement, vote, dispatch, rules))]
        mode, key, _ = settled[0].decision
        is_eager = mode is NONE
        # Eager and unsplit, each rank has its own size; else all have one key.
        is_own = is_eager and key.num_ubatches == 1
        apart = None
        if is_eager:
            # If the ranks that need eager left the other ones alone, these would agree on this.
            others = [each for each, vote in zip(words, votes, strict=True) if vote.runtime_mode]
            if others:
                part = decide(merge(others), rules)
                exclude = frozenset(other for other in RuntimeMode if other > part.runtime_mode)
                apart = dispatch(part.num_tokens_padded, part.uniform, 0, exclude)
            lowest = agreement.eager_because if agreement.runtime_mode is NONE else None
            eager[(lowest[0] if lowest else settled[0].decision.reason).name] += 1
            num["eager_by_one_rank"] += len(votes) - len(others) == 1
        steps[mode.name] += 1
        num["split_steps"] += key.num_ubatches > 1
        if settled[0].unsplit_because is not None:
            unsplit[settled[0].unsplit_because[0].name] += 1

        for vote, step in zip(votes, settled, strict=True):
            own_mode, own_key, _ = step.decision
            if own_mode is not mode or not (is_own or own_key == key):
                num["divergent_rank_steps"] += 1
            real, size, alone = vote.num_tokens_unpadded, own_key.num_tokens, vote.num_tokens_padded
            if not real:
                num["padding_of_idle_ranks"] += size
                continue
            num["busy_rank_steps"] += 1
            num["real_tokens"] += real
            num["padding_by_slowest_rank"] += max(0, size - alone)
            num["eager_rank_steps_lowered"] += is_eager and vote.runtime_mode is not NONE
            at = step.decision if apart is None or vote.runtime_mode is NONE else apart
            ran = {
                "agreed": (mode, size),
                "alone": (vote.runtime_mode, alone),
                "eager_apart": (at.mode, max(real, at.descriptor.num_tokens)),
                "pad_eager": (mode, max(size, agreement.num_tokens_padded)),
            }
            for rule, (by_rule, padded) in ran.items():
                modes[rule][by_rule] += 1
                padding[rule] += padded - real
    return {
        "ranks": num_ranks,
        "requests": len(trace),
        "step_s": step_s,
        "speed": speed,
        "steps": steps.total(),
        "modes": {mode.name: steps[mode.name] for mode in RuntimeMode},
        "eager_reasons": dict(sorted(eager.items())),
        "unsplit_reasons": dict(sorted(unsplit.items())),
        **{name: num[name] for name in COUNTS},
        "rules": {
            rule: {
                "modes": {mode.name: modes[rule][mode] for mode in RuntimeMode},
                "padding": padding[rule],
            }
            for rule in RULES
        },
    }

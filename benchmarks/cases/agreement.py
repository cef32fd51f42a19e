"""C-agreement: ranks agree, against a column for each rank added up and read by the host."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import Case, Row, Samples, difference, ratio, row, time_host
from graphrt import CUDAGraphDispatcher, RuntimeConfig, RuntimeMode, launch_ranks, resolve
from graphrt.parallel import (
    InProcessExchange,
    RankVote,
    Round,
    SplitRules,
    decide,
    make_tag,
    merge,
    pack,
    settle,
)

INNER = 200
ROUNDS = 10_000


def over_gloo() -> Sequence[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.json"
        status = launch_ranks(2, ["-m", "benchmarks.rank_agreement", str(file)])
        if status:
            raise RuntimeError(f"a rank ended with status {status}")
        samples: Samples = json.loads(file.read_text(encoding="utf-8"))
    timed = "a whole agreement: pack, one collective of 2 ranks over gloo, decide"
    return [
        row(
            f"C-agreement-{wire}",
            ratio(samples, wire, "by hand"),
            target=0.65 if wire == "auto" else None,
            unit="ratio",
            samples=samples,
            timed=timed,
        )
        for wire in ("auto", "reduce", "gather")
    ]


def pure() -> Sequence[Row]:
    tag, rules = make_tag(Round.STEP, 1, 12345), SplitRules(2)
    votes = [RankVote(rank, 33 + 3 * rank, 64, RuntimeMode.FULL, True) for rank in range(8)]
    messages = [pack(vote, tag) for vote in votes]
    words = merge(messages)

    def nothing() -> None:
        return None

    def looped(call: Callable[[], object]) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(INNER):
                call()

        return loop

    arms = {
        "merge and decide": looped(lambda: decide(merge(messages), rules)),
        "decide": looped(lambda: decide(words, rules)),
        "empty call": looped(nothing),
        "call of a lambda": looped(lambda: None),
    }
    samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
    for name in ("merge and decide", "decide"):
        samples[name] = difference(samples, name, "call of a lambda")
    us = {name: [value / 1000 for value in values] for name, values in samples.items()}
    timed = "8 messages of 10 words, less the call of a lambda"
    return [
        row(
            "C-agreement-pure",
            us["merge and decide"],
            target=2.0,
            unit="us",
            samples=samples,
            timed=timed,
        ),
        row("C-agreement-decide", us["decide"], target=None, unit="us", samples=samples),
        row(
            "C-agreement-pure-calls",
            ratio(samples, "merge and decide", "empty call"),
            target=None,
            unit="ratio",
            samples=samples,
            timed=f"{timed}, over an empty call",
        ),
    ]


def divergence() -> Sequence[Row]:
    """Random rounds of 4 ranks in process: how many decided otherwise than rank 0."""
    plan = resolve(RuntimeConfig()).plan
    dispatch, rules = CUDAGraphDispatcher(plan).dispatch, SplitRules.of(plan)
    ranks = InProcessExchange(4).ranks
    source = random.Random(1)
    num_divergent = 0
    for number in range(ROUNDS):
        votes = []
        for rank in range(4):
            tokens = source.choice([0, source.randrange(1, 64), source.randrange(1, 900)])
            if not tokens:
                votes.append(RankVote.idle(rank))
                continue
            uniform = source.random() < 0.7
            mode, key, reason = dispatch(tokens, uniform)
            padded = key.num_tokens
            votes.append(RankVote(rank, tokens, padded, mode, uniform, 0, 0, reason, None))
        tag = make_tag(Round.STEP, 0, number)
        pending = [each.start(pack(v, tag)) for each, v in zip(ranks, votes, strict=True)]
        steps = [
            settle(decide(each.result(), rules), vote, dispatch, rules)
            for each, vote in zip(pending, votes, strict=True)
        ]
        shapes = {
            None
            if step is None
            else (step.decision.mode, step.decision.descriptor)
            if step.decision.mode
            else RuntimeMode.NONE
            for step in steps
        }
        num_divergent += len(shapes) > 1
    return [
        row(
            "C-agreement-divergent",
            [float(num_divergent)],
            target=0.0,
            unit="rounds",
            samples={},
            rounds=ROUNDS,
            ranks=4,
        )
    ]


CASES = [
    Case("C-agreement", "ranks agree, over one all-reduce with host reads", over_gloo),
    Case("C-agreement-pure", "merge 8 messages and decide", pure),
    Case("C-agreement-divergent", "random rounds of 4 ranks", divergence),
]

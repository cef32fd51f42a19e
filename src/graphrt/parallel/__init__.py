"""One decision for all ranks: votes, the message that carries them, what follows. Torch-free."""

from graphrt.parallel.agreement import (
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

__all__ = [
    "NUM_WORDS",
    "Agreement",
    "RankVote",
    "Round",
    "SettledStep",
    "SplitRules",
    "agree",
    "check_plans",
    "decide",
    "make_tag",
    "merge",
    "pack",
    "plan_hash",
    "plan_text",
    "settle",
]

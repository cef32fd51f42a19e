"""One decision for all ranks: votes, the message that carries them, what follows.

Without torch, but for an exchange over torch.distributed once it is made.
"""

from __future__ import annotations

from graphrt.parallel.agreement import (
    NUM_WORDS,
    Agreement,
    Phase,
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
from graphrt.parallel.exchange import Exchange, InProcessExchange, Pending, TorchExchange
from graphrt.parallel.launch import launch_ranks
from graphrt.parallel.lockstep import Lockstep, agree_least

__all__ = [
    "NUM_WORDS",
    "Agreement",
    "Exchange",
    "InProcessExchange",
    "Lockstep",
    "Pending",
    "Phase",
    "RankVote",
    "Round",
    "SettledStep",
    "SplitRules",
    "TorchExchange",
    "agree",
    "agree_least",
    "check_plans",
    "decide",
    "launch_ranks",
    "make_tag",
    "merge",
    "pack",
    "plan_hash",
    "plan_text",
    "settle",
]

"""One decision for all ranks: votes, the message that carries them, what follows.

Without torch, but for an exchange over torch.distributed once it is made.
"""

from __future__ import annotations

from graphrt.parallel.agreement import (
    NUM_WORDS as NUM_WORDS,
    Agreement as Agreement,
    Phase as Phase,
    RankVote as RankVote,
    Round as Round,
    SettledStep as SettledStep,
    SplitRules as SplitRules,
    agree as agree,
    check_plans as check_plans,
    decide as decide,
    make_tag as make_tag,
    merge as merge,
    pack as pack,
    plan_hash as plan_hash,
    plan_text as plan_text,
    settle as settle,
)
from graphrt.parallel.exchange import (
    Exchange as Exchange,
    InProcessExchange as InProcessExchange,
    Pending as Pending,
    TorchExchange as TorchExchange,
)
from graphrt.parallel.launch import launch_ranks as launch_ranks
from graphrt.parallel.lockstep import Lockstep as Lockstep, agree_least as agree_least

"""From options and facts to an immutable plan: ``resolve(config, facts) -> Resolved``. Torch-free.

What a user asks (``RuntimeConfig``), what is true here (``Facts``) and what follows (``Plan``) are
three types, all frozen.
"""

from graphrt.config.compilation import CompilationConfig, CompilationLevel, PassConfig
from graphrt.config.environment import RankVariables, environment_of_rank, rank_variables
from graphrt.config.options import (
    AttentionSupport,
    Facts,
    ModeLimit,
    RankConfig,
    RuntimeConfig,
    UBatchConfig,
)
from graphrt.config.plan import Adjustment, CompilePlan, Plan, Resolved
from graphrt.config.resolution import resolve

__all__ = [
    "Adjustment",
    "AttentionSupport",
    "CompilationConfig",
    "CompilationLevel",
    "CompilePlan",
    "Facts",
    "ModeLimit",
    "PassConfig",
    "Plan",
    "RankConfig",
    "RankVariables",
    "Resolved",
    "RuntimeConfig",
    "UBatchConfig",
    "environment_of_rank",
    "rank_variables",
    "resolve",
]

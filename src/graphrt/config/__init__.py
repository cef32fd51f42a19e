"""From options and facts to an immutable plan: ``resolve(config, facts) -> Resolved``. Torch-free.

What a user asks (``RuntimeConfig``), what is true here (``Facts``) and what follows (``Plan``) are
three types, all frozen.
"""

from graphrt.config.compilation import (
    CompilationConfig as CompilationConfig,
    CompilationLevel as CompilationLevel,
    PassConfig as PassConfig,
)
from graphrt.config.environment import (
    RankVariables as RankVariables,
    environment_of_rank as environment_of_rank,
    rank_variables as rank_variables,
)
from graphrt.config.options import (
    AttentionSupport as AttentionSupport,
    Facts as Facts,
    ModeLimit as ModeLimit,
    RankConfig as RankConfig,
    RuntimeConfig as RuntimeConfig,
    UBatchConfig as UBatchConfig,
)
from graphrt.config.plan import (
    Adjustment as Adjustment,
    CompilePlan as CompilePlan,
    Plan as Plan,
    Resolved as Resolved,
)
from graphrt.config.resolution import resolve as resolve

"""From wishes and facts to an immutable plan: ``resolve(config, facts) -> Resolved``. Torch-free.

Wishes (``RuntimeConfig``), facts (``Facts``) and what follows (``Plan``) are three types, all
frozen; nothing is ever written again.
"""

from graphrt.config.facts import AttentionSupport, Facts, ModeLimit
from graphrt.config.plan import Adjustment, Plan, Resolved
from graphrt.config.resolution import resolve
from graphrt.config.wishes import CompilationConfig, CompilationLevel, RuntimeConfig

__all__ = [
    "Adjustment",
    "AttentionSupport",
    "CompilationConfig",
    "CompilationLevel",
    "Facts",
    "ModeLimit",
    "Plan",
    "Resolved",
    "RuntimeConfig",
    "resolve",
]

"""From the mode that is asked to the mode that is possible, with a reason for every step.

Monotone: less attention support never gives more graph. More graph is first more for uniform
decode batches, then more for mixed ones.
"""

from __future__ import annotations

from graphrt.batch import CUDAGraphMode, RuntimeMode
from graphrt.config.checked import config_error
from graphrt.config.facts import AttentionSupport, Facts
from graphrt.config.plan import Adjustment
from graphrt.config.wishes import CompilationLevel
from graphrt.errors import ConfigProblem

MODE_FIELD = "cudagraph_mode"


def resolve_mode(
    asked: CUDAGraphMode, *, level: CompilationLevel, query_len: int, facts: Facts
) -> tuple[CUDAGraphMode, list[Adjustment]]:
    """Return the effective mode and the steps that led to it.

    Raises ``ConfigError`` if mixed batches are to run FULL and attention is never captured.
    """
    steps: list[Adjustment] = []
    support, who = facts.least_support()
    piecewise = facts.piecewise_at(level)
    without_graph = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE

    def step(mode: CUDAGraphMode, lower: CUDAGraphMode, reason: str) -> CUDAGraphMode:
        if lower is not mode:
            steps.append(Adjustment(MODE_FIELD, mode, lower, reason))
        return lower

    mode = asked
    for limit in facts.mode_limits:
        if not _permits(limit.mode, mode):
            mode = step(mode, limit.mode, limit.reason)

    if level is CompilationLevel.PIECEWISE and facts.splitting == "none":
        piecewise, without_graph = False, CUDAGraphMode.NONE
        if mode.has_piecewise_cudagraphs():
            reason = "compile level 3 without splitting ops is one piece that holds attention"
            mode = step(mode, CUDAGraphMode.FULL, reason)

    said = f"{who} supports {support.name}"
    if mode.mixed_mode() is RuntimeMode.FULL and support < AttentionSupport.ALWAYS:
        if support is AttentionSupport.NEVER:
            found = f"{mode.name}, but {said}: attention cannot be in any full graph"
            accepted = "PIECEWISE, FULL_AND_PIECEWISE or NONE" if piecewise else "NONE"
            raise config_error("resolve", [ConfigProblem(MODE_FIELD, found, accepted)])
        lower = CUDAGraphMode.FULL_AND_PIECEWISE if piecewise else CUDAGraphMode.FULL_DECODE_ONLY
        mode = step(mode, lower, f"{said}; a full graph of mixed batches needs ALWAYS")
    if mode.decode_mode() is RuntimeMode.FULL and support is AttentionSupport.NEVER:
        mode = step(mode, without_graph, f"{said}; full graphs of decode batches need more")
    if (
        mode.decode_mode() is RuntimeMode.FULL
        and query_len > 1
        and support < AttentionSupport.UNIFORM_BATCH
    ):
        reason = f"{said}; decode batches of {query_len} tokens a request need UNIFORM_BATCH"
        mode = step(mode, without_graph, reason)
    if not piecewise:
        mode = step(mode, mode.without_piecewise(), "piecewise graphs are not available")

    # What the rules above, or another limit, made of the mode may be beyond a limit again.
    for limit in facts.mode_limits:
        if not _permits(limit.mode, mode):
            mode = step(mode, CUDAGraphMode.NONE, limit.reason)
    return mode, steps


def _permits(limit: CUDAGraphMode, mode: CUDAGraphMode) -> bool:
    return mode in (limit, CUDAGraphMode.NONE)

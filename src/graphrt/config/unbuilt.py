"""Plans that a runtime refuses: options that nothing reads yet, and attention that would be wrong.

``resolve`` gives these plans, because they are sound as plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from graphrt.config.compilation import PassConfig
from graphrt.config.plan import CompilePlan
from graphrt.errors import ConfigProblem


def unbuilt(plan: CompilePlan) -> Iterator[ConfigProblem]:
    """What of ``plan`` a runtime cannot do yet."""
    if plan.inductor_passes:
        yield _problem("inductor_passes", plan.inductor_passes, "none")
    for item in fields(PassConfig):
        found = getattr(plan.pass_config, item.name)
        if found != item.default and item.name != "enable_noop":
            yield _problem(f"pass_config.{item.name}", found, str(item.default))


def _problem(name: str, found: object, accepted: str) -> ConfigProblem:
    return ConfigProblem(f"compilation.{name}", str(found), accepted)


def misplaced_attention(plan: CompilePlan) -> Iterator[ConfigProblem]:
    """Attention inside compiled code that may read its cache before this step has written it."""
    # A partition is Inductor's own graph, whatever it is cut at.
    by_inductor = plan.attention_is_split and plan.use_inductor_graph_partition
    is_inside = by_inductor or not plan.attention_is_split
    if plan.attention_ops and plan.moves_writes and is_inside and not plan.attention_writes_cache:
        name, value = "splitting_ops", str(list(plan.splitting_ops))
        accepted = "level 3, cut at these operators"
        if by_inductor:
            name, value, accepted = "use_inductor_graph_partition", "True", "None or False"
        found = (
            f"{value} at level {int(plan.level)}, so that backend"
            f" {plan.backend!r} compiles {', '.join(plan.attention_ops)}, which may then read the"
            " cache before this step has written it"
        )
        yield _problem(name, found, f"{accepted}; or facts with attention_writes_cache=True")

"""What can be planned and no runtime does yet: refused, so that no option is lost in silence."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.config.compilation import PASS_FLAGS
from graphrt.config.plan import CompilePlan
from graphrt.errors import ConfigProblem


def unbuilt(plan: CompilePlan) -> Iterator[ConfigProblem]:
    """What of ``plan`` a runtime cannot do yet."""
    if plan.use_inductor_graph_partition:
        yield _problem("use_inductor_graph_partition", True, "None or False")
    if plan.inductor_passes:
        yield _problem("inductor_passes", plan.inductor_passes, "none")
    for name in PASS_FLAGS:
        if getattr(plan.pass_config, name):
            yield _problem(f"pass_config.{name}", True, "False")


def _problem(name: str, found: object, accepted: str) -> ConfigProblem:
    return ConfigProblem(f"compilation.{name}", str(found), accepted)

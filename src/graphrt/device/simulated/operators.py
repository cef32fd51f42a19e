"""What an operator's schema and tags say about it, whatever its arguments are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphrt.device.simulated import refusals
from graphrt.device.simulated.refusals import Why

Operator = torch._ops.OpOverload

_MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv"})


class Traits(NamedTuple):
    """What the schema and tags of an operator say, whatever its arguments are."""

    name: str
    refusal: Why | None
    judged_by_arguments: bool
    is_composite: bool
    runs_for_real: bool
    """It moves no data: a view, a change of metadata, a question about metadata."""
    only_allocates: bool
    bakes: bool
    written: tuple[int | str, ...]
    """Positions, and names of keyword arguments, that it writes."""
    returns_written: tuple[int | str | None, ...]
    """For each result the argument that it is; None: something new."""
    uses_rng: bool
    takes_workspace: bool


_ALLOCATORS = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::empty_permuted"}
    | {"aten::new_empty", "aten::new_empty_strided"}
)
_PASSED_THROUGH = frozenset({"profiler", "prim"})


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def decompose(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the parts of a composite operator, as eager would.

    ``func.decompose`` may pick a Python decomposition that computes other bits than the kernel.
    """
    run = getattr(func, "_op_dk", None)
    if run is None:
        return func.decompose(*args, **kwargs)
    return run(_COMPOSITE, *args, **kwargs)


def traits_of(func: Operator) -> Traits:
    schema = func._schema
    tags = {tag.name for tag in func.tags}
    written: list[int | str] = []
    by_alias: dict[str, int | str] = {}
    for at, argument in enumerate(schema.arguments):
        place: int | str = argument.name if argument.kwarg_only else at
        info = argument.alias_info
        if info is not None and info.is_write:
            written.append(place)
            by_alias.update(dict.fromkeys(info.before_set, place))
    views = [one.alias_info is not None and not one.alias_info.is_write for one in schema.returns]
    returns_written: list[int | str | None] = []
    for one in schema.returns:
        info = one.alias_info
        sets = list(info.before_set) if info is not None and info.is_write else []
        returns_written.append(by_alias[sets[0]] if sets else None)
    returns_tensors = any("Tensor" in str(one.type) for one in schema.returns)
    asks_metadata = bool(schema.returns) and not returns_tensors and not written
    return Traits(
        name=func.name(),
        refusal=refusals.refusal_of(func),
        judged_by_arguments=refusals.is_judged_by_arguments(func),
        is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ),
        runs_for_real=(
            any(views)
            or "inplace_view" in tags
            or asks_metadata
            or func.namespace in _PASSED_THROUGH
        ),
        only_allocates=schema.name in _ALLOCATORS and not written,
        bakes=schema.name in ("aten::lift_fresh", "aten::lift"),
        written=tuple(written),
        returns_written=tuple(returns_written),
        uses_rng="nondeterministic_seeded" in tags,
        takes_workspace=schema.name in _MATMULS,
    )

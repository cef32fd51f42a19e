"""Operations in two forms: plain torch, which a compiler sees through, and an optimised one.

Which form runs is decided once, where the operation is made, by the rules of the plan. The registry
is filled by imports and holds classes only: what was decided is kept in each operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from graphrt.config import CompilationLevel, CompilePlan
from graphrt.config.checked import check_type, config_error
from graphrt.errors import ConfigError, ConfigProblem, shown

Op = TypeVar("Op", bound="CustomOp")

_REGISTERED: dict[str, type[CustomOp]] = {}
_NO_SELF: Any = None


class CustomOp(torch.nn.Module):
    """An operation with a plain form and, for some devices, an optimised one.

    A subclass has ``forward_native``, plain torch that is its definition and can be traced, and may
    have ``forward_optimized``, for devices of the kinds in ``optimized_for``. What the optimised
    form calls must itself be traceable: torch's operators, or one registered with a fake kernel.
    Both take and return the same.

    ``operator`` instead of ``forward_optimized``: the name, ``ns::op``, of a registered operator
    that is the optimised form. It may have a ``largest_size``: the largest batch for which it is
    faster than what Inductor makes of the plain form, which pieces for larger ones then have. The
    plain form then uses nothing of ``self``, and branches on no tensor.

    ``plan``: Whose rules decide, ``resolve(...).compile``. ``device``: the kind of the tensors it
    will be called with. ``is_enabled``: whether the rules want the optimised form; without one for
    the device, the plain form runs all the same, which ``is_optimized`` tells.
    Errors: ``ConfigError`` for a class that is not registered.
    """

    name: ClassVar[str] = ""
    optimized_for: ClassVar[tuple[str, ...]] = ("cuda",)
    operator: ClassVar[str] = ""
    largest_size: ClassVar[int | None] = None

    def __init__(self, plan: CompilePlan, device: str | torch.device) -> None:
        super().__init__()
        if _REGISTERED.get(self.name) is not type(self):
            raise ConfigError(
                f"{type(self).__qualname__}",
                expected="a class that is registered by a name",
                found="one that is not",
                do="put @CustomOp.register(...) above it",
            )
        check_type("plan", plan, CompilePlan, "a CompilePlan", "pass resolve(config).plan.compile")
        kind = type(self)
        has_form = bool(kind.operator) or kind.forward_optimized is not CustomOp.forward_optimized
        self.is_enabled = self.enabled(plan)
        self.is_optimized = (
            self.is_enabled and has_form and torch.device(device).type in self.optimized_for
        )

    @staticmethod
    def register(name: str) -> Callable[[type[Op]], type[Op]]:
        """Give a subclass the name that rules use.

        Errors: ``ConfigError`` for a name that another class has, or that no rule could say.
        """

        def register(kind: type[Op]) -> type[Op]:
            is_name = isinstance(name, str) and name.isidentifier()
            before = _REGISTERED.get(name) if is_name else None
            # The same class again: its module was loaded a second time.
            is_new = before is None or _place(before) == _place(kind)
            if not is_name or not is_new:
                found = shown(name) if before is None else f"that of {'.'.join(_place(before))}"
                raise ConfigError(
                    f"custom op {name!r}",
                    expected="an identifier that no other operation has",
                    found=found,
                    do="choose another name",
                )
            kind.name = name
            _REGISTERED[name] = kind
            return kind

        return register

    @classmethod
    def enabled(cls, plan: CompilePlan) -> bool:
        """Whether the rules of ``plan`` want the optimised form.

        A rule with its name decides, then ``all`` or ``none``; else it is wanted, except where
        Inductor compiles the pieces, because it fuses plain forms by itself: there only up to its
        ``largest_size``.
        """
        if f"+{cls.name}" in plan.custom_ops or f"-{cls.name}" in plan.custom_ops:
            return f"+{cls.name}" in plan.custom_ops
        if "all" in plan.custom_ops or "none" in plan.custom_ops:
            return "all" in plan.custom_ops
        fuses_plain = (plan.level, plan.backend) == (CompilationLevel.PIECEWISE, "inductor")
        return cls.largest_size is not None or not fuses_plain

    @property
    def form(self) -> Callable[..., Any]:
        """What a call runs. A traced model that keeps it is traced in less time than one that calls
        the module."""
        if not self.is_optimized:
            return self.forward_native
        return _registered(self.operator) if self.operator else self.forward_optimized

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.form(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The operation in plain torch."""
        raise NotImplementedError(f"{type(self).__qualname__}.forward_native")

    def forward_optimized(self, *args: Any, **kwargs: Any) -> Any:
        """The same, faster."""
        if not self.operator:
            raise NotImplementedError(f"{type(self).__qualname__}.forward_optimized")
        return _registered(self.operator)(*args, **kwargs)


def _registered(operator: str) -> Callable[..., Any]:
    namespace, _, name = operator.partition("::")
    found: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name)
    return found


class SizedForm(NamedTuple):
    """What replaces an operator in pieces for larger batches."""

    plain: Callable[..., Any]
    largest_size: int


def sized_forms() -> dict[str, SizedForm]:
    """Of every operator that is the optimised form of an operation with a ``largest_size``."""
    return {
        kind.operator: SizedForm(partial(kind.forward_native, _NO_SELF), kind.largest_size)
        for kind in _REGISTERED.values()
        if kind.operator and kind.largest_size is not None
    }


class CustomOpCounts(NamedTuple):
    """How many operations of a model the rules switched on and off.

    ``enabled``: Name -> those that are to run their optimised form.
    ``disabled``: Name -> those that run their plain form.
    """

    enabled: Counter[str]
    disabled: Counter[str]


def count_custom_ops(model: object) -> CustomOpCounts:
    """The operations in ``model``, by name; none in what is no module."""
    counts = CustomOpCounts(Counter(), Counter())
    for op in _ops_in(model):
        (counts.enabled if op.is_enabled else counts.disabled)[op.name] += 1
    return counts


def check_custom_ops(plan: CompilePlan, model: object = None) -> None:
    """Compare the rules of ``plan`` with what is registered, and with the operations of ``model``.

    Errors: ``ConfigError`` for a rule with a name that nothing has, and for an operation that was
    made by other rules.
    """
    problems = []
    for rule in plan.custom_ops:
        if rule[0] in "+-" and rule[1:] not in _REGISTERED:
            nearest_first = get_close_matches(rule[1:], _REGISTERED, len(_REGISTERED) or 1, 0.0)
            known = ", ".join(nearest_first) or "none: first import what registers it"
            found = f"{rule!r}, an unknown name"
            problems.append(ConfigProblem("compilation.custom_ops", found, known))
    wrong = sorted({op.name for op in _ops_in(model) if op.is_enabled != op.enabled(plan)})
    if wrong:
        found = f"{list(plan.custom_ops)}, and operations made by other rules: {', '.join(wrong)}"
        accepted = "the rules that the model was built with: make its operations with this plan"
        problems.append(ConfigProblem("compilation.custom_ops", found, accepted))
    if problems:
        raise config_error("custom ops", problems)


def _ops_in(model: object) -> list[CustomOp]:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, CustomOp)]


def _place(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__

"""Sizes that vary: ranges that compiled code serves, and made-up inputs to compile it with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, _constrain_range_for_size

from graphrt.errors import ContractError


class Range(NamedTuple):
    """Sizes that one compiled form serves, both ends included."""

    start: int
    end: int
    is_static: bool = False
    """One size, with static shapes."""

    def __str__(self) -> str:
        return str(self.start) if self.is_static else f"{self.start}-{self.end}"


def ranges_of(
    ranges: Sequence[tuple[int, int | None]], sizes: Sequence[int], most: int
) -> tuple[Range, ...]:
    """Ranges, then exact sizes, cut to ``most``: the largest size of the axis."""
    cut = [Range(start, min(end or most, most)) for start, end in ranges if start <= most]
    return (*(cut or [Range(1, most)]), *(Range(size, size, True) for size in sizes))


class Forms:
    """The compiled forms of one piece. ``place``: argument and dimension that say the size."""

    def __init__(
        self,
        forms: Mapping[Range, Callable[..., Any]],
        place: tuple[int, int] | None,
        axis: str,
    ) -> None:
        self._axis = axis
        self._exact = {one.start: form for one, form in forms.items() if one.is_static}
        ranges = sorted(one for one in forms if not one.is_static)
        self._ends = [one.end for one in ranges]
        self._forms = [forms[one] for one in ranges]
        self._place = place
        self.only = self._forms[0] if place is None or len(forms) == 1 else None
        """The form that serves every call, if there is one."""

    def __call__(self, *args: Any) -> Any:
        if self.only is not None:
            return self.only(*args)
        assert self._place is not None, "a piece of several forms has a size"
        argument, dim = self._place
        size = args[argument] if dim < 0 else args[argument].shape[dim]
        return self.form(size)(*args)

    def form(self, size: int) -> Callable[..., Any]:
        """That of an exact size, else of its range. Errors: ``ContractError`` above all of them."""
        exact = self._exact.get(size)
        if exact is not None:
            return exact
        at = bisect_left(self._ends, size)
        if at == len(self._ends):
            raise ContractError(
                f"{size} {self._axis}",
                expected=f"at most {self._ends[-1]}, the largest size that was compiled for",
                found=str(size),
                do="raise the limit in the config, and make another runtime",
            )
        return self._forms[at]


class Axis(NamedTuple):
    """What varies in a traced graph."""

    name: str
    most: int
    """Its largest size."""


class Symbols:
    """The symbols of a traced graph, and the axes that they stand for."""

    def __init__(self, axes: Mapping[Any, Axis], *, is_backed: bool) -> None:
        self.axes = dict(axes)
        self._is_backed = is_backed

    def place(self, nodes: Sequence[fx.Node], axis: str) -> tuple[int, int] | None:
        """Position in ``nodes`` and dimension (-1: a number) that are the size of ``axis``."""
        symbols = {symbol for symbol, known in self.axes.items() if known.name == axis}
        found = None
        for index, node in enumerate(nodes):
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt) and value.node.expr in symbols:
                return index, -1
            if found is None and isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr in symbols:
                        found = index, dim
        return found

    def inputs(
        self, nodes: Sequence[fx.Node], axis: str, sizes: Range
    ) -> tuple[FakeTensorMode, list[Any]]:
        """Fake values of ``nodes`` in a mode of their own, where ``axis`` has ``sizes``.

        In a new environment of shapes, so that nothing which one form assumes is left to another.
        """
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        known: dict[Any, Any] = {}

        def new_symbol(symbol: Any) -> Any:
            about = self.axes.get(symbol)
            bounds = sizes if about and about.name == axis else None
            if bounds and bounds.is_static:
                return sympy.Integer(bounds.start)
            least, most = bounds[:2] if bounds else (1, about.most) if about else (0, None)
            if self._is_backed and about:
                return _backed(env, str(symbol), max(least, 2), most or 2)
            with env.ignore_fresh_unbacked_symbols():
                made = env.create_unbacked_symint()
            _constrain_range_for_size(made, least, most)
            return made.node.expr

        def value(size: Any) -> Any:
            if not isinstance(size, torch.SymInt):
                return size
            expression = size.node.expr
            for symbol in sorted(expression.free_symbols, key=str):
                if symbol not in known:
                    known[symbol] = new_symbol(symbol)
            expression = expression.xreplace(known)
            if expression.is_number:
                return int(expression)
            hint = int(expression.xreplace(env.backed_var_to_val)) if self._is_backed else None
            return env.create_symintnode(expression, hint=hint)

        def fake(node: fx.Node) -> Any:
            example = node.meta.get("example_value")
            if not isinstance(example, torch.Tensor):
                return value(example)
            shape, stride = map(value, example.shape), map(value, example.stride())
            with mode:
                return torch.empty_strided(
                    tuple(shape), tuple(stride), dtype=example.dtype, device=example.device
                )

        return mode, [fake(node) for node in nodes]


def _backed(env: ShapeEnv, name: str, least: int, most: int) -> Any:
    raise NotImplementedError

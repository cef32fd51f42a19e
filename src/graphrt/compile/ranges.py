"""Sizes that vary: ranges that compiled code serves, and made-up inputs to compile it with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StrictMinMaxConstraint,
    _constrain_range_for_size,
)
from torch.utils._sympy.value_ranges import ValueRanges

from graphrt.compile.failures import shape_guard

_HINT = 37
"""What a symbol stands for where compilers ask: no size that anything is special for."""
_MOST_TRIED = 64


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
    """Ranges without holes up to ``most``, the largest size of the axis; then exact sizes."""
    starts = [start for start, _ in ranges if start <= most] or [1]
    ends = [*(start - 1 for start in starts[1:]), most]
    return (*map(Range, starts, ends), *(Range(size, size, True) for size in sizes))


def cut_at(ranges: Sequence[Range], ends: Collection[int]) -> tuple[Range, ...]:
    """``ranges``, and in place of one that goes on beyond some of ``ends``, its parts."""
    found: list[Range] = []
    for one in ranges:
        inner = sorted(end for end in ends if one.start <= end < one.end)
        starts = (one.start, *(end + 1 for end in inner))
        stops = (*inner, one.end)
        found += [Range(*part, one.is_static) for part in zip(starts, stops, strict=True)]
    return tuple(found)


def chosen_by_size(
    forms: Mapping[Range, Callable[..., Any]], place: tuple[int, int] | None
) -> Callable[..., Any]:
    """What runs the compiled form of an exact size, else of its range. ``place``: argument and
    dimension that say the size; None: there is one form."""
    if place is None or len(forms) == 1:
        return next(iter(forms.values()))
    argument, dim = place
    exact = {one.start: form for one, form in forms.items() if one.is_static}
    ranges = sorted(one for one in forms if not one.is_static)
    ends = [one.end for one in ranges]

    def call(*args: Any) -> Any:
        size = args[argument] if dim < 0 else args[argument].shape[dim]
        form = exact.get(size)
        if form is None:
            form = forms[ranges[bisect_left(ends, size)]]
        return form(*args)

    return call


class Axis(NamedTuple):
    """What varies in a traced graph."""

    name: str
    most: int
    """Its largest size."""
    order: int = 0
    """0: the axis of ranges and sizes."""


class Symbols:
    """The symbols of a graph that was traced in ``mode``, and the axes that they stand for."""

    def __init__(self, axes: Mapping[Any, Axis], mode: Any, *, is_backed: bool) -> None:
        self.axes = dict(axes)
        self.mode = mode
        self.names = {symbol: axis.name for symbol, axis in axes.items()}
        self._is_backed = is_backed

    def place(self, nodes: Sequence[fx.Node], axis: str) -> tuple[int, int] | None:
        """Position in ``nodes`` and dimension (-1: a number) that are the size of ``axis``."""
        found = [place for size, place in sizes_of(nodes) if self.names.get(size) == axis]
        return min(found, key=lambda place: place[1] >= 0, default=None)

    def inputs(
        self, nodes: Sequence[fx.Node], axis: str, sizes: Range
    ) -> tuple[FakeTensorMode, list[Any], dict[Any, Axis]]:
        """Fake values of ``nodes`` in a mode of their own, where ``axis`` has ``sizes``; and what
        varies in them, if it is backed, by symbol.

        In a new environment of shapes, so that nothing which one form assumes is left to another.
        """
        fresh = FreshSymbols(self.axes, axis, sizes, is_backed=self._is_backed)

        def fake(node: fx.Node) -> Any:
            example = node.meta.get("example_value")
            if not isinstance(example, torch.Tensor):
                return fresh.value(example)
            shape, stride = map(fresh.value, example.shape), map(fresh.value, example.stride())
            with fresh.mode:
                return torch.empty_strided(
                    tuple(shape), tuple(stride), dtype=example.dtype, device=example.device
                )

        return fresh.mode, [fake(node) for node in nodes], fresh.made


class FreshSymbols:
    """Symbols in a mode of their own, in place of those of a trace, which stand for ``axes``.

    ``axis`` has ``sizes`` there; None: each axis has all that it may have.
    """

    def __init__(
        self,
        axes: Mapping[Any, Axis],
        axis: str = "",
        sizes: Range | None = None,
        *,
        is_backed: bool,
    ) -> None:
        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env)
        self.made: dict[Any, Axis] = {}
        """Those that are backed."""
        self._axes, self._axis, self._sizes, self._is_backed = axes, axis, sizes, is_backed
        self._known: dict[Any, Any] = {}
        self._numbers: dict[Any, Any] = {}

    @property
    def names(self) -> dict[Any, Any]:
        """Of those that stand for axes: names that are the same in every process."""
        return {self._known[one]: name for name, one in self._named().items()}

    def of_names(self, expression: Any) -> Any:
        """What an expression of ``names`` is here."""
        return self.number(expression.xreplace(self._named()))

    def _named(self) -> dict[Any, Any]:
        known = [(one, axis) for one, axis in self._axes.items() if one in self._known]
        return {
            sympy.Symbol(f"{axis.name}{at}", integer=True): one
            for at, (one, axis) in enumerate(known)
        }

    def size_of(self, axis: str) -> Any:
        """The size of an axis, also of one that is nowhere in the graph."""
        named = (symbol for symbol, about in self._axes.items() if about.name == axis)
        return self.number(next(named, sympy.Symbol(axis, integer=True)))

    def value(self, size: Any) -> Any:
        """A size of the trace, here."""
        return self.number(size.node.expr) if isinstance(size, torch.SymInt) else size

    def number(self, expression: Any) -> Any:
        """What an expression of symbols of the trace is here: a number, or a truth value."""
        if expression not in self._numbers:
            self._numbers[expression] = self._new_number(expression)
        return self._numbers[expression]

    def _new_number(self, expression: Any) -> Any:
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._known:
                self._known[symbol] = self._new_symbol(symbol)
        expression = expression.xreplace(self._known)
        if isinstance(expression, Boolean) and not expression.is_Symbol:
            return self._env.create_symboolnode(expression)
        if expression.is_number:
            return int(expression)
        hint = expression.xreplace(self._env.backed_var_to_val) if self.made else expression
        return self._env.create_symintnode(expression, hint=int(hint) if hint.is_number else None)

    def _new_symbol(self, symbol: Any) -> Any:
        about = self._axes.get(symbol)
        bounds = self._sizes if about and about.name == self._axis else None
        if bounds and bounds.is_static:
            return sympy.Integer(bounds.start)
        least, most = bounds[:2] if bounds else (1, about.most) if about else (0, None)
        if self._is_backed and about:
            new = _backed(self._env, str(symbol), max(least, 2), max(most or 2, 2))
            self.made[new] = about
            return new
        with self._env.ignore_fresh_unbacked_symbols():
            unbacked = self._env.create_unbacked_symint()
        _constrain_range_for_size(unbacked, least, most)
        return unbacked.node.expr


def sizes_of(nodes: Iterable[fx.Node]) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Each size in ``nodes`` that is no number, with its position and dimension (-1: it is it)."""
    for index, node in enumerate(nodes):
        value = node.meta.get("example_value")
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(-1, value)]
        for dim, size in sizes:
            if isinstance(size, torch.SymInt):
                yield size.node.expr, (index, dim)


def _backed(env: ShapeEnv, name: str, least: int, most: int) -> Any:
    """A symbol with a value, on which code may branch: the branch becomes a guard of ``env``."""
    bounds = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(least, most))
    value = max(least, min(most, _HINT))
    return env.create_symbol(value, ConstantSource(name), DimDynamic.DYNAMIC, bounds)


def refuse_shape_guards(mode: Any, axes: Mapping[Any, Axis], sizes: Range | None) -> None:
    """Errors: ``ShapeGuardError`` with the first branch on a size in ``mode``, a fake one with an
    environment of shapes, that some other size does not take. ``sizes``: of the first axis; None:
    all. Of two axes the first is at least the second.

    Tried are all small sizes, and the largest.
    """
    for guard in mode.shape_env.guards:
        known = [(symbol, axes[symbol]) for symbol in axes if symbol in guard.expr.free_symbols]
        known.sort(key=lambda item: item[1].order)
        tried = [_tried(axis, None if axis.order else sizes) for _, axis in known]
        for values in product(*tried) if known else ():
            if list(values) != sorted(values, reverse=True):
                continue
            given = {symbol: sympy.Integer(n) for (symbol, _), n in zip(known, values, strict=True)}
            if guard.expr.xreplace(given) is not sympy.false:
                continue
            where = _line_of(guard)
            named = {symbol: sympy.Symbol(axis.name) for symbol, axis in known}
            told = zip([axis.name for _, axis in known], values, strict=True)
            sizes_told = ", ".join(f"{n} {name}" for name, n in told)
            found = f"{guard.expr.xreplace(named)}, which does not hold for {sizes_told}"
            raise shape_guard(f" at {where}", found, where)


def branch_of(mode: Any, axes: Mapping[Any, Axis]) -> str:
    """The line of the first branch in ``mode`` on more than whether an axis is above a number."""
    for guard in mode.shape_env.guards:
        if {*axes} & guard.expr.free_symbols and not any(one.is_Symbol for one in guard.expr.args):
            return _line_of(guard)
    return ""


def _line_of(guard: Any) -> str:
    return str(guard.sloc.maybe_user_loc or guard.sloc.framework_loc)


def _tried(axis: Axis, sizes: Range | None) -> list[int]:
    least, most = (max(2, sizes.start), sizes.end) if sizes else (2, axis.most)
    return sorted({*range(least, min(most, least + _MOST_TRIED) + 1), max(most, least)})

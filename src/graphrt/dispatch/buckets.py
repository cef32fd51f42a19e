"""Dispatch for any callable: named axes, each with its sizes; every axis is padded up on its own.

Same decisions and reasons as for token batches. The key is a ``BatchDescriptor`` whose
``num_tokens`` is the first axis and whose ``variant`` is a ``BucketKey``: every size, in the order
of the axes, and the caller's own variant. Programs, contexts and wrappers need no second key type.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from graphrt.batch import BatchDescriptor, CUDAGraphMode, Decision, Reason, RuntimeMode
from graphrt.config.checked import (
    check_count as check_size,
    check_hashable,
    check_type,
    checked_list,
)
from graphrt.config.plan import MOST_KEYS
from graphrt.dispatch.dispatcher import NOTHING, Unavailable, check_count, check_keys, check_modes
from graphrt.errors import BatchError, ConfigError, shown


class BucketKey(NamedTuple):
    """What ``BatchDescriptor.variant`` holds for a bucketed call."""

    sizes: tuple[int, ...]
    """One per axis, in the order of the axes."""
    variant: object = None


class BucketDispatcher:
    """Decides which graph serves a call with the given axis sizes. Immutable.

    ``axes``: name -> sizes (any order; stored ascending, once each); the first named axis is the
    key's ``num_tokens``. There is one key for every combination of sizes, largest volume first.
    All calls are treated alike: with ``mode`` FULL_AND_PIECEWISE the first of the two that has a
    graph serves, FULL first. ``unavailable`` and ``variant`` as for ``CUDAGraphDispatcher``. Raises
    ``ConfigError`` for an axis without sizes, FULL_DECODE_ONLY, more than 2**16 keys, or a wrong
    ``unavailable``.
    """

    __slots__ = ("_modes", "_served", "_variant", "axes", "keys")

    def __init__(
        self,
        axes: Mapping[str, Sequence[int]],
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
        unavailable: Unavailable = MappingProxyType({}),
        variant: object = None,
    ) -> None:
        check_type(
            "axes", axes, Mapping, "a dict by name, such as {'batch': [2, 4]}", "name the axis"
        )
        check_type("mode", mode, CUDAGraphMode, "a CUDAGraphMode")
        check_hashable("variant", variant)
        expected, do = "at least one size, each an integer >= 1", "list the sizes it is padded to"
        self.axes: dict[str, tuple[int, ...]] = {}
        """Axis name -> its sizes, ascending."""
        for name, sizes in axes.items():
            check_type("an axis of sizes", name, str, "a name")
            listed = checked_list(f"sizes of axis {name!r}", sizes, int, expected, do)
            for size in listed or (0,):
                check_size(f"a size of axis {name!r}", size)
            self.axes[name] = tuple(sorted(set(listed)))
        if not axes or mode is CUDAGraphMode.FULL_DECODE_ONLY:
            raise ConfigError(
                "bucket dispatch",
                expected="at least one axis, and a mode other than FULL_DECODE_ONLY",
                found=f"axes {list(axes)}, mode {mode.name}",
                do="name the axes that vary; a bucketed call has no decode routine of its own",
            )
        self._modes = sorted({*mode.value} - {RuntimeMode.NONE}, reverse=True)
        num_keys = prod(len(listed) for listed in self.axes.values()) * max(1, len(self._modes))
        if num_keys > MOST_KEYS:
            raise ConfigError(
                "bucket dispatch",
                expected=f"at most {MOST_KEYS} combinations of sizes, each with a key of its own",
                found=f"{num_keys}",
                do="list fewer sizes: a call is padded to the next one",
            )
        self._variant = variant
        order = sorted(
            product(*self.axes.values()), key=lambda sizes: (prod(sizes), sizes), reverse=True
        )
        self.keys: tuple[tuple[RuntimeMode, BatchDescriptor], ...] = tuple(
            (each, self._describe(sizes)) for each in reversed(self._modes) for sizes in order
        )
        """Every key with its mode, in capture order: PIECEWISE before FULL."""
        missing = check_keys(unavailable, self.keys)
        # Mode and padded sizes -> (decision of an exact call, that of a padded one), or why not.
        self._served: dict[object, tuple[Decision, Decision] | Reason] = {
            (item[0], item[1].variant): missing.get(
                item, (Decision(*item, Reason.HIT), Decision(*item, Reason.PADDED))
            )
            for item in self.keys
        }

    def dispatch(
        self, sizes: Mapping[str, int], exclude: frozenset[RuntimeMode] = NOTHING
    ) -> Decision:
        """Return mode, key and reason for a call of these unpadded axis ``sizes``.

        Decisions with a graph are shared; an eager one is built for the call, whose sizes have no
        bound. Raises ``BatchError`` for a missing or unknown axis, a size that is no integer >= 0,
        or an ``exclude`` that holds no modes.
        """
        real = ordered_sizes(sizes, self.axes)
        excluded = check_modes(exclude)
        if not self._modes:
            return self._none(real, Reason.MODE_NONE)
        if any(size > listed[-1] for size, listed in zip(real, self.axes.values(), strict=True)):
            return self._none(real, Reason.ABOVE_MAX)
        padded = tuple(
            listed[bisect_left(listed, size)]
            for size, listed in zip(real, self.axes.values(), strict=True)
        )
        why = Reason.EXCLUDED
        for mode in self._modes:
            if mode in excluded:
                continue
            served = self._served[mode, BucketKey(padded, self._variant)]
            if not isinstance(served, Reason):
                exact, rounded_up = served
                return exact if padded == real else rounded_up
            # Of the best mode that is not excluded.
            why = served if why is Reason.EXCLUDED else why
        return self._none(real, why)

    def _describe(self, sizes: tuple[int, ...]) -> BatchDescriptor:
        return BatchDescriptor(sizes[0], variant=BucketKey(sizes, self._variant))

    def _none(self, sizes: tuple[int, ...], why: Reason) -> Decision:
        return Decision(RuntimeMode.NONE, self._describe(sizes), why)


def ordered_sizes(sizes: object, axes: Mapping[str, object]) -> tuple[int, ...]:
    """The sizes of a call in the order of ``axes``, one for each.

    Errors: ``BatchError`` for what is no mapping, a missing or unknown axis, and what is no
            integer >= 0.
    """
    if not isinstance(sizes, Mapping) or sizes.keys() != axes.keys():
        raise BatchError(
            "sizes",
            expected=f"a size for each of {list(axes)}",
            found=shown(sizes),
            do="pass a dict axis -> real size, with every axis once",
        )
    return tuple(check_count(f"axis {name!r}", sizes[name], least=0) for name in axes)

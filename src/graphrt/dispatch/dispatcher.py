"""Which graph serves a batch, and why: tables built once from a plan and from what is captured.

A dispatcher never changes. Rows are indexed by token count and hold prebuilt decisions, so a hit
builds nothing; decisions of rarer calls are built on first use and then shared as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace
from itertools import pairwise
from operator import index
from sys import maxsize
from types import MappingProxyType
from typing import NamedTuple

from graphrt.batch import BatchDescriptor, Decision, Reason, RuntimeMode
from graphrt.config import Plan
from graphrt.config.checked import check_hashable, check_type
from graphrt.errors import BatchError, ConfigError, shown

NOTHING: frozenset[RuntimeMode] = frozenset()
EVERY_MODE = frozenset(RuntimeMode)
_SETS = (frozenset, set)
_NO_ADAPTERS = 0

Unavailable = Mapping[tuple[RuntimeMode, BatchDescriptor], Reason]
"""Keys without a graph, and why: NOT_CAPTURED_YET, CAPTURE_FAILED, INVALIDATED."""


class _Row(NamedTuple):
    """Every decision for one kind of batch."""

    decisions: list[Decision | None]
    """For 0, 1, 2, ... tokens, up to the largest size of any graph for this kind of batch. None
    where it runs eager, until the first one of its size: such a decision contains the size."""
    reasons: list[Reason]
    """For as many tokens: why a batch runs eager, where it does."""
    beyond: Reason
    """Why a larger batch runs eager."""


class _Family(NamedTuple):
    """The graphs of one mode that fit one kind of batch, smallest first."""

    mode: RuntimeMode
    sizes: list[int]
    keys: list[BatchDescriptor | None]
    """One for each size; None where that size has no graph of as many micro-batches."""


class CUDAGraphDispatcher:
    """Decides which graph of ``plan`` serves a batch. Immutable; may be shared between threads.

    ``unavailable``: the keys that have no graph now, each with the reason; a lower mode may then
    serve their batches. ``variant`` is put into every key: one dispatcher per variant. Without one,
    the keys in decisions are the plan's own objects, so that wrappers may compare by identity.
    Raises ``ConfigError`` if ``unavailable`` holds a key that the plan has not, or a reason that is
    no miss.
    """

    __slots__ = (
        "_decode_row",
        "_decode_rows",
        "_eager",
        "_families",
        "_mixed_row",
        "_mixed_rows",
        "_plan",
        "_rows",
        "_unavailable",
        "_variant",
        "keys",
    )

    def __init__(
        self, plan: Plan, unavailable: Unavailable = MappingProxyType({}), variant: object = None
    ) -> None:
        check_type("plan", plan, Plan, "a Plan", "pass resolve(config, facts).plan")
        check_hashable("variant", variant)
        self.keys = plan.capture_order
        """Every key with its mode, in capture order, as decisions carry them."""
        if variant is not None:
            self.keys = tuple((mode, replace(key, variant=variant)) for mode, key in self.keys)
        self._plan = plan
        self._variant = variant
        self._unavailable: Unavailable = check_keys(unavailable, self.keys)
        self._families: dict[tuple[RuntimeMode, bool, int, int], _Family] = {}
        for mode, key in reversed(self.keys):
            kind = (mode, key.uniform, key.num_active_loras, key.num_ubatches)
            family = self._families.setdefault(kind, _Family(mode, [], []))
            family.sizes.append(key.num_tokens)
            family.keys.append(key)
        # Filled on first use, by setdefault: if two threads build the same, both get the first.
        self._eager: dict[tuple[int, int, int, Reason], Decision] = {}
        self._rows: dict[tuple[bool, int, frozenset[RuntimeMode], int], _Row] = {}
        counts = range(plan.max_loras + 1)
        self._mixed_rows = [self._row(False, count, NOTHING, 1).decisions for count in counts]
        self._decode_rows = [self._row(True, count, NOTHING, 1).decisions for count in counts]
        self._mixed_row, self._decode_row = self._mixed_rows[0], self._decode_rows[0]

    def dispatch(
        self,
        num_tokens: int,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = NOTHING,
        num_ubatches: int = 1,
    ) -> Decision:
        """Return mode, key and reason for a batch of ``num_tokens`` unpadded tokens.

        ``uniform`` claims that every request brings exactly q tokens. Priority is FULL, PIECEWISE,
        NONE, less ``exclude``; NONE in ``exclude`` changes nothing, because eager is always
        possible. With ``num_ubatches`` above 1 a batch is padded as if unsplit, and served if that
        very size has a graph split into as many micro-batches. An empty batch is padded like any
        other. Accepts any integer type. Raises ``BatchError`` for a number below its
        minimum, too many adapters, or an ``exclude`` that holds no modes.
        """
        # One list look-up for an ordinary batch, two with adapters. Everything else, errors
        # included, is left to _decide; only negative numbers would index silently. A caller's own
        # empty frozenset is another object than the default, and `not exclude` alone would accept
        # None. Zero is one object; where it is not, it takes the longer way.
        try:
            if (
                num_tokens >= 0
                and num_ubatches == 1
                and (exclude is NOTHING or (not exclude and type(exclude) in _SETS))
            ):
                if num_active_loras is _NO_ADAPTERS:
                    found = (self._decode_row if uniform else self._mixed_row)[num_tokens]
                elif num_active_loras > 0:
                    rows = self._decode_rows if uniform else self._mixed_rows
                    found = rows[num_active_loras][num_tokens]
                else:
                    found = None
                if found is not None:
                    return found
        except (IndexError, TypeError, ValueError, RuntimeError):
            pass  # A wrong argument, such as a tensor, or a batch larger than any graph.
        return self._decide(num_tokens, uniform, num_active_loras, exclude, num_ubatches)

    def _decide(
        self,
        num_tokens: int,
        uniform: bool,
        num_active_loras: int,
        exclude: Iterable[RuntimeMode],
        num_ubatches: int,
    ) -> Decision:
        tokens = check_count("num_tokens", num_tokens, least=0)
        count = check_count("num_active_loras", num_active_loras, least=0)
        ubatches = check_count("num_ubatches", num_ubatches, least=1)
        if count > self._plan.max_loras:
            raise BatchError(
                f"num_active_loras = {count}",
                expected=f"0 to max_loras = {self._plan.max_loras} distinct adapters",
                found=str(count),
                do="split the batch, or resolve a plan with a larger max_loras",
            )
        uniform = check_uniform(uniform)
        decisions, reasons, beyond = self._row(uniform, count, check_modes(exclude), ubatches)
        if tokens >= len(decisions):
            return self._none(tokens, count, ubatches, beyond)
        found = decisions[tokens]
        if found is None:
            found = decisions[tokens] = self._none(tokens, count, ubatches, reasons[tokens])
        return found

    def _row(
        self, uniform: bool, count: int, exclude: frozenset[RuntimeMode], num_ubatches: int
    ) -> _Row:
        policy = self._plan.cudagraph_mode
        uniform = uniform and policy.separate_routine()
        name = (uniform, count, exclude, num_ubatches)
        known = self._rows.get(name)
        if known is not None:
            return known

        # The graphs that may serve such a batch, highest mode first.
        kinds = [(policy.decode_mode(), True)] if uniform else []
        if policy.mixed_mode() is not RuntimeMode.NONE:
            kinds.append((policy.mixed_mode(), False))
        captured = self._plan.lora_padding_table[count]
        found = (self._family(*kind, captured, num_ubatches) for kind in kinds)
        families = [family for family in found if family is not None]
        beyond = Reason.ABOVE_MAX if families else Reason.NO_KEY if kinds else Reason.MODE_NONE

        decisions: list[Decision | None] = []
        reasons: list[Reason] = []
        # From one listed size to the next every batch has the same key.
        sizes = sorted({size for family in families for size in family.sizes})
        for below, size in pairwise([-1, *sizes]):
            best = self._best(families, size, exclude)
            if isinstance(best, Reason):
                decisions += [None] * (size - below)
                reasons += [best] * (size - below)
                continue
            mode, key = best
            decisions += [Decision(mode, key, Reason.PADDED)] * (size - below)
            reasons += [Reason.PADDED] * (size - below)
            if key.num_tokens == size and key.num_active_loras == count:
                decisions[-1] = Decision(mode, key, Reason.HIT)
        return self._rows.setdefault(name, _Row(decisions, reasons, beyond))

    def _family(
        self, mode: RuntimeMode, uniform: bool, count: int, num_ubatches: int
    ) -> _Family | None:
        family = self._families.get((mode, uniform, count, num_ubatches))
        unsplit = self._families.get((mode, uniform, count, 1))
        if family is None or unsplit is None or num_ubatches == 1:
            return family
        # Padded as unsplit ones, because ranks that call a split off go on with the size they have.
        split = dict(zip(family.sizes, family.keys, strict=True))
        return _Family(mode, unsplit.sizes, [split.get(size) for size in unsplit.sizes])

    def _best(
        self, families: Iterable[_Family], num_tokens: int, exclude: frozenset[RuntimeMode]
    ) -> tuple[RuntimeMode, BatchDescriptor] | Reason:
        """The first available graph that holds ``num_tokens``, or why there is none."""
        missing: Reason | None = None
        for mode, sizes, keys in families:
            place = bisect_left(sizes, num_tokens)
            if place == len(sizes) or mode in exclude:
                continue
            key = keys[place]
            why = Reason.NO_KEY if key is None else self._unavailable.get((mode, key))
            if key is not None and why is None:
                return mode, key
            missing = why if missing is None else missing
        # A size in this row always fits some graph, so only exclusion can have ruled it out.
        return Reason.EXCLUDED if missing is None else missing

    def _none(self, num_tokens: int, count: int, ubatches: int, why: Reason) -> Decision:
        """The shared eager decision, with the batch itself as its descriptor."""
        name = (num_tokens, count, ubatches, why)
        decision = self._eager.get(name)
        if decision is None:
            batch = BatchDescriptor(
                num_tokens,
                has_lora=count > 0,
                num_active_loras=count,
                num_ubatches=ubatches,
                variant=self._variant,
            )
            decision = Decision(RuntimeMode.NONE, batch, why)
            # Only sizes within the plan's limit are kept: the others have no bound.
            if num_tokens <= self._plan.max_num_batched_tokens:
                return self._eager.setdefault(name, decision)
        return decision


def check_keys(
    unavailable: Unavailable, keys: Iterable[tuple[RuntimeMode, BatchDescriptor]]
) -> Unavailable:
    """Return a copy. Raises ``ConfigError`` for an unknown key, or a reason that is no miss."""
    check_type("unavailable keys", unavailable, Mapping, "(mode, key) -> Reason")
    copy = dict(unavailable)
    unknown = copy.keys() - set(keys)
    if unknown:
        raise ConfigError(
            "unavailable keys",
            expected="keys of the plan, each with its mode",
            found=", ".join(sorted(map(shown, unknown))),
            do="take the pairs from the dispatcher's own `keys`",
        )
    for why in copy.values():
        if not isinstance(why, Reason) or not why.is_miss:
            raise ConfigError(
                "unavailable keys",
                expected="a reason why the key has no graph",
                found=shown(why),
                do="leave out the keys whose graphs serve",
            )
    return copy


def check_count(name: str, value: int, *, least: int) -> int:
    """Return ``value`` as an int. Raises ``BatchError`` if it is none of 64 bits, or below
    ``least``."""
    if type(value) is int and least <= value <= maxsize:
        return value
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= maxsize:
        raise BatchError(
            f"{name} = {shown(value)}",
            expected=f"an integer >= {least}",
            found=f"{type(value).__name__} {shown(value)}",
            do="count what is in the batch",
        )
    return number


def check_uniform(value: object) -> bool:
    """Return ``value`` as a bool. Raises ``BatchError`` for what is neither true nor false."""
    try:
        return bool(value)
    except Exception:  # noqa: BLE001  A tensor of several elements, or what raises by itself.
        raise BatchError(
            "uniform", expected="True or False", found=shown(value), do="pass one of them"
        ) from None


def check_modes(exclude: Iterable[RuntimeMode]) -> frozenset[RuntimeMode]:
    """Return the excluded modes, without NONE. Raises ``BatchError`` for anything else."""
    try:
        # An iterator may never end, and a range be longer than memory.
        are_modes = isinstance(exclude, Sized) and all(mode in EVERY_MODE for mode in exclude)
        named = frozenset(exclude) if are_modes else None
    except TypeError:
        named = None  # Not even a set; the message is the same.
    if named is None:
        raise BatchError(
            "exclude",
            expected="a set of RuntimeMode members",
            found=shown(exclude),
            do="exclude RuntimeMode.FULL, RuntimeMode.PIECEWISE, or both",
        )
    return named - {RuntimeMode.NONE} if RuntimeMode.NONE in named else named

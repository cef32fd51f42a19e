"""Which graph serves a batch, and why: tables built once from a plan and what is published.

A dispatcher never changes. Rows are indexed by token count and hold prebuilt decisions, so a hit
builds nothing; decisions of rarer calls are built on first use and then shared just the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from operator import index
from types import MappingProxyType
from typing import NamedTuple

from graphrt.batch import BatchDescriptor, Decision, MissReason, RuntimeMode
from graphrt.config import Plan
from graphrt.errors import BatchError, ConfigError

NOTHING: frozenset[RuntimeMode] = frozenset()
EVERYTHING = frozenset(RuntimeMode)

Unpublished = Mapping[tuple[RuntimeMode, BatchDescriptor], MissReason]
"""Why no graph serves a key now: NOT_CAPTURED_YET, CAPTURE_FAILED, INVALIDATED."""


_Batch = tuple[bool, int, frozenset[RuntimeMode], int]
"""What a row is for: uniform, adapters, exclusions, micro-batches."""


class _Family(NamedTuple):
    """The graphs of one mode that fit one kind of batch, smallest first."""

    mode: RuntimeMode
    sizes: list[int]
    keys: list[BatchDescriptor]


class CUDAGraphDispatcher:
    """Decides which graph of ``plan`` serves a batch. Immutable; may be shared between threads.

    ``unpublished`` says of every key that no graph serves now why that is so; a lower mode may
    then serve its batches. ``variant`` is put into every key: one dispatcher per variant. Without
    one, the keys handed out are the plan's own objects, so that wrappers may compare by identity.
    Raises ``ConfigError`` if ``unpublished`` names what is no key of the plan, or gives no miss.
    """

    __slots__ = (
        "_decode_rows",
        "_eager",
        "_families",
        "_held",
        "_mixed_rows",
        "_other_rows",
        "_plan",
        "_unpublished",
        "_variant",
        "keys",
    )

    def __init__(
        self,
        plan: Plan,
        unpublished: Unpublished = MappingProxyType({}),
        variant: object = None,
    ) -> None:
        self.keys = plan.capture_order
        """Every key with its mode, in capture order, as decisions carry them."""
        if variant is not None:
            self.keys = tuple((mode, replace(key, variant=variant)) for mode, key in self.keys)
        self._plan = plan
        self._variant = variant
        self._unpublished = checked_unpublished(unpublished, self.keys)
        self._families: dict[tuple[RuntimeMode, bool, int, int], _Family] = {}
        for mode, key in reversed(self.keys):
            kind = (mode, key.uniform, key.num_active_loras, key.num_ubatches)
            family = self._families.setdefault(kind, _Family(mode, [], []))
            family.sizes.append(key.num_tokens)
            family.keys.append(key)
        # Filled on first use, by setdefault: of two threads that build the same, one wins for both.
        self._eager: dict[tuple[int, int, int, MissReason], Decision] = {}
        self._held: dict[tuple[bool, int, frozenset[RuntimeMode]], tuple[Decision, ...]] = {}
        self._other_rows: dict[_Batch, tuple[list[Decision], MissReason]] = {}
        counts = range(plan.max_loras + 1)
        self._mixed_rows = [self._row(False, count, NOTHING, 1) for count in counts]
        self._decode_rows = self._mixed_rows
        if plan.cudagraph_mode.separate_routine():
            self._decode_rows = [self._row(True, count, NOTHING, 1) for count in counts]

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
        NONE, less ``exclude``; naming NONE there changes nothing, for something must run. With
        ``num_ubatches`` above 1 only graphs that are split so may serve. An empty batch is padded
        like any other. Any integer type will do. Raises ``BatchError`` for what is no batch.
        """
        # One index for the adapters, one for the tokens. Everything out of the ordinary, errors
        # included, takes the long way; only negative numbers would index silently.
        try:
            if (
                exclude is NOTHING
                and num_ubatches == 1
                and num_tokens >= 0
                and num_active_loras >= 0
            ):
                if uniform:
                    return self._decode_rows[num_active_loras][num_tokens]
                return self._mixed_rows[num_active_loras][num_tokens]
        except (IndexError, TypeError, ValueError):
            pass  # The long way says what is wrong, or that the batch is above the maximum.
        return self._decide(num_tokens, uniform, num_active_loras, exclude, num_ubatches)

    def dispatch_key(
        self, descriptor: BatchDescriptor, exclude: frozenset[RuntimeMode] = NOTHING
    ) -> Decision:
        """Return the decision for a batch that is described already, padded or not.

        A published key of the plan gets itself back. A descriptor of another variant has no key
        here. Raises ``BatchError`` if the descriptor contradicts itself or the plan.
        """
        count, num_reqs = descriptor.num_active_loras, descriptor.num_reqs
        if descriptor.has_lora != (count > 0):
            raise BatchError(
                repr(descriptor),
                expected="has_lora exactly when num_active_loras is above 0",
                found=f"has_lora={descriptor.has_lora}, num_active_loras={count}",
                do="count the distinct adapters of the batch",
            )
        if num_reqs is not None and num_reqs > self._plan.max_num_seqs:
            raise BatchError(
                repr(descriptor),
                expected=f"at most max_num_seqs = {self._plan.max_num_seqs} requests",
                found=str(num_reqs),
                do="split the batch, or resolve a plan with a larger max_num_seqs",
            )
        decision = self.dispatch(
            descriptor.num_tokens, descriptor.uniform, count, exclude, descriptor.num_ubatches
        )
        if descriptor.variant != self._variant:
            return Decision(RuntimeMode.NONE, descriptor, MissReason.NO_KEY)
        return decision

    def row(
        self,
        *,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = NOTHING,
    ) -> tuple[Decision, ...]:
        """Return the decisions of ``dispatch`` for 0..max_num_batched_tokens tokens, to be held.

        ``row[n]`` is the object that ``dispatch(n, ...)`` returns. Nobody checks the index: a
        negative one counts from the end. A held row is as old as its dispatcher.
        """
        name = (bool(uniform), num_active_loras, excluded(exclude))
        held = self._held.get(name)
        if held is None:
            row = tuple(
                self.dispatch(num_tokens, uniform, num_active_loras, exclude)
                for num_tokens in range(self._plan.max_num_batched_tokens + 1)
            )
            held = self._held.setdefault(name, row)
        return held

    def _decide(
        self,
        num_tokens: int,
        uniform: bool,
        num_active_loras: int,
        exclude: Iterable[RuntimeMode],
        num_ubatches: int,
    ) -> Decision:
        """The long way: check, find or build the row, and share what lies beyond its end."""
        tokens = counted("num_tokens", num_tokens, least=0)
        count = counted("num_active_loras", num_active_loras, least=0)
        ubatches = counted("num_ubatches", num_ubatches, least=1)
        if count > self._plan.max_loras:
            raise BatchError(
                f"num_active_loras = {count}",
                expected=f"0 to max_loras = {self._plan.max_loras} distinct adapters",
                found=str(count),
                do="split the batch, or resolve a plan with a larger max_loras",
            )
        name = (bool(uniform), count, excluded(exclude), ubatches)
        known = self._other_rows.get(name)
        if known is None:
            beyond = self._reason_beyond(name[0], count, ubatches)
            if name[2] or ubatches > 1:
                row = self._row(*name)
            else:
                row = (self._decode_rows if uniform else self._mixed_rows)[count]
            known = self._other_rows.setdefault(name, (row, beyond))
        row, beyond = known
        return row[tokens] if tokens < len(row) else self._none(tokens, count, ubatches, beyond)

    def _candidates(self, uniform: bool, count: int, num_ubatches: int) -> list[_Family]:
        """The graphs that may serve such a batch, best first. Empty: its routine is NONE."""
        policy = self._plan.cudagraph_mode
        kinds = []
        if uniform and policy.separate_routine():
            kinds.append((policy.decode_mode(), True))
        if policy.mixed_mode() is not RuntimeMode.NONE:
            kinds.append((policy.mixed_mode(), False))
        captured = self._plan.lora_padding_table[count]
        return [
            self._families.get((mode, is_uniform, captured, num_ubatches), _Family(mode, [], []))
            for mode, is_uniform in kinds
        ]

    def _row(
        self, uniform: bool, count: int, exclude: frozenset[RuntimeMode], num_ubatches: int
    ) -> list[Decision]:
        """Decisions for 0..the largest size of any graph that may serve this kind of batch."""
        families = self._candidates(uniform, count, num_ubatches)
        row: list[Decision] = []
        # From one listed size to the next every batch has the same key.
        sizes = sorted({size for family in families for size in family.sizes})
        for below, size in pairwise([-1, *sizes]):
            found = self._best(families, size, exclude)
            if isinstance(found, MissReason):
                tokens = range(below + 1, size + 1)
                row += [self._none(n, count, num_ubatches, found) for n in tokens]
                continue
            mode, key = found
            padded = Decision(mode, key, MissReason.PADDED)
            row += [padded] * (size - below)
            if key.num_tokens == size and key.num_active_loras == count:
                row[-1] = Decision(mode, key, MissReason.HIT)
        return row

    def _best(
        self, families: Iterable[_Family], num_tokens: int, exclude: frozenset[RuntimeMode]
    ) -> tuple[RuntimeMode, BatchDescriptor] | MissReason:
        """The first published graph that holds ``num_tokens``, or why there is none."""
        missing: MissReason | None = None
        for mode, sizes, keys in families:
            place = bisect_left(sizes, num_tokens)
            if place == len(sizes) or mode in exclude:
                continue
            why = self._unpublished.get((mode, keys[place]))
            if why is None:
                return mode, keys[place]
            missing = why if missing is None else missing
        # Some family holds this size, else there were no row for it: exclusion is what is left.
        return MissReason.EXCLUDED if missing is None else missing

    def _reason_beyond(self, uniform: bool, count: int, num_ubatches: int) -> MissReason:
        """Why no graph can hold a batch that is larger than its row."""
        families = self._candidates(uniform, count, num_ubatches)
        if not families:
            return MissReason.MODE_NONE
        has_keys = any(family.sizes for family in families)
        return MissReason.ABOVE_MAX if has_keys else MissReason.NO_KEY

    def _none(self, num_tokens: int, count: int, ubatches: int, why: MissReason) -> Decision:
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
            # A batch above the plan's own limit is answered, and not remembered without limit.
            if num_tokens <= self._plan.max_num_batched_tokens:
                return self._eager.setdefault(name, decision)
        return decision


def checked_unpublished(
    unpublished: Unpublished, keys: Iterable[tuple[RuntimeMode, BatchDescriptor]]
) -> Unpublished:
    """Return a copy. Raises ``ConfigError`` for an entry that no decision could ever show."""
    copy = dict(unpublished)
    strangers = copy.keys() - set(keys)
    if strangers:
        raise ConfigError(
            "unpublished keys",
            expected="keys of the plan, each with its mode",
            found=", ".join(sorted(f"{mode!r} {key!r}" for mode, key in strangers)),
            do="take the pairs from the dispatcher's own `keys`",
        )
    hits = [why for why in copy.values() if not why.is_miss]
    if hits:
        raise ConfigError(
            "unpublished keys",
            expected="a reason why the key's graph does not serve",
            found=", ".join(sorted({why.name for why in hits})),
            do="leave out the keys whose graphs serve",
        )
    return copy


def counted(name: str, value: int, *, least: int) -> int:
    """Return ``value`` as an int. Raises ``BatchError`` if it is none, or below ``least``."""
    if type(value) is int and value >= least:
        return value
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise BatchError(
            f"{name} = {value!r}",
            expected=f"an integer >= {least}",
            found=f"{type(value).__name__} {value!r}",
            do="count what is in the batch",
        )
    return number


def excluded(exclude: Iterable[RuntimeMode]) -> frozenset[RuntimeMode]:
    """Return the modes that are out. Raises ``BatchError`` for what is no ``RuntimeMode``."""
    if exclude is NOTHING:
        return NOTHING
    try:
        named = frozenset(exclude)
    except TypeError:
        named = None  # Not even a set; the message is the same.
    if named is None or not named <= EVERYTHING:
        raise BatchError(
            f"exclude = {exclude!r}",
            expected="a set of RuntimeMode members",
            found=f"{type(exclude).__name__} {exclude!r}",
            do="exclude RuntimeMode.FULL, RuntimeMode.PIECEWISE, or both",
        )
    return named - {RuntimeMode.NONE} if RuntimeMode.NONE in named else named

"""How ranks take one decision: each packs its vote into integers, and the largest of each counts.

The element-wise maximum of the messages is all that any rank reads. It is the same on every rank
whatever their order, so that each of them decides alike on its own.

==== ============================================== ===========================================
word content                                        largest one
==== ============================================== ===========================================
0, 1 tag, and its negation                          opposite if all ranks are in one round
2    padded tokens                                  P
3    (-unpadded tokens) << 20 | rank                fewest tokens U, and whose
4    0: FULL, else (2 - mode) << 28 | reason | rank lowest mode, why, whose
5, 6 uniform << 16 | variant, and its negation      opposite if all ranks share them
7    adapters                                       most adapters
8    0: split, else reason << 20 | rank             an objection to a split, and whose
9    0: takes PIECEWISE, else 1 << 20 | rank        a rank that does not
     ``FAILED`` | rank: its last step has failed    all wait for their devices, and vote again
==== ============================================== ===========================================

A rank without work is neutral: it shares any variant, and lowers no mode unless it says so, where
it has no graph that the others could take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import IntEnum
from hashlib import sha256
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

from graphrt.batch import (
    BatchDescriptor,
    Decision,
    Reason,
    RuntimeMode,
    UBatchReason,
    last_ubatch_is_empty,
    ubatch_stride,
)
from graphrt.config import Plan
from graphrt.errors import BatchError, PlanMismatchError, RankDesyncError

NUM_WORDS = 10
FAILED = 2 << 20
MOST_RANKS = 2**20
MOST_TOKENS = 2**42
MOST_VARIANTS = 2**16
_RANK = MOST_RANKS - 1
_SHARES_ANY = -(2**62)
_PIECEWISE = frozenset({RuntimeMode.PIECEWISE})
_GRAPHS = _PIECEWISE | {RuntimeMode.FULL}
# CPython 3.11 finds the member of a number slowly, and every step needs some.
_MODES = tuple(RuntimeMode)
_NONE, _, _FULL = _MODES
_ABOVE = (_GRAPHS, frozenset({_FULL}), frozenset[RuntimeMode]())
"""By agreed mode: the modes above it."""
_REASONS = {int(reason): reason for reason in Reason}
_DISABLED = UBatchReason.DISABLED
_UBATCH_REASONS = {int(reason): reason for reason in UBatchReason}


class Round(IntEnum):
    """What a message is about. Values never change meaning, because they travel."""

    FACTS = 1
    PLAN = 2
    CAPTURE = 4
    """Each round of a capture, and of the comparison of a replay with eager: see ``Phase``."""
    TIMING = 7
    STEP = 8
    CLOSE = 10


class Phase(IntEnum):
    """Where in a capture a rank is."""

    BEGIN = 1
    WARMUP = 2
    """Before the warm-up of a key."""
    WARMED = 3
    CAPTURE = 4
    """Before the capture of a key."""
    CAPTURED = 5
    COMPARE = 6
    """Before each run of a comparison."""
    COMPARED = 7
    END = 8


def make_tag(kind: Round, generation: int, sequence: int) -> int:
    """One number for a round: its kind, the generation of graphs (< 2**16), its place (< 2**40)."""
    return kind << 56 | generation << 40 | sequence


def _tag_text(tag: int) -> str:
    kind = tag >> 56
    name = Round(kind).name if kind in Round.__members__.values() else str(kind)
    return f"{name} round {tag & (1 << 40) - 1} of generation {tag >> 40 & 0xFFFF}"


class SplitRules(NamedTuple):
    """Which steps are split; alike on every rank, because it follows from the plan."""

    num_ubatches: int = 1
    query_len: int = 1
    decode_token_threshold: int = 32
    prefill_token_threshold: int = 512
    allow_eager: bool = True
    unprofitable: frozenset[BatchDescriptor] = frozenset()
    """Split keys whose graph was measured to be no faster than the unsplit one."""

    @classmethod
    def of(cls, plan: Plan) -> SplitRules:
        asked = plan.ubatch
        return cls(
            asked.num_ubatches,
            plan.query_len,
            asked.decode_token_threshold,
            asked.prefill_token_threshold,
            asked.allow_eager,
        )


class RankVote(NamedTuple):
    """What one rank would do on its own, from its local dispatch. Without tokens it is idle."""

    rank: int
    num_tokens_unpadded: int
    num_tokens_padded: int
    runtime_mode: RuntimeMode = _FULL
    uniform: bool = False
    variant: int = 0
    """Place of the batch's variant in a list that is alike on every rank."""
    num_active_loras: int = 0
    miss_reason: Reason = Reason.HIT
    """The reason of the local decision."""
    ubatch_reason: UBatchReason | None = None
    """Why this rank does not want a split step; None: it wants one."""
    takes_piecewise: bool = True
    """False: its step excludes PIECEWISE, which another rank may have."""

    @classmethod
    def idle(cls, rank: int) -> RankVote:
        """The vote of a rank without work."""
        return cls(rank, 0, 0, ubatch_reason=UBatchReason.PEER_IDLE)


class Agreement(NamedTuple):
    """What holds on every rank alike, so that anyone may branch on it."""

    idle: bool
    """No rank has work: nobody runs."""
    runtime_mode: RuntimeMode
    num_tokens_padded: int
    """P: the most tokens that a rank has padded to on its own."""
    min_num_tokens: int
    """Fewest unpadded tokens of a rank; 0 if one is idle."""
    min_rank: int
    """The rank that has fewest."""
    uniform: bool
    variant: int
    num_active_loras: int
    num_ubatches: int
    eager_because: tuple[Reason, int] | None
    """Reason and rank of the lowest mode; None if it is FULL."""
    unsplit_because: tuple[UBatchReason, int] | None
    """Why the step is not split, and the rank that it is due to."""
    refuses_piecewise: int | None
    """A rank that takes FULL or eager only; None: there is none."""


_new = tuple.__new__


class SettledStep(NamedTuple):
    """What one rank runs."""

    decision: Decision
    eager_because: tuple[Reason, int | None] | None = None
    """For RANKS_DISAGREE: the reason and rank behind it; None for a rank: several together."""
    unsplit_because: tuple[UBatchReason, int | None] | None = None
    """Why it is not split, and the rank; None for a rank: the plan has no graph for it."""


Dispatch = Callable[[int, bool, int, frozenset[RuntimeMode], int], Decision]
"""``CUDAGraphDispatcher.dispatch`` of the agreed variant: tokens, uniform, adapters, excluded
modes, micro-batches."""


def pack(vote: RankVote, tag: int = 0) -> tuple[int, ...]:
    """The ten words of a vote, each of which fits 64 bits with its sign.

    Errors: ``BatchError`` for numbers that do not fit, or fewer padded than unpadded tokens.
    """
    rank, real, padded, mode, uniform, variant, loras, reason, objection, takes = vote
    if not (
        0 <= rank < MOST_RANKS
        and (1 <= real <= padded < MOST_TOKENS or real == padded == 0)
        and 0 <= variant < MOST_VARIANTS
        and 0 <= loras < MOST_TOKENS
        and (mode or reason > 1)
        and 0 <= tag < 2**62
    ):
        raise BatchError(
            "a rank's vote",
            expected="rank < 2**20, 1 <= unpadded <= padded < 2**42 (both 0: idle), "
            "variant < 2**16, adapters >= 0, tag < 2**62; a miss beside mode NONE",
            found=f"{vote}, tag {tag}",
            do="vote for the batch that the rank has",
        )
    refuses = 0 if takes else 1 << 20 | rank
    lowest = 0 if mode == 2 else (2 - mode) << 28 | reason << 20 | rank
    kind = uniform << 16 | variant
    minus_kind = -kind
    if not real:
        kind, minus_kind, loras, objection = _SHARES_ANY, _SHARES_ANY, 0, UBatchReason.PEER_IDLE
    fewest = -real << 20 | rank
    unsplit = 0 if objection is None else objection << 20 | rank
    return tag, -tag, padded, fewest, lowest, kind, minus_kind, loras, unsplit, refuses


def pack_capture(
    rank: int, phase: Phase | None, subject: int, tag: int, *, failed: bool = False, left: int = 0
) -> tuple[int, ...]:
    """The ten words of a round of a capture.

    ``phase``: where this rank is; None: it leaves the capture, wherever the others are, because of
    an error (``left`` 1) or an interrupt (2). ``subject``: a hash of what it captures (< 2**62).
    ``failed``: this rank could not capture or compare it.
    """
    if phase is None:
        where: tuple[int, ...] = (_SHARES_ANY, _SHARES_ANY, _SHARES_ANY, _SHARES_ANY)
    else:
        where = (phase, -phase, subject, -subject)
    told = (left << 20 | rank if left else 0, 0, 0, 1 << 20 | rank if failed else 0)
    return (tag, -tag, *where, *told)


class CaptureRound(NamedTuple):
    """What the ranks told in a round of a capture."""

    is_same: bool
    """All that stay are in one phase of one key."""
    failed: int | None
    """A rank that could not capture or compare it."""
    left: tuple[int, int] | None
    """A rank that leaves: 1 for an error or 2 for an interrupt, and which rank."""


def read_capture(words: Sequence[int]) -> CaptureRound:
    """Errors: ``RankDesyncError`` if not all ranks capture."""
    check_round(words)
    _, _, phase, minus_phase, subject, minus_subject, left, _, _, failed = words
    return CaptureRound(
        phase in (-minus_phase, _SHARES_ANY) and subject in (-minus_subject, _SHARES_ANY),
        failed & _RANK if failed else None,
        (left >> 20, left & _RANK) if left else None,
    )


def merge(messages: Sequence[Sequence[int]]) -> Sequence[int]:
    """The largest of each word; all messages have equally many."""
    # Most words of most rounds are the same on all ranks, and counting takes half as long as max.
    count = len(messages)
    return [
        first if column.count(first := column[0]) == count else max(column)
        for column in zip(*messages)  # noqa: B905  All ranks send equally many; it costs a fifth.
    ]


def agree(votes: Iterable[RankVote], rules: SplitRules, tag: int = 0) -> Agreement:
    """What ranks that cast these votes agree on: ``pack``, ``merge`` and ``decide``."""
    return decide(merge([pack(vote, tag) for vote in votes]), rules)


def decide(words: Sequence[int], rules: SplitRules) -> Agreement:
    """Read the merged words of all ranks.

    Errors: ``RankDesyncError`` if they were not all in the same round.
    """
    tag, minus_tag, padded, fewest, lowest, kind, minus_kind, loras, objection, refuses = words
    if tag != -minus_tag:
        check_round(words)
    uniform, variant = False, 0
    # A difference in variant makes the batch mixed: no variant but the first has graphs for all.
    if kind == -minus_kind:
        uniform, variant = kind >= MOST_VARIANTS, kind & MOST_VARIANTS - 1
    real, fewest_rank = -(fewest >> 20), fewest & _RANK
    unsplit: tuple[UBatchReason, int] | None = None
    num_ubatches, query_len, threshold, prefill_threshold, _, _ = rules
    if not uniform:
        query_len, threshold = 1, prefill_threshold
    if objection:
        unsplit = _UBATCH_REASONS[objection >> 20], objection & _RANK
    elif num_ubatches == 1:
        unsplit = _DISABLED, fewest_rank
    elif real < threshold:
        unsplit = UBatchReason.BELOW_THRESHOLD, fewest_rank
    elif not (stride := ubatch_stride(padded, query_len, num_ubatches)):
        unsplit = UBatchReason.TOO_FEW_TOKENS, fewest_rank
    elif stride * (num_ubatches - 1) >= real:
        unsplit = UBatchReason.LAST_SLICE_EMPTY, fewest_rank
    if refuses and lowest >> 28 == 1:
        lowest = 2 << 28 | Reason.EXCLUDED << 20 | refuses & _RANK
    # As ``Agreement(...)``, in two thirds of the time.
    agreed = (
        not padded,
        _MODES[2 - (lowest >> 28)],
        padded,
        real,
        fewest_rank,
        uniform,
        variant,
        loras,
        num_ubatches if unsplit is None else 1,
        (_REASONS[lowest >> 20 & 0xFF], lowest & _RANK) if lowest else None,
        unsplit,
        refuses & _RANK if refuses else None,
    )
    return _new(Agreement, agreed)


def check_round(words: Sequence[int]) -> None:
    """Errors: ``RankDesyncError`` if the merged words are of several rounds."""
    tag, minus_tag = words[0], words[1]
    if tag != -minus_tag:
        raise RankDesyncError(
            "an agreement among ranks",
            expected="every rank in the same round",
            found=f"one in {_tag_text(-minus_tag)}, one in {_tag_text(tag)}",
            do="make every rank take part in each step and capture; an idle one votes idle",
        )


def tokens_of(words: Sequence[int]) -> int:
    """The unpadded tokens of a rank, read off its words of a step; 0 if it is idle."""
    return -(words[3] >> 20)


def settle(
    agreement: Agreement, vote: RankVote, dispatch: Dispatch, rules: SplitRules
) -> SettledStep | None:
    """What the rank of ``vote`` runs; None if no rank has work.

    Mode and key of a graph, and whether the step is split, are the same on every rank, because
    ``dispatch`` is asked about agreed values only. A step that runs eager and unsplit has each
    rank's own unpadded size, and one token of padding on an idle rank.
    """
    if agreement.idle:
        return None
    mode, padded = agreement.runtime_mode, agreement.num_tokens_padded
    uniform, excluded = agreement.uniform, _ABOVE[mode]
    if agreement.refuses_piecewise is not None:
        excluded |= _PIECEWISE
    loras, num_ubatches = agreement.num_active_loras, agreement.num_ubatches
    because: tuple[UBatchReason, int | None] | None = agreement.unsplit_because
    if num_ubatches > 1:
        found = dispatch(padded, uniform, loras, excluded, num_ubatches)
        real, query_len = agreement.min_num_tokens, rules.query_len if uniform else 1
        size, is_full, may_be_eager = found.descriptor.num_tokens, found.mode == _FULL, True
        if not is_full:
            because = UBatchReason.NO_FULL_GRAPH, None
        elif last_ubatch_is_empty(real, size, query_len, num_ubatches):
            because = UBatchReason.LAST_SLICE_EMPTY, agreement.min_rank
        elif found.descriptor in rules.unprofitable:
            because, may_be_eager = (UBatchReason.NOT_PROFITABLE, None), False
        else:
            return SettledStep(_for(vote, found))
        if rules.allow_eager and may_be_eager and real >= rules.prefill_token_threshold:
            # All pad to one size, because each slice communicates with that of other ranks.
            key = dispatch(padded, uniform, loras, _GRAPHS, num_ubatches).descriptor
            reason = Reason.NO_KEY if is_full else found.reason
            lowered = agreement.eager_because if vote.runtime_mode > mode else None
            return _eager(Decision(_NONE, key, reason), vote, lowered, None)
    culprit: tuple[Reason, int | None] | None = agreement.eager_because
    if mode != _NONE:
        found = dispatch(padded, uniform, loras, excluded, 1)
        if found.mode != _NONE:
            return SettledStep(_for(vote, found), None, because)
        culprit = found.reason, None if culprit is None else culprit[1]
    size = vote.num_tokens_unpadded or 1
    own = dispatch(size, vote.uniform, vote.num_active_loras, _GRAPHS, 1)
    return _eager(own, vote, culprit, because)


def _for(vote: RankVote, found: Decision) -> Decision:
    """A graph's decision with the reason of this rank, which may have less than was agreed."""
    mode, key, _ = found
    own = vote.num_tokens_unpadded, vote.num_active_loras
    is_hit = own == (key.num_tokens, key.num_active_loras)
    return Decision(mode, key, Reason.HIT if is_hit else Reason.PADDED)


def _eager(
    decision: Decision,
    vote: RankVote,
    culprit: tuple[Reason, int | None] | None,
    unsplit_because: tuple[UBatchReason, int | None] | None,
) -> SettledStep:
    """An eager step with the reason of this rank: its own, or another rank's."""
    reason = decision.reason
    if vote.runtime_mode == _NONE:
        reason, culprit = vote.miss_reason, None
    elif culprit is not None:
        reason = Reason.RANKS_DISAGREE
    return SettledStep(Decision(_NONE, decision.descriptor, reason), culprit, unsplit_because)


def plan_text(plan: Plan, also: Mapping[str, object] = MappingProxyType({})) -> str:
    """What ranks must share, one fact a line: of the plan, and ``also`` (versions, SM budget)."""
    asked = plan.ubatch
    facts: dict[str, object] = {
        "cudagraph_mode": plan.cudagraph_mode.name,
        "level": plan.level.name,
        "query_len": plan.query_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "lora_padding_table": list(plan.lora_padding_table),
        "compile_sizes": list(plan.compile_sizes),
        **{f"ubatch.{item.name}": getattr(asked, item.name) for item in fields(asked)},
        **also,
    }
    lines = [f"{name} = {value}" for name, value in facts.items()]
    return "\n".join([*lines, *(f"{mode.name} {key!r}" for mode, key in plan.capture_order)])


def plan_hash(text: str) -> int:
    """62 bits of a text, to be sent beside their negation."""
    return int.from_bytes(sha256(text.encode()).digest()[:8]) >> 2


def check_plans(texts: Sequence[str]) -> None:
    """Compare the ``plan_text`` of every rank, rank 0 first.

    Errors: ``PlanMismatchError`` with the first line that is not the same on all, for each rank.
    """
    for lines in zip_longest(*(text.split("\n") for text in texts), fillvalue="(nothing)"):
        if len(set(lines)) > 1:
            ranks: dict[str, list[str]] = {}
            for rank, line in enumerate(lines):
                ranks.setdefault(line, []).append(str(rank))
            raise PlanMismatchError(
                "the plans of the ranks",
                expected="the same on every rank",
                found="; ".join(
                    f"{line} on rank{'s' * (len(who) > 1)} {', '.join(who)}"
                    for line, who in ranks.items()
                ),
                do="give every rank the same config, engine and versions",
            )

"""Keeps the ranks of one runtime in step: facts and plan at its start, captures, steps.

Every round is one message of ``NUM_WORDS`` words, so that a rank that serves beside one that
captures is told apart by its tag, whatever the wire.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.config import RankConfig
from graphrt.errors import PeerFailedError, RankDesyncError, RankError, RankLostError, with_notes
from graphrt.parallel.agreement import (
    FAILED,
    NUM_WORDS,
    Agreement,
    Phase,
    RankVote,
    Round,
    SplitRules,
    check_plans,
    check_round,
    decide,
    make_tag,
    pack,
    pack_capture,
    plan_hash,
    read_capture,
)
from graphrt.parallel.exchange import TIMEOUT_S, Exchange, Pending

_ROOM = NUM_WORDS - 2
"""Words of a message beside its tag."""
_LEFT_BY_ERROR, _LEFT_BY_INTERRUPT = 1, 2


class Captured(Protocol):
    """What is captured: a ``CaptureJob``, or the entry of its program."""

    @property
    def mode(self) -> RuntimeMode: ...
    @property
    def key(self) -> BatchDescriptor: ...


def _send(
    exchange: Exchange, kind: Round, numbers: Sequence[int], timeout_s: float, about: str
) -> Sequence[int]:
    """One message of up to ``_ROOM`` numbers beside a tag; the largest of each."""
    tag = make_tag(kind, 0, exchange.num_rounds)
    rest = [0] * (_ROOM - len(numbers))
    words, _ = _meet(exchange, [tag, -tag, *numbers, *rest], timeout_s, about)
    check_round(words)
    return words[2 : 2 + len(numbers)]


def _meet(
    exchange: Exchange, words: Sequence[int], timeout_s: float, about: str
) -> tuple[Sequence[int], Pending]:
    """One round of all ranks. One that is interrupted in it ends the exchange, because nobody knows
    whether the others have its message."""
    try:
        pending = exchange.start(words, timeout_s=timeout_s, about=about)
        return pending.result(), pending
    except Exception:
        raise
    except BaseException:
        exchange.give_up(
            RankLostError(
                f"rank {exchange.rank}, {about}",
                expected="to wait for all ranks",
                found="an interrupt of this rank meanwhile",
                do="start all ranks again",
            )
        )
        raise


def agree_least(
    exchange: Exchange, numbers: Sequence[int], timeout_s: float = TIMEOUT_S
) -> list[int]:
    """The least of each number over all ranks, for what follows from each rank's own device.

    ``numbers``: at most 8 between -2**62 and 2**62, equally many on every rank. Errors:
    ``RankError``.
    """
    negated = [-number for number in numbers]
    return [-word for word in _send(exchange, Round.FACTS, negated, timeout_s, "the facts round")]


class Lockstep:
    """The rounds of one runtime over one exchange, with the time-outs of ``config``.

    A round that fails raises ``RankError`` on every rank that waits in it.
    """

    def __init__(self, exchange: Exchange, config: RankConfig) -> None:
        self.exchange = exchange
        self.rank, self.world = exchange.rank, exchange.world
        self.num_tokens_across_ranks: tuple[int, ...] | None = None
        """In the last step, 0 for an idle rank; None where the wire does not tell."""
        self._config = config
        self._begun = 0
        """At which round the last capture began: no other over this exchange has that number."""
        self._outcome = Phase.WARMED
        """Where all ranks wait for what comes of what was let pass."""
        self._compared = ""
        """What is compared now."""
        self._is_told = False
        """The error that is being raised came from a round: the others know it."""
        self.is_unfinished = False
        """The last step of this rank has not come to its end, because it failed or was interrupted,
        perhaps before a collective of the others."""

    # -- start

    def require_same_plan(self, text: str) -> None:
        """Errors: ``PlanMismatchError`` with the first line of ``plan_text`` that differs."""
        exchange, about = self.exchange, "the plan round"
        found = plan_hash(text)
        timeout_s = self._config.capture_timeout_s
        largest, minus_least = _send(exchange, Round.PLAN, [found, -found], timeout_s, about)
        if largest == -minus_least:
            return
        name = f"plan {exchange.num_rounds}"
        exchange.post(f"{name} of {self.rank}", text)
        _send(exchange, Round.PLAN, [], timeout_s, about)  # All have posted theirs.
        check_plans([exchange.read(f"{name} of {rank}") or "" for rank in range(self.world)])

    # -- a step

    def agree(
        self,
        vote: RankVote,
        rules: SplitRules,
        graphs: int = 0,
        *,
        is_alone: bool = False,
        wait: Callable[[], None] = lambda: None,
    ) -> Agreement:
        """What all ranks' votes for this step come to. ``graphs``: 16 bits of what is captured.

        ``is_alone``: all ranks have the same vote, so that none is sent. ``wait()``: waits for the
        device. All do after a step that failed on one of them: where a device waits in a collective
        of that step, the next one of the rank that failed would give it a wrong result.
        Errors: ``RankDesyncError`` where ranks have other graphs, or do something else.
        """
        if is_alone:
            self.num_tokens_across_ranks = (vote.num_tokens_unpadded,) * self.world
            agreement = decide(pack(vote), rules)
        else:
            exchange = self.exchange
            words = pack(vote, make_tag(Round.STEP, graphs, exchange.num_rounds))
            if self.is_unfinished:
                words = (*words[:-1], FAILED | self.rank)
            found, pending = _meet(exchange, words, self._config.step_timeout_s, "a step")
            if found[-1] >= FAILED:
                check_round(found)
                wait()
                self.is_unfinished = False
                return self.agree(vote, rules, graphs)
            agreement = decide(found, rules)
            self.num_tokens_across_ranks = pending.num_tokens_across_ranks
        # Until whoever runs it says otherwise, because an interrupt may come before that.
        self.is_unfinished = not agreement.idle
        return agreement

    # -- a capture

    @contextmanager
    def capturing(self, outcome: Callable[[], str]) -> Iterator[None]:
        """Around a capture, which all ranks begin and end together.

        ``outcome()``: what is captured then, in words, alike on every rank. A rank that leaves with
        an error ends the capture of the others with ``RankLostError``; one that is interrupted
        interrupts them too.
        """
        self._begun = self.exchange.num_rounds
        self._is_told = False
        self._capture_round(Phase.BEGIN, "begin")
        try:
            yield
        except BaseException as error:
            if not self._is_told:
                self._leave(error)
            raise
        self._capture_round(Phase.END, outcome())

    def gate(self, job: Captured, phase: str) -> bool:
        """Asked before and after each warm-up and capture, and told of each failure: the gate of
        ``capture_all``.

        All ranks learn at once how a warm-up has ended, because one that failed before a collective
        has left the others in it: on a GPU their hosts go on, and the next collective of this rank
        would answer the wrong one of theirs.
        Errors: ``PeerFailedError`` for what another rank could not capture; then no rank has it.
        """
        about = f"{job.mode.name}, {job.key}"
        if phase != "failed":
            asked = Phase[phase.upper()]
            if asked in (Phase.WARMUP, Phase.CAPTURE):
                self._outcome = Phase(asked + 1)
            self._capture_round(asked, about)
        elif self._is_told:
            self._is_told = False
        else:
            self._post_error(about)
            error = sys.exception()
            for rank in range(self.world):
                text = self._error_of(rank, about) if rank != self.rank else ""
                if text and error is not None:
                    # Perhaps why a collective of this rank's warm-up came to no end.
                    error.add_note(f"rank {rank} failed too: {text}")
            self._capture_round(self._outcome, about, failed=True)
        return True

    @contextmanager
    def comparing(self, captured: Captured) -> Iterator[None]:
        """Around the comparison of a replay with eager: it fails on all ranks or on none.

        Errors: ``PeerFailedError`` if another rank's comparison failed.
        """
        about = self._compared = f"{captured.mode.name}, {captured.key}"
        self._is_told = False
        try:
            yield
        except Exception:
            if not self._is_told:
                self._post_error(about)
                self._capture_round(Phase.COMPARED, about, failed=True)
            self._is_told = False
            raise
        finally:
            self._compared = ""
        self._capture_round(Phase.COMPARED, about)

    def before_run(self) -> None:
        """Wait for all ranks before each run of a comparison, because runs meet in collectives.

        Errors: ``PeerFailedError`` if another rank does not run it, because its comparison failed.
        """
        if self._compared:
            self._capture_round(Phase.COMPARE, self._compared)

    def served_by_all(self, serves: Sequence[bool]) -> list[bool]:
        """Which of the plan's keys have a graph on every rank."""
        missing = [not each for each in serves]
        return [not each for each in self._largest(Round.CAPTURE, missing, "what is captured")]

    def slowest(self, times: Sequence[int]) -> list[int]:
        """The longest of each time over all ranks, which have measured equally many."""
        return self._largest(Round.TIMING, times, "times of replays")

    def _largest(self, kind: Round, numbers: Sequence[int], about: str) -> list[int]:
        """The largest of each number over all ranks, in as many rounds as it takes."""
        timeout_s = self._config.capture_timeout_s
        parts = [numbers[start : start + _ROOM] for start in range(0, len(numbers), _ROOM)]
        found = [_send(self.exchange, kind, part, timeout_s, about) for part in parts]
        return [number for part in found for number in part]

    def _capture_round(self, phase: Phase, about: str, *, failed: bool = False) -> None:
        exchange, where = self.exchange, f"{phase.name} of {about}"
        tag = make_tag(Round.CAPTURE, 0, exchange.num_rounds)
        words = pack_capture(self.rank, phase, plan_hash(about), tag, failed=failed)
        try:
            exchange.post(f"round of {self.rank}", where)
            found, _ = _meet(exchange, words, self._config.capture_timeout_s, where)
            is_same, failed_rank, left = read_capture(found)
        except RankError as error:
            self._is_told = True
            self._tell_last_rounds(error)
            raise
        if left is not None:
            self._end_with(*left)
        if failed:
            return  # The others know, and this rank raises its own error.
        if failed_rank is not None:
            self._is_told = True
            raise PeerFailedError(
                about,
                expected="a capture, and replays equal to eager, on every rank",
                found=f"a failure on rank {failed_rank}: "
                f"{self._error_of(failed_rank, about) or 'no text'}",
                do="see that rank's error; no rank serves this key, because a graph on some ranks "
                "only would leave the others waiting in its collectives",
            )
        if not is_same:
            self._is_told = True
            raise RankDesyncError(
                f"rank {self.rank}, {where}",
                expected="every rank at the same key of its capture",
                found="another rank at another one, or in another phase of it",
                do="capture the same keys in the same order on every rank",
            )

    def _tell_last_rounds(self, error: RankError) -> None:
        """Say where the ranks that are missing were seen last."""
        for rank in getattr(error, "missing", ()):
            try:
                last = self.exchange.read(f"round of {rank}")
                left = self.exchange.read(f"left {self._begun} by {rank}")
            except RankLostError:
                return  # The store is gone, as the error says.
            error.add_note(f"rank {rank} was last at: {last or 'no round of a capture'}")
            if left:
                error.add_note(f"rank {rank} left it: {left}")

    def _leave(self, error: BaseException) -> None:
        left = _LEFT_BY_ERROR if isinstance(error, Exception) else _LEFT_BY_INTERRUPT
        exchange = self.exchange
        tag = make_tag(Round.CAPTURE, 0, exchange.num_rounds)
        words = pack_capture(self.rank, None, 0, tag, left=left)
        try:
            exchange.post(f"left {self._begun} by {self.rank}", _told(error))
            _meet(exchange, words, self._config.capture_timeout_s, "leaving a capture")
        except RankError as later:
            if later.__cause__ is not error:  # One that ended the exchange has told them.
                error.add_note(f"and the other ranks could not be told: {later}")

    def _end_with(self, left: int, rank: int) -> NoReturn:
        self._is_told = True
        if left == _LEFT_BY_INTERRUPT:
            raise KeyboardInterrupt(f"rank {rank} was interrupted")
        text = self.exchange.read(f"left {self._begun} by {rank}")
        raise RankLostError(
            f"rank {self.rank}, a capture",
            missing=(rank,),
            expected="every rank until the end of the capture",
            found=f"that rank {rank} left it: {text}",
            do="see that rank's error",
        )

    def _post_error(self, about: str) -> None:
        error = sys.exception()  # Gates are told of a failure while it is handled.
        text = "" if error is None else _told(error)
        self.exchange.post(f"error {self._begun} of {self.rank}: {about}", text)

    def _error_of(self, rank: int, about: str) -> str:
        return self.exchange.read(f"error {self._begun} of {rank}: {about}") or ""


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {with_notes(error)}"[:4000]

"""Steps of a runtime that decides together with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from graphrt.batch import BatchDescriptor, Decision, Reason, RuntimeMode, UBatchReason
from graphrt.config import AttentionSupport, Facts, RankConfig, Resolved, RuntimeConfig
from graphrt.errors import ConfigError, RankDesyncError
from graphrt.graphs import Key
from graphrt.parallel import (
    Exchange,
    Lockstep,
    RankVote,
    SettledStep,
    SplitRules,
    agree_least,
    plan_hash,
    plan_text,
    settle,
)
from graphrt.runner import CUDAGraphRunner
from graphrt.runner.keys import Dispatcher, missing_text

_NO_LIMIT = 2**61


def agree_on_facts(
    exchange: Exchange, config: RuntimeConfig, facts: Facts | None
) -> tuple[RuntimeConfig, Facts]:
    """Config and facts with what may differ between ranks reduced to the least of all: the
    support of attention inside a graph, and the room for graphs."""
    facts = facts or Facts()
    own = [
        facts.least_support()[0],
        min(config.max_graph_bytes or _NO_LIMIT, _NO_LIMIT),
        min(config.max_graphs or _NO_LIMIT, _NO_LIMIT),
    ]
    timeout_s = config.ranks.capture_timeout_s
    support, num_bytes, num_graphs = agree_least(exchange, own, timeout_s)
    if support < own[0]:
        groups = {**facts.attention_groups, "of another rank": AttentionSupport(support)}
        facts = replace(facts, attention_groups=groups)
    return (
        replace(
            config,
            max_graph_bytes=num_bytes if num_bytes < _NO_LIMIT else None,
            max_graphs=num_graphs if num_graphs < _NO_LIMIT else None,
        ),
        facts,
    )


def check_rank_config(config: RankConfig, has_ranks: bool) -> None:
    """Errors: ``ConfigError`` for what would have no effect."""
    if config.check_every > 1 and not config.same_batch:
        raise ConfigError(
            "ranks.check_every",
            expected="1, because every rank takes part in every decision",
            found=str(config.check_every),
            do="leave it out; ranks that see one batch (same_batch=True) may decide alone",
        )
    if not has_ranks and config != RankConfig():
        raise ConfigError(
            "config.ranks",
            expected="an exchange as well: Runtime(ranks=...)",
            found=repr(config),
            do="pass ranks=, or leave it out",
        )


class RankedSteps:
    """What each step of one rank is, decided with all others.

    A rank whose graphs are other than those after the last capture, because something that they
    read was replaced, votes eager until all capture again: ranks that dispatch alike must have the
    same graphs.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        runner: CUDAGraphRunner,
        resolved: Resolved,
        sms: tuple[int, int] | None,
    ) -> None:
        plan, compiled = resolved.plan, resolved.compile.compute_hash()
        config = resolved.config
        # Runs that only some ranks make would wait for the others in their collectives.
        runs = {
            name: getattr(config, name)
            for name in ("on_miss", "on_capture_error", "verify_first_replay", "verify_every")
        }
        warmups = config.compilation.cudagraph_num_of_warmups
        also = {"torch": torch.__version__, "compile": compiled, "warmups": warmups, **runs}
        also["ranks.check_every"] = config.ranks.check_every
        # Launch sizes are part of a graph.
        also["SMs of communication and computation"] = sms
        lockstep.require_same_plan(plan_text(plan, also))
        self._lockstep = lockstep
        self._same_batch, self._check_every = config.ranks.same_batch, config.ranks.check_every
        self._num_unchecked = self._unchecked = 0
        """Steps since ranks of ``same_batch`` were compared, and a hash of what they were."""
        self.batch_digest = 0
        """Of what the ranks of ``same_batch`` compute, beside its size: alike on every rank."""
        self._runner = runner
        # Split eagerly, all ranks would have to pad to one size, which no eager step does.
        self._rules = SplitRules.of(plan)._replace(allow_eager=False)
        self._look = runner.look_before_deciding()
        self.last: SettledStep | None = None
        self._dispatcher: Dispatcher
        self._agreed: Mapping[Key, Reason]
        """What had no graph when all ranks last had the same ones."""
        self._graphs: int
        """16 bits of that."""
        self._differs: Reason | None
        """Why this rank has no longer the same ones; None: it has."""
        self.note_captured()

    def note_captured(self) -> None:
        """The ranks have the same graphs, because all have just captured."""
        missing = self._runner.missing()
        self._agree_on(missing, missing)

    def _agree_on(self, agreed: Mapping[Key, Reason], missing: Mapping[Key, Reason]) -> None:
        self._agreed = agreed
        self._graphs = plan_hash(missing_text(agreed)) & 0xFFFF
        self._dispatcher = self._runner.dispatcher
        self._differs = _first_difference(agreed, missing)

    def leave_unsplit(self, keys: frozenset[BatchDescriptor]) -> None:
        """Split none of ``keys`` from here on; all ranks were told the same."""
        self._rules = self._rules._replace(unprofitable=keys)

    def noting_drops(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, whose failure the others are told of in the next step, and after which a program
        whose comparison failed is no difference: whichever rank it failed on, all drop it."""

        def noted(*args: Any) -> Any:
            before = self._agreed if self.has_agreed_graphs else None
            try:
                result = run(*args)
            except Exception:
                if before is not None:
                    now = self._runner.missing()
                    agreed = {
                        key: before.get(key, why)
                        for key, why in now.items()
                        if key in before or why is Reason.CAPTURE_FAILED
                    }
                    self._agree_on(agreed, now)
                raise
            self._lockstep.is_unfinished = False
            return result

        return noted

    @property
    def has_agreed_graphs(self) -> bool:
        if self._dispatcher is not self._runner.dispatcher:
            self._dispatcher = self._runner.dispatcher
            self._differs = _first_difference(self._agreed, self._runner.missing())
        return self._differs is None

    @property
    def last_unsplit(self) -> UBatchReason | None:
        """Why the last step was not split into micro-batches."""
        because = None if self.last is None else self.last.unsplit_because
        return None if because is None else because[0]

    def decide(
        self,
        num_tokens: int,
        uniform: bool,
        num_active_loras: int,
        exclude: frozenset[RuntimeMode],
        unsplit: UBatchReason | None = UBatchReason.DISABLED,
    ) -> Decision:
        """What all ranks run in this step, with the batch of this one.

        ``unsplit``: why this rank does not want it split; None: it does.
        """
        self._look()
        local = self._runner.dispatcher.dispatch(num_tokens, uniform, num_active_loras, exclude)
        mode, key, reason = local
        if not self.has_agreed_graphs and mode is not RuntimeMode.NONE:
            assert self._differs is not None
            mode, reason = RuntimeMode.NONE, self._differs
        vote = RankVote(
            self._lockstep.rank,
            num_tokens,
            num_tokens if mode is RuntimeMode.NONE else key.num_tokens,
            mode,
            uniform,
            0,
            num_active_loras,
            reason,
            unsplit,
            RuntimeMode.PIECEWISE not in exclude,
        )
        settled = self._settle(vote)
        assert settled is not None, "this rank has work"
        return settled.decision

    def decide_idle(self) -> Decision | None:
        """The same without a batch; None if no rank has one."""
        self._look()
        vote = RankVote.idle(self._lockstep.rank)
        if not self.has_agreed_graphs:
            assert self._differs is not None
            vote = vote._replace(runtime_mode=RuntimeMode.NONE, miss_reason=self._differs)
        settled = self._settle(vote)
        return None if settled is None else settled.decision

    def _settle(self, vote: RankVote) -> SettledStep | None:
        lockstep, rules, about = self._lockstep, self._rules, self._graphs
        is_alone = False
        if self._same_batch:
            done = self._unchecked, vote.num_tokens_unpadded, vote.uniform, self.batch_digest
            self._num_unchecked += 1
            # An idle rank waits for the others, as it would in a step; one whose graphs are other
            # than theirs would pad to another size than they do.
            is_alone = (
                self._num_unchecked < self._check_every
                and vote.num_tokens_unpadded > 0
                and self.has_agreed_graphs
                and not lockstep.is_unfinished
            )
            if is_alone:
                self._unchecked = hash(done)
            else:
                # In the tag, so that every rank finds out, not only the one with fewest tokens.
                about ^= hash(done) & 0xFFFF
                self._num_unchecked = self._unchecked = 0
        try:
            agreement = lockstep.agree(
                vote, rules, about, is_alone=is_alone, wait=self._runner.library.synchronize
            )
        except RankDesyncError as error:
            if self._same_batch:
                error.add_note(
                    "these ranks share a model and must see one batch: give each of them the same "
                    "requests in the same order, and none further steps after one has failed "
                    f"(here: {vote.num_tokens_unpadded} tokens)"
                )
            raise
        self.last = settle(agreement, vote, self._runner.dispatcher.dispatch, rules)
        across = lockstep.num_tokens_across_ranks
        # An idle rank brings one token of padding to an eager step.
        self._runner.tell_ranks(
            None if across is None else tuple(max(1, tokens) for tokens in across)
        )
        return self.last


def _first_difference(agreed: Mapping[Key, Reason], now: Mapping[Key, Reason]) -> Reason | None:
    for key, reason in now.items():
        if agreed.get(key) is not reason:
            return reason
    return Reason.NOT_CAPTURED_YET if len(agreed) != len(now) else None

"""Whatever happens to a runtime, in whatever order: each step returns what eager would."""

from __future__ import annotations

from contextlib import suppress

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphrt import GraphrtError
from graphrt.events import Captured, Retired, Verified
from lab import MAX_REQS, MAX_TOKENS, POLICIES, RuntimeLab, Tally, Toy, assert_equal

BATCHES = st.integers(1, MAX_TOKENS).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(1, min(n, MAX_REQS)), st.integers(0, 9))
)


class Life(RuleBasedStateMachine):
    """Steps, captures, failures, interrupts, replaced weights, other weights, verification."""

    @initialize(
        policy=st.sampled_from(POLICIES[1:]),
        output_policy=st.sampled_from(["view", "clone", "checked_view"]),
        on_error=st.sampled_from(["raise", "skip"]),
        every=st.sampled_from([None, 1, 3]),
    )
    def open(self, policy, output_policy, on_error, every):
        asked = {"on_capture_error": on_error, "verify_every": every}
        self.lab = RuntimeLab(policy, model=Moody(), policy=output_policy, asked=asked).__enter__()
        self.is_stale = False
        self.num_weights = 0

    @rule(batch=BATCHES)
    def step(self, batch):
        num_tokens, num_reqs, seed = batch
        uniform = num_tokens == num_reqs
        if self.is_stale:
            # Nobody asked check_externals: a graph may use the old weight, as CUDA would.
            return
        outputs = self.lab.step(num_tokens, num_reqs, uniform, seed)
        assert_equal(outputs, self.lab.eager(num_tokens, num_reqs, seed))
        event = self.lab.step_events[-1]
        assert event.reason is self.lab.runtime.last_decision.reason

    @rule()
    def capture(self):
        report = self.lab.runtime.capture()
        assert not report.missing
        assert not report.failures
        self.is_stale = False

    @rule(at=st.integers(1, 12), kind=st.sampled_from([OSError, KeyboardInterrupt]))
    def capture_and_fail(self, at, kind):
        self.lab.model.countdown[0][0] = at
        self.lab.model.error = kind
        with suppress(kind):
            self.lab.runtime.capture()
        self.lab.model.countdown[0][0] = -1

    @rule(op=st.sampled_from([{"op": 1}, {"allocation": 0}, {"end": True}]))
    def capture_on_a_failing_device(self, op):
        for name, value in op.items():
            setattr(self.lab.device.faults, name, value)
        with suppress(GraphrtError):
            self.lab.runtime.capture()
        self.lab.device.faults.op = self.lab.device.faults.allocation = None
        self.lab.device.faults.end = False

    @rule()
    def replace_a_weight(self):
        self.num_weights += 1
        self.lab.model.weight.data = torch.full((4, 4), 0.1 * self.num_weights)
        self.is_stale = True

    @precondition(lambda self: self.is_stale)
    @rule()
    def check_externals(self):
        self.lab.runtime.check_externals()
        self.is_stale = False

    @rule()
    def copy_into_a_weight(self):
        with torch.no_grad():
            self.lab.model.weight.mul_(0.5)

    @invariant()
    def nothing_serves_unverified(self):
        if not hasattr(self, "lab"):
            return
        report = self.lab.runtime.report()
        verified = {(e.mode, e.key) for e in self.lab.events if isinstance(e, Verified)}
        for mode, key in self.lab.runtime.plan.capture_order:
            if (mode, key) not in report.missing:
                assert (mode, key) in verified
        assert len(self.lab.runtime.library.generations) <= 1

    @invariant()
    def every_byte_is_accounted_for(self):
        if not hasattr(self, "lab"):
            return
        captured = sum(isinstance(e, Captured) for e in self.lab.events)
        retired = sum(e.num_programs for e in self.lab.events if isinstance(e, Retired))
        alive = sum(len(g.programs) for g in self.lab.runtime.library.generations)
        assert captured - retired == alive
        assert alive == len(self.lab.runtime.report().graphs)

    def teardown(self):
        if hasattr(self, "lab"):
            self.lab.__exit__()
            assert self.lab.runtime.library.num_graphs == 0


class Moody(Toy):
    def __init__(self):
        super().__init__()
        self.countdown = (Tally(-1),)
        self.error = OSError

    def forward(self, *, x, ids, lens):
        self.countdown[0][0] -= 1
        if self.countdown[0][0] == 0:
            raise self.error("mood")
        return super().forward(x=x, ids=ids, lens=lens)


Life.TestCase.settings = settings(max_examples=20, stateful_step_count=14, deadline=None)
TestLife = Life.TestCase

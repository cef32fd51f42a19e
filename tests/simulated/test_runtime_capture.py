"""Capturing through a runtime: what it tries, what it keeps, what a failure leaves, recapture."""

from __future__ import annotations

import itertools
import signal

import pytest
import torch

from graphrt import Reason, SimulatedDevice, TensorStateGuard, break_point
from graphrt.errors import ConfigError, GraphMemoryError, StateAdvancedError, TooManyFailuresError
from graphrt.events import Captured, CaptureFailed, PaddingVerified, RanEager, Retired, Verified
from lab import (
    FULL,
    NONE,
    PIECEWISE,
    POLICIES,
    SIZES,
    RuntimeLab,
    Tally,
    Toy,
    assert_equal,
    example,
)


@pytest.mark.parametrize("policy", POLICIES)
def test_capture_covers_and_verifies_every_key_of_the_plan(policy):
    with RuntimeLab(policy) as lab:
        assert set(lab.missing.values()) <= {Reason.NOT_CAPTURED_YET}
        report = lab.runtime.capture()
        order = list(lab.runtime.plan.capture_order)
        assert {(graph.mode, graph.key) for graph in report.graphs} == set(order)
        captured = lab.events_of(Captured)
        assert [(event.mode, event.key) for event in captured] == order
        verified = lab.events_of(Verified)
        assert [(event.mode, event.key) for event in verified] == order
        assert all(event.equal and event.max_abs_difference == 0 for event in verified)
        assert not report.missing
        assert not report.failures
        for graph, event in zip(
            sorted(report.graphs, key=lambda g: order.index((g.mode, g.key))), captured, strict=True
        ):
            assert graph.state == "ready"
            parts = graph.warmup_seconds, graph.capture_seconds, graph.check_seconds
            assert min(parts) > 0
            assert graph.seconds == sum(parts)
            assert 0 < event.seconds < graph.capture_seconds
            assert (graph.num_graphs, graph.num_eager) == ((1, 0) if graph.mode is FULL else (2, 1))
            assert graph.memory.num_nodes > 0
            assert graph.memory.static_output_bytes > 0 or graph.mode is FULL
        assert report.device == "simulated"
        of_keys = sum(graph.seconds for graph in report.graphs)
        assert report.other_seconds == report.capture_seconds - of_keys
        assert report.other_seconds > 0


def test_report_counts_each_byte_once():
    with RuntimeLab("PIECEWISE") as lab:
        report = lab.runtime.capture()
        assert report.graph_bytes == lab.runtime.library.charged_bytes
        assert report.graph_bytes == sum(
            graph.memory.pool_growth_bytes + graph.memory.exec_bytes for graph in report.graphs
        )


def test_capture_progress_counts_captures_and_first_replays():
    reported = []
    with RuntimeLab() as lab:
        lab.runtime.capture(lambda *facts: reported.append(facts))
        order = [key for _, key in lab.runtime.plan.capture_order]
    total = 2 * len(order)
    assert [(done, of) for done, of, _ in reported] == [(n, total) for n in range(1, total + 1)]
    assert [key for _, _, key in reported] == 2 * order


def test_capture_again_when_all_serve_does_nothing():
    reported = []
    with RuntimeLab() as lab:
        lab.runtime.capture()
        calls, events = lab.model.num_calls, len(lab.events)
        lab.runtime.capture(lambda *facts: reported.append(facts))
        assert (lab.model.num_calls, len(lab.events), reported) == (calls, events, [])


class Counting(torch.nn.Module):
    """Counts its calls in a tensor, and each token's position in another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))
        self.num_calls = Tally(0)

    def forward(self, *, x, ids, lens):
        self.num_calls[0] += 1
        self.total.add_(1)
        return {"rows": x * self.total, "lens": lens}


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_capture_warmups_leave_guarded_state_untouched(warmups):
    model = Counting()
    compilation = {"cudagraph_num_of_warmups": warmups}
    guard = TensorStateGuard([model.total])
    asked = {"compilation": compilation, "verify_first_replay": False}
    with RuntimeLab("FULL", model=model, state=guard, asked=asked) as lab:
        lab.step(4, 4)
        lab.step(4, 4)
        lab.runtime.capture()
        assert model.num_calls[0] == 2 + (warmups + 1) * len(SIZES)
        assert model.total == 2
        for calls in range(3, 6):
            lab.step(4, 4)
            assert model.total == calls


def test_verification_advances_guarded_state_by_one_step():
    model = Counting()
    guard = TensorStateGuard([model.total])
    with RuntimeLab("FULL", model=model, state=guard, asked={"verify_every": 1}) as lab:
        lab.runtime.capture()
        assert model.total == 0
        for calls in range(1, 4):
            lab.step(4, 4)
            assert model.total == calls


def test_state_unguarded_is_refused_unless_may_overwrite():
    model = Counting()
    with (
        RuntimeLab("FULL", model=model) as lab,
        pytest.raises(StateAdvancedError, match="total"),
    ):
        lab.runtime.capture()
    model = Counting()
    asked = {"verify_first_replay": False}
    with RuntimeLab("FULL", model=model, may_overwrite=[model.total], asked=asked) as lab:
        assert not lab.runtime.capture().missing


class FailingAt(Toy):
    """Fails for one number of tokens while ``armed``."""

    def __init__(self, num_tokens, error=OSError, when=lambda: True):
        super().__init__()
        self.arm = (num_tokens, error, when)

    def forward(self, *, x, ids, lens):
        num_tokens, error, when = self.arm
        if x.shape[0] == num_tokens and when():
            raise error("no such size")
        return super().forward(x=x, ids=ids, lens=lens)


class Switch:
    """Kept where no walk finds it: a changed attribute that code reads would end the programs."""

    def __init__(self, on=True):
        self._state = itertools.repeat({"on": on})

    @property
    def on(self):
        return next(self._state)["on"]

    @on.setter
    def on(self, value):
        next(self._state)["on"] = value

    def __call__(self):
        return self.on


def test_capture_failure_skipped_runs_its_key_eagerly():
    armed = Switch()
    model = FailingAt(4, when=armed)
    with RuntimeLab("PIECEWISE", model=model, asked={"on_capture_error": "skip"}) as lab:
        report = lab.runtime.capture()
        assert lab.missing == {(PIECEWISE, 4): Reason.CAPTURE_FAILED}
        assert [key.num_tokens for _, key in report.failures] == [4]
        assert "no such size" in next(iter(report.failures.values()))
        failed = lab.events_of(CaptureFailed)
        assert [(event.key.num_tokens, event.error) for event in failed] == [(4, "OSError")]
        armed.on = False
        for num_tokens, mode in ((2, PIECEWISE), (3, NONE), (4, NONE), (7, PIECEWISE)):
            outputs = lab.step(num_tokens, 2)
            assert lab.runtime.last_decision.mode is mode
            assert_equal(outputs, lab.eager(num_tokens, 2))
        assert {e.reason for e in lab.events_of(RanEager)} == {Reason.CAPTURE_FAILED}
        # What failed is tried again, and only that.
        before = len(lab.events)
        assert not lab.runtime.capture().missing
        assert [e.key.num_tokens for e in lab.events[before:] if isinstance(e, Captured)] == [4]
        lab.step(3, 2)
        assert lab.runtime.last_decision.mode is PIECEWISE


def test_capture_error_raised_keeps_earlier_programs():
    # Only the capture fails, not the warm-up: 8 is captured before 4 is tried.
    capturing = Switch(False)
    model = FailingAt(4, when=capturing)
    reported = []

    def progress(done, total, key):
        reported.append(key)
        capturing.on = True

    with RuntimeLab("PIECEWISE", model=model) as lab:
        with pytest.raises(OSError, match="no such size") as raised:
            lab.runtime.capture(progress)
        assert "PIECEWISE" in "".join(raised.value.__notes__)
        capturing.on = False
        assert lab.missing == {
            (PIECEWISE, 4): Reason.CAPTURE_FAILED,
            (PIECEWISE, 2): Reason.NOT_CAPTURED_YET,
        }
        for num_tokens, mode in ((4, NONE), (5, PIECEWISE), (8, PIECEWISE)):
            outputs = lab.step(num_tokens, 2)
            assert lab.runtime.last_decision.mode is mode
            assert_equal(outputs, lab.eager(num_tokens, 2))
        assert not lab.runtime.capture().missing
        assert len(lab.events_of(Captured)) == len(SIZES)


def test_first_replay_error_is_raised_after_the_others():
    model = Toy()
    broken = Switch()

    def examples(sizes, seed):
        if seed == 1 and sizes["tokens"] == 8 and broken():
            raise RuntimeError("no example")
        return example(sizes, seed)

    with RuntimeLab("FULL", model=model, examples=examples) as lab:
        with pytest.raises(RuntimeError, match="no example"):
            lab.runtime.capture()
        assert lab.missing == {(FULL, 8): Reason.CAPTURE_FAILED}
        lab.step(4, 2)
        assert lab.runtime.last_decision.mode is FULL
        lab.step(8, 2)
        assert lab.runtime.last_decision[::2] == (NONE, Reason.CAPTURE_FAILED)
        broken.on = False
        assert not lab.runtime.capture().missing
        lab.step(8, 2)
        assert lab.runtime.last_decision.mode is FULL


def test_three_failures_in_a_row_fail_the_rest_untried():
    class Never(Toy):
        def forward(self, *, x, ids, lens):
            if lab.runtime.library.scope is not None:
                self.calls[0] += 1
                raise OSError("never")
            return super().forward(x=x, ids=ids, lens=lens)

    asked = {"on_capture_error": "skip", "compilation": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
    with RuntimeLab("FULL", model=Never(), asked=asked) as lab:
        report = lab.runtime.capture()
        assert set(report.missing.values()) == {Reason.CAPTURE_FAILED}
        assert lab.model.num_calls == 3
        gave_up = [text for text in report.failures.values() if "consecutive" in text]
        assert len(gave_up) == 1
        assert TooManyFailuresError.__name__ in [
            event.error for event in lab.events_of(CaptureFailed)
        ]


class Interrupted(Toy):
    """Ctrl-C, once, at the n-th time from now that its Python runs, eager segments included."""

    def __init__(self):
        super().__init__()
        self.countdown = Tally(-1)

    def forward(self, *, x, ids, lens):
        self.count()
        return super().forward(x=x, ids=ids, lens=lens)

    @break_point
    def middle(self, hidden):
        self.count()
        return torch.sigmoid(hidden @ self.weight)

    def count(self):
        self.countdown[0] -= 1
        if self.countdown[0] == 0:
            raise KeyboardInterrupt


# Two for each of 3 warm-ups, 3 captures, 3 eager runs and 3 unpadded ones; each piecewise replay
# has one more.
@pytest.mark.parametrize("at", [1, 6, 7, 8, 11, 13, 14, 15, 18])
@pytest.mark.parametrize("policy", ["FULL", "PIECEWISE"])
def test_interrupt_anywhere_leaves_nothing_unverified(policy, at):
    with RuntimeLab(policy, model=Interrupted()) as lab:
        lab.model.countdown[0] = at
        with pytest.raises(KeyboardInterrupt):
            lab.runtime.capture()
        assert not lab.device.is_capturing()
        verified = lab.events_of(PaddingVerified)
        assert len(lab.missing) == len(SIZES) - len(verified)
        assert set(lab.missing.values()) == {Reason.NOT_CAPTURED_YET}
        assert_equal(lab.step(2, 2), lab.eager(2, 2))

        reported = []
        report = lab.runtime.capture(lambda done, total, key: reported.append((done, total)))
        assert reported == [(n, len(reported)) for n in range(1, len(reported) + 1)]
        assert not report.missing
        assert all(graph.seconds > 0 for graph in report.graphs)
        # Nothing that was captured is captured again.
        assert len(lab.events_of(Captured)) == len(SIZES)
        for num_tokens in (2, 3, 8):
            assert_equal(lab.step(num_tokens, 2), lab.eager(num_tokens, 2))
            assert lab.runtime.last_decision.mode.name == policy


@pytest.mark.parametrize("at", [1, 5, 9, 14, 17])
def test_interrupt_waits_for_the_key_and_a_second_does_not(at):
    class Signalled(Interrupted):
        """Raises the signal itself, as a terminal would, in the middle of a forward."""

        def count(self):
            self.countdown[0] -= 1
            if self.countdown[0] == 0:
                signal.raise_signal(signal.SIGINT)
                survived.append(len(lab.events_of(Captured, Verified)))
                if twice:
                    signal.raise_signal(signal.SIGINT)

    for twice in (False, True):
        survived = Tally()
        with RuntimeLab("FULL", model=Signalled()) as lab:
            lab.model.countdown[0] = at
            with pytest.raises(KeyboardInterrupt):
                lab.runtime.capture()
            assert len(survived) == 1
            # At most the key at hand was finished; the next one was not begun.
            assert len(lab.events_of(Captured, Verified)) - survived[0] <= (0 if twice else 2)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert not lab.runtime.capture().missing
            assert_equal(lab.step(3, 2), lab.eager(3, 2))


@pytest.mark.parametrize("policy", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_weight_replaced_runs_eager_until_recapture(policy):
    with RuntimeLab(policy) as lab:
        lab.runtime.capture()
        first_bytes = lab.runtime.report().graph_bytes
        for round_number in range(3):
            lab.model.weight.data = torch.randn(4, 4) + round_number
            report = lab.runtime.check_externals()
            assert "weight" in "".join(report.moved)
            assert set(lab.missing.values()) == {Reason.INVALIDATED}
            for batch in ((3, 3, True), (5, 2, False)):
                outputs = lab.step(*batch)
                assert lab.runtime.last_decision[::2] == (NONE, Reason.INVALIDATED)
                assert_equal(outputs, lab.eager(*batch[:2]))

            again = lab.runtime.capture()
            assert not again.missing
            assert again.graph_bytes == first_bytes
            assert len(lab.runtime.library.generations) == 1
            for batch in ((3, 3, True), (5, 2, False)):
                outputs = lab.step(*batch)
                assert lab.runtime.last_decision.mode is not NONE
                assert_equal(outputs, lab.eager(*batch[:2]))
            assert lab.runtime.check_externals().is_unchanged


class Routed(Toy):
    """Reads another weight where there are few tokens."""

    def __init__(self):
        super().__init__()
        self.small = torch.nn.Parameter(torch.ones(4))

    def forward(self, *, x, ids, lens):
        if x.shape[0] <= 2:
            x = x * self.small
        return super().forward(x=x, ids=ids, lens=lens)


def test_recapture_keeps_what_serves_until_it_is_done():
    with RuntimeLab("FULL", model=Routed()) as lab:
        lab.runtime.capture()
        lab.model.small.data = torch.full((4,), 3.0)
        lab.runtime.check_externals()
        assert lab.missing == {(FULL, 2): Reason.INVALIDATED}

        # A recapture that fails takes nothing away.
        lab.device.faults.end = True
        with pytest.raises(Exception, match="end"):
            lab.runtime.capture()
        lab.device.faults.end = False
        assert lab.missing.keys() == {(FULL, 2)}
        assert_equal(lab.step(8, 2), lab.eager(8, 2))
        assert lab.runtime.last_decision.mode is FULL
        assert_equal(lab.step(2, 2), lab.eager(2, 2))
        assert lab.runtime.last_decision.mode is NONE

        assert not lab.runtime.capture().missing
        assert len(lab.runtime.library.generations) == 1
        assert [event.num_programs for event in lab.events_of(Retired)][-1] == 3
        for num_tokens in (2, 8):
            assert_equal(lab.step(num_tokens, 2), lab.eager(num_tokens, 2))
            assert lab.runtime.last_decision.mode is FULL


def test_recapture_notices_a_replaced_weight():
    with RuntimeLab("FULL") as lab:
        lab.runtime.capture()
        lab.model.weight.data = torch.eye(4)
        assert not lab.runtime.capture().missing
        assert_equal(lab.step(8, 2), lab.eager(8, 2))
        assert lab.runtime.last_decision.mode is FULL


def test_weight_copied_into_keeps_every_graph():
    with RuntimeLab() as lab:
        lab.runtime.capture()
        with torch.no_grad():
            lab.model.weight.copy_(torch.eye(4))
        assert lab.runtime.check_externals().is_unchanged
        outputs = lab.step(3, 3, True)
        assert lab.runtime.last_decision.mode is FULL
        assert_equal(outputs, lab.eager(3, 3))


def test_max_graphs_exceeded_is_an_error_or_a_reason():
    with RuntimeLab("FULL", asked={"max_graphs": 2}) as lab:
        with pytest.raises(GraphMemoryError, match="at most 2"):
            lab.runtime.capture()
        assert lab.missing == {(FULL, 2): Reason.CAPTURE_FAILED}
        lab.step(8, 2)
        assert lab.runtime.last_decision.mode is FULL
    with RuntimeLab("FULL", asked={"max_graphs": 2, "on_capture_error": "skip"}) as lab:
        assert len(lab.runtime.capture().graphs) == 2
        assert lab.missing == {(FULL, 2): Reason.CAPTURE_FAILED}
        assert_equal(lab.step(2, 2), lab.eager(2, 2))


def test_max_graphs_just_enough_allows_a_recapture():
    with RuntimeLab("FULL", asked={"max_graphs": len(SIZES)}) as lab:
        lab.runtime.capture()
        lab.model.weight.data = torch.randn(4, 4)
        lab.runtime.check_externals()
        assert not lab.runtime.capture().missing


def test_max_graph_bytes_exceeded_gives_bytes_back():
    with RuntimeLab("FULL") as lab:
        needed = lab.runtime.capture().graph_bytes
    asked = {"max_graph_bytes": needed - 1, "on_capture_error": "skip"}
    with RuntimeLab("FULL", asked=asked) as lab:
        report = lab.runtime.capture()
        assert 0 < len(report.graphs) < len(SIZES)
        assert set(report.missing.values()) == {Reason.CAPTURE_FAILED}
        assert report.graph_bytes <= needed - 1
        assert {event.error for event in lab.events_of(CaptureFailed)} == {"GraphMemoryError"}


def test_out_of_memory_while_capturing_lets_the_rest_serve():
    device = SimulatedDevice(max_graphs=1)
    with RuntimeLab("FULL", device=device, asked={"on_capture_error": "skip"}) as lab:
        lab.runtime.capture()
        assert len(lab.missing) == len(SIZES) - 1
        for num_tokens in (2, 8):
            assert_equal(lab.step(num_tokens, 2), lab.eager(num_tokens, 2))


def test_example_that_does_not_fill_its_key_is_refused():
    def short(sizes, seed):
        return example({**sizes, "tokens": sizes["tokens"] - 1}, seed)

    with RuntimeLab("FULL", examples=short) as lab, pytest.raises(Exception, match="shape"):
        lab.runtime.capture()


def test_output_path_that_does_not_exist_is_named():
    with (
        RuntimeLab("FULL", outputs={"logits": "tokens"}) as lab,
        pytest.raises(ConfigError, match="logits"),
    ):
        lab.runtime.capture()

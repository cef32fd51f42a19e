"""Verification by a runtime: what never serves, what is caught later, what state is left."""

from __future__ import annotations

import pytest
import torch

from graphrt import BufferSpec, Reason, TensorStateGuard, get_forward_context
from graphrt.errors import VerificationError
from graphrt.events import CaptureFailed, PaddingVerified, Replayed, Verified
from lab import FULL, INPUTS, NONE, SIZES, RuntimeLab, Toy, assert_equal, example, values

ROWS = {"rows": "tokens"}


class FrozenHostValue(torch.nn.Module):
    """Reads the step's number from the host: right in eager, frozen in a graph."""

    def __init__(self):
        super().__init__()
        self.number = [1.0]

    def forward(self, *, x, ids, lens):
        return {"rows": x * self.number[0]}


class ReadsContext(torch.nn.Module):
    def forward(self, *, x, ids, lens):
        live = get_forward_context().attn_metadata
        return {"rows": x * (1.0 if live is None else live)}


class Memoises(torch.nn.Module):
    """Keeps a tensor of its first inputs, as if it were a constant."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, *, x, ids, lens):
        if self.scale is None:
            self.scale = x.sum()
        return {"rows": x * self.scale}


class Alternates(torch.nn.Module):
    """Gives every other run another result."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, *, x, ids, lens):
        self.n += 1
        return {"rows": x * (1 + self.n % 2)}


def with_live(live):
    def examples(sizes, seed):
        return example(sizes, seed)._replace(step_info=live)

    return examples


@pytest.mark.parametrize(
    ("policy", "model", "options"),
    [
        ("FULL", ReadsContext, {"examples": with_live(2.0)}),
        ("PIECEWISE", ReadsContext, {"examples": with_live(2.0)}),
        ("FULL", Memoises, {}),
        ("PIECEWISE", Memoises, {}),
        ("FULL", Alternates, {}),
        ("PIECEWISE", Alternates, {}),
    ],
)
def test_verification_of_frozen_value_or_memo_fails(policy, model, options):
    with RuntimeLab(policy, model=model(), outputs=ROWS, **options) as lab:
        with pytest.raises(VerificationError) as raised:
            lab.runtime.capture()
        assert policy in raised.value.subject
        assert set(lab.runtime.report().missing.values()) == {Reason.CAPTURE_FAILED}
        lab.step(4, 2, step_info=3.0)
        assert lab.runtime.last_decision[::2] == (NONE, Reason.CAPTURE_FAILED)
        assert not lab.events_of(Replayed)


def test_verification_failure_invalidates_the_program():
    asked = {"on_capture_error": "skip"}
    with RuntimeLab("FULL", model=Memoises(), outputs=ROWS, asked=asked) as lab:
        report = lab.runtime.capture()
        assert {graph.state for graph in report.graphs} == {"invalid"}
        assert len(report.failures) == len(SIZES)
        failed = lab.events_of(CaptureFailed)
        assert [event.error for event in failed] == ["VerificationError"] * len(SIZES)
        assert all("expected" in event.message for event in failed)
        assert [event.equal for event in lab.events_of(Verified)] == [False] * 3


def test_verification_failure_repaired_is_captured_again():
    model = ReadsContext()
    asked = {"on_capture_error": "skip"}
    live = [2.0]

    def examples(sizes, seed):
        return example(sizes, seed)._replace(step_info=live[0])

    with RuntimeLab("FULL", model=model, outputs=ROWS, asked=asked, examples=examples) as lab:
        assert len(lab.runtime.capture().missing) == len(SIZES)
        num_bytes = lab.runtime.report().graph_bytes
        live[0] = None
        again = lab.runtime.capture()
        assert not again.missing
        assert {graph.state for graph in again.graphs} == {"ready"}
        # The programs that failed are gone, not kept beside the new ones.
        assert again.graph_bytes == num_bytes
        lab.step(4, 2)
        assert lab.runtime.last_decision.mode is FULL


def test_verification_off_still_replays_each_program_once():
    asked = {"verify_first_replay": False}
    with RuntimeLab("FULL", model=Memoises(), outputs=ROWS, asked=asked) as lab:
        report = lab.runtime.capture()
        assert {graph.state for graph in report.graphs} == {"ready"}
        assert not lab.events_of(Verified)


@pytest.mark.parametrize("every", [1, 3])
def test_verify_every_compares_one_of_n_replays(every):
    with RuntimeLab(asked={"verify_every": every}) as lab:
        lab.runtime.capture()
        lab.events.clear()
        for number in range(1, 8):
            outputs = lab.step(3, 3, True, seed=number)
            assert_equal(outputs, lab.eager(3, 3, seed=number))
            lab.step(9, 2)  # an eager step is not counted
            verified = lab.events_of(Verified, PaddingVerified)
            kinds = [Verified, PaddingVerified] * 4  # The two comparisons take turns.
            assert list(map(type, verified)) == kinds[: number // every]
        assert len(lab.step_events) == 14


def corrupt(lab: RuntimeLab) -> None:
    """Make graphs wrong behind the runtime's back: a host value that they have frozen."""
    lab.model.number[0] = 5.0


def test_verify_every_finds_a_wrong_replay_and_stops_its_graph():
    asked = {"verify_every": 2, "watch": "off"}
    with RuntimeLab("FULL", model=FrozenHostValue(), outputs=ROWS, asked=asked) as lab:
        lab.runtime.capture()
        corrupt(lab)
        lab.step(4, 2)
        with pytest.raises(VerificationError, match=r"rows"):
            lab.step(4, 2)
        rows = lab.step(4, 2)["rows"]
        assert torch.equal(rows, values(4, 2)["x"] * 5)
        assert lab.runtime.last_decision[::2] == (NONE, Reason.CAPTURE_FAILED)
        lab.step(8, 2)  # not compared yet
        assert lab.runtime.last_decision.mode is FULL
        (failed,) = lab.events_of(CaptureFailed)
        assert failed.error == "VerificationError"
        # Captured anew, with the value of now.
        assert not lab.runtime.capture().missing
        assert torch.equal(lab.step(4, 2)["rows"], values(4, 2)["x"] * 5)
        assert lab.runtime.last_decision.mode is FULL


def test_verify_every_finds_a_difference_of_state():
    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(64))
            self.number = [1.0]

        def forward(self, *, x, ids, lens):
            added = torch.where(ids >= 0, x[:, 0], 0) * self.number[0]
            self.cache.index_add_(0, ids.clamp(min=0), added)
            return {"rows": x + 1}

    model = Writes()
    guard = TensorStateGuard([model.cache])
    options = {"outputs": ROWS, "state": guard, "asked": {"verify_every": 1, "watch": "off"}}
    with RuntimeLab("FULL", model=model, **options) as lab:
        lab.runtime.capture()
        assert not model.cache.any()
        lab.step(4, 2)
        before = model.cache.clone()
        corrupt(lab)
        with pytest.raises(VerificationError, match="state"):
            lab.step(4, 2)
        assert torch.equal(model.cache, before)


def test_verify_tolerance_accepts_small_differences():
    class Drifts(FrozenHostValue):
        pass

    for tolerance, is_caught in ((None, True), (1e-3, False)):
        options = {"asked": {"verify_every": 1, "watch": "off"}, "verify_tolerance": tolerance}
        with RuntimeLab("FULL", model=Drifts(), outputs=ROWS, **options) as lab:
            lab.runtime.capture()
            lab.model.number[0] = 1 + 1e-5
            if is_caught:
                with pytest.raises(VerificationError):
                    lab.step(4, 2)
            else:
                lab.step(4, 2)
                assert lab.runtime.last_decision.mode is FULL


def test_step_whose_replay_fails_is_not_repeated_eagerly():
    with RuntimeLab("FULL", model=Toy()) as lab:
        lab.runtime.capture()
        calls = lab.model.num_calls
        lab.events.clear()
        lab.device.faults.replay_op = 1
        with pytest.raises(Exception, match="replay"):
            lab.step(4, 2)
        lab.device.faults.replay_op = None
        assert lab.model.num_calls == calls
        assert lab.events == []
        assert_equal(lab.step(4, 2), lab.eager(4, 2))


def test_written_buffer_is_staged_again_for_the_replay():
    def doubling(*, x, ids, lens):
        return {"rows": x.mul_(2) + 0}

    inputs = (BufferSpec("x", INPUTS[0].shape, torch.float32, written=True), *INPUTS[1:])
    options = {"inputs": inputs, "outputs": ROWS, "asked": {"verify_every": 1}}
    with RuntimeLab("FULL", model=doubling, **options) as lab:
        lab.runtime.capture()
        for num_tokens in (8, 3, 9):
            rows = lab.step(num_tokens, 2)["rows"]
            assert torch.equal(rows, values(num_tokens, 2)["x"] * 2)

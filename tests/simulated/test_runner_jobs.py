"""``capture_all`` captures parts: jobs, gates, and a check of each first replay."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    CaptureJob,
    CaptureOptions,
    CUDAGraphWrapper,
    ForwardContext,
    GraphLibrary,
    Reason,
    RuntimeMode,
    SimulatedDevice,
    TensorStateGuard,
    capture_all,
)
from graphrt.errors import ConfigError, EmptyCaptureError, GraphrtError, VerificationError
from graphrt.events import Verified
from lab import Tally

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE
KEYS = [BatchDescriptor(n) for n in (4, 2)]


@pytest.fixture
def lab():
    lab = Lab()
    with torch.no_grad():
        yield lab
    lab.library.close()
    lab.device.close()


class Lab:
    def __init__(self):
        self.events = []
        self.device = SimulatedDevice()
        self.library = GraphLibrary(self.device, observer=self.events.append)
        self.static = torch.zeros(8)
        self.seeds = []

    def inputs(self, key):
        def make_inputs(seed):
            self.seeds.append(seed)
            view = self.static[: key.num_tokens]
            view.copy_(torch.arange(key.num_tokens) + float(seed))
            return (view,), {}

        return make_inputs

    def jobs(self, fn, owner="part", keys=KEYS, **changes):
        return [CaptureJob(fn, FULL, key, self.inputs(key), owner=owner, **changes) for key in keys]

    @property
    def num_verified(self):
        return sum(isinstance(event, Verified) for event in self.events)


def counting():
    calls = Tally()

    def fn(x):
        calls.append(x.shape[0])
        return x + 1

    return fn, calls


def frozen_value():
    """Returns another value at each call, on the host: no graph can."""
    calls = []

    def fn(x):
        calls.append(1)
        return x + len(calls)

    return fn


def test_inputs_by_seed_are_compared_with_eager(lab):
    fn, calls = counting()
    report = capture_all(lab.library, lab.jobs(fn))
    assert [program.key for program in report.programs] == KEYS
    assert not report.failures
    # Each check looks at the captured contents again, because examples may ignore the seed.
    assert lab.seeds == [0, 0, 0, 0] + [0, 1, 1, 1] * 2
    assert list(calls) == [4, 2, 4, 2, 4, 2]
    assert lab.num_verified == 2
    assert len(report.seconds) == 2
    assert all(seconds > 0 for seconds in report.seconds.values())
    view = lab.static[:4].fill_(3)
    assert torch.equal(report.programs[0](view), torch.full((4,), 4.0))


def test_inputs_without_seed_are_not_compared(lab):
    report = capture_all(
        lab.library,
        [CaptureJob(frozen_value(), FULL, KEYS[0], lambda: ((lab.static[:4],), {}), owner="part")],
    )
    assert len(report.programs) == 1
    assert lab.num_verified == 0


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_wrong_first_replay_never_serves(lab, on_error):
    right, _ = counting()
    jobs = lab.jobs(frozen_value(), "wrong") + lab.jobs(right, "right")
    options = CaptureOptions(on_error=on_error)
    if on_error == "raise":
        with pytest.raises(VerificationError):
            capture_all(lab.library, jobs, options)
    else:
        report = capture_all(lab.library, jobs, options)
        assert [entry.owner for entry in report.failures] == ["wrong", "wrong"]
    reasons = {(entry.owner, entry.reason) for entry in lab.library.catalog}
    assert reasons == {("wrong", Reason.CAPTURE_FAILED), ("right", Reason.HIT)}
    assert {p.owner for p in lab.library.programs if p.is_valid} == {"right"}


@pytest.mark.parametrize("generation", ["current", "lazy"])
def test_target_that_calls_wrappers_is_compared_as_a_whole(lab, generation):
    fn, calls = counting()
    first, last = (CUDAGraphWrapper(fn, lab.library, FULL, name=name) for name in "ab")

    def target(x):
        return last(first(x)) * 2

    options = CaptureOptions(generation=generation)
    report = capture_all(lab.library, lab.jobs(target, owner=""), options)
    assert len(report.programs) == 4
    assert all(program.is_compared for program in report.programs)
    assert lab.num_verified == 2
    num_calls = len(list(calls))
    # Programs that serve are neither captured nor compared again.
    capture_all(lab.library, lab.jobs(target, owner=""), options)
    assert (len(list(calls)), lab.num_verified) == (num_calls, 2)
    lab.static[:4] = 3
    with ForwardContext(FULL, KEYS[0]):
        assert target(lab.static[:4]).tolist() == [10.0] * 4
    assert len(list(calls)) == num_calls


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("is_first_wrong", [False, True])
def test_wrong_wrapper_that_a_target_calls_never_serves(lab, on_error, is_first_wrong):
    fns = {"right": counting()[0], "wrong": frozen_value()}
    parts = [CUDAGraphWrapper(fn, lab.library, FULL, name=name) for name, fn in fns.items()]
    first, last = reversed(parts) if is_first_wrong else parts
    jobs = lab.jobs(lambda x: last(first(x)), owner="", keys=KEYS[:1])
    with pytest.raises(VerificationError) if on_error == "raise" else nullcontext():
        report = capture_all(lab.library, jobs, CaptureOptions(on_error=on_error))
        assert len(report.failures) == 1
    # Which of them is wrong, a comparison of the whole does not tell.
    assert not any(program.is_valid for program in lab.library.programs)
    assert len(lab.library.programs) == 2
    with ForwardContext(FULL, KEYS[0]), pytest.raises(GraphrtError):
        last(first(lab.static[:4]))


def test_scratch_that_adds_up_is_put_back_between_compared_runs(lab):
    total = torch.zeros(4)

    def fn(x):
        return total[: len(x)].add_(x) + 1

    options = CaptureOptions(may_overwrite=[total])
    report = capture_all(lab.library, lab.jobs(fn), options)
    assert [program.is_compared for program in report.programs] == [True, True]
    total.zero_()
    view = lab.static[:4].fill_(3)
    assert [report.programs[0](view).tolist() for _ in range(2)] == [[4.0] * 4, [7.0] * 4]


def test_check_replaces_the_comparison(lab):
    checked, over = [], []
    jobs = lab.jobs(frozen_value(), check=checked.append, checked=over.append)
    report = capture_all(lab.library, jobs)
    assert [entry.key for entry in checked] == [entry.key for entry in over] == KEYS
    assert not report.failures
    assert lab.num_verified == 0


def test_failing_capture_is_skipped_or_raised(lab):
    def fn(x):
        if x.shape[0] == 4:
            raise OSError("four")
        return x + 1

    with pytest.raises(OSError, match="four"):
        capture_all(lab.library, lab.jobs(fn, "raised"))
    assert not lab.library.programs
    report = capture_all(lab.library, lab.jobs(fn, "skipped"), CaptureOptions(on_error="skip"))
    assert [entry.key for entry in report.failures] == [KEYS[0]]
    assert [program.key for program in report.programs] == [KEYS[1]]
    assert isinstance(report.failures[0].error, OSError)


def test_key_that_has_a_program_is_not_run_again(lab):
    fn, calls = counting()
    capture_all(lab.library, lab.jobs(fn))
    calls.clear()
    report = capture_all(lab.library, lab.jobs(fn))
    assert not calls
    assert report == ((), (), (), {})


@pytest.mark.parametrize("phase", ["warmup", "warmed", "capture", "captured"])
def test_gate_that_refuses_leaves_no_program(lab, phase):
    fn, _ = counting()
    asked = []

    def gate(job, at):
        asked.append((job.key, at))
        return job.key is not KEYS[0] or at != phase

    report = capture_all(lab.library, jobs := lab.jobs(fn), gate=gate)
    assert report.skipped == (jobs[0],)
    assert [program.key for program in lab.library.programs] == [KEYS[1]]
    assert (KEYS[1], "captured") in asked
    assert lab.num_verified == 1


def reading_hidden():
    """A callable of which the smallest key alone reads a tensor that nothing names."""
    hidden = itertools.repeat(torch.ones(2))  # No walk finds what it repeats.
    return lambda x: x + next(hidden).view(2) if x.shape[0] == 2 else x + 1


def test_key_captured_blindly_is_captured_again(lab):
    jobs = lab.jobs(reading_hidden(), keys=[BatchDescriptor(n) for n in (8, 4, 2)])
    report = capture_all(lab.library, jobs, CaptureOptions(observe="ends"))
    assert sorted(program.key.num_tokens for program in report.programs) == [2, 4, 8]
    assert all(program.is_valid and program.is_observed for program in report.programs)


def test_gate_that_raises_behind_a_capture_leaves_no_program(lab):
    fn, _ = counting()

    def gate(job, at):
        if at == "captured":
            raise OSError("no room")
        return True

    with pytest.raises(OSError, match="no room"):
        capture_all(lab.library, lab.jobs(fn), gate=gate)
    assert not lab.library.programs


def test_gate_refusing_a_second_capture_is_obeyed(lab):
    """A key captured blindly is captured again once another shows a tensor that nothing names."""
    asked, fn = [], reading_hidden()

    def gate(job, at):
        asked.append((job.key.num_tokens, at))
        return asked.count((4, "capture")) < 2

    jobs = lab.jobs(fn, keys=[BatchDescriptor(n) for n in (8, 4, 2)])
    report = capture_all(lab.library, jobs, CaptureOptions(observe="ends"), gate=gate)
    assert asked.count((4, "capture")) == 2
    assert report.skipped == (jobs[1],)
    assert {p.key.num_tokens for p in lab.library.programs if p.is_valid} == {8, 2}


def test_wrappers_inside_a_target_are_captured(lab):
    fn, _ = counting()
    inner = CUDAGraphWrapper(fn, lab.library, PIECEWISE)

    def outer(x):
        return inner(x) * 2

    report = capture_all(
        lab.library, [CaptureJob(outer, PIECEWISE, key, lab.inputs(key)) for key in KEYS]
    )
    assert [(p.owner, p.mode, p.key) for p in report.programs] == [
        (inner.owner, PIECEWISE, key) for key in KEYS
    ]
    with pytest.raises(EmptyCaptureError):
        capture_all(lab.library, [CaptureJob(outer, FULL, KEYS[0], lab.inputs(KEYS[0]))])


def test_wrapper_of_another_library_raises(lab):
    other = GraphLibrary(lab.device)
    wrapper = CUDAGraphWrapper(lambda x: x + 1, other, FULL)
    with pytest.raises(ConfigError, match="library"):
        capture_all(lab.library, [CaptureJob(wrapper, FULL, KEYS[0], lab.inputs(KEYS[0]))])
    assert not lab.library.programs
    other.close()


def test_state_is_as_before_the_capture(lab):
    count = torch.zeros(1)

    def fn(x):
        count.add_(1)
        return x + count

    report = capture_all(
        lab.library, lab.jobs(fn), CaptureOptions(state=TensorStateGuard([count]), warmups=2)
    )
    assert count.item() == 0
    assert not report.failures
    assert lab.num_verified == 2


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_rebuilt_generation_with_a_wrong_program_is_given_up(lab, on_error):
    factor = [1]

    def fn(x):
        factor[0] += is_wrong
        return x * factor[0]

    is_wrong = 0
    capture_all(lab.library, lab.jobs(fn))
    [old] = lab.library.generations
    is_wrong = 1
    with (
        pytest.raises(VerificationError),
        lab.library.capture_scope(generation="new", on_error=on_error) as scope,
    ):
        capture_all(lab.library, lab.jobs(fn), scope.options)
    assert lab.library.generations == (old,)
    assert all(program.is_valid for program in lab.library.programs)

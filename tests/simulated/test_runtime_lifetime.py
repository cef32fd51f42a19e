"""The life of a runtime: close, ownership, neighbours, threads, forks."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.modules import module as torch_module

from graphrt import OutputSpec, Reason, Runtime, SimulatedDevice
from graphrt.device import simulated
from graphrt.errors import (
    CaptureInProgressError,
    ConfigError,
    ForkedProcessError,
    LibraryClosedError,
    LifetimeError,
    StaticBufferError,
)
from graphrt.events import KeysChanged
from lab import (
    FULL,
    INPUTS,
    NONE,
    OUTPUTS,
    PIECEWISE,
    RuntimeLab,
    Toy,
    assert_equal,
    config,
    example,
    in_a_child,
    random_rows,
    rows_runner,
)


def test_close_gives_everything_back_and_may_be_repeated():
    lab = RuntimeLab()
    lab.runtime.capture()
    assert lab.device.memory().pool_bytes == 0 < lab.runtime.report().graph_bytes
    program = weakref.ref(lab.runtime.library.programs[0])
    for _ in range(3):
        lab.runtime.close()
    gc.collect()
    assert program() is None
    report = lab.runtime.report()
    assert (report.graphs, report.graph_bytes) == ((), 0)
    with pytest.raises(LibraryClosedError):
        lab.step(3, 3, True)
    with pytest.raises(LibraryClosedError):
        lab.step(9, 2)
    with pytest.raises(LibraryClosedError):
        lab.runtime.capture()
    with pytest.raises(LibraryClosedError):
        lab.runtime.check_externals()


def test_close_whose_observer_raises_leaves_nothing():
    wrong = []

    def observe(event):
        if type(event) in wrong:
            raise ZeroDivisionError

    before = len(torch_module._global_module_registration_hooks)
    runner = rows_runner(lambda x: torch.relu(x), observer=observe)
    runner.capture()
    runner.run(random_rows({"n": 2}, seed=2))
    wrong.append(KeysChanged)
    with pytest.raises(ZeroDivisionError):
        runner.close()
    assert len(torch_module._global_module_registration_hooks) == before
    with pytest.raises(LibraryClosedError):
        runner.run(random_rows({"n": 2}, seed=2))


def test_close_without_a_capture_works():
    for mode in ("NONE", "FULL"):
        with RuntimeLab(mode) as lab:
            lab.step(4, 2)
        with pytest.raises(LibraryClosedError):
            lab.step(4, 2)


def test_with_block_that_raises_closes():
    lab = RuntimeLab()

    def serve():
        with lab.runtime as runtime:
            runtime.capture()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    with pytest.raises(LibraryClosedError):
        lab.step(4, 2)


def make(device, **options) -> Runtime:
    given = {"inputs": INPUTS, "outputs": OutputSpec(OUTPUTS), "examples": example, **options}
    return Runtime(Toy(), config=config("FULL"), device=device, **given)


def is_closed(device: SimulatedDevice) -> bool:
    try:
        device.new_pool()
    except LifetimeError:
        return True
    return False


def test_close_closes_only_a_device_made_by_name():
    owned = make("simulated")
    owned.close()
    assert is_closed(owned.device)
    device = SimulatedDevice()
    for _ in range(2):
        runtime = make(device)
        runtime.capture()
        runtime.close()
        assert not is_closed(device)
    device.close()


def test_runtime_constructor_that_fails_closes_its_device(monkeypatch):
    made = []
    make_one = simulated.SimulatedDevice

    def remembered(*args, **kwargs):
        made.append(make_one(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(simulated, "SimulatedDevice", remembered)
    for options in ({"inputs": [INPUTS[0], INPUTS[0]]}, {"outputs": OutputSpec({"": "pixels"})}):
        with pytest.raises((StaticBufferError, ConfigError)):
            make("simulated", **options)
    assert len(made) == 2
    assert all(map(is_closed, made))


def test_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="simulated"):
        make("tpu")


def test_close_during_a_capture_is_refused():
    with RuntimeLab() as lab:
        with lab.runtime.library.capture_scope(), pytest.raises(CaptureInProgressError):
            lab.runtime.close()
        lab.step(9, 2)
        lab.runtime.capture()


def test_step_after_a_retirement_by_hand_runs_eager():
    with RuntimeLab() as lab:
        lab.runtime.capture()
        lab.step(4, 4)
        assert lab.runtime.last_decision.mode is PIECEWISE
        lab.runtime.library.retire()
        for _ in range(2):
            lab.step(4, 4)
            assert lab.runtime.last_decision.mode is NONE
            assert lab.runtime.last_decision.reason is Reason.NOT_CAPTURED_YET
        lab.runtime.capture()
        lab.step(4, 4)
        assert lab.runtime.last_decision.mode is PIECEWISE


def test_runtime_never_closed_warns():
    labs = [RuntimeLab("FULL")]
    labs[0].runtime.capture()
    labs.clear()
    with pytest.warns(ResourceWarning, match="never closed"):
        gc.collect()


@pytest.mark.parametrize("shared_device", [True, False])
def test_runtimes_in_one_process_do_not_interfere(shared_device):
    device = SimulatedDevice() if shared_device else None
    with RuntimeLab(device=device) as one:
        one.runtime.capture()
        rows = one.step(3, 3, True, seed=1)
        before = {name: tensor.clone() for name, tensor in rows.items()}
        with RuntimeLab("FULL", device=device) as other:
            other.runtime.capture()
            for seed in range(3):
                assert_equal(other.step(7, 2, seed=seed), other.eager(7, 2, seed=seed))
            # What the other one captured and replayed has not touched this one's graph storage.
            assert_equal(rows, before)
            other.model.weight.data = torch.zeros(4, 4)
            other.runtime.check_externals()
            assert not one.runtime.report().missing
            assert one.runtime.check_externals().is_unchanged
        assert_equal(rows, before)
        assert_equal(one.step(4, 4, True, seed=2), one.eager(4, 4, seed=2))
        assert one.runtime.last_decision.mode is FULL


def test_threads_with_a_runtime_each_do_not_interfere():
    start = threading.Barrier(2, timeout=60)

    def serve(seed: int, policy: str) -> set[str]:
        with RuntimeLab(policy) as lab:
            for round_number in range(3):
                start.wait()
                lab.runtime.capture()
                for step in range(40):
                    batch = 1 + (seed + step) % 16, 1
                    outputs = lab.step(*batch, seed=seed + step)
                    assert_equal(outputs, lab.eager(*batch, seed=seed + step))
                lab.model.weight.data = torch.full((4, 4), float(seed + round_number))
                lab.runtime.check_externals()
            return {event.reason.name for event in lab.step_events}

    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(serve, 0, "PIECEWISE"), threads.submit(serve, 5, "FULL")]
        for answer in answers:
            assert answer.result(timeout=120) == {"HIT", "PADDED", "ABOVE_MAX"}
    assert gc.isenabled()


def test_capture_in_a_thread_lets_another_runtime_step():
    with RuntimeLab("FULL") as serving, RuntimeLab("FULL") as capturing:
        serving.runtime.capture()
        served = []

        def serve_one(done, total, key):
            # In the middle of the other's capture, from another thread.
            thread = threading.Thread(
                target=lambda: served.append(
                    {name: t.clone() for name, t in serving.step(7, 2, seed=done).items()}
                )
            )
            thread.start()
            thread.join(timeout=60)

        capturing.runtime.capture(serve_one)
        assert len(served) == 6
        for done, outputs in enumerate(served, start=1):
            assert_equal(outputs, serving.eager(7, 2, seed=done))


def test_fork_child_step_is_refused_and_parent_goes_on():
    with RuntimeLab() as lab:
        lab.runtime.capture()
        for batch in ((3, 3, True), (5, 2, False)):
            said = in_a_child(lambda batch=batch: lab.step(*batch))
            assert said.startswith(ForkedProcessError.__name__), said
        assert in_a_child(lab.runtime.close) == "None"
        assert_equal(lab.step(3, 3, True), lab.eager(3, 3))
        assert lab.runtime.last_decision.mode is FULL

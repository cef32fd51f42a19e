"""An attention backend whose kernels are built while another one serves."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from llm_traffic import MODES, TRAFFIC, engine_config, serve
from test_llm_attention_registered import PlainAttention

from graphrt import Event, Reason, RuntimeMode, StepMetrics
from graphrt.events import Withdrawn
from graphrt_llm import KVCache, Limits, LLMEngine, assembly, register_attention_backend
from graphrt_llm.attention import SwitchingAttention, building
from graphrt_llm.attention.building import ProcessBuild
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.errors import AttentionBackendError, EngineConfigError


class Stub:
    """A build that ends after some polls, one for each step."""

    def __init__(self, num_polls: int, failure: str = "") -> None:
        self.num_polls = num_polls
        self.failure = failure
        self.num_closed = 0

    def poll(self) -> str | None:
        self.num_polls -= 1
        return None if self.num_polls >= 0 else self.failure

    def close(self) -> None:
        self.num_closed += 1


class Counting(SdpaAttention):
    """Counts the calls of ``prepare``. Eager code needs that of its own backend."""

    num_prepared = 0

    def prepare(self, *args) -> None:
        type(self).num_prepared += 1
        super().prepare(*args)


BUILDS: list[Any] = []


@pytest.fixture(scope="module")
def switching() -> str:
    """A backend that ``sdpa`` serves until the latest of ``BUILDS`` has ended."""

    def factory(cache: KVCache, limits: Limits | None) -> SwitchingAttention:
        return SwitchingAttention(SdpaAttention(cache), Counting(cache), BUILDS[-1])

    register_attention_backend("switching", factory)
    return "switching"


@pytest.fixture(scope="module")
def expected():
    with LLMEngine.tiny(engine_config()) as engine:
        return serve(engine, TRAFFIC)[:2]


def engine_of(mode: str, capture: str, overlap: bool, observer=None) -> LLMEngine:
    config = replace(
        engine_config(mode, overlap=overlap), attention_backend="switching", capture=capture
    )
    return LLMEngine.tiny(config, observer=observer)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 40),
    st.sampled_from(MODES),
    st.sampled_from(["before_serving", "by_priority"]),
    st.booleans(),
)
def test_a_switch_between_steps_changes_no_token(
    switching, expected, num_polls, mode, capture, overlap
):
    BUILDS.append(Stub(num_polls))
    Counting.num_prepared = 0
    events: list[Event] = []
    with engine_of(mode, capture, overlap, events.append) as engine:
        if capture == "before_serving":
            engine.capture()
            assert not Counting.num_prepared
        served = serve(engine, TRAFFIC)
        assert served[:2] == expected
        num_late = len(served.steps) - num_polls
        assert (Counting.num_prepared > 0) == (num_late > 0)
        switches = [event for event in events if isinstance(event, Withdrawn)]
        assert len(switches) == (num_late > 0)
        if switches and mode.startswith("FULL") and capture == "before_serving":
            assert switches[0].num_programs > 0
            for _ in engine.runtime.report().missing:
                engine.step()  # Idle: a graph each.
            assert not engine.runtime.report().missing
        assert serve(engine, TRAFFIC)[:2] == expected
    assert BUILDS[-1].num_closed == (num_polls > 2 * len(served.steps))


def test_an_engine_that_cannot_be_made_leaves_nothing_open(switching, monkeypatch):
    closed, make = [], assembly.make_device

    def make_device(*asked):
        device = make(*asked)
        close = device.close
        monkeypatch.setattr(device, "close", lambda: (closed.append(device), close()))
        return device

    monkeypatch.setattr(assembly, "make_device", make_device)
    BUILDS.append(Stub(5))
    config = replace(engine_config("NONE"), attention_backend="switching")
    compilation = replace(config.runtime.compilation, level=1)
    config = replace(config, runtime=replace(config.runtime, compilation=compilation))
    with pytest.raises(EngineConfigError, match="level"):
        LLMEngine.tiny(config)
    assert (len(closed), BUILDS[-1].num_closed) == (1, 1)


def test_graphs_are_captured_anew_by_priority(switching):
    BUILDS.append(Stub(2))
    metrics = StepMetrics()
    with engine_of("FULL_AND_PIECEWISE", "before_serving", False, metrics) as engine:
        engine.capture()
        pieces = [g.key for g in engine.runtime.report().graphs if g.mode is RuntimeMode.PIECEWISE]
        engine.add_request(range(1, 4))
        steps = [engine.step() for _ in range(2)]
        assert not metrics.snapshot().lifetimes.withdrawals
        step = engine.step()
        # The graph of this batch came first, so that no step ran eager.
        assert [s.decision.mode for s in (*steps[1:], step)] == [RuntimeMode.FULL] * 2
        lifetimes = metrics.snapshot().lifetimes
        assert (lifetimes.withdrawals, lifetimes.withdrawn_programs) == (1, 3)
        assert len(engine.runtime.report().missing) == 2
        left = [g.key for g in engine.runtime.report().graphs if g.mode is RuntimeMode.PIECEWISE]
        assert left == pieces
        # The backend that serves is no value that graphs hold.
        assert not engine.runtime.check_externals().moved
        assert engine.attention.reason.endswith("it is built now")


def test_withdrawn_graphs_leave_their_place_in_the_budget(switching, expected):
    BUILDS.append(Stub(5))
    config = engine_config("FULL_DECODE_ONLY", max_graphs=3)
    config = replace(config, attention_backend="switching", capture="by_priority")
    with LLMEngine.tiny(config) as engine:
        engine.capture()
        assert serve(engine, TRAFFIC)[:2] == expected
        assert engine.runtime.library.num_graphs == 3
        assert not engine.runtime.report().missing


class Failing(SdpaAttention):
    """Has no kernel for FULL graphs."""

    def prepare(self, key, step_info) -> None:
        if key.num_reqs is not None:
            raise RuntimeError("no kernel")
        super().prepare(key, step_info)


def test_keys_that_failed_before_a_switch_are_tried_again():
    register_attention_backend(
        "failing-first",
        lambda cache, limits: SwitchingAttention(Failing(cache), Counting(cache), Stub(3)),
    )
    config = engine_config("FULL_DECODE_ONLY", on_capture_error="skip")
    config = replace(config, attention_backend="failing-first", capture="by_priority")
    with LLMEngine.tiny(config) as engine:
        engine.step()
        assert Reason.CAPTURE_FAILED in engine.runtime.report().missing.values()
        while engine.is_building:
            engine.step()
        for _ in engine.runtime.report().missing:
            engine.step()
        assert not engine.runtime.report().missing


@pytest.mark.parametrize("failure", ["", "no compiler"])
def test_switch_that_is_interrupted_goes_on_in_the_next_step(switching, expected, failure):
    BUILDS.append(Stub(5, failure))
    withdrawn: list[int] = []

    def observer(event: Event) -> None:
        if isinstance(event, Withdrawn):
            withdrawn.append(event.num_programs)
            if len(withdrawn) == 1:
                raise KeyboardInterrupt

    with engine_of("FULL_DECODE_ONLY", "before_serving", True, observer) as engine:
        engine.capture()
        with pytest.raises(KeyboardInterrupt):
            serve(engine, TRAFFIC)
        assert engine.is_building
        engine.abort_all()
        assert serve(engine, TRAFFIC)[:2] == expected
        assert not engine.is_building
        assert not engine.runtime.report().missing
        assert engine.attention.reason.count("built") == 1
    assert withdrawn == [0 if failure else 3, 0]


def test_a_build_that_fails_is_told_and_changes_nothing(switching, expected):
    BUILDS.append(Stub(3, failure="no compiler"))
    events: list[Event] = []
    Counting.num_prepared = 0
    with engine_of("FULL_AND_PIECEWISE", "before_serving", True, events.append) as engine:
        engine.capture()
        assert serve(engine, TRAFFIC)[:2] == expected
        assert not engine.runtime.report().missing
        assert engine.attention.reason.endswith("not built: no compiler")
    assert not Counting.num_prepared
    [told] = [event for event in events if isinstance(event, Withdrawn)]
    assert told.num_programs == 0
    assert "no compiler" in told.reason
    assert not BUILDS[-1].num_closed, "it has ended"


def test_tensors_shared_in_eager_code_are_refused():
    register_attention_backend(
        "sharing",
        lambda cache, limits: SwitchingAttention(PlainAttention(cache), Counting(cache), Stub(9)),
    )
    with (
        LLMEngine.tiny(replace(engine_config(), attention_backend="sharing")) as engine,
        pytest.raises(AttentionBackendError, match="2 tensors from PlainAttention"),
    ):
        engine.generate([1, 2, 3])


def test_a_closed_engine_ends_its_build(switching):
    BUILDS.append(Stub(100))
    with engine_of("NONE", "before_serving", False) as engine:
        engine.step()
    assert BUILDS[-1].num_closed == 1


def test_graphs_are_captured_while_a_library_is_imported(switching, expected, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(building, "missing_modules", lambda cache: [] if may_end.wait(30) else None)
    build = building.LoadedLater(None)
    BUILDS.append(build)
    with engine_of("FULL_AND_PIECEWISE", "by_priority", True) as engine:
        assert serve(engine, TRAFFIC)[:2] == expected
        assert engine.is_building
        may_end.set()
        wait([build._loaded])
        assert serve(engine, TRAFFIC)[:2] == expected
        assert engine.attention.reason.endswith("it is built now")


def ended(build: ProcessBuild) -> str:
    """What ``poll`` says at the end; the processes are tiny."""
    for process in build._processes:
        process.wait(30)
    found = build.poll()
    assert found is not None
    assert build.poll() == found
    return found


def test_a_process_build_tells_how_it_ended():
    assert ended(ProcessBuild([["-c", "pass"], ["-c", "print('all is well')"]])) == ""
    wrong = "import sys; print('no nvcc'); sys.exit(3)"
    assert ended(ProcessBuild([["-c", "pass"], ["-c", wrong]])) == "exit codes [0, 3]: no nvcc"
    asked = "import os, sys, graphrt_llm; sys.exit(os.environ['ASKED'] != 'yes')"
    assert ended(ProcessBuild([["-c", asked]], {"ASKED": "yes"})) == ""


def test_a_closed_process_build_leaves_no_process(switching, expected):
    build = ProcessBuild([["-c", "input()"], ["-c", "import time; time.sleep(60)"]])
    BUILDS.append(build)
    with engine_of("FULL_AND_PIECEWISE", "by_priority", True) as engine:
        assert build._processes[1].poll() is None
        # What graphs hold is found by a walk, which meets the processes too.
        assert serve(engine, TRAFFIC)[:2] == expected
    assert [process.returncode is None for process in build._processes] == [False, False]
    build.close()

"""The baton: who runs when, what a worker takes over, how failures and stalls end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.device.torch_modes import report_capturing
from graphrt.errors import UBatchBusyError, UBatchDeadlockError
from graphrt.ubatch.baton import UBatchAborted, Worker, WorkerCrew, _Run

VARIABLE: ContextVar[int] = ContextVar("variable", default=0)


@pytest.fixture
def crew() -> Iterator[WorkerCrew]:
    crew = WorkerCrew(2)
    yield crew
    crew.close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = {*threading.enumerate()}  # One of an earlier file of tests may end meanwhile.
    yield
    assert {*threading.enumerate()} <= before


def traced(crew: WorkerCrew, yields: list[int]) -> list[tuple[int, int]]:
    """(worker, segment) in the order in which they ran."""
    trace: list[tuple[int, int]] = []

    def body(worker: Worker) -> int:
        for number in range(yields[worker.index]):
            trace.append((worker.index, number))
            worker.hand_over(f"layer{number}")
        trace.append((worker.index, yields[worker.index]))
        return worker.index

    assert crew.run([body] * len(yields)) == list(range(len(yields)))
    return trace


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_segments_run_in_order_of_yields_then_index(yields: list[int]) -> None:
    crew = WorkerCrew(len(yields))
    try:
        ran = traced(crew, yields)
        assert ran == sorted(ran, key=lambda item: (item[1], item[0]))
        assert len(ran) == sum(yields) + len(yields)
        assert traced(crew, yields) == ran
    finally:
        crew.close()


def test_threads_stay_from_run_to_run(crew: WorkerCrew) -> None:
    idents = [crew.run([lambda worker: threading.get_ident()] * 2) for _ in range(3)]
    assert idents[0] == idents[1] == idents[2]
    assert len(set(idents[0])) == 2


def test_ended_worker_holds_nothing_of_its_run(
    crew: WorkerCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording may end before the thread of its last worker waits for the next run."""
    leave, may_go_on = _Run.leave, threading.Event()

    def leave_and_linger(run: _Run, worker: Worker) -> None:
        leave(run, worker)
        assert may_go_on.wait(30)

    monkeypatch.setattr(_Run, "leave", leave_and_linger)
    given = [torch.ones(2), torch.ones(2)]
    results = crew.run([partial(lambda tensor, worker: tensor + 1, tensor) for tensor in given])
    held = [weakref.ref(tensor) for tensor in given + results]
    del given, results
    left = [ref() for ref in held]
    may_go_on.set()
    assert left == [None] * 4


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Seeing(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_worker_takes_over_what_torch_keeps_for_a_thread(crew: WorkerCrew) -> None:
    def state(worker: Worker) -> Any:
        worker.hand_over("once")
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            VARIABLE.get(),
        )

    def compute(worker: Worker) -> None:
        torch.ones(2).add(1)

    token = VARIABLE.set(3)
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        assert crew.run([state] * 2) == [(False, True, True, torch.float16, 3)] * 2
    VARIABLE.reset(token)
    assert crew.run([state] * 2)[1][:3] == (True, False, False)
    with torch.no_grad():
        assert crew.run([state] * 2)[0][0] is False
    asks = [lambda worker: torch.cuda.is_current_stream_capturing()] * 2
    with report_capturing():
        assert crew.run(asks) == [True, True]
    with Counting() as counting, Seeing() as seeing:
        crew.run([compute] * 2)
    assert counting.count == 4
    assert seeing.seen.count("add") == 2
    crew.run([compute] * 2)
    assert counting.count == 4


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", range(5))
def test_first_error_ends_all_in_index_order(num_workers: int, failing: int, at: int) -> None:
    """``at``: the yield before which it raises; 0 is before the first, 4 after the last."""
    failing = min(failing, num_workers - 1)
    crew, unwound = WorkerCrew(num_workers), list[int]()
    error = KeyError("broken")

    def body(worker: Worker) -> None:
        try:
            for number in range(4):
                if (worker.index, number) == (failing, at):
                    raise error
                worker.hand_over(f"layer{number}")
            if (worker.index, 4) == (failing, at):
                raise error
        finally:
            unwound.append(worker.index)

    try:
        with pytest.raises(KeyError) as caught:
            crew.run([body] * num_workers)
        assert caught.value is error
        place = f"after yield 'layer{at - 1}'" if at else "before its first yield"
        assert caught.value.__notes__ == [f"in micro-batch {failing} of {num_workers}, {place}"]
        others = [index for index in unwound if index != failing]
        assert others == sorted(others)
        # Who has begun, unwinds; who has not, never begins.
        begun = set(range(num_workers)) if at else set(range(failing + 1))
        assert set(unwound) == begun
        assert traced(crew, [1] * num_workers)
    finally:
        crew.close()


def test_worker_that_swallows_the_abort_gets_it_again(crew: WorkerCrew) -> None:
    aborts = []

    def stubborn(worker: Worker) -> None:
        for number in range(3):
            try:
                worker.hand_over(str(number))
            except UBatchAborted as abort:
                aborts.append(abort)
        raise ValueError("late")

    def failing(worker: Worker) -> None:
        raise KeyError("first")

    with pytest.raises(KeyError) as caught:
        crew.run([stubborn, failing])
    assert len(aborts) == 3
    assert "late" in caught.value.__notes__[1]


def test_interrupt_in_the_caller_releases_all(crew: WorkerCrew) -> None:
    main, ended = threading.get_ident(), list[Any]()
    crew.stall_timeout_s = 3600.0  # What is heard before that is no stall.

    def body(worker: Worker) -> None:
        try:
            for _ in range(1_000_000):
                if worker.index == 1 and not ended:
                    ended.append("asked")
                    signal.pthread_kill(main, signal.SIGINT)
                    # Handing over at once would keep the caller waiting for the interpreter lock.
                    assert worker.run is not None
                    assert any(worker.run.is_aborting for _ in range(10**8))
                worker.hand_over("round")
        finally:
            ended.append(worker.index)

    with pytest.raises(KeyboardInterrupt):
        crew.run([body] * 2)
    assert sorted(ended[1:]) == [0, 1]
    assert traced(crew, [1, 1])


@pytest.mark.parametrize("line", [0, 1, 2, 3, 4, 7])
def test_interrupt_at_the_start_leaves_no_worker_running(crew: WorkerCrew, line: int) -> None:
    lines, before = list[int](), sys.gettrace()

    def interrupt(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not WorkerCrew._wait.__code__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == line + 1:
                raise KeyboardInterrupt
        return interrupt

    assert traced(crew, [1, 1])
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            crew.run([lambda worker: worker.hand_over("round")] * 2)
    finally:
        sys.settrace(before)
    assert traced(crew, [2, 2])


def test_stuck_worker_is_named_and_replaced() -> None:
    crew, free = WorkerCrew(2, stall_timeout_s=0.2), threading.Event()
    unwound = []
    threads: list[threading.Thread] = []

    def stuck(worker: Worker) -> None:
        threads.append(threading.current_thread())
        worker.stream = "compute"
        worker.hand_over("layer0")
        free.wait()

    def parked(worker: Worker) -> None:
        try:
            worker.hand_over("layer0")
            worker.hand_over("layer1")
        finally:
            unwound.append(worker.index)

    try:
        with pytest.raises(UBatchDeadlockError) as caught:
            crew.run([stuck, parked])
        found = caught.value.found
        assert "micro-batch 0 (holds the baton, after yield 'layer0', on stream 'compute')" in found
        assert "free.wait()" in found
        assert "micro-batch 1 (parked" in found
        assert unwound == [1]
        assert crew.num_abandoned == 1
        assert traced(crew, [2, 2])
    finally:
        free.set()
        crew.close()
        threads[0].join()


def test_second_thread_is_refused(crew: WorkerCrew) -> None:
    refused = []

    def inside(worker: Worker) -> None:
        try:
            crew.run([lambda worker: None] * 2)
        except UBatchBusyError as error:
            refused.append(error)

    crew.run([inside, inside])
    assert len(refused) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_makes_threads_of_its_own(crew: WorkerCrew) -> None:
    crew.run([lambda worker: None] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0 if crew.run([lambda worker: worker.index] * 2) == [0, 1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""The capture scope: what it changes while it is open, and the phases of a set of jobs."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from graph_lab import FULL, KEY, NONE, PIECEWISE, Lab
from torch import Tensor

from graphrt.batch import BatchDescriptor
from graphrt.context import ForwardContext, get_forward_context
from graphrt.errors import (
    AmbientError,
    CaptureFuseError,
    CaptureInProgressError,
    ConfigError,
    EmptyCaptureError,
    ForbiddenOperationError,
    FrozenBufferError,
    GraphMemoryError,
    LibraryClosedError,
)
from graphrt.events import Captured, CaptureFailed
from graphrt.graphs import (
    CaptureJob,
    GraphBudget,
    Workspace,
    break_point,
    forbid_in_capture,
)
from graphrt.graphs.collection import MOST_IMMORTAL, is_heap_frozen


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture
def thawed() -> Iterator[None]:
    """A heap as a program has it: nothing frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


class Log:
    """A resource and target that write down what happens, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def reserve(self, max_key: BatchDescriptor) -> None:
        self.lines.append(f"reserve {max_key.num_tokens}")

    def prepare(self, key: BatchDescriptor, live: Any) -> None:
        self.lines.append(f"prepare {key.num_tokens} {live}")

    def freeze(self) -> None:
        self.lines.append("freeze")


def keys(*sizes: int) -> list[BatchDescriptor]:
    return [BatchDescriptor(size) for size in sizes]


def test_everything_is_restored_also_after_an_error(lab: Lab) -> None:
    for fails in (False, True):
        caller = lab.device.stream("caller")
        with lab.device.use(caller), ForwardContext(FULL, KEY) as outer:
            try:
                with lab.library.capture_scope() as scope:
                    assert lab.device.current_stream() is not caller
                    assert get_forward_context().capture_scope is scope
                    assert get_forward_context().cudagraph_runtime_mode is NONE
                    assert not gc.isenabled()
                    if fails:
                        raise ValueError("in the scope")
            except ValueError:
                assert fails
            assert lab.device.current_stream() is caller
            assert get_forward_context() is outer
            assert gc.isenabled()
        assert not lab.library.has_open_scope


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.usefixtures("thawed")
def test_bug_class_17_the_collector_is_left_exactly_as_it_was(
    enabled: bool, frozen: bool, fails: bool
) -> None:
    with Lab() as lab:
        if frozen:
            gc.freeze()
        if not enabled:
            gc.disable()
        num_frozen = gc.get_freeze_count()
        try:
            with lab.library.capture_scope() as scope, scope.step(FULL, KEY):
                assert not gc.isenabled()
                assert is_heap_frozen()
                wrapper = lab.wrap(lambda x: x.item() if fails else x + 1)
                wrapper(torch.ones(1))
        except ForbiddenOperationError:
            assert fails
        assert gc.isenabled() is enabled
        # Frozen objects may die; none may join them.
        assert gc.get_freeze_count() <= num_frozen + MOST_IMMORTAL
        assert is_heap_frozen() is frozen
        gc.enable()
        gc.unfreeze()


class Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("thawed")
def test_a_scope_collects_what_it_made_and_does_not_walk_the_old_heap_again() -> None:
    was_aside: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            was_aside.append(is_heap_frozen())

    with Lab() as lab:
        old = weakref.ref(Node())
        gc.callbacks.append(note)
        try:
            with lab.library.capture_scope():
                assert old() is None, "collected on entry"
                made = weakref.ref(Node())
                assert made() is not None
                was_aside.clear()
        finally:
            gc.callbacks.remove(note)
        assert made() is None
        assert was_aside == [True]


@pytest.mark.usefixtures("thawed")
def test_two_overlapping_scopes_of_two_libraries_share_one_pause() -> None:
    with Lab() as one, Lab() as two:
        first, second = one.library.capture_scope(), two.library.capture_scope()
        first.__enter__()
        other = contextvars.copy_context()
        other.run(second.__enter__)
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        other.run(second.__exit__, None, None, None)
    assert gc.isenabled()
    assert not is_heap_frozen()


@pytest.mark.usefixtures("thawed")
def test_a_pause_that_another_thread_ended_is_not_ended_again() -> None:
    """A scope enters and leaves while the last one out collects, and a third one follows it."""
    with Lab() as one, Lab() as two, Lab() as three:
        third, elsewhere = three.library.capture_scope(), contextvars.Context()

        class Meets:
            """Dies in the collection of the scope that made it."""

            def __init__(self) -> None:
                self.itself = self

            def __del__(self) -> None:
                def others() -> None:
                    with two.library.capture_scope():
                        pass
                    third.__enter__()

                elsewhere.run(others)

        with one.library.capture_scope():
            Meets()
        assert three.library.has_open_scope
        assert not gc.isenabled()
        assert is_heap_frozen()
        elsewhere.run(third.__exit__, None, None, None)
    assert gc.isenabled()
    assert not is_heap_frozen()


def test_the_capture_stream_comes_after_the_caller_and_the_caller_after_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[tuple[object, object]] = []
    monkeypatch.setattr(lab.device, "order", lambda after, before: orders.append((after, before)))
    caller, stream = lab.device.current_stream(), lab.library.generations[0].stream
    with lab.library.capture_scope():
        assert orders == [(stream, caller)]
    assert orders == [(stream, caller), (caller, stream)]


def test_one_scope_at_a_time_and_none_after_close(lab: Lab) -> None:
    with lab.library.capture_scope():
        with pytest.raises(CaptureInProgressError), lab.library.capture_scope():
            pass
        with pytest.raises(CaptureInProgressError):
            lab.library.close()
        with Lab(lab.device) as other, other.library.capture_scope():
            pass
    lab.library.close()
    with pytest.raises(LibraryClosedError), lab.library.capture_scope():
        pass


def test_phases_reserve_warm_everything_freeze_then_capture_in_order(lab: Lab) -> None:
    log = Log()
    wrapper = lab.wrap(lambda x: log.lines.append("run") or x + 1)

    def make(size: int) -> Any:
        x = torch.ones(size)
        return lambda: (log.lines.append(f"inputs {size}"), (((x,), {})))[1]

    jobs = [CaptureJob(wrapper, FULL, key, make(key.num_tokens)) for key in keys(4, 8)]
    report = lab.capture_all(*jobs, resources=[log], warmups=2)
    warm = [["inputs 4", "prepare 4 None", "run"] * 2, ["inputs 8", "prepare 8 None", "run"] * 2]
    captures = [["inputs 4", "prepare 4 None", "run"], ["inputs 8", "prepare 8 None", "run"]]
    expected = ["reserve 8", *chain(*warm), "freeze", *chain(*captures)]
    assert log.lines == expected
    assert [program.key.num_tokens for program in report.programs] == [4, 8]
    assert list(report.seconds) == jobs
    assert not report.failures
    assert not report.skipped


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_warmups_are_honoured_and_only_the_last_answers_capture(lab: Lab, warmups: int) -> None:
    answers: list[bool] = []

    def model(x: Tensor) -> Tensor:
        try:
            answers.append(torch.cuda.is_current_stream_capturing())
        except RuntimeError:  # a CPU build of torch, asked outside window and last warm-up
            answers.append(False)
        return x + 1

    lab.capture_all(lab.job(lab.wrap(model), torch.ones(2)), warmups=warmups)
    expected = [False] * (warmups - 1) + [True] * min(warmups, 1) + [True]
    assert answers == expected
    with pytest.raises(ConfigError):
        lab.library.capture_scope(warmups=-1)


def test_progress_is_told_after_each_job(lab: Lab) -> None:
    told: list[tuple[int, int, int]] = []
    wrapper = lab.wrap(lambda x: x + 1)
    jobs = [lab.job(wrapper, torch.ones(key.num_tokens), key=key) for key in keys(8, 4)]
    lab.capture_all(*jobs, progress=lambda *at: told.append((*at[:2], at[2].key.num_tokens)))
    assert told == [(1, 2, 8), (2, 2, 4)]


def test_a_gate_keeps_step_skips_and_drops(lab: Lab) -> None:
    seen: list[tuple[int, str]] = []

    def gate(job: CaptureJob, phase: str) -> bool:
        seen.append((job.key.num_tokens, phase))
        return (job.key.num_tokens, phase) not in [(8, "warmup"), (4, "capture"), (2, "captured")]

    wrapper = lab.wrap(lambda x: x + 1 if len(x) > 1 else x.item())
    jobs = [lab.job(wrapper, torch.ones(key.num_tokens), key=key) for key in keys(8, 4, 2, 1, 3)]
    report = lab.capture_all(*jobs, gate=gate, on_error="skip")
    assert [job.key.num_tokens for job in report.skipped] == [8, 4, 2]
    assert [failure.key.num_tokens for failure in report.failures] == [1]
    assert [program.key.num_tokens for program in report.programs] == [3]
    assert list(wrapper.concrete_cudagraph_entries) == keys(3)
    assert seen == [
        (8, "warmup"),
        (4, "warmup"),
        (2, "warmup"),
        (1, "warmup"),
        (3, "warmup"),
        (4, "capture"),
        (2, "capture"),
        (2, "captured"),
        (1, "capture"),
        (1, "failed"),
        (3, "capture"),
        (3, "captured"),
    ]
    assert lab.library.num_graphs == 1


def test_a_job_whose_mode_no_wrapper_matches_is_empty(lab: Lab) -> None:
    job = CaptureJob(lab.wrap(abs, PIECEWISE), FULL, KEY, lambda: ((torch.ones(1),), {}))
    with pytest.raises(EmptyCaptureError, match="FULL"):
        lab.capture_all(job)


def test_bug_class_13_other_modes_at_capture_than_at_warm_up_are_refused(lab: Lab) -> None:
    wrapper, x = lab.wrap(lambda x: x @ x), torch.ones(2, 2)
    with lab.library.capture_scope() as scope:
        with scope.step(NONE, KEY):
            wrapper(x)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(AmbientError, match="autocast"),
            scope.step(FULL, KEY),
        ):
            wrapper(x)
        with scope.step(FULL, KEY):
            wrapper(x)
    assert KEY in wrapper.concrete_cudagraph_entries


def test_bug_class_13_a_callable_that_initialises_late_is_stopped(lab: Lab) -> None:
    ready: set[tuple[str, torch.Size]] = set()

    def model(x: Tensor) -> Tensor:
        place = (lab.device.current_stream().name, x.shape)
        if place not in ready:
            forbid_in_capture("building the plan")
            ready.add(place)
        return x + 1

    wrapper = lab.wrap(model)
    with pytest.raises(Exception, match="building the plan"):
        lab.capture(wrapper, torch.ones(2))
    lab.library.forget_failures()
    model(torch.ones(2))
    lab.capture_all(lab.job(wrapper, torch.ones(2)), warmups=1)
    assert KEY in wrapper.concrete_cudagraph_entries


def test_grad_mode_is_refused_at_warm_up_and_at_capture(lab: Lab) -> None:
    wrapper, x = lab.wrap(lambda x: x + 1), torch.ones(2)
    with torch.enable_grad():
        for warmups in (0, 1):
            with pytest.raises(AmbientError, match="grad"):
                lab.capture_all(lab.job(wrapper, x), warmups=warmups)
            lab.library.forget_failures()


def test_bug_class_7_a_failed_key_is_not_tried_again_until_forgotten(lab: Lab) -> None:
    calls = []

    def model(x: Tensor) -> Tensor:
        calls.append(1)
        return x * x.sum().item() if len(x) == 4 else x + 1

    wrapper = lab.wrap(model, name="model")
    jobs = [lab.job(wrapper, torch.ones(key.num_tokens), key=key) for key in keys(4, 2)]
    with lab.library.capture_scope(on_error="skip", warmups=0) as scope:
        for _ in range(100):
            report = scope.capture_all(jobs)
            assert [f.key.num_tokens for f in report.failures] == [4]
    assert len(calls) == 2
    [record] = lab.library.failures
    assert (record.owner, record.mode, record.key) == ("model", FULL, BatchDescriptor(4))
    assert record.error.__traceback__ is None
    assert [type(e) for e in lab.events].count(CaptureFailed) == 1
    with pytest.raises(type(record.error)):
        lab.capture(wrapper, torch.ones(4), key=BatchDescriptor(4))
    assert len(calls) == 2
    lab.library.forget_failures()
    with pytest.raises(type(record.error)):
        lab.capture(wrapper, torch.ones(4), key=BatchDescriptor(4))
    assert len(calls) == 3


def test_three_failures_in_a_row_open_the_fuse(lab: Lab) -> None:
    calls = []

    def model(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x * x.sum().item() if len(x) != 5 else x + 1

    wrapper = lab.wrap(model)
    jobs = [lab.job(wrapper, torch.ones(k.num_tokens), key=k) for k in keys(9, 8, 5, 7, 6, 4, 3, 2)]
    report = lab.capture_all(*jobs, on_error="skip", warmups=0)
    assert calls == [9, 8, 5, 7, 6, 4]
    assert [f.key.num_tokens for f in report.failures] == [9, 8, 7, 6, 4, 3, 2]
    assert [isinstance(f.error, CaptureFuseError) for f in report.failures] == [False] * 5 + [
        True
    ] * 2
    with pytest.raises(CaptureFuseError):
        lab.capture(wrapper, torch.ones(5), key=BatchDescriptor(50))
    lab.library.forget_failures()
    lab.capture(wrapper, torch.ones(5), key=BatchDescriptor(50))


def test_a_failing_warm_up_is_a_failure_of_its_job_alone(lab: Lab) -> None:
    def model(x: Tensor) -> Tensor:
        if len(x) == 4:
            raise ValueError("no such size")
        return x + 1

    wrapper = lab.wrap(model)
    jobs = [lab.job(wrapper, torch.ones(k.num_tokens), key=k) for k in keys(8, 4, 2)]
    report = lab.capture_all(*jobs, on_error="skip")
    assert [p.key.num_tokens for p in report.programs] == [8, 2]
    [failure] = report.failures
    assert isinstance(failure.error, ValueError)


def test_programs_of_a_job_that_failed_later_are_dropped(lab: Lab) -> None:
    first, second = lab.wrap(lambda x: x + 1), lab.wrap(lambda x: x * x.sum().item())

    def target(x: Tensor) -> Tensor:
        return second(first(x))

    job = CaptureJob(target, FULL, KEY, lambda: ((torch.ones(2),), {}))
    with pytest.raises(Exception, match="item"):
        lab.capture_all(job, warmups=0)
    assert not first.concrete_cudagraph_entries
    assert lab.library.num_graphs == 0


def test_a_graph_budget_is_an_error_or_a_record(lab: Lab) -> None:
    for on_error in ("raise", "skip"):
        with Lab(budget=GraphBudget(max_graphs=2)) as small:
            wrapper = small.wrap(lambda x: x + 1)
            jobs = [small.job(wrapper, torch.ones(k.num_tokens), key=k) for k in keys(8, 4, 2, 1)]
            if on_error == "raise":
                with pytest.raises(GraphMemoryError):
                    small.capture_all(*jobs)
            else:
                report = small.capture_all(*jobs, on_error="skip")
                assert [f.key.num_tokens for f in report.failures] == [2, 1]
            assert list(wrapper.concrete_cudagraph_entries) == keys(8, 4)
            assert small.library.num_graphs == 2


def test_a_byte_budget_resets_what_ended_above_it(lab: Lab) -> None:
    probe = lab.wrap(lambda x: x + 1)
    lab.capture(probe, torch.ones(8))
    one = lab.library.charged_bytes
    assert lab.library.admit(10**12)
    with Lab(budget=GraphBudget(max_bytes=one)) as small:
        wrapper, x = small.wrap(lambda x: x + 1), torch.ones(8)
        small.capture(wrapper, x)
        assert small.library.admit(0)
        assert not small.library.admit(1)
        big = BatchDescriptor(1000)
        with pytest.raises(GraphMemoryError):
            small.capture(wrapper, torch.ones(1000), key=big)
        assert list(wrapper.concrete_cudagraph_entries) == [KEY]
        assert small.library.num_graphs == 1
        assert torch.equal(small.step(wrapper, x), x + 1)


def test_bug_class_10_a_workspace_may_not_grow_between_warm_up_and_capture(lab: Lab) -> None:
    workspace = Workspace("scratch")
    sizes = iter([8, 16])

    def model(x: Tensor) -> Tensor:
        return x + workspace.get((next(sizes),), torch.float32)[: len(x)]

    with pytest.raises(FrozenBufferError):
        lab.capture_all(lab.job(lab.wrap(model), torch.ones(2)), resources=[workspace])
    assert workspace.is_frozen
    lab.library.retire()
    assert not workspace.is_frozen


def test_two_threads_each_with_its_own_library_do_not_meet() -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(2, timeout=30)

    def work(seed: int) -> None:
        try:
            with Lab() as lab:
                gap = break_point(lambda x: x * 3)
                wrapper = lab.wrap(lambda x: gap(x + seed) + 1, PIECEWISE)
                x = torch.zeros(4)
                barrier.wait()
                for size in range(1, 6):
                    lab.capture(wrapper, x, key=BatchDescriptor(size))
                for size in range(1, 6):
                    x.fill_(size)
                    out = lab.step(wrapper, x, mode=PIECEWISE, key=BatchDescriptor(size))
                    assert torch.equal(out, (x + seed) * 3 + 1)
                assert lab.library.num_cudagraph_captured == 10
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert gc.isenabled()


def test_a_new_thread_has_no_permission(lab: Lab) -> None:
    found: list[object] = []
    with lab.library.capture_scope():
        thread = threading.Thread(target=lambda: found.append(get_forward_context()))
        thread.start()
        thread.join()
    assert found == [None]


def test_bug_class_25_ascending_order_works_and_its_growth_shows() -> None:
    peaks, grown = [], []
    for order in ((64, 32, 16, 8), (8, 16, 32, 64)):
        with Lab() as lab:
            wrapper = lab.wrap(lambda x: ((x + 1) * 2).relu() - 3)
            inputs = {size: torch.randn(size, 16) for size in order}
            jobs = [lab.job(wrapper, inputs[k.num_tokens], key=k) for k in keys(*order)]
            lab.capture_all(*jobs)
            [generation] = lab.library.generations
            peaks.append(generation.pool.bytes())
            events = [event for event in lab.events if isinstance(event, Captured)]
            grown.append([event.pool_growth_bytes > 0 for event in events])
            for key in keys(*order):
                x = inputs[key.num_tokens]
                assert torch.equal(lab.step(wrapper, x, key=key), ((x + 1) * 2).relu() - 3)
    assert peaks[1] >= peaks[0]
    assert grown[0] == [True, False, False, False]
    assert sum(grown[1]) > 1

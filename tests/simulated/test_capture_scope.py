"""The capture scope: what it changes while it is open, and the phases of a set of jobs."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from graphrt import (
    BatchDescriptor,
    CaptureJob,
    ForwardContext,
    GraphBudget,
    Workspace,
    break_point,
    capture_all,
    get_forward_context,
)
from graphrt.errors import (
    CaptureInProgressError,
    ConfigError,
    EmptyCaptureError,
    EnvironmentMismatchError,
    FrozenBufferError,
    GraphMemoryError,
    LibraryClosedError,
    TooManyFailuresError,
)
from graphrt.events import CaptureFailed
from graphrt.gc_pause import is_heap_frozen
from lab import FULL, KEY, NONE, PIECEWISE, Lab, Tally


class Log:
    """A resource and target that write down what happens, in order."""

    def __init__(self) -> None:
        self.note = Mock()  # No list: that would be put back.

    @property
    def lines(self) -> list[str]:
        return [call.args[0] for call in self.note.call_args_list]

    def reserve(self, max_key: BatchDescriptor) -> None:
        self.note(f"reserve {max_key.num_tokens}")

    def prepare(self, key: BatchDescriptor, step_info: Any) -> None:
        self.note(f"prepare {key.num_tokens} {step_info}")

    def freeze(self) -> None:
        self.note("freeze")


def keys(*sizes: int) -> list[BatchDescriptor]:
    return [BatchDescriptor(size) for size in sizes]


def test_scope_exit_restores_everything_also_after_an_error(lab: Lab) -> None:
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
        assert lab.library.scope is None


class Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_scope_exit_collects_only_what_the_scope_made() -> None:
    was_frozen: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            was_frozen.append(is_heap_frozen())

    with Lab(frozen=False) as lab:
        old = weakref.ref(Node())
        gc.callbacks.append(note)
        try:
            with lab.library.capture_scope():
                assert old() is None, "collected on entry"
                made = weakref.ref(Node())
                assert made() is not None
                was_frozen.clear()
        finally:
            gc.callbacks.remove(note)
        assert made() is None
        assert was_frozen == [True]


@pytest.mark.usefixtures("usual_heap")
def test_scopes_that_overlap_share_one_collector_pause() -> None:
    with Lab(frozen=False) as one, Lab(frozen=False) as two:
        first, second = one.library.capture_scope(), two.library.capture_scope()
        first.__enter__()
        other = contextvars.copy_context()
        other.run(second.__enter__)
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        other.run(second.__exit__, None, None, None)
    assert gc.isenabled()
    assert not is_heap_frozen()


@pytest.mark.usefixtures("usual_heap")
def test_scope_opened_in_a_finaliser_keeps_the_collector_off() -> None:
    """A scope enters and leaves while the last one out collects, and a third one follows it."""
    with Lab(frozen=False) as one, Lab(frozen=False) as two, Lab(frozen=False) as three:
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
        assert three.library.scope is not None
        assert not gc.isenabled()
        assert is_heap_frozen()
        elsewhere.run(third.__exit__, None, None, None)
    assert gc.isenabled()
    assert not is_heap_frozen()


def test_scope_orders_its_stream_and_the_callers(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[tuple[object, object]] = []
    monkeypatch.setattr(lab.device, "order", lambda after, before: orders.append((after, before)))
    caller = lab.device.current_stream()
    with lab.library.capture_scope() as scope:
        stream = scope.stream
        assert stream is not caller
        assert orders == [(stream, caller)]
    assert orders == [(stream, caller), (caller, stream)]


def test_scope_on_a_given_stream_warms_up_and_captures_there(lab: Lab) -> None:
    stream, seen = lab.device.stream("engine"), Mock()

    def fn(x: Tensor) -> Tensor:
        seen(lab.device.current_stream())
        return x + 1

    x = torch.ones(2)
    wrapper = lab.wrap(fn)
    lab.capture_all(lab.job(wrapper, x), stream=stream)
    assert [call.args[0] for call in seen.call_args_list] == [stream] * 2
    assert lab.device.current_stream() is not stream
    assert torch.equal(lab.step(wrapper, x), x + 1)
    lab.library.close()
    assert lab.device.adopt_stream(stream) is stream


def test_scope_on_a_stream_of_another_device_is_refused(lab: Lab) -> None:
    lab.device.stream("engine")
    with Lab() as other:
        for wrong in (other.device.stream("engine"), lab.device.current_stream(), "engine"):
            with pytest.raises(ConfigError, match="stream"):
                lab.library.capture_scope(stream=wrong)
    with lab.library.capture_scope():
        pass


def test_scope_inside_a_scope_or_after_close_is_refused(lab: Lab) -> None:
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


def test_jobs_reserve_warm_up_freeze_then_capture_in_order(lab: Lab) -> None:
    log = Log()
    wrapper = lab.wrap(lambda x: (log.note("run"), x + 1)[1])

    def make(size: int) -> Any:
        x = torch.ones(size)
        return lambda: (log.note(f"inputs {size}"), (((x,), {})))[1]

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


class Prepared:
    """A resource with ``prepare`` and what each subclass adds; writes down every call."""

    def __init__(self) -> None:
        self.note = Mock()  # No list: that would be put back.

    @property
    def lines(self) -> list[str]:
        return [call.args[0] for call in self.note.call_args_list]

    def prepare(self, key: BatchDescriptor, step_info: Any) -> None:
        self.note(f"prepare {key.num_tokens}")


class PreparedOnce(Prepared):
    def prepare_for_capture(self, key: BatchDescriptor) -> None:
        self.note(f"once {key.num_tokens}")


def test_resource_with_prepare_alone_is_enough(lab: Lab) -> None:
    resource, wrapper = Prepared(), lab.wrap(lambda x: x + 1)
    lab.capture_all(lab.job(wrapper, torch.ones(2)), resources=[resource])
    assert resource.lines == ["prepare 8"] * 2
    with pytest.raises(ConfigError, match=r"prepare\(key, step_info\)"):
        lab.library.capture_scope(resources=[object()])
    with pytest.raises(ConfigError, match="list"):
        lab.library.capture_scope(resources=resource)


def test_resource_hears_of_each_key_once_before_its_warm_up(lab: Lab) -> None:
    resource, x = PreparedOnce(), torch.ones(2)
    wrapper = lab.wrap(lambda x: x + 1)
    four, two = (lab.job(wrapper, x, key=key) for key in keys(4, 2))
    lab.capture_all(four, two, resources=[resource], warmups=2)
    assert resource.lines == [
        *["once 4", "prepare 4", "prepare 4", "once 2", "prepare 2", "prepare 2"],
        *["prepare 4", "prepare 2"],
    ]
    resource.note.reset_mock()
    lab.library.retire()
    lab.capture_all(four, resources=[resource], warmups=0)
    assert resource.lines == ["prepare 4"]
    # By hand: prepared by the caller, but told of a new key all the same.
    resource.note.reset_mock()
    lab.capture(
        wrapper, x, key=BatchDescriptor(1), scope={"resources": [resource], "checks": "none"}
    )
    assert resource.lines == ["once 1"]


def test_resource_that_fails_for_a_key_is_asked_again(lab: Lab) -> None:
    resource, wrapper = PreparedOnce(), lab.wrap(lambda x: x + 1)
    job = lab.job(wrapper, torch.ones(2))
    resource.note.side_effect = [OSError("no plan"), None, None, None]
    with pytest.raises(OSError, match="no plan"):
        lab.capture_all(job, resources=[resource])
    lab.library.forget_failures()
    lab.capture_all(job, resources=[resource])
    assert resource.lines == ["once 8", "once 8", "prepare 8", "prepare 8"]


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_warmups_run_and_only_the_last_reports_capturing(lab: Lab, warmups: int) -> None:
    answers = Tally()

    def model(x: Tensor) -> Tensor:
        try:
            answers.append(torch.cuda.is_current_stream_capturing())
        except RuntimeError:  # a CPU build of torch, asked outside a recording and the last warm-up
            answers.append(False)
        return x + 1

    lab.capture_all(lab.job(lab.wrap(model), torch.ones(2)), warmups=warmups)
    expected = [False] * (warmups - 1) + [True] * min(warmups, 1) + [True]
    assert list(answers) == expected
    with pytest.raises(ConfigError):
        lab.library.capture_scope(warmups=-1)


def test_jobs_progress_is_called_after_each(lab: Lab) -> None:
    reported: list[tuple[int, int, int]] = []
    wrapper = lab.wrap(lambda x: x + 1)
    jobs = [lab.job(wrapper, torch.ones(key.num_tokens), key=key) for key in keys(8, 4)]
    lab.capture_all(*jobs, progress=lambda *at: reported.append((*at[:2], at[2].key.num_tokens)))
    assert reported == [(1, 2, 8), (2, 2, 4)]


def test_jobs_gate_skips_and_drops(lab: Lab) -> None:
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
        *((tokens, phase) for tokens in (4, 2, 1, 3) for phase in ("warmup", "warmed")),
        (4, "capture"),
        (2, "capture"),
        (2, "captured"),
        (1, "capture"),
        (1, "failed"),
        (3, "capture"),
        (3, "captured"),
    ]
    assert lab.library.num_graphs == 1


def test_job_whose_mode_no_wrapper_matches_is_empty(lab: Lab) -> None:
    job = CaptureJob(lab.wrap(abs, PIECEWISE), FULL, KEY, lambda: ((torch.ones(1),), {}))
    with pytest.raises(EmptyCaptureError, match="FULL"):
        lab.capture_all(job)


def test_grad_mode_at_warm_up_or_capture_is_refused(lab: Lab) -> None:
    wrapper, x = lab.wrap(lambda x: x + 1), torch.ones(2)
    with torch.enable_grad():
        for warmups in (0, 1):
            with pytest.raises(EnvironmentMismatchError, match="grad"):
                lab.capture_all(lab.job(wrapper, x), warmups=warmups)
            lab.library.forget_failures()


def test_capture_in_another_environment_is_no_failure_of_its_key(lab: Lab) -> None:
    wrapper, x = lab.wrap(lambda x: x + 1), torch.ones(2)
    with torch.enable_grad(), pytest.raises(EnvironmentMismatchError, match="grad"):
        lab.capture(wrapper, x)
    assert not lab.library.failures
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), x + 1)


def test_failed_key_is_not_tried_again_until_forgotten(lab: Lab) -> None:
    calls = Tally()

    def model(x: Tensor) -> Tensor:
        calls.append(1)
        return x * x.sum().item() if len(x) == 4 else x + 1

    wrapper = lab.wrap(model, name="model")
    jobs = [lab.job(wrapper, torch.ones(key.num_tokens), key=key) for key in keys(4, 2)]
    with lab.library.capture_scope(on_error="skip", warmups=0) as scope:
        for _ in range(100):
            report = capture_all(scope.library, jobs)
            assert [f.key.num_tokens for f in report.failures] == [4]
    assert len(calls) == 2
    [record] = lab.library.failures
    assert (record.owner, record.mode, record.key) == ("model", FULL, BatchDescriptor(4))
    assert record.error.__traceback__ is None
    kind = type(record.error)
    assert [type(e) for e in lab.events].count(CaptureFailed) == 1
    with pytest.raises(kind):
        lab.capture(wrapper, torch.ones(4), key=BatchDescriptor(4))
    assert len(calls) == 2
    lab.library.forget_failures()
    with pytest.raises(kind):
        lab.capture(wrapper, torch.ones(4), key=BatchDescriptor(4))
    assert len(calls) == 3


def test_three_failures_in_a_row_give_up_the_owner(lab: Lab) -> None:
    calls = Tally()

    def model(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x * x.sum().item() if len(x) != 5 else x + 1

    wrapper = lab.wrap(model)
    jobs = [lab.job(wrapper, torch.ones(k.num_tokens), key=k) for k in keys(9, 8, 5, 7, 6, 4, 3, 2)]
    report = lab.capture_all(*jobs, on_error="skip", warmups=0)
    assert list(calls) == [9, 8, 5, 7, 6, 4]
    assert [f.key.num_tokens for f in report.failures] == [9, 8, 7, 6, 4, 3, 2]
    assert [isinstance(f.error, TooManyFailuresError) for f in report.failures] == [False] * 5 + [
        True
    ] * 2
    with pytest.raises(TooManyFailuresError):
        lab.capture(wrapper, torch.ones(5), key=BatchDescriptor(50))
    lab.library.forget_failures()
    lab.capture(wrapper, torch.ones(5), key=BatchDescriptor(50))


def test_warm_up_that_fails_fails_its_job_alone(lab: Lab) -> None:
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


def test_job_that_fails_later_drops_its_programs(lab: Lab) -> None:
    first, second = lab.wrap(lambda x: x + 1), lab.wrap(lambda x: x * x.sum().item())

    def target(x: Tensor) -> Tensor:
        return second(first(x))

    job = CaptureJob(target, FULL, KEY, lambda: ((torch.ones(2),), {}))
    with pytest.raises(Exception, match="item"):
        lab.capture_all(job, warmups=0)
    assert not first.concrete_cudagraph_entries
    assert lab.library.num_graphs == 0


def test_graph_budget_exceeded_is_an_error_or_a_record(lab: Lab) -> None:
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


def test_byte_budget_exceeded_resets_the_program(lab: Lab) -> None:
    probe = lab.wrap(lambda x: x + 1)
    lab.capture(probe, torch.ones(8))
    one = lab.library.charged_bytes
    assert lab.library.fits_budget(10**12)
    with Lab(budget=GraphBudget(max_bytes=one)) as small:
        wrapper, x = small.wrap(lambda x: x + 1), torch.ones(8)
        small.capture(wrapper, x)
        assert small.library.fits_budget(0)
        assert not small.library.fits_budget(1)
        big = BatchDescriptor(1000)
        with pytest.raises(GraphMemoryError):
            small.capture(wrapper, torch.ones(1000), key=big)
        assert list(wrapper.concrete_cudagraph_entries) == [KEY]
        assert small.library.num_graphs == 1
        assert torch.equal(small.step(wrapper, x), x + 1)


def test_workspace_growth_after_warm_up_is_refused(lab: Lab) -> None:
    workspace = Workspace("scratch")
    sizes = iter([8, 16])

    def model(x: Tensor) -> Tensor:
        return x + workspace.get((next(sizes),), torch.float32)[: len(x)]

    with pytest.raises(FrozenBufferError):
        lab.capture_all(lab.job(lab.wrap(model), torch.ones(2)), resources=[workspace])
    assert workspace.is_frozen
    lab.library.retire()
    assert not workspace.is_frozen


def test_threads_with_a_library_each_do_not_interfere() -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(2, timeout=30)

    def work(seed: int) -> None:
        try:
            with Lab() as lab:
                eager = break_point(lambda x: x * 3)
                wrapper = lab.wrap(lambda x: eager(x + seed) + 1, PIECEWISE)
                x = torch.zeros(4)
                barrier.wait()
                for size in range(1, 6):
                    lab.capture(wrapper, x, key=BatchDescriptor(size))
                for size in range(1, 6):
                    x.fill_(size)
                    out = lab.step(wrapper, x, key=BatchDescriptor(size))
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


def test_thread_started_in_a_scope_has_no_context(lab: Lab) -> None:
    found: list[object] = []
    with lab.library.capture_scope():
        thread = threading.Thread(target=lambda: found.append(get_forward_context()))
        thread.start()
        thread.join()
    assert found == [None]


def test_step_of_a_mode_by_name_is_refused():
    with (
        Lab() as lab,
        lab.library.capture_scope() as scope,
        pytest.raises(ConfigError, match="mode of a step"),
        scope.step("FULL", KEY),
    ):
        pass

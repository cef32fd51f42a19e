"""Two devices, two threads: neither sees what the other records."""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_recording import record, same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphrt.device.simulated import SimulatedDevice
from graphrt.device.simulated.ops import Operators
from graphrt.errors import CaptureInProgressError, ForbiddenOperationError


def in_thread(work: Any, *, context: contextvars.Context | None = None) -> Any:
    """Run ``work`` in another thread; its result, or its error raised here."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((context.run(work) if context else work(), None))
        except BaseException as error:  # noqa: BLE001  # handed to the caller below
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def test_device_is_made_with_the_collector_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports first lives on."""
    enabled, make = [], FakeTensorMode.__init__
    monkeypatch.setattr(
        FakeTensorMode,
        "__init__",
        lambda mode, **options: (enabled.append(gc.isenabled()), make(mode, **options))[1],
    )
    SimulatedDevice().close()
    assert enabled == [False]
    assert gc.isenabled()


def test_two_devices_share_nothing() -> None:
    one, two = SimulatedDevice(), SimulatedDevice()
    x = torch.ones(4)
    first, mine = record(one, one.new_pool(), lambda: x + 1)
    second, theirs = record(two, two.new_pool(), lambda: mine * 3)
    assert one.owns(mine)
    assert not one.owns(theirs)
    assert two.weak_alias(mine) is mine
    assert [use.tensor is mine for use in second.externals] == [True]
    first.replay()
    second.replay()
    assert theirs.tolist() == [6.0] * 4
    two.close()
    first.replay()
    assert mine.tolist() == [2.0] * 4
    one.close()


def test_shapes_known_from_one_device_are_asked_for_on_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = SimulatedDevice(), SimulatedDevice()
    x = torch.ones(3, 5, 7)
    record(one, one.new_pool(), lambda: (x + 1).sum(2))
    monkeypatch.setattr(Operators, "_infer", lambda *_: pytest.fail("asked again"))
    graph, result = record(two, two.new_pool(), lambda: (x + 1).sum(2))
    graph.replay()
    assert same(result, (x + 1).sum(2))
    one.close()
    two.close()


def test_results_are_of_the_default_type_of_their_recording() -> None:
    devices = SimulatedDevice(), SimulatedDevice()
    whole, before = torch.arange(1, 6), torch.get_default_dtype()
    try:
        for device, dtype in zip(devices, (torch.float32, torch.float64), strict=True):
            torch.set_default_dtype(dtype)
            graph, result = record(device, device.new_pool(), lambda: whole / 3)
            graph.replay()
            assert same(result, whole / 3)
            device.close()
    finally:
        torch.set_default_dtype(before)


def test_generator_of_a_known_operator_is_not_kept() -> None:
    generator = torch.Generator()
    kept = weakref.ref(generator)
    drawn = torch.ops.aten.bernoulli.default
    Operators().results(drawn, (torch.ones(3),), {"generator": generator})
    del generator
    assert kept() is None


def test_fake_kernel_registered_anew_is_asked_on_another_device() -> None:
    @torch.library.custom_op("graphrt_isolation::cut", mutates_args=())
    def cut(x: torch.Tensor) -> torch.Tensor:
        return x[:2].clone()

    x = torch.arange(5.0)
    for rows in (1, 2):  # A first attempt, and the kernel as it should be.
        cut.register_fake(lambda x, rows=rows: x.new_empty(rows))
        device = SimulatedDevice()
        _, result = record(device, device.new_pool(), lambda: cut(x))
        assert result.shape == (rows,)
        device.close()


def test_two_devices_record_in_two_threads() -> None:
    one, two = SimulatedDevice(), SimulatedDevice()
    x = torch.randn(8, 8)
    stream = one.stream("capture")
    with torch.no_grad(), one.use(stream):
        recording = one.begin(one.new_pool(), stream, "outer")
        first = x @ x
        inner, other = in_thread(lambda: record(two, two.new_pool(), lambda: x + 1))
        second = first + 1
        graph = recording.end()
    assert graph.num_nodes == 2
    assert inner.num_nodes == 1
    graph.replay()
    inner.replay()
    assert same(second, x @ x + 1)
    assert same(other, x + 1)
    one.close()
    two.close()


def test_one_device_records_in_many_threads() -> None:
    device = SimulatedDevice()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            pool, stream = device.new_pool(), device.stream(f"capture {number}")
            x = torch.full((number + 2, 8), float(number))
            start.wait()
            for _ in range(5):
                with torch.no_grad(), device.use(stream):
                    recording = device.begin(pool, stream, f"thread {number}")
                    out = torch.relu(x @ x.t() + 1).softmax(-1).topk(1).values
                    graph = recording.end()
                assert graph.num_nodes == 5
                graph.replay()
                assert same(out, torch.relu(x @ x.t() + 1).softmax(-1).topk(1).values)
                graph.reset()
        except BaseException as error:  # noqa: BLE001  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switch)
    assert failures == []
    device.close()


def test_recording_belongs_to_its_thread() -> None:
    device = SimulatedDevice()
    stream, pool, x = device.stream("capture"), device.new_pool(), torch.ones(4)
    with device.use(stream):
        recording = device.begin(pool, stream, "mine")
        assert device.is_capturing()
        assert not in_thread(device.is_capturing)
        assert in_thread(device.current_stream) is not stream
        assert in_thread(lambda: (x + 1).tolist()) == [2.0] * 4

        def joined() -> list[Any]:
            with recording.join_thread():
                y = x + 1
                with pytest.raises(CaptureInProgressError):
                    device.begin(device.new_pool(), device.current_stream(), "nested")
            return [y, device.is_capturing(), (x * 5).tolist()]

        y, still, eager = in_thread(joined, context=contextvars.copy_context())
        assert eager == [5.0] * 4
        assert still  # The copied context still knows of the recording; its modes are gone.
        out = y * 10
        graph = recording.end()
    assert not device.is_capturing()
    graph.replay()
    assert out.tolist() == [20.0] * 4
    device.close()


def test_joined_thread_is_refused_the_same_operations() -> None:
    device = SimulatedDevice()
    stream, pool, x = device.stream("capture"), device.new_pool(), torch.ones(4)
    with device.use(stream):
        recording = device.begin(pool, stream, "mine")

        def joined() -> None:
            with recording.join_thread():
                x.sum().item()

        with pytest.raises(ForbiddenOperationError) as caught:
            in_thread(joined)
        with pytest.raises(ForbiddenOperationError):
            recording.end()
    assert "joined: x.sum().item()" in caught.value.source
    assert not device.is_capturing()
    device.close()


def begin_on(device: SimulatedDevice, pool: Any, name: str) -> Any:
    with device.use(device.stream(name)):
        return device.begin(pool, device.stream(name), name)


def test_second_recording_into_a_pool_is_refused() -> None:
    device = SimulatedDevice()
    stream, pool = device.stream("capture"), device.new_pool()
    with device.use(stream):
        recording = device.begin(pool, stream, "mine")
        with pytest.raises(CaptureInProgressError):
            device.begin(pool, stream, "same thread")
        with pytest.raises(CaptureInProgressError):
            in_thread(lambda: begin_on(device, pool, "other stream"))
        recording.abort(ValueError())
    device.close()


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """What torch answers where nothing is captured; CPU builds cannot be asked."""
    answer = bool
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", answer)
    return answer


def test_torch_reports_a_capture_only_where_one_is_open(no_capture: Callable[[], bool]) -> None:
    device = SimulatedDevice()
    stream = device.stream("capture")
    with device.use(stream):
        recording = device.begin(device.new_pool(), stream, "mine")
        assert torch.cuda.is_current_stream_capturing()
        assert not in_thread(torch.cuda.is_current_stream_capturing)
        with device.report_capturing():
            assert torch.cuda.is_current_stream_capturing()
        assert torch.cuda.is_current_stream_capturing()
        recording.abort(ValueError())
    assert torch.cuda.is_current_stream_capturing is no_capture
    with device.report_capturing():
        assert torch.cuda.is_current_stream_capturing()
        assert not device.is_capturing()
    assert torch.cuda.is_current_stream_capturing is no_capture
    device.close()


def test_abort_leaves_no_mode_behind() -> None:
    device = SimulatedDevice()
    x = torch.ones(2)
    modes = list(_get_current_dispatch_mode_stack())

    def fails() -> None:
        x.add_(1)
        raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        record(device, device.new_pool(), fails)
    assert _get_current_dispatch_mode_stack() == modes
    assert (x + 1).tolist() == [2.0, 2.0]
    device.close()

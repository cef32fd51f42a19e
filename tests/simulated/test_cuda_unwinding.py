"""A capture that could not be ended is undone, whatever a release of torch leaves behind.

A machine has one release of torch, so a small model takes the place of three of them here. The
tests on a GPU hold the installed one to the same promises.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphrt.device.cuda import CaptureState, CUDARecording, PoolTable, private, recording
from graphrt.errors import (
    CaptureInProgressError,
    EmptyCaptureError,
    ForbiddenOperationError,
    UnjoinedStreamError,
)

STREAM, POOL, OTHER_POOL = 7, (0, 5), (9, 0)


class DriverError(RuntimeError):
    def __init__(self, code):
        super().__init__(f"CUDA error {code}")
        self.error_code = code


class FakeTorch:
    """What a capture changes in torch and in the driver.

    ``release``: what a failed ``capture_end`` undoes. "2.11": nothing. "#180395": the routing of
    allocations. "#190348": that, and ``reset`` gives up the pool.
    """

    def __init__(self, release):
        self.release = release
        self.is_capturing = False
        self.end_error = None  # the driver's, at the next end
        self.routes = []  # of device allocations and of pinned host allocations
        self.uses = Counter({POOL: 1})
        self.has_generator = False
        self.num_kernels = self.reserved = 0
        self.warning = ""
        self.log = []
        self.interrupted = ""

    def interrupt(self, moment):
        """Python delivers an interrupt once the call of torch has returned."""
        if self.interrupted == moment:
            self.interrupted = ""
            raise KeyboardInterrupt

    def captured_nodes(self, handle):
        assert handle == STREAM
        return self.num_kernels if self.is_capturing and not self.end_error else None

    def begin_driver_capture(self, handle):
        assert handle == STREAM
        assert not self.is_capturing
        self.is_capturing = True

    def end_driver_capture(self, handle):
        self.is_capturing, self.end_error = False, None

    def stop_routing(self, pool, index):
        self.routes = [route for route in self.routes if route != ("device", pool)]

    def release_pool(self, pool, index):
        self.uses[pool] -= 1

    def check_undone(self, state):
        assert not self.is_capturing
        assert not self.routes
        assert not self.has_generator
        assert self.uses == Counter({POOL: 1})
        assert not state.recordings
        # And the same pool captures again.
        opened = begin(self, state)
        self.num_kernels = 1
        graph = opened.end()
        assert self.uses[POOL] == 2
        graph.reset()
        assert self.uses[POOL] == 1


def graph_type(fake):
    class FakeGraph:
        def __init__(self, keep_graph=False):
            self.uses_pool = self.is_ended = False
            self.pool = None

        def capture_begin(self, pool=OTHER_POOL, capture_error_mode="global"):
            assert capture_error_mode == "thread_local"
            torch.zeros(1).fill_(1)  # As torch makes and fills a generator's seed and offset.
            assert not fake.is_capturing
            assert ("device", pool) not in fake.routes
            assert ("host", pool) not in fake.routes
            self.pool, self.uses_pool = pool, True
            fake.is_capturing = fake.has_generator = True
            fake.routes += [("device", pool), ("host", pool)]
            fake.uses[pool] += 1
            fake.interrupt("begin")

        def capture_end(self):
            torch.zeros(1).fill_(1)
            fake.log.append("capture_end")
            code, fake.end_error = fake.end_error, None
            code = code if fake.is_capturing else 401
            fake.is_capturing = False
            if code and fake.release == "2.11":
                raise DriverError(code)
            if ("device", self.pool) not in fake.routes:
                raise RuntimeError("capture_end() called before capture_begin().")
            fake.routes = [route for route in fake.routes if route[1] != self.pool]
            if code:
                raise DriverError(code)
            fake.has_generator, self.is_ended = False, True
            if not fake.num_kernels:
                warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)
            fake.num_kernels = 0
            if fake.warning:
                warnings.warn(fake.warning, stacklevel=1)
            fake.interrupt("end")

        def instantiate(self):
            fake.log.append("instantiate")

        def reset(self):
            if self.uses_pool and (self.is_ended or fake.release == "#190348"):
                fake.uses[self.pool] -= 1
                self.uses_pool = False

    return FakeGraph


@pytest.fixture(params=["2.11", "#180395", "#190348"])
def fake(request, monkeypatch):
    fake = FakeTorch(request.param)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph_type(fake))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(private, "is_current_stream", lambda handle, index: False)
    monkeypatch.setattr(torch.cuda, "default_generators", (None,))
    monkeypatch.setattr(private, "is_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(private, "clear_blas_workspaces", lambda: None)
    monkeypatch.setattr(private, "bytes_ever_reserved", lambda index: fake.reserved)
    for name in (
        *("begin_driver_capture", "end_driver_capture", "captured_nodes"),
        *("stop_routing", "release_pool"),
    ):
        monkeypatch.setattr(private, name, getattr(fake, name))
    monkeypatch.setattr(recording, "bare_launch", lambda graph, label: None)
    return fake


@pytest.fixture(params=[False], ids=["plain"])
def state(request):
    return CaptureState(0, request.param, PoolTable())


debug = pytest.mark.parametrize("state", [True], indirect=True, ids=["debug"])


def begin(fake, state):
    pool = SimpleNamespace(
        handle=POOL, use_count=lambda: fake.uses[POOL], num_graphs=0, is_recording=False
    )
    stream = SimpleNamespace(cuda_stream=STREAM)
    return CUDARecording(state, pool, stream, "case", (), observe=True)


@pytest.mark.parametrize("code", [900, 901, 904])
def test_abort_of_a_broken_capture_undoes_it(fake, state, code):
    opened = begin(fake, state)
    fake.end_error = code
    failure = opened.abort(DriverError(900))
    assert isinstance(failure, ForbiddenOperationError)
    assert not hasattr(failure, "__notes__"), failure.__notes__
    fake.check_undone(state)


def test_ends_read_the_pools_again_where_memory_was_taken(fake, state):
    reads = []
    state.pools.add(SimpleNamespace(is_released=False, refresh=lambda: reads.append(fake.reserved)))
    for fake.reserved in (0, 0, 64, 64, 96):
        begin(fake, state).end(allow_empty=True)
    assert reads == [0, 64, 96]


def test_end_of_a_broken_capture_raises_and_undoes_it(fake, state):
    opened = begin(fake, state)
    fake.end_error = 904
    with pytest.raises(UnjoinedStreamError):
        opened.end()
    fake.check_undone(state)


def test_abort_for_the_callers_error_returns_that_error(fake, state):
    mistake = ValueError("the caller's")
    opened = begin(fake, state)
    fake.num_kernels = 3
    assert opened.abort(mistake) is mistake
    fake.check_undone(state)


def test_empty_graph_raises_unless_it_is_allowed(fake, state):
    with pytest.raises(EmptyCaptureError):
        begin(fake, state).end()
    fake.check_undone(state)
    graph = begin(fake, state).end(allow_empty=True)
    assert graph.num_nodes == 0
    graph.reset()
    fake.check_undone(state)


def test_torch_warning_that_raises_leaves_no_graph(fake, state):
    opened = begin(fake, state)
    fake.num_kernels, fake.warning = 1, "deprecated"
    with pytest.raises(UserWarning, match="deprecated"):
        opened.end()
    fake.warning = ""
    fake.check_undone(state)


@pytest.mark.parametrize("code", [None, 904])
def test_torch_warning_does_not_stop_an_abort(fake, state, code):
    mistake = ValueError("the caller's")
    opened = begin(fake, state)
    fake.num_kernels, fake.warning, fake.end_error = 1, "deprecated", code
    assert opened.abort(mistake) is mistake
    assert not hasattr(mistake, "__notes__"), mistake.__notes__
    fake.warning = ""
    fake.check_undone(state)


@pytest.mark.parametrize("moment", ["noted", "begin", "closed", "end"])
def test_interrupt_around_begin_and_end_is_undone(fake, state, moment):
    class Interrupted(set):
        def add(self, item):
            super().add(item)
            fake.interrupt("noted")

        def discard(self, item):
            super().discard(item)
            fake.interrupt("closed")

    state.recordings = Interrupted()
    fake.interrupted, fake.num_kernels = moment, 1
    with pytest.raises(KeyboardInterrupt) as caught:
        begin(fake, state).end()
    assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
    assert state.current.get() is None
    assert not _get_current_dispatch_mode_stack()
    fake.num_kernels = 0
    fake.check_undone(state)


def test_capture_that_torch_does_not_begin_is_undone(fake, state, monkeypatch):
    def raise_code_900(graph, *args, **kwargs):
        raise DriverError(900)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", raise_code_900)
        # What the clean-up begins itself would be refused too.
        patch.setattr(CUDARecording, "_free_generators", lambda recording: None)
        with pytest.raises(ForbiddenOperationError):
            begin(fake, state)
    assert not _get_current_dispatch_mode_stack()
    fake.check_undone(state)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_cleaning_that_fails_after_a_good_end_resets_the_graph(fake, state, monkeypatch, kind):
    def fail():
        raise kind("the driver is gone")

    opened = begin(fake, state)
    fake.num_kernels = 1
    with monkeypatch.context() as patch:
        patch.setattr(private, "clear_blas_workspaces", fail)
        with pytest.raises(kind):
            opened.end()
    fake.check_undone(state)
    assert not state.graphs


def test_devices_of_one_gpu_see_each_others_recordings(fake, state):
    twin, neighbour = CaptureState(0, False, PoolTable()), CaptureState(1, False, PoolTable())
    opened = begin(fake, state)
    with pytest.raises(CaptureInProgressError):
        twin.check_none_open("trim")
    assert twin.current.get() is opened
    neighbour.check_none_open("trim")
    opened.abort(ValueError("the caller's"))
    twin.check_none_open("trim")


def test_failing_clean_up_is_a_note_on_the_first_error(fake, state, monkeypatch):
    opened = begin(fake, state)

    def fail():
        raise OSError("the driver is gone")

    monkeypatch.setattr(private, "clear_blas_workspaces", fail)
    failure = opened.abort(DriverError(900))
    assert isinstance(failure, ForbiddenOperationError)
    assert any("the driver is gone" in note for note in failure.__notes__)


def test_error_that_follows_a_swallowed_one_names_the_first(fake, state):
    opened = begin(fake, state)
    opened._tracker.fail("aten._local_scalar_dense.default", DriverError(900))
    fake.end_error = 901
    with pytest.raises(ForbiddenOperationError) as caught:
        opened.end()
    assert caught.value.operation == "aten._local_scalar_dense.default"
    fake.check_undone(state)


def test_mode_that_raises_does_not_see_torchs_bookkeeping(fake, state):
    """Half registered with a generator, a graph would end the process when it is destroyed."""

    class Raises(TorchDispatchMode):
        def __torch_dispatch__(self, func, *_):
            raise InterruptedError(str(func))

    with Raises():
        opened = begin(fake, state)
        fake.num_kernels = 1
        opened.end().reset()
        broken = begin(fake, state)
        fake.end_error = 900
        failure = broken.abort(InterruptedError("in the recording"))
        with pytest.raises(InterruptedError):
            torch.ones(1)
    assert not hasattr(failure, "__notes__"), failure.__notes__
    fake.check_undone(state)


@pytest.fixture(params=[False, True], ids=["switched off", "switched on"])
def annotations(request, fake, monkeypatch):
    """``torch.cuda._graph_annotations``: one switch, scopes, and a log of the calls."""

    @contextmanager
    def mark_kernels(label):
        assert annotations._annotations_enabled
        fake.log.append(f"mark {label}")
        yield
        assert fake.is_capturing, "the nodes are read before the capture ends"
        fake.log.append("marked")

    annotations = SimpleNamespace(
        _annotations_enabled=request.param,
        enable_annotations=lambda: setattr(annotations, "_annotations_enabled", True),
        disable_annotations=lambda: setattr(annotations, "_annotations_enabled", False),
        mark_kernels=mark_kernels,
        resolve_pending_annotations=lambda: fake.log.append("resolve"),
        remap_to_exec_graph=lambda graph: fake.log.append("remap"),
    )
    monkeypatch.setattr(private, "kernel_annotations", lambda: annotations)
    yield annotations
    assert annotations._annotations_enabled is request.param, "the switch is the process's"


@debug
def test_debug_recording_labels_its_kernels(fake, state, annotations):
    opened = begin(fake, state)
    fake.num_kernels = 3
    assert opened.end().num_nodes == 3
    order = ["mark case", "marked", "resolve", "capture_end", "instantiate", "remap"]
    assert fake.log == order


@debug
@pytest.mark.parametrize(
    "step", ["mark_kernels", "resolve_pending_annotations", "remap_to_exec_graph"]
)
@pytest.mark.parametrize("kind", [RuntimeError, TypeError, KeyboardInterrupt])
def test_debug_recording_that_fails_is_undone(fake, state, annotations, monkeypatch, step, kind):
    def fail(*_):
        raise kind("the bindings are of another release")

    with monkeypatch.context() as patch:
        patch.setattr(annotations, step, fail)
        fake.num_kernels = 3
        with pytest.raises(kind, match="another release") as caught:
            begin(fake, state).end()
    assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
    fake.check_undone(state)


@debug
def test_debug_recording_without_a_graph_labels_nothing(fake, state, annotations):
    opened = begin(fake, state)
    fake.end_error = 900
    opened.abort(DriverError(900))
    with pytest.raises(EmptyCaptureError):
        begin(fake, state).end()
    assert "remap" not in fake.log
    fake.check_undone(state)


def test_recording_of_a_plain_device_labels_nothing(fake, state, annotations):
    opened = begin(fake, state)
    fake.num_kernels = 3
    opened.end()
    assert fake.log == ["capture_end"]


def test_annotations_are_found_where_torch_has_them():
    has_them = importlib.util.find_spec("torch.cuda._graph_annotations") is not None
    assert (private.kernel_annotations() is not None) is has_them

"""A capture that could not be ended is undone, whatever the release of torch has left behind.

Torch is a small fake here: what it leaves behind differs between releases, of which a machine has
one. The same rules run on the real thing in the GPU lane.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.device.cuda import private, recording
from graphrt.device.cuda.labels import torch_annotations
from graphrt.errors import EmptyCaptureError, ForbiddenOperationError, UnjoinedStreamError

STREAM = 7
POOL = (0, 5)


class RefusedError(RuntimeError):
    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA error {code}")
        self.error_code = code


class FakeTorch:
    """The allocator's and the driver's state that a capture changes."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.capturing = False
        self.invalid_code: int | None = None
        self.log: list[str] = []
        self.routes: list[Any] = []
        self.host_routes: list[Any] = []
        self.uses = {POOL: 1}
        self.generator_captured = False
        self.num_kernels = 0
        self.warning = ""


class FakeGraph:
    """``capture_end`` as the releases have it: "bare", "unrouted" (#180395), "fixed" (#190348)."""

    torch: FakeTorch

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: Any = None
        self._holds_pool = False
        self._ended = False

    def register_generator_state(self, generator: Any) -> None: ...

    def capture_begin(self, pool: Any = (9, 0), capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        torch.zeros(1).fill_(1)  # As torch makes and fills the seed and the offset of a generator.
        state = self.torch
        if pool in state.routes or pool in state.host_routes:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        assert not state.capturing
        self._pool = pool
        state.generator_captured = True
        state.routes.append(pool)
        state.host_routes.append(pool)
        state.uses[pool] = state.uses.get(pool, 0) + 1
        self._holds_pool = True
        state.capturing = True

    def capture_end(self) -> None:
        torch.zeros(1).fill_(1)  # Bookkeeping, as in capture_begin.
        state = self.torch
        state.log.append("capture_end")
        code, state.invalid_code = state.invalid_code, None
        if not state.capturing:
            code = 401
        state.capturing = False
        if code is not None and state.release == "bare":
            raise RefusedError(code)
        if self._pool not in state.routes:
            raise RuntimeError("capture_end() called before capture_begin().")
        state.routes.remove(self._pool)
        state.host_routes.remove(self._pool)
        if code is not None:
            raise RefusedError(code)
        state.generator_captured = False
        self._ended = True
        if not state.num_kernels:
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)
        state.num_kernels = 0
        if state.warning:
            warnings.warn(state.warning, stacklevel=1)

    def instantiate(self) -> None:
        self.torch.log.append("instantiate")

    def raw_cuda_graph(self) -> int:
        return 1

    def replay(self) -> None:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")

    def reset(self) -> None:
        if self._ended or (self.torch.release == "fixed" and self._holds_pool):
            self.torch.uses[self._pool] -= 1
            self._holds_pool = False
        self._ended = False


class FakeDevice:
    def __init__(self) -> None:
        self.index = 0
        self.debug = False
        self.torch_device = torch.device("cuda", 0)
        self._plans: dict[int, Any] = {}
        self._graphs: dict[int, Any] = {}
        self.num_open = 0

    def holds(self, address: int) -> bool:
        return False

    def current_stream(self) -> None:
        """None of the table's: a window has to make its own current to end."""

    def refresh_pools(self) -> None: ...

    def _opened(self, window: Any) -> None:
        self.num_open += 1

    def _closed(self, window: Any) -> None:
        self.num_open -= 1

    def _refuse_in_window(self, subject: str) -> None:
        assert not self.num_open


@contextmanager
def no_stream(stream: Any) -> Iterator[None]:
    yield


@pytest.fixture(params=["bare", "unrouted", "fixed"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    state = FakeTorch(request.param)
    FakeGraph.torch = state

    def begin_bare(handle: int) -> None:
        assert handle == STREAM
        assert not state.capturing
        state.capturing = True

    def end_bare(handle: int) -> None:
        state.capturing, state.invalid_code = False, None

    def stop_routing(pool: Any, index: int) -> None:
        if pool in state.routes:
            state.routes.remove(pool)

    def release_pool(pool: Any, index: int) -> None:
        state.uses[pool] -= 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", no_stream)
    monkeypatch.setattr(torch.cuda, "default_generators", (SimpleNamespace(get_offset=int),))
    monkeypatch.setattr(private, "is_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(private, "clear_blas_workspaces", lambda: None)
    monkeypatch.setattr(private, "begin_bare_capture", begin_bare)
    monkeypatch.setattr(private, "end_bare_capture", end_bare)
    monkeypatch.setattr(private, "stop_routing", stop_routing)
    monkeypatch.setattr(private, "release_pool", release_pool)
    monkeypatch.setattr(recording, "bare_launch", lambda graph, label: graph.replay)
    return state


def open_window(fake: FakeTorch, device: FakeDevice) -> recording.CUDARecording:
    pool: Any = SimpleNamespace(
        handle=POOL, use_count=lambda: fake.uses[POOL], num_graphs=0, is_recording=False
    )
    stream: Any = SimpleNamespace(torch_stream=SimpleNamespace(cuda_stream=STREAM))
    return recording.CUDARecording(device, pool, stream, "case", (), observe=True)  # type: ignore[arg-type]


def check_undone(fake: FakeTorch, device: FakeDevice) -> None:
    assert not fake.capturing
    assert fake.routes == []
    assert fake.host_routes == []
    assert not fake.generator_captured
    assert fake.uses[POOL] == 1
    assert all(count == 0 for pool, count in fake.uses.items() if pool != POOL)
    assert device.num_open == 0
    # And the same pool captures again.
    window = open_window(fake, device)
    fake.num_kernels = 1
    graph = window.end()
    assert fake.uses[POOL] == 2
    graph.reset()
    assert fake.uses[POOL] == 1


@pytest.mark.parametrize("code", [900, 901, 904])
def test_an_abort_undoes_what_a_refused_end_leaves_behind(fake: FakeTorch, code: int) -> None:
    device = FakeDevice()
    window = open_window(fake, device)
    fake.invalid_code = code
    failure = window.abort(RefusedError(900))
    assert isinstance(failure, ForbiddenOperationError)
    assert not hasattr(failure, "__notes__"), failure.__notes__
    check_undone(fake, device)


def test_an_end_that_is_refused_undoes_as_much_and_raises(fake: FakeTorch) -> None:
    device = FakeDevice()
    window = open_window(fake, device)
    fake.invalid_code = 904
    with pytest.raises(UnjoinedStreamError):
        window.end()
    check_undone(fake, device)


def test_an_error_of_the_callers_needs_no_undoing_and_comes_back_itself(fake: FakeTorch) -> None:
    device, mistake = FakeDevice(), ValueError("the caller's")
    window = open_window(fake, device)
    fake.num_kernels = 3
    assert window.abort(mistake) is mistake
    check_undone(fake, device)


def test_the_warning_of_an_empty_graph_becomes_an_error(fake: FakeTorch) -> None:
    device = FakeDevice()
    window = open_window(fake, device)
    with pytest.raises(EmptyCaptureError):
        window.end()
    check_undone(fake, device)


def test_an_empty_graph_that_was_asked_for_has_no_nodes(fake: FakeTorch) -> None:
    device = FakeDevice()
    graph = open_window(fake, device).end(allow_empty=True)
    assert graph.num_nodes == 0
    graph.reset()
    check_undone(fake, device)


def test_a_warning_of_torch_s_that_a_filter_makes_an_error_leaves_no_graph(fake: FakeTorch) -> None:
    device = FakeDevice()
    window = open_window(fake, device)
    fake.num_kernels, fake.warning = 1, "deprecated"
    with pytest.raises(UserWarning, match="deprecated"):
        window.end()
    fake.warning = ""
    check_undone(fake, device)


def test_a_warning_of_torch_s_keeps_no_abort_from_its_clean_up(fake: FakeTorch) -> None:
    device, mistake = FakeDevice(), ValueError("the caller's")
    for code in (None, 904):
        window = open_window(fake, device)
        fake.num_kernels, fake.warning, fake.invalid_code = 1, "deprecated", code
        assert window.abort(mistake) is mistake
        assert not hasattr(mistake, "__notes__"), mistake.__notes__
        fake.warning = ""
        check_undone(fake, device)


def test_a_clean_up_that_fails_is_a_note_on_the_first_error(
    fake: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    window = open_window(fake, device)

    def fail() -> None:
        raise OSError("the driver is gone")

    monkeypatch.setattr(private, "clear_blas_workspaces", fail)
    failure = window.abort(RefusedError(900))
    assert isinstance(failure, ForbiddenOperationError)
    assert any("the driver is gone" in note for note in failure.__notes__)


def test_an_echo_is_explained_by_the_error_that_the_callable_swallowed(fake: FakeTorch) -> None:
    device = FakeDevice()
    window = open_window(fake, device)
    window._ledger.fail("aten._local_scalar_dense.default", RefusedError(900))
    fake.invalid_code = 901
    with pytest.raises(ForbiddenOperationError) as caught:
        window.end()
    assert caught.value.operation == "aten._local_scalar_dense.default"
    check_undone(fake, device)


class FakeAnnotations:
    """``torch.cuda._graph_annotations``: one switch, scopes, and a log of what was called when."""

    def __init__(self, state: FakeTorch, enabled: bool) -> None:
        self._state = state
        self._annotations_enabled = enabled

    def enable_annotations(self) -> None:
        self._annotations_enabled = True

    def disable_annotations(self) -> None:
        self._annotations_enabled = False

    @contextmanager
    def mark_kernels(self, label: str) -> Iterator[None]:
        assert self._annotations_enabled
        assert self._state.capturing
        self._state.log.append(f"mark {label}")
        yield
        assert self._state.capturing, "the nodes are read while the window is open"
        self._state.log.append("marked")

    def resolve_pending_annotations(self) -> None:
        self._state.log.append("resolve")

    def remap_to_exec_graph(self, graph: Any) -> None:
        self._state.log.append("remap")


@pytest.fixture(params=[False, True], ids=["switched off", "switched on"])
def annotations(
    request: pytest.FixtureRequest, fake: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> FakeAnnotations:
    fakes = FakeAnnotations(fake, request.param)
    monkeypatch.setattr(recording, "torch_annotations", lambda: fakes)
    monkeypatch.setattr(private, "count_nodes", lambda graph: 3)
    return fakes


def debug_device() -> FakeDevice:
    device = FakeDevice()
    device.debug = True
    return device


def test_a_debug_window_s_kernels_carry_its_label(fake, annotations):
    was_enabled = annotations._annotations_enabled
    window = open_window(fake, debug_device())
    assert annotations._annotations_enabled is was_enabled, "the switch is everybody's"
    fake.num_kernels = 3
    window.end()
    order = ["mark case", "marked", "resolve", "capture_end", "instantiate", "remap"]
    assert fake.log == order


def test_a_window_whose_kernels_cannot_be_labelled_is_closed_again(fake, annotations, monkeypatch):
    device, was_enabled = debug_device(), annotations._annotations_enabled

    def mark_kernels(label: str) -> Any:
        raise RuntimeError("the bindings are of another release")

    with monkeypatch.context() as patch:
        patch.setattr(annotations, "mark_kernels", mark_kernels)
        with pytest.raises(RuntimeError, match="another release"):
            open_window(fake, device)
    assert annotations._annotations_enabled is was_enabled
    assert (device.num_open, fake.capturing, fake.routes) == (0, False, [])
    window = open_window(fake, device)
    fake.num_kernels = 3
    window.end()


@pytest.mark.parametrize(
    "step", ["resolve_pending_annotations", "remap_to_exec_graph", "count_nodes"]
)
@pytest.mark.parametrize("kind", [RuntimeError, TypeError, KeyboardInterrupt])
def test_a_debug_window_that_cannot_be_looked_at_leaves_nothing_behind(
    fake, annotations, monkeypatch, step, kind
):
    device = debug_device()

    def fails(*graph: Any) -> Any:
        raise kind("the bindings are of another release")

    with monkeypatch.context() as patch:
        patch.setattr(private if step == "count_nodes" else annotations, step, fails)
        window = open_window(fake, device)
        fake.num_kernels = 3
        with pytest.raises(kind, match="another release") as caught:
            window.end()
    assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
    check_undone(fake, device)


def test_an_aborted_or_empty_window_labels_nothing(fake, annotations):
    device = debug_device()
    fake_window = open_window(fake, device)
    fake.invalid_code = 900
    fake_window.abort(RefusedError(900))
    with pytest.raises(EmptyCaptureError):
        open_window(fake, device).end()
    assert "remap" not in fake.log
    assert device.num_open == 0


def test_a_window_is_labelled_on_a_debug_device_alone(fake, annotations):
    window = open_window(fake, FakeDevice())
    fake.num_kernels = 3
    window.end()
    assert fake.log == ["capture_end"]


def test_annotations_are_found_where_torch_has_them():
    has_them = importlib.util.find_spec("torch.cuda._graph_annotations") is not None
    assert (torch_annotations() is not None) is has_them


class Refuses(TorchDispatchMode):
    """A mode of the caller's that lets no operation pass."""

    def __torch_dispatch__(self, func: Any, *_: Any) -> Any:
        raise InterruptedError(str(func))


def test_a_mode_that_raises_never_meets_torch_s_own_bookkeeping(fake):
    """Half registered with a generator, a graph would end the process when it goes."""
    device = FakeDevice()
    with Refuses():
        window = open_window(fake, device)
        fake.num_kernels = 1
        window.end().reset()
        refused = open_window(fake, device)
        fake.invalid_code = 900
        failure = refused.abort(InterruptedError("in the window"))
        with pytest.raises(InterruptedError):
            torch.ones(1)
    assert not hasattr(failure, "__notes__"), failure.__notes__
    check_undone(fake, device)

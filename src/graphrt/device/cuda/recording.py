"""A recording, and the graph that comes out of it.

It calls torch's ``CUDAGraph`` directly: ``torch.cuda.graph`` synchronises and empties caches on
every entry. The price is that a failed capture has to be undone here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from graphrt.device.base import TensorUse
from graphrt.device.cuda import private
from graphrt.device.cuda.failures import FOLLOWS_ANOTHER, error_code, replay_failure, translate
from graphrt.device.cuda.observe import Observer, OperatorInfo, UseTracker
from graphrt.device.cuda.pool import CUDAPool, PoolTable
from graphrt.device.torch_modes import enter, leave
from graphrt.errors import (
    CaptureError,
    CaptureInProgressError,
    DeviceReplayError,
    EmptyCaptureError,
)


class OpenRecordings:
    """The open recordings of one GPU, whichever device object began them."""

    def __init__(self) -> None:
        self.current: ContextVar[CUDARecording | None] = ContextVar("recording", default=None)
        self.all: set[CUDARecording] = set()
        """Those of all threads."""


_open_recordings: dict[int, OpenRecordings] = {}
"""By index: the allocator, cuBLAS's workspaces and the driver's rules are the process's too."""


@dataclass(eq=False)
class CaptureState:
    """What the recordings and the graphs of one device share."""

    index: int
    debug: bool
    pools: PoolTable

    def __post_init__(self) -> None:
        opened = _open_recordings.setdefault(self.index, OpenRecordings())
        self.current, self.recordings = opened.current, opened.all
        self.graphs: dict[int, CUDADeviceGraph] = {}
        """Those that are not reset, oldest first, by id. Strong on purpose: see there."""
        self.operators: dict[int, OperatorInfo] = {}
        self._reserved = -1
        """What the allocator had taken when the pools were read last."""

    def note_growth(self) -> None:
        """Read the pools' address ranges again, if the allocator has taken memory since.

        To read them takes longer than the count does, and a PIECEWISE program has many recordings.
        """
        reserved = private.bytes_ever_reserved(self.index)
        if reserved != self._reserved:
            self.pools.refresh()
            self._reserved = reserved

    def check_none_open(self, subject: str) -> None:
        """To free or map device memory would break the capture of any thread.

        Errors: ``CaptureInProgressError``.
        """
        if self.recordings:
            raise CaptureInProgressError(
                subject,
                expected="no open recording on this GPU",
                found=f"{len(self.recordings)} open",
                do="do it after the recording has ended",
            )


@dataclass(eq=False, repr=False)
class CUDADeviceGraph:
    """One instantiated graph. The device keeps it alive until ``reset``.

    Otherwise the garbage collector could destroy it during a recording, and break that.

    ``replay`` is the bare launch from the start, so that it may be bound once.
    """

    _state: CaptureState
    _graph: torch.cuda.CUDAGraph | None
    _pool: CUDAPool
    _label: str
    externals: tuple[TensorUse, ...]
    uses_rng: bool
    """Whether a replay may move a generator: as observed, or True if nothing was."""
    num_nodes: int | None
    """None where the driver does not say."""

    def __post_init__(self) -> None:
        assert self._graph is not None, "until it is reset"
        self.replay: Callable[[], None] = bare_launch(self._graph, self._label)
        self._state.graphs[id(self)] = self
        self._pool.num_graphs += 1

    def reset(self) -> None:
        """Destroy the executable, and no longer count as a user of the pool. Idempotent.

        Errors: ``CaptureInProgressError`` during a recording of this device, which it would break.
        """
        if self._graph is None:
            return
        self._state.check_none_open(f"reset of {self._label}")
        # Drop torch's object too: while it lives, the generators keep memory for its numbers. A
        # caller that still has the old callable gets torch's error that the graph is gone.
        graph, self._graph = self._graph, None
        self.replay = self._fail_replay
        self.externals = ()
        graph.reset()
        self._pool.num_graphs -= 1
        del self._state.graphs[id(self)]

    def _fail_replay(self) -> None:
        raise DeviceReplayError(
            self._label,
            expected="a graph that was not reset",
            found="a replay after reset()",
            do="look the program up at each step instead of keeping its graphs",
        )


def bare_launch(graph: torch.cuda.CUDAGraph, label: str) -> Callable[[], None]:
    """A callable that launches ``graph``, for the hot path.

    The base class's method is bound once: the Python override above it costs more than the call.
    """
    has_checks = getattr(graph, "_tracker", None) is not None  # They are in the override.
    replay: Callable[[], None] = (
        graph.replay if has_checks else super(torch.cuda.CUDAGraph, graph).replay
    )

    def launch(replay: Callable[[], None] = replay) -> None:
        try:
            replay()
        except RuntimeError as error:
            raise replay_failure(error, label) from error

    return launch


@dataclass(eq=False, repr=False)
class CUDARecording:
    """An open recording of the calling thread. Made by ``CUDADevice.begin``.

    ``stream`` is current. Errors: torch's own, translated; what was begun is undone.
    """

    _state: CaptureState
    _pool: CUDAPool
    _stream: torch.cuda.Stream
    _label: str
    generators: InitVar[Sequence[torch.Generator]]
    observe: InitVar[bool]

    def __post_init__(self, generators: Sequence[torch.Generator], observe: bool) -> None:
        state, pool = self._state, self._pool
        # torch registers the default one itself.
        default = torch.cuda.default_generators[state.index]
        self._generators = [each for each in generators if each is not default]
        self._tracker = UseTracker("cuda", state.pools.holds, state.operators)
        self._observer = Observer(self._tracker) if observe else None
        self._num_uses = pool.use_count()
        self._graph = torch.cuda.CUDAGraph(keep_graph=state.debug)
        self._labels: private.KernelLabels | None = None
        private.clear_blas_workspaces()
        optional = private.supported(self._graph.capture_begin, check_input_liveness=state.debug)
        try:
            # Noted before it begins, because an interrupt may arrive after each call.
            state.recordings.add(self)
            pool.is_recording = True
            state.current.set(self)
            with private.without_modes():
                self._register_generators(self._graph)
                self._graph.capture_begin(
                    pool.handle, capture_error_mode="thread_local", **optional
                )
            if self._observer is not None:
                enter(self._observer)
            annotations = private.kernel_annotations() if state.debug else None
            if annotations is not None:
                self._labels = private.KernelLabels(annotations, self._label)
        except BaseException as error:  # noqa: BLE001  The caller has no recording to abort.
            raise self.abort(error)  # noqa: B904  The same error, or it has it as its cause.

    @property
    def is_open(self) -> bool:
        return self in self._state.recordings

    @property
    def pool_id(self) -> private.PoolId:
        return self._pool.id

    def end(self, allow_empty: bool = False) -> CUDADeviceGraph:
        """End the recording and instantiate its graph."""
        assert self.is_open, "a recording is ended once"
        if self._labels is not None:
            try:
                self._labels.close()
            except BaseException as error:  # noqa: BLE001  The caller does not abort after an end.
                raise self.abort(error)  # noqa: B904  The same error, or it has it as its cause.
        try:
            self._close()
            num_nodes = self._capture_end()
        except BaseException as error:  # noqa: BLE001  The caller does not abort after an end.
            raise self._undone(error)  # noqa: B904  The same error, or it has it as its cause.
        try:
            # The callable handled its error, if there was one; a traceback keeps tensors allocated.
            self._tracker.take_failure()
            self._clean_caches()
            if num_nodes == 0 and not allow_empty:
                raise EmptyCaptureError(
                    self._label,
                    expected="at least one kernel between begin and end",
                    found="an empty graph",
                    do="launch on the capture stream and device, and capture something that"
                    " computes",
                )
            if self._labels is not None and num_nodes != 0:
                self._labels.move_to_executable(self._graph)
            return CUDADeviceGraph(
                self._state,
                self._graph,
                self._pool,
                self._label,
                externals=self._tracker.externals(),
                uses_rng=self._tracker.uses_rng or self._observer is None,
                num_nodes=num_nodes,
            )
        except BaseException as error:  # noqa: BLE001  The caller has no graph to reset.
            self._graph.reset()
            raise translate(error)  # noqa: B904  The same error, or it has it as its cause.

    def abort(self, first_error: BaseException) -> BaseException:
        """End the recording, drop it, and say what went wrong. Never raises."""
        failure = self._explain(first_error)
        if self.is_open:
            self._close()
            self._clean_up(self._drop, failure)
        return failure

    @contextmanager
    def join_thread(self) -> Iterator[None]:
        """Record the calling thread's work: the capture stream is current and observed there."""
        observer = Observer(self._tracker) if self._observer is not None else None
        current = self._state.current
        with torch.cuda.stream(self._stream):
            before = current.set(self)
            if observer is not None:
                enter(observer)
            try:
                yield
            finally:
                if observer is not None:
                    leave(observer)
                current.reset(before)

    def opaque(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        out_meta: Any = None,
        written: Sequence[int] | Mapping[int, str] = (),
    ) -> Any:
        """A plain call: CUDA records whatever launches."""
        return fn(*args)

    def _close(self) -> None:
        self._pool.is_recording = False
        self._state.recordings.discard(self)
        self._state.current.set(None)
        if self._observer is not None:
            leave(self._observer)

    def _capture_end(self, *, warns: bool = True) -> int | None:
        """End torch's capture. Returns how many nodes it recorded."""
        with self._on_stream(), private.without_modes():
            num_nodes = private.captured_nodes(self._stream.cuda_stream)
            is_quiet = num_nodes == 0 or not warns  # torch warns of an empty one.
            with warnings.catch_warnings(action="ignore") if is_quiet else nullcontext():
                self._graph.capture_end()
            if self._state.debug:  # torch does not instantiate a graph that it keeps.
                self._graph.instantiate()
        return num_nodes

    def _explain(self, error: BaseException) -> BaseException:
        """``error`` translated, or the first device error if ``error`` only follows from it."""
        first, operation = self._tracker.take_failure()
        if first is not None and (first is error or error_code(error) == FOLLOWS_ANOTHER):
            return translate(first, operation)
        return translate(error)

    def _undone(self, error: BaseException) -> BaseException:
        """Undo a capture that torch failed to end, or whose end was interrupted; return the error.

        The caller raises it: a local variable that holds a raised error is a cycle through its
        traceback, which would keep the tensors of every frame in it allocated.
        """
        failure = self._explain(error)
        self._close()  # Which an interrupt may have cut short.
        self._clean_up(self._unwind, failure)
        return failure

    def _drop(self) -> None:
        try:
            self._capture_end(warns=False)
        except RuntimeError:  # Expected: whatever failed has invalidated the capture.
            self._unwind()
        else:
            self._graph.reset()

    def _clean_up(self, first_step: Callable[[], None], failure: BaseException) -> None:
        """Run every step of the clean-up, whatever fails; its errors become notes."""
        for step in (first_step, self._clean_caches):
            try:
                step()
            except Exception as error:  # noqa: BLE001  It must not replace the first error.
                failure.add_note(f"while cleaning up after {self._label}: {error!r}")

    def _clean_caches(self) -> None:
        """After every recording: drop its BLAS workspaces, and note how the pool has grown."""
        private.clear_blas_workspaces()
        self._state.note_growth()

    def _unwind(self) -> None:
        """Undo what torch leaves behind when a capture could not be ended.

        ``capture_end`` raises as soon as the driver reports an error, and nothing behind that line
        runs: device and pinned host allocations stay routed to the pool, the pool stays in use, and
        the generators believe that they are still captured, so that the next random number raises.
        No call undoes all of that. But torch does it when the driver agrees to end a capture: so
        give it an empty capture of the driver's to end.

        torch 2.11 needs it. PyTorch #180395 ends the routing, and #190348 releases the pool: drop
        this when the oldest supported torch has both and resets its generators too.
        """
        handle = self._stream.cuda_stream
        with self._on_stream():
            if private.is_stream_capturing():
                private.end_driver_capture(handle)
            private.begin_driver_capture(handle)
            try:
                self._capture_end(warns=False)
            except RuntimeError:  # This torch had ended its routing before it raised.
                if private.is_stream_capturing():
                    private.end_driver_capture(handle)
                private.stop_routing(self._pool.handle, self._state.index)
                self._free_generators()
            if private.is_stream_capturing():
                raise CaptureError(
                    self._label,
                    expected="a stream that captures no more",
                    found="the capture stream still does",
                    do="close the device and make another",
                )
        self._graph.reset()
        num_uses = self._pool.use_count()
        if num_uses is not None and self._num_uses is not None:
            for _ in range(num_uses - self._num_uses):
                private.release_pool(self._pool.handle, self._state.index)

    def _free_generators(self) -> None:
        """Take the generators out of capture mode, by an empty capture that succeeds."""
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), private.without_modes():
            self._register_generators(graph)
            warnings.simplefilter("ignore")  # It is empty.
            graph.capture_begin(capture_error_mode="thread_local")
            graph.capture_end()
        graph.reset()

    def _register_generators(self, graph: torch.cuda.CUDAGraph) -> None:
        for generator in self._generators:
            graph.register_generator_state(generator)

    def _on_stream(self) -> AbstractContextManager[Any]:
        # A recording may end where a side stream is current; torch ends it on its own stream only.
        # To enter a stream takes longer than to ask, and a PIECEWISE program has many recordings.
        is_current = private.is_current_stream(self._stream.cuda_stream, self._state.index)
        return nullcontext() if is_current else torch.cuda.stream(self._stream)

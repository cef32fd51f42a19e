"""A window, and the graph that comes out of it.

Torch is asked directly, without ``torch.cuda.graph``, which synchronises and empties caches on
every entry. The price is that a failed capture has to be undone here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from graphrt.device.base import ExternalUse
from graphrt.device.cuda import private
from graphrt.device.cuda.failures import ECHO, error_code, replay_failure, translate
from graphrt.device.cuda.labels import KernelLabels, torch_annotations
from graphrt.device.cuda.observe import Ledger, Observer
from graphrt.device.cuda.pool import CUDAPool
from graphrt.device.cuda.streams import CUDAStream
from graphrt.errors import CaptureError, DeviceReplayError, EmptyCaptureError

if TYPE_CHECKING:
    from graphrt.device.cuda.device import CUDADevice


class CUDADeviceGraph:
    """One instantiated graph. The device keeps it alive until ``reset``.

    A graph that the garbage collector could destroy would be destroyed in somebody's window, and
    break the capture there.

    ``replay`` is the bare launch from the start, so that it may be bound once.
    """

    def __init__(
        self,
        device: CUDADevice,
        graph: torch.cuda.CUDAGraph,
        pool: CUDAPool,
        label: str,
        *,
        ledger: Ledger,
        uses_rng: bool,
        num_nodes: int | None,
    ) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._label = label
        self._externals = ledger.externals()
        self._uses_rng = uses_rng
        self._num_nodes = num_nodes
        self.replay: Callable[[], None] = bare_launch(graph, label)
        pool.num_graphs += 1
        device._graphs[id(self)] = self

    @property
    def num_nodes(self) -> int | None:
        """Nodes: 0 for an empty graph, else known on a debug device with cuda-bindings only."""
        return self._num_nodes

    @property
    def uses_rng(self) -> bool:
        """Whether a replay may move a generator: what was observed, or True if nothing was."""
        return self._uses_rng

    @property
    def externals(self) -> Sequence[ExternalUse]:
        """Tensors outside every pool that the recording touched, in order of first touch."""
        return self._externals

    def reset(self) -> None:
        """Destroy the executable and give its hold on the pool back. Idempotent.

        Errors: ``CaptureInProgressError`` in a window of this device, whose capture it would break.
        """
        if self._graph is None:
            return
        self._device._refuse_in_window(f"reset of {self._label}")
        # Let go of it too: while the object lives, the generators keep memory for its numbers.
        # Whoever still has the old callable launches what torch knows to be gone: an error.
        graph, self._graph = self._graph, None
        self.replay = self._refuse
        self._externals = ()
        graph.reset()
        self._pool.num_graphs -= 1
        del self._device._graphs[id(self)]

    def _refuse(self) -> None:
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
    has_checks = getattr(graph, "_tracker", None) is not None  # They live in the override.
    replay: Callable[[], None] = (
        graph.replay if has_checks else super(torch.cuda.CUDAGraph, graph).replay
    )

    def launch(replay: Callable[[], None] = replay) -> None:
        try:
            replay()
        except RuntimeError as error:
            raise replay_failure(error, label) from error

    return launch


class CUDARecording:
    """An open window on the calling thread. Made by ``CUDADevice.begin``."""

    def __init__(
        self,
        device: CUDADevice,
        pool: CUDAPool,
        stream: CUDAStream,
        label: str,
        generators: Sequence[torch.Generator],
        observe: bool,
    ) -> None:
        self._device = device
        self._pool = pool
        self._stream = stream
        self._label = label
        default = torch.cuda.default_generators[device.index]
        self._generators = (default, *(each for each in generators if each is not default))
        self._ledger = Ledger(device.torch_device.type, device.holds, device._plans)
        self._observer = Observer(self._ledger) if observe else None
        self._observes = observe
        self._num_uses = pool.use_count()
        self._graph = torch.cuda.CUDAGraph(keep_graph=device.debug)
        self._labels: KernelLabels | None = None
        self.is_open = False
        self._begin()

    def _begin(self) -> None:
        private.clear_blas_workspaces()
        optional = private.supported(
            self._graph.capture_begin, check_input_liveness=self._device.debug
        )
        try:
            with private.past_modes():
                for generator in self._generators[1:]:  # torch registers the default one itself.
                    self._graph.register_generator_state(generator)
                self._graph.capture_begin(
                    self._pool.handle, capture_error_mode="thread_local", **optional
                )
        except RuntimeError as error:
            raise self._refused(error)  # noqa: B904  It has its cause.
        self.is_open = True
        self._pool.is_recording = True
        self._device._opened(self)
        if self._observer is not None:
            self._observer.enter()
        annotations = torch_annotations() if self._device.debug else None
        if annotations is None:
            return
        try:
            self._labels = KernelLabels(annotations, self._label)
        except Exception as error:  # noqa: BLE001  Nobody else has this window to close it.
            raise self.abort(error)  # noqa: B904  It is the same error, or has it as its cause.

    def end(self, allow_empty: bool = False) -> CUDADeviceGraph:
        """Close the window and instantiate what it recorded."""
        assert self.is_open, "a window is ended once"
        if self._labels is not None:
            try:
                self._labels.close()
            except BaseException as error:  # noqa: BLE001  Nobody else closes this window now.
                raise self.abort(error)  # noqa: B904  It is the same error, or has it as its cause.
        self._close()
        try:
            heard = self._capture_end()
        except RuntimeError as error:
            raise self._refused(error)  # noqa: B904  It has its cause.
        self._ledger.take_failure()  # The callable coped with it; its traceback holds tensors.
        self._settle()
        others = [each for each in heard if "graph is empty" not in str(each.message).lower()]
        is_empty = len(others) < len(heard)
        if is_empty and not allow_empty:
            self._graph.reset()
            raise EmptyCaptureError(
                self._label,
                expected="at least one kernel between begin and end",
                found="an empty graph",
                do="launch on the capture stream and device, and capture something that computes",
            )
        num_nodes = 0 if is_empty else None
        try:
            for each in others:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            if self._labels is not None and not is_empty:
                self._labels.follow(self._graph)
            if self._device.debug and not is_empty:
                num_nodes = private.count_nodes(self._graph.raw_cuda_graph())
        except BaseException as error:  # noqa: BLE001  Nobody else has this graph to reset it.
            self._graph.reset()
            raise translate(error)  # noqa: B904  It is the same error, or has it as its cause.
        return CUDADeviceGraph(
            self._device,
            self._graph,
            self._pool,
            self._label,
            ledger=self._ledger,
            uses_rng=self._ledger.uses_rng or not self._observes,
            num_nodes=num_nodes,
        )

    def abort(self, first_error: BaseException) -> BaseException:
        """Close the window, drop what was recorded, and say what went wrong. Never raises."""
        failure = self._explain(first_error)
        if self.is_open:
            self._close()
            self._clean_up(self._drop, failure)
        return failure

    @contextmanager
    def join_thread(self) -> Iterator[None]:
        """Record the calling thread's work: the capture stream is current and observed there."""
        observer = Observer(self._ledger) if self._observes else None
        with torch.cuda.stream(self._stream.torch_stream), self._device._joined(self):
            if observer is None:
                yield
                return
            observer.enter()
            try:
                yield
            finally:
                observer.leave()

    def opaque(self, fn: Callable[..., Any], args: Sequence[Any], out_meta: Any = None) -> Any:
        """A plain call: CUDA records whatever launches."""
        return fn(*args)

    def _refused(self, error: RuntimeError) -> BaseException:
        """What to raise when torch refused to begin or end; all of it is undone.

        Made here and raised by the caller: a local variable that holds a raised error is a cycle
        through its traceback, which would keep the tensors of every frame in it allocated.
        """
        failure = self._explain(error)
        self._clean_up(self._unwind, failure)
        return failure

    def _close(self) -> None:
        self.is_open = False
        self._pool.is_recording = False
        self._device._closed(self)
        if self._observer is not None:
            self._observer.leave()

    def _capture_end(self) -> list[warnings.WarningMessage]:
        """End torch's capture; return what it warned of, an empty graph for one."""
        with (
            self._on_stream(),
            private.past_modes(),
            warnings.catch_warnings(record=True) as heard,
        ):
            warnings.simplefilter("always")
            self._graph.capture_end()
            if self._device.debug:  # A graph that is kept is not instantiated by itself.
                self._graph.instantiate()
        return heard

    def _explain(self, error: BaseException) -> BaseException:
        """The first device error of the window, translated; an echo is never the first."""
        first, operation = self._ledger.take_failure()
        if first is not None and (first is error or error_code(error) == ECHO):
            return translate(first, operation)
        return translate(error)

    def _drop(self) -> None:
        try:
            self._capture_end()
        except RuntimeError:  # Expected: whatever failed has invalidated the capture.
            self._unwind()
        else:
            self._graph.reset()

    def _clean_up(self, first_step: Callable[[], None], failure: BaseException) -> None:
        """Run every step of the clean-up, whatever the others say; their errors become notes."""
        for step in (first_step, self._settle):
            try:
                step()
            except Exception as error:  # noqa: BLE001  It must not replace the first error.
                failure.add_note(f"while cleaning up after {self._label}: {error!r}")

    def _settle(self) -> None:
        """What every closed window leaves behind: own workspaces, and a pool that knows itself."""
        private.clear_blas_workspaces()
        self._device.refresh_pools()

    def _unwind(self) -> None:
        """Undo what torch leaves behind when a capture could not be ended.

        ``capture_end`` raises as soon as the driver refuses, and up to some release (PyTorch
        #180395, #190348) nothing behind that line runs: device and pinned host allocations stay
        routed to the pool, the pool stays in use, and the generators still believe that they are
        captured, so that the next random number raises. There is no call to undo all of that. But
        torch does undo it when the driver agrees to end: so give it an empty capture to end.
        """
        handle = self._stream.torch_stream.cuda_stream
        with self._on_stream():
            if private.is_stream_capturing():
                private.end_bare_capture(handle)
            private.begin_bare_capture(handle)
            try:
                self._capture_end()
            except RuntimeError:  # This torch had undone its routing before it raised.
                if private.is_stream_capturing():
                    private.end_bare_capture(handle)
                private.stop_routing(self._pool.handle, self._device.index)
                self._free_generators()
            if private.is_stream_capturing():
                raise CaptureError(
                    self._label,
                    expected="a stream that captures no more",
                    found=f"stream {self._stream.name!r} still does",
                    do="close the device and make another",
                )
        self._graph.reset()
        num_uses = self._pool.use_count()
        if num_uses is not None and self._num_uses is not None:
            for _ in range(num_uses - self._num_uses):
                private.release_pool(self._pool.handle, self._device.index)

    def _free_generators(self) -> None:
        """Take the generators out of capture mode, by an empty capture that succeeds."""
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), private.past_modes():
            for generator in self._generators[1:]:
                graph.register_generator_state(generator)
            warnings.simplefilter("ignore")  # It is empty.
            graph.capture_begin(capture_error_mode="thread_local")
            graph.capture_end()
        graph.reset()

    def _on_stream(self) -> AbstractContextManager[Any]:
        # A window may end where a side stream is current; torch ends it on its own stream only.
        return torch.cuda.stream(self._stream.torch_stream)

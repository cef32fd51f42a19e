"""The open recording: what torch is asked to do is recorded instead.

Views run at once, on poisoned pool memory, because they move no data. Kernels are recorded, and
their results allocated. Functions here that call themselves are no closures: such a closure is a
cycle, and would keep the tensors of a call alive until a collection.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphrt.device.base import TensorUse
from graphrt.device.simulated.forbidden_ops import (
    INDEXING,
    MAKES_HOST_TENSOR,
    RESEEDS,
    SEEN_IN_RECORDINGS,
    UNDECLARED,
    Args,
    Kwargs,
    Operator,
    branches,
    check_arguments,
    check_function,
    constant_tensor,
    mixes_host,
    one_hot,
    reads_host,
    takes_numbers,
    unsupported,
    uploads,
)
from graphrt.device.simulated.graph import Call, Shared, SimulatedGraph, Workspace, copy_results
from graphrt.device.simulated.memory import PoolMemory, without_modes
from graphrt.device.simulated.ops import (
    NOT_RECORDED,
    NewTensor,
    Traits,
    decompose,
    leaves,
    tensors_in,
)
from graphrt.device.simulated.races import Accesses, touched_by
from graphrt.device.simulated.streams import RecordedStreams, SimulatedStream
from graphrt.device.simulated.tensors import RecordedTensors
from graphrt.device.torch_modes import (
    OfRecording,
    enter,
    is_for_parts,
    leave,
    report_capturing,
    shown_to_modes,
)
from graphrt.errors import CaptureError, EmptyCaptureError, GraphrtError
from graphrt.source import caller_source

_WORKSPACE_BYTES = 4096


@dataclass(eq=False, repr=False)
class SimulatedRecording:
    """An open recording. See ``base.Recording``."""

    _shared: Shared
    _pool: PoolMemory
    stream: InitVar[SimulatedStream]
    _label: str
    _observe: bool
    generators: InitVar[Sequence[torch.Generator]]

    def __post_init__(self, stream: SimulatedStream, generators: Sequence[torch.Generator]) -> None:
        shared = self._shared
        self._streams = RecordedStreams(self._label, stream)
        self._tensors = RecordedTensors(self._pool, shared)
        self._seed = torch.default_generator.initial_seed()
        # Nothing draws from these now. From the other one the recorded code's host tensors may.
        others = [one for one in generators if one is not torch.default_generator]
        self._states = [(one, one.get_state()) for one in others]
        self._function: Any = None
        """The function of torch's that runs now, as Python called it."""
        self._first_error: BaseException | None = None
        self._accesses = Accesses()
        self._calls: list[Call] = []
        self._uses_rng = False
        self._workspaces: dict[SimulatedStream, Workspace] = {}
        self._owned_workspaces: list[Workspace] = []
        self._modes = ExitStack()
        self._pool.begin_recording()
        shared.thread.set_recording(self._streams)
        try:
            self._modes.enter_context(self._recording())
        except BaseException:
            self._close(None)
            raise

    # The ends, and what may happen in between.

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Everything that the calling thread does is recorded."""
        with ExitStack() as stack:
            stack.enter_context(report_capturing())
            stack.enter_context(shown_to_modes(SEEN_IN_RECORDINGS))
            if self._shared.compiled_code_guard is not None:
                stack.enter_context(self._shared.compiled_code_guard())
            for mode in (_OperatorRecorder(self), _FunctionRecorder(self)):
                enter(mode)
                stack.callback(leave, mode)
            yield

    def end(self, allow_empty: bool = False) -> SimulatedGraph:
        if not self._streams.is_open:
            raise CaptureError(
                f"{self._label}: the recording is closed already",
                expected="an open recording",
                found="one that was ended or aborted",
                do="begin a new recording.",
            )
        self._modes.close()
        graph = None
        try:
            graph = self._build(allow_empty)
        finally:
            self._close(graph)
        return graph

    def abort(self, first_error: BaseException) -> BaseException:
        if self._streams.is_open:
            self._modes.close()
            self._close(None)
        return first_error

    def _close(self, graph: SimulatedGraph | None) -> None:
        # Kept by the recording, the error would be a cycle through its traceback, and hold tensors.
        self._first_error = None
        self._streams.close()
        # Each recording owns its workspaces: another one must not find them here.
        self._shared.workspaces.clear()
        self._shared.thread.set_recording(None)
        if graph is not None:
            self._shared.memory.graphs[graph] = graph.num_nodes
        self._pool.end_recording(keep=graph is not None)

    @contextmanager
    def join_thread(self) -> Iterator[None]:
        with self._shared.thread.join(self._streams), self._recording():
            yield

    def opaque(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        out_meta: Any = None,
        written: Sequence[int] | Mapping[int, str] = (),
    ) -> Any:
        name = getattr(fn, "__name__", type(fn).__name__)
        try:
            with without_modes():
                if callable(out_meta) and not isinstance(out_meta, torch.Tensor):
                    out_meta, written = out_meta()
                if out_meta is None:
                    raise unsupported(
                        name,
                        f"opaque call of {name} without out_meta",
                        expected="out_meta: tensors (meta ones too) that say what the call returns",
                        found="none",
                        do="pass out_meta (an empty tuple if it returns None).",
                    )
                taken = {one.untyped_storage()._cdata for one in tensors_in(args)}
                views = {
                    at: one
                    for at, one in enumerate(out_meta if type(out_meta) is tuple else ())
                    if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata in taken
                }
                if views:
                    out_meta = tuple(
                        None if at in views else one for at, one in enumerate(out_meta)
                    )
                for at, line in written.items() if isinstance(written, Mapping) else ():
                    self._tensors.aliased(args[at], True, name, line)
                results = self._record(fn, name, args, {}, written, out_meta)
        except GraphrtError as error:
            self.fail(error)
            raise
        return tuple(views.get(at, one) for at, one in enumerate(results)) if views else results

    def _build(self, allow_empty: bool) -> SimulatedGraph:
        """The graph. The modes are gone, the streams still belong to the recording."""
        if self._first_error is not None:
            raise self._first_error
        self._shared.faults.check_end()
        if torch.default_generator.initial_seed() != self._seed or not all(
            torch.equal(one.get_state(), state) for one, state in self._states
        ):
            raise RESEEDS.error()
        self._streams.check_joined()
        if not self._calls and not allow_empty:
            raise EmptyCaptureError(
                f"{self._label}: nothing was recorded",
                expected="at least one kernel in the recording",
                found="none",
                do="check that the callable does its work on this device and this stream.",
            )
        self._shared.memory.check_graph(self._label, len(self._calls))
        self._pool.poll()
        used = [one for one in self._tensors.held.values() if one.used_by_kernel]
        uses = [
            TensorUse(one.tensor, one.written, one.source) for one in used if not one.is_constant
        ]
        return SimulatedGraph(
            label=self._label,
            calls=tuple(self._calls),
            uses_rng=self._uses_rng,
            externals=tuple(uses) if self._observe else (),
            held=tuple([one.tensor for one in used]),
            scratch=self._tensors.scratch(),
            workspaces=tuple(self._workspaces.values()),
            owned_workspaces=tuple(self._owned_workspaces),
            pool=self._pool,
            shared=self._shared,
        )

    # The operators, as torch dispatches them.

    def record_operator(
        self, func: Operator, args: Args, kwargs: Kwargs, mode: TorchDispatchMode
    ) -> Any:
        """Record ``func``, or run it if it moves no data. ``mode``: what records its parts."""
        traits = self._shared.operators.traits(func)
        if func.namespace == "c10d":
            raise unsupported(
                traits.name,
                f"{traits.name} cannot be recorded on the simulated device",
                expected="operators whose schema says which tensors they write",
                found="a collective of torch.distributed, which does not",
                do="call it in an operator of your own (torch.library) that says so, or in a "
                "break point.",
            )
        if traits.makes_constant:
            made = func(*args, **kwargs)
            return self._host_tensor(made) if made.numel() else made
        if self._is_on_host(func, traits, args, kwargs):
            result = func(*args, **kwargs)
            self._tensors.note_host(result)
            return result
        forbidden = traits.forbidden
        if traits.depends_on_arguments:
            forbidden = check_arguments(func, args, kwargs, self._tensors.is_host)
        elif (
            forbidden is None
            and traits.asks_metadata
            and self._shared.operators.reads_data(func, args, kwargs)
        ):
            forbidden = reads_host(traits.name)
        if forbidden is not None:
            raise forbidden.error()
        if traits.is_composite:
            with mode:
                return decompose(func, args, kwargs)
        if traits.moves_no_data:
            self._tensors.note_inputs(args, traits.name)
            return func(*args, **kwargs)
        if traits.written:
            self._grow_empty(func, traits, args, kwargs)
        described = self._shared.operators.results(func, args, kwargs)
        if described is NOT_RECORDED:
            self._tensors.note_inputs(args, traits.name)
            return func(*args, **kwargs)
        if traits.only_allocates:
            stream, source = self._shared.thread.stream, caller_source()
            self._streams.issue(stream, traits.name, source)
            return self._tensors.allocated(described, stream, source)
        if traits.takes_workspace:
            self._take_workspace()
        if traits.uses_rng:
            self._check_generator(leaves((args, tuple(kwargs.values()))))
            self._uses_rng = True
        # Replays call it without its Python frame, where torch names it so.
        call = getattr(func, "_op", func)
        written = traits.written
        if traits.hidden_writes is not None:
            written = written.union(traits.hidden_writes(args))
        results = self._record(call, traits.name, args, kwargs, written, described)
        return _returned(results, traits, args, kwargs)

    def _is_on_host(self, func: Operator, traits: Traits, args: Args, kwargs: Kwargs) -> bool:
        """Whether it works on host memory alone, and so runs now.

        Errors: ``ForbiddenOperationError`` if it takes host memory beside tensors of the device,
        apart from what passes for a number.
        """
        tensors = tensors_in((args, tuple(kwargs.values())))
        on_host = [one for one in tensors if self._tensors.is_host(one)]
        if not on_host:
            return False
        # A factory that names a device makes a tensor there; a copy of host values is a host's.
        names_device = kwargs.get("device") is not None and not traits.name.startswith(
            "aten::_to_copy"
        )
        if len(on_host) == len(tensors):
            return not names_device
        if traits.is_composite or traits.asks_metadata or traits.name in _TAKES_HOST:
            return False
        is_written = any(self._tensors.is_host(one) for one in _written(traits, args, kwargs))
        if is_written or not takes_numbers(func, args, kwargs, on_host):
            raise mixes_host(traits.name).error()
        return False

    def _check_generator(self, given: list[Any]) -> None:
        # By address: operators get other Python objects of the same generators.
        drawn: list[Any] = [one for one in given if isinstance(one, torch.Generator)]
        known: list[Any] = [torch.default_generator, *[one for one, _ in self._states]]
        if not {one._cdata for one in drawn} <= {one._cdata for one in known}:
            raise UNDECLARED.error()

    def _host_tensor(self, made: Any) -> Any:
        """``made`` of host values: host memory, of which replays only see what it holds now."""
        name = getattr(self._function, "__name__", "from_numpy")
        if self._function is torch.Tensor.new:
            raise uploads("Tensor.new (of host values)").error()
        if self._function not in INDEXING:
            forbidden = constant_tensor(f"torch.{name}")
            if self._shared.strict:
                raise forbidden.error()
            source = caller_source()
            warnings.warn_explicit(
                f"{forbidden.name} while capturing: {forbidden.reason}, at {source.with_text}",
                UserWarning,
                source.file or "<unknown>",
                source.line,
                registry=self._shared.warned,
            )
        self._tensors.note_host(made)
        return made

    def _grow_empty(self, func: Operator, traits: Traits, args: Args, kwargs: Kwargs) -> None:
        """Allocate for results that the caller passed as tensors without elements."""
        if all(one.numel() for one in _written(traits, args, kwargs)):
            return
        stream, source = self._shared.thread.stream, caller_source()
        for tensor, new in self._shared.operators.grown(func, args, kwargs):
            with without_modes():
                memory = self._tensors.allocated(new, stream, source)
                tensor.set_(memory)

    def call_function(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """A call that torch may answer without dispatching anything."""
        forbidden = check_function(func, args, kwargs, self._tensors.is_host)
        if forbidden is not None:
            error = forbidden.error()
            self.fail(error)
            raise error
        if func is torch._C._nn.one_hot:
            func = one_hot
        outer, self._function = self._function, func
        try:
            result = func(*args, **kwargs)
            if func in MAKES_HOST_TENSOR and not isinstance(args[0], torch.Tensor):
                result = self._host_tensor(result)
            return result
        finally:
            self._function = outer

    def fail(self, error: GraphrtError) -> None:
        """A stream that met an error captures no more, even if the caller goes on."""
        if self._first_error is None:
            self._first_error = error
            error.found = f"{error.found}, while recording {self._label!r}"

    def _record(
        self,
        function: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: Kwargs,
        written: Collection[int | str],
        described: Any,
    ) -> Any:
        """Add a call of ``function`` to the graph, and allocate what it returns, as described."""
        stream, source = self._shared.thread.stream, caller_source()
        self._streams.issue(stream, name, source)
        self._shared.faults.check_op(len(self._calls), name, source)
        results = self._tensors.allocated(described, stream, source)
        store: Callable[[Any], object] | None = None
        if isinstance(results, torch.Tensor):
            store = self._tensors.alias(results).copy_
        elif tensors_in(results):
            targets = [
                self._tensors.alias(leaf) if isinstance(leaf, torch.Tensor) else None
                for leaf in leaves(results)
            ]
            are_nested = any(isinstance(one, (list, tuple)) for one in results)
            store = partial(copy_results, targets, are_nested)
        aliased = self._tensors.aliased
        given = tuple([aliased(one, at in written, name) for at, one in enumerate(args)])
        named = {key: aliased(one, key in written, name) for key, one in kwargs.items()}
        call = Call(stream, dict(stream.clock), function, given, named, store, name, source)
        if self._streams.checks_races:
            for value, is_written in touched_by(args, kwargs, written, results):
                self._accesses.note(value, is_written, name, stream, source)
        self._calls.append(call)
        return results

    def _take_workspace(self) -> None:
        if not self._shared.takes_workspaces:
            return
        stream = self._shared.thread.stream
        workspace = self._shared.workspaces.get(stream)
        if workspace is None:
            new = NewTensor((_WORKSPACE_BYTES,), (1,), torch.uint8)
            workspace = Workspace(self._tensors.allocated(new, stream, caller_source()))
            self._shared.workspaces[stream] = workspace
            self._owned_workspaces.append(workspace)
        self._workspaces[stream] = workspace


class _OperatorRecorder(OfRecording, TorchDispatchMode):
    """Sees every operator of the thread it is entered in."""

    supports_higher_order_operators = True

    def __init__(self, recording: SimulatedRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if is_for_parts(types):
            return NotImplemented
        try:
            if isinstance(func, torch._ops.HigherOrderOperator):
                raise _unsupported(func)
            with torch._C.DisableTorchFunction():
                return self._recording.record_operator(func, args, kwargs or {}, self)
        except GraphrtError as error:
            self._recording.fail(error)
            raise


def is_recording() -> bool:
    """Whether the calling thread is recorded, by whichever device."""
    return any(isinstance(mode, _OperatorRecorder) for mode in _get_current_dispatch_mode_stack())


class _FunctionRecorder(OfRecording, TorchFunctionMode):
    """Sees the calls that Python answers without asking the dispatcher, such as ``tolist``."""

    def __init__(self, recording: SimulatedRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        try:
            return self._recording.call_function(func, args, kwargs or {})
        except GraphrtError as error:
            # Our frames, and torch's below, would keep the tensors of this call with the error.
            del args, kwargs
            raise error.with_traceback(None)  # noqa: B904  # the cause is set already


def _unsupported(func: Any) -> GraphrtError:
    name = func.name()
    if name in ("cond", "while_loop"):
        return branches(f"torch.{name}").error()
    return unsupported(
        name,
        f"torch.ops.higher_order.{name} cannot be recorded on the simulated device",
        expected="operators on tensors",
        found=f"{name}, which takes functions",
        do="record the call as an opaque node.",
    )


# They read one of their arguments on the host, wherever the others are.
_TAKES_HOST = frozenset({"aten::_pack_padded_sequence"})


def _written(traits: Traits, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    named = [at for at in traits.written if isinstance(at, str) or at < len(args)]
    return tensors_in([args[at] if isinstance(at, int) else kwargs.get(at) for at in named])


def _returned(results: Any, traits: Traits, args: Args, kwargs: Kwargs) -> Any:
    """What the operator returns: new tensors, and written arguments in their places."""
    places = traits.returns_written
    values = (results,) if len(places) == 1 else results or ()
    returned = [
        value if place is None else args[place] if isinstance(place, int) else kwargs[place]
        for place, value in zip(places, values, strict=True)
    ]
    if len(places) > 1:
        return tuple(returned)
    return returned[0] if returned else None

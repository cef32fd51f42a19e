"""The capture scope: the explicit permission to capture.

While a scope is open its thread runs on the capture stream, the garbage collector is paused, and
the forward context carries the scope; leaving it restores all of that, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.device.base import Device
from graphrt.errors import AmbientError, CaptureInProgressError, ConfigError
from graphrt.events import Captured
from graphrt.graphs.ambient import (
    Ambient,
    compare_ambient,
    read_ambient,
    refuse_grad_mode,
    refuse_other_stream,
)
from graphrt.graphs.builder import ProgramBuilder
from graphrt.graphs.capture import CaptureTerms, capture_program
from graphrt.graphs.collection import CollectorPause
from graphrt.graphs.destination import Destination
from graphrt.graphs.generation import Generation
from graphrt.graphs.jobs import CaptureJob, CaptureReport, CaptureRun, Gate, Progress
from graphrt.graphs.program import Program
from graphrt.graphs.state import Resource, StateGuard, Workspace
from graphrt.graphs.table import ProgramTable

if TYPE_CHECKING:
    from graphrt.graphs.library import GraphLibrary
    from graphrt.graphs.wrapper import CUDAGraphOptions


@dataclass(slots=True, eq=False)
class WrapperCalls:
    """What the calls of wrappers came to while one job was captured."""

    captured: list[Program] = field(default_factory=list)
    is_matched: bool = False
    """True once a wrapper of the step's mode was called: it captured, or found its program."""


class CaptureScope:
    """The permission to capture into one library, as a context manager.

    ``state`` guards what warm-ups and gaps advance; ``sinks`` are tensors they may write instead.
    ``holds``: tensors every program keeps alive (known to a custom kernel only by pointer).
    ``resources``: reserved, prepared and frozen around captures; workspaces too. ``warmups``:
    eager runs per job before anything is captured. ``on_error``: ``"skip"`` keeps a
    ``FailureRecord`` and goes on. ``generation``: add to the ``"current"`` one; rebuild into a
    ``"new"`` one, published at exit, after which the current one is retired; or use ``"lazy"``
    ones of limited size. ``observe``: ``"none"`` for callables that hold compiled code, which runs
    differently under a dispatch mode. ``allow_escape``: names (``*`` and ``?`` as in a shell) of
    attributes that may keep memory of the window.

    Entering ends the validity of every output that a replay returned.
    Errors: ``CaptureInProgressError`` if a scope of this library is open.
    """

    def __init__(
        self,
        library: GraphLibrary,
        *,
        state: StateGuard | None,
        sinks: Sequence[torch.Tensor],
        holds: Sequence[torch.Tensor],
        resources: Sequence[Resource | Workspace],
        warmups: int,
        on_error: Literal["raise", "skip"],
        generation: Literal["current", "new", "lazy"],
        observe: Literal["capture", "none"],
        allow_escape: Sequence[str],
    ) -> None:
        _require_choice("on_error", on_error, ("raise", "skip"))
        _require_choice("generation", generation, ("current", "new", "lazy"))
        _require_choice("observe", observe, ("capture", "none"))
        if warmups < 0:
            raise ConfigError("warmups", expected="0 or more", found=str(warmups), do="correct it")
        self.library = library
        self.device: Device = library.device
        self.builder: ProgramBuilder | None = None
        """The builder whose window is open, where break points find it."""
        self.num_inlined = 0
        """Wrapper calls that ran inline because a window was open."""
        workspaces = [item for item in resources if isinstance(item, Workspace)]
        self.destination = Destination(library, generation, workspaces)
        """The generation that programs go into, and who finds them there."""
        self._resources = [item for item in resources if not isinstance(item, Workspace)]
        self._state = state
        self._warmups = warmups
        self._on_error: Literal["raise", "skip"] = on_error
        self._terms = CaptureTerms(
            holds=tuple(holds),
            sinks=tuple(sinks),
            observe=observe == "capture",
            allow_escape=tuple(allow_escape),
            num_warmups=warmups,
            is_guarded=state is not None,
        )
        self._ambients: dict[BatchDescriptor, Ambient] = {}
        self._calls: WrapperCalls | None = None
        # One permit for the window: taking it is one atomic list operation.
        self._permits = [object()]
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        library, device = self.library, self.device
        library.claim_scope()
        with ExitStack() as exits:
            exits.callback(library.release_scope)
            exits.enter_context(self.destination)
            stream = self.destination.generation().stream
            caller = device.current_stream()
            exits.callback(CollectorPause.enter(self).leave, self)
            device.order(stream, caller)
            exits.callback(device.order, caller, stream)
            exits.enter_context(device.use(stream))
            device.trim()
            exits.enter_context(ForwardContext(capture_scope=self))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.__exit__(kind, error, trace)

    # -- by hand

    @contextmanager
    def step(self, mode: RuntimeMode, key: BatchDescriptor) -> Iterator[ForwardContext]:
        """Run one step: NONE to warm ``key`` up, then the mode to capture. State is the caller's.

        The modes around a warm-up are recorded and compared with those around the capture.
        """
        ambient = read_ambient(self.device)
        if mode is RuntimeMode.NONE:
            self._ambients[key] = ambient
        elif key in self._ambients:
            compare_ambient(self._ambients[key], ambient)
        with ForwardContext(mode, key, capture_scope=self) as context:
            yield context

    # -- a set of keys

    def capture_all(
        self,
        jobs: Sequence[CaptureJob],
        gate: Gate | None = None,
        progress: Progress | None = None,
        later: Iterable[BatchDescriptor] = (),
    ) -> CaptureReport:
        """Warm every job up, freeze resources and workspaces, capture every job in order.

        Order PIECEWISE before FULL, then by tokens, micro-batches and adapters, descending: the
        first capture sets the pool's high-water mark. Another order costs memory.

        ``progress(done, total, job)`` is called as each job is done with. ``later``: keys that
        other calls capture. Resources are reserved for the largest of these and the jobs' keys,
        because none may grow once a graph holds its address.
        Errors: the first failure, unless the scope skips failures.
        """
        run = CaptureRun(
            self,
            gate,
            state=self._state,
            resources=self._resources,
            warmups=self._warmups,
            on_error=self._on_error,
        )
        return run.capture_all(tuple(jobs), progress, later)

    @contextmanager
    def noting_calls(self) -> Iterator[WrapperCalls]:
        """While entered, captures are those of one job and not by hand; note what they are.

        Called by runs of ``capture_all``.
        """
        outer, self._calls = self._calls, WrapperCalls()
        try:
            yield self._calls
        finally:
            self._calls = outer

    # -- one program; called by wrappers

    def find(self, table: ProgramTable, key: BatchDescriptor | None) -> Program | None:
        """Return the valid program that a call in this scope replays, if there is one."""
        if key is None:
            table.find(key)  # raises: nothing can be captured or found without a key
            raise AssertionError("a table never finds a missing key")
        program, calls = self.destination.find(table, key), self._calls
        if program is not None and calls is not None:
            calls.is_matched = True
        return program

    def capture(
        self,
        table: ProgramTable,
        key: BatchDescriptor,
        runnable: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: CUDAGraphOptions,
    ) -> Program:
        """Capture one program and register it. Errors leave no entry, graph or window behind."""
        library, book = self.library, self.library.failure_book
        book.refuse_known(table.owner, table.mode, key)
        try:
            permit = self._permits.pop()
        except IndexError:
            raise CaptureInProgressError(
                f"{table.owner} {table.mode.name} {key}",
                expected="one capture at a time",
                found="another thread's window in this scope",
                do="capture from one thread",
            ) from None
        started = perf_counter()
        try:
            refuse_grad_mode(read_ambient(self.device))
            stream = self.destination.generation().stream
            refuse_other_stream(stream, self.device.current_stream())
            library.make_room(1)
            library.require_budget()
            # Asked again: to make room, the library may have retired the one just asked for.
            generation = self.destination.generation()
            self.builder = self._new_builder(table, key, generation)
            program = capture_program(
                self.builder,
                library,
                generation,
                runnable,
                args,
                kwargs,
                weak_outputs=options.weak_ref_output,
                terms=self._terms,
                by_hand=self._calls is None,
            )
            num_inlined = self.builder.num_inlined
        except AmbientError as error:
            error.locate(owner=table.owner, mode=table.mode.name, key=str(key))
            raise
        except Exception as error:
            # A job's failure is counted once, by the job.
            book.add(table.owner, table.mode, key, error, counts=self._calls is None)
            raise
        finally:
            self.builder = None
            self._permits.append(permit)
        self.num_inlined += num_inlined
        self._register(program, options, perf_counter() - started)
        return program

    def _new_builder(
        self, table: ProgramTable, key: BatchDescriptor, generation: Generation
    ) -> ProgramBuilder:
        return ProgramBuilder(
            device=self.device,
            pool=generation.pool,
            stream=generation.stream,
            owner=table.owner,
            mode=table.mode,
            key=key,
            side_streams=self.library.side_streams,
            generators=self.library.generators,
            observe=self._terms.observe,
        )

    def _register(self, program: Program, options: CUDAGraphOptions, seconds: float) -> None:
        library, memory = self.library, program.memory
        self.destination.publish(program)
        library.num_cudagraph_captured += program.num_graphs
        library.failure_book.succeeded()
        calls = self._calls
        if calls is not None:
            calls.is_matched = True
            calls.captured.append(program)
        library.emit(
            Captured(
                owner=program.owner,
                mode=program.mode,
                key=program.key,
                num_graphs=program.num_graphs,
                num_gaps=program.num_gaps,
                num_nodes=memory.num_nodes,
                seconds=seconds,
                pool_growth_bytes=memory.pool_growth_bytes,
                exec_bytes=memory.exec_bytes,
                slot_bytes=memory.slot_bytes,
                external_bytes=memory.external_bytes,
                display=options.debug_log_enable,
            )
        )


def _require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(name, expected=" or ".join(choices), found=repr(value), do="choose one")

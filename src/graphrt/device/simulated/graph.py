"""A recorded graph: calls in order, and a replay that runs one after the other.

It runs in inference mode and without autocast, which are of the caller and not of the graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from graphrt.device.base import TensorUse
from graphrt.device.simulated.memory import POISON, DeviceMemory, PoolMemory
from graphrt.device.simulated.ops import Operators, leaves
from graphrt.device.simulated.streams import CallingThread, SimulatedStream
from graphrt.errors import CaptureError, DeviceReplayError, GraphMemoryError, RetiredProgramError
from graphrt.source import Source, caller_source


@dataclass(kw_only=True, slots=True)
class Faults:
    """Where the device shall fail, for tests. Numbers count from 0 in each recording or replay."""

    op: int | None = None
    """The kernel that fails while it is recorded."""
    allocation: int | None = None
    """The allocation in a recording that finds no memory."""
    end: bool = False
    """The end of a recording fails."""
    replay_op: int | None = None
    """The kernel that fails at replay; those before it have run."""
    replay_order: int | None = None
    """No fault: replay in a random order that streams and marks permit; the seed of the order."""

    def check_op(self, number: int, operation: str, source: Source) -> None:
        if number == self.op:
            raise _injected(CaptureError, operation, number, source)

    def check_allocation(self, number: int, source: Source) -> None:
        if number == self.allocation:
            raise _injected(GraphMemoryError, "an allocation", number, source)

    def check_end(self) -> None:
        if self.end:
            raise _injected(CaptureError, "the end of the recording", 0, caller_source())


def _injected(error: type[CaptureError], what: str, number: int, source: Source) -> CaptureError:
    return error(
        f"injected fault: {what} failed while capturing",
        expected="no fault",
        found=f"fault at {what} number {number}, at {source.with_text}",
        do="unset device.faults.",
        operation=what,
        source=source.with_text,
    )


class Workspace:
    """Scratch that a library keeps for a stream; the recording that took it owns it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor


@dataclass(kw_only=True)
class Shared:
    """What a device shares with its recordings and graphs."""

    faults: Faults
    strict: bool
    poisons_always: bool
    takes_workspaces: bool
    """Whether matrix products take one."""
    memory: DeviceMemory
    thread: CallingThread = field(default_factory=CallingThread)
    operators: Operators = field(default_factory=Operators)
    workspaces: dict[SimulatedStream, Workspace] = field(default_factory=dict)
    """Of the open recording, as a library that keeps one for each stream sees them."""
    compiled_code_guard: Callable[[], AbstractContextManager[Any]] | None = None
    warned: dict[Any, Any] = field(default_factory=dict)
    """What ``warnings`` keeps for each module: a line that makes constants is told once."""


@dataclass(slots=True)
class Call:
    """One recorded kernel. ``store`` takes its result, where that needs memory."""

    stream: SimulatedStream
    clock: Mapping[SimulatedStream, int]
    """How far into each stream it comes after; in its own, its place."""
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    store: Callable[[Any], object] | None
    operation: str
    source: Source

    def run(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        if self.store is not None:
            self.store(result)


def copy_results(targets: Sequence[torch.Tensor | None], are_nested: bool, results: Any) -> None:
    """Copy results to ``targets``, by position; None: no new tensor, or none in this run,
    as of what ``mkldnn_rnn_layer`` keeps for training alone."""
    values = leaves(results) if are_nested else results
    for target, value in zip(targets, values, strict=True):
        if target is not None and value is not None:
            if 0 in target.stride():  # Expanded: torch writes no memory that elements share.
                own = tuple(slice(None if stride else 1) for stride in target.stride())
                target, value = target[own], value[own]
            target.copy_(value)


@dataclass(eq=False, kw_only=True)
class SimulatedGraph:
    """One recorded graph. See ``base.DeviceGraph``."""

    label: str
    calls: Sequence[Call]
    uses_rng: bool
    externals: Sequence[TensorUse]
    held: Sequence[torch.Tensor]
    """Tensors outside the pool that the calls use: alive as long as the graph."""
    scratch: Sequence[torch.Tensor]
    """The pool bytes that are this graph's own."""
    workspaces: Sequence[Workspace]
    owned_workspaces: Sequence[Workspace]
    pool: PoolMemory
    shared: Shared
    num_nodes: int = field(init=False)
    is_reset: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.num_nodes = len(self.calls)
        self.replay: Callable[[], None] = self._replay

    def _replay(self) -> None:
        if self.is_reset:  # A caller kept the function.
            _raise_retired()
        for workspace in self.workspaces:
            if workspace.tensor is None:
                raise RetiredProgramError(
                    f"{self.label}: the replay uses scratch memory of a graph that was reset",
                    expected="scratch memory that this recording owns",
                    found="a workspace whose owner is gone",
                    do="let each recording take its own workspaces.",
                )
        faults = self.shared.faults
        with torch._C._DisableAutocast(), torch._C._InferenceMode(True):
            if self.shared.poisons_always:
                for one in self.scratch:
                    one.fill_(POISON)
            seed = faults.replay_order
            for at, call in enumerate(self.calls if seed is None else self._shuffled(seed)):
                if at == faults.replay_op:
                    raise self._failed(call, "an injected fault")
                try:
                    call.run()
                except Exception as error:
                    raise self._failed(call, str(error)) from error

    def _shuffled(self, seed: int) -> Iterator[Call]:
        """The calls in a random order in which each comes after what it waited for."""
        random = Random(seed)
        waiting: dict[SimulatedStream, deque[Call]] = {}
        for call in self.calls:
            waiting.setdefault(call.stream, deque()).append(call)
        while waiting:
            ready = [
                stream
                for stream, calls in waiting.items()
                if all(
                    other is stream or calls[0].clock.get(other, 0) < others[0].clock[other]
                    for other, others in waiting.items()
                )
            ]
            stream = random.choice(ready)
            yield waiting[stream].popleft()
            if not waiting[stream]:
                del waiting[stream]

    def schedule_length(self, cost: Callable[[str], float]) -> float:
        """When the last call ends, if each takes ``cost(operation)`` and waits only for its stream
        and for marks. It checks the order of a schedule, and predicts no time."""
        ended: dict[SimulatedStream, list[tuple[int, float]]] = {}
        for call in self.calls:
            begins = 0.0
            for stream, ticks in call.clock.items():
                done = [end for tick, end in ended.get(stream, ()) if tick <= ticks]
                begins = max(begins, done[-1] if done else 0.0)
            end = begins + cost(call.operation)
            ended.setdefault(call.stream, []).append((call.clock[call.stream], end))
        return max((calls[-1][1] for calls in ended.values()), default=0.0)

    def reset(self) -> None:
        if self.is_reset:
            return
        self.is_reset = True
        for workspace in self.owned_workspaces:
            workspace.tensor = None
        self.pool.poison_unless_live(
            [(one.data_ptr(), one.data_ptr() + one.numel()) for one in self.scratch]
        )
        # The graph, or the function, may be kept: neither shall keep tensors alive.
        self.replay = _raise_retired
        self.calls = self.externals = self.held = self.scratch = self.workspaces = ()
        del self.shared.memory.graphs[self]

    def _failed(self, call: Call, what: str) -> DeviceReplayError:
        return DeviceReplayError(
            f"{self.label}: the replay failed at {call.operation}",
            expected="every recorded kernel to run",
            found=f"{what} in {call.operation}, recorded at {call.source}",
            do="treat what the graph writes as undefined; nothing was run a second time.",
        )


def _raise_retired() -> None:
    raise RetiredProgramError(
        "a graph was replayed after its reset",
        expected="a graph that was not reset",
        found="a graph whose memory has been given up",
        do="capture it again.",
    )

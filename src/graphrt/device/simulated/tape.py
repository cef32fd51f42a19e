"""A recorded graph: kernels in order, and one generated function that calls them.

The function is straight-line code with every callable and argument as a default value, so that a
replay looks nothing up. It runs in inference mode, which takes autograd out of every call, and
outside of any mode that recorded it.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from graphrt.device.base import ExternalUse
from graphrt.device.simulated.kernels import Call, copy_results
from graphrt.device.simulated.memory import POISON, PoolMemory
from graphrt.errors import DeviceReplayError, RetiredProgramError

if TYPE_CHECKING:
    from graphrt.device.simulated.device import SimulatedDevice

NODE_BYTES = 1843
"""Driver memory for each node: 1.8 KiB, measured on an H200."""


class Workspace:
    """Scratch that a library keeps for a stream; the recording that took it owns it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def release(self) -> None:
        self.tensor = None


class Node(NamedTuple):
    """One recorded kernel."""

    call: Call
    operation: str
    source: str


def _retired() -> None:
    """Takes the place of a replay function after ``reset``, also where a caller kept it."""
    raise RetiredProgramError(
        "a graph was replayed after its reset",
        expected="a graph that was not reset",
        found="a graph whose memory has been given up",
        do="capture it again.",
    )


class SimulatedGraph:
    """One recorded graph. See ``base.DeviceGraph``."""

    replay: Callable[[], None]

    def __init__(
        self,
        device: SimulatedDevice,
        pool: PoolMemory,
        label: str,
        nodes: Sequence[Node],
        *,
        uses_rng: bool,
        externals: Sequence[ExternalUse],
        held: Sequence[Any],
        scratch: Sequence[torch.Tensor],
        workspaces: Sequence[Workspace],
        owned_workspaces: Sequence[Workspace],
    ) -> None:
        self.label = label
        self._device = device
        self._pool = pool
        self._nodes = tuple(nodes)
        self._uses_rng = uses_rng
        self._externals = tuple(externals)
        self._held = tuple(held)
        self._scratch = tuple(scratch)
        self._workspaces = tuple(workspaces)
        self._owned_workspaces = tuple(owned_workspaces)
        self._num_nodes = len(self._nodes)
        self._file = f"<graphrt simulated {label} {id(self):x}>"
        self._first_line = 0
        self.is_reset = False
        self.replay = self._generate()

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def uses_rng(self) -> bool:
        return self._uses_rng

    @property
    def externals(self) -> Sequence[ExternalUse]:
        return self._externals

    @property
    def operations(self) -> Sequence[str]:
        """The names of the recorded operators, in order."""
        return [node.operation for node in self._nodes]

    def reset(self) -> None:
        if self.is_reset:
            return
        self.is_reset = True
        # The function may have been kept: it must neither run nor keep the tensors alive.
        function: Any = self.replay
        function.__defaults__ = None
        function.__code__ = _retired.__code__
        function.__globals__["RetiredProgramError"] = RetiredProgramError
        for workspace in self._owned_workspaces:
            workspace.release()
        self._pool.poison_unless_live(
            [(one.data_ptr(), one.data_ptr() + one.numel()) for one in self._scratch]
        )
        self._nodes = ()
        self._externals = ()
        self._held = ()
        self._scratch = ()
        linecache.cache.pop(self._file, None)
        self._device.forget(self)

    def _generate(self) -> Callable[[], None]:
        constants: dict[str, Any] = {}
        names: dict[int, str] = {}

        def constant(value: Any) -> str:
            name = names.get(id(value))
            if name is None:
                name = names[id(value)] = f"c{len(constants)}"
                constants[name] = value
            return name

        def call_text(call: Call) -> str:
            args = [constant(one) for one in call.args]
            args += [f"{name}={constant(one)}" for name, one in call.kwargs.items()]
            text = f"{constant(call.function)}({', '.join(args)})"
            if not call.copy_to:
                return text
            if not any(to is not None for to in call.copy_to):
                return text
            if call.is_single:
                return f"{constant(torch.Tensor.copy_)}({constant(call.copy_to[0])}, {text})"
            return f"{constant(copy_results)}({constant(call.copy_to)}, {text})"

        lines = []
        if self._workspaces:
            lines.append(f"{constant(self._check_workspaces)}()")
        if self._device.poison == "always":
            lines += [f"{constant(one)}.fill_({POISON})" for one in self._scratch]
        prologue = len(lines)
        lines += [call_text(node.call) for node in self._nodes] or ["pass"]
        body = "".join(f"            {line}\n" for line in lines)
        constants |= {
            "faults": self._device.faults,
            "autocast": torch._C._is_any_autocast_enabled,
            "inference": torch._C._InferenceMode,
            "slow": self._replay_slowly,
            "failed": self._failed,
        }
        parameters = ", ".join(f"{name}={name}" for name in constants)
        source = (
            f"def replay({parameters}):\n"
            "    if faults.replay_op is not None or autocast():\n"
            "        return slow()\n"
            "    try:\n"
            "        with inference(True):\n"
            f"{body}"
            "    except Exception as error:\n"
            "        raise failed(error) from error\n"
        )
        self._first_line = 6 + prologue
        lines_of_source = source.splitlines(keepends=True)
        linecache.cache[self._file] = (len(source), None, lines_of_source, self._file)
        exec(compile(source, self._file, "exec"), constants)
        replay: Callable[[], None] = constants["replay"]
        # The default values hold everything. The globals would hold it as well, also after reset.
        constants.clear()
        return replay

    def _check_workspaces(self) -> None:
        if any(workspace.tensor is None for workspace in self._workspaces):
            raise RetiredProgramError(
                f"{self.label}: the replay uses scratch memory of a graph that was reset",
                expected="scratch memory that this recording owns",
                found="a workspace whose owner is gone",
                do="let each recording take its own workspaces.",
            )

    def _replay_slowly(self) -> None:
        """The same kernels, one by one: with a fault to inject, or autocast to keep out."""
        fault = self._device.faults.replay_op
        with torch._C._DisableAutocast(), torch._C._InferenceMode(True):
            if self._workspaces:
                self._check_workspaces()
            if self._device.poison == "always":
                for one in self._scratch:
                    one.fill_(POISON)
            for at, node in enumerate(self._nodes):
                if at == fault:
                    raise self._error_at(node, "an injected fault")
                try:
                    node.call.run()
                except Exception as error:
                    raise self._error_at(node, str(error)) from error

    def _failed(self, error: Exception) -> Exception:
        if isinstance(error, RetiredProgramError):
            return error
        line = 0
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                line = trace.tb_lineno
            trace = trace.tb_next
        at = line - self._first_line
        assert 0 <= at < len(self._nodes), "only a recorded kernel can fail"
        return self._error_at(self._nodes[at], str(error))

    def _error_at(self, node: Node, what: str) -> DeviceReplayError:
        return DeviceReplayError(
            f"{self.label}: the replay failed at {node.operation}",
            expected="every recorded kernel to run",
            found=f"{what} in {node.operation}, recorded at {node.source}",
            do="treat what the graph writes as undefined; nothing was run a second time.",
        )

"""The capture scope: how programs are captured, and the explicit permission to do it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.config.checked import (
    check_choice,
    check_count,
    check_flags,
    check_type,
    checked_list,
)
from graphrt.context import CaptureContext, ForwardContext
from graphrt.device.base import Device, Stream
from graphrt.errors import ConfigError, NestedReplayError
from graphrt.externals.environment import CaptureEnvironment
from graphrt.externals.host_snapshot import HostSnapshot
from graphrt.graphs.program import Program
from graphrt.graphs.recorder import ProgramRecorder
from graphrt.graphs.resources import Resource, StateGuard, Workspace
from graphrt.graphs.writes import KeptTensors
from graphrt.source import caller_source

Observe = Literal["ends", "always", "never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureOptions:
    """How programs are captured: one value for a whole scope, or changed for one program.

    Errors: ``ConfigError`` for a value that is none of those listed.

    ``state``: Guards what warm-ups, eager segments and first replays advance: all of it, or the
      capture is refused. A tensor counts as guarded with every other one over its storage.
    ``may_overwrite``: Tensors that these may write instead, where the inputs point (a KV cache).
    ``keep_alive``: Tensors that every program keeps alive, because kernels know them by address
      alone.
    ``warmups``: Eager runs of each job before anything is captured.
    ``on_error``: ``"skip"`` keeps a failure in the catalogue and goes on.
    ``generation``: Add to the current generation; rebuild into a new one, which takes the current
      one's place when the scope ends; or use lazy ones of limited size.
    ``observe``: Which recordings learn what they touch outside the pool, by a dispatch mode that
      slows them, and which warm-ups are, so that what they write undeclared can be put back.
      ``"ends"``: the largest and the smallest key of a callable, and all of them once one touches a
      tensor that nothing names. ``"never"``: for callables that hold compiled code, which runs
      differently under a dispatch mode. None: the device's default, ``"always"`` on the simulated
      device and ``"ends"`` on CUDA. What a capture that is not observed writes, no check sees.
    ``allow_escape``: Names (``*`` and ``?`` as in a shell) of attributes that may keep memory of a
      recording.
    ``checks``: ``"all"``: a callable that writes what neither ``state`` nor ``may_overwrite`` nor
      a static buffer declared ``written`` covers is refused, because warm-ups, eager segments and
      first replays advance it; and first replays are compared with eager. ``"none"``: neither, for
      engines that warm up and check by themselves.
    ``layers``: What operators find as ``layers`` of the forward context, in captures and replays.
    ``weak_outputs``: True: later captures reuse the output's bytes, and the output is an alias
      that keeps nothing allocated. False: the owning tensor.
    ``resources``: Reserved, prepared and frozen around captures, see ``Resource``; workspaces are
      frozen.
    ``stream``: What the scope warms up and records on: a ``torch.cuda.Stream`` of the engine's, or
      a stream of the library's device; None: the library's own. For what ties memory to the stream
      that it is captured on (a custom all-reduce). A pool keeps freed blocks for each stream, so
      that captures on several streams share less memory.
    """

    state: StateGuard | None = None
    may_overwrite: Collection[torch.Tensor] = ()
    keep_alive: Sequence[torch.Tensor] = ()
    resources: Sequence[Resource | Workspace] = ()
    stream: Any = None
    warmups: int = 1
    on_error: Literal["raise", "skip"] = "raise"
    generation: Literal["current", "new", "lazy"] = "current"
    observe: Observe | None = None
    allow_escape: Sequence[str] = ()
    checks: Literal["all", "none"] = "all"
    layers: Mapping[str, Any] | None = None
    weak_outputs: bool = True

    def __post_init__(self) -> None:
        check_choice("on_error", self.on_error, ("raise", "skip"))
        check_choice("generation", self.generation, ("current", "new", "lazy"))
        check_choice("checks", self.checks, ("all", "none"))
        check_choice("observe", self.observe, ("ends", "always", "never", None))
        check_count("warmups", self.warmups, least=0)
        check_flags("CaptureOptions", weak_outputs=self.weak_outputs)
        resources = "a list of objects with a method prepare(key, step_info), and workspaces"
        add = "add the method; reserve, prepare_for_capture and freeze may be left out"
        for name, kind, expected, do in (
            ("may_overwrite", torch.Tensor, "a list of tensors", "leave out what is no tensor"),
            ("keep_alive", torch.Tensor, "a list of tensors", "leave out what is no tensor"),
            ("resources", Resource | Workspace, resources, add),
            ("allow_escape", str, "a list of names", "put it into a list"),
        ):
            value = getattr(self, name)
            # A tensor would be taken for the list of its rows.
            if isinstance(value, torch.Tensor | str):
                found, do = type(value).__qualname__, "put it into a list"
                raise ConfigError(name, expected="a list", found=found, do=do)
            object.__setattr__(self, name, checked_list(name, value, kind, expected, do))
        expected = "an object with the methods save() and restore(token)"
        do = "TensorStateGuard([...]) guards tensors"
        check_type("state", self.state, StateGuard | None, expected, do)
        expected = "a mapping of objects by name"
        check_type("layers", self.layers, Mapping | None, expected, "name them")

    @property
    def workspaces(self) -> list[Workspace]:
        return [item for item in self.resources if isinstance(item, Workspace)]

    @property
    def prepared(self) -> list[Resource]:
        """Those of ``resources`` that are prepared before every run."""
        return [item for item in self.resources if not isinstance(item, Workspace)]


CALL_INNER = (
    "call the inner runner's runner.fn, which becomes part of the outer graph; or run it inside a "
    "break point of a PIECEWISE program, with a library of its own on the same device: "
    "device=outer.device"
)


@dataclass(eq=False)
class CaptureScope:
    """An open permission to capture into one library; see ``GraphLibrary.capture_scope``."""

    library: object
    device: Device
    options: CaptureOptions
    stream: Stream
    """What it warms up and records on."""
    prepare_for_capture: Callable[[BatchDescriptor], None]
    """Called before a key's first warm-up: lets resources set up what is made once for it."""
    recorder: ProgramRecorder | None = None
    """Set while a program is recorded, where break points find it."""
    programs: list[Program] = field(default_factory=list)
    """Captured in this scope, in order."""
    has_frozen_workspaces: bool = False
    guarded: dict[int, set[torch.UntypedStorage | None]] = field(default_factory=dict)
    """By id of a state guard that was watched: the storages that it keeps."""
    hosts: dict[int, HostSnapshot] = field(default_factory=dict)
    """By id of a callable that is captured here: what it remembers on the host."""
    kept: KeptTensors = field(default_factory=KeptTensors)
    """What tensors that nothing declares held before runs of this scope wrote them."""
    runs_inside: dict[str, str] = field(default_factory=dict)
    """By name of a runner that ran inside a callable that is captured here: the user's line."""
    recording_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a program is recorded: one at a time."""
    _environments: dict[BatchDescriptor, CaptureEnvironment] = field(default_factory=dict)

    def host_of(self, fn: object) -> HostSnapshot:
        """The snapshot of what ``fn`` remembers; made before its first run in this scope."""
        known = self.hosts.get(id(fn))
        if known is None:
            known = self.hosts[id(fn)] = HostSnapshot(fn)
        return known

    @property
    def told_runs(self) -> str:
        """Which runners ran inside a callable that is captured here, for an error."""
        told = ", ".join(
            f"the runner {name!r} at {line}" for name, line in self.runs_inside.items()
        )
        return told and f"; inside it runs {told}"

    def note_run(self, name: str) -> None:
        """Note that the runner ``name`` runs inside a callable that is captured here.

        Errors: ``NestedReplayError`` in a recording, outside eager segments.
        """
        recorder = self.recorder
        self.runs_inside[name] = line = str(caller_source())
        if recorder is None or recorder.in_eager:
            return
        raise NestedReplayError(
            f"a run of the runner {name!r} inside the recording of {recorder.owner} "
            f"{recorder.mode.name} {recorder.key}",
            expected="no run of one runner in a graph of another, which would stage into buffers "
            "that the other one fills, and would not notice what replaces its weights",
            found=f"one at {line}" if line else "one",
            do=CALL_INNER,
        )

    @contextmanager
    def step(self, mode: RuntimeMode, key: BatchDescriptor) -> Iterator[ForwardContext]:
        """Run one step: NONE to warm ``key`` up, then the mode to capture. State is the caller's.

        Resources hear of a new key (``prepare_for_capture``); preparing them is the caller's too.
        The environment of a warm-up is kept and compared with that of the capture.
        """
        # Another value is no wrapper's mode: nothing would be captured, without an error.
        check_choice("mode of a step", mode, tuple(RuntimeMode))
        check_type("key of a step", key, BatchDescriptor, "a BatchDescriptor")
        self.prepare_for_capture(key)
        environment = CaptureEnvironment.read(self.device)
        if mode is RuntimeMode.NONE:
            self._environments[key] = environment
        elif key in self._environments:
            self._environments[key].require_equal(environment)
        with CaptureContext(mode, key, capture_scope=self) as context:
            yield context

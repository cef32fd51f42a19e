"""A program: what a capture left behind, ready to be replayed. It cannot capture.

``check`` and ``replay`` are attributes, and a change of state swaps them: a program that must not
run has raising ones, so that state costs nothing per step. Keep the program, never its ``replay``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.device.base import Device, Stream
from graphrt.errors import (
    GraphrtError,
    InvalidProgramError,
    ReplayError,
    RetiredProgramError,
    StreamRaceError,
)
from graphrt.graphs.externals import External
from graphrt.graphs.flat import FlatReplay, Replay, generate_replay
from graphrt.graphs.segments import GraphSegment, Segment
from graphrt.graphs.stale import Checker, InputLeaf, Signature, StaleCheck, generate_checker

State = Literal["captured", "ready", "invalid", "retired"]


class GraphMemory(NamedTuple):
    """What one program costs, in bytes."""

    pool_growth_bytes: int
    """What the pool took from the device for it; 0 where earlier blocks sufficed."""
    exec_bytes: int
    """Free memory of the driver less the allocator's part: the executables. Lumpy."""
    slot_bytes: int
    """Pool memory that receives what gaps return."""
    external_bytes: int
    """Storage outside the pool that the program keeps alive; shared with other programs."""
    num_nodes: int | None
    """Kernel nodes; None where the device cannot know."""


class Program:
    """An ordered list of segments over stable storage, found by (owner, mode, key).

    ``state``: ``captured`` (never replayed), ``ready`` (first call checked; only these may be
    dispatched to), ``invalid`` (an external moved), ``retired``.
    ``outputs``: what the callable returned; the next replay of any program of the library
    overwrites it. None once retired.
    ``knows_externals``: True if ``externals`` tells exactly what the graphs read and write.
    ``hooked_modules``: modules with forward hooks, whose Python ran at capture and never again.
    ``unchecked``: paths of arguments that no check compares (opaque objects).
    """

    __slots__ = (
        "__weakref__",
        "_after_gap",
        "_device",
        "_flat",
        "_has_replayed",
        "_moved",
        "_refusal",
        "_stale_check",
        "_stream",
        "_trained",
        "check",
        "externals",
        "generation",
        "hooked_modules",
        "key",
        "knows_externals",
        "memory",
        "mode",
        "outputs",
        "owner",
        "replay",
        "segments",
        "signature",
        "state",
    )

    check: Checker
    replay: Replay

    def __init__(
        self,
        *,
        owner: str,
        mode: RuntimeMode,
        key: BatchDescriptor,
        generation: int,
        segments: Sequence[Segment],
        signature: Signature,
        outputs: Any,
        externals: Sequence[External],
        memory: GraphMemory,
        device: Device,
        stale_check: StaleCheck = StaleCheck.IDENTITY,
        after_gap: Callable[[], None] | None = None,
        knows_externals: bool = False,
        hooked_modules: Sequence[str] = (),
    ) -> None:
        self.owner = owner
        self.mode = mode
        self.key = key
        self.generation = generation
        self.segments = tuple(segments)
        self.signature = signature
        self.outputs = outputs
        self.externals = tuple(externals)
        self.memory = memory
        self.knows_externals = knows_externals
        self.hooked_modules = tuple(hooked_modules)
        self.state: State = "captured"
        self._device = device
        self._stale_check = stale_check
        self._after_gap = after_gap
        self._flat = self._generate()
        self._trained: Checker | None = None
        self._has_replayed = False
        self._stream: Stream | None = None
        self._moved: tuple[str, ...] = ()
        self._refusal: Callable[[], GraphrtError] | None = None
        self._install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, replay, return the outputs.

        Aliasing: the outputs are graph storage; the next replay of any program of the library
                  overwrites them. Clone to keep.
        Errors:   ``StaleInputError``, ``UnkeyedValueError`` before anything ran.
        """
        self.check(args, kwargs)
        self.replay()
        return self.outputs

    @property
    def title(self) -> str:
        """Owner, mode and key: how errors and tracebacks call this program."""
        return f"{self.owner} {self.mode.name} {self.key}"

    @property
    def inputs(self) -> tuple[InputLeaf, ...]:
        """What capture saw in its arguments, leaf by leaf."""
        return tuple(leaf for leaf in self.signature.leaves.values() if leaf.kind != "container")

    @property
    def unchecked(self) -> tuple[str, ...]:
        return tuple(leaf.path for leaf in self.inputs if leaf.kind == "opaque")

    @property
    def source(self) -> str:
        """The generated replay, one line per segment; gaps name their break point."""
        return self._flat.source

    @property
    def num_graphs(self) -> int:
        return sum(isinstance(segment, GraphSegment) for segment in self.segments)

    @property
    def num_gaps(self) -> int:
        return len(self.segments) - self.num_graphs

    @property
    def external_bytes(self) -> int:
        """Bytes outside the pool that this program keeps alive."""
        return self.memory.external_bytes

    @property
    def is_valid(self) -> bool:
        return self.state in ("captured", "ready")

    def annotated_replay(self) -> Replay:
        """Return a replay with a profiler range per segment. For a look; it is not kept."""
        return generate_replay(self.title, self.segments, self._after_gap, annotate=True).function

    def invalidate(self, names: Sequence[str] = ()) -> None:
        """Refuse replays from now on because ``names`` moved. A retired program stays so."""
        if self.state != "retired":
            self.state = "invalid"
            self._moved = tuple(names)
            self._install()

    def refuse(self, error: Callable[[], GraphrtError]) -> None:
        """Make every use raise ``error()`` until ``accept``, whatever the state."""
        self._refusal = error
        self._install()

    def accept(self) -> None:
        """Undo ``refuse``."""
        self._refusal = None
        self._install()

    def retire(self) -> None:
        """Reset the graphs, newest first, and let go of everything. Only the library calls this."""
        self.state = "retired"
        self._flat.forget()
        self._flat = FlatReplay(_nothing, "", self._flat.filename)
        self._trained = None
        self._install()
        for segment in reversed(self.segments):
            if isinstance(segment, GraphSegment):
                segment.graph.reset()
        self.segments = ()
        self.outputs = None
        self.externals = ()
        self._after_gap = None

    def _generate(self) -> FlatReplay:
        flat = generate_replay(self.title, self.segments, self._after_gap)
        if len(self.segments) == 1 and isinstance(self.segments[0], GraphSegment):
            # One line that calls one callable: the callable itself does the same, sooner.
            return flat._replace(function=self.segments[0].graph.replay)
        return flat

    def _install(self) -> None:
        """Set ``check`` and ``replay`` to what the state allows."""
        refusal = self._refusal
        if self.state == "retired":
            refusal = self._retired_error
        elif refusal is None and self.state == "invalid":
            refusal = self._invalid_error
        if refusal is not None:
            self.check = self.replay = _raising(refusal)
        elif self._trained is None:
            self.check = self._check_first
            self.replay = _raising(self._unchecked_error)
        else:
            self.check = self._trained
            self.replay = self._flat.function if self._has_replayed else self._replay_first

    def _check_first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare everything with what capture saw, then install the generated pair."""
        self.signature.compare(args, kwargs, self.title)
        self._stream = self._device.current_stream()
        self._trained = generate_checker(
            self._stale_check,
            self.signature,
            args,
            kwargs,
            by_address=partial(_owns, self._device),
            full_check=self._check_fully,
        )
        self.state = "ready"
        self._install()

    def _replay_first(self) -> None:
        self._flat.function()
        # Devices learn from a graph's first replay and hand out a leaner callable after it.
        self._flat.forget()
        self._flat = self._generate()
        self._has_replayed = True
        self._install()

    def _check_fully(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.signature.compare(args, kwargs, self.title)
        if self._stale_check is StaleCheck.POINTER:
            current = self._device.current_stream()
            if current is not self._stream:
                first = "" if self._stream is None else self._stream.name
                raise StreamRaceError(
                    self.title,
                    expected=f"stream {first!r}, as at the first replay",
                    found=f"stream {current.name!r}",
                    do="replay and stage on one stream: the pool's blocks are shared by programs",
                )

    def _retired_error(self) -> GraphrtError:
        return RetiredProgramError(
            self.title,
            expected="a program of a live generation",
            found=f"generation {self.generation} is retired",
            do="look the program up at each step instead of keeping it",
        )

    def _invalid_error(self) -> GraphrtError:
        moved = ", ".join(self._moved) or "it was invalidated by hand"
        return InvalidProgramError(
            self.title,
            expected="externals where they were at capture",
            found=f"moved: {moved}" if self._moved else moved,
            do="run the step eager and capture again; to change weights, copy into them",
        )

    def _unchecked_error(self) -> GraphrtError:
        return ReplayError(
            self.title,
            expected="a first call with arguments, which are checked",
            found="replay() of a program that was never called",
            do="call the program, or its wrapper, once with the step's arguments",
        )


def _owns(device: Device, tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and device.owns(tensor)


def _nothing() -> None:
    return None


def _raising(error: Callable[[], GraphrtError]) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise error()

    return refuse

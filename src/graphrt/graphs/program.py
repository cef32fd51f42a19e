"""A program: what a capture left behind, ready to be replayed. It cannot capture.

It is an ordered list of segments, each a device graph or an eager call between two of them.
``check`` and ``replay`` are attributes that a change of state swaps: a program that must not run
has raising ones, so that its state costs nothing per step. Keep the program, never its ``replay``.
"""

from __future__ import annotations

import keyword
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import compress
from operator import not_
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.device.base import Device, DeviceGraph, Stream
from graphrt.errors import (
    BreakOutputError,
    GraphrtError,
    InvalidProgramError,
    ReplayError,
    RetiredProgramError,
    StreamRaceError,
    UnkeyedValueError,
)
from graphrt.externals.held import HeldByResource, HeldTensor, Lookup, Reads, SetByResources
from graphrt.externals.places import Place
from graphrt.externals.unwatched import Unwatched
from graphrt.graphs.generated import make_function
from graphrt.graphs.nesting import ReplayInProgress
from graphrt.graphs.signature import Checker, InputLeaf, Signature, StaleCheck, generate_checker
from graphrt.values import (
    Path,
    bytes_of,
    format_path,
    same_host_value,
    storage_start,
    tensors_of,
    walk,
)

Replay = Callable[[], None]
State = Literal["captured", "ready", "invalid", "retired"]


@dataclass(frozen=True, slots=True)
class GraphSegment:
    """One device graph."""

    graph: DeviceGraph


@dataclass(frozen=True, slots=True)
class Returned:
    """One leaf of what an eager segment returned at capture, and must return at each replay."""

    path: Path
    kind: Literal["static_output", "passed", "host", "opaque"]
    """static_output: a tensor, copied into pool memory that the next graph reads; passed: an
    argument, or a view of one; host: a value the model's Python has already acted on."""
    value: Any
    """static_output, passed: a tensor over the bytes the next graph reads; host: the value."""
    subclass: type | None = None
    """Of a static output: its class, where the model's operators may do something else for it."""


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Static outputs over one storage: they stay one, whatever the model writes through either."""

    leaves: tuple[int, ...]
    """Their positions among ``EagerSegment.returned``."""
    offsets: tuple[int, ...]
    """Where each begins, in bytes."""
    target: torch.Tensor
    """The bytes that all of them lie in."""


@dataclass(frozen=True, slots=True)
class EagerSegment:
    """``fn(*args, **kwargs)``, run at every replay where capture met the break point."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    returned: tuple[Returned, ...]
    site: str
    """Module path, file and line of the break point."""
    writes_out: bool
    """True if ``fn`` gets its static output under a keyword and may return nothing."""
    shared: tuple[SharedBytes, ...] = ()
    has_stub: bool = False
    """True if something else than ``fn`` ran at capture."""
    owns_results: bool = False
    """True if its static outputs or its arguments are written afterwards: what it makes may then
    not be an argument, because the graph would write one where eager execution writes both."""

    @property
    def static_outputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose bytes the next graphs read; each replay overwrites them."""
        return tuple(leaf.value for leaf in self.returned if leaf.kind == "static_output")

    def store(self, result: Any) -> None:
        """Copy what a replay returned into the static outputs.

        Errors: ``BreakOutputError`` for another structure, shape or dtype, or other tensors that
        share memory; ``UnkeyedValueError`` for another host value.
        """
        leaves = [node for node in walk(result) if node.kind != "container"]
        if [leaf.path for leaf in leaves] != [leaf.path for leaf in self.returned]:
            raise self._misfit("the structure returned at capture", f"{type(result).__name__}")
        is_shared = {index for shared in self.shared for index in shared.leaves}
        for index, (expected, found) in enumerate(zip(self.returned, leaves, strict=True)):
            self._store_leaf(expected, found.value, copies=index not in is_shared)
        tensors = {
            index: node.value
            for index, node in enumerate(leaves)
            if self.returned[index].kind == "static_output"
        }
        if self.owns_results:
            self._require_own(tensors)
        if len(tensors) > 1:
            self._store_shared(tensors)

    def _require_own(self, found: Mapping[int, torch.Tensor]) -> None:
        given = {storage_start(tensor) for tensor in tensors_of((self.args, self.kwargs))} - {0}
        for index, tensor in found.items():
            returned = self.returned[index]
            if tensor is not returned.value and storage_start(tensor) in given:
                raise self._misfit(
                    f"{format_path(returned.path, root='result')}: a tensor of its own, as at "
                    "capture, because it or an argument is written afterwards",
                    "an argument, or a view of one",
                    "return a copy (clone) where it returns an argument",
                )

    def _store_shared(self, found: Mapping[int, torch.Tensor]) -> None:
        groups = shared_storages(found)
        expected = [shared.leaves for shared in self.shared]
        if self.has_stub:
            # It tells structure and shapes, hardly what shares memory; the graph has copies.
            groups = {leaves: starts for leaves, starts in groups.items() if leaves in expected}
        if list(groups) != expected:
            raise self._misfit("the tensors that shared memory at capture, and no others", "others")
        for shared, offsets in zip(self.shared, groups.values(), strict=True):
            tensors = [found[index] for index in shared.leaves]
            values = [self.returned[index].value for index in shared.leaves]
            if offsets != shared.offsets or any(
                tensor.stride() != value.stride() or not _same_bits(tensor, value)
                for tensor, value in zip(tensors, values, strict=True)
            ):
                raise self._misfit("views of one tensor as at capture", "other views of it")
            shared.target.copy_(bytes_of(tensors))

    def _store_leaf(self, expected: Returned, found: Any, copies: bool) -> None:
        place = format_path(expected.path, root="result")
        value = expected.value
        if expected.kind == "host" and not same_host_value(value, found):
            raise UnkeyedValueError(
                f"eager {self.site}: {place}",
                expected=f"{value!r}, the value the model acted on at capture",
                found=repr(found),
                do="put it in the key's `variant` or return a tensor",
            )
        if expected.kind in ("host", "opaque") or found is value:
            return
        if not isinstance(found, torch.Tensor):
            raise self._misfit(f"{place}: a tensor", type(found).__name__)
        if found.shape != value.shape or found.dtype is not value.dtype:
            raise self._misfit(
                f"{place}: {value.dtype} of shape {tuple(value.shape)}",
                f"{found.dtype} of shape {tuple(found.shape)}",
            )
        if expected.kind == "static_output":
            subclass = subclass_of(found)
            if subclass is not expected.subclass and not self.has_stub:
                names = [(kind or torch.Tensor).__name__ for kind in (expected.subclass, subclass)]
                raise self._misfit(f"{place}: a {names[0]}, as at capture", f"a {names[1]}")
            if copies:
                # Detached: a step outside no_grad must not tie its history to the static output.
                value.copy_(found.detach())
        elif (
            found.data_ptr() != value.data_ptr()
            or found.stride() != value.stride()
            or not _same_bits(found, value)
        ):
            raise self._misfit(f"{place}: the argument it returned at capture", "another tensor")

    def _misfit(
        self,
        expected: str,
        found: str,
        do: str = "return the same shapes at every step of a key, or capture again",
    ) -> BreakOutputError:
        return BreakOutputError(f"eager {self.site}", expected=expected, found=found, do=do)


def shared_storages(tensors: Mapping[int, torch.Tensor]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Which of ``tensors`` lie in one storage, and where each begins: bytes from the first one."""
    by_storage: dict[int, list[int]] = {}
    for index, tensor in tensors.items():
        start = storage_start(tensor)
        if start and tensor.numel():  # Without elements there is nothing to share.
            by_storage.setdefault(start, []).append(index)
    groups = {}
    for group in by_storage.values():
        if len(group) > 1:
            starts = [int(tensors[i].storage_offset()) * tensors[i].dtype.itemsize for i in group]
            groups[tuple(group)] = tuple(start - min(starts) for start in starts)
    return groups


def subclass_of(tensor: torch.Tensor) -> type | None:
    """The class of a tensor; None for those of torch that do what any tensor does."""
    return None if type(tensor) in (torch.Tensor, torch.nn.Parameter) else type(tensor)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()


Segment = GraphSegment | EagerSegment


class GraphMemory(NamedTuple):
    """What one program costs, in bytes.

    ``pool_growth_bytes``: What the pool took from the device for it; 0 where earlier blocks
      sufficed.
    ``exec_bytes``: Free memory of the driver less the allocator's part: the executables. Lumpy.
    ``static_output_bytes``: Pool memory that receives what eager segments return.
    ``external_bytes``: Storage outside the pool that the program keeps alive; shared with other
      programs.
    ``num_nodes``: Kernel nodes; None where the device cannot know.
    """

    pool_growth_bytes: int
    exec_bytes: int
    static_output_bytes: int
    external_bytes: int
    num_nodes: int | None


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True, repr=False)
class Program:
    """An ordered list of segments over stable storage, found by (owner, mode, key).

    ``owner``, ``mode``, ``key``, ``generation``: whose it is, and of which generation's pool.
    ``segments``: device graphs, and eager calls between them. ``has_eager``: True if there are any
    of these. ``source``: the generated replay, one line or more for each; eager ones name their
    site. ``outputs``: what the callable returned; the next replay of any program of the library
    overwrites it. None once retired. ``signature``: its arguments at capture.
    ``externals``: the tensors outside the pool that it holds. ``values``: the host values that it
    froze and that the callable's code names; ``reads``: where both were found. ``memory``: what it
    costs.
    ``is_observed``: True if its capture was observed. ``is_compared``: True once a replay of it
    equalled eager execution. ``autocast``: the dtype that autocast was on with at capture; None if
    it was off. ``reads_step_info``: True if a graph holds what the forward context said of the
    step. ``device``, ``replaying``, ``stale_check``: those of its library.
    ``moved``: what was replaced, once it is invalid; empty if it was made so by hand.
    ``suspected``: what resources own of what it reads and have replaced, perhaps because another
    key has its own: only once they are prepared can be told whether a replay reads the right one.
    ``set_by_resources``: host values that resources may set before each run, as they were at the
    capture, but those with others of which a run was right.
    ``check``: raises unless the arguments are those that were captured. ``replay``: launches the
    segments; the first call of ``check`` installs it.
    """

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    generation: int
    segments: Sequence[Segment]
    signature: Signature
    outputs: Any
    externals: Sequence[HeldTensor]
    reads: Reads | None
    values: Sequence[Place]
    memory: GraphMemory
    autocast: torch.dtype | None = None
    is_observed: bool = True
    reads_step_info: bool = False
    device: Device
    replaying: ReplayInProgress
    stale_check: StaleCheck
    after_eager: InitVar[Callable[[], None] | None]

    check: Checker = field(init=False)
    replay: Replay = field(init=False)
    source: str = field(init=False)
    has_eager: bool = field(init=False)
    is_compared: bool = field(init=False, default=False)
    moved: tuple[str, ...] | None = field(init=False, default=None)
    suspected: Sequence[HeldByResource] = field(init=False, default=())
    set_by_resources: SetByResources = field(init=False)
    _of_resources: Sequence[HeldByResource] = field(init=False)
    _ignored: frozenset[str] = field(init=False)
    _filename: str = field(init=False)
    _function: Replay = field(init=False)
    _stream: Stream | None = field(init=False, default=None)
    _recheck: Callable[[], object] | None = field(init=False, default=None)
    _ask: Callable[[], object] | None = field(init=False, default=None)
    _is_retired: bool = field(init=False, default=False)
    _refusal: Callable[[], GraphrtError] | None = field(init=False, default=None)
    _checker: Checker | None = field(init=False, default=None)

    def __post_init__(self, after_eager: Callable[[], None] | None) -> None:
        self.segments, self.externals = tuple(self.segments), tuple(self.externals)
        assert self.reads is not None, "let go of when it is retired"
        self.values, self._ignored = tuple(self.values), self.reads.prepared
        self._of_resources = self.reads.held_by_resources(self.externals)
        self.set_by_resources = self.reads.set_by_resources()
        self.has_eager = any(isinstance(segment, EagerSegment) for segment in self.segments)
        self._filename = _free_filename(self.title)
        guard = (self.replaying, self.title) if self.has_eager else None
        self._function, self.source = generate_replay(
            self.segments, self._filename, after_eager, guard
        )
        if len(self.segments) == 1 and isinstance(self.segments[0], GraphSegment):
            # One line that calls one callable: the callable itself does the same, sooner.
            self._function = self.segments[0].graph.replay
        self._install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, replay, return the outputs.

        Aliasing: the outputs are graph storage; the next replay of any program of the library
                  overwrites them. Clone to keep.
        Errors:   ``StaleInputError``, ``UnkeyedValueError`` before anything ran;
                  ``NestedReplayError`` inside an eager segment of a program of the library.
        """
        if self.replaying.title is not None:
            raise self.replaying.refusal(self.title)
        self.check(args, kwargs)
        self.replay()
        return self.outputs

    @property
    def title(self) -> str:
        """Owner, mode and key: how errors and tracebacks call this program."""
        return f"{self.owner} {self.mode.name} {self.key}"

    @property
    def state(self) -> State:
        """``captured`` (never called), ``ready`` (first call checked), ``invalid``, ``retired``."""
        if self._is_retired:
            return "retired"
        if self.moved is not None:
            return "invalid"
        return "captured" if self._checker is None else "ready"

    @property
    def knows_externals(self) -> bool:
        """True if ``externals`` tell exactly what the graphs read and write."""
        return self.is_observed and self.device.name == "simulated"

    @property
    def is_valid(self) -> bool:
        """True if nothing it reads has moved and its graphs exist."""
        return self.moved is None and not self._is_retired

    @property
    def inputs(self) -> tuple[InputLeaf, ...]:
        """What capture saw in its arguments, leaf by leaf."""
        return tuple(leaf for leaf in self.signature.leaves.values() if leaf.kind != "container")

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Opaque objects, which no check compares: paths of arguments, of what containers among
        them have besides their entries, and of what eager segments returned."""
        leaves = self.signature.leaves.values()
        return (
            *(leaf.path for leaf in leaves if leaf.kind == "opaque"),
            *(f"{leaf.path}.{name}" for leaf in leaves for name in leaf.besides),
            *(
                f"{segment.site}: {format_path(leaf.path, root='result')}"
                for segment in self.segments
                if isinstance(segment, EagerSegment)
                for leaf in segment.returned
                if leaf.kind == "opaque"
            ),
        )

    @property
    def unwatched(self) -> tuple[Unwatched, ...]:
        """What its callable reads besides its arguments and no step compares."""
        return () if self.reads is None else self.reads.unwatched

    @property
    def num_graphs(self) -> int:
        return sum(isinstance(segment, GraphSegment) for segment in self.segments)

    @property
    def num_eager(self) -> int:
        """Eager segments: Python that runs at every replay."""
        return len(self.segments) - self.num_graphs

    @property
    def sources(
        self,
    ) -> tuple[Sequence[HeldTensor], Sequence[Place], Reads | None, frozenset[str], Sequence[Any]]:
        """What ``watched_tensors`` (all) and ``watched_values`` (the second to fourth) are told
        from: while these are the same objects, so are the answers."""
        return self.externals, self.values, self.reads, self._ignored, self.suspected

    def watched_tensors(self) -> list[HeldTensor]:
        """The tensors whose replacement makes it wrong.

        Where the device cannot see all that a graph reads, all tensors that it holds.
        """
        ignored, suspected = self._ignored, {item.held.name for item in self.suspected}
        return [
            item
            for item in self.externals
            if (item.touched and item.name not in suspected)
            or not (self.knows_externals or item.name in ignored)
        ]

    def watched_ways(self) -> list[Place]:
        """The places in resources that lead to tensors which it reads."""
        return [place for item in self._of_resources for place in item.way[:-1]]

    def watched_values(self) -> list[Place]:
        """The host values whose replacement makes it wrong."""
        ignored = self._ignored
        return [place for place in self.values if place.path not in ignored]

    def find_moved(self, lookup: Lookup | None = None) -> list[str]:
        """Names of what it reads that another storage, value or code stands behind now."""
        if self.reads is None:
            return []
        replaced = [item.was_replaced() for item in self._of_resources]
        if any(replaced):
            self.suspected = [*self.suspected, *compress(self._of_resources, replaced)]
            self._of_resources = list(compress(self._of_resources, map(not_, replaced)))
        tensors = self.watched_tensors()
        found = (lookup or Lookup()).find(self.reads, tensors, self.values)
        moved = [name for name in found.moved if name not in self._ignored]
        if not moved and found.reads is not self.reads:
            # An object gave way to another that holds the same: that one is looked at from now on.
            others = [item for item in self.externals if item not in tensors]
            self.externals = (*found.tensors, *others)
            self.reads, self.values = found.reads, tuple(found.values)
        return moved

    def find_replaced_by_resources(self) -> list[str]:
        """Names of what is suspected that resources, prepared for its key, have put elsewhere."""
        return [item.held.name for item in self.suspected if item.has_moved()]

    def find_set_otherwise(self) -> list[str]:
        """Names of host values that resources, prepared for its key, have set to others than at the
        capture."""
        return [item.way[-1].path for item in self.set_by_resources.others()]

    def accept_set_otherwise(self) -> None:
        """Let these differ from here on, because a run with others was right."""
        if others := self.set_by_resources.others():
            self.set_by_resources = self.set_by_resources.without(others)

    def settle(self, lookup: Lookup) -> None:
        """Leave out what the callable has itself changed since the capture: counters, flags.

        Called once, after the first replay was checked. A tensor that the graphs are known to read
        stays.
        """
        if self.reads is None:
            return
        tensors = self.watched_tensors()
        names = lookup.find(self.reads, tensors, self.values).moved
        touched = {item.name for item in tensors if item.touched}
        self._ignored |= frozenset(names) - touched

    def suspect(self, recheck: Callable[[], object]) -> None:
        """Let the next check of arguments call ``recheck`` first."""
        self._recheck = recheck
        self._install()

    def ask_each_time(self, ask: Callable[[], object]) -> None:
        """Let every later check of arguments call ``ask`` first."""
        self._ask = ask
        self._install()

    def invalidate(self, names: Sequence[str] = ()) -> None:
        """Refuse replays from now on because ``names`` moved."""
        self.moved = tuple(names)
        self._install()

    def disable(self, error: Callable[[], GraphrtError] | None) -> None:
        """Make every use raise ``error()``, whatever the state; None ends that."""
        self._refusal = error
        self._install()

    def retire(self) -> None:
        """Reset the graphs, newest first, and let go of everything. Only the library calls this."""
        self._is_retired = True
        self.replaying.unasking.discard(self._install)
        linecache.cache.pop(self._filename, None)
        self._checker = None
        self._function = lambda: None
        self._install()
        for segment in reversed(self.segments):
            if isinstance(segment, GraphSegment):
                segment.graph.reset()
        self.segments = ()
        self.outputs = None
        self.externals = self.values = ()
        self._of_resources = self.suspected = ()
        self.set_by_resources = SetByResources(())
        self.reads = self._ask = None

    def _install(self) -> None:
        """Set ``check`` and ``replay`` to what the state allows."""
        refusal = self._refusal
        if self._is_retired:
            refusal = self._retired_error
        elif refusal is None and self.moved is not None:
            refusal = self._invalid_error
        if refusal is not None:
            self.check = self.replay = _raising(refusal)
        elif self._recheck is not None:
            self.check = self._check_suspected
        elif self._checker is None:
            self.check = self._after_asking(self._check_first)
            self.replay = _raising(self._unchecked_error)
        else:
            self.check = self._after_asking(self._checker)
            self.replay = self._function if self.has_eager else self._replay_asking

    def _after_asking(self, check: Checker) -> Checker:
        ask = self._ask
        if ask is None:
            return check

        def ask_and_check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            ask()
            check(args, kwargs)

        return ask_and_check

    def _replay_asking(self) -> None:
        """Replay unless another program is in the middle; ask no more until one begins."""
        self.replaying.require_none(self.title)
        self.replay = self._function
        self.replaying.unasking.add(self._install)
        self._function()

    def _check_suspected(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at everything that is read before the arguments are compared."""
        assert self._recheck is not None, "installed by suspect()"
        recheck, self._recheck = self._recheck, None
        recheck()
        self._install()
        self.check(args, kwargs)

    def _check_first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare everything with what capture saw, then install the generated checker."""
        self.signature.compare(args, kwargs, self.title)
        self._stream = self.device.current_stream()
        self._checker = generate_checker(
            self.stale_check,
            args,
            kwargs,
            by_address=self.device.owns,
            full_check=self._check_fully,
        )
        self._install()

    def _check_fully(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.signature.compare(args, kwargs, self.title)
        if self.stale_check is StaleCheck.POINTER:
            current = self.device.current_stream()
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
        moved = f"moved: {', '.join(self.moved)}" if self.moved else "it was invalidated by hand"
        return InvalidProgramError(
            self.title,
            expected="externals where they were at capture",
            found=moved,
            do="run the step eager and capture again; to change weights, copy into them",
        )

    def _unchecked_error(self) -> GraphrtError:
        return ReplayError(
            self.title,
            expected="a first call with arguments, which are checked",
            found="replay() of a program that was never called",
            do="call the program, or its wrapper, once with the step's arguments",
        )


def generate_replay(
    segments: Sequence[Segment],
    filename: str,
    after_eager: Callable[[], None] | None = None,
    guard: tuple[ReplayInProgress, str] | None = None,
) -> tuple[Replay, str]:
    """Write the replay of ``segments`` as one function, a line or more each; return it, its text.

    It reads no context, hashes nothing and tests nothing per graph. Its text is registered with
    ``linecache`` under ``filename``, so a traceback out of an eager segment shows its site.
    ``after_eager`` runs after every eager segment, before its result is stored (it joins streams).
    ``guard``: lets no other program of the library run in between, and the name of this one.
    """
    # Constants are globals of the function, not default arguments: a program of 65 segments has
    # some 150 of them, and each default argument is copied at each call.
    constants: dict[str, Any] = {"after_eager": after_eager, "Tensor": torch.Tensor}
    lines = []
    for number, segment in enumerate(segments):
        if isinstance(segment, GraphSegment):
            constants[f"graph_{number}"] = segment.graph.replay
            lines.append(f"graph_{number}()")
        else:
            lines += _eager_lines(number, segment, constants, after_eager is not None)
    if guard is not None:
        constants["replaying"], constants["title"] = guard
        lines = [
            # What ``begin`` does, without the call where it is spared.
            "if replaying.title is not None or replaying.unasking:",
            "    replaying.begin(title)",
            "replaying.title = title",
            "try:",
            *(f"    {line}" for line in lines),
            "finally:",
            "    replaying.title = None",
        ]
    source = "\n".join(["def replay():", *(f"    {line}" for line in lines), ""])
    # No modification time: linecache keeps such an entry when it checks its files.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return make_function(source, filename, constants), source


def _eager_lines(
    number: int, segment: EagerSegment, constants: dict[str, Any], joins: bool
) -> list[str]:
    constants[f"eager_{number}"] = segment.fn
    constants[f"store_{number}"] = segment.store
    arguments = []
    for index, value in enumerate(segment.args):
        constants[f"arg_{number}_{index}"] = value
        arguments.append(f"arg_{number}_{index}")
    others = {}
    for name, value in segment.kwargs.items():
        if name.isidentifier() and not keyword.iskeyword(name):
            constants[f"arg_{number}_{name}"] = value
            arguments.append(f"{name}=arg_{number}_{name}")
        else:
            others[name] = value
    if others:
        constants[f"others_{number}"] = others
        arguments.append(f"**others_{number}")
    comment = f"  # {segment.site}".replace("\n", " ")
    lines = [f"result = eager_{number}({', '.join(arguments)}){comment}"]
    if joins:  # What it returned may still be in the making on a side stream.
        lines.append("after_eager()")
    only = segment.returned[0] if len(segment.returned) == 1 else None
    is_value = only is not None and only.kind == "host" and only.value is not None
    if only is None or only.path or only.kind == "opaque" or is_value:
        return [*lines, f"store_{number}(result){comment}"]
    constants[f"expected_{number}"] = only.value
    absent = " and result is not None" if segment.writes_out else ""
    lines.append(f"if result is not expected_{number}{absent}:{comment}")
    if only.kind != "static_output" or only.subclass or segment.owns_results:
        return [*lines, f"    store_{number}(result)"]
    # The usual result is one tensor that fits: it is checked and copied in line, because the
    # general way through ``store`` costs several times as much.
    constants[f"shape_{number}"] = only.value.shape
    constants[f"dtype_{number}"] = only.value.dtype
    constants[f"copy_{number}"] = only.value.copy_
    return [
        *lines,
        f"    if (result.__class__ is Tensor and result.shape == shape_{number}",
        f"            and result.dtype is dtype_{number} and not result.requires_grad):",
        f"        copy_{number}(result)",
        "    else:",
        f"        store_{number}(result)",
    ]


def _free_filename(title: str) -> str:
    """Two libraries may hold programs of one name; each keeps its own text."""
    filename = f"<graphrt {title}>"
    number = 2
    while filename in linecache.cache:
        filename = f"<graphrt {title} ({number})>"
        number += 1
    return filename


def _raising(error: Callable[[], GraphrtError]) -> Callable[..., NoReturn]:
    def raises(*_: Any, **__: Any) -> NoReturn:
        raise error()

    return raises

"""Records one program: opens a recording, cuts it at break points, ends it. It cannot replay.

While a recorder records, the capture scope names it, and break points find it there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import TracebackType
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType, ref

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.device.base import Device, DeviceGraph, Pool, Recording, Stream
from graphrt.device.torch_modes import with_bits_of
from graphrt.errors import BreakError, CaptureError, EmptyCaptureError
from graphrt.externals.held import HeldTensor, Reads, TensorRef, modules_of
from graphrt.graphs.nesting import ReplayInProgress
from graphrt.graphs.program import (
    EagerSegment,
    GraphSegment,
    Returned,
    Segment,
    SharedBytes,
    shared_storages,
    subclass_of,
)
from graphrt.graphs.resources import StateGuard
from graphrt.graphs.writes import Write, observed_writes, whole_of
from graphrt.source import traceback_source
from graphrt.values import (
    bytes_of,
    format_call_path,
    is_host,
    kept_host_value,
    map_leaves,
    rebuild,
    storage_start,
    tensors_of,
    walk_call,
)

_ALIGNMENT = 16
"""Bytes of the largest element."""


class OpenCuts:
    """How many PIECEWISE recordings are open in the process.

    Compiled code cannot read a forward context; it can be compiled for a value of this.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.count += number


open_cuts = OpenCuts()


class _Writes:
    """Whether a tensor is written from now on, in place or through a view.

    ``empty(dtype, device)``: a tensor without elements.
    """

    def __init__(self, tensor: torch.Tensor, empty: Callable[..., torch.Tensor]) -> None:
        self._counter: torch.Tensor | None = None
        # Nothing counts the writes of inference mode, nor those of a tensor made of others.
        if not tensor.is_inference() and not hasattr(tensor, "__tensor_flatten__"):
            # It shares the count, and no memory: the pool shall have that back.
            self._counter = tensor.detach()
            self._counter.data = empty(tensor.dtype, tensor.device)
            self._before = self._counter._version

    def happened(self, *, if_uncounted: bool) -> bool:
        """True if it was written."""
        return if_uncounted if self._counter is None else self._counter._version != self._before


class _Original(NamedTuple):
    """The storage of a tensor that an eager segment made, and the copy that stands for it."""

    storage: ReferenceType[torch.UntypedStorage]
    copy: _Writes


class _Shared(NamedTuple):
    """What one eager segment shares with the graphs. ``segment``: its position."""

    segment: int
    originals: list[_Original]
    given: list[_Writes]
    """Its arguments in the pool."""


@dataclass(kw_only=True, eq=False)
class ProgramRecorder:
    """One capture of one callable, on the calling thread and the current stream."""

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    device: Device
    pool: Pool
    stream: Stream
    replaying: ReplayInProgress
    side_streams: Sequence[Stream]
    generators: Sequence[torch.Generator]
    observe: bool
    keep: Callable[[torch.Tensor], None] | None
    """Called before an eager segment that is observed writes a tensor for the first time."""
    state: StateGuard | None
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    segments: list[Segment] = field(default_factory=list)
    outputs: Any = None
    static_output_bytes: int = 0
    static_outputs: list[ReferenceType[torch.UntypedStorage]] = field(default_factory=list)
    """Weak, because the pool gives their memory to others where the model drops them."""
    in_eager: bool = False
    """True while an eager segment runs at capture."""
    reads_step_info: bool = False
    """True once the callable read ``attn_metadata`` of the forward context outside an eager
    segment: what it said then is part of the graph."""
    eager_writes: list[Write] = field(default_factory=list)
    """Tensors outside the pool that an eager segment wrote while it ran at capture."""
    _saved: list[Any] = field(default_factory=list)
    """What the guard saved before the first eager segment ran."""
    # A worker in a copy of the caller's context finds this recorder too, and must not cut.
    _thread: int = field(default_factory=threading.get_ident)
    _eager_inputs: dict[int, TensorRef] = field(default_factory=dict)
    """Tensors outside the pool that eager segments are bound to, by id: layers share most."""
    _aliases: dict[int, tuple[ReferenceType[torch.Tensor], Any, torch.Tensor]] = field(
        default_factory=dict
    )
    """By id of a pool tensor that eager segments are bound to: it, its layout, what is bound.
    Weak, because the pool gets the memory back where the model drops the tensor."""
    _shared: list[_Shared] = field(default_factory=list)
    """Of each eager segment: what it shares with the graphs, to see who writes it afterwards."""
    _recording: Recording | None = None
    _eager_failure: BaseException | None = None

    @cached_property
    def _label(self) -> str:
        return f"{self.owner} {self.mode.name} {self.key}"

    @cached_property
    def _empty(self) -> Callable[..., torch.Tensor]:
        """One tensor for all that count writes: to make each its own takes longer than the rest."""
        return cache(lambda dtype, device: torch.empty(0, dtype=dtype, device=device))

    @property
    def graphs(self) -> list[DeviceGraph]:
        return [item.graph for item in self.segments if isinstance(item, GraphSegment)]

    def record(self, *, weak_outputs: bool) -> None:
        """Run ``fn`` once inside recordings; fills ``segments`` and ``outputs``.

        What eager segments advance of the guarded state is put back.
        An error leaves no recording open and no graph alive, and propagates with its place noted.
        """
        cuts = self.mode is RuntimeMode.PIECEWISE
        open_cuts.add(cuts)
        try:
            self._open_segment()
            result = self.fn(*self.args, **self.kwargs)
            if self._eager_failure is not None:
                # The model caught what its eager segment raised, and went on outside any recording.
                raise self._eager_failure
            self._close_segment()
            # Once the strong output is gone, later captures reuse its bytes. Not sooner, because
            # the device drops a result that dies inside the recording as unread.
            self.outputs = _map_kept(result, self.device.weak_alias) if weak_outputs else result
            del result
            self._settle_shared()
            if not self.graphs:
                raise EmptyCaptureError(
                    expected="at least one kernel outside eager segments",
                    found="none",
                    do="check that the callable works on tensors of this device",
                )
        except BaseException as error:  # noqa: BLE001 - raised again below, translated or as it is
            num_segments = len(self.segments)
            recording, self._recording = self._recording, None
            first = error if recording is None else recording.abort(error)
            self.reset()
            self._note_place(first, error.__traceback__, num_segments)
            try:
                if first is error:
                    raise
                raise first from first.__cause__ or error
            finally:
                # This frame is in the error's traceback: together they would be a cycle that
                # keeps pool memory alive.
                del first
        finally:
            open_cuts.add(-cuts)
            self._eager_failure = None
            if self.state is not None and self._saved:
                try:
                    self.state.restore(self._saved.pop())
                except BaseException:
                    self.reset()
                    raise

    def run_eager(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        out: str | None = None,
        stub: Callable[..., Any] | None = None,
    ) -> Any:
        """End the segment, run ``fn`` (or ``stub``) eagerly, append it, open the next segment.

        Returns what ``fn`` returned, its tensors replaced by static outputs: pool memory that each
        replay refills and the next graph reads.
        """
        self.in_eager = True
        try:
            self._close_segment()
            site = f"segment {len(self.segments)}: {name}"
            if self.state is not None and not self._saved:
                self._saved.append(self.state.save())
            given = tensors_of((args, kwargs))
            of_pool = [tensor for tensor in given if not self._is_outside(tensor)]
            for tensor in of_pool:
                # The kernels before it have not run: zero keeps index-like values in range.
                _zero(tensor)
            versions = [(tensor, _version(tensor)) for tensor in given]
            watch: AbstractContextManager[list[Write]] = (
                observed_writes(self.keep) if self.observe else nullcontext([])
            )
            self.replaying.begin(f"{self._label}, which is being captured")
            try:
                with watch as writes:
                    result = (stub or fn)(*args, **kwargs)
            finally:
                self.replaying.end()
            self._join_side_streams()  # What it returned may still be in the making there.
            # An observation sees every tensor; without one, versions tell of those that were given.
            writes += [
                Write(tensor, site) for tensor, version in versions if _version(tensor) != version
            ]
            self.eager_writes += [write for write in writes if not self.device.owns(write.tensor)]
            returned: list[Returned] = []
            bind = self._bind(site)
            given_ids = set(map(id, given))
            # Mostly it returns one of its arguments, whose storages need no look then.
            others = [
                each
                for each in tensors_of(result)
                if id(each) not in given_ids or not storage_start(each)
            ]
            addresses = {storage_start(tensor) for tensor in given} - {0} if others else set()
            new = [each for each in others if storage_start(each) not in addresses]
            _require_strided(new, site)
            statics = self._static_outputs(new)
            self._shared.append(
                _Shared(
                    len(self.segments),
                    [
                        _Original(ref(t.untyped_storage()), _Writes(statics[id(t)], self._empty))
                        for t in new
                    ],
                    [_Writes(tensor, self._empty) for tensor in of_pool],
                )
            )
            value = rebuild(result, self._keep_leaf(given_ids, returned, bind, statics))
            bound = {key: _map_kept(item, bind) for key, item in kwargs.items()}
            if out is not None and out not in kwargs:
                bound.update(self._static_output_for(out, returned, site))
            self.segments.append(
                EagerSegment(
                    fn,
                    _map_kept(args, bind),
                    bound,
                    tuple(returned),
                    site,
                    writes_out=out is not None,
                    shared=self._shared_bytes(new, returned),
                    has_stub=stub is not None,
                )
            )
            self._open_segment()
        except BaseException as error:
            self._eager_failure = error
            raise
        finally:
            self.in_eager = False
        return value

    def join_thread(self) -> AbstractContextManager[None]:
        """A worker thread enters it to issue work for the open recording.

        Errors: ``CaptureError`` where nothing is being recorded.
        """
        if self._recording is None:
            raise CaptureError(
                self._label,
                expected="an open recording, which a thread can join",
                found="none",
                do="join it while the callable that is captured runs",
            )
        return self._recording.join_thread()

    def opaque(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        describe: Callable[[], tuple[Any, Sequence[int] | Mapping[int, str]]],
    ) -> Any:
        """Record ``fn(*args)`` as one node. ``describe``: see ``Recording.opaque``."""
        assert self._recording is not None, "asked for by open_recorder"
        return self._recording.opaque(fn, args, describe)

    @property
    def records_here(self) -> bool:
        """True while this thread's calls are recorded."""
        return self._recording is not None and self._thread == threading.get_ident()

    def externals(
        self, reads: Reads, keep_alive: Sequence[torch.Tensor], names: Sequence[str] = ()
    ) -> list[HeldTensor]:
        """Return everything outside the pool that the program must keep.

        ``reads``: what the callable reaches, as it is now. ``names``: of its parameters.
        """
        refs = [
            *(
                TensorRef(format_call_path(node.path, names), node.value)
                for node in walk_call(self.args, self.kwargs)
                if node.kind == "tensor"
            ),
            *self._eager_inputs.values(),
            *(TensorRef(f"keep_alive[{index}]", tensor) for index, tensor in enumerate(keep_alive)),
            *(
                TensorRef("", use.tensor, written=use.written)
                for graph in self.graphs
                for use in graph.externals
            ),
            *(TensorRef("", write.tensor, written=True) for write in self.eager_writes),
        ]
        return reads.hold(refs, self.device.owns)

    def writes(self) -> list[Write]:
        """Every tensor outside the pool that was written, once for each segment."""
        return [
            *(
                Write(use.tensor, use.source)
                for graph in self.graphs
                for use in graph.externals
                if use.written
            ),
            *self.eager_writes,
        ]

    def reset(self) -> None:
        """Destroy what was recorded, newest first."""
        for graph in reversed(self.graphs):
            graph.reset()
        self.segments.clear()
        self.outputs = None

    def _join_side_streams(self) -> None:
        for side in self.side_streams:
            self.device.order(self.stream, side)

    def _open_segment(self) -> None:
        self._join_side_streams()
        label = f"{self._label} segment {len(self.segments)}"
        self._recording = self.device.begin(
            self.pool, self.stream, label, self.generators, observe=self.observe
        )
        # Work on a stream that stays outside the recording would run once, now, and be missing
        # from every replay.
        for side in self.side_streams:
            self.device.order(side, self.stream)

    def _close_segment(self) -> None:
        self._join_side_streams()
        recording, self._recording = self._recording, None
        assert recording is not None, "a segment is closed only while it is recorded"
        graph = recording.end(allow_empty=True)
        if graph.num_nodes == 0:
            graph.reset()
        else:
            self.segments.append(GraphSegment(graph))

    def _settle_shared(self) -> None:
        """Find out what was written of what eager segments and graphs share, now that all ran.

        A graph writes the copy of what a segment returned: whoever keeps the original, which eager
        execution writes, is told of a write. A segment whose result or arguments are written has to
        return at each replay what shares memory as it did at capture.
        """
        for index, originals, given in self._shared:
            segment = self.segments[index]
            assert isinstance(segment, EagerSegment), "noted when it was appended"
            for item in originals:
                storage = item.storage()
                if storage is not None and item.copy.happened(if_uncounted=False):
                    through = f"{segment.site}, through what it returned (return a copy of it)"
                    self.eager_writes.append(Write(whole_of(storage), through))
            shared = [*(item.copy for item in originals), *given]
            if originals and any(writes.happened(if_uncounted=True) for writes in shared):
                self.segments[index] = replace(segment, owns_results=True)
        self._shared.clear()

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._eager_inputs or not self.device.owns(tensor)

    def _bind(self, site: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that maps a tensor to what an eager segment is bound to instead.

        One tensor is bound to one object wherever it stands, because a segment that returns an
        argument is recognised by identity.
        """

        def bind(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self._eager_inputs:
                return tensor
            if not self.device.owns(tensor):
                self._eager_inputs[id(tensor)] = TensorRef(site, tensor)
                return tensor
            layout = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            known = self._aliases.get(id(tensor))
            if known is not None and known[0]() is tensor and known[1] == layout:
                return known[2]
            alias = self.device.weak_alias(tensor)
            self._aliases[id(tensor)] = ref(tensor), layout, alias
            return alias

        return bind

    def _keep_leaf(
        self,
        given_ids: set[int],
        returned: list[Returned],
        bind: Callable[[torch.Tensor], torch.Tensor],
        statics: Mapping[int, torch.Tensor],
    ) -> Callable[[Any, Any], Any]:
        """Return the function that replaces and lists each leaf of an eager segment's result.

        ``statics``: what stands for a tensor that is no argument, nor a view of one, by its id.
        """

        def keep(path: Any, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                static = statics.get(id(value))
                if static is None:
                    alias = bind if id(value) in given_ids else self.device.weak_alias
                    returned.append(Returned(path, "passed", alias(value)))
                    return value
                known = self.device.weak_alias(static)
                returned.append(Returned(path, "static_output", known, subclass_of(value)))
                return static
            kind: Literal["host", "opaque"] = "host" if is_host(value) else "opaque"
            returned.append(Returned(path, kind, kept_host_value(value)))
            return value

        return keep

    def _static_outputs(self, new: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Pool memory for tensors that an eager segment made, by their ids, with what they hold.

        Those over one storage lie in one block again.
        """
        statics: dict[int, torch.Tensor] = {}
        for group in shared_storages(dict(enumerate(new))):
            tensors = [new[index] for index in group]
            source = bytes_of(tensors)
            # Each element where its dtype allows it to be: as many bytes behind such a place.
            lead = source.storage_offset() % _ALIGNMENT
            size = -(-(lead + source.numel()) // _ALIGNMENT) * _ALIGNMENT
            block = self._alloc_static((size,), (1,), torch.uint8)
            block[lead : lead + source.numel()].copy_(source)
            for tensor in tensors:
                start = tensor.storage_offset() * tensor.dtype.itemsize - source.storage_offset()
                static = block.view(tensor.dtype).as_strided(
                    tensor.shape, tensor.stride(), (lead + start) // tensor.dtype.itemsize
                )
                statics[id(tensor)] = with_bits_of(static, tensor)
        for tensor in new:
            if id(tensor) not in statics:
                step = tensor.stride()
                # A broadcast result has fewer bytes than elements; its copy needs room for each.
                step = tensor.contiguous().stride() if 0 in step else step
                static = self._alloc_static(tensor.shape, step, tensor.dtype)
                with torch.no_grad():
                    statics[id(tensor)] = static.copy_(tensor)
        return statics

    def _shared_bytes(
        self, new: Sequence[torch.Tensor], returned: Sequence[Returned]
    ) -> tuple[SharedBytes, ...]:
        """How the static outputs over one storage are refilled."""
        places = [index for index, leaf in enumerate(returned) if leaf.kind == "static_output"]
        found = []
        for group, offsets in shared_storages(dict(enumerate(new))).items():
            leaves = tuple(places[index] for index in group)
            target = bytes_of([returned[leaf].value for leaf in leaves])
            found.append(SharedBytes(leaves, offsets, self.device.weak_alias(target)))
        return tuple(found)

    def _alloc_static(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        static = self.device.alloc(self.pool, size, stride, dtype)
        storage = static.untyped_storage()
        self.static_output_bytes += storage.nbytes()
        self.static_outputs.append(ref(storage))
        return static

    def _static_output_for(
        self, out: str, returned: Sequence[Returned], site: str
    ) -> dict[str, torch.Tensor]:
        if len(returned) == 1 and returned[0].path == () and returned[0].kind == "static_output":
            return {out: returned[0].value}
        raise BreakError(
            site,
            expected=f"one tensor returned where {out!r} is not given",
            found=", ".join(item.kind for item in returned) or "nothing",
            do=f"allocate and return the tensor when {out!r} is None, write into it otherwise",
        )

    def _note_place(self, error: BaseException, trace: TracebackType | None, segment: int) -> None:
        """Say where the capture stopped; what inner rooms already said stays."""
        module_path = _module_path(trace, self.fn)
        source = str(traceback_source(trace))
        mode, key = self.mode.name, str(self.key)
        if isinstance(error, CaptureError):
            error.locate(
                owner=self.owner, mode=mode, key=key, segment=segment, module_path=module_path
            )
            error.source = error.source or source
            return
        place = ", ".join(part for part in (module_path, source) if part)
        error.add_note(f"while capturing {self.owner}, {mode}, {key}, segment {segment}: {place}")


def _module_path(trace: TracebackType | None, runnable: Callable[..., Any]) -> str:
    """The path of the innermost module of ``runnable`` in a traceback."""
    names = {id(module): path for path, module in modules_of(runnable).items()}
    found = ""
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def _zero(tensor: torch.Tensor) -> None:
    """Zero every element; of a broadcast tensor, each byte once."""
    steps = tensor.stride()
    if 0 in steps:
        shape = [1 if step == 0 else size for size, step in zip(tensor.shape, steps, strict=True)]
        tensor = tensor.as_strided(shape, steps, tensor.storage_offset())
    tensor.zero_()


def _require_strided(returned: Sequence[torch.Tensor], site: str) -> None:
    for tensor in returned:
        if tensor.layout is not torch.strided:
            raise BreakError(
                site,
                expected="strided tensors, which each replay copies into the memory graphs read",
                found=f"a tensor of layout {tensor.layout}",
                do="return its parts (indices and values), or make it dense there",
            )


def _version(tensor: torch.Tensor) -> int:
    """In-place writes so far; inference tensors do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _map_kept(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of ``value`` that nobody else changes, with ``change`` applied to each tensor."""
    return map_leaves(
        value,
        lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else kept_host_value(leaf),
    )

"""From a traced graph to the function that calls its compiled pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing

from graphrt.compile import effects, kept_graphs, ranges, splitter
from graphrt.compile.backends import BlackBox, Inductor, Job
from graphrt.compile.custom_ops import SizedForm, sized_forms
from graphrt.compile.dump import Dump
from graphrt.compile.failures import refuse_dropped_sizes, refuse_side_effects, refuse_values
from graphrt.compile.guards import Audit, Axes
from graphrt.compile.kept_graphs import NotKeptError
from graphrt.compile.partition import Cuts, cut_operator, refuse_other_devices
from graphrt.compile.passes import remove_noops, share_masks
from graphrt.compile.ranges import Axis, Range, Symbols
from graphrt.compile.splitter import Described, Piece, PieceInfo, Wrap
from graphrt.config import CompilePlan
from graphrt.events import CacheMiss, Compiled as CompiledEvent, Observer


class CompileReport(NamedTuple):
    """What compiling did."""

    backend: str
    seconds: Mapping[str, float]
    """By phase: ``trace``, ``split``, ``compile``, ``load``."""
    num_compiles: int
    """Calls of the backend."""
    num_graphs: int = 1
    """Graphs that were traced: above 1, there are graph breaks, which level 1 allows."""
    recompiles: tuple[str, ...] = ()
    """At level 1: why torch compiled again what it had compiled."""
    pieces: tuple[PieceInfo, ...] = ()
    ranges: tuple[Range, ...] = ()
    """Sizes that each unique piece is compiled for."""
    misses: Mapping[CacheMiss, int] = {}
    """Why these were not loaded from the cache."""
    num_loaded: int = 0
    """Compiled forms that came from the cache."""
    is_trace_kept: bool = False
    """Whether the trace is that of an earlier process."""
    why_traced: str = ""
    """Why it is not, or why a later process cannot use this one."""
    unmatched_splitting_ops: tuple[str, ...] = ()
    """Those that the traced graph does not have."""
    side_effects: tuple[str, ...] = ()
    """Globals that the traced code changes: eager runs do, replays do not."""
    num_audited: int = 0
    """Things that the trace read and that are compared before each capture."""
    num_noops: int = 0
    """Operations that changed nothing, and were removed."""
    notes: tuple[str, ...] = ()
    """What could not be done as asked, and why."""

    @property
    def num_compiled(self) -> int:
        return sum(piece.kind == "captured" for piece in self.pieces)

    @property
    def num_unique(self) -> int:
        """Of the compiled pieces, those that differ from each other."""
        return len({piece.unique_id for piece in self.pieces if piece.kind == "captured"})

    @property
    def compilation_time(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())


class Setup(NamedTuple):
    """What every trace of a model is compiled with."""

    plan: CompilePlan
    limits: Mapping[str, int]
    """Axis -> the largest size."""
    ops: splitter.SplittingOps
    attention: splitter.SplittingOps
    """Those that read what others store."""
    compiler: Inductor | BlackBox
    wrap: Wrap
    """What becomes of each piece."""
    observer: Observer | None
    dump: Dump


_Forms = dict[fx.GraphModule, tuple[Callable[..., Any], Callable[..., Described]]]
"""Of each unique compiled piece: its code, and what says what a call of it does."""


class Compilation:
    """One traced graph on its way to the function that calls its pieces."""

    def __init__(
        self, setup: Setup, axes: Axes, audit: Audit, *, is_backed: bool, is_written: bool
    ) -> None:
        self._setup, self._axes, self._audit = setup, axes, audit
        self._is_backed, self._is_written = is_backed, is_written
        self._started = perf_counter()
        self._limits, self._plan, self._compiler = setup.limits, setup.plan, setup.compiler
        self._symbols: Symbols | None = None
        self.infos: list[PieceInfo] = []
        self.held = effects.Copies()
        """What the run of the traced call writes."""
        self.report: CompileReport | None = None
        self.graph: bytes | None = None
        """As it was traced, for another process; None where ``is_written`` is false, or it cannot
        be written."""
        self.why_not_kept = ""
        self._missed: Counter[CacheMiss | None] = Counter()
        """None: loaded."""
        self._seconds = {"compile": 0.0, "load": 0.0}
        self._axis = next(iter(self._limits), "")
        """That of ranges and sizes."""
        most = self._limits.get(self._axis, 1)
        self._ranges = ranges.ranges_of(self._plan.ranges, self._plan.sizes, most)
        self._sized: dict[str, SizedForm] = {}
        self._cuts: Cuts | None = None
        """Where Inductor cuts the graph."""

    def run(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The function that Dynamo is to call."""
        self._setup.dump.graph("dynamo.py", graph)
        self._audit.changed = side_effects = refuse_side_effects()
        self._audit.note_traced(TracingContext.get_traced_code() or ())
        refuse_values(graph, self._setup.ops.find)
        if not self._is_backed:
            refuse_dropped_sizes(graph)
        if self._is_written:
            try:
                self.graph = kept_graphs.to_bytes(graph, self._symbols_of(graph, inputs).axes)
            except NotKeptError as error:
                self.why_not_kept = str(error)
        return self.compiled(graph, inputs, side_effects)

    def compiled(
        self, graph: fx.GraphModule, inputs: Sequence[Any], side_effects: tuple[str, ...]
    ) -> Callable[..., Any]:
        """What calls the pieces of ``graph``, all compiled."""
        began = perf_counter()
        symbols = self._symbols = self._symbols_of(graph, inputs)
        num_noops = self._tidy(graph)
        pieces, unmatched = self._cut(graph, symbols)
        seconds = {"trace": began - self._started, "split": perf_counter() - began}
        calls = self._wrapped(pieces, self._compile_all(pieces, symbols))
        self.held = effects.copies_of_written(graph, inputs)
        stitched, source = splitter.stitch(graph, pieces, calls)
        self._setup.dump.write("stitch.py", lambda: source)
        misses = {reason: count for reason, count in self._missed.items() if reason is not None}
        self.report = CompileReport(
            backend=self._compiler.name,
            seconds=seconds | self._seconds,
            num_compiles=sum(misses.values()),
            ranges=self._ranges,
            misses=misses,
            num_loaded=self._missed[None],
            unmatched_splitting_ops=unmatched,
            side_effects=side_effects,
            num_noops=num_noops,
        )
        return stitched

    def _tidy(self, graph: fx.GraphModule) -> int:
        """Run the passes over the whole graph. Returns how many operations did nothing, and are
        gone."""
        plan, ops, dump = self._plan, self._setup.ops, self._setup.dump
        num_noops = num_added = 0
        effects.drop_inference_mode(graph)
        if plan.level == 3 and plan.backend in ("eager", "inductor"):
            if plan.pass_config.enable_noop and (num_noops := remove_noops(graph, ops)):
                dump.graph("dynamo.1_remove_noops.py", graph)
            before = len(graph.graph.nodes)
            share_masks(graph, ops)
            if num_added := len(graph.graph.nodes) - before:
                dump.graph("dynamo.2_share_masks.py", graph)
        told = {"remove_noops": {"removed": num_noops}, "share_masks": {"added": num_added}}
        dump.json("passes.json", lambda: told)
        return num_noops

    def _cut(self, graph: fx.GraphModule, symbols: Symbols) -> tuple[list[Piece], tuple[str, ...]]:
        """As ``splitter.cut``. Errors also: what a replay of these pieces would do wrong."""
        setup, ops, is_opaque = self._setup, self._setup.ops, self._compiler.is_opaque
        by_inductor = self._plan.use_inductor_graph_partition
        marked = cut_operator if by_inductor else None
        pieces, unmatched = splitter.cut(graph, ops, symbols.names, is_opaque, marked)
        setup.dump.pieces(pieces)
        effects.refuse_open_contexts(graph, ops, is_opaque)
        if is_opaque:
            for piece in _captured(pieces):
                effects.refuse_views_of_written(piece)
                effects.refuse_unresolved(piece)
                for readers in (setup.attention, *([ops] if by_inductor else [])):
                    effects.refuse_hidden_reads(piece, readers)
            effects.refuse_shared_writes(pieces)
        if by_inductor:
            refuse_other_devices(graph)
            self._cuts = Cuts(graph, ops, setup.wrap, pieces[0].structure)
        return pieces, unmatched

    def _compile_all(self, pieces: Sequence[Piece], symbols: Symbols) -> _Forms:
        """Every compiled piece, alike ones once."""
        captured = _captured(pieces)
        if self._compiler.name == "inductor":
            called = {splitter.operator_of(node) for piece in captured for node in piece.nodes}
            self._sized = {name: form for name, form in sized_forms().items() if name in called}
            largest = {form.largest_size for form in self._sized.values()}
            self._ranges = ranges.cut_at(self._ranges, largest)
        forms: _Forms = {}
        for piece in captured:
            if piece.module not in forms:
                forms[piece.module] = self._compile(piece, symbols), effects.description(piece)
        return forms

    def _wrapped(self, pieces: Sequence[Piece], forms: _Forms) -> list[Callable[..., Any]]:
        """What the owner of the graphs makes of each piece, in order."""
        calls: list[Callable[..., Any]] = []
        self.infos = [] if self._cuts is None else self._cuts.infos
        for index, piece in enumerate(pieces):
            info = PieceInfo(index, piece.name, piece.kind, piece.is_plain, piece.structure[:16])
            call: Callable[..., Any] = piece.module.forward
            if piece.kind == "captured":
                call, described = forms[piece.module]
                if self._cuts is not None:
                    calls.append(self._cuts.bound(call))
                    continue
                if self._compiler.is_opaque:
                    describe = partial(described, effects.written_inputs(piece))
                    info = info._replace(is_opaque=True, describe=describe)
            else:
                if (written := effects.written_inputs(piece)) and not piece.is_plain:
                    call = effects.noting_writes(call, partial(_at, [*written]))
                if any(self._setup.ops.impl_of(node) is not None for node in piece.nodes):
                    traced = tuple(node.meta.get("example_value") for node in piece.outputs)
                    is_opaque = self._compiler.is_opaque
                    call = effects.checking_results(call, piece.name, traced, is_opaque)
            calls.append(self._setup.wrap(call, info))
            # A report is kept for long; what it needs of a piece is a few words.
            self.infos.append(info._replace(describe=None))
        return calls

    def refuse_shape_guards(self) -> None:
        """Errors: ``ShapeGuardError`` for a branch of the trace that not every size takes."""
        if self._is_backed and self._symbols is not None:
            ranges.refuse_shape_guards(self._symbols.mode, self._symbols.axes, None)

    def branch(self) -> str:
        """The line of a branch of the trace on a size; "" if it has none."""
        known = self._symbols
        return "" if known is None else ranges.branch_of(known.mode, known.axes)

    def _symbols_of(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Symbols:
        """Which symbol stands for which axis, by the tensors whose dimensions were marked."""
        axes: dict[Any, Axis] = {}
        for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
            for dim, name in self._axes.get(id(value), {}).items():
                size = node.meta["example_value"].shape[dim]
                if isinstance(size, torch.SymInt):
                    order = list(self._limits).index(name)
                    axes[size.node.expr] = Axis(name, self._limits[name], order)
        return Symbols(axes, TracingContext.get().fake_mode, is_backed=self._is_backed)

    def _compile(self, piece: Piece, symbols: Symbols) -> Callable[..., Any]:
        """A piece, with every form of it, made before any of them is used."""
        place = symbols.place(piece.inputs, self._axis)
        wanted = self._ranges
        if place is None:  # Its size does not vary, or with another axis.
            wanted = (Range(1, self._limits.get(self._axis, 1)),)
        bounds = ", ".join(f"{name} 1-{most}" for name, most in self._limits.items())
        forms = {}
        for sizes in wanted:
            began = perf_counter()
            mode, inputs, axes = symbols.inputs(piece.inputs, self._axis, sizes)
            # In plain form what is an operator for smaller sizes.
            large = [(op, one) for op, one in self._sized.items() if sizes.start > one.largest_size]
            plain = {op: form.plain for op, form in large}
            module, structure = piece.module, piece.structure
            if any(splitter.operator_of(node) in plain for node in piece.nodes):
                with mode, enable_python_dispatcher():
                    module = splitter.written_out(module, plain, inputs)
                structure = splitter.structure_of(module, symbols.names)
            job = Job(module, inputs, piece.name, structure, sizes, bounds)
            with tracing(TracingContext(mode)):
                form = self._compiler.compile(job)
            ranges.refuse_shape_guards(mode, axes, sizes)
            is_opaque = self._compiler.is_opaque
            forms[sizes] = effects.with_layouts(form.call, piece) if is_opaque else form.call
            seconds = perf_counter() - began
            self._seconds["compile" if form.missed else "load"] += seconds
            self._missed[form.missed] += 1
            if self._setup.observer is not None:
                event = CompiledEvent(piece.name, sizes.start, sizes.end, seconds, form.missed)
                self._setup.observer(event)
        return ranges.chosen_by_size(forms, place)


def _captured(pieces: Sequence[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.kind == "captured"]


def _at(places: Sequence[int], args: Any, _: Any) -> list[Any]:
    return [args[at] for at in places]

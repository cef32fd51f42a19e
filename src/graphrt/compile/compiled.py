"""A callable that is traced once, for every size, and then runs as its pieces."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch.utils import _pytree as pytree

from graphrt.compile import effects, kept_graphs, kept_traces, ranges, splitter, torch_api
from graphrt.compile.backends import BlackBox, Inductor, Job, device_text
from graphrt.compile.cache import CompileCache, key_of
from graphrt.compile.custom_ops import SizedForm, sized_forms
from graphrt.compile.dump import Dump
from graphrt.compile.failures import (
    OF_TRACING,
    refuse_dropped_sizes,
    refuse_side_effects,
    refuse_values,
    translated,
)
from graphrt.compile.guards import Audit, Contract, argument_name
from graphrt.compile.kept_graphs import NotKeptError
from graphrt.compile.kept_traces import KeptTrace
from graphrt.compile.partition import Cuts, cut_operator, refuse_other_devices
from graphrt.compile.passes import remove_noops, share_masks
from graphrt.compile.ranges import Axis, Range, Symbols
from graphrt.compile.splitter import Described, Piece, PieceInfo, Wrap
from graphrt.config import CompilePlan
from graphrt.errors import (
    CompileError,
    ContractError,
    GraphBreakError,
    GraphrtError,
    RecompileError,
    ShapeGuardError,
    copy_error,
)
from graphrt.events import CacheMiss, Compiled as CompiledEvent, Observer
from graphrt.values import tensors_of

_NO_AXES: frozenset[str] = frozenset()

Varying = Sequence[tuple[torch.Tensor, int, str]]
"""Tensor, dimension, axis."""


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


class Compiled:
    """``target``, as it was when it was traced: called with the same arguments, but for sizes.

    ``trace`` comes first; a call before it is a ``CompileError``. ``impls``: Python functions to
    call in place of splitting ops. ``wrap``: what becomes of each piece; called in order, when all
    are compiled. ``limits``: axis -> the largest size; of the first, ``plan`` has ranges and sizes.
    ``observer`` is told what was compiled. ``rank``: of this process, under which it is noted.

    Dynamo asks nothing at calls: each compares its arguments with those traced, ``audit`` all else
    that the trace read. Errors: ``SplittingOpError`` for an unknown splitting op;
    ``ConfigError`` for an unknown backend, and an unknown option of Inductor.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        plan: CompilePlan,
        *,
        limits: Mapping[str, int],
        impls: Mapping[str, Callable[..., Any]] | None = None,
        wrap: Wrap = lambda piece, info: piece,
        observer: Observer | None = None,
        rank: int = 0,
    ) -> None:
        self.runnable = target
        """What walks of what it reaches follow."""
        self.report: CompileReport | None = None
        self._ops = splitter.SplittingOps(plan.splitting_ops, impls)
        self._attention = splitter.SplittingOps(plan.attention_ops)
        is_inductor = plan.backend == "inductor"
        self._compiler = Inductor(plan, rank) if is_inductor else BlackBox(plan.backend)
        self.is_opaque = self._compiler.is_opaque
        """Whether recorders that work by dispatch modes cannot see what its code launches."""
        self._dump = Dump(plan.debug_dump_path, rank)
        self._plan = plan
        self._wrap = wrap
        self._limits = dict(limits)
        self._observer = observer
        self._varying: Varying | None = None
        """Set while it is traced."""
        self._looked_at: tuple[Varying, Sequence[torch.Size | None]] | None = None
        """By ``look``: its inputs, and the shapes of the tensors that the first call was given."""
        self._shapes: list[torch.Size | None] | None = None
        """These, while it looks."""
        self.is_backed = plan.dynamic_shapes == "backed"
        """Whether calls in which an axis has size 1 need a trace of their own: the sizes of others
        are backed then."""
        self._notes: tuple[str, ...] = ()
        self._traces: dict[frozenset[str], _Trace] = {}
        """By axes that have size 1: others are alike for every size only if they are backed."""
        self._ones = _NO_AXES
        """Of the trace that is made."""
        self.keeps_traces = True
        """Whether later processes may use its traces, and it those of earlier ones: to compare
        them, the model runs more often."""
        self._sizes: Mapping[str, int] | None = None
        """Of the next trace, if it may be kept."""
        self._is_tried_backed = False
        """Whether sizes are backed because they are in a trace that was kept."""
        self._is_confirming = False
        self._kept: _Kept | None = None
        """The trace of an earlier process, compared in a run at other sizes."""
        self._why_traced = ""
        self.is_audit_due = False
        """Whether the next call is to compare what the trace read."""

    refused = staticmethod(torch_api.compiled_code_refused)
    """A context in which compiled code that no piece is, raises."""

    def trace(self, run: Callable[[], object], varying: Varying) -> None:
        """Trace it at the first call that ``run`` makes. ``varying``: dimensions of its tensors.

        Traced again: only where ``is_backed``, for sizes of which others are 1.
        Errors: ``CompileError`` and what is below it, ``BreakError`` for a break point; each names
        the user's line. What ``run`` itself raises.
        """
        try:
            self._trace(run, varying)
        except (ShapeGuardError, GraphBreakError) as error:
            # Without bounds of marks (torch 2.11 and 2.12), a slice of the axis is taken for a size
            # that depends on data. Of what does, the second trace says the same.
            if self.is_backed or self._plan.dynamic_shapes != "auto" or self._traces:
                raise
            self.is_backed = True
            self._notes = (
                f"dynamic_shapes: backed instead of unbacked, because of a {error.subject}",
            )
            self._trace(run, varying)

    def look(self, run: Callable[[], object], varying: Varying) -> None:
        """Let ``trace`` know which dimensions vary in arguments that are computed before the call:
        ``run`` is made uncompiled, at other sizes of each axis than it will have there. A trace
        that ``has_kept`` found is compared with it."""
        shapes: list[torch.Size | None] = []
        self._shapes = shapes
        # The model around the part would not be ready for a run that ends in the part.
        self._is_confirming = self._is_there()
        try:
            run()
        finally:
            self._shapes, self._is_confirming = None, False
            if self._kept is None:
                self._try_unbacked()
        self._looked_at = varying, shapes

    def has_kept(self, sizes: Mapping[str, int]) -> bool:
        """Whether an earlier process kept a trace of calls that have these sizes, which the next
        trace is to be of. Before it is used ``confirm`` is to compare it at others."""
        self._sizes, self._kept = sizes, None
        if self._is_there():
            return True
        if self.is_backed or self._plan.dynamic_shapes != "auto" or self._traces:
            return False
        self.is_backed = self._is_tried_backed = True
        if self._is_there():
            self._notes = ("dynamic_shapes: backed, as in the trace that was kept",)
            return True
        self._try_unbacked()
        return False

    def _is_there(self) -> bool:
        place = self._place_of_kept()
        return place is not None and place[0].has(place[1])

    def _try_unbacked(self) -> None:
        if self._is_tried_backed and not self._traces:
            self.is_backed = self._is_tried_backed = False
            self._notes = ()

    def confirm(self, run: Callable[[], object]) -> None:
        """Compare the trace that was kept with the first call that ``run`` makes, at other sizes
        than the trace's. There it ends. Where it fails before that, the trace is made anew."""
        self._is_confirming = True
        try:
            run()
        except _ComparedError:
            pass
        except Exception as error:  # noqa: BLE001 - a start that keeps nothing does not run it
            self._kept = None
            self._why_traced = f"the kept one failed: {type(error).__name__}: {error}"
        finally:
            self._is_confirming = False
        if self._kept is None:
            self._try_unbacked()

    def _place_of_kept(self) -> tuple[CompileCache, str] | None:
        """Where the next trace is kept, and under which key; None if it is not."""
        plan, cache, sizes = self._plan, self._compiler.cache(), self._sizes
        if (
            cache is None
            or sizes is None
            or not self.keeps_traces
            or plan.guard_policy == "keep"
            or plan.use_inductor_graph_partition
            or not torch_api.may_compile()
            or self._identity is None
        ):
            return None
        factors = {
            "torch": self._compiler.versions,
            "dynamo": torch_api.options_of_traces(),
            "plan": plan.compute_hash(),
            "model": self._identity,
            "limits": self._limits,
            "backed": self.is_backed,
            "ones": sorted(axis for axis in sizes if self.is_backed and sizes[axis] == 1),
        }
        return cache, key_of(factors)

    @cached_property
    def _identity(self) -> str | None:
        """What names the model in keys; None where its own code fails."""
        with suppress(Exception):
            return kept_traces.target_of(self.runnable)
        return None

    def _confirm(self, args: Any, kwargs: Any) -> None:
        try:
            self._kept = self._compared(args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it is made anew
            self._why_traced = f"the kept one failed: {type(error).__name__}: {error}"

    def _compared(self, args: Any, kwargs: Any) -> _Kept | None:
        """The trace that was kept, if it is that of this model, as far as this call shows."""
        place = self._place_of_kept()
        if place is None:
            return None
        cache, key = place
        cache.device = cache.device or _devices_of(args, kwargs)
        found = cache.read(key)
        if not isinstance(found, bytes):
            self._why_traced = f"cache: {found.name}"
            return None
        kept: KeptTrace = pickle.loads(found)  # Code, from a folder of this user's.
        graph, mode = kept_graphs.from_bytes(kept.graph, is_backed=self.is_backed)
        root, scope = own_root(self.runnable)
        kept_traces.name_modules(kept, root)
        contract = Contract(args, kwargs, {}, self._limits)
        audit = Audit(scope, root.__globals__, contract, at_calls=False)
        # First what runs nothing: the graph may be one of another model.
        self._why_traced = (
            kept_traces.change(kept, audit)
            or kept_traces.operator_change(graph, mode)
            or kept_traces.difference(kept, graph, root, args, kwargs)
        )
        return None if self._why_traced else _Kept(kept, graph, mode)

    def _trace(self, run: Callable[[], object], varying: Varying) -> None:
        self._ones = frozenset(
            axis for tensor, dim, axis in varying if self.is_backed and tensor.shape[dim] == 1
        )
        if self._ones in self._traces:
            raise _again("a second call of trace")
        varying = [one for one in varying if one[2] not in self._ones]
        if self.is_backed:
            _refuse_equal_sizes(varying)
        for tensor, dim, axis in varying:
            torch_api.mark(tensor, dim, axis, self._limits[axis], is_backed=self.is_backed)
        self._varying = varying
        try:
            run()
        finally:
            self._varying = None
            for tensor, _, _ in varying:
                torch_api.unmark(tensor)
        if self._ones not in self._traces:
            raise CompileError(
                "compile",
                expected="a model that calls its compiled part",
                found="a run that did not",
                do="give as compile_part a module that the model calls",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._varying is not None:
            try:
                return self._first_call(args, kwargs)
            except Exception as error:
                self._dump.failed(error, self._compiler.keys)
                raise
        if self._is_confirming:
            self._is_confirming = False
            self._confirm(args, kwargs)
            if self._shapes is None:
                raise _ComparedError
        trace = self._traces.get(_NO_AXES)
        if self.is_backed and self._traces:
            ones, trace = next(iter(self._traces.items()))
            ones |= trace.contract.axes_of_one(args, kwargs)
            # A part need not have all axes of the model among its arguments.
            known = trace.contract.axes
            fits = (one for key, one in self._traces.items() if key & known == ones & known)
            trace = next(fits, trace)
        if trace is None:
            if self._shapes is not None:
                leaves = pytree.tree_leaves((args, kwargs))
                # Those of the first call come first.
                self._shapes += [x.shape if isinstance(x, torch.Tensor) else None for x in leaves]
                return self.runnable(*args, **kwargs)
            raise CompileError(
                "compiled code",
                expected="a trace before the first call",
                found="none",
                do="give the runtime examples, or call capture(like=...) before the first step",
            )
        trace.contract.check(args, kwargs)
        if self.is_audit_due:
            self.audit()
            self.is_audit_due = False
        if trace.audit.at_calls:
            trace.audit.check_call()
        try:
            return trace.call(*args, **kwargs)
        except Exception:
            if not trace.audit.at_calls:
                trace.audit.check()  # What it reads may be there no more.
            raise

    def audit(self, *, again: bool = False) -> None:
        """Compare everything that the trace read with what stands there now.

        ``again``: also at the next call. Errors: ``GuardAuditError`` with what differs.
        """
        for trace in self._traces.values():
            trace.audit.check()
            self.is_audit_due = again

    def __reduce_ex__(self, _: object) -> NoReturn:
        # A copied model would keep this one, which runs the parameters of the first.
        raise copy_error(self)

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        varying, self._varying = self._varying or (), None
        computed = self._computed(args, kwargs, varying)
        try:
            for tensor, dim, axis in computed:
                torch_api.mark(tensor, dim, axis, self._limits[axis], is_backed=self.is_backed)
            return self._trace_call(args, kwargs, [*varying, *computed])
        finally:
            for tensor, _, _ in computed:
                torch_api.unmark(tensor)

    def _computed(self, args: Any, kwargs: Any, varying: Varying) -> Varying:
        """What varies in arguments that were computed before the call, as ``look`` saw it.

        Errors: ``ContractError`` for a size that varies otherwise than an axis does.
        """
        if self._looked_at is None:
            return ()
        before = {axis: tensor.shape[dim] for tensor, dim, axis in self._looked_at[0]}
        now = {axis: tensor.shape[dim] for tensor, dim, axis in varying}
        axes = {(now[axis], before[axis]): axis for axis in now if now[axis] != before[axis]}
        known = {id(tensor) for tensor, _, _ in varying}
        found: list[tuple[torch.Tensor, int, str]] = []
        paths, _ = pytree.tree_flatten_with_path((args, kwargs))
        for (path, leaf), shape in zip(paths, self._looked_at[1], strict=False):
            if shape is None or not isinstance(leaf, torch.Tensor) or id(leaf) in known:
                continue
            known.add(id(leaf))
            for dim, sizes in enumerate(zip(leaf.shape, shape, strict=False)):
                if sizes in axes:
                    found.append((leaf, dim, axes[sizes]))
                elif sizes[0] != sizes[1] and not (self.is_backed and sizes[0] == 1):
                    told = (f"{n} {axis}, before {was}" for (n, was), axis in axes.items())
                    raise ContractError(
                        f"dimension {dim} of {argument_name(path)}",
                        expected=f"a size that stays, or that of an axis: {', '.join(told)}",
                        found=f"{sizes[0]}, before {sizes[1]}",
                        do="compute it inside the compiled part, or compile the whole model",
                    )
        return found

    def _trace_call(self, args: Any, kwargs: Any, varying: Varying) -> Any:
        axes: dict[int, dict[int, str]] = {}
        for tensor, dim, axis in varying:
            axes.setdefault(id(tensor), {})[dim] = axis
        contract = Contract(args, kwargs, axes, self._limits, 2 if self.is_backed else 1)
        contract.check(args, kwargs)
        kept, self._kept = self._kept, None
        if kept is not None:
            with_kept = self._call_kept(kept, args, kwargs, axes, contract)
            if with_kept is not None:
                return with_kept[0]
        root, scope = own_root(self.runnable)
        is_kept = self._plan.guard_policy == "keep"
        audit = Audit(scope, root.__globals__, contract, at_calls=is_kept)
        found = _Compilation(self, axes, audit)
        # Dynamo keeps ``backend`` for good: what it refers to is taken out of this list.
        compilers = [found]

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return compilers.pop().run(graph, inputs)

        try:
            traced = torch_api.traced(
                root, backend, audit.chosen, args, kwargs, guards_hooks=audit.at_calls
            )
        except OF_TRACING as error:
            found.refuse_shape_guards()  # It names the line.
            raise translated(error) from error
        finally:
            compilers.clear()
            effects.put_back(found.held)
        if traced.call is None:
            raise told_not_to_compile()
        if found.report is None:
            raise CompileError(
                "trace",
                expected="code that computes something with torch",
                found="a call without any operation",
                do="run it uncompiled (level 0)",
            )
        found.refuse_shape_guards()
        audit.guards = traced.guards
        self._keep(traced, found, contract, audit, (args, kwargs))
        self._note(_Trace(traced.call, contract, audit), found, is_kept=False)
        return traced.results

    def _keep(
        self,
        traced: torch_api.Traced,
        found: _Compilation,
        contract: Contract,
        audit: Audit,
        given: tuple[Any, Any],
    ) -> None:
        """Let later processes use the trace. ``given``: to the traced call."""
        place = self._place_of_kept()
        if place is None:
            return
        cache, key = place
        cache.device = cache.device or _devices_of(*given)
        try:
            if found.graph is None:
                raise NotKeptError(found.why_not_kept)
            payload = kept_traces.to_bytes(traced, found.graph, contract, audit)
        except NotKeptError as error:
            self._why_traced = f"not kept: {error}"
        else:
            cache.write(key, payload, {"piece": "trace", "sizes": ", ".join(sorted(self._ones))})

    def _call_kept(
        self,
        kept: _Kept,
        args: Any,
        kwargs: Any,
        axes: Mapping[int, Mapping[int, str]],
        contract: Contract,
    ) -> tuple[Any] | None:
        """What the call returns, made with a kept trace. None if that is not one of this model."""
        root, scope = own_root(self.runnable)
        audit = Audit(scope, root.__globals__, contract, at_calls=False)
        found = _Compilation(self, axes, audit)

        def first(*inputs: Any) -> Any:
            self._dump.graph("dynamo.py", kept.graph)
            with tracing(TracingContext(kept.mode)):
                run = torch_api.uncompiled(found.compiled(kept.graph, inputs, ()))
            root.__globals__[kept.trace.entry] = run
            return run(*inputs)

        try:
            kept_traces.name_modules(kept.trace, root)
            self._why_traced = (
                kept_traces.change(kept.trace, audit)
                or kept_traces.guarded(kept.trace, root, contract, audit)
                or kept_traces.difference(kept.trace, kept.graph, root, args, kwargs)
            )
            if self._why_traced:
                return None
            call = kept_traces.function_of(kept.trace, root, first)
            outputs = call(*args, **kwargs)
        except GraphrtError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the model is traced again
            self._why_traced = f"{type(error).__name__}: {error}"
            return None
        finally:
            effects.put_back(found.held)
        self._note(_Trace(call, contract, audit), found, is_kept=True)
        return (outputs,)

    def _note(self, trace: _Trace, found: _Compilation, *, is_kept: bool) -> None:
        self._traces[self._ones] = trace
        self._sizes = None
        if len(self._traces) > 1 or found.report is None:
            return
        self.report = found.report._replace(
            pieces=tuple(found.infos),
            num_audited=len(trace.audit.kept),
            notes=self._notes,
            is_trace_kept=is_kept,
            why_traced=self._why_traced,
        )
        keys, misses = self._compiler.keys, self.report.misses
        self._dump.json("guards.json", lambda: {"compared": trace.audit.told})
        self._dump.json("cache.json", lambda: {"asked": keys, "misses": misses})
        self._dump.json("report.json", self.report._asdict)


class _ComparedError(Exception):
    """Ends a run that was made to compare a trace with it."""


class _Kept(NamedTuple):
    """A trace of an earlier process, in this one."""

    trace: KeptTrace
    graph: fx.GraphModule
    mode: Any


_Forms = dict[fx.GraphModule, tuple[Callable[..., Any], Callable[..., Described]]]
"""Of each unique compiled piece: its code, and what says what a call of it does."""


class _Trace(NamedTuple):
    """One trace, and what has to be as it was then."""

    call: Callable[..., Any]
    contract: Contract
    audit: Audit


class _Compilation:
    """One traced graph on its way to the function that calls its pieces."""

    def __init__(
        self, owner: Compiled, axes: Mapping[int, Mapping[int, str]], audit: Audit
    ) -> None:
        self._owner, self._axes, self._audit = owner, axes, audit
        self._started = perf_counter()
        self._limits, self._plan, self._compiler = owner._limits, owner._plan, owner._compiler
        self._symbols: Symbols | None = None
        self.infos: list[PieceInfo] = []
        self.held = effects.Copies()
        """What the run of the traced call writes."""
        self.report: CompileReport | None = None
        self.graph: bytes | None = None
        """As it was traced, for another process."""
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
        owner = self._owner
        owner._dump.graph("dynamo.py", graph)
        self._audit.changed = side_effects = refuse_side_effects()
        self._audit.note_traced(TracingContext.get_traced_code() or ())
        refuse_values(graph, owner._ops.find)
        if not owner.is_backed:
            refuse_dropped_sizes(graph)
        if owner._place_of_kept() is not None:
            try:
                self.graph = kept_graphs.to_bytes(graph, self._symbols_of(graph, inputs).axes)
            except NotKeptError as error:
                self.why_not_kept = str(error)
        return self.compiled(graph, inputs, side_effects)

    def compiled(
        self, graph: fx.GraphModule, inputs: Sequence[Any], side_effects: tuple[str, ...]
    ) -> Callable[..., Any]:
        """What calls the pieces of ``graph``, all compiled."""
        owner, began = self._owner, perf_counter()
        symbols = self._symbols = self._symbols_of(graph, inputs)
        num_noops = self._tidy(graph)
        pieces, unmatched = self._cut(graph, symbols)
        seconds = {"trace": began - self._started, "split": perf_counter() - began}
        calls = self._wrapped(pieces, self._compile_all(pieces, symbols))
        self.held = effects.copies_of_written(graph, inputs)
        stitched, source = splitter.stitch(graph, pieces, calls)
        owner._dump.write("stitch.py", lambda: source)
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
        plan, ops, num_noops, num_added = self._plan, self._owner._ops, 0, 0
        dump = self._owner._dump
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
        owner, ops = self._owner, self._owner._ops
        is_opaque, by_inductor = owner.is_opaque, self._plan.use_inductor_graph_partition
        marked = cut_operator if by_inductor else None
        pieces, unmatched = splitter.cut(graph, ops, symbols.names, is_opaque, marked)
        owner._dump.pieces(pieces)
        effects.refuse_open_contexts(graph, ops, is_opaque)
        if is_opaque:
            effects.refuse_shared_writes(pieces)
            effects.refuse_unresolved(pieces)
            for piece in _captured(pieces):
                for readers in (owner._attention, *([ops] if by_inductor else [])):
                    effects.refuse_hidden_reads(piece, readers)
        if by_inductor:
            refuse_other_devices(graph)
            self._cuts = Cuts(graph, ops, owner._wrap, pieces[0].structure)
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
                if self._owner.is_opaque:
                    describe = partial(described, effects.written_inputs(piece))
                    info = info._replace(is_opaque=True, describe=describe)
            else:
                if (written := effects.written_inputs(piece)) and not piece.is_plain:
                    call = effects.noting_writes(call, partial(_at, [*written]))
                if any(self._owner._ops.impl_of(node) is not None for node in piece.nodes):
                    traced = tuple(node.meta.get("example_value") for node in piece.outputs)
                    is_opaque = self._owner.is_opaque
                    call = effects.checking_results(call, piece.name, traced, is_opaque)
            calls.append(self._owner._wrap(call, info))
            # A report is kept for long; what it needs of a piece is a few words.
            self.infos.append(info._replace(describe=None))
        return calls

    def refuse_shape_guards(self) -> None:
        """Errors: ``ShapeGuardError`` for a branch of the trace that not every size takes."""
        if self._owner.is_backed and self._symbols is not None:
            ranges.refuse_shape_guards(self._symbols.mode, self._symbols.axes, None)

    def _symbols_of(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Symbols:
        """Which symbol stands for which axis, by the tensors whose dimensions were marked."""
        axes: dict[Any, Axis] = {}
        for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
            for dim, name in self._axes.get(id(value), {}).items():
                size = node.meta["example_value"].shape[dim]
                if isinstance(size, torch.SymInt):
                    order = list(self._limits).index(name)
                    axes[size.node.expr] = Axis(name, self._limits[name], order)
        return Symbols(axes, TracingContext.get().fake_mode, is_backed=self._owner.is_backed)

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
            if self._owner._observer is not None:
                event = CompiledEvent(piece.name, sizes.start, sizes.end, seconds, form.missed)
                self._owner._observer(event)
        return ranges.chosen_by_size(forms, place)


def _captured(pieces: Sequence[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.kind == "captured"]


def _devices_of(args: Any, kwargs: Any) -> str:
    return device_text({one.device for one in tensors_of((args, kwargs))})


def _at(places: Sequence[int], args: Any, _: Any) -> list[Any]:
    return [args[at] for at in places]


def _refuse_equal_sizes(varying: Varying) -> None:
    """Errors: ``ContractError`` where two axes have one size: a trace would take them for one."""
    sizes = {axis: tensor.shape[dim] for tensor, dim, axis in varying}
    if len(set(sizes.values())) < len(sizes):
        raise ContractError(
            "the traced call",
            expected="another size of each axis, because equal ones are taken for one",
            found=", ".join(f"{size} {axis}" for axis, size in sizes.items()),
            do="give examples of unequal sizes, or dynamic_shapes='unbacked'",
        )


def own_root(target: Callable[..., Any]) -> tuple[FunctionType, dict[str, Any]]:
    """A function that calls ``target``, with code and globals of its own; its variables.

    Dynamo keeps what it compiled by code object: without guards, a second runtime would run the
    trace of the first. And it adds names to the globals.
    """
    scope: dict[str, Any] = {"model": target, "function": None}
    if isinstance(target, MethodType):
        scope = {"model": target.__self__, "function": target.__func__}
    plain: Any = _root_of(**scope)
    own = {"__builtins__": __builtins__, "__name__": __name__}
    return FunctionType(plain.__code__.replace(), own, "root", None, plain.__closure__), scope


def _root_of(model: Any, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def root(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs) if function is None else function(model, *args, **kwargs)

    return root


def told_not_to_compile() -> RecompileError:
    """The error for a call that Dynamo leaves as it is."""
    return _again("a call that Dynamo was told not to compile")


def _again(found: str) -> RecompileError:
    return RecompileError(
        "compiled code",
        expected="one trace, which serves every call",
        found=found,
        do="compile once, outside torch.compiler.disable and set_stance, with Dynamo switched on "
        "(torch._dynamo.config.disable, TORCHDYNAMO_DISABLE)",
    )

"""A callable that is traced once, for every size, and then runs as its pieces."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch.utils import _pytree as pytree

from graphrt.compile import effects, fake_runs, kept_traces, splitter, torch_api
from graphrt.compile.backends import BlackBox, Inductor, device_text
from graphrt.compile.cache import CompileCache, key_of
from graphrt.compile.compilation import Compilation, CompileReport, Setup
from graphrt.compile.dump import Dump
from graphrt.compile.failures import OF_TRACING, translated
from graphrt.compile.guards import Audit, Contract, Given, argument_name
from graphrt.compile.kept_graphs import NotKeptError
from graphrt.compile.kept_traces import KeptTrace
from graphrt.compile.splitter import Wrap
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
from graphrt.events import Observer
from graphrt.values import tensors_of

_NO_AXES: frozenset[str] = frozenset()

Varying = Sequence[tuple[torch.Tensor, int, str]]
"""Tensor, dimension, axis."""


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
        is_inductor = plan.backend == "inductor"
        self._setup = Setup(
            plan,
            dict(limits),
            splitter.SplittingOps(plan.splitting_ops, impls),
            splitter.SplittingOps(plan.attention_ops),
            Inductor(plan, rank) if is_inductor else BlackBox(plan.backend),
            wrap,
            observer,
            Dump(plan.debug_dump_path, rank),
        )
        self.is_opaque = self._setup.compiler.is_opaque
        """Whether recorders that work by dispatch modes cannot see what its code launches."""
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
        self._rank = rank
        self._is_trying = False
        """Whether the trace that is made is to be a kept one or none."""
        self._why_traced = ""
        self.is_audit_due = False
        """Whether the next call is to compare what the trace read."""

    refused = staticmethod(torch_api.compiled_code_refused)
    """A context in which compiled code that no piece is, raises."""

    def trace(self, run: Callable[[], object], varying: Varying) -> None:
        """Trace it at the first call that ``run`` makes. ``varying``: dimensions of its tensors.

        A trace that an earlier process kept is used, if it is one of this model.
        Traced again: only where ``is_backed``, for sizes of which others are 1.
        Errors: ``CompileError`` and what is below it, ``BreakError`` for a break point; each names
        the user's line. What ``run`` itself raises.
        """
        self._why_traced = ""
        is_auto = self._setup.plan.dynamic_shapes == "auto"
        may_choose = is_auto and not self.is_backed and not self._traces
        if may_choose and self._is_kept_backed(varying):
            self._choose_backed("as in the trace that was kept")
            self._trace(run, varying, is_trying=True)
            if self._traces:
                return
            self.is_backed, self._notes = False, ()
        try:
            self._trace(run, varying)
        except (ShapeGuardError, GraphBreakError) as error:
            # Without bounds of marks (torch 2.11 and 2.12), a slice of the axis is taken for a size
            # that depends on data. Of what does, the second trace says the same.
            if not may_choose or self._traces:
                raise
            self._choose_backed(f"instead of unbacked, because of a {error.subject}")
            self._trace(run, varying)
        if self._ones not in self._traces:
            raise CompileError(
                "compile",
                expected="a model that calls its compiled part",
                found="a run that did not",
                do="give as compile_part a module that the model calls",
            )

    def _choose_backed(self, why: str) -> None:
        self.is_backed = True
        self._notes = (f"dynamic_shapes: backed {why}",)

    def _is_kept_backed(self, varying: Varying) -> bool:
        """Whether an earlier process kept such a trace, and none of unbacked sizes."""
        unbacked = self._place_of_kept(_NO_AXES, is_backed=False)
        backed = self._place_of_kept(_axes_of_one(varying), is_backed=True)
        if unbacked is None or backed is None:
            return False
        (cache, key), (_, other) = backed, unbacked
        return cache.has(key) and not cache.has(other)

    def look(self, run: Callable[[], object], varying: Varying) -> None:
        """Let ``trace`` know which dimensions vary in arguments that are computed before the call:
        ``run`` is made uncompiled, at other sizes of each axis than it will have there."""
        shapes: list[torch.Size | None] = []
        self._shapes = shapes
        try:
            run()
        finally:
            self._shapes = None
        self._looked_at = varying, shapes

    def _place_of_kept(
        self, ones: frozenset[str], *, is_backed: bool
    ) -> tuple[CompileCache, str] | None:
        """Where the trace of calls in which these axes have size 1 is kept, and under which key;
        None if it is not."""
        plan, cache = self._setup.plan, self._setup.compiler.cache()
        if (
            cache is None
            or plan.guard_policy == "keep"
            or plan.use_inductor_graph_partition
            or not torch_api.may_compile()
            or self._identity is None
        ):
            return None
        factors = {
            "torch": cache.torch,
            "dynamo": torch_api.options_of_traces(),
            "plan": plan.compute_hash(),
            "model": self._identity,
            "rank": self._rank,  # Ranks may read numbers of their own.
            "limits": self._setup.limits,
            "backed": is_backed,
            "ones": sorted(ones),
        }
        return cache, key_of(factors)

    @cached_property
    def _identity(self) -> str | None:
        """What names the model in keys; None where its own code fails."""
        with suppress(Exception):
            return kept_traces.target_of(self.runnable)
        return None

    def _trace(
        self, run: Callable[[], object], varying: Varying, *, is_trying: bool = False
    ) -> None:
        self._ones = _axes_of_one(varying) if self.is_backed else _NO_AXES
        if self._ones in self._traces:
            raise _again("a second call of trace")
        varying = [one for one in varying if one[2] not in self._ones]
        if self.is_backed:
            _refuse_equal_sizes(varying)
        self._varying, self._is_trying = varying, is_trying
        try:
            run()
        finally:
            self._varying = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._varying is not None:
            try:
                return self._first_call(args, kwargs)
            except Exception as error:
                self._setup.dump.failed(error, self._setup.compiler.keys)
                raise
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
        varying = [*varying, *self._computed(args, kwargs, varying)]
        try:
            for tensor, dim, axis in varying:
                most = self._setup.limits[axis]
                torch_api.mark(tensor, dim, axis, most, is_backed=self.is_backed)
            return self._trace_call(args, kwargs, varying)
        finally:
            for tensor, _, _ in varying:
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
        given = Given(args, kwargs, axes)
        contract = Contract(given, self._setup.limits, 2 if self.is_backed else 1)
        contract.check(args, kwargs)
        place = self._place_of_kept(self._ones, is_backed=self.is_backed)
        with_kept = self._call_kept(place, given, contract)
        if with_kept is not None:
            return with_kept[0]
        if self._is_trying:
            return self.runnable(*args, **kwargs)
        root, scope = own_root(self.runnable)
        is_asked = self._setup.plan.guard_policy == "keep"
        audit = Audit(scope, root.__globals__, contract, at_calls=is_asked)
        found = Compilation(
            self._setup, axes, audit, is_backed=self.is_backed, is_written=place is not None
        )
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
            raise translated(error, found.branch()) from error
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
        if place is not None:
            self._keep(place, traced, found, contract, audit, given)
        self._note(_Trace(traced.call, contract, audit), found, is_kept=False)
        return traced.results

    def _keep(
        self,
        place: tuple[CompileCache, str],
        traced: torch_api.Traced,
        found: Compilation,
        contract: Contract,
        audit: Audit,
        given: Given,
    ) -> None:
        """Let later processes use the trace."""
        cache, key = place
        try:
            if found.graph is None:
                raise NotKeptError(found.why_not_kept)
            root, _ = own_root(self.runnable)
            made = kept_traces.to_bytes(
                traced, found.graph, contract, audit, root, given, is_backed=self.is_backed
            )
        except NotKeptError as error:
            self._why_traced = f"not kept: {error}"
        else:
            payload = kept_traces.joined(made, self._kept(place, given))
            cache.write(key, payload, {"piece": "trace", "sizes": ", ".join(sorted(self._ones))})

    def _kept(self, place: tuple[CompileCache, str], given: Given) -> list[bytes]:
        """The traces that were kept of such calls, the newest first."""
        cache, key = place
        devices = {one.device for one in tensors_of((given.args, given.kwargs))}
        cache.device = cache.device or device_text(devices)
        if not cache.has(key):
            return []
        found = cache.read(key)
        if not isinstance(found, bytes):
            self._why_traced = f"cache: {found.name}"
            return []
        try:
            traces: list[bytes] = [*pickle.loads(found)]  # Code, from a folder of this user's.
        except Exception as error:  # noqa: BLE001 - whatever it is, the model is traced again
            self._why_traced = f"{type(error).__name__}: {error}"
            return []
        return traces

    def _call_kept(
        self, place: tuple[CompileCache, str] | None, given: Given, contract: Contract
    ) -> tuple[Any] | None:
        """What the call returns, made with a kept trace. None if there is none of this model."""
        if place is None:
            return None
        refused = []
        for kept in self._kept(place, given):
            called = self._call_with(kept, given, contract)
            if called is not None:
                return called
            refused.append(self._why_traced)
        if refused:
            self._why_traced = refused[0]  # The newest is the likeliest to be of this model.
        return None

    def _call_with(self, kept: bytes, given: Given, contract: Contract) -> tuple[Any] | None:
        root, scope = own_root(self.runnable)
        audit = Audit(scope, root.__globals__, contract, at_calls=False)
        found = Compilation(
            self._setup, given.axes, audit, is_backed=self.is_backed, is_written=False
        )
        try:
            trace: KeptTrace = pickle.loads(kept)
            with torch_api.without_importing_export():
                traced = kept_traces.traced_call(trace, root, given, is_backed=self.is_backed)
                self._why_traced = (
                    kept_traces.change(trace, audit)
                    or kept_traces.guarded(trace, root, contract, audit)
                    or fake_runs.difference(trace.calls, traced, root)
                )
            if self._why_traced:
                return None

            def first(*inputs: Any) -> Any:
                self._setup.dump.graph("dynamo.py", traced.graph)
                mode = traced.fresh.mode
                with tracing(TracingContext(mode)), torch_api.without_importing_export():
                    run = torch.compiler.disable(found.compiled(traced.graph, inputs, ()))
                root.__globals__[trace.entry] = run
                return run(*inputs)

            function = traced.function_of(first)
            outputs = function(*given.args, **given.kwargs)
        except GraphrtError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the model is traced again
            self._why_traced = f"{type(error).__name__}: {error}"
            return None
        finally:
            effects.put_back(found.held)
        self._note(_Trace(function, contract, audit), found, is_kept=True)
        return (outputs,)

    def _note(self, trace: _Trace, found: Compilation, *, is_kept: bool) -> None:
        self._traces[self._ones] = trace
        if len(self._traces) > 1 or found.report is None:
            return
        self.report = found.report._replace(
            pieces=tuple(found.infos),
            num_audited=len(trace.audit.kept),
            notes=self._notes,
            is_trace_kept=is_kept,
            why_traced=self._why_traced,
        )
        keys, misses = self._setup.compiler.keys, self.report.misses
        self._setup.dump.json("guards.json", lambda: {"compared": trace.audit.told})
        self._setup.dump.json("cache.json", lambda: {"asked": keys, "misses": misses})
        self._setup.dump.json("report.json", self.report._asdict)


class _Trace(NamedTuple):
    """One trace, and what has to be as it was then."""

    call: Callable[..., Any]
    contract: Contract
    audit: Audit


def _axes_of_one(varying: Varying) -> frozenset[str]:
    return frozenset(axis for tensor, dim, axis in varying if tensor.shape[dim] == 1)


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

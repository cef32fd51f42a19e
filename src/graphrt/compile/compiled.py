"""A callable that is traced once, for every size, and then runs as its pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo import exc
from torch._dynamo.decorators import mark_unbacked

from graphrt.compile.failures import refuse_side_effects, refuse_values, translated
from graphrt.compile.guards import Audit, Contract
from graphrt.compile.splitter import PieceInfo, Split, SplittingOps, Wrap, split
from graphrt.errors import CompileError, RecompileError

Varying = Sequence[tuple[torch.Tensor, int, str]]
"""Tensor, dimension, axis."""


class CompileReport(NamedTuple):
    """What compiling did."""

    pieces: tuple[PieceInfo, ...]
    seconds: Mapping[str, float]
    """By phase: ``trace``, ``split``."""
    unmatched_splitting_ops: tuple[str, ...]
    """Those that the traced graph does not have."""
    side_effects: tuple[str, ...]
    """Globals that the traced code changes: eager runs do, replays do not."""
    num_audited: int
    """Things that the trace read and that are compared before each capture."""
    unaudited: tuple[str, ...]
    """Those that cannot be."""

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

    ``trace`` comes first; a call before it is a ``CompileError``. ``splitting_ops``: where to cut.
    ``impls``: Python functions to call in place of splitting ops. ``wrap``: what becomes of each
    piece; called in order, when all are known. ``sizes``: axis -> the largest size.

    Dynamo's guards are dropped: each call compares its arguments with those traced, ``audit`` all
    else that the trace read. Errors: ``SplittingOpError`` for an unknown splitting op.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        *,
        splitting_ops: Sequence[str],
        sizes: Mapping[str, int],
        impls: Mapping[str, Callable[..., Any]] | None = None,
        wrap: Wrap = lambda piece, info: piece,
    ) -> None:
        self.runnable = target
        """What walks of what it reaches follow."""
        self.report: CompileReport | None = None
        self.source = ""
        """The generated function that calls the pieces."""
        self._ops = SplittingOps(splitting_ops)
        self._impls = dict(impls or {})
        self._wrap = wrap
        self._sizes = dict(sizes)
        self._varying: Varying | None = None
        """Set while it is traced."""
        self._entry: Callable[..., Any] | None = None
        self._contract: Contract | None = None
        self._audit: Audit | None = None
        self._is_audit_due = False

    def trace(self, run: Callable[[], object], varying: Varying) -> None:
        """Trace it at the first call that ``run`` makes. ``varying``: dimensions of its tensors.

        Errors: ``CompileError`` and what is below it, ``BreakError`` for a break point; each names
        the user's line. What ``run`` itself raises.
        """
        if self.report is not None:
            raise _again("a second call of trace")
        for tensor, dim, axis in varying:
            mark_unbacked(tensor, dim, shape_id=axis)
        self._varying = varying
        try:
            run()
        finally:
            self._varying = None
        if self._entry is None:
            raise CompileError(
                "compile",
                expected="a model that calls its compiled part",
                found="a run that did not",
                do="give as compile_part a module that the model calls",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._contract is None or self._entry is None:
            return self._first_call(args, kwargs)
        self._contract.check(args, kwargs)
        if self._is_audit_due:
            self.audit()
            self._is_audit_due = False
        return self._entry(*args, **kwargs)

    def audit(self, *, again: bool = False) -> None:
        """Compare everything that the trace read with what stands there now.

        ``again``: also at the next call. Errors: ``GuardAuditError`` with what differs.
        """
        if self._audit is not None:
            self._audit.check()
            self._is_audit_due = again

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        if self._varying is None:
            raise CompileError(
                "compiled code",
                expected="a trace before the first call",
                found="none",
                do="give the runtime examples, or call capture(like=...) before the first step",
            )
        started = perf_counter()
        axes: dict[int, dict[int, str]] = {}
        for tensor, dim, axis in self._varying:
            axes.setdefault(id(tensor), {})[dim] = axis
        contract = Contract(args, kwargs, axes, self._sizes)
        guards: list[Any] = []
        # Dynamo keeps ``backend`` for good: what it refers to is taken out of these lists.
        made: list[Any] = []
        compilers = [self._cut]

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if not compilers:
                raise _again("Dynamo, for a call that it takes for another one")
            made.append(compilers.pop()(graph))
            return made[0][0].run  # type: ignore[no-any-return]

        def drop_all(entries: Sequence[Any]) -> list[bool]:
            guards.extend(entries)
            return [False] * len(entries)

        root, scope = _own_root(self.runnable)
        # A fresh dict for each: torch.compile takes entries out of it.
        options: dict[str, Any] = {"guard_filter_fn": drop_all}
        # dynamic=False, because numbers that differ between two runtimes of one class would else
        # become inputs. Dimensions that are marked vary all the same.
        entry = torch.compile(root, backend=backend, fullgraph=True, dynamic=False, options=options)
        try:
            outputs = entry(*args, **kwargs)
        except exc.TorchDynamoException as error:
            raise translated(error) from error
        finally:
            compilers.clear()
            results = tuple(made)
            made.clear()
        [(found, effects, began, ended)] = results
        audit = Audit(guards, scope, root.__globals__)
        self.source = found.source
        self._contract, self._audit, self._entry = contract, audit, entry
        self.report = CompileReport(
            found.pieces,
            {"trace": began - started, "split": ended - began},
            found.unmatched,
            effects,
            audit.num_checked,
            audit.unchecked,
        )
        return outputs

    def _cut(self, graph: fx.GraphModule) -> tuple[Split, tuple[str, ...], float, float]:
        """The pieces of a traced graph, globals that its code changes, and when it was cut."""
        effects = refuse_side_effects()
        began = perf_counter()
        refuse_values(node for node in graph.graph.nodes if self._ops.find(node) is None)
        return split(graph, self._ops, self._impls, self._wrap), effects, began, perf_counter()


def _own_root(target: Callable[..., Any]) -> tuple[FunctionType, dict[str, Any]]:
    """A function that calls ``target``, with code and globals of its own; its variables.

    Dynamo keeps what it compiled by code object: without guards, a second runtime would run the
    trace of the first. And it adds names to the globals.
    """
    if isinstance(target, MethodType):
        scope = {"model": target.__self__, "function": target.__func__}
        plain = _root_of_method(target.__self__, target.__func__)
    else:
        scope = {"model": target}
        plain = _root_of_callable(target)
    code: CodeType = plain.__code__.replace()
    own = {"torch": torch, "_ran_uncompiled": _ran_uncompiled, "__builtins__": __builtins__}
    root = FunctionType(code, own | {"__name__": __name__}, "root", None, plain.__closure__)
    return root, scope


def _root_of_method(model: Any, function: Callable[..., Any]) -> Any:
    def root(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _ran_uncompiled()
        return function(model, *args, **kwargs)

    return root


def _root_of_callable(model: Callable[..., Any]) -> Any:
    def root(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _ran_uncompiled()
        return model(*args, **kwargs)

    return root


def _ran_uncompiled() -> None:
    """Dynamo traces around it: only code that runs as plain Python gets here."""
    raise _again("a call that Dynamo left uncompiled (torch.compiler.disable, or a set_stance)")


def _again(found: str) -> RecompileError:
    return RecompileError(
        "compiled code",
        expected="one trace, which serves every call",
        found=found,
        do="compile once, outside torch.compiler.disable and set_stance",
    )

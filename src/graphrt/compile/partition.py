"""Inductor's own cut: the whole graph is compiled at once, as parts called between splitting ops.

Inductor calls these parts *partitions*: functions of the code that it generates, with splitting ops
called between them. Programs are cut there as anywhere: compiled code calls, in place of a
splitting op, an operator of the same schema that runs what this call of the compiled code is to run
there. So the code itself belongs to no runtime, and neither does its entry in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from graphrt.compile import torch_api
from graphrt.compile.effects import checking_results, noting_writes, written_among
from graphrt.compile.failures import line_of
from graphrt.compile.splitter import FIELD, PieceInfo, SplittingOps, Wrap, operator_of
from graphrt.errors import CompileError, ConfigError, SplittingOpError
from graphrt.values import tensors_of

_NAMESPACE = "graphrt_cut"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")


class _Cuts(threading.local):
    """Of the compiled code that this thread runs."""

    running: Cuts | None = None


_CUTS = _Cuts()


class Cuts:
    """What one runtime runs at the splitting ops of its compiled code, and the pieces it met."""

    def __init__(
        self, graph: fx.GraphModule, ops: SplittingOps, wrap: Wrap, unique_id: str
    ) -> None:
        self.infos: list[PieceInfo] = []
        """In call order; complete after the first call."""
        self._is_complete = False
        self._unique_id = unique_id[:12]
        self._at: dict[torch._ops.OpOverload, tuple[Callable[..., Any], PieceInfo, str]] = {}
        """What is called, and the line that calls the operator."""
        self._given: tuple[Any, ...] = ()
        """To the compiled code, in its first call."""
        for node in graph.graph.nodes:
            op = None if ops.find(node) is None else operator_called_by(node)
            if op is not None and op not in self._at:
                is_plain, title = ops.impl_of(node) is not None, operator_of(node)
                info = PieceInfo(0, title, "splitting", is_plain, title)
                call = ops.call_of(node, True) or op
                if is_plain:
                    call = checking_results(call, title, node.meta.get("example_value"), True)
                elif op._schema.is_mutable:
                    call = noting_writes(call, partial(_declared, op))
                self._at[op] = wrap(call, info), info, line_of(node)

    def bound(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, compiled code, which runs what this runtime does at splitting ops.

        Errors: ``CompileError`` for a tensor that does not begin where Inductor's code takes it to:
        Inductor copies such tensors, but not for code whose partitions are wrapped.
        """

        def run(*args: Any) -> Any:
            for one in args:
                if isinstance(one, torch.Tensor) and one.data_ptr() % torch_api.ALIGNMENT:
                    raise CompileError(
                        f"a tensor for compiled code, {tuple(one.shape)} {one.dtype}",
                        expected=f"one that begins at a multiple of {torch_api.ALIGNMENT} bytes",
                        found="one that does not",
                        do="clone it, or cut without use_inductor_graph_partition",
                    )
            before, _CUTS.running = _CUTS.running, self
            if not self._is_complete:
                self._given = args
            try:
                return call(*args)
            finally:
                _CUTS.running = before
                self._is_complete, self._given = True, ()

        return run

    def at(self, op: torch._ops.OpOverload) -> Callable[..., Any]:
        """What to call in place of a splitting op."""
        call, info, _ = self._at[op]
        if self._is_complete:
            return call
        self._note(info)
        return partial(self._watched, op)

    def _watched(self, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Errors: ``CompileError`` for a write that the schema does not name: Inductor may then run
        what reads it before the operator."""
        call, _, line = self._at[op]
        declared = _declared(op, args, kwargs)
        named = {tensor.untyped_storage()._cdata for tensor in declared}
        watched = [
            (tensor, tensor._version)
            for tensor in tensors_of((self._given, args, kwargs))
            if tensor.untyped_storage()._cdata not in named and not tensor.is_inference()
        ]
        # Inside Inductor's code tensors do not count what is written to them.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            result = call(*args, **kwargs)
        for tensor, version in watched:
            if tensor._version != version:
                raise CompileError(
                    f"{op} at {line}",
                    expected="a splitting op whose schema names all that it writes",
                    found=f"a write to another tensor, {tuple(tensor.shape)} {tensor.dtype}",
                    do="declare it in the schema (mutates_args), or cut without "
                    "use_inductor_graph_partition",
                    source=line,
                )
        return result

    def entered(self, partition: int) -> None:
        """Inductor's code calls this one of its partitions."""
        unique_id = f"{self._unique_id} {partition}"
        self._note(PieceInfo(0, f"partition {partition}", "captured", False, unique_id))

    def _note(self, info: PieceInfo) -> None:
        if not self._is_complete:
            self.infos.append(info._replace(number=len(self.infos)))


def _declared(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What a call writes, as the schema says."""
    return tensors_of(written_among(op, args, kwargs))


def _noting(partition: Callable[[list[Any]], Any], about: Any) -> Callable[[list[Any]], Any]:
    """What Inductor's code calls in place of a partition, with a list that this empties."""

    def run(args: list[Any]) -> Any:
        if _CUTS.running is not None:
            _CUTS.running.entered(about.partition_index)
        return partition(args)

    return run


def operator_called_by(node: fx.Node) -> torch._ops.OpOverload:
    """Errors: ``SplittingOpError`` for what Inductor cannot cut at: Python functions, and operators
    that it would leave out or whose overload the graph does not say."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket) and target.overloads() == ["default"]:
        target = target.default
    writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    if not isinstance(target, torch._ops.OpOverload):
        is_operator = isinstance(target, torch._ops.OpOverloadPacket)
        found = "one of several overloads" if is_operator else "a Python function"
    elif not node.users and not writes:
        found = "one whose result nothing uses and whose schema writes nothing: it is left out"
    else:
        return target
    raise SplittingOpError(
        f"{FIELD}: {node.target} at {line_of(node)}",
        expected="an operator (ns::op.overload) at which Inductor can cut",
        found=found,
        do="declare in its schema what it writes, or cut without use_inductor_graph_partition",
        source=line_of(node),
    )


def cut_operator(node: fx.Node) -> torch._ops.OpOverload:
    """What Inductor's code calls in place of the splitting op of ``node``."""
    return _operator_like(operator_called_by(node))


# Once for each operator: Dynamo permits one compilation at a time, and torch keeps these for good.
@cache
def _operator_like(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """An operator of the same schema, whose name is in the cache of compiled code."""
    # Not alike for ``a_b::c`` and ``a::b_c``.
    name = str(op).replace("_", "__").replace(".", "_1_")
    schema = str(op._schema)
    _LIBRARY.define(name + schema[schema.index("(") :], tags=tuple(op.tags))

    def run(*args: Any, **kwargs: Any) -> Any:
        running = _CUTS.running
        return (op if running is None else running.at(op))(*args, **kwargs)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", op, lib=_LIBRARY)
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return found


def refuse_own_cuts(options: Mapping[str, Any]) -> None:
    """Errors: ``ConfigError`` for options of Inductor that say where it cuts."""
    for name in ("graph_partition", "custom_should_partition_ops"):
        if name in options:
            raise ConfigError(
                f"compilation.inductor_compile_config.{name}",
                expected="nothing beside use_inductor_graph_partition, which sets it",
                found=repr(options[name]),
                do="name in splitting_ops where to cut",
            )


def refuse_other_devices(graph: fx.GraphModule) -> None:
    """Errors: ``CompileError`` for a value of another device than the first tensor's: what handles
    it would run between two partitions, in no graph and in no eager segment."""
    first: torch.device | None = None
    for node in graph.graph.nodes:
        for one in tensors_of(node.meta.get("example_value")):
            first = first or one.device
            if one.device != first:
                raise CompileError(
                    f"{node.name} at {line_of(node)}",
                    expected=f"tensors of one device, {first}, where Inductor cuts the graph",
                    found=f"one of {one.device}",
                    do="move it to the device before the compiled part, or cut without "
                    "use_inductor_graph_partition",
                    source=line_of(node),
                )


def partitioned(module: fx.GraphModule) -> AbstractContextManager[None]:
    """While entered, Inductor compiles and loads ``module`` as partitions between its cuts."""
    called = {operator_of(node) for node in module.graph.nodes}
    cuts = sorted(name for name in called if name.startswith(f"{_NAMESPACE}::"))
    return torch_api.partitioned(cuts, _noting)

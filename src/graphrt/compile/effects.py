"""What pieces write, and what goes wrong where a compiler may move or copy what is written."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from graphrt.compile.failures import line_of
from graphrt.compile.splitter import Described, Piece, SplittingOps
from graphrt.errors import CompileError


_WRITING_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("setitem", "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul"),
        *("ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
    )
)


class Description:
    """Says of calls of a piece what they return and write, without making them."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._known: dict[Any, Described] = {}

    def __call__(self, args: Sequence[Any]) -> Described:
        key = tuple(
            (arg.shape, arg.stride()) if isinstance(arg, torch.Tensor) else arg for arg in args
        )
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._describe(args)
        return known

    def _describe(self, args: Sequence[Any]) -> Described:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            fakes = [
                torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
                if isinstance(arg, torch.Tensor)
                else arg
                for arg in args
            ]
            versions = [_version(fake) for fake in fakes]
            outputs = fx.Interpreter(self._module).run(*fakes)
            written = [at for at, fake in enumerate(fakes) if _version(fake) != versions[at]]
        del mode
        return Described(tuple(_meta(one) for one in outputs), tuple(written))


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def refuse_shared_writes(pieces: Sequence[Piece]) -> None:
    """Errors: ``CompileError`` where a piece writes what two results of a compiled one share.

    A compiler keeps what its code returns, not which of it lies in one memory.
    """
    shared: dict[int, str] = {}
    for piece in pieces:
        written = [value for node in piece.nodes for value in written_by(node)]
        for value in written:
            name = shared.get(_storage(value))
            if name is not None:
                raise CompileError(
                    f"{value.name}, which {piece.name} writes at {line_of(written_at(piece))}",
                    expected="memory of its own, which no other result of compiled code shares",
                    found=f"a view that {name} returns beside its base or another view",
                    do="clone it before it is written, or use backend='eager'",
                    source=line_of(written_at(piece)),
                )
        if piece.kind == "captured":
            given = [_storage(node) for node in piece.inputs]
            made = [_storage(node) for node in piece.outputs]
            for storage in made:
                if storage and (storage in given or made.count(storage) > 1):
                    shared[storage] = piece.name


def refuse_hidden_reads(piece: Piece, attention: SplittingOps) -> None:
    """Errors: ``CompileError`` where attention inside a compiled piece reads what the piece writes,
    and does not take it as an argument: a compiler moves the write behind it."""
    written: dict[int, fx.Node] = {}
    for node in piece.nodes:
        if attention.find(node):
            taken = {_storage(one) for one in node.all_input_nodes}
            for storage, store in written.items():
                if storage not in taken:
                    raise CompileError(
                        f"{attention.find(node)} at {line_of(node)}",
                        expected="attention cut out of what is compiled, or an operator that takes "
                        "each tensor that was written before it and that it reads",
                        found=f"a store at {line_of(store)}, which a compiler moves behind it",
                        do="name it in splitting_ops, or use backend='eager'",
                        source=line_of(node),
                    )
        given = {_storage(one) for one in piece.inputs}
        for value in written_by(node):
            if _storage(value) in given:
                written[_storage(value)] = node


def written_at(piece: Piece) -> fx.Node:
    return next((node for node in piece.nodes if written_by(node)), piece.nodes[0])


def written_by(node: fx.Node) -> list[fx.Node]:
    """What a node writes in place: as the operator's schema says, else by the names of torch."""
    target, found = node.target, []
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        for index, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[index] if index < len(node.args) else None
                found.append(node.kwargs.get(argument.name, given))
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        ends_so = name.endswith("_") and not name.endswith("__")
        if ends_so or target in _WRITING_OPERATORS or node.kwargs.get("inplace") is True:
            found += node.args[:1]
        found.append(node.kwargs.get("out"))
    return [value for value in found if isinstance(value, fx.Node)]


def _storage(node: fx.Node) -> int:
    """Names the memory of a value in the trace; 0 for what is no tensor."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0

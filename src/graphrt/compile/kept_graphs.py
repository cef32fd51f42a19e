"""A traced graph as bytes: what it calls, on which lines, and what is known of each value."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from graphrt.compile.effects import is_of_transform, is_setting
from graphrt.compile.ranges import Axis, FreshSymbols
from graphrt.compile.splitter import MODULES_OF_TORCH

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
_CALLS = ("call_function", "call_method")


class NotKeptError(Exception):
    """Says why a trace is not one that another process can use."""


class _Tensor(NamedTuple):
    """A fake one. Sizes, strides and offset: numbers, or ``_Size``."""

    memory: int
    """Equal for views of one memory."""
    dtype: torch.dtype
    device: torch.device
    layout: tuple[Sequence[Any], Sequence[Any], Any]


class _Size(NamedTuple):
    """Or a condition on sizes."""

    expression: Any


class _Pickler(pickle.Pickler):
    """Writes nodes as their places in the graph."""

    def __init__(self, file: io.BytesIO, nodes: Sequence[fx.Node]) -> None:
        super().__init__(file)
        self._places = {node: place for place, node in enumerate(nodes)}

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            raise NotKeptError(f"a {type(obj).__name__} among the arguments of a call")
        return self._places[obj] if isinstance(obj, fx.Node) else None


class _Unpickler(pickle.Unpickler):
    """Reads them as the nodes that were made so far."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.nodes: list[fx.Node] = []

    def persistent_load(self, pid: Any) -> fx.Node:
        node: fx.Node = self.nodes[pid]
        return node


@contextmanager
def saying_why() -> Iterator[None]:
    """Turns what is raised into a ``NotKeptError``."""
    try:
        yield
    except NotKeptError:
        raise
    except Exception as error:
        raise NotKeptError(f"{type(error).__name__}: {error}") from error


@saying_why()
def to_bytes(graph: fx.GraphModule, axes: Mapping[Any, Axis]) -> bytes:
    """``axes``: what its symbols stand for. Errors: ``NotKeptError`` for a graph with constants,
    graphs inside it, calls of the user's functions, or values that are told otherwise than by
    dtype, device and layout."""
    file = io.BytesIO()
    nodes = [*graph.graph.nodes]
    pickler = _Pickler(file, nodes)
    memories: dict[int, int] = {}
    pickler.dump((dict(axes), len(nodes)))
    for node in nodes:
        if node.op not in (*_CALLS, "placeholder", "output"):
            raise NotKeptError(f"{node.name}, a constant of the graph, or a graph inside it")
        if is_setting(node) or node.target is torch.autograd.grad_mode._enter_inference_mode:
            # What enters these may raise where it is compared.
            raise NotKeptError(f"{node.name}, a setting of torch")
        target = _name_of(node.target) if node.op == "call_function" else str(node.target)
        value = _told(node.meta.get("example_value"), memories)
        pickler.dump((node.op, target, node.args, node.kwargs, node.name, node.stack_trace, value))
    return file.getvalue()


def from_bytes(data: bytes, *, is_backed: bool) -> tuple[fx.GraphModule, FreshSymbols]:
    """The graph, and the symbols in it. Errors: whatever is wrong with the bytes."""
    unpickler = _Unpickler(io.BytesIO(data))
    axes, num_nodes = unpickler.load()
    fresh = FreshSymbols(axes, is_backed=is_backed)
    memories: dict[int, torch.UntypedStorage] = {}
    graph = fx.Graph()
    with torch.no_grad():
        for _ in range(num_nodes):
            op, target, args, kwargs, name, stack, value = unpickler.load()
            called = _found(target) if op == "call_function" else target
            node = graph.create_node(op, called, args, kwargs, name)
            if stack is not None:
                node.meta["stack_trace"] = stack
            if op in _CALLS or op == "placeholder":
                node.meta["example_value"] = _made(value, memories, fresh)
            unpickler.nodes.append(node)
    return fx.GraphModule(torch.nn.Module(), graph), fresh


def fake_tensor(
    mode: FakeTensorMode,
    memory: torch.UntypedStorage | None,
    dtype: torch.dtype,
    device: torch.device,
    layout: tuple[Sequence[Any], Sequence[Any], Any],
) -> FakeTensor:
    """One of ``mode`` with these sizes, strides and offset. ``memory``: of another one that it
    shares; None: its own."""
    with no_dispatch():
        meta = torch.empty(0, dtype=dtype, device="meta")
        if memory is not None:
            meta.set_(memory, 0, (0,), (1,))
        # How large the memory is nobody asks; to compute it takes longer than all else.
        return FakeTensor(mode, meta.as_strided(*layout), device)


def _name_of(target: Any) -> str:
    name = fx.Node._pretty_print_target(target)
    if name.partition(".")[0] not in MODULES_OF_TORCH or _found(name) is not target:
        raise NotKeptError(f"{name}, which is no function of torch, and no operator")
    return name


def _found(name: str) -> Any:
    root, *parts = name.split(".")
    return reduce(lambda owner, part: getattr(owner, part, None), parts, sys.modules.get(root))


def _told(value: Any, memories: dict[int, int]) -> Any:
    if isinstance(value, torch.SymInt | torch.SymBool):
        return _Size(value.node.expr)
    if isinstance(value, tuple | list):
        # Named tuples of torch too are told as plain ones.
        told = (_told(one, memories) for one in value)
        return [*told] if isinstance(value, list) else (*told,)
    if isinstance(value, FakeTensor) and value.layout is torch.strided:
        is_lazy = value.is_conj() or value.is_neg()
        if not is_lazy and not is_of_transform(value):
            memory = memories.setdefault(value.untyped_storage()._cdata, len(memories))
            layout = tuple(value.shape), tuple(value.stride()), value.storage_offset()
            sizes: Any = _told(layout, memories)
            return _Tensor(memory, value.dtype, value.device, sizes)
    if not isinstance(value, _PLAIN):
        raise NotKeptError(f"a {type(value).__name__} among its values")
    return value


def _made(value: Any, memories: dict[int, torch.UntypedStorage], fresh: FreshSymbols) -> Any:
    if isinstance(value, _Size):
        return fresh.number(value.expression)
    if isinstance(value, _Tensor):
        layout, memory = _made(value.layout, memories, fresh), memories.get(value.memory)
        made = fake_tensor(fresh.mode, memory, value.dtype, value.device, layout)
        memories.setdefault(value.memory, made.untyped_storage())
        return made
    if isinstance(value, tuple | list):
        return type(value)([_made(one, memories, fresh) for one in value])
    return value

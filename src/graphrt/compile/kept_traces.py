"""Traces that earlier processes made: kept beside compiled code, compared before they are used.

A trace is used again only if the files of the traced code are the same, all that its guards are
about is told the same, and runs of the model and of the graph make the same calls, at the sizes of
the trace and at others. What a trace read without a guard is found by these runs.
"""

from __future__ import annotations

import builtins
import marshal
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphrt.compile import effects, splitter, torch_api
from graphrt.compile.guards import HOST, Audit, Contract
from graphrt.compile.kept_graphs import NotKeptError
from graphrt.compile.torch_api import GuardParts, Traced
from graphrt.externals.places import module_of
from graphrt.source import IMPORTED_AT
from graphrt.values import tensors_of

_PLAIN = (*HOST, torch.layout, torch.memory_format)
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_CHECKS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
"""Of sizes: Dynamo writes them into graphs."""
_LARGEST_CONSTANT = 1 << 20
"""Bytes: to compare larger ones takes longer than a trace."""
_LEFT_OUT = frozenset(f"aten::{name}" for name in (*_EMPTY, *_CHECKS))


class KeptTrace(NamedTuple):
    """What another process needs of a trace."""

    code: bytes
    """Of the function that Dynamo made of the root."""
    entry: str
    """The global of it that is the graph."""
    modules: Mapping[str, str]
    """Its globals that are modules, "" for all that is built in."""
    graph: bytes
    guards: Sequence[GuardParts]
    ordered: Any
    """Sources of dicts whose order matters."""
    codes: Sequence[tuple[str, int, str]]
    """File, line and name of all that was traced."""
    names: Sequence[str]
    """That this has."""
    read: Mapping[str, str]
    """In words: its files, and by expression what the guards are about."""
    arguments: Mapping[str, str]
    """In words, and modes."""


def to_bytes(traced: Traced, graph: bytes, contract: Contract, audit: Audit) -> bytes:
    """Errors: ``NotKeptError`` for a trace that another process cannot use."""
    call: Any = traced.call
    code, scope = call.__code__, call.__globals__
    modules = {name: one.__name__ for name, one in scope.items() if isinstance(one, ModuleType)}
    modules |= {name: "" for name, one in scope.items() if one is vars(builtins)}
    entries = (scope.keys() & {*code.co_names}) - modules.keys()
    if len(entries) != 1 or audit.changed:
        raise NotKeptError(f"globals that it makes or changes: {[*entries, *audit.changed]}")
    try:
        return pickle.dumps(
            KeptTrace(
                marshal.dumps(code),
                entries.pop(),
                modules,
                graph,
                [one for one in traced.parts if one.name],
                traced.ordered,
                [*audit.traced],
                [*audit.names],
                _read(audit, traced.parts),
                _arguments(contract),
            )
        )
    except NotKeptError:
        raise
    except Exception as error:
        raise NotKeptError(f"{type(error).__name__}: {error}") from error


def function_of(kept: KeptTrace, root: FunctionType, run: Callable[..., Any]) -> FunctionType:
    """What Dynamo made of ``root``, whose globals are as for ``name_modules``; calls ``run`` with
    the inputs of the graph."""
    scope = root.__globals__
    scope[kept.entry] = run
    return FunctionType(marshal.loads(kept.code), scope, "root", None, root.__closure__)


def name_modules(kept: KeptTrace, root: FunctionType) -> None:
    """Let ``root`` have the modules that the kept code, and expressions of its guards, name."""
    for name, module in kept.modules.items():
        root.__globals__[name] = import_module(module) if module else vars(builtins)


def change(kept: KeptTrace, audit: Audit) -> str:
    """What of the files, and of what the guards are about, is told otherwise now; "" if nothing is.
    Lets ``audit`` know what the trace read."""
    audit.traced, audit.names = frozenset(kept.codes), frozenset(kept.names)
    audit.chosen([one._replace(value=audit.value_of(one.name)) for one in kept.guards])
    return _first_other(kept.read, _read(audit, kept.guards))


def guarded(kept: KeptTrace, root: FunctionType, contract: Contract, audit: Audit) -> str:
    """Let ``audit`` compare what the trace read with what stands there now. Returns what differs
    already: also of the arguments, as ``contract`` has them; "" if nothing does."""
    made = [one for one in kept.guards if one.made_of is not None]
    audit.guards = torch_api.guards_of(root, audit.scope, made, kept.ordered)
    if not audit.guards.check(audit.scope):
        return " ".join(audit.guards.check_verbose(audit.scope).verbose_code_parts)
    return _first_other(kept.arguments, _arguments(contract))


def _first_other(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{name}: {now.get(name)}, before {before.get(name)}"
    return ""


def difference(
    kept: KeptTrace, graph: fx.GraphModule, root: FunctionType, args: Any, kwargs: Any
) -> str:
    """The first operation of ``root``, run uncompiled, that the kept ``graph`` does not call alike;
    "" if there is none. Raises nothing; what both write is put back."""
    of_graph, of_model = _Calls(), _Calls()

    def run(*inputs: Any) -> Any:
        for calls in (of_graph, of_model):
            calls.number(inputs)
        return graph(*inputs)

    for calls, call in ((of_graph, function_of(kept, root, run)), (of_model, root)):
        try:
            with torch_api.as_if_traced(), calls:
                calls.returned(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whatever it is, the model is traced again
            return f"{type(error).__name__}: {error}"
        finally:
            effects.put_back(calls.held)
    return of_model.difference(of_graph)


class _Calls(TorchDispatchMode):
    """The operations that run while it is entered, but for those that only make views of tensors,
    or tensors without contents. Memories are numbered as they are met."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: effects.Copies = []
        """What was there before, of what they wrote."""
        self._told: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._met: list[StorageWeakRef] = []
        """So that no other memory gets the name of one that is gone."""
        self._made: set[int] = set()
        """Memories that are new, or are held."""
        self._room = effects.MOST_COPIED_BYTES

    def number(self, values: Any) -> None:
        """Number the memory of tensors, in order."""
        for leaf in pytree.tree_leaves(values):
            if _memory_of(leaf):
                self._number(leaf.untyped_storage())

    def returned(self, results: Any) -> None:
        """Note what the whole call returns."""
        leaves, structure = pytree.tree_flatten(results)
        self._told.append(("results", str(structure), [self._of(leaf) for leaf in leaves]))

    def difference(self, other: _Calls) -> str:
        """The first call that differs, "" if none does."""
        for one, another in zip(self._told, other._told, strict=False):
            if one != another:
                return f"{one[0]} called as {one[1:]}, before {another[0]} as {another[1:]}"
        return "" if len(self._told) == len(other._told) else "the number of calls"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        # Before the call, which may write the contents that are told of constants.
        told = [self._of(leaf) for leaf in given]
        if func._schema.is_mutable:
            for tensor in tensors_of(effects.written_among(func, args, kwargs)):
                self._hold(tensor.untyped_storage())
        results = func(*args, **kwargs)
        made = pytree.tree_leaves(results)
        memories = {_memory_of(one) for one in given}
        are_views = bool(made) and all(_memory_of(one) in memories - {0} for one in made)
        for one in made:
            if _memory_of(one) not in (memories | {0}):
                self._made.add(self._number(one.untyped_storage()))
        is_left_out = are_views and not func._schema.is_mutable
        if func._schema.name not in _LEFT_OUT and not is_left_out:
            self._told.append((str(func), told, [*kwargs], [self._of(leaf) for leaf in made]))
        return results

    def _hold(self, storage: torch.UntypedStorage) -> None:
        number = self._number(storage)
        if number not in self._made:
            self._made.add(number)
            self._room -= storage.nbytes()
            # What is larger is a cache, of which runs on examples write free rows.
            if self._room >= 0:
                with _disable_current_modes():
                    self.held.append((storage, storage.clone()))

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._met.append(StorageWeakRef(storage))
        return self._numbers[storage._cdata]

    def _of(self, leaf: Any) -> Any:
        if not _memory_of(leaf):
            return type(leaf).__qualname__, leaf if isinstance(leaf, _PLAIN) else None
        storage = leaf.untyped_storage()
        if storage._cdata not in self._numbers:
            # Neither taken nor made: a constant, as torch.tensor(2.0) makes.
            if storage.nbytes() > _LARGEST_CONSTANT:
                raise NotKeptError(f"a constant of {storage.nbytes()} bytes")
            with _disable_current_modes():
                contents = sha256(bytes(storage.cpu().tolist())).hexdigest()
            self._told.append(("a constant", contents))
        layout = leaf.storage_offset(), leaf.shape, leaf.stride()
        return self._number(storage), *layout, leaf.dtype, leaf.device


def operator_change(graph: fx.GraphModule, mode: Any) -> str:
    """The first operator that is not torch's own and that tells other results than in the kept
    trace; "" if there is none: the code of operators is in no traced file."""
    for node in graph.graph.nodes:
        if splitter.is_of_others(node):
            given = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["example_value"])
            with mode, torch.no_grad():
                results = node.target(*given[0], **given[1])
            if _layouts(results) != _layouts(node.meta["example_value"]):
                return f"results of {splitter.operator_of(node)}"
    return ""


def _layouts(results: Any) -> list[Any]:
    return [
        (leaf.dtype, leaf.device, str(leaf.shape), str(leaf.stride()))
        if isinstance(leaf, torch.Tensor)
        else type(leaf)
        for leaf in pytree.tree_leaves(results)
    ]


def _memory_of(value: Any) -> int:
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_strided else 0


def _arguments(contract: Contract) -> dict[str, str]:
    return {name: _words_of(value) for name, value in contract.told}


def _read(audit: Audit, guards: Sequence[GuardParts]) -> dict[str, str]:
    found = {name: _words_of(value) for name, value in audit.read()}
    for one in guards:
        if one.guard_type == "HASATTR" and one.made_of is not None:
            attribute = one.made_of[1].keywords["attr"]
            has = hasattr(audit.value_of(one.name), attribute)
            found[f"hasattr {one.name}.{attribute}"] = str(has)
    for file, _, name in audit.traced:
        if file in found:
            continue
        if Path(file).is_file():
            if Path(file).stat().st_mtime > IMPORTED_AT:
                raise NotKeptError(f"{file}, which changed after this process began")
            found[file] = sha256(Path(file).read_bytes()).hexdigest()
        # Python's own, or a method of a data class, whose text is nowhere.
        elif not file.startswith("<frozen ") and not name.startswith("__"):
            raise NotKeptError(f"{name}, whose code is in no file")
    return found


def target_of(target: Callable[..., Any]) -> str:
    """Names a model by its classes, and the shapes of its parameters and buffers. Errors: those of
    the model's own code."""
    owner = target.__self__ if isinstance(target, MethodType) else target
    told = [_words_of(target), _words_of(type(owner))]
    if isinstance(owner, torch.nn.Module):
        told += [f"{name} {_words_of(type(one))}" for name, one in owner.named_modules()]
        named = (*owner.named_parameters(), *owner.named_buffers())
        told += [f"{name} {one.dtype} {tuple(one.shape)}" for name, one in named]
    return sha256("\n".join(told).encode()).hexdigest()


def _words_of(value: Any, depth: int = 8) -> str:
    """The same in every process for what is alike."""
    kind = type(value)
    name = f"{module_of(kind)}.{kind.__qualname__}"
    if isinstance(value, str | bytes):  # It may be a secret.
        return f"{name} {sha256(repr(value).encode()).hexdigest()}"
    if isinstance(value, (*_PLAIN, Enum)):
        return f"{name} {value!r}"
    if isinstance(value, type):
        return f"{module_of(value)}.{value.__qualname__}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, CodeType):
        return _hash_of(value)
    if isinstance(value, FunctionType | MethodType):
        called = f"{value.__module__}.{value.__qualname__} {_words_of(value.__defaults__)}"
        return f"{name} {called} {_hash_of(value.__code__)}"
    if isinstance(value, torch.Tensor):
        return f"{name} {value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    if isinstance(value, BuiltinFunctionType):
        return f"{name} {value.__module__}.{value.__qualname__}"
    if isinstance(value, list | tuple | dict | set | frozenset | deque) and depth:
        # Of a dict the keys: guards are about each value that was read.
        inside = [_words_of(part, depth - 1) for part in value]
        return f"{name} {sorted(inside) if isinstance(value, set | frozenset) else inside}"
    return name


def _hash_of(code: CodeType) -> str:
    """Of what it does, whatever its lines are."""
    consts = [_words_of(one) for one in code.co_consts]
    told = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts)
    return sha256(repr(told).encode()).hexdigest()

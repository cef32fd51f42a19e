"""Traces that earlier processes made: kept beside compiled code, compared before they are used.

A trace is used again only if the files of the traced code are the same, all that its guards are
about is told the same, and runs of the model and of the graph with fake tensors call the same
operations, whatever the sizes are. What a trace read without a guard is found by these runs.
"""

from __future__ import annotations

import builtins
import marshal
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import torch

from graphrt.compile import fake_runs, kept_graphs, torch_api
from graphrt.compile.fake_runs import PLAIN, Calls, TracedCall
from graphrt.compile.guards import Audit, Contract, Given
from graphrt.compile.kept_graphs import NotKeptError
from graphrt.compile.torch_api import GuardParts, Traced
from graphrt.externals.places import module_of
from graphrt.source import IMPORTED_AT

MOST_TRACES = 4
"""Kept of models that are alike in classes and shapes, but not in constants, or in their code."""


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
    calls: Calls
    """Those of the graph."""


@kept_graphs.saying_why()
def to_bytes(
    traced: Traced,
    graph: bytes,
    contract: Contract,
    audit: Audit,
    root: FunctionType,
    given: Given,
    *,
    is_backed: bool,
) -> bytes:
    """``root``: another one than was traced, of the same model. ``given``: to the traced call.
    Errors: ``NotKeptError`` for a trace that another process cannot use."""
    call: Any = traced.call
    code, scope = call.__code__, call.__globals__
    modules = {name: one.__name__ for name, one in scope.items() if isinstance(one, ModuleType)}
    modules |= {name: "" for name, one in scope.items() if one is vars(builtins)}
    entries = (scope.keys() & {*code.co_names}) - modules.keys()
    if len(entries) != 1 or audit.changed:
        raise NotKeptError(f"globals that it makes or changes: {[*entries, *audit.changed]}")
    kept = KeptTrace(
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
        Calls((), (), {}),
    )
    calls = fake_runs.calls_of(traced_call(kept, root, given, is_backed=is_backed))
    return pickle.dumps(kept._replace(calls=calls))


def joined(made: bytes, earlier: Sequence[bytes]) -> bytes:
    """An entry of the cache: ``made``, and those of ``earlier`` that read something else: one that
    read the same was refused just now."""
    read = _read_by(made)
    others = [one for one in earlier if _read_by(one) not in (read, None)]
    return pickle.dumps([made, *others][:MOST_TRACES])


def _read_by(kept: bytes) -> Mapping[str, str] | None:
    with suppress(Exception):  # What it names may be gone.
        return cast(KeptTrace, pickle.loads(kept)).read
    return None


def traced_call(
    kept: KeptTrace, root: FunctionType, given: Given, *, is_backed: bool
) -> TracedCall:
    """A call of ``root``, which gets the modules that the kept code, and expressions of its guards,
    name; and the kept graph of such a call."""
    for name, module in kept.modules.items():
        root.__globals__[name] = import_module(module) if module else vars(builtins)
    graph, fresh = kept_graphs.from_bytes(kept.graph, is_backed=is_backed)
    return TracedCall(graph, fresh, partial(_function_of, kept, root), given)


def _function_of(kept: KeptTrace, root: FunctionType, run: Callable[..., Any]) -> FunctionType:
    """What Dynamo made of ``root``; calls ``run`` with the inputs of the graph."""
    scope = root.__globals__
    scope[kept.entry] = run
    return FunctionType(marshal.loads(kept.code), scope, "root", None, root.__closure__)


def change(kept: KeptTrace, audit: Audit) -> str:
    """What of the files, and of what the guards are about, is told otherwise now; "" if nothing is.
    Lets ``audit`` know what the trace read."""
    audit.traced, audit.names = frozenset(kept.codes), frozenset(kept.names)
    audit.chosen([one._replace(value=_value_of(one, audit)) for one in kept.guards])
    return _first_other(kept.read, _read(audit, kept.guards))


def _value_of(guard: GuardParts, audit: Audit) -> object:
    owner, attribute = torch_api.attribute_asked(guard) or (guard.name, "")
    is_there = owner == guard.name or hasattr(audit.value_of(owner), attribute)
    return audit.value_of(guard.name) if is_there else None


def guarded(kept: KeptTrace, root: FunctionType, contract: Contract, audit: Audit) -> str:
    """Let ``audit`` compare what the trace read with what stands there now. Returns what differs
    already: also of the arguments, as ``contract`` has them; "" if nothing does."""
    audit.guards = torch_api.guards_of(root, audit.scope, kept.guards, kept.ordered)
    if not audit.guards.check(audit.scope):
        return " ".join(audit.guards.check_verbose(audit.scope).verbose_code_parts)
    return _first_other(kept.arguments, _arguments(contract))


def _first_other(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{name}: {now.get(name)}, before {before.get(name)}"
    return ""


def _arguments(contract: Contract) -> dict[str, str]:
    return {name: _words_of(value) for name, value in contract.told}


def _read(audit: Audit, guards: Sequence[GuardParts]) -> dict[str, str]:
    found = {name: _words_of(value) for name, value in audit.read()}
    for owner, attribute in filter(None, map(torch_api.attribute_asked, guards)):
        found[f"hasattr {owner}.{attribute}"] = str(hasattr(audit.value_of(owner), attribute))
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
    if isinstance(value, (*PLAIN, Enum)):
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

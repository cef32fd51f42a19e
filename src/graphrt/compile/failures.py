"""What Dynamo raises, and what it noticed, as errors that name the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from traceback import FrameSummary
from typing import Any

import torch
from torch import fx
from torch._dynamo import exc
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
)

from graphrt.compile import torch_api
from graphrt.compile.guards import as_written
from graphrt.config.checked import warn_user
from graphrt.errors import (
    BreakError,
    CompileError,
    GraphBreakError,
    GraphrtError,
    ShapeGuardError,
    SideEffectError,
    SideEffectWarning,
)
from graphrt.externals.places import own_dict
from graphrt.source import Source, is_user_file

OF_TRACING = (exc.TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode)
"""What torch raises where it does not trace."""

_CONTAINERS = (dict, list, tuple, set, frozenset)
"""What changes in them is not told by attributes."""

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
_UNBACKED = re.compile(r"\bz?uf?\d+\b")
"""What torch calls sizes and numbers that it does not know while it traces."""
_PUT_ASIDE = "put it into an operator, which level 3 can cut out (splitting_ops)"


def translated(error: Exception, branch: str = "") -> GraphrtError:
    """The error to raise in place of Dynamo's. ``branch``: the line of a branch on a size, for an
    error that tells none."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, GraphrtError):
        return inner
    source = _user_line(getattr(error, "real_stack", None) or ())
    at = f" at {source.with_text}" if source else ""
    first, _, rest = str(error).partition("\n")
    if "_refuse_to_cut" in rest:
        return BreakError(
            f"break point{at}",
            expected="no break point in what is traced: level 3 cuts it at splitting ops, level 2 "
            "nowhere",
            found="one that the trace reached",
            do="register the function as an operator, which level 3 cuts at where splitting_ops "
            "names it, or use level 0",
            source=str(source),
        )
    is_value_asked = isinstance(error, exc.UserError | GuardOnDataDependentSymNode)
    if is_value_asked and "data-dependent expression" in first:
        told = first.partition("data-dependent expression ")[2]
        expression, _, about = told.partition(" (unhinted")
        _, is_told, sizes = about.partition("Size-like symbols: ")
        values = {*_UNBACKED.findall(expression)} - {*_UNBACKED.findall(sizes)}
        if not torch_api.MARKS_BOUNDS:  # The size of a slice is told as any integer is.
            values = {name for name in values if "f" in name}
        if is_told and values:
            return GraphBreakError(
                f"branch on a value of a tensor{at}",
                expected="code that runs alike whatever tensors contain, because a replay asks no "
                "value",
                found=f"{expression}, where {' and '.join(sorted(values))} came out of a tensor",
                do=f"choose on the device, as torch.where does, or {_PUT_ASIDE}",
                source=str(source),
            )
        found = f"{expression}, where u0, u1 ... are sizes that vary or numbers out of a tensor"
        return shape_guard(at, found, str(source))
    if isinstance(error, ConstraintViolationError) or "Constraints violated" in first:
        # Of a size that became a number, where that was is told as text, once for each dimension.
        why, _, stack = (rest.strip() or first).partition("\n\nUser stack:")
        line = source or _source_in(stack.partition("\n\n")[0])
        where = line.with_text if line else branch
        return shape_guard(f" at {where}" if where else "", why, str(line) or branch)
    if isinstance(error, exc.Unsupported | exc.UserError):
        return GraphBreakError(
            f"graph break{at}",
            expected="code that is traced as one graph",
            found=first or type(error).__name__,
            do=f"remove it, or {_PUT_ASIDE}",
            source=str(source),
        )
    return CompileError(
        f"trace{at}",
        expected="a model that runs on the example",
        found=_cause(inner or error),
        do="run the model uncompiled (level 0) to see the error itself",
        source=str(source),
    )


def asked_of_unbacked(error: Exception) -> str:
    """What a compiler that failed asked of a size that it does not know, and for which operation;
    "" if it failed otherwise. Inductor tells it as text."""
    text = str(error)
    asked = re.search(r"data-dependent expression (.+?) \(unhinted", text)
    target = re.search(r"^ *target: (\S+)", text, re.MULTILINE)
    if asked is None:
        return ""
    return f"{target[1] if target else 'code'} that asks {asked[1]}, where u0, u1 ... vary"


def _cause(error: Exception) -> str:
    """The first line; of a run on fake tensors, what that raised."""
    first, _, rest = str(error).strip().partition("\n")
    _, _, raised = rest.partition("): got ")
    return raised.partition("\n")[0] or f"{type(error).__name__}: {first}"


def shape_guard(at: str, found: str, source: str) -> ShapeGuardError:
    """The error for a branch on a size, ``at`` some line."""
    return ShapeGuardError(
        f"branch on a size{at}",
        expected="code that runs alike for every size, because one trace serves all of them",
        found=found,
        do=f"remove the branch, or {_PUT_ASIDE}",
        source=source,
    )


def refuse_values(graph: fx.GraphModule, cut_at: Callable[[fx.Node], object]) -> None:
    """Errors: ``GraphBreakError`` for a size or number that depends on the contents of a tensor,
    because a graph that is captured would hold that of the capture. ``cut_at``: None of others."""
    for node in graph.graph.nodes:
        depends = node.op != "placeholder" and node.meta.get("unbacked_bindings")
        if depends and cut_at(node) is None:
            source = line_of(node)
            raise GraphBreakError(
                f"{node.name} at {source}" if source else node.name,
                expected="sizes and numbers that do not depend on what a tensor contains",
                found=f"{node.target}, whose result does",
                do="keep it on the device, or put it into an operator that splitting_ops names "
                "(level 3)",
                source=source,
            )


def refuse_dropped_sizes(graph: fx.GraphModule) -> None:
    """Errors: ``ShapeGuardError`` for a ``squeeze`` of a dimension that varies and is not known:
    torch takes it for one that is never 1, and the result has one dimension less where it is."""
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", node.target) not in ("squeeze", "squeeze_"):
            continue
        value = node.args[0].meta.get("example_value")
        dims = node.kwargs.get("dim", (*node.args[1:], None)[0])
        told = range(value.dim()) if dims is None else dims if isinstance(dims, tuple) else (dims,)
        if any(isinstance(value.shape[dim], torch.SymInt) for dim in told):
            source = line_of(node)
            found = "squeeze of a dimension that varies, which drops it at size 1 alone"
            raise shape_guard(f" at {source}" if source else "", found, source)


def refuse_side_effects() -> tuple[str, ...]:
    """What the code that is traced now does beside its graph: globals that it changes are returned.

    Errors: ``SideEffectError`` for everything else.
    """
    tracer: Any = InstructionTranslator.current_tx()
    effects = tracer.output.side_effects
    changed: list[str] = []
    for variable in effects.id_to_variable.values():
        source = getattr(variable, "source", None)
        is_new = type(variable.mutation_type).__name__.endswith("New")
        if source is None or is_new or not effects.is_modified(variable):
            continue
        stored = effects.store_attr_mutations.get(variable, {})
        is_global = source.name.startswith("G[")
        if is_global and _is_put_back(variable, stored):
            continue
        attributes = "".join(f".{name}" for name in stored)
        stacks = effects.mutation_user_stacks.get(variable, ())
        line = next(filter(None, map(_user_line, reversed(stacks))), Source())
        at = f" at {line.with_text}" if line else ""
        subject = as_written(f"{source.name}{attributes}{_changed_key(variable)}")
        if is_global:
            changed.append(subject)
            text = f"{subject} is changed{at}: this happens in eager runs, and in no replay"
            warn_user(SideEffectWarning, text)
            continue
        raise SideEffectError(
            f"{subject}{at}",
            expected="compiled code that assigns no attribute and changes no container",
            found="it does: a replay would not",
            do="write in place, as self.buf.copy_(...), or do it before the compiled part",
            source=str(line),
        )
    return tuple(changed)


def _changed_key(variable: Any) -> str:
    """Of a dictionary of buffers, parameters or modules, which are attributes as a user sees it."""
    before = getattr(variable, "original_items", {})
    if not variable.source.name.endswith(("._buffers", "._parameters", "._modules")):
        return ""
    now = variable.items.items()
    changed = [key.vt.as_python_constant() for key, value in now if before.get(key) is not value]
    return f"[{changed[0]!r}]" if changed else ""


def _is_put_back(variable: Any, stored: Mapping[str, Any]) -> bool:
    """True for an object whose attributes the code leaves as they are: transformers sets a flag of
    its own for each forward."""
    target = getattr(variable, "value", None)
    own = own_dict(target)
    if own is None or issubclass(type(target), _CONTAINERS) or not stored:
        return False
    return all(
        name in own and value.is_python_constant() and own[name] is value.as_python_constant()
        for name, value in stored.items()
    )


def _user_line(stack: Iterable[FrameSummary]) -> Source:
    own = [frame for frame in stack if is_user_file(frame.filename)]
    return Source(own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else Source()


def line_of(node: fx.Node) -> str:
    """``source_of``, as text."""
    return str(source_of(node))


def source_of(node: fx.Node) -> Source:
    """The user's line that was traced as this node, as the stack says that Dynamo keeps as text."""
    return _source_in(node.stack_trace or "")


def _source_in(stack: str) -> Source:
    frames = _FRAME.findall(stack)
    return _user_line(FrameSummary(f, int(n), name, lookup_line=False) for f, n, name in frames)

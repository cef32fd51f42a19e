"""A traced graph, cut at splitting ops into pieces, and the function that calls them in order."""

from __future__ import annotations

import ctypes
import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeVar, cast
from uuid import uuid4

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from graphrt.compile import torch_api
from graphrt.compile.failures import source_of
from graphrt.compile.ranges import sizes_of
from graphrt.errors import SplittingOpError
from graphrt.source import TRACED_LINES

T = TypeVar("T")

FIELD = "compilation.splitting_ops"

# A part of these alone computes nothing that a graph would save: it joins the piece before it.
_TRIVIAL = re.compile(
    r"(new_|sym_)?(empty|size)(_like)?|view(_as)?|transpose|permute|(un)?squeeze|expand|select"
    r"|narrow|chunk|split|unbind|getitem"
)

MODULES_OF_TORCH = ("torch", "operator", "_operator", "math", "builtins")
_NAMESPACES_OF_TORCH = ("aten", "prim", "prims")
_PROCESS = uuid4().hex
_ENDS = ("placeholder", "output")


Kind = Literal["captured", "splitting"]
"""``splitting``: runs eagerly between graphs."""

Described = tuple[tuple[Any, ...], Mapping[int, str]]
"""What a call returns, new tensors as ``meta`` ones, and views of arguments; and the positions of
those that it writes, each with the user's line, "" where that is not known."""


class PieceInfo(NamedTuple):
    """One piece, in call order."""

    number: int
    name: str
    """``piece 3``, or of a splitting piece the names of its ops."""
    kind: Kind
    is_plain: bool
    """True if each splitting op of it is called as the Python function that was given for it."""
    unique_id: str
    """Equal for pieces that compute the same, and share compiled code."""
    is_opaque: bool = False
    """True if its kernels cannot be seen by a dispatch mode: see ``describe``."""
    describe: Callable[[Sequence[Any]], Described] | None = None
    """Of an opaque piece: what a call with these arguments would do."""


Wrap = Callable[[Callable[..., Any], PieceInfo], Callable[..., Any]]
"""``wrap(piece, info)``: what is called in place of ``piece``, which takes and returns tuples."""


class Piece(NamedTuple):
    """A part of the traced graph."""

    kind: Kind
    name: str
    is_plain: bool
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    module: fx.GraphModule
    """Of ``nodes`` alone: takes ``inputs``, returns ``outputs`` as a tuple. Pieces of one
    ``structure`` share one; where recorders see what it calls, if they are of the same lines."""
    structure: str
    """A hash of what it computes, the same in every process."""


class SplittingOps:
    """The names of ``splitting_ops``, looked up: ``ns::op``, ``ns::op.overload``, ``ns.op``, or the
    dotted path of a Python callable. ``impls``: by such names, functions to call in place of them.

    Errors: ``SplittingOpError`` for a name that stands for nothing.
    """

    def __init__(
        self, names: Sequence[str], impls: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self.names = tuple(names)
        self._names = _targets(names)
        self._impls = {
            target: (impls or {})[name] for target, name in _targets(impls or ()).items()
        }

    def find(self, node: fx.Node) -> str | None:
        """The name that cuts the graph at ``node``; "" for one that torch says no graph can hold;
        None if it is not cut."""
        called: Any = node.target
        if isinstance(called, torch._ops.OpOverloadPacket):
            called = getattr(called, called.overloads()[0])
        tags = getattr(called, "tags", ())
        return _of_node(self._names, node, "" if torch.Tag.cudagraph_unsafe in tags else None)

    def impl_of(self, node: fx.Node) -> Callable[..., Any] | None:
        """The function that was given for what ``node`` calls."""
        given, called = _of_node(self._impls, node, None), node.target
        if given is not None and isinstance(called, FunctionType) and called not in self._impls:
            name = _path_of(called)
            raise SplittingOpError(
                f"op_impls: {operator_of(node)}",
                expected="the name of what the model calls, if its arguments may be others",
                found=f"{name}, a Python function",
                do=f"name {name}",
            )
        return given

    def call_of(self, node: fx.Node, is_cut: bool) -> Callable[..., Any] | None:
        """What to call in place of what ``node`` calls: the function given for it, else that which
        a splitting op is; None: nothing else. ``is_cut``: whether ``find`` finds it."""
        given = self.impl_of(node)
        if given is None and is_cut:
            # Recorders see what it calls, not one operator whose Python would run at each replay.
            return torch_api.python_of(operator_of(node), node.args, node.kwargs)
        return given


_Target = tuple[str, str] | Callable[..., Any]
"""``ns::op`` and overload, "" for every one; or a Python callable."""


def _targets(names: Iterable[str]) -> dict[_Target, str]:
    """What each of the names stands for."""
    found: dict[_Target, str] = {}
    for name in names:
        op = _operator(name)
        try:
            if op is None and "::" in name:
                raise ValueError("no operator of that name is registered")
            found[op or callable_at(name)] = name
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise SplittingOpError(
                f"{FIELD}: {name!r}",
                expected="ns::op, ns::op.overload or ns.op of a registered operator, or "
                "package.callable",
                found=str(error),
                do="correct it, or import what registers it before the runtime is made",
            ) from error
    return found


def _of_node(known: Mapping[_Target, T], node: fx.Node, other: T | None) -> T | None:
    """What is known of what ``node`` calls; else ``other``."""
    name = operator_of(node)
    found = known.get(cast("Any", node.target), known.get((name, ""), other))
    if found is other and any(isinstance(one, tuple) and one[0] == name for one in known):
        found = known.get((name, overload_of(node)), other)
    return found


def _operator(name: str) -> tuple[str, str] | None:
    """(``ns::op``, overload) of a registered operator. ``a.b`` may be a Python callable too."""
    if "::" not in name and name.count(".") != 1:
        return None
    namespace, _, rest = name.replace("::", ".", 1).partition(".")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None or (overload and overload not in packet.overloads()):
        return None
    return f"{namespace}::{op}", overload


def callable_at(path: str) -> Callable[..., Any]:
    """What the dotted path of a Python callable stands for.

    Errors: ``ImportError``, ``AttributeError``, ``ValueError``, and ``TypeError`` for what cannot
    be called.
    """
    module, _, attribute = path.rpartition(".")
    try:
        owner = import_module(module)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{module} cannot be imported: {type(error).__name__}: {error}"
        raise ImportError(text) from error
    found: Callable[..., Any] = getattr(owner, attribute)
    if not callable(found):
        raise TypeError(f"a {type(found).__name__}, which cannot be called")
    return found


def cut(
    graph: fx.GraphModule,
    ops: SplittingOps,
    axes: Mapping[Any, str],
    is_opaque: bool,
    marked: Callable[[fx.Node], Any] | None = None,
) -> tuple[list[Piece], tuple[str, ...]]:
    """Cut ``graph`` at every splitting op; also the ops that it does not have. What ``ops`` say to
    call in place of one is called inside a compiled piece too, unless that ``is_opaque``.
    ``axes``: by symbol, what varies; ``marked``: leave it whole for another to cut, and call this
    in place of each splitting op.

    Order is kept; consecutive splitting ops are one piece; ``getitem`` stays with its producer.
    Errors: ``SplittingOpError`` if there are ``ops`` and the graph has none of them.
    """
    parts, found = _parts(graph, ops)
    matched = {*found.values()}
    if ops.names and not matched:
        those = [node for node in graph.graph.nodes if node.op.startswith("call")]
        known = sorted({operator_of(node) or _path_of(node.target) for node in those})
        raise SplittingOpError(
            FIELD,
            expected="at least one of them in the traced graph",
            found=f"none of {', '.join(ops.names)} among {', '.join(known)}",
            do="name the operators between which graphs are captured, or () for none",
        )
    pieces: list[Piece] = []
    modules: dict[tuple[str, ...], fx.GraphModule] = {}
    places = graph.graph.find_nodes(op="placeholder")
    sizes = {size: places[at] for size, (at, dim) in sizes_of(places) if dim < 0}
    if marked is not None:
        # Not the parts in order: they have each ``getitem`` beside its producer.
        parts = [("captured", [node for node in graph.graph.nodes if node.op not in _ENDS])]
    for index, (kind, nodes) in enumerate(parts):
        inside = set(nodes)
        # By first use, so that alike pieces have them in one order.
        used = dict.fromkeys(used for node in nodes for used in node.all_input_nodes)
        inputs = [node for node in used if node not in inside]
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        if kind == "captured":
            inputs += _sizes_behind(sizes, inputs, outputs)
        names = {node: found[node] for node in nodes if node in found}
        called: dict[fx.Node, Any] = {}
        is_seen = kind == "splitting" or not is_opaque
        if is_seen:
            calls = ((node, ops.call_of(node, node in names)) for node in nodes)
            called = {node: call for node, call in calls if call is not None}
        elif marked is not None:
            called = {node: marked(node) for node in names}
        structure = _structure(graph, axes, inputs, nodes, (tuple(outputs),), called)
        lines = [str(node.stack_trace) for node in nodes] if is_seen else []
        # Alike ones share one: to make a module takes longer than all else.
        module = modules.get((structure, *lines))
        if module is None:
            module = extract(graph, nodes, inputs, outputs, called)
            modules[structure, *lines] = module
        pieces.append(
            Piece(
                kind,
                ", ".join(name for name in names.values() if name) or f"piece {index}",
                kind == "splitting" and all(ops.impl_of(node) is not None for node in names),
                nodes,
                inputs,
                outputs,
                module,
                structure,
            )
        )
    return pieces, tuple(name for name in ops.names if name not in matched)


def stitch(
    graph: fx.GraphModule, pieces: Sequence[Piece], calls: Sequence[Callable[..., Any]]
) -> tuple[Callable[..., tuple[Any, ...]], str]:
    """A function that takes the graph's inputs, calls ``calls`` in order, returns its outputs; and
    its text."""
    output: Any = graph.graph.output_node()
    last_use = {node: index for index, piece in enumerate(pieces) for node in piece.inputs}
    last_use |= dict.fromkeys(output.all_input_nodes, len(pieces))
    text = {node: f"v{index}" for index, node in enumerate(graph.graph.nodes)}
    body = []
    for index, piece in enumerate(pieces):
        made = "".join(f"{text[node]}, " for node in piece.outputs)
        call = f"piece_{index}({', '.join(text[node] for node in piece.inputs)})"
        body.append(f"({made}) = {call}" if piece.outputs else call)
        # Free what no later piece reads: an eager run then needs no more memory than uncompiled.
        dead = [text[node] for node in piece.inputs + piece.outputs if last_use[node] == index]
        body += [f"del {', '.join(dead)}"] if dead else []
    body.append(f"return ({''.join(f'{text[node]}, ' for node in output.args[0])})")
    arguments = ", ".join(text[node] for node in graph.graph.find_nodes(op="placeholder"))
    source = f"def stitched({arguments}):\n" + "".join(f"    {line}\n" for line in body)
    scope: dict[str, Any] = {f"piece_{index}": call for index, call in enumerate(calls)}
    exec(compile(source, "<graphrt stitched>", "exec"), scope)
    return scope["stitched"], source


def _parts(
    graph: fx.GraphModule, ops: SplittingOps
) -> tuple[list[tuple[Kind, list[fx.Node]]], dict[fx.Node, str]]:
    """The nodes of each piece in order, and the name that matched each splitting op."""
    parts: list[tuple[Kind, list[fx.Node]]] = []
    part_of: dict[fx.Node, list[fx.Node]] = {}
    found: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        if node.op in _ENDS:
            continue
        name = ops.find(node)
        producer = part_of.get(node.args[0]) if node.target is operator.getitem else None
        if producer is not None and isinstance(node.args[1], int):
            part_of[node] = producer
            producer.append(node)
            continue
        if name is not None:
            found[node] = name
        kind: Kind = "captured" if name is None else "splitting"
        if not parts or parts[-1][0] != kind:
            if kind == "splitting" and len(parts) > 1 and _is_trivial(parts[-1][1]):
                moved = parts.pop()[1]
                parts[-1][1].extend(moved)
                part_of.update(dict.fromkeys(moved, parts[-1][1]))
            else:
                parts.append((kind, []))
        parts[-1][1].append(node)
        part_of[node] = parts[-1][1]
    return parts, found


def _sizes_behind(
    sizes: Mapping[Any, fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> list[fx.Node]:
    """Those of ``sizes``, the graph's, that those of a piece's values are made of, as ``n + 3``,
    and that none of its ``inputs`` has: a compiler asks for them."""
    missing = sizes.keys() - {size for size, _ in sizes_of(inputs)}
    if missing:
        values = [node.meta.get("example_value") for node in (*inputs, *outputs)]
        sized = [value for value in values if isinstance(value, torch.Tensor | torch.SymInt)]
        missing &= free_symbols(sized)
    return [node for size, node in sizes.items() if size in missing]


def _is_trivial(nodes: Sequence[fx.Node]) -> bool:
    return all(_TRIVIAL.fullmatch(name_of(node)) for node in nodes)


def extract(
    owner: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    called: Mapping[fx.Node, Any],
) -> fx.GraphModule:
    """A graph of ``nodes`` of ``owner``, which always returns a tuple. ``called``: what to call
    instead of what a node calls."""
    piece = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = piece.placeholder(node.name)
        copies[node].meta = node.meta
    for node in nodes:
        copies[node] = piece.node_copy(node, copies.__getitem__)
        if node in called:
            copies[node].op, copies[node].target = "call_function", called[node]
    piece.output(tuple(copies[node] for node in outputs))
    module = fx.GraphModule(owner, piece)
    lines = torch_api.nodes_by_line(module)
    # For errors about what its code does.
    setattr(module, TRACED_LINES, {line: source_of(node) for line, node in lines.items()})
    return module


def operator_of(node: fx.Node) -> str:
    """``ns::op`` of what a node calls, also as the function or method of torch, or the operator of
    Python on tensors, that has its name; "" where it has none."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    is_of_torch = node.op == "call_function" and module_of(target) == "torch"
    if node.op == "call_method" or module_of(target) == "_operator":
        values = [used.meta.get("example_value") for used in node.all_input_nodes]
        is_of_torch = any(isinstance(value, torch.Tensor) for value in values)
    name = name_of(node)
    return f"aten::{name}" if is_of_torch and hasattr(torch.ops.aten, name) else ""


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls, without an overload's."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def module_of(target: object) -> str:
    """The outermost package of a function."""
    return str(getattr(target, "__module__", None) or "torch").partition(".")[0]


def _path_of(target: Any) -> str:
    module = getattr(target, "__module__", None) or "torch"
    return f"{module}.{getattr(target, '__qualname__', target)}"


def overload_of(node: fx.Node) -> str:
    """The name of the overload that a node with an ``operator_of`` calls; "" for none that takes
    these arguments."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._overloadname
    given: Any = fx.node.map_arg(
        (node.args, node.kwargs), lambda used: used.meta.get("example_value")
    )
    return torch_api.chosen_overload(operator_of(node), *given)


def written_out(
    module: fx.GraphModule, plain: Mapping[str, Callable[..., Any]], inputs: Sequence[Any]
) -> fx.GraphModule:
    """``module`` with what the functions do in place of operators of these names; ``inputs``: fake
    ones of it."""
    graph = deepcopy(module.graph)
    for node in graph.nodes:
        if (function := plain.get(operator_of(node))) is not None:
            node.op, node.target = "call_function", function
    written = make_fx(fx.Interpreter(module, graph=graph).run)(*inputs)
    for node in written.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    return written


def structure_of(module: fx.GraphModule, axes: Mapping[Any, str]) -> str:
    """A hash of what it computes, without the names of its values and of symbols."""
    inputs = module.graph.find_nodes(op="placeholder")
    nodes = [node for node in module.graph.nodes if node.op not in _ENDS]
    return _structure(module, axes, inputs, nodes, module.graph.output_node().args, {})


def _structure(
    owner: fx.GraphModule,
    axes: Mapping[Any, str],
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Any,
    called: Mapping[fx.Node, Any],
) -> str:
    """Of what ``extract`` would make, without making it. ``owner``: of its constants."""
    # Symbols that are no axis are counted in order of their first use.
    symbols: dict[Any, Any] = {symbol: sympy.Symbol(name) for symbol, name in axes.items()}

    def told(value: Any) -> str:
        if isinstance(value, torch.SymInt):
            expression = value.node.expr
            for symbol in sorted(expression.free_symbols, key=str):
                symbols.setdefault(symbol, sympy.Symbol(f"s{len(symbols)}"))
            return str(expression.xreplace(symbols))
        if isinstance(value, torch.Tensor):
            parts = (*map(told, value.shape), "|", *map(told, value.stride()))
            return f"{value.dtype} {value.device} {' '.join(parts)}"
        return f"{type(value).__name__} {value!r}"

    lines = [told(node.meta.get("example_value")) for node in inputs]
    places = {node: f"%{index}" for index, node in enumerate((*inputs, *nodes))}
    for node in nodes:
        target = called.get(node, node.target)
        if node.op == "get_attr":
            constant = operator.attrgetter(str(target))(owner)
            if isinstance(constant, fx.GraphModule):
                lines.append(structure_of(constant, axes))
            else:
                is_tensor = isinstance(constant, torch.Tensor)
                contents = digest_of(constant) if is_tensor else repr(constant)
                lines.append(f"{told(constant)} {contents}")
        else:
            kind, name = "method", target
            if not isinstance(target, str):
                kind, name = "function", _named(target)
            given = fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
            lines.append(f"{kind} {name} {given!r}")
            if is_of_others(node):
                lines += map(told, tree_leaves(node.meta.get("example_value")))
    lines.append(repr(fx.node.map_arg(outputs, places.__getitem__)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_of_others(node: fx.Node) -> bool:
    """Whether it calls an operator that is not torch's own: what it returns may be told otherwise
    in another process, by another operator of that name."""
    is_operator = isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_operator and operator_of(node).partition("::")[0] not in _NAMESPACES_OF_TORCH


def _named(target: Any) -> str:
    """The same in every process for what torch and Python define; of the user's code, which may
    be another one by the same name, only while this process runs."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return ", ".join(_named(getattr(target, one)) for one in target.overloads())
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target} {target._schema}"
        is_own = target.namespace in _NAMESPACES_OF_TORCH
        return name if is_own or torch_api.is_seen_whole(target) else f"{name} {_PROCESS}"
    name = _path_of(target)
    # Kernels of Triton are numbers in the arguments.
    is_kernel = "triton_kernel" in str(target)
    if is_kernel or module_of(target) not in MODULES_OF_TORCH:
        return f"{name} {_PROCESS} {id(target)}"
    return name


def digest_of(tensor: torch.Tensor) -> str:
    """Of the bytes of its contents, in order."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    # Without NumPy, which torch does not need.
    return hashlib.sha256(ctypes.string_at(flat.data_ptr(), flat.numel())).hexdigest()

"""What pieces write, and what goes wrong where a compiler may move or copy what is written."""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from types import FunctionType
from typing import Any

import sympy
import torch
from torch import fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.printers import PythonPrinter

from graphrt.compile import splitter
from graphrt.compile.failures import line_of
from graphrt.compile.ranges import sizes_of
from graphrt.compile.splitter import Described, Piece, SplittingOps, name_of, operator_of
from graphrt.device.torch_modes import hidden_writes
from graphrt.errors import CompileError, ContractError

_IN_PLACE = (
    "setitem iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
)
_WRITING_OPERATORS = frozenset(getattr(operator, name) for name in _IN_PLACE.split())

_SETTING = re.compile(r"_?set_(?!grad_enabled).*|enable_.*|_sdpa_kernel")

MOST_COPIED_BYTES = 1 << 28

_Known = tuple[Sequence[Any], Mapping[int, int], tuple[int, ...]]
"""Fake results; by memory, which argument lies in it; positions of what is written."""


def description(piece: Piece) -> Callable[[Mapping[int, str], Sequence[Any]], Described]:
    """Says of calls of a piece, and of alike ones, what they return and write. Takes the lines of
    the one that is called, as ``written_inputs``, and the arguments."""
    # By their schemas too, because fake kernels of operators need not write.
    module, declared = piece.module, [*written_inputs(piece)]
    known: dict[Any, _Known] = {}

    def describe(lines: Mapping[int, str], args: Sequence[Any]) -> Described:
        key = tuple(
            (arg.shape, arg.stride()) if isinstance(arg, torch.Tensor) else arg for arg in args
        )
        if key not in known:
            known[key] = _described(module, declared, args)
        results, given, written = known[key]
        likes = tuple(_like(result, given, args) for result in results)
        return likes, {at: lines.get(at, "") for at in written}

    return describe


def _described(module: fx.GraphModule, declared: Sequence[int], args: Sequence[Any]) -> _Known:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [
            torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
            if isinstance(arg, torch.Tensor)
            else arg
            for arg in args
        ]
        tensors = {at: fake for at, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)}
        versions = {at: fake._version for at, fake in tensors.items()}
        results = fx.Interpreter(module).run(*fakes)
        written = {at for at, fake in tensors.items() if fake._version != versions[at]}
    given = {fake.untyped_storage()._cdata: at for at, fake in tensors.items()}
    return results, given, tuple(sorted({*written, *declared}))


def _like(result: Any, given: Mapping[int, int], args: Sequence[Any]) -> Any:
    """A result as it is, or a tensor like it."""
    if not isinstance(result, torch.Tensor):
        return result
    shape, stride, dtype = result.shape, result.stride(), result.dtype
    at = given.get(result.untyped_storage()._cdata)
    if at is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    # A view of an argument: what is written through one of them is read through the other.
    typed = args[at].view(dtype)
    return typed.as_strided(shape, stride, typed.storage_offset() + result.storage_offset())


def refuse_shared_writes(pieces: Sequence[Piece]) -> None:
    """Errors: ``CompileError`` where a piece writes what two results of a compiled one share: a
    compiler keeps what its code returns, not which of it lies in one memory."""
    shared: dict[int, str] = {}
    for piece in pieces:
        writes = [(node, value) for node in piece.nodes for value in written_by(node)]
        for node, value in writes:
            name = shared.get(storage_of(value))
            if name is not None:
                raise CompileError(
                    f"{value.name}, which {piece.name} writes at {line_of(node)}",
                    expected="memory of its own, which no other result of compiled code shares",
                    found=f"one of several results of {name} over one memory",
                    do="clone it before it is written, or use backend='eager'",
                    source=line_of(node),
                )
        if piece.kind == "captured":
            given = [storage_of(node) for node in piece.inputs]
            made = [storage_of(node) for node in piece.outputs]
            for storage in made:
                if storage and storage not in given and made.count(storage) > 1:
                    shared[storage] = piece.name


def refuse_unresolved(piece: Piece) -> None:
    """Errors: ``CompileError`` for a tensor that compiled code takes or returns and that is to be
    conjugated, or negated, when it is read: compilers make code for the memory as it is."""
    for node in (*piece.inputs, *piece.outputs):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            raise CompileError(
                f"{node.name} of {piece.name}",
                expected="a tensor whose memory holds its values, where compiled code begins and "
                "ends",
                found="one that torch conjugates or negates when it is read",
                do="call resolve_conj() and resolve_neg() on it, or use backend='eager'",
                source=line_of(node),
            )


def refuse_views_of_written(piece: Piece) -> None:
    """Errors: ``CompileError`` where compiled code writes what it takes twice, as views of one
    memory: a compiler takes arguments for memory of their own."""
    written = {storage_of(value): node for node in piece.nodes for value in written_by(node)}
    for first, second in combinations(piece.inputs, 2):
        storage = storage_of(first)
        if storage and storage == storage_of(second) and storage in written:
            one, other = (node.meta["example_value"] for node in (first, second))
            if _may_overlap(one, other):
                at = line_of(written[storage])
                raise CompileError(
                    f"{first.name} and {second.name}, which {piece.name} takes and writes at {at}",
                    expected="memory that compiled code takes once, if it writes it",
                    found="two views of one memory, which a compiler takes for two memories",
                    do="clone one, make the view where it is read, or use backend='eager'",
                    source=at,
                )


def _may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """False only if two views of one memory share no element."""
    numbers = (*one.shape, *one.stride(), *other.shape, *other.stride())
    offsets = (one.storage_offset(), other.storage_offset())
    is_known = all(isinstance(number, int) for number in (*numbers, *offsets))
    if not is_known or one.dtype != other.dtype:
        return True
    # Is there a place of each for which the difference of their offsets is made up? Dimensions of
    # one stride count as one, or each pair of their places would be tried.
    spans: dict[int, tuple[int, int]] = {}
    for view, backward, forward in ((one, 0, 1), (other, 1, 0)):
        for n, s in zip(view.shape, view.stride(), strict=True):
            low, high = spans.get(s, (0, 0))
            spans[s] = low - backward * (n - 1), high + forward * (n - 1)
    terms = sorted(((s, *span) for s, span in spans.items() if s), reverse=True)

    def can_be(wanted: int, at: int) -> bool:
        if at == len(terms):
            return wanted == 0
        if wanted % math.gcd(*(s for s, _, _ in terms[at:])):
            return False
        stride, low, high = terms[at]
        least = sum(s * first for s, first, _ in terms[at + 1 :])
        most = sum(s * last for s, _, last in terms[at + 1 :])
        low = max(low, -((most - wanted) // stride))
        high = min(high, (wanted - least) // stride)
        return any(can_be(wanted - stride * k, at + 1) for k in range(low, high + 1))

    return 0 not in (*one.shape, *other.shape) and can_be(int(offsets[1] - offsets[0]), 0)


def with_layouts(call: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
    """``call``, whose results have the strides of the piece's ``outputs``.

    Inductor keeps the strides of results only where no size in them is unbacked.
    """
    given = {storage_of(node) for node in piece.inputs}
    wanted: dict[int, tuple[Any, ...]] = {}
    for place, node in enumerate(piece.outputs):
        value = node.meta.get("example_value")
        # torch makes views of arguments of these again.
        if not isinstance(value, torch.Tensor) or storage_of(node) in given:
            continue
        if any(isinstance(stride, torch.SymInt) for stride in value.stride()):
            wanted[place] = tuple(map(sympy.sympify, value.stride()))
    if not wanted:
        return call
    where = {size: place for size, place in sizes_of(piece.inputs) if size.is_Symbol}
    texts = [f"({', '.join(map(PythonPrinter().doprint, each))},)" for each in wanted.values()]
    names = ", ".join(str(symbol) for symbol in where)
    strides_for = eval(f"lambda {names}: [{', '.join(texts)}]", {"math": math})

    def with_strides(*args: Any) -> Any:
        results = list(call(*args))
        known = [args[at] if dim < 0 else args[at].shape[dim] for at, dim in where.values()]
        for place, strides in zip(wanted, strides_for(*known), strict=True):
            result = results[place]
            layout = zip(result.shape, result.stride(), strides, strict=True)
            if any(size > 1 and found != stride for size, found, stride in layout):
                # What several elements share is there once.
                own = result[tuple(slice(None if stride else 1) for stride in strides)]
                laid_out = result.new_empty_strided(own.shape, strides).copy_(own)
                results[place] = laid_out.expand(result.shape)
        return results

    return with_strides


def checking_results(
    call: Callable[..., Any], name: str, traced: Any, is_opaque: bool
) -> Callable[..., Any]:
    """``call``, which has to return what was ``traced`` but for sizes that vary: what follows is
    compiled for that. Strides too, if that ``is_opaque``.

    Errors: ``ContractError``. ``name``: of the function, for these.
    """
    wanted = tree_leaves(traced)

    def run(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        found = tree_leaves(results)
        if len(found) != len(wanted):
            raise _other_result(name, f"{len(wanted)} results", f"{len(found)}")
        for expected, result in zip(wanted, found, strict=True):
            if isinstance(expected, torch.Tensor) and not _is_like(expected, result, is_opaque):
                raise _other_result(name, _text_of(expected), _text_of(result))
        return results

    return run


def _is_like(expected: torch.Tensor, found: Any, is_opaque: bool) -> bool:
    if not isinstance(found, torch.Tensor) or found.dim() != expected.dim():
        return False
    expected_layout: tuple[Any, ...] = (expected.shape, expected.stride())
    layout = zip(found.shape, found.stride(), *expected_layout, strict=True)
    return (found.dtype, found.device) == (expected.dtype, expected.device) and all(
        (isinstance(wanted, torch.SymInt) or size == wanted)
        and (isinstance(step, torch.SymInt) or stride == step or size < 2 or not is_opaque)
        for size, stride, wanted, step in layout
    )


def _text_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    sizes, strides = (", ".join(map(str, each)) for each in (value.shape, value.stride()))
    return f"{value.dtype} of shape ({sizes}), strides ({strides}), on {value.device}"


def _other_result(name: str, expected: str, found: str) -> ContractError:
    return ContractError(
        f"what is called for {name}",
        expected=f"results as the operator's in the trace: {expected}",
        found=found,
        do="let the function in op_impls return what the operator returns",
    )


def noting_writes(
    call: Callable[..., Any], written: Callable[[Any, Any], Sequence[torch.Tensor]]
) -> Callable[..., Any]:
    """``call``, after which the tensors that its schemas declare as written count a write.

    torch counts its own operations only: no kernel that is launched past it, as Triton's are. Who
    records an eager segment without observing it asks those counts what it wrote.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        torch.autograd.graph.increment_version(written(args, kwargs))
        return results

    return run


def refuse_hidden_reads(piece: Piece, readers: SplittingOps) -> None:
    """Errors: ``CompileError`` where one of ``readers`` inside a compiled piece may read what the
    piece writes, and does not take it as an argument: a compiler moves the write behind it."""
    written: dict[int, fx.Node] = {}
    for node in piece.nodes:
        if readers.find(node) is not None:
            taken = {storage_of(one) for one in node.all_input_nodes}
            for storage, store in written.items():
                if storage not in taken:
                    raise CompileError(
                        f"{operator_of(node)} at {line_of(node)}",
                        expected="attention cut out of what is compiled, or an operator that takes "
                        "each tensor that was written before it and that it reads",
                        found=f"a store at {line_of(store)}, which a compiler moves behind it",
                        do="name it in splitting_ops at level 3, without "
                        "use_inductor_graph_partition, or use backend='eager'",
                        source=line_of(node),
                    )
        given = {storage_of(one) for one in piece.inputs} - {0}
        for value in written_by(node):
            if storage_of(value) in given:
                written[storage_of(value)] = node


def drop_inference_mode(graph: fx.GraphModule) -> None:
    """Take ``torch.inference_mode`` out of the graph: who runs it records no gradients anyway, and
    one piece would enter what another one leaves."""
    grad_mode = torch.autograd.grad_mode
    for target in (grad_mode._exit_inference_mode, grad_mode._enter_inference_mode):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            graph.graph.erase_node(node)


def refuse_open_contexts(graph: fx.GraphModule, ops: SplittingOps, is_opaque: bool) -> None:
    """Errors: ``CompileError`` where one of ``ops`` is called under an autocast, a transform of
    functions or a setting of torch (``sdpa_kernel``) that the model has entered: pieces before it
    enter and pieces behind it leave, so that a replay, which runs no Python of theirs, calls it
    without. An autocast that changes nothing may stay, unless that ``is_opaque``.
    """
    entered: list[fx.Node] = []
    settings = {node: _setting_of(node) for node in graph.graph.nodes if is_setting(node)}
    values: dict[Any, list[str]] = {}
    for node, told in settings.items():
        values.setdefault(node.target, []).append(told)
    # A context puts back at last what was there. What is set once is not put back.
    at_rest = {target: told[-1] for target, told in values.items() if len({*told}) > 1}
    set_now: dict[Any, str] = {}
    for node in graph.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            entered.append(node)
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            entered.remove(node.args[0])
        elif node in settings:
            set_now[node.target] = settings[node]
        else:
            around = [
                f"autocast({kind!r}, {dtype}, enabled={is_on})"
                for kind, dtype, is_on, *_ in (one.args for one in entered)
                if is_opaque or is_on or torch.is_autocast_enabled(str(kind))
            ]
            around += [told for target, told in set_now.items() if told != at_rest.get(target)]
            if any(is_of_transform(one.meta.get("example_value")) for one in node.all_input_nodes):
                around.append("torch.vmap, or another transform of functions,")
            if around and ops.find(node) is not None:
                raise CompileError(
                    f"{node.name} at {line_of(node)}",
                    expected="a splitting op outside every autocast, torch.vmap and setting of "
                    "torch that the model enters",
                    found=f"{around[0]} around it",
                    do="enter it inside the operator, or around captures and steps",
                    source=line_of(node),
                )


def is_setting(node: fx.Node) -> bool:
    """Whether it sets something of the thread or process; not whether gradients are recorded."""
    is_call = node.op == "call_function" and not node.users and "example_value" not in node.meta
    return is_call and _SETTING.fullmatch(name_of(node)) is not None


def _setting_of(node: fx.Node) -> str:
    """The call as it is written."""
    given = fx.node.map_arg(node.args, lambda one: one.args[0] if one.args else one)
    return f"{name_of(node).strip('_')}{given!r}"


def written_inputs(piece: Piece) -> dict[int, str]:
    """The positions of the arguments whose memory a piece writes, each with the user's line."""
    lines: dict[int, str] = {}
    for node in piece.nodes:
        for value in written_by(node):
            lines.setdefault(storage_of(value), line_of(node))
    places = ((at, storage_of(node)) for at, node in enumerate(piece.inputs))
    return {at: lines[storage] for at, storage in places if storage and storage in lines}


def written_by(node: fx.Node) -> list[fx.Node]:
    """What a node writes in place: as the operator's schema says, else by the names of torch."""
    target: Any = node.target
    found: list[Any] = []
    if isinstance(target, torch._ops.HigherOrderOperator):
        # Of what its graphs write, all that it takes may be.
        inside = (one for graph in _graphs_of(node) for one in graph.graph.nodes)
        return node.all_input_nodes if any(map(written_by, inside)) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, splitter.overload_of(node) or target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        found += written_among(target, node.args, node.kwargs)
    elif operator_of(node) in ("aten::batch_norm", "aten::instance_norm"):
        args, kwargs = node.args, dict(node.kwargs)
        if isinstance(target, FunctionType):  # Whose arguments have another order.
            bound = inspect.signature(target).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = (), bound.arguments
        op = getattr(torch.ops.aten, operator_of(node).removeprefix("aten::")).default
        found += written_among(op, args, kwargs)
    else:
        name = name_of(node)
        # Not ``operator.and_``, whose name is no keyword for that reason alone.
        is_operator = getattr(target, "__module__", "") == "_operator"
        ends_so = name.endswith("_") and not name.endswith("__") and not is_operator
        is_method = node.op == "call_method" and name.strip("_") in _IN_PLACE.split()
        if ends_so or is_method or target in _WRITING_OPERATORS or _is_in_place(node):
            found += node.args[:1]
        found.append(node.kwargs.get("out"))
    written: list[fx.Node] = []
    # Lists of tensors too, which some operators write.
    fx.node.map_arg(found, written.append)
    return written


def _is_in_place(node: fx.Node) -> bool:
    """Whether a function of torch is told, by name or by position, to write its first argument."""
    given = node.kwargs.get("inplace", False)
    if isinstance(node.target, FunctionType):
        parameters = [*inspect.signature(node.target).parameters]
        if "inplace" in parameters[: len(node.args)]:
            given = node.args[parameters.index("inplace")]
    return given is True


def _graphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator is given."""
    owner: Any = node.graph.owning_module
    given = [one for one in node.all_input_nodes if one.op == "get_attr"]
    found = [operator.attrgetter(str(one.target))(owner) for one in given]
    return [one for one in found if isinstance(one, fx.GraphModule)]


def written_among(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What of the arguments an operator writes in place, by its schema or known otherwise."""
    arguments = op._schema.arguments
    given = [
        kwargs.get(argument.name, args[at] if at < len(args) else None)
        for at, argument in enumerate(arguments)
    ]
    hidden = hidden_writes(op._schema)
    found = [given[at] for at in hidden(given)] if hidden else []
    for one, argument in zip(given, arguments, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(one)
    return found


Copies = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
"""Memory, with a copy of what it held."""


def put_back(copies: Copies) -> None:
    """The first of several copies of one memory counts."""
    for storage, copy in reversed(copies):
        storage.copy_(copy)


def copies_of_written(graph: fx.GraphModule, inputs: Sequence[Any]) -> Copies:
    """The memory of ``inputs`` that a run of ``graph`` writes, each with a copy of what it holds.

    Of 256 MiB at most: what is larger is a cache, of which runs on examples write free rows.
    """
    written = {storage_of(value) for node in graph.graph.nodes for value in written_by(node)} - {0}
    found: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    room = MOST_COPIED_BYTES
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if storage_of(node) in written - found.keys():
            storage = value.untyped_storage()
            room -= storage.nbytes()
            if room >= 0:
                found[storage_of(node)] = storage, storage.clone()
    return [*found.values()]


def is_of_transform(value: object) -> bool:
    """Whether it is a tensor as ``torch.vmap`` and other transforms of functions see it."""
    return isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)


def storage_of(node: fx.Node) -> int:
    """Names the memory of a value in the trace; 0 for what is no tensor."""
    value: Any = node.meta.get("example_value")
    while is_of_transform(value):
        value = get_unwrapped(value)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0

"""Passes over a traced graph, before it is cut."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from graphrt.compile.effects import is_of_transform, storage_of, written_by
from graphrt.compile.splitter import MODULES_OF_TORCH, SplittingOps, module_of, name_of

# They compute nothing: their result is a view or a copy of the first argument, or that itself.
_MAY_CHANGE_NOTHING = re.compile(
    r"view(_as)?|reshape(_as)?|(un)?flatten|expand(_as)?|(un)?squeeze|narrow|contiguous|getitem"
    r"|to|type(_as)?|double|float|half|bfloat16|long|int"
)
# They change shape, strides or memory of the Python object that they are given, not of its views.
_CHANGES_AN_OBJECT = re.compile(
    r"(t|transpose|swap(axes|dims)|(un)?squeeze|resize(_as)?|as_strided|set|rename)_|set_data"
)


def remove_noops(graph: fx.GraphModule, ops: SplittingOps) -> int:
    """Use the argument of what returns it unchanged: the same memory, shape, strides and dtype.

    Returns how many operations are gone. What the graph returns, and ``ops``, stay; and all where
    some tensor gets another shape in place, because its views do not.
    """
    if any(_CHANGES_AN_OBJECT.fullmatch(name_of(node)) for node in graph.graph.nodes):
        return 0
    num_removed = 0
    for node in list(graph.graph.nodes):
        is_returned = any(user.op == "output" for user in node.users)
        if is_returned or not _changes_nothing(node) or ops.find(node) is not None:
            continue
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
        num_removed += 1
    return num_removed


def share_masks(graph: fx.GraphModule, ops: SplittingOps) -> None:
    """Make what torch's attention adds in place of a boolean mask where that mask is made.

    Attention that is cut out would make it at each call, by three kernels. A function that is given
    to be called in place of it gets the mask itself.
    """
    attend = F.scaled_dot_product_attention
    nodes = [*graph.graph.find_nodes(op="call_function", target=attend)]
    nodes = [node for node in nodes if ops.find(node) is not None and ops.impl_of(node) is None]
    may_write = graph.graph.nodes if nodes else ()
    written = {storage_of(value) for node in may_write for value in _may_write(node)}
    made: dict[tuple[Any, ...], fx.Node | None] = {}
    for node in nodes:
        mask = node.kwargs.get("attn_mask", (*node.args[3:4], None)[0])
        told = [_told(one.meta.get("example_value")) for one in node.all_input_nodes]
        if not isinstance(mask, fx.Node) or None in told or storage_of(mask) in written:
            continue
        if mask.meta["example_value"].dtype != torch.bool:
            continue
        # All but the memory, which is another one in each layer.
        key = (mask, str([one[1:] for one in told if one]), str(node.args[3:]), str(node.kwargs))
        if key not in made:
            made[key] = _additive(node, mask)
        if (added := made[key]) is not None:
            node.replace_input_with(mask, added)


def _additive(attention: fx.Node, mask: fx.Node) -> fx.Node | None:
    """What ``attention`` makes of ``mask``, behind it in the graph; None if it adds nothing."""
    inputs = attention.all_input_nodes

    def attend(*values: Any) -> Any:
        known = dict(zip(inputs, values, strict=True))
        given: Any = fx.node.map_arg((attention.args, attention.kwargs), known.__getitem__)
        args, kwargs = given
        return F.scaled_dot_product_attention(*args, **kwargs)

    # Traced, because what stands for minus infinity depends on the kernel that torch chooses.
    values = [one.meta["example_value"] for one in inputs]
    with values[inputs.index(mask)].fake_mode, enable_python_dispatcher():
        traced = make_fx(attend)(*values).graph
    given = list(traced.nodes)[inputs.index(mask)]
    where = next((one for one in given.users if one.target is torch.ops.aten.where.self), None)
    if where is None:
        return None
    before = mask.next
    while before.op == "placeholder":
        before = before.next
    copies = {given: mask}
    with mask.graph.inserting_before(before):
        for node in (*where.all_input_nodes, where):
            if node is not given:
                copies[node] = mask.graph.node_copy(node, copies.__getitem__)
                copies[node].meta["example_value"] = node.meta["val"]
    return copies[where]


def _may_write(node: fx.Node) -> list[fx.Node]:
    """What a node writes in place; of a function that is not torch's, all that it takes."""
    target = node.target
    is_told = node.op != "call_function" or isinstance(
        target, torch._ops.OpOverload | torch._ops.OpOverloadPacket
    )
    is_kernel = isinstance(target, torch._ops.HigherOrderOperator)  # Of Triton, for one.
    if is_told or (module_of(target) in MODULES_OF_TORCH and not is_kernel):
        return written_by(node)
    return node.all_input_nodes


def _changes_nothing(node: fx.Node) -> bool:
    is_of_torch = node.op == "call_method" or (
        node.op == "call_function"
        and (node.target is operator.getitem or getattr(node.target, "__module__", "") == "torch")
    )
    if not is_of_torch or not _MAY_CHANGE_NOTHING.fullmatch(name_of(node)) or not node.args:
        return False
    source = node.args[0]
    told = _told(source.meta.get("example_value")) if isinstance(source, fx.Node) else None
    return told is not None and told == _told(node.meta.get("example_value"))


def _told(value: Any) -> tuple[Any, ...] | None:
    """Equal for tensors that are one in all but their Python object. No guard is made of sizes."""
    if not isinstance(value, torch.Tensor) or is_of_transform(value):
        return None
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    bits = (value.is_conj(), value.is_neg(), value.requires_grad)
    memory = value.untyped_storage()._cdata
    told = [one.node.expr if isinstance(one, torch.SymInt) else one for one in numbers]
    return (memory, value.dtype, value.device, value.dim(), *bits, *told)

"""Passes over a traced graph, before it is cut."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from graphrt.compile.splitter import SplittingOps

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
    if any(_CHANGES_AN_OBJECT.fullmatch(_name(node)) for node in graph.graph.nodes):
        return 0
    num_removed = 0
    for node in list(graph.graph.nodes):
        is_returned = any(user.op == "output" for user in node.users)
        if is_returned or not _changes_nothing(node) or ops.find(node) is not None:
            continue
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
        num_removed += 1
    if num_removed:
        graph.recompile()
    return num_removed


def _changes_nothing(node: fx.Node) -> bool:
    is_of_torch = node.op == "call_method" or (
        node.op == "call_function"
        and (node.target is operator.getitem or getattr(node.target, "__module__", "") == "torch")
    )
    if not is_of_torch or not _MAY_CHANGE_NOTHING.fullmatch(_name(node)) or not node.args:
        return False
    source = node.args[0]
    told = _told(source.meta.get("example_value")) if isinstance(source, fx.Node) else None
    return told is not None and told == _told(node.meta.get("example_value"))


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _told(value: Any) -> tuple[Any, ...] | None:
    """Equal for tensors that are one in all but their Python object. No guard is made of sizes."""
    if not isinstance(value, torch.Tensor):
        return None
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    bits = (value.is_conj(), value.is_neg(), value.requires_grad)
    memory = value.untyped_storage()._cdata
    told = [one.node.expr if isinstance(one, torch.SymInt) else one for one in numbers]
    return (memory, value.dtype, value.device, value.dim(), *bits, *told)

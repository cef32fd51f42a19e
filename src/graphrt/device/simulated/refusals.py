"""What a graph cannot hold, and where in the user's code it was met.

Two tables: operations that reach the dispatcher, and calls that never do because Python answers
them. Anything else is judged by the tags that torch puts on its operators.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch

from graphrt.errors import ForbiddenOperationError

_TORCH = str(Path(torch.__file__).parent) + os.sep
_GRAPHRT = str(Path(__file__).parents[2]) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def _is_user_code(file: str) -> bool:
    if file.startswith((_TORCH, _GRAPHRT, "<frozen")):
        return False
    # Installed packages may lie inside the folder of the standard library.
    return not file.startswith(_STANDARD) or "site-packages" in file


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.file else "unknown place"

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def user_place() -> Place:
    """The innermost frame of the thread that is not torch's, ours or the standard library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_user_code(code.co_filename):
            return Place(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return Place("", 0, "")


class Why(NamedTuple):
    """Why an operation is refused, what it is called, and what to do instead."""

    operation: str
    why: str
    do: str


def _reads_host(operation: str) -> Why:
    return Why(
        operation,
        "it waits for the device and hands a value to Python",
        "keep the value on the device (torch.where, index_select), or pass it as part of the key.",
    )


def _sized_by_data(operation: str) -> Why:
    return Why(
        operation,
        "the size of its result depends on data",
        "use a fixed size: torch.where, masked_fill, topk, or a mask carried along.",
    )


def _rebinds(operation: str) -> Why:
    return Why(
        operation,
        "it gives a tensor other memory, and a replay keeps using the memory it recorded",
        "write into the tensor with copy_(), or rebind outside the capture.",
    )


def _copies_object(operation: str) -> Why:
    return Why(
        operation,
        "it copies a tensor's bytes on the host",
        "copy with clone() inside the capture, or copy the object outside it.",
    )


def _by_operator() -> Mapping[str, Why]:
    host = {
        "aten::item": "aten::_local_scalar_dense (.item())",
        "aten::_local_scalar_dense": "aten::_local_scalar_dense (.item())",
        "aten::is_nonzero": "aten::is_nonzero (bool(tensor))",
        "aten::equal": "aten::equal (torch.equal)",
        "aten::allclose": "aten::allclose",
    }
    sized = {
        "aten::nonzero": "aten::nonzero",
        "aten::nonzero_numpy": "aten::nonzero (as_tuple=True)",
        "aten::argwhere": "aten::argwhere",
        "aten::masked_select": "aten::masked_select",
        "aten::unique_dim": "aten::unique_dim (torch.unique)",
        "aten::unique_consecutive": "aten::unique_consecutive",
        "aten::unique_dim_consecutive": "aten::unique_dim_consecutive",
        "aten::_unique": "aten::_unique (torch.unique)",
        "aten::_unique2": "aten::_unique2 (torch.unique)",
        "aten::bincount": "aten::bincount",
    }
    rebinds = (
        "aten::resize_",
        "aten::resize_as_",
        "aten::set_",
        "aten::set_data",
        "aten::resize",
        "aten::set",
    )
    table = {name: _reads_host(shown) for name, shown in host.items()}
    table |= {name: _sized_by_data(shown) for name, shown in sized.items()}
    table |= {name: _rebinds(name) for name in rebinds}
    return MappingProxyType(table)


def _by_function() -> Mapping[Callable[..., Any], Why]:
    tensor: Any = torch.Tensor
    table = {
        tensor.item: _reads_host("aten::_local_scalar_dense (.item())"),
        tensor.__bool__: _reads_host("aten::_local_scalar_dense (bool(tensor))"),
        tensor.__int__: _reads_host("aten::_local_scalar_dense (int(tensor))"),
        tensor.__float__: _reads_host("aten::_local_scalar_dense (float(tensor))"),
        tensor.__complex__: _reads_host("aten::_local_scalar_dense (complex(tensor))"),
        tensor.__index__: _reads_host("aten::_local_scalar_dense (a tensor as an index)"),
        tensor.__contains__: _reads_host("aten::_local_scalar_dense (value in tensor)"),
        tensor.tolist: _reads_host("Tensor.tolist"),
        tensor.numpy: _reads_host("Tensor.numpy"),
        tensor.__array__: _reads_host("Tensor.__array__ (numpy conversion)"),
        tensor.__repr__: _reads_host("Tensor.__repr__ (printing)"),
        tensor.__format__: _reads_host("Tensor.__format__ (formatting)"),
        tensor.__deepcopy__: _copies_object("Tensor.__deepcopy__ (copy.deepcopy)"),
        tensor.__reduce_ex__: _copies_object("Tensor.__reduce_ex__ (pickling, copy.copy)"),
        tensor.data.__set__: _rebinds("Tensor.data.__set__ (assignment to .data)"),
    }
    return MappingProxyType(table)


BY_OPERATOR = _by_operator()
BY_FUNCTION = _by_function()
CPU = _reads_host("Tensor.cpu")
PICKLING = _copies_object("Tensor.__reduce_ex__ (pickling, copy.copy)")
TENSOR_SPLIT = _reads_host("torch.tensor_split (sections in a tensor)")
BOOLEAN_INDEX = _sized_by_data("aten::index (boolean mask)")
BOOLEAN_INDEX_PUT = Why(
    "aten::index_put_ (boolean mask)",
    "the number of elements that are written depends on data",
    "use masked_fill_ or torch.where.",
)
BAKED_TENSOR = Why(
    "torch.tensor",
    "its host values are read once, now, and every replay uses the same ones",
    "make the tensor before the capture, or fill it on the device (torch.full, torch.arange).",
)

# Tags that say so, apart from operators whose tag holds for some of their arguments only.
_TAGS: Mapping[str, Callable[[str], Why]] = MappingProxyType(
    {
        "data_dependent_output": _reads_host,
        "dynamic_output_shape": _sized_by_data,
        "cudagraph_unsafe": lambda name: Why(
            name, "it is declared unsafe in CUDA graphs", "take it out of the captured part."
        ),
    }
)
_JUDGED_BY_ARGUMENTS = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
    | {"aten::_unsafe_index", "aten::_unsafe_index_put", "aten::repeat_interleave"}
)


def refusal_of(func: torch._ops.OpOverload) -> Why | None:
    """Why ``func`` is refused whatever its arguments are, or None."""
    name = func._schema.name
    if name in BY_OPERATOR:
        return BY_OPERATOR[name]
    if name in _JUDGED_BY_ARGUMENTS:
        return None
    # Read by name: the set of tags grows from one torch to the next.
    present = {tag.name for tag in func.tags}
    for tag, why in _TAGS.items():
        if tag in present:
            return why(name)
    return None


def is_judged_by_arguments(func: torch._ops.OpOverload) -> bool:
    return func._schema.name in _JUDGED_BY_ARGUMENTS


def refusal_of_call(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Why | None:
    """Why this call is refused, for operators that are refused for some arguments only."""
    name = func._schema.name
    if name == "aten::repeat_interleave":
        if func._overloadname == "self_int" or kwargs.get("output_size") is not None:
            return None
        return _sized_by_data("aten::repeat_interleave (repeats in a tensor)")
    masks = any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in args[1]
    )
    if not masks:
        return None
    return BOOLEAN_INDEX_PUT if "put" in name else BOOLEAN_INDEX


def refuse(reason: Why, place: Place | None = None) -> ForbiddenOperationError:
    """The error for ``reason``, at the user's line."""
    place = place or user_place()
    return ForbiddenOperationError(
        f"operation {reason.operation} is not permitted while capturing: {reason.why}, "
        f"at {place}: {place.text}",
        expected="work that the device can repeat without Python",
        found=f"{reason.operation} at {place}: {place.text}",
        do=reason.do,
        operation=reason.operation,
        source=f"{place}: {place.text}",
    )

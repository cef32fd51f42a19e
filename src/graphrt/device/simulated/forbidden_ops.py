"""What a graph cannot hold.

Two tables: operations that reach the dispatcher, and calls that never do because Python answers
them. Any other operator is judged by the tags that torch puts on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch

from graphrt.errors import ForbiddenOperationError
from graphrt.source import caller_source

Operator = torch._ops.OpOverload


class ForbiddenOp(NamedTuple):
    """An operation that cannot be captured: how the user calls it, why not, what to do instead."""

    name: str
    reason: str
    fix: str

    def error(self) -> ForbiddenOperationError:
        """At the user's line."""
        source = caller_source()
        return ForbiddenOperationError(
            f"operation {self.name} is not permitted while capturing: {self.reason}, "
            f"at {source.with_text}",
            expected="work that the device can repeat without Python",
            found=f"{self.name} at {source.with_text}",
            do=self.fix,
            operation=self.name,
            source=source.with_text,
        )


def _reads_host(name: str) -> ForbiddenOp:
    return ForbiddenOp(
        name,
        "it waits for the device and hands a value to Python",
        "keep the value on the device (torch.where, index_select), or pass it as part of the key.",
    )


def _sized_by_data(name: str) -> ForbiddenOp:
    return ForbiddenOp(
        name,
        "the size of its result depends on data",
        "use a fixed size: torch.where, masked_fill, topk, or a mask carried along.",
    )


def _rebinds(name: str) -> ForbiddenOp:
    return ForbiddenOp(
        name,
        "it gives a tensor other memory, and a replay keeps using the memory it recorded",
        "write into the tensor with copy_(), or rebind outside the capture.",
    )


def _copies_object(name: str) -> ForbiddenOp:
    return ForbiddenOp(
        name,
        "it copies a tensor's bytes on the host",
        "copy with clone() inside the capture, or copy the object outside it.",
    )


CONSTANT_TENSOR = ForbiddenOp(
    "torch.tensor",
    "its host values are read once, now, and every replay uses the same ones",
    "make the tensor before the capture, or fill it on the device (torch.full, torch.arange).",
)
_PICKLING = _copies_object("Tensor.__reduce_ex__ (pickling, copy.copy)")

_OPERATORS: Mapping[str, ForbiddenOp] = MappingProxyType(
    {
        "aten::item": _reads_host("aten::_local_scalar_dense (.item())"),
        "aten::_local_scalar_dense": _reads_host("aten::_local_scalar_dense (.item())"),
        "aten::is_nonzero": _reads_host("aten::is_nonzero (bool(tensor))"),
        "aten::equal": _reads_host("aten::equal (torch.equal)"),
        "aten::allclose": _reads_host("aten::allclose"),
        "aten::nonzero": _sized_by_data("aten::nonzero"),
        "aten::nonzero_numpy": _sized_by_data("aten::nonzero (as_tuple=True)"),
        "aten::argwhere": _sized_by_data("aten::argwhere"),
        "aten::masked_select": _sized_by_data("aten::masked_select"),
        "aten::unique_dim": _sized_by_data("aten::unique_dim (torch.unique)"),
        "aten::unique_consecutive": _sized_by_data("aten::unique_consecutive"),
        "aten::unique_dim_consecutive": _sized_by_data("aten::unique_dim_consecutive"),
        "aten::_unique": _sized_by_data("aten::_unique (torch.unique)"),
        "aten::_unique2": _sized_by_data("aten::_unique2 (torch.unique)"),
        "aten::bincount": _sized_by_data("aten::bincount"),
        "aten::resize_": _rebinds("aten::resize_"),
        "aten::resize_as_": _rebinds("aten::resize_as_"),
        "aten::set_": _rebinds("aten::set_"),
        "aten::set_data": _rebinds("aten::set_data"),
        "aten::resize": _rebinds("aten::resize"),
        "aten::set": _rebinds("aten::set"),
    }
)
_TAGS: Mapping[str, Callable[[str], ForbiddenOp]] = MappingProxyType(
    {
        "data_dependent_output": _reads_host,
        "dynamic_output_shape": _sized_by_data,
        "cudagraph_unsafe": lambda name: ForbiddenOp(
            name, "it is declared unsafe in CUDA graphs", "take it out of the captured part."
        ),
    }
)
# Their tags hold for some of their arguments only.
_DEPENDS_ON_ARGUMENTS = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
    | {"aten::_unsafe_index", "aten::_unsafe_index_put", "aten::repeat_interleave"}
)


def depends_on_arguments(func: Operator) -> bool:
    return func._schema.name in _DEPENDS_ON_ARGUMENTS


def check_operator(func: Operator) -> ForbiddenOp | None:
    """Whether ``func`` is forbidden, by its name or its tags."""
    name = func._schema.name
    if name in _OPERATORS:
        return _OPERATORS[name]
    # Read by name: the set of tags grows from one torch to the next.
    present = {tag.name for tag in func.tags}
    return next((forbidden(name) for tag, forbidden in _TAGS.items() if tag in present), None)


def check_arguments(
    func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ForbiddenOp | None:
    """Whether this call is forbidden, for operators that depend on their arguments."""
    name = func._schema.name
    if name == "aten::repeat_interleave":
        if func._overloadname == "self_int" or kwargs.get("output_size") is not None:
            return None
        return _sized_by_data("aten::repeat_interleave (repeats in a tensor)")
    if not any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in args[1]
    ):
        return None
    if "put" not in name:
        return _sized_by_data("aten::index (boolean mask)")
    return ForbiddenOp(
        "aten::index_put_ (boolean mask)",
        "the number of elements that are written depends on data",
        "use masked_fill_ or torch.where.",
    )


_Owns = Callable[[torch.Tensor], bool]


def check_function(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owns: _Owns
) -> ForbiddenOp | None:
    """Whether a call that Python may answer is forbidden. ``owns``: a tensor of the device's."""
    found = _FUNCTIONS.get(func)
    return found if found is None or isinstance(found, ForbiddenOp) else found(args, kwargs, owns)


def _check_cpu(args: tuple[Any, ...], kwargs: dict[str, Any], owns: _Owns) -> ForbiddenOp | None:
    # A pool tensor is certainly on the device. Of other tensors the simulation cannot know.
    with torch._C.DisableTorchFunction():
        return _reads_host("Tensor.cpu") if owns(args[0]) else None


# A plain tensor pickles itself without asking anybody; the first thing to be seen is that this
# function takes its storage. Where it has another name, only subclasses and parameters are seen.
_REDUCES = getattr(getattr(torch.Tensor, "_reduce_ex_internal", None), "__code__", None)


def _check_storage(
    args: tuple[Any, ...], kwargs: dict[str, Any], owns: _Owns
) -> ForbiddenOp | None:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is not None and frame.f_code is _REDUCES:
            return _PICKLING
        frame = frame.f_back if frame is not None else None
    return None


def _check_split(args: tuple[Any, ...], kwargs: dict[str, Any], owns: _Owns) -> ForbiddenOp | None:
    sections = [*args[1:2], *[kwargs[k] for k in kwargs if k != "dim"]]
    if any(isinstance(one, torch.Tensor) for one in sections):
        return _reads_host("torch.tensor_split (sections in a tensor)")
    return None


def _check_constant(
    args: tuple[Any, ...], kwargs: dict[str, Any], owns: _Owns
) -> ForbiddenOp | None:
    data = args[0] if args else kwargs.get("data")
    return None if isinstance(data, torch.Tensor) else CONSTANT_TENSOR


def _functions() -> Mapping[Any, Any]:
    tensor: Any = torch.Tensor
    return MappingProxyType(
        {
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
            tensor.__reduce_ex__: _PICKLING,
            tensor.data.__set__: _rebinds("Tensor.data.__set__ (assignment to .data)"),
            tensor.cpu: _check_cpu,
            tensor.untyped_storage: _check_storage,
            torch.tensor_split: _check_split,
            tensor.tensor_split: _check_split,
            torch.tensor: _check_constant,
            torch.as_tensor: _check_constant,
        }
    )


_FUNCTIONS = _functions()

"""What a graph cannot hold.

Two tables: operations that reach the dispatcher, and calls that never do because Python answers
them. Any other operator is judged by the tags that torch puts on it.

Device and host memory are both the CPU's here. Memory counts as the host's if it was made of host
values in the recording; a device counts as the host if the user's function spells it "cpu".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from graphrt.errors import ForbiddenOperationError, UnsupportedOperationError
from graphrt.source import caller_source, is_user_file

Operator = torch._ops.OpOverload
Is = Callable[[torch.Tensor], bool]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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


def unsupported(
    operation: str, subject: str, *, expected: str, found: str, do: str
) -> UnsupportedOperationError:
    """What the simulated device, other than CUDA, cannot record: at the user's line."""
    source = caller_source().with_text
    found = f"{found}, at {source}"
    return UnsupportedOperationError(
        subject, expected=expected, found=found, do=do, operation=operation, source=source
    )


def cannot_hold(operation: str, tensor: torch.Tensor) -> UnsupportedOperationError:
    return unsupported(
        operation,
        f"{operation} takes a tensor that the simulated device cannot hold",
        expected="strided CPU tensors",
        found=f"layout {tensor.layout} on {tensor.device}",
        do="convert it before the capture.",
    )


def _because(reason: str, fix: str) -> Callable[[str], ForbiddenOp]:
    """Makes the operation of a name that is forbidden for this reason."""
    return lambda name: ForbiddenOp(name, reason, fix)


_MADE_BEFORE = (
    "make the tensor before the capture, or fill it on the device (torch.full, torch.arange)."
)
reads_host = _because(
    "it waits for the device and hands a value to Python",
    "keep the value on the device (torch.where, index_select), or pass it as part of the key.",
)
_sized_by_data = _because(
    "the size of its result depends on data",
    "use a fixed size: torch.where, masked_fill, topk, or a mask carried along.",
)
_rebinds = _because(
    "it gives a tensor other memory, and a replay keeps using the memory it recorded",
    "write into the tensor with copy_(), or rebind outside the capture.",
)
_copies_object = _because(
    "it copies a tensor's bytes on the host",
    "copy with clone() inside the capture, or copy the object outside it.",
)
_checks_host = _because(
    "it waits for the device to check its result, or its arguments, on the host",
    "use a variant that does not check (torch.linalg.inv_ex, cholesky_ex, solve_ex), "
    "or compute it outside the capture.",
)
_is_cpu_only = _because("it has no CUDA kernel", "use torch.histc with a range, or scatter_add_.")
_runs_python = _because(
    "it calls a Python function for each element, on the host only",
    "write it in operators on the whole tensor.",
)
constant_tensor = _because(
    "its host values are read once, now, and every replay uses the same ones", _MADE_BEFORE
)
uploads = _because("it copies host memory to the device and waits for it", _MADE_BEFORE)
branches = _because(
    "Python decides which function runs by a value on the device",
    "compute both and choose with torch.where, or decide outside the capture.",
)


# On CUDA these take a number in a tensor of the host as a number, without a copy. Others copy it to
# the device (torch.where) or refuse it (torch.clamp between tensors, torch.cat).
_TAKE_NUMBERS = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "pow"),
        *("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "fmax", "fmin"),
        *("bitwise_and", "bitwise_or", "bitwise_xor"),
        *("logical_and", "logical_or", "logical_xor"),
    )
)
_TAKE_NUMBER_AS: Mapping[str, str] = {
    "aten::addcmul": "tensor2",
    "aten::lerp": "weight",
    **dict.fromkeys(("aten::fill", "aten::index_fill", "aten::masked_fill"), "value"),
    **dict.fromkeys(
        ("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put"), "values"
    ),
}


def _named(func: Operator, args: Args, kwargs: Kwargs) -> Kwargs:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def takes_numbers(
    func: Operator, args: Args, kwargs: Kwargs, on_host: Sequence[torch.Tensor]
) -> bool:
    """Whether ``func`` takes each of its arguments ``on_host`` as a number."""
    if any(one.dim() for one in on_host):
        return False
    name = func._schema.name.removesuffix("_")
    if func.namespace != "aten" or name in _TAKE_NUMBERS:
        return True
    named = _named(func, args, kwargs)
    return all(one is named.get(_TAKE_NUMBER_AS.get(name, "")) for one in on_host)


def mixes_host(name: str) -> ForbiddenOp:
    """An operator that takes host memory together with tensors of the device."""
    if name.startswith("aten::copy_"):
        return ForbiddenOp(
            "aten::copy_ (from host memory)",
            "it copies host memory to the device and waits for it",
            "assign a number to a slice (x[i : i + 1] = 2.0) or with fill_(); make other tensors "
            "before the capture.",
        )
    return ForbiddenOp(
        f"{name} (with a tensor, list or array of host values)",
        "host memory would have to be copied to the device",
        _MADE_BEFORE,
    )


def one_hot(indices: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As CUDA computes it: with a number of classes it reads nothing on the host."""
    if num_classes <= 0:
        raise _sized_by_data("torch.nn.functional.one_hot (without num_classes)").error()
    zeros = torch.zeros((*indices.shape, num_classes), dtype=torch.int64, device=indices.device)
    return zeros.scatter_(-1, indices.unsqueeze(-1), 1)


RESEEDS = ForbiddenOp(
    "torch.manual_seed",
    "it changes the seed once, now, and no replay does",
    "seed before the capture, or between two replays.",
)
UNDECLARED = ForbiddenOp(
    "a random number of a generator that the recording does not know",
    "no replay would move that generator on",
    "declare the generator where the library is made (generators=...).",
)
_PICKLING = _copies_object("Tensor.__reduce_ex__ (pickling, copy.copy)")

_OPERATORS: Mapping[str, ForbiddenOp] = {
    "aten::item": reads_host("aten::_local_scalar_dense (.item())"),
    "aten::_local_scalar_dense": reads_host("aten::_local_scalar_dense (.item())"),
    "aten::is_nonzero": reads_host("aten::is_nonzero (bool(tensor))"),
    "aten::equal": reads_host("aten::equal (torch.equal)"),
    "aten::allclose": reads_host("aten::allclose"),
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
    "aten::cholesky": _checks_host("aten::cholesky"),
    "aten::_linalg_eigh": _checks_host("aten::_linalg_eigh (torch.linalg.eigh)"),
    "aten::_linalg_svd": _checks_host("aten::_linalg_svd (torch.linalg.svd)"),
    "aten::linalg_eig": _checks_host("aten::linalg_eig (torch.linalg.eig)"),
    "aten::linalg_eigvals": _checks_host("aten::linalg_eigvals"),
    "aten::_linalg_eigvals": _checks_host("aten::_linalg_eigvals (torch.linalg.eigvals)"),
    "aten::linalg_lstsq": _checks_host("aten::linalg_lstsq (torch.linalg.lstsq)"),
    "aten::linalg_matrix_exp": _checks_host("aten::linalg_matrix_exp (torch.matrix_exp)"),
    "aten::linalg_pinv": _checks_host("aten::linalg_pinv (torch.linalg.pinv)"),
    "aten::histogram": _is_cpu_only("aten::histogram"),
    "aten::_histogramdd_bin_edges": _is_cpu_only("aten::_histogramdd_bin_edges"),
    "aten::_histogramdd_from_bin_cts": _is_cpu_only("aten::_histogramdd_from_bin_cts"),
    "aten::_histogramdd_from_bin_tensors": _is_cpu_only("aten::_histogramdd_from_bin_tensors"),
    "aten::set_data": _rebinds("aten::set_data"),
    "aten::resize": _rebinds("aten::resize"),
    "aten::set": _rebinds("aten::set"),
}
_TAGS: Mapping[str, Callable[[str], ForbiddenOp]] = {
    "data_dependent_output": reads_host,
    "dynamic_output_shape": _sized_by_data,
    "cudagraph_unsafe": _because(
        "it is declared unsafe in CUDA graphs", "take it out of the captured part."
    ),
}


def depends_on_arguments(func: Operator) -> bool:
    return func._schema.name in _BY_ARGUMENTS or any(
        argument.name == "check_errors" for argument in func._schema.arguments
    )


def check_operator(func: Operator) -> ForbiddenOp | None:
    """Whether ``func`` is forbidden, by its name or its tags."""
    name = func._schema.name
    if name in _OPERATORS:
        return _OPERATORS[name]
    # Read by name: the set of tags grows from one torch to the next.
    present = {tag.name for tag in func.tags}
    return next((forbidden(name) for tag, forbidden in _TAGS.items() if tag in present), None)


def check_arguments(func: Operator, args: Args, kwargs: Kwargs, is_host: Is) -> ForbiddenOp | None:
    """Whether this call is forbidden, for operators that depend on their arguments."""
    named = _named(func, args, kwargs)
    if named.get("check_errors"):
        return _checks_host(f"{func._schema.name} (check_errors=True)")
    check = _BY_ARGUMENTS.get(func._schema.name)
    return check(func, named, is_host) if check is not None else None


def _check_repeats(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    if func._overloadname == "self_int" or named.get("output_size") is not None:
        return None
    return _sized_by_data("aten::repeat_interleave (repeats in a tensor)")


def _check_indices(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    """A mask selects as many elements as data say; a number is written under it with no count."""
    indices = [one for one in named["indices"] if isinstance(one, torch.Tensor)]
    is_mask = any(one.dtype in (torch.bool, torch.uint8) for one in indices)
    if "values" not in named:
        return _sized_by_data("aten::index (boolean mask)") if is_mask else None
    value = named["values"]
    if not is_mask:
        # CUDA takes a number as a tensor of the host, and copies it to the device.
        return uploads("aten::index_put_ (of a number)") if is_host(value) else None
    is_filled = len(indices) == 1 and value.numel() == 1 and not named.get("accumulate", False)
    if is_filled and is_host(value):
        return None
    return ForbiddenOp(
        "aten::index_put_ (boolean mask)",
        "the number of elements that are written depends on data",
        "use masked_fill_ or torch.where.",
    )


def _check_info(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    return _checks_host(f"aten::_linalg_check_errors (in {named['api_name']})")


def _check_ends(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    ends = [named[k] for k in ("start", "end") if isinstance(named[k], torch.Tensor)]
    if all(is_host(one) for one in ends):
        return None
    return reads_host(f"{func._schema.name} (ends in tensors)")


def _check_range(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    if named.get("min", 0) != named.get("max", 0):
        return None
    return reads_host("aten::histc (without a range)")


def _check_fill(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    value = named["value"]
    if not isinstance(value, torch.Tensor) or is_host(value):
        return None
    return reads_host(f"{func._schema.name} (by a value on the device)")


def _check_deviation(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    if not isinstance(named.get("std"), torch.Tensor):
        return None
    return ForbiddenOp(
        "aten::normal (std in a tensor)",
        "it waits for the device to check the deviations on the host",
        "use mean + std * torch.randn_like(std).",
    )


def _check_isin(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    known, wanted = named.get("elements"), named.get("test_elements")
    if not isinstance(known, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return None
    # CUDA compares each with each up to this size, and calls torch.unique beyond.
    is_small = wanted.numel() < 10.0 * known.numel() ** 0.145
    return None if is_small or named.get("assume_unique") else _sized_by_data("aten::isin")


def _check_resize(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    tensor = named["self"]
    like = named.get("the_template")
    size = like.shape if like is not None else named["size"]
    needed = (torch.Size(size).numel() + tensor.storage_offset()) * tensor.dtype.itemsize
    return None if needed <= tensor.untyped_storage().nbytes() else _rebinds(func._schema.name)


def _check_sorter(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    if named.get("sorter") is None:
        return None
    return _checks_host(f"{func._schema.name} (with a sorter)")


def _refuse_always(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    return _checks_host(func._schema.name)


def _check_square(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    if named["A"].shape[-1] == named["A"].shape[-2]:
        return None
    return _checks_host(f"{func._schema.name} (of a matrix that is not square)")


def _check_single(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    if named["self"].dim() == 2:
        return None
    return _checks_host(f"{func._schema.name} (of several matrices)")


def _check_mode(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    tensor = named["self"]
    # Longer ones are sorted by Thrust, one after the other.
    if tensor.dim() == 0 or tensor.shape[named.get("dim", -1)] <= 2048:
        return None
    return _checks_host("aten::mode (along more than 2048 elements)")


def _check_lengths(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    if named.get("lengths") is None or named.get("unsafe"):
        return None
    return _checks_host(f"{func._schema.name} (lengths that are checked: pass unsafe=True)")


def _check_set(func: Operator, named: Kwargs, is_host: Is) -> ForbiddenOp | None:
    source = named.get("source")
    if isinstance(source, torch.Tensor):
        source = source.untyped_storage()
    if source is not None and source.data_ptr() == named["self"].untyped_storage().data_ptr():
        return None
    return _rebinds("aten::set_")


_BY_ARGUMENTS: Mapping[str, Callable[[Operator, Kwargs, Is], ForbiddenOp | None]] = {
    f"aten::{name}": check
    for check, names in (
        (_check_indices, ("index", "index_put", "index_put_", "_index_put_impl_")),
        (_check_indices, ("_unsafe_index", "_unsafe_index_put")),
        (_check_repeats, ("repeat_interleave",)),
        (_check_info, ("_linalg_check_errors",)),
        (_check_ends, ("linspace", "logspace")),
        (_check_range, ("histc",)),
        (_check_fill, ("masked_fill", "masked_fill_", "index_fill", "index_fill_")),
        (_check_deviation, ("normal",)),
        (_check_isin, ("isin",)),
        (_check_resize, ("resize_", "resize_as_")),
        (_check_set, ("set_",)),
        (_check_sorter, ("searchsorted",)),
        (_check_lengths, ("segment_reduce",)),
        (_refuse_always, ("linalg_ldl_factor_ex", "linalg_ldl_solve")),
        (_check_square, ("linalg_lu_factor_ex", "linalg_lu")),
        (_check_single, ("cholesky_inverse", "cholesky_solve")),
        (_check_mode, ("mode",)),
    )
    for name in names
}


def check_function(func: Any, args: Args, kwargs: Kwargs, is_host: Is) -> ForbiddenOp | None:
    """Whether a call that Python may answer is forbidden."""
    found = _FUNCTIONS.get(func)
    if found is None:
        return None
    with torch._C.DisableTorchFunction():
        if not isinstance(found, ForbiddenOp):
            checked: ForbiddenOp | None = found(args, kwargs, is_host)
            return checked
        is_on_host = bool(args) and isinstance(args[0], torch.Tensor) and is_host(args[0])
        return None if is_on_host else found


def _spells_cpu(device: Any) -> bool:
    """Whether the user's function itself holds the text, not a variable of the device's name."""
    if device != "cpu" or not isinstance(device, str):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and "cpu" in frame.f_code.co_consts


def _check_to(args: Args, kwargs: Kwargs, is_host: Is) -> ForbiddenOp | None:
    target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
    if isinstance(target, torch.Tensor):
        to_host = is_host(target)
    elif isinstance(target, (str, int, torch.device)):
        to_host = _spells_cpu(target)
    else:
        return None
    from_host = is_host(args[0])
    if from_host == to_host:
        return None
    return uploads("Tensor.to (of host memory)") if from_host else reads_host("Tensor.to('cpu')")


# Kept, because recordings replace the function.
_FROM_DLPACK = from_dlpack.__code__


def _check_dlpack(args: Args, kwargs: Kwargs, is_host: Is) -> ForbiddenOp | None:
    # torch.from_dlpack makes one more tensor over the same device memory; others read on the host.
    if is_host(args[0]) or _is_called_by(_FROM_DLPACK):
        return None
    return reads_host("Tensor.__dlpack__ (read on the host)")


def _is_called_by(code: Any) -> bool:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


# A plain tensor pickles itself without asking anybody; the first thing to be seen is that this
# function takes its storage. Where it has another name, only subclasses and parameters are seen.
_REDUCES = getattr(getattr(torch.Tensor, "_reduce_ex_internal", None), "__code__", None)


def _check_storage(args: Args, kwargs: Kwargs, is_host: Is) -> ForbiddenOp | None:
    return _PICKLING if _is_called_by(_REDUCES) and not is_host(args[0]) else None


def _check_split(args: Args, kwargs: Kwargs, is_host: Is) -> ForbiddenOp | None:
    sections = [*args[1:2], *[kwargs[k] for k in kwargs if k != "dim"]]
    if any(isinstance(one, torch.Tensor) and not is_host(one) for one in sections):
        return reads_host("torch.tensor_split (sections in a tensor)")
    return None


def _holds_tensor(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(_holds_tensor(one) for one in data)
    return isinstance(data, torch.Tensor)


def _check_values(
    name: str, data: Any, device: Any, is_host: Is, to_device: bool = False
) -> ForbiddenOp | None:
    """A tensor made of ``data``, on the host unless a device is named."""
    to_device |= device is not None and not _spells_cpu(device)
    if isinstance(data, torch.Tensor):
        return uploads(name) if to_device and is_host(data) else None
    if _holds_tensor(data):
        return reads_host(f"{name} (of a list of tensors)")
    is_empty = isinstance(data, (list, tuple)) and not data  # There is nothing to copy.
    return uploads(f"{name} (on the device)") if to_device and not is_empty else None


def _check_new(name: str, args: Args, kwargs: Kwargs, is_host: Is) -> ForbiddenOp | None:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    return _check_values(name, data, kwargs.get("device"), is_host)


def _check_new_tensor(args: Args, kwargs: Kwargs, is_host: Is) -> ForbiddenOp | None:
    data = args[1] if len(args) > 1 else kwargs.get("data")
    is_on_device = kwargs.get("device") is None and not is_host(args[0])
    name = "Tensor.new_tensor"
    return _check_values(name, data, kwargs.get("device"), is_host, is_on_device)


_TENSOR: Any = torch.Tensor
_RUN_PYTHON = ("apply_", "map_", "map2_")
_FUNCTIONS: Mapping[Any, Any] = {
    _TENSOR.item: reads_host("aten::_local_scalar_dense (.item())"),
    _TENSOR.__bool__: reads_host("aten::_local_scalar_dense (bool(tensor))"),
    _TENSOR.__int__: reads_host("aten::_local_scalar_dense (int(tensor))"),
    _TENSOR.__float__: reads_host("aten::_local_scalar_dense (float(tensor))"),
    _TENSOR.__complex__: reads_host("aten::_local_scalar_dense (complex(tensor))"),
    _TENSOR.__index__: reads_host("aten::_local_scalar_dense (a tensor as an index)"),
    _TENSOR.__contains__: reads_host("aten::_local_scalar_dense (value in tensor)"),
    _TENSOR.tolist: reads_host("Tensor.tolist"),
    _TENSOR.numpy: reads_host("Tensor.numpy"),
    _TENSOR.__array__: reads_host("Tensor.__array__ (numpy conversion)"),
    _TENSOR.__repr__: reads_host("Tensor.__repr__ (printing)"),
    _TENSOR.__format__: reads_host("Tensor.__format__ (formatting)"),
    _TENSOR.__deepcopy__: _copies_object("Tensor.__deepcopy__ (copy.deepcopy)"),
    _TENSOR.__reduce_ex__: _PICKLING,
    _TENSOR.data.__set__: _rebinds("Tensor.data.__set__ (assignment to .data)"),
    _TENSOR.cpu: reads_host("Tensor.cpu"),
    _TENSOR.to: _check_to,
    _TENSOR.__dlpack__: _check_dlpack,
    _TENSOR.new_tensor: _check_new_tensor,
    _TENSOR.untyped_storage: _check_storage,
    torch.tensor_split: _check_split,
    _TENSOR.tensor_split: _check_split,
    torch.tensor: partial(_check_new, "torch.tensor"),
    torch.as_tensor: partial(_check_new, "torch.as_tensor"),
    torch.asarray: partial(_check_new, "torch.asarray"),
    torch.random.manual_seed: RESEEDS,
    torch.random.seed: RESEEDS,
    **{getattr(_TENSOR, name): _runs_python(f"Tensor.{name}") for name in _RUN_PYTHON},
}

SEEN_IN_RECORDINGS: Sequence[tuple[Any, str]] = (
    (torch, "manual_seed"),
    (torch.random, "manual_seed"),
    (torch, "seed"),
    (torch.random, "seed"),
    (torch, "frombuffer"),
    (torch, "from_dlpack"),
    (torch.utils.dlpack, "from_dlpack"),
)
"""Functions that torch shows to no mode: module and name."""
MAKES_HOST_TENSOR = frozenset({torch.frombuffer, from_dlpack})
INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
"""They make tensors of Python's numbers and lists."""

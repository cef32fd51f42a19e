"""What an operator returns, found without computing it: fake tensors built over meta tensors.

Fake tensors answer as the CPU would, strides and device included, but cost about 120 us an
operator; the answer depends only on shapes and host values, so it is kept by signature.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from graphrt.device.simulated.refusals import Why, refuse, user_place
from graphrt.errors import UnsupportedOperationError

CPU = torch.device("cpu")


class OutMeta(NamedTuple):
    """A fresh result."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class AliasOf(NamedTuple):
    """A result in the storage of an argument; ``itself``: it is that argument."""

    argument: int
    itself: bool


def meta_of(tensor: torch.Tensor) -> OutMeta:
    return OutMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def signature(value: Any) -> Hashable:
    """A key under which shapes and kernels are the same. Raises TypeError if there is none."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride(), value.device)
    if isinstance(value, (list, tuple)):
        return tuple([signature(one) for one in value])
    # The type counts: 1, 1.0 and True are equal and choose different kernels.
    return (type(value), value)


def tensors_in(value: Any, found: list[torch.Tensor]) -> None:
    """Append the tensors in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            tensors_in(one, found)


class ShapeInference:
    """Runs operators on fake tensors. One per device."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def results(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of ``func`` with ``OutMeta`` or ``AliasOf`` in place of tensors.

        Errors: ``UnsupportedOperationError`` without a fake kernel, ``ForbiddenOperationError`` if
        the shape depends on data or an argument would be resized. What the operator itself says
        about wrong arguments passes unchanged.
        """
        fakes: dict[int, FakeTensor] = {}
        order: list[torch.Tensor] = []

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                known = fakes.get(id(value))
                if known is None:
                    meta = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device="meta"
                    )
                    known = fakes[id(value)] = FakeTensor(self._mode, meta, value.device)
                    order.append(value)
                return known
            if isinstance(value, (list, tuple)):
                return type(value)(map(fake, value)) if type(value) in (list, tuple) else value
            return value

        fake_args = [fake(one) for one in args]
        fake_kwargs = {name: fake(one) for name, one in kwargs.items()}
        try:
            with self._mode:
                result = func(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            why = "its result depends on data"
            raise refuse(Why(str(func), why, "use an operation of fixed size.")) from error
        except (
            UnsupportedOperatorException,
            UnsupportedFakeTensorException,
            NotImplementedError,
        ) as error:
            place = user_place()
            raise UnsupportedOperationError(
                f"{func} cannot be recorded without running it",
                expected="a fake kernel, which says the shape of the result",
                found=f"none for {func}, at {place}: {place.text}",
                do="register one with torch.library.register_fake, or use strategy='execute'.",
                operation=str(func),
                source=f"{place}: {place.text}",
            ) from error
        for tensor in order:
            after = fakes[id(tensor)]
            if after.shape != tensor.shape:
                why = f"it resizes an argument from {tuple(tensor.shape)} to {tuple(after.shape)}"
                raise refuse(Why(str(func), why, "pass a tensor of the right size."))
        storages = {
            fakes[id(tensor)].untyped_storage()._cdata: at for at, tensor in enumerate(order)
        }

        def describe(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                at = storages.get(value.untyped_storage()._cdata)
                if at is None:
                    return meta_of(value) if value.device.type == "cpu" else value.device
                return AliasOf(at, value is fakes[id(order[at])])
            if isinstance(value, (list, tuple)):
                return [describe(one) for one in value]
            return value

        return describe(result)

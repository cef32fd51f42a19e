"""What an operator returns, found without computing it: fake tensors built over meta tensors.

Fake tensors answer as the CPU would, strides and device included, but cost about 120 us an
operator; the answer depends only on shapes and host values, so it is kept by signature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
from graphrt.errors import ForbiddenOperationError, UnsupportedOperationError

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
    """Runs operators on fake tensors. One per window: a fake mode serves one thread at a time."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # It would remember by the same key as we do, only slower. Without effect where it has no
        # such name.
        self._mode.cache_enabled = False

    def results(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of ``func`` with ``OutMeta`` or ``AliasOf`` in place of tensors.

        A device in their place: nothing of this is on the simulated device (meta tensors).

        Errors: ``UnsupportedOperationError`` without a fake kernel, ``ForbiddenOperationError`` if
        the shape depends on data or an argument would be resized. What the operator itself says
        about wrong arguments passes unchanged.
        """
        tensors: list[torch.Tensor] = []
        tensors_in((args, tuple(kwargs.values())), tensors)
        if any(one.device.type != "cpu" for one in tensors):
            return tensors[0].device
        stand_ins = _StandIns(self._fake)
        try:
            with self._mode:
                return self._described(func, args, kwargs, stand_ins)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            why = "its result depends on data"
            raise refuse(Why(str(func), why, "use an operation of fixed size.")) from (
                error.with_traceback(None)  # Its frames lead to the tensors of this call.
            )
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
            ) from error.with_traceback(None)
        except ForbiddenOperationError:
            raise
        except Exception:  # noqa: BLE001  # what the kernel itself says is raised instead
            # Fake kernels are stricter than the CPU's at times. Run on zeros, which touches no
            # state, the kernel says in its own words whether it takes such arguments.
            return self._described(func, args, kwargs, _StandIns(_zeros))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self._mode, meta, tensor.device)

    @staticmethod
    def _described(
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stand_ins: _StandIns,
    ) -> Any:
        given = [stand_ins.of(one) for one in args]
        named = {name: stand_ins.of(one) for name, one in kwargs.items()}
        result = func(*given, **named)
        for shape, after in zip(stand_ins.shapes, stand_ins.tensors, strict=True):
            if after.shape != shape:
                why = f"it resizes an argument from {tuple(shape)} to {tuple(after.shape)}"
                raise refuse(Why(str(func), why, "pass a tensor of the right size."))
        return stand_ins.describe(result)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


class _StandIns:
    """What is passed in place of the tensors of one call, one for each tensor object."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.shapes: list[torch.Size] = []
        self._make = make
        self._by_id: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self._by_id.get(id(value))
            if known is None:
                known = self._by_id[id(value)] = self._make(value)
                self.tensors.append(known)
                self.shapes.append(value.shape)
            return known
        if type(value) in (list, tuple):
            return type(value)([self.of(one) for one in value])
        return value

    def describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()._cdata
            for at, argument in enumerate(self.tensors):
                if argument.untyped_storage()._cdata == storage:
                    return AliasOf(at, value is argument)
            return meta_of(value) if value.device.type == "cpu" else value.device
        if isinstance(value, (list, tuple)):
            return [self.describe(one) for one in value]
        return value

"""The parameters of a model, and their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

Device = torch.device | str


class CheckpointTensor(NamedTuple):
    """One tensor of a HF checkpoint and its place in the model."""

    name: str
    shape: tuple[int, ...]
    destination: Tensor
    """The part of a parameter that holds it, or its ``part``, or what broadcasts from it."""
    part: tuple[slice, ...] = ()
    """What of it this rank has; empty: all."""

    def shared(self, dim: int, rank: int, world: int) -> CheckpointTensor:
        """The tensor of which ``destination`` is the part of ``rank``: of ``world`` along ``dim``.

        The tensor itself for one rank, and if it has no such dimension.
        """
        if world == 1 or dim >= len(self.shape):
            return self
        size = self.shape[dim]
        shape = (*self.shape[:dim], world * size, *self.shape[dim + 1 :])
        part = (*[slice(None)] * dim, slice(rank * size, (rank + 1) * size))
        return self._replace(shape=shape, part=part)


class Projection(nn.Module):
    """Several linear maps of one input, stacked by rows: one matrix product instead of several.

    Only the parameters, undefined until weights are loaded; the kernels compute the product.
    """

    def __init__(
        self, in_features: int, *out_features: int, bias: bool, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__()
        self.out_features = out_features
        outputs = sum(out_features)
        self.weight = _matrix(in_features, outputs, dtype, device)
        self.bias = parameter((outputs,), dtype, device) if bias else None

    @property
    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """Weight [in, out] and bias [out], as the kernels take them."""
        # What is asked for before each kernel: a module finds its parameters last of all.
        weight = self._parameters.get("weight")
        return self.weight if weight is None else weight, self.bias

    def checkpoint_tensors(self, *names: str) -> Iterator[CheckpointTensor]:
        """The parts, in order of rows, as ``name.weight`` and ``name.bias``."""
        yield from _rows([f"{name}.weight" for name in names], self.out_features, self.weight.t())
        if self.bias is not None:
            yield from _rows([f"{name}.bias" for name in names], self.out_features, self.bias)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _matrix(
    in_features: int, out_features: int, dtype: torch.dtype, device: Device
) -> nn.Parameter:
    """[in, out], of which each column is contiguous: a checkpoint's [out, in] is its transpose."""
    stored = torch.empty((out_features, in_features), dtype=dtype, device=device)
    return nn.Parameter(stored.t(), requires_grad=False)


def whole(name: str, tensor: Tensor) -> CheckpointTensor:
    return CheckpointTensor(name, tuple(tensor.shape), tensor)


def _rows(names: list[str], counts: tuple[int, ...], tensor: Tensor) -> Iterator[CheckpointTensor]:
    for name, part in zip(names, tensor.split(counts), strict=True):
        yield whole(name, part)

"""Which inputs moved between two steps: what a replay would read from where it no longer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.graphs.leaves import format_path, walk


class Address(NamedTuple):
    """Where a tensor lies and how it is laid out. Keeps the tensor not alive."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}, stride {self.stride}, at {self.pointer:#x}"


class Move(NamedTuple):
    """One input that is not where, or not what, it was."""

    path: str
    before: Address | None
    """None if there was no tensor."""
    after: Address | None
    """None if there is no tensor."""

    def __str__(self) -> str:
        return f"{self.path}: {self.before or 'absent'} -> {self.after or 'absent'}"


def addresses_of(
    args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> dict[str, Address]:
    """Path -> address of every tensor in the arguments of a call, nested ones too.

    Paths read as Python: ``args[0]``, ``kwargs['meta'].table[2]``.
    """
    found = {}
    for root, values in (("args", tuple(args)), ("kwargs", dict(kwargs or {}))):
        for node in walk(values):
            if node.kind == "tensor":
                tensor = node.value
                found[format_path(node.path, root)] = Address(
                    tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
                )
    return found


def moved_inputs(before: Mapping[str, Address], after: Mapping[str, Address]) -> tuple[Move, ...]:
    """Compare the addresses of two calls. Empty: the second may replay what the first captured."""
    return tuple(
        Move(path, before.get(path), after.get(path))
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    )

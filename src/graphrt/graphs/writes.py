"""Notes which tensors some eager code writes, and the user's line that wrote each first.

A dispatch mode sees every operation with its arguments. It sees no kernel that is launched past
torch's dispatcher (a raw pointer in a custom kernel, Triton called directly).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from graphrt.device.torch_modes import LookingMode, is_for_parts
from graphrt.graphs.buffers import is_staging
from graphrt.graphs.values import storage_start, tensors_of
from graphrt.source import caller_source


class Write(NamedTuple):
    """A tensor that existed before, and was written."""

    tensor: torch.Tensor
    source: str
    """The user's line; empty where there is none."""
    is_staged: bool = False
    """True where a ``BufferSet`` filled one of its buffers."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


@contextmanager
def observed_writes() -> Iterator[list[Write]]:
    """Collect the first write to each storage that the body did not make itself, and the first by
    a ``BufferSet``."""
    observer = _WriteObserver()
    with observer:
        yield observer.writes


class _WriteObserver(LookingMode):
    """Notes what operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Write] = []
        # By address: one that was given stays, since its tensor outlives the body or is never
        # looked at again.
        self._given: set[int] = set()
        self._written: set[tuple[int, bool]] = set()
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if types and is_for_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        self._given |= {storage_start(tensor) for tensor in given} - self._made
        schema = getattr(func, "_schema", None)
        for position, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                is_sent = position < len(args)
                value = args[position] if is_sent else kwargs.get(argument.name)
                self._note(tensors_of(value))
        result = func(*args, **kwargs)
        self._made |= {storage_start(tensor) for tensor in tensors_of(result)} - self._given
        return result

    def _note(self, tensors: Sequence[torch.Tensor]) -> None:
        is_staged = bool(tensors) and is_staging()
        for tensor in tensors:
            address = storage_start(tensor)
            if address and address not in self._made and (address, is_staged) not in self._written:
                self._written.add((address, is_staged))
                self.writes.append(Write(tensor, str(caller_source()), is_staged))

"""The tensors of one recording: what it allocates, and what its calls use in their place.

A call must not own the memory of a user's tensor, or no block would ever be free again. It gets an
alias: a tensor over the same bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphrt.device.simulated.forbidden_ops import cannot_hold
from graphrt.device.simulated.graph import Shared
from graphrt.device.simulated.memory import LiveBlock, PoolMemory, extent_bytes
from graphrt.device.simulated.ops import NewTensor, tensors_in
from graphrt.device.simulated.streams import SimulatedStream
from graphrt.device.torch_modes import with_bits_of
from graphrt.source import Source, caller_source


@dataclass(eq=False, slots=True)
class HeldInput:
    """Memory outside every pool that the recording uses, and so keeps."""

    tensor: torch.Tensor
    is_constant: bool = False
    """It was made of host values in the recording: no input of the caller's."""
    used_by_kernel: bool = False
    written: bool = False
    source: str = ""
    """The user's line that wrote it first."""


class _Alias(NamedTuple):
    """What calls use for a user's tensor: the same bytes, owning no pool memory."""

    tensor: torch.Tensor
    held: HeldInput | None


@dataclass(eq=False, repr=False)
class RecordedTensors:
    """Allocates results, and hands out one alias for each layout of the same bytes."""

    _pool: PoolMemory
    _shared: Shared

    def __post_init__(self) -> None:
        self._memory = self._shared.memory
        self._num_allocations = 0
        self._aliases: dict[Hashable, _Alias] = {}
        self.held: dict[int, HeldInput] = {}
        """By address of the storage, in order of first use; some are only viewed."""
        self._blocks: dict[LiveBlock, None] = {}
        """Allocated in this recording, in order."""
        self._host: set[int] = set()
        """Addresses of storages made of host values in this recording. They are held, so that
        nothing else gets their addresses."""
        self._earlier_ranges: set[tuple[int, int]] = set()
        """Pool bytes that were filled before this recording and that it uses."""

    def allocated(self, described: Any, stream: SimulatedStream, source: Source) -> Any:
        """``described`` with memory for each tensor in it."""
        if isinstance(described, (list, tuple)):
            parts = [self.allocated(one, stream, source) for one in described]
            kind: Any = type(described)
            return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        if isinstance(described, torch.Tensor):
            described = NewTensor.like(described)
        if isinstance(described, NewTensor):
            return self._allocate(described, stream, source)
        return described

    def _allocate(self, new: NewTensor, stream: SimulatedStream, source: Source) -> torch.Tensor:
        self._shared.faults.check_allocation(self._num_allocations, source)
        self._num_allocations += 1
        with torch._C._InferenceMode(False):
            tensor, block = self._pool.allocate(
                new.size, new.stride, new.dtype, str(source), stream
            )
        self._memory.check_allocation(source)
        self._blocks[block] = None
        return tensor

    def note_inputs(self, args: Sequence[Any], operation: str) -> None:
        """Remember the tensor objects that a view was taken of: kernels may see views only."""
        for tensor in tensors_in(args):
            if tensor.layout is not torch.strided:
                # Of what is taken out of it, nobody would see that it is replaced.
                raise cannot_hold(operation, tensor)
            address = tensor.untyped_storage().data_ptr()
            if address not in self.held and self._memory.arena_at(address) is None:
                self.held[address] = HeldInput(tensor)

    def note_host(self, value: Any) -> None:
        """The tensors in ``value`` are host memory, as long as this recording is open."""
        for tensor in tensors_in(value):
            address = tensor.untyped_storage().data_ptr()
            # An empty tensor has no address.
            if address and self._memory.arena_at(address) is None:
                self.held.setdefault(address, HeldInput(tensor)).is_constant = True
                self._host.add(address)

    def is_host(self, tensor: torch.Tensor) -> bool:
        if not self._host or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() in self._host

    def aliased(self, value: Any, written: bool, operation: str, line: str = "") -> Any:
        """``value`` with aliases in place of tensors. ``line``: the user's that writes it, where
        that is not the caller's."""
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type != "cpu":
                raise cannot_hold(operation, value)
            return self.alias(value, written, line)
        if type(value) in (list, tuple):
            return type(value)([self.aliased(one, written, operation) for one in value])
        return value

    def alias(self, tensor: torch.Tensor, written: bool = False, line: str = "") -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        bits = (tensor.is_conj(), tensor.is_neg())
        key = (tensor.data_ptr(), address, tensor.dtype, tensor.shape, tensor.stride(), bits)
        known = self._aliases.get(key)
        if known is None:
            known = self._aliases[key] = self._new_alias(tensor, address)
        if known.held is not None:
            known.held.used_by_kernel = True
            if written and not known.held.written:
                known.held.written = True
                known.held.source = line or str(caller_source())
        return known.tensor

    def _new_alias(self, tensor: torch.Tensor, address: int) -> _Alias:
        block = self._pool.live.get(address)
        arena = block.arena if block is not None else self._memory.arena_at(address)
        if arena is None:
            held = self.held.setdefault(address, HeldInput(tensor))
            return _Alias(tensor.detach(), held)
        start = address + int(tensor.storage_offset()) * tensor.dtype.itemsize
        alias = arena.view(start, tensor.shape, tensor.stride(), tensor.dtype)
        alias = with_bits_of(alias, tensor)
        if block is None or block not in self._blocks:
            end = start + extent_bytes(tensor.shape, tensor.stride(), tensor.dtype)
            self._earlier_ranges.add((start, end))
        return _Alias(alias, None)

    def scratch(self) -> tuple[torch.Tensor, ...]:
        """Bytes allocated in this recording, apart from those that were filled before it."""
        ranges: dict[tuple[int, int], torch.Tensor] = {}
        for block in self._blocks:
            start, end = block.address, block.address + block.num_bytes
            if not any(low < end and start < high for low, high in self._earlier_ranges):
                ranges[start, end] = block.arena.view(start, (block.num_bytes,), (1,), torch.uint8)
        return tuple(ranges.values())

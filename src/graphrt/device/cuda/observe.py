"""Learn, while a window is open, what it touches that is not the pool's.

A dispatch mode sees every operation with its arguments. What it cannot see: kernels that are
launched past torch's dispatcher (a raw pointer in a custom kernel, Triton called directly).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.device import mode_stack
from graphrt.device.base import ExternalUse
from graphrt.device.cuda.pool import storage_address

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose own pointer can be asked for: a subclass may have none."""


class _Traits(NamedTuple):
    """What an operator's schema says of it, read once for each window."""

    written_positions: frozenset[int]
    written_names: frozenset[str]
    uses_rng: bool


class Ledger:
    """What one window touched. Observers of several threads may share it, one at a time.

    It holds tensors strongly only if they are not the pool's: to hold a temporary of the window
    would keep its block from being reused within the graph.
    """

    def __init__(self, device_type: str, is_pooled: Callable[[int], bool]) -> None:
        self._device_type = device_type
        self._is_pooled = is_pooled
        self._traits: dict[Any, _Traits] = {}
        self._made: set[int] = set()
        self._uses: dict[int, ExternalUse] = {}
        # A storage's address is slow to ask for, and every operation of a capture asks. A tensor's
        # own pointer is not: these remember what it led to.
        self._pool_pointers: set[int] = set()
        self._external_pointers: dict[int, int] = {}
        self.uses_rng = False
        self._failed_operation = ""
        self._first_error: BaseException | None = None

    def touch(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the tensors that go into ``operation``, and which of them it writes."""
        traits = self._traits.get(operation)
        if traits is None:
            traits = self._traits[operation] = _traits_of(operation)
            self.uses_rng |= traits.uses_rng
        for position, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                self._touch_tensor(value, position in traits.written_positions)
            elif isinstance(value, list | tuple | dict):
                for tensor in _tensors(value):
                    self._touch_tensor(tensor, position in traits.written_positions)
        for name, value in kwargs.items():
            for tensor in _tensors(value):
                self._touch_tensor(tensor, name in traits.written_names)

    def _touch_tensor(self, tensor: torch.Tensor, written: bool) -> None:
        pointer = tensor.data_ptr() if type(tensor) in _PLAIN else 0
        if pointer in self._pool_pointers:
            return
        address = self._external_pointers.get(pointer) or storage_address(tensor)
        if address is None:
            return
        use = self._uses.get(address)
        if use is None:
            if address in self._made or self._is_pooled(address):
                self._remember_pooled(pointer)
                return
            self._uses[address] = ExternalUse(tensor, written)
        elif written and not use.written:
            self._uses[address] = ExternalUse(use.tensor, True)
        if pointer:
            self._external_pointers[pointer] = address

    def make(self, result: Any) -> None:
        """Note the tensors that came out: new ones lie in the pool, so nobody needs to hold them.

        Host tensors do not; they become externals as soon as something reads them.
        """
        for tensor in (result,) if isinstance(result, torch.Tensor) else _tensors(result):
            pointer = tensor.data_ptr() if type(tensor) in _PLAIN else 0
            if pointer in self._pool_pointers or pointer in self._external_pointers:
                continue
            address = storage_address(tensor)
            if (
                address is not None
                and address not in self._uses
                and tensor.device.type == self._device_type
            ):
                self._made.add(address)
                self._remember_pooled(pointer)

    def _remember_pooled(self, pointer: int) -> None:
        if pointer:
            self._pool_pointers.add(pointer)

    def fail(self, operation: Any, error: BaseException) -> None:
        """Keep the first error, with its operation: later ones are its echoes."""
        if self._first_error is None:
            self._first_error = error
            self._failed_operation = str(operation)

    def take_failure(self) -> tuple[BaseException | None, str]:
        """The first error and its operation, to whoever asks first: it is not kept any longer."""
        error, self._first_error = self._first_error, None
        return error, self._failed_operation

    def externals(self) -> tuple[ExternalUse, ...]:
        """Tensors outside every pool, in order of first touch."""
        return tuple(use for address, use in self._uses.items() if not self._is_pooled(address))


class Observer(TorchDispatchMode):
    """Passes every operation on unchanged, and writes it into a ledger."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the guard that torch puts around each dispatch: compiled code is not observed."""
        return False

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if mode_stack.is_for_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        self._ledger.touch(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._ledger.fail(func, error)
            raise
        self._ledger.make(result)
        return result

    def enter(self) -> None:
        """Observe the calling thread from now on."""
        mode_stack.enter(self)

    def leave(self) -> None:
        """Stop observing, also from below modes that were entered later."""
        mode_stack.leave(self)


def _traits_of(operation: Any) -> _Traits:
    schema = getattr(operation, "_schema", None)  # Higher-order operators have none.
    written = [
        (position, argument.name)
        for position, argument in enumerate(() if schema is None else schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _Traits(
        frozenset(position for position, _ in written),
        frozenset(name for _, name in written),
        torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()),
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)

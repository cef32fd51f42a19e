"""Learn, while a window is open, what it touches that is not the pool's.

A dispatch mode sees every operation with its arguments. What it cannot see: kernels that are
launched past torch's dispatcher (a raw pointer in a custom kernel, Triton called directly).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphrt.device.base import ExternalUse
from graphrt.device.cuda.pool import storage_address


class Ledger:
    """What one window touched. Observers of several threads may share it, one at a time.

    It holds tensors strongly only if they are not the pool's: to hold a temporary of the window
    would keep its block from being reused within the graph.
    """

    def __init__(self, device_type: str, is_pooled: Callable[[int], bool]) -> None:
        self._device_type = device_type
        self._is_pooled = is_pooled
        self._made: set[int] = set()
        self._uses: dict[int, ExternalUse] = {}
        self.uses_rng = False
        self._failed_operation = ""
        self._first_error: BaseException | None = None

    def touch(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the tensors that go into ``operation``, and which of them it writes."""
        schema = getattr(operation, "_schema", None)  # Higher-order operators have none.
        declared = () if schema is None else schema.arguments
        written_names = {
            argument.name
            for argument in declared
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        for position, value in enumerate(args):
            name = declared[position].name if position < len(declared) else ""
            self._touch_value(value, name in written_names)
        for name, value in kwargs.items():
            self._touch_value(value, name in written_names)
        if torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()):
            self.uses_rng = True

    def _touch_value(self, value: Any, written: bool) -> None:
        for tensor in _tensors(value):
            address = storage_address(tensor)
            if address is None or address in self._made or self._is_pooled(address):
                continue
            use = self._uses.get(address)
            if use is None:
                self._uses[address] = ExternalUse(tensor, written)
            elif written and not use.written:
                self._uses[address] = ExternalUse(use.tensor, True)

    def make(self, result: Any) -> None:
        """Note the tensors that came out: new ones lie in the pool, so nobody needs to hold them.

        Host tensors do not; they become externals as soon as something reads them.
        """
        for tensor in _tensors(result):
            address = storage_address(tensor)
            if (
                address is not None
                and address not in self._uses
                and tensor.device.type == self._device_type
            ):
                self._made.add(address)

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

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
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
        _enter(self)

    def leave(self) -> None:
        """Stop observing, also from below modes that were entered later.

        A window may end deep in the caller's code (at a break point), inside a mode of its own.
        """
        above: list[TorchDispatchMode] = []
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_get_current_dispatch_mode_stack()[-1])
            _leave(above[-1])
        _leave(self)
        for mode in reversed(above):
            _enter(mode)


def _enter(mode: TorchDispatchMode) -> None:
    # The base class's own step, whatever the mode adds: it keeps torch's flags, which say whether
    # any mode is active, in agreement with the stack.
    TorchDispatchMode.__enter__(mode)


def _leave(mode: TorchDispatchMode) -> None:
    TorchDispatchMode.__exit__(mode, None, None, None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)

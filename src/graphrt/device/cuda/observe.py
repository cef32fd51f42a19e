"""Learns which tensors outside the pool a recording reads and writes.

A dispatch mode sees every operation with its arguments. What it cannot see: kernels that are
launched past torch's dispatcher (a raw pointer in a custom kernel, Triton called directly).

It runs at every operation of an observed capture, so what it does for each is kept short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphrt.device.base import TensorUse
from graphrt.device.cuda import private
from graphrt.device.cuda.pool import storage_address
from graphrt.device.torch_modes import LookingMode, OfRecording, hidden_writes, is_for_parts
from graphrt.source import caller_source

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types that have a data pointer of their own: a subclass may have none."""


class OperatorInfo(NamedTuple):
    """What an operator's schema says."""

    operator: Any
    """Kept, because infos are found by its id: its hash is Python, and slow."""
    call: Callable[..., Any]
    """Runs it."""
    positions: tuple[tuple[int, bool], ...] | None
    """Arguments that can hold tensors, and whether each is written. None: any, and none is."""
    is_written: Mapping[str, bool]
    """The same by name."""
    uses_rng: bool
    hidden_writes: Callable[[Sequence[Any]], Sequence[int]] | None = None


@dataclass(eq=False, repr=False)
class UseTracker:
    """The tensors that one recording uses. Observers of several threads may share it in turns.

    It holds tensors strongly only if they are not the pool's: to hold a temporary of the recording
    would keep its block from being reused within the graph.

    ``operators``: infos by id; recordings that share it read each schema once.
    """

    _device_type: str
    _is_pooled: Callable[[int], bool]
    _operators: dict[int, OperatorInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._made: set[int] = set()
        self._uses: dict[int, TensorUse] = {}
        # A storage's address is slow to get, a tensor's own pointer is not. Reads of these pointers
        # are noted already, or need no note; the second set says so of writes.
        self._noted: set[int] = set()
        self._noted_written: set[int] = set()
        self.uses_rng = False
        self._failed_operation = ""
        self._first_error: BaseException | None = None

    def inputs(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Callable[..., Any]:
        """Note the tensors that ``operation`` reads and writes; return what runs it."""
        info = self._operators.get(id(operation))
        if info is None:
            info = self._operators[id(operation)] = _info_of(operation)
        if info.uses_rng:
            self.uses_rng = True
        positions = info.positions
        if positions is None:
            for value in args:
                self._input(value, False)
        else:
            num_args = len(args)  # Defaults at the end are not sent.
            for position, written in positions:
                if position < num_args:
                    self._input(args[position], written)
        if kwargs:
            for name, value in kwargs.items():
                written = info.is_written.get(name, False)
                if positions is None or name in info.is_written:
                    self._input(value, written)
        if info.hidden_writes is not None:
            for position in info.hidden_writes(args):
                self._input(args[position], True)
        return info.call

    def _input(self, value: Any, written: bool) -> None:
        pointer = _pointer_of(value)
        if pointer in (self._noted_written if written else self._noted):
            return
        if pointer:
            self._input_tensor(value, written, pointer)
        else:
            for tensor in _tensors(value):
                self._input_tensor(tensor, written, _pointer_of(tensor))

    def _input_tensor(self, tensor: torch.Tensor, written: bool, pointer: int) -> None:
        address = storage_address(tensor)
        if address is None:
            return
        use = self._uses.get(address)
        if use is None:
            if address in self._made or self._is_pooled(address):
                self._set_noted(pointer, True)
                return
            source = str(caller_source()) if written else ""
            use = self._uses[address] = TensorUse(tensor, written, source)
        elif written and not use.written:
            use = self._uses[address] = TensorUse(use.tensor, True, str(caller_source()))
        self._set_noted(pointer, use.written)

    def outputs(self, result: Any) -> None:
        """Note the tensors that came out: new ones are the pool's, and are not held.

        New host tensors are not the pool's: they become externals when an operation reads them.
        """
        pointer = _pointer_of(result)
        if pointer in self._noted:
            return
        if pointer:
            self._output_tensor(result, pointer)
        else:
            for tensor in _tensors(result):
                self._output_tensor(tensor, _pointer_of(tensor))

    def _output_tensor(self, tensor: torch.Tensor, pointer: int) -> None:
        if pointer in self._noted:
            return
        address = storage_address(tensor)
        if (
            address is not None
            and address not in self._uses
            and tensor.device.type == self._device_type
        ):
            self._made.add(address)
            self._set_noted(pointer, True)

    def _set_noted(self, pointer: int, written: bool) -> None:
        if pointer:
            self._noted.add(pointer)
            if written:
                self._noted_written.add(pointer)

    def fail(self, operation: Any, error: BaseException) -> None:
        """Keep the first error, with its operation: later ones only follow from it."""
        if self._first_error is None:
            self._first_error = error
            self._failed_operation = str(operation)

    def take_failure(self) -> tuple[BaseException | None, str]:
        """The first error and its operation. The error is given once and then dropped."""
        error, self._first_error = self._first_error, None
        return error, self._failed_operation

    def externals(self) -> tuple[TensorUse, ...]:
        """Tensors outside every pool, in order of first use."""
        return tuple(use for address, use in self._uses.items() if not self._is_pooled(address))


class Observer(OfRecording, LookingMode):
    """Notes operations in a tracker."""

    def __init__(self, tracker: UseTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if types and is_for_parts(types):
            return NotImplemented
        tracker = self._tracker
        call = tracker.inputs(func, args, kwargs)
        try:
            result = call(*args, **kwargs) if kwargs else call(*args)
        except BaseException as error:
            tracker.fail(func, error)
            raise
        tracker.outputs(result)
        return result


# Types of the schema language that hold no tensor, in whatever lists and optionals.
_NO_TENSORS = frozenset(
    (
        *("IntType", "SymIntType", "BoolType", "SymBoolType", "FloatType", "SymFloatType"),
        *("ComplexType", "NumberType", "StringType", "DeviceObjType", "GeneratorType"),
    )
)


def _info_of(operation: Any) -> OperatorInfo:
    uses_rng = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
    schema = getattr(operation, "_schema", None)
    if schema is None:  # Higher-order operators have none.
        return OperatorInfo(operation, operation, None, {}, uses_rng)
    holding = [
        (position, argument.name, bool(argument.alias_info and argument.alias_info.is_write))
        for position, argument in enumerate(schema.arguments)
        if _may_hold_tensors(argument.type)
    ]
    return OperatorInfo(
        operation,
        private.bare_operator(operation),
        tuple((position, written) for position, _, written in holding),
        {name: written for _, name, written in holding},
        uses_rng,
        hidden_writes(schema),
    )


def _may_hold_tensors(kind: Any) -> bool:
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() not in _NO_TENSORS


def _pointer_of(value: Any) -> int:
    """Where a plain tensor starts; 0 for anything else, and for a tensor without bytes."""
    try:
        return value.data_ptr() if type(value) in _PLAIN else 0
    except RuntimeError:  # A sparse tensor.
        return 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)

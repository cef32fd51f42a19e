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
from graphrt.device.cuda import private
from graphrt.device.cuda.pool import storage_address

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types whose own pointer can be asked for: a subclass may have none."""


class OperatorPlan(NamedTuple):
    """What an operator's schema says of it."""

    operator: Any
    """Kept, because plans are found by its id: its hash is Python, and slow."""
    call: Callable[..., Any]
    """Runs it."""
    positions: tuple[tuple[int, bool], ...] | None
    """Arguments that can hold tensors, and whether each is written. None: any, and none is."""
    is_written: Mapping[str, bool]
    """The same by name."""
    uses_rng: bool


class Ledger:
    """What one window touched. Observers of several threads may share it, one at a time.

    It holds tensors strongly only if they are not the pool's: to hold a temporary of the window
    would keep its block from being reused within the graph.

    ``plans``: what is known of operators; windows that share it read each schema once.
    """

    def __init__(
        self,
        device_type: str,
        is_pooled: Callable[[int], bool],
        plans: dict[int, OperatorPlan] | None = None,
    ) -> None:
        self._device_type = device_type
        self._is_pooled = is_pooled
        self._plans = {} if plans is None else plans
        self._made: set[int] = set()
        self._uses: dict[int, ExternalUse] = {}
        # A storage's address is slow to ask for, and every operation of a capture asks. A tensor's
        # own pointer is not: these are the pointers of which a read, or a write, is no news.
        self._known: set[int] = set()
        self._known_written: set[int] = set()
        self.uses_rng = False
        self._failed_operation = ""
        self._first_error: BaseException | None = None

    def touch(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Callable[..., Any]:
        """Note the tensors that go into ``operation``, and which it writes; return what runs it."""
        plan = self._plans.get(id(operation))
        if plan is None:
            plan = self._plans[id(operation)] = _plan_of(operation)
        if plan.uses_rng:
            self.uses_rng = True
        positions = plan.positions
        if positions is None:
            for value in args:
                self._touch(value, False)
        else:
            num_args = len(args)  # Defaults at the end are not sent.
            for position, written in positions:
                if position < num_args:
                    self._touch(args[position], written)
        if kwargs:
            for name, value in kwargs.items():
                written = plan.is_written.get(name, False)
                if positions is None or name in plan.is_written:
                    self._touch(value, written)
        return plan.call

    def _touch(self, value: Any, written: bool) -> None:
        pointer = _pointer_of(value)
        if pointer in (self._known_written if written else self._known):
            return
        if pointer:
            self._touch_tensor(value, written, pointer)
        else:
            for tensor in _tensors(value):
                self._touch_tensor(tensor, written, _pointer_of(tensor))

    def _touch_tensor(self, tensor: torch.Tensor, written: bool, pointer: int) -> None:
        address = storage_address(tensor)
        if address is None:
            return
        use = self._uses.get(address)
        if use is None:
            if address in self._made or self._is_pooled(address):
                self._remember(pointer, True)
                return
            use = self._uses[address] = ExternalUse(tensor, written)
        elif written and not use.written:
            use = self._uses[address] = ExternalUse(use.tensor, True)
        self._remember(pointer, use.written)

    def make(self, result: Any) -> None:
        """Note the tensors that came out: new ones lie in the pool, so nobody needs to hold them.

        Host tensors do not; they become externals as soon as something reads them.
        """
        pointer = _pointer_of(result)
        if pointer in self._known:
            return
        if pointer:
            self._make_tensor(result, pointer)
        else:
            for tensor in _tensors(result):
                self._make_tensor(tensor, _pointer_of(tensor))

    def _make_tensor(self, tensor: torch.Tensor, pointer: int) -> None:
        if pointer in self._known:
            return
        address = storage_address(tensor)
        if (
            address is not None
            and address not in self._uses
            and tensor.device.type == self._device_type
        ):
            self._made.add(address)
            self._remember(pointer, True)

    def _remember(self, pointer: int, written: bool) -> None:
        """From now on a read of ``pointer`` is no news; nor a write, if it is known as written.

        Nor is anything that happens to the pool's memory.
        """
        if pointer:
            self._known.add(pointer)
            if written:
                self._known_written.add(pointer)

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
        if types and mode_stack.is_for_parts(types):
            return NotImplemented
        ledger = self._ledger
        call = ledger.touch(func, args, kwargs)
        try:
            result = call(*args, **kwargs) if kwargs else call(*args)
        except BaseException as error:
            ledger.fail(func, error)
            raise
        ledger.make(result)
        return result

    def enter(self) -> None:
        """Observe the calling thread from now on."""
        mode_stack.enter(self)

    def leave(self) -> None:
        """Stop observing, also from below modes that were entered later."""
        mode_stack.leave(self)


# Kinds of the schema language that are no tensors, whatever they are nested in.
_NO_TENSORS = frozenset(
    (
        "IntType",
        "SymIntType",
        "BoolType",
        "SymBoolType",
        "FloatType",
        "SymFloatType",
        "ComplexType",
        "NumberType",
        "StringType",
        "DeviceObjType",
        "GeneratorType",
    )
)


def _plan_of(operation: Any) -> OperatorPlan:
    uses_rng = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
    schema = getattr(operation, "_schema", None)
    if schema is None:  # Higher-order operators have none.
        return OperatorPlan(operation, operation, None, {}, uses_rng)
    holding = [
        (position, argument.name, _is_written(argument))
        for position, argument in enumerate(schema.arguments)
        if _may_hold_tensors(argument.type)
    ]
    return OperatorPlan(
        operation,
        private.bare_operator(operation),
        tuple((position, written) for position, _, written in holding),
        {name: written for _, name, written in holding},
        uses_rng,
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _may_hold_tensors(kind: Any) -> bool:
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() not in _NO_TENSORS


def _pointer_of(value: Any) -> int:
    """Where a plain tensor starts; 0 for what is none, or has no bytes of its own."""
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

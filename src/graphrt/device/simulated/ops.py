"""What is known of an operator before it runs: from its schema and tags, and by shape inference.

Shapes come from fake tensors built over meta tensors. They answer as the CPU would, strides and
device included, but cost up to some ms an operator; the answer depends only on shapes, host values
and torch's default type, so it is kept by signature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from graphrt.device.simulated.forbidden_ops import (
    Args,
    ForbiddenOp,
    Kwargs,
    Operator,
    cannot_hold,
    check_operator,
    depends_on_arguments,
    unsupported,
)
from graphrt.device.torch_modes import hidden_writes
from graphrt.errors import ForbiddenOperationError
from graphrt.gc_pause import gc_paused


class Traits(NamedTuple):
    """What the schema and tags of an operator say, whatever its arguments are."""

    name: str
    forbidden: ForbiddenOp | None
    depends_on_arguments: bool
    """Whether it is forbidden."""
    is_composite: bool
    moves_no_data: bool
    """A view, a change of metadata, a question about metadata."""
    asks_metadata: bool
    """It returns no tensor and writes none: a question about metadata, or a read on the host."""
    only_allocates: bool
    makes_constant: bool
    written: frozenset[int | str]
    """Positions, and names of keyword arguments, that it writes."""
    hidden_writes: Callable[[Args], Sequence[int]] | None
    returns_written: tuple[int | str | None, ...]
    """For each result the argument that it is; None: something new."""
    uses_rng: bool
    takes_workspace: bool


_MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv"})
_ALLOCATORS = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::empty_permuted"}
    | {"aten::new_empty", "aten::new_empty_strided"}
)
_CONSTANTS = frozenset({"aten::lift_fresh", "aten::lift"})


@lru_cache(maxsize=4096)
def _traits_of(func: Operator) -> Traits:
    schema = func._schema
    tags = {tag.name for tag in func.tags}
    written: set[int | str] = set()
    by_alias: dict[str, int | str] = {}
    for at, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            place: int | str = argument.name if argument.kwarg_only else at
            written.add(place)
            by_alias.update(dict.fromkeys(info.before_set, place))
    returns_written: list[int | str | None] = []
    returns_view = False
    for one in schema.returns:
        info = one.alias_info
        returns_view |= info is not None and not info.is_write
        sets = list(info.before_set) if info is not None and info.is_write else []
        returns_written.append(by_alias[sets[0]] if sets else None)
    returns_tensors = any("Tensor" in str(one.type) for one in schema.returns)
    asks_metadata = bool(schema.returns) and not returns_tensors and not written
    return Traits(
        name=func.name(),
        forbidden=check_operator(func),
        depends_on_arguments=depends_on_arguments(func),
        is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ),
        moves_no_data=(
            returns_view
            or "inplace_view" in tags
            or asks_metadata
            or func.namespace in ("profiler", "prim")
        ),
        asks_metadata=asks_metadata and func.namespace not in ("profiler", "prim"),
        only_allocates=schema.name in _ALLOCATORS and not written,
        makes_constant=schema.name in _CONSTANTS,
        written=frozenset(written),
        hidden_writes=hidden_writes(schema),
        returns_written=tuple(returns_written),
        uses_rng="nondeterministic_seeded" in tags,
        takes_workspace=schema.name in _MATMULS,
    )


def decompose(func: Operator, args: Args, kwargs: Kwargs) -> Any:
    """Run the parts of a composite operator, as eager would.

    ``func.decompose`` may pick a Python decomposition that computes other bits than the kernel.
    """
    run = getattr(func, "_op_dk", None)
    if run is None:
        return func.decompose(*args, **kwargs)
    return run(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A result that needs memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: torch.Tensor) -> NewTensor:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class _NotRecorded:
    """See ``NOT_RECORDED``."""


NOT_RECORDED: Final = _NotRecorded()
"""A result that shares the memory of an argument (a view that the schema does not mention), or
that is not on the simulated device (a meta tensor)."""


def leaves(value: Any) -> list[Any]:
    """What nested lists and tuples hold, in order."""
    if not isinstance(value, (list, tuple)):
        return [value]
    found: list[Any] = []
    for one in value:  # At each replay, of what compiled pieces return.
        found += leaves(one) if isinstance(one, (list, tuple)) else (one,)
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


_RESULTS_OF_ATEN: dict[Hashable, tuple[Any]] = {}
"""By signature, for all devices of the process: nobody changes these operators."""
_MOST_RESULTS = 1 << 16


class Operators:
    """Traits by operator, and results by signature. One per device."""

    traits = staticmethod(_traits_of)

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[Any]] = {}
        """Of operators outside aten, of which a user may register another fake kernel."""
        self._reads_data: dict[Operator, bool] = {}
        # A fake mode serves one thread at a time. The first is made here: it imports for a second.
        with gc_paused(collects=False, ages=True):
            self._idle_modes = [_new_fake_mode()]

    def results(self, func: Operator, args: Args, kwargs: Kwargs) -> Any:
        """What ``func`` returns: ``NewTensor`` for tensors, None for arguments that it writes.

        ``NOT_RECORDED`` where it has to run now.

        Errors: ``UnsupportedOperationError`` without a fake kernel, ``ForbiddenOperationError`` if
        the shape depends on data or an argument would be resized. What the operator itself says
        about wrong arguments passes unchanged.
        """
        results = _RESULTS_OF_ATEN if func.namespace == "aten" else self._results
        try:
            named = tuple([(k, _signature(v)) for k, v in kwargs.items()])
            key = (func, torch.get_default_dtype(), _signature(args), named)
            known = results.get(key)
        except TypeError:
            return self._infer(func, args, kwargs)
        if known is None:
            if len(results) >= _MOST_RESULTS:
                results.clear()
            known = results[key] = (self._infer(func, args, kwargs),)
        return known[0]

    def reads_data(self, func: Operator, args: Args, kwargs: Kwargs) -> bool:
        """Whether ``func``, which returns no tensor, needs more than metadata for its answer."""
        known = self._reads_data.get(func)
        if known is None:
            try:
                _Substitutes(_meta).run(func, args, kwargs)
                known = False
            except Exception:  # noqa: BLE001  # whatever it says of tensors that hold no data
                known = True
            self._reads_data[func] = known
        return known

    def grown(
        self, func: Operator, args: Args, kwargs: Kwargs
    ) -> list[tuple[torch.Tensor, NewTensor]]:
        """The arguments without elements to which ``func`` gives some."""
        with self._fakes() as substitutes:
            substitutes.run(func, args, kwargs)
        return [
            (before, NewTensor.like(after))
            for before, after in substitutes.by_id.values()
            if after.shape != before.shape
        ]

    def _infer(self, func: Operator, args: Args, kwargs: Kwargs) -> Any:
        tensors = list(tensors_in((args, tuple(kwargs.values()))))
        if any(one.device.type != "cpu" for one in tensors):
            return NOT_RECORDED
        for one in tensors:
            if one.layout is not torch.strided:
                raise cannot_hold(self.traits(func).name, one)
        places = self.traits(func).returns_written
        results = self._run_on_fakes(func, args, kwargs)
        if len(places) == 1:
            results = results if places[0] is None else None
        elif any(place is not None for place in places):
            results = [
                one if place is None else None for place, one in zip(places, results, strict=True)
            ]
        return NOT_RECORDED if NOT_RECORDED in leaves(results) else results

    def _run_on_fakes(self, func: Operator, args: Args, kwargs: Kwargs) -> Any:
        try:
            with self._fakes() as substitutes:
                return substitutes.run(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            reason = "its result depends on data"
            raise ForbiddenOp(str(func), reason, "use an operation of fixed size.").error() from (
                error.with_traceback(None)  # Its frames lead to the tensors of this call.
            )
        except (
            UnsupportedOperatorException,
            UnsupportedFakeTensorException,
            NotImplementedError,
        ) as error:
            raise unsupported(
                str(func),
                f"{func} cannot be recorded without running it",
                expected="a fake kernel, which says the shape of the result",
                found=f"none for {func}",
                do="register one with torch.library.register_fake, or record the call as an "
                "opaque node.",
            ) from error.with_traceback(None)
        except ForbiddenOperationError:
            raise
        except Exception:  # noqa: BLE001  # what the kernel itself says is raised instead
            # Fake kernels are stricter than the CPU's at times. Run on zeros, which touches no
            # state, the kernel says in its own words whether it takes such arguments.
            return _Substitutes(_zeros).run(func, args, kwargs)

    @contextmanager
    def _fakes(self) -> Iterator[_Substitutes]:
        """Fake tensors in place of those of one call, in a mode that no other thread uses."""
        try:
            mode = self._idle_modes.pop()
        except IndexError:
            mode = _new_fake_mode()
        try:
            with mode:
                yield _Substitutes(lambda one: FakeTensor(mode, _meta(one), one.device))
        finally:
            self._idle_modes.append(mode)


def _new_fake_mode() -> FakeTensorMode:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # It would remember by the same key as we do, only slower. Without effect where it has no such
    # name.
    mode.cache_enabled = False
    return mode


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def _signature(value: Any) -> Hashable:
    """A key under which shapes and kernels are the same. Raises TypeError if there is none."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(value.layout)
        return (value.dtype, value.shape, value.stride(), value.device)
    if isinstance(value, (list, tuple)):
        return tuple([_signature(one) for one in value])
    if isinstance(value, torch.ScriptObject):  # Packed weights: they have a hash and no equality.
        raise TypeError(type(value))
    # Which generator does not count, and it must not live as long as this.
    # The type does: 1, 1.0 and True are equal and choose different kernels.
    return (type(value), None if isinstance(value, torch.Generator) else value)


class _Substitutes:
    """What is passed in place of the tensors of one call, one for each tensor object."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make = make
        self.by_id: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id of a tensor: itself, and what is passed in its place."""

    def run(self, func: Operator, args: Args, kwargs: Kwargs) -> Any:
        given = [self._substitute(one) for one in args]
        named = {name: self._substitute(one) for name, one in kwargs.items()}
        result = func(*given, **named)
        for before, after in self.by_id.values():
            if after.shape != before.shape and before.numel():
                reason = (
                    f"it resizes an argument from {tuple(before.shape)} to {tuple(after.shape)}"
                )
                raise ForbiddenOp(str(func), reason, "pass a tensor of the right size.").error()
        storages = {one.untyped_storage()._cdata for _, one in self.by_id.values()}
        return _described(result, storages)

    def _substitute(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self.by_id.get(id(value))
            if known is None:
                known = self.by_id[id(value)] = (value, self._make(value))
            return known[1]
        if type(value) in (list, tuple):
            return type(value)([self._substitute(one) for one in value])
        return value


def _described(value: Any, storages: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.untyped_storage()._cdata in storages or value.device.type != "cpu":
            return NOT_RECORDED
        return NewTensor.like(value)
    if isinstance(value, (list, tuple)):
        return [_described(one, storages) for one in value]
    return value

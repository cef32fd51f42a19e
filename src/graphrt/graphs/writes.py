"""Notes which tensors some eager code writes, the user's line that wrote each first, and what they
held before.

A dispatch mode sees every operation with its arguments. It sees no kernel that is launched past
torch's dispatcher (a raw pointer in a custom kernel, Triton called directly).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch

from graphrt.device.torch_modes import (
    LookingMode,
    hidden_writes,
    is_for_parts,
    wait_for_pinned,
)
from graphrt.graphs.buffers import is_staging
from graphrt.source import caller_source
from graphrt.values import storage_start, tensors_of

MAX_KEPT_BYTES = 256 << 20
"""A state that is larger, and that nobody declared, would leave too little for the captures."""


class Write(NamedTuple):
    """A tensor that existed before, and was written."""

    tensor: torch.Tensor
    source: str
    """The user's line; empty where there is none."""
    is_staged: bool = False
    """True where a ``BufferSet`` filled one of its buffers."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


class _Kept(NamedTuple):
    storage: ReferenceType[torch.UntypedStorage]
    """Weak, because most of what is kept for nothing is freed within the run."""
    copy: torch.Tensor
    of: object


class KeptTensors:
    """What storages held before runs wrote them: at most ``MAX_KEPT_BYTES``, on their device."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def keep(self, tensor: torch.Tensor, of: object) -> None:
        """Copy the storage of ``tensor``, which a run of ``of`` is about to write for the first
        time, unless it is kept already."""
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        num_kept = sum(kept.copy.numel() for kept in tuple(self._kept.values()))
        if address in self._kept or num_kept + num_bytes > MAX_KEPT_BYTES:
            return
        wait_for_pinned([tensor])
        try:
            with torch.inference_mode():
                copy = whole_of(storage).clone()
        except torch.OutOfMemoryError:  # As if it were too large.
            return
        forget = partial(self._forget, address)
        self._kept[address] = _Kept(ref(storage, forget), copy, of)

    def put_back(self, is_meant: Callable[[torch.UntypedStorage, object], bool]) -> bool:
        """Write back, and forget, what ``is_meant(storage, of)``; True if there was any."""
        found = [
            (storage, kept.copy)
            for kept in tuple(self._kept.values())
            if (storage := kept.storage()) is not None and is_meant(storage, kept.of)
        ]
        for storage, copy in found:
            with torch.inference_mode():
                whole = whole_of(storage)
                wait_for_pinned([whole])
                whole.copy_(copy)
            self._forget(storage.data_ptr())
        return bool(found)

    def clear(self) -> None:
        self._kept.clear()

    def _forget(self, address: int, _: object = None) -> None:
        self._kept.pop(address, None)


def whole_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of all bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def observed_writes(keep: Callable[[torch.Tensor], None] | None = None) -> Iterator[list[Write]]:
    """Collect the first write to each storage that the body did not make itself, and the first by
    a ``BufferSet``. ``keep(tensor)`` is called before the first of these, not those of a
    ``BufferSet``."""
    observer = _WriteObserver(keep)
    with observer:
        yield observer.writes


def keeping_writes(keep: Callable[[torch.Tensor], None]) -> AbstractContextManager[object]:
    """While entered, ``keep(tensor)`` is called as by ``observed_writes``, in a run that may
    compile. With a torch that compiles nothing under a mode, nobody looks."""
    can_compile = hasattr(LookingMode, "ignore_compile_internals")
    return _KeepingObserver(keep) if can_compile else nullcontext()


def first_source(run: Callable[[], Any], is_written: Callable[[], bool]) -> str:
    """The user's line of the operation of ``run`` after which ``is_written()``; empty if none is
    seen. With a torch that compiles nothing under a mode, nobody looks."""
    if not hasattr(LookingMode, "ignore_compile_internals"):
        return ""
    observer = _FirstWrite(is_written)
    with observer:
        run()
    return observer.source


@lru_cache(maxsize=1024)  # A schema makes its arguments anew each time that it is asked for them.
def _writes_of(func: Any) -> tuple[tuple[tuple[int, str], ...], Callable[..., Any] | None]:
    """Position and name of each argument that an operator writes; and its ``hidden_writes``."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return (), None
    told = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return told, hidden_writes(schema)


class _WriteObserver(LookingMode):
    """Notes what operations write."""

    def __init__(self, keep: Callable[[torch.Tensor], None] | None) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self._keep = keep
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
        given = tensors_of((*args, *kwargs.values()))
        self._given.update(set(map(storage_start, given)) - self._made)
        told, hidden = _writes_of(func)
        for position, name in told:
            self._note(tensors_of(args[position] if position < len(args) else kwargs.get(name)))
        for position in hidden(args) if hidden is not None else ():
            self._note(tensors_of(args[position]))
        result = func(*args, **kwargs)
        self._made.update(set(map(storage_start, tensors_of(result))) - self._given)
        return result

    def _note(self, tensors: Sequence[torch.Tensor]) -> None:
        is_staged = bool(tensors) and is_staging()
        for tensor in tensors:
            address = storage_start(tensor)
            if address and address not in self._made and (address, is_staged) not in self._written:
                self._written.add((address, is_staged))
                if self._keep is not None and not is_staged:
                    self._keep(tensor)
                self._add(tensor, is_staged)

    def _add(self, tensor: torch.Tensor, is_staged: bool) -> None:
        self.writes.append(Write(tensor, str(caller_source()), is_staged))


class _KeepingObserver(_WriteObserver):
    """Holds no tensor: what the run frees is free. Dynamo compiles under it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _add(self, tensor: torch.Tensor, is_staged: bool) -> None:
        pass


class _FirstWrite(LookingMode):
    def __init__(self, is_written: Callable[[], bool]) -> None:
        super().__init__()
        self.source = ""
        self._is_written = is_written

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if types and is_for_parts(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self.source and any(_writes_of(func)) and self._is_written():
            self.source = str(caller_source())
        return result

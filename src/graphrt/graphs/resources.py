"""What outlives a step and takes part in capture: resources, guarded state, scratch memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from graphrt.config.checked import check_type, checked_list
from graphrt.context import get_forward_context
from graphrt.device.torch_modes import wait_for_pinned
from graphrt.errors import ConfigError, FrozenBufferError, shown


@runtime_checkable
class Resource(Protocol):
    """Host-side work a graph depends on: attention plans, metadata, scratch of a library.

    Three more methods are called where a resource has them:
    ``reserve(max_key)``: allocate for the largest key; once, before anything is warmed up.
    ``prepare_for_capture(key)``: set up what is made once for each key, such as an attention
    plan over fixed buffers; once in the life of a library, before the first warm-up of the key.
    ``freeze()``: from here on refuse to grow (``FrozenBufferError``), because graphs hold the
    addresses; after the warm-ups, before the first capture.
    """

    def prepare(self, key: Any, step_info: Any) -> None:
        """Bring what the graph reads up to date. Called before **every** step.

        Graph, padded and eager steps, warm-ups, captures and checks alike; ``step_info`` describes
        the step, or the example of a check, and is None in warm-ups and captures. ``key``: the
        ``BatchDescriptor``, padded; of the batch itself in eager runs, to which a check of padding
        belongs, so that it may have a size that is never captured.
        """


def optional_methods(resources: Iterable[object], name: str) -> tuple[Callable[..., None], ...]:
    """The method ``name`` of each resource that has it, in order."""
    found = (getattr(resource, name, None) for resource in resources)
    return tuple(method for method in found if callable(method))


@runtime_checkable
class StateGuard(Protocol):
    """Saves state that a callable advances, and restores it.

    A capture is refused if it writes a tensor that the guard leaves out. Which ones it keeps, its
    attribute ``tensors`` says (a list or mapping of them); without one, they are those that
    ``restore(save())`` writes, which is tried once a scope.
    """

    def save(self) -> Any:
        """Return a token that later calls of the callable do not change."""

    def restore(self, token: Any) -> None:
        """Write the state of ``token`` back in place: graphs hold the addresses."""


class TensorStateGuard:
    """Guards tensors by cloning them and copying back, in place.

    A token is a list of clones, in the order of ``tensors``; it costs their bytes while it lives.
    With pinned memory among them, saving and restoring wait for the current device.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] | Mapping[str, torch.Tensor]) -> None:
        given = tensors.values() if isinstance(tensors, Mapping) else tensors
        expected = "a list of tensors, or a mapping with them as values"
        self.tensors = list(checked_list("TensorStateGuard", given, torch.Tensor, expected))

    def save(self) -> list[torch.Tensor]:
        wait_for_pinned(self.tensors)
        with torch.inference_mode():
            return [tensor.clone() for tensor in self.tensors]

    def restore(self, token: list[torch.Tensor]) -> None:
        wait_for_pinned(self.tensors)
        # State made in inference mode can be written in no other; other state in this one too.
        with torch.inference_mode():
            if self.tensors:
                torch._foreach_copy_(self.tensors, token)


class Workspace:
    """Scratch bytes that every caller shares and that may grow until a graph holds their address.

    ``device``: where the bytes live; None is torch's default device. One thread at a time.
    """

    def __init__(self, name: str, device: torch.device | str | None = None) -> None:
        check_type("name of a Workspace", name, str, "a string")
        try:
            _ = device is None or torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"workspace {name!r}: device",
                expected="a device of torch's, or None",
                found=shown(device),
                do="name one, as cpu or cuda:0",
            ) from error
        self.name = name
        self.device = device
        self._bytes: torch.Tensor | None = None
        self._holders: set[Hashable] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        return 0 if self._bytes is None else self._bytes.numel()

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """Where the bytes are now, for what declares that captures may write them."""
        return None if self._bytes is None else self._bytes.untyped_storage()

    @property
    def is_frozen(self) -> bool:
        return bool(self._holders)

    def get(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return scratch of this shape; what it holds is undefined.

        Aliasing: every call returns the same bytes, so at most one result is in use at a time. A
                  growth moves them; earlier results keep the old ones.
        Errors:   ``FrozenBufferError`` for a growth while frozen; ``ConfigError`` for what is no
                  shape or dtype.
        """
        try:
            needed = operator.index(math.prod(shape) * dtype.itemsize)
            if min(shape, default=0) < 0:  # A slice would give other bytes than were asked for.
                raise ValueError("a negative size")
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"workspace {self.name!r}",
                expected="a shape, and a torch.dtype",
                found=f"{shown(shape)}, {shown(dtype)}",
                do="correct them",
            ) from error
        # Scratch born in inference mode, or viewed as another dtype there, could not be written
        # outside it.
        with torch.inference_mode(False):
            if needed > self.num_bytes:
                self._grow(needed)
            if self._bytes is None:
                return torch.empty(tuple(shape), dtype=dtype, device=self.device)
            return self._bytes[:needed].view(dtype).view(tuple(shape))

    def freeze(self, generation: Hashable = None) -> None:
        """Refuse growth until every generation that froze it has thawed it.

        Idempotent for one ``generation``.
        """
        self._holders.add(generation)

    def thaw(self, generation: Hashable = None) -> None:
        """Undo ``freeze`` of ``generation``, whose programs are retired."""
        self._holders.discard(generation)

    def _grow(self, needed: int) -> None:
        if self._holders:
            context = get_forward_context()
            key = context.batch_descriptor if context is not None else None
            raise FrozenBufferError(
                f"workspace {self.name!r}" + (f", {key}" if key is not None else ""),
                expected=f"at most {self.num_bytes} bytes, whose address graphs hold",
                found=f"a request for {needed} bytes",
                do="reserve for the largest key in the warm-ups; it thaws when the generations "
                "captured over it are retired",
            )
        self._bytes = torch.empty(needed, dtype=torch.uint8, device=self.device)

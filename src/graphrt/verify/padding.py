"""Proves two things by poison: that nothing reads the padding, and that every output is written.

The poison is a byte pattern. 0xFF is NaN in every floating dtype and -1 in every signed integer;
a second pattern tells an element that was never written from one that happens to equal the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from graphrt.errors import VerificationError
from graphrt.graphs.buffers import BoundBuffers, Sizes
from graphrt.graphs.resources import StateGuard
from graphrt.graphs.values import as_bits, format_path, own_copy, walk
from graphrt.verify.compare import compare

_PATTERNS = (0xFF, 0xFE)


class Unwritten(NamedTuple):
    """An output that a run leaves as it was, in whole or in part."""

    path: str
    num_elements: int
    first_index: tuple[int, ...]


def poison(tensor: torch.Tensor, pattern: int = 0xFF) -> None:
    """Fill every byte of ``tensor``'s elements with ``pattern``."""
    bits = as_bits(tensor)
    bits.fill_(_word(bits.dtype, pattern))


def find_unwritten(
    run: Callable[[], Any], outputs: Any, *, inputs: Iterable[torch.Tensor] = ()
) -> tuple[Unwritten, ...]:
    """Poison ``outputs`` before each of two runs and report what both left untouched.

    ``inputs``: outputs over their storage are handed through, not written, and are left alone.
    ``run`` must write the same ``outputs`` again, as a replay does. Waits for the device.
    """
    handed_through = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    tensors = {
        format_path(node.path): node.value
        for node in walk(outputs)
        if node.kind == "tensor" and node.value.untyped_storage().data_ptr() not in handed_through
    }
    untouched: dict[str, torch.Tensor] = {}
    for pattern in _PATTERNS:
        for tensor in tensors.values():
            poison(tensor, pattern)
        run()
        for path, tensor in tensors.items():
            bits = as_bits(tensor)
            same = bits == _word(bits.dtype, pattern)
            untouched[path] = same if path not in untouched else untouched[path] & same
    return tuple(
        Unwritten(path, int(mask.sum()), tuple(int(i) for i in mask.nonzero()[0]))
        for path, mask in untouched.items()
        if bool(mask.any())
    )


@contextmanager
def poisoned_padding(
    bound: BoundBuffers, n: Sizes, names: Iterable[str] | None = None
) -> Iterator[None]:
    """Poison the padded rows of a staged step; on exit they hold what they held before.

    ``names``: which buffers. By default those whose padding must not matter: keep, which claims
    that nothing reads it, and floating ones, where NaN spreads to every row it touches. What an
    integer zero or fill padding holds is read on purpose and stays.
    """
    chosen = _unread(bound) if names is None else tuple(names)
    padding = bound.padding(n)
    views = [view for name in chosen for view in padding[name]]
    kept = [view.clone() for view in views]
    for view in views:
        poison(view)
    try:
        yield
    finally:
        for view, contents in zip(views, kept, strict=True):
            view.copy_(contents)


def check_padding_unread(
    bound: BoundBuffers,
    n: Sizes,
    run: Callable[[], Any],
    *,
    state: StateGuard | None = None,
    names: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Run a staged step with its own and with poisoned padding; both must return the same bits.

    ``run`` returns outputs at their *real* size. ``state``: restored before each run, and after
    the last one the state is as before the call. Returns the names of the buffers poisoned.

    Errors: ``VerificationError`` naming the buffers whose padded rows reach a real output.
    """
    chosen = _unread(bound) if names is None else tuple(names)
    saved = state.save() if state is not None else None

    def outputs(*poisoned: str) -> Any:
        with poisoned_padding(bound, n, poisoned):
            taken = own_copy(run())
        if state is not None:
            taken = (taken, state.save())
            state.restore(saved)
        return taken

    expected = outputs()
    together = compare(expected, outputs(*chosen))
    if together.is_equal:
        return chosen
    alone = [name for name in chosen if not compare(expected, outputs(name)).is_equal]
    raise VerificationError(
        f"{bound.key}, real sizes {n}",
        expected="real outputs and state that no padded row reaches",
        found=f"poison in {', '.join(alone or chosen)} changes them: {together}",
        do="mask the padded rows, or declare a padding that is neutral where they are read",
    )


def _unread(bound: BoundBuffers) -> tuple[str, ...]:
    return tuple(
        name
        for name, spec in bound.specs.items()
        if spec.policy.kind == "keep"
        or (spec.policy.kind != "fill_once" and spec.dtype.is_floating_point)
    )


def _word(dtype: torch.dtype, pattern: int) -> int:
    signed = dtype is not torch.uint8
    return int.from_bytes(bytes([pattern]) * dtype.itemsize, "little", signed=signed)

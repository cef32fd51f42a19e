"""Compares what eager execution and a replay returned, and says where they first differ.

Replay against eager with the same kernels on the same padded batch is bit-equal, so that is what
is asked by default; a tolerance is for comparing a padded with an unpadded run, where the size of
a matrix product alone may change its rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphrt.graphs.values import Node, as_bits, format_path, same_host_value, walk

_MAX_SHOWN = 4


class Difference(NamedTuple):
    """One place where two results differ. Strings and numbers only: it keeps no tensor alive."""

    path: str
    """Where, written as Python would: ``['logits'][0]``; empty for the result itself."""
    expected: str
    found: str
    max_abs_difference: float = math.nan
    """NaN where no difference can be taken: structures, shapes, NaN against a number."""
    first_index: tuple[int, ...] | None = None
    num_differing: int = 0

    def __str__(self) -> str:
        where = self.path or "the result"
        if self.first_index is None:
            return f"{where}: expected {self.expected}, found {self.found}"
        return (
            f"{where}: {self.num_differing} elements differ by at most "
            f"{self.max_abs_difference:g}, first at {list(self.first_index)}: "
            f"expected {self.expected}, found {self.found}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of ``compare``."""

    differences: tuple[Difference, ...]
    num_compared: int
    """Tensors and host values that were compared."""
    unchecked: tuple[str, ...]
    """Paths of opaque values, which are not compared."""
    max_abs_difference: float
    """Over all tensors, tolerated ones too; NaN if a difference could not be taken."""

    @property
    def is_equal(self) -> bool:
        """True if nothing that was compared differs by more than the tolerance."""
        return not self.differences

    def __str__(self) -> str:
        if self.is_equal:
            return f"{self.num_compared} values are equal"
        lines = [str(difference) for difference in self.differences[:_MAX_SHOWN]]
        if len(self.differences) > _MAX_SHOWN:
            lines.append(f"and {len(self.differences) - _MAX_SHOWN} more")
        return "; ".join(lines)


def compare(expected: Any, actual: Any, *, tolerance: float | None = None) -> Comparison:
    """Compare two results leaf by leaf: structure, shape, dtype, and every element.

    ``tolerance``: the largest absolute difference accepted in floating tensors and host floats;
    None asks for equal bits. NaN equals NaN whatever its bits, with and without a tolerance; 0.0
    and -0.0 have other bits. Strides and devices are not compared. Waits for the device.
    """
    differences: list[Difference] = []
    sizes = [0.0]
    num_compared = 0
    unchecked = []
    left = {format_path(node.path): node for node in walk(expected)}
    right = {format_path(node.path): node for node in walk(actual)}
    for path in left.keys() | right.keys():
        one, other = left.get(path), right.get(path)
        if one is None or other is None:
            # Reported at the container, whose type or number of children differs too.
            continue
        if one.kind != other.kind or (one.kind == "container" and not _same_container(one, other)):
            differences.append(Difference(path, _describe(one), _describe(other)))
        elif one.kind == "opaque":
            unchecked.append(path)
        elif one.kind == "tensor":
            num_compared += 1
            difference, size = _compare_tensors(path, one.value, other.value, tolerance)
            differences += [] if difference is None else [difference]
            sizes.append(size)
        elif one.kind == "host":
            num_compared += 1
            if not same_host_value(one.value, other.value, tolerance):
                differences.append(Difference(path, repr(one.value), repr(other.value)))
    # Not max alone: what it makes of a NaN depends on the order.
    largest = math.nan if any(map(math.isnan, sizes)) else max(sizes)
    order = {path: number for number, path in enumerate(left)}
    differences.sort(key=lambda difference: order[difference.path])
    return Comparison(tuple(differences), num_compared, tuple(sorted(unchecked)), largest)


def _compare_tensors(
    path: str, expected: torch.Tensor, actual: torch.Tensor, tolerance: float | None
) -> tuple[Difference | None, float]:
    """Return the difference, if it counts, and the largest absolute one, counted or not."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return Difference(path, _describe_tensor(expected), _describe_tensor(actual)), math.nan
    expected, actual = expected.detach(), actual.detach().to(expected.device)
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    # Almost always so, and known after one wait for the device.
    if torch.equal(as_bits(expected), as_bits(actual)):
        return None, 0.0
    differing = as_bits(expected) != as_bits(actual)
    # In float64, because the 8-bit formats have no isnan of their own. It holds the difference of
    # every dtype but very large int64, where it rounds.
    left, right = expected.double(), actual.double()
    differing &= ~(left.isnan() & right.isnan())
    if not bool(differing.any()):
        return None, 0.0
    differences = (left - right).abs()
    size = differences[differing].max().item()
    if tolerance is not None and expected.is_floating_point():
        # A pair of infinities is equal bits; NaN against a number fails the comparison.
        differing &= ~(differences <= tolerance)
        if not bool(differing.any()):
            return None, size
    # Of an empty index (a 0-d tensor) the first is ().
    first = tuple(int(i) for i in differing.nonzero()[0])
    return (
        Difference(
            path,
            repr(expected[first].item()),
            repr(actual[first].item()),
            size,
            first,
            int(differing.sum()),
        ),
        size,
    )


def _same_container(one: Node, other: Node) -> bool:
    if type(one.value) is not type(other.value) or one.num_children != other.num_children:
        return False
    return not isinstance(one.value, dict) or one.value.keys() == other.value.keys()


def _describe(node: Node) -> str:
    if node.kind == "tensor":
        return _describe_tensor(node.value)
    if node.kind == "host":
        return repr(node.value)
    if isinstance(node.value, dict):
        return f"{type(node.value).__name__} of {sorted(map(str, node.value))}"
    if node.kind == "container":
        return f"{type(node.value).__name__} of {node.num_children}"
    return type(node.value).__name__


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"

"""Compares what eager execution and a replay returned, and says where they first differ.

Replay against eager with the same kernels on the same padded batch is bit-equal, so that is what
is asked by default. A padded and an unpadded run are compared within a tolerance, because the size
of a matrix product alone may change its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphrt.config.checked import check_number, check_type
from graphrt.errors import shown
from graphrt.values import Node, as_bits, dotted, format_path, same_host_value, walk

_MAX_SHOWN = 4
_OPAQUE = (
    "another one, which nothing looks into: return tensors and host values, in tuples, lists, "
    "dicts or dataclasses, or the same object in every run"
)


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
    """Tensors and host values that were compared, without empty ones and None."""
    unchecked: tuple[str, ...]
    """Paths of opaque values: they are the same object, whose contents are not compared."""
    max_abs_difference: float
    """Over all tensors, tolerated ones too; NaN if a difference could not be taken."""
    num_ties: int = 0
    """Choices that differ between elements equal within the tolerance."""
    share_in_16_bits: float = 0.0
    """The least relative tolerance within which 16-bit tensors are equal; 0 where none is given."""

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


def compare(
    expected: Any,
    actual: Any,
    *,
    tolerance: float | Mapping[torch.dtype, float] | None = None,
    chosen_from: Mapping[str, str] = MappingProxyType({}),
) -> Comparison:
    """Compare two results leaf by leaf: structure, shape, dtype, and every element.

    ``tolerance``: the largest absolute difference accepted in floating tensors and host floats; or
    by dtype, relative, where all else is compared exactly; None asks for equal bits. A relative one
    is of the largest finite element of ``expected``. In 16 bits it is of root mean squares, of all
    differences and elements; and three times it in each row (dimension 0), of the larger of the
    row's and of all. NaN equals NaN whatever its bits, with and without a tolerance; 0.0 and -0.0
    have other bits. Strides and devices are not compared.
    ``chosen_from``: dotted path of an integer tensor -> that of the floating one whose last
    dimension it indexes (a greedy choice). Indices of elements equal within tolerance are a tie.
    Waits for the device.
    """
    for limit in tolerance.values() if isinstance(tolerance, Mapping) else (tolerance,):
        if limit is not None:
            check_number("tolerance", limit)
    check_type("chosen_from", chosen_from, Mapping, "paths by path")
    differences: list[Difference] = []
    sizes, shares = [0.0], [0.0]
    num_compared = num_ties = 0
    unchecked = []
    nodes = list(walk(expected))
    left = {format_path(node.path): node for node in nodes}
    scores_of = {
        format_path(node.path): scores.value
        for node in nodes
        for scores in nodes
        if chosen_from and chosen_from.get(dotted(node.path)) == dotted(scores.path)
    }
    right = {format_path(node.path): node for node in walk(actual)}
    of_host = None if isinstance(tolerance, Mapping) else tolerance
    # A place on one side only is reported at the container, whose type or number of children
    # differs too.
    for path in left.keys() & right.keys():
        one, other = left[path], right[path]
        if one.kind != other.kind or (one.kind == "container" and not _same_container(one, other)):
            differences.append(Difference(path, _describe(one), _describe(other)))
        elif one.kind == "opaque":
            if one.value is other.value:
                unchecked.append(path)
            else:
                differences.append(Difference(path, f"a {_describe(one)}", _OPAQUE))
        elif one.kind == "tensor":
            num_compared += one.value.numel() > 0
            difference, size, ties, share = _compare_tensors(
                path, one.value, other.value, tolerance, scores_of.get(path)
            )
            differences += [] if difference is None else [difference]
            sizes.append(size)
            shares.append(share)
            num_ties += ties
        elif one.kind == "host":
            num_compared += one.value is not None
            if not same_host_value(one.value, other.value, of_host):
                differences.append(Difference(path, shown(one.value), shown(other.value)))
    order = {path: number for number, path in enumerate(left)}
    differences.sort(key=lambda difference: order[difference.path])
    return Comparison(
        tuple(differences),
        num_compared,
        tuple(sorted(unchecked)),
        largest_of(sizes),
        num_ties,
        largest_of(shares),
    )


def largest_of(sizes: Iterable[float]) -> float:
    """The largest; NaN if any is, which ``max`` alone would tell by their order."""
    each = list(sizes)
    return math.nan if any(map(math.isnan, each)) else max(each)


def _compare_tensors(
    path: str,
    expected: torch.Tensor,
    actual: torch.Tensor,
    tolerance: float | Mapping[torch.dtype, float] | None,
    scores: torch.Tensor | None,
) -> tuple[Difference | None, float, int, float]:
    """Return the difference, if it counts, the largest absolute one, counted or not, ties, and the
    share of a 16-bit tensor.

    Waits for a GPU once, unless something differs.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        difference = Difference(path, _describe_tensor(expected), _describe_tensor(actual))
        return difference, math.nan, 0, 0.0
    expected, actual = _resolved(expected), _resolved(actual).to(expected.device)
    whole = expected
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    # Almost always so where bits count. Within a tolerance less often, and a GPU answers by a wait.
    asks = tolerance is None or expected.device.type == "cpu"
    if not whole.numel() or (asks and torch.equal(as_bits(expected), as_bits(actual))):
        return None, 0.0, 0, 0.0
    differing = as_bits(expected) != as_bits(actual)
    # The 8-bit formats have no ``isnan`` of their own.
    left, right = (t if t.dtype.itemsize > 1 else _widened(t) for t in (expected, actual))
    differing &= (left == left) | (right == right)  # NaN is not equal to itself.
    relative = tolerance.get(whole.dtype) if isinstance(tolerance, Mapping) else None
    rest: list[torch.Tensor] = []
    if relative is not None and _is_short(whole):
        differences = _differences(expected, actual, differing)
        shares = _shares_of_rows(_widened(expected), differences)
        # In the place of ties, which floats have none of.
        rest = [differences.max().double(), torch.zeros_like(shares.sum()), shares.max()]
        differing &= ~(shares <= relative)  # True for NaN.
    elif (limit := _limit(whole, tolerance)) is not None:
        differences = _differences(expected, actual, differing)
        rest = [differences.max().double()]
        # A pair of infinities is equal bits; NaN against a number fails the comparison.
        differing &= ~(differences <= limit)
    elif scores is not None:
        ties = _ties(expected, actual, scores, tolerance) & differing
        differing &= ~ties
        rest = [ties.new_zeros((), dtype=torch.float64), ties.sum().double()]
    count = differing.sum()
    # Stacked, because each number of its own is a wait.
    numbers = torch.stack([count.double(), *rest]).tolist() if rest else [count.item()]
    num_differing, size, num_ties, share = [*numbers, 0.0, 0.0, 0.0][:4]
    if not num_differing:
        return None, size, int(num_ties), share
    # Of an empty index (a 0-d tensor) the first is ().
    first = tuple(int(i) for i in differing.nonzero()[0])
    size = size or _differences(expected, actual, differing).max().item()
    one, other = repr(expected[first].item()), repr(actual[first].item())
    difference = Difference(path, one, other, size, first, int(num_differing))
    return difference, size, int(num_ties), share


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, of which none is conjugate or negative by a bit of the tensor alone."""
    return tensor.detach().resolve_conj().resolve_neg()


def _differences(
    expected: torch.Tensor, actual: torch.Tensor, differing: torch.Tensor
) -> torch.Tensor:
    # Not picked by the mask, because to list the places costs more than the comparison.
    return torch.where(differing, (_widened(expected) - _widened(actual)).abs_(), 0.0)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """In a dtype that holds the difference of two elements. Very large int64 round in float64."""
    return tensor.float() if _is_short(tensor) else tensor.double()


def _is_short(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize <= 2


_ROW_SHARE = 3.0
"""How much further than a whole tensor one row of it may be off, relatively."""


def _shares_of_rows(expected: torch.Tensor, differences: torch.Tensor) -> torch.Tensor:
    """The relative tolerance that each row of a 16-bit result needs, by root mean squares: of the
    row, and of all.

    Not the largest difference, because that of millions of elements is far out in the tail: a deep
    model amplifies roundings, in some rows ten times as much as in others.
    """
    rows = (expected.shape[0], -1) if expected.dim() else (1, -1)
    # Norms, of equally many elements each: few passes over millions of elements.
    off_of_row, size_of_row = (
        torch.linalg.vector_norm(x.reshape(rows), dim=1, dtype=torch.float64)
        for x in (differences, expected.nan_to_num(0.0, 0.0, 0.0))
    )
    off, size = map(torch.linalg.vector_norm, (off_of_row, size_of_row))
    scale = _ROW_SHARE * torch.maximum(size_of_row, size / math.sqrt(rows[0]))
    shares = torch.maximum(off_of_row / scale, off / size)
    # What is equal needs none, also where all is zero.
    shares = torch.where(off == 0, 0.0, shares)
    return shares.view(-1, *[1] * (expected.dim() - 1)) if expected.dim() else shares[0]


def _limit(
    expected: torch.Tensor, tolerance: float | Mapping[torch.dtype, float] | None
) -> float | torch.Tensor | None:
    """The largest difference that does not count; None where bits have to be equal."""
    if not isinstance(tolerance, Mapping):
        return tolerance if expected.is_floating_point() else None
    relative = tolerance.get(expected.dtype)
    if relative is None or expected.numel() == 0:
        return None
    whole = torch.view_as_real(expected) if expected.is_complex() else expected
    whole = whole if whole.dtype.itemsize > 1 else _widened(whole)
    least, most = whole.nan_to_num(0.0, 0.0, 0.0).aminmax()
    return relative * torch.maximum(-least, most).double()


def _ties(
    expected: torch.Tensor,
    actual: torch.Tensor,
    scores: torch.Tensor,
    tolerance: float | Mapping[torch.dtype, float] | None,
) -> torch.Tensor:
    """Where two choices differ between elements of ``scores`` that are equal within tolerance."""
    limit = _limit(scores, tolerance)
    one_each = scores.dim() == expected.dim() + 1
    places = [choice.unsqueeze(-1) if one_each else choice for choice in (expected, actual)]
    valid = [(place >= 0) & (place < scores.shape[-1]) for place in places]
    left, right = (
        _widened(scores.gather(-1, place.clamp(0, scores.shape[-1] - 1).long())) for place in places
    )
    ties = ((left - right).abs() <= (0.0 if limit is None else limit)) & valid[0] & valid[1]
    return ties.squeeze(-1) if one_each else ties


def _same_container(one: Node, other: Node) -> bool:
    if type(one.value) is not type(other.value) or one.num_children != other.num_children:
        return False
    return not isinstance(one.value, dict) or one.value.keys() == other.value.keys()


def _describe(node: Node) -> str:
    if node.kind == "tensor":
        return _describe_tensor(node.value)
    if node.kind == "host":
        return shown(node.value)
    if isinstance(node.value, dict):
        return f"{type(node.value).__name__} of {sorted(map(str, node.value))}"
    if node.kind == "container":
        return f"{type(node.value).__name__} of {node.num_children}"
    return type(node.value).__name__


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"

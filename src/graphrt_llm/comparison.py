"""Whether two runs produced the same tokens, and which differences are ties.

A greedy choice between two tokens whose logits are closer than the dtype's tolerance may fall
either way when padding changes the order of a sum. Such a difference is a tie, counted and not
held against the run; the tokens after it follow from another choice and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

RequestId = TypeVar("RequestId", str, int)


class Difference(NamedTuple):
    """The first token at which a request's runs part, and the gap that does not excuse it."""

    request_id: str | int
    position: int
    gap: float


class TokenComparison(NamedTuple):
    """What ``compare_tokens`` found."""

    identical: bool
    """True if nothing differs but ties."""
    ties: int
    differences: tuple[Difference, ...]


def compare_tokens(
    reference: Mapping[RequestId, Sequence[int]],
    candidate: Mapping[RequestId, Sequence[int]],
    gap_lookup: Callable[[RequestId, int], float],
    tolerance: float,
) -> TokenComparison:
    """Compare the output tokens of two runs, request by request.

    ``gap_lookup(request_id, index)`` gives the reference's top-2 logit gap, computed eagerly, where
    the token ``index`` was chosen; it is asked at most once for each request. A gap below
    ``tolerance`` makes the difference a tie. A request that is missing in one run, or whose one
    output only continues the other, differs with an infinite gap.
    """
    ties, differences = 0, []
    for request_id in sorted(reference.keys() | candidate.keys()):
        here, there = reference.get(request_id), candidate.get(request_id)
        if here is None or there is None:
            differences.append(Difference(request_id, 0, float("inf")))
            continue
        pairs = zip(here, there, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if index is not None:
            gap = gap_lookup(request_id, index)
            if gap < tolerance:
                ties += 1
            else:
                differences.append(Difference(request_id, index, gap))
        elif len(here) != len(there):
            shorter = min(len(here), len(there))
            differences.append(Difference(request_id, shorter, float("inf")))
    return TokenComparison(not differences, ties, tuple(differences))

"""Whether two runs produced the same tokens, and which differences are ties.

If the two largest logits differ by less than the dtype's tolerance, padding, which changes the
order of sums, may change the greedy choice. Such a difference is a tie: it is counted, and the runs
still count as identical. The tokens after it follow from another choice and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

RequestId = TypeVar("RequestId", str, int)


class Difference(NamedTuple):
    """The first output token in which a request's runs differ, and the margin of its logits."""

    request_id: str | int
    position: int
    margin: float


class TokenComparison(NamedTuple):
    """The result of ``compare_tokens``.

    ``identical``: True if nothing differs but ties.
    ``ties``: Differences between equally likely tokens.
    ``differences``: All others.
    """

    identical: bool
    ties: int
    differences: tuple[Difference, ...]


def compare_tokens(
    reference: Mapping[RequestId, Sequence[int]],
    candidate: Mapping[RequestId, Sequence[int]],
    margin_of: Callable[[RequestId, int], float],
    tolerance: float,
) -> TokenComparison:
    """Compare the output tokens of two runs, request by request.

    ``margin_of(request_id, position)``: by how much the reference's two largest logits differed,
    computed eagerly, where it chose that output token; called at most once for each request. A
    margin below ``tolerance`` makes the difference a tie. A request that is missing in one run, or
    that has more tokens in one of them, differs with an infinite margin.
    """
    ties, differences = 0, []
    for request_id in sorted(reference.keys() | candidate.keys()):
        here, there = reference.get(request_id), candidate.get(request_id)
        if here is None or there is None:
            differences.append(Difference(request_id, 0, float("inf")))
            continue
        pairs = zip(here, there, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if position is not None:
            margin = margin_of(request_id, position)
            if margin < tolerance:
                ties += 1
            else:
                differences.append(Difference(request_id, position, margin))
        elif len(here) != len(there):
            shorter = min(len(here), len(there))
            differences.append(Difference(request_id, shorter, float("inf")))
    return TokenComparison(not differences, ties, tuple(differences))

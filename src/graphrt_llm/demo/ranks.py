"""What each rank of a demo found: gathered by the first one, which reports it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from graphrt import Exchange, agree_least
from graphrt.report import summarize_runs
from graphrt_llm.demo.compare import Outcome


def are_identical(outcomes: Sequence[Outcome]) -> bool:
    """True if every policy produced the tokens of the first, except for ties."""
    return all(outcome.comparison.identical for outcome in outcomes)


def of_rank(rank: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What one rank found: its requests, whether policies agree, its modes and tokens."""
    summaries = summarize_runs([outcome.run for outcome in outcomes])
    tokens = outcomes[0].tokens
    return {
        "rank": rank,
        "num_requests": len(tokens),
        "num_tokens": sum(map(len, tokens.values())),
        "tokens_identical": are_identical(outcomes),
        "modes": {name: summary.as_dict() for name, summary in summaries.items()},
        "tokens": {str(request): list(each) for request, each in tokens.items()},
    }


def gather(ranks: Exchange, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank found, by rank; they wait for one another."""
    name = f"demo {ranks.num_rounds}"
    ranks.post(f"{name} of {ranks.rank}", json.dumps(own))
    agree_least(ranks, [])
    return [json.loads(ranks.read(f"{name} of {rank}") or "{}") for rank in range(ranks.world)]


def all_identical(parts: Sequence[Mapping[str, Any]]) -> bool:
    """True if on every rank every policy produced the tokens of the first, and if ranks that
    served the same request produced the same."""
    first = {request: each for part in reversed(parts) for request, each in part["tokens"].items()}
    return all(
        part["tokens_identical"] and part["tokens"].items() <= first.items() for part in parts
    )


def tokens_digest(parts: Sequence[Mapping[str, Any]]) -> str:
    """A hash of all output tokens by request: the same for any number of ranks."""
    tokens = {int(request): each for part in parts for request, each in part["tokens"].items()}
    return sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()[:16]


def in_words(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One sentence for each rank."""
    for part in parts:
        yield (
            f"Rank {part['rank']} served {part['num_requests']:,} requests, "
            f"{part['num_tokens']:,} tokens: {'the same' if part['tokens_identical'] else 'OTHERS'}"
            " under every policy."
        )
    if len(parts) > 1:
        yield "What follows is of rank 0."

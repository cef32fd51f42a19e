"""The generator: the published statistics of the Azure 2023 conversation trace, and its seed."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from graphrt.errors import TraceError
from graphrt.planner import generate_azure_like, read_trace

NUM_REQUESTS = 19_366
SECONDS = 3_502

# Published: (mean, median, p99, maximum).
PROMPT = (1155, 1020, 4142, 14_050)
OUTPUT = (211, 129, 601, 1_000)


def statistics_of(values: list[int]) -> tuple[float, float, float, int]:
    cuts = statistics.quantiles(values, n=100)
    return statistics.fmean(values), cuts[49], cuts[98], max(values)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("field", "published"), [("num_prompt_tokens", PROMPT), ("num_output_tokens", OUTPUT)]
)
def test_lengths_follow_the_published_statistics(
    seed: int, field: str, published: tuple[int, int, int, int]
) -> None:
    values = [getattr(request, field) for request in generate_azure_like(NUM_REQUESTS, seed)]
    mean, median, p99, largest = statistics_of(values)
    assert mean == pytest.approx(published[0], rel=0.04)
    assert median == pytest.approx(published[1], rel=0.05)
    # One percent of 19,366 is few: its own spread is 4 %.
    assert p99 == pytest.approx(published[2], rel=0.12)
    assert 0.8 * published[3] <= largest <= published[3]
    assert min(values) >= 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_arrivals_follow_the_published_rate(seed: int) -> None:
    arrivals = [request.arrival_s for request in generate_azure_like(NUM_REQUESTS, seed)]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(SECONDS, rel=0.03)


def test_the_seed_decides_and_a_shorter_trace_is_a_beginning() -> None:
    assert generate_azure_like(50, 7) == generate_azure_like(50, 7)
    assert generate_azure_like(50, 7) != generate_azure_like(50, 8)
    assert generate_azure_like(50, 7)[:20] == generate_azure_like(20, 7)


def test_at_least_one_request_is_asked_for() -> None:
    with pytest.raises(TraceError):
        generate_azure_like(0, 0)


def test_the_real_trace_has_the_statistics_the_generator_follows(shared: Path) -> None:
    requests = read_trace(shared / "traces/azure2023/AzureLLMInferenceTrace_conv.csv")
    for field, published in (("num_prompt_tokens", PROMPT), ("num_output_tokens", OUTPUT)):
        found = statistics_of([getattr(request, field) for request in requests])
        assert found == pytest.approx(published, rel=0.01)

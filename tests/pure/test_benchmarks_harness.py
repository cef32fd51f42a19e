"""What the harness does with samples: no clock is read by these tests."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable

import pytest
from benchmarks.harness import (
    Row,
    as_json,
    difference,
    percentile,
    quiet,
    ratio,
    rounds,
    row,
    time_host,
    time_launch,
    time_wall,
)
from hypothesis import given, strategies as st

SAMPLES = {"new": [2.0, 6.0, 9.0], "old": [1.0, 2.0, 3.0]}
WHERE = {"device": "a device", "torch": "2.0", "commit": "abc"}


def make(value: float, target: float, higher_is_better: bool = False) -> Row:
    return row(
        "G0",
        [value],
        target=target,
        unit="ratio",
        samples={},
        higher_is_better=higher_is_better,
    )


def test_ratios_and_differences_are_taken_block_by_block() -> None:
    assert ratio(SAMPLES, "new", "old") == [2.0, 3.0, 3.0]
    assert difference(SAMPLES, "new", "old") == [1.0, 4.0, 6.0]


def test_arms_of_unequal_length_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        ratio({"a": [1.0], "b": [1.0, 2.0]}, "a", "b")


def test_a_row_tells_median_extremes_config_and_samples() -> None:
    made = row("G0-x", [3.0, 1.0, 2.0], target=2.5, unit="ms", samples=SAMPLES, layers=4)
    assert (made.value, made.spread) == (2.0, (1.0, 3.0))
    assert (made.config, made.samples) == ({"layers": 4}, SAMPLES)


@pytest.mark.parametrize(
    ("value", "higher_is_better", "is_reached"),
    [
        (0.9, False, True),
        (1.0, False, True),
        (1.1, False, False),
        (0.9, True, False),
        (1.0, True, True),
    ],
)
def test_a_target_is_a_bound_on_its_side(
    value: float, higher_is_better: bool, is_reached: bool
) -> None:
    assert make(value, 1.0, higher_is_better).is_reached is is_reached


def test_json_has_the_fields_of_the_contract_and_nothing_is_lost() -> None:
    made = row("G0", [1.5], target=2.0, unit="ratio", samples=SAMPLES, sizes=(1, 2))
    (read,) = json.loads(as_json([made], WHERE))
    assert read == {
        "metric": "G0",
        "value": 1.5,
        "target": 2.0,
        "unit": "ratio",
        "higher_is_better": False,
        "spread": [1.5, 1.5],
        "config": {"sizes": [1, 2]},
        "samples": SAMPLES,
        **WHERE,
    }


def test_cpu_case_names_the_host_as_its_device() -> None:
    where = {**WHERE, "host": "a CPU"}
    rows = [row(m, [1.0], target=1, unit="us", samples={}) for m in ("C-wrapper-step", "G1")]
    devices = [item["device"] for item in json.loads(as_json(rows, where))]
    assert devices == ["a CPU", "a device"]


def test_no_rows_are_an_empty_list() -> None:
    assert json.loads(as_json([], WHERE)) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0.001, 1))
def test_percentile_is_the_smallest_sufficient_sample(values: list[float], share: float) -> None:
    found = percentile(values, share)

    def share_up_to(bound: float) -> float:
        return sum(value <= bound for value in values) / len(values)

    assert found in values
    assert share_up_to(found) >= share - 1e-9
    assert all(share_up_to(value) < share for value in values if value < found)


def test_the_percentiles_of_ten_thousand_steps() -> None:
    values = [float(number) for number in range(10_000, 0, -1)]
    assert percentile(values, 0.5) == 5000
    assert percentile(values, 0.999) == 9990
    assert percentile(values, 1.0) == 10_000


def test_every_second_block_runs_backwards() -> None:
    arms = {"a": int, "b": int, "c": int}
    assert "".join(name for name, _ in rounds(arms, 3)) == "abccbaabc"


def test_timers_interleave_arms_and_return_a_figure_a_block() -> None:
    calls: list[str] = []
    arms = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    wait = lambda: calls.append("wait")  # noqa: E731
    for samples in (
        time_host(arms, blocks=3, block_ms=0.01),
        time_launch(arms, launches=2, bursts=2, blocks=3, synchronize=wait),
        time_wall(arms, blocks=3, repeats=2, warmup=1, synchronize=wait),
    ):
        assert {name: len(figures) for name, figures in samples.items()} == {"a": 3, "b": 3}
        assert all(figure > 0 for figures in samples.values() for figure in figures)


def test_a_launch_burst_begins_with_an_idle_device() -> None:
    calls: list[str] = []
    arms = {"a": lambda: calls.append("a")}
    time_launch(arms, launches=2, bursts=2, blocks=1, synchronize=lambda: calls.append("|"))
    assert "".join(calls) == "aa|" + "|aa|aa|"


@pytest.mark.parametrize(("each", "expected"), [(False, "^|aa|"), (True, "^|a|a||")])
def test_a_wall_block_ends_when_the_device_is_idle(each: bool, expected: str) -> None:
    calls: list[str] = []
    time_wall(
        {"a": lambda: calls.append("a")},
        blocks=1,
        repeats=2,
        warmup=1,
        synchronize=lambda: calls.append("|"),
        each=each,
        before=lambda: calls.append("^"),
    )
    assert "".join(calls).endswith(expected)


class Clock:
    """Time that passes only where an arm says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def takes(self, *nanoseconds: int) -> Callable[[], None]:
        """An arm that takes these times, over and over."""
        times = itertools.cycle(nanoseconds)

        def arm() -> None:
            self.now += next(times)

        return arm


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("benchmarks.harness.perf_counter_ns", clock)
    return clock


def test_host_time_is_per_call_and_per_repetition(clock: Clock) -> None:
    arms = {"once": clock.takes(1000), "tenfold": clock.takes(1000)}
    samples = time_host(arms, blocks=2, block_ms=0.1, per_call={"tenfold": 10})
    assert samples == {"once": [1000, 1000], "tenfold": [100, 100]}


def test_the_fastest_slice_of_a_block_counts(clock: Clock) -> None:
    # One call a slice; after 3 calls to calibrate, every fifth is not disturbed.
    arm = clock.takes(900, 900, 900, *(900, 900, 100, 900, 900) * 2)
    assert time_host({"arm": arm}, blocks=2, block_ms=0.0001) == {"arm": [100, 100]}


def test_launch_time_leaves_waiting_out(clock: Clock) -> None:
    wait = clock.takes(1_000_000)
    samples = time_launch({"arm": clock.takes(70)}, launches=4, blocks=2, synchronize=wait)
    assert samples == {"arm": [70, 70]}


def test_wall_time_holds_the_waiting_but_not_what_comes_before(clock: Clock) -> None:
    arms = {"arm": clock.takes(1_000_000)}
    for each, expected in ((False, 1 + 4 / 2), (True, 1 + 4 + 4 / 2)):
        samples = time_wall(
            arms,
            blocks=1,
            repeats=2,
            synchronize=clock.takes(4_000_000),
            each=each,
            before=clock.takes(9_000_000),
        )
        assert samples == {"arm": [expected]}


def test_quiet_leaves_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    with quiet():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with quiet():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

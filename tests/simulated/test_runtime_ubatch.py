"""A runtime whose steps are split into micro-batches: which, by which program, and what is said."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.lab import FULL, NONE

from graphrt import (
    BufferSpec,
    Example,
    OutputSpec,
    Padding,
    Reason,
    Runtime,
    RuntimeConfig,
    StepMetrics,
    break_point,
    ubatch,
)
from graphrt.batch import UBatchReason
from graphrt.errors import BatchError, ConfigError, VerificationError
from graphrt.events import RanEager, Replayed
from graphrt.parallel import RankVote, SplitRules, agree, settle
from graphrt.runner import CUDAGraphRunner
from graphrt.ubatch import wants_split

UB = UBatchReason

WIDTH = 4
SPLIT = {"num_ubatches": 2, "decode_token_threshold": 4, "prefill_token_threshold": 12}


class Model(torch.nn.Module):
    """One row for each token, one for each request, from values that point at both."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.is_wrong = False

    def forward(
        self, x: torch.Tensor, owners: torch.Tensor, last: torch.Tensor, scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        for layer in range(2):
            send = torch.tanh(x @ self.weight) * scales[owners][:, None]
            received = torch.empty_like(send)
            with ubatch.communication(f"layer{layer}", send):
                received.copy_(send)
            x = self.middle(received)
        if self.is_wrong and ubatch.index() == 1:
            x = x.flip(0) if threading.current_thread() is not threading.main_thread() else x
        return {"rows": x, "last": x[last]}

    @break_point
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


INPUTS = (
    BufferSpec("x", ("tokens", WIDTH), torch.float32),
    BufferSpec("owners", ("tokens",), torch.int64, Padding.fill(0), rebase="requests"),
    BufferSpec("last", ("requests",), torch.int64, Padding.fill(0), rebase="tokens"),
    BufferSpec("scales", ("requests",), torch.float32),
)
OUTPUTS = OutputSpec({"rows": "tokens", "last": "requests"})


def lens_of(num_tokens: int, num_reqs: int) -> list[int]:
    return [1 + (num_tokens - num_reqs)] + [1] * (num_reqs - 1)


def values(lens: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lens)
    return {
        "x": torch.randn(sum(lens), WIDTH, generator=generator),
        "owners": torch.repeat_interleave(torch.arange(len(lens)), lengths),
        "last": lengths.cumsum(0) - 1,
        "scales": torch.rand(len(lens), generator=generator) + 0.5,
    }


def examples(sizes: Mapping[str, int], seed: int) -> Example:
    return Example(values(lens_of(sizes["tokens"], sizes["requests"]), seed))


def make(model: Model, events: list[Any], **config: Any) -> Runtime:
    options: dict[str, Any] = {
        "compilation": {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": (2, 4, 8, 16),
        },
        "max_num_seqs": 16,
        "max_num_batched_tokens": 32,
        "ubatch": SPLIT,
    }
    return Runtime(
        model,
        inputs=INPUTS,
        outputs=OUTPUTS,
        examples=examples,
        device="simulated",
        config=RuntimeConfig(**{**options, **config}),
        observer=events.append,
        verify_tolerance=1e-6,
    )


class Served:
    def __init__(self, **config: Any) -> None:
        self.model, self.events = Model(), list[Any]()
        self.runtime = make(self.model, self.events, **config)

    def step(self, lens: list[int], seed: int = 3, **more: Any) -> Any:
        found = self.runtime.step(
            values(lens, seed), num_tokens=sum(lens), num_reqs=len(lens), **more
        )
        with torch.no_grad():
            expected = self.model(**values(lens, seed))
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
        return self.events[-1]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    threads = threading.active_count()
    served = Served()
    served.runtime.capture()
    yield served
    served.runtime.close()
    assert threading.active_count() == threads


def test_both_twins_of_a_key_are_captured_and_checked(served: Served) -> None:
    report = served.runtime.report()
    assert not report.missing
    split = [graph for graph in report.graphs if graph.key.num_ubatches == 2]
    assert sorted(graph.key.num_tokens for graph in split) == [4, 8, 16]
    assert served.runtime.explain(split[0].key)


@pytest.mark.parametrize(
    ("num_tokens", "num_ubatches", "padded", "why"),
    [
        (16, 2, 16, None),
        (9, 2, 16, None),
        (8, 2, 8, None),
        (5, 2, 8, None),
        (3, 1, 4, UBatchReason.BELOW_THRESHOLD),
        (4, 2, 4, None),
    ],
)
def test_uniform_step_replays_the_split_program_where_it_pays(
    served: Served, num_tokens: int, num_ubatches: int, padded: int, why: Any
) -> None:
    event = served.step([1] * num_tokens)
    assert isinstance(event, Replayed)
    assert event.mode is FULL
    assert (event.num_ubatches, event.num_padded_tokens) == (num_ubatches, padded)
    assert event.ubatch_reason is why


def test_a_runtime_alone_decides_as_ranks_would(served: Served) -> None:
    plan, rules = served.runtime.plan, SplitRules.of(served.runtime.plan)
    dispatch = served.runtime.dispatcher.dispatch
    for uniform in (True, False):
        for num_tokens in range(1, 17 if uniform else 33):
            lens = [1] * num_tokens if uniform else [num_tokens]
            event = served.step(lens, query_lens=lens, uniform=uniform)
            found = dispatch(num_tokens, uniform)
            vote = RankVote(
                rank=0,
                num_tokens_unpadded=num_tokens,
                num_tokens_padded=found.descriptor.num_tokens,
                runtime_mode=found.mode,
                uniform=uniform,
                miss_reason=found.reason,
                ubatch_reason=wants_split(num_tokens, uniform, plan.ubatch),
            )
            settled = settle(agree([vote], rules), vote, dispatch, rules)
            assert settled is not None
            why = None if settled.unsplit_because is None else settled.unsplit_because[0]
            assert (event.num_ubatches, event.ubatch_reason) == (
                settled.decision.descriptor.num_ubatches,
                why,
            )


def test_split_with_an_empty_last_slice_is_called_off(served: Served) -> None:
    """17 to 32 tokens are no batch of this plan; 8 of 16 would leave the second slice empty."""
    sizes = (4, 16)
    other = Served(
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    )
    other.runtime.capture()
    event = other.step([1] * 8)
    assert event.ubatch_reason is UBatchReason.LAST_SLICE_EMPTY
    assert (event.num_ubatches, event.num_padded_tokens) == (1, 16)
    assert other.step([1] * 9).num_ubatches == 2
    other.runtime.close()


@pytest.mark.parametrize("lens", [[10, 3, 7], [20], [1] * 7 + [13], [6, 6, 6, 6]])
def test_large_mixed_step_is_cut_eagerly(served: Served, lens: list[int]) -> None:
    event = served.step(lens, query_lens=lens)
    assert isinstance(event, RanEager)
    assert (event.num_ubatches, event.ubatch_reason) == (2, None)
    event = served.step(lens)
    assert (event.num_ubatches, event.ubatch_reason) == (1, UBatchReason.NO_FULL_GRAPH)
    kinds = ([20.0], ["20"], itertools.repeat(1), [None], torch.ones(1, 20))
    for wrong in ([1, 2], [*lens, 0], [*lens, 5], 20, *kinds):
        with pytest.raises(BatchError, match="query_lens"):
            served.step(lens, query_lens=wrong)
    with pytest.raises(BatchError, match="unsplit"):
        served.step(lens, query_lens=lens, unsplit=True)
    event = served.step(lens, query_lens=torch.tensor(lens))
    assert event.num_ubatches == 2


def test_small_mixed_step_is_not_cut(served: Served) -> None:
    event = served.step([2, 3], query_lens=[2, 3])
    assert event.ubatch_reason is UBatchReason.BELOW_THRESHOLD
    event = served.step([1] * 8, unsplit=UBatchReason.REQUEST_DEPENDENCY)
    assert event.ubatch_reason is UBatchReason.REQUEST_DEPENDENCY
    assert (event.mode, event.num_ubatches) == (FULL, 1)


def test_eager_cuts_can_be_forbidden() -> None:
    other = Served(ubatch={**SPLIT, "allow_eager": False})
    other.runtime.capture()
    event = other.step([20], query_lens=[20])
    assert event.ubatch_reason is UBatchReason.NO_FULL_GRAPH
    other.runtime.close()


def test_strict_runtime_takes_no_unsplit_step_for_a_miss() -> None:
    other = Served(on_miss="strict")
    other.runtime.capture()
    assert other.step([1] * 3).ubatch_reason is UBatchReason.BELOW_THRESHOLD
    assert isinstance(other.step([6, 8], query_lens=[6, 8]), Replayed)
    other.runtime.close()


def test_uncaptured_split_is_noted_and_captured_next() -> None:
    other = Served()
    event = other.step([1] * 8)
    assert isinstance(event, RanEager)
    assert event.reason is Reason.NOT_CAPTURED_YET
    assert event.ubatch_reason is UBatchReason.NO_FULL_GRAPH
    other.runtime.capture_next(2)
    captured = {graph.key.num_ubatches for graph in other.runtime.report().graphs}
    assert captured == {1, 2}
    assert other.step([1] * 8).num_ubatches == 2
    other.runtime.close()


def test_replaced_weight_stops_the_split_program_too() -> None:
    other = Served()
    other.runtime.capture()
    other.model.weight = torch.nn.Parameter(other.model.weight.detach() * 2)
    event = other.step([1] * 8)
    assert isinstance(event, RanEager)
    for _ in range(2):
        assert event.reason is Reason.INVALIDATED
        assert (event.num_ubatches, event.ubatch_reason) == (1, UB.NO_FULL_GRAPH)
        event = other.step([1] * 8)
    other.runtime.close()


def test_overlap_that_changes_the_result_is_never_published() -> None:
    other = Served()
    other.model.is_wrong = True
    with pytest.raises(VerificationError):
        other.runtime.capture()
    found = {graph.key.num_ubatches for graph in other.runtime.report().graphs}
    assert 1 in found
    assert {key.num_ubatches for _, key in other.runtime.report().missing} == {2}
    other.runtime.close()


@pytest.mark.parametrize("sizes", [(4, 8), (8,)])
def test_input_that_is_not_rebased_is_found(sizes: tuple[int, ...]) -> None:
    """Micro-batches agree with each other then, and not with the whole batch."""
    inputs = [replace(spec, rebase=None) for spec in INPUTS]

    def places(found: Mapping[str, int], seed: int) -> Example:
        made = values([1] * found["requests"], seed)
        # In range for each half too, so that nothing fails.
        return Example({**made, "last": made["last"] % 2, "owners": made["owners"] % 2})

    runtime = Runtime(
        Model(),
        inputs=inputs,
        outputs=OUTPUTS,
        examples=places,
        device="simulated",
        config=RuntimeConfig(
            compilation={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
            max_num_seqs=8,
            max_num_batched_tokens=16,
            ubatch={**SPLIT, "decode_token_threshold": 8},
        ),
        verify_tolerance=1e-6,
    )
    with pytest.raises(VerificationError, match="num_ubatches=2"):
        runtime.capture()
    runtime.close()


def test_metrics_count_splits_and_why_not() -> None:
    metrics = StepMetrics()
    runtime = Runtime(
        Model(),
        inputs=INPUTS,
        outputs=OUTPUTS,
        examples=examples,
        device="simulated",
        config=RuntimeConfig(
            compilation={"cudagraph_mode": "NONE"},
            max_num_seqs=16,
            max_num_batched_tokens=32,
            ubatch=SPLIT,
        ),
        observer=metrics,
    )
    for lens in ([20], [20], [3]):
        runtime.step(values(lens), num_tokens=sum(lens), num_reqs=1, query_lens=lens)
    runtime.close()
    found = metrics.snapshot()
    assert found.split_steps == 2
    assert found.unsplit_reasons == {UBatchReason.BELOW_THRESHOLD: 1}
    assert found.merge(found).split_steps == 4
    assert found.miss_reasons() == {Reason.MODE_NONE: 3}


def test_size_that_is_not_faster_in_micro_batches_is_not_split(monkeypatch: Any) -> None:
    module = sys.modules["graphrt.runtime.splitting"]
    monkeypatch.setattr(module, "_TIMED_DEVICES", ("simulated",))
    timed = []

    def time_replays(runner: Any, keys: Any) -> list[int]:
        times = CUDAGraphRunner.measured(runner, keys)  # type: ignore[attr-defined]
        assert all(0 < each < 10**9 for each in times)
        timed.append([key for _, key in keys])
        return [3_000_000, 2_000_000 if keys[0][1].num_tokens == 8 else 4_000_000]

    monkeypatch.setattr(CUDAGraphRunner, "measured", CUDAGraphRunner.time_replays, raising=False)
    monkeypatch.setattr(CUDAGraphRunner, "time_replays", time_replays)
    served = Served()
    served.runtime.capture()
    served.runtime.capture()
    assert [split.num_tokens for split, _ in timed] == [16, 8, 4]
    assert all(split == replace(whole, num_ubatches=2) for split, whole in timed)
    why = {n: served.step([1] * n).ubatch_reason for n in (16, 8, 7, 4)}
    assert why == {16: None, 8: UB.NOT_PROFITABLE, 7: UB.NOT_PROFITABLE, 4: None}
    report = served.runtime.report()
    assert {key.num_tokens: ms for key, ms in report.split_ms.items()} == {
        16: (3.0, 4.0),
        8: (3.0, 2.0),
        4: (3.0, 4.0),
    }
    assert "2 sizes are split, 1 are not" in str(report)
    timed.clear()
    eight = next(key for key in report.split_ms if key.num_tokens == 8)
    served.runtime.withdraw([(FULL, replace(eight, num_ubatches=1))], "other kernels")
    served.runtime.capture()
    assert [split for split, _ in timed] == [eight]
    assert served.step([20], query_lens=[20]).ubatch_reason is UB.NOT_PROFITABLE  # Eager.
    served.runtime.close()
    other = Served(ubatch={**SPLIT, "auto_off": False})
    other.runtime.capture()
    assert len(timed) == 1
    assert other.step([20], query_lens=[20]).num_ubatches == 2
    assert other.step([1] * 8).ubatch_reason is None
    other.runtime.close()


def test_compiled_models_are_not_split_yet() -> None:
    config = RuntimeConfig(
        compilation={"level": 3, "splitting_ops": ("aten.mm",)}, max_num_seqs=16, ubatch=SPLIT
    )
    with pytest.raises(ConfigError, match="level 3"):
        Runtime(Model(), inputs=INPUTS, outputs=OUTPUTS, device="simulated", config=config)


def test_inputs_that_depend_on_the_key_are_refused() -> None:
    with pytest.raises(ConfigError, match="splits steps"):
        Runtime(
            Model(),
            inputs=lambda key: INPUTS,
            outputs=OUTPUTS,
            device="simulated",
            config=RuntimeConfig(max_num_seqs=64, ubatch={**SPLIT, "num_ubatches": 2}),
        )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 99))
def test_any_batch_gives_what_the_model_gives(served: Served, lens: list[int], seed: int) -> None:
    lens = lens[: max(1, 32 // max(lens))][:16]
    served.step(lens, seed, query_lens=lens)


def test_sampled_comparison_runs_the_slices_one_by_one() -> None:
    other = Served(verify_every=1)
    other.runtime.capture()
    for seed in range(4):
        assert other.step([1] * 7, seed).num_ubatches == 2
    assert other.runtime.last_decision is not None
    assert other.runtime.last_decision.mode is not NONE
    other.runtime.close()

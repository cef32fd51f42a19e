"""Steps that are cut eagerly are compared with the whole batch before anybody trusts them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.lab import NONE

from graphrt import (
    BufferSpec,
    OutputSpec,
    Padding,
    Runtime,
    RuntimeConfig,
    StepMetrics,
    TensorStateGuard,
    get_forward_context,
    ubatch,
)
from graphrt.batch import UBatchReason
from graphrt.errors import UnverifiedWarning
from graphrt.events import CaptureFailed, RanEager, Verified

WIDTH, SLOTS = 4, 64
FAILED = UBatchReason.SPLIT_FAILED

Rows = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """Two layers that communicate; ``mix`` is applied to the rows between them."""

    def __init__(self, mix: Callable[..., torch.Tensor] = lambda x, **_: x) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.cache = torch.zeros(SLOTS, WIDTH)
        self.mix, self.calls = mix, 0

    def forward(
        self,
        x: torch.Tensor,
        owners: torch.Tensor,
        last: torch.Tensor,
        scales: torch.Tensor,
        slots: torch.Tensor,
    ) -> Rows:
        self.calls += 1
        for layer in range(2):
            send = torch.tanh(x @ self.weight) * scales[owners][:, None]
            received = torch.empty_like(send)
            with ubatch.communication(f"layer{layer}", send):
                received.copy_(send)
            x = self.mix(received, owners=owners, scales=scales) if layer == 0 else received
        self.cache.index_copy_(0, slots, x)
        return {"rows": x, "last": x[last]}


INPUTS = (
    BufferSpec("x", ("tokens", WIDTH), torch.float32),
    BufferSpec("owners", ("tokens",), torch.int64, Padding.fill(0), rebase="requests"),
    BufferSpec("last", ("requests",), torch.int64, Padding.fill(0), rebase="tokens"),
    BufferSpec("scales", ("requests",), torch.float32),
    BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(SLOTS - 1)),
)


def values(lens: Sequence[int], seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    lengths, num_tokens = torch.tensor(lens), sum(lens)
    return {
        "x": torch.randn(num_tokens, WIDTH, generator=generator),
        "owners": torch.repeat_interleave(torch.arange(len(lens)), lengths),
        "last": lengths.cumsum(0) - 1,
        "scales": torch.rand(len(lens), generator=generator) + 0.5,
        "slots": torch.randperm(SLOTS - 1, generator=generator)[:num_tokens],
    }


class Served:
    """A runtime without graphs, and an equal model that runs each batch whole."""

    def __init__(self, make: Callable[[], Model] = Model, **options: Any) -> None:
        self.model, self.alone, self.events = make(), make(), list[Any]()
        config: dict[str, Any] = {
            "compilation": {"cudagraph_mode": "NONE"},
            "max_num_seqs": 16,
            "max_num_batched_tokens": 48,
            "ubatch": {
                "num_ubatches": options.pop("num_ubatches", 2),
                "decode_token_threshold": 4,
                "prefill_token_threshold": 8,
            },
            **options.pop("config", {}),
        }
        options.setdefault("may_overwrite", {self.model.cache: "slots"})
        self.runtime = Runtime(
            self.model,
            inputs=INPUTS,
            outputs=OutputSpec(
                {"rows": "tokens", "last": "requests"}, options.pop("policy", "clone")
            ),
            device="simulated",
            config=RuntimeConfig(**config),
            **{"observer": self.events.append, **options},
        )

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.runtime.close()

    def step(self, lens: Sequence[int], seed: int = 3) -> RanEager:
        """Run a batch; its rows and the cache must be those of the whole batch."""
        found = self.runtime.step(values(lens, seed), query_lens=lens, uniform=False)
        with torch.no_grad():
            expected = self.alone(**values(lens, seed))
        for name, rows in expected.items():
            torch.testing.assert_close(found[name], rows, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(self.model.cache, self.alone.cache, rtol=1e-4, atol=1e-5)
        event = self.events[-1]
        assert isinstance(event, RanEager)
        return event

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def rank(x: torch.Tensor, scales: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    return x * (1 + scales.argsort().argsort()[owners][:, None].to(x.dtype))


def attention(x: torch.Tensor, owners: torch.Tensor, **_: Any) -> torch.Tensor:
    """Of each token to the others of its request in this step: whole requests do not mix."""
    is_own = owners[:, None] == owners[None, :]
    return (x @ x.T).masked_fill(~is_own, float("-inf")).softmax(-1) @ x


MIXING: dict[str, Callable[..., torch.Tensor]] = {
    "mean": lambda x, **_: x - x.mean(0),
    "softmax": lambda x, **_: x.softmax(0),
    "first row": lambda x, **_: x + x[:1],
    "last row": lambda x, **_: x + x[-1:],
    "number of rows": lambda x, **_: x * x.shape[0],
    "cumulative sum": lambda x, **_: x.cumsum(0),
    "largest": lambda x, **_: x / x.abs().amax(),
    "rank": rank,
    "softmax of requests": lambda x, scales, owners: x * scales.softmax(0)[owners][:, None],
    "order": lambda x, **_: x.sort(0).values,
}
ALONE: dict[str, Callable[..., torch.Tensor]] = {
    "rows": lambda x, **_: x.softmax(-1),
    "norm": lambda x, **_: torch.nn.functional.layer_norm(x, (WIDTH,)),
    "scale": lambda x, scales, owners: x / scales[owners][:, None],
}

LENS = st.lists(st.integers(1, 12), min_size=1, max_size=8).filter(lambda lens: sum(lens) <= 48)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(MIXING)),
    st.lists(LENS, min_size=1, max_size=4),
    st.integers(2, 3),
    st.integers(0, 99),
)
def test_cut_steps_of_a_model_that_mixes_give_the_rows_of_the_whole_batch(
    name: str, batches: list[list[int]], num_ubatches: int, seed: int
) -> None:
    with Served(lambda: Model(MIXING[name]), num_ubatches=num_ubatches) as served:
        for number, lens in enumerate(batches):
            served.step(lens, seed + number)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(ALONE)),
    st.lists(LENS, min_size=1, max_size=4),
    st.integers(2, 3),
    st.integers(0, 99),
)
def test_cut_steps_of_a_model_that_does_not_mix_go_on(
    name: str, batches: list[list[int]], num_ubatches: int, seed: int
) -> None:
    with Served(lambda: Model(ALONE[name]), num_ubatches=num_ubatches) as served:
        for number, lens in enumerate(batches):
            event = served.step(lens, seed + number)
            assert event.num_ubatches == (num_ubatches if sum(lens) >= 8 else 1)
        assert not served.of(CaptureFailed)
        assert all(event.equal for event in served.of(Verified))


@pytest.mark.parametrize("name", sorted(MIXING))
def test_model_that_mixes_is_not_split_again_and_says_why(name: str) -> None:
    with Served(lambda: Model(MIXING[name])) as served:
        for seed in range(3):
            event = served.step([5, 3, 4], seed)
            assert (event.num_ubatches, event.ubatch_reason) == (1, FAILED)
        (compared,), (failed,) = served.of(Verified), served.of(CaptureFailed)
        assert (compared.mode, compared.key.num_ubatches, compared.equal) == (NONE, 2, False)
        assert (failed.mode, failed.key, failed.error) == (
            NONE,
            compared.key,
            "VerificationError",
        )
        (text,) = served.runtime.report().failures.values()
        assert text == failed.message
        assert "allow_eager=False" in text
        assert text in str(served.runtime.report())
        decision = served.runtime.last_decision
        assert decision is not None
        assert decision.descriptor.num_ubatches == 1


def test_split_that_was_right_is_not_compared_again() -> None:
    with Served() as served:
        lens = [1] * 15 + [2]
        before = served.model.calls
        assert served.step(lens).ubatch_reason is None
        assert served.model.calls == before + 2  # That of the whole batch was put back.
        for seed in range(5):
            served.step(lens, seed)
        assert len(served.of(Verified)) == 1
        assert served.model.calls == before + 12


def test_order_of_two_requests_is_found_when_they_change_places() -> None:
    """Request 0 lies in one part, request 1 in both: while that has the lower rank, all agree."""
    with Served(lambda: Model(rank)) as served:
        orders = [values([1, 8], seed)["scales"] for seed in range(4)]
        assert [bool(one[1] < one[0]) for one in orders] == [True, True, True, False]
        for seed in range(3):
            assert served.step([1, 8], seed).num_ubatches == 2
        assert served.step([1, 8], 3).ubatch_reason is FAILED


@pytest.mark.parametrize("mix", ["rows", "mean"])
@pytest.mark.parametrize("policy", ["view", "checked_view"])
def test_outputs_of_a_compared_step_may_be_read(policy: str, mix: str) -> None:
    with Served(lambda: Model({**MIXING, **ALONE}[mix]), policy=policy) as served:
        for seed in range(4):
            served.step([5, 7], seed)


def test_requests_that_are_cut_inside_are_another_kind_of_step() -> None:
    with Served(lambda: Model(attention)) as served:
        assert served.step([6, 6]).num_ubatches == 2
        assert served.step([6, 6], 4).num_ubatches == 2
        assert served.step([5, 7]).ubatch_reason is FAILED
        assert served.step([6, 6]).ubatch_reason is FAILED


def small_share(x: torch.Tensor, **_: Any) -> torch.Tensor:
    return x + x.mean(0) * 1e-6


def test_dependency_below_the_tolerance_is_found_by_other_rows() -> None:
    with Served(lambda: Model(small_share)) as served:
        assert served.step([6, 6]).ubatch_reason is FAILED


def test_bits_that_vary_from_run_to_run_are_compared_within_the_tolerance() -> None:
    number = itertools.count()

    def varying(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x * (1 + next(number) * 1e-7)

    with Served(lambda: Model(varying)) as served:
        assert served.step([6, 6]).num_ubatches == 2


def test_more_requests_are_another_kind_of_step() -> None:
    with Served(lambda: Model(MIXING["softmax of requests"])) as served:
        assert served.step([12]).num_ubatches == 2
        assert served.step([5, 7]).ubatch_reason is FAILED


def test_sampled_cuts_are_compared_again() -> None:
    is_mixing = [False]

    def sometimes(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x - x.mean(0) if is_mixing[0] else x

    with Served(lambda: Model(sometimes), config={"verify_every": 1}) as served:
        assert served.step([5, 7]).num_ubatches == 2
        assert served.step([5, 7]).num_ubatches == 2
        is_mixing[0] = True
        assert served.step([5, 7]).ubatch_reason is FAILED


def test_verify_off_compares_no_cut() -> None:
    with Served(config={"verify_first_replay": False}) as served:
        assert served.step([5, 7]).num_ubatches == 2
        assert not served.of(Verified)


def test_capture_lets_a_repaired_model_be_split_again() -> None:
    model = Model(MIXING["mean"])
    with Served(lambda: model) as served:
        served.alone = model
        assert served.step([5, 7]).ubatch_reason is FAILED
        model.mix = ALONE["rows"]
        assert served.step([5, 7]).ubatch_reason is FAILED
        served.runtime.withdraw([], "repaired")
        assert served.step([5, 7]).num_ubatches == 2
        assert not served.runtime.report().failures


class Counting(Model):
    """Counts its runs in a tensor, which micro-batches advance more often."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, **inputs: torch.Tensor) -> Rows:
        self.count += 1
        return super().forward(**inputs)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_state_that_micro_batches_advance_otherwise_is_advanced_once(is_guarded: bool) -> None:
    model = Counting()
    state = TensorStateGuard([model.count]) if is_guarded else None
    with Served(lambda: model, state=state) as served:
        served.alone = Model()
        for number in range(3):
            event = served.step([5, 7])
            assert event.ubatch_reason is FAILED
            assert model.count.item() == number + 1
        (failed,) = served.of(CaptureFailed)
        assert failed.error == ("VerificationError" if is_guarded else "StateAdvancedError")
        assert is_guarded or "count is written at" in failed.message


class Recurrent(Model):
    """Adds to what the step before left in the rows of its requests."""

    def forward(self, **inputs: torch.Tensor) -> Rows:
        slots = inputs["slots"]
        return super().forward(**{**inputs, "x": inputs["x"] + self.cache[slots]})


def test_rows_that_a_step_reads_and_writes_are_put_back() -> None:
    model = Recurrent()
    served = Served(
        lambda: model, may_overwrite={model.cache: "slots"}, state=TensorStateGuard([model.cache])
    )
    served.alone = Recurrent()
    with served:
        for _ in range(4):
            assert served.step([5, 7]).num_ubatches == 2
        assert [event.equal for event in served.of(Verified)] == [True] * 4


def test_rows_of_a_cache_that_a_step_reads_and_writes_are_put_back_without_a_guard() -> None:
    with Served(Recurrent) as served:
        for _ in range(4):
            assert served.step([5, 7]).num_ubatches == 2


def test_cache_without_its_rows_is_warned_of_where_the_whole_batch_leaves_another() -> None:
    model = Misplaced()
    served = Served(lambda: model, may_overwrite=[model.cache])
    with served, pytest.warns(UnverifiedWarning, match="may_overwrite 0 is left otherwise"):
        served.runtime.step(values([5, 7]), query_lens=[5, 7], uniform=False)
    model = Model()
    with Served(lambda: model, may_overwrite=[model.cache]) as served:
        assert served.step([5, 7]).num_ubatches == 2


class Misplaced(Model):
    """Right rows, but each part writes the first of its own into one place of the cache."""

    def forward(self, **inputs: torch.Tensor) -> Rows:
        found = super().forward(**inputs)
        self.cache.index_copy_(0, inputs["slots"], found["rows"] - found["rows"][:1])
        return found


def test_state_that_differs_alone_counts() -> None:
    with Served(Misplaced) as served:
        assert served.step([5, 7]).ubatch_reason is FAILED
        assert "may_overwrite" in served.of(CaptureFailed)[0].message


def test_step_info_of_each_part_says_nothing_of_the_whole() -> None:
    def reads(x: torch.Tensor, **_: Any) -> torch.Tensor:
        context = get_forward_context()
        assert context is not None
        return x * context.attn_metadata["scale"]

    batch, info = values([5, 7]), [{"scale": 2.0}, {"scale": 2.0}]
    with Served(lambda: Model(reads)) as served:
        step = {"query_lens": [5, 7], "uniform": False}
        served.runtime.step(batch, step_info=info, **step)
        assert not served.of(Verified)
        served.runtime.step(batch, step_info=info[0], **step)
        assert [event.equal for event in served.of(Verified)] == [True]
        assert [event.num_ubatches for event in served.of(RanEager)] == [2, 2]


class Random(Model):
    def forward(self, **inputs: torch.Tensor) -> Rows:
        found = super().forward(**inputs)
        return {**found, "rows": found["rows"] + torch.rand(found["rows"].shape)}


def test_random_numbers_are_drawn_as_without_a_comparison() -> None:
    inputs, found = values([5, 7]), []
    for verify in (True, False):
        with Served(Random, config={"verify_first_replay": verify}) as served:
            torch.manual_seed(11)
            steps = [
                served.runtime.step(inputs, query_lens=[5, 7], uniform=False) for _ in range(3)
            ]
            found.append([step["rows"] for step in steps])
            assert [event.num_ubatches for event in served.of(RanEager)] == [2, 2, 2]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Failing(Recurrent):
    """Raises in a run of so many rows."""

    num_rows = 0

    def forward(self, **inputs: torch.Tensor) -> Rows:
        found = super().forward(**inputs)
        if len(inputs["x"]) == self.num_rows:
            raise KeyError("of the model")
        return found


@pytest.mark.parametrize("num_rows", [13, 6, 7])
def test_error_inside_a_comparison_leaves_the_state_of_before(num_rows: int) -> None:
    model = Failing()
    with Served(lambda: model) as served:
        served.alone = Recurrent()
        model.num_rows = num_rows
        with pytest.raises(KeyError, match="of the model"):
            served.step([5, 8])
        assert not model.cache.any()
        assert model.calls == 0
        model.num_rows = 0
        for seed in range(3):
            assert served.step([5, 8], seed).num_ubatches == 2
        assert [event.equal for event in served.of(Verified)] == [True] * 3


def test_unsplit_steps_are_counted_with_the_reason() -> None:
    metrics = StepMetrics()
    with Served(lambda: Model(MIXING["mean"]), observer=metrics) as served:
        for lens in ([5, 7], [5, 7], [1, 2]):
            served.runtime.step(values(lens), query_lens=lens, uniform=False)
    found = metrics.snapshot()
    assert found.split_steps == 0
    assert found.unsplit_reasons == {FAILED: 2, UBatchReason.BELOW_THRESHOLD: 1}
    assert found.failures == {"VerificationError": 1}
    assert found.verifications.different == 1

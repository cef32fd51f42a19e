"""Of a tensor whose rows an input names, no run writes another row without being found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bug_classes import Packed
from graphrt import (
    BufferSpec,
    CUDAGraphRunner,
    OutputSpec,
    Padding,
    Reason,
    TensorStateGuard,
    break_point,
)
from graphrt.errors import StateAdvancedError, VerificationError
from graphrt.runner import comparisons

X = BufferSpec("x", ("n", 3), torch.float32)
Write = Callable[[Tensor, Tensor, Tensor], Any]
HERE = "test_other_rows.py"


def examples(sizes: Any, seed: int) -> dict[str, Tensor]:
    """Rows 1 to 16 of the cache, in any order."""
    generator = torch.Generator().manual_seed(seed + 1)
    slots = torch.randperm(16, generator=generator)[: sizes["n"]] + 1
    return {"x": torch.randn(sizes["n"], 3, generator=generator), "slots": slots}


def runner(fn: Any, may_overwrite: Any, padding: Any = None, **options: Any) -> CUDAGraphRunner:
    slots = BufferSpec("slots", ("n",), torch.int64, padding or Padding.fill(0))
    options = {"sizes": {"n": [4, 8]}, "examples": examples, **options}
    return CUDAGraphRunner(
        fn,
        inputs=[X, slots],
        outputs=OutputSpec({"": "n"}),
        may_overwrite=may_overwrite,
        device="simulated",
        **options,
    )


def writing(cache: Tensor, write: Write | None = None) -> Callable[..., Tensor]:
    def model(x: Tensor, slots: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x.to(cache.dtype))
        if write is not None:
            write(cache, x, slots)
        return x * 2

    return model


def filled(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(96).reshape(32, 3).to(dtype)


BESIDE: dict[str, Write] = {
    "of the batch": lambda cache, x, slots: cache[27].copy_(x[0]),
    "advanced": lambda cache, x, slots: cache[27].add_(1),
    "zero": lambda cache, x, slots: cache[0].zero_(),
    "by the size": lambda cache, x, slots: cache[26 + x.shape[0] // 4].fill_(5),
    "next to the named": lambda cache, x, slots: cache.index_fill_(0, slots + 15, 0),
    "from the end": lambda cache, x, slots: cache.index_fill_(0, 32 - slots[:2].clamp(max=8), 1),
    "one element": lambda cache, x, slots: cache[31, 2:].fill_(3),
}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("warmups", [0, 1])
@pytest.mark.parametrize("write", BESIDE.values(), ids=BESIDE)
def test_write_of_a_row_that_no_input_names_is_refused(
    write: Write, warmups: int, mode: str
) -> None:
    cache = filled()
    before = cache.clone()
    options: Any = {"warmups": warmups, "modes": [mode]}
    with (
        runner(writing(cache, write), {cache: "slots"}, **options) as served,
        pytest.raises(StateAdvancedError, match="cache, other rows of may_overwrite 0") as caught,
    ):
        served.capture()
    assert HERE in caught.value.source
    assert torch.equal(cache, before)


def test_tensor_without_rows_may_be_written_in_any() -> None:
    cache = filled()
    with runner(writing(cache, BESIDE["of the batch"]), [cache]) as served:
        assert len(served.capture().graphs) == 2


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.complex128, torch.int8, torch.int64),
    ],
)
def test_rows_of_every_dtype_are_compared_and_as_before(dtype: torch.dtype) -> None:
    # Within a larger one, and in another order than they lie in memory.
    whole = torch.zeros(4, 7, 40, dtype=torch.float64).to(dtype)
    cache = whole[1:3, 2, 3:35].t()
    cache.copy_(torch.arange(64).reshape(32, 2))
    if dtype.is_floating_point:
        cache[20:22] = torch.tensor([[float("nan"), 3], [448, 5]]).to(dtype)
    before = whole.clone()

    def model(x: Tensor, slots: Tensor) -> Tensor:
        cache[slots] = x[:, :2].to(dtype)
        if writes:
            cache[29] = (100 * x[0, :2]).to(dtype)
        return x * 2

    writes = False
    with runner(model, {cache: "slots"}) as served:
        assert len(served.capture().graphs) == 2
    changed = (whole.view(torch.uint8) != before.view(torch.uint8)).reshape(4, 7, 40, -1).any(-1)
    assert not changed[:, :, 20:].any()  # The slots of examples lie before.
    writes = True
    with runner(model, {cache: "slots"}) as served, pytest.raises(StateAdvancedError) as caught:
        served.capture()
    assert "written: 29, at" in str(caught.value)


def test_infinite_elements_never_become_another_kind() -> None:
    cache = filled()
    cache[30] = torch.tensor([float("inf"), -float("inf"), 0])

    @break_point
    def look(x: Tensor) -> Tensor:
        if cache.isnan().any():
            raise ArithmeticError("not a number")
        return x + 1

    def model(x: Tensor, slots: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x)
        return look(x * 1) * 2

    with runner(model, {cache: "slots"}, modes=["PIECEWISE"]) as served:
        served.capture()
    assert cache[30].tolist() == [float("inf"), -float("inf"), 0]


@pytest.mark.parametrize("sizes", [[1], [1, 4], [4, 8]])
def test_other_rows_are_as_before_after_any_number_of_checks(sizes: list[int]) -> None:
    cache = filled()
    with runner(writing(cache), {cache: "slots"}, sizes={"n": sizes}) as served:
        assert len(served.capture().graphs) == len(sizes)
    assert torch.equal(cache[17:], filled()[17:])


def test_named_rows_and_their_neighbours_serve() -> None:
    cache = filled()
    expected = cache.clone()
    with runner(writing(cache), {cache: "slots"}, verify_every=1) as served:
        served.capture()
        cache.copy_(expected)
        for seed in range(6):
            batch = examples({"n": 3}, seed)
            served.run(batch)
            assert served.last_decision.reason is Reason.PADDED
            expected.index_copy_(0, batch["slots"], batch["x"])
            assert torch.equal(cache[1:], expected[1:])


@pytest.mark.parametrize(
    ("padding", "place"),
    [
        (Padding.fill(0), None),
        (Padding.fill(31), None),
        (Padding.fill(-1), None),
        (Padding.fill(-1), 0),
        (Padding.fill(40), 31),
        (Padding.fill(-1), 19),
    ],
)
def test_row_for_padding_is_no_other_row(padding: Any, place: int | None) -> None:
    cache = filled()

    def model(x: Tensor, slots: Tensor) -> Tensor:
        if place is not None:
            slots = torch.where((slots < 0) | (slots > 31), place, slots)
        cache[slots] = x
        return x * 2

    with runner(model, {cache: "slots"}, padding, verify_every=1) as served:
        if place == 19:  # Neither the padding names it, nor is it the first or the last.
            with pytest.raises(StateAdvancedError, match="written: 19"):
                served.capture()
            return
        assert len(served.capture().graphs) == 2
        for seed in range(4):
            served.run(examples({"n": 3}, seed))
            assert served.last_decision.reason is Reason.PADDED


def test_row_written_by_padding_alone_is_refused() -> None:
    cache = filled()

    def next_too(cache: Tensor, x: Tensor, slots: Tensor) -> None:
        cache.index_copy_(0, torch.where(slots == 0, 25, slots), x)

    with (
        runner(writing(cache, next_too), {cache: "slots"}) as served,
        pytest.raises(StateAdvancedError, match=r"real sizes(?s:.*)written: 25"),
    ):
        served.capture()
    before = filled()
    assert torch.equal(cache[17:], before[17:])


def test_rows_of_two_inputs_in_one_storage_are_together() -> None:
    whole = torch.zeros(2, 32, 3)
    keys, values = whole[0], whole[1]
    turned = values.view(16, 6)

    def model(x: Tensor, slots: Tensor) -> Tensor:
        keys.index_copy_(0, slots, x)
        values.index_copy_(0, slots, x + 1)
        if beside:
            keys[20] = x[0]
        return x * 2

    beside = False
    for named in ({keys: "slots", values: "slots"}, {whole.transpose(0, 1): "slots"}):
        with runner(model, named) as served:
            assert len(served.capture().graphs) == 2
    beside = True
    for named in ({keys: "slots", values: "slots"}, {values: "slots", whole[0]: "slots"}):
        with runner(model, named) as served, pytest.raises(StateAdvancedError, match="20"):
            served.capture()

    def two_views(x: Tensor, slots: Tensor) -> Tensor:
        values.index_copy_(0, slots.clamp(max=3), x)
        turned.index_copy_(0, slots // 2, torch.cat([x, x], 1))
        return x * 2

    # Each row of one lies in a row of the other, which an input names.
    apart: Any = {"sizes": {"n": [1, 2]}, "warmups": 1}
    with runner(two_views, {values: "slots", turned: "slots"}, **apart) as served:
        with pytest.raises((VerificationError, StateAdvancedError)) as caught:
            served.capture()
        assert "written: " in str(caught.value) or "rows slots" in str(caught.value)


class FillsOnce(torch.nn.Module):
    """Makes the row of padding ready in its first run."""

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.cache = filled()
        self.value = value
        self.is_ready = False

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        if not self.is_ready:
            self.cache[20] = x[0] if self.value is None else self.value
            self.is_ready = True
        self.cache.index_copy_(0, slots, x)
        return x + torch.where(slots < 0, self.cache[20, 0], 0)[:, None]


@pytest.mark.parametrize("value", [0.0, 7.5, None])
def test_row_that_a_first_run_fills_is_admitted_if_it_is_always_the_same(
    value: float | None,
) -> None:
    model = FillsOnce(value)
    with runner(model, {model.cache: "slots"}) as served:
        if value is None:
            with pytest.raises(VerificationError, match="other rows of may_overwrite 0"):
                served.capture()
            assert torch.equal(model.cache, filled())
            assert not model.is_ready
            return
        assert len(served.capture().graphs) == 2
        assert model.cache[20].tolist() == [value] * 3
        assert model.is_ready


def test_guarded_tensor_may_be_written_in_other_rows() -> None:
    cache = filled()
    before = cache.clone()

    def advance(cache: Tensor, x: Tensor, slots: Tensor) -> None:
        cache[27].add_(1)

    options: Any = {"state": TensorStateGuard([cache]), "verify_every": 1}
    with runner(writing(cache, advance), {cache: "slots"}, **options) as served:
        served.capture()
        assert torch.equal(cache, before)
        for count in range(1, 5):
            served.run(examples({"n": 3}, count))
            assert served.last_decision.reason is Reason.PADDED
            assert torch.equal(cache[27], before[27] + count)


def test_sampled_step_finds_rows_that_only_eager_writes() -> None:
    cache = filled()
    before = cache.clone()

    def model(x: Tensor, slots: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x)
        if x.shape[0] == 3:  # The batch of an example has 1 row, 4, 5 or 8.
            cache[27] = x[0]
        return x * 2

    with runner(model, {cache: "slots"}, verify_every=2) as served:
        served.capture()
        cache.copy_(before)
        found = None
        for seed in range(4):
            try:
                served.run(examples({"n": 3}, seed))
            except VerificationError as error:
                found = error
                break
        assert found is not None
        assert "may_overwrite 0" in str(found)
        served.run(examples({"n": 3}, 5))
        assert served.last_decision.reason is Reason.CAPTURE_FAILED


def test_row_that_both_sides_write_in_a_sampled_step_advances_once() -> None:
    cache = filled()

    def advance(x: Tensor, slots: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x)
        cache[27].add_(x[0].gt(100).float())  # No example is so large.
        return x * 2

    with runner(advance, {cache: "slots"}, verify_every=1) as served:
        served.capture()
        expected = cache[27].clone()
        for size in (3, 4, 4, 3):
            batch = examples({"n": size}, size)
            served.run({**batch, "x": batch["x"] + 1000})
            expected += 1
            assert torch.equal(cache[27], expected)


def test_large_tensor_is_said_not_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "MAX_COMPARED_BYTES", 32 * 3 * 4 + 11)
    small, large = filled(), filled(torch.float64)

    def model(x: Tensor, slots: Tensor) -> Tensor:
        small.index_copy_(0, slots, x)
        large.index_copy_(0, slots, x.double())
        written[27] = x[0]
        return x * 2

    written, named = large, {large: "slots", small: "slots"}
    with warnings.catch_warnings(), runner(model, named) as served:
        warnings.simplefilter("error")
        told = [graph.padding for graph in served.capture().graphs]
    assert all("without the other rows of 1 of may_overwrite, too large" in each for each in told)
    written = small
    with runner(model, named) as served, pytest.raises(StateAdvancedError, match="written: 27"):
        served.capture()


def test_tensor_made_of_others_is_refused_with_the_parts_that_are_written() -> None:
    cache = Packed(filled(), filled())

    def model(x: Tensor, slots: Tensor) -> Tensor:
        cache.codes.index_copy_(0, slots, x)
        return x * 2

    with (
        runner(model, {cache: "slots"}) as served,
        pytest.raises(StateAdvancedError, match=r"cache\.codes is written"),
    ):
        served.capture()


def test_refused_capture_puts_all_rows_back_unless_another_graph_serves() -> None:
    for fails_at, is_put_back in (((4, 8), True), ((8,), False)):
        cache = filled()

        def beside(cache: Tensor, x: Tensor, slots: Tensor, at: Any = fails_at) -> None:
            if x.shape[0] in at:
                cache[27].add_(1)

        options: Any = {"on_capture_error": "skip", "sizes": {"n": [4, 8]}}
        with runner(writing(cache, beside), {cache: "slots"}, **options) as served:
            report = served.capture()
        assert len(report.failures) == len(fails_at)
        assert torch.equal(cache, filled()) is is_put_back


def test_eager_segment_that_writes_another_row_is_refused() -> None:
    cache = filled()

    def write_beside(row: Tensor) -> None:
        cache[27] = row

    @break_point
    def attend(x: Tensor, slots: Tensor) -> Tensor:
        write_beside(x[0])
        cache.index_copy_(0, slots, x)
        return x * 2

    with (
        runner(
            lambda x, slots: attend(x + 0, slots) + 1, {cache: "slots"}, modes=["PIECEWISE"]
        ) as served,
        pytest.raises(StateAdvancedError, match=r"written: 27, at .*write_beside"),
    ):
        served.capture()
    assert torch.equal(cache, filled())

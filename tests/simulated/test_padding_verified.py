"""Padded batches are compared with the batch as it is: what reads padding never serves a step."""

from __future__ import annotations

import itertools
import sys
import warnings
from dataclasses import dataclass
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphrt import (
    BufferSpec,
    CUDAGraphRunner,
    Example,
    OutputSpec,
    Padding,
    Reason,
    Runtime,
    RuntimeConfig,
    TensorStateGuard,
    break_point,
    get_forward_context,
)
from graphrt.errors import (
    BatchError,
    ConfigError,
    DeviceReplayError,
    EnvironmentMismatchError,
    EscapedAllocationError,
    ForbiddenOperationError,
    ReentrantStepError,
    UnkeyedValueError,
    UnverifiedWarning,
    VerificationError,
)
from graphrt.events import PaddingVerified, RanEager, Replayed, Verified
from graphrt.verify import Rounding, compare
from lab import rows_runner

X = BufferSpec("x", ("tokens", 3), torch.float32)
SLOTS = BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(31))


def examples(sizes, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    return Example({"x": torch.randn(sizes["tokens"], 3, generator=generator)})


def with_slots(sizes, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    slots = torch.randperm(16, generator=generator)[: sizes["tokens"]]
    return examples(sizes, seed)._replace(values={**examples(sizes, seed).values, "slots": slots})


def make(model, *, inputs=(X,), outputs=None, examples=examples, asked=None, mode=None, **options):
    compilation = {"cudagraph_capture_sizes": [4, 8], "cudagraph_mode": mode or "FULL"}
    compilation |= (asked or {}).pop("compilation", {})
    return Runtime(
        model,
        inputs=inputs,
        outputs=OutputSpec({"": "tokens"}) if outputs is None else outputs,
        examples=examples,
        config=RuntimeConfig(
            max_num_seqs=8, max_num_batched_tokens=16, compilation=compilation, **(asked or {})
        ),
        device="simulated",
        **options,
    )


def refused(model, expected="", **options):
    with make(model, **options) as runtime, pytest.raises(VerificationError) as raised:
        runtime.capture()
    assert expected in str(raised.value)
    return str(raised.value)


def test_padding_that_is_no_index_says_that_padding_was_run():
    table = torch.arange(10.0)
    ids = BufferSpec("ids", ("tokens",), torch.int64, Padding.fill(-1))
    with make(lambda ids: torch.embedding(table[:, None], ids), inputs=[ids], examples=None) as it:
        with pytest.raises(DeviceReplayError, match="index out of range") as raised:
            it.capture(like={"ids": torch.arange(8)})
        (note,) = raised.value.__notes__
        assert "padded rows hold what the padding of their BufferSpec says" in note
        assert note in next(iter(it.report().failures.values()))


@break_point
def half(x):
    return x / 2


def conv(x):
    return torch.nn.functional.conv1d(x.t()[None], torch.ones(3, 3, 3), padding=1)[0].t()


READS_PADDING = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: torch.softmax(x, 0),
    "max": lambda x: x - x.amax(0),
    "cumsum from the end": lambda x: x.flip(0).cumsum(0).flip(0),
    "norm": lambda x: x / x.norm(),
    "sort": lambda x: x.sort(0).values,
    "roll": lambda x: x.roll(1, 0),
    "attention without a mask": lambda x: torch.softmax(x @ x.t(), -1) @ x,
    "neighbours": conv,
    "quantisation by the largest": lambda x: (x / x.abs().max() * 7).round(),
}


@pytest.mark.parametrize("model", READS_PADDING.values(), ids=READS_PADDING)
def test_model_that_reads_padding_is_refused(model):
    told = refused(model, "padding is read: other padded rows in x change")
    assert "first at" in told


RUNS = itertools.count(1)


@torch.library.custom_op("graphrt_tests::varies", mutates_args=())
def varies(x: torch.Tensor) -> torch.Tensor:
    """Rounds otherwise in each run, as a kernel does that sums by atomics."""
    return x + next(RUNS) % 5 * 2e-6


varies.register_fake(torch.empty_like)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_bits_that_vary_from_run_to_run_are_told_as_that(mode):
    told = refused(varies, "a kernel's bits vary from run to run", mode=mode)
    assert "verify_tolerance" in told
    with make(varies, mode=mode, verify_tolerance=1e-4) as runtime:
        runtime.capture()
        runtime.step({"x": torch.ones(3, 3)})
        assert not runtime.last_decision.reason.is_miss


def test_bits_that_vary_after_an_equal_first_check_are_not_told_as_padding(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RUNS", itertools.repeat(0))

    def vary(event):
        if isinstance(event, Verified):
            monkeypatch.setattr(sys.modules[__name__], "RUNS", itertools.count())

    told = refused(varies, "a kernel's bits vary from run to run", observer=vary)
    assert "padding is read" not in told


@pytest.mark.parametrize("reduce", [torch.amax, torch.amin])
@pytest.mark.parametrize("column", range(4))
def test_reduction_of_one_column_over_rows_is_refused(reduce, column):
    spec = BufferSpec("x", ("tokens", 4), torch.float32)

    def of_four(sizes, seed):
        return torch.randn(sizes["tokens"], 4, generator=torch.Generator().manual_seed(seed))

    options = {"inputs": (spec,), "examples": lambda *args: {"x": of_four(*args)}}
    refused(lambda x: x - reduce(x[:, column], 0), "padding is read", **options)


def test_maximum_over_a_single_padded_row_is_refused():
    spec = BufferSpec("x", ("tokens",), torch.float32)
    options = {
        "inputs": (spec,),
        "examples": lambda sizes, seed: {"x": torch.arange(1.0, sizes["tokens"] + 1) + seed},
        "asked": {"compilation": {"cudagraph_capture_sizes": [1, 2, 4]}},
    }
    refused(lambda x: x - x.max(), "'tokens': 3", **options)


def test_imaginary_part_of_padding_is_varied():
    spec = BufferSpec("x", ("tokens",), torch.complex64)

    def of_complex(sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(sizes["tokens"], dtype=torch.complex64, generator=generator)}

    options = {"inputs": (spec,), "examples": of_complex}
    refused(lambda x: x + x.imag.sum(), "padding is read", **options)


USES_THE_SIZE = {
    "times the number of rows": lambda x: x * x.shape[0],
    "branch on the size": lambda x: x * 2 if x.shape[0] < 4 else x * 3,
    "position from the end": lambda x: x + torch.arange(x.shape[0]).flip(0)[:, None],
    "reversed rows": lambda x: x + torch.linspace(0, 1, x.shape[0])[:, None],
}


@pytest.mark.parametrize("model", USES_THE_SIZE.values(), ids=USES_THE_SIZE)
def test_model_that_uses_the_padded_size_is_refused(model):
    refused(model, "the result depends on the padded size")


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (lambda x: x[-1:] * 2, OutputSpec({})),
        (lambda x: x.sum(0, keepdim=True) / x.shape[0], OutputSpec({})),
        (lambda x: {"y": x * 2, "n": x.shape[0]}, OutputSpec({"y": "tokens"})),
        (lambda x: {"y": x * 2, "best": x.sum(1).argmax()}, OutputSpec({"y": "tokens"})),
    ],
)
def test_output_of_no_row_that_depends_on_padding_is_refused(model, outputs):
    refused(model, outputs=outputs)


def test_rows_that_mask_their_padding_are_admitted():
    events = []
    mask = BufferSpec("mask", ("tokens",), torch.bool, Padding.zero())

    def model(x, mask):
        x = torch.where(mask[:, None], x, 0.0)
        return x - x.sum(0) / mask.sum()

    def masked(sizes, seed):
        ones = torch.ones(sizes["tokens"], dtype=torch.bool)
        return {**examples(sizes, seed).values, "mask": ones}

    with make(model, inputs=(X, mask), examples=masked, observer=events.append) as runtime:
        report = runtime.capture()
        assert {graph.padding for graph in report.graphs} == {
            "compared with 5 tokens and 5 requests",
            "compared with 1 tokens and 1 requests",
        }
        runtime.step(
            {"x": torch.ones(3, 3), "mask": torch.ones(3, dtype=torch.bool)},
            num_tokens=3,
            num_reqs=1,
        )
        assert "Its padding: compared with 1 tokens" in runtime.explain()
    found = [event for event in events if isinstance(event, PaddingVerified)]
    assert [event.equal for event in found] == [True, True]


def test_masks_by_a_product_leave_zeros_of_either_sign():
    """Of the rows that ``keep`` masks, the sum over all rows decides the sign of 0."""

    def with_mask(sizes, seed):
        keep = torch.arange(sizes["tokens"]).remainder(2).float()[:, None]
        return {**examples(sizes, seed).values, "keep": keep}

    def model(x, keep):
        return x * keep + 0 * x.sum(0)

    specs = [X, BufferSpec("keep", ("tokens", 1), torch.float32, Padding.zero())]
    runner = CUDAGraphRunner(
        model,
        inputs=specs,
        outputs=OutputSpec({"": "tokens"}),
        sizes={"tokens": [4, 8]},
        examples=with_mask,
        device="simulated",
        verify_every=1,
    )
    with runner:
        runner.capture()
        for seed in range(4):
            batch = with_mask({"tokens": 3}, 20 + seed)
            assert torch.equal(runner.run(batch), model(**batch))


def test_declared_padding_is_read_on_purpose():
    low = BufferSpec("x", ("tokens", 3), torch.float32, Padding.fill(float("-inf")))
    with make(lambda x: x - x.amax(0), inputs=(low,)) as runtime:
        assert len(runtime.capture().graphs) == 2
    refused(lambda x: x - x.amax(0), "padding is read", inputs=(X,))


def test_arbitrary_padding_of_integers_is_varied():
    def model(ids):
        return ids * 2 + ids.max()

    def of_ids(sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        return {"ids": torch.randint(50, 90, (sizes["tokens"],), generator=generator)}

    for padding in (Padding.fill(0, arbitrary=True), Padding.keep()):
        spec = BufferSpec("ids", ("tokens",), torch.int64, padding)
        # The largest real row does not change the largest, so only sums show it.
        refused(lambda ids: ids * 2 + ids.sum(), "padding is read", inputs=(spec,), examples=of_ids)
        # The real rows again are no other set of ids: rows of the captured example are.
        refused(
            lambda ids: ids * 2 + torch.nn.functional.one_hot(ids, 90)[:, 50:].amax(0).sum(),
            "padding is read",
            inputs=(spec,),
            examples=of_ids,
        )
    declared = BufferSpec("ids", ("tokens",), torch.int64, Padding.fill(0))
    with make(model, inputs=(declared,), examples=of_ids) as runtime:
        assert len(runtime.capture().graphs) == 2


def test_reads_padding_is_declared_and_shown():
    why = "one scale for the whole batch"
    with make(lambda x: x * (x.abs().amax() >= 0), reads_padding=why) as runtime:
        report = runtime.capture()
        assert all(graph.padding.startswith(f"reads padding: {why}") for graph in report.graphs)
        runtime.step({"x": torch.ones(3, 3)}, num_tokens=3, num_reqs=1)
        assert why in runtime.explain()
    # The unpadded batch still decides.
    refused(lambda x: x * x.shape[0], "depends on the padded size", reads_padding=why)


@pytest.mark.parametrize("policy", ["view", "clone", "checked_view"])
def test_dependence_on_the_padded_size_is_refused_under_every_policy(policy):
    outputs = OutputSpec({"": "tokens"}, policy)
    refused(lambda x: x * x.shape[0], "depends on the padded size", outputs=outputs)
    refused(lambda x: x - x.amax(0), "padding is read", outputs=outputs)


def test_graph_that_is_wrong_in_a_padded_sample_is_not_put_down_to_padding():
    weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    options = {"verify_every": 1, "watch": "off"}
    with rows_runner(lambda x: x * weight, (4,), **options) as runner:
        runner.capture()
        runner.run({"x": torch.ones(3, 4)})
        weight.data = torch.full((4,), 2.0)
        with pytest.raises(VerificationError) as caught:
            runner.run({"x": torch.ones(3, 4)})
    assert "padded size" not in str(caught.value)
    assert "weight" in str(caught.value)


def test_choice_between_equal_scores_is_a_tie():
    events = []

    def model(x):
        # Rounded as another number of rows might: below the tolerance of float32.
        logits = torch.stack([x[:, 0], x[:, 0] + 1e-7 * (x.shape[0] - 3)], 1)
        return {"logits": logits, "tokens": logits.argmax(-1)}

    axes = {"logits": "tokens", "tokens": "tokens"}
    refused(model, "['tokens']", outputs=OutputSpec(axes), mode="FULL")
    outputs = OutputSpec(axes, chosen_from={"tokens": "logits"})
    with make(model, outputs=outputs, observer=events.append) as runtime:
        runtime.capture()
    assert sum(event.num_ties for event in events if isinstance(event, PaddingVerified)) > 0
    for wrong in ({"token": "logits"}, {"tokens": "logit"}, {"logits": "tokens"}):
        with (
            make(model, outputs=OutputSpec(axes, chosen_from=wrong)) as runtime,
            pytest.raises(ConfigError, match="chosen_from"),
        ):
            runtime.capture()


def test_rounding_of_a_part_in_float32_is_no_dependence_on_the_size():
    def with_error(relative, part, whole=torch.float64):
        def model(x):
            # As another number of rows might round it.
            return (x * 0.1).to(part).to(whole) * (1 + relative * (x.shape[0] - 3))

        return model

    def options(dtype):
        def typed(sizes, seed):
            return {"x": examples(sizes, seed).values["x"].to(dtype)}

        return {"inputs": [BufferSpec("x", ("tokens", 3), dtype)], "examples": typed}

    of_doubles = options(torch.float64)
    with make(with_error(1e-7, torch.float32), **of_doubles) as runtime:
        runtime.capture()
        x = torch.randn(3, 3, dtype=torch.float64)
        assert torch.equal(
            runtime.step({"x": x})[:, 0], (x * 0.1).float().double()[:, 0] * (1 + 1e-7)
        )
    for policy in ("view", "clone", "checked_view"):
        outputs = OutputSpec({"": "tokens"}, policy)
        refused(with_error(1e-7, torch.float64), "padded size", outputs=outputs, **of_doubles)
    refused(with_error(1e-2, torch.float32), "padded size", **of_doubles)
    # No shorter dtype counts so: what bfloat16 rounds away is a quarter.
    refused(with_error(1e-2, torch.bfloat16), "padded size", **of_doubles)
    mixed = with_error(1e-2, torch.bfloat16, torch.float32)
    refused(mixed, "padded size", **options(torch.float32))


class Memo(torch.nn.Module):
    """Writes the rows that its first batch named."""

    def __init__(self, memoises=True):
        super().__init__()
        self.memoises = memoises
        self.memo = None
        self.register_buffer("cache", torch.zeros(32, 3))

    def forward(self, x, slots):
        if self.memo is None and self.memoises:
            self.memo = slots.clone()
        self.cache.index_copy_(0, self.memo[: slots.shape[0]] if self.memoises else slots, x)
        return x * 2


@pytest.mark.parametrize("form", [lambda m: [m.cache], lambda m: {m.cache: "slots"}])
@pytest.mark.parametrize("memoises", [True, False])
def test_rows_written_to_the_wrong_place_are_refused(form, memoises):
    model = Memo(memoises)
    options = {
        "inputs": (X, SLOTS),
        "examples": with_slots,
        "may_overwrite": form(model),
    }
    if memoises:
        assert "memo" in refused(model, "may_overwrite 0", **options)
        return
    with make(model, **options) as runtime:
        assert len(runtime.capture().graphs) == 2


def test_sampled_step_poisons_only_what_it_writes():
    model = Memo(memoises=False)
    options = {
        "inputs": (X, SLOTS),
        "examples": with_slots,
        "may_overwrite": {model.cache: "slots"},
    }
    with make(model, asked={"verify_every": 1}, **options) as runtime:
        runtime.capture()
        for start in (0, 3, 6):
            rows = torch.full((3, 3), float(start + 1))
            slots = torch.arange(start, start + 3)
            runtime.step({"x": rows, "slots": slots}, num_tokens=3, num_reqs=1)
        assert model.cache[:9, 0].tolist() == [1.0] * 3 + [4.0] * 3 + [7.0] * 3


WRITES_IN_PART = {
    "on a condition": lambda cache, x, slots: cache.index_copy_(
        0, slots, torch.where((slots % 2 == 0)[:, None], x, cache.index_select(0, slots))
    ),
    "some columns": lambda cache, x, slots: cache[:, :2].index_copy_(0, slots, x[:, :2]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize("write", WRITES_IN_PART.values(), ids=WRITES_IN_PART)
def test_rows_written_in_part_keep_the_rest(write, dtype):
    cache = torch.zeros(32, 3, dtype=dtype)

    def model(x, slots):
        write(cache, x.to(dtype), slots)
        return x * 2

    options = {"inputs": (X, SLOTS), "examples": with_slots, "may_overwrite": {cache: "slots"}}
    with make(model, asked={"verify_every": 1}, **options) as runtime:
        runtime.capture()
        for value in (3.0, 4.0, 5.0):
            before = cache.fill_(1).clone()
            slots = torch.tensor([2, 3, 4])
            rows = torch.full((3, 3), value)
            runtime.step({"x": rows, "slots": slots}, num_tokens=3, num_reqs=1)
            write(before, rows.to(dtype), slots)
            assert torch.equal(cache[:31], before[:31])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", ["sum", "amax"])
def test_rows_that_a_run_also_reads_belong_to_the_state(dtype, reduce):
    cache = torch.zeros(32, 3, dtype=dtype)

    def model(x, slots):
        cache.scatter_reduce_(0, slots[:, None].expand(-1, 3), x.to(dtype), reduce)
        return x * 2

    options = {"inputs": (X, SLOTS), "examples": with_slots}
    assert "give such a tensor to state= too" in refused(
        model, "rows slots of may_overwrite 0", may_overwrite={cache: "slots"}, **options
    )


@pytest.mark.parametrize("leaks", [False, True])
def test_state_rows_are_read_and_written_beside_a_padding_row(leaks):
    """As recurrent models do: padded requests share the last row, which nobody compares."""
    state = torch.zeros(32, 3)

    def model(x, slots):
        new = torch.tanh(state.index_select(0, slots) + x)
        if leaks:
            new = new + x.sum() * 0.1
        state.index_copy_(0, slots, new)
        return new

    options = {
        "inputs": (X, SLOTS),
        "examples": with_slots,
        "state": TensorStateGuard([state]),
        "may_overwrite": {state: "slots"},
    }
    if leaks:
        refused(model, "x", **options)
        return
    with make(model, asked={"verify_every": 1}, **options) as runtime:
        runtime.capture()
        expected = state.zero_().clone()
        for value in (3.0, -4.0, 5.0):
            slots, rows = torch.tensor([2, 3, 4]), torch.full((3, 3), value)
            found = runtime.step({"x": rows, "slots": slots}, num_tokens=3, num_reqs=1)
            expected[slots] = torch.tanh(expected[slots] + rows)
            assert torch.equal(found, expected[slots])
            assert torch.equal(state[:31], expected[:31])


@pytest.mark.parametrize("name", ["slot", "x", "mask"])
def test_rows_named_by_no_input_of_integers_are_refused(name):
    cache = torch.zeros(32, 3)
    mask = BufferSpec("mask", ("tokens",), torch.bool, Padding.zero())
    with pytest.raises(ConfigError, match="one of slots"):
        make(lambda **_: None, inputs=(X, SLOTS, mask), may_overwrite={cache: name})
    with pytest.raises(ConfigError, match="shape \\(\\)"):
        make(lambda **_: None, inputs=(X, SLOTS), may_overwrite={torch.zeros(()): "slots"})


@pytest.mark.parametrize("shape", [("tokens",), (2, "tokens"), ("tokens", 2)])
def test_slots_of_any_shape_name_the_rows(shape):
    cache = torch.zeros(64, 3)
    spec = BufferSpec("slots", shape, torch.int32, Padding.fill(-1), optional=True)

    def model(x, slots):
        rows = x if slots.dim() == 1 else x.repeat_interleave(2, 0)
        flat = slots.t().flatten() if shape[0] == 2 else slots.flatten()
        cache.index_copy_(0, torch.where(flat < 0, 63, flat).long(), rows)
        return x * 2

    def of_sizes(sizes, seed):
        values = with_slots(sizes, seed).values
        each = values["slots"].int()
        slots = {1: each, 2: torch.stack([each, each + 16], shape.index("tokens") ^ 1)}[len(shape)]
        return {"x": values["x"], "slots": slots}

    options = {"inputs": (X, spec), "examples": of_sizes, "may_overwrite": {cache: "slots"}}
    with make(model, asked={"verify_every": 1}, **options) as runtime:
        runtime.capture()
        for seed in (3, 4):
            batch = of_sizes({"tokens": 3}, seed)
            runtime.step(batch, num_tokens=3, num_reqs=1)
            first = batch["slots"].flatten()[0].item()
            assert torch.equal(cache[first], batch["x"][0])
        for _ in range(2):  # Without slots no row is named.
            runtime.step({"x": batch["x"]}, num_tokens=3, num_reqs=1)


@pytest.mark.parametrize("by_key", [False, True])
def test_written_buffer_that_accumulates_is_admitted(by_key):
    specs = [X, BufferSpec("acc", ("tokens",), torch.float32, written=True)]

    def model(x, acc):
        acc.add_(x.sum(1))
        return x + acc[:, None]

    def of_sizes(sizes, seed):
        return {**examples(sizes, seed).values, "acc": torch.ones(sizes["tokens"])}

    runner = CUDAGraphRunner(
        model,
        inputs=(lambda key: specs) if by_key else specs,
        outputs=OutputSpec({"": "tokens"}),
        sizes={"tokens": [2, 4]},
        examples=of_sizes,
        device="simulated",
        verify_every=1,
    )
    with runner:
        runner.capture()
        batch = of_sizes({"tokens": 3}, 9)
        for _ in range(2):
            expected = batch["x"] + 1 + batch["x"].sum(1, keepdim=True)
            assert torch.allclose(runner.run(batch), expected)


def test_state_that_padding_advances_is_refused():
    total = torch.zeros(3)

    def model(x):
        total.add_(x.sum(0))
        return x * 2

    refused(model, "other padded rows in x change ['state']", state=TensorStateGuard([total]))
    assert total.eq(0).all()


def test_written_buffer_is_compared():
    box = {"memo": None}
    acc = BufferSpec("acc", ("tokens", 3), torch.float32, written=True)

    def model(x, acc):
        if box["memo"] is None:
            box["memo"] = x.clone()
        acc.copy_(box["memo"][: x.shape[0]] + x)
        return x * 2

    def with_acc(sizes, seed):
        values = examples(sizes, seed).values
        return {**values, "acc": torch.zeros_like(values["x"])}

    refused(model, "buffer acc", inputs=(X, acc), examples=with_acc)


def test_step_without_outputs_is_compared_by_what_it_writes():
    cache, box = torch.zeros(8, 3), {}

    def model(x):
        memo = box.setdefault("memo", x.clone())
        cache[: x.shape[0]].copy_(memo[: x.shape[0]])

    refused(model, "may_overwrite 0", outputs=OutputSpec({}), may_overwrite=[cache])


def test_nothing_to_compare_warns_and_is_refused_in_strict_mode():
    big = torch.zeros(1 << 25)

    def model(x):
        big[: x.shape[0]].copy_(x[:, 0])

    options = {"outputs": OutputSpec({}), "may_overwrite": [big]}
    with make(model, **options) as runtime, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime.capture()
    assert {warning.category for warning in caught} == {UnverifiedWarning}
    refused(model, "nothing was compared", asked={"on_miss": "strict"}, **options)


def test_opaque_outputs_alone_are_named_as_what_is_not_compared():
    strict, cache = {"asked": {"on_miss": "strict"}, "outputs": OutputSpec({})}, object()
    for cut, path in ((slice(1, None), "[0]"), (1, "the result")):
        told = refused(lambda x, cut=cut: (x * 2, cache)[cut], **strict)
        assert f"nothing but opaque values, which are not compared: {path}" in told


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize(
    "result",
    [
        lambda x: SimpleNamespace(rows=x),
        lambda x: SimpleNamespace(rows=half(x)),
        lambda x: SimpleNamespace(num_rows=len(x)),
        lambda x: iter([len(x)]),
    ],
    ids=["input", "segment", "host", "iterator"],
)
def test_opaque_result_that_each_run_makes_anew_is_refused(mode, result):
    """A replay would return that of the capture, as large as the key, at every step."""
    kind = type(result(torch.ones(1, 3))).__name__
    outputs = OutputSpec({"0": "tokens"})
    with make(lambda x: (x * 2, result(x)), outputs=outputs, mode=mode) as runtime:
        with pytest.raises((VerificationError, EscapedAllocationError)) as raised:
            runtime.capture()
        assert f" a {kind}" in raised.value.found
        values = examples({"tokens": 3}, 0).values
        assert runtime.step(values)[1] is not runtime.step(values)[1]


def test_opaque_result_that_every_run_returns_is_served():
    cache = SimpleNamespace(rows=torch.zeros(8, 3))
    with make(lambda x: (x * 2, cache), outputs=OutputSpec({"0": "tokens"})) as runtime:
        runtime.capture()
        x = torch.ones(3, 3)
        rows, found = runtime.step({"x": x})
        assert (runtime.last_decision.mode.name, found) == ("FULL", cache)
        assert torch.equal(rows, x * 2)


def test_prepare_that_counts_is_named_as_a_cause_of_bits_that_vary():
    class Counts:
        scale = torch.zeros(1)

        def prepare(self, key, step_info):
            self.scale += 1

    resource = Counts()
    told = refused(lambda x: x * resource.scale * len(x), resources=[resource])
    assert "prepare() of a resource counts" in told


def test_sum_in_a_tensor_too_large_to_be_put_back_is_named_as_a_cause():
    big = torch.zeros(1 << 25)

    def model(x):
        big[:1].add_(1)
        return x + big[:1]

    told = refused(model, "differ from each other", may_overwrite=[big])
    assert "may_overwrite that is too large to be put back" in told


def test_sum_in_scratch_is_put_back_before_causes_are_looked_for():
    small = torch.zeros(4)

    def model(x):
        small[:1].add_(1)
        return x + x.mean(0) + small[:1]

    assert "differ from each other" not in refused(model, "padding is read", may_overwrite=[small])
    assert small[1:].eq(0).all()


def bernoulli_of(x):
    return x * torch.empty_like(x).bernoulli_(torch.sigmoid(x)) + torch.bernoulli(torch.sigmoid(x))


def chosen(x):
    probabilities = torch.softmax(x, -1)
    again = torch.multinomial(probabilities, 4, replacement=True)
    return torch.cat([torch.multinomial(probabilities, 2), again], -1)


RANDOM = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "by columns": lambda x: x + torch.rand(x.shape[1], x.shape[0]).T,
    "of all rows": lambda x: x[:, torch.randperm(3)] * torch.randn(3),
    "integers": lambda x: x + torch.randint(2, 9, (len(x), 1)),
    "in place": lambda x: x + torch.empty_like(x).exponential_() * torch.empty_like(x).normal_(),
    "normal": lambda x: torch.normal(x, 2.0) * torch.randn_like(x),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "dropout of channels": lambda x: torch.nn.functional.dropout1d(x, 0.3),
    "alpha dropout": lambda x: torch.nn.functional.alpha_dropout(x, 0.3, training=True),
    "dropout as on a GPU": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "bernoulli": bernoulli_of,
    "multinomial": chosen,
    "greedy with noise": lambda x: (x - torch.empty_like(x).exponential_().log()).argmax(-1),
    "in an eager segment": lambda x: drawn_eagerly(x) * 2,
}


@break_point
def drawn_eagerly(x):
    return x + torch.rand_like(x)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", RANDOM)
def test_random_model_is_compared_with_the_unpadded_batch(name, mode):
    """The runs that are compared draw the same for the same rows."""
    state = torch.get_rng_state()
    with make(RANDOM[name], mode=mode) as runtime:
        told = [graph.padding for graph in runtime.capture().graphs]
        assert torch.equal(torch.get_rng_state(), state)
        runtime.step({"x": torch.zeros(3, 3)}, num_reqs=3)
    assert len(told) == 2
    assert not any("random" in each for each in told)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize(
    "wrong", [lambda x, y: y * len(x), lambda x, y: y + (len(x) == 8)], ids=["times", "branch"]
)
def test_random_model_that_depends_on_its_size_is_refused(name, wrong):
    torch.manual_seed(0)  # Of a single row that draws the index 0, a multiple shows nothing.
    assert "depends on the padded size" in refused(lambda x: wrong(x, RANDOM[name](x)), mode="FULL")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda x: torch.poisson(x.abs()), "aten::poisson draws"),
        (lambda x: x + torch.randperm(len(x))[:, None], "other draws"),
        (lambda x: x + torch.rand(x.numel()).view_as(x), "(24,) padded, (15,) unpadded"),
        (lambda x: x + (torch.rand(3) if len(x) > 6 else 0), "fewer draws"),
        (lambda x: x + (torch.rand(3) if len(x) < 6 else 0), "other draws"),
    ],
    ids=["of a rate", "of the size", "flat", "fewer", "more"],
)
def test_random_model_whose_rows_cannot_draw_alike_is_admitted_and_told(model, told):
    """What they draw follows from how many rows there are."""
    with make(model) as runtime:
        graphs = runtime.capture().graphs
    without = "draws random numbers, without the unpadded batch: "
    assert any(without in graph.padding and told in graph.padding for graph in graphs)


def test_random_choice_that_rounding_alone_changes_is_admitted():
    """One of two equal ones is chosen, by noise of the last bit."""
    torch.manual_seed(0)

    def near(x):
        rounded = 0.0 if len(x) == 8 else 1e-7
        return (torch.rand(len(x), 64) * 1e-6 + rounded > 5e-7).long()

    with make(near) as runtime:
        assert len(runtime.capture().graphs) == 2


def test_random_model_in_service_is_compared_with_the_unpadded_batch():
    """What depends on a size that no example has is found there."""

    def model(x):
        return torch.nn.functional.dropout(x, 0.5) + (len(x) == 7)

    with make(model, asked={"verify_every": 1}) as runtime:
        runtime.capture()
        for size in (6, 6, 7):
            runtime.step({"x": torch.ones(size, 3)}, num_reqs=size)
        with pytest.raises(VerificationError, match="depends on the padded size"):
            runtime.step({"x": torch.ones(7, 3)}, num_reqs=7)


def test_generator_that_nobody_declared_is_refused_by_name():
    own = torch.Generator().manual_seed(3)
    drawing = make(lambda x: x + torch.rand(x.shape, generator=own))
    with drawing as runtime, pytest.raises(ForbiddenOperationError) as refusal:
        runtime.capture()
    assert "generator" in refusal.value.do


# -- two axes


def two_axes(fn, **options):
    def of_sizes(sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(sizes["batch"], sizes["length"], generator=generator)}

    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("x", ("batch", "length"), torch.float64)],
        outputs=OutputSpec({"": {0: "batch", 1: "length"}}),
        sizes={"batch": [2, 4], "length": [3, 6]},
        examples=of_sizes,
        device="simulated",
        **options,
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_each_axis_is_padded_on_its_own(dim):
    wrong = two_axes(lambda x: x - x.mean(dim, keepdim=True))
    with wrong, pytest.raises(VerificationError, match="padding is read"):
        wrong.capture()
    with two_axes(torch.tanh) as runner:
        padding = {graph.padding for graph in runner.capture().graphs}
    assert "compared with 3 batch and 6 length, 4 batch and 5 length" in padding


def test_key_of_the_caller_is_padded_from_one_row():
    spec = BufferSpec("x", ("tokens",), torch.float64)
    options = {
        "inputs": [spec],
        "outputs": OutputSpec({"": "tokens"}),
        "capacity": {"tokens": 8},
        "examples": lambda sizes, seed: {"x": torch.arange(1.0, sizes["tokens"] + 1) + seed},
        "device": "simulated",
    }
    wrong = CUDAGraphRunner(lambda x: x - x.mean(), **options)
    with wrong, pytest.raises(VerificationError, match="padding is read"):
        wrong.capture([wrong.key(tokens=8)])
    with CUDAGraphRunner(lambda x: x * 2, verify_every=1, **options) as runner:
        key = runner.key(tokens=8)
        runner.capture([key])
        for _ in range(2):  # A batch that comes padded has no unpadded run.
            padded = torch.tensor([1.0, 2, 3, 0, 0, 0, 0, 0], dtype=torch.float64)
            rows = runner.run({"x": padded}, key=key, sizes={"tokens": 3})
            assert rows.tolist() == [2.0, 4.0, 6.0]


def test_sampled_step_finds_what_the_first_check_could_not():
    calls = []

    def model(x):  # 3 rows are neither the smallest batch of a key nor a full one.
        return x * (2 if x.shape[0] == 3 else 1)

    with make(model, asked={"verify_every": 1}, observer=calls.append) as runtime:
        runtime.capture()
        step = {"num_tokens": 3, "num_reqs": 1}
        runtime.step({"x": torch.ones(3, 3)}, **step)  # The two comparisons take turns.
        with pytest.raises(VerificationError, match="depends on the padded size"):
            runtime.step({"x": torch.ones(3, 3)}, **step)
        assert runtime.step({"x": torch.ones(3, 3)}, **step)[0, 0] == 2
    assert [event.equal for event in calls if isinstance(event, PaddingVerified)][-1] is False


def test_capture_next_pads_the_batch_that_asked():
    with make(lambda x: x * (2 if x.shape[0] == 6 else 1)) as runtime:
        runtime.step({"x": torch.ones(6, 3)}, num_tokens=6, num_reqs=2)
        with pytest.raises(VerificationError, match="'tokens': 6, 'requests': 2"):
            runtime.capture_next()


def pairs(x):
    places = torch.arange(x.shape[0])
    return x[(places ^ 1).clamp(max=x.shape[0] - 1)]


def test_size_that_is_even_as_its_key_is_passed_over():
    """Rows that are paired are wrong at 7 of 8, and right at 6."""
    with rows_runner(pairs, (5, 8), on_capture_error="skip") as runner:
        failures = [str(failure) for failure in runner.capture().failures.values()]
        assert any("real sizes {'n': 7}" in failure for failure in failures)
    asked = {"compilation": {"cudagraph_capture_sizes": [5, 8]}}
    refused(pairs, "real sizes {'tokens': 7, 'requests': 7}", asked=asked)


def test_single_row_is_padded_to_the_smallest_key():
    runner = rows_runner(lambda x: x * (2 if x.shape[0] == 1 else 1), (5,))
    with runner, pytest.raises(VerificationError, match="depends on the padded size"):
        runner.capture()


SHORT = BufferSpec("x", ("n", 4), torch.bfloat16)


def short_rows(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(sizes["n"], 4, generator=generator).to(torch.bfloat16)}


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x + (20 if x.shape[0] > 2 else 19),
        lambda x: x * (1 + x.shape[0] / 64),
        lambda x: (x * 1.1 if x.shape[0] > 2 else x * 1).add_(1),
    ],
    ids=["branch", "arithmetic", "in_place"],
)
def test_size_within_the_tolerance_of_16_bits_is_refused(model):
    runner = rows_runner(model, (8,), inputs=[SHORT], examples=short_rows)
    with runner, pytest.raises(VerificationError, match="depends on the padded size"):
        runner.capture()


def amplifies(x, weights, bias):
    for weight in weights:  # Sums in another order for few rows, as kernels make them.
        moved = x @ weight
        if x.shape[0] <= 6:
            moved = sum(x[:, i, None] * weight[i] for i in range(4))
        x = torch.nn.functional.layer_norm((x + 0.5 * moved).add_(bias), (4,))
    return x


def layers_that_amplify():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(24, 4, 4, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("policy", ["view", "checked_view"])
def test_rounding_that_layers_amplify_is_admitted(policy):
    weights, bias = layers_that_amplify(), torch.full((4,), 0.01, dtype=torch.bfloat16)
    x = short_rows({"n": 8}, 1)["x"]
    few, many = amplifies(x[:5], weights, bias), amplifies(x, weights, bias)[:5]
    assert (few - many).norm() > 0.016 * many.norm(), "by more than a few last bits"
    before = bias.clone()
    options = {"inputs": [SHORT], "outputs": OutputSpec({"": "n"}, policy=policy)}
    model = lambda x: amplifies(x, weights, bias)  # noqa: E731
    with rows_runner(model, (4, 8), examples=short_rows, **options) as runner:
        assert len(runner.capture().graphs) == 2
    assert torch.equal(bias, before)


def adds(x, made):
    torch.add(x, 1, out=made)


@pytest.mark.parametrize(
    ("run", "is_judged"),
    [
        (lambda x: x + 1, True),
        (lambda x: adds(x, torch.empty_like(x)), True),
        (lambda x: adds(x + 1, x), False),
        (lambda x: None, False),
    ],
    ids=["operator", "out_of_operator", "out_made_elsewhere", "nothing"],
)
def test_rounding_that_operators_do_not_show_keeps_the_whole_tolerance(run, is_judged):
    """As in kernels that Inductor compiled, whose memory no operator makes."""
    limits = []

    def compared(asked):
        limits.append(asked[torch.bfloat16])
        return compare(torch.ones(2), torch.ones(2) + (asked[torch.bfloat16] < 0.25))

    def measure(mode):
        x = torch.ones(4, dtype=torch.bfloat16)
        with mode:
            run(x)
        return compare(torch.ones(2), torch.ones(2))

    outcome = Rounding().judge(compared, {torch.bfloat16: 0.25}, measure)
    assert outcome.is_equal is not is_judged
    assert (limits[-1] == 0.25) is not is_judged


def test_sampled_step_that_measures_rounding_leaves_state_as_its_replay():
    weights, bias = layers_that_amplify(), torch.zeros(4, dtype=torch.bfloat16)
    last = torch.zeros(4, dtype=torch.bfloat16)

    def model(x):
        is_large = (x.abs() > 8).any(-1, keepdim=True)  # In no example.
        result = torch.where(is_large, amplifies(x, weights, bias), x)
        last.copy_(result[0])
        return result

    options = {"inputs": [SHORT], "examples": short_rows, "state": TensorStateGuard([last])}
    with rows_runner(model, (4, 8), verify_every=1, **options) as runner:
        runner.capture()
        for seed in range(6):
            rows = runner.run({"x": short_rows({"n": 5}, seed)["x"] * 100})
            assert torch.equal(rows[0], last)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.sampled_from(["tanh", "scale", "softmax", "matmul", "mean", "shape"]),
        min_size=1,
        max_size=3,
    )
)
def test_chain_is_admitted_if_and_only_if_rows_are_separate(names):
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    parts = {
        "tanh": torch.tanh,
        "scale": lambda x: x * 3,
        "softmax": lambda x: torch.softmax(x, 1),
        "matmul": lambda x: x @ weight,
        "mean": lambda x: x - x.mean(0),
        "shape": lambda x: x + x.shape[0],
    }

    def model(x):
        for name in names:
            x = parts[name](x)
        return x

    wrong = {"mean", "shape"} & set(names)
    # A softmax over columns does not see what is added to all of them.
    with make(model) as runtime:
        if "mean" in wrong:
            with pytest.raises(VerificationError):
                runtime.capture()
        elif not wrong:
            assert len(runtime.capture().graphs) == 2


# -- examples


def test_examples_that_ignore_the_seed_are_refused():
    refused(lambda x: x * 2, "equal contents", examples=lambda sizes, seed: examples(sizes, 0))
    shared = torch.empty(8, 3)

    def rewritten(sizes, seed):  # One tensor, rewritten for each seed.
        view = shared[: sizes["tokens"]]
        return Example({"x": view.copy_(examples(sizes, seed).values["x"])})

    with make(lambda x: x * 2, examples=rewritten) as runtime:
        assert len(runtime.capture().graphs) == 2


def reads_step_info(x):
    info = get_forward_context().attn_metadata
    return x * (info["n"] if info else 4)


@break_point
def eager_part(x):
    return reads_step_info(x)


def with_info(make_info, **more):
    def of_sizes(sizes, seed):
        return examples(sizes, seed)._replace(step_info=make_info(seed), **more)

    return of_sizes


def test_step_info_held_by_a_graph_has_to_differ():
    refused(reads_step_info, "step_info", examples=with_info(lambda seed: {"n": 4}))
    refused(reads_step_info, "bit for bit", examples=with_info(lambda seed: {"n": 4 + seed}))
    # The capture ran without: what seed 1 says may be what the callable does then.
    refused(reads_step_info, "bit for bit", examples=with_info(lambda seed: {"n": 5 - seed}))
    constant = with_info(lambda seed: {"n": 4}, constant_info=True)
    batch = {"values": {"x": torch.ones(4, 3)}, "num_tokens": 4, "num_reqs": 1}
    with make(reads_step_info, examples=constant) as runtime:
        runtime.capture()
        assert runtime.step(**batch, step_info={"n": 4})[0, 0] == 4


@dataclass
class Info:
    n: float = 0.0
    table: torch.Tensor | None = None


def test_step_info_declared_constant_is_compared_in_each_step():
    batch = {"values": {"x": torch.ones(4, 3)}, "num_tokens": 4, "num_reqs": 1}
    changing = {"n": 4, "lens": [1, 2]}
    for make_info, other in (
        (lambda: changing, {"n": 5, "lens": [1, 2]}),
        (lambda: {"n": 4, "lens": [1, 2]}, {"n": 4, "lens": [1, 3]}),
        (lambda: {"n": 4, "lens": [1, 2]}, {"n": 4}),
        (lambda: {"n": 4, "info": Info(0.0, torch.ones(2))}, {"n": 4, "info": Info(-0.0)}),
        (lambda: {"n": 4, "info": Info(0.0)}, {"n": 4, "info": Info(-0.0)}),
        (lambda: {"n": 4}, {"n": 4.0}),
        (lambda: {"n": 4}, None),
    ):
        declared = with_info(lambda seed, make_info=make_info: make_info(), constant_info=True)
        with make(reads_step_info, examples=declared) as runtime:
            runtime.capture()
            # Another object that says the same, with tensors of its own.
            assert runtime.step(**batch, step_info=make_info())[0, 0] == 4
            assert runtime.last_decision.mode.name == "FULL"
            for _ in range(2):
                with pytest.raises(UnkeyedValueError, match="constant_info"):
                    runtime.step(**batch, step_info=other)
            assert runtime.step(**batch, step_info=make_info())[0, 0] == 4
            if make_info() is changing:  # Changed in place.
                changing["n"] = 5
                with pytest.raises(UnkeyedValueError, match="constant_info"):
                    runtime.step(**batch, step_info=changing)


def test_step_info_declared_constant_may_change_where_no_graph_holds_it():
    constant = with_info(lambda seed: {"n": 4}, constant_info=True)
    batch = {"values": {"x": torch.ones(4, 3)}, "num_tokens": 4, "num_reqs": 1}
    with make(lambda x: eager_part(x + 0) * 1, examples=constant, mode="PIECEWISE") as runtime:
        runtime.capture()
        assert runtime.step(**batch, step_info={"n": 9})[0, 0] == 9


def test_step_info_held_by_the_second_mode_of_a_key_has_to_differ_too():
    def of_sizes(sizes, seed):
        return Example({"x": torch.full((sizes["n"], 4), 1.0 + seed)}, {"n": 4})

    modes = ("FULL", "PIECEWISE")  # One key for both.
    with (
        rows_runner(lambda x: eager_part(x + 0) * 1, modes=modes, examples=of_sizes) as runner,
        pytest.raises(VerificationError, match=r"FULL.*step_info"),
    ):
        runner.capture()


@pytest.mark.parametrize("place", [31, 3])
def test_padding_that_falls_on_real_rows_of_scratch_is_told(place):
    cache, big = torch.zeros(32, 3), torch.zeros(1 << 25)
    slots = BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(place))

    def model(x, slots):
        cache.index_copy_(0, slots, x)
        big[: x.shape[0]].copy_(x[:, 0])
        return x * 2

    def in_order(sizes, seed):
        values = examples(sizes, seed).values
        return {**values, "slots": torch.arange(sizes["tokens"]) + 3}

    options = {"inputs": (X, slots), "examples": in_order, "may_overwrite": [cache, big]}
    falls = place == 3
    with make(model, **options) as runtime, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = [graph.padding for graph in runtime.capture().graphs]
    assert [item.category for item in caught] == [UnverifiedWarning] * 2 * falls
    assert all(("may_overwrite 0 is left otherwise" in each) is falls for each in told)
    assert all("without 1 of may_overwrite" in each for each in told)
    if falls:
        refused(model, "may_overwrite 0 is left", asked={"on_miss": "strict"}, **options)


@pytest.mark.parametrize(
    ("make_info", "part"),
    [
        (lambda seed: {"n": 4, "step": seed}, "step_info['n']"),
        (lambda seed: {"n": 4, "table": torch.full((2,), seed)}, "step_info['n']"),
        (lambda seed: {"n": 4 + seed, "table": torch.ones(2)}, "step_info['table']"),
        (lambda seed: {"n": 4 + seed, "lens": [seed, 7]}, "step_info['lens'][1]"),
        (lambda seed: {"n": 4} if seed else None, "step_info['n']"),
        (lambda seed: None if seed else {"n": 4}, "step_info['n']"),
        (lambda seed: {"n": 4 + seed, "object": object()}, "step_info['object']"),
    ],
)
def test_part_of_step_info_that_no_example_varies_is_refused_by_name(make_info, part):
    refused(reads_step_info, part, examples=with_info(make_info))


def test_step_info_of_no_example_is_refused_in_a_step():
    batch = {"values": {"x": torch.ones(4, 3)}, "num_tokens": 4, "num_reqs": 1}
    with make(reads_step_info) as runtime:
        runtime.capture()
        assert runtime.step(**batch)[0, 0] == 4
        with pytest.raises(UnkeyedValueError, match="step_info"):
            runtime.step(**batch, step_info={"n": 9})


def test_step_info_read_in_an_eager_segment_is_live():
    same = with_info(lambda seed: {"n": 4})
    batch = {"values": {"x": torch.ones(4, 3)}, "num_tokens": 4, "num_reqs": 1}
    with make(lambda x: eager_part(x + 0) * 1, examples=same, mode="PIECEWISE") as runtime:
        runtime.capture()
        assert runtime.step(**batch, step_info={"n": 9})[0, 0] == 9


class CountsCalls(torch.nn.Module):
    n = 0

    def forward(self, x):
        self.n += 1
        return x * self.n


def test_first_call_is_compared_with_a_second_without_warmups():
    options = {"compilation": {"cudagraph_num_of_warmups": 0}}
    refused(CountsCalls(), "bit for bit", asked=options)


# -- arguments of a step


@pytest.mark.parametrize("num_reqs", [0, -1, 2.5, "a", 99])
def test_num_reqs_that_is_no_count_raises(num_reqs):
    with make(lambda x: x * 2) as runtime:
        for _ in range(2):  # Eager, then by a graph.
            with pytest.raises(BatchError, match="num_reqs"):
                runtime.step({"x": torch.ones(4, 3)}, num_tokens=4, num_reqs=num_reqs)
            runtime.capture()


@pytest.mark.parametrize("what", ["step", "capture", "capture_next"])
@pytest.mark.parametrize(
    ("where", "num_tokens"), [("model", 12), ("observer", 4)], ids=["model", "observer"]
)
def test_call_inside_a_step_of_the_same_runtime_raises(where, num_tokens, what):
    box = {}

    def call_inner(asked):
        if asked == where and (inner := box.pop("inner", None)):
            inner()

    def model(x):
        call_inner("model")
        return x * 2

    def look(event):
        if isinstance(event, Replayed | RanEager):
            call_inner("observer")

    def batch(value):
        x = torch.full((num_tokens, 3), value)
        return {"values": {"x": x}, "num_tokens": num_tokens, "num_reqs": 1}

    with make(model, observer=look) as runtime:
        runtime.capture()
        calls = {
            "step": lambda: runtime.step(**batch(0.0)),
            "capture": runtime.capture,
            "capture_next": runtime.capture_next,
        }
        box["inner"] = calls[what]
        with pytest.raises(ReentrantStepError):
            runtime.step(**batch(1.0))
        assert runtime.step(**batch(1.0)).eq(2).all()


def test_step_inside_the_check_of_a_capture_raises():
    box = {}

    def look(event):
        if isinstance(event, PaddingVerified):
            box["runtime"].step({"x": torch.ones(4, 3)}, num_tokens=4, num_reqs=1)

    with make(lambda x: x * 2, observer=look) as runtime:
        box["runtime"] = runtime
        with pytest.raises(ReentrantStepError):
            runtime.capture()


def test_run_from_the_observer_of_a_run_raises():
    box = {}

    def look(event):
        if isinstance(event, Replayed) and (inner := box.pop("inner", None)):
            inner()

    with rows_runner(lambda x: x * 2, observer=look) as runner:
        runner.capture()
        box["inner"] = lambda: runner.run({"x": torch.zeros(2, 4)})
        with pytest.raises(ReentrantStepError):
            runner.run({"x": torch.ones(2, 4)})
        assert runner.run({"x": torch.ones(2, 4)}).eq(2).all()


def test_autocast_of_capture_and_step_has_to_agree():
    linear = torch.nn.Linear(3, 3)
    batch = {"values": {"x": torch.ones(4, 3)}, "num_tokens": 4, "num_reqs": 1}
    with make(lambda x: linear(x)) as runtime:
        with torch.autocast("cpu", torch.bfloat16):
            runtime.capture()
            assert runtime.step(**batch).dtype is torch.bfloat16
        with pytest.raises(EnvironmentMismatchError, match="autocast"):
            runtime.step(**batch)
        with torch.autocast("cpu", torch.float16), pytest.raises(EnvironmentMismatchError):
            runtime.step(**batch)


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        (lambda x: x.repeat_interleave(4, 0), {"": "tokens"}),
        (lambda x: x.sum(0), {"": "tokens"}),
        (lambda x: x * 2, {"": {1: "tokens"}}),
    ],
)
def test_output_spec_that_contradicts_the_output_raises(model, axes):
    with make(model, outputs=OutputSpec(axes)) as runtime, pytest.raises(ConfigError, match="axis"):
        runtime.capture()


def test_output_spec_of_an_unknown_axis_raises():
    with pytest.raises(ConfigError, match="'token' of output"):
        make(lambda x: x, outputs=OutputSpec({"": "token"}))


def test_written_buffer_of_each_key_is_compared_in_place():
    def model(x):
        x.mul_(0.5)
        return x + 1

    def made(sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(sizes["rows"], sizes["length"], generator=generator)}

    with CUDAGraphRunner(
        model,
        inputs=(BufferSpec("x", ("rows", "length"), torch.float32, written=True),),
        outputs=OutputSpec({"": {0: "rows", 1: "length"}}),
        sizes={"rows": [4], "length": [5]},
        examples=made,
        device="simulated",
    ) as runner:
        runner.capture()
        values = made({"rows": 2, "length": 3}, 7)
        assert torch.equal(runner.run(values), values["x"] * 0.5 + 1)
        assert runner.last_decision.reason is Reason.PADDED


def test_key_missed_by_a_batch_that_fills_it_is_padded():
    """That batch has fewer requests, which pads another axis alone."""
    with make(lambda x: x * x.shape[0], mode="PIECEWISE") as runtime:
        runtime.step(examples({"tokens": 8}, 3).values, num_tokens=8, num_reqs=2)
        with pytest.raises(VerificationError, match="depends on the padded size"):
            runtime.capture_next()


def test_rows_read_before_written_are_right_in_compared_steps():
    state = torch.zeros(32, 3)

    def model(x, slots):
        new = state.index_select(0, slots) + x
        state.index_copy_(0, slots, new)
        return new * 1

    options = {"inputs": (X, SLOTS), "examples": with_slots, "may_overwrite": {state: "slots"}}
    # The first check refuses such a model, because it poisons the rows.
    asked = {"verify_every": 1, "verify_first_replay": False}
    with make(model, asked=asked, **options) as runtime:
        runtime.capture()
        state.zero_()
        values = with_slots({"tokens": 3}, 7).values
        for count in (1, 2, 3, 4):
            found = runtime.step(values, num_tokens=3, num_reqs=1)
            torch.testing.assert_close(found, count * values["x"])


@pytest.mark.parametrize(
    ("model", "path", "entry"),
    [
        (lambda x: x * 2, "the result", "OutputSpec({'': {0: 'tokens'}})"),
        (lambda x: {"a": (x * 2).t()}, "['a']", "OutputSpec({'a': {1: 'tokens'}})"),
        (lambda x: [x * 2, torch.dropout(x, 0.5, True)], "[0]", "OutputSpec({'0': {0: 'tokens'}})"),
        # Frames of audio, pairs of rows: no size of an axis.
        (lambda x: (x * 2).repeat(2, 1), "the result", "OutputSpec({'': {0: lambda sizes: ...}})"),
        (
            lambda x: {"a": [(x * 2).expand(2, -1, 3).reshape(-1).expand(2, -1).t() + 0]},
            "['a'][0]",
            "OutputSpec({'a.0': {0: lambda sizes: ...}})",
        ),
    ],
)
def test_output_without_an_entry_is_named(model, path, entry):
    with make(model, outputs=OutputSpec({})) as runtime, pytest.raises(VerificationError) as raised:
        runtime.capture()
    assert raised.value.expected.startswith(f"{path} cut to ")
    assert entry in raised.value.do


def test_row_of_state_for_padding_that_counts_is_told_how_to_be_declared():
    counts = torch.zeros(32, dtype=torch.int64)

    def model(x, slots):
        counts[slots] += 1
        return x * counts[slots][:, None]

    options = {"inputs": (X, SLOTS), "examples": with_slots, "state": TensorStateGuard([counts])}
    told = refused(model, "depends on the padded size: ['state'][0]", **options)
    assert "may_overwrite={tensor: 'input that indexes its rows'}" in told
    with make(model, may_overwrite={counts: "slots"}, **options) as runtime:
        runtime.capture()
        values = with_slots({"tokens": 3}, 7).values
        for count in (1, 2, 3):
            found = runtime.step(values, num_tokens=3, num_reqs=1)
            torch.testing.assert_close(found, count * values["x"])
            assert runtime.last_decision.reason is Reason.PADDED
    assert "may_overwrite" not in refused(lambda x: x * len(x), "depends on the padded size")


def test_difference_as_small_as_rounding_names_the_tolerance():
    def model(x):
        return x + x.amax() * 1e-6

    assert "verify_tolerance=" in refused(model, "padding is read", inputs=(X,))
    with make(model, inputs=(X,), verify_tolerance=1e-3) as runtime:
        runtime.capture()
    assert "verify_tolerance=" not in refused(lambda x: x + x.amax(), "padding is read")


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_step_while_a_capture_goes_on_is_refused(in_a_thread):
    found = []

    def step():
        with pytest.raises(ReentrantStepError, match="capture") as raised:
            runtime.step({"x": torch.ones(3, 3)}, num_tokens=3, num_reqs=3)
        found.append(raised)

    def progress(*told):
        if in_a_thread:
            thread = Thread(target=step)
            thread.start()
            thread.join()
        else:
            step()

    with make(lambda x: x * 2, inputs=(X,)) as runtime:
        runtime.capture(progress)
        assert len(found) == 2 * len(runtime.report().graphs)
        rows = runtime.step({"x": torch.ones(3, 3)}, num_tokens=3, num_reqs=3)
        assert torch.equal(rows, torch.full((3, 3), 2.0))
        assert runtime.last_decision.reason is Reason.PADDED


def test_padding_accepted_by_verify_tolerance_is_told_as_equal():
    events = []
    model = lambda x: x + x.shape[0] / 1000  # noqa: E731
    with make(model, verify_tolerance=0.1, observer=events.append) as runtime:
        runtime.capture()
    told = [event for event in events if isinstance(event, PaddingVerified)]
    assert told
    assert all(event.equal and event.max_abs_difference > 1e-3 for event in told)


def sampled_over_ids(model):
    """A runtime that compares each step; any id may stand in the padding."""

    def some_ids(sizes, seed):
        return {"ids": torch.arange(1, 1 + sizes["tokens"]) + seed}

    ids = BufferSpec("ids", ("tokens",), torch.int64, Padding.fill(0, arbitrary=True))
    return make(model, inputs=(ids,), examples=some_ids, asked={"verify_every": 1})


@pytest.mark.parametrize("others", [[7, 7, 7, 7], [7]])
def test_sampled_padding_has_integers_of_the_sample_before(others):
    reads_all = torch.zeros(1, dtype=torch.int64)

    def model(*, ids):
        return ids + reads_all * ids.max()

    with sampled_over_ids(model) as runtime:
        runtime.capture()
        reads_all.fill_(1)  # From now on each row depends on the largest id, of padding too.
        runtime.step({"ids": torch.tensor(others)}, num_reqs=1)
        with pytest.raises(VerificationError, match="padding is read"):
            runtime.step({"ids": torch.tensor([1, 2, 3])}, num_reqs=1)


def test_sampled_padding_of_a_model_that_reads_none_is_right():
    def model(*, ids):
        return ids * 2

    with sampled_over_ids(model) as runtime:
        runtime.capture()
        for length in (4, 3, 1, 2, 4, 3, 8, 5):
            rows = torch.arange(5, 5 + length)
            assert runtime.step({"ids": rows}, num_reqs=1).tolist() == (rows * 2).tolist()


def test_sampled_padding_writes_nowhere_that_an_earlier_batch_wrote():
    cache = torch.zeros(32, 3)

    def model(*, x, slots):
        cache.index_copy_(0, slots, x)
        return x * 2

    def valid(sizes, seed):
        n = sizes["tokens"]
        return {"x": torch.rand(n, 3) + seed, "slots": torch.arange(n) + 8 * seed}

    slots = BufferSpec("slots", ("tokens",), torch.int64, Padding.keep())
    options = {"inputs": (X, slots), "examples": valid, "may_overwrite": {cache: "slots"}}
    with make(model, asked={"verify_every": 1}, **options) as runtime:
        runtime.capture()
        runtime.step({"x": torch.ones(8, 3), "slots": torch.arange(8)}, num_reqs=1)
        with pytest.raises(VerificationError, match="padding is read"):
            runtime.step({"x": torch.ones(3, 3), "slots": torch.arange(20, 23)}, num_reqs=1)
    assert cache[4:8].tolist() == [[1.0] * 3] * 4

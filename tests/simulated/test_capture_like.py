"""``capture(like=...)``: examples made of the rows of one real batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from graphrt import BufferSpec, CUDAGraphRunner, Example, OutputSpec, Padding
from graphrt.errors import (
    ConfigError,
    InputMismatchError,
    UnverifiedWarning,
    VerificationError,
)
from graphrt.runner.examples import as_example, examples_like
from lab import RuntimeLab, assert_equal, nested, rows_runner, values

SHAPES = {"x": ("rows", 2), "grid": (3, "columns", "rows"), "scale": (1,)}


def double(x):
    return x * 2


def batch_of(rows, columns):
    return {
        "x": torch.arange(rows * 2.0).reshape(rows, 2) + 1,
        "grid": torch.arange(3 * columns * rows).reshape(3, columns, rows),
        "scale": torch.tensor([2.0]),
    }


def like(batch, **sizes):
    return examples_like(as_example(batch), sizes, SHAPES)


@given(*[st.integers(1, 5)] * 4, st.integers(0, 9))
def test_example_rows_are_those_of_the_batch_rotated(rows, columns, n, m, seed):
    batch = batch_of(rows, columns)
    made = like(batch, rows=rows, columns=columns)({"rows": n, "columns": m}, seed).values
    picked = (torch.arange(n) + seed) % rows
    assert torch.equal(
        made["grid"], batch["grid"][:, (torch.arange(m) + seed) % columns][:, :, picked]
    )
    is_same = seed % rows == 0 and seed % columns == 0
    factor = 0.5 if seed % 2 and is_same else 1
    assert torch.equal(made["x"], batch["x"][picked] * factor)
    assert made["scale"].item() == 2 * factor


@given(st.integers(1, 4), st.integers(1, 6))
def test_example_of_equal_rows_is_halved_for_odd_seeds(rows, n):
    row = torch.tensor([0.0, -3.0, float("inf"), float("nan")])
    made = examples_like(
        as_example({"x": row.repeat(rows, 1), "ids": torch.full((rows,), 7)}),
        {"rows": rows},
        {"x": ("rows", 4), "ids": ("rows",)},
    )
    for seed, factor in enumerate((1, 0.5, 1, 0.5)):
        example = made({"rows": n}, seed).values
        assert torch.equal(example["x"].nan_to_num(9), (row * factor).nan_to_num(9).repeat(n, 1))
        assert torch.equal(example["ids"], torch.full((n,), 7))


def test_example_keeps_its_values_when_the_batch_changes():
    batch = batch_of(2, 1)
    made = like(batch, rows=2, columns=1)
    first = made({"rows": 3, "columns": 1}, 0).values["x"].clone()
    batch["x"].zero_()
    assert torch.equal(made({"rows": 3, "columns": 1}, 0).values["x"], first)


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
def test_runtime_captured_like_a_batch_equals_eager(num_tokens):
    with RuntimeLab(examples=None) as lab:
        report = lab.runtime.capture(like=values(num_tokens, min(num_tokens, 4)))
        assert not report.missing
        for batch in ((3, 3, True), (5, 2, False), (9, 2, False)):
            assert_equal(lab.step(*batch), lab.eager(*batch[:2]))


def test_runtime_captures_the_rest_like_the_same_batch():
    with RuntimeLab(examples=None) as lab:
        with pytest.raises(ConfigError, match="like=batch"):
            lab.runtime.capture()
        keys = lab.runtime.plan.capture_order
        lab.runtime.capture(like=values(3, 2), keys=keys[:1])
        assert lab.runtime.capture_next(len(keys)) == 0
        assert not lab.runtime.report().missing


@pytest.mark.parametrize("by_key", [False, True])
def test_runner_captured_like_a_batch_serves_every_size(by_key):
    specs = [BufferSpec("x", ("batch", "length", 2), torch.float32)]
    with CUDAGraphRunner(
        lambda x: torch.tanh(x),
        inputs=(lambda key: specs) if by_key else specs,
        outputs=OutputSpec({"": {0: "batch", 1: "length"}}),
        sizes={"batch": [1, 4], "length": [2, 8]},
        device="simulated",
    ) as runner:
        x = torch.randn(3, 5, 2)
        assert len(runner.capture(like={"x": x}).graphs) == 4
        assert torch.equal(runner.run({"x": x}), torch.tanh(x))


def test_like_with_step_info_reaches_resources_unchanged():
    seen = []

    class Resource:
        def prepare(self, key, step_info):
            seen.append(step_info)

    with RuntimeLab(examples=None, resources=[Resource()]) as lab:
        lab.runtime.capture(like=Example(values(3, 2), step_info="metadata"))
    assert set(seen) == {None, "metadata"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ids": None}, "'ids'"),
        ({"idz": torch.zeros(3)}, "'ids'"),
        ({"ids": torch.zeros(0, dtype=torch.int64), "x": torch.zeros(0, 4)}, "'tokens'"),
        ({"x": torch.zeros(2, 4)}, "'tokens'"),
        ({"x": torch.zeros(3, 5)}, "'x'"),
    ],
)
def test_like_of_another_shape_is_refused_by_name(change, word):
    with RuntimeLab(examples=None) as lab, pytest.raises(InputMismatchError, match=word):
        lab.runtime.capture(like={**values(3, 2), **change})


def test_like_without_an_input_is_refused_by_name():
    batch = values(3, 2)
    del batch["lens"]
    with RuntimeLab(examples=None) as lab, pytest.raises(InputMismatchError, match="'lens'"):
        lab.runtime.capture(like=batch)


def test_like_of_no_batch_is_refused():
    with RuntimeLab(examples=None) as lab, pytest.raises(InputMismatchError, match="like"):
        lab.runtime.capture(like=torch.ones(3))


def test_like_beside_examples_is_refused():
    with RuntimeLab() as lab, pytest.raises(ConfigError, match="like"):
        lab.runtime.capture(like=values(3, 2))


def test_like_whose_rows_cannot_differ_says_what_to_give():
    with CUDAGraphRunner(
        lambda ids: ids + 1,
        inputs=[BufferSpec("ids", ("rows",), torch.int64, Padding.zero())],
        outputs=OutputSpec({"": "rows"}),
        sizes={"rows": [2]},
        device="simulated",
    ) as runner:
        with pytest.raises(VerificationError, match="rows differ"):
            runner.capture(like={"ids": torch.tensor([5, 5])})
        assert not runner.capture(like={"ids": torch.tensor([5, 6])}).missing


class Scaled(torch.nn.Module):
    """Keeps what it makes of ``t`` in its first call, which is a mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = None

    def forward(self, x, t):
        if self.kept is None:
            self.kept = t * 2
        return x * self.kept


@pytest.mark.parametrize("on_miss", ["eager", "strict"])
def test_memo_of_an_input_that_no_example_varies_is_told(on_miss):
    inputs = [
        BufferSpec("x", (2, 4), torch.float32),
        BufferSpec("t", (1,), torch.int64, Padding.zero()),
    ]
    batch = {"x": torch.ones(2, 4), "t": torch.tensor([2])}
    with CUDAGraphRunner(
        Scaled(), inputs=inputs, outputs=OutputSpec({}), device="simulated", on_miss=on_miss
    ) as runner:
        if on_miss == "strict":
            with pytest.raises(VerificationError, match="kept, set by the first warm-up"):
                runner.capture(like=batch)
        else:
            with pytest.warns(UnverifiedWarning, match=r"kept, set .* the same t for seeds"):
                runner.capture(like=batch)


def test_memo_is_not_told_where_every_input_varies():
    with (
        CUDAGraphRunner(
            Scaled(),
            inputs=[BufferSpec("x", (2, 4), torch.float32), BufferSpec("t", (1,), torch.float32)],
            outputs=OutputSpec({}),
            device="simulated",
        ) as runner,
        pytest.raises(VerificationError, match="kept"),
    ):
        runner.capture(like={"x": torch.ones(2, 4), "t": torch.tensor([2.0])})


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 4, dtype=torch.complex64),
        nested(torch.ones(2, 4)),
        torch.ones(2, 4).to_sparse(),
        torch.ones(2, 4, device="meta"),
        [[1.0, 2.0, 3.0, 4.0]],
        None,
    ],
    ids=str,
)
def test_batch_that_no_buffer_takes_is_refused(value):
    with rows_runner(double, examples=None) as runner:
        for _ in range(2):
            with pytest.raises(InputMismatchError, match="'x'"):
                runner.capture(like={"x": value})


@pytest.mark.parametrize("wide", [torch.ones(1, 4), torch.ones(1, 1)], ids=["rows", "all"])
def test_batch_larger_than_memory_is_cut_to_the_rows_that_examples_have(wide):
    with rows_runner(double, examples=None) as runner:
        runner.capture(like={"x": wide.expand(2**44, 4)})
        assert torch.equal(runner.run({"x": torch.ones(2, 4)}), torch.full((2, 4), 2.0))

"""What is typed wrongly on the first day ends in an error of graphrt that says what to do."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from typing import Any

import numpy
import pytest
import torch

from graphrt import (
    BucketDispatcher,
    BufferSet,
    BufferSpec,
    CaptureJob,
    CUDAGraphDispatcher,
    CUDAGraphRunner,
    CUDAGraphWrapper,
    Decision,
    Example,
    GraphLibrary,
    OutputSpec,
    Padding,
    Reason,
    RuntimeConfig,
    TensorStateGuard,
    Workspace,
    break_at,
    break_point,
    capture_all,
    compare,
    resolve,
)
from graphrt.errors import (
    BatchError,
    ConfigError,
    GraphrtError,
    InputMismatchError,
    StaticBufferError,
    shown,
)
from graphrt.report import Progress
from lab import FULL, KEY, Lab, RuntimeLab, nested, random_rows, rows_runner, values

ROWS = torch.ones(2, 4)
NARROW = BufferSpec("x", ("n",), torch.float32)
WIDE = BufferSpec("x", ("n", 10**15), torch.float32)
NESTED = nested(ROWS)
PLAN = resolve(RuntimeConfig(max_num_seqs=4, max_num_batched_tokens=8)).plan
DECISION = Decision(FULL, KEY, Reason.HIT)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    "options",
    [
        {"sizes": {"n": 4}},
        {"sizes": {"n": None}},
        {"sizes": {"n": "24"}},
        {"sizes": {"n": [2.0]}},
        {"sizes": {"n": ["2"]}},
        {"sizes": {"n": [True]}},
        {"sizes": {"n": torch.tensor([2, 4])}},
        {"sizes": {1: [2]}},
        {"sizes": {"n": range(1, 10**12)}},
        {"sizes": {"n": itertools.count(1)}},
        {"sizes": {"n": itertools.repeat(2)}},
        {"sizes": {"n": torch.tensor(2)}},
        {"sizes": {"n": [10**5000]}},
        {"capacity": {"n": float("nan")}},
        {"capacity": {"n": 10**5000}},
        {"modes": itertools.repeat("FULL")},
        {"modes": torch.tensor(1)},
        {"resources": itertools.repeat(Workspace("scratch"))},
        {"resources": itertools.count()},
        {"resources": torch.tensor(1)},
        {"resources": numpy.ones(())},
        {"keep_alive": itertools.repeat(ROWS)},
        {"may_overwrite": itertools.repeat(ROWS)},
        {"layers": itertools.count()},
        {"verify_every": 10**5000},
        {"verify_tolerance": 10**5000},
        {"verify_tolerance": float("inf")},
        {"verify_tolerance": float("nan")},
        {"modes": None},
        {"modes": 5},
        {"warmups": 1.5},
        {"warmups": "1"},
        {"library": 5},
        {"name": 5},
        {"reads_padding": True},
        {"outputs": {"": "n"}},
        {"space": 5},
        {"lockstep": 5},
        {"nvtx": torch.ones(2)},
        {"sizes": torch.ones(2)},
        {"watch": numpy.ones(2)},
        {"verify": torch.ones(2)},
        {"observe": numpy.ones(2)},
    ],
    ids=lambda asked: re.sub(" at 0x[0-9a-f]+", "", shown(asked)),
)
def test_wrong_option_of_a_runner_is_refused_by_name(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ConfigError, match=name.removesuffix("s")):
        rows_runner(double, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OutputSpec("n"),
        lambda: OutputSpec(["n"]),
        lambda: OutputSpec({"": 5}),
        lambda: OutputSpec({"": None}),
        lambda: OutputSpec({"": {"a": "n"}}),
        lambda: CUDAGraphRunner(double, examples=lambda sizes, seed: {"x": 5}, device="simulated"),
        lambda: CUDAGraphRunner(double, examples=lambda sizes, seed: {"x": NESTED}),
        lambda: OutputSpec({"": {10**5000: "n"}}),
        lambda: OutputSpec({"": {-1: "n"}}),
        lambda: OutputSpec({"": {True: "n"}}),
        lambda: OutputSpec({3: "n"}),
        lambda: OutputSpec({10**5000: "n"}),
        lambda: OutputSpec({("a", 0): "n"}),
        lambda: OutputSpec({}, torch.ones(2)),
        lambda: OutputSpec({}, chosen_from=range(3)),
        lambda: OutputSpec({}, chosen_from=range(10**12)),
        lambda: OutputSpec({}, chosen_from=itertools.repeat(("a", "b"))),
        lambda: OutputSpec({}, chosen_from="ab"),
        lambda: OutputSpec({}, chosen_from=None),
        lambda: OutputSpec({}, chosen_from={"a": 3}),
        lambda: OutputSpec({}, chosen_from={3: "a"}),
        lambda: compare(ROWS, ROWS, tolerance=[1]),
        lambda: compare(ROWS, ROWS, tolerance=float("nan")),
        lambda: compare(ROWS, ROWS, tolerance={torch.float32: "a"}),
        lambda: compare(ROWS, ROWS, chosen_from=["a"]),
        lambda: Padding.fill("a"),
        lambda: Padding.fill(None),
        lambda: Padding.fill(1j),
        lambda: Padding("zeros"),
        lambda: BufferSpec("x", ("n", 4.0), torch.float32),
        lambda: BufferSpec("x", (None, 4), torch.float32),
        lambda: BufferSpec("x", ("n", True), torch.float32),
        lambda: BufferSpec("x", ("n",), torch.float32, rebase="rows"),
        lambda: GraphLibrary("simulated", stale_check="pointer"),
        lambda: GraphLibrary("simulated", budget=5),
        lambda: GraphLibrary("simulated", generation_size="a"),
        lambda: CUDAGraphWrapper(double, None, FULL),
        lambda: BufferSet([WIDE], {"n": 2}, lambda key: {"n": 2}, torch.device("cpu")),
        lambda: BufferSet([NARROW], {"n": 10**5000}, dict, torch.device("cpu")),
        lambda: TensorStateGuard(itertools.repeat(ROWS)),
        lambda: TensorStateGuard(itertools.count()),
        lambda: TensorStateGuard(torch.tensor(1)),
        lambda: BucketDispatcher(["n"]),
        lambda: BucketDispatcher({1: [4]}),
        lambda: BucketDispatcher({"n": [4]}, "FULL"),
        lambda: BucketDispatcher({"n": [4]}, unavailable=["n"]),
        lambda: BucketDispatcher({"n": [4]}, variant=([],)),
        lambda: CUDAGraphDispatcher(5),
        lambda: CUDAGraphDispatcher(PLAN, unavailable=5),
        lambda: CUDAGraphDispatcher(PLAN, unavailable={PLAN.capture_order[0]: "why"}),
        lambda: CUDAGraphDispatcher(PLAN, variant={}),
        lambda: CUDAGraphDispatcher(PLAN).dispatch(torch.ones(2)),
        lambda: CUDAGraphDispatcher(PLAN).dispatch(2, torch.ones(2)),
        lambda: CUDAGraphDispatcher(PLAN).dispatch(2, exclude=torch.ones(2)),
        lambda: CaptureJob(5, FULL, KEY, double),
        lambda: CaptureJob(double, "FULL", KEY, double),
        lambda: CaptureJob(double, FULL, 5, double),
        lambda: CaptureJob(double, FULL, KEY, 5),
        lambda: CaptureJob(double, FULL, KEY, double, owner=5),
        lambda: CaptureJob(double, FULL, KEY, double, checked=5),
        lambda: capture_all(5, []),
        lambda: capture_all(GraphLibrary("simulated"), 5),
        lambda: capture_all(GraphLibrary("simulated"), [5]),
        lambda: capture_all(GraphLibrary("simulated"), [], 5),
        lambda: capture_all(GraphLibrary("simulated"), [], gate=5),
        lambda: capture_all(GraphLibrary("simulated"), [], progress=5),
        lambda: capture_all(GraphLibrary("simulated"), [], later=itertools.count()),
        lambda: capture_all(GraphLibrary("simulated"), [], host=5),
        lambda: BucketDispatcher({"n": itertools.count(1)}),
        lambda: BucketDispatcher({"n": range(1, 10**12)}),
        lambda: BucketDispatcher({"n": [4]}).dispatch({"n": 10**5000}),
        lambda: BucketDispatcher({"n": [4]}).dispatch({"n": 4}, itertools.count()),
        lambda: BucketDispatcher({"n": [4]}).dispatch({"n": 4}, 5),
    ],
)
def test_wrong_value_is_refused_where_it_is_made(make: Any) -> None:
    with pytest.raises(GraphrtError):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: break_point("attention"),
        lambda: break_point(name="attention")("attention"),
        lambda: break_point(capture_stub=5)(double),
        lambda: break_point(stub_when="never")(double),
        lambda: break_at(torch.nn.Linear(4, 4), names=5).__enter__(),
        lambda: break_at(torch.nn.Linear(4, 4), names=[torch.nn.Linear]).__enter__(),
        lambda: break_at(torch.nn.Linear(4, 4), types="Linear").__enter__(),
        lambda: break_at(torch.nn.Linear(4, 4), names=itertools.repeat("a")).__enter__(),
    ],
)
def test_wrong_break_point_is_refused_where_it_is_made(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"break"):
        make()


def test_wrapper_of_no_callable_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="callable"):
        lab.wrap(5)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda runner: runner.decide(2), BatchError),
        (lambda runner: runner.decide(None), BatchError),
        (lambda runner: runner.run({"x": ROWS}, key="a"), BatchError),
        (lambda runner: runner.run({"x": ROWS}, decision=5), BatchError),
        (lambda runner: runner.run({"x": ROWS}, decision=Decision(5, 6, 7)), BatchError),
        (lambda runner: runner.run({"x": ROWS}, decision=Decision(FULL, [], 7)), BatchError),
        (lambda runner: runner.run({"x": ROWS}, sizes={"n": 10**5000}), GraphrtError),
        (lambda runner: runner.run(itertools.count()), InputMismatchError),
        (lambda runner: runner.run(itertools.count(), sizes={"n": 2}), InputMismatchError),
        (lambda runner: runner.run({"x": ROWS[:1, :1].expand(10**12, 4)}), StaticBufferError),
        (lambda runner: runner.decide({"n": 2}, itertools.count()), BatchError),
        (lambda runner: runner.decide({"n": 10**5000}), BatchError),
        (lambda runner: runner.key(n=10**5000), BatchError),
        (lambda runner: runner.key(n=2, variant=[]), ConfigError),
        (lambda runner: runner.key(n=2, variant=([],)), ConfigError),
        (lambda runner: runner.run({"x": NESTED}), InputMismatchError),
        (lambda runner: runner.run({"x": NESTED}, sizes={"n": 2}), InputMismatchError),
        (lambda runner: runner.run({"x": NESTED}, key=runner.key(n=2)), InputMismatchError),
        (lambda runner: runner.real_sizes({"x": NESTED}), InputMismatchError),
        (lambda runner: runner.real_sizes({10**5000: ROWS}), InputMismatchError),
        (lambda runner: runner.run({"x": ROWS}, decision=DECISION, sizes=5), BatchError),
        (lambda runner: runner.capture(itertools.repeat(runner.keys[0])), ConfigError),
        (lambda runner: runner.capture(itertools.count()), ConfigError),
        (lambda runner: runner.capture(5), ConfigError),
        (lambda runner: runner.capture([(FULL, [])]), ConfigError),
        (lambda runner: runner.capture([([], runner.keys[0][1])]), ConfigError),
        (lambda runner: runner.capture([runner.keys[0] * 2]), ConfigError),
        (lambda runner: runner.capture_next(first=(FULL, [])), ConfigError),
        (lambda runner: runner.capture_next(10**5000), ConfigError),
        (lambda runner: runner.withdraw(itertools.count(), "new kernels"), ConfigError),
        (lambda runner: runner.withdraw([], 5), ConfigError),
        (lambda runner: runner.capture(progress=5), ConfigError),
        (lambda runner: runner.capture_next(allow=5), ConfigError),
    ],
)
def test_wrong_argument_of_a_runner_is_refused(call: Any, error: type[Exception]) -> None:
    with rows_runner(double) as runner:
        with pytest.raises(error):
            call(runner)
        runner.capture()
        assert torch.equal(runner.run({"x": ROWS}), ROWS * 2)


@pytest.mark.parametrize("wrong", ["num_tokens", "uniform", "num_active_loras", "exclude"])
def test_tensor_of_several_elements_in_place_of_a_number_is_refused(wrong: str) -> None:
    with RuntimeLab("FULL") as lab:
        for others in ({}, {"num_tokens": 2, "num_reqs": 2}):
            with pytest.raises((BatchError, InputMismatchError)):
                lab.runtime.step(values(2, 2), **{**others, wrong: torch.ones(2)})
        with pytest.raises(BatchError):
            lab.runtime.key_for(**{"num_tokens": 2, wrong: torch.ones(2)})
        for keys in (5, itertools.count()):
            with pytest.raises(ConfigError):
                lab.runtime.withdraw(keys, "new kernels")


@pytest.mark.parametrize("given", [[ROWS], "x", None])
def test_example_of_no_values_by_name_is_refused(given: Any) -> None:
    with (
        rows_runner(double, examples=lambda sizes, seed: Example(given)) as runner,
        pytest.raises(ConfigError, match="examples"),
    ):
        runner.capture()


def test_capture_of_a_lazy_module_is_refused_and_leaves_it_usable() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(4))
    with rows_runner(lambda x: model(x)) as runner:
        with pytest.raises(ConfigError, match="lazy") as caught:
            runner.capture()
        assert caught.value.subject == "model.0.weight"
        eager = runner.run({"x": ROWS})  # Makes the parameters.
        runner.capture()
        assert torch.equal(runner.run({"x": ROWS}), eager)
        assert runner.last_decision is not None
        assert runner.last_decision.mode is FULL


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn])
def test_value_without_strides_is_refused_after_one_with_them(make: Any) -> None:
    with rows_runner(double) as runner:
        runner.capture()
        for _ in range(2):
            assert torch.equal(runner.run({"x": ROWS}), ROWS * 2)
            with pytest.raises(InputMismatchError, match="dense"):
                runner.run({"x": make(ROWS)})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_value_is_refused_wherever_it_is_given(layout: Any) -> None:
    value = {"x": torch.nested.nested_tensor([ROWS, ROWS[:1]], layout=layout)}
    with rows_runner(double) as runner:
        for _ in range(2):  # Before a capture, and after it.
            for way in ({}, {"sizes": {"n": 2}}, {"key": runner.key(n=2)}):
                with pytest.raises(InputMismatchError, match="a nested tensor"):
                    runner.run(value, **way)
            runner.capture()
        assert torch.equal(runner.run({"x": ROWS}), ROWS * 2)
    with (
        rows_runner(double, examples=None) as runner,
        pytest.raises(InputMismatchError, match="a nested tensor"),
    ):
        runner.capture(like=value)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda call: call.__name__
)
def test_copy_of_what_owns_graphs_is_refused(duplicate: Any) -> None:
    with rows_runner(double) as runner, RuntimeLab("FULL") as lab:
        runner.capture()
        for owner in (runner, runner.library, lab.runtime):
            with pytest.raises(ConfigError, match=f"a copy of a {type(owner).__name__}"):
                duplicate(owner)
        assert torch.equal(runner.run({"x": ROWS}), ROWS * 2)


def test_progress_that_is_false_tells_nobody() -> None:
    told: list[int] = []
    with rows_runner(double, (2, 4), examples=random_rows) as runner:
        runner.capture([runner.key(n=4)], progress=False)
        tell: Progress = lambda done, total, key: told.append(done)  # noqa: E731
        runner.capture(progress=tell)
    assert told == [1, 2]

"""What runs of a capture that fails wrote, and nobody declared, is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from graphrt import BatchDescriptor, TensorStateGuard, break_point
from graphrt.errors import StateAdvancedError
from graphrt.graphs import writes
from graphrt.graphs.writes import KeptTensors
from lab import PIECEWISE, Lab, rows_runner


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


def counting(cell: Tensor) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        cell.add_(1)
        return x + cell

    return step


@pytest.mark.parametrize("warmups", [0, 1, 3])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_write_refused_is_put_back(lab: Lab, warmups: int, on_error: Any) -> None:
    cell = torch.tensor([7.0, 8.0, 9.0])
    jobs = [
        lab.job(lab.wrap(counting(cell[1:2])), torch.ones(2), key=key) for key in lab_keys(4, 8)
    ]
    with pytest.raises(StateAdvancedError) if on_error == "raise" else nullcontext():
        lab.capture_all(*jobs, warmups=warmups, on_error=on_error)
    assert cell.tolist() == [7, 8, 9]
    assert not lab.library.programs


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "out": lambda cell: torch.add(cell, 1, out=cell),
    "outs": lambda cell: torch.aminmax(torch.arange(3.0) + 1, dim=0, out=(cell[0], cell[1])),
    "list": lambda cell: torch._foreach_add_([torch.zeros(2), cell], 1),
    "index": lambda cell: cell.index_copy_(0, torch.arange(1), torch.ones(1)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_refused_is_put_back_whichever_argument_is_written(
    lab: Lab, write: Callable[[Tensor], Any]
) -> None:
    cell = torch.tensor([7.0, 8.0])

    def step(x: Tensor) -> Tensor:
        write(cell)
        return x + cell

    with pytest.raises(StateAdvancedError):
        lab.capture_all(lab.job(lab.wrap(step), torch.ones(2), key=BatchDescriptor(4)))
    assert cell.tolist() == [7, 8]


def batch_norm(x: Tensor, mean: Tensor, var: Tensor, *, training: bool) -> Tensor:
    return functional.batch_norm(x, mean, var, training=training)


def instance_norm(x: Tensor, mean: Tensor, var: Tensor, *, training: bool) -> Tensor:
    return functional.instance_norm(x.t()[None], mean, var, use_input_stats=training)[0].t()


def update_stats(x: Tensor, mean: Tensor, var: Tensor, *, training: bool) -> Tensor:
    return x + torch.batch_norm_update_stats(x, mean if training else None, None, 0.1)[0]


@pytest.mark.parametrize("norm", [batch_norm, instance_norm, update_stats])
@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("warmups", [0, 1])
def test_statistics_that_no_schema_tells_are_refused_and_put_back_or_guarded(
    lab: Lab, norm: Callable[..., Tensor], is_inference: bool, warmups: int
) -> None:
    mean, var = torch.zeros(3), torch.ones(3)

    def step(x: Tensor) -> Tensor:
        with torch.inference_mode(is_inference):
            return norm(x, mean, var, training=True) + 1

    x = torch.arange(6.0).view(2, 3)
    for guard in (None, TensorStateGuard([])):
        with pytest.raises(StateAdvancedError, match=r"mean is written at .*\.py"):
            lab.capture_all(lab.job(lab.wrap(step), x), warmups=warmups, state=guard)
        assert (mean.tolist(), var.tolist()) == ([0, 0, 0], [1, 1, 1])
    state = TensorStateGuard([mean, var])
    (program,) = lab.capture_all(lab.job(lab.wrap(step), x), warmups=warmups, state=state).programs
    assert (mean.tolist(), var.tolist()) == ([0, 0, 0], [1, 1, 1])
    program(x)
    torch.testing.assert_close(mean, x.mean(0) / 10)


@pytest.mark.parametrize("norm", [batch_norm, instance_norm, update_stats])
def test_statistics_that_are_only_read_need_no_guard(lab: Lab, norm: Callable[..., Tensor]) -> None:
    mean, var, x = torch.ones(3), torch.ones(3), torch.arange(6.0).view(2, 3)
    step = lab.wrap(lambda x: norm(x, mean, var, training=False) + 1)
    (program,) = lab.capture_all(lab.job(step, x)).programs
    torch.testing.assert_close(program(x), norm(x, mean, var, training=False) + 1)


@pytest.mark.parametrize("is_declared", [False, True])
def test_statistics_of_an_eager_segment_are_refused_and_put_back_or_guarded(
    lab: Lab, is_declared: bool
) -> None:
    norm = torch.nn.BatchNorm1d(3, affine=False)
    before = {name: kept.clone() for name, kept in norm.state_dict().items()}
    kept = [norm.num_batches_tracked]
    kept += [norm.running_mean, norm.running_var] if is_declared else []
    step = lab.wrap(lambda x: break_point(norm)(x * 2) + 1, PIECEWISE)
    job = lab.job(step, torch.arange(6.0).view(2, 3))
    told = pytest.raises(StateAdvancedError, match="running_mean is written at")
    with nullcontext() if is_declared else told:
        lab.capture_all(job, state=TensorStateGuard(kept))
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)


def lab_keys(*sizes: int) -> list[BatchDescriptor]:
    return [BatchDescriptor(size) for size in sizes]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_write_refused_by_a_runner_is_put_back(on_error: Any) -> None:
    cell = torch.zeros(1)
    options: Any = {"sizes": (4, 8), "on_capture_error": on_error}
    with rows_runner(counting(cell), **options) as runner:
        for capture in (runner.capture_next, runner.capture):
            with pytest.raises(StateAdvancedError) if on_error == "raise" else nullcontext():
                capture()
            assert cell.item() == 0


def test_write_refused_is_put_back_where_another_key_serves() -> None:
    cell = torch.zeros(1)

    def step(x: Tensor) -> Tensor:
        return x + (cell.add_(1) if len(x) == 8 else cell)

    with rows_runner(step, (4, 8), on_capture_error="skip") as runner:
        runner.capture()
        assert len(runner.report().failures) == 1
        assert cell.item() == 0
        assert runner.run({"x": torch.ones(4, 4)}).tolist() == [[1, 1, 1, 1]] * 4


def test_write_of_an_eager_segment_that_is_refused_is_put_back(lab: Lab) -> None:
    cell = torch.zeros(2)
    segment = break_point(lambda x: x + cell.add_(1))
    with pytest.raises(StateAdvancedError):
        lab.capture(lab.wrap(lambda x: segment(x + 1) + 1, PIECEWISE), torch.ones(2))
    assert cell.tolist() == [0, 0]


def test_write_of_an_eager_segment_before_an_error_is_put_back(lab: Lab) -> None:
    cell = torch.zeros(2)
    segment = break_point(lambda x: x + cell.add_(1))

    def model(x: Tensor) -> Tensor:
        segment(x + 1)
        raise KeyError("late")

    with pytest.raises(KeyError):
        lab.capture(lab.wrap(model, PIECEWISE), torch.ones(2))
    assert cell.tolist() == [0, 0]


def test_first_run_that_fills_a_table_keeps_it_where_a_graph_reads_it(lab: Lab) -> None:
    model = SimpleNamespace(table=torch.zeros(2), is_filled=False)

    def step(x: Tensor, is_wrong: bool) -> Tensor:
        if not model.is_filled:
            model.table.fill_(3)
            model.is_filled = True
        return x.nonzero() if is_wrong else x + model.table

    wrapper = lab.wrap(step)
    jobs = [
        lab.job(wrapper, torch.ones(2), size == 8, key=BatchDescriptor(size)) for size in (8, 4)
    ]
    lab.capture_all(*jobs, on_error="skip")
    assert model.table.tolist() == [3, 3]
    assert len(lab.library.programs) == 1


def test_first_run_that_fills_a_table_leaves_nothing_where_all_keys_fail(lab: Lab) -> None:
    model = SimpleNamespace(table=torch.zeros(2), is_filled=False)

    def step(x: Tensor) -> Tensor:
        if not model.is_filled:
            model.table.fill_(3)
            model.is_filled = True
        return x.nonzero() + model.table[0]

    lab.capture_all(lab.job(lab.wrap(step), torch.ones(2)), on_error="skip")
    assert not model.is_filled
    assert model.table.tolist() == [0, 0]


def test_only_what_nothing_declares_is_copied(lab: Lab, monkeypatch: Any) -> None:
    kept = []
    monkeypatch.setattr(KeptTensors, "keep", lambda self, tensor, of: kept.append(tensor))
    guarded, named, table = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    model = SimpleNamespace(is_filled=False)

    def step(x: Tensor) -> Tensor:
        guarded.add_(1)
        named.add_(1)
        if not model.is_filled:
            table.add_(1)
            model.is_filled = True
        scratch = x.new_zeros(2)
        return scratch.add_(x).add_(guarded)

    options: Any = {"state": TensorStateGuard([guarded]), "may_overwrite": [named]}
    lab.capture_all(lab.job(lab.wrap(step), torch.ones(2)), **options)
    assert len(kept) == 1
    assert kept[0] is table


@pytest.mark.parametrize(
    ("options", "left"), [({"observe": "never"}, 1), ({"checks": "none"}, 1), ({}, 0)]
)
def test_run_that_nobody_observes_leaves_what_it_wrote(
    lab: Lab, options: dict[str, Any], left: int
) -> None:
    cell = torch.zeros(1)

    def step(x: Tensor) -> Tensor:
        cell.add_(1)
        return x.nonzero()

    lab.capture_all(lab.job(lab.wrap(step), torch.ones(2)), on_error="skip", **options)
    assert cell.item() == left


def test_state_too_large_to_copy_stays_written(lab: Lab, monkeypatch: Any) -> None:
    monkeypatch.setattr(writes, "MAX_KEPT_BYTES", 40)
    small, large = torch.zeros(2), torch.zeros(9)

    def step(x: Tensor) -> Tensor:
        small.add_(1)
        large.add_(1)
        return x + 1

    with pytest.raises(StateAdvancedError):
        lab.capture_all(lab.job(lab.wrap(step), torch.ones(2)))
    assert not small.any()
    assert large.tolist() == [1] * 9


def test_state_without_memory_for_a_copy_stays_written(lab: Lab, monkeypatch: Any) -> None:
    def no_memory(storage: torch.UntypedStorage) -> Tensor:
        raise torch.OutOfMemoryError(f"no {storage.nbytes()} bytes")

    cell = torch.zeros(1)
    monkeypatch.setattr(writes, "whole_of", no_memory)
    with pytest.raises(StateAdvancedError):
        lab.capture_all(lab.job(lab.wrap(counting(cell)), torch.ones(2)))
    assert cell.item() > 0


def test_copy_is_freed_with_its_tensor() -> None:
    kept, tensor, other = KeptTensors(), torch.zeros(4), torch.zeros(4)
    kept.keep(tensor, "a")
    kept.keep(other, "b")
    tensor.add_(1)
    other.add_(1)
    del other
    assert len(kept._kept) == 1
    assert kept.put_back(lambda storage, of: of == "a")
    assert tensor.tolist() == [0] * 4
    assert not kept.put_back(lambda storage, of: True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int64])
def test_every_dtype_and_view_is_put_back(lab: Lab, dtype: torch.dtype) -> None:
    with torch.inference_mode(dtype is torch.int64):
        whole = torch.arange(12).reshape(3, 4).to(dtype)
    before, part = whole.clone(), whole.t()[1:3]

    def step(x: Tensor) -> Tensor:
        with torch.inference_mode():
            part.zero_()
            whole[0].fill_(1)
        return x + 1

    with pytest.raises(StateAdvancedError):
        lab.capture_all(lab.job(lab.wrap(step), torch.ones(2)))
    assert torch.equal(whole, before)


def test_warm_up_that_compiles_compiles(lab: Lab) -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    inner = torch.compile(lambda x: x * 2, backend=backend)

    def step(x: Tensor) -> Tensor:
        y: Tensor = inner(x + 1)
        return y + 1

    lab.capture_all(lab.job(lab.wrap(step), torch.ones(2)))
    assert len(compiled) == 1
    assert step(torch.ones(2)).tolist() == [5, 5]
    assert len(compiled) == 1

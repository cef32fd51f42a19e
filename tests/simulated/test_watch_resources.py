"""What resources own and graphs read: ``prepare`` may set it anew, but not somewhere else."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from graphrt import Example, break_point
from graphrt.errors import InvalidProgramError, VerificationError
from lab import random_rows, rows_runner


class Meta(NamedTuple):
    scales: torch.Tensor


class Scales:
    """One number for each row, in a buffer that grows with the batch."""

    def __init__(self, held):
        self.buffer, self.held = torch.ones(4), held
        self.kept = held(self.buffer)

    def prepare(self, key, step_info):
        rows = key.num_tokens
        if rows > len(self.buffer):
            self.buffer = torch.ones(rows)
        if step_info is not None:
            self.buffer[: len(step_info)] = torch.tensor(step_info)
        self.kept = self.held(self.buffer[:rows])


class OfKey(Scales):
    """A buffer of its own for each key: other memory before each run, and right."""

    def __init__(self, held):
        self.by_key = {rows: torch.ones(rows) for rows in range(1, 10)}
        super().__init__(held)

    def prepare(self, key, step_info):
        self.buffer = self.by_key[key.num_tokens]
        super().prepare(key, step_info)


class Anew(Scales):
    """Another buffer in each run."""

    def prepare(self, key, step_info):
        self.buffer = torch.empty(9)
        super().prepare(key, step_info)


FORMS = {
    "tensor": (lambda scales: scales, lambda kept: kept),
    "object": (lambda scales: SimpleNamespace(scales=scales), lambda kept: kept.scales),
    "named tuple": (Meta, lambda kept: kept.scales),
    "dict in list": (lambda scales: [{"scales": scales}], lambda kept: kept[0]["scales"]),
}
forms = pytest.mark.parametrize("form", FORMS)


@break_point
def scaled_eagerly(x, resource, read):
    return x * read(resource.kept)[: len(x), None]


def examples(sizes, seed):
    values = random_rows(sizes, seed)
    return Example(values, step_info=[1.0 + seed + row for row in range(sizes["n"])])


def scaling(kind, form, sizes=(2, 4), *, is_eager=False, **options):
    held, read = FORMS[form]
    resource = kind(held)

    def scale(x):
        if is_eager:
            return scaled_eagerly(x + 0, resource, read) + 0
        return x * read(resource.kept)[: len(x), None]

    options = {"watch": "always"} | options
    options |= {"resources": [resource], "examples": examples}
    return rows_runner(scale, sizes, **options)


def is_right(runner, rows, first):
    info = [float(first + row) for row in range(rows)]
    found = runner.run({"x": torch.ones(rows, 4)}, step_info=info)
    return torch.equal(found, torch.tensor(info)[:, None].expand(rows, 4))


class Moved(Scales):
    """Another memory of the same tensor for a larger batch."""

    def prepare(self, key, step_info):
        if key.num_tokens > len(self.buffer):
            self.buffer.data = torch.ones(key.num_tokens)
            self.kept = self.held(self.buffer)
        if step_info is not None:
            self.buffer[: len(step_info)] = torch.tensor(step_info)


@forms
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("watch", ["always", "spread"])
def test_tensor_of_a_resource_that_gets_other_memory_ends_the_graph(form, mode, watch) -> None:
    with scaling(Moved, form, modes=(mode,), watch=watch) as runner:
        runner.capture()
        assert is_right(runner, 3, 2)
        assert is_right(runner, 6, 3)  # Eager, and the memory moves.
        with pytest.raises(InvalidProgramError, match=r"replaced by prepare\(\): resource\."):
            list(map(partial(is_right, runner, 3), range(runner.num_watched)))
        assert is_right(runner, 3, 4)
        assert runner.last_decision.reason.name == "INVALIDATED"


@forms
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_buffer_that_prepare_replaces_later_ends_the_graph_that_reads_it(form, mode) -> None:
    with scaling(Scales, form, modes=(mode,)) as runner:
        runner.capture()
        assert all(is_right(runner, rows, 2) for rows in (3, 2, 4))
        assert is_right(runner, 6, 3)  # Eager, and the buffer grows.
        with pytest.raises(InvalidProgramError, match=r"replaced by prepare\(\): resource.kept"):
            is_right(runner, 3, 4)
        assert is_right(runner, 3, 4)
        assert runner.last_decision.reason.name == "INVALIDATED"
        runner.capture()
        assert all(is_right(runner, rows, 5) for rows in (3, 2, 4))
        assert runner.last_decision.reason.name == "HIT"


@forms
def test_replaced_buffer_ends_graphs_of_captures_that_were_not_observed(form) -> None:
    """Those between the largest and the smallest key, as on CUDA."""
    with scaling(Scales, form, (1, 2, 3, 4), observe="ends") as runner:
        runner.capture()
        assert is_right(runner, 6, 3)
        for rows in (3, 2):
            with pytest.raises(InvalidProgramError):
                is_right(runner, rows, 4)
            assert is_right(runner, rows, 4)


@forms
@pytest.mark.parametrize("observe", ["always", "ends"])
def test_buffer_for_each_key_is_no_replacement(form, observe) -> None:
    with scaling(OfKey, form, (1, 2, 3, 4), observe=observe) as runner:
        runner.capture()
        for number, rows in enumerate((3, 2, 6, 4, 1, 3, 2)):
            assert is_right(runner, rows, number)
            assert runner.last_decision.mode.name == ("NONE" if rows == 6 else "FULL")


@forms
def test_eager_segment_may_read_another_buffer_in_each_run(form) -> None:
    with scaling(Anew, form, modes=("PIECEWISE",), is_eager=True) as runner:
        runner.capture()
        for number, rows in enumerate((3, 2, 6, 4)):
            assert is_right(runner, rows, number)
            assert runner.last_decision.mode.name == ("NONE" if rows == 6 else "PIECEWISE")


@forms
def test_graph_that_reads_another_buffer_in_each_run_is_refused_by_its_name(form) -> None:
    with scaling(Anew, form) as runner, pytest.raises(VerificationError) as raised:
        runner.capture()
    assert raised.value.do.startswith("moved since the capture: resource.kept")


def test_module_of_a_resource_that_is_replaced_is_noticed() -> None:
    resource = SimpleNamespace(prepare=lambda key, step_info: None, layer=torch.nn.Linear(4, 4))
    options = {"resources": [resource], "watch": "always"}
    with rows_runner(lambda x: resource.layer(x), **options) as runner:
        runner.capture()
        resource.layer = torch.nn.Linear(4, 4)
        x = torch.ones(2, 4)
        assert torch.equal(runner.run({"x": x}), resource.layer(x))
        assert runner.last_decision.reason.name == "INVALIDATED"

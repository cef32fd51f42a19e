"""Wrong arguments of the parts that engines are made of end in errors of graphrt, where given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import pytest
import torch

from graphrt import (
    BufferSet,
    BufferSpec,
    CaptureOptions,
    CUDAGraphOptions,
    CUDAGraphRunner,
    CUDAGraphWrapper,
    CustomOp,
    Decision,
    GraphBudget,
    GraphLibrary,
    OutputSpec,
    Padding,
    Reason,
    SimulatedDevice,
    Workspace,
    break_at,
    capture_program,
)
from graphrt.config import UBatchConfig
from graphrt.errors import ConfigError, GraphrtError, shown
from graphrt.ubatch import UBatchWrapper, make_slices
from lab import FULL, KEY

CPU = torch.device("cpu")
ROWS = torch.ones(2, 4)
PAIRS = (torch.ones(4), {"n": 4}), (torch.ones(2), {"n": 2})


def endless() -> Iterator[int]:
    """More items than any list may have; drained, it fails the test."""
    yield from range(2**16 + 2)
    raise AssertionError("drained")


WRONG: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: 3,
    lambda: -1,
    lambda: 2.5,
    lambda: "a",
    list,
    object,
    lambda: torch.ones(2),
    lambda: numpy.ones(2),
    lambda: 10**5000,
    lambda: float("nan"),
    dict,
    lambda: b"x",
    lambda: [5],
    lambda: {5: 5},
    lambda: True,
    lambda: int,
    endless,
)
"""Each makes a value of another kind or range; which of them a parameter takes, ``PARTS`` says."""


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Twice(CustomOp):
    forward_native = staticmethod(double)


def spec() -> BufferSpec:
    return BufferSpec("x", ("n", 4), torch.float32)


def buffers(**changes: Any) -> BufferSet:
    given = {"specs": [spec()], "capacity": {"n": 8}, "device": CPU}
    return BufferSet(**{**given, "axis_sizes": lambda key: {"n": 8}, **changes})


def in_a_library(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with a library of its own, unless it is given one."""

    def run(**given: Any) -> None:
        with GraphLibrary(SimulatedDevice()) as library, torch.no_grad():
            call(**{"library": library, **given})

    return run


@in_a_library
def wrap_split(**given: Any) -> None:
    UBatchWrapper(**given).close()


@in_a_library
def step_of(library: GraphLibrary, key: Any) -> None:
    with library.capture_scope() as scope, scope.step(FULL, key):
        pass


def bound(outputs: Any, axes: Mapping[str, Any], **padded: int) -> Any:
    return OutputSpec(axes).bind(outputs, padded)


capture = in_a_library(capture_program)
captured = {"owner": "o", "mode": FULL, "key": KEY, "fn": double, "args": (ROWS,)}
wrapped = {"runnable": double, "runtime_mode": FULL}
split = {**wrapped, "config": UBatchConfig()}


def suspended(keep_programs: Any) -> None:
    with GraphLibrary("simulated") as library:
        library.suspend(keep_programs)


def executed(decision: Any) -> None:
    runner = CUDAGraphRunner(
        double, inputs=[spec()], outputs=OutputSpec({"": "n"}), device="simulated", sizes={"n": [2]}
    )
    try:
        runner.execute(decision, {"n": 2}, {"x": ROWS})
    finally:
        runner.close()


PARTS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    # What is called with each wrong value, and which of them are right for it, as shown.
    "BufferSet specs": (lambda v: buffers(specs=v, capacity={"n": 8}), ("[]", "{}")),
    "BufferSet capacity": (lambda v: buffers(capacity=v), ()),
    "BufferSet axis_sizes": (lambda v: buffers(axis_sizes=v), ("<class 'int'>",)),
    "BufferSet device": (lambda v: buffers(device=v), ()),
    "sizes of a key": (lambda v: buffers(axis_sizes=lambda key: v).bind(KEY), ()),
    "size of a key": (
        lambda v: buffers(axis_sizes=lambda key: {"n": v}).bind(KEY),
        ("3", "True"),
    ),
    "padding": (lambda v: buffers().bind(KEY).padding(v), ("3", "True")),
    "unpadded": (lambda v: buffers().unpadded({"n": v}), ("3", "True")),
    "stage": (lambda v: buffers().bind(KEY).stage({"n": v}, {"x": ROWS}), ()),
    "sizes_of": (lambda v: buffers().bind(KEY).sizes_of(v, 2), ("{}", "{5: 5}")),
    "infer first": (lambda v: OutputSpec.infer(v, PAIRS[1]), ()),
    "infer second": (lambda v: OutputSpec.infer(PAIRS[0], v), ()),
    "infer sizes": (lambda v: OutputSpec.infer((ROWS, v), PAIRS[1]), ()),
    "bind padded": (
        lambda v: OutputSpec({"": "n"}).bind(ROWS, v),
        ("None", "{}", "{5: 5}"),
    ),
    "unpad": (lambda v: bound(ROWS, {"": "n"}, n=2).unpad(v), ("True",)),
    "unpad of an axis": (lambda v: bound(ROWS, {"": "n"}, n=2).unpad({"n": v}), ("True",)),
    "unpad of two axes": (
        lambda v: bound(ROWS, {"": {0: "n", 1: "m"}}, n=2, m=4).unpad(v),
        ("True",),
    ),
    "unpad by a function": (lambda v: bound(ROWS, {"": lambda n: v}).unpad({}), ("True",)),
    "generators": (lambda v: GraphLibrary("simulated", generators=v).close(), ("[]", "{}")),
    "hooks": (lambda v: GraphLibrary("simulated", after_resume=v).close(), ("[]", "{}")),
    "GraphBudget": (lambda v: GraphBudget(max_bytes=v), ("None", "3")),
    "capture_program library": (lambda v: capture(**captured, library=v), ()),
    "capture_program owner": (lambda v: capture(**{**captured, "owner": v}), ("'a'",)),
    "capture_program mode": (lambda v: capture(**{**captured, "mode": v}), ()),
    "capture_program key": (lambda v: capture(**{**captured, "key": v}), ()),
    "capture_program options": (lambda v: capture(**captured, options=v), ("None",)),
    "CUDAGraphWrapper options": (
        lambda v: in_a_library(CUDAGraphWrapper)(**wrapped, cudagraph_options=v),
        ("None",),
    ),
    "CUDAGraphWrapper name": (
        lambda v: in_a_library(CUDAGraphWrapper)(**wrapped, name=v),
        ("None", "'a'"),
    ),
    "UBatchWrapper library": (lambda v: wrap_split(**split, library=v), ()),
    "UBatchWrapper config": (lambda v: wrap_split(**{**split, "config": v}), ()),
    "UBatchWrapper mode": (lambda v: wrap_split(**{**split, "runtime_mode": v}), ()),
    "UBatchWrapper outputs": (lambda v: wrap_split(**split, outputs=v), ("None",)),
    "key of a scope's step": (lambda v: step_of(key=v), ()),
    "break_at": (lambda v: break_at(v, names="a").__enter__(), ()),
    "optional input": (lambda v: BufferSpec("x", (4,), torch.float32, optional=v), ("True",)),
    "written input": (lambda v: BufferSpec("x", (4,), torch.float32, written=v), ("True",)),
    "arbitrary padding": (lambda v: Padding.fill(0, arbitrary=v), ("True",)),
    "arbitrary zeros": (lambda v: Padding.zero(arbitrary=v), ("True",)),
    "weak_outputs": (lambda v: CaptureOptions(weak_outputs=v), ("True",)),
    "debug_log_enable": (lambda v: CUDAGraphOptions(debug_log_enable=v), ("True",)),
    "gc_disable": (lambda v: CUDAGraphOptions(gc_disable=v), ("True",)),
    "weak_ref_output": (lambda v: CUDAGraphOptions(weak_ref_output=v), ("True",)),
    "strict device": (lambda v: SimulatedDevice(strict=v), ("True",)),
    "workspace_model": (lambda v: SimulatedDevice(workspace_model=v), ("True",)),
    "keep_programs": (lambda v: suspended(v), ()),
    "make_slices lengths": (lambda v: make_slices(v, 8, 2, 2), ("[]", "{}", "[5]", "{5: 5}")),
    "make_slices tokens": (lambda v: make_slices([1, 1], v, 2, 2), ("3",)),
    "make_slices requests": (lambda v: make_slices([4], 8, v, 2), ("3", "True")),
    "make_slices number": (lambda v: make_slices([4, 4], 8, 2, v), ("3", "True")),
    "make_slices query_len": (lambda v: make_slices([4, 4], 8, 2, 2, v), ("3", "True")),
    "make_slices cuts": (
        lambda v: make_slices([8], 8, 1, 2, split_points=v),
        ("None", "[5]", "{5: 5}"),
    ),
    "decision": (lambda v: executed(v), ()),
    "mode of a decision": (lambda v: executed(Decision(v, KEY, Reason.HIT)), ()),
    "CustomOp": (lambda v: CustomOp.register("twice_of_parts")(Twice)(v, "cpu"), ()),
}


def is_taken(call: Callable[[Any], Any], value: Any) -> bool:
    """False if ``value`` is refused by an error of graphrt; any other error passes."""
    try:
        call(value)
    except GraphrtError:
        return False
    return True


@pytest.mark.parametrize("part", PARTS)
def test_argument_of_a_part_of_another_kind_is_refused(part: str) -> None:
    call, right = PARTS[part]
    assert {shown(make()) for make in WRONG if is_taken(call, make())} == set(right)


@pytest.mark.parametrize("shape", [None, 3, "ab", (-1,), (1.5,), (2, -2)])
def test_workspace_of_no_shape_is_refused(shape: Any) -> None:
    scratch = Workspace("scratch")
    scratch.get((16,), torch.int8)
    with pytest.raises(ConfigError, match="scratch"):
        scratch.get(shape, torch.int8)


def test_workspace_of_no_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="scratch"):
        Workspace("scratch").get([2], "int8")


@pytest.mark.parametrize("pool", [[], {}, numpy.ones(2), "a", 3])
def test_library_pool_of_another_kind_is_refused(pool: Any) -> None:
    with pytest.raises(ConfigError, match="pool"):
        GraphLibrary("simulated", pool=pool)

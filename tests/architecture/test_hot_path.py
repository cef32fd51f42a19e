"""The path of a step is a golden list: what runs, traced, neither waits, logs nor reads back."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import graphrt
from graphrt import (
    BufferSpec,
    CompilationConfig,
    OutputSpec,
    Padding,
    Runtime,
    RuntimeConfig,
    RuntimeMode,
    break_point,
)

SOURCE = Path(graphrt.__file__).parent

# Every function of graphrt that a step runs, in order. The device's replay is left out.
DISPATCH = [
    "runtime/runtime.py Runtime.step",
    "dispatch/dispatcher.py CUDAGraphDispatcher.dispatch",
]
EXECUTE = [
    "runner/runner.py CUDAGraphRunner.execute",
    "graphs/watch.py Watch.look",
    "runner/executor.py Executor.replay",
    "graphs/buffers.py BoundBuffers.stage_without_grad",
]
GOLDEN = {
    "FULL": [*DISPATCH, *EXECUTE, "graphs/outputs.py BoundOutputs.unpad"],
    "PIECEWISE": [
        *DISPATCH,
        *EXECUTE,
        "context.py ForwardContext.__enter__",
        "<graphrt model PIECEWISE BatchDescriptor(num_tokens=4)> replay",
        "context.py ForwardContext.__exit__",
        "graphs/outputs.py BoundOutputs.unpad",
    ],
}
WAITING = {"item", "tolist", "cpu", "numpy", "synchronize", "print", "warn", "debug", "info", "log"}


@break_point
def middle(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def model(*, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = middle(x * 2) * 3
    return result


def examples(sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(sizes["tokens"]) + seed}


def traced(step: Callable[[], Any]) -> list[str]:
    """The functions of graphrt that ``step`` calls, outside the device room, in order."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith("<graphrt model"):
            called.append(f"{code.co_filename} {code.co_qualname}")
        elif code.co_filename.startswith(str(SOURCE)):
            place = Path(code.co_filename).relative_to(SOURCE).as_posix()
            if not place.startswith("device/"):
                called.append(f"{place} {code.co_qualname}")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("policy", sorted(GOLDEN))
def test_step_calls_the_golden_functions(policy: str) -> None:
    with (
        Runtime(
            model,
            inputs=[BufferSpec("x", ("tokens",), torch.int64, Padding.zero())],
            outputs=OutputSpec({"": "tokens"}, "view"),
            examples=examples,
            config=RuntimeConfig(
                compilation=CompilationConfig(cudagraph_mode=policy, cudagraph_capture_sizes=[4]),
                max_num_seqs=4,
                max_num_batched_tokens=8,
            ),
            device="simulated",
        ) as runtime,
        torch.no_grad(),
    ):
        runtime.capture()
        x = torch.arange(3)

        def step() -> None:
            runtime.step({"x": x}, num_tokens=3, num_reqs=3, uniform=True, exclude=frozenset())

        step()  # The first step of a size makes its views.
        called = traced(step)
        assert runtime.last_decision is not None
        assert runtime.last_decision.mode is RuntimeMode[policy]
    # User code within the replay is the user's own.
    assert called == GOLDEN[policy]


@pytest.mark.parametrize(
    "name", sorted({name for names in GOLDEN.values() for name in names if name[0] != "<"})
)
def test_hot_function_never_waits_logs_or_reads_back(name: str) -> None:
    place, _, qualified = name.partition(" ")
    owner, _, method = qualified.partition(".")
    tree = ast.parse((SOURCE / place).read_text(encoding="utf-8"))
    [found] = [
        member
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == owner
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name == method
    ]
    for node in ast.walk(found):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = called or (node.func.id if isinstance(node.func, ast.Name) else "")
            assert called not in WAITING, f"{place}:{node.lineno} {name} calls {called}"
        assert not isinstance(node, ast.ListComp | ast.DictComp | ast.SetComp), (
            f"{place}:{node.lineno} {name} builds a container every step"
        )

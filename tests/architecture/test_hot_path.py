"""The hot path is a short written list. What stands on it neither waits, logs nor reads back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "graphrt"

# Every function a replayed step runs. The generated checker and replay are strings: their makers
# are not on the path.
HOT = {
    "dispatch/dispatcher.py": ["CUDAGraphDispatcher.dispatch"],
    "context.py": [
        "ForwardContext.__init__",
        "ForwardContext.__enter__",
        "ForwardContext.__exit__",
    ],
    "graphs/wrapper.py": ["CUDAGraphWrapper.__call__"],
    "graphs/program.py": ["Program.__call__"],
    "graphs/buffers.py": ["BoundBuffers.stage"],
    "graphs/outputs.py": ["BoundOutputs.take", "OutputSpec.expire", "_same"],
    "runtime/runtime.py": ["Runtime.step", "Runtime._replay_sampled"],
    "runtime/steps.py": ["Steps.replay"],
}

WAITING = {"item", "tolist", "cpu", "numpy", "synchronize", "print", "warn", "debug", "info", "log"}


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    found[f"{node.name}.{member.name}"] = member
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = node
    return found


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place, names in HOT.items() for name in names]
)
def test_a_hot_function_exists_and_never_waits_logs_or_reads_back(place: str, name: str) -> None:
    found = functions(ast.parse((SOURCE / place).read_text(encoding="utf-8")))
    assert name in found, f"{place} has no {name}; the list of hot functions is out of date"
    for node in ast.walk(found[name]):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = called or (node.func.id if isinstance(node.func, ast.Name) else "")
            assert called not in WAITING, f"{place}:{node.lineno} {name} calls {called}"
        assert not isinstance(node, ast.ListComp | ast.DictComp | ast.SetComp), (
            f"{place}:{node.lineno} {name} builds a container every step"
        )

"""One room per outside API: names that may be said in one place only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "graphrt"

# Name -> where it may be said. Lint bans the imports; this also sees attribute chains.
DOORS = {
    "torch.cuda": ("device/cuda",),
    "torch.distributed": ("parallel/exchange.py",),
    "torch.fx": ("compile/",),
    "torch._dynamo": ("compile/",),
    "torch._inductor": ("compile/",),
    "os.environ": ("config/",),
    "os.getenv": ("config/",),
    "threading": ("ubatch/baton.py",),
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def names_said(tree: ast.AST) -> set[str]:
    said: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            said |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            said |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Attribute):
            said.add(dotted(node))
    return said


@pytest.mark.parametrize("name", sorted(DOORS))
def test_an_outside_api_is_named_behind_its_door_only(name: str) -> None:
    strays = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith(DOORS[name]):
            continue
        said = names_said(ast.parse(path.read_text(encoding="utf-8")))
        if any(word == name or word.startswith(name + ".") for word in said):
            strays.append(place)
    assert strays == []


def test_the_library_prints_at_the_command_line_only() -> None:
    strays = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith("cli/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and dotted(node.func) in {"print", "logging.basicConfig"}:
                strays.append(f"{place}:{node.lineno}")
    assert strays == []

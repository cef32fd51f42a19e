"""How many lines CUDA graphs cost each kind of client, counted in the examples and the README.

Counted is everything that a client writes for graphs: declarations, examples to capture with, what
attention prepares, the call of a step; where the loop is the client's own, the loop as well. Not
counted are blanks, comments, docstrings, imports, the model, and an engine's scheduling.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# client, where it is, what of it is counted ("" is all), the aim, what is reached
CLIENTS = [
    ("engine, decode batches in full graphs", "12", "OnGraphs", 30, 29),
    ("the same with prefills in pieces", "12", "OnGraphs CutAttention", 50, 31),
    ("engine that pads by itself", "13", "GraphRunner Backend PadsByItself.__init__", 45, 42),
    ("encoder over batch and length", "08", "encoder_on_graphs", 25, 13),
    ("transformers with a static cache", "10", "generate", 15, 15),
    ("denoising loop of fixed shapes", "09", "denoise denoise_on_a_graph", 12, 11),
    ("quick start of the README", "README.md", "", 12, 12),
]


def source_of(file: str) -> str:
    if file == "README.md":
        text = (ROOT / file).read_text(encoding="utf-8")
        return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    return next((ROOT / "examples").glob(f"{file}_*.py")).read_text(encoding="utf-8")


def count_lines(source: str, names: str) -> int:
    """Lines of these classes, functions and methods, or of all, decorators included."""
    tree = ast.parse(source)
    found: dict[str, ast.AST] = {"": tree}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = inner
    counted: set[int] = set()
    for name in names.split() or [""]:
        for inner in ast.walk(found[name]):
            if isinstance(inner, ast.stmt | ast.expr):
                counted |= set(range(inner.lineno, inner.end_lineno + 1))
    for inner in ast.walk(tree):
        is_text = isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
        if isinstance(inner, ast.Import | ast.ImportFrom) or is_text:
            counted -= set(range(inner.lineno, inner.end_lineno + 1))
    lines = [line.strip() for line in source.splitlines()]
    return sum(bool(lines[n - 1]) and not lines[n - 1].startswith("#") for n in counted)


@pytest.mark.parametrize(
    ("file", "counted", "aim", "reached"),
    [client[1:] for client in CLIENTS],
    ids=[client[0] for client in CLIENTS],
)
def test_client_is_as_short_as_said(file, counted, aim, reached):
    assert count_lines(source_of(file), counted) == reached
    assert reached <= aim


def test_port_is_shorter_than_graphs_by_hand():
    by_hand = count_lines(source_of("11"), "HandWritten")
    assert count_lines(source_of("12"), "OnGraphs CutAttention") < by_hand


def test_count_leaves_out_what_is_no_code():
    source = '''
import torch


class Port:
    """Two lines
    of text."""

    @staticmethod
    def step(x):  # a comment

        # another
        return torch.relu(
            x
        )
'''
    assert count_lines(source, "Port") == 6
    assert count_lines(source, "Port.step") == 5
    assert count_lines(source, "") == 6

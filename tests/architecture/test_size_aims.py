"""What must not grow back: import circles, frames around a capture, names nobody can guess."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from capture_trace import trace_capture
from dropped_words import WORDS
from imports import describe, find_circles, read_imports

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src"
MOST_FRAMES = 7


def test_import_circles_counted_are_none() -> None:
    told = []
    for package in ("graphrt", "graphrt_llm"):
        imports = read_imports(SOURCE, package)
        told += [describe(circle, imports) for circle in find_circles(imports, package)]
    assert not told, f"import circles: {len(told)}\n" + "\n".join(told)


def test_capture_traced_takes_few_frames() -> None:
    frames = trace_capture().frames
    assert frames[0].endswith(" Runtime.capture")
    assert len(frames) <= MOST_FRAMES, (
        f"{len(frames)} frames of graphrt from Runtime.capture to the recording of one graph, "
        f"at most {MOST_FRAMES}:\n" + "\n".join(frames)
    )


def definitions() -> Iterator[tuple[str, str]]:
    """Yield place and head of every function and class, and of every file as if it were one."""
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(REPOSITORY).as_posix()
        yield place, place.removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{place}:{node.lineno}", f"def {node.name}("
            elif isinstance(node, ast.ClassDef):
                yield f"{place}:{node.lineno}", f"class {node.name}("


def test_name_defined_in_src_says_no_dropped_word() -> None:
    strays = [
        f"{place} {head.removesuffix('(')}: says {word.said}"
        for place, head in definitions()
        for word in WORDS
        if word.count(head, place)
    ]
    assert not strays, f"{len(strays)} names to rename:\n" + "\n".join(strays)


def test_dropped_words_searched_are_found() -> None:
    said = {
        "def run_gap(": "gap",
        "class Window(": "window",
        "num_gaps += 1": "gap",
        "slot = self._slot(value)": "slot",
        "@dataclass(slots=True)": None,
        "the sliding window of attention": None,
        "self._term = _Term()": "_Term",
        "x = torch.cuda.Stream()  # it stands\n    # in front of nobody's": "stands in",
        "capture, not recapture": None,
    }
    for text, word in said.items():
        found = [w.said for w in WORDS if w.count(text, "src/graphrt/graphs/builder.py")]
        assert (word in found) if word else not found, (text, found)

"""Print the longest functions, largest files and widest importers: questions, no gate."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
SHOWN = 8


def main() -> None:
    functions: list[tuple[int, str]] = []
    files: list[tuple[int, str]] = []
    importers: list[tuple[int, str]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        place = path.relative_to(SOURCE).as_posix()
        files.append((text.count("\n"), place))
        own: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((lines, f"{place}:{node.lineno} {node.name}"))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphrt"):
                own.add(node.module or "")
        importers.append((len(own), place))
    print(f"{sum(lines for lines, _ in files)} lines in {len(files)} files")
    for title, rows in (
        ("longest functions (lines)", functions),
        ("largest files (lines)", files),
        ("widest importers (own modules)", importers),
    ):
        print(title)
        for count, place in sorted(rows, reverse=True)[:SHOWN]:
            print(f"  {count:5} {place}")


if __name__ == "__main__":
    main()

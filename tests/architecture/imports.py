"""Which module of a package imports which, and where the imports form a circle."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

Imports = dict[str, dict[str, int]]
"""Module -> each module it imports -> the first line that does."""


@cache
def read_imports(source: Path, package: str) -> Imports:
    """Read every import statement of ``package``, a folder of ``source``.

    Imports under ``if TYPE_CHECKING`` and inside functions count too. ``from a.b import X`` is an
    edge to ``a.b``, or to ``a.b.X`` where that is a module. To import the module ``a.b`` is no
    edge to the package ``a``.
    """
    trees = {}
    packages = set()
    for path in sorted((source / package).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
        if parts[-1] == "__init__":
            packages.add(name)
    bound = {name: _bound_names(trees[name], name) for name in packages}

    imports: Imports = {}
    for name, tree in trees.items():
        room = name if name in packages else name.rpartition(".")[0]
        imports[name] = {}
        for node in ast.walk(tree):
            for base, last in _asked(node, room):
                module = f"{base}.{last}"
                is_module = module in trees and last not in bound.get(base, ())
                wanted = module if is_module else base
                if wanted in trees:
                    imports[name].setdefault(wanted, node.lineno)
    return imports


def find_circles(imports: Imports, root: str) -> list[list[str]]:
    """Return the modules of each circle (each strongly connected component), sorted by name.

    What ``root`` imports does not count, because a root package resolves its names on first use.
    """
    counted = {**imports, root: {}}
    reached = {name: _reached_from(name, counted) for name in counted}
    circles = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in counted
        if name in reached[name]
    }
    return sorted(sorted(circle) for circle in circles)


def importers_of(imports: Imports, root: str) -> list[str]:
    """Return the modules that import ``root``, which resolves its names by importing them."""
    return [name for name, wanted in imports.items() if root in wanted]


def describe(circle: list[str], imports: Imports) -> str:
    """Name the modules of a circle, then each import in it with its line."""
    lines = [f"{len(circle)} modules: {', '.join(circle)}"]
    for name in circle:
        lines += [
            f"  {name}:{line} imports {wanted}"
            for wanted, line in imports[name].items()
            if wanted in circle
        ]
    return "\n".join(lines)


def _asked(node: ast.AST, room: str) -> list[tuple[str, str]]:
    """Return (module, name in it or "") for everything an import statement in ``room`` asks for."""
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parts = room.split(".")
        base = ".".join([*parts[: len(parts) + 1 - node.level], *filter(None, [base])])
    return [(base, alias.name) for alias in node.names]


def _bound_names(tree: ast.Module, package: str) -> set[str]:
    """Return the names that a package defines itself, or imports out of a module."""
    bound: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module not in (None, package):
            bound |= {alias.asname or alias.name for alias in node.names}
    return bound


def _reached_from(start: str, imports: Imports) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for wanted in imports[waiting.pop()]:
            if wanted not in reached:
                reached.add(wanted)
                waiting.append(wanted)
    return reached

"""No modules of a package import each other, at the top, for types alone, or inside a function.

The import contracts of ``pyproject.toml`` see floors: not what happens inside one room.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from imports import describe, find_circles, importers_of, read_imports

SOURCE = Path(__file__).resolve().parents[2] / "src"
PACKAGES = ("graphrt", "graphrt_llm")


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_read_form_no_circle(package: str) -> None:
    imports = read_imports(SOURCE, package)
    told = [describe(circle, imports) for circle in find_circles(imports, package)]
    assert not told, f"import circles: {len(told)}\n" + "\n".join(told)


@pytest.mark.parametrize("package", PACKAGES)
def test_root_package_imported_from_inside_is_found(package: str) -> None:
    imports = read_imports(SOURCE, package)
    strays = [f"{name}:{imports[name][package]}" for name in importers_of(imports, package)]
    assert not strays, f"import the module itself instead of the root {package}: {strays}"


def house(folder: Path, files: Mapping[str, str]) -> Path:
    for place, text in {"__init__.py": "", **files}.items():
        path = folder / "house" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


GUARDED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        pytest.param(
            {"a.py": GUARDED + "from house.b import B", "b.py": "from house.a import A"},
            ["house.a", "house.b"],
            id="type checking",
        ),
        pytest.param(
            {"a.py": "def f():\n    import house.b as b", "b.py": "from . import a"},
            ["house.a", "house.b"],
            id="inside a function",
        ),
        pytest.param(
            {"room/__init__.py": "from .door import D", "room/door.py": "from house.room import E"},
            ["house.room", "house.room.door"],
            id="package and module",
        ),
        pytest.param(
            {
                "room/__init__.py": "from house.room.door import door",
                "room/door.py": "import house.a",
                "a.py": "from house.room import door",
            },
            ["house.a", "house.room", "house.room.door"],
            id="function named as its module",
        ),
        pytest.param(
            {"a.py": "from .b import B", "b.py": "from .c import C", "c.py": "from .a import A"},
            ["house.a", "house.b", "house.c"],
            id="three modules",
        ),
    ],
)
def test_modules_in_a_circle_are_named(
    tmp_path: Path, files: dict[str, str], circle: list[str]
) -> None:
    imports = read_imports(house(tmp_path, files), "house")
    assert find_circles(imports, "house") == [circle]
    assert describe(circle, imports).startswith(f"{len(circle)} modules: {', '.join(circle)}\n")


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(
            {"a.py": "from house.b import B", "b.py": "import house.c", "c.py": "import torch"},
            id="chain",
        ),
        pytest.param(
            {
                "room/__init__.py": "from house.room import wall\nfrom house.room.door import D",
                "room/door.py": "from house.room import wall\nimport house.room.wall",
                "room/wall.py": "",
            },
            id="a sibling is no import of the package",
        ),
        pytest.param(
            {"__init__.py": GUARDED + "from house.a import A", "a.py": "from house import A"},
            id="what the root imports",
        ),
    ],
)
def test_modules_without_a_circle_are_passed(tmp_path: Path, files: dict[str, str]) -> None:
    assert find_circles(read_imports(house(tmp_path, files), "house"), "house") == []


def test_module_that_imports_the_root_is_named(tmp_path: Path) -> None:
    files = {"a.py": "def f():\n    import house", "b.py": "from house import a"}
    assert importers_of(read_imports(house(tmp_path, files), "house"), "house") == ["house.a"]

"""Print how large graphrt is, beside its aims. Questions, no gate: it always exits 0.

``was`` is what this script counted at b607448, but for places that keep programs, which were
counted by hand. The plan of the second pass counted two of them otherwise: 11,733 code lines; 15
frames, and 19 files to open for one capture. Here the frames are
those on the Python stack inside the model while its graph is recorded, from ``Runtime.capture`` on
and without the device room; their files, each once; and the files of all functions called by then.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import textwrap
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dropped_words import count_words
from imports import find_circles, importers_of, read_imports

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src"
SHOWN = 8
INDENT = "  "

# Where a public name is used, if anybody uses it.
USERS = ("src/graphrt_llm", "examples", "benchmarks", "docs", "README.md")
NOT_PRODUCTION = ("device/simulated/", "cli/", "report/tables.py")
# Why aims are not reached, with figures of today.
REASONS = """\
  not reached, because:
  code lines, files: the aims were counted for the features of b607448. Rooms and files that came
  since have {new:,}: compile, parallel, ubatch, steps of ranks and of micro-batches. `runner`, of
  which 300 were expected, has {runner:,}: axes, keys of the caller's, sizes read off values, checks
  of arguments and of padding, reports. {state:,} find what graphs read besides inputs and what a
  model remembers on the host. Of all lines {imports:,} are imports, {signatures:,} signatures,
  {parts:,} parts of errors. {once} functions have no user but tests, public answers all of them.
  files below 60 lines: {faces} are faces of rooms; all others but one have two users or a door.
  functions of at most 4 lines: {fixed} are properties, special methods or methods of protocols,
  {often} have two uses or more, {single} have one.
  files of all called by then: those on the stack are read to follow a capture; of what they call,
  {looks} look at what the callable reads and remembers, {values} are values and options, the rest
  buffers, keys, the library and its scope.
  places that keep programs or reasons by key: the catalogue's two decide, by owner and by key; the
  others are read from it, by a runner, a dispatcher or a rank in a step, or tell what one capture
  or report was:
"""
NEW = (
    *("compile/", "parallel/", "ubatch/"),
    *("runtime/ranks.py", "runtime/splitting.py", "runtime/compiling.py"),
)
STATE = (
    *(f"externals/{name}.py" for name in ("reachable", "held", "host_snapshot")),
    *("graphs/watch.py", "graphs/writes.py"),
)
LOOKS = (
    *STATE,
    *(f"externals/{name}.py" for name in ("places", "code_names", "environment")),
    "values.py",
)
VALUES = ("batch.py", "context.py", "interrupts.py", "config/", "report/")
BY_KEY = re.compile(r"\b(Program|Entry|OwnerEntries|ReadyGraph|Reason|Unavailable)\b")
"""What an attribute holds that says which program serves a key, or why none does."""
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
# Code lines and files of each room at b607448.
ROOMS_WERE = {
    "(top level)": (665, 7),
    "cli": (396, 5),
    "config": (550, 9),
    "device": (173, 4),
    "device/cuda": (1_176, 9),
    "device/simulated": (2_126, 12),
    "dispatch": (409, 4),
    "graphs": (3_644, 26),
    "planner": (182, 2),
    "report": (1_017, 10),
    "runtime": (738, 7),
    "verify": (635, 7),
}


class File(NamedTuple):
    place: str
    num_lines: int
    num_code_lines: int
    """Without blanks, comments, and strings that stand alone, such as docstrings."""
    functions: list[tuple[int, str]]
    """Lines of each, signature and docstring included, and where it is."""
    num_own_imports: int


@cache
def read_files() -> list[File]:
    return [_read_file(path) for path in sorted(SOURCE.rglob("*.py"))]


def library_files() -> dict[str, File]:
    """Return the files of ``graphrt`` by their path in it."""
    head = "graphrt/"
    return {f.place.removeprefix(head): f for f in read_files() if f.place.startswith(head)}


@cache
def parsed(path: Path) -> list[ast.AST]:
    """All nodes of a file. To read each once takes a third of the time."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _read_file(path: Path) -> File:
    text = path.read_text(encoding="utf-8")
    place = path.relative_to(SOURCE).as_posix()
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    functions = []
    own: set[str] = set()
    for node in parsed(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            functions.append((lines, f"{place}:{node.lineno} {node.name}"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphrt"):
            own.add(node.module or "")
        elif isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", 0), str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return File(place, text.count("\n"), len(code), functions, len(own))


def names_used_nowhere() -> list[str]:
    """Return the public names that nothing but graphrt itself and its tests says."""
    import graphrt

    said: set[str] = set()
    for user in USERS:
        paths = [REPOSITORY / user, *sorted((REPOSITORY / user).rglob("*"))]
        for path in paths:
            if path.suffix in {".py", ".md"}:
                said |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return [name for name in graphrt.__all__ if name not in said]


def print_aims() -> None:
    files = library_files()
    lengths = [lines for file in files.values() for lines, _ in file.functions]
    code = {place: file.num_code_lines for place, file in files.items()}
    production = [n for place, n in code.items() if not place.startswith(NOT_PRODUCTION)]
    imports = read_imports(SOURCE, "graphrt")
    engine = read_imports(SOURCE, "graphrt_llm")
    rows = [
        ("code lines of graphrt", sum(code.values()), "11,711", "~9,000"),
        ("  production lines", sum(production), "9,023", "~7,500; finished ~12,000"),
        ("files", len(code), "102", "~65"),
        ("  below 60 code lines", sum(lines < 60 for lines in code.values()), "32", "few"),
        ("functions", len(lengths), "1,023", ""),
        ("  of at most 4 lines", sum(lines <= 4 for lines in lengths), "354", "few"),
        ("import circles", len(find_circles(imports, "graphrt")), "4", "0"),
        ("  modules that import the root", len(importers_of(imports, "graphrt")), "1", "0"),
        ("  circles of graphrt_llm", len(find_circles(engine, "graphrt_llm")), "1", "0"),
    ]
    print(f"{'aims':34}{'now':>8}{'was':>8}  aim")
    for row in rows:
        print_row(*row)


@cache
def places_by_key() -> list[str]:
    """The attributes that find a program, or the reason why there is none, by key or owner."""
    found = []
    for path in sorted((SOURCE / "graphrt").rglob("*.py")):
        for kind in (node for node in parsed(path) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(kind):
                is_own = node in kind.body or isinstance(getattr(node, "target", 0), ast.Attribute)
                if isinstance(node, ast.AnnAssign) and is_own and _finds_by_key(node.annotation):
                    found.append(f"{kind.name}.{ast.unparse(node.target).removeprefix('self.')}")
    return found


def _finds_by_key(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.Name):
        return annotation.id == "Unavailable"
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.slice, ast.Tuple):
        return False
    is_mapping = ast.unparse(annotation.value) in ("dict", "Mapping")
    return is_mapping and bool(BY_KEY.search(ast.unparse(annotation.slice.elts[-1])))


def print_public_names() -> None:
    import graphrt

    print_row("public names", len(graphrt.__all__), "146", "~70")
    print_row("  used nowhere but in tests", len(names_used_nowhere()), "71", "few")


def print_places() -> None:
    print_row("places that keep programs by key", len(places_by_key()), "10", "1")


def print_capture() -> None:
    from capture_trace import trace_capture

    trace = trace_capture()
    print_row("frames, capture to recording", len(trace.frames), "14", "<= 7")
    print_row("  files they lie in", len(trace.files), "7", "<= 8")
    print_row("  files of all called by then", len(trace.files_run), "24", "<= 8")


def print_row(title: str, now: int, was: str, aim: str) -> None:
    print(f"{title:34}{now:8,}{was:>8}  {aim}".rstrip())


def print_reasons() -> None:
    from capture_trace import trace_capture

    files_run = trace_capture().files_run
    code = {place: file.num_code_lines for place, file in library_files().items()}
    counts = count_syntax()
    small = counts["small"] - counts["fixed"]
    print(
        REASONS.format(
            new=sum(lines for place, lines in code.items() if place.startswith(NEW)),
            runner=sum(lines for place, lines in code.items() if place.startswith("runner/")),
            state=sum(code[place] for place in STATE),
            looks=sum(place in LOOKS for place in files_run),
            values=sum(place.startswith(VALUES) for place in files_run),
            faces=sum(code[place] < 60 for place in code if place.endswith("__.py")),
            often=small - counts["single"],
            **{name: counts[name] for name in ("imports", "signatures", "parts")},
            **{name: counts[name] for name in ("once", "fixed", "single")},
        ),
        end="",
    )
    print(
        textwrap.fill(
            ", ".join(places_by_key()), 98, initial_indent=INDENT, subsequent_indent=INDENT
        )
    )


def count_syntax() -> Counter[str]:
    """Count lines of imports, signatures and error parts; short functions, by how they are used.

    A name that all of ``src`` says twice has one use, one that it says once has none.
    """
    paths = sorted(SOURCE.rglob("*.py"))
    said = Counter(re.findall(r"\w+", "\n".join(path.read_text("utf-8") for path in paths)))
    counts = Counter[str]()
    for path in paths:
        if path.relative_to(SOURCE).parts[0] != "graphrt":
            continue
        for node in parsed(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                counts["imports"] += _num_lines(node)
            elif isinstance(node, ast.keyword) and node.arg in ("expected", "found", "do"):
                counts["parts"] += _num_lines(node)
            elif isinstance(node, ast.FunctionDef):
                counts["signatures"] += max(node.body[0].lineno - node.lineno, 1)
                is_special = node.name.startswith("__")
                counts["once"] += not is_special and said[node.name] == 1
                if _num_lines(node) <= 4:
                    bodies = [item for item in node.body if not _is_text(item)]
                    counts["small"] += 1
                    if (
                        is_special
                        or not bodies
                        or "property" in map(ast.unparse, node.decorator_list)
                    ):
                        counts["fixed"] += 1
                    elif said[node.name] == 2:
                        counts["single"] += 1
    return counts


def _num_lines(node: ast.AST) -> int:
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1


def _is_text(node: ast.stmt) -> bool:
    """Whether it is a docstring, or the dots of a protocol."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def print_rooms() -> None:
    """Code lines and files of each room; of ``device``, each device is a room."""
    rooms: dict[str, list[int]] = {}
    for place, file in library_files().items():
        folders = place.split("/")[:-1]
        name = "/".join(folders[: 2 if folders[:1] == ["device"] else 1]) or "(top level)"
        rooms.setdefault(name, []).append(file.num_code_lines)
    print(f"{'rooms':20}{'code lines':>12}{'was':>8}{'files':>8}{'was':>8}")
    for name in sorted({*rooms, *ROOMS_WERE}):
        lines, (lines_then, files_then) = rooms.get(name, []), ROOMS_WERE.get(name, (0, 0))
        print(f"{name:20}{sum(lines):12,}{lines_then:8,}{len(lines):8}{files_then:8}")


def print_words() -> None:
    counts = count_words(REPOSITORY)
    print_row("dropped words, said", counts.total(), "2,370", "0")
    told = ", ".join(f"{word} {count}" for word, count in counts.most_common())
    if told:
        print(textwrap.fill(told, 98, initial_indent=INDENT, subsequent_indent=INDENT))


def print_largest() -> None:
    files = read_files()
    print(f"{sum(file.num_lines for file in files)} lines in {len(files)} files")
    for title, rows in (
        ("longest functions (lines)", [row for file in files for row in file.functions]),
        ("largest files (lines)", [(file.num_lines, file.place) for file in files]),
        ("widest importers (own modules)", [(f.num_own_imports, f.place) for f in files]),
    ):
        print(title)
        for count, place in sorted(rows, reverse=True)[:SHOWN]:
            print(f"  {count:5} {place}")


def main() -> None:
    sections = (
        *(print_aims, print_places, print_public_names, print_capture),
        *(print_words, print_reasons, print_rooms, print_largest),
    )
    for section in sections:
        try:
            section()
        except Exception as error:  # noqa: BLE001  A report must not fail with what it reports on.
            print(f"{section.__name__}: not measured, {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))  # Of this checkout, whichever one is installed.
    main()

"""One place per outside API: names that may be said in some files only."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "graphrt"

# Name -> where it may be said: a folder ("/" at its end) or one file. Of two names that fit, the
# longer one decides. Lint bans the imports; this also sees attribute chains.
DOORS = {
    "torch.cuda": ("device/cuda/",),
    # Libraries ask torch whether a capture runs, so both devices answer in torch's own place.
    "torch.cuda.is_current_stream_capturing": ("device/cuda/", "device/torch_modes.py"),
    "torch.distributed": ("parallel/exchange.py", "ubatch/peer_copies.py"),
    "torch.fx": ("compile/",),
    "torch._dynamo": ("compile/",),
    "torch._inductor": ("compile/",),
    "os.environ": ("config/",),
    "os.getenv": ("config/",),
    # What draws on a terminal: the command line, and bars for those who ask for them.
    "rich.console": ("cli/", "report/progress.py"),
    "rich.progress": ("report/progress.py",),
    # What starts threads. Locks and thread ids are anyone's.
    "threading.Thread": ("ubatch/baton.py", "waits.py"),
    "threading.Timer": (),
    "_thread.start_new_thread": (),
    "concurrent.futures": (),
}

# State of the process: one guarded object each, because every library in the process shares it.
PROCESS_STATE = {
    "gc.callbacks": ("gc_pause.py",),
    "gc.disable": ("gc_pause.py",),
    "gc.enable": ("gc_pause.py",),
    "gc.freeze": ("gc_pause.py",),
    "gc.set_threshold": ("gc_pause.py",),
    "gc.unfreeze": ("gc_pause.py",),
    "signal.signal": ("interrupts.py",),
    "torch.nn.modules.module.register_module_buffer_registration_hook": ("graphs/watch.py",),
    "torch.nn.modules.module.register_module_module_registration_hook": ("graphs/watch.py",),
    "torch.nn.modules.module.register_module_parameter_registration_hook": ("graphs/watch.py",),
    "os.register_at_fork": ("graphs/library.py", "parallel/exchange.py"),
    # Python keeps the filters of warnings for all threads together.
    "warnings.catch_warnings": ("device/cuda/",),
    "warnings.filterwarnings": ("device/cuda/",),
    "warnings.simplefilter": ("device/cuda/",),
    "sys.setprofile": (),
    "sys.settrace": (),
    "atexit.register": (),
}
PATCHES_TORCH = ("device/torch_modes.py", "compile/torch_api.py", "parallel/exchange.py")

PLACES = {**DOORS, **PROCESS_STATE}


@cache
def files_of_library() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(SOURCE.rglob("*.py"))
    ]


def is_behind(place: str, doors: tuple[str, ...]) -> bool:
    return any(place.startswith(door) if door.endswith("/") else place == door for door in doors)


def origins(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name of a file stands for: ``th`` is ``threading``."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return found


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        head = dotted(node.value, known)
        return f"{head}.{node.attr}" if head else ""
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def names_said(tree: ast.AST) -> list[tuple[int, str]]:
    """Return each name that is imported or read, in full, with its line."""
    known = origins(tree)
    heads = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    said: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            said += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            said += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in heads:
            said.append((node.lineno, dotted(node, known)))
    return said


def place_rule(name: str) -> str:
    """Return the entry of ``PLACES`` that decides about ``name``, or nothing."""
    fitting = [entry for entry in PLACES if f"{name}.".startswith(f"{entry}.")]
    return max(fitting, key=len, default="")


def attributes_set(tree: ast.AST) -> list[tuple[int, str]]:
    """Return every dotted name that is assigned to, deleted, or given to ``setattr``."""
    known = origins(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            inside = node.value if isinstance(node, ast.Subscript) else node
            found.append((node.lineno, dotted(inside, known)))
        elif isinstance(node, ast.Call) and dotted(node.func, known) in {"setattr", "delattr"}:
            found.append((node.lineno, f"{dotted(node.args[0], known)}."))
    return found


@cache
def said_in_library() -> list[tuple[str, int, str, str]]:
    """Return file, line, name and deciding entry of every name that has one."""
    return [
        (place, line, name, place_rule(name))
        for place, tree in files_of_library()
        for line, name in sorted(names_said(tree))
        if place_rule(name)
    ]


@pytest.mark.parametrize("name", sorted(PLACES))
def test_outside_api_named_elsewhere_is_found(name: str) -> None:
    strays = [
        f"{place}:{line} says {said}"
        for place, line, said, rule in said_in_library()
        if rule == name and not is_behind(place, PLACES[name])
    ]
    assert not strays, f"{name} belongs in {PLACES[name] or 'no file'}: {strays}"


def test_attribute_of_torch_set_elsewhere_is_found() -> None:
    strays = [
        f"{place}:{line} sets {name}"
        for place, tree in files_of_library()
        if not is_behind(place, PATCHES_TORCH)
        for line, name in attributes_set(tree)
        if name.startswith("torch.")
    ]
    assert not strays, f"torch itself is changed in {PATCHES_TORCH} only: {strays}"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("import torch\ntorch.cuda.Stream()", "torch.cuda"),
        ("from torch import cuda", "torch.cuda"),
        (
            "import torch as t\nt.cuda.is_current_stream_capturing()",
            "torch.cuda.is_current_stream_capturing",
        ),
        ("import threading as th\nclass A(th.Thread): ...", "threading.Thread"),
        ("from threading import Thread as T", "threading.Thread"),
        ("from concurrent import futures", "concurrent.futures"),
        ("from os import environ as e\ne.get('A')", "os.environ"),
        ("import gc\ngc.callbacks.append(print)", "gc.callbacks"),
        ("import threading\nthreading.Lock()\nthreading.get_ident()", ""),
        ("import gc\ngc.collect()\ngc.isenabled()", ""),
        ("import torch\ntorch.cudart", ""),
    ],
)
def test_name_said_by_any_import_is_recognised(text: str, rule: str) -> None:
    assert {place_rule(name) for _, name in names_said(ast.parse(text))} - {""} == {rule} - {""}


@pytest.mark.parametrize(
    ("text", "is_patch"),
    [
        ("import torch\ntorch.cuda.query = print", True),
        ("import torch as t\nsetattr(t.cuda, 'query', print)", True),
        ("from torch import Tensor\ndel Tensor.item", True),
        ("import torch\ntorch.ops.table['a'] = 1", True),
        ("import torch\nx = torch.cuda\nself.torch = 1", False),
    ],
)
def test_patch_of_torch_is_recognised(text: str, is_patch: bool) -> None:
    found = [name for _, name in attributes_set(ast.parse(text)) if name.startswith("torch.")]
    assert bool(found) is is_patch


def test_file_beside_a_folder_is_not_behind_its_door() -> None:
    assert is_behind("device/cuda/pool.py", ("device/cuda/",))
    assert not is_behind("device/cuda_pools.py", ("device/cuda/",))
    assert is_behind("interrupts.py", ("interrupts.py",))
    assert not is_behind("interrupts.py.bak", ("interrupts.py",))


def test_library_configures_no_logging() -> None:
    setters = {"addHandler", "setLevel", "basicConfig", "dictConfig", "captureWarnings"}
    strays = [
        f"{place}:{node.lineno}"
        for place, tree in files_of_library()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in setters
    ]
    assert strays == []


def test_library_prints_at_the_command_line_only() -> None:
    strays = []
    for place, tree in files_of_library():
        known = origins(tree)
        for node in ast.walk(tree):
            name = dotted(node.func, known) if isinstance(node, ast.Call) else ""
            if name in {"print", "logging.basicConfig"} and not is_behind(place, ("cli/",)):
                strays.append(f"{place}:{node.lineno}")
    assert strays == []

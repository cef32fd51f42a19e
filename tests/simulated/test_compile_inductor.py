"""Pieces compiled by Inductor: recorded as one node each, kept on disk between processes.

They need a C++ compiler, and take seconds each.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from hashlib import sha256
from itertools import cycle

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import codecache, config as inductor_config, cpp_builder, cpu_vec_isa

from graphrt.compile import Compiled, torch_api
from graphrt.compile.cache import CompileCache
from graphrt.errors import BackendError, ConfigWarning, UnrecordedCodeError
from graphrt.events import CacheMiss, Compiled as CompiledEvent
from lab import FULL, PIECEWISE, WIDTH, RuntimeLab, values

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    # Of torch's own modules, as they are imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


class Store(torch.nn.Module):
    """Layers that write a table which the splitting op reads, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.register_buffer("table", torch.zeros(64, WIDTH))

    def forward(self, *, x, ids, lens):
        for _ in range(3):
            x = torch.tanh(x @ self.weight)
            self.table.index_copy_(0, torch.arange(x.shape[0]), x)
            x = torch.sigmoid(self.table.narrow(0, 0, x.shape[0]))
        return {"rows": x * 2.0 + ids[:, None], "lens": lens * 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def filled(folder):
    """The folder with an entry for each piece; who spoils them has them compiled again."""
    with lab_of(folder, "NONE", compile_sizes=[4]):
        return folder


def lab_of(folder, mode="FULL_AND_PIECEWISE", **options):
    compilation = {"level": 3, "backend": "inductor", "splitting_ops": ["torch.sigmoid"]}
    compilation |= {"cache_dir": folder, **options}
    model = Store()
    return RuntimeLab(
        mode, model=model, asked={"compilation": compilation}, may_overwrite=[model.table]
    )


def missed(lab):
    return [event.missed for event in lab.events if isinstance(event, CompiledEvent)]


def test_compiled_pieces_replay_what_eager_computes(folder):
    with lab_of(folder, compile_sizes=[4]) as lab:
        report = lab.runtime.capture()
        assert (report.compile.num_compiled, report.compile.num_unique) == (4, 3)
        assert [str(sizes) for sizes in report.compile.ranges] == ["1-16", "4"]
        assert {(e.num_graphs, e.num_eager) for e in report.graphs if e.mode is PIECEWISE} == {
            (4, 3)
        }
        assert {(e.num_graphs, e.num_eager) for e in report.graphs if e.mode is FULL} == {(1, 0)}
        found = []
        for seed, (tokens, reqs) in enumerate(
            [(1, 1), (2, 2), (3, 3), (4, 4), (5, 2), (8, 3), (9, 2)]
        ):
            outputs = lab.step(tokens, reqs, uniform=tokens == reqs, seed=seed)
            found.append((tokens, reqs, seed, {k: v.clone() for k, v in outputs.items()}))
            found[-1][-1]["table"] = lab.model.table[:tokens].clone()
        num_compiles = report.compile.num_compiles
        assert lab.runtime.report().compile.num_compiles == num_compiles
    model = Store()
    with torch.no_grad():
        for tokens, reqs, seed, outputs in found:
            expected = model(**values(tokens, reqs, seed))
            expected["table"] = model.table[:tokens]
            for name, value in outputs.items():
                torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)


class Heads(torch.nn.Module):
    """A batched product, which Inductor does not compile for rows whose number it does not know."""

    def forward(self, *, x, ids, lens):
        heads = torch.tanh(x).view(-1, 2, WIDTH // 2).transpose(0, 1)
        rows = torch.bmm(heads * 2, heads.transpose(1, 2) * 3).sum(0)
        return {"rows": rows @ x + ids[:, None], "lens": lens * 2}


def test_batched_product_over_an_axis_is_compiled_and_kept(tmp_path):
    options = {"level": 3, "backend": "inductor", "splitting_ops": ["torch.tanh"]}
    options["cache_dir"] = tmp_path
    for is_kept in (False, True):
        with RuntimeLab(
            "FULL", model=Heads(), asked={"compilation": options}, reads_padding="a product"
        ) as lab:
            report = lab.runtime.report().compile
            assert report.is_trace_kept is is_kept
            for sizes in ((1, 1), (5, 2), (8, 4)):
                outputs = lab.step(*sizes, uniform=sizes[0] == sizes[1])
                expected = Heads()(**values(*sizes))
                torch.testing.assert_close(outputs["rows"], expected["rows"])


def forget_in_memory():
    """What Inductor knows in this process, as if it were another one."""
    for known in (codecache.PyCodeCache, codecache.CppPythonBindingsCodeCache):
        known.cache_clear()
    codecache._precompile_header.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def test_second_start_compiles_nothing(folder, monkeypatch):
    with lab_of(folder, "NONE", compile_sizes=[4]):
        pass  # There is an entry, also where this test runs alone.
    forget_in_memory()
    ran, kept = [], folder.glob("v*/objects/*/*")
    written = {path: path.stat().st_mtime_ns for path in kept}
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", lambda *command, **options: ran.append(1))
    with lab_of(folder, "NONE", compile_sizes=[4]) as lab:
        report = lab.runtime.report().compile
        assert (report.num_compiles, report.num_loaded) == (0, len(missed(lab)))
        assert set(missed(lab)) == {None}
        assert report.seconds["compile"] == 0.0
    assert not ran
    assert written
    assert written == {path: path.stat().st_mtime_ns for path in folder.glob("v*/objects/*/*")}
    asked = cpu_vec_isa.valid_vec_isa_list.cache_info()
    assert asked.misses == 0, "a process for each instruction set of the CPU"


def test_second_cache_of_a_process_serves_another_process(folder, tmp_path, monkeypatch):
    """Inductor knows the libraries of the first one, which lie in another folder."""
    for one in (folder, tmp_path):
        with lab_of(one, "NONE"):
            pass
    forget_in_memory()
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", lambda *command, **options: None)
    with lab_of(tmp_path, "NONE") as lab:
        assert set(missed(lab)) == {None}


def test_code_for_a_cpu_with_other_instructions_is_not_found(folder, monkeypatch):
    with lab_of(folder, "NONE"):
        pass
    known = torch.cpu._is_avx512_bf16_supported()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: not known)
    torch_api.device_name.cache_clear()
    try:
        with lab_of(folder, "NONE", compile_sizes=[]) as lab:
            assert set(missed(lab)) == {CacheMiss.ABSENT}
    finally:
        torch_api.device_name.cache_clear()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: data[:-100], CacheMiss.CORRUPT),
        (lambda data: data[:-7] + bytes([data[-7] ^ 4]) + data[-6:], CacheMiss.CORRUPT),
        (lambda data: data.replace(b'"schema": 7', b'"schema": 0', 1), CacheMiss.FOREIGN_SCHEMA),
        (lambda data: data.replace(b'"torch": "', b'"torch": "0', 1), CacheMiss.FOREIGN_TORCH),
        (lambda data: data.replace(b'"device": "', b'"device": "0', 1), CacheMiss.FOREIGN_DEVICE),
    ],
)
def test_bad_entry_is_compiled_again_with_its_reason(filled, spoil, reason):
    for path in filled.glob("v*/objects/*/*"):
        path.write_bytes(spoil(path.read_bytes()))
    for expected in (reason, None):
        with lab_of(filled, "NONE", compile_sizes=[4]) as lab:
            lab.step(3, 2)
            assert set(missed(lab)) == {expected}


@pytest.mark.parametrize(
    "payload", [b"", b"code", pickle.dumps(5), pickle.dumps((None, b"code")), pickle.dumps((5, 5))]
)
def test_entry_that_holds_something_else_is_compiled_again(filled, payload):
    for path in filled.glob("v*/objects/*/*"):
        about = json.loads(path.read_bytes().partition(b"\n")[0])
        about |= {"length": len(payload), "sha256": sha256(payload).hexdigest()}
        path.write_bytes(json.dumps(about).encode() + b"\n" + payload)
    for expected in (CacheMiss.LOAD_FAILED, None):
        with lab_of(filled, "NONE", compile_sizes=[4]) as lab:
            lab.step(3, 2)
            assert set(missed(lab)) == {expected}


@pytest.mark.parametrize("suffixes", [("", ".py"), (".so",), ("", ".py", ".so")])
@pytest.mark.parametrize("spoil", [lambda data: data[: len(data) // 2], None])
def test_file_of_inductor_that_is_cut_or_gone_is_written_again(
    folder, tmp_path, suffixes, spoil, monkeypatch
):
    """Inductor itself trusts what is in its folder: to load half a library ends the process."""
    with lab_of(folder, "NONE"):
        pass  # There is something to spoil, also where this test runs alone.
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("v*/inductor/**/*"):
        if path.is_file() and path.suffix in suffixes:
            if spoil is None:
                path.unlink()
            else:
                path.write_bytes(spoil(path.read_bytes()))
    forget_in_memory()
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", lambda *command, **options: None)
    for _ in range(2):
        with lab_of(tmp_path, "NONE") as lab:
            lab.step(3, 2)
            assert set(missed(lab)) == {None}
    assert [path.name for path in tmp_path.glob("v*/inductor*")] == ["inductor"]


@pytest.fixture
def without_entries(folder, tmp_path):
    """A copy of the cache in which only Inductor's own folder is left."""
    with lab_of(folder, "NONE"):
        pass  # There is something to copy, also where a test runs alone.
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(next(tmp_path.glob("v*/objects")))
    return tmp_path


def test_libraries_that_a_killed_linker_left_are_made_again(without_entries):
    """No entry has them. Some load, and end the process later; without that for the question which
    vectors the CPU has, code is made for none."""
    libraries = {path: path.stat().st_size for path in without_entries.glob("v*/inductor/??/*.so")}
    # Named as the library about vectors is, which this process may have made in another folder.
    about_vectors = next(iter(libraries)).with_name("cvectors.so")
    shutil.copyfile(next(iter(libraries)), about_vectors)
    libraries[about_vectors] = about_vectors.stat().st_size
    for part, (path, size) in zip(cycle((0.1, 0.999, 0)), libraries.items(), strict=False):
        os.truncate(path, int(size * part))
    forget_in_memory()
    with lab_of(without_entries, "NONE") as lab:
        lab.step(3, 2)
        assert set(missed(lab)) == {CacheMiss.ABSENT}
    # Those that were asked for; with a longer path in them.
    made_again = [path for path in libraries if path.exists()]
    assert made_again
    assert about_vectors not in made_again
    assert all(path.stat().st_size >= libraries[path] for path in made_again)


def test_library_that_another_process_is_linking_is_waited_for(without_entries, monkeypatch):
    path = next(without_entries.glob("v*/inductor/??/*.main.so"))
    lock = path.parent.parent / "locks" / path.name.replace(".main.so", ".lock")
    assert lock.exists()  # Inductor's.
    whole, waited_for = path.read_bytes(), []

    class Waits(torch_api.FileLock):
        def acquire(self, *args, **kwargs):
            waited_for.append(self.lock_file)
            path.write_bytes(whole)
            return super().acquire(*args, **kwargs)

    os.truncate(path, 100)
    monkeypatch.setattr(torch_api, "FileLock", Waits)
    forget_in_memory()
    with lab_of(without_entries, "NONE") as lab:
        lab.step(3, 2)
    assert waited_for == [str(lock)]
    assert path.read_bytes() == whole


def test_folder_that_inductor_cannot_use_starts_without_a_compiler(folder, tmp_path, monkeypatch):
    with lab_of(folder, "NONE"):
        pass
    spaced = tmp_path / "a folder"
    shutil.copytree(folder, spaced)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", lambda *command, **options: None)
    forget_in_memory()
    with lab_of(spaced, "NONE") as lab:
        lab.step(3, 2)
        assert set(missed(lab)) == {None}
    assert list((tmp_path / "new").glob("*/*.so"))


def test_one_thread_at_a_time_compiles_or_loads(folder, monkeypatch):
    """Inductor's folder, and what a load replaces of torch, are the process's."""
    taken, load = [], torch_api.from_bytes

    def take():
        taken.append(compile_lock.acquire(blocking=False))

    def loads(payload):
        other = threading.Thread(target=take)
        other.start()
        other.join()
        return load(payload)

    with lab_of(folder, "NONE"):
        pass
    monkeypatch.setattr(torch_api, "from_bytes", loads)
    with lab_of(folder, "NONE") as lab:
        assert lab.runtime.report().compile.is_trace_kept
        assert taken == [False] * len(missed(lab))


def test_piece_that_does_not_compile_leaves_inductors_files(folder, tmp_path, monkeypatch):
    with lab_of(folder, "NONE"):
        pass
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(next(tmp_path.glob("v*/objects")))
    before = {path for path in tmp_path.glob("v*/inductor/**/*") if path.suffix != ".lock"}

    def broken(*args, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch._inductor, "standalone_compile", broken)
    with pytest.raises(BackendError, match="no such kernel"), lab_of(tmp_path, "NONE"):
        pass
    assert before <= set(tmp_path.glob("v*/**/*"))


def test_compiler_of_cpp_that_is_missing_is_asked_for(tmp_path):
    missing = inductor_config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(BackendError, match=r"install a C\+\+ compiler"):
        lab_of(tmp_path, "NONE", compile_cache=False)


def test_locale_that_inductor_cannot_read_its_files_in_is_named(tmp_path, monkeypatch):
    def broken(*args, **options):
        b"\xe2".decode("ascii")

    monkeypatch.setattr(torch._inductor, "standalone_compile", broken)
    with pytest.raises(BackendError, match="set PYTHONUTF8=1"):
        lab_of(tmp_path, "NONE", compile_cache=False)


def test_cache_switched_off_is_neither_read_nor_written(tmp_path):
    with lab_of(tmp_path, "NONE", compile_cache=False) as lab:
        assert set(missed(lab)) == {CacheMiss.DISABLED}
    assert not list(tmp_path.iterdir())


def test_option_without_text_is_not_cached(tmp_path):
    def made(width):
        return lambda graph: width

    options = {"post_grad_custom_post_pass": None, "joint_custom_pre_pass": made(3)}
    with lab_of(tmp_path, "NONE", inductor_compile_config=options) as lab:
        assert set(missed(lab)) == {CacheMiss.UNHASHABLE_PASS}


def pieces_and_sum(folder):
    """How many pieces were compiled or loaded, and what a step computes with them."""
    with lab_of(folder, "NONE") as lab:
        found = lab.step(5, 2)["rows"]
        return len(missed(lab)), round(found.double().sum().item(), 3)


def test_start_with_kept_code_imports_nothing_that_makes_code(folder):
    """Not even where another thread imports these modules while code is loaded (``is_asked``)."""
    expected = [*map(str, pieces_and_sum(folder))]
    program = textwrap.dedent(
        f"""
        import gc, importlib, inspect, os, sys, threading
        gc.disable()  # Imports take less.
        from pathlib import Path
        sys.path[:0] = {sys.path!r}
        import torch
        from test_compile_inductor import lab_of, missed
        torch.set_num_threads({torch.get_num_threads()})  # Code for other threads is another entry.
        child = os.fork()  # To import torch once for both.
        is_asked = not child
        assert is_asked or os.waitpid(child, 0)[1] == 0
        found = []
        def ask():
            from torch._inductor.decomposition import select_decomp_table
            found.append(select_decomp_table)
            import torch._inductor.codegen.memory_planning
            found.append(torch._inductor.codegen.memory_planning.MemoryPlanner)
            scope = {{"__name__": "torch._inductor.codecache"}}
            exec("from torch._inductor.graph import GraphLowering", scope)
            found.append(scope["GraphLowering"])
            module = importlib.import_module("torch._inductor.select_algorithm")
            found.extend((module.extern_kernels, module.__file__))
        load = torch.compiler.load_cache_artifacts
        def load_while_asked(saved):
            inspect.getmodule(Path)  # It looks at each module.
            if is_asked:
                thread = threading.Thread(target=ask)
                thread.start()
                thread.join()
            return load(saved)
        torch.compiler.load_cache_artifacts = load_while_asked
        with lab_of(Path({str(folder)!r}), "NONE") as lab:
            total = round(lab.step(5, 2)["rows"].double().sum().item(), 3)
            print(len(missed(lab)), total, set(missed(lab)) == {{None}})
        makers = ("compile_fx", "decomposition", "graph", "ir", "lowering", "select_algorithm")
        makers = [f"torch._inductor.{{name}}" for name in makers]
        print(not sys.modules.keys().isdisjoint(["torch.export._trace", *makers]))
        # Nothing is left of what stood for them.
        during, found = found, []
        ask()
        print(during == found * len(missed(lab) if is_asked else []))
        from torch._inductor import compile_fx, debug, graph
        print(compile_fx.GraphLowering is graph.GraphLowering, debug is torch._inductor.debug)
        kernels = torch._inductor.codecache.PyCodeCache.modules[0].extern_kernels
        print(kernels.mm is torch.mm, kernels.bias_addmm.__module__.startswith("torch._inductor."))
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    asked, not_asked = ([*expected, "True", said, *["True"] * 5] for said in ("True", "False"))
    assert run.stdout.split() == asked + not_asked


def test_processes_that_start_at_once_both_end_right(folder, tmp_path):
    expected = pieces_and_sum(folder)
    # Inductor's own caches alone, so that the pieces need no C++ compiler once more.
    shutil.copytree(folder / "v7" / "inductor", tmp_path / "v7" / "inductor")
    program = textwrap.dedent(
        f"""
        import gc, os, sys
        gc.disable()
        from pathlib import Path
        sys.path[:0] = {sys.path!r}
        import torch, torch._dynamo, torch._inductor.compile_fx  # Once for both.
        from test_compile_inductor import pieces_and_sum
        torch.set_num_threads({torch.get_num_threads()})  # Code for other threads is another entry.
        child = os.fork()
        print(pieces_and_sum(Path({str(tmp_path)!r})))
        assert not child or os.waitpid(child, 0)[1] == 0
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [str(expected)] * 2
    # And the hash of torch's source, and the trace.
    assert len(list(tmp_path.glob("v7/objects/*/*"))) == 5


def test_compiled_code_called_directly_in_a_recording_is_refused(folder):
    with lab_of(folder, "NONE") as lab:
        x = torch.ones(3, WIDTH)
        plan = replace(lab.runtime.resolved.compile, splitting_ops=())
        piece = Compiled(lambda x: x * 2.0, plan, limits={"tokens": 16})
        piece.trace(lambda: piece(x), [(x, 0, "tokens")])

        def model(*, x, ids, lens):
            return {"rows": piece(x) + ids[:, None], "lens": lens * 2}

        with (
            RuntimeLab("FULL", model=model, device=lab.device) as other,
            pytest.raises(UnrecordedCodeError, match="called directly"),
        ):
            other.runtime.capture()


@pytest.fixture
def torch_in(tmp_path, monkeypatch):
    """Torch's source is in a folder, and reading all of it is counted."""
    source, hashed = tmp_path / "torch", []
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a.py").write_text("1")
    monkeypatch.setattr(torch, "__path__", [str(source)])

    def build(roots, prefix, hasher):
        hashed.append(roots)
        hasher.update((source / "sub" / "a.py").read_bytes())

    monkeypatch.setattr(codecache, "build_code_hash", build)
    codecache.torch_key.clear()
    yield source, hashed
    codecache.torch_key.clear()
    torch_api._source_files.cache_clear()


def versions_of_another_process(root):
    codecache.torch_key.clear()
    torch_api._source_files.cache_clear()
    return torch_api.versions(CompileCache(root))


def test_source_of_torch_is_read_once_for_all_processes(torch_in, tmp_path):
    source, hashed = torch_in
    found = [versions_of_another_process(tmp_path)]
    (source / "a.pyc").write_bytes(b"Written by an import.")
    found += [versions_of_another_process(tmp_path) for _ in range(2)]
    assert found[0] == found[1] == found[2]
    assert bytes.fromhex(found[0]["torch source"]) == codecache.torch_key()
    assert len(hashed) == 1
    changed = source / "sub" / "a.py"
    changed.write_text("2")
    os.utime(changed, ns=(1, 1))
    assert versions_of_another_process(tmp_path) != found[0]
    (source / "b.py").write_text("")
    versions_of_another_process(tmp_path)
    assert len(hashed) == 3


@pytest.mark.parametrize("spoil", [lambda data: data[:-3], lambda data: b""])
def test_kept_hash_of_torch_that_is_spoiled_is_made_anew(torch_in, tmp_path, spoil):
    found = versions_of_another_process(tmp_path)
    [path] = tmp_path.glob("v*/objects/*/*")
    path.write_bytes(spoil(path.read_bytes()))
    for _ in range(2):
        assert versions_of_another_process(tmp_path) == found
    assert len(torch_in[1]) == 2


def test_folder_that_keeps_no_hash_of_torch_is_told(torch_in, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(ConfigWarning, match="nothing is written"):
        found = versions_of_another_process(tmp_path / "file")
    assert found["torch source"]

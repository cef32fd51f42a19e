"""Pieces compiled by Inductor: recorded as one node each, kept on disk between processes.

They need a C++ compiler, and take seconds each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial

import pytest
import torch

from graphrt import CompilationConfig, RuntimeConfig, resolve
from graphrt.compile import Compiled, CustomOp
from graphrt.errors import CompileError, UnrecordedCodeError
from graphrt.events import CacheMiss, Compiled as CompiledEvent
from graphrt_llm import LLMEngine
from graphrt_llm.assembly import TINY_CONFIG
from lab import FULL, PIECEWISE, WIDTH, RuntimeLab, values

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    # Of torch's own modules, as they are imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


ROWS: list[int] = []


@CustomOp.register("test_few")
class Few(CustomOp):
    operator, largest_size, optimized_for = "graphrt_test::few", 4, ("cpu",)

    def forward_native(self, x, table):
        table.add_(x.mean())
        return x.tanh().neg().neg() + x.shape[0]


@torch.library.custom_op("graphrt_test::few", mutates_args=("table",))
def few(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    ROWS.append(x.shape[0])
    return Few.forward_native(None, x, table)


few.register_fake(lambda x, table: torch.empty_like(x))


@CustomOp.register("test_pair")
class Pair(CustomOp):
    operator, largest_size, optimized_for = "graphrt_test::pair", 4, ("cpu",)

    def forward_native(self, x):
        return x + 1.0, x * 2.0


@torch.library.custom_op("graphrt_test::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return Pair.forward_native(None, x)


pair.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))


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


def test_second_start_compiles_nothing(folder):
    with lab_of(folder, "NONE", compile_sizes=[4]) as lab:
        report = lab.runtime.report().compile
        assert (report.num_compiles, report.num_loaded) == (0, len(missed(lab)))
        assert set(missed(lab)) == {None}
        assert report.seconds["compile"] == 0.0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: data[:-100], CacheMiss.CORRUPT),
        (lambda data: data[:-7] + bytes([data[-7] ^ 4]) + data[-6:], CacheMiss.CORRUPT),
        (lambda data: data.replace(b'"schema": 2', b'"schema": 0', 1), CacheMiss.FOREIGN_SCHEMA),
        (lambda data: data.replace(b'"torch": "', b'"torch": "0', 1), CacheMiss.FOREIGN_TORCH),
        (lambda data: data.replace(b'"device": "', b'"device": "0', 1), CacheMiss.FOREIGN_DEVICE),
    ],
)
def test_bad_entry_is_compiled_again_with_its_reason(folder, spoil, reason):
    with lab_of(folder, "NONE", compile_sizes=[4]):
        pass  # There is an entry to spoil, also where this test runs alone.
    for path in folder.glob("v*/objects/*/*"):
        path.write_bytes(spoil(path.read_bytes()))
    for expected in (reason, None):
        with lab_of(folder, "NONE", compile_sizes=[4]) as lab:
            lab.step(3, 2)
            assert set(missed(lab)) == {expected}


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


def test_processes_that_start_at_once_both_end_right(folder, tmp_path):
    # Inductor's own caches alone, so that the pieces need no C++ compiler once more.
    shutil.copytree(folder / "v2" / "inductor", tmp_path / "v2" / "inductor")
    program = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = {sys.path!r}
        import torch
        from test_compile_inductor import lab_of, missed
        from lab import values
        with lab_of({str(tmp_path)!r}, "NONE") as lab:
            found = lab.step(5, 2)["rows"]
            print(len(missed(lab)), round(found.double().sum().item(), 3))
        """
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate()[0].strip() for process in running]
    assert told[0] == told[1] != ""
    assert len(list(tmp_path.glob("v*/objects/*/*"))) == 3


def test_precision_of_one_backend_is_a_key_of_its_own(tmp_path):
    asked = {"level": 2, "backend": "inductor", "cache_dir": tmp_path}
    plan = resolve(RuntimeConfig(compilation=CompilationConfig(**asked))).compile
    x, before = torch.ones(4, 4), torch.backends.cuda.matmul.fp32_precision
    num_loaded = []
    try:
        for precision in ("ieee", "tf32", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            one = Compiled(lambda x: x * 2.0, plan, limits={"tokens": 8})
            one.trace(partial(one, x), [(x, 0, "tokens")])
            num_loaded.append(one.report.num_loaded)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert num_loaded == [0, 0, 1]


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


def test_engine_with_compiled_pieces_generates_the_same_tokens(folder):
    prompts = [[1, 2, 3, 4, 5], [9] * 20, [7]]

    def tokens(**options):
        compilation = CompilationConfig(cudagraph_capture_sizes=[1, 2, 4, 8], **options)
        asked = replace(TINY_CONFIG, runtime=replace(TINY_CONFIG.runtime, compilation=compilation))
        with LLMEngine.tiny(asked) as engine:
            engine.capture()
            return engine.generate(prompts)

    expected = tokens(cudagraph_mode="NONE", level=0)
    found = tokens(level=3, backend="inductor", cache_dir=folder)
    assert found == expected


def test_operator_of_few_rows_is_plain_in_pieces_for_more(tmp_path):
    asked = {"backend": "inductor", "cache_dir": tmp_path, "level": 3, "splitting_ops": ()}

    def run(rules, num_loaded, ranges):
        config = RuntimeConfig(compilation=CompilationConfig(custom_ops=rules, **asked))
        plan = resolve(config).compile
        op, table = Few(plan, "cpu"), torch.zeros(3)
        one = Compiled(lambda x: op(x * 2.0, table) * 3.0, plan, limits={"tokens": 8})
        inputs = [torch.randn(size, 3) for size in (8, 4, 5, 1, 7)]
        one.trace(lambda: one(inputs[0]), [(inputs[0], 0, "tokens")])
        table.zero_()
        found = [(one(x), table.clone()) for x in inputs]
        assert one.report.num_loaded == num_loaded
        assert [str(sizes) for sizes in one.report.ranges] == ranges
        expected = torch.zeros(3)
        for x, (result, state) in zip(inputs, found, strict=True):
            plain = Few.forward_native(None, x * 2.0, expected) * 3.0
            torch.testing.assert_close((result, state), (plain, expected))

    for num_loaded in (0, 2):
        ROWS.clear()
        run("", num_loaded, ["1-4", "5-8"])
        assert set(ROWS) == {4, 1}
    ROWS.clear()
    run("none", 0, ["1-8"])
    assert ROWS == []


def test_inductor_folder_that_is_read_only_is_left_alone(tmp_path, monkeypatch):
    asked = {"level": 2, "backend": "inductor", "cache_dir": tmp_path}
    plan = resolve(RuntimeConfig(compilation=CompilationConfig(**asked))).compile
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    one = Compiled(lambda x: x - 1.0, plan, limits={"tokens": 8}, rank=3)
    x = torch.ones(4, 2)
    one.trace(partial(one, x), [(x, 0, "tokens")])
    assert torch.equal(one(x), x - 1.0)
    assert not any((tmp_path / "v2" / "inductor").iterdir())
    [index] = tmp_path.glob("v2/plans/*/rank_3/index.json")
    [entry] = json.loads(index.read_text())
    assert list(tmp_path.glob(f"v2/objects/*/{entry['key']}.bin"))


def test_results_over_an_argument_stay_views_at_later_calls(tmp_path):
    asked = {"level": 2, "backend": "inductor", "cache_dir": tmp_path}
    plan = resolve(RuntimeConfig(compilation=CompilationConfig(**asked))).compile
    one = Compiled(lambda x: (x.view(-1), x + 1.0), plan, limits={"tokens": 8})
    first = torch.zeros(4, 2)
    one.trace(partial(one, first), [(first, 0, "tokens")])
    for size in (4, 3, 8):
        x = torch.randn(size, 2)
        view, more = one(x)
        assert (view.shape, view.data_ptr()) == ((size * 2,), x.data_ptr())
        assert torch.equal(more, x + 1.0)


def compiled(function, folder, level=3):
    splitting = {"splitting_ops": ("torch.sigmoid",)} if level == 3 else {}
    config = CompilationConfig(level=level, backend="inductor", cache_dir=folder, **splitting)
    plan = resolve(RuntimeConfig(compilation=config)).compile
    return Compiled(function, plan, limits={"tokens": 8})


def test_results_of_pieces_keep_the_layout_of_the_model(tmp_path):
    def turned(x):
        rows = x.t().contiguous()
        heads = (x * 2.0).view(1, -1, 3, 2).transpose(1, 2)
        few = (x.t() + 1.0).contiguous()[:, :2]
        return torch.sigmoid(rows).view(-1), rows + 1.0, heads, few, (x + 3.0).t()

    one = compiled(turned, tmp_path)
    first = torch.randn(8, 6)
    one.trace(partial(one, first), [(first, 0, "tokens")])
    for size in (8, 5, 2):
        x = torch.randn(size, 6)
        found, expected = one(x), turned(x)
        torch.testing.assert_close(found, expected)
        assert [each.stride() for each in found] == [each.stride() for each in expected]


def test_expanded_result_in_new_memory_is_refused(tmp_path):
    def expanded(x):
        return torch.sigmoid(x.t().contiguous().expand(2, 3, x.shape[0]))

    one = compiled(expanded, tmp_path)
    x = torch.randn(8, 3)
    with pytest.raises(CompileError, match="memory of their own"):
        one.trace(partial(one, x), [(x, 0, "tokens")])


def test_later_call_outside_no_grad_gives_the_same(tmp_path):
    asked = {"level": 2, "backend": "inductor", "cache_dir": tmp_path}
    plan = resolve(RuntimeConfig(compilation=CompilationConfig(**asked))).compile
    weight = torch.nn.Parameter(torch.randn(2, 3))
    one = Compiled(lambda x: x @ weight, plan, limits={"tokens": 8})
    x = torch.randn(4, 2)
    with torch.no_grad():
        one.trace(partial(one, x), [(x, 0, "tokens")])
        expected = one(x)
    with torch.enable_grad():
        assert torch.equal(one(x), expected)


def test_operator_of_two_results_is_plain_in_pieces_for_more(tmp_path):
    asked = {"backend": "inductor", "cache_dir": tmp_path, "level": 3, "splitting_ops": ()}
    plan = resolve(RuntimeConfig(compilation=CompilationConfig(**asked))).compile
    op = Pair(plan, "cpu")
    one = Compiled(lambda x: op(x)[1] - op(x)[0], plan, limits={"tokens": 8})
    first = torch.randn(8, 3)
    one.trace(partial(one, first), [(first, 0, "tokens")])
    for size in (3, 8):
        x = torch.randn(size, 3)
        torch.testing.assert_close(one(x), x * 2.0 - (x + 1.0))

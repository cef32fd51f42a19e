"""What pieces of Inductor return, and the engine with them.

They need a C++ compiler, and take seconds each.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._inductor import codecache, config as inductor_config, cpp_builder
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime import autotune_cache
from torch._inductor.standalone_compile import CacheCompiledArtifact
from torch.utils._appending_byte_serializer import BytesWriter

from graphrt import CompilationConfig, RuntimeConfig, resolve
from graphrt.compile import Compiled, CustomOp, splitter, torch_api
from graphrt.errors import BackendError, ConfigError, GuardAuditError
from graphrt.events import CacheMiss
from graphrt_llm import LLMEngine
from graphrt_llm.assembly import TINY_CONFIG

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


def plan_of(folder, level=3, **options):
    asked = {"level": level, "backend": "inductor", "cache_dir": folder, **options}
    return resolve(RuntimeConfig(compilation=CompilationConfig(**asked))).compile


def compiled(function, plan, **options):
    return Compiled(function, plan, limits={"tokens": 8}, **options)


CUT = {"splitting_ops": ("torch.sigmoid",)}


def test_engine_with_compiled_pieces_generates_the_same_tokens(tmp_path):
    prompts = [[1, 2, 3, 4, 5], [9] * 20, [7]]

    def tokens(**options):
        compilation = CompilationConfig(cudagraph_capture_sizes=[1, 2, 4, 8], **options)
        asked = replace(TINY_CONFIG, runtime=replace(TINY_CONFIG.runtime, compilation=compilation))
        with LLMEngine.tiny(asked) as engine:
            engine.capture()
            return engine.generate(prompts)

    expected = tokens(cudagraph_mode="NONE", level=0)
    found = tokens(level=3, backend="inductor", cache_dir=tmp_path)
    assert found == expected


def test_precision_of_one_backend_is_a_key_of_its_own(tmp_path):
    plan = plan_of(tmp_path, level=2)
    x, before = torch.ones(4, 4), torch.backends.cuda.matmul.fp32_precision
    num_loaded = []
    try:
        for precision in ("ieee", "tf32", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            one = compiled(lambda x: x * 2.0, plan)
            one.trace(partial(one, x), [(x, 0, "tokens")])
            num_loaded.append(one.report.num_loaded)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert num_loaded == [0, 0, 1]


def test_operator_of_few_rows_is_plain_in_pieces_for_more(tmp_path):
    def run(rules, num_loaded, ranges):
        plan = plan_of(tmp_path, splitting_ops=(), custom_ops=rules)
        op, table = Few(plan, "cpu"), torch.zeros(3)
        one = compiled(lambda x: op(x * 2.0, table) * 3.0, plan)
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


def test_operator_of_two_results_is_plain_in_pieces_for_more(tmp_path):
    plan = plan_of(tmp_path, splitting_ops=())
    op = Pair(plan, "cpu")
    one = compiled(lambda x: op(x)[1] - op(x)[0], plan)
    first = torch.randn(8, 3)
    one.trace(partial(one, first), [(first, 0, "tokens")])
    for size in (3, 8):
        x = torch.randn(size, 3)
        torch.testing.assert_close(one(x), x * 2.0 - (x + 1.0))


def test_inductor_folder_that_is_read_only_is_left_alone(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, level=2)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    one = compiled(lambda x: x - 1.0, plan, rank=3)
    x = torch.ones(4, 2)
    one.trace(partial(one, x), [(x, 0, "tokens")])
    assert torch.equal(one(x), x - 1.0)
    assert not any((tmp_path / "v7" / "inductor").iterdir())
    [index] = tmp_path.glob("v7/plans/*/rank_3/index.json")
    [entry] = json.loads(index.read_text())
    assert list(tmp_path.glob(f"v7/objects/*/{entry['key']}.bin"))


def test_folder_removed_while_a_piece_is_compiled_costs_one_more_compilation(tmp_path, monkeypatch):
    """Inductor keeps in memory that a library could not be made."""
    compiles, removed = cpp_builder.run_compile_cmd, []

    def compile_late(command, cwd):
        if "main.cpp" in str(command) and not removed:
            removed.append(shutil.rmtree(tmp_path / "v7" / "inductor"))
        return compiles(command, cwd)

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", compile_late)
    events = []
    plan = plan_of(tmp_path, level=2)
    one = Compiled(lambda x: x * 3.25 - 1.0, plan, limits={"tokens": 8}, observer=events.append)
    x = torch.ones(4, 2)
    one.trace(partial(one, x), [(x, 0, "tokens")])
    assert torch.equal(one(x), x * 3.25 - 1.0)
    assert removed
    assert [event.missed for event in events] == [CacheMiss.CORRUPT]
    assert missed_by(lambda x: x * 3.25 - 1.0, plan) == [None], "what the retry made is kept"
    assert [path.name for path in tmp_path.glob("v*/inductor*")] == ["inductor"]


@pytest.mark.parametrize("name", ["with space", "it's", 'q"uote', "back\\slash", "ta\tb"])
def test_cache_whose_path_a_shell_would_split_is_used(tmp_path, name):
    """Inductor's own folder takes its place for libraries: their compiler is told in one line."""
    plan = plan_of(tmp_path / name, level=2)
    for missed in (CacheMiss.ABSENT, None):
        events = []
        one = Compiled(lambda x: x - 7.0, plan, limits={"tokens": 8}, observer=events.append)
        x = torch.ones(4, 2)
        one.trace(partial(one, x), [(x, 0, "tokens")])
        assert torch.equal(one(x), x - 7.0)
        assert [event.missed for event in events] == [missed]


WRITTEN_OUT = torch.library.Library("graphrt_written_out", "DEF")
WRITTEN_OUT.define("composed(Tensor x) -> Tensor")
WRITTEN_OUT.impl("composed", lambda x: x * 2.0, "CompositeImplicitAutograd")


@torch.library.custom_op("graphrt_test::whole", mutates_args=())
def whole(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


whole.register_fake(torch.empty_like)


def missed_by(function, plan):
    events, x = [], torch.ones(4, 2)
    one = Compiled(function, plan, limits={"tokens": 8}, observer=events.append)
    one.trace(partial(one, x), [(x, 0, "tokens")])
    return [event.missed for event in events]


@pytest.mark.parametrize(
    ("op", "found"),
    [("graphrt_written_out::composed", CacheMiss.ABSENT), ("graphrt_test::whole", None)],
)
def test_operator_that_compilers_write_out_is_not_found_by_another_process(
    tmp_path, monkeypatch, op, found
):
    """Its body is in the code, and may be another one by the same name there."""
    namespace, name = op.split("::")
    called = getattr(getattr(torch.ops, namespace), name)
    plan = plan_of(tmp_path, level=2)
    assert missed_by(lambda x: called(x) + 1.0, plan) == [CacheMiss.ABSENT]
    assert missed_by(lambda x: called(x) + 1.0, plan) == [None]
    monkeypatch.setattr(splitter, "_PROCESS", "another process")
    assert missed_by(lambda x: called(x) + 1.0, plan) == [found]


class Pass(CustomGraphPass):
    def __init__(self, name):
        self.name = name

    def __call__(self, graph):
        """Changes nothing."""

    def uuid(self):
        return self.name


def test_pass_of_inductors_configuration_is_part_of_the_key(tmp_path):
    plan = plan_of(tmp_path, level=2)
    for name, found in (("a", CacheMiss.ABSENT), ("b", CacheMiss.ABSENT), ("a", None)):
        with inductor_config.patch(post_grad_custom_post_pass=Pass(name)):
            assert missed_by(lambda x: x - 9.0, plan) == [found]
    for unnamed in ({"post_grad_custom_post_pass": Pass(None)}, {"external_matmul": [torch.mm]}):
        with inductor_config.patch(unnamed):
            assert missed_by(lambda x: x - 9.0, plan) == [CacheMiss.UNHASHABLE_PASS]


class WrappingError(Exception):
    def __init__(self, inner_exception: Exception) -> None:
        self.inner_exception = inner_exception


@pytest.mark.parametrize(
    ("place", "named"),
    [("v7/inductor/73", "compilation.cache_dir, or GRAPH"), ("../73", "TORCHINDUCTOR_CACHE_DIR")],
)
@pytest.mark.parametrize("wrapping", [WrappingError, lambda error: error])
def test_folder_that_inductor_cannot_write_is_named(tmp_path, monkeypatch, place, named, wrapping):
    denied = PermissionError(errno.EACCES, "Permission denied", str((tmp_path / place).resolve()))
    fails = mock.Mock(side_effect=wrapping(denied))
    monkeypatch.setattr(torch_api, "compile_by_inductor", fails)
    one = compiled(lambda x: x - 1.0, plan_of(tmp_path, level=2))
    x = torch.ones(4, 2)
    with pytest.raises(ConfigError, match=f"^{named}(.|\n)*Permission denied"):
        one.trace(partial(one, x), [(x, 0, "tokens")])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None])
def test_disk_that_is_full_is_named(tmp_path, monkeypatch, error):
    told = f"C++ compile error\nCommand: g++ {tmp_path}/v7/a.cpp\nld: {os.strerror(errno.ENOSPC)}"
    fails = mock.Mock(side_effect=error or RuntimeError(told))
    monkeypatch.setattr(torch_api, "compile_by_inductor", fails)
    one = compiled(lambda x: x - 1.0, plan_of(tmp_path, level=2))
    x = torch.ones(4, 2)
    with pytest.raises(ConfigError, match=r"^compilation\.cache_dir(.|\n)*No space left"):
        one.trace(partial(one, x), [(x, 0, "tokens")])


def test_failure_over_a_read_only_folder_stays_what_it_is(tmp_path, monkeypatch):
    (tmp_path / "v7" / "inductor").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: path.name == "inductor")
    fails = mock.Mock(side_effect=RuntimeError("no such luck"))
    monkeypatch.setattr(torch_api, "compile_by_inductor", fails)
    one = compiled(lambda x: x - 1.0, plan_of(tmp_path, level=2))
    x = torch.ones(4, 2)
    with pytest.raises(BackendError, match="no such luck"):
        one.trace(partial(one, x), [(x, 0, "tokens")])
    assert fails.call_count == 1


class Kernel(SimpleNamespace):
    """As far as Inductor's tuning is asked for."""

    def bench(self, launcher, *, device):
        return launcher, device, torch_api.benchmarker.L2_cache_size


def test_kernels_to_tune_are_timed_while_the_gpu_is_still_busy(monkeypatch):
    """Filling 60 MB takes less time than a launch: kernels of 5 us seemed to take 20."""
    timing = SimpleNamespace(L2_cache_size=60)
    monkeypatch.setattr(torch_api, "benchmarker", timing)
    kernel = Kernel(autotune_cache_info={"autotune_cache_state": "miss"})
    monkeypatch.setattr(codecache.PyCodeCache, "modules", [SimpleNamespace(kernel=kernel)])
    sizes = []
    monkeypatch.setattr(
        torch._inductor,
        "standalone_compile",
        lambda *args, **options: sizes.append(timing.L2_cache_size),
    )
    torch_api.compile_by_inductor(None, [], {}, "1")
    assert kernel.bench("launcher", device="cuda")[2] == 60, "it is not tuned"
    for _ in range(2):
        torch_api.compile_by_inductor(None, [], {"coordinate_descent_tuning": True}, "1")
        assert kernel.bench("launcher", device="cuda") == ("launcher", "cuda", 2**28)
    assert sizes == [60, 2**28, 2**28]
    assert timing.L2_cache_size == 60


def test_kernels_that_were_found_tuned_are_marked(monkeypatch):
    """Triton forgets the mark where Inductor's workers pickle a kernel."""

    def kernel(state):
        result = SimpleNamespace(config=SimpleNamespace())
        info = {"autotune_cache_state": state}
        return Kernel(autotune_cache_info=info, compile_results=[result])

    found, searched = kernel("hit"), kernel("miss")
    modules = [SimpleNamespace(found=found, searched=searched, code="text")]
    monkeypatch.setattr(codecache.PyCodeCache, "modules", modules)
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *args, **options: "made")
    tuned = {"coordinate_descent_tuning": True}
    assert torch_api.compile_by_inductor(None, [], {}, "1")[0] == "made"
    assert not vars(found.compile_results[0].config)
    assert torch_api.compile_by_inductor(None, [], tuned, "1")[0] == "made"
    assert vars(found.compile_results[0].config) == {"found_by_coordesc": True}
    assert not vars(searched.compile_results[0].config)


KERNEL = """
from types import SimpleNamespace
from torch._inductor.runtime.triton_heuristics import check_autotune_cache

def config(size):
    return SimpleNamespace(kwargs={"XBLOCK": size}, num_warps=4, num_stages=1)

meta = {"coordinate_descent_tuning": DESCENDS}
configs, cache, info = check_autotune_cache([config(64), config(128)], __file__, meta)
kernel = SimpleNamespace(configs=configs, cache=cache, autotune_cache_info=info, inductor_meta=meta)
"""


@pytest.mark.parametrize("descends", [False, True])
def test_kernel_that_was_tuned_in_this_process_is_loaded_tuned(tmp_path, monkeypatch, descends):
    """Inductor keeps it in memory as it was before, or as it was between two ways of tuning."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Without Triton it is a class that takes nothing.
    monkeypatch.setattr(autotune_cache, "Config", lambda a, **b: SimpleNamespace(kwargs=a, **b))
    source = KERNEL.replace("DESCENDS", str(descends))
    load = partial(codecache._load_triton_kernel_from_source, "kernel", source)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _: None)
    monkeypatch.setattr(CacheCompiledArtifact, "_load_impl", lambda *_: load())
    saved = BytesWriter()
    saved.write_bytes(CacheCompiledArtifact.CACHE_HEADER)
    saved.write_bytes(b"of torch's source")
    saved.write_str("key")
    saved.write_bytes(b"code")
    payload = pickle.dumps((None, [], {}, saved.to_bytes()))
    untuned = load()
    assert len(untuned.configs) == 2
    assert load() is untuned
    untuned.cache.save(untuned.configs[1], 0)
    if descends:
        between = torch_api.from_bytes(payload)
        assert [config.kwargs for config in between.configs] == [{"XBLOCK": 128}]
        untuned.cache.save(untuned.configs[0], 0, found_by_coordesc=True)
    tuned = torch_api.from_bytes(payload)
    assert [config.kwargs for config in tuned.configs] == [{"XBLOCK": 64 if descends else 128}]
    assert torch_api.from_bytes(payload) is tuned, "one kernel serves all pieces that call it"


def test_cache_folder_with_a_space_is_read_again(tmp_path):
    x = torch.randn(4, 2)
    for num_loaded in (0, 1):
        one = compiled(lambda x: x * 5.0, plan_of(tmp_path / "a folder", level=2))
        one.trace(partial(one, x), [(x, 0, "tokens")])
        assert torch.equal(one(x), x * 5.0)
        assert one.report.num_loaded == num_loaded


def test_results_over_an_argument_stay_views_at_later_calls(tmp_path):
    plan = plan_of(tmp_path, level=2)
    one = compiled(lambda x: (x.view(-1), x + 1.0), plan)
    first = torch.zeros(4, 2)
    one.trace(partial(one, first), [(first, 0, "tokens")])
    for size in (4, 3, 8):
        x = torch.randn(size, 2)
        view, more = one(x)
        assert (view.shape, view.data_ptr()) == ((size * 2,), x.data_ptr())
        assert torch.equal(more, x + 1.0)


def test_results_of_pieces_keep_the_layout_of_the_model(tmp_path):
    def turned(x):
        rows = x.t().contiguous()
        heads = (x * 2.0).view(1, -1, 3, 2).transpose(1, 2)
        few = (x.t() + 1.0).contiguous()[::2]
        half = x[::2].t().contiguous().t()
        wide = rows.exp().expand(2, 6, x.shape[0])
        return torch.sigmoid(rows).view(-1), rows + 1.0, heads, few, (x + 3.0).t(), half * 2.0, wide

    one = compiled(turned, plan_of(tmp_path, **CUT))
    first = torch.randn(8, 6)
    one.trace(partial(one, first), [(first, 0, "tokens")])
    for size in (8, 5, 2):
        x = torch.randn(size, 6)
        found, expected = one(x), turned(x)
        torch.testing.assert_close(found, expected)
        assert [each.stride() for each in found] == [each.stride() for each in expected]


@pytest.mark.parametrize("marking", ["unbacked", "backed"])
def test_piece_whose_sizes_are_made_of_the_axis_is_compiled(tmp_path, marking):
    def longer(x):
        rows = torch.sigmoid(torch.cat([x, x.new_ones(3, 4)]))
        return torch.tanh(rows) * 2.0, rows.t().contiguous()

    asked = {"dynamic_shapes": marking, "compile_ranges_endpoints": [3], **CUT}
    one = compiled(longer, plan_of(tmp_path, **asked))
    first = torch.randn(4, 4)
    one.trace(partial(one, first), [(first, 0, "tokens")])
    for size in (2, 4, 5, 8):
        x = torch.randn(size, 4)
        torch.testing.assert_close(one(x), longer(x))


def test_later_call_outside_no_grad_gives_the_same(tmp_path):
    plan = plan_of(tmp_path, level=2)
    weight = torch.nn.Parameter(torch.randn(2, 3))
    one = compiled(lambda x: x @ weight, plan)
    x = torch.randn(4, 2)
    with torch.no_grad():
        one.trace(partial(one, x), [(x, 0, "tokens")])
        expected = one(x)
    with torch.enable_grad():
        assert torch.equal(one(x), expected)


def test_weight_of_another_layout_is_refused_outside_recordings(tmp_path):
    weight = torch.nn.Parameter(torch.randn(2, 3))
    one = compiled(lambda x: x @ weight, plan_of(tmp_path, level=2))
    x = torch.randn(4, 2)
    with torch.no_grad():
        one.trace(partial(one, x), [(x, 0, "tokens")])
        one(x)
        weight.data = torch.randn(3, 2).t()
        with pytest.raises(GuardAuditError) as caught:
            one(x)
    assert "stride" in str(caught.value.__context__)  # What Inductor's code said of it.

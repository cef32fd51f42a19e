"""Inductor's own cut at splitting ops. It cuts between kernels of a GPU only, so here it is told
that those of the CPU are such; programs of it are captured in tests/gpu."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config, utils as inductor_utils
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

import partitions
from graphrt import RuntimeConfig, resolve
from graphrt.compile import Compiled
from graphrt.errors import CompileError, ConfigError, SplittingOpError
from partitions import ATTEND, MAX_TOKENS, NUM_LAYERS, WIDTH, Decoder

# Of torch's own modules, as they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def _cpu_counts_as_gpu(monkeypatch):
    should_partition = Scheduler.should_partition

    def on_any_device(self, node):
        with mock.patch.object(BaseSchedulerNode, "is_gpu", return_value=True):
            return should_partition(self, node)

    monkeypatch.setattr(Scheduler, "should_partition", on_any_device)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def compiled(model, folder, wrap=lambda call, info: call, impls=None, **options):
    config = RuntimeConfig(compilation=partitions.compilation(folder, **options))
    plan = resolve(config, partitions.facts()).compile
    one = Compiled(model, plan, limits={"tokens": MAX_TOKENS}, wrap=wrap, impls=impls)
    x = torch.randn(13, WIDTH)
    with torch.no_grad():
        one.trace(lambda: one(x), [(x, 0, "tokens")])
    return one


def assert_computes(one, model, size):
    x = torch.randn(size, WIDTH)
    with torch.no_grad():
        model.cache.zero_()
        found, cache = one(x).clone(), model.cache.clone()
        model.cache.zero_()
        torch.testing.assert_close(found, model(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, model.cache, atol=1e-5, rtol=1e-5)


@needs_compiler
def test_partitions_compute_what_eager_does_at_every_size(folder):
    model, wrapped = Decoder(), []

    def wrap(call, info):
        wrapped.append((info.kind, info.name, info.is_plain))
        return call

    one = compiled(model, folder, wrap)
    kinds = [piece.kind for piece in one.report.pieces]
    assert kinds == ["captured", "splitting"] * NUM_LAYERS + ["captured"]
    assert [piece.number for piece in one.report.pieces] == list(range(2 * NUM_LAYERS + 1))
    assert wrapped == [("splitting", ATTEND, False)]
    for size in (1, 2, 5, 8, 13, MAX_TOKENS):
        assert_computes(one, model, size)
    assert one.report.num_compiles + one.report.num_loaded == 1
    assert inductor_utils._unstable_customized_partition_wrapper.wrapper is None
    assert inductor_config.custom_should_partition_ops == []


@needs_compiler
def test_two_runtimes_of_one_entry_run_each_its_own(folder):
    """Also where one runs inside the other."""
    compiled(Decoder(), folder)
    models, ran, inside = [Decoder(), Decoder(seed=9)], [], []

    def impl_of(number):
        def impl(x, cache, out, layer):
            ran.append(number)
            while inside:
                inside.pop()(torch.randn(2, WIDTH))
            partitions.attend(x, cache, out, layer)

        return {ATTEND: impl}

    ones = [compiled(m, folder, impls=impl_of(number)) for number, m in enumerate(models)]
    for one in ones:
        assert (one.report.num_compiles, one.report.num_loaded) == (0, 1)
        assert [piece.is_plain for piece in one.report.pieces] == [False, True] * 3 + [False]
    for number in (0, 1, 0):
        ran.clear()
        with torch.no_grad():
            ones[number](torch.randn(4, WIDTH))
        assert ran == [number] * NUM_LAYERS
        assert_computes(ones[number], models[number], 4)
    ran.clear()
    inside.append(ones[1])
    assert_computes(ones[0], models[0], 4)
    assert ran == [0, 1, 1, 1, 0, 0]


@needs_compiler
def test_tensor_that_begins_between_words_is_refused(folder):
    model = Decoder()
    shape = model.cache.shape
    model.cache = torch.zeros(shape.numel() + 1)[1:].view(shape)
    assert model.cache.data_ptr() % inductor_utils.ALIGNMENT
    with pytest.raises(CompileError, match=r"compiled code(.|\n)*multiple of"):
        compiled(model, folder)


class Listing(Decoder):
    """Gives what is written as a list, and returns a view of it."""

    def forward(self, x):
        torch.ops.graphrt_tests.count([self.cache], x)
        return x * 2, self.cache[1, 3:]


def add_1(ones, x):
    ones[0].add_(1.0)


@needs_compiler
def test_list_is_written_and_viewed(folder):
    model, x = Listing(), torch.randn(6, WIDTH)
    with torch.library._scoped_library("graphrt_tests", "FRAGMENT") as library:
        library.define("count(Tensor(a!)[] ones, Tensor x) -> ()")
        library.impl("count", add_1, "CompositeExplicitAutograd")
        torch.library.register_fake("graphrt_tests::count", lambda ones, x: None, lib=library)
        one = compiled(model, folder, splitting_ops=["graphrt_tests::count"])
        model.cache.zero_()
        with torch.no_grad():
            _, view = one(x)
    assert torch.equal(model.cache, torch.ones(model.cache.shape))
    model.cache.fill_(7.0)
    assert torch.equal(view, model.cache[1, 3:])


@pytest.mark.parametrize("name", ["graph_partition", "custom_should_partition_ops"])
def test_option_of_inductor_that_undoes_partitions_is_refused(folder, name):
    asked = {"inductor_compile_config": {name: []}}
    with pytest.raises(ConfigError, match=name):
        compiled(Decoder(), folder, **asked)


class Storing(torch.nn.Module):
    """Writes a table, then calls an operator that does not take it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(MAX_TOKENS, WIDTH))

    def forward(self, x):
        self.table.index_copy_(0, torch.arange(x.shape[0]), x)
        return torch.ops.graphrt_tests.note(x)


def silent(x):
    torch.ops.graphrt_tests.note(x)
    return x * 2


def on_meta(x):
    out, cache = torch.empty_like(x), torch.zeros(1, MAX_TOKENS + 1, WIDTH)
    torch.ops.graphrt_tests.attend(x, cache, out, 0)
    return out, torch.empty(WIDTH, device="meta")


@pytest.mark.parametrize(
    ("model", "ops", "error", "found"),
    [
        (
            Storing(),
            ["graphrt_tests::note"],
            CompileError,
            "a store at .*test_compile_partition.py",
        ),
        (torch.sigmoid, ["torch.sigmoid"], SplittingOpError, "a Python function"),
        (silent, ["graphrt_tests::note"], SplittingOpError, "nothing uses"),
        (on_meta, [ATTEND], CompileError, "one of meta"),
    ],
)
def test_what_a_partition_would_get_wrong_is_refused(folder, model, ops, error, found):
    with torch.library._scoped_library("graphrt_tests", "FRAGMENT") as library:
        library.define("note(Tensor x) -> Tensor")
        torch.library.register_fake("graphrt_tests::note", torch.empty_like, lib=library)
        with pytest.raises(error, match=found):
            compiled(model, folder, splitting_ops=ops)


class Counting(torch.nn.Module):
    """Reads what an operator has written, which its schema does not name."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x):
        return self.operator(x) + self.total


@needs_compiler
@pytest.mark.parametrize("written", ["argument", "buffer"])
def test_write_that_the_schema_does_not_name_is_refused(folder, written):
    name = f"hides_{written}"

    def hide(x):
        (x if written == "argument" else model.total).add_(1.0)
        return x * 2.0

    with torch.library._scoped_library("graphrt_tests", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, hide, "CompositeExplicitAutograd")
        torch.library.register_fake(f"graphrt_tests::{name}", torch.empty_like, lib=library)
        model = Counting(getattr(torch.ops.graphrt_tests, name))
        with pytest.raises(CompileError, match="a write to another tensor") as caught:
            compiled(model, folder, splitting_ops=[f"graphrt_tests::{name}"])
    assert "test_compile_partition" in caught.value.source

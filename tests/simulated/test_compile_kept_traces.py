"""Traces kept between processes: compared before they are used, or made anew with a reason.

They need a C++ compiler. Two runtimes of one process stand for two processes where nothing of the
process matters.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps
from types import ModuleType

import pytest
import sympy
import torch

from graphrt.compile import fake_runs, kept_graphs, kept_traces
from graphrt.compile.cache import CompileCache
from graphrt.compile.kept_graphs import NotKeptError
from graphrt.compile.ranges import Axis
from graphrt.errors import (
    CompileError,
    GraphBreakError,
    GuardAuditError,
    ShapeGuardError,
    SideEffectError,
)
from lab import WIDTH, RuntimeLab, example, values

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

SWITCH = "KEPT_TRACES_TEST"
NO_KERNELS = {"fallback_by_default": True}
"""Lets Inductor's code call torch's operators, because C++ for each test took half of the time."""


@dataclass
class Options:
    scale: float = 2.0
    is_shifted: bool = False


class Named(list):
    pass


class Model(torch.nn.Module):
    """What the trace reads: constants, a list, an object, two parameters that may be one, the
    environment of the process, which no guard is about; and it writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.second = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.register_buffer("count", torch.zeros(1))
        self.options = Options()
        self.options.offset = 0.5
        self.factors = [1.0, 0.5]
        self.recent = collections.deque([1.0])
        self.named = Named([1.0])
        self.choose = max

    def forward(self, *, x, ids, lens):
        x = x * getattr(self.options, "limit", 1.0) + getattr(self.options, "offset", 0.0)
        x = x * len(self.recent) * len(self.named) * self.choose(2, 3)
        x = torch.tanh(x @ self.first)
        self.count.add_(1)
        x = torch.sigmoid(x)
        for factor in self.factors:
            x = x * factor
        x = x @ self.second * self.options.scale
        switch = os.environ.get(SWITCH)
        x = x * torch.tensor(3.0 if switch == "constant" else 1.0)
        scaled = {"beta" if switch == "keyword" else "alpha": 0.5}
        x = torch.addmm(self.first[0], x, self.first, **scaled)
        if switch == "shift":
            x = x + 1.0
        if switch == "small" and x.shape[0] <= 8:
            x = x + 1.0
        if switch == "one" and ids.shape[0] == 1:
            x = x + 1.0
        if switch == "five" and x.shape[0] == 5:
            x = x + 1.0
        if switch == "multiple" and x.shape[0] % 3 == 0:
            x = x + 1.0
        if switch == "requests" and lens.shape[0] > 3:
            x = x + 1.0
        if switch == "check":
            torch._check(x.shape[0] <= 12)
        x = x * (-0.0 if switch == "zero" else 0.0) + x
        if switch == "hold":
            self.held = x * 2
        if switch == "data":
            same = x * 1
            same.data = x * 2
            x = same
        if switch == "hold argument":
            self.held = x
        if switch == "step":
            self.options.scale += 1.0
        if switch == "hook":
            self.register_forward_hook(lambda *_: None)
        if switch == "hide":
            sys.modules.setdefault("kept_traces_hidden", ModuleType("hidden")).held = x * 2
        if switch == "seed":
            torch.manual_seed(5)
        if switch == "threads":
            torch.set_num_threads(3)
        if switch == "dtype":
            torch.set_default_dtype(torch.float64)
        if switch == "dtype of some":
            torch.set_default_dtype(torch.float64)
            x = x + torch.ones(WIDTH, dtype=torch.int64) / 3
            torch.set_default_dtype(torch.float32)
        if switch == "count":
            self.second.add_(1.0)
        if switch == "draw":
            x = x + torch.rand(WIDTH)
        rows = x + ids[:, None]
        return (
            {"rows": rows, "lens": lens * 2}
            if switch != "twice"
            else {
                "rows": rows,
                "lens": lens * 2,
                "again": rows,
            }
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the trace of ``Model`` as it is made."""
    place = tmp_path_factory.mktemp("cache")
    with lab_of(place) as lab:
        assert compiled(lab) == (False, "")
    return place


@pytest.fixture
def kept(folder, tmp_path):
    """A copy, for tests whose start writes."""
    shutil.copytree(folder, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def backed(tmp_path_factory):
    """With the traces of ``Model`` for backed sizes."""
    place = tmp_path_factory.mktemp("cache")
    with lab_of(place, options={"dynamic_shapes": "backed"}) as lab:
        assert not compiled(lab)[0]
        require_right(lab)
    return place


def lab_of(folder, model=None, options=None, **others):
    asked = {"level": 3, "backend": "inductor", "splitting_ops": ["torch.sigmoid"]}
    asked |= {"inductor_compile_config": NO_KERNELS, "cache_dir": folder, **(options or {})}
    model = Model() if model is None else model
    others = {"may_overwrite": [model.count]} | others if hasattr(model, "count") else others
    return RuntimeLab("NONE", model=model, asked={"compilation": asked}, **others)


def compiled(lab):
    """Whether its trace is a kept one, and why not."""
    report = lab.runtime.report().compile
    return report.is_trace_kept, report.why_traced


def require_right(lab):
    for seed, (tokens, reqs) in enumerate([(1, 1), (2, 2), (5, 2), (8, 3), (13, 3)]):
        outputs = lab.step(tokens, reqs, seed=seed)
        with torch.no_grad():
            expected = lab.model(**values(tokens, reqs, seed))
        torch.testing.assert_close(outputs["rows"], expected["rows"], atol=1e-5, rtol=1e-5)
        assert torch.equal(outputs["lens"], expected["lens"])


def test_second_start_takes_the_trace_and_is_right_at_every_size(folder):
    with lab_of(folder) as lab:
        assert compiled(lab) == (True, "")
        report = lab.runtime.report().compile
        assert (report.num_compiles, report.num_loaded) == (0, 2)
        assert report.num_audited > 0
        assert "traced by an earlier process" in str(lab.runtime.report())
        require_right(lab)


def test_start_with_a_kept_trace_leaves_state_and_seeds_as_they_were(folder):
    model = Model()
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    with lab_of(folder, model) as lab:
        assert compiled(lab)[0]
        assert model.count.item() == 0
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]


def change_scale(model):
    model.options.scale = 3.0


def change_list(model):
    model.factors.append(2.0)


def change_type(model):
    model.options = type("Other", (Options,), {})()


def set_optional(model):
    model.options.limit = 4.0


def remove_optional(model):
    del model.options.offset


def change_deque(model):
    model.recent.append(1.0)


def change_subclass(model):
    model.named.append(1.0)


def change_builtin(model):
    model.choose = min


def tie(model):
    model.second = model.first


def hook(model):
    model.register_forward_hook(lambda *_: None)


CHANGES = [
    *(change_scale, change_list, change_type, tie, hook, set_optional, remove_optional),
    *(change_deque, change_subclass, change_builtin),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_model_that_changed_is_traced_anew_with_a_reason(kept, change):
    model = Model()
    change(model)
    with lab_of(kept, model) as lab:
        assert not compiled(lab)[0]
        require_right(lab)
    with lab_of(kept, model) as lab:
        assert compiled(lab)[0]
        require_right(lab)


def test_reason_names_what_differs(kept):
    model = Model()
    change_scale(model)
    with lab_of(kept, model) as lab:
        assert "model.options.scale: builtins.float 3.0, before" in compiled(lab)[1]
        assert f"traced here: {compiled(lab)[1]}" in str(lab.runtime.report())


def test_models_that_differ_in_a_constant_have_a_trace_each(kept):
    other = Model()
    change_scale(other)
    with lab_of(kept, other) as lab:
        assert not compiled(lab)[0]
    for model in (other, Model()):
        with lab_of(kept, model) as lab:
            assert compiled(lab) == (True, "")
            require_right(lab)


def test_entry_has_the_newest_traces_and_one_for_what_was_read():
    def kept(scale, entry="f"):
        fields = dict.fromkeys(kept_traces.KeptTrace._fields)
        trace = kept_traces.KeptTrace(**fields | {"read": {"scale": str(scale)}, "entry": entry})
        return pickle.dumps(trace)

    entry = []
    for scale in range(9):
        entry = pickle.loads(kept_traces.joined(kept(scale), entry))
        assert entry == [kept(one) for one in range(scale, -1, -1)][: kept_traces.MOST_TRACES]
    again = kept_traces.joined(kept(7, "g"), [b"cut", *entry])
    assert pickle.loads(again) == [kept(7, "g"), kept(8), kept(6), kept(5)]


@pytest.mark.parametrize(
    "switch", ["shift", "constant", "keyword", "zero", "count", "draw", "twice"]
)
def test_what_no_guard_compares_is_found_by_runs(kept, monkeypatch, switch):
    monkeypatch.setenv(SWITCH, switch)
    with lab_of(kept) as lab:
        assert not compiled(lab)[0]
        assert lab.model.second[0, 0] == Model().second[0, 0]
        if switch not in ("draw", "twice", "count"):
            require_right(lab)


@pytest.mark.parametrize("switch", ["small", "five", "multiple", "requests"])
def test_branch_on_a_size_is_refused_as_without_a_kept_trace(kept, monkeypatch, switch):
    monkeypatch.setenv(SWITCH, switch)
    with pytest.raises(ShapeGuardError, match=rf"branch on a size at .*{switch}"):
        lab_of(kept)


def test_branch_on_a_backed_size_is_refused_as_without_a_kept_trace(backed, monkeypatch):
    monkeypatch.setenv(SWITCH, "five")
    with pytest.raises(ShapeGuardError, match=r"branch on a size at .*five"):
        lab_of(backed, options={"dynamic_shapes": "backed"})


def test_branch_on_one_token_is_traced_anew(kept, monkeypatch):
    monkeypatch.setenv(SWITCH, "one")
    with lab_of(kept) as lab:
        assert not compiled(lab)[0]
        assert "GuardOnDataDependentSymNode" in compiled(lab)[1]
        require_right(lab)


def test_check_of_a_size_that_the_trace_does_not_make_is_found(kept, monkeypatch):
    monkeypatch.setenv(SWITCH, "check")
    with lab_of(kept) as lab:
        assert not compiled(lab)[0]
        assert "it takes for granted that" in compiled(lab)[1]


@pytest.mark.parametrize("switch", ["hold", "hold argument", "step", "hook", "data"])
def test_side_effect_is_put_back_and_refused_as_without_a_kept_trace(kept, monkeypatch, switch):
    monkeypatch.setenv(SWITCH, switch)
    model = Model()
    before = dict(vars(model))
    with pytest.raises((SideEffectError, GraphBreakError)):
        lab_of(kept, model)
    assert vars(model) == before
    assert not model._forward_hooks


def test_fake_tensor_that_something_else_keeps_is_an_error(kept, monkeypatch):
    monkeypatch.setenv(SWITCH, "hide")
    with pytest.raises(SideEffectError, match=r"fake result of aten\.mul"):
        lab_of(kept)
    sys.modules.pop("kept_traces_hidden")


@pytest.mark.parametrize("switch", ["dtype", "dtype of some", "seed", "threads"])
def test_setting_of_torch_is_put_back_and_no_kept_trace_is_used(kept, monkeypatch, switch):
    monkeypatch.setenv(SWITCH, switch)
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    # Refused, as with an empty cache, or traced anew.
    with suppress(CompileError), lab_of(kept) as lab:
        assert not compiled(lab)[0]
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


class Told:
    """A result that is no tree of tensors."""

    def __init__(self, rows, lens):
        self.rows, self.lens = rows, lens


class Telling(torch.nn.Module):
    def forward(self, *, x, ids, lens):
        return Told(torch.sigmoid(x) + ids[:, None], lens * 2)


def test_result_whose_contents_nothing_compares_is_not_kept(tmp_path):
    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Telling()

        def forward(self, **inputs):
            told = self.inner(**inputs)
            return {"rows": told.rows, "lens": told.lens}

    for _ in range(2):
        model = Whole()
        with lab_of(tmp_path, model, compile_part=model.inner) as lab:
            assert "Told'>, whose contents nothing compares" in compiled(lab)[1]
            require_right(lab)


class Composed(torch.nn.Module):
    """Modules that torch computes otherwise where weights may get gradients, or sizes vary."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.keys = torch.nn.Parameter(torch.randn(3, WIDTH, generator=generator))
        self.cell = torch.nn.GRUCell(WIDTH, WIDTH)
        self.bag = torch.nn.EmbeddingBag(64, WIDTH, mode="sum")
        for parameter in (*self.cell.parameters(), *self.bag.parameters()):
            torch.nn.init.normal_(parameter, generator=generator)

    def forward(self, *, x, ids, lens):
        keys = self.keys.expand(x.shape[0], -1, -1)
        x = x + torch.bmm(x[:, None], keys.transpose(1, 2)).sum(2)
        x = torch.sigmoid(self.cell(x, self.bag(ids[:, None].long() % 64)))
        return {"rows": x + ids[:, None], "lens": lens * 2}


def test_trace_of_modules_that_torch_composes_is_kept(tmp_path):
    for is_kept in (False, True):
        with lab_of(tmp_path, Composed()) as lab:
            assert compiled(lab) == (is_kept, "")
            require_right(lab)


class Doubled(torch.nn.Module):
    def forward(self, *, x, ids, lens):
        rows = torch.sigmoid(x) + torch.ops.kept_traces.double(torch.tanh(x)) + ids[:, None]
        return {"rows": rows, "lens": lens * 2}


def test_operator_that_returns_another_dtype_is_found(tmp_path):
    """Its code is in no file that was traced."""
    for dtype, is_kept in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
        with torch.library._scoped_library("kept_traces", "FRAGMENT") as library:
            library.define("double(Tensor x) -> Tensor")
            library.impl("double", lambda x, d=dtype: (x * 2).to(d), "CPU")
            fake = partial(torch.empty_like, dtype=dtype)
            torch.library.register_fake("kept_traces::double", fake, lib=library)
            with lab_of(tmp_path, Doubled()) as lab:
                assert compiled(lab)[0] is is_kept
                require_right(lab)


@cache
def table(is_compiling):
    return torch.arange(WIDTH, dtype=torch.float32) + float(is_compiling)


class Tables:
    @staticmethod
    @cache
    def table(is_compiling):
        return torch.arange(WIDTH, dtype=torch.float32) + float(is_compiling)


def hidden(function):
    @wraps(function)
    def call(*args):
        return (function(*args),)[0]

    return call


@hidden
@lru_cache(maxsize=4)
def hidden_table(is_compiling):
    return (torch.arange(WIDTH, dtype=torch.float32) + float(is_compiling),)[0]


class Tabled(torch.nn.Module):
    def __init__(self, table=table):
        super().__init__()
        self.tables = {"one": table}

    def forward(self, *, x, ids, lens):
        rows = torch.sigmoid(x) + self.tables["one"](False) + ids[:, None]
        return {"rows": rows, "lens": lens * 2}


@pytest.mark.filterwarnings("ignore:.*lru_cache")
@pytest.mark.parametrize("function", [table, Tables.table, hidden_table])
def test_cached_function_that_is_called_for_the_comparison_forgets_it(tmp_path, function):
    cached = getattr(function, "__wrapped__", function) if function is hidden_table else function
    for is_kept in (False, True):
        cached.cache_clear()
        with lab_of(tmp_path, Tabled(function)) as lab:
            assert compiled(lab) == (is_kept, "")
            assert cached.cache_info().currsize == 0
            require_right(lab)


@lru_cache
def table_of_torch(is_compiling):
    return torch.arange(WIDTH, dtype=torch.float32) + float(is_compiling)


class OfTorch(torch.nn.Module):
    def forward(self, *, x, ids, lens):
        rows = torch.sigmoid(x) + torch.random.table_of_torch(False) + ids[:, None]
        return {"rows": rows, "lens": lens * 2}


@pytest.mark.filterwarnings("ignore:.*lru_cache")
def test_cached_function_in_a_module_of_torch_forgets_the_run(tmp_path, monkeypatch):
    """What walks a model does not enter it, and the heap is frozen, as in servers."""
    table = table_of_torch
    monkeypatch.setattr(torch.random, "table_of_torch", table, raising=False)
    monkeypatch.delitem(globals(), "table_of_torch")
    for is_kept in (False, True):
        table.cache_clear()
        with lab_of(tmp_path, OfTorch()) as lab:
            assert compiled(lab) == (is_kept, "")
            assert table.cache_info().currsize == 0
            require_right(lab)


@pytest.mark.filterwarnings("ignore:.*lru_cache")
def test_cached_function_that_was_called_before_keeps_its_results(tmp_path):
    """Its result is a constant there, which no trace has: those call the function."""
    table.cache_clear()
    with lab_of(tmp_path, Tabled()):
        pass
    before = table(False)
    with lab_of(tmp_path, Tabled()) as lab:
        assert "a constant" in compiled(lab)[1]
        assert table(False) is before
        require_right(lab)


def test_constant_that_is_too_large_to_read_is_traced_anew(kept, monkeypatch):
    monkeypatch.setattr(fake_runs, "_LARGEST_CONSTANT", 3)
    with lab_of(kept) as lab:
        assert compiled(lab) == (False, "not kept: a constant of 4 bytes")


class Served(torch.nn.Module):
    """Its operator runs nowhere, its data is looked at, and parts of it are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH,), 2.0))
        self.options = collections.UserDict(scale=2.0)

    def forward(self, *, x, ids, lens):
        with torch.profiler.record_function("first"):
            x = x * self.weight.data * self.options["scale"]
        if torch.compiler.is_compiling():
            x = x * 1
        first, second = torch.ops.kept_traces.served(x).chunk(2, 1)
        rows = torch.cat([second, first], 1) + ids[:, None]
        return {"rows": rows, "lens": lens * 2}


@pytest.mark.filterwarnings("ignore:.*profiler")
def test_operator_that_a_function_serves_is_compared_by_its_fake(tmp_path):
    def stub(x):
        raise NotImplementedError

    with torch.library._scoped_library("kept_traces", "FRAGMENT") as library:
        library.define("served(Tensor x) -> Tensor")
        library.impl("served", stub, "CPU")
        torch.library.register_fake("kept_traces::served", torch.empty_like, lib=library)
        for is_kept in (False, True):
            options = {"splitting_ops": ["kept_traces::served"]}
            impls = {"kept_traces::served": torch.sigmoid}
            with lab_of(tmp_path, Served(), options, op_impls=impls) as lab:
                assert compiled(lab) == (is_kept, "")
                given = values(5, 2, 0)
                first, second = torch.sigmoid(given["x"] * 4.0).chunk(2, 1)
                expected = torch.cat([second, first], 1) + given["ids"][:, None]
                torch.testing.assert_close(lab.step(5, 2, seed=0)["rows"], expected)


def test_capture_after_a_kept_start_compares_what_the_trace_read(folder):
    with lab_of(folder) as lab:
        assert compiled(lab)[0]
        lab.model.options.scale = 5.0
        with pytest.raises(GuardAuditError, match=r"model\.options\.scale"):
            lab.runtime.capture()


def test_start_asks_for_examples_of_the_sizes_of_the_trace_alone(kept):
    asked = set()

    def noting(sizes, seed):
        asked.add(sizes["tokens"])
        return example(sizes, seed)

    with lab_of(kept, examples=noting) as lab:
        assert compiled(lab) == (True, "")
        assert len(asked) == 1


@pytest.mark.parametrize("options", [{"guard_policy": "keep"}, {"compile_cache": False}])
def test_options_that_keep_no_trace(tmp_path, options):
    for _ in range(2):
        with lab_of(tmp_path, options=options) as lab:
            assert compiled(lab) == (False, "")


def test_backed_sizes_have_a_trace_of_each_kind(backed):
    with lab_of(backed, options={"dynamic_shapes": "backed"}) as lab:
        assert compiled(lab)[0]
        require_right(lab)
    pieces = [entry.about["piece"] for entry in CompileCache(backed).entries()]
    assert pieces.count("trace") == 3  # Of several tokens and requests, of one request, of one.


def test_backed_sizes_are_tried_where_a_kept_trace_has_them(tmp_path, monkeypatch):
    """Without bounds of marks (torch 2.11 and 2.12) many a model needs them."""

    class Sliced(Model):
        def forward(self, *, x, ids, lens):
            outputs = super().forward(x=x, ids=ids, lens=lens)
            half = x.shape[0] * 2
            if half == 2:
                outputs["rows"] = outputs["rows"] * 1
            return outputs

    found = []
    for _ in range(2):
        with lab_of(tmp_path, Sliced()) as lab:
            report = lab.runtime.report().compile
            found.append((report.is_trace_kept, len(report.notes)))
            require_right(lab)
    assert found == [(False, 1), (True, 1)]


SOURCE = """
import torch

class Small(torch.nn.Module):
    def forward(self, *, x, ids, lens):
        return {"rows": torch.sigmoid(x) * FACTOR + ids[:, None], "lens": lens * 2}
"""


def module_of(path, text, age):
    """The module that ``text`` is, written ``age`` seconds ago."""
    path.write_text(text)
    os.utime(path, (time.time() - age,) * 2)
    spec = importlib.util.spec_from_file_location("kept_small", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kept_small"] = module
    spec.loader.exec_module(module)
    return module


def test_text_of_the_traced_code_that_changed_is_traced_anew(tmp_path):
    path, cache = tmp_path / "kept_small.py", tmp_path / "cache"
    old = SOURCE.replace("FACTOR", "2.0")
    for text, is_kept in ((old, False), (old, True), (f"{old}# More.", False)):
        model = module_of(path, text, age=10_000).Small()
        with lab_of(cache, model) as lab:
            assert compiled(lab)[0] is is_kept
            require_right(lab)


def test_text_that_changed_while_the_process_ran_is_not_trusted(tmp_path):
    path, cache = tmp_path / "kept_small.py", tmp_path / "cache"
    text = SOURCE.replace("FACTOR", "2.0")
    with lab_of(cache, module_of(path, text, age=10_000).Small()) as lab:
        assert compiled(lab) == (False, "")
    model = module_of(path, text, age=-10).Small()
    for _ in range(2):
        with lab_of(cache, model) as lab:
            assert "changed after this process began" in compiled(lab)[1]


def test_code_of_no_file_is_not_kept(tmp_path):
    module = sys.modules["kept_nowhere"] = ModuleType("kept_nowhere")
    exec(SOURCE.replace("FACTOR", "2.0"), vars(module))
    for _ in range(2):
        with lab_of(tmp_path, module.Small()) as lab:
            assert compiled(lab) == (False, "not kept: forward, whose code is in no file")


def test_part_of_a_model_takes_its_kept_trace(tmp_path):
    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()
            self.is_running = False

        def forward(self, **inputs):
            assert not self.is_running, "each run of it ended as it does"
            self.is_running = True
            outputs = self.inner(**inputs)
            self.is_running = False
            return outputs

    for is_kept in (False, True):
        model = Whole()
        options = {"compile_part": model.inner, "may_overwrite": [model.inner.count]}
        with lab_of(tmp_path, model, **options) as lab:
            assert compiled(lab)[0] is is_kept
            require_right(lab)


class OneAxis(torch.nn.Module):
    def forward(self, x):
        return torch.sigmoid(x * 2)


def test_part_of_one_axis_of_two_has_backed_sizes(tmp_path):
    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = OneAxis()

        def forward(self, *, x, ids, lens):
            return {"rows": self.inner(x * 2) + ids[:, None], "lens": lens * 2}

    for is_kept in (False, True):
        model = Whole()
        options = {"dynamic_shapes": "backed"}
        with lab_of(tmp_path, model, options, compile_part=model.inner) as lab:
            assert compiled(lab)[0] is is_kept
            require_right(lab)


@pytest.mark.parametrize("options", [[], ["-O"]])
def test_other_process_takes_the_trace(folder, options):
    """Its hashes of text, addresses and order of sets are others; and it may have no assertions."""
    program = textwrap.dedent(
        f"""
        import sys
        from importlib import _bootstrap_external as machinery
        from pathlib import Path
        bytecode_of = machinery.cache_from_source
        # Libraries are read with their assertions: to compile torch without takes 12 s.
        machinery.cache_from_source = lambda path, *_, **options: bytecode_of(
            path, optimization="" if "site-packages" in path else None
        )
        sys.path[:0] = {sys.path!r}
        import torch
        from test_compile_kept_traces import compiled, lab_of, require_right
        torch.set_num_threads({torch.get_num_threads()})
        with lab_of(Path({str(folder)!r})) as lab:
            require_right(lab)
            print(compiled(lab), lab.runtime.report().compile.num_compiles)
        """
    )
    command = [sys.executable, *options, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "(True, '') 0"


# -- graphs as bytes


class Views(torch.nn.Module):
    """Views of one memory, several results, sizes that are sums."""

    def forward(self, *, x, ids, lens):
        first, second = x.unsafe_chunk(2, 1)
        joined = torch.cat([first, second.t().t()], 0)
        most, _ = joined.max(1)
        x[:, :1].add_(most[: x.shape[0], None])
        return {"rows": joined, "lens": most.new_zeros(joined.shape[0] + 3), "x": x}


def told(graph):
    """Of each node what it calls and where, and of its value dtype, layout and memory."""
    memories = {}

    def about(value):
        if isinstance(value, torch.Tensor):
            memory = memories.setdefault(value.untyped_storage()._cdata, len(memories))
            sizes = [about(n) for n in (*value.shape, *value.stride(), value.storage_offset())]
            return memory, value.dtype, value.device, sizes
        if isinstance(value, tuple | list):
            return [about(one) for one in value]
        return value if isinstance(value, int) else type(value)

    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    return [
        (node.op, str(node.target), node.name, node.stack_trace, about(node.meta["example_value"]))
        for node in nodes
    ]


def test_graph_read_back_says_the_same_of_every_value(monkeypatch, tmp_path):
    seen = []
    write = kept_graphs.to_bytes

    def noting(graph, axes):
        seen.append((told(graph), write(graph, axes)))
        return seen[-1][1]

    monkeypatch.setattr(kept_graphs, "to_bytes", noting)
    compilation = {"level": 2, "backend": "inductor", "inductor_compile_config": NO_KERNELS}
    compilation |= {"cache_dir": tmp_path}
    outputs = {"rows": "tokens", "x": "tokens"}
    with RuntimeLab("NONE", model=Views(), outputs=outputs, asked={"compilation": compilation}):
        pass
    ((expected, data),) = seen
    again, _ = kept_graphs.from_bytes(data, is_backed=False)
    for one, another in zip(told(again), expected, strict=True):
        assert one == another


def test_graph_that_calls_the_users_function_is_not_kept():
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    graph.output((graph.call_function(example, (value,)),))
    with pytest.raises(NotKeptError, match="no function of torch"):
        kept_graphs.to_bytes(torch.fx.GraphModule(torch.nn.Module(), graph), {})


def test_graph_with_an_argument_that_cannot_be_written_is_not_kept():
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    node = graph.call_function(torch.relu, (value,))
    graph.output((node,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    # As of code that Dynamo writes, which need not be the text of its graph.
    [of_module] = module.graph.find_nodes(op="call_function", target=torch.relu)
    of_module.args = (*of_module.args, type("Local", (), {}))
    with pytest.raises(NotKeptError, match="PicklingError"):
        kept_graphs.to_bytes(module, {})


def test_axes_come_back_with_their_limits():
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    data = kept_graphs.to_bytes(module, {sympy.Symbol("s0"): Axis("tokens", 16)})
    again, fresh = kept_graphs.from_bytes(data, is_backed=True)
    assert [node.op for node in again.graph.nodes] == ["placeholder", "output"]
    assert isinstance(fresh.size_of("tokens"), torch.SymInt)
    assert fresh.mode.shape_env.var_to_range[fresh.size_of("tokens").node.expr].upper == 16

"""Level 3 through a runtime: one trace for every size, cut at splitting ops; what it refuses."""

from __future__ import annotations

import gc
import linecache
import os
import pickle
import re
import traceback
import weakref
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from types import FunctionType

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo import funcname_cache
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphrt import CompilationConfig, Facts, Reason, RuntimeConfig, break_point, resolve
from graphrt.compile import Compiled
from graphrt.errors import (
    BreakError,
    CompileError,
    ConfigError,
    ContractError,
    ForbiddenOperationError,
    GraphBreakError,
    GuardAuditError,
    RecompileError,
    ShapeGuardError,
    SideEffectError,
    SideEffectWarning,
    SplittingOpError,
    StateAdvancedError,
)
from graphrt_llm import LLMEngine
from graphrt_llm.assembly import TINY_CONFIG
from graphrt_llm.model_config import ModelConfig
from lab import (
    FULL,
    MAX_REQS,
    MAX_TOKENS,
    PIECEWISE,
    POLICIES,
    WIDTH,
    RuntimeLab,
    Tally,
    assert_equal,
    values,
)

LOG: list[int] = []
LOG_SCALE = 2.0
PLAN = resolve(RuntimeConfig(compilation=CompilationConfig(level=3))).compile


class Formula(torch.nn.Module):
    """One sigmoid between two products: cut at it, two compiled pieces."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.register_buffer("steps", torch.zeros(1))
        self.scale = scale
        self.calls = 0
        self.kept: list[torch.Tensor] = []

    def forward(self, *, x, ids, lens):
        hidden = self.between(torch.tanh(x @ self.weight) * self.scale)
        return {"rows": torch.sigmoid(hidden) @ self.weight + ids[:, None], "lens": lens * 2}

    def between(self, hidden):
        return hidden


class Outer(torch.nn.Module):
    """Python of its own around the part that is compiled."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part
        self.runs = Tally(0)

    def forward(self, **inputs):
        self.runs[0] += 1
        return self.part(**inputs)


def compiled(mode: str = "PIECEWISE", model=None, ops=("torch.sigmoid",), **options) -> RuntimeLab:
    asked = options.pop("asked", {})
    asked["compilation"] = {"level": 3, "splitting_ops": ops, **asked.get("compilation", {})}
    return RuntimeLab(mode, model=Formula() if model is None else model, asked=asked, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("has_part", [False, True])
def test_compiled_steps_give_the_bits_of_eager_ones(policy, has_part):
    part = Formula()
    model, options = (Outer(part), {"compile_part": part}) if has_part else (part, {})
    with compiled(policy, model, asked={"verify_every": 3}, **options) as lab:
        report = lab.runtime.capture()
        assert {entry.num_eager for entry in report.graphs if entry.mode is PIECEWISE} <= {1}
        assert (report.compile.num_compiled, report.compile.num_unique) == (2, 2)
        assert report.compile.unmatched_splitting_ops == ()
        assert report.compile.compilation_time > 0
        steps = [(n, r, False) for n in (1, 2, 3, 5, 8, 9, MAX_TOKENS) for r in (1, MAX_REQS)]
        steps = [step for step in steps if step[1] <= step[0]]
        outputs = []
        for seed, step in enumerate([*steps, (3, 3, True), (4, 4, True)]):
            mine = lab.step(*step, seed=seed)
            outputs.append(
                (step, seed, {k: v.clone() for k, v in mine.items()}, lab.runtime.last_decision)
            )
    # Closed, so that the model is its own again.
    assert "forward" not in vars(part)
    for (tokens, reqs, _), seed, found, decision in outputs:
        lab.runtime = type("Ran", (), {"last_decision": decision})
        assert_equal(found, lab.eager(tokens, reqs, seed))


def test_engine_of_16_layers_has_33_pieces_and_3_differ():
    config = replace(ModelConfig.tiny(), num_layers=16, architecture="Qwen3ForCausalLM")
    compilation = CompilationConfig(
        level=3, cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[4]
    )
    asked = replace(TINY_CONFIG, runtime=replace(TINY_CONFIG.runtime, compilation=compilation))
    prompts = [[1, 2, 3, 4, 5], [9] * 20, [7]]
    with LLMEngine.with_random_weights(config, asked) as engine:
        report = engine.capture()
        assert len(report.compile.pieces) == 33
        assert (report.compile.num_compiled, report.compile.num_unique) == (17, 3)
        assert {(e.num_graphs, e.num_eager) for e in report.graphs if e.mode is PIECEWISE} == {
            (17, 16)
        }
        assert {(e.num_graphs, e.num_eager) for e in report.graphs if e.mode is FULL} == {(1, 0)}
        found = engine.generate(prompts)
    plain = replace(
        TINY_CONFIG,
        runtime=replace(TINY_CONFIG.runtime, compilation=CompilationConfig(cudagraph_mode="NONE")),
    )
    with LLMEngine.with_random_weights(config, plain) as engine:
        assert engine.generate(prompts) == found


def test_runtimes_of_one_class_keep_their_own_constants():
    found = []
    for scale in (1.0, 2.0, 3.0):
        lab = compiled("FULL", Formula(scale))
        lab.runtime.capture()
        found.append((lab, lab.step(8, 4)["rows"].clone()))
    for lab, rows in found:
        lab.runtime.close()
        with torch.no_grad():
            assert torch.equal(rows, lab.model(**values(8, 4))["rows"])
    assert not torch.equal(found[0][1], found[1][1])


def test_callables_beyond_dynamos_limit_are_compiled():
    def add(number):
        return lambda x: x + number

    for number in range(10):
        x = torch.zeros(3)
        one = Compiled(add(number), PLAN, limits={"tokens": 8})
        one.trace(lambda: one(x), [(x, 0, "tokens")])  # noqa: B023  # It runs at once.
        assert one(torch.ones(5)).tolist() == [1.0 + number] * 5
        with pytest.raises(RecompileError):
            one.trace(lambda: None, [])


def test_trace_reads_no_file_for_the_names_of_functions(monkeypatch):
    read = {}
    monkeypatch.setattr(funcname_cache, "cache", read)
    with compiled("NONE"):
        assert not read


def test_trace_is_not_interrupted_by_collections():
    callers, before = [], gc.get_threshold()

    def note(phase, _):
        callers.append([frame.name for frame in traceback.extract_stack(limit=200)])

    gc.callbacks.append(note)
    gc.set_threshold(10)
    try:
        with compiled("NONE"):
            assert callers
            assert not [names for names in callers if "_first_call" in names]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def test_closed_runtime_frees_what_it_compiled():
    lab = compiled("PIECEWISE")
    lab.runtime.capture()
    lab.step(3, 2)
    lab.runtime.close()
    weight = weakref.ref(lab.model.weight)
    del lab
    gc.collect()
    assert weight() is None


def test_model_without_examples_is_compiled_by_its_real_batch():
    with compiled("FULL", examples=None) as lab:
        with pytest.raises(CompileError, match="before the first call"):
            lab.step(3, 2)
        report = lab.runtime.capture(like=values(5, 2))
        assert report.compile.num_compiled == 2
        lab.step(5, 2)
        assert lab.runtime.last_decision.mode is FULL


# -- what cannot be traced


class AssignsBuffer(Formula):
    def between(self, hidden):
        self.steps = self.steps + 1  # the line
        return hidden


class CountsCalls(Formula):
    def between(self, hidden):
        self.calls += 1  # the line
        return hidden


class KeepsTensors(Formula):
    def between(self, hidden):
        self.kept.append(hidden)  # the line
        return hidden


class BranchesOnValues(Formula):
    def between(self, hidden):
        if hidden.sum() > 0:  # the line
            return hidden
        return -hidden


class Prints(Formula):
    def between(self, hidden):
        print("here")  # the line
        return hidden


class ReadsValue(Formula):
    def between(self, hidden):
        return hidden * hidden.sum().item()  # the line


class SelectsRows(Formula):
    def between(self, hidden):
        return hidden + hidden[hidden > 0].sum()  # the line


class BranchesOnSize(Formula):
    def between(self, hidden):
        if hidden.shape[0] > 4:  # the line
            return hidden
        return -hidden


class GoesThroughRows(Formula):
    def between(self, hidden):
        return torch.stack([row * 2 for row in hidden])  # the line


class HasBreakPoint(Formula):
    @break_point
    def inside(self, hidden):
        return hidden + 1

    def between(self, hidden):
        return self.inside(hidden)  # the line


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (AssignsBuffer, SideEffectError, "model.steps at"),
        (CountsCalls, SideEffectError, "model.calls"),
        (KeepsTensors, SideEffectError, "model.kept"),
        (BranchesOnValues, GraphBreakError, "Data-dependent"),
        (Prints, GraphBreakError, "print"),
        (ReadsValue, GraphBreakError, "item"),
        (SelectsRows, GraphBreakError, "contains"),
        (BranchesOnSize, ShapeGuardError, "> 4"),
        (GoesThroughRows, ShapeGuardError, "a constant"),
        (HasBreakPoint, BreakError, "level 2 nowhere"),
    ],
)
@pytest.mark.parametrize("level", [3, 2])
def test_code_that_no_trace_can_hold_names_its_line(kind, error, told, level):
    model, at_2 = kind(), {"compilation": {"level": 2, "splitting_ops": None}}
    asked = {"mode": "FULL", "asked": at_2} if level == 2 else {}
    with pytest.raises(error, match=told) as caught:
        compiled(model=Outer(model), compile_part=model, **asked)
    number = re.search(rf"^{re.escape(__file__)}:(\d+) in ", caught.value.source)[1]
    assert linecache.getline(__file__, int(number)).endswith("# the line\n")
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [("compile_part", Formula(), 0), ("op_impls", {"a::b": print}, 0), ("op_impls", {}, 1)],
)
def test_argument_that_the_level_does_not_read_is_refused(monkeypatch, name, value, level):
    asked = {"compilation": {"level": level}}
    with pytest.raises(ConfigError, match=f"{name}(.|\n)*level {level}"):
        RuntimeLab("NONE", model=Formula(), asked=asked, **{name: value})
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    facts = Facts(attention_ops=("a::b",), has_break_points=False)
    with RuntimeLab("NONE", model=Formula(), facts=facts, **{name: value}) as lab:
        assert lab.runtime.plan.level == 0


class Noops(torch.nn.Module):
    """Six operations that change nothing, among others by the same names that do."""

    def forward(self, *, x, ids, lens):
        rows = x.view(x.shape[0], -1).contiguous().to(x.dtype).reshape(x.shape)
        rows = torch.sigmoid(rows.double().float()[:, :]) + x.to(torch.float32)
        turned = rows.t().contiguous().view(-1)
        x.add_(1.0).mul_(2.0)
        kept, bits = x.t().contiguous().t(), x.view(torch.int32) > 1
        return {
            "rows": rows + turned.view(WIDTH, -1).t() + kept + ids[:, None] + bits,
            "lens": lens.view(-1),
        }


@pytest.mark.parametrize("is_on", [True, False])
def test_operations_that_change_nothing_are_removed(is_on):
    asked = {"compilation": {"pass_config": {"enable_noop": is_on}}}
    with compiled("NONE", Noops(), asked=asked) as lab:
        assert lab.runtime.report().compile.num_noops == (6 if is_on else 0)
        given = values(5, 2)
        found = lab.step(5, 2)
    expected = Noops()(**{name: value.clone() for name, value in given.items()})
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@torch.compiler.allow_in_graph
def _narrow(mask, near):
    return mask.logical_and_(near)


class Masked(torch.nn.Module):
    """Attention over one mask, twice; ``kind``: what becomes of the mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *, x, ids, lens):
        places = torch.arange(x.shape[0])
        mask = places[None, :] <= places[:, None]
        if self.kind == "sum":
            mask = torch.where(mask, 0.0, -torch.inf)
        rows = x[None] * 1.0
        for _ in range(2):
            rows = torch.nn.functional.scaled_dot_product_attention(
                rows * 2.0, rows, rows, attn_mask=mask
            )
            near = places[:, None] < places + 3
            if self.kind == "written":
                mask.logical_and_(near)
            if self.kind == "written in a list":
                torch._foreach_copy_([mask], [mask & near])
            if self.kind == "written by a function":
                _narrow(mask, near)
        return {"rows": rows[0], "lens": lens * 1}


@pytest.mark.parametrize(
    ("kind", "num_made"),
    [
        ("boolean", 1),
        ("sum", 0),
        ("written", 0),
        ("written in a list", 0),
        ("written by a function", 0),
    ],
)
def test_mask_of_attention_that_is_cut_out_is_made_once(tmp_path, kind, num_made):
    asked = {"compilation": {"debug_dump_path": tmp_path}}
    ops = ["torch.nn.functional.scaled_dot_product_attention"]
    with compiled("FULL", Masked(kind), asked=asked, ops=ops) as lab:
        lab.runtime.capture()
        given = values(8, 2)
        found = lab.step(8, 2)
        assert_equal(found, Masked(kind)(**given))
    pieces = [path.read_text() for path in tmp_path.rglob("piece_*.before.py")]
    assert sum(text.count("= torch.ops.aten.where") for text in pieces) == num_made
    taking = [text for text in pieces if re.search(r"_attention\(.*where", text)]
    assert len(taking) == 2 * num_made


def test_function_given_for_attention_gets_the_mask_itself():
    given = []

    def attend(query, key, value, attn_mask=None):
        given.append(attn_mask.dtype)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask)

    name = "torch.nn.functional.scaled_dot_product_attention"
    ops = [name]
    with compiled("NONE", Masked("boolean"), ops=ops, op_impls={name: attend}) as lab:
        assert_equal(lab.step(8, 2), Masked("boolean")(**values(8, 2)))
    assert set(given) == {torch.bool}


def as_double(x):
    return torch.sigmoid(x).double()


def turned_around(x):
    return torch.sigmoid(x).t().contiguous().t()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (as_double, r"float64"),
        (lambda x: torch.sigmoid(x)[:, :2], r"shape \(\d+, 2\)"),
        (lambda x: torch.sigmoid(x)[None], r"shape \(1, "),
        (lambda x: None, "NoneType"),
        (lambda x: (torch.sigmoid(x), x), "2"),
        (lambda x: torch.sigmoid(x).to("meta"), "meta"),
        (turned_around, r"strides \(1, "),
    ],
    ids=["dtype", "size", "rank", "none", "two", "device", "strides"],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_function_given_for_an_op_that_returns_something_else_is_refused(function, told, backend):
    asked = {"compilation": {"backend": backend}}
    options = {"asked": asked, "ops": ["aten::sigmoid"], "op_impls": {"aten::sigmoid": function}}
    if function is turned_around and backend == "eager":
        # Operator by operator, any strides are right.
        with compiled("NONE", **options) as lab:
            assert_equal(lab.step(5, 2), Formula()(**values(5, 2)))
        return
    with pytest.raises(ContractError, match=rf"aten::sigmoid(.|\n)*found: .*{told}"):
        compiled("NONE", **options)


class Conjugates(Formula):
    """A view that is conjugated when it is read, and its imaginary part, which is negated then."""

    def __init__(self, *, is_resolved: bool) -> None:
        super().__init__()
        self.is_resolved = is_resolved

    def between(self, hidden):
        turned = torch.complex(hidden, hidden * 2).conj()
        if self.is_resolved:
            turned = turned.resolve_conj()
        return torch.sigmoid(hidden) + turned.imag


@pytest.mark.parametrize("is_resolved", [False, True])
def test_tensor_that_is_conjugated_when_read_does_not_leave_compiled_code(is_resolved):
    model, asked = Conjugates(is_resolved=is_resolved), {"compilation": {"backend": "aot_eager"}}
    if not is_resolved:
        with pytest.raises(CompileError, match="resolve_conj") as caught:
            compiled("NONE", model, asked=asked)
        assert caught.value.source.startswith(__file__)
        asked = {}
    with compiled("NONE", model, asked=asked) as lab, torch.no_grad():
        outputs = {name: value.clone() for name, value in lab.step(5, 2).items()}
        assert_equal(outputs, Conjugates(is_resolved=True)(**values(5, 2)))


TABLE = numpy.full(WIDTH, 2.0, dtype=numpy.float32)


class ReadsArray(Formula):
    def between(self, hidden):
        return hidden * torch.from_numpy(TABLE)


def test_array_of_numpy_is_read_anew_and_compared_as_a_tensor(monkeypatch):
    with compiled("NONE", ReadsArray()) as lab:
        lab.runtime.check_externals()
        monkeypatch.setattr(f"{__name__}.TABLE", TABLE * 2)
        outputs = {name: value.clone() for name, value in lab.step(5, 2).items()}
        with torch.no_grad():
            assert_equal(outputs, ReadsArray()(**values(5, 2)))
        lab.runtime.check_externals()
        monkeypatch.setattr(f"{__name__}.TABLE", TABLE.astype(numpy.float64))
        with pytest.raises(GuardAuditError, match="TABLE"):
            lab.runtime.check_externals()


def test_code_without_operations_is_refused():
    plan = resolve(RuntimeConfig(compilation=CompilationConfig(level=3, splitting_ops=()))).compile
    one, x = Compiled(lambda x: (x, x), plan, limits={"tokens": 8}), torch.ones(4, 2)
    with pytest.raises(CompileError, match="without any operation"):
        one.trace(lambda: one(x), [(x, 0, "tokens")])


class Turned(torch.nn.Module):
    """Turns a view in place and back, which leaves the tensor under it as it is."""

    def forward(self, *, x, ids, lens):
        rows = x + 1.0
        view = rows.view(x.shape)
        view.t_()
        sums = rows.sum(0)
        torch.ops.aten.t_.default(view)
        return {"rows": view * sums + ids[:, None], "lens": lens * 1}


def test_view_that_changes_in_place_is_not_removed():
    with compiled("NONE", Turned(), ops=()) as lab:
        given = values(5, 2)
        found = lab.step(5, 2)
    assert torch.equal(found["rows"], Turned()(**given)["rows"])


def test_changed_global_is_a_warning_and_in_the_report(monkeypatch):
    class Logs(Formula):
        def between(self, hidden):
            LOG.append(1)
            return hidden * LOG_SCALE

    with pytest.warns(SideEffectWarning, match="LOG is changed at .*LOG.append") as caught:
        lab = compiled("NONE", Logs())
    assert {os.path.basename(warning.filename) for warning in caught} == {"lab.py"}
    with lab:
        assert [name.rpartition(".")[2] for name in lab.runtime.report().compile.side_effects] == [
            "LOG"
        ]
        lab.runtime.check_externals()  # What the code itself changes is no constant of the trace.
        monkeypatch.setitem(globals(), "LOG_SCALE", 3.0)
        with pytest.raises(GuardAuditError, match="LOG_SCALE"):
            lab.runtime.check_externals()


class Flags:
    def __init__(self):
        self.is_in_a_run, self.runs = False, 0


FLAGS = Flags()


def test_global_that_is_put_back_is_no_change():
    class Marks(Formula):
        def between(self, hidden):
            FLAGS.is_in_a_run = True
            hidden = hidden * 2 if FLAGS.is_in_a_run else hidden
            FLAGS.is_in_a_run = False
            return hidden

    with compiled("NONE", Marks()) as lab:
        assert not lab.runtime.report().compile.side_effects

    class Counts(Marks):
        def between(self, hidden):
            FLAGS.runs += 1
            return super().between(hidden)

    with pytest.warns(SideEffectWarning, match="FLAGS.runs"):
        compiled("NONE", Counts()).runtime.close()


def test_buffer_written_in_place_is_written_by_every_replay():
    class Counts(Formula):
        def between(self, hidden):
            self.steps.add_(1)
            return hidden

    model = Counts()
    with compiled("FULL", model, may_overwrite=[model.steps]) as lab:
        lab.runtime.capture()
        before = model.steps.item()
        for _ in range(3):
            lab.step(3, 2)
        assert model.steps.item() == before + 3


@pytest.mark.parametrize(
    ("ops", "found"),
    [
        (["graphrt_no::such"], "no operator"),
        (["aten::no_such"], "no operator"),
        (["aten::add.NoSuch"], "no operator"),
        (["torch.nn.no_such_function"], "no_such_function"),
        (["no_module.at.all"], "no_module"),
        (["torch.nn.functional"], "cannot be called"),
        (["torch.cos", "aten::sin"], "none of torch.cos, aten::sin"),
    ],
)
def test_splitting_op_that_is_unknown_is_named(ops, found):
    with pytest.raises(SplittingOpError, match=found) as caught:
        compiled(ops=ops)
    assert "splitting_ops" in str(caught.value)
    assert isinstance(caught.value, ConfigError)


@torch.library.custom_op("graphrt_tests::waves", mutates_args=())
def waves(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


waves.register_fake(torch.empty_like)


def test_custom_op_that_cuts_is_recorded_as_its_own_kernels():
    class Cut(Formula):
        def between(self, hidden):
            return torch.ops.graphrt_tests.waves(hidden)

    with compiled("FULL_AND_PIECEWISE", Cut(), ops=["graphrt_tests::waves"]) as lab:
        report = lab.runtime.capture()
        assert [piece.name for piece in report.compile.pieces][1] == "graphrt_tests::waves"
        for entry in report.graphs:
            name = lab.runtime.runner.name
            program = lab.runtime.library.program(name, entry.mode, entry.key)
            graphs = [one.graph for one in program.segments if hasattr(one, "graph")]
            kernels = [call.operation for graph in graphs for call in graph.calls]
            assert "graphrt_tests::waves" not in kernels
            assert ("aten::sin" in kernels) is (entry.mode is FULL)
        for sizes in ((3, 2, False), (4, 4, True)):
            found = {k: v.clone() for k, v in lab.step(*sizes).items()}
            with torch.no_grad():
                assert_equal(found, Cut()(**values(*sizes[:2])))


def scribble(steps: torch.Tensor, x: torch.Tensor) -> None:
    """Writes past torch's dispatcher, as a Triton kernel does."""
    steps.numpy()[...] += 1


torch.library.custom_op("graphrt_tests::scribbles", mutates_args=("steps",))(scribble)
library = torch.library.Library("graphrt_tests", "FRAGMENT")
library.define("scribbles_plainly(Tensor(a!) steps, Tensor x) -> ()")
library.impl("scribbles_plainly", scribble, "CompositeExplicitAutograd")
for _name in ("scribbles", "scribbles_plainly"):
    torch.library.register_fake(
        f"graphrt_tests::{_name}", lambda steps, x: None, allow_override=True
    )


@pytest.mark.parametrize("op", ["scribbles", "scribbles_plainly"])
def test_declared_write_of_a_splitting_op_past_torch_is_told(op):
    class Scribbles(Formula):
        def between(self, hidden):
            getattr(torch.ops.graphrt_tests, op)(self.steps, hidden)
            return hidden

    with (
        compiled("PIECEWISE", Scribbles(), ops=[f"graphrt_tests::{op}"]) as lab,
        pytest.raises(StateAdvancedError, match="steps"),
    ):
        lab.runtime.capture()


@torch.library.custom_op("graphrt_tests::times", mutates_args=())
def times(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


times.register_fake(lambda x, by: torch.empty_like(x, dtype=torch.result_type(x, float(by))))


@torch.library.custom_op(
    "graphrt_tests::renamed", mutates_args=(), schema="(Tensor x, int more=3) -> Tensor"
)
def renamed(taken, more=3):
    return taken * 2 + more


renamed.register_fake(lambda x, more=3: torch.empty_like(x))


@torch.library.custom_op("graphrt_tests::overridden", mutates_args=())
def overridden(x: torch.Tensor) -> torch.Tensor:
    return x * 2


overridden.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ops.graphrt_tests.times(x.long() + 2**61, 8) / 2.0**61,
        lambda x: torch.ops.graphrt_tests.times(x.long() + 2**61, by=8) / 2.0**61,
        lambda x: torch.ops.graphrt_tests.renamed(x=x),
        lambda x: torch.ops.graphrt_tests.overridden(x),
    ],
    ids=["integer_for_float", "the_same_by_name", "other_names", "kernel_of_a_library"],
)
def test_custom_op_that_cuts_is_called_as_torch_calls_it(call):
    class Cut(Formula):
        def between(self, hidden):
            return call(hidden)

    ops = [f"graphrt_tests::{name}" for name in ("times", "renamed", "overridden")]
    with torch.library._scoped_library("graphrt_tests", "FRAGMENT") as library:
        library.impl("overridden", lambda x: x * 5, "CPU")
        with compiled("FULL_AND_PIECEWISE", Cut(), ops=ops) as lab:
            lab.runtime.capture()
            for sizes in ((3, 2, False), (4, 4, True)):
                found = {k: v.clone() for k, v in lab.step(*sizes).items()}
                with torch.no_grad():
                    assert_equal(found, Cut()(**values(*sizes[:2])))


def test_splitting_op_that_matches_nothing_is_reported():
    with compiled(ops=["torch.sigmoid", "torch.cos"]) as lab:
        assert lab.runtime.report().compile.unmatched_splitting_ops == ("torch.cos",)


def test_piecewise_graphs_without_splitting_ops_are_refused():
    with pytest.raises(ConfigError, match="where PIECEWISE graphs end"):
        compiled(ops=None)
    with compiled("PIECEWISE", ops=()) as lab:
        assert lab.runtime.plan.cudagraph_mode.name == "FULL"


class WritesUndeclared(Formula):
    def between(self, hidden):
        return hidden + self.steps.add_(1)  # the line


class Inverts(Formula):
    def between(self, hidden):
        return hidden + torch.linalg.inv(self.weight)[0]  # the line


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize(
    ("model", "error"),
    [(WritesUndeclared, StateAdvancedError), (Inverts, ForbiddenOperationError)],
)
def test_what_a_capture_refuses_in_traced_code_names_its_line(model, error, level):
    options = {"ops": None, "asked": {"compilation": {"level": 2}}} if level == 2 else {}
    with compiled("FULL", model(), **options) as lab, pytest.raises(error) as caught:
        lab.runtime.capture()
    place = re.search(rf"at {re.escape(__file__)}:(\d+) in between", str(caught.value))
    assert "the line" in linecache.getline(__file__, int(place[1]))


class WritesTwice(Formula):
    def __init__(self):
        super().__init__()
        self.register_buffer("others", torch.zeros(1))

    def between(self, hidden):
        hidden = torch.sigmoid(hidden)
        hidden = hidden + self.steps.cumsum_(0)  # the first line
        hidden = torch.sigmoid(hidden)
        return hidden + self.others.cumsum_(0)  # the second line


@pytest.mark.parametrize("op", ["aten::cumsum_", "torch.sigmoid"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_write_of_a_piece_names_its_own_line_beside_an_alike_piece(op, backend):
    options = {"ops": [op], "asked": {"compilation": {"backend": backend}}}
    with (
        compiled(model=WritesTwice(), **options) as lab,
        pytest.raises(StateAdvancedError) as caught,
    ):
        lab.runtime.capture()
    lines = re.findall(rf"{re.escape(__file__)}:(\d+) in between", caught.value.found)
    told = [linecache.getline(__file__, int(line)).partition("# ")[2] for line in lines]
    assert told == ["the first line\n", "the second line\n"]


# -- what replaces guards


def test_attribute_changed_after_the_trace_is_refused():
    with compiled("FULL") as lab:
        lab.runtime.capture()
        lab.model.scale = 5.0
        for call in (lab.runtime.capture, lab.runtime.capture_next, lab.runtime.check_externals):
            with pytest.raises(GuardAuditError, match=r"model\.scale") as caught:
                call()
            assert "2.0" in caught.value.expected
        lab.model.scale = 2.0
        lab.runtime.check_externals()
        lab.model.scale = 5.0
        with pytest.raises(GuardAuditError):  # The first eager run after it.
            lab.step(MAX_TOKENS, 2)


@pytest.mark.parametrize("change", ["hook", "rebound", "length", "gone"])
def test_structure_changed_after_the_trace_is_refused(change):
    class Two(Formula):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)])

        def between(self, hidden):
            for part in self.parts:
                hidden = part(hidden)
            return hidden

    with compiled("NONE", Two()) as lab:
        parts = lab.model.parts
        if change == "hook":
            parts[0].register_forward_hook(lambda module, args, out: out + 1)
        elif change == "rebound":
            parts[1] = torch.nn.Sigmoid()
        elif change == "length":
            parts.append(torch.nn.Tanh())
        else:
            del lab.model.parts
            with pytest.raises(GuardAuditError, match="parts"):  # The code itself reads it.
                lab.step(MAX_TOKENS, 2)
        with pytest.raises(GuardAuditError, match="parts"):
            lab.runtime.check_externals()


def test_hook_of_all_modules_that_comes_after_the_trace_is_refused():
    with compiled("NONE", Reads()) as lab:
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *call: None)
        try:
            with pytest.raises(GuardAuditError, match="_global_forward_hooks"):
                lab.runtime.check_externals()
        finally:
            handle.remove()
        lab.runtime.check_externals()


def test_report_of_compiled_code_can_be_copied_and_pickled():
    with compiled("NONE") as lab:
        report = lab.runtime.report()
        assert deepcopy(report).compile == pickle.loads(pickle.dumps(report)).compile
        assert deepcopy(report).missing == report.missing


@dataclass
class Rows:
    x: torch.Tensor
    note: str = "a" * 999


def test_other_object_as_an_argument_is_told_briefly():
    class Takes(torch.nn.Module):
        def forward(self, rows):
            return torch.sigmoid(rows.x)

    class Gives(Outer):
        def forward(self, *, x, ids, lens):
            return {"rows": self.part(Rows(x)) + ids[:, None], "lens": lens * 2}

    part = Takes()
    with (
        compiled("NONE", Gives(part), compile_part=part) as lab,
        pytest.raises(ContractError, match="Rows") as caught,
    ):
        lab.step(5, 2)
    assert len(caught.value.found) < 250


def test_call_other_than_the_traced_one_is_refused():
    model = Formula()
    with compiled("NONE", Outer(model), compile_part=model) as lab:
        good = values(5, 2)
        with torch.no_grad():
            lab.model(**good)
            for name, changed, told in (
                ("x", good["x"].double(), "dtype of argument 'x'"),
                ("x", good["x"][None], "rank of argument 'x'"),
                ("x", good["x"][:, :2].contiguous(), "dimension 1 of argument 'x'"),
                ("x", good["x"].t().contiguous().t(), "layout of argument 'x'"),
                ("ids", good["ids"][:4], "5 tokens, as dimension 0 of argument 'x' has"),
                ("lens", torch.zeros(MAX_REQS + 1, dtype=torch.int64), "1 to 4 requests"),
                ("x", good["x"]._neg_view(), "is_neg True"),
                ("lens", 3, "a tensor"),
            ):
                with pytest.raises(ContractError, match=told):
                    lab.model(**{**good, name: changed})
            with pytest.raises(ContractError, match="arguments"):
                lab.model(**good, more=1)
            with pytest.raises(ContractError, match="arguments"):
                lab.model(**dict(reversed(good.items())))
            small = values(2, 2)
            with pytest.raises(ContractError, match="a tensor of its own"):
                lab.model(**{**small, "lens": small["ids"]})
            with (
                torch.autocast("cpu", torch.bfloat16),
                pytest.raises(ContractError, match="autocast"),
            ):
                lab.model(**good)


class Defaults:
    base = 1.0


class Settings(Defaults):
    """An argument that is no tensor."""

    def __init__(self) -> None:
        self.scale, self.table = 2.0, {"a": [1.0]}

    @property
    def double(self) -> float:
        return self.scale * 2


class TakesSettings(torch.nn.Module):
    def forward(self, x, told, *, options):
        x = torch.sigmoid(x * told.scale * told.table["a"][0] + told.base)
        return x * told.double * options["told"].scale * (3.0 if hasattr(told, "late") else 1.0)


class GivesSettings(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.told, self.other = TakesSettings(), Settings(), Settings()

    def forward(self, *, x, ids, lens):
        rows = self.part(x, self.told, options={"told": self.other}) + ids[:, None]
        return {"rows": rows, "lens": lens * 2}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model, put: put.setattr(model.told, "scale", 3.0), r"args\[1\].scale"),
        (
            lambda model, put: put.setattr(model.other, "scale", 3.0),
            r"kwargs\['options'\]\['told'\].scale",
        ),
        (lambda model, put: put.setattr(model.told, "table", {"a": [1.0, 1.0]}), r"table\['a'\]"),
        (
            lambda model, put: put.setattr(model.told, "late", True, raising=False),
            r"hasattr\(args\[1\], 'late'\)",
        ),
        (lambda model, put: put.setitem(vars(model.told), "base", 3.0), r"args\[1\]"),
        (lambda model, put: put.setattr(Settings, "base", 3.0, raising=False), r"args\[1\].base"),
        (lambda model, put: put.setattr(Settings, "double", property(lambda _: 3.0)), r"args\[1\]"),
    ],
    ids=["attribute", "of a keyword", "item", "absent", "hides class", "hides base", "property"],
)
def test_object_given_to_a_compiled_part_is_compared_by_what_was_read(monkeypatch, change, told):
    model = GivesSettings()
    with compiled("FULL", model, compile_part=model.part) as lab:
        lab.runtime.capture()
        lab.step(5, 2)
        change(model, monkeypatch)
        with pytest.raises(GuardAuditError, match=told):
            lab.runtime.capture()
        monkeypatch.undo()
        lab.runtime.capture()


def test_compiled_code_needs_dynamo_for_its_trace_alone():
    model = Formula()
    with compiled("NONE", Outer(model), compile_part=model) as lab, torch.no_grad():
        expected = Formula()(**values(5, 2))
        with torch.compiler.set_stance("force_eager"):
            lab.model.part.forward.is_audit_due = True  # It runs the compiled code, not the model.
            assert_equal(lab.model(**values(5, 2)), expected)
            assert not lab.model.part.forward.is_audit_due
            with pytest.raises(RecompileError, match="set_stance"):
                compiled("NONE", Formula())


@pytest.mark.parametrize(
    "switched_off",
    [
        lambda: torch.compiler.set_stance("fail_on_recompile"),
        lambda: torch._dynamo.config.patch(disable=True),
    ],
)
def test_dynamo_that_is_switched_off_is_named(switched_off):
    with switched_off(), pytest.raises(RecompileError, match=r"set_stance.*config\.disable"):
        compiled("NONE")


@pytest.mark.parametrize("policy", ["audit", "keep"])
def test_code_that_dynamo_forgot_runs_and_is_audited(policy):
    asked = {"compilation": {"guard_policy": policy}}
    with compiled("NONE", asked=asked) as lab:
        expected = {name: value.clone() for name, value in lab.step(5, 2).items()}
        torch._dynamo.reset()
        assert_equal(lab.step(5, 2), expected)
        lab.runtime.check_externals()
        lab.model.scale = 3.0
        with pytest.raises(GuardAuditError, match=r"model\.scale"):
            lab.runtime.check_externals()


def test_what_no_trace_depends_on_may_change():
    with compiled("NONE") as lab:
        lab.model.requires_grad_(False)
        lab.runtime.check_externals()
        with torch.inference_mode():
            lab.runtime.check_externals()


def test_constant_that_a_graph_step_finds_replaced_is_refused():
    with compiled(asked={"watch": "always"}) as lab:
        lab.runtime.capture()
        lab.step(5, 2)
        lab.model.weight = torch.nn.Parameter(torch.eye(WIDTH))  # An input of the traced graph.
        outputs = {name: value.clone() for name, value in lab.step(5, 2).items()}
        assert lab.runtime.last_decision.reason is Reason.INVALIDATED
        with torch.no_grad():
            assert_equal(outputs, lab.model.forward(**values(5, 2)))
        lab.runtime.capture()
        lab.model.scale = 3.0
        for _ in range(2):  # Also once the graph is gone.
            with pytest.raises(GuardAuditError, match=r"model\.scale"):
                lab.step(5, 2)
        lab.model.scale = 2.0
        lab.step(5, 2)


class EntersAutocast(Formula):
    def __init__(self, is_on):
        super().__init__()
        self.is_on = is_on
        self.gate = torch.nn.Sigmoid()

    def forward(self, *, x, ids, lens):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_on):
            hidden = self.gate(x * 2)  # the line
        return {"rows": hidden.float() @ self.weight + ids[:, None], "lens": lens * 2}


def test_autocast_around_a_splitting_op_is_refused_unless_it_changes_nothing():
    with pytest.raises(CompileError, match=r"autocast.*enabled=True") as caught:
        compiled(model=EntersAutocast(True))
    number = re.search(rf"^{re.escape(__file__)}:(\d+) in forward", caught.value.source)[1]
    assert linecache.getline(__file__, int(number)).endswith("# the line\n")
    with compiled(model=EntersAutocast(False)) as lab:
        lab.runtime.capture()
        outputs = {name: value.clone() for name, value in lab.step(5, 2).items()}
        assert_equal(outputs, lab.eager(5, 2))


class Sets(Formula):
    """Sets something of torch, and puts it back."""

    def __init__(self, function, new, old, *, is_around: bool) -> None:
        super().__init__()
        self.set, self.new, self.old, self.is_around = function, new, old, is_around

    def forward(self, *, x, ids, lens):
        hidden = x * 2
        self.set(self.new)
        if self.is_around:
            hidden = torch.sigmoid(hidden)
            self.set(self.old)
        else:
            hidden = hidden * 3
            self.set(self.old)
            hidden = torch.sigmoid(hidden)
        return {"rows": hidden + ids[:, None], "lens": lens * 2}


class LimitsAttention(Formula):
    def between(self, hidden):
        with sdpa_kernel(SDPBackend.MATH):
            return torch.sigmoid(hidden)


class SetsOnce(Formula):
    def between(self, hidden):
        torch.set_float32_matmul_precision("highest")
        return hidden


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Sets(torch.set_default_dtype, torch.float64, torch.float32, is_around=True), "float64"),
        (
            Sets(torch.use_deterministic_algorithms, True, False, is_around=True),
            r"deterministic_algorithms\(True",
        ),
        (LimitsAttention(), r"sdpa_kernel\(\['MATH'\]"),
        (SetsOnce(), "highest"),
    ],
    ids=["dtype", "deterministic", "attention", "set once"],
)
def test_setting_of_torch_around_a_splitting_op_is_refused(model, told, backend):
    before = torch.backends.cuda.flash_sdp_enabled(), torch.get_default_dtype()
    with pytest.raises(CompileError, match=told) as caught:
        compiled(model=model, asked={"compilation": {"backend": backend}})
    assert caught.value.source.startswith(__file__)
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.get_default_dtype())


def test_setting_of_torch_that_is_put_back_before_the_splitting_op_may_stay():
    model = Sets(torch.set_float32_matmul_precision, "high", "highest", is_around=False)
    with compiled(model=model) as lab:
        lab.runtime.capture()
        outputs = {name: value.clone() for name, value in lab.step(5, 2).items()}
        assert_equal(outputs, lab.eager(5, 2))


class Infers(Formula):
    @torch.inference_mode()
    def forward(self, **inputs):
        return super().forward(**inputs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inference_mode_of_the_model_changes_no_piece(backend):
    with compiled(model=Infers(), asked={"compilation": {"backend": backend}}) as lab:
        assert not torch.is_inference_mode_enabled()
        lab.runtime.capture()
        outputs = {name: value.clone() for name, value in lab.step(5, 2).items()}
        assert_equal(outputs, Formula.forward(lab.model, **values(5, 2)))


def test_part_of_two_runtimes_is_refused():
    part = Formula()
    with (
        compiled("NONE", Outer(part), compile_part=part),
        pytest.raises(ConfigError, match="another runtime"),
    ):
        compiled("NONE", Outer(part), compile_part=part)
    with pytest.raises(CompileError, match="compiled part"):
        compiled("NONE", Formula(), compile_part=part)
    assert "forward" not in vars(part)
    with compiled("NONE", Outer(part), compile_part=part) as lab:
        lab.step(3, 2)


def test_part_gets_the_forward_back_that_it_had():
    part = Formula()
    before = part.forward = partial(Formula.forward, part)
    with compiled("NONE", Outer(part), compile_part=part) as lab:
        assert part.forward is not before
        lab.step(3, 2)
    assert part.forward is before


class Mode(Enum):
    ONE = 1
    TWO = 2


class Doubled:
    factor = 2.0


class Scale(torch.nn.Module):
    def forward(self, x):
        return x * 2.0


def tripled(self, x):
    return x * 3.0


def as_it_is(x):
    return x


def as_its_double(x):
    return 2 * x


def copied(function):
    """Another function of the same code."""
    return FunctionType(function.__code__, function.__globals__, function.__name__)


def turned(weight):
    """The same values in another layout."""
    return weight.data.t().contiguous().t()


class Reads(Formula):
    """Reads one thing of each kind."""

    def __init__(self):
        super().__init__()
        self.mode, self.op, self.sizes = Mode.ONE, torch.ops.aten.tanh, {1, 2}
        self.by_class, self.module = Doubled(), Scale()
        self.first = self.second = torch.nn.Parameter(torch.ones(1))
        self.pair, self.function, self.inner = (1.0, (2, "a")), copied(as_it_is), Doubled()

    def between(self, hidden):
        hidden = self.function(hidden) * self.pair[0] * self.pair[1][0]
        hidden = hidden * getattr(self.inner, "extra", 1.0) + (
            2.0 if hasattr(self, "late") else 1.0
        )
        hidden = self.op(hidden) + (1.0 if self.mode is Mode.ONE else 2.0)
        hidden = hidden * self.by_class.factor + (1.0 if 2 in self.sizes else 3.0)
        return self.module(hidden) * self.first + self.second


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: setattr(model, "mode", Mode.TWO), "mode"),
        (lambda model: setattr(model, "op", torch.ops.aten.relu), "op"),
        (lambda model: setattr(model, "sizes", {1, 3}), "sizes"),
        (lambda model: setattr(model.by_class, "factor", 3.0), "factor"),
        (lambda model: setattr(model.module, "forward", torch.tanh), "forward"),
        (lambda model: setattr(type(model.module), "forward", tripled), r"model\.module"),
        (lambda model: setattr(type(model), "forward", tripled), "model"),
        (lambda model: setattr(model, "second", torch.nn.Parameter(torch.zeros(1))), "second"),
        (lambda model: setattr(model, "pair", (3.0, (2, "a"))), r"model\.pair"),
        (lambda model: setattr(model, "pair", (1.0, (True, "a"))), r"model\.pair"),
        (lambda model: setattr(model.function, "__code__", as_its_double.__code__), "function"),
        (lambda model: setattr(model, "late", None), r"hasattr\(model, 'late'\)"),
        (lambda model: setattr(model.inner, "extra", 3.0), r"hasattr\(model.inner, 'extra'\)"),
        (lambda model: setattr(model.weight, "data", turned(model.weight)), r"model\.weight"),
    ],
    ids=[
        *("enum", "operator", "set", "attribute of the class", "method", "method of a class"),
        *("method of the model's class", "shared tensor"),
        *("tuple", "type in a tuple", "code", "absent", "absent of an object", "layout"),
    ],
)
def test_what_the_trace_read_is_compared_by_what_it_is(monkeypatch, change, told):
    for kind in (Scale, Reads):
        monkeypatch.setattr(kind, "forward", kind.forward)  # Put back, where it is replaced.
    with compiled("NONE", Reads()) as lab:
        lab.runtime.check_externals()
        change(lab.model)
        with pytest.raises(GuardAuditError, match=told):
            lab.runtime.check_externals()


def test_arguments_that_were_one_tensor_stay_one():
    compilation = CompilationConfig(level=2, compile_cache=False)
    plan = resolve(RuntimeConfig(compilation=compilation)).compile
    one = Compiled(lambda x, y: x * 2.0 + y, plan, limits={"tokens": 8})
    x = torch.ones(4, 2)
    one.trace(lambda: one(x, x), [(x, 0, "tokens")])
    assert torch.equal(one(x, x), x * 3.0)
    with pytest.raises(ContractError, match="argument 1"):
        one(x, torch.zeros(4, 2))


# -- the cut


@settings(max_examples=6, deadline=None)
@given(
    ops=st.lists(
        st.sampled_from(["tanh", "sigmoid", "cut", "view", "pair"]), min_size=1, max_size=9
    )
)
def test_graph_cut_anywhere_computes_the_same(ops):
    class Chain(Formula):
        def between(self, hidden):
            pair = hidden.unbind(1)
            for op in ops:
                if op == "view":
                    hidden = hidden.view(-1, WIDTH)
                elif op == "pair":
                    pair = hidden.unbind(1)
                elif op == "cut":
                    hidden = torch.cos(hidden) + pair[-1][:, None]
                else:
                    hidden = getattr(torch, op)(hidden)
            return hidden + pair[0][:, None]

    with compiled("PIECEWISE", Chain(), ops=["torch.cos", "torch.sigmoid"]) as lab:
        report = lab.runtime.capture()
        kinds = [piece.kind for piece in report.compile.pieces]
        assert all(a != b for a, b in pairwise(kinds))
        found = {k: v.clone() for k, v in lab.step(8, 2).items()}
    with torch.no_grad():
        assert_equal(
            found, {"rows": lab.model(**values(8, 2))["rows"], "lens": values(8, 2)["lens"] * 2}
        )


def counting_alone(graphs):
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return backend


def test_level_1_leaves_the_users_own_compilation_alone():
    graphs = []
    with compiled("FULL", ops=None, asked={"compilation": {"level": 1}}) as lab:
        lab.runtime.capture()
        lab.step(3, 2)
    with torch.no_grad():
        torch.compile(Formula(), backend=counting_alone(graphs))(**values(3, 2))
    assert graphs, "Dynamo compiles other models of the class"


@pytest.mark.parametrize("level", [1, 2, 3])
def test_copy_of_a_model_with_a_compiled_part_is_refused(level):
    part = Formula()
    options = {"level": level, "splitting_ops": ("torch.sigmoid",) if level == 3 else None}
    with (
        compiled("FULL", Outer(part), compile_part=part, asked={"compilation": options}),
        pytest.raises(ConfigError, match="a copy of a"),
    ):
        deepcopy(part)
    assert deepcopy(part).scale == part.scale


class Asks(Formula):
    """Asks for a value of a tensor, which no trace can hold."""

    def between(self, hidden):
        return hidden * hidden.sum().item()


@pytest.mark.parametrize("level", [1, 3])
def test_model_is_freed_after_its_runtime_or_its_failed_trace(level):
    model = Formula() if level == 1 else Asks()
    freed = weakref.ref(model)
    asked = {"compilation": {"level": level, "splitting_ops": None}}
    if level == 1:
        with compiled("FULL", model, ops=None, asked=asked) as lab:
            lab.step(3, 2)
        del lab
    else:
        with pytest.raises(GraphBreakError):
            compiled("PIECEWISE", model)
    del model
    gc.collect()
    assert freed() is None

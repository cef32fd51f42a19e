"""What compiles the pieces: each unique one once for each range and size; which backend that is."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings, strategies as st
from torch.nn import functional

from graphrt import CompilationConfig, Facts, RuntimeConfig, resolve
from graphrt.compile import Compiled, Stock
from graphrt.errors import (
    BackendError,
    CompileDuringCaptureError,
    CompileError,
    ConfigError,
    ContractError,
    GraphBreakError,
    RecompileError,
    SplittingOpError,
    StateAdvancedError,
)
from graphrt.events import Compiled as CompiledEvent
from lab import MAX_REQS, MAX_TOKENS, WIDTH, RuntimeLab, assert_equal, values

CALLS: list[object] = []
"""Of the backend ``counting``: the first dimension of each first tensor."""
RAN: list[int] = []
"""Which of the things that ``spying`` returned ran."""

CACHE = torch.zeros(64, WIDTH)


def counting(graph, inputs):
    """A backend that compiles nothing, and remembers what it was asked."""
    CALLS.append(next((one.shape[0] for one in inputs if isinstance(one, torch.Tensor)), None))
    return graph.forward


def spying(graph, inputs):
    number = len(CALLS)
    CALLS.append(number)
    return lambda *args: RAN.append(number) or graph.forward(*args)


def failing(graph, inputs):
    raise RuntimeError("no such luck")


@torch.library.custom_op("graphrt_tests::hides", mutates_args=())
def hides(x: torch.Tensor) -> torch.Tensor:
    """Attention that finds the cache by itself."""
    return x + CACHE[: x.shape[0]]


@torch.library.custom_op("graphrt_tests::takes", mutates_args=())
def takes(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return x + cache[: x.shape[0]]


@torch.library.custom_op("graphrt_tests::adds", mutates_args=("x",))
def adds(x: torch.Tensor) -> None:
    x.add_(1.0)


adds.register_fake(lambda x: None)
hides.register_fake(torch.empty_like)
takes.register_fake(lambda x, cache: torch.empty_like(x))

COUNTING = f"{__name__}.counting"


class Layers(torch.nn.Module):
    """Alike pieces between sigmoids, one for each layer."""

    def __init__(self, num_layers: int = 4, constants=()) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weights = torch.nn.ParameterList(
            torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH for _ in range(num_layers)
        )
        self.constants = list(constants) or [1.0] * num_layers

    def forward(self, *, x, ids, lens):
        for weight, constant in zip(self.weights, self.constants, strict=True):
            x = torch.sigmoid(torch.tanh(x @ weight) * constant)
        return {"rows": x * 3.0 + ids[:, None], "lens": lens * 2}


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()
    RAN.clear()


def compile_alone(model, num_rows=5, most=64, facts=None, impls=None, **options):
    """``Compiled`` by itself, traced at ``num_rows``; and its events."""
    asked = {"level": 3, "splitting_ops": ["torch.sigmoid"], "backend": COUNTING, **options}
    config = RuntimeConfig(
        compilation=CompilationConfig(**asked), max_num_seqs=4, max_num_batched_tokens=most
    )
    events = []
    plan = resolve(config, facts).compile
    one = Compiled(model, plan, limits={"tokens": most}, impls=impls, observer=events.append)
    x = torch.randn(num_rows, WIDTH)
    with torch.no_grad():
        one.trace(lambda: one(x), [(x, 0, "tokens")])
    return one, events


def chain(model):
    return lambda x: model(x=x, ids=x[:, 0], lens=x[:, 1])["rows"]


def test_unique_piece_is_compiled_once_for_each_range_and_size():
    model = chain(Layers(6))
    one, events = compile_alone(
        model, most=8192, compile_ranges_endpoints=[8, 32], compile_sizes=[16, 64, 128]
    )
    assert (len(one.report.pieces), one.report.num_unique) == (13, 3)
    assert len(CALLS) == one.report.num_compiles == 3 * 6
    told = ["1-8", "9-32", "33-8192", "16", "64", "128"]
    assert [str(sizes) for sizes in one.report.ranges] == told
    ends = [(1, 8), (9, 32), (33, 8192), (16, 16), (64, 64), (128, 128)]
    assert [(event.start, event.end) for event in events] == ends * 3
    assert all(isinstance(event, CompiledEvent) for event in events)
    assert [size for size in CALLS if type(size) is int] == [16, 64, 128] * 3
    with torch.no_grad():
        for rows in (1, 2, 8, 9, 16, 33, 64, 8192):
            x = torch.randn(rows, WIDTH)
            assert torch.equal(one(x), model(x))
        with pytest.raises(ContractError, match="8192"):
            one(torch.randn(8193, WIDTH))
    assert len(CALLS) == 18


@settings(max_examples=12, deadline=None)
@given(
    ends=st.lists(st.integers(1, 60), unique=True, max_size=4),
    sizes=st.lists(st.integers(1, 64), unique=True, max_size=4),
    rows=st.integers(1, 64),
)
def test_size_runs_its_exact_form_or_that_of_its_range(ends, sizes, rows):
    CALLS.clear()
    one, events = compile_alone(
        lambda x: x * 2.0,
        splitting_ops=[],
        backend=f"{__name__}.spying",
        compile_ranges_endpoints=ends,
        compile_sizes=sizes,
        cudagraph_mode="NONE",
    )
    RAN.clear()
    one(torch.zeros(rows, WIDTH))
    [number] = RAN
    served = events[number]
    if rows in sizes:
        assert (served.start, served.end) == (rows, rows)
    else:
        assert served.start <= rows <= served.end
        assert served.end == min([end for end in ends if end >= rows], default=64)


def test_piece_with_another_constant_is_compiled_itself():
    one, _ = compile_alone(chain(Layers(4, constants=[1.0, 2.0, 2.0, 3.0])))
    assert (one.report.num_compiled, one.report.num_unique, len(CALLS)) == (5, 4, 4)


def test_pieces_over_unlike_sizes_are_not_shared():
    def model(x):
        twice = torch.sigmoid(torch.sigmoid(torch.cat((x, x))) + 1.0)
        thrice = torch.sigmoid(torch.sigmoid(torch.cat((x, x, x))) + 1.0)
        return twice.mean() * thrice.mean()

    one, _ = compile_alone(model)
    captured = [piece.unique_id for piece in one.report.pieces if piece.kind == "captured"]
    assert len(captured) == len(set(captured)) == 5


@pytest.mark.parametrize("backend", ["eager", "aot_eager", COUNTING])
@pytest.mark.parametrize("level", [2, 3])
def test_backend_runs_through_graphs_with_equal_outputs(backend, level):
    compilation = {"level": level, "backend": backend}
    compilation |= {"splitting_ops": ["torch.sigmoid"]} if level == 3 else {}
    model = Layers(3)
    mode = "FULL_AND_PIECEWISE" if level == 3 else "FULL"
    with RuntimeLab(mode, model=model, asked={"compilation": compilation}) as lab:
        report = lab.runtime.capture()
        assert report.compile.backend == backend
        assert len(report.compile.pieces) == (7 if level == 3 else 1)
        assert len(CALLS) == ((3 if level == 3 else 1) if backend == COUNTING else 0)
        assert {e.num_eager for e in report.graphs if e.mode.name == "PIECEWISE"} <= {3}
        found = []
        for sizes in ((1, 1), (3, 2), (8, 4), (MAX_TOKENS, MAX_REQS)):
            outputs = {k: v.clone() for k, v in lab.step(*sizes).items()}
            assert (lab.runtime.last_decision.mode.name == "NONE") is (sizes[0] == MAX_TOKENS)
            found.append((sizes, outputs))
    with torch.no_grad():
        for sizes, outputs in found:
            assert_equal(outputs, model(**values(*sizes)))


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("no_such", "nearest is"),
        ("no_module_at_all.backend", "No module"),
        (f"{__name__}.nothing", "nothing"),
        (f"{__name__}.WIDTH", "cannot be called"),
    ],
)
def test_backend_that_does_not_exist_is_named(backend, told):
    with pytest.raises(ConfigError, match=told) as caught:
        compile_alone(chain(Layers()), backend=backend)
    assert "compilation.backend" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise RuntimeError('no card')", "RuntimeError: no card"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_module_that_cannot_be_imported_is_named_with_its_error(tmp_path, monkeypatch, text, told):
    (tmp_path / "graphrt_test_bad.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"compilation\.backend(.|\n)*{told}"):
        compile_alone(chain(Layers()), backend="graphrt_test_bad.backend")
    with pytest.raises(SplittingOpError, match=told):
        compile_alone(chain(Layers()), splitting_ops=["graphrt_test_bad.some.op"])
    with pytest.raises(SplittingOpError, match=told):
        compile_alone(chain(Layers()), splitting_ops=["graphrt_test_bad.op"])


def forgets(graph, inputs):
    """A backend that returns nothing."""


@pytest.mark.parametrize("level", [1, 3])
def test_backend_that_returns_no_function_is_named(level):
    name = f"{__name__}.forgets"
    plan = resolve(RuntimeConfig(compilation=CompilationConfig(level=1, backend=name))).compile
    stock = partial(Stock(lambda x: x + 1, plan), torch.ones(2))
    run = stock if level == 1 else partial(compile_alone, chain(Layers()), backend=name)
    with pytest.raises(BackendError, match=r"forgets(.|\n)*NoneType, which cannot be called"):
        run()


def test_option_that_inductor_does_not_have_is_named():
    with pytest.raises(ConfigError, match="max_autotune") as caught:
        compile_alone(
            chain(Layers()), backend="inductor", inductor_compile_config={"max_autotunes": True}
        )
    assert "inductor_compile_config" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("epilogue_fusion", "no"), ("cpp.threads", "2"), ("max_autotune_gemm_backends", 3)],
)
def test_option_of_inductor_with_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"inductor_compile_config\.{name}") as caught:
        compile_alone(chain(Layers()), backend="inductor", inductor_compile_config={name: value})
    assert repr(value) in caught.value.found


def test_option_of_inductor_that_may_have_several_types_is_taken():
    options = {"joint_custom_pre_pass": None, "cpp.simdlen": None, "debug_index_asserts": True}
    plan = CompilationConfig(level=3, backend="inductor", inductor_compile_config=options)
    taken = Compiled(chain(Layers()), resolve(RuntimeConfig(compilation=plan)).compile, limits={})
    assert taken.report is None  # Nothing is traced before the first call.


def test_backend_that_raises_is_named_with_piece_and_cause():
    with pytest.raises(BackendError, match=r"failing, compiling piece 0(.|\n)*no such luck") as it:
        compile_alone(chain(Layers()), backend=f"{__name__}.failing")
    assert isinstance(it.value.__cause__.inner_exception.__cause__, RuntimeError)


# -- what a compiler may move or copy


@pytest.mark.parametrize(
    ("attend", "backend", "is_right"),
    [
        (lambda x: hides(x), "aot_eager", False),
        (lambda x: hides(x), "eager", True),
        (lambda x: takes(x, CACHE), "aot_eager", True),
    ],
)
def test_store_that_attention_reads_unseen_is_refused(attend, backend, is_right):
    def model(x):
        CACHE[: x.shape[0]].copy_(x)
        return attend(x * 2.0)

    facts = Facts(attention_ops=("graphrt_tests::hides", "graphrt_tests::takes"))
    asked = {"facts": facts, "splitting_ops": [], "backend": backend, "cudagraph_mode": "FULL"}
    if is_right:
        one, _ = compile_alone(model, **asked)
        x = torch.ones(3, WIDTH)
        assert torch.equal(one(x), x * 3.0)
        return
    with pytest.raises(CompileError, match="moves behind it") as caught:
        compile_alone(model, **asked)
    assert "test_compile_backends" in caught.value.source


@pytest.mark.parametrize("backend", ["eager", COUNTING])
def test_write_to_memory_that_results_share_is_refused(backend):
    def model(x):
        both = x * 2.0
        adds(both[:, :2])
        return both * 1.0

    asked = {"backend": backend, "splitting_ops": ["graphrt_tests::adds"]}
    if backend == "eager":
        one, _ = compile_alone(model, **asked)
        assert one(torch.ones(3, WIDTH))[0].tolist() == [3.0, 3.0] + [2.0] * (WIDTH - 2)
        return
    with pytest.raises(CompileError, match="shares") as caught:
        compile_alone(model, **asked)
    assert "test_compile_backends" in caught.value.source


def by_position(x):
    return torch.nn.functional.relu(x, True)


def by_method(x):
    return x.__imul__(2.0)


def inside_an_operator(x):
    return torch.utils.checkpoint.checkpoint(lambda y: y.mul_(2.0), x, use_reentrant=False)


@pytest.mark.parametrize("writes", [by_position, by_method, inside_an_operator])
def test_write_that_no_name_tells_is_refused_where_it_is_shared(writes):
    def model(x):
        both = x * 2.0
        view = both[:, :2]
        kept = torch.sigmoid(x)
        writes(view)
        return both + kept

    with pytest.raises(CompileError, match="two views of one memory") as caught:
        compile_alone(model)
    assert "test_compile_backends" in caught.value.source


@pytest.mark.parametrize("backend", ["eager", COUNTING])
def test_write_to_one_of_two_overlapping_views_is_refused(backend):
    """A compiler that takes them for two memories reads the other as it was before."""

    def model(x):
        rows = x.view(-1, 2, WIDTH // 2)
        gate = torch.sigmoid(x)
        x.mul_(3.0)
        return rows.sum(1) + gate.sum()

    asked = {"backend": backend}
    if backend == "eager":
        one, _ = compile_alone(model, **asked)
        x = torch.ones(3, WIDTH)
        assert torch.equal(one(x.clone()), model(x))
        return
    with pytest.raises(CompileError, match="two views of one memory") as caught:
        compile_alone(model, **asked)
    assert "test_compile_backends" in caught.value.source


@pytest.mark.parametrize(
    "views",
    [
        lambda: torch.zeros(4, 2, WIDTH).unbind(1),
        # As many pairs of rows as nobody could try one by one.
        lambda: torch.zeros(2**16, 32, 2).unbind(2),
    ],
    ids=["rows", "columns"],
)
def test_write_to_one_of_two_disjoint_views_is_compiled(views):
    keys, values = views()

    def model(x):
        gate = torch.sigmoid(x)
        return gate * keys.fill_(1.0).sum() + values.fill_(2.0).sum()

    one, _ = compile_alone(model)
    x = torch.ones(3, WIDTH)
    assert torch.equal(one(x), model(x))


def scaled_by(scale):
    @torch.compiler.allow_in_graph
    def function(x):
        return x * scale

    return function


class Expands(torch.nn.Module):
    """Of a mask for all heads, whose elements lie in the memory of one."""

    def __init__(self, is_fixed: bool) -> None:
        super().__init__()
        self.is_fixed = is_fixed

    def forward(self, *, x, ids, lens):
        rows = torch.tanh(x) if self.is_fixed else torch.tanh(x.t()).contiguous()
        heads = rows.expand(3, *rows.shape)
        summed = (torch.sigmoid(heads) + heads).sum(0)
        summed = summed if self.is_fixed else summed.t()
        return {"rows": summed + ids[:, None], "lens": lens * 2}


@pytest.mark.parametrize("is_fixed", [True, False])
def test_expanded_result_of_an_opaque_piece_is_replayed(is_fixed):
    asked = {
        "compilation": {"level": 3, "backend": "aot_eager", "splitting_ops": ["torch.sigmoid"]}
    }
    with RuntimeLab("PIECEWISE", model=Expands(is_fixed), asked=asked) as lab:
        lab.runtime.capture()
        for sizes in ((1, 1), (3, 2), (8, 4)):
            found = {k: v.clone() for k, v in lab.step(*sizes).items()}
            assert lab.runtime.last_decision.mode.name == "PIECEWISE"
            assert_equal(found, Expands(is_fixed)(**values(*sizes)))


def test_functions_of_one_name_do_not_share_compiled_code():
    double, triple = scaled_by(2.0), scaled_by(3.0)

    def model(x):
        x = torch.sigmoid(double(x))
        x = torch.sigmoid(triple(x))
        return torch.sigmoid(double(x))

    one, _ = compile_alone(model)
    x = torch.randn(3, WIDTH)
    assert torch.equal(one(x), model(x))


def test_default_overload_cuts_where_it_is_called_by_name():
    asked = {"splitting_ops": ["graphrt_tests::hides.default"], "backend": "eager"}
    one, _ = compile_alone(lambda x: hides(x * 2.0) * 2.0, **asked)
    assert [piece.kind for piece in one.report.pieces] == ["captured", "splitting", "captured"]
    one, _ = compile_alone(lambda x: torch.ops.graphrt_tests.hides(x * 2.0) * 2.0, **asked)
    assert [piece.kind for piece in one.report.pieces] == ["captured", "splitting", "captured"]


def kinds(model, **asked):
    one, _ = compile_alone(lambda x: model(x * 2.0) * 2.0, **{"backend": "eager", **asked})
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(one(x), model(x * 2.0) * 2.0, rtol=0, atol=0)
    return [piece.kind for piece in one.report.pieces]


CUT = ["captured", "splitting", "captured"]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("aten::sigmoid", torch.sigmoid),
        ("aten.sigmoid", lambda x: x.sigmoid()),
        ("aten::sigmoid", lambda x: torch.sigmoid(input=x, out=torch.empty_like(x))),
        ("aten::sigmoid.default", functional.sigmoid),
        ("aten::sigmoid.default", torch.nn.Sigmoid()),
        ("aten::sigmoid.default", torch.ops.aten.sigmoid),
        ("aten::sigmoid.out", lambda x: torch.sigmoid(x, out=torch.empty_like(x))),
        ("aten::softmax", torch.nn.Softmax(-1)),
        ("aten::softmax.int", lambda x: x.softmax(-1)),
        ("aten::silu", functional.silu),
        ("aten::matmul", lambda x: x @ x[0]),
        ("aten::add", lambda x: 1.0 + x),
        ("aten::add.Tensor", lambda x: x + x),
    ],
)
def test_operator_of_torch_cuts_however_the_model_calls_it(name, model):
    assert kinds(model, splitting_ops=[name]) == CUT


@pytest.mark.parametrize(
    ("name", "model", "found"),
    [
        ("aten::sigmoid.out", torch.sigmoid, "aten::sigmoid"),
        ("aten::add", lambda x: x.sum() * torch.ones(x.shape[0] + 3), "_operator.add"),
        ("aten::_softmax", torch.nn.Softmax(-1), "aten::softmax"),
        ("aten::cross_entropy_loss", lambda x: functional.cross_entropy(x, x), "cross_entropy"),
    ],
)
def test_operator_that_no_call_is_is_refused_with_what_is_called(name, model, found):
    with pytest.raises(SplittingOpError, match=f"none of {name} among .*{found}"):
        kinds(model, splitting_ops=[name])


def test_function_given_for_an_operator_is_called_where_arguments_are_the_same():
    impls = {"aten::softmax": lambda x, dim: x + dim}
    asked = {"splitting_ops": ["aten::softmax"], "backend": "eager", "impls": impls}
    one, _ = compile_alone(lambda x: (x * 2.0).softmax(-1), **asked)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(one(x), x * 2.0 - 1.0)
    with pytest.raises(SplittingOpError, match=r"name torch.nn.functional.softmax"):
        compile_alone(torch.nn.Softmax(-1), **asked)


@torch.library.custom_op(
    "graphrt_tests::waits", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def waits(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


waits.register_fake(torch.empty_like)


def test_operator_that_no_graph_can_hold_cuts_however_it_is_called():
    for called in (waits, torch.ops.graphrt_tests.waits, torch.ops.graphrt_tests.waits.default):
        assert kinds(called, splitting_ops=None) == CUT


@pytest.mark.parametrize("backend", ["eager", COUNTING])
def test_transform_of_functions_is_traced_but_not_cut(backend):
    asked = {"splitting_ops": ["aten::sigmoid"], "backend": backend}
    rows = torch.vmap(lambda row: row.clone().add_(1.0).view(row.shape))
    assert kinds(lambda x: torch.sigmoid(rows(x)), **asked) == CUT
    with pytest.raises(CompileError, match=r"torch.vmap, or another transform.* around it"):
        compile_alone(torch.vmap(lambda row: torch.sigmoid(row) * 2.0), **asked)


class Store(torch.nn.Module):
    """Writes a table twice; what is read in between is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(64, WIDTH))

    def forward(self, *, x, ids, lens):
        rows = self.table.narrow(0, 0, x.shape[0])
        rows.copy_(x * 2.0)
        gated = torch.sigmoid(rows)
        written = self.table.narrow(0, 0, x.shape[0]).add_(1.0)
        return {"rows": gated + written + ids[:, None], "lens": lens * 2}


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_opaque_piece_returns_views_and_tells_what_it_writes(mode):
    compilation = {"level": 3, "backend": COUNTING, "splitting_ops": ["torch.sigmoid"]}
    model = Store()
    asked = {"compilation": compilation}
    with RuntimeLab(mode, model=model, asked=asked, may_overwrite=[model.table]) as lab:
        lab.runtime.capture()
        found = {k: v.clone() for k, v in lab.step(3, 2, seed=4).items()}
        assert lab.runtime.last_decision.mode.name == mode
    with torch.no_grad():
        assert_equal(found, Store()(**values(3, 2, 4)))
    with (
        RuntimeLab(mode, model=Store(), asked={"compilation": compilation}) as lab,
        pytest.raises(StateAdvancedError, match="table"),
    ):
        lab.runtime.capture()


library = torch.library.Library("graphrt_tests", "FRAGMENT")
library.define("fills(Tensor(a!) table, Tensor x) -> ()")


def fills(table, x):
    table[: x.shape[0]].copy_(x)


library.impl("fills", fills, "CompositeExplicitAutograd")
torch.library.register_fake("graphrt_tests::fills", lambda table, x: None, lib=library)


def test_write_of_an_operator_whose_fake_writes_nothing_is_told():
    class Fills(Store):
        def forward(self, *, x, ids, lens):
            torch.ops.graphrt_tests.fills(self.table, x)
            return {"rows": torch.sigmoid(x) + ids[:, None], "lens": lens * 2}

    compilation = {"level": 3, "backend": COUNTING, "splitting_ops": ["torch.sigmoid"]}
    with (
        RuntimeLab("FULL", model=Fills(), asked={"compilation": compilation}) as lab,
        pytest.raises(StateAdvancedError, match="table"),
    ):
        lab.runtime.capture()


@pytest.mark.parametrize("has_function", [True, False])
def test_statistics_that_an_opaque_piece_keeps_are_told(has_function):
    class Normed(Store):
        def forward(self, *, x, ids, lens):
            mean, var = self.table[0], self.table[1]
            twice = torch.stack([x, x * 2.0]).transpose(1, 2)
            if has_function:
                twice = functional.batch_norm(twice, mean, var, training=True)
            else:
                twice = torch.batch_norm(twice, None, None, mean, var, True, 0.1, 1e-5, False)
            return {"rows": torch.sigmoid(twice[1].t()) + ids[:, None], "lens": lens * 2}

    compilation = {"level": 3, "backend": COUNTING, "splitting_ops": ["torch.sigmoid"]}
    with (
        RuntimeLab("FULL", model=Normed(), asked={"compilation": compilation}) as lab,
        pytest.raises(StateAdvancedError, match="table"),
    ):
        lab.runtime.capture()


def test_failed_trace_leaves_what_earlier_ones_wrote_as_it_was():
    class Normed(Store):
        def forward(self, *, x, ids, lens):
            self.table.add_(1.0)
            x = functional.batch_norm(x, self.table[0], self.table[1], training=True)
            return {"rows": torch.sigmoid(x) + ids[:, None], "lens": lens * 2}

    model = Normed()
    with pytest.raises(CompileError, match="more than 1 value per channel"):
        RuntimeLab("NONE", model=model, asked={"compilation": {"level": 2}})
    assert model.table.eq(0.0).all()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_trace_leaves_what_the_model_writes_as_it_was(level):
    class Counts(Store):
        def forward(self, *, x, ids, lens):
            self.table.add_(1.0)
            if level == 1:
                torch._dynamo.graph_break()
            rows = torch.sigmoid(x) + self.table[0]
            self.table.add_(1.0)
            return {"rows": rows + ids[:, None], "lens": lens * 2}

    model = Counts()
    ops = {"splitting_ops": ["torch.sigmoid"]} if level == 3 else {}
    with RuntimeLab("NONE", model=model, asked={"compilation": {"level": level, **ops}}) as lab:
        assert model.table.eq(0.0).all()
        lab.step(3, 2)
        assert model.table.eq(2.0).all()


# -- level 1


class Broken(Layers):
    def forward(self, *, x, ids, lens):
        x = torch.tanh(x)
        torch._dynamo.graph_break()
        return {"rows": x * 3.0 + ids[:, None], "lens": lens * 2}


def test_level_1_counts_graphs_and_recompiles_with_their_reason():
    asked = {"compilation": {"level": 1, "backend": COUNTING}}
    with RuntimeLab("FULL", model=Broken(), asked=asked) as lab:
        assert lab.runtime.report().compile.num_graphs == 2
        lab.runtime.capture()
        found = {k: v.clone() for k, v in lab.step(3, 2).items()}
        assert lab.runtime.last_decision.mode.name == "FULL"
        report = lab.runtime.report().compile
        assert report.num_compiles == len(CALLS) > report.num_graphs
        assert any("size" in reason for reason in report.recompiles)
        with torch.no_grad():
            assert_equal(found, Broken()(**values(3, 2)))


def test_level_1_counts_no_graph_that_did_not_compile():
    plan = resolve(
        RuntimeConfig(compilation=CompilationConfig(level=1, backend=f"{__name__}.failing"))
    ).compile
    stock = Stock(lambda x: x + 1, plan)
    for _ in range(2):
        with pytest.raises(BackendError, match="failing, compiling graph_0"):
            stock(torch.ones(2))
    assert stock.report is None


def test_level_1_says_that_a_stance_forbids_to_compile():
    plan = resolve(RuntimeConfig(compilation=CompilationConfig(level=1))).compile
    stock = Stock(lambda x: x + 1, plan)
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RecompileError, match="set_stance"),
    ):
        stock(torch.ones(2))
    assert torch.equal(stock(torch.ones(2)), torch.full((2,), 2.0))


def test_level_1_refuses_to_compile_inside_a_recording():
    def refuse_now():
        raise CompileDuringCaptureError("compile level 1")

    plan = resolve(RuntimeConfig(compilation=CompilationConfig(level=1))).compile
    stock = Stock(lambda x: x + 1, plan, refuse_now=refuse_now)
    with pytest.raises(CompileDuringCaptureError):
        stock(torch.ones(2))


# -- the dump


def test_dump_tells_what_was_traced_cut_and_compiled(tmp_path):
    for _ in range(2):
        compile_alone(chain(Layers()), debug_dump_path=tmp_path)
    first, second = sorted((tmp_path / "rank_0").iterdir())
    told = {path.name: path.read_text() for path in first.iterdir()}
    assert set(told) == {path.name for path in second.iterdir()}
    assert told["stitch.py"].count(" = piece_") == len(told["split.py"].splitlines())
    assert len([name for name in told if name.endswith(".before.py")]) == 4
    assert "tanh" in told["piece_0.before.py"]
    assert "tanh" in told["dynamo.py"]
    assert told["split.py"].count("captured") == 5
    assert json.loads(told["passes.json"])["remove_noops"] == {"removed": 0}
    assert json.loads(told["report.json"])["num_compiles"] == 3
    assert json.loads(told["guards.json"])["compared"]
    with pytest.raises(BackendError):
        compile_alone(chain(Layers()), backend=f"{__name__}.failing", debug_dump_path=tmp_path)
    third = tmp_path / "rank_0" / "model_2"
    assert (third / "dynamo.py").exists()
    assert "no such luck" in json.loads((third / "report.json").read_text())["error"]


@pytest.mark.parametrize("level", [2, 3])
def test_dump_of_a_trace_that_fails_names_the_line(tmp_path, level):
    ops = ["torch.sigmoid"] if level == 3 else None
    with pytest.raises(GraphBreakError):
        compile_alone(chain(Broken()), level=level, splitting_ops=ops, debug_dump_path=tmp_path)
    told = json.loads((tmp_path / "rank_0" / "model_0" / "report.json").read_text())
    assert told["error"].startswith("GraphBreakError")
    assert "test_compile_backends" in told["error"]


def test_dump_has_the_graph_after_each_pass_that_changed_it(tmp_path):
    def model(x):
        return torch.sigmoid(x.view(x.shape)) * 2

    compile_alone(model, backend="eager", debug_dump_path=tmp_path)
    folder = tmp_path / "rank_0" / "model_0"
    has_view = [
        any("view" in line and "#" not in line for line in path.read_text().splitlines())
        for path in (folder / "dynamo.py", folder / "dynamo.1_remove_noops.py")
    ]
    assert has_view == [True, False]
    assert not (folder / "dynamo.2_share_masks.py").exists()
    told = json.loads((folder / "passes.json").read_text())
    assert told == {"remove_noops": {"removed": 1}, "share_masks": {"added": 0}}


@pytest.mark.parametrize("backend", [COUNTING, f"{__name__}.failing"])
def test_dump_of_level_1_has_graphs_and_a_report(tmp_path, backend):
    options = CompilationConfig(level=1, backend=backend, debug_dump_path=tmp_path)
    stock = Stock(chain(Broken()), resolve(RuntimeConfig(compilation=options)).compile)
    is_failing = backend.endswith("failing")
    with pytest.raises(BackendError) if is_failing else nullcontext():
        stock(torch.ones(5, WIDTH))
    folder = tmp_path / "rank_0" / "model_0"
    told = json.loads((folder / "report.json").read_text())
    assert (folder / "graph_0.py").exists()
    assert "no such luck" in told["error"] if is_failing else told["num_compiles"] == len(CALLS) > 0


def test_dump_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="debug_dump_path"):
        compile_alone(chain(Layers()), debug_dump_path=tmp_path / "file")

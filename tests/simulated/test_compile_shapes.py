"""How the size that varies is marked for the trace; what replaces a branch on it."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch._dynamo import exc

from graphrt import CompilationConfig, RuntimeConfig, resolve
from graphrt.compile import Compiled, torch_api
from graphrt.errors import (
    CompileError,
    ContractError,
    GraphBreakError,
    GuardAuditError,
    RecompileError,
    ShapeGuardError,
)
from lab import MAX_TOKENS, WIDTH, RuntimeLab, assert_equal, values


class Branches(torch.nn.Module):
    """A branch on a size that every planned size takes, if ``limit`` is large."""

    def __init__(self, limit: int = 1000) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.limit = limit

    def forward(self, *, x, ids, lens):
        if lens.shape[0] <= x.shape[0] < self.limit:  # the line
            x = x @ self.weight
        return {"rows": torch.sigmoid(x) + ids[:, None], "lens": lens * 2}


class Compares(Branches):
    def forward(self, *, x, ids, lens):
        if x.shape[0] != lens.shape[0]:  # the line
            x = x @ self.weight
        return {"rows": torch.sigmoid(x) + ids[:, None], "lens": lens * 2}


def lab_of(model, mode="FULL", **options):
    options = {"level": 3, "splitting_ops": ["torch.sigmoid"], **options}
    return RuntimeLab(mode, model=model, asked={"compilation": options})


@pytest.mark.parametrize("marking", ["auto", "backed"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_branch_that_every_size_takes_is_traced_backed(marking, backend):
    model = Branches()
    with lab_of(model, "FULL_AND_PIECEWISE", dynamic_shapes=marking, backend=backend) as lab:
        report = lab.runtime.capture()
        notes = report.compile.notes
        assert f"Compiled by {backend}: 3 pieces, 2 compiled, 2 unique" in str(report)
        assert (len(notes) == 1 and "test_compile_shapes" in notes[0]) is (marking == "auto")
        found = []
        for sizes in ((1, 1), (2, 1), (2, 2), (5, 2), (8, 4), (16, 1)):
            outputs = lab.step(*sizes, uniform=sizes[0] == sizes[1])
            found.append((sizes, {k: v.clone() for k, v in outputs.items()}))
    with torch.no_grad():
        for sizes, outputs in found:
            assert_equal(outputs, model(**values(*sizes)))


class Slices(Branches):
    def forward(self, *, x, ids, lens):
        return {"rows": torch.sigmoid(x) + x[:1] + ids[:, None], "lens": lens * 2}


def test_slice_of_the_axis_is_traced_unbacked_or_else_backed():
    model = Slices()
    with lab_of(model) as lab:
        lab.runtime.capture()
        for sizes in ((1, 1), (2, 2), (5, 2), (8, 4)):
            outputs = lab.step(*sizes, uniform=sizes[0] == sizes[1])
            assert_equal(outputs, model(**values(*sizes)))


def test_branch_is_refused_where_sizes_are_unbacked():
    with pytest.raises(ShapeGuardError, match="the line"):
        lab_of(Branches(), dynamic_shapes="unbacked")


class Adds(Branches):
    def forward(self, *, x, ids, lens):
        rows = torch.sigmoid(x) + torch.ones(MAX_TOKENS // 2, WIDTH)  # the line
        return {"rows": rows + ids[:, None], "lens": lens * 2}


def test_size_that_the_code_fixes_names_its_line_and_nothing_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch._guards"), "handlers", [caplog.handler])
    with pytest.raises(ShapeGuardError, match="the line"):
        lab_of(Adds(), dynamic_shapes="backed")
    assert "Error while creating guard" not in caplog.text


@pytest.mark.parametrize("model", [Branches(5), Branches(13), Compares()])
@pytest.mark.parametrize("marking", ["auto", "backed"])
def test_branch_that_some_size_does_not_take_is_refused(model, marking):
    with pytest.raises(ShapeGuardError) as caught:
        lab_of(model, dynamic_shapes=marking)
    assert re.search(rf"at {re.escape(__file__)}:\d+ in forward: .*the line", str(caught.value))
    assert "does not hold for" in caught.value.found


class Plain(torch.nn.Module):
    def forward(self, *, x, ids, lens):
        return {"rows": torch.sigmoid(x) + ids[:, None], "lens": lens * 2}


def backend_that_asks_a_size(graph, inputs):
    tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
    return graph if any(one.shape[0] == 1 for one in tensors) else graph.forward


@pytest.mark.parametrize("level", [2, 3])
def test_backend_that_has_to_know_sizes_gets_backed_ones(level):
    ops = ["torch.sigmoid"] if level == 3 else None
    options = {"level": level, "splitting_ops": ops}
    backend = f"{__name__}.backend_that_asks_a_size"
    with lab_of(Plain(), backend=backend, **options) as lab:
        report = lab.runtime.report().compile
        assert "backed instead of unbacked, because of a branch on a size" in report.notes[0]
        for sizes in ((1, 1), (2, 2), (5, 2)):
            outputs = lab.step(*sizes, uniform=sizes[0] == sizes[1])
            assert_equal(outputs, Plain()(**values(*sizes)))
    with pytest.raises(ShapeGuardError) as caught:
        lab_of(Plain(), backend=backend, dynamic_shapes="unbacked", **options)
    assert caught.value.found == "code that asks Eq(u0, 1), where u0, u1 ... vary"
    assert "dynamic_shapes='auto'" in caught.value.do


class Chunks(Branches):
    def forward(self, *, x, ids, lens):
        first, second = x.chunk(2)  # the line
        return {"rows": torch.sigmoid(torch.cat([first, second])) + ids[:, None], "lens": lens * 2}


@pytest.mark.parametrize("marking", ["auto", "backed", "unbacked"])
def test_number_of_parts_that_depends_on_a_size_names_its_line(marking):
    with pytest.raises(
        ShapeGuardError, match=r"test_compile_shapes\.py:\d+ in forward: .*the line"
    ):
        lab_of(Chunks(), dynamic_shapes=marking)


@pytest.mark.parametrize(
    "chosen", [lambda x: x.long().view(-1).tolist()[0], lambda x: [1, 2][x.sum().long().item()]]
)
@pytest.mark.parametrize("level", [2, 3])
def test_number_out_of_a_tensor_that_the_trace_asks_for_names_the_line(level, chosen):
    def model(x):
        return torch.sigmoid(x) * chosen(x)

    ops = ["torch.sigmoid"] if level == 3 else None
    plan = resolve(
        RuntimeConfig(compilation=CompilationConfig(level=level, splitting_ops=ops))
    ).compile
    compiled = Compiled(model, plan, limits={"tokens": 16})
    x = torch.zeros(5, WIDTH)
    with pytest.raises((GraphBreakError, ShapeGuardError), match="test_compile_shapes"):
        compiled.trace(lambda: compiled(x), [(x, 0, "tokens")])


def asks_a_value(x):
    if torch.tanh(x).sum().item() > 0:  # the line
        return torch.sigmoid(x) * 2
    return torch.sigmoid(x)


def asks_a_value_and_a_size(x):
    if x.sum().long().item() > x.shape[0]:  # the line
        return torch.sigmoid(x) * 2
    return torch.sigmoid(x)


def asks_a_size(x):
    if x[x.shape[0] // 2 :].shape[0] > 4:  # the line
        return torch.sigmoid(x) * 2
    return torch.sigmoid(x)


# Before torch 2.13 the size of a slice and an integer out of a tensor are told alike.
OF_INTEGERS = (
    (GraphBreakError, "branch on a value of a tensor")
    if torch_api.MARKS_BOUNDS
    else (ShapeGuardError, "branch on a size")
)


@pytest.mark.parametrize("marking", ["auto", "backed", "unbacked"])
@pytest.mark.parametrize(
    ("model", "error", "subject"),
    [
        (asks_a_value, GraphBreakError, "branch on a value of a tensor"),
        (asks_a_value_and_a_size, *OF_INTEGERS),
        (asks_a_size, ShapeGuardError, "branch on a size"),
    ],
)
def test_branch_says_whether_a_value_or_a_size_decides(model, error, subject, marking):
    options = CompilationConfig(
        level=3, splitting_ops=["torch.sigmoid"], backend="eager", dynamic_shapes=marking
    )
    plan = resolve(RuntimeConfig(compilation=options)).compile
    compiled = Compiled(model, plan, limits={"tokens": 16})
    x = torch.zeros(5, WIDTH)
    with pytest.raises(error, match=f"^{subject} at .*the line") as caught:
        compiled.trace(lambda: compiled(x), [(x, 0, "tokens")])
    # All of the condition, with its brackets.
    assert re.match(r".* (>|<=) (0|u0|5|4)\b", caught.value.found)


def test_first_call_of_equal_sizes_is_refused():
    compilation = CompilationConfig(level=2, dynamic_shapes="backed")
    plan = resolve(RuntimeConfig(compilation=compilation)).compile
    compiled = Compiled(Branches(), plan, limits={"tokens": 16, "requests": 4})
    inputs = values(3, 3)
    varying = [(inputs["x"], 0, "tokens"), (inputs["lens"], 0, "requests")]
    with pytest.raises(ContractError, match="equal ones are taken for one"):
        compiled.trace(lambda: compiled(**inputs), varying)


@pytest.mark.parametrize("marking", ["unbacked", "backed"])
@pytest.mark.parametrize("size", [0, 17])
def test_first_call_of_a_size_beyond_the_limits_is_refused(marking, size):
    compilation = CompilationConfig(level=2, dynamic_shapes=marking)
    plan = resolve(RuntimeConfig(compilation=compilation)).compile
    compiled = Compiled(torch.tanh, plan, limits={"tokens": 16})
    x = torch.zeros(size, WIDTH)
    with pytest.raises(ContractError, match="16 tokens"):
        compiled.trace(lambda: compiled(x), [(x, 0, "tokens")])


# -- guards kept


def changes_scale(model):
    model.limit = 900


def adds_hook(model):
    model.register_forward_hook(lambda module, args, out: {**out, "lens": out["lens"] + 1})


class Scales:
    def times(self, x):
        return x * 2


class Methods(torch.nn.Module):
    """Its own methods, one of its base and one of a plain object."""

    scales = Scales()

    def forward(self, *, x, ids, lens):
        x = torch.sigmoid(self.scales.times(self.own(self.of_class(x))))
        return {"rows": x + ids[:, None], "lens": lens * 2}

    def own(self, x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return x * 3


class Inherits(Methods):
    pass


def changed(x):
    return x - 1


@pytest.mark.parametrize("policy", ["audit", "keep"])
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Methods, "own", lambda self, x: x - 1),
        (Inherits, "own", lambda self, x: x - 1),  # Hides that of its base.
        (Methods, "of_class", staticmethod(changed)),
        (Scales, "times", lambda self, x: x - 1),
        (Inherits, "__call__", lambda self, **inputs: {"rows": inputs["x"], "lens": 0}),
    ],
)
def test_method_replaced_after_the_trace_is_caught_by_either_policy(
    monkeypatch, owner, name, value, policy
):
    with lab_of(Inherits(), guard_policy=policy) as lab:
        lab.runtime.capture()
        monkeypatch.setattr(owner, name, value, raising=False)
        if policy == "keep":
            with pytest.raises(RecompileError, match=name):
                lab.step(16, 2)
        with pytest.raises(GuardAuditError, match=name):
            lab.runtime.check_externals()
        monkeypatch.undo()
        lab.runtime.check_externals()


class DecodesOnly(torch.nn.Module):
    """Takes as many requests as tokens."""

    def forward(self, *, x, ids, lens):
        rows = torch.sigmoid(x * 2) + lens[:, None]
        return {"rows": rows + ids[:, None], "lens": lens * 2}


@pytest.mark.parametrize(
    ("level", "marking"), [(1, "auto"), (2, "auto"), (3, "auto"), (3, "backed")]
)
def test_model_of_decode_steps_alone_is_traced_with_one_axis(level, marking):
    shapes = {} if level == 1 else {"dynamic_shapes": marking}
    ops = {"splitting_ops": ["torch.sigmoid"]} if level == 3 else {}
    asked = {"compilation": {"level": level, **shapes, **ops}}
    with RuntimeLab("FULL_DECODE_ONLY", model=DecodesOnly(), asked=asked) as lab:
        lab.runtime.capture()
        for number in (1, 2, 3, 4):
            outputs = {k: v.clone() for k, v in lab.step(number, number, True).items()}
            with torch.no_grad():
                assert_equal(outputs, DecodesOnly()(**values(number, number)))
        if level > 1:
            with pytest.raises(ContractError, match="as dimension 0 of argument"):
                lab.step(6, 3)


def test_model_that_fails_with_any_sizes_raises_its_own_error():
    class Fails(DecodesOnly):
        def forward(self, **inputs):
            return super().forward(**inputs)["rows"] @ torch.ones(3, 3)

    with pytest.raises(CompileError, match="reduction dim"):
        lab_of(Fails(), "FULL_DECODE_ONLY")


class TakesComputed(torch.nn.Module):
    def forward(self, hidden, factors, table):
        return torch.sigmoid(hidden * 2) @ table, factors * 3


class Computes(torch.nn.Module):
    """Computes the arguments of its part: one size is that of tokens, in every run."""

    def __init__(self, length=None):
        super().__init__()
        self.part, self.length = TakesComputed(), length

    def forward(self, *, x, ids, lens):
        table = torch.eye(WIDTH) if self.length is None else self.length(x)
        rows, doubled = self.part(x + ids[:, None], lens * 2, table)
        return {"rows": rows[: len(x)], "lens": doubled}


@pytest.mark.parametrize(
    ("level", "marking"), [(2, "auto"), (3, "auto"), (3, "backed"), (3, "unbacked")]
)
def test_part_whose_arguments_are_computed_serves_every_size(level, marking):
    model = Computes()
    ops = {"splitting_ops": ["torch.sigmoid"]} if level == 3 else {}
    asked = {"compilation": {"level": level, "dynamic_shapes": marking, **ops}}
    with RuntimeLab("FULL", model=model, asked=asked, compile_part=model.part) as lab:
        lab.runtime.capture()
        for sizes in ((1, 1), (3, 2), (4, 4), (8, 1), (16, 2)):
            outputs = {k: v.clone() for k, v in lab.step(*sizes).items()}
            with torch.no_grad():
                assert_equal(outputs, Computes()(**values(*sizes)))


def test_part_with_a_size_that_no_axis_has_is_refused():
    model = Computes(lambda x: torch.ones(WIDTH, 2 * len(x)))
    asked = {"compilation": {"level": 3, "splitting_ops": ["torch.sigmoid"]}}
    with pytest.raises(
        ContractError, match=r"dimension 1 of argument 2(.|\n)*found: +16, before 8"
    ):
        RuntimeLab("FULL", model=model, asked=asked, compile_part=model.part)
    assert "forward" not in vars(model.part)


class Kind(type):
    """A class of classes."""

    rate = 2.0


class Rated(metaclass=Kind):
    limit = 4.0


class Above(Rated):
    pass


def rates(x):
    return x * (rates.factor if hasattr(rates, "factor") else 2.0)


class Lookups(torch.nn.Module):
    """Attributes that are found on the way from an object to its class, and beyond."""

    scale = 2.0
    rated = Above()

    def forward(self, *, x, ids, lens):
        x = rates(x) * self.scale * self.rated.limit * Rated.rate
        return {"rows": torch.sigmoid(x) + ids[:, None], "lens": lens * 2}


class Hides(Lookups):
    pass


@pytest.mark.parametrize("policy", ["audit", "keep"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Hides, "scale"), (Above, "limit"), (Kind, "rate"), (rates, "factor")],
)
def test_attribute_that_comes_to_hide_what_was_traced_is_caught(monkeypatch, owner, name, policy):
    with lab_of(Hides(), guard_policy=policy) as lab:
        monkeypatch.setattr(owner, name, 3.0, raising=False)
        if policy == "keep" and name in ("scale", "limit"):
            with pytest.raises(RecompileError, match=f"{name}[^$]*3.0 of "):
                lab.step(16, 2)
        with pytest.raises(GuardAuditError, match=f"{name}[^$]*3.0 of "):
            lab.runtime.capture()
        monkeypatch.undo()
        monkeypatch.setattr(owner, "another", 3.0, raising=False)  # No traced code has the name.
        lab.runtime.capture()
        lab.step(16, 2)


@pytest.mark.parametrize("policy", ["audit", "keep"])
@pytest.mark.parametrize("change", [changes_scale, adds_hook])
def test_change_after_the_trace_is_caught_by_either_policy(change, policy):
    model = Branches()
    with lab_of(model, guard_policy=policy) as lab:
        lab.runtime.capture()
        for sizes in ((3, 2), (8, 4), (16, 2)):
            outputs = {k: v.clone() for k, v in lab.step(*sizes).items()}
            with torch.no_grad():
                assert_equal(outputs, Branches()(**values(*sizes)))
        change(model)
        if policy == "keep":
            with pytest.raises(RecompileError, match=r"limit|hooks"):
                lab.step(16, 2)
        with pytest.raises(GuardAuditError):
            lab.runtime.check_externals()


@torch.compile(backend="eager", dynamic=False)
def foreign(x):
    return x * 2 + 1


@torch.library.custom_op("graphrt_tests::calls_foreign", mutates_args=())
def calls_foreign(x: torch.Tensor) -> torch.Tensor:
    return foreign(x)


calls_foreign.register_fake(torch.empty_like)


def test_kept_guards_leave_foreign_code_free_to_compile():
    class Calls(torch.nn.Module):
        scale = 2.0

        def forward(self, x):
            return torch.ops.graphrt_tests.calls_foreign(torch.tanh(x) * self.scale) * 3.0

    model = Calls()
    compilation = CompilationConfig(level=2, guard_policy="keep")
    one = Compiled(
        model, resolve(RuntimeConfig(compilation=compilation)).compile, limits={"tokens": 64}
    )
    x = torch.randn(5, WIDTH)
    one.trace(lambda: one(x), [(x, 0, "tokens")])
    for rows in (3, 7, 9):  # Another compilation of ``foreign`` each.
        x = torch.randn(rows, WIDTH)
        assert torch.equal(one(x), model(x))
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        pytest.raises(exc.RecompileError, match="foreign"),  # The caller's own, as torch says it.
    ):
        one(torch.randn(11, WIDTH))
    for _ in range(10):
        model.scale = 4.0
        with pytest.raises(RecompileError, match="scale"):
            one(x)
        del model.scale
    assert torch.equal(one(x), model(x))


def test_argument_of_other_strides_than_traced_is_refused():
    config = RuntimeConfig(compilation=CompilationConfig(level=2, backend="eager"))
    entry = Compiled(lambda x: x * 2.0, resolve(config).compile, limits={"tokens": 8})
    traced, other = torch.randn(8, 6)[:, :3], torch.randn(5, 6)[:, 3:]
    with torch.no_grad():
        entry.trace(lambda: entry(traced), [(traced, 0, "tokens")])
        assert torch.equal(entry(other), other * 2.0)
        with pytest.raises(ContractError, match="strides of argument 0"):
            entry(other.contiguous())


class Squeezes(Branches):
    """The result of ``squeeze`` has one dimension less for one row alone."""

    def forward(self, *, x, ids, lens):
        hidden = torch.sigmoid(x @ self.weight)
        flat = hidden.squeeze()
        hidden = hidden + (flat[None] if flat.dim() == 1 else flat)
        return {"rows": hidden + ids[:, None], "lens": lens * 2}


def test_squeeze_of_an_axis_is_traced_backed_and_right_for_one_row():
    model = Squeezes()
    with lab_of(model, "FULL_AND_PIECEWISE") as lab:
        report = lab.runtime.capture()
        assert "backed instead of unbacked" in report.compile.notes[0]
        for sizes in ((1, 1), (2, 1), (5, 2), (16, 1)):
            found = {k: v.clone() for k, v in lab.step(*sizes).items()}
            with torch.no_grad():
                assert_equal(found, model(**values(*sizes)))


def test_squeeze_of_an_axis_is_refused_where_sizes_have_to_be_unbacked():
    with pytest.raises(ShapeGuardError, match="squeeze of a dimension that varies") as caught:
        lab_of(Squeezes(), dynamic_shapes="unbacked")
    assert "test_compile_shapes" in str(caught.value)

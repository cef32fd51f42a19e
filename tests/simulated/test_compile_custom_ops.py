"""Operations in two forms: which rules choose which, and what is counted."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

from graphrt import CompilationConfig, Facts, OutputSpec, Runtime, RuntimeConfig, resolve
from graphrt.compile import CustomOp, check_custom_ops, count_custom_ops
from graphrt.config import CompilePlan
from graphrt.errors import ConfigError


@CustomOp.register("test_double")
class Double(CustomOp):
    optimized_for = ("cpu",)

    def forward_native(self, x):
        return x + x

    def forward_optimized(self, x):
        return x * 2.0 + 1.0  # Wrong, so that it can be told apart.


@CustomOp.register("test_halve")
class Halve(CustomOp):
    optimized_for = ("cpu",)

    def forward_native(self, x):
        return x / 2


@CustomOp.register("test_negate")
class Negate(CustomOp):
    optimized_for = ("cpu",)
    operator = "aten::neg"

    def forward_native(self, x):
        return 0 - x


def plan(rules: str = "", **asked: Any) -> CompilePlan:
    config = CompilationConfig(custom_ops=rules, **asked)  # type: ignore[arg-type]
    return resolve(RuntimeConfig(compilation=config), Facts(attention_ops=("a::b",))).compile


@pytest.mark.parametrize(
    ("rules", "asked", "double", "halve"),
    [
        ("", {"level": 0}, True, True),
        ("", {"level": 1, "backend": "inductor"}, True, True),
        ("", {"level": 3}, True, True),
        ("", {"level": 3, "backend": "inductor"}, False, False),
        ("", {"level": 3, "backend": "my.own"}, True, True),
        ("all", {"level": 3, "backend": "inductor"}, True, True),
        ("all,-test_double", {}, False, True),
        ("none,+test_double", {}, True, False),
        ("none", {}, False, False),
        ("+test_double", {"level": 3, "backend": "inductor"}, True, False),
        ("-test_double", {}, False, True),
    ],
)
def test_rules_choose_the_form_and_are_counted(rules, asked, double, halve):
    made = plan(rules, **asked)
    model = torch.nn.Sequential(Double(made, "cpu"), Double(made, "cpu"), Halve(made, "cpu"))
    counts = count_custom_ops(model)
    for name, number, is_on in (("test_double", 2, double), ("test_halve", 1, halve)):
        assert (counts.enabled[name], counts.disabled[name]) == (
            number * is_on,
            number * (not is_on),
        )
    check_custom_ops(made, model)


def test_form_runs_where_the_device_has_it():
    x = torch.ones(2)
    on, off = plan("all"), plan("none")
    assert Double(on, "cpu")(x).tolist() == [3.0, 3.0]
    assert Double(off, "cpu")(x).tolist() == Double(on, "meta")(x).tolist() == [2.0, 2.0]
    halve = Halve(on, "cpu")
    assert (halve.is_enabled, halve.is_optimized) == (True, False)
    assert halve(x).tolist() == [0.5, 0.5]
    assert copy.deepcopy(Double(on, "cpu"))(x).tolist() == [3.0, 3.0]
    for op in (Double(on, "cpu"), Double(off, "cpu"), halve, Negate(on, "cpu")):
        assert op.form(x).tolist() == op(x).tolist()
    assert Negate(on, "cpu").form is torch.ops.aten.neg


@pytest.mark.parametrize(("rules", "expected"), [("all", 3.0), ("none", 2.0)])
def test_both_forms_are_traced_as_one_graph(rules, expected):
    model = torch.nn.Sequential(Double(plan(rules), "cpu"))
    traced = torch.compile(model, backend="eager", fullgraph=True)
    assert traced(torch.ones(2)).tolist() == [expected, expected]


def test_unknown_name_is_refused_with_the_nearest_first():
    with pytest.raises(ConfigError) as caught:
        check_custom_ops(plan("none,+test_doubel,-test_halves"))
    first, second = caught.value.problems
    assert "'+test_doubel'" in first.found
    assert first.accepted.startswith("test_double, ")
    assert second.accepted.startswith("test_halve, ")


def test_model_made_by_other_rules_is_refused():
    model = torch.nn.Sequential(Double(plan("none"), "cpu"))
    check_custom_ops(plan("none"), model)
    with pytest.raises(ConfigError, match="made by other rules: test_double"):
        check_custom_ops(plan("all"), model)


def test_name_is_given_once():
    with pytest.raises(ConfigError, match="no other operation has"):

        @CustomOp.register("test_double")
        class Other(CustomOp): ...

    for name in ("", "a,b", "+a"):
        with pytest.raises(ConfigError, match="identifier"):
            CustomOp.register(name)(Double)
    assert CustomOp.register("test_double")(Double) is Double


def test_class_without_a_name_makes_no_operation():
    class Unnamed(Double): ...

    for kind in (CustomOp, Unnamed):
        with pytest.raises(ConfigError, match="is registered by a name"):
            kind(plan(), "cpu")


def test_runtime_refuses_rules_that_it_cannot_keep():
    for rules in ("none,+test_doubel", "all"):
        config = RuntimeConfig(compilation=CompilationConfig(custom_ops=rules))
        model = torch.nn.Sequential(Double(plan("none"), "cpu"))
        with pytest.raises(ConfigError, match="custom_ops"):
            Runtime(
                model,
                inputs=[],
                outputs=OutputSpec({"": "tokens"}),
                config=config,
                device="simulated",
            )


IMPORTS = """
import sys
import graphrt
graphrt.CustomOp, graphrt.Runtime
print("torch._dynamo" in sys.modules)
graphrt.load_compiler()
loaded = {*sys.modules}
import graphrt.runtime.compiling
print([name for name in {*sys.modules} - loaded if name.startswith(("torch", "graphrt.compile"))])
"""


def test_custom_ops_load_no_compiler_and_load_compiler_all_of_it():
    told = subprocess.run(
        [sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE, text=True, check=True
    )
    assert told.stdout.split("\n") == ["False", "[]", ""]

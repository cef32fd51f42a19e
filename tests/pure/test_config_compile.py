"""Options of compiling: what is accepted, what is deprecated, what is hashed, what is written."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import warnings
from collections import UserList
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import config_strategies
import pytest
from hypothesis import given

from graphrt import CUDAGraphMode
from graphrt.config import CompilationConfig, PassConfig, RuntimeConfig, resolve
from graphrt.errors import ConfigError, ConfigProblem, ConfigWarning


def problems_of(**asked: Any) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        CompilationConfig(**asked)
    return list(caught.value.problems)


def rewrite(graph: Any) -> None:
    graph.nodes.reverse()


def bound(number: int) -> Callable[[Any], int]:
    return lambda graph: number


class WithUuid:
    def __init__(self, own: str | None) -> None:
        self.own = own

    def __call__(self, graph: Any) -> None: ...

    def uuid(self) -> str | None:
        return self.own


class Raises(WithUuid):
    def uuid(self) -> str | None:
        raise RuntimeError("no such luck")


DEEP: dict[str, Any] = {}
DEEP["itself"] = DEEP
CYCLE: list[Any] = []
CYCLE.append(CYCLE)

# name -> default, (given, stored), what is wrong
FIELDS: dict[str, tuple[Any, tuple[Any, Any], list[Any]]] = {
    "backend": ("", ("package.module.fn", "package.module.fn"), ["a b", "a.", "1a", None, 3]),
    "custom_ops": (
        (),
        ("none, +norm", ("none", "+norm")),
        ["quant", "+", "-", "all,none", "all,all", "none,none", "+x,-x", ["all,none"], 3],
    ),
    "splitting_ops": (
        None,
        (["a::b", "a.b", "a::b", "a::b.out", "a.b.c"], ("a::b", "a.b", "a::b.out", "a.b.c")),
        ["a::b", ["relu"], ["a::"], [3]],
    ),
    "use_inductor": (None, (True, True), [1, "yes"]),
    "compile_ranges_endpoints": (None, ([32, 8, 32], (8, 32)), [[0], [True], 8, ["8"]]),
    "dynamic_shapes": ("auto", ("backed", "backed"), ["AUTO", None]),
    "guard_policy": ("audit", ("keep", "keep"), ["drop", None]),
    "use_inductor_graph_partition": (None, (False, False), ["no", 0]),
    "inductor_compile_config": (
        {},
        ({"a": [1, 2]}, {"a": (1, 2)}),
        [
            *([("a", 1)], {1: 2}, DEEP, {"a": CYCLE}, {"a": {1: 2, "1": 3}}, {"a": 10**6000}),
            *({"a": float("inf")}, {"a": [float("nan")]}, {"a": Raises("1")}),
        ],
    ),
    "inductor_passes": (
        {},
        ({"a": "package.rewrite"}, {"a": "package.rewrite"}),
        [
            *({"a": "rewrite"}, {"a": 3}, {1: "a.b"}, ["a.b"], {"a": "a. b"}),
            *({"a": WithUuid}, {"a": Raises("1")}),
        ],
    ),
    "pass_config": (
        PassConfig(),
        ({"enable_fusion": True}, PassConfig(enable_fusion=True)),
        ["all", True],
    ),
    "cache_dir": (None, ("somewhere", Path("somewhere")), [3, True]),
    "compile_cache": (True, (False, False), [0, None]),
    "debug_dump_path": (None, ("", None), [3]),
    "cudagraph_copy_inputs": (False, (True, True), [1]),
}


@pytest.mark.parametrize("name", FIELDS)
def test_option_has_default_and_stores_what_is_given(name: str) -> None:
    default, (given_value, stored), _ = FIELDS[name]
    assert getattr(CompilationConfig(), name) == default
    assert getattr(CompilationConfig(**{name: given_value}), name) == stored


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_option_is_named_with_found_and_accepted(name: str) -> None:
    for value in FIELDS[name][2]:
        for problem in problems_of(**{name: value}):
            assert problem.field.startswith(name)
            assert problem.found
            assert problem.accepted


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("custom_ops", "quant", "'all', 'none', '+name', '-name'; 'quant' is none of them"),
        ("custom_ops", "all,none", "not 'all' with 'none'"),
        ("custom_ops", "+x,-x", "not '+x' with '-x'"),
        ("custom_ops", "all,all", "not 'all' with 'all'"),
        ("splitting_ops", ["relu"], "ns::op, ns::op.overload, ns.op or package.callable"),
        ("backend", "a b", "package.module.function"),
        ("inductor_passes", {"a": 3}, "callable or 'package.module.name'"),
        ("dynamic_shapes", "no", "'auto', 'unbacked' or 'backed'"),
        ("guard_policy", "no", "'audit' or 'keep'"),
        ("pass_config", {"enable_noops": True}, "nearest is 'enable_noop'"),
    ],
)
def test_accepted_values_are_listed(name: str, value: Any, accepted: str) -> None:
    [problem] = problems_of(**{name: value})
    assert accepted in problem.accepted


def test_backend_inductor_without_inductor_is_refused() -> None:
    [problem] = problems_of(backend="inductor", use_inductor=False)
    assert problem.field == "use_inductor"


@pytest.mark.parametrize(
    "value",
    [{1}, b"1", bytearray(1), range(10**15), (n for n in "a"), UserList([1]), object(), 1j, len],
)
def test_option_that_is_no_json_is_neither_walked_nor_cached(value: object) -> None:
    config = CompilationConfig(
        level=3, use_inductor=True, splitting_ops=(), inductor_compile_config={"a": value}
    )
    plan = resolve(RuntimeConfig(compilation=config)).compile
    assert plan.inductor_compile_config["a"] is value
    assert plan.unhashable_passes == ("a",)
    assert plan.compute_hash() == plan.compute_hash()
    assert json.loads(repr(config))["inductor_compile_config"] == {}


def test_mappings_are_copied_and_read_only() -> None:
    inner: dict[str, Any] = {"x": [1]}
    mine: dict[str, Any] = {"a": [1], "c": inner}
    config = CompilationConfig(inductor_compile_config=mine)
    mine["b"] = [2]
    mine["a"].append(2)
    inner["y"] = 2
    inner["x"].append(3)
    options: Any = config.inductor_compile_config
    assert options == {"a": (1,), "c": {"x": (1,)}}
    for mapping in (options, options["c"]):
        with pytest.raises(TypeError):
            mapping["b"] = 3
    assert json.loads(repr(config))["inductor_compile_config"] == {"a": [1], "c": {"x": [1]}}
    assert CompilationConfig.from_json(repr(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(CompilationConfig(inductor_compile_config={"a": [1], "c": inner}))


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("max_capture_size", "Plan.max_capture_size"),
        ("bs_to_padded_graph_size", "Plan.padding_table"),
        ("local_cache_dir", "cache_dir"),
        ("enabled_custom_ops", "count_custom_ops(model).enabled"),
        ("disabled_custom_ops", "count_custom_ops(model).disabled"),
        ("traced_files", "nothing has it"),
        ("compilation_time", "CompileReport.compilation_time"),
        ("static_forward_context", "ForwardContext.layers"),
    ],
)
def test_derived_value_given_is_refused_with_its_home(name: str, home: str) -> None:
    first, second = problems_of(**{name: {}, "level": 9})
    assert (first.field, second.field) == (name, "level")
    assert home in first.accepted


# --- Deprecated options


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ({"use_cudagraph": False}, "NONE"),
        ({"use_cudagraph": True}, None),
        ({"full_cuda_graph": True}, "FULL"),
        ({"full_cuda_graph": False}, None),
        ({"full_cuda_graph": False, "use_cudagraph": False}, "NONE"),
        ({"full_cuda_graph": True, "use_cudagraph": True, "splitting_ops": ["a::b"]}, "FULL"),
        ({"use_cudagraph": True, "cudagraph_mode": "PIECEWISE"}, "PIECEWISE"),
    ],
)
def test_deprecated_option_warns_at_caller_and_migrates(
    asked: dict[str, Any], mode: str | None
) -> None:
    with pytest.warns(DeprecationWarning, match="use cudagraph_mode") as caught:
        config = CompilationConfig(**asked)
    assert {item.filename for item in caught} == {__file__}
    assert len(caught) == len({"use_cudagraph", "full_cuda_graph"} & set(asked))
    assert config.cudagraph_mode is (None if mode is None else CUDAGraphMode[mode])
    assert (config.use_cudagraph, config.full_cuda_graph) == (None, None)
    # A copy and a round trip through text do not warn: warnings are errors here.
    assert replace(config) == config
    assert CompilationConfig.from_json(repr(config)) == config


@pytest.mark.parametrize(
    "asked",
    [
        {"use_cudagraph": False, "cudagraph_mode": "FULL"},
        {"full_cuda_graph": True, "cudagraph_mode": "FULL"},
        {"use_cudagraph": False, "full_cuda_graph": True},
    ],
)
def test_deprecated_option_beside_another_is_refused(asked: dict[str, Any]) -> None:
    [problem] = problems_of(**asked)
    assert problem.field in asked
    assert "mutually exclusive" in problem.accepted


def test_deprecated_option_of_a_wrong_type_is_named() -> None:
    assert [item.field for item in problems_of(use_cudagraph="no")] == ["use_cudagraph"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"enable_fusion": True, "enable_noop": False}, "enable_fusion"),
        ({"enable_attn_fusion": True, "enable_noop": False}, "enable_attn_fusion"),
        ({"enable_fi_allreduce_fusion": True, "enable_noop": False}, "enable_fi_allreduce_fusion"),
        ({"enable_async_tp": True}, "enable_async_tp"),
    ],
)
def test_pass_that_finds_nothing_is_warned_of_at_the_caller(
    asked: dict[str, Any], said: str
) -> None:
    for build in (
        lambda: PassConfig(**asked),
        lambda: RuntimeConfig(compilation={"pass_config": asked}),  # type: ignore[arg-type]
    ):
        with pytest.warns(ConfigWarning, match=said) as caught:
            build()
        assert [item.filename for item in caught] == [__file__]


def test_passes_by_default_warn_of_nothing() -> None:
    with warnings.catch_warnings(record=True, action="always") as warned:
        PassConfig()
        PassConfig(enable_noop=False)
        PassConfig(enable_fusion=True)
        PassConfig(enable_async_tp=True, enable_sequence_parallelism=True)
    assert warned == []


# --- Hash and text

ANOTHER: dict[str, Any] = {
    "level": 1,
    "cudagraph_mode": "FULL",
    "cudagraph_capture_sizes": [8],
    "max_cudagraph_capture_size": 8,
    "compile_sizes": [8],
    "cudagraph_specialize_lora": False,
    "cudagraph_num_of_warmups": 3,
    "debug_dump_path": "dump",
    **{name: FIELDS[name][1][0] for name in FIELDS if name != "debug_dump_path"},
}
IN_HASH = {
    *("level", "backend", "custom_ops", "splitting_ops", "use_inductor", "dynamic_shapes"),
    *("use_inductor_graph_partition", "inductor_compile_config", "inductor_passes", "pass_config"),
}


@pytest.mark.parametrize("kind", [CompilationConfig, PassConfig])
def test_every_option_says_what_it_affects(kind: Any) -> None:
    assert {item.metadata["affects"] for item in fields(kind)} == {"graph", "nothing_compiled"}


@pytest.mark.parametrize("name", sorted(ANOTHER))
def test_hash_changes_with_options_that_change_code(name: str) -> None:
    changed = CompilationConfig(**{name: ANOTHER[name]})
    assert changed != CompilationConfig()
    same = changed.compute_hash() == CompilationConfig().compute_hash()
    assert same is (name not in IN_HASH)


def test_hash_has_a_value_for_every_option() -> None:
    deprecated = {"use_cudagraph", "full_cuda_graph"}
    assert {item.name for item in fields(CompilationConfig)} == {*ANOTHER, *deprecated}


def test_hash_ignores_the_order_of_rules_and_keys() -> None:
    one = CompilationConfig(
        custom_ops="+a,-b", splitting_ops=["a::b", "c::d"], inductor_compile_config={"a": 1, "b": 2}
    )
    other = CompilationConfig(
        custom_ops="-b,+a", splitting_ops=["c::d", "a::b"], inductor_compile_config={"b": 2, "a": 1}
    )
    assert one.compute_hash() == other.compute_hash()


def test_hash_is_the_same_in_another_process() -> None:
    config = CompilationConfig(custom_ops="none,+a", pass_config={"enable_fusion": True})
    code = (
        "from graphrt import CompilationConfig as C\n"
        f"print(C.from_json({repr(config)!r}).compute_hash())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == config.compute_hash()


def hash_with(rewrite: Any) -> str:
    return CompilationConfig(inductor_passes={"mine": rewrite}).compute_hash()


def test_hash_tells_passes_apart_by_uuid_else_by_source() -> None:
    assert hash_with(WithUuid("1")) == hash_with(WithUuid("1")) != hash_with(WithUuid("2"))
    assert hash_with(rewrite) != hash_with(test_passes_by_default_warn_of_nothing)


def test_uuid_of_passes_ignores_the_self_check() -> None:
    assert PassConfig().uuid() == PassConfig(self_check=False).uuid()
    for item in fields(PassConfig):
        other = 3 if item.name.startswith("fi_") else not item.default
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)
            changed = PassConfig(**{item.name: other})
        assert (changed.uuid() == PassConfig().uuid()) is (item.name == "self_check")


def test_text_of_the_defaults_is_empty() -> None:
    assert repr(CompilationConfig()) == str(CompilationConfig()) == repr(PassConfig()) == "{}"


def test_text_has_what_differs_as_json() -> None:
    config = CompilationConfig(
        level=3,  # type: ignore[arg-type]
        cudagraph_mode="FULL",  # type: ignore[arg-type]
        pass_config={"enable_fusion": True},  # type: ignore[arg-type]
        cache_dir="cache",  # type: ignore[arg-type]
        inductor_passes={"mine": rewrite},
        inductor_compile_config={"hook": WithUuid("1"), "option": True},
    )
    assert json.loads(repr(config)) == {
        "level": "PIECEWISE",
        "cudagraph_mode": "FULL",
        "pass_config": {"enable_fusion": True},
        "cache_dir": "cache",
        "inductor_passes": {"mine": f"{__name__}.rewrite"},
        "inductor_compile_config": {"option": True},
    }


@given(config=config_strategies.compilations())
def test_text_read_back_is_the_config(config: CompilationConfig) -> None:
    assert CompilationConfig.from_json(repr(config)) == config


@pytest.mark.parametrize("text", ["", "[]", '{"level": 3, "level": 2}', '{"levle": 3}', "{1: 2}"])
def test_text_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        CompilationConfig.from_json(text)


def test_unknown_key_named_as_a_parameter_of_python_is_named():
    with pytest.raises(ConfigError, match="self"):
        CompilationConfig.from_json('{"self": 1}')

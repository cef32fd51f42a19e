"""What follows from options of compiling: level, backend, cuts, passes, ranges, cache."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import config_strategies
import pytest
from hypothesis import given

from graphrt import CUDAGraphMode
from graphrt.config import CompilationConfig, CompilePlan, Facts, Resolved, RuntimeConfig, resolve
from graphrt.config.unbuilt import misplaced_attention
from graphrt.errors import ConfigError, ConfigWarning

Case = tuple[RuntimeConfig, Facts, Resolved]
ATTENTION = ("llm::attention",)
CUDA = Facts(device="cuda", attention_ops=ATTENTION)
TWO = Facts(attention_ops=ATTENTION, tp_size=2)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("TORCH_COMPILE_DISABLE", "GRAPHRT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def resolved(facts: Facts | None = None, strict: bool = False, **asked: Any) -> Resolved:
    outer = {"max_num_batched_tokens": asked.pop("max_num_batched_tokens", 8192)}
    config = RuntimeConfig(compilation=CompilationConfig(**asked), **outer)
    return resolve(config, facts or Facts(attention_ops=ATTENTION), strict)


def plan(facts: Facts | None = None, **asked: Any) -> CompilePlan:
    return resolved(facts, **asked).compile


def changes(facts: Facts | None = None, **asked: Any) -> list[tuple[str, object, object]]:
    found = resolved(facts, **asked)
    again = resolve(found.config, facts or Facts(attention_ops=ATTENTION))
    assert (again.compile, again.adjustments) == (found.compile, ())
    return [item[:3] for item in found.adjustments]


def problems_of(facts: Facts | None = None, **asked: Any) -> dict[str, tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        resolved(facts, **asked)
    return {item.field: (item.found, item.accepted) for item in caught.value.problems}


# --- Level


@pytest.mark.parametrize(
    ("asked", "facts", "level"),
    [
        ({}, Facts(), 0),
        ({}, Facts(attention_ops=ATTENTION), 0),
        ({}, Facts(attention_ops=ATTENTION, has_break_points=False), 3),
        ({}, Facts(has_break_points=False), 0),
        ({"backend": "eager"}, Facts(), 0),
        ({"splitting_ops": ["a::b"]}, Facts(), 3),
        ({"splitting_ops": []}, Facts(), 0),
        ({"compile_sizes": [8]}, Facts(), 3),
        ({"compile_ranges_endpoints": [8]}, Facts(), 3),
        ({"inductor_passes": {"a": "b.c"}}, Facts(), 3),
        ({"pass_config": {"enable_fusion": True}}, Facts(), 3),
        ({"pass_config": {"enable_noop": False}}, Facts(), 0),
        ({"use_inductor_graph_partition": True}, CUDA, 3),
        ({"level": 2}, Facts(), 2),
    ],
)
def test_level_open_follows_from_what_is_asked(
    asked: dict[str, Any], facts: Facts, level: int
) -> None:
    found = resolved(facts, **asked)
    assert found.plan.level == found.compile.level == level


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    "asked",
    [
        {"splitting_ops": ["a::b"]},
        {"compile_sizes": [8]},
        {"compile_ranges_endpoints": [8]},
        {"inductor_passes": {"a": "b.c"}},
        {"pass_config": {"enable_attn_fusion": True}},
    ],
)
def test_option_of_level_3_at_another_is_refused(level: int, asked: dict[str, Any]) -> None:
    [(field, (found, accepted))] = problems_of(level=level, **asked).items()
    assert field.partition(".")[0] in asked
    assert f"at level {level}" in found
    assert accepted == "level 3"


def test_compile_disabled_in_the_environment_gives_level_0(
    environment: pytest.MonkeyPatch,
) -> None:
    facts = Facts(attention_ops=ATTENTION, has_break_points=False)
    environment.setenv("TORCH_COMPILE_DISABLE", "1")
    assert changes(facts)[0] == ("level", 3, 0)
    assert changes(level=0) == []
    assert set(problems_of(level=1)) == {"level"}
    assert "TORCH_COMPILE_DISABLE" in problems_of(splitting_ops=["a::b"])["splitting_ops"][0]
    environment.setenv("TORCH_COMPILE_DISABLE", "0")
    assert plan(level=1).level == 1


# --- Backend


@pytest.mark.parametrize(
    ("asked", "device", "backend"),
    [
        ({"level": 1}, "cuda", "eager"),
        ({"level": 2, "backend": "aot_eager"}, None, "aot_eager"),
        ({"level": 3}, None, "eager"),
        ({"level": 3}, "cpu", "eager"),
        ({"level": 3}, "simulated", "eager"),
        ({"level": 3}, "cuda", "inductor"),
        ({"level": 3, "use_inductor": True}, "cpu", "inductor"),
        ({"level": 3, "use_inductor": False}, "cuda", "eager"),
        ({"level": 3, "backend": "a.b"}, "cuda", "a.b"),
        ({"level": 0}, "cuda", ""),
    ],
)
def test_backend_left_empty_follows_from_the_device(
    asked: dict[str, Any], device: Any, backend: str
) -> None:
    assert plan(Facts(device=device, attention_ops=ATTENTION), **asked).backend == backend


@pytest.mark.parametrize(
    ("level", "asked", "effective"),
    [
        (0, {"backend": "inductor"}, ""),
        (0, {"guard_policy": "keep"}, "audit"),
        (0, {"dynamic_shapes": "backed"}, "auto"),
        (0, {"debug_dump_path": Path("dump")}, None),
        (0, {"cache_dir": Path("cache")}, None),
        (0, {"splitting_ops": ()}, None),
        (1, {"guard_policy": "keep"}, "audit"),
        (1, {"cache_dir": Path("cache")}, None),
        (3, {"cache_dir": Path("cache")}, None),
        (2, {"use_inductor": False}, None),
        (2, {"use_inductor": True}, None),
        (2, {"inductor_compile_config": {"max_autotune": True}}, {}),
        (3, {"inductor_compile_config": {"max_autotune": True}}, {}),
    ],
)
def test_option_that_nothing_reads_is_set_back_aloud(
    level: int, asked: dict[str, Any], effective: object
) -> None:
    [(field, value)] = asked.items()
    assert (field, value, effective) in changes(level=level, **asked)
    with pytest.raises(ConfigError, match=field):
        resolved(strict=True, level=level, cudagraph_mode="FULL_DECODE_ONLY", **asked)


def test_folder_of_a_cache_that_is_switched_off_is_set_back_aloud() -> None:
    asked = {"level": 3, "backend": "inductor", "compile_cache": False, "cache_dir": "here"}
    assert ("cache_dir", Path("here"), None) in changes(**asked)


def test_option_that_the_level_reads_stays() -> None:
    assert changes(level=2, guard_policy="keep", cudagraph_mode="FULL", backend="inductor") == []
    assert plan(level=2, dynamic_shapes="backed").dynamic_shapes == "backed"
    options = {"max_autotune": True}
    for level in (2, 3):
        found = plan(CUDA, level=level, backend="inductor", inductor_compile_config=options)
        assert found.inductor_compile_config == options


@pytest.mark.parametrize(
    ("asked", "device", "missing"),
    [
        ({"level": 2}, "cuda", "level 3, backend 'inductor'"),
        ({"level": 3, "backend": "eager"}, "cuda", "backend 'inductor'"),
        ({"level": 3, "backend": "inductor"}, "cpu", "a CUDA device"),
    ],
)
def test_partition_names_what_it_lacks(asked: dict[str, Any], device: Any, missing: str) -> None:
    facts = Facts(device=device, attention_ops=ATTENTION)
    problems = problems_of(facts, use_inductor_graph_partition=True, **asked)
    assert problems["use_inductor_graph_partition"][0] == f"True, without {missing}"


# --- Where it is cut


def test_cut_by_default_is_at_attention() -> None:
    found = plan(level=3)
    assert found.splitting_ops == ATTENTION
    assert found.attention_is_split
    assert not plan(level=2).attention_is_split


@pytest.mark.parametrize(
    ("ops", "is_split"),
    [
        (["llm.attention"], True),
        (["llm::attention.default"], True),
        (["llm::attention.out"], False),
        (["llm::other"], False),
    ],
)
def test_attention_is_found_however_it_is_spelled(ops: list[str], is_split: bool) -> None:
    assert plan(splitting_ops=ops).attention_is_split is is_split


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_no_cut_makes_the_graph_full(mode: str) -> None:
    asked: dict[str, Any] = {"level": 3, "splitting_ops": [], "cudagraph_mode": mode}
    assert changes(**asked) == [("cudagraph_mode", CUDAGraphMode[mode], CUDAGraphMode.FULL)]
    with pytest.raises(ConfigError, match="cudagraph_mode"):
        resolved(strict=True, **asked)
    never = Facts(attention_ops=ATTENTION, attention_support="NEVER")  # type: ignore[arg-type]
    assert set(problems_of(never, **asked)) == {"cudagraph_mode"}


@pytest.mark.parametrize("level", [1, 2])
def test_levels_1_and_2_have_no_piecewise_graphs(level: int) -> None:
    assert changes(level=level, cudagraph_mode="PIECEWISE") == [
        ("cudagraph_mode", CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)
    ]
    assert changes(level=level, cudagraph_mode="FULL") == []


# --- Passes


@pytest.mark.parametrize("flag", ["enable_attn_fusion", "enable_sequence_parallelism"])
def test_pass_across_attention_needs_it_inside(flag: str) -> None:
    asked: dict[str, Any] = {"pass_config": {flag: True}, "compile_sizes": [8]}
    found = changes(TWO, **asked)
    assert found[0] == ("splitting_ops", None, ())
    assert found[1][0] == "cudagraph_mode"
    problems = problems_of(TWO, splitting_ops=["llm.attention", "a::b"], **asked)
    assert "['llm.attention']" in problems["splitting_ops"][0]
    assert plan(TWO, splitting_ops=["a::b"], **asked).splitting_ops == ("a::b",)
    cuda = Facts(device="cuda", attention_ops=ATTENTION, tp_size=2)
    assert plan(cuda, use_inductor_graph_partition=True, **asked).splitting_ops == ATTENTION


@pytest.mark.parametrize(
    "flag", ["enable_sequence_parallelism", "enable_async_tp", "enable_fi_allreduce_fusion"]
)
def test_pass_between_ranks_is_off_for_one_rank(flag: str) -> None:
    asked = {"enable_sequence_parallelism": True, flag: True}
    assert (f"pass_config.{flag}", True, False) in changes(pass_config=asked)
    assert not getattr(plan(pass_config=asked).pass_config, flag)


def test_sequence_parallelism_needs_a_size_that_ranks_share() -> None:
    asked: dict[str, Any] = {"pass_config": {"enable_sequence_parallelism": True}}
    sizes = {"cudagraph_capture_sizes": [2, 4, 7], "max_num_batched_tokens": 64}
    assert "tp_size = 2" in problems_of(TWO, **asked, **sizes)["compile_sizes"][1]
    assert "compile_sizes" in problems_of(TWO, compile_sizes=[63], **asked, **sizes)
    found = resolved(TWO, compile_sizes="cudagraph_capture_sizes", **asked, **sizes)
    assert found.compile.sizes == (2, 4)


def test_sequence_parallelism_drops_sizes_ranks_cannot_share() -> None:
    asked: dict[str, Any] = {
        "pass_config": {"enable_sequence_parallelism": True},
        "compile_sizes": [4],
        "cudagraph_mode": "FULL",
    }
    found = changes(TWO, cudagraph_capture_sizes=[1, 2, 4, 15], **asked)
    assert found[-1] == ("cudagraph_capture_sizes", (1, 2, 4, 15), (2, 4))
    sizes = resolved(TWO, **asked).plan.capture_sizes
    assert sizes[:4] == (2, 4, 8, 16)
    asked["cudagraph_mode"] = "FULL_DECODE_ONLY"
    config = RuntimeConfig(compilation=CompilationConfig(**asked), num_speculative_tokens=2)
    assert resolve(config, TWO).plan.decode_capture_sizes[:3] == (6, 12, 24)
    assert "cudagraph_capture_sizes" in problems_of(TWO, cudagraph_capture_sizes=[1, 3], **asked)
    assert "max_cudagraph_capture_size" in problems_of(TWO, max_cudagraph_capture_size=1, **asked)


def test_passes_need_a_backend_that_has_them() -> None:
    asked: dict[str, Any] = {
        "inductor_passes": {"a": "b.c"},
        "pass_config": {"enable_fusion": True},
    }
    problems = problems_of(backend="a.b", **asked)
    assert set(problems) == {"inductor_passes", "pass_config.enable_fusion"}
    assert plan(backend="eager", **asked).pass_config.enable_fusion


def test_async_tp_needs_cuda() -> None:
    passes = {"enable_async_tp": True, "enable_sequence_parallelism": True}
    problems = problems_of(TWO, pass_config=passes, compile_sizes=[8])
    assert set(problems) == {"pass_config.enable_async_tp"}


# --- Ranges, sizes, cache


def test_ranges_end_at_the_largest_batch() -> None:
    assert plan(level=3).ranges == ((1, 8192),)
    assert plan(compile_ranges_endpoints=[32, 8]).ranges == ((1, 8), (9, 32), (33, 8192))
    assert plan(compile_ranges_endpoints=[8192]).ranges == ((1, 8192),)
    assert plan(level=2).ranges == ()
    dropped = changes(compile_ranges_endpoints=[8, 9000])
    assert dropped == [("compile_ranges_endpoints", (8, 9000), (8,))]
    assert changes(compile_ranges_endpoints=[9000]) == [("compile_ranges_endpoints", (9000,), ())]


@pytest.mark.parametrize(("limit", "ends"), [(64, [64, 8192]), (9000, [8192])])
def test_limit_of_a_pass_ends_a_range(limit: int, ends: list[int]) -> None:
    passes = {"enable_fi_allreduce_fusion": True, "fi_allreduce_fusion_max_token_num": limit}
    assert [end for _, end in plan(TWO, pass_config=passes).ranges] == ends
    assert changes(TWO, pass_config=passes) == []
    passes["enable_fi_allreduce_fusion"] = False
    assert len(plan(TWO, level=3, pass_config=passes).ranges) == 1


@given(case=config_strategies.compile_resolutions())
def test_ranges_ascend_without_holes(case: Case) -> None:
    config, _, found = case
    ranges = found.compile.ranges
    assert bool(ranges) == (found.compile.level == 3)
    if ranges:
        assert (ranges[0][0], ranges[-1][1]) == (1, config.max_num_batched_tokens)
    for (_, last), (first, _) in pairwise(ranges):
        assert first - 1 == last


@given(case=config_strategies.compile_resolutions())
def test_plan_says_what_the_compiler_may_rely_on(case: Case) -> None:
    _, _, found = case
    compiled = found.compile
    assert (compiled.backend == "") == (compiled.level == 0)
    assert (compiled.cache_dir is None) == (compiled.level == 0 or not compiled.compile_cache)
    assert compiled.sizes == found.plan.compile_sizes
    assert compiled.splitting_ops == found.plan.splitting_ops
    assert compiled.level == 3 or not (compiled.sizes or compiled.splitting_ops)
    assert pickle.loads(pickle.dumps(compiled)) == compiled


def test_sizes_compiled_need_no_graphs() -> None:
    asked: dict[str, Any] = {"cudagraph_mode": "NONE", "compile_sizes": [3, 5, 7]}
    assert plan(**asked).sizes == (3, 5, 7)


def test_cache_folder_is_the_first_one_named(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HOME", "/someone")
    assert plan(level=3).cache_dir == Path("/someone/.cache/graphrt")
    environment.setenv("XDG_CACHE_HOME", "/user")
    assert plan(level=3).cache_dir == Path("/user/graphrt")
    environment.setenv("GRAPHRT_CACHE_DIR", "/own")
    assert plan(level=3).cache_dir == Path("/own")
    mine = plan(level=3, backend="inductor", cache_dir="/mine")
    assert mine.cache_dir == Path("/mine")
    assert plan(level=3, compile_cache=False).cache_dir is None
    assert plan(level=0).cache_dir is None


def test_cache_folder_that_nobody_names_is_asked_for(
    environment: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("no home")

    environment.setattr("pathlib.Path.home", nowhere)
    assert set(problems_of(level=3, backend="inductor")) == {"cache_dir"}
    assert plan(level=3, backend="inductor", compile_cache=False).cache_dir is None
    assert plan(level=3, backend="eager").cache_dir is None


# --- The rest


def test_inputs_are_copied_for_piecewise_graphs_only() -> None:
    assert changes(cudagraph_copy_inputs=True) == []
    found = changes(cudagraph_copy_inputs=True, cudagraph_mode="FULL")
    assert found == [("cudagraph_copy_inputs", True, False)]


def test_no_warmup_on_cuda_is_warned_of_at_the_caller() -> None:
    with pytest.warns(ConfigWarning, match="num_of_warmups") as caught:
        resolve(RuntimeConfig(compilation=CompilationConfig(cudagraph_num_of_warmups=0)), CUDA)
    assert [item.filename for item in caught] == [__file__]
    resolved(cudagraph_num_of_warmups=0)
    resolved(CUDA, cudagraph_num_of_warmups=0, cudagraph_mode="NONE")


def rewrite(graph: Any) -> None:
    graph.nodes.reverse()


def test_hash_of_a_plan_has_what_changes_code() -> None:
    one = plan(level=3)
    same: list[dict[str, Any]] = [
        {"compile_sizes": [8]},
        {"compile_ranges_endpoints": [8]},
        {"cache_dir": "here"},
        {"guard_policy": "keep"},
        {"splitting_ops": ATTENTION},
        {"backend": "eager"},
        {"use_inductor": False},
    ]
    for asked in same:
        assert plan(**{"level": 3, **asked}).compute_hash() == one.compute_hash()
    other: list[dict[str, Any]] = [
        {"level": 2},
        {"backend": "inductor"},
        {"splitting_ops": ["a::b"]},
        {"dynamic_shapes": "backed"},
        {"custom_ops": "none"},
        {"inductor_passes": {"a": rewrite}},
        {"pass_config": {"enable_noop": False}},
        {"use_inductor": True, "inductor_compile_config": {"max_autotune": True}},
    ]
    hashes = {plan(**{"level": 3, **asked}).compute_hash() for asked in [{}, *other]}
    assert len(hashes) == 1 + len(other)


def test_pass_without_text_of_its_own_is_not_hashable() -> None:
    number = 3

    def bound(graph: Any) -> int:
        return number

    passes: dict[str, Any] = {"fine": rewrite, "text": "a.b", "bound": bound, "built in": print}
    passes["one"], passes["two"] = (lambda graph: 1), (lambda graph: 2)
    passes["alone"] = lambda graph: 1
    passes["default"] = lambda graph, number=number: number
    found = plan(inductor_passes=passes).unhashable_passes
    assert set(found) == {"bound", "built in", "one", "two", "default"}
    assert plan(level=3).unhashable_passes == ()
    hook = {"hook": bound, "option": [1]}
    found = plan(level=3, use_inductor=True, inductor_compile_config=hook).unhashable_passes
    assert found == ("hook",)


# --- What a runtime refuses


@pytest.mark.parametrize(
    ("asked", "is_refused"),
    [
        ({"level": 0}, False),
        ({"level": 2}, False),
        ({"level": 2, "backend": "inductor"}, True),
        ({"level": 3, "backend": "inductor"}, False),
        ({"level": 3, "backend": "inductor", "splitting_ops": []}, True),
        ({"level": 3, "backend": "a.b", "splitting_ops": ["a::b"]}, True),
        ({"level": 3, "splitting_ops": []}, False),
        ({"level": 3, "pass_config": {"enable_attn_fusion": True}}, True),
        ({"level": 3, "use_inductor_graph_partition": True}, True),
    ],
)
def test_attention_inside_compiled_code_must_write_its_cache(
    asked: dict[str, Any], is_refused: bool
) -> None:
    facts = Facts(attention_ops=ATTENTION, device="cuda")
    if "backend" not in asked and "use_inductor_graph_partition" not in asked:
        asked = {**asked, "backend": "eager"} if asked["level"] else asked

    def refused(facts: Facts) -> bool:
        problems = misplaced_attention(plan(facts, **asked))
        by_inductor = "use_inductor_graph_partition" in asked
        name = "use_inductor_graph_partition" if by_inductor else "splitting_ops"
        return [item.field for item in problems] == [f"compilation.{name}"]

    assert refused(facts) is is_refused
    assert not refused(replace(facts, attention_writes_cache=True))
    assert not refused(replace(facts, attention_ops=()))

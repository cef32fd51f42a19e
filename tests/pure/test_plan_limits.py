"""A plan says which sizes it does not serve as asked, and refuses tables that fill memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, strategies as st

from graphrt import BucketDispatcher, CUDAGraphDispatcher, Reason, RuntimeMode
from graphrt.config import CompilationConfig, Facts, Resolved, RuntimeConfig, resolve
from graphrt.errors import ConfigError, TraceError
from graphrt.planner import generate_azure_like

SIZES = "cudagraph_capture_sizes"


def resolved(sizes: list[int] | None, mode: str = "FULL_AND_PIECEWISE", **asked: Any) -> Resolved:
    compilation = {"cudagraph_mode": mode, SIZES: sizes}
    if "maximum" in asked:
        compilation["max_cudagraph_capture_size"] = asked.pop("maximum")
    config = RuntimeConfig(compilation=CompilationConfig(**compilation), **asked)
    return resolve(config, Facts())


# --- sizes that are not served as asked


@pytest.mark.parametrize(
    ("sizes", "mode", "asked", "decode"),
    [
        ([12], "FULL_DECODE_ONLY", {"max_num_seqs": 7}, ()),
        ([16, 32], "FULL_AND_PIECEWISE", {"max_num_seqs": 4}, ()),
        ([4, 16], "FULL_DECODE_ONLY", {"max_num_seqs": 4}, (4,)),
        ([4, 16], "FULL_AND_PIECEWISE", {"max_num_seqs": 6}, (4,)),
        ([1, 2, 4, 8], "FULL_AND_PIECEWISE", {"max_num_seqs": 4, "num_speculative_tokens": 2}, 0),
        ([3, 8], "FULL_DECODE_ONLY", {"max_num_seqs": 4, "num_speculative_tokens": 2}, (3, 6)),
        ([1, 2], "FULL_AND_PIECEWISE", {"num_speculative_tokens": 2}, ()),
        (None, "FULL_DECODE_ONLY", {"maximum": 2, "num_speculative_tokens": 2}, ()),
    ],
)
def test_decode_sizes_not_as_asked_are_an_adjustment(
    sizes: list[int] | None, mode: str, asked: dict[str, Any], decode: Any
) -> None:
    found = resolved(sizes, mode, **asked)
    decode = decode if decode != 0 else (3, 6)
    (item,) = found.adjustments
    given = asked.get("maximum") if sizes is None else tuple(sizes)
    assert item[:3] == ("decode_capture_sizes", given, decode)
    assert found.plan.decode_capture_sizes == decode
    with pytest.raises(ConfigError) as caught:
        resolve(found.config, Facts(), strict=True)
    assert [problem.field for problem in caught.value.problems] == ["decode_capture_sizes"]


@pytest.mark.parametrize(
    ("sizes", "mode", "asked"),
    [
        ([1, 2, 4, 256, 512], "FULL_AND_PIECEWISE", {"max_num_seqs": 256}),
        ([1, 2, 4, 8], "FULL_DECODE_ONLY", {"max_num_seqs": 8}),
        ([3, 6, 8], "FULL_AND_PIECEWISE", {"max_num_seqs": 2, "num_speculative_tokens": 2}),
        ([1, 2, 4, 8], "FULL", {"max_num_seqs": 2}),
        ([1, 2, 4, 8], "PIECEWISE", {"max_num_seqs": 2}),
        (None, "FULL_AND_PIECEWISE", {"num_speculative_tokens": 2}),
    ],
)
def test_sizes_served_as_asked_need_no_adjustment(
    sizes: list[int] | None, mode: str, asked: dict[str, Any]
) -> None:
    found = resolved(sizes, mode, **asked)
    assert found.adjustments == ()
    assert resolve(found.config, Facts(), strict=True) == found


@given(
    sizes=st.sets(st.integers(1, 40), min_size=1, max_size=5),
    mode=st.sampled_from(["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
    seqs=st.integers(1, 12),
    speculative=st.integers(0, 3),
)
def test_size_without_its_key_is_said(
    sizes: set[int], mode: str, seqs: int, speculative: int
) -> None:
    found = resolved(sorted(sizes), mode, max_num_seqs=seqs, num_speculative_tokens=speculative)
    keys = found.plan.keys
    served = {key.num_tokens for listed in keys.values() for key in listed}
    is_as_asked = served == sizes and bool(keys[RuntimeMode.FULL])
    assert found.adjustments or is_as_asked
    # What a decode batch would have got, had its size been rounded up to a listed one.
    q, top = 1 + speculative, max(sizes)
    reachable = [n for n in range(q, q * seqs + 1, q) if n <= top]
    dispatcher = CUDAGraphDispatcher(found.plan)
    eager = [n for n in reachable if dispatcher.dispatch(n, uniform=True)[0] < RuntimeMode.FULL]
    assert found.adjustments or not eager


@pytest.mark.parametrize(
    ("compilation", "asked", "adjusted"),
    [
        ({"max_cudagraph_capture_size": 12}, {}, ("max_cudagraph_capture_size", 12, 8)),
        (
            {"max_cudagraph_capture_size": 26, "cudagraph_mode": "PIECEWISE"},
            {"num_speculative_tokens": 12},
            ("max_cudagraph_capture_size", 26, 24),
        ),
        ({SIZES: [4, 8]}, {"interactivity": True}, ("interactivity", True, False)),
        ({"cudagraph_mode": "NONE"}, {"interactivity": True}, ("interactivity", True, False)),
        (
            {"cudagraph_mode": "NONE", "compile_sizes": SIZES, "backend": "eager"},
            {},
            ("compile_sizes", (SIZES,), ()),
        ),
        (
            {"cudagraph_mode": "NONE", "compile_sizes": [7, SIZES], "level": 3},
            {},
            ("compile_sizes", (7, SIZES), (7,)),
        ),
        (
            {"level": 3, "backend": "eager", "use_inductor": True},
            {},
            ("use_inductor", True, None),
        ),
        (
            {"level": 3, "backend": "mine.compile", "use_inductor": True},
            {},
            ("use_inductor", True, None),
        ),
    ],
)
def test_wish_that_comes_to_nothing_is_an_adjustment(
    compilation: dict[str, Any], asked: dict[str, Any], adjusted: tuple[object, ...]
) -> None:
    config, facts = RuntimeConfig(compilation=compilation, **asked), Facts(device="cpu")
    found = resolve(config, facts)
    assert [item[:3] for item in found.adjustments] == [adjusted]
    again = resolve(found.config, facts, strict=True)
    assert (again.plan, again.compile, again.adjustments) == (found.plan, found.compile, ())
    with pytest.raises(ConfigError) as caught:
        resolve(config, facts, strict=True)
    assert [problem.field for problem in caught.value.problems] == [adjusted[0]]


@pytest.mark.parametrize(
    ("compilation", "asked"),
    [
        ({"max_cudagraph_capture_size": 24}, {}),
        # Decode batches of two requests have as many tokens.
        ({"max_cudagraph_capture_size": 26}, {"num_speculative_tokens": 12}),
        ({"max_cudagraph_capture_size": 12}, {"interactivity": True}),
        ({"level": 3, "backend": "inductor", "use_inductor": True}, {}),
        ({"level": 3, "backend": "eager", "use_inductor": False}, {}),
        ({"level": 3, "compile_sizes": SIZES}, {}),
    ],
)
def test_wish_that_is_met_is_no_adjustment(
    compilation: dict[str, Any], asked: dict[str, Any]
) -> None:
    config = RuntimeConfig(compilation=compilation, **asked)
    assert resolve(config, Facts(device="cpu"), strict=True).adjustments == ()


# --- limits

MANY = [f"{sign}rule{number}" for number in range(2**15) for sign in "+-"]
KEYS: dict[str, Any] = dict.fromkeys(map("key{}".format, range(10**5)), 1)
HUGE: list[dict[str, Any]] = [
    KEYS,
    {"compilation": KEYS},
    {"compilation": {"pass_config": KEYS}},
    {"ubatch": KEYS},
    {"compilation": {"custom_ops": MANY}},
    {"compilation": {"custom_ops": ",".join([*MANY, "+more"])}},
    {"compilation": {"custom_ops": "x" * 10**6}},
    {"max_loras": 10**8},
    {"max_num_batched_tokens": 10**12},
    {"max_num_seqs": 10**9},
    {"num_speculative_tokens": 10**9},
    {"max_num_seqs": 10**5000},
    {"compilation": {SIZES: [1, 900_000_000_000]}},
    {"compilation": {SIZES: [10**5000]}},
    {"compilation": {"max_cudagraph_capture_size": 9 * 10**11}, "max_num_batched_tokens": 2**20},
    {"compilation": {SIZES: [1] * (2**16 + 1)}},
    {"compilation": {SIZES: [-1] * 2**16}},
    {"compilation": {"compile_sizes": [1] * (2**16 + 1)}},
    {"compilation": {"compile_sizes": [10**9]}},
    {"compilation": {"cudagraph_num_of_warmups": 10**9}},
    {"compilation": {SIZES: [2**20]}, "max_num_batched_tokens": 2**20, "max_loras": 1024},
    {
        "compilation": {SIZES: list(range(1, 2**14))},
        "max_num_batched_tokens": 2**14,
        "max_loras": 16,
        "lora_capture": "each",
    },
]


def refused(asked: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(RuntimeConfig(**asked), Facts())
    assert caught.value.problems
    return str(caught.value)


@pytest.mark.parametrize("asked", HUGE, ids=range(len(HUGE)))
def test_number_that_would_fill_memory_is_refused(asked: dict[str, Any]) -> None:
    assert len(refused(asked)) < 20_000


LIMITED = """
import resource, sys
import graphrt, graphrt.config, graphrt.dispatch, graphrt.planner
from test_plan_limits import HUGE, refused
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, in_use + 2**30))
for asked in HUGE:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    refused(asked)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 2, asked
print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits and sizes of a process are Linux's")
def test_wrong_plans_need_neither_memory_nor_time() -> None:
    assert resource.RLIMIT_AS
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        cwd=__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "refused\n", done.stderr


def test_largest_plan_that_is_accepted_is_made_at_once() -> None:
    asked = {"compilation": {SIZES: [4095]}, "max_loras": 1023, "lora_capture": "max_only"}
    plan = resolve(RuntimeConfig(**asked), Facts()).plan
    missing = dict.fromkeys(plan.capture_order, Reason.NOT_CAPTURED_YET)
    dispatcher = CUDAGraphDispatcher(plan, missing)
    decision = dispatcher.dispatch(7, num_active_loras=3)
    assert (decision.reason, decision.descriptor.num_tokens) == (Reason.NOT_CAPTURED_YET, 7)
    assert dispatcher.dispatch(7, num_active_loras=3) is decision


def test_bucket_axes_with_too_many_keys_are_refused() -> None:
    assert len(BucketDispatcher({"a": range(1, 257), "b": range(1, 257)}).keys) == 2**16
    with pytest.raises(ConfigError):
        BucketDispatcher({name: range(1, 10_000) for name in "abcd"})


@pytest.mark.parametrize("number", [10**12, 0, -1, 1.5, True, "8", float("nan")])
def test_number_of_generated_requests_that_does_not_fit_is_refused(number: Any) -> None:
    with pytest.raises(TraceError):
        generate_azure_like(number, seed=0)


def test_facts_with_too_many_attention_groups_are_refused() -> None:
    with pytest.raises(ConfigError):
        Facts(attention_groups=dict.fromkeys(KEYS, "ALWAYS"))


def test_error_of_many_problems_shows_the_first_ones() -> None:
    text = refused({"compilation": {SIZES: [-1] * 1000}})
    assert "and 950 more" in text
    assert json.dumps(text)

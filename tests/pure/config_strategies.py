"""Random options and facts that a user could write down, for the tests of plan and dispatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import reject, strategies as st

from graphrt.batch import CUDAGraphMode
from graphrt.config import (
    AttentionSupport,
    CompilationConfig,
    Facts,
    ModeLimit,
    PassConfig,
    Resolved,
    RuntimeConfig,
    resolve,
)
from graphrt.errors import ConfigError

modes = st.sampled_from(CUDAGraphMode)
supports = st.sampled_from(AttentionSupport)
limits = st.lists(st.builds(ModeLimit, mode=modes, reason=st.just("a library")), max_size=2)

facts = st.builds(
    Facts,
    attention_support=supports,
    has_break_points=st.booleans(),
    splitting=st.sampled_from(["attention", "other", "none"]),
    attention_ops=st.sampled_from([(), ("llm::attention",)]),
    piecewise_available=st.none() | st.booleans(),
    mode_limits=limits,
    compute_capability=st.sampled_from([None, (9, 0), (10, 3)]),
)


@st.composite
def configs(draw: st.DrawFn) -> RuntimeConfig:
    sizes = draw(st.none() | st.lists(st.integers(1, 80), min_size=1, max_size=8))
    batch_limit = draw(st.integers(1, 100) | st.sampled_from([512, 8192]))
    maximum = None
    if sizes is None:
        maximum = draw(st.none() | st.integers(1, 600))
    elif min(sizes) > batch_limit:
        sizes = [batch_limit]
    return RuntimeConfig(
        compilation=CompilationConfig(
            level=draw(st.sampled_from([None, 0, 3])),
            cudagraph_mode=draw(st.none() | modes),
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=maximum,
            cudagraph_specialize_lora=draw(st.booleans()),
        ),
        max_num_seqs=draw(st.integers(1, 40) | st.just(256)),
        max_num_batched_tokens=batch_limit,
        num_speculative_tokens=draw(st.integers(0, 4)),
        max_loras=draw(st.integers(0, 5)),
        lora_capture=draw(st.sampled_from(["each", "powers_of_two", "max_only"])),
        interactivity=draw(st.booleans()),
    )


@st.composite
def resolutions(draw: st.DrawFn) -> tuple[RuntimeConfig, Facts, Resolved]:
    """A config and facts that resolve, and what they resolve to."""
    asked, found = draw(configs()), draw(facts)
    try:
        return asked, found, resolve(asked, found)
    except ConfigError:
        reject()


# --- Options of compiling. None of them warns: warnings are errors in tests.

OPS = ("llm::attention", "llm.attention", "llm::attention.default", "llm::cache", "torch.nn.relu")

pass_configs = st.builds(
    PassConfig,
    enable_fusion=st.booleans(),
    enable_attn_fusion=st.booleans(),
    enable_sequence_parallelism=st.just(True),
    enable_async_tp=st.booleans(),
    enable_fi_allreduce_fusion=st.booleans(),
    fi_allreduce_fusion_max_token_num=st.integers(1, 100),
) | st.builds(PassConfig, enable_noop=st.booleans(), self_check=st.booleans())

compile_facts = st.builds(
    Facts,
    attention_support=supports,
    has_break_points=st.booleans(),
    attention_ops=st.sampled_from([(), ("llm::attention",)]),
    device=st.sampled_from([None, "cuda", "cpu"]),
    tp_size=st.sampled_from([1, 2]),
)


@st.composite
def compilations(draw: st.DrawFn) -> CompilationConfig:
    """Options as they are written down; what contradicts itself is not drawn."""
    options: dict[str, Any] = {
        "backend": st.sampled_from(["", "eager", "inductor", "mine.compile"]),
        "custom_ops": st.sampled_from(["none,+norm", "all", "-norm", ""]),
        "splitting_ops": st.lists(st.sampled_from(OPS), max_size=3),
        "use_inductor": st.just(True),
        "compile_sizes": st.lists(st.sampled_from([2, 16, 64]), min_size=1, max_size=2),
        "compile_ranges_endpoints": st.lists(st.integers(1, 600), max_size=3),
        "dynamic_shapes": st.sampled_from(["auto", "unbacked", "backed"]),
        "guard_policy": st.sampled_from(["audit", "keep"]),
        "use_inductor_graph_partition": st.booleans(),
        "inductor_compile_config": st.dictionaries(
            st.sampled_from(["max_autotune", "combo_kernels"]), st.booleans() | st.integers()
        ),
        "inductor_passes": st.dictionaries(st.sampled_from(["a", "b"]), st.just("mine.rewrite")),
        "pass_config": pass_configs,
        "cache_dir": st.sampled_from(["cache", ""]),
        "compile_cache": st.booleans(),
        "debug_dump_path": st.sampled_from(["dump", ""]),
        "cudagraph_mode": modes,
        "cudagraph_capture_sizes": st.just([1, 2, 4, 15, 16, 64]),
        "cudagraph_copy_inputs": st.booleans(),
    }
    level = draw(st.sampled_from([None, 0, 1, 2, 3, 3]))
    asked = {name: draw(options[name]) for name in draw(st.sets(st.sampled_from(sorted(options))))}
    return CompilationConfig(level=level, **asked)


@st.composite
def compile_resolutions(draw: st.DrawFn) -> tuple[RuntimeConfig, Facts, Resolved]:
    """As ``resolutions``, with options of compiling."""
    outer = draw(configs())
    asked = replace(outer, compilation=draw(compilations()), max_num_batched_tokens=512)
    found = draw(compile_facts)
    try:
        return asked, found, resolve(asked, found)
    except ConfigError:
        reject()

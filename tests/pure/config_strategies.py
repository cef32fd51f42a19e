"""Random options and facts that a user could write down, for the tests of plan and dispatch."""

from __future__ import annotations

from hypothesis import reject, strategies as st

from graphrt.batch import CUDAGraphMode
from graphrt.config import (
    AttentionSupport,
    CompilationConfig,
    Facts,
    ModeLimit,
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

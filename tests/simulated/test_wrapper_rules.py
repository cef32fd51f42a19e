"""The published rules of the wrapper, one by one, and what this wrapper adds."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    ForwardContext,
    break_point,
)
from graphrt.errors import (
    BreakError,
    CaptureOutsideScopeError,
    ConfigError,
    ContextError,
)
from lab import FULL, KEY, NONE, PIECEWISE, Lab


class Counting:
    """``x * 2 + 1``, counting its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2 + 1


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_w1_single_policies_become_runtime_modes(lab: Lab, mode: CUDAGraphMode) -> None:
    assert CUDAGraphWrapper(abs, lab.library, mode).runtime_mode is mode.mixed_mode()


@pytest.mark.parametrize(
    "mode",
    [NONE, CUDAGraphMode.NONE, CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY],
)
def test_w1_no_graph_and_pairs_are_refused(lab: Lab, mode: object) -> None:
    with pytest.raises(ConfigError):
        CUDAGraphWrapper(abs, lab.library, mode)  # type: ignore[arg-type]


def test_w2_matching_mode_without_key_is_refused(lab: Lab) -> None:
    with pytest.raises(ContextError):
        lab.step(lab.wrap(abs), torch.ones(1), key=None)
    with lab.library.capture_scope() as scope, pytest.raises(ContextError):
        lab.step(lab.wrap(abs), torch.ones(1), key=None)
    assert not scope.programs


def test_w3_runnable_without_matching_mode_runs_alone(lab: Lab) -> None:
    fn = Counting()
    wrapper = lab.wrap(fn)
    assert wrapper(torch.ones(1)).item() == 3
    assert lab.step(wrapper, torch.ones(1), mode=NONE).item() == 3
    assert lab.step(wrapper, torch.ones(1), mode=PIECEWISE).item() == 3
    assert fn.calls == 3
    assert not wrapper.concrete_cudagraph_entries
    assert not lab.events


def test_w4_nested_wrapper_in_the_other_mode_passes_through(lab: Lab) -> None:
    x = torch.ones(4)
    inner = lab.wrap(Counting(), PIECEWISE, name="inner")
    outer = lab.wrap(inner, FULL, name="outer")
    report = lab.capture_all(lab.job(outer, x), *[lab.job(inner, x)], warmups=0)
    assert [(p.owner, p.mode) for p in report.programs] == [("outer", FULL), ("inner", PIECEWISE)]
    for mode in (FULL, PIECEWISE):
        assert torch.equal(lab.step(outer, x, mode=mode), x * 2 + 1)


def test_w4_matching_wrapper_in_eager_segment_is_refused(lab: Lab) -> None:
    inner = lab.wrap(Counting(), PIECEWISE, name="inner")
    eager = break_point(lambda x: inner(x))
    outer = lab.wrap(lambda x: eager(x + 1) * 10, PIECEWISE, name="outer")
    with pytest.raises(BreakError):
        lab.capture(outer, torch.ones(4))
    assert not outer.concrete_cudagraph_entries


def test_w5_unseen_key_outside_a_scope_names_neighbours(lab: Lab) -> None:
    wrapper = lab.wrap(Counting(), name="decoder")
    lab.capture(wrapper, torch.ones(4))
    with pytest.raises(CaptureOutsideScopeError) as caught:
        lab.step(wrapper, torch.ones(4), key=BatchDescriptor(7))
    assert caught.value.owner == "decoder"
    assert "num_tokens=7" in caught.value.key
    assert "num_tokens=8" in caught.value.expected


def test_w7_capturing_call_runs_no_kernel(lab: Lab) -> None:
    wrapper, x = lab.wrap(Counting()), torch.ones(4)
    with lab.library.capture_scope() as scope, scope.step(FULL, KEY):
        captured = wrapper(x).clone()
    assert not torch.equal(captured, x * 2 + 1)


def test_w8_known_key_replays_without_the_runnable(lab: Lab) -> None:
    fn = Counting()
    wrapper, x = lab.wrap(fn), torch.ones(4)
    program = lab.capture(wrapper, x)
    calls = fn.calls
    for value in (1.0, 5.0):
        x.fill_(value)
        assert lab.step(wrapper, x) is program.outputs
        assert torch.equal(program.outputs, x * 2 + 1)
    assert fn.calls == calls


def test_w9_outputs_are_aliases_except_what_was_handed_through(lab: Lab) -> None:
    wrapper, x = lab.wrap(lambda x: (x, x + 1)), torch.ones(4)
    program = lab.capture(wrapper, x)
    handed_through, computed = program.outputs
    assert handed_through is x
    assert lab.device.owns(computed)
    [generation] = lab.library.generations
    assert not generation.pool.live_blocks()


def test_w10_weak_outputs_let_later_captures_reuse_their_bytes(lab: Lab) -> None:
    x = torch.ones(4)
    weak = [lab.capture(lab.wrap(Counting()), x).outputs.data_ptr() for _ in range(2)]
    assert weak[0] == weak[1]
    strong = CUDAGraphOptions(weak_ref_output=False)
    kept = [
        lab.capture(lab.wrap(Counting(), cudagraph_options=strong), x).outputs.data_ptr()
        for _ in range(2)
    ]
    assert kept[0] != kept[1]


def test_w11_unknown_attributes_come_from_the_runnable(lab: Lab) -> None:
    wrapper = lab.wrap(torch.nn.Linear(3, 5))
    assert wrapper.out_features == 5
    with pytest.raises(AttributeError, match=r"Linear.*'nowhere'"):
        _ = wrapper.nowhere
    wrapper.out_features = 7
    assert wrapper.runnable.out_features == 5


def test_w11_wrapper_without_init_raises_and_does_not_recurse(lab: Lab) -> None:
    empty = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
    with pytest.raises(AttributeError):
        _ = empty.anything
    copied = copy.copy(lab.wrap(Counting()))
    assert copied.unwrap().calls == 0
    with pytest.raises(ConfigError, match="a copy of a GraphLibrary"):
        pickle.dumps(lab.wrap(Counting()))


def test_w12_unwrap_goes_one_level_or_all(lab: Lab) -> None:
    fn = Counting()
    inner = lab.wrap(fn, PIECEWISE)
    outer = lab.wrap(inner, FULL)
    assert outer.unwrap() is inner
    assert outer.unwrap(deep=True) is fn


def test_w14_programs_of_a_generation_share_one_pool(lab: Lab) -> None:
    wrapper = lab.wrap(Counting())
    handle = wrapper.graph_pool
    for tokens in (8, 4):
        lab.capture(wrapper, torch.ones(tokens), key=BatchDescriptor(tokens))
    [generation] = lab.library.generations
    assert handle == generation.pool.handle == wrapper.graph_pool


def test_w14_pool_handle_may_be_given() -> None:
    with Lab() as first, Lab(first.device, pool=first.library.graph_pool) as second:
        assert second.library.graph_pool == first.library.graph_pool


def test_w15_counter_counts_pieces_times_sizes_and_never_falls(lab: Lab) -> None:
    eager = break_point(lambda x: x + 1)
    wrapper = lab.wrap(lambda x: eager(eager(x * 2) * 2) * 2, PIECEWISE)
    for tokens in (8, 4, 2):
        lab.capture(wrapper, torch.ones(tokens), key=BatchDescriptor(tokens))
    assert lab.library.num_cudagraph_captured == 3 * 3
    lab.library.retire()
    assert lab.library.num_cudagraph_captured == 9
    assert lab.library.num_graphs == 0


def test_w16_entry_appears_after_success_and_is_read_only(lab: Lab) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    wrapper = lab.wrap(fails)
    with pytest.raises(Exception, match="item"):
        lab.capture(wrapper, torch.ones(4))
    assert KEY not in wrapper.concrete_cudagraph_entries
    with pytest.raises(TypeError):
        wrapper.concrete_cudagraph_entries[KEY] = None  # type: ignore[index]


def test_wrapper_names_are_unique_per_mode(lab: Lab) -> None:
    lab.wrap(abs, name="model")
    lab.wrap(abs, PIECEWISE, name="model")
    with pytest.raises(ConfigError):
        lab.wrap(abs, name="model")
    assert {lab.wrap(abs).owner, lab.wrap(abs).owner} == {"abs", "abs#2"}


def test_wrapper_equal_key_finds_the_same_program(lab: Lab) -> None:
    wrapper, x = lab.wrap(Counting()), torch.ones(4)
    program = lab.capture(wrapper, x)
    for _ in range(2):
        assert lab.step(wrapper, x, key=BatchDescriptor(8)) is program.outputs
    other = lab.capture(wrapper, x, key=BatchDescriptor(9))
    assert lab.step(wrapper, x, key=BatchDescriptor(9)) is other.outputs
    assert lab.step(wrapper, x, key=BatchDescriptor(8)) is program.outputs


def test_wrapper_num_ubatches_is_part_of_the_key(lab: Lab) -> None:
    wrapper, x = lab.wrap(Counting()), torch.ones(4)
    split = BatchDescriptor(8, num_ubatches=2)
    assert lab.capture(wrapper, x, key=split) is not lab.capture(wrapper, x)
    assert lab.library.program("Counting", FULL, split).key.num_ubatches == 2


def test_wrapper_known_key_replays_inside_a_scope_too(lab: Lab) -> None:
    fn = Counting()
    wrapper, x = lab.wrap(fn), torch.ones(4)
    lab.capture(wrapper, x)
    with lab.library.capture_scope() as scope, scope.step(FULL, KEY):
        assert torch.equal(wrapper(x), x * 2 + 1)
    assert fn.calls == 1


def test_wrapper_forward_context_inside_a_scope_captures(lab: Lab) -> None:
    wrapper, x = lab.wrap(Counting()), torch.ones(4)
    with lab.library.capture_scope(), ForwardContext(FULL, KEY):
        wrapper(x)
    assert KEY in wrapper.concrete_cudagraph_entries


def test_wrapper_scope_of_another_library_does_not_capture(lab: Lab) -> None:
    with Lab(lab.device) as other:
        wrapper = other.wrap(Counting())
        with (
            lab.library.capture_scope() as scope,
            scope.step(FULL, KEY),
            pytest.raises(CaptureOutsideScopeError),
        ):
            wrapper(torch.ones(4))

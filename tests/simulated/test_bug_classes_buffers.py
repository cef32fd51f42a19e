"""Known bug classes of static buffers, outputs and workspaces, end to end on the simulated device.

Each class names public threads that show the failure in other systems.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import (
    FrozenBufferError,
    MutatedInputError,
    StaleOutputError,
    UnkeyedValueError,
    VerificationError,
)
from graphrt.graphs.buffers import BufferSet
from graphrt.graphs.bufferspec import SENTINEL, BufferSpec
from graphrt.graphs.jobs import CaptureJob
from graphrt.graphs.library import GraphLibrary
from graphrt.graphs.outputs import OutputSpec
from graphrt.graphs.state import TensorStateGuard, Workspace
from graphrt.graphs.wrapper import CUDAGraphWrapper
from graphrt.verify.hoststate import HostState
from graphrt.verify.replaycheck import check_replay

FULL = RuntimeMode.FULL
SIZES = (8, 4, 2)
NUM_SLOTS = 12
SINK = NUM_SLOTS - 1


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def library() -> Iterator[GraphLibrary]:
    device = SimulatedDevice()
    with GraphLibrary(device) as library:
        yield library
    device.close()


def buffers_for(library: GraphLibrary, *specs: BufferSpec) -> BufferSet:
    buffers = BufferSet(
        specs, {"tokens": max(SIZES)}, lambda key: {"tokens": key.num_tokens}, library.device
    )
    library.add_buffers(buffers)
    return buffers


def capture(
    library: GraphLibrary, wrapper: CUDAGraphWrapper, buffers: BufferSet, **scope: Any
) -> None:
    jobs = [
        CaptureJob(wrapper, FULL, key, lambda key=key: ((), buffers.bind(key).views))
        for key in map(BatchDescriptor, SIZES)
    ]
    with library.capture_scope(**scope) as opened:
        opened.capture_all(jobs)


def key_for(n: int) -> BatchDescriptor:
    return BatchDescriptor(min(size for size in SIZES if size >= n))


def replay(wrapper: CUDAGraphWrapper, buffers: BufferSet, n: int, **values: torch.Tensor) -> Any:
    key = key_for(n)
    bound = buffers.bind(key)
    bound.stage(n, values)
    with ForwardContext(FULL, key):
        return wrapper(**bound.views)


# --- class 5: padded rows touch state, stale tails
#     (SGLang #10892, AReno #509, TensorRT-LLM #18207)


@pytest.mark.parametrize("sizes", list(itertools.permutations((8, 3, 8, 5)))[::2])
def test_padded_rows_never_touch_state(library: GraphLibrary, sizes: tuple[int, ...]) -> None:
    cache = torch.zeros(NUM_SLOTS, 2)
    buffers = buffers_for(
        library,
        BufferSpec("x", ("tokens", 2), torch.float32),
        BufferSpec("slots", ("tokens",), torch.int64, SENTINEL(SINK)),
        BufferSpec("bonus", ("tokens",), torch.float32, optional=True),
    )

    def step(x: torch.Tensor, slots: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        cache[slots] += x + bonus[:, None]
        return cache[slots]

    wrapper = CUDAGraphWrapper(step, library, FULL)
    capture(library, wrapper, buffers, state=TensorStateGuard([cache]))
    assert cache.eq(0).all()

    # Everything that a step before may have left behind: live slots, huge values, a full bonus.
    buffers.bind(BatchDescriptor(8)).stage(
        8,
        {
            "x": torch.full((8, 2), 1e9),
            "slots": torch.arange(8),
            "bonus": torch.full((8,), 1e9),
        },
    )
    expected = torch.zeros(NUM_SLOTS, 2)
    for number, n in enumerate(sizes, start=1):
        slots = (torch.arange(n) * 3 + number) % SINK  # 3 and 11 share no divisor: all different
        values = {"x": torch.full((n, 2), float(number)), "slots": slots}
        expected[slots] += number
        if number % 2:
            values["bonus"] = torch.ones(n)
            expected[slots] += 1
        out = replay(wrapper, buffers, n, **values)
        assert torch.equal(out[:n], expected[slots])
        assert torch.equal(cache[:SINK], expected[:SINK])


def test_a_graph_that_writes_a_buffer_must_have_declared_it(library: GraphLibrary) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    undeclared = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    with pytest.raises(MutatedInputError) as raised:
        capture(library, CUDAGraphWrapper(step, library, FULL), undeclared)
    assert "x" in str(raised.value)

    with GraphLibrary(library.device) as other:
        declared = buffers_for(other, BufferSpec("x", ("tokens",), torch.float32, written=True))
        wrapper = CUDAGraphWrapper(step, other, FULL)
        capture(other, wrapper, declared)
        for n in (7, 3, 8, 1):
            out = replay(wrapper, declared, n, x=torch.full((n,), 5.0))
            padded = key_for(n).num_tokens
            # Padded rows start from 0 each time, whatever the replay before left in them.
            assert out.tolist() == [6.0] * n + [1.0] * (padded - n)


# --- class 6: output overwritten or mis-trimmed
#     (TensorRT-LLM #14326, PyTorch #148439, vllm-omni #4466)


@dataclass
class Answer:
    logits: torch.Tensor
    parts: tuple[torch.Tensor, dict[str, torch.Tensor]]


def answer(x: torch.Tensor) -> Answer:
    return Answer(x * 2, (x.repeat_interleave(3), {"input": x[:]}))


def bound_outputs(
    wrapper: CUDAGraphWrapper, policy: Any
) -> tuple[OutputSpec, dict[BatchDescriptor, Any]]:
    axes = {"logits": "tokens", "parts.0": lambda n: 3 * n, "parts.1.input": "tokens"}
    spec = OutputSpec(axes, policy)
    programs = wrapper.concrete_cudagraph_entries
    return spec, {key: spec.bind(program) for key, program in programs.items()}


def check_answer(taken: Answer, n: int, value: float) -> None:
    assert taken.logits.tolist() == [2 * value] * n
    assert taken.parts[0].tolist() == [value] * (3 * n)
    assert taken.parts[1]["input"].tolist() == [value] * n


def test_clones_of_one_step_survive_the_next(library: GraphLibrary) -> None:
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    wrapper = CUDAGraphWrapper(answer, library, FULL)
    capture(library, wrapper, buffers)
    _, outputs = bound_outputs(wrapper, "clone")
    held = []
    for value, n in enumerate((3, 8, 3, 1, 4), start=1):
        replay(wrapper, buffers, n, x=torch.full((n,), float(value)))
        held.append((outputs[key_for(n)].take(n), n, float(value)))
    for taken, n, value in held:
        check_answer(taken, n, value)


def test_views_are_right_until_the_next_step_and_leases_say_when_they_are_not(
    library: GraphLibrary,
) -> None:
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    wrapper = CUDAGraphWrapper(answer, library, FULL)
    capture(library, wrapper, buffers)
    _, views = bound_outputs(wrapper, "view")
    spec, leases = bound_outputs(wrapper, "lease")
    previous: Answer | None = None
    for value, n in enumerate((3, 8, 2), start=1):
        spec.expire()
        replay(wrapper, buffers, n, x=torch.full((n,), float(value)))
        check_answer(views[key_for(n)].take(n), n, float(value))
        leased = leases[key_for(n)].take(n)
        check_answer(leased, n, float(value))
        if previous is not None:
            for stale in (previous.logits, previous.parts[1]["input"]):
                with pytest.raises(StaleOutputError):
                    stale.sum()
        previous = leased


def test_axes_inferred_from_two_programs(library: GraphLibrary) -> None:
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    wrapper = CUDAGraphWrapper(lambda x: (x + 1, x.sum()), library, FULL)
    capture(library, wrapper, buffers)
    programs = wrapper.concrete_cudagraph_entries
    small, large = BatchDescriptor(2), BatchDescriptor(8)
    spec = OutputSpec.infer((programs[large], {"tokens": 8}), (programs[small], {"tokens": 2}))
    replay(wrapper, buffers, 7, x=torch.ones(7))
    rows, total = spec.bind(programs[large]).take(7)
    assert rows.tolist() == [2.0] * 7
    assert total == 7.0


# --- class 10: a workspace grows after a capture (TensorRT-LLM #16319, vLLM #46067)


def with_scratch(workspace: Workspace, need: dict[int, int]) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        scratch = workspace.get((need[len(x)],), torch.float32)
        scratch[: len(x)].copy_(x * 2)
        return scratch[: len(x)] + 1

    return step


def test_a_workspace_that_grows_at_a_smaller_key_grows_before_any_capture(
    library: GraphLibrary,
) -> None:
    workspace = Workspace("split-k")
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    step = with_scratch(workspace, {8: 8, 4: 64, 2: 2})  # 4 needs more than 8
    wrapper = CUDAGraphWrapper(step, library, FULL)
    # Scratch is no state to keep, whatever it holds.
    capture(library, wrapper, buffers, resources=[workspace], state=TensorStateGuard([]))
    assert workspace.num_bytes == 64 * 4
    address = workspace.get((1,), torch.uint8).data_ptr()
    for program in wrapper.concrete_cudagraph_entries.values():
        # All of them, the one of 8 rows too, were captured over the bytes of after the growth.
        touched = {item.tensor.untyped_storage().data_ptr() for item in program.externals}
        assert address in touched
    for n in (8, 3, 2, 7):
        out = replay(wrapper, buffers, n, x=torch.arange(n, dtype=torch.float32))
        assert out[:n].tolist() == [2.0 * i + 1 for i in range(n)]
    assert workspace.get((1,), torch.uint8).data_ptr() == address


def test_growth_after_the_capture_names_the_key_and_is_possible_again_after_retirement(
    library: GraphLibrary,
) -> None:
    workspace = Workspace("split-k")
    need = dict.fromkeys(SIZES, 8)
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    step = with_scratch(workspace, need)
    wrapper = CUDAGraphWrapper(step, library, FULL)
    capture(library, wrapper, buffers, resources=[workspace], state=TensorStateGuard([]))
    need[4] = 9
    key = BatchDescriptor(4)
    with ForwardContext(RuntimeMode.NONE, key), pytest.raises(FrozenBufferError) as raised:
        wrapper(buffers.bind(key).views["x"])
    assert str(key) in raised.value.subject
    assert "36 bytes" in raised.value.found
    assert replay(wrapper, buffers, 4, x=torch.ones(4)).tolist() == [3.0] * 4
    library.retire()
    assert step(torch.ones(4)).tolist() == [3.0] * 4


# --- classes 3, 4 and 9, the part that only a comparison shows
#     (transformers #45323, rtp-llm #1084, ROCm aiter #5393)


class Frozen(torch.nn.Module):
    """Reads the host three ways: an attribute, a memo of its inputs, a hook's counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()
        self.length = 4
        self.memo: torch.Tensor | None = None
        self.memoises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.memoises and self.memo is None:
            self.memo = x.max().clone()
        scale = self.memo if self.memo is not None else 1.0
        return self.inner(x) * scale + self.length


def verify(
    wrapper: CUDAGraphWrapper, model: Frozen, buffers: BufferSet, before: HostState | None = None
) -> Any:
    """What a runtime does for a new program: other inputs than at capture, both sides."""
    key = BatchDescriptor(4)
    bound = buffers.bind(key)
    bound.stage(4, {"x": torch.tensor([1.0, 2.0, 3.0, 5.0])})

    def run(mode: RuntimeMode) -> Any:
        with ForwardContext(mode, key):
            return wrapper(**bound.views)

    return check_replay(
        mode=FULL,
        key=key,
        run_eager=lambda: run(RuntimeMode.NONE),
        run_replay=lambda: run(FULL),
        runnable=model,
        before_warmup=before,
    )


def test_a_host_value_read_from_a_closure_or_attribute_is_flagged(library: GraphLibrary) -> None:
    model = Frozen()
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    wrapper = CUDAGraphWrapper(model, library, FULL)
    capture(library, wrapper, buffers)
    assert verify(wrapper, model, buffers).comparison.is_equal
    model.length = 7
    with pytest.raises(VerificationError) as raised:
        verify(wrapper, model, buffers)
    assert "3" in raised.value.found  # 7 - 4


def test_a_host_argument_is_refused_before_it_can_be_wrong(library: GraphLibrary) -> None:
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    wrapper = CUDAGraphWrapper(lambda x, n: x + n, library, FULL)
    key = BatchDescriptor(4)
    view = buffers.bind(key).views["x"]
    with library.capture_scope() as scope, scope.step(FULL, key):
        wrapper(view, 4)
    with ForwardContext(FULL, key):
        wrapper(view, 4)
        with pytest.raises(UnkeyedValueError):
            wrapper(view, 7)


def test_a_value_memoised_in_the_warmup_is_flagged(library: GraphLibrary) -> None:
    model = Frozen()
    model.memoises = True
    before = HostState(model)
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    wrapper = CUDAGraphWrapper(model, library, FULL)
    capture(library, wrapper, buffers)  # the warm-up of 8 sees zeros and keeps 0
    assert verify(wrapper, model, buffers).comparison.is_equal  # eager is just as wrong
    with pytest.raises(VerificationError) as raised:
        verify(wrapper, model, buffers, before)
    assert "memo" in raised.value.do


def test_a_hook_that_no_replay_runs_is_reported(library: GraphLibrary) -> None:
    model = Frozen()
    calls = []
    model.inner.register_forward_hook(lambda *_: calls.append(1))
    buffers = buffers_for(library, BufferSpec("x", ("tokens",), torch.float32))
    wrapper = CUDAGraphWrapper(model, library, FULL)
    capture(library, wrapper, buffers)
    seen = len(calls)
    verified = verify(wrapper, model, buffers)
    assert [hook.module for hook in verified.hooks] == ["inner"]
    assert len(calls) == seen + 1  # eager ran it, the replay did not

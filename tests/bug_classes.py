"""Known bug classes of CUDA graphs that need no device of a kind: each lane runs them on its own.

The simulated lane has more cases of most of them, where its recorder sees more than a GPU shows.
A subclass is collected in a lane whose fixture ``device`` gives the device.
"""

from __future__ import annotations

import contextvars
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphrt import (
    BatchDescriptor,
    BufferSpec,
    CaptureJob,
    CUDAGraphOptions,
    CUDAGraphRunner,
    CUDAGraphWrapper,
    Device,
    ForwardContext,
    GraphBudget,
    OutputSpec,
    Padding,
    Program,
    Reason,
    RuntimeMode,
    StaleCheck,
    TensorStateGuard,
    Workspace,
    break_point,
    capture_all,
    check_replay,
    forbid_in_capture,
)
from graphrt.errors import (
    CaptureInProgressError,
    CaptureOutsideScopeError,
    EmptyCaptureError,
    EnvironmentMismatchError,
    EscapedAllocationError,
    FrozenBufferError,
    InvalidProgramError,
    LateInitError,
    MutatedInputError,
    NestedReplayError,
    StaleInputError,
    StaleOutputError,
    StateAdvancedError,
    StreamRaceError,
    UnjoinedStreamError,
    UnkeyedValueError,
    VerificationError,
)
from graphrt.gc_pause import MOST_IMMORTAL, is_heap_frozen
from graphrt.graphs import GraphSegment
from lab import FULL, KEY, NONE, PIECEWISE, SIZES, Lab, Tally, rows_runner


def graphs_of(program: Program) -> list[Any]:
    return [part.graph for part in program.segments if isinstance(part, GraphSegment)]


def watch_resets(monkeypatch: pytest.MonkeyPatch, graph_type: Any, device: Device) -> list[bool]:
    """Note for every graph that is reset from now on whether a recording was open."""
    reset, while_recording = graph_type.reset, []

    def watched(graph: Any) -> None:
        while_recording.append(device.is_capturing())
        reset(graph)

    monkeypatch.setattr(graph_type, "reset", watched)
    return while_recording


def keep_busy(device: Device) -> None:
    """Let the current stream be late, as it always is on a CPU: a missing join shows then."""
    if device.name == "cuda":
        torch.cuda._sleep(10_000_000)


class Packed(torch.Tensor):
    """Says that it is a matrix and is made of codes and scales, as quantised weights are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        plain = [each.codes * each.scale if isinstance(each, Packed) else each for each in args]
        return func(*plain, **(kwargs or {}))


class Attention:
    """Over requests of several lengths, padded to the longest, which Python knows.

    Inputs: queries, keys and values [tokens, width]; the request and the position in it of every
    token; the length of every request.
    """

    num_tokens, num_requests, width = 8, 3, 4

    def __init__(self, lab: Lab) -> None:
        def integers(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=lab.device.torch_device)

        self.qkv = lab.random(3, self.num_tokens, self.width)
        self.request, self.position = integers(self.num_tokens), integers(self.num_tokens)
        self.lengths = integers(self.num_requests)
        self.longest = 0

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.request, self.position, self.lengths

    def ask(self, lengths: Sequence[int]) -> None:
        self.longest = max(lengths)
        owners = [index for index, length in enumerate(lengths) for _ in range(length)]
        self.request.copy_(torch.tensor(owners))
        self.position.copy_(torch.tensor([at for length in lengths for at in range(length)]))
        self.lengths.copy_(torch.tensor(lengths))

    def __call__(
        self,
        qkv: torch.Tensor,
        request: torch.Tensor,
        position: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        longest = self.longest
        # As a kernel that is given the longest length: it does not see what lies beyond.
        rows = request * longest + position.clamp(max=longest - 1)
        padded = qkv.new_zeros(3, self.num_requests * longest, self.width).index_copy(1, rows, qkv)
        q, k, v = padded.view(3, self.num_requests, longest, self.width)
        hidden = torch.arange(longest, device=lengths.device) >= lengths[:, None]
        scores = (q @ k.transpose(1, 2)).masked_fill(hidden[:, None], float("-inf"))
        return (scores.softmax(-1) @ v).flatten(0, 1)[rows]


class Recurrent:
    """A step that reads and advances three kinds of state: recurrent, a cache, a position."""

    def __init__(self, lab: Lab) -> None:
        self.weight = lab.random(8, 8)
        self.hidden = lab.random(1, 8, seed=1)
        self.cache = lab.full((16, 8), 0.0)
        self.position = torch.zeros(1, dtype=torch.int64, device=lab.device.torch_device)

    @property
    def state(self) -> list[torch.Tensor]:
        return [self.hidden, self.cache, self.position]

    @break_point
    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden.copy_(self.mix(self.hidden @ self.weight + x))
        self.cache.index_copy_(0, self.position, self.hidden)
        self.position.add_(1)
        return self.cache.sum(0)


@dataclass
class Answer:
    logits: torch.Tensor
    parts: tuple[torch.Tensor, dict[str, torch.Tensor]]


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


ENVIRONMENTS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "autocast": lambda kind: torch.autocast(kind, torch.bfloat16),
    "inference_mode": lambda kind: torch.inference_mode(),
    "sdpa": lambda kind: sdpa_kernel(SDPBackend.MATH),
    "default_dtype": lambda kind: float64_by_default(),
    "deterministic": lambda kind: deterministic(),
    "float32_precision": lambda kind: tf32(),
}
"""By the name of what changes; each takes the kind of device."""


def remembering(place: str) -> Callable[..., torch.Tensor]:
    """A callable that adds its last input to this one, and keeps it in a ``place`` of its own."""
    last: list[torch.Tensor] = []

    class Model:
        prev: torch.Tensor | None = None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            before = (last[-1] if last else None) if place == "list" else self.prev
            if place == "list":
                last.append(x)
            else:
                self.prev = x[-1:] if place == "view" else x
            return x[:] if before is None else x + before.sum()

    model = Model()
    if place != "closure":
        return model
    prev: torch.Tensor | None = None

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal prev
        before, prev = prev, x
        return x[:] if before is None else x + before.sum()

    return step


class BugClasses:
    @pytest.fixture
    def make_lab(self, device: Device) -> Iterator[Callable[..., Lab]]:
        with ExitStack() as labs:
            yield lambda **options: labs.enter_context(Lab(device, **options))

    @pytest.fixture
    def lab(self, make_lab: Callable[..., Lab]) -> Lab:
        return make_lab()

    def test_1_captured_tensor_dropped_by_its_owner_is_kept(self, lab: Lab) -> None:
        owner = {"w": lab.full((256,), 3.0) * 2}
        x = lab.full((256,), 1.0)
        wrapper = lab.wrap_and_capture(lambda x: x + owner["w"], x)
        owner.clear()
        gc.collect()
        others = [lab.full((256,), -9.0) for _ in range(64)]
        assert lab.step(wrapper, x).eq(7).all()
        assert all(other.eq(-9).all() for other in others)

    def test_1_parts_of_a_packed_tensor_are_kept(self, lab: Lab) -> None:
        owner = {"w": Packed(lab.full((16, 16), 3.0).to(torch.int8), lab.full((16,), 0.5))}
        x = lab.full((16,), 1.0)
        wrapper = lab.wrap_and_capture(lambda x: x @ owner["w"], x)
        program = wrapper.concrete_cudagraph_entries[KEY]
        assert program.memory.external_bytes == 16 * 16 + 2 * x.nbytes
        owner.clear()
        gc.collect()
        others = [lab.full((n,), -9.0) for _ in range(64) for n in (16, 64)]
        assert lab.step(wrapper, x).eq(24).all()
        assert all(other.eq(-9).all() for other in others)

    def test_1_tensor_known_by_pointer_is_kept_by_keep_alive(self, lab: Lab) -> None:
        x, hidden = lab.full((256,), 1.0), lab.full((256,), 3.0)
        wrapper = lab.wrap_and_capture(lambda x: x + 1, x, scope={"keep_alive": [hidden]})
        program = wrapper.concrete_cudagraph_entries[KEY]
        assert program.memory.external_bytes == x.nbytes + hidden.nbytes
        assert [each.name for each in program.externals if each.tensor is hidden] == [
            "keep_alive[0]"
        ]
        address = hidden.data_ptr()
        del hidden
        gc.collect()
        others = [lab.full((256,), -9.0) for _ in range(64)]
        assert address not in {other.data_ptr() for other in others}

    @pytest.mark.parametrize("rebinds", ["parameter", "attribute"])
    def test_2_rebound_storage_is_noticed_and_a_copy_is_not(self, lab: Lab, rebinds: str) -> None:
        model = torch.nn.Linear(8, 8, device=lab.device.torch_device)
        model.scale = lab.full((8,), 2.0)
        x = lab.full((2, 8), 1.0)
        forward = model.forward
        model.forward = lambda x: forward(x) * model.scale  # type: ignore[method-assign]
        wrapper = lab.wrap_and_capture(model, x)
        lab.step(wrapper, x)
        model.weight.copy_(model.weight * 3)
        assert lab.library.check_externals().is_unchanged
        torch.testing.assert_close(lab.step(wrapper, x), model(x))
        if rebinds == "parameter":
            model.weight.data = model.weight.data.clone()
        else:
            model.scale = model.scale.clone()
        report = lab.library.check_externals()
        assert report.moved == ("weight" if rebinds == "parameter" else "scale",)
        with pytest.raises(InvalidProgramError):
            lab.step(wrapper, x)

    def test_2_rebound_part_of_a_packed_weight_is_named(self, lab: Lab) -> None:
        model = torch.nn.Module()
        model.weight = Packed(lab.random(8, 8).round().to(torch.int8), lab.full((8,), 0.5))
        model.forward = lambda x: x @ model.weight
        x = lab.random(2, 8, seed=1)
        wrapper = lab.wrap_and_capture(model, x)
        assert torch.equal(lab.step(wrapper, x), model(x))
        model.weight.codes.mul_(3)
        assert lab.library.check_externals().is_unchanged
        assert torch.equal(lab.step(wrapper, x), model(x))
        model.weight.codes = model.weight.codes.clone()
        assert lab.library.check_externals().moved == ("weight.codes",)
        with pytest.raises(InvalidProgramError, match=r"weight\.codes"):
            lab.step(wrapper, x)

    def test_3_host_value_outside_the_key_is_refused(self, lab: Lab) -> None:
        x = lab.full((4,), 1.0)
        wrapper = lab.wrap_and_capture(lambda x, n: x + n, x, 4)
        assert lab.step(wrapper, x, 4).tolist() == [5.0] * 4
        with pytest.raises(UnkeyedValueError):
            lab.step(wrapper, x, 7)

    def test_3_longest_length_in_python_fails_verification(self, lab: Lab) -> None:
        attention = Attention(lab)
        attention.ask([4, 2, 2])
        wrapper = lab.wrap_and_capture(attention, *attention.inputs)

        def verify() -> None:
            check_replay(
                mode=FULL,
                key=KEY,
                run_eager=lambda: attention(*attention.inputs),
                run_replay=lambda: lab.step(wrapper, *attention.inputs),
            )

        # Other lengths are tensors: right, as long as the longest stays.
        for lengths in ([4, 2, 2], [1, 3, 4], [4, 4, 0][::-1]):
            attention.ask(lengths)
            verify()
        attention.ask([6, 1, 1])
        with pytest.raises(VerificationError, match="outputs"):
            verify()

    @pytest.mark.parametrize("sizes", [(8, 3, 8, 5), (3, 8, 5, 8), (5, 3, 8, 2)])
    def test_5_padded_rows_never_touch_state(self, lab: Lab, sizes: tuple[int, ...]) -> None:
        place = lab.device.torch_device
        cache = lab.full((12, 2), 0.0)
        buffers = lab.buffers(
            BufferSpec("x", ("tokens", 2), torch.float32),
            BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(11)),
            BufferSpec("bonus", ("tokens",), torch.float32, optional=True),
        )

        def step(x: torch.Tensor, slots: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
            cache.index_put_((slots,), x + bonus[:, None], accumulate=True)
            return cache[slots]

        wrapper = lab.capture_sizes(step, buffers, state=TensorStateGuard([cache]))
        assert cache.eq(0).all()
        buffers.bind(KEY).stage(
            8,
            {
                "x": lab.full((8, 2), 1e9),
                "slots": torch.arange(8, device=place),
                "bonus": lab.full((8,), 1e9),
            },
        )
        expected = lab.full((12, 2), 0.0)
        for number, n in enumerate(sizes, start=1):
            slots = (torch.arange(n, device=place) * 3 + number) % 11
            values = {"x": lab.full((n, 2), float(number)), "slots": slots}
            expected[slots] += number
            if number % 2:
                values["bonus"] = lab.full((n,), 1.0)
                expected[slots] += 1
            out = lab.staged(wrapper, buffers, n, **values)
            assert torch.equal(out[:n], expected[slots])
            assert torch.equal(cache[:11], expected[:11])

    @pytest.mark.parametrize("sizes", [(8, 3, 8, 5), (3, 8, 5, 8)])
    def test_5_padded_rows_never_touch_a_paged_cache(
        self, lab: Lab, sizes: tuple[int, ...]
    ) -> None:
        # Request i owns block 7 - i; the last block is where padding writes.
        place, block_size, sink = lab.device.torch_device, 4, 8
        cache = lab.full((9, block_size, 2), 0.0)
        buffers = lab.buffers(
            BufferSpec("x", ("tokens", 2), torch.float32),
            BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(sink * block_size)),
            BufferSpec("table", ("tokens", 1), torch.int64, Padding.fill(sink)),
            BufferSpec("lengths", ("tokens",), torch.int64, Padding.zero()),
        )

        def step(
            x: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
        ) -> torch.Tensor:
            cache.view(-1, 2).index_copy_(0, slots, x)
            seen = torch.arange(block_size, device=lengths.device) < lengths[:, None]
            return (cache[table].flatten(1, 2) * seen[:, :, None]).sum(1)

        wrapper = lab.capture_sizes(step, buffers, state=TensorStateGuard([cache]))
        assert cache.eq(0).all()
        blocks = 7 - torch.arange(8, device=place)
        full = {
            "x": lab.full((8, 2), 1e9),
            "slots": blocks * block_size,
            "table": blocks[:, None],
            "lengths": torch.full((8,), 4, device=place),
        }
        buffers.bind(KEY).stage(8, full)
        expected, length = lab.full((9, block_size, 2), 0.0), [0] * 8
        for number, n in enumerate(sizes, start=1):
            for index in range(n):
                expected[7 - index, length[index]] = number
                length[index] += 1
            lengths = torch.tensor(length[:n], device=place)
            values = {
                "x": lab.full((n, 2), float(number)),
                "slots": blocks[:n] * block_size + lengths - 1,
                "table": blocks[:n, None],
                "lengths": lengths,
            }
            out = lab.staged(wrapper, buffers, n, **values)
            assert torch.equal(out[:n], expected[blocks[:n]].sum(1))
            assert torch.equal(cache[:sink], expected[:sink])

    def test_5_written_buffer_is_declared_and_refilled(self, make_lab: Callable[..., Lab]) -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

        lab = make_lab()
        with pytest.raises(MutatedInputError, match="'x'"):
            lab.capture_sizes(step, lab.buffers(BufferSpec("x", ("tokens",), torch.float32)))
        lab = make_lab()
        buffers = lab.buffers(BufferSpec("x", ("tokens",), torch.float32, written=True))
        wrapper = lab.capture_sizes(step, buffers)
        for n, padded in [(7, 8), (3, 4), (8, 8), (1, 2)]:
            out = lab.staged(wrapper, buffers, n, x=lab.full((n,), 5.0))
            # Padded rows start from 0 each time, whatever the replay before left in them.
            assert out.tolist() == [6.0] * n + [1.0] * (padded - n)

    def test_6_views_are_right_and_raise_after_the_next_step(self, lab: Lab) -> None:
        def answer(x: torch.Tensor) -> Answer:
            return Answer(x * 2, (x.repeat_interleave(3), {"input": x[:]}))

        buffers = lab.buffers(BufferSpec("x", ("tokens",), torch.float32))
        wrapper = lab.capture_sizes(answer, buffers)
        axes = {"logits": "tokens", "parts.0": lambda n: 3 * n, "parts.1.input": "tokens"}
        specs = [OutputSpec(axes, policy) for policy in ("view", "clone", "checked_view")]
        programs = wrapper.concrete_cudagraph_entries.items()
        unpad = {
            key.num_tokens: [spec.bind(program).unpad for spec in specs]
            for key, program in programs
        }
        clones: list[tuple[Answer, int, float]] = []
        previous: Answer | None = None
        for value, (n, padded) in enumerate([(3, 4), (8, 8), (2, 2), (3, 4)], start=1):
            specs[-1].expire()
            lab.staged(wrapper, buffers, n, x=lab.full((n,), float(value)))
            view, clone, checked = [cut(n) for cut in unpad[padded]]
            clones.append((clone, n, float(value)))
            for found, count, number in [(view, n, value), (checked, n, value), *clones]:
                assert found.logits.tolist() == [2.0 * number] * count
                assert found.parts[0].tolist() == [number] * (3 * count)
                assert found.parts[1]["input"].tolist() == [number] * count
            if previous is not None:
                for stale in (previous.logits, previous.parts[1]["input"]):
                    with pytest.raises(StaleOutputError):
                        stale.sum()
            previous = checked

    def test_6_view_of_a_retired_program_raises(self, lab: Lab) -> None:
        options = {"outputs": OutputSpec({"": "n"}, "checked_view"), "device": lab.device}
        with rows_runner(lambda x: x * 2, **options) as runner:
            runner.capture()
            held = runner.run({"x": lab.full((2, 4), 3.0)})
            first = held[:1]
            assert first.eq(6).all()
            runner.library.retire()
            for view in (held, first):
                with pytest.raises(StaleOutputError, match="retired"):
                    view.sum()
            again = runner.run({"x": lab.full((2, 4), 3.0)})
            assert again.eq(6).all()  # Eager: memory of its own.

    @pytest.mark.parametrize("place", ["attribute", "view", "list", "closure"])
    @pytest.mark.parametrize("policy", ["view", "clone", "checked_view"])
    @pytest.mark.parametrize("why", ["uncaptured", "failed", "above_max", "axes"])
    def test_6_input_kept_by_eager_runs_stays_what_it_was(
        self, lab: Lab, why: str, policy: Any, place: str
    ) -> None:
        """Static buffers would hold the input of the next run there."""
        width = "width" if why == "axes" else 4
        sizes = {"n": [2, 4]} | ({"width": [4]} if why == "axes" else {})
        lengths = {0: "n"} | ({1: "width"} if why == "axes" else {})
        plain = remembering(place)
        with rows_runner(
            remembering(place),
            sizes,
            inputs=[BufferSpec("x", ("n", width), torch.float32)],
            outputs=OutputSpec({"": lengths}, policy),
            device=lab.device,
            on_capture_error="skip",
        ) as runner:
            outputs = []
            for number, n in enumerate((2, 3, 3, 1, 4, 3)):
                if number == 3 and why in ("failed", "axes"):
                    runner.capture()  # In mid-stream.
                x = lab.random(n + 4 * (why == "above_max"), 4, seed=number)
                found = runner.run({"x": x})
                assert torch.equal(found, plain(x))
                assert runner.last_decision is not None
                assert runner.last_decision.mode is NONE
                outputs.append((found, found.clone()))
            if policy != "checked_view":
                # None of them lies where a later run writes.
                assert all(torch.equal(*pair) for pair in outputs)

    @pytest.mark.parametrize("by_size", [True, False])
    @pytest.mark.parametrize("in_parts", [True, False])
    def test_6_input_kept_for_some_batches_is_put_back(
        self, lab: Lab, in_parts: bool, by_size: bool
    ) -> None:
        """Where other keys have graphs too, which read what first runs set."""

        class Model:
            def __init__(self) -> None:
                self.prev: dict[int, torch.Tensor] = {}

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                if len(x) < 5:
                    return x * 2
                place = len(x) if by_size else 0
                before, self.prev[place] = self.prev.get(place), x
                return x * 2 if before is None else x * 2 + before.sum()

        model, plain = Model(), Model()
        with rows_runner(
            model, (2, 4, 8), device=lab.device, on_capture_error="skip", verify_every=2
        ) as runner:
            served = set()
            for number, n in enumerate((8, 8, 3, 6, 9, 8, 2, 6, 8, 9, 4, 6)):
                if number % 3 == 1:
                    before = dict(model.prev)
                    if in_parts:
                        runner.capture_next()
                    else:
                        runner.capture()
                    assert model.prev.keys() == before.keys()
                    assert all(model.prev[place] is kept for place, kept in before.items())
                x = lab.random(n, 4, seed=number)
                assert torch.equal(runner.run({"x": x}), plain(x))
                assert runner.last_decision is not None
                served.add((n < 5, runner.last_decision.mode, runner.last_decision.reason))
            modes = {(is_small, mode) for is_small, mode, _ in served}
            assert (False, NONE) in modes
            assert (False, FULL) not in modes
            # Where a device does not tell what graphs read, all that the model keeps counts as
            # read: an eager step that replaces it invalidates the small batches' graphs too.
            is_seen = lab.device.name == "simulated"
            is_invalidated = (True, NONE, Reason.INVALIDATED) in served
            assert (True, FULL) in modes or (is_invalidated and not is_seen), str(runner.report())

    def test_6_clones_survive_a_thousand_calls(self, lab: Lab) -> None:
        buffers = lab.buffers(BufferSpec("x", ("tokens",), torch.float32))
        wrapper = lab.capture_sizes(lambda x: x * 2, buffers)
        spec = OutputSpec({"": "tokens"}, "clone")
        takes = {
            key.num_tokens: spec.bind(program).unpad
            for key, program in wrapper.concrete_cudagraph_entries.items()
        }
        held: list[tuple[int, torch.Tensor]] = []
        for number in range(1000):
            n = (8, 2, 3)[number % 3]
            lab.staged(wrapper, buffers, n, x=lab.full((n,), float(number)))
            held.append((number, takes[min(s for s in SIZES if s >= n)](n)))
            held = held[-7:]
        assert all(tensor.eq(2.0 * number).all() for number, tensor in held)

    def test_6_clones_on_two_streams_survive_a_thousand_calls(self, lab: Lab) -> None:
        device, buffers = lab.device, lab.buffers(BufferSpec("x", ("tokens",), torch.float32))
        wrapper = lab.capture_sizes(lambda x: x * 2, buffers)
        spec = OutputSpec({"": "tokens"}, "clone")
        takes = {
            key.num_tokens: spec.bind(program).unpad
            for key, program in wrapper.concrete_cudagraph_entries.items()
        }
        streams = (device.stream("one"), device.stream("two"))
        device.order(streams[1], device.current_stream())
        held: list[tuple[int, torch.Tensor]] = []
        for number in range(1000):
            n = (8, 2, 3)[number % 3]
            own = streams[number % 2]
            # The pool is one: a replay waits for what the other stream does with it.
            device.order(own, streams[1 - number % 2])
            with device.use(own):
                lab.staged(wrapper, buffers, n, x=lab.full((n,), float(number)))
                held.append((number, takes[min(s for s in SIZES if s >= n)](n)))
            held = held[-7:]
        device.synchronize()
        assert all(tensor.eq(2.0 * number).all() for number, tensor in held)

    def test_7_nothing_is_captured_while_serving(self, lab: Lab) -> None:
        x = lab.full((8,), 1.0)
        wrapper = lab.wrap_and_capture(lambda x: x + 1, x)
        count = lab.library.num_cudagraph_captured
        for _ in range(100):
            with pytest.raises(CaptureOutsideScopeError):
                lab.step(wrapper, x, key=BatchDescriptor(16))
        assert lab.library.num_cudagraph_captured == count == 1

    @pytest.mark.parametrize(("generation_size", "num_rounds"), [(1, 200), (2, 60)])
    def test_8_graphs_captured_and_retired_leave_others_right(
        self,
        make_lab: Callable[..., Lab],
        monkeypatch: pytest.MonkeyPatch,
        generation_size: int,
        num_rounds: int,
    ) -> None:
        """Six shapes take turns on two graphs."""
        lab = make_lab(budget=GraphBudget(max_graphs=2), generation_size=generation_size)
        device, choice = lab.device, random.Random(8)
        # Few rows of many columns are summed in parts, for which the library needs its workspace.
        depth = 4096 if device.name == "cuda" else 64
        num_rounds = num_rounds if device.name == "cuda" else num_rounds // 4
        inputs, weights = [], []
        for rows, dtype in itertools.product((2, 8, 16), (torch.bfloat16, torch.float32)):
            inputs.append(lab.random(rows, depth, seed=rows).to(dtype))
            weights.append((lab.random(depth, 32, seed=rows) / depth**0.5).to(dtype))
        bias = lab.random(32, seed=1)

        def forward(x: torch.Tensor, index: int) -> torch.Tensor:
            weight = weights[index]
            hidden = torch.nn.functional.linear(x, weight.t(), bias.to(x.dtype))
            return torch.relu(hidden) @ weight[:32]

        wrapper = lab.wrap(forward)
        entries = wrapper.concrete_cudagraph_entries

        def capture(index: int) -> None:
            key = BatchDescriptor(index + 1)
            lab.wrap_and_capture(
                wrapper, inputs[index], index, key=key, scope={"generation": "lazy"}
            )

        capture(0)
        [graph] = graphs_of(entries[BatchDescriptor(1)])
        while_recording = watch_resets(monkeypatch, type(graph), device)
        for _ in range(num_rounds):
            index = choice.randrange(len(inputs))
            if BatchDescriptor(index + 1) not in entries:
                capture(index)
            assert lab.library.num_graphs <= 2
            for key in list(entries):
                index = key.num_tokens - 1
                x = inputs[index].normal_()
                assert torch.equal(lab.step(wrapper, x, index, key=key), forward(x, index))
        assert len(while_recording) > num_rounds / 2
        assert not any(while_recording)

    def test_8_dead_cycle_is_not_collected_in_a_recording(
        self, lab: Lab, make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other, x = make_lab(), lab.full((8,), 1.0)
        kept = other.wrap_and_capture(lambda x: x + 1, x)
        program = kept.concrete_cudagraph_entries[KEY]
        [graph] = graphs_of(program)
        while_recording = watch_resets(monkeypatch, type(graph), lab.device)
        cycle: list[Any] = [program, graph]
        cycle.append(cycle)
        del program, graph, cycle

        def collects(x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            gc.collect()
            return y + 1

        wrapper = lab.wrap_and_capture(collects, x)
        assert not while_recording
        assert lab.step(wrapper, x).tolist() == [4.0] * 8
        assert other.step(kept, x).tolist() == [2.0] * 8
        other.library.retire()
        assert while_recording == [False]

    def test_9_cache_made_in_a_recording_is_named(self, lab: Lab) -> None:
        class Lazy(torch.nn.Module):
            ws: torch.Tensor | None = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.ws is None:
                    self.ws = torch.zeros_like(x)
                return x + self.ws

        model, x = Lazy(), lab.full((8,), 1.0)
        wrapper = CUDAGraphWrapper(model, lab.library, FULL)
        with (
            pytest.raises(EscapedAllocationError, match="ws"),
            lab.library.capture_scope(warmups=0) as scope,
        ):
            capture_all(scope.library, [CaptureJob(wrapper, FULL, KEY, lambda: ((x,), {}))])
        assert not wrapper.concrete_cudagraph_entries

    def test_9_cache_made_where_an_eager_segment_had_its_result_is_named(self, lab: Lab) -> None:
        doubled = break_point(lambda x: x * 2)

        class Lazy(torch.nn.Module):
            ws: torch.Tensor | None = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = doubled(x) + 1  # What it returned is dropped here, and its memory reused next.
                if self.ws is None:
                    self.ws = torch.zeros_like(x)
                return y + self.ws

        wrapper = lab.wrap(Lazy(), PIECEWISE)
        with pytest.raises(EscapedAllocationError, match="ws"):
            lab.capture(wrapper, lab.full((8,), 1.0))
        assert not wrapper.concrete_cudagraph_entries

    def test_9_failed_capture_leaves_nothing_in_the_model(self, lab: Lab) -> None:
        class Model(torch.nn.Module):
            last: torch.Tensor | None = None

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("n", lab.full((), 0.0))
                self.log: list[torch.Tensor] = []

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.n = self.n + 1
                self.last = x * 2
                self.log.append(self.last)
                return x * self.n

        model, x = Model(), lab.full((8,), 1.0)
        before = model.n
        with pytest.raises(EscapedAllocationError):
            lab.wrap_and_capture(model, x)
        assert model.n is before
        assert model.last is None
        assert not model.log
        for count in (1.0, 2.0):
            assert torch.equal(model(x), x * count)

    def test_9_output_kept_by_the_model_is_put_back(self, lab: Lab) -> None:
        kept: list[torch.Tensor] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            kept.append(x * 2)
            return kept[-1]

        x = lab.full((8,), 1.0)
        wrapper = lab.wrap(step)
        lab.capture(wrapper, x)
        assert not kept
        assert torch.equal(lab.step(wrapper, x), x * 2)

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_12_host_counter_is_put_back_and_a_memo_stays(
        self, lab: Lab, mode: RuntimeMode
    ) -> None:
        class Model(torch.nn.Module):
            n = 0
            table: torch.Tensor | None = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.n += 1
                if self.table is None:
                    self.table = lab.full((8,), 3.0)
                return self.middle(x + self.table)

            @break_point
            def middle(self, x: torch.Tensor) -> torch.Tensor:
                self.n += 1
                return x * 2

        model, x = Model(), lab.full((8,), 1.0)
        wrapper = lab.wrap_and_capture(model, x, mode=mode, scope={"warmups": 2})
        assert model.n == 0
        table = model.table
        assert lab.step(wrapper, x).eq(8).all()
        assert model(x).eq(8).all()
        assert model.table is table

    @pytest.mark.parametrize(
        ("mode", "is_eager"), [(FULL, False), (PIECEWISE, False), (PIECEWISE, True)]
    )
    def test_12_write_that_the_guard_leaves_out_is_refused(
        self, lab: Lab, mode: RuntimeMode, is_eager: bool
    ) -> None:
        kept, left_out = lab.full((8,), 0.0), lab.full((8,), 0.0)

        def advance(x: torch.Tensor) -> torch.Tensor:
            kept.add_(1)
            left_out.add_(1)
            return x + kept

        middle = break_point(advance) if is_eager else advance
        x, guard = lab.full((8,), 1.0), TensorStateGuard([kept])
        wrapper = lab.wrap(lambda x: middle(x * 2) * 2, mode)
        with pytest.raises(StateAdvancedError) as raised:
            lab.wrap_and_capture(wrapper, x, scope={"state": guard})
        assert "advance" in raised.value.source
        assert kept.eq(0).all()
        both = TensorStateGuard([kept, left_out])
        lab.library.forget_failures()
        left_out.zero_()
        lab.wrap_and_capture(wrapper, x, scope={"state": both})
        assert kept.eq(0).all()
        assert left_out.eq(0).all()
        assert lab.step(wrapper, x).eq(6).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
    @pytest.mark.parametrize("is_eager", [False, True])
    def test_12_row_that_no_input_names_is_refused(
        self, lab: Lab, dtype: torch.dtype, is_eager: bool
    ) -> None:
        cache = torch.arange(96, device=lab.device.torch_device).reshape(32, 3).to(dtype)
        before, beside = cache.clone(), False

        def write(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(0, slots, x.to(cache.dtype))
            if beside:
                cache[27] = (x[0] + x.shape[0]).to(cache.dtype)
            return x * 2

        def examples(sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
            slots = (torch.arange(sizes["n"]) + 3 * seed) % 16 + 1
            return {"x": slots[:, None] * torch.ones(3), "slots": slots}

        middle = break_point(write) if is_eager else write
        specs = [
            BufferSpec("x", ("n", 3), torch.float32),
            BufferSpec("slots", ("n",), torch.int64, Padding.fill(0)),
        ]
        options: Any = {
            "inputs": specs,
            "outputs": OutputSpec({"": "n"}),
            "examples": examples,
            "sizes": {"n": [2, 8]},
            "modes": ["PIECEWISE" if is_eager else "FULL"],
            "library": lab.library,
            "verify_every": 1,
            "may_overwrite": {cache: "slots"},
        }
        runner = CUDAGraphRunner(lambda x, slots: middle(x + 0, slots) + 1, name="a", **options)
        assert len(runner.capture().graphs) == 2
        assert torch.equal(cache[17:], before[17:])
        batch = examples({"n": 5}, 3)
        assert runner.run(batch).cpu().equal(batch["x"] * 2 + 1)
        runner.close()
        cache.copy_(before)
        beside = True
        runner = CUDAGraphRunner(lambda x, slots: middle(x + 0, slots) + 1, name="b", **options)
        with pytest.raises(StateAdvancedError, match="written: 27, at") as raised:
            runner.capture()
        assert "write" in raised.value.source
        assert torch.equal(cache, before)
        runner.close()

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    @pytest.mark.parametrize("weak", [True, False])
    def test_9_blocks_of_a_recording_die_but_an_owned_output(
        self, lab: Lab, mode: RuntimeMode, weak: bool
    ) -> None:
        eager = break_point(lambda x: x * 2)
        options = CUDAGraphOptions(weak_ref_output=weak)
        wrapper = lab.wrap(lambda x: eager(x @ x + 1) @ x, mode, cudagraph_options=options)
        x = lab.random(8, 8)
        lab.wrap_and_capture(wrapper, x)
        program = wrapper.concrete_cudagraph_entries[KEY]
        [generation] = lab.library.generations
        live = [block.address for block in generation.pool.live_blocks()]
        assert live == ([] if weak else [program.outputs.data_ptr()])

    def test_10_workspace_captured_may_not_grow_until_retired(self, lab: Lab) -> None:
        workspace = Workspace("scratch", lab.device.torch_device)
        need = {8: 8, 4: 64, 2: 2}
        buffers = lab.buffers(BufferSpec("x", ("tokens",), torch.float32))
        captured_over = Tally()

        def step(x: torch.Tensor) -> torch.Tensor:
            scratch = workspace.get((need[len(x)],), torch.float32)[: len(x)]
            if lab.device.is_capturing():
                captured_over.append(scratch.data_ptr())
            return scratch.copy_(x) * 2

        wrapper = lab.capture_sizes(
            step, buffers, resources=[workspace], state=TensorStateGuard([])
        )
        address = workspace.get((1,), torch.uint8).data_ptr()
        assert list(captured_over) == [address] * len(SIZES)
        for n in (8, 3, 2, 7):
            out = lab.staged(wrapper, buffers, n, x=lab.full((n,), float(n)))
            assert out[:n].tolist() == [2.0 * n] * n
        assert workspace.get((1,), torch.uint8).data_ptr() == address
        for program in wrapper.concrete_cudagraph_entries.values():
            # The one of 8 rows too, which needs less than was reserved.
            assert address in {
                each.tensor.untyped_storage().data_ptr() for each in program.externals
            }
        need[4], key = 1000, BatchDescriptor(4)
        with ForwardContext(NONE, key), pytest.raises(FrozenBufferError) as raised:
            wrapper(buffers.bind(key).views["x"])
        assert str(key) in raised.value.subject
        assert "4000 bytes" in raised.value.found
        lab.library.retire()
        assert step(lab.full((4,), 1.0)).tolist() == [2.0] * 4

    @pytest.mark.parametrize("warmups", [0, 1, 3])
    def test_11_warm_up_and_capture_advance_no_state(self, lab: Lab, warmups: int) -> None:
        count = lab.full((1,), 5.0)
        x = lab.full((4,), 1.0)

        def step(x: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            return x * count

        wrapper = lab.wrap_and_capture(
            step, x, scope={"state": TensorStateGuard([count]), "warmups": warmups}
        )
        assert count.item() == 5.0
        for number in range(6, 10):
            assert lab.step(wrapper, x).tolist() == [float(number)] * 4

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_11_recurrent_state_goes_on_where_eager_left_it(
        self, lab: Lab, mode: RuntimeMode
    ) -> None:
        model, reference = Recurrent(lab), Recurrent(lab)
        x = lab.random(1, 8, seed=2)
        for _ in range(3):
            model(x)
            reference(x)
        wrapper = lab.wrap_and_capture(
            model, x, mode=mode, scope={"state": TensorStateGuard(model.state), "warmups": 2}
        )
        for number in range(5):
            assert all(map(torch.equal, model.state, reference.state))
            x.copy_(lab.random(1, 8, seed=10 + number))
            assert torch.equal(lab.step(wrapper, x), reference(x))

    @pytest.mark.parametrize("name", ENVIRONMENTS)
    def test_13_capture_under_other_modes_than_warm_up_is_refused(
        self, lab: Lab, name: str
    ) -> None:
        wrapper, x = lab.wrap(lambda x: x @ x), lab.random(8, 8)
        with lab.library.capture_scope() as scope:
            with scope.step(NONE, KEY):
                wrapper(x)
            with (
                ENVIRONMENTS[name](lab.device.torch_device.type),
                pytest.raises(EnvironmentMismatchError, match=name),
                scope.step(FULL, KEY),
            ):
                wrapper(x)
            assert not wrapper.concrete_cudagraph_entries
            with scope.step(FULL, KEY):
                wrapper(x)
        assert torch.equal(lab.step(wrapper, x), x @ x)

    def test_13_first_use_in_a_recording_is_refused(self, lab: Lab) -> None:
        ready: set[Any] = set()

        def lazy(x: torch.Tensor) -> torch.Tensor:
            # As a library that makes a plan for each stream and shape.
            place = (lab.device.current_stream(), x.shape)
            if place not in ready:
                forbid_in_capture("making a plan")
                ready.add(place)
            return x + 1

        x, y = lab.full((8,), 1.0), lab.full((4,), 1.0)
        with pytest.raises(LateInitError, match="making a plan"):
            lab.wrap_and_capture(lazy, x, scope={"warmups": 0})
        assert lab.library.num_graphs == 0
        lazy(x)  # On another stream: of no use to the capture.
        with pytest.raises(LateInitError):
            lab.wrap_and_capture(lazy, x, scope={"warmups": 0})
        for each in (x, y):
            wrapper = lab.wrap_and_capture(lazy, each)
            assert lab.step(wrapper, each).eq(2).all()

    def test_15_wrapper_called_on_another_stream_is_refused(self, lab: Lab) -> None:
        wrapper, x = lab.wrap(lambda x: x + 1), lab.full((8,), 1.0)
        elsewhere = lab.device.stream("elsewhere")
        with lab.library.capture_scope() as scope, scope.step(FULL, KEY):
            with (
                lab.device.use(elsewhere),
                pytest.raises(EnvironmentMismatchError, match="elsewhere"),
            ):
                wrapper(x)
            assert lab.library.num_graphs == 0
            wrapper(x)
        assert lab.step(wrapper, x).tolist() == [2.0] * 8

    def test_15_capture_inside_a_capture_is_part_of_it(self, lab: Lab) -> None:
        inner, x = lab.wrap(lambda x: x * 2, name="inner"), lab.full((8,), 3.0)
        outer = lab.wrap(lambda x: inner(x) + 1)
        with lab.library.capture_scope() as scope:
            with scope.step(FULL, KEY):
                outer(x)
            assert len(scope.programs) == 1
        assert not inner.concrete_cudagraph_entries
        assert lab.library.num_cudagraph_captured == 1
        assert lab.step(outer, x).tolist() == [7.0] * 8

    def test_15_scope_inside_a_recording_is_refused(self, lab: Lab) -> None:
        def greedy(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            with pytest.raises(CaptureInProgressError), lab.library.capture_scope():
                pass
            return y + 1

        x = lab.full((8,), 3.0)
        wrapper = lab.wrap_and_capture(greedy, x)
        assert lab.step(wrapper, x).tolist() == [7.0] * 8

    def test_15_scope_in_another_librarys_recording_is_refused(self, lab: Lab) -> None:
        with Lab(lab.device) as other:
            inner, x = other.wrap(lambda x: x * 2, name="inner"), lab.full((8,), 3.0)
            other.capture(inner, x)

            def greedy(x: torch.Tensor) -> torch.Tensor:
                with pytest.raises(CaptureInProgressError), other.library.capture_scope():
                    pass
                return inner(x) + 1

            wrapper = lab.wrap(greedy)
            lab.capture(wrapper, x)
            x.fill_(4)
            assert lab.step(wrapper, x).tolist() == [9.0] * 8

    def test_15_replay_inside_a_replay_is_refused(self, lab: Lab) -> None:
        draft, y = lab.wrap(lambda y: y @ y + 1, name="draft"), lab.full((64, 64), 3.0)
        nested = []

        @break_point
        def eager(x: torch.Tensor) -> torch.Tensor:
            if nested:
                lab.step(draft, y)
            return x * 1

        main, x = lab.wrap(lambda x: (x + 1) + eager(x * 2), PIECEWISE), lab.full((64, 64), 1.0)
        lab.capture(main, x)
        lab.capture(draft, y)
        lab.step(draft, y)
        assert lab.step(main, x)[0, 0].item() == 4
        nested.append(True)
        with pytest.raises(NestedReplayError, match="draft"):
            lab.step(main, x)
        nested.clear()
        assert lab.step(main, x)[0, 0].item() == 4
        assert torch.equal(lab.step(draft, y), y @ y + 1)

    def test_6_tensors_of_an_eager_segment_stay_views(self, lab: Lab) -> None:
        eager = break_point(lambda x: ((y := x * 2), y, y[:4], torch.complex(y, y).conj()))

        def model(x: torch.Tensor) -> torch.Tensor:
            one, same, part, conjugated = eager(x + 1)
            part.add_(one[4:])
            return one + same + conjugated.imag

        wrapper, x = lab.wrap(model, PIECEWISE), lab.random(8)
        lab.capture(wrapper, x)
        for seed in (1, 2):
            x.copy_(lab.random(8, seed=seed))
            assert torch.equal(lab.step(wrapper, x), model(x))

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_15_capture_of_nothing_is_refused(self, lab: Lab, mode: RuntimeMode) -> None:
        x = lab.full((8, 8), 1.0)
        with pytest.raises(EmptyCaptureError):
            lab.wrap_and_capture(lambda x: x.t()[1:], x, mode=mode)
        assert lab.library.num_graphs == 0
        wrapper = lab.wrap_and_capture(lambda x: x.t() + 1, x, mode=mode)
        num_nodes = wrapper.concrete_cudagraph_entries[KEY].memory.num_nodes
        assert num_nodes > 0
        assert lab.step(wrapper, x).eq(2).all()

    def test_15_of_two_threads_in_one_scope_one_captures(self, lab: Lab) -> None:
        inside, refused = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def model(x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert refused.wait(20)
            return x + 1

        def second() -> None:
            assert inside.wait(20)
            try:
                wrapper(x)
            except CaptureInProgressError as error:
                errors.append(error)
            finally:
                refused.set()

        wrapper, x = lab.wrap(model), lab.full((8,), 1.0)
        with lab.library.capture_scope() as scope, scope.step(FULL, KEY):
            thread = threading.Thread(target=contextvars.copy_context().run, args=(second,))
            thread.start()
            wrapper(x)
            thread.join()
        assert len(errors) == 1
        assert len(wrapper.concrete_cudagraph_entries) == 1
        assert lab.library.num_cudagraph_captured == 1
        assert lab.step(wrapper, x).tolist() == [2.0] * 8

    @pytest.mark.parametrize("form", ["returned", "written"])
    def test_16_side_stream_work_of_an_eager_segment_is_awaited(self, lab: Lab, form: str) -> None:
        device, side = lab.device, lab.library.stream("side")

        def multiply(v: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            device.order(side, device.current_stream())
            with device.use(side):
                keep_busy(device)
                return torch.mul(v, 7, out=out)

        eager = break_point(multiply) if form == "returned" else break_point(multiply, out="out")
        v = lab.full((1 << 16,), 1.0)
        wrapper = lab.wrap_and_capture(lambda v: eager(v + 0) + 3, v, mode=PIECEWISE)
        for value in (1.0, 4.0, -2.0):
            v.fill_(value)
            assert lab.step(wrapper, v).eq(value * 7 + 3).all()

    def test_16_registered_stream_is_joined_and_forked_at_a_break(self, lab: Lab) -> None:
        device, side = lab.device, lab.library.stream("side")
        seen: list[float] = []
        look = break_point(lambda y: seen.append(y.sum().item()))

        def model(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            device.order(side, device.current_stream())
            with device.use(side):
                keep_busy(device)
                z = y + 1
            look(y)
            with device.use(side):
                w = z * 3
            device.order(device.current_stream(), side)
            return w + y

        x = lab.full((4,), 1.0)
        wrapper = lab.wrap_and_capture(model, x, mode=PIECEWISE)
        assert wrapper.concrete_cudagraph_entries[KEY].num_graphs == 2
        for value in (1.0, 4.0):
            x.fill_(value)
            assert lab.step(wrapper, x).tolist() == [(value * 2 + 1) * 3 + value * 2] * 4
            assert seen[-1] == value * 8

    def test_16_unregistered_stream_unjoined_is_refused(self, lab: Lab) -> None:
        device, side = lab.device, lab.device.stream("private")

        def forgets(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            device.order(side, device.current_stream())
            with device.use(side):
                return y + 1

        x = lab.full((8,), 1.0)
        with pytest.raises(UnjoinedStreamError):
            lab.wrap_and_capture(forgets, x, scope={"warmups": 0})
        assert lab.library.num_graphs == 0
        lab.library.register_stream(side)
        wrapper = lab.wrap_and_capture(forgets, x, scope={"warmups": 0})
        for value in (1.0, 4.0):
            x.fill_(value)
            assert lab.step(wrapper, x).tolist() == [value * 2 + 1] * 8

    @pytest.mark.usefixtures("usual_heap")
    @pytest.mark.parametrize("enabled", [True, False])
    @pytest.mark.parametrize("frozen", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    def test_17_collector_is_left_as_it_was(
        self, make_lab: Callable[..., Lab], enabled: bool, frozen: bool, fails: bool
    ) -> None:
        lab = make_lab(frozen=False)

        def body(x: torch.Tensor) -> torch.Tensor:
            assert not gc.isenabled()
            assert is_heap_frozen()
            if fails and lab.device.is_capturing():
                raise ValueError("injected")
            return x + 1

        gc.unfreeze()
        if frozen:
            gc.freeze()
        num_frozen = gc.get_freeze_count()
        if not enabled:
            gc.disable()
        try:
            lab.wrap_and_capture(body, lab.full((8,), 1.0))
        except ValueError:
            assert fails
        finally:
            is_enabled = gc.isenabled()
            gc.enable()
        assert is_enabled is enabled
        # Frozen objects may die; none may join them.
        assert is_heap_frozen() is frozen
        assert gc.get_freeze_count() <= num_frozen + MOST_IMMORTAL
        gc.unfreeze()

    def test_18_second_replay_stream_is_refused_by_pointer_check(
        self, make_lab: Callable[..., Lab]
    ) -> None:
        lab = make_lab(stale_check=StaleCheck.POINTER)
        x = lab.full((8,), 1.0)
        wrapper = lab.wrap_and_capture(lambda x: x * 2, x)
        assert lab.step(wrapper, x).tolist() == [2.0] * 8
        with (
            lab.device.use(lab.device.stream("second")),
            pytest.raises(StreamRaceError, match="second"),
        ):
            lab.step(wrapper, x)
        x.fill_(5.0)
        assert lab.step(wrapper, x).tolist() == [10.0] * 8

    def test_19_replays_advance_the_random_sequence(self, lab: Lab) -> None:
        x = lab.full((64,), 0.0)
        wrapper = lab.wrap_and_capture(lambda x: x + torch.rand_like(x), x)
        torch.manual_seed(7)
        first, second = (lab.step(wrapper, x).clone() for _ in range(2))
        assert not torch.equal(first, second)
        torch.manual_seed(7)
        assert torch.equal(lab.step(wrapper, x), first)

    def test_19_declared_generator_draws_what_eager_would(
        self, make_lab: Callable[..., Lab], device: Device
    ) -> None:
        generator = torch.Generator(device.torch_device)
        lab = make_lab(generators=[generator])
        x = lab.full((64,), 1.0)

        def draw(x: torch.Tensor) -> torch.Tensor:
            own = torch.rand(x.shape, generator=generator, device=x.device)
            return torch.nn.functional.dropout(x, 0.5) + own

        def seed(number: int) -> None:
            torch.manual_seed(number)
            generator.manual_seed(number + 1)

        eager = {}
        for number in (3, 8):
            seed(number)
            eager[number] = [draw(x) for _ in range(3)]
        wrapper = lab.wrap_and_capture(draw, x)
        for number in (3, 8, 3):
            seed(number)
            for expected in eager[number]:
                assert torch.equal(lab.step(wrapper, x), expected)

    def test_20_captures_and_retirements_leave_no_charge(self, lab: Lab) -> None:
        x = lab.full((1024,), 1.0)
        charges = []
        for _ in range(20):
            wrapper = lab.wrap_and_capture(lambda x: (x * 2).relu() + 1, x)
            assert lab.step(wrapper, x).eq(3).all()
            lab.library.retire()
            charges.append((lab.library.num_graphs, lab.library.charged_bytes))
        assert set(charges) == {(0, 0)}

    def test_21_replaced_entry_of_a_container_is_named_by_path(self, lab: Lab) -> None:
        x = lab.full((4,), 1.0)
        inputs = {"a": [x]}
        wrapper = lab.wrap_and_capture(lambda d: d["a"][0] + 1, d=inputs)
        lab.step(wrapper, d=inputs)
        inputs["a"][0] = lab.full((4,), 5.0)
        with pytest.raises(StaleInputError, match=r": d\['a'\]\[0\]"):
            lab.step(wrapper, d=inputs)

    def test_22_inference_mode_makes_no_difference(self, lab: Lab) -> None:
        buffers = lab.buffers(BufferSpec("x", ("tokens",), torch.float32))
        wrapper = lab.capture_sizes(lambda x: x + 1, buffers)
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                out = lab.staged(wrapper, buffers, 3, x=lab.full((3,), 4.0))
                assert out[:3].tolist() == [5.0] * 3

    def test_24_failed_replay_is_not_repeated_eagerly(self, lab: Lab) -> None:
        state, calls = lab.full((4,), 0.0), []

        @break_point(out="out")
        def eager(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            calls.append(None)
            if len(calls) == 5:
                raise ValueError("injected")
            out = torch.empty_like(x) if out is None else out
            return out.copy_(x)

        def step(x: torch.Tensor) -> torch.Tensor:
            state.add_(1)
            return eager(x + 1) * 2

        x = lab.full((4,), 1.0)
        wrapper = lab.wrap_and_capture(
            step, x, mode=PIECEWISE, scope={"state": TensorStateGuard([state])}
        )
        count = len(calls)
        calls.extend([None] * (2 - count))
        for _ in range(2):
            assert lab.step(wrapper, x).tolist() == [4.0] * 4
        with pytest.raises(ValueError, match="injected"):
            lab.step(wrapper, x)
        # The first graph ran once more, nothing of it twice, and the program still serves.
        assert state.tolist() == [3.0] * 4
        assert lab.step(wrapper, x).tolist() == [4.0] * 4

    def test_25_sizes_captured_upwards_are_right(
        self, make_lab: Callable[..., Lab], record_property: Callable[[str, int], None]
    ) -> None:
        width, pool_bytes = 1 << 16, []
        for order in (SIZES, SIZES[::-1]):
            lab = make_lab()
            buffers = lab.buffers(BufferSpec("x", ("tokens", width), torch.float32))
            wrapper = lab.capture_sizes(lambda x: (x + 1) * 2, buffers, sizes=order)
            for n in (8, 3, 2, 7, 1):
                out = lab.staged(wrapper, buffers, n, x=lab.full((n, width), float(n)))
                assert out[:n].eq(2 * n + 2).all()
            [generation] = lab.library.generations
            pool_bytes.append(generation.pool.bytes())
        downwards, upwards = pool_bytes
        record_property("pool_bytes_downwards", downwards)
        record_property("pool_bytes_upwards", upwards)
        assert upwards >= downwards >= max(SIZES) * width * 4

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphrt import (
    SENTINEL,
    ZERO,
    BatchDescriptor,
    BufferSet,
    BufferSpec,
    CaptureJob,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    Device,
    ForwardContext,
    GraphBudget,
    GraphLibrary,
    GraphSegment,
    OutputSpec,
    Program,
    RuntimeMode,
    StaleCheck,
    TensorStateGuard,
    Workspace,
    break_point,
    check_replay,
    forbid_in_capture,
)
from graphrt.errors import (
    AmbientError,
    CaptureInProgressError,
    CaptureOutsideScopeError,
    EmptyCaptureError,
    EscapedAllocationError,
    FrozenBufferError,
    InvalidProgramError,
    LateInitError,
    StaleInputError,
    StreamRaceError,
    UnjoinedStreamError,
    UnkeyedValueError,
    VerificationError,
)
from graphrt.graphs.collection import MOST_IMMORTAL, is_heap_frozen

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
KEY = BatchDescriptor(8)
SIZES = (8, 4, 2)


class Bench:
    """A library on the lane's device, and the usual moves."""

    def __init__(self, device: Device, **library_options: Any) -> None:
        self.device = device
        self.library = GraphLibrary(device, **library_options)

    def full(self, shape: tuple[int, ...], value: float) -> torch.Tensor:
        return torch.full(shape, value, device=self.device.torch_device)

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device.torch_device)

    def wrap(
        self, fn: Callable[..., Any], mode: RuntimeMode = FULL, **options: Any
    ) -> CUDAGraphWrapper:
        return CUDAGraphWrapper(fn, self.library, mode, **options)

    def capture(
        self,
        fn: Callable[..., Any],
        *args: Any,
        mode: RuntimeMode = FULL,
        key: BatchDescriptor = KEY,
        scope: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> CUDAGraphWrapper:
        wrapper = fn if isinstance(fn, CUDAGraphWrapper) else self.wrap(fn, mode)
        with self.library.capture_scope(**(scope or {})) as opened:
            opened.capture_all(
                [CaptureJob(wrapper, wrapper.runtime_mode, key, lambda: (args, kwargs))]
            )
        return wrapper

    def step(
        self,
        wrapper: CUDAGraphWrapper,
        *args: Any,
        key: BatchDescriptor = KEY,
        **kwargs: Any,
    ) -> Any:
        with ForwardContext(wrapper.runtime_mode, key):
            return wrapper(*args, **kwargs)

    def buffers(self, *specs: BufferSpec) -> BufferSet:
        sizes = {"tokens": max(SIZES)}
        buffers = BufferSet(specs, sizes, lambda key: {"tokens": key.num_tokens}, self.device)
        self.library.add_buffers(buffers)
        return buffers

    def capture_sizes(
        self, fn: Callable[..., Any], buffers: BufferSet, sizes: Any = SIZES, **scope: Any
    ) -> CUDAGraphWrapper:
        wrapper = CUDAGraphWrapper(fn, self.library, FULL)
        jobs = [
            CaptureJob(wrapper, FULL, key, lambda key=key: ((), buffers.bind(key).views))
            for key in map(BatchDescriptor, sizes)
        ]
        with self.library.capture_scope(**scope) as opened:
            opened.capture_all(jobs)
        return wrapper

    def staged(
        self, wrapper: CUDAGraphWrapper, buffers: BufferSet, n: int, **values: torch.Tensor
    ) -> Any:
        key = BatchDescriptor(min(size for size in SIZES if size >= n))
        bound = buffers.bind(key)
        bound.stage(n, values)
        return self.step(wrapper, key=key, **bound.views)


def graphs_of(program: Program) -> list[Any]:
    return [part.graph for part in program.segments if isinstance(part, GraphSegment)]


def watch_resets(monkeypatch: pytest.MonkeyPatch, graph_type: Any, device: Device) -> list[bool]:
    """Note for every graph that is reset from now on whether a window was open."""
    reset, in_window = graph_type.reset, []

    def watched(graph: Any) -> None:
        in_window.append(device.is_capturing())
        reset(graph)

    monkeypatch.setattr(graph_type, "reset", watched)
    return in_window


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

    def __init__(self, bench: Bench) -> None:
        def integers(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=bench.device.torch_device)

        self.qkv = bench.random(3, self.num_tokens, self.width)
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
        # As a kernel that was told the longest length: it does not see what lies beyond.
        rows = request * longest + position.clamp(max=longest - 1)
        padded = qkv.new_zeros(3, self.num_requests * longest, self.width).index_copy(1, rows, qkv)
        q, k, v = padded.view(3, self.num_requests, longest, self.width)
        hidden = torch.arange(longest, device=lengths.device) >= lengths[:, None]
        scores = (q @ k.transpose(1, 2)).masked_fill(hidden[:, None], float("-inf"))
        return (scores.softmax(-1) @ v).flatten(0, 1)[rows]


class Recurrent:
    """A step that reads and advances three kinds of state: recurrent, a cache, a position."""

    def __init__(self, bench: Bench) -> None:
        self.weight = bench.random(8, 8)
        self.hidden = bench.random(1, 8, seed=1)
        self.cache = bench.full((16, 8), 0.0)
        self.position = torch.zeros(1, dtype=torch.int64, device=bench.device.torch_device)

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


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Scopes collect, and torch's own heap takes a fifth of a second; frozen, it is skipped."""
    was_frozen = is_heap_frozen()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_frozen:
            gc.freeze()


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


AMBIENTS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "autocast": lambda kind: torch.autocast(kind, torch.bfloat16),
    "inference_mode": lambda kind: torch.inference_mode(),
    "sdpa": lambda kind: sdpa_kernel(SDPBackend.MATH),
    "default_dtype": lambda kind: float64_by_default(),
    "deterministic": lambda kind: deterministic(),
    "float32_precision": lambda kind: tf32(),
}
"""By the name of what changes; each takes the kind of device."""


class BugClasses:
    @pytest.fixture(autouse=True)
    def _frozen_heap(self, device: Device) -> Iterator[None]:
        with frozen_heap():
            yield

    @pytest.fixture
    def make_bench(self, device: Device) -> Iterator[Callable[..., Bench]]:
        made: list[Bench] = []

        def make(**library_options: Any) -> Bench:
            made.append(Bench(device, **library_options))
            return made[-1]

        with torch.no_grad():
            yield make
        for bench in made:
            bench.library.close()

    @pytest.fixture
    def bench(self, make_bench: Callable[..., Bench]) -> Bench:
        return make_bench()

    def test_1_a_captured_tensor_is_kept_when_its_owner_drops_it(self, bench: Bench) -> None:
        owner = {"w": bench.full((256,), 3.0) * 2}
        x = bench.full((256,), 1.0)
        wrapper = bench.capture(lambda x: x + owner["w"], x)
        owner.clear()
        gc.collect()
        others = [bench.full((256,), -9.0) for _ in range(64)]
        assert bench.step(wrapper, x).eq(7).all()
        assert all(other.eq(-9).all() for other in others)

    def test_1_the_parts_of_a_packed_tensor_are_kept(self, bench: Bench) -> None:
        owner = {"w": Packed(bench.full((16, 16), 3.0).to(torch.int8), bench.full((16,), 0.5))}
        x = bench.full((16,), 1.0)
        wrapper = bench.capture(lambda x: x @ owner["w"], x)
        program = wrapper.concrete_cudagraph_entries[KEY]
        assert program.external_bytes == 16 * 16 + 2 * x.nbytes
        owner.clear()
        gc.collect()
        others = [bench.full((n,), -9.0) for _ in range(64) for n in (16, 64)]
        assert bench.step(wrapper, x).eq(24).all()
        assert all(other.eq(-9).all() for other in others)

    def test_1_what_only_a_pointer_knows_is_kept_by_name(self, bench: Bench) -> None:
        x, hidden = bench.full((256,), 1.0), bench.full((256,), 3.0)
        wrapper = bench.capture(lambda x: x + 1, x, scope={"holds": [hidden]})
        program = wrapper.concrete_cudagraph_entries[KEY]
        assert program.external_bytes == x.nbytes + hidden.nbytes
        address = hidden.data_ptr()
        del hidden
        gc.collect()
        others = [bench.full((256,), -9.0) for _ in range(64)]
        assert address not in {other.data_ptr() for other in others}

    @pytest.mark.parametrize("rebinds", ["parameter", "attribute"])
    def test_2_rebound_storage_is_noticed_and_a_copy_into_it_is_not(
        self, bench: Bench, rebinds: str
    ) -> None:
        model = torch.nn.Linear(8, 8, device=bench.device.torch_device)
        model.scale = bench.full((8,), 2.0)
        x = bench.full((2, 8), 1.0)
        forward = model.forward
        model.forward = lambda x: forward(x) * model.scale  # type: ignore[method-assign]
        wrapper = bench.capture(model, x)
        bench.step(wrapper, x)
        model.weight.copy_(model.weight * 3)
        assert bench.library.check_externals().is_unchanged
        torch.testing.assert_close(bench.step(wrapper, x), model(x))
        if rebinds == "parameter":
            model.weight.data = model.weight.data.clone()
        else:
            model.scale = model.scale.clone()
        report = bench.library.check_externals()
        assert report.moved == ("weight" if rebinds == "parameter" else "scale",)
        with pytest.raises(InvalidProgramError):
            bench.step(wrapper, x)

    def test_2_a_part_of_a_packed_weight_is_noticed_by_its_name(self, bench: Bench) -> None:
        model = torch.nn.Module()
        model.weight = Packed(bench.random(8, 8).round().to(torch.int8), bench.full((8,), 0.5))
        model.forward = lambda x: x @ model.weight
        x = bench.random(2, 8, seed=1)
        wrapper = bench.capture(model, x)
        assert torch.equal(bench.step(wrapper, x), model(x))
        model.weight.codes.mul_(3)
        assert bench.library.check_externals().is_unchanged
        assert torch.equal(bench.step(wrapper, x), model(x))
        model.weight.codes = model.weight.codes.clone()
        assert bench.library.check_externals().moved == ("weight.codes",)
        with pytest.raises(InvalidProgramError, match=r"weight\.codes"):
            bench.step(wrapper, x)

    def test_3_a_host_value_that_is_not_in_the_key_is_refused(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        wrapper = bench.capture(lambda x, n: x + n, x, 4)
        assert bench.step(wrapper, x, 4).tolist() == [5.0] * 4
        with pytest.raises(UnkeyedValueError):
            bench.step(wrapper, x, 7)

    def test_3_a_longest_length_that_python_knew_is_flagged_by_verification(
        self, bench: Bench
    ) -> None:
        attention = Attention(bench)
        attention.ask([4, 2, 2])
        wrapper = bench.capture(attention, *attention.inputs)

        def verify() -> None:
            check_replay(
                mode=FULL,
                key=KEY,
                run_eager=lambda: attention(*attention.inputs),
                run_replay=lambda: bench.step(wrapper, *attention.inputs),
            )

        # Other lengths are tensors: right, as long as the longest stays.
        for lengths in ([4, 2, 2], [1, 3, 4], [4, 4, 0][::-1]):
            attention.ask(lengths)
            verify()
        attention.ask([6, 1, 1])
        with pytest.raises(VerificationError, match="outputs"):
            verify()

    @pytest.mark.parametrize("sizes", [(8, 3, 8, 5), (3, 8, 5, 8), (5, 3, 8, 2)])
    def test_5_padded_rows_never_touch_state(self, bench: Bench, sizes: tuple[int, ...]) -> None:
        place = bench.device.torch_device
        cache = bench.full((12, 2), 0.0)
        buffers = bench.buffers(
            BufferSpec("x", ("tokens", 2), torch.float32),
            BufferSpec("slots", ("tokens",), torch.int64, SENTINEL(11)),
            BufferSpec("bonus", ("tokens",), torch.float32, optional=True),
        )

        def step(x: torch.Tensor, slots: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
            cache.index_put_((slots,), x + bonus[:, None], accumulate=True)
            return cache[slots]

        wrapper = bench.capture_sizes(step, buffers, state=TensorStateGuard([cache]))
        assert cache.eq(0).all()
        buffers.bind(KEY).stage(
            8,
            {
                "x": bench.full((8, 2), 1e9),
                "slots": torch.arange(8, device=place),
                "bonus": bench.full((8,), 1e9),
            },
        )
        expected = bench.full((12, 2), 0.0)
        for number, n in enumerate(sizes, start=1):
            slots = (torch.arange(n, device=place) * 3 + number) % 11
            values = {"x": bench.full((n, 2), float(number)), "slots": slots}
            expected[slots] += number
            if number % 2:
                values["bonus"] = bench.full((n,), 1.0)
                expected[slots] += 1
            out = bench.staged(wrapper, buffers, n, **values)
            assert torch.equal(out[:n], expected[slots])
            assert torch.equal(cache[:11], expected[:11])

    @pytest.mark.parametrize("sizes", [(8, 3, 8, 5), (3, 8, 5, 8)])
    def test_5_padded_rows_never_touch_a_paged_cache(
        self, bench: Bench, sizes: tuple[int, ...]
    ) -> None:
        # Request i owns block 7 - i; the last block is where padding writes.
        place, block_size, sink = bench.device.torch_device, 4, 8
        cache = bench.full((9, block_size, 2), 0.0)
        buffers = bench.buffers(
            BufferSpec("x", ("tokens", 2), torch.float32),
            BufferSpec("slots", ("tokens",), torch.int64, SENTINEL(sink * block_size)),
            BufferSpec("table", ("tokens", 1), torch.int64, SENTINEL(sink)),
            BufferSpec("lengths", ("tokens",), torch.int64, ZERO),
        )

        def step(
            x: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
        ) -> torch.Tensor:
            cache.view(-1, 2).index_copy_(0, slots, x)
            seen = torch.arange(block_size, device=lengths.device) < lengths[:, None]
            return (cache[table].flatten(1, 2) * seen[:, :, None]).sum(1)

        wrapper = bench.capture_sizes(step, buffers, state=TensorStateGuard([cache]))
        assert cache.eq(0).all()
        blocks = 7 - torch.arange(8, device=place)
        full = {
            "x": bench.full((8, 2), 1e9),
            "slots": blocks * block_size,
            "table": blocks[:, None],
            "lengths": torch.full((8,), 4, device=place),
        }
        buffers.bind(KEY).stage(8, full)
        expected, length = bench.full((9, block_size, 2), 0.0), [0] * 8
        for number, n in enumerate(sizes, start=1):
            for index in range(n):
                expected[7 - index, length[index]] = number
                length[index] += 1
            lengths = torch.tensor(length[:n], device=place)
            values = {
                "x": bench.full((n, 2), float(number)),
                "slots": blocks[:n] * block_size + lengths - 1,
                "table": blocks[:n, None],
                "lengths": lengths,
            }
            out = bench.staged(wrapper, buffers, n, **values)
            assert torch.equal(out[:n], expected[blocks[:n]].sum(1))
            assert torch.equal(cache[:sink], expected[:sink])

    def test_6_clones_survive_a_thousand_alternating_calls(self, bench: Bench) -> None:
        buffers = bench.buffers(BufferSpec("x", ("tokens",), torch.float32))
        wrapper = bench.capture_sizes(lambda x: x * 2, buffers)
        spec = OutputSpec({"": "tokens"}, "clone")
        takes = {
            key.num_tokens: spec.bind(program).take
            for key, program in wrapper.concrete_cudagraph_entries.items()
        }
        held: list[tuple[int, torch.Tensor]] = []
        for number in range(1000):
            n = (8, 2, 3)[number % 3]
            bench.staged(wrapper, buffers, n, x=bench.full((n,), float(number)))
            held.append((number, takes[min(s for s in SIZES if s >= n)](n)))
            held = held[-7:]
        assert all(tensor.eq(2.0 * number).all() for number, tensor in held)

    def test_6_clones_taken_on_two_streams_survive_a_thousand_alternating_calls(
        self, bench: Bench
    ) -> None:
        device, buffers = bench.device, bench.buffers(BufferSpec("x", ("tokens",), torch.float32))
        wrapper = bench.capture_sizes(lambda x: x * 2, buffers)
        spec = OutputSpec({"": "tokens"}, "clone")
        takes = {
            key.num_tokens: spec.bind(program).take
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
                bench.staged(wrapper, buffers, n, x=bench.full((n,), float(number)))
                held.append((number, takes[min(s for s in SIZES if s >= n)](n)))
            held = held[-7:]
        device.synchronize()
        assert all(tensor.eq(2.0 * number).all() for number, tensor in held)

    def test_7_nothing_is_captured_while_serving(self, bench: Bench) -> None:
        x = bench.full((8,), 1.0)
        wrapper = bench.capture(lambda x: x + 1, x)
        count = bench.library.num_cudagraph_captured
        for _ in range(100):
            with pytest.raises(CaptureOutsideScopeError):
                bench.step(wrapper, x, key=BatchDescriptor(16))
        assert bench.library.num_cudagraph_captured == count == 1

    @pytest.mark.parametrize(("generation_size", "num_rounds"), [(1, 200), (2, 60)])
    def test_8_graphs_that_come_and_go_leave_the_others_right(
        self,
        make_bench: Callable[..., Bench],
        monkeypatch: pytest.MonkeyPatch,
        generation_size: int,
        num_rounds: int,
    ) -> None:
        """Six shapes take turns on two graphs."""
        bench = make_bench(budget=GraphBudget(max_graphs=2), generation_size=generation_size)
        device, choice = bench.device, random.Random(8)
        # Few rows of many columns are summed in parts, for which the library needs its workspace.
        depth = 4096 if device.name == "cuda" else 64
        num_rounds = num_rounds if device.name == "cuda" else num_rounds // 4
        inputs, weights = [], []
        for rows, dtype in itertools.product((2, 8, 16), (torch.bfloat16, torch.float32)):
            inputs.append(bench.random(rows, depth, seed=rows).to(dtype))
            weights.append((bench.random(depth, 32, seed=rows) / depth**0.5).to(dtype))
        bias = bench.random(32, seed=1)

        def forward(x: torch.Tensor, index: int) -> torch.Tensor:
            weight = weights[index]
            hidden = torch.nn.functional.linear(x, weight.t(), bias.to(x.dtype))
            return torch.relu(hidden) @ weight[:32]

        wrapper = bench.wrap(forward)
        entries = wrapper.concrete_cudagraph_entries

        def capture(index: int) -> None:
            key = BatchDescriptor(index + 1)
            bench.capture(wrapper, inputs[index], index, key=key, scope={"generation": "lazy"})

        capture(0)
        [graph] = graphs_of(entries[BatchDescriptor(1)])
        in_window = watch_resets(monkeypatch, type(graph), device)
        for _ in range(num_rounds):
            index = choice.randrange(len(inputs))
            if BatchDescriptor(index + 1) not in entries:
                capture(index)
            assert bench.library.num_graphs <= 2
            for key in list(entries):
                index = key.num_tokens - 1
                x = inputs[index].normal_()
                assert torch.equal(bench.step(wrapper, x, index, key=key), forward(x, index))
        assert len(in_window) > num_rounds / 2
        assert not any(in_window)

    def test_8_a_dead_cycle_that_holds_a_program_is_collected_in_no_window(
        self, bench: Bench, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other, x = make_bench(), bench.full((8,), 1.0)
        kept = other.capture(lambda x: x + 1, x)
        program = kept.concrete_cudagraph_entries[KEY]
        [graph] = graphs_of(program)
        in_window = watch_resets(monkeypatch, type(graph), bench.device)
        cycle: list[Any] = [program, graph]
        cycle.append(cycle)
        del program, graph, cycle

        def collects(x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            gc.collect()
            return y + 1

        wrapper = bench.capture(collects, x)
        assert not in_window
        assert bench.step(wrapper, x).tolist() == [4.0] * 8
        assert other.step(kept, x).tolist() == [2.0] * 8
        other.library.retire()
        assert in_window == [False]

    def test_9_a_cache_born_in_the_window_is_named(self, bench: Bench) -> None:
        class Lazy(torch.nn.Module):
            ws: torch.Tensor | None = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.ws is None:
                    self.ws = torch.zeros_like(x)
                return x + self.ws

        model, x = Lazy(), bench.full((8,), 1.0)
        wrapper = CUDAGraphWrapper(model, bench.library, FULL)
        with (
            pytest.raises(EscapedAllocationError, match="ws"),
            bench.library.capture_scope(warmups=0) as scope,
        ):
            scope.capture_all([CaptureJob(wrapper, FULL, KEY, lambda: ((x,), {}))])
        assert not wrapper.concrete_cudagraph_entries

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    @pytest.mark.parametrize("weak", [True, False])
    def test_9_no_block_of_a_window_lives_on_but_an_owned_output(
        self, bench: Bench, mode: RuntimeMode, weak: bool
    ) -> None:
        gap = break_point(lambda x: x * 2)
        options = CUDAGraphOptions(weak_ref_output=weak)
        wrapper = bench.wrap(lambda x: gap(x @ x + 1) @ x, mode, cudagraph_options=options)
        x = bench.random(8, 8)
        bench.capture(wrapper, x)
        program = wrapper.concrete_cudagraph_entries[KEY]
        [generation] = bench.library.generations
        live = [block.address for block in generation.pool.live_blocks()]
        assert live == ([] if weak else [program.outputs.data_ptr()])

    def test_10_a_workspace_stays_where_it_was_captured(self, bench: Bench) -> None:
        workspace = Workspace("scratch", bench.device.torch_device)
        need = {8: 8, 4: 64, 2: 2}
        buffers = bench.buffers(BufferSpec("x", ("tokens",), torch.float32))
        captured_over: list[int] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            scratch = workspace.get((need[len(x)],), torch.float32)[: len(x)]
            if bench.device.is_capturing():
                captured_over.append(scratch.data_ptr())
            return scratch.copy_(x) * 2

        wrapper = bench.capture_sizes(
            step, buffers, resources=[workspace], state=TensorStateGuard([])
        )
        address = workspace.get((1,), torch.uint8).data_ptr()
        assert captured_over == [address] * len(SIZES)
        for n in (8, 3, 2, 7):
            out = bench.staged(wrapper, buffers, n, x=bench.full((n,), float(n)))
            assert out[:n].tolist() == [2.0 * n] * n
        assert workspace.get((1,), torch.uint8).data_ptr() == address
        need[4] = 1000
        with ForwardContext(NONE, BatchDescriptor(4)), pytest.raises(FrozenBufferError):
            wrapper(buffers.bind(BatchDescriptor(4)).views["x"])

    @pytest.mark.parametrize("warmups", [0, 1, 3])
    def test_11_warm_up_and_capture_advance_no_state(self, bench: Bench, warmups: int) -> None:
        count = bench.full((1,), 5.0)
        x = bench.full((4,), 1.0)

        def step(x: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            return x * count

        wrapper = bench.capture(
            step, x, scope={"state": TensorStateGuard([count]), "warmups": warmups}
        )
        assert count.item() == 5.0
        for number in range(6, 10):
            assert bench.step(wrapper, x).tolist() == [float(number)] * 4

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_11_recurrent_state_and_caches_go_on_where_eager_left_them(
        self, bench: Bench, mode: RuntimeMode
    ) -> None:
        model, twin = Recurrent(bench), Recurrent(bench)
        x = bench.random(1, 8, seed=2)
        for _ in range(3):
            model(x)
            twin(x)
        wrapper = bench.capture(
            model, x, mode=mode, scope={"state": TensorStateGuard(model.state), "warmups": 2}
        )
        for number in range(5):
            assert all(map(torch.equal, model.state, twin.state))
            x.copy_(bench.random(1, 8, seed=10 + number))
            assert torch.equal(bench.step(wrapper, x), twin(x))

    @pytest.mark.parametrize("name", AMBIENTS)
    def test_13_a_capture_under_other_modes_than_its_warm_up_is_refused(
        self, bench: Bench, name: str
    ) -> None:
        wrapper, x = bench.wrap(lambda x: x @ x), bench.random(8, 8)
        with bench.library.capture_scope() as scope:
            with scope.step(NONE, KEY):
                wrapper(x)
            with (
                AMBIENTS[name](bench.device.torch_device.type),
                pytest.raises(AmbientError, match=name),
                scope.step(FULL, KEY),
            ):
                wrapper(x)
            assert not wrapper.concrete_cudagraph_entries
            with scope.step(FULL, KEY):
                wrapper(x)
        assert torch.equal(bench.step(wrapper, x), x @ x)

    def test_13_what_initialises_on_first_use_is_stopped_in_a_window_and_not_in_a_warm_up(
        self, bench: Bench
    ) -> None:
        ready: set[Any] = set()

        def lazy(x: torch.Tensor) -> torch.Tensor:
            # As a library that makes a plan for each stream and shape.
            place = (bench.device.current_stream(), x.shape)
            if place not in ready:
                forbid_in_capture("making a plan")
                ready.add(place)
            return x + 1

        x, y = bench.full((8,), 1.0), bench.full((4,), 1.0)
        with pytest.raises(LateInitError, match="making a plan"):
            bench.capture(lazy, x, scope={"warmups": 0})
        assert bench.library.num_graphs == 0
        lazy(x)  # On another stream: of no use to the capture.
        with pytest.raises(LateInitError):
            bench.capture(lazy, x, scope={"warmups": 0})
        for each in (x, y):
            wrapper = bench.capture(lazy, each)
            assert bench.step(wrapper, each).eq(2).all()

    def test_15_a_wrapper_called_on_another_stream_is_refused(self, bench: Bench) -> None:
        wrapper, x = bench.wrap(lambda x: x + 1), bench.full((8,), 1.0)
        elsewhere = bench.device.stream("elsewhere")
        with bench.library.capture_scope() as scope, scope.step(FULL, KEY):
            with bench.device.use(elsewhere), pytest.raises(AmbientError, match="elsewhere"):
                wrapper(x)
            assert bench.library.num_graphs == 0
            wrapper(x)
        assert bench.step(wrapper, x).tolist() == [2.0] * 8

    def test_15_a_capture_inside_a_capture_is_part_of_it(self, bench: Bench) -> None:
        inner, x = bench.wrap(lambda x: x * 2, name="inner"), bench.full((8,), 3.0)
        outer = bench.wrap(lambda x: inner(x) + 1)
        with bench.library.capture_scope() as scope:
            with scope.step(FULL, KEY):
                outer(x)
            assert scope.num_inlined == 1
        assert not inner.concrete_cudagraph_entries
        assert bench.library.num_cudagraph_captured == 1
        assert bench.step(outer, x).tolist() == [7.0] * 8

    def test_15_a_scope_inside_a_window_is_refused_and_the_capture_goes_on(
        self, bench: Bench
    ) -> None:
        def greedy(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            with pytest.raises(CaptureInProgressError), bench.library.capture_scope():
                pass
            return y + 1

        x = bench.full((8,), 3.0)
        wrapper = bench.capture(greedy, x)
        assert bench.step(wrapper, x).tolist() == [7.0] * 8

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_15_a_capture_of_nothing_is_an_error_and_one_of_something_has_nodes(
        self, bench: Bench, mode: RuntimeMode
    ) -> None:
        x = bench.full((8, 8), 1.0)
        with pytest.raises(EmptyCaptureError):
            bench.capture(lambda x: x.t()[1:], x, mode=mode)
        assert bench.library.num_graphs == 0
        wrapper = bench.capture(lambda x: x.t() + 1, x, mode=mode)
        num_nodes = wrapper.concrete_cudagraph_entries[KEY].memory.num_nodes
        assert num_nodes is None or num_nodes > 0
        assert bench.step(wrapper, x).eq(2).all()

    def test_15_of_two_threads_in_one_scope_one_captures(self, bench: Bench) -> None:
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

        wrapper, x = bench.wrap(model), bench.full((8,), 1.0)
        with bench.library.capture_scope() as scope, scope.step(FULL, KEY):
            thread = threading.Thread(target=contextvars.copy_context().run, args=(second,))
            thread.start()
            wrapper(x)
            thread.join()
        assert len(errors) == 1
        assert len(wrapper.concrete_cudagraph_entries) == 1
        assert bench.library.num_cudagraph_captured == 1
        assert bench.step(wrapper, x).tolist() == [2.0] * 8

    @pytest.mark.parametrize("form", ["returned", "written"])
    def test_16_side_stream_work_of_a_gap_is_waited_for(self, bench: Bench, form: str) -> None:
        device, side = bench.device, bench.library.stream("side")

        def multiply(v: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            device.order(side, device.current_stream())
            with device.use(side):
                keep_busy(device)
                return torch.mul(v, 7, out=out)

        gap = break_point(multiply) if form == "returned" else break_point(multiply, out="out")
        v = bench.full((1 << 16,), 1.0)
        wrapper = bench.capture(lambda v: gap(v + 0) + 3, v, mode=PIECEWISE)
        for value in (1.0, 4.0, -2.0):
            v.fill_(value)
            assert bench.step(wrapper, v).eq(value * 7 + 3).all()

    def test_16_a_registered_stream_is_joined_at_a_break_and_forked_again(
        self, bench: Bench
    ) -> None:
        device, side = bench.device, bench.library.stream("side")
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

        x = bench.full((4,), 1.0)
        wrapper = bench.capture(model, x, mode=PIECEWISE)
        assert wrapper.concrete_cudagraph_entries[KEY].num_graphs == 2
        for value in (1.0, 4.0):
            x.fill_(value)
            assert bench.step(wrapper, x).tolist() == [(value * 2 + 1) * 3 + value * 2] * 4
            assert seen[-1] == value * 8

    def test_16_an_unregistered_stream_that_is_not_joined_is_an_error(self, bench: Bench) -> None:
        device, side = bench.device, bench.device.stream("private")

        def forgets(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            device.order(side, device.current_stream())
            with device.use(side):
                return y + 1

        x = bench.full((8,), 1.0)
        with pytest.raises(UnjoinedStreamError):
            bench.capture(forgets, x, scope={"warmups": 0})
        assert bench.library.num_graphs == 0
        bench.library.register_stream(side)
        wrapper = bench.capture(forgets, x, scope={"warmups": 0})
        for value in (1.0, 4.0):
            x.fill_(value)
            assert bench.step(wrapper, x).tolist() == [value * 2 + 1] * 8

    @pytest.mark.parametrize(
        ("enabled", "frozen", "fails"),
        [(True, False, False), (False, False, False), (True, True, False), (False, True, True)],
    )
    def test_17_the_collector_is_left_as_it_was(
        self, bench: Bench, enabled: bool, frozen: bool, fails: bool
    ) -> None:
        def body(x: torch.Tensor) -> torch.Tensor:
            assert not gc.isenabled()
            assert is_heap_frozen()
            if fails and bench.device.is_capturing():
                raise ValueError("injected")
            return x + 1

        gc.unfreeze()
        if frozen:
            gc.freeze()
        num_frozen = gc.get_freeze_count()
        if not enabled:
            gc.disable()
        try:
            bench.capture(body, bench.full((8,), 1.0))
        except ValueError:
            assert fails
        finally:
            is_enabled = gc.isenabled()
            gc.enable()
        assert is_enabled is enabled
        # Frozen objects may die; none may join them.
        assert is_heap_frozen() is frozen
        assert gc.get_freeze_count() <= num_frozen + MOST_IMMORTAL

    def test_18_a_second_replay_stream_is_refused_where_pointers_are_checked(
        self, make_bench: Callable[..., Bench]
    ) -> None:
        bench = make_bench(stale_check=StaleCheck.POINTER)
        x = bench.full((8,), 1.0)
        wrapper = bench.capture(lambda x: x * 2, x)
        assert bench.step(wrapper, x).tolist() == [2.0] * 8
        with (
            bench.device.use(bench.device.stream("second")),
            pytest.raises(StreamRaceError, match="second"),
        ):
            bench.step(wrapper, x)
        x.fill_(5.0)
        assert bench.step(wrapper, x).tolist() == [10.0] * 8

    def test_19_replays_go_on_in_the_random_sequence(self, bench: Bench) -> None:
        x = bench.full((64,), 0.0)
        wrapper = bench.capture(lambda x: x + torch.rand_like(x), x)
        torch.manual_seed(7)
        first, second = (bench.step(wrapper, x).clone() for _ in range(2))
        assert not torch.equal(first, second)
        torch.manual_seed(7)
        assert torch.equal(bench.step(wrapper, x), first)

    def test_19_a_declared_generator_draws_what_eager_would_beside_the_default_one(
        self, make_bench: Callable[..., Bench], device: Device
    ) -> None:
        generator = torch.Generator(device.torch_device)
        bench = make_bench(generators=[generator])
        x = bench.full((64,), 1.0)

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
        wrapper = bench.capture(draw, x)
        for number in (3, 8, 3):
            seed(number)
            for expected in eager[number]:
                assert torch.equal(bench.step(wrapper, x), expected)

    def test_20_captures_and_retirements_leave_no_charge(self, bench: Bench) -> None:
        x = bench.full((1024,), 1.0)
        charges = []
        for _ in range(20):
            wrapper = bench.capture(lambda x: (x * 2).relu() + 1, x)
            assert bench.step(wrapper, x).eq(3).all()
            bench.library.retire()
            charges.append((bench.library.num_graphs, bench.library.charged_bytes))
        assert set(charges) == {(0, 0)}

    def test_21_a_replaced_entry_of_a_container_is_found_by_path(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        inputs = {"a": [x]}
        wrapper = bench.capture(lambda d: d["a"][0] + 1, d=inputs)
        bench.step(wrapper, d=inputs)
        inputs["a"][0] = bench.full((4,), 5.0)
        with pytest.raises(StaleInputError, match=r"kwargs\['d'\]\['a'\]\[0\]"):
            bench.step(wrapper, d=inputs)

    def test_22_inference_mode_makes_no_difference(self, bench: Bench) -> None:
        buffers = bench.buffers(BufferSpec("x", ("tokens",), torch.float32))
        wrapper = bench.capture_sizes(lambda x: x + 1, buffers)
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                out = bench.staged(wrapper, buffers, 3, x=bench.full((3,), 4.0))
                assert out[:3].tolist() == [5.0] * 3

    def test_24_a_failed_replay_is_never_run_again_eagerly(self, bench: Bench) -> None:
        state, calls = bench.full((4,), 0.0), []

        @break_point(out="out")
        def gap(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            calls.append(None)
            if len(calls) == 5:
                raise ValueError("injected")
            out = torch.empty_like(x) if out is None else out
            return out.copy_(x)

        def step(x: torch.Tensor) -> torch.Tensor:
            state.add_(1)
            return gap(x + 1) * 2

        x = bench.full((4,), 1.0)
        wrapper = bench.capture(step, x, mode=PIECEWISE, scope={"state": TensorStateGuard([state])})
        count = len(calls)
        calls.extend([None] * (2 - count))
        for _ in range(2):
            assert bench.step(wrapper, x).tolist() == [4.0] * 4
        with pytest.raises(ValueError, match="injected"):
            bench.step(wrapper, x)
        # The first graph ran once more, nothing of it twice, and the program still serves.
        assert state.tolist() == [3.0] * 4
        assert bench.step(wrapper, x).tolist() == [4.0] * 4

    def test_25_sizes_captured_upwards_are_right_and_cost_no_less(
        self, make_bench: Callable[..., Bench], record_property: Callable[[str, int], None]
    ) -> None:
        width, pool_bytes = 1 << 16, []
        for order in (SIZES, SIZES[::-1]):
            bench = make_bench()
            buffers = bench.buffers(BufferSpec("x", ("tokens", width), torch.float32))
            wrapper = bench.capture_sizes(lambda x: (x + 1) * 2, buffers, sizes=order)
            for n in (8, 3, 2, 7, 1):
                out = bench.staged(wrapper, buffers, n, x=bench.full((n, width), float(n)))
                assert out[:n].eq(2 * n + 2).all()
            [generation] = bench.library.generations
            pool_bytes.append(generation.pool.bytes())
        downwards, upwards = pool_bytes
        record_property("pool_bytes_downwards", downwards)
        record_property("pool_bytes_upwards", upwards)
        assert upwards >= downwards >= max(SIZES) * width * 4

"""Known bug classes of CUDA graphs that need no device of a kind: each lane runs them on its own.

The simulated lane has more cases of most of them, where its recorder sees more than a GPU shows.
A subclass is collected in a lane whose fixture ``device`` gives the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphrt import (
    SENTINEL,
    BatchDescriptor,
    BufferSet,
    BufferSpec,
    CaptureJob,
    CUDAGraphWrapper,
    Device,
    ForwardContext,
    GraphLibrary,
    OutputSpec,
    RuntimeMode,
    TensorStateGuard,
    break_point,
)
from graphrt.errors import (
    CaptureOutsideScopeError,
    EscapedAllocationError,
    FrozenBufferError,
    InvalidProgramError,
    StaleInputError,
    UnkeyedValueError,
)
from graphrt.graphs import Workspace

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
KEY = BatchDescriptor(8)
SIZES = (8, 4, 2)


class Bench:
    """A library on the lane's device, and the usual moves."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.library = GraphLibrary(device)

    def full(self, shape: tuple[int, ...], value: float) -> torch.Tensor:
        return torch.full(shape, value, device=self.device.torch_device)

    def capture(
        self,
        fn: Callable[..., Any],
        *args: Any,
        mode: RuntimeMode = FULL,
        key: BatchDescriptor = KEY,
        scope: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> CUDAGraphWrapper:
        wrapper = CUDAGraphWrapper(fn, self.library, mode)
        with self.library.capture_scope(**(scope or {})) as opened:
            opened.capture_all([CaptureJob(wrapper, mode, key, lambda: (args, kwargs))])
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


class BugClasses:
    @pytest.fixture
    def bench(self, device: Device) -> Iterator[Bench]:
        bench = Bench(device)
        with torch.no_grad():
            yield bench
        bench.library.close()

    def test_1_a_captured_tensor_is_kept_when_its_owner_drops_it(self, bench: Bench) -> None:
        owner = {"w": bench.full((256,), 3.0) * 2}
        x = bench.full((256,), 1.0)
        wrapper = bench.capture(lambda x: x + owner["w"], x)
        owner.clear()
        gc.collect()
        others = [bench.full((256,), -9.0) for _ in range(64)]
        assert bench.step(wrapper, x).eq(7).all()
        assert all(other.eq(-9).all() for other in others)

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

    def test_3_a_host_value_that_is_not_in_the_key_is_refused(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        wrapper = bench.capture(lambda x, n: x + n, x, 4)
        assert bench.step(wrapper, x, 4).tolist() == [5.0] * 4
        with pytest.raises(UnkeyedValueError):
            bench.step(wrapper, x, 7)

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

    def test_7_nothing_is_captured_while_serving(self, bench: Bench) -> None:
        x = bench.full((8,), 1.0)
        wrapper = bench.capture(lambda x: x + 1, x)
        count = bench.library.num_cudagraph_captured
        for _ in range(100):
            with pytest.raises(CaptureOutsideScopeError):
                bench.step(wrapper, x, key=BatchDescriptor(16))
        assert bench.library.num_cudagraph_captured == count == 1

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

    def test_10_a_workspace_stays_where_it_was_captured(self, bench: Bench) -> None:
        workspace = Workspace("scratch", bench.device.torch_device)
        need = {8: 8, 4: 64, 2: 2}
        buffers = bench.buffers(BufferSpec("x", ("tokens",), torch.float32))

        def step(x: torch.Tensor) -> torch.Tensor:
            scratch = workspace.get((need[len(x)],), torch.float32)[: len(x)]
            return scratch.copy_(x) * 2

        wrapper = bench.capture_sizes(
            step, buffers, resources=[workspace], state=TensorStateGuard([])
        )
        address = workspace.get((1,), torch.uint8).data_ptr()
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

    def test_19_replays_go_on_in_the_random_sequence(self, bench: Bench) -> None:
        x = bench.full((64,), 0.0)
        wrapper = bench.capture(lambda x: x + torch.rand_like(x), x)
        torch.manual_seed(7)
        first, second = (bench.step(wrapper, x).clone() for _ in range(2))
        assert not torch.equal(first, second)
        torch.manual_seed(7)
        assert torch.equal(bench.step(wrapper, x), first)

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

    def test_25_sizes_captured_upwards_are_right_too(self, bench: Bench) -> None:
        buffers = bench.buffers(BufferSpec("x", ("tokens",), torch.float32))
        wrapper = bench.capture_sizes(lambda x: (x + 1) * 2, buffers, sizes=SIZES[::-1])
        for n in (8, 3, 2, 7, 1):
            out = bench.staged(wrapper, buffers, n, x=bench.full((n,), float(n)))
            assert out[:n].tolist() == [2.0 * n + 2] * n

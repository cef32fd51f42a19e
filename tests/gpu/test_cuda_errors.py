"""A capture that fails on a GPU raises a typed error, and is undone to the last counter."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from device_contract import Bench, same
from graphrt.device.cuda import CUDADevice, private
from graphrt.errors import (
    CaptureError,
    CaptureInProgressError,
    EnvironmentMismatchError,
    ForbiddenOperationError,
    GraphMemoryError,
    UnjoinedStreamError,
)


@pytest.fixture
def bench(device: CUDADevice) -> Bench:
    return Bench(device, device.new_pool())


def test_forbidden_operation_has_the_drivers_error_as_cause(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    with pytest.raises(ForbiddenOperationError) as caught:
        bench.record(lambda: x.sum().item())
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "_local_scalar_dense" in caught.value.operation


def test_synchronize_in_a_recording_is_forbidden(bench: Bench) -> None:
    x = bench.full((8,), 1.0)

    def body() -> None:
        torch.neg(x)
        torch.cuda.synchronize()

    with pytest.raises(ForbiddenOperationError) as caught:
        bench.record(body)
    assert "synchronize" in caught.value.operation
    bench.check_usable()


def test_copy_from_unpinned_memory_is_forbidden_with_its_line(bench: Bench) -> None:
    x, host = bench.full((8,), 1.0), torch.ones(8)

    def body() -> torch.Tensor:
        return x + host.to(x.device)

    with pytest.raises(ForbiddenOperationError) as caught:
        bench.record(body)
    assert "body" in caught.value.source
    bench.check_usable()


def test_copy_from_pinned_memory_is_an_external(bench: Bench) -> None:
    x, host = bench.full((8,), 1.0), torch.ones(8).pin_memory()
    graph, out = bench.record(lambda: x + host.to(x.device, non_blocking=True))
    assert host.data_ptr() in {use.tensor.data_ptr() for use in graph.externals}
    host.fill_(5.0)
    bench.replay(graph)
    assert out.tolist() == [6.0] * 8


@pytest.mark.parametrize("method", ["capture_begin", "capture_end"])
def test_interrupt_after_torch_began_or_ended_is_undone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    x = bench.full((8,), 1.0)
    real = getattr(torch.cuda.CUDAGraph, method)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        # Python delivers an interrupt once the call of torch has returned.
        monkeypatch.setattr(torch.cuda.CUDAGraph, method, real)
        real(*args, **kwargs)
        raise KeyboardInterrupt

    bench.record(lambda: x * 2)
    monkeypatch.setattr(torch.cuda.CUDAGraph, method, interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        bench.record(lambda: x + 1)
    assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
    bench.check_usable()


def test_cleaning_that_fails_after_a_good_end_is_undone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = bench.full((8,), 1.0)

    def body() -> torch.Tensor:
        monkeypatch.setattr(private, "clear_blas_workspaces", fail)
        return x + 1

    def fail() -> None:
        monkeypatch.undo()
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        bench.record(body)
    bench.check_usable()


def test_recording_on_the_default_stream_raises(bench: Bench) -> None:
    with pytest.raises(EnvironmentMismatchError):
        bench.device.begin(bench.pool, bench.device.current_stream(), "case")
    bench.check_usable()


def test_recording_inside_torchs_own_capture_raises(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    foreign = torch.cuda.CUDAGraph()
    stream = bench.device.stream("capture")
    with torch.cuda.graph(foreign, stream=stream.torch_stream):
        y = x + 1
        with pytest.raises(CaptureInProgressError):
            bench.device.begin(bench.pool, stream, "case")
    foreign.replay()
    bench.device.synchronize()
    assert y.tolist() == [2.0] * 8
    foreign.reset()
    bench.check_usable()


def test_undeclared_generator_raises_or_is_right(
    bench: Bench,
) -> None:
    torch_device = bench.device.torch_device
    generator = torch.Generator(torch_device).manual_seed(3)
    eager = [torch.rand(8, generator=generator, device=torch_device) for _ in range(2)]
    generator.manual_seed(3)
    # Releases with one generator state per capture allow it; older ones refuse.
    with suppress(ForbiddenOperationError):
        graph, out = bench.record(lambda: torch.rand(8, generator=generator, device=torch_device))
        for expected in eager:
            bench.replay(graph)
            assert same(out, expected)
    generator.manual_seed(3)
    assert same(torch.rand(8, generator=generator, device=torch_device), eager[0])
    bench.check_usable()


def fail_by_value(x: torch.Tensor) -> None:
    raise ValueError("the caller's own")


def fail_by_item(x: torch.Tensor) -> None:
    x.sum().item()


def fail_by_synchronising(x: torch.Tensor) -> None:
    torch.cuda.synchronize()


def fail_by_memory(x: torch.Tensor) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=x.device)


def fail_by_random_item(x: torch.Tensor) -> None:
    torch.rand_like(x).sum().item()


FAILURES: list[tuple[Callable[[torch.Tensor], None], type[Exception]]] = [
    (fail_by_value, ValueError),
    (fail_by_item, ForbiddenOperationError),
    (fail_by_synchronising, ForbiddenOperationError),
    (fail_by_memory, GraphMemoryError),
    (fail_by_random_item, ForbiddenOperationError),
]


def test_capture_after_fifty_failed_ones_is_right(bench: Bench) -> None:
    choice = random.Random(0)
    x = bench.random(64, 64)
    pool: Any = bench.pool

    def body(fail_at: int, fail: Callable[[torch.Tensor], None] | None) -> torch.Tensor:
        y = x
        for step in range(8):
            if step == fail_at and fail is not None:
                fail(y)
            y = torch.relu(y @ x) * 0.1 + step
        return y

    for _ in range(50):
        fail, kind = choice.choice(FAILURES)
        with pytest.raises(kind):
            bench.record(body, choice.randrange(8), fail)
        assert pool.use_count() == 1
        assert list(pool.live_blocks()) == []
        assert not torch.cuda.is_current_stream_capturing()
        torch.rand(4, device=x.device)  # The generator left capture mode.
        torch.empty(1 << 12, pin_memory=True)  # And so did the allocator of pinned memory.
    graph, out = bench.record(body, -1, None)
    x.copy_(torch.randn(64, 64))
    bench.replay(graph)
    assert same(out, body(-1, None))
    assert pool.use_count() == 2


@pytest.mark.parametrize("end", ["end", "abort"])
def test_failed_end_leaves_the_pool_as_it_was(bench: Bench, end: str) -> None:
    device, x = bench.device, bench.full((8,), 1.0)
    capture, side = device.stream("capture"), device.stream("side")
    pool: Any = bench.pool
    for _ in range(3):
        with device.use(capture):
            recording = device.begin(bench.pool, capture, "case")
            device.order(side, capture)
            with device.use(side):
                torch.neg(x)
            if end == "end":
                with pytest.raises(UnjoinedStreamError):
                    recording.end()
            else:
                mistake = KeyError("first")
                assert recording.abort(mistake) is mistake
        for stream in (capture, side):
            with device.use(stream):
                assert not private.is_stream_capturing()
        assert pool.use_count() == 1
    bench.check_usable()


def test_allocation_after_a_failed_capture_is_not_the_pools(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    with pytest.raises(ForbiddenOperationError):
        bench.record(fail_by_item, x)
    with bench.device.use(bench.device.stream("capture")):
        outside = torch.empty(1 << 20, device=x.device)
    bench.device.pools.refresh()  # type: ignore[attr-defined]
    assert not bench.device.owns(outside)
    assert list(bench.pool.live_blocks()) == []


def test_torchs_own_capture_works_after_a_failed_one(bench: Bench) -> None:
    x = bench.full((8,), 1.0)
    with pytest.raises(ForbiddenOperationError):
        bench.record(fail_by_random_item, x)
    foreign = torch.cuda.CUDAGraph()
    with torch.cuda.graph(foreign):
        y = torch.rand_like(x) + 1
    foreign.replay()
    bench.device.synchronize()
    assert y.ge(1.0).all()
    foreign.reset()


def test_debug_device_captures_again_after_a_forbidden_operation(device: CUDADevice) -> None:
    device = CUDADevice(debug=True)
    bench = Bench(device, device.new_pool())
    x = bench.full((8,), 1.0)
    graph, out = bench.record(lambda: ((x + 1) * 2).neg())
    assert graph.num_nodes == 3
    bench.replay(graph)
    assert out.tolist() == [-4.0] * 8
    with pytest.raises(ForbiddenOperationError):
        bench.record(fail_by_item, x)
    bench.check_usable()
    device.close()


def test_unobserved_swallowed_error_fails_the_capture(bench: Bench) -> None:
    x = bench.full((8,), 1.0)

    def swallow() -> torch.Tensor:
        try:
            fail_by_item(x)
        except RuntimeError:
            return x + 1
        return x

    with pytest.raises(CaptureError):
        bench.record(swallow, observe=False)
    bench.check_usable()

"""Bug class 13: what compiles, tunes or loads on first use is warm before a capture, or refused.

A first use inside a window is an error of ours or right, never a broken capture. The file comes
last in its lane: the compiler's heap makes every later collection slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from bug_classes import FULL, KEY, NONE, Bench, frozen_heap
from graphrt import AmbientError, CaptureError, ForbiddenOperationError
from graphrt.device.cuda import CUDADevice

pytestmark = [
    pytest.mark.usefixtures("cold_caches"),
    # The compiler and Triton warn about affairs of their own, and not the same in each release.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def cold_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that was compiled before is found, neither in memory nor on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    # In this process: workers would outlive the test.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def bench(device: CUDADevice) -> Iterator[Bench]:
    bench = Bench(device)
    with frozen_heap(), torch.no_grad():
        yield bench
    bench.library.close()


def check_replays(bench: Bench, wrapper: Any, x: torch.Tensor, eager: Callable[..., Any]) -> None:
    for _ in range(3):
        x.normal_()
        assert torch.equal(bench.step(wrapper, x), eager(x))


def centred(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.gelu(x * 2 + 1)
    return hidden - hidden.mean(-1, keepdim=True)


def test_bug_class_13_a_compiled_function_is_right_when_warm_and_not_broken_when_cold(
    bench: Bench,
) -> None:
    compiled, x = torch.compile(centred), bench.random(64, 256)
    # Today's compilers read the generator's state, which no window allows.
    with suppress(CaptureError):
        wrapper = bench.capture(compiled, x, scope={"observe": "none", "warmups": 0})
        check_replays(bench, wrapper, x, compiled)
    torch.rand(4, device=x.device)  # The generator left capture mode.
    wrapper = bench.capture(compiled, x, scope={"observe": "none"})
    check_replays(bench, wrapper, x, compiled)
    torch.testing.assert_close(bench.step(wrapper, x), centred(x))
    program = wrapper.concrete_cudagraph_entries[KEY]
    [generation] = bench.library.generations
    # Unobserved, and still every block of the window is an output's, which is borrowed.
    assert program.num_graphs == 1
    assert not list(generation.pool.live_blocks())
    # Under other modes than the warm-up's it would compile anew, in the window.
    other = bench.wrap(compiled, name="under other modes")
    with bench.library.capture_scope(observe="none") as scope:
        with scope.step(NONE, KEY):
            other(x)
        with (
            torch.autocast("cuda", torch.bfloat16),
            pytest.raises(AmbientError, match="autocast"),
            scope.step(FULL, KEY),
        ):
            other(x)
    assert not other.concrete_cudagraph_entries


def _double(x, out, size, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out + at, tl.load(x + at, mask=inside) * 2, mask=inside)


def launching(kernel: Any, **options: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of ``x`` that launches ``kernel`` over it; ``options`` are the kernel's own."""

    def launch(x: torch.Tensor) -> torch.Tensor:
        out, size = torch.empty_like(x), x.numel()
        kernel[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, out, size, **options)
        return out

    return launch


def test_bug_class_13_a_cold_kernel_is_right_when_warm_and_not_broken_when_cold(
    bench: Bench,
) -> None:
    double, x = launching(triton.jit(_double), BLOCK=256), bench.random(10_000)
    with suppress(CaptureError):
        wrapper = bench.capture(double, x, scope={"warmups": 0})
        check_replays(bench, wrapper, x, lambda x: x * 2)
    wrapper = bench.capture(double, x)
    check_replays(bench, wrapper, x, lambda x: x * 2)


def test_bug_class_13_a_kernel_that_would_be_tuned_in_a_window_is_refused_there(
    bench: Bench,
) -> None:
    configs = [triton.Config({"BLOCK": block}) for block in (128, 256)]
    tuned = triton.autotune(configs, key=["size"])(triton.jit(_double))
    double, x, y = launching(tuned), bench.random(10_000), bench.random(5_000)
    for each in (x, y):
        # Each size is tuned on its own, by timing launches, which waits for the device.
        with pytest.raises(ForbiddenOperationError):
            bench.capture(double, each, scope={"warmups": 0})
        assert bench.library.num_graphs == 0
        bench.library.forget_failures()
        wrapper = bench.capture(double, each)
        check_replays(bench, wrapper, each, lambda x: x * 2)
        bench.library.retire()

"""Bug class 13: code that compiles, tunes or loads on first use is warm before a capture.

A first use inside a recording is a graphrt error or gives right results, never a broken capture.
The file is the last of its lane, because the compiler's heap makes later collections slower.
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
from torch._inductor import config as inductor_config

from graphrt import Device
from graphrt.errors import CaptureError, EnvironmentMismatchError, ForbiddenOperationError
from lab import FULL, KEY, NONE, Lab

pytestmark = [
    pytest.mark.usefixtures("cold_caches"),
    # The compiler and Triton emit warnings that differ between releases.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def cold_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty compiler caches, in memory and on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    torch.compiler.reset()
    # In this process: workers would outlive the test. By torch's own patch, because monkeypatch
    # deletes what it finds in no ``__dict__``, and such a module then has the option no more.
    with inductor_config.patch(compile_threads=1):
        yield
    torch.compiler.reset()


@pytest.fixture
def lab(device: Device) -> Iterator[Lab]:
    with Lab(device) as lab:
        yield lab


def check_replays(lab: Lab, wrapper: Any, x: torch.Tensor, eager: Callable[..., Any]) -> None:
    for _ in range(3):
        x.normal_()
        assert torch.equal(lab.step(wrapper, x), eager(x))


def centred(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.gelu(x * 2 + 1)
    return hidden - hidden.mean(-1, keepdim=True)


def test_bug_class_13_a_compiled_function_warm_or_cold_is_right(
    lab: Lab,
) -> None:
    compiled, x = torch.compile(centred), lab.random(64, 256)
    # Current compilers read the generator's state, which is forbidden in a recording.
    with suppress(CaptureError):
        wrapper = lab.wrap_and_capture(compiled, x, scope={"observe": "never", "warmups": 0})
        check_replays(lab, wrapper, x, compiled)
    torch.rand(4, device=x.device)  # The generator left capture mode.
    wrapper = lab.wrap_and_capture(compiled, x, scope={"observe": "never"})
    check_replays(lab, wrapper, x, compiled)
    torch.testing.assert_close(lab.step(wrapper, x), centred(x))
    program = wrapper.concrete_cudagraph_entries[KEY]
    [generation] = lab.library.generations
    # Unobserved, and still every block of the recording belongs to an output.
    assert program.num_graphs == 1
    assert not list(generation.pool.live_blocks())
    # Under other modes than the warm-up's it would compile again, in the recording.
    other = lab.wrap(compiled, name="under other modes")
    with lab.library.capture_scope(observe="never") as scope:
        with scope.step(NONE, KEY):
            other(x)
        with (
            torch.autocast("cuda", torch.bfloat16),
            pytest.raises(EnvironmentMismatchError, match="autocast"),
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


def test_bug_class_13_a_triton_kernel_warm_or_cold_is_right(
    lab: Lab,
) -> None:
    double, x = launching(triton.jit(_double), BLOCK=256), lab.random(10_000)
    with suppress(CaptureError):
        wrapper = lab.wrap_and_capture(double, x, scope={"warmups": 0})
        check_replays(lab, wrapper, x, lambda x: x * 2)
    wrapper = lab.wrap_and_capture(double, x)
    check_replays(lab, wrapper, x, lambda x: x * 2)


def test_bug_class_13_autotuning_in_a_recording_is_refused(
    lab: Lab,
) -> None:
    configs = [triton.Config({"BLOCK": block}) for block in (128, 256)]
    tuned = triton.autotune(configs, key=["size"])(triton.jit(_double))
    double, x, y = launching(tuned), lab.random(10_000), lab.random(5_000)
    for each in (x, y):
        # Each size is tuned on its own, by timing launches, which waits for the device.
        with pytest.raises(ForbiddenOperationError):
            lab.wrap_and_capture(double, each, scope={"warmups": 0})
        assert lab.library.num_graphs == 0
        lab.library.forget_failures()
        wrapper = lab.wrap_and_capture(double, each)
        check_replays(lab, wrapper, each, lambda x: x * 2)
        lab.library.retire()

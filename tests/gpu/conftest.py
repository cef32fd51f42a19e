"""The lane that needs a CUDA device. Without one it fails: a skipped lane proves nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from graphrt.device.cuda import CUDADevice


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            f"tests/gpu needs a CUDA device; torch {torch.__version__} sees none. "
            "Without a GPU run tests/pure, tests/simulated and tests/architecture."
        )


@pytest.fixture
def device() -> Iterator[CUDADevice]:
    device = CUDADevice()
    yield device
    device.close()


@pytest.fixture
def settled(device: CUDADevice) -> CUDADevice:
    """A device that has made its lazy things: handles, workspaces, generator state."""
    x = torch.ones(64, 64, device=device.torch_device)
    (x @ x).sum().item()
    torch.rand(1, device=device.torch_device)
    gc.collect()
    device.synchronize()
    device.trim()
    return device

"""The lane that needs a CUDA device. Without one it fails: a skipped lane proves nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from flashinfer_builds import FlashInferBuilds

from graphrt.device.cuda import CUDADevice

# Before their first import, or a failing case would not show its values.
pytest.register_assert_rewrite("bug_classes", "device_contract", "runtime_interrupts", "trends")


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            f"tests/gpu needs a CUDA device; torch {torch.__version__} sees none. "
            "Without a GPU run tests/pure, tests/simulated and tests/architecture."
        )
    config.pluginmanager.register(FlashInferBuilds())
    config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """Prints each failure when it comes, because a lane that a time limit ends has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and not hasattr(self._config, "workerinput"):
            terminal.write_line("")
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})")
            terminal.write_line(report.longreprtext[-4000:])
            terminal.flush()


@pytest.fixture(scope="session", autouse=True)
def _libraries_are_warm() -> None:
    """Handles, workspaces and generators are made on first use, which must be in no recording."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, 64, device="cuda", dtype=dtype)
        (x @ x).sum().item()
    torch.rand(1, device="cuda")
    torch.empty(1, pin_memory=True)
    # A capture makes the default generator keep two small tensors for good.
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """This lane collects all there is: what keeps device memory must be gone."""


@pytest.fixture
def usual_heap() -> None:
    """As it is in this lane."""


@pytest.fixture
def device() -> Iterator[CUDADevice]:
    """A device of its own for each test, with nothing cached: what is closed here is gone."""
    gc.collect()
    device = CUDADevice()
    device.trim()
    yield device
    device.close()

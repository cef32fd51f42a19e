"""Builds FlashInfer's modules in another process while other tests run.

FlashInfer calls nvcc at the first plan of each module: one after the other, over a minute in all if
nothing is cached, with the GPU idle. Here all are built at once. The process makes no CUDA context,
because tests of memory read the driver's free bytes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

import pytest

MODULES = tuple((kernels, dtype) for kernels in ("fa2", "fa3") for dtype in ("bfloat16", "float16"))
"""Kernels and dtypes of the tests; ``fa3`` on Hopper GPUs only."""

MAX_SECONDS = 240
"""Several times what nvcc needs on 16 cores. After it, the tests build for themselves."""


class FlashInferBuilds:
    """A pytest plugin: tests with "flashinfer" in their id wait until the process has ended.

    Other tests that run FlashInfer wait for FlashInfer's own lock.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        is_wanted = not session.config.option.collectonly and any(
            map(_uses_flashinfer, session.items)
        )
        if not is_wanted or not _is_installed():
            return (yield)
        with tempfile.TemporaryFile() as log:
            self._process = _start(log)
            try:
                return (yield)
            finally:
                has_ended = self._process.poll() is not None
                _stop(self._process)
                if has_ended and self._process.returncode != 0:
                    log.seek(0)
                    output = log.read().decode(errors="replace")
                    self._failure = f"exit code {self._process.returncode}\n{output}\n"

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._process is None or not _uses_flashinfer(item):
            return
        try:
            self._process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            _stop(self._process)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._failure:
            terminalreporter.section("FlashInfer's modules were not all built beforehand")
            terminalreporter.write(self._failure)


def _uses_flashinfer(item: pytest.Item) -> bool:
    return "flashinfer" in item.nodeid


def _is_installed() -> bool:
    # Imported here: the process does not need it, and pytest has to rewrite its asserts first.
    from engines import HAS_FLASHINFER

    return HAS_FLASHINFER


def _start(log: IO[bytes]) -> subprocess.Popen[bytes]:
    from flashinfer.jit import current_compilation_context

    # Passed on, because they name the cache folder, and finding them needs a CUDA call.
    archs = sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    named = " ".join(f"{major}.{minor}" for major, minor in archs)
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "FLASHINFER_CUDA_ARCH_LIST": named, "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    # SIGTERM first: ninja then ends its compilers, which are in other process groups.
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)


def specs() -> list[Any]:
    """The modules, by the arguments with which FlashInfer's wrappers ask for them."""
    import torch
    from engines import SMALL
    from flashinfer.jit import current_compilation_context, gen_batch_prefill_module

    def spec(kernels: str, name: str) -> Any:
        dtype, size = getattr(torch, name), SMALL["head_dim"]
        asked = (dtype, dtype, dtype, torch.int32, size, size, 0, False, False, False)
        return gen_batch_prefill_module(kernels, *asked)

    is_hopper = any(major == 9 for major, _ in current_compilation_context.TARGET_CUDA_ARCHS)
    found = [spec(*module) for module in MODULES if is_hopper or module[0] != "fa3"]
    return [each for each in found if not each.is_aot]


def build() -> None:
    """Build each module under its lock and with its own build log, as a wrapper does.

    ``flashinfer.jit.build_jit_specs`` keeps one log for all: the wrappers would build again.
    """
    # The tests have priority.
    os.nice(10)
    wanted = specs()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: spec.build(verbose=False), wanted))


if __name__ == "__main__":
    build()

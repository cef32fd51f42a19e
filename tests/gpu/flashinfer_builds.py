"""FlashInfer's modules, built by a process of their own while other tests run.

FlashInfer has nvcc build a module when it is first planned for: one after the other, over a minute
in all where nothing is cached, and the GPU idle. Here all are built at once. The process makes no
CUDA context: tests of memory read the driver's free bytes.
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

DECODE_DTYPES = ("bfloat16", "float16")
PREFILL_DTYPES = ("bfloat16",)
"""What the tests plan for. Decode is that on CUDA cores: on tensor cores it is prefill's module."""

MAX_SECONDS = 240
"""Several times what nvcc needs on 16 cores. After this long the tests build for themselves."""


class FlashInferBuilds:
    """A plugin of pytest: tests that say FlashInfer wait for the process, so nobody else builds.

    A test that runs FlashInfer without saying so is served by FlashInfer's own lock.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        is_wanted = not session.config.option.collectonly and any(map(_says_so, session.items))
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
        if self._process is None or not _says_so(item):
            return
        try:
            self._process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            _stop(self._process)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._failure:
            terminalreporter.section("FlashInfer's modules were not all built beforehand")
            terminalreporter.write(self._failure)


def _says_so(item: pytest.Item) -> bool:
    return "flashinfer" in item.nodeid


def _is_installed() -> bool:
    # Not at the top: the process needs none of it, and pytest has to rewrite it first.
    from engines import HAS_FLASHINFER

    return HAS_FLASHINFER


def _start(log: IO[bytes]) -> subprocess.Popen[bytes]:
    from flashinfer.jit import current_compilation_context

    # They name the folder of the cache, and finding them takes a CUDA call.
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
    # First a signal at which ninja ends its compilers: they are in groups of their own.
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)


def specs() -> list[Any]:
    """The modules, by the arguments with which FlashInfer's wrappers ask for them."""
    import torch
    from engines import SMALL
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    def asked(name: str) -> tuple[Any, ...]:
        """Dtypes of queries, cache, output, indices; head sizes; no positions, window or cap."""
        dtype, size = getattr(torch, name), SMALL["head_dim"]
        return dtype, dtype, dtype, torch.int32, size, size, 0, False, False

    decode = [gen_batch_decode_module(*asked(name)) for name in DECODE_DTYPES]
    prefill = [gen_batch_prefill_module("fa2", *asked(name), False) for name in PREFILL_DTYPES]
    return [spec for spec in decode + prefill if not spec.is_aot]


def build() -> None:
    """Each under its lock and with its own log of what was built, as a wrapper would.

    ``flashinfer.jit.build_jit_specs`` keeps one log for all: the wrappers would build again.
    """
    # The tests go first where cores are few.
    os.nice(10)
    wanted = specs()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: spec.build(verbose=False), wanted))


if __name__ == "__main__":
    build()

"""Loads FlashInfer, and builds its kernels in processes of their own, while another one serves.

FlashInfer calls nvcc at the first plan of each of its modules, which takes 16 s (``fa2``) and up to
73 s (``fa3``) on an H200's host, and keeps what it built on disk. The processes make no CUDA
context.
"""

from __future__ import annotations

import _imp
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, get_native_id, main_thread
from time import perf_counter
from typing import Any

import torch

import graphrt_llm.attention.flashinfer as flashinfer
from graphrt_llm.background import Future, in_thread
from graphrt_llm.kv_cache import KVCache

POLLS_BEFORE_IMPORT = 2
"""One for each step: that of a first prompt, and the one after it, which has a graph captured."""

BURST_S = 0.002
"""Of imports beside steps, after which they pause ..."""
PAUSE = 3
"""... so many times as long as they took."""

NICENESS = 10
"""Of the compilers: the engine's host work goes first."""


def missing_modules(cache: KVCache) -> list[tuple[str, str, int]]:
    """Kernels, dtype and head size of the modules that FlashInfer would build for ``cache``."""
    dtype = str(cache.tensor.dtype).removeprefix("torch.")
    kernels = dict.fromkeys(("fa2", flashinfer.chunk_kernels(cache)))
    modules = [(name, dtype, cache.config.head_dim) for name in kernels]
    return [module for module in modules if not _spec(*module).is_compiled]


def _spec(kernels: str, dtype_name: str, head_dim: int) -> Any:
    """A module as FlashInfer's wrappers ask for it: without positions, sliding window, cap."""
    from flashinfer.jit import gen_batch_prefill_module

    dtype = getattr(torch, dtype_name)
    asked = (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False)
    return gen_batch_prefill_module(kernels, *asked)


def flashinfer_build(modules: Sequence[tuple[str, str, int]]) -> ProcessBuild:
    """Begin to build ``modules`` of FlashInfer, each in a process."""
    from flashinfer.jit import current_compilation_context

    # They name the cache's folder, and finding them needs a CUDA call.
    archs = sorted(current_compilation_context.TARGET_CUDA_ARCHS)
    environment = {
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(f"{major}.{minor}" for major, minor in archs),
        "CUDA_VISIBLE_DEVICES": "",
    }
    source = f"import {__name__} as building; building.build_module{{}}"
    return ProcessBuild([["-c", source.format(module)] for module in modules], environment)


def build_module(kernels: str, dtype_name: str, head_dim: int) -> None:
    """Build one, in this process, at a low priority."""
    os.nice(NICENESS)
    # Under the module's own lock and log, as a wrapper builds it: it finds nothing to do then.
    _spec(kernels, dtype_name, head_dim).build(verbose=False)


@contextmanager
def paused_imports(goes_on: Event) -> Iterator[None]:
    """While entered, imports of this thread leave the other ones time, until ``goes_on`` is set.

    An import holds the interpreter's lock, and every operation of torch gives it away for a moment:
    steps would wait for nearly all of the import.
    """
    pauses = _Pauses(goes_on)
    sys.meta_path.insert(0, pauses)
    try:
        yield
    finally:
        # Another list, because imports of other threads, which go through this one by position,
        # would leave a finder out. Whoever kept that one may put it back.
        pauses.is_over = True
        sys.meta_path = [finder for finder in sys.meta_path if finder is not pauses]


class _Pauses:
    """Of the process's finders of modules the first, which finds none."""

    def __init__(self, goes_on: Event) -> None:
        # Python's own number of a thread may be another one's in a forked child.
        self._thread, self._goes_on = get_native_id(), goes_on
        self._began = perf_counter()
        self.is_over = False

    def find_spec(self, *asked: object) -> None:
        if not self.is_over and get_native_id() == self._thread:
            took = perf_counter() - self._began
            if took > BURST_S and main_thread().is_alive():  # Else nobody is left to leave time.
                with ExitStack() as stack:
                    with suppress(RuntimeError):  # Not held, where no import asks.
                        _imp.release_lock()  # Imports of other threads wait for it.
                        stack.callback(_imp.acquire_lock)
                    self._goes_on.wait(PAUSE * took)
                self._began = perf_counter()


class LoadedLater:
    """A ``switching.Build`` of FlashInfer, which a thread imports first.

    Not from the first polls on: the import takes a second or more, which the first tokens need not
    wait for.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._polls_left = POLLS_BEFORE_IMPORT
        # What the thread finds is in it alone: a capture would take an attribute that changes
        # meanwhile for the model's state.
        self._loaded: Future[ProcessBuild | None] | None = None
        self._is_closed = Event()
        self._process = os.getpid()

    def poll(self) -> str | None:
        if self._polls_left:
            self._polls_left -= 1
            return None
        if self._loaded is None:
            self._loaded = in_thread(self._load)
        if not self._loaded.done():
            return None
        error = self._loaded.exception()
        if error is not None:  # Told; what serves already goes on.
            return f"{type(error).__name__}: {error}"
        build = self._loaded.result()
        return "" if build is None else build.poll()

    def _load(self) -> ProcessBuild | None:
        with paused_imports(self._is_closed):
            modules = missing_modules(self._cache)
        # A process that ends without closing anything would leave compilers behind.
        is_over = self._is_closed.is_set() or not main_thread().is_alive()
        return flashinfer_build(modules) if modules and not is_over else None

    def close(self) -> None:
        self._is_closed.set()
        # A forked child would wait for a thread that it does not have.
        is_ours = self._process == os.getpid()
        if is_ours and self._loaded is not None and self._loaded.exception() is None:
            build = self._loaded.result()
            if build is not None:
                build.close()


class ProcessBuild:
    """A ``switching.Build`` by processes of this Python: one for each of ``arguments``."""

    def __init__(
        self, arguments: Iterable[Sequence[str]], environment: Mapping[str, str] | None = None
    ) -> None:
        # The child finds what this process does, however that was put on the path.
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})}
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the build
        self._failure: str | None = None
        self._processes = [
            subprocess.Popen(
                [*command, *each],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for each in arguments
        ]

    def poll(self) -> str | None:
        codes = [process.poll() for process in self._processes]
        if None in codes:
            return None
        if self._failure is None:
            self._failure = ""
            if any(codes):
                self._log.seek(0)
                last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
                self._failure = f"exit codes {codes}: {''.join(last)}"
            self._log.close()
        return self._failure

    def close(self) -> None:
        # SIGTERM first: ninja then ends its compilers, which are in other process groups.
        for number, seconds in ((signal.SIGTERM, 1), (signal.SIGKILL, 10)):
            going_on = [process for process in self._processes if process.poll() is None]
            for process in going_on:
                os.killpg(process.pid, number)
            for process in going_on:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
        self._log.close()

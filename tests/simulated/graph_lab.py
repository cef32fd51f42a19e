"""A small laboratory for graph tests: a simulated device, one library, the usual moves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.device.simulated import SimulatedDevice
from graphrt.events import Event
from graphrt.graphs import CaptureJob, CaptureReport, CUDAGraphWrapper, GraphLibrary, Program

# Every scope collects. Torch's own heap is a fifth of a second each time; frozen, it is skipped.
gc.collect()
gc.freeze()

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
KEY = BatchDescriptor(8)


class Lab:
    """Device, library and every event it emitted; closes the library at the end."""

    def __init__(self, device: SimulatedDevice | None = None, **library_options: Any) -> None:
        self.device = device or SimulatedDevice()
        self.events: list[Event] = []
        self.library = GraphLibrary(self.device, observer=self.events.append, **library_options)

    def __enter__(self) -> Lab:
        self.no_grad = torch.no_grad()
        self.no_grad.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.no_grad.__exit__(None, None, None)
        self.library.close()

    def wrap(
        self, fn: Callable[..., Any], mode: RuntimeMode = FULL, name: str | None = None, **more: Any
    ) -> CUDAGraphWrapper:
        return CUDAGraphWrapper(fn, self.library, mode, name=name, **more)

    def capture(
        self,
        wrapper: CUDAGraphWrapper,
        *args: Any,
        key: BatchDescriptor = KEY,
        scope: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Program:
        """Capture by hand, without a warm-up; state is the caller's."""
        with (
            self.library.capture_scope(**(scope or {})) as opened,
            opened.step(wrapper.runtime_mode, key),
        ):
            wrapper(*args, **kwargs)
        return wrapper.concrete_cudagraph_entries[key]

    def capture_all(
        self, *jobs: CaptureJob, gate: Any = None, progress: Any = None, **scope: Any
    ) -> CaptureReport:
        with self.library.capture_scope(**scope) as opened:
            return opened.capture_all(jobs, gate=gate, progress=progress)

    @staticmethod
    def job(
        wrapper: CUDAGraphWrapper, *args: Any, key: BatchDescriptor = KEY, **kwargs: Any
    ) -> CaptureJob:
        return CaptureJob(wrapper, wrapper.runtime_mode, key, lambda: (args, kwargs))

    @staticmethod
    def step(
        wrapper: Callable[..., Any],
        *args: Any,
        mode: RuntimeMode = FULL,
        key: BatchDescriptor | None = KEY,
        **kwargs: Any,
    ) -> Any:
        with ForwardContext(mode, key):
            return wrapper(*args, **kwargs)

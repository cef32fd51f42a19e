"""Captures one graph for real and reads which of graphrt's functions that takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch

import graphrt
from graphrt import BufferSpec, OutputSpec, Runtime, RuntimeConfig

LIBRARY = graphrt.__file__.removesuffix("__init__.py")


class CaptureTrace(NamedTuple):
    """What ran from ``Runtime.capture`` to the recording of a graph, the device room left out."""

    frames: tuple[str, ...]
    """"file function" of the Python stack inside the model, outermost first."""
    files_run: frozenset[str]
    """The files of every function that was called until then, on the stack or not."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files of ``frames``, each once."""
        return tuple(dict.fromkeys(frame.partition(" ")[0] for frame in self.frames))


def _example(sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((sizes["tokens"],), float(seed))}


@cache
def trace_capture() -> CaptureTrace:
    """Capture one FULL graph of a tiny model on the simulated device; read the stack inside it."""
    frames: list[str] = []
    files_run: set[str] = set()

    def note_call(frame: FrameType, event: str, _: Any) -> None:
        name = _name_of(frame)
        if event == "call" and name:
            files_run.add(name.partition(" ")[0])

    def model(x: torch.Tensor) -> torch.Tensor:
        if not frames and _is_recorded():
            sys.setprofile(None)
            frames.extend(_own_stack())
        return x + 1

    runtime = Runtime(
        model,
        inputs=[BufferSpec("x", ("tokens",), torch.float32)],
        outputs=OutputSpec({"": "tokens"}, "view"),
        examples=_example,
        config=RuntimeConfig(
            max_num_seqs=2,
            max_num_batched_tokens=2,
            compilation={
                "cudagraph_mode": "FULL",
                "cudagraph_capture_sizes": [2],
                # None, because the last warm-up is told that it is captured.
                "cudagraph_num_of_warmups": 0,
            },
        ),
        device="simulated",
    )
    profile = sys.getprofile()
    with runtime:
        sys.setprofile(note_call)
        try:
            runtime.capture()
        finally:
            sys.setprofile(profile)
    assert frames, "no call of the model was told that it is captured"
    return CaptureTrace(tuple(frames), frozenset(files_run))


def _is_recorded() -> bool:
    """Ask torch, as libraries do; without CUDA it raises where no device of graphrt's answers."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:
        return False


def _own_stack() -> list[str]:
    names = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names.append(_name_of(frame))
        frame = frame.f_back
    return [name for name in reversed(names) if name]


def _name_of(frame: FrameType) -> str:
    """Return "file function" for a function of graphrt outside its device room, else nothing."""
    place = frame.f_code.co_filename
    if not place.startswith(LIBRARY) or place.startswith(f"{LIBRARY}device/"):
        return ""
    return f"{place.removeprefix(LIBRARY)} {frame.f_code.co_qualname}"

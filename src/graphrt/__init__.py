"""graphrt: plan, capture, dispatch and replay CUDA graphs for PyTorch inference.

Public names are resolved on first use, so that the torch-free rooms never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_ROOM_OF = {
    "BatchDescriptor": "batch",
    "CUDAGraphMode": "batch",
    "Decision": "batch",
    "MissReason": "batch",
    "RuntimeMode": "batch",
    "ForwardContext": "context",
    "get_forward_context": "context",
    "GraphrtError": "errors",
}

__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'graphrt' has no attribute {name!r}")
    value = getattr(import_module(f"graphrt.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

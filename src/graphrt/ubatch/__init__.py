"""Micro-batches: how a batch is cut into slices, and how they run while others communicate.

A model calls what is torch-free; what runs micro-batches is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphrt.ubatch.communication import (
    Communication,
    active,
    communication,
    compute_mark,
    count,
    index,
    register_recv_hook,
    run_recv_hook,
    switch_to_comm,
    switch_to_compute,
    token_offset,
    yield_,
    yield_and_switch_to_comm,
    yield_and_switch_to_compute,
)
from graphrt.ubatch.slices import (
    SliceMetadata,
    UBatchSlice,
    make_slices,
    slice_metadata,
    wants_split,
)

if TYPE_CHECKING:
    from graphrt.ubatch.baton import UBatchAborted
    from graphrt.ubatch.peer_copies import PeerCopies
    from graphrt.ubatch.split import CaptureHook, InputAxes, SMControl, SplitCallable
    from graphrt.ubatch.wrapper import UBatchWrapper

_LATER = {
    "UBatchAborted": "baton",
    "PeerCopies": "peer_copies",
    "SMControl": "split",
    "CaptureHook": "split",
    "InputAxes": "split",
    "SplitCallable": "split",
    "UBatchWrapper": "wrapper",
}

__all__ = [
    "CaptureHook",
    "Communication",
    "InputAxes",
    "PeerCopies",
    "SMControl",
    "SliceMetadata",
    "SplitCallable",
    "UBatchAborted",
    "UBatchSlice",
    "UBatchWrapper",
    "active",
    "communication",
    "compute_mark",
    "count",
    "index",
    "make_slices",
    "register_recv_hook",
    "run_recv_hook",
    "slice_metadata",
    "switch_to_comm",
    "switch_to_compute",
    "token_offset",
    "wants_split",
    "yield_",
    "yield_and_switch_to_comm",
    "yield_and_switch_to_compute",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"graphrt.ubatch.{_LATER[name]}"), name)
    raise AttributeError(f"module 'graphrt.ubatch' has no attribute {name!r}")

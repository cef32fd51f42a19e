"""Micro-batches: how a batch is cut into slices, and how they run while others communicate.

A model calls what is torch-free; what runs micro-batches is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphrt.ubatch.communication import (
    Communication as Communication,
    active as active,
    communication as communication,
    compute_mark as compute_mark,
    count as count,
    index as index,
    register_recv_hook as register_recv_hook,
    run_recv_hook as run_recv_hook,
    switch_to_comm as switch_to_comm,
    switch_to_compute as switch_to_compute,
    token_offset as token_offset,
    yield_ as yield_,
    yield_and_switch_to_comm as yield_and_switch_to_comm,
    yield_and_switch_to_compute as yield_and_switch_to_compute,
)
from graphrt.ubatch.slices import (
    SliceMetadata as SliceMetadata,
    UBatchSlice as UBatchSlice,
    make_slices as make_slices,
    slice_metadata as slice_metadata,
    slices_of_key as slices_of_key,
    wants_split as wants_split,
)

if TYPE_CHECKING:
    from graphrt.ubatch.baton import UBatchAborted as UBatchAborted
    from graphrt.ubatch.peer_copies import PeerCopies as PeerCopies
    from graphrt.ubatch.split import (
        CaptureHook as CaptureHook,
        InputAxes as InputAxes,
        SMControl as SMControl,
        SplitCallable as SplitCallable,
    )
    from graphrt.ubatch.wrapper import UBatchWrapper as UBatchWrapper

_LATER = {
    "UBatchAborted": "baton",
    "PeerCopies": "peer_copies",
    "SMControl": "split",
    "CaptureHook": "split",
    "InputAxes": "split",
    "SplitCallable": "split",
    "UBatchWrapper": "wrapper",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"graphrt.ubatch.{_LATER[name]}"), name)
    raise AttributeError(f"module 'graphrt.ubatch' has no attribute {name!r}")

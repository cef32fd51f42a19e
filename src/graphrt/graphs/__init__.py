"""Capture, programs, replay: what is recorded, what plays it, who owns it.

Recording and replaying are two types that share no class: what replays cannot capture.
"""

from __future__ import annotations

from graphrt.graphs.breaks import break_at, break_call, break_point, forbid_in_capture, no_breaks
from graphrt.graphs.buffers import BoundBuffers, BufferSet
from graphrt.graphs.bufferspec import BufferSpec, Padding
from graphrt.graphs.capture import capture_program
from graphrt.graphs.catalog import Catalog, Entry, Key, TimedPhase, too_many_failures
from graphrt.graphs.environment import autocast_dtype, autocast_error, require_no_grad
from graphrt.graphs.gc_pause import frozen_heap, gc_paused
from graphrt.graphs.held import ExternalsReport
from graphrt.graphs.host_snapshot import HostSnapshot
from graphrt.graphs.library import GraphBudget, GraphLibrary
from graphrt.graphs.outputs import OutputSpec
from graphrt.graphs.program import EagerSegment, GraphMemory, GraphSegment, Program, Returned
from graphrt.graphs.resources import (
    Resource,
    StateGuard,
    TensorStateGuard,
    Workspace,
    optional_methods,
)
from graphrt.graphs.scope import CaptureOptions, CaptureScope
from graphrt.graphs.signature import StaleCheck
from graphrt.graphs.unwatched import Unwatched
from graphrt.graphs.watch import Watch, WatchMode
from graphrt.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper

__all__ = [
    "BoundBuffers",
    "BufferSet",
    "BufferSpec",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CaptureOptions",
    "CaptureScope",
    "Catalog",
    "EagerSegment",
    "Entry",
    "ExternalsReport",
    "GraphBudget",
    "GraphLibrary",
    "GraphMemory",
    "GraphSegment",
    "HostSnapshot",
    "Key",
    "OutputSpec",
    "Padding",
    "Program",
    "Resource",
    "Returned",
    "StaleCheck",
    "StateGuard",
    "TensorStateGuard",
    "TimedPhase",
    "Unwatched",
    "Watch",
    "WatchMode",
    "Workspace",
    "autocast_dtype",
    "autocast_error",
    "break_at",
    "break_call",
    "break_point",
    "capture_program",
    "forbid_in_capture",
    "frozen_heap",
    "gc_paused",
    "no_breaks",
    "optional_methods",
    "require_no_grad",
    "too_many_failures",
]

"""Capture, programs, replay: what is recorded, what plays it, who owns it.

Recording and replaying are two types that share no class: what replays cannot capture.
"""

from __future__ import annotations

from graphrt.errors import LateInitError
from graphrt.graphs.breaks import break_at, break_call, break_point, forbid_in_capture, no_breaks
from graphrt.graphs.buffers import BoundBuffers, BufferSet
from graphrt.graphs.bufferspec import FILL_ONCE, KEEP, SENTINEL, ZERO, BufferSpec, Padding
from graphrt.graphs.builder import ProgramBuilder
from graphrt.graphs.externals import External, ExternalsReport
from graphrt.graphs.failures import FailureRecord
from graphrt.graphs.generation import Generation
from graphrt.graphs.jobs import CaptureJob, CaptureReport
from graphrt.graphs.library import GraphBudget, GraphLibrary
from graphrt.graphs.outputs import BoundOutputs, OutputSpec
from graphrt.graphs.program import GraphMemory, Program
from graphrt.graphs.scope import CaptureScope
from graphrt.graphs.segments import EagerSegment, GraphSegment
from graphrt.graphs.stale import StaleCheck
from graphrt.graphs.state import Resource, StateGuard, TensorStateGuard, Workspace
from graphrt.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper

__all__ = [
    "FILL_ONCE",
    "KEEP",
    "SENTINEL",
    "ZERO",
    "BoundBuffers",
    "BoundOutputs",
    "BufferSet",
    "BufferSpec",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CaptureJob",
    "CaptureReport",
    "CaptureScope",
    "EagerSegment",
    "External",
    "ExternalsReport",
    "FailureRecord",
    "Generation",
    "GraphBudget",
    "GraphLibrary",
    "GraphMemory",
    "GraphSegment",
    "LateInitError",
    "OutputSpec",
    "Padding",
    "Program",
    "ProgramBuilder",
    "Resource",
    "StaleCheck",
    "StateGuard",
    "TensorStateGuard",
    "Workspace",
    "break_at",
    "break_call",
    "break_point",
    "forbid_in_capture",
    "no_breaks",
]

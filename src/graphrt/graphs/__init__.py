"""Capture, programs, replay: what is recorded, what plays it, who owns it.

Recording and replaying are two types that share no class: what replays cannot capture.
"""

from __future__ import annotations

from graphrt.graphs.breaks import (
    break_at as break_at,
    break_call as break_call,
    break_point as break_point,
    forbid_in_capture as forbid_in_capture,
    no_breaks as no_breaks,
)
from graphrt.graphs.buffers import BoundBuffers as BoundBuffers, BufferSet as BufferSet
from graphrt.graphs.bufferspec import BufferSpec as BufferSpec, Padding as Padding
from graphrt.graphs.capture import (
    capture_program as capture_program,
    keep_undeclared as keep_undeclared,
)
from graphrt.graphs.catalog import (
    Catalog as Catalog,
    Entry as Entry,
    Key as Key,
    TimedPhase as TimedPhase,
    too_many_failures as too_many_failures,
)
from graphrt.graphs.library import GraphBudget as GraphBudget, GraphLibrary as GraphLibrary
from graphrt.graphs.outputs import OutputSpec as OutputSpec
from graphrt.graphs.program import (
    EagerSegment as EagerSegment,
    GraphMemory as GraphMemory,
    GraphSegment as GraphSegment,
    Program as Program,
    Returned as Returned,
)
from graphrt.graphs.resources import (
    Resource as Resource,
    StateGuard as StateGuard,
    TensorStateGuard as TensorStateGuard,
    Workspace as Workspace,
    optional_methods as optional_methods,
)
from graphrt.graphs.scope import CaptureOptions as CaptureOptions, CaptureScope as CaptureScope
from graphrt.graphs.signature import StaleCheck as StaleCheck
from graphrt.graphs.watch import Watch as Watch, WatchMode as WatchMode
from graphrt.graphs.wrapper import (
    CUDAGraphOptions as CUDAGraphOptions,
    CUDAGraphWrapper as CUDAGraphWrapper,
)

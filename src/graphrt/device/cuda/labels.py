"""Names for a window's kernels in profiler traces, where torch can keep them (2.12 and later).

torch keeps annotations by node of a graph; a trace that its profiler exports is merged with them
afterwards (``torch.cuda._annotate_cuda_graph_trace``). Finding a window's nodes costs a walk over
its graph, so only a debug device does it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def torch_annotations() -> ModuleType | None:
    """torch's module of kernel annotations; None before 2.12.

    Where the driver or cuda-bindings are too old for them it does nothing, and says so in its log.
    """
    try:
        from torch.cuda import _graph_annotations
    except ImportError:
        return None
    return _graph_annotations


class KernelLabels:
    """Labels what the calling thread's current stream captures from here on until ``close``."""

    def __init__(self, annotations: Any, label: str) -> None:
        self._annotations = annotations
        # torch has one switch for all, and asks it only when a scope begins.
        was_enabled = annotations._annotations_enabled
        annotations.enable_annotations()
        try:
            self._scope = annotations.mark_kernels(label)
            self._scope.__enter__()
        finally:
            if not was_enabled:
                annotations.disable_annotations()

    def close(self) -> None:
        """Label the nodes. The window has to be open still."""
        self._scope.__exit__(None, None, None)
        self._annotations.resolve_pending_annotations()

    def follow(self, graph: torch.cuda.CUDAGraph) -> None:
        """Move the labels to the executable, whose nodes a trace knows by other numbers."""
        self._annotations.remap_to_exec_graph(graph)

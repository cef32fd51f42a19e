"""graphrt: plan, capture, dispatch and replay CUDA graphs for PyTorch inference.

Public names are resolved on first use, so that the torch-free rooms never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.batch import BatchDescriptor as BatchDescriptor
    from graphrt.batch import CUDAGraphMode as CUDAGraphMode
    from graphrt.batch import Decision as Decision
    from graphrt.batch import MissReason as MissReason
    from graphrt.batch import RuntimeMode as RuntimeMode
    from graphrt.context import ForwardContext as ForwardContext
    from graphrt.context import get_forward_context as get_forward_context
    from graphrt.errors import GraphrtError as GraphrtError
    from graphrt.report.metrics import StepMetrics as StepMetrics
    from graphrt.report.page import ReportPage as ReportPage
    from graphrt.report.page import check_report_path as check_report_path
    from graphrt.report.page import write_report as write_report
    from graphrt.report.summary import PolicyRun as PolicyRun
    from graphrt.report.summary import summarize_runs as summarize_runs
    from graphrt.report.tables import TextRow as TextRow
    from graphrt.report.tables import TextTable as TextTable
    from graphrt.report.tables import capture_table as capture_table
    from graphrt.report.tables import comparison_table as comparison_table
    from graphrt.report.tables import miss_table as miss_table

_ROOM_OF = {
    "BatchDescriptor": "batch",
    "CUDAGraphMode": "batch",
    "Decision": "batch",
    "MissReason": "batch",
    "RuntimeMode": "batch",
    "ForwardContext": "context",
    "get_forward_context": "context",
    "GraphrtError": "errors",
    "PolicyRun": "report.summary",
    "ReportPage": "report.page",
    "StepMetrics": "report.metrics",
    "TextRow": "report.tables",
    "TextTable": "report.tables",
    "capture_table": "report.tables",
    "check_report_path": "report.page",
    "comparison_table": "report.tables",
    "miss_table": "report.tables",
    "summarize_runs": "report.summary",
    "write_report": "report.page",
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

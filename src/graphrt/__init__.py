"""graphrt: plan, capture, dispatch and replay CUDA graphs for PyTorch inference.

Public names are resolved on first use, so that the torch-free rooms never load torch. Four modules
are public as wholes: ``graphrt.errors``, ``events`` (what an observer is given), ``report`` (tables
and pages of runs) and ``planner`` (traffic to run); so is ``graphrt.ubatch``, for models that call
it. What only some users of another room need is imported from that room.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.batch import (
        BatchDescriptor as BatchDescriptor,
        CUDAGraphMode as CUDAGraphMode,
        Decision as Decision,
        Reason as Reason,
        RuntimeMode as RuntimeMode,
        UBatchReason as UBatchReason,
    )
    from graphrt.compile import CustomOp as CustomOp, load_compiler as load_compiler
    from graphrt.config import (
        Adjustment as Adjustment,
        AttentionSupport as AttentionSupport,
        CompilationConfig as CompilationConfig,
        Facts as Facts,
        Plan as Plan,
        RankConfig as RankConfig,
        RankVariables as RankVariables,
        RuntimeConfig as RuntimeConfig,
        rank_variables as rank_variables,
        resolve as resolve,
    )
    from graphrt.context import (
        ForwardContext as ForwardContext,
        get_forward_context as get_forward_context,
    )
    from graphrt.device import make_device as make_device
    from graphrt.device.base import Device as Device
    from graphrt.device.simulated import SimulatedDevice as SimulatedDevice
    from graphrt.dispatch import (
        BucketDispatcher as BucketDispatcher,
        CUDAGraphDispatcher as CUDAGraphDispatcher,
    )
    from graphrt.errors import GraphrtError as GraphrtError
    from graphrt.events import Event as Event, Observer as Observer
    from graphrt.graphs import (
        BufferSet as BufferSet,
        BufferSpec as BufferSpec,
        CaptureOptions as CaptureOptions,
        CUDAGraphOptions as CUDAGraphOptions,
        CUDAGraphWrapper as CUDAGraphWrapper,
        GraphBudget as GraphBudget,
        GraphLibrary as GraphLibrary,
        OutputSpec as OutputSpec,
        Padding as Padding,
        Program as Program,
        Resource as Resource,
        StaleCheck as StaleCheck,
        StateGuard as StateGuard,
        TensorStateGuard as TensorStateGuard,
        Workspace as Workspace,
        break_at as break_at,
        break_call as break_call,
        break_point as break_point,
        capture_program as capture_program,
        forbid_in_capture as forbid_in_capture,
        no_breaks as no_breaks,
    )
    from graphrt.interrupts import interrupted_between_steps as interrupted_between_steps
    from graphrt.parallel import (
        Exchange as Exchange,
        InProcessExchange as InProcessExchange,
        TorchExchange as TorchExchange,
        agree_least as agree_least,
        launch_ranks as launch_ranks,
    )
    from graphrt.report import (
        LoggingObserver as LoggingObserver,
        ProgressBars as ProgressBars,
        PrometheusObserver as PrometheusObserver,
        StepMetrics as StepMetrics,
    )
    from graphrt.runner import (
        CaptureJob as CaptureJob,
        CUDAGraphRunner as CUDAGraphRunner,
        Example as Example,
        capture_all as capture_all,
    )
    from graphrt.runtime import Runtime as Runtime, RuntimeReport as RuntimeReport
    from graphrt.verify import (
        check_padding_unread as check_padding_unread,
        check_replay as check_replay,
        compare as compare,
        explain as explain,
    )

_MODULES = ("errors", "events", "planner", "report", "ubatch")
_NAMES_OF_ROOM = {
    "batch": "BatchDescriptor CUDAGraphMode Decision Reason RuntimeMode UBatchReason",
    "compile": "CustomOp load_compiler",
    "config": """
        Adjustment AttentionSupport CompilationConfig Facts Plan RankConfig RankVariables
        RuntimeConfig rank_variables resolve
    """,
    "context": "ForwardContext get_forward_context",
    "device": "make_device",
    "device.base": "Device",
    "device.simulated": "SimulatedDevice",
    "dispatch": "BucketDispatcher CUDAGraphDispatcher",
    "errors": "GraphrtError",
    "events": "Event Observer",
    "graphs": """
        BufferSet BufferSpec CUDAGraphOptions CUDAGraphWrapper CaptureOptions GraphBudget
        GraphLibrary OutputSpec Padding Program Resource StaleCheck StateGuard
        TensorStateGuard Workspace break_at break_call break_point capture_program
        forbid_in_capture no_breaks
    """,
    "interrupts": "interrupted_between_steps",
    "parallel": "Exchange InProcessExchange TorchExchange agree_least launch_ranks",
    "report": "LoggingObserver ProgressBars PrometheusObserver StepMetrics",
    "runner": "CUDAGraphRunner CaptureJob Example capture_all",
    "runtime": "Runtime RuntimeReport",
    "verify": "check_padding_unread check_replay compare explain",
}
_ROOM_OF = {name: room for room, names in _NAMES_OF_ROOM.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"graphrt.{name}")
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'graphrt' has no attribute {name!r}")
    from graphrt.gc_pause import gc_paused

    with gc_paused(collects=False, ages=True):  # The first may import torch.
        value = getattr(import_module(f"graphrt.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", *_MODULES]

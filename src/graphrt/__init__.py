"""graphrt: plan, capture, dispatch and replay CUDA graphs for PyTorch inference.

Public names are resolved on first use, so that the torch-free rooms never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.batch import (
        BatchDescriptor as BatchDescriptor,
        CUDAGraphMode as CUDAGraphMode,
        Decision as Decision,
        MissReason as MissReason,
        RuntimeMode as RuntimeMode,
    )
    from graphrt.config import (
        Adjustment as Adjustment,
        AttentionSupport as AttentionSupport,
        CompilationConfig as CompilationConfig,
        CompilationLevel as CompilationLevel,
        Facts as Facts,
        ModeLimit as ModeLimit,
        Plan as Plan,
        Resolved as Resolved,
        RuntimeConfig as RuntimeConfig,
        resolve as resolve,
    )
    from graphrt.context import (
        ForwardContext as ForwardContext,
        get_forward_context as get_forward_context,
    )
    from graphrt.device import (
        make_device as make_device,
    )
    from graphrt.device.base import (
        Device as Device,
    )
    from graphrt.device.simulated import (
        SimulatedDevice as SimulatedDevice,
    )
    from graphrt.dispatch import (
        BucketDispatcher as BucketDispatcher,
        BucketKey as BucketKey,
        CUDAGraphDispatcher as CUDAGraphDispatcher,
    )
    from graphrt.errors import (
        AmbientError as AmbientError,
        BatchError as BatchError,
        BreakError as BreakError,
        BreakOutputError as BreakOutputError,
        CaptureError as CaptureError,
        CaptureFuseError as CaptureFuseError,
        CaptureInProgressError as CaptureInProgressError,
        CaptureOutsideScopeError as CaptureOutsideScopeError,
        CommandError as CommandError,
        ConfigError as ConfigError,
        ConfigProblem as ConfigProblem,
        ContextError as ContextError,
        DeviceReplayError as DeviceReplayError,
        EmptyCaptureError as EmptyCaptureError,
        EscapedAllocationError as EscapedAllocationError,
        ForbiddenOperationError as ForbiddenOperationError,
        ForkedProcessError as ForkedProcessError,
        FrozenBufferError as FrozenBufferError,
        GraphMemoryError as GraphMemoryError,
        GraphrtError as GraphrtError,
        InputMismatchError as InputMismatchError,
        InvalidProgramError as InvalidProgramError,
        LateInitError as LateInitError,
        LibraryClosedError as LibraryClosedError,
        LifetimeError as LifetimeError,
        MissError as MissError,
        MissingExtraError as MissingExtraError,
        MutatedInputError as MutatedInputError,
        PaddingRequiredError as PaddingRequiredError,
        ReplayError as ReplayError,
        ReportError as ReportError,
        RetiredProgramError as RetiredProgramError,
        StaleInputError as StaleInputError,
        StaleOutputError as StaleOutputError,
        StateAdvancedError as StateAdvancedError,
        StaticBufferError as StaticBufferError,
        StreamRaceError as StreamRaceError,
        SuspendedError as SuspendedError,
        TraceError as TraceError,
        UnjoinedStreamError as UnjoinedStreamError,
        UnkeyedValueError as UnkeyedValueError,
        UnrecordedCodeError as UnrecordedCodeError,
        UnsupportedOperationError as UnsupportedOperationError,
        VerificationError as VerificationError,
    )
    from graphrt.events import (
        Captured as Captured,
        CaptureFailed as CaptureFailed,
        Event as Event,
        Invalidated as Invalidated,
        Observer as Observer,
        RanEager as RanEager,
        Replayed as Replayed,
        Retired as Retired,
        Verified as Verified,
    )
    from graphrt.graphs import (
        FILL_ONCE as FILL_ONCE,
        KEEP as KEEP,
        SENTINEL as SENTINEL,
        ZERO as ZERO,
        BoundBuffers as BoundBuffers,
        BoundOutputs as BoundOutputs,
        BufferSet as BufferSet,
        BufferSpec as BufferSpec,
        CaptureJob as CaptureJob,
        CaptureReport as CaptureReport,
        CaptureScope as CaptureScope,
        CUDAGraphOptions as CUDAGraphOptions,
        CUDAGraphWrapper as CUDAGraphWrapper,
        EagerSegment as EagerSegment,
        External as External,
        ExternalsReport as ExternalsReport,
        FailureRecord as FailureRecord,
        Generation as Generation,
        GraphBudget as GraphBudget,
        GraphLibrary as GraphLibrary,
        GraphMemory as GraphMemory,
        GraphSegment as GraphSegment,
        OutputSpec as OutputSpec,
        Padding as Padding,
        Program as Program,
        ProgramBuilder as ProgramBuilder,
        Resource as Resource,
        StaleCheck as StaleCheck,
        StateGuard as StateGuard,
        TensorStateGuard as TensorStateGuard,
        Workspace as Workspace,
        break_at as break_at,
        break_call as break_call,
        break_point as break_point,
        forbid_in_capture as forbid_in_capture,
        no_breaks as no_breaks,
    )
    from graphrt.interrupts import (
        interrupted_between_steps as interrupted_between_steps,
    )
    from graphrt.planner.trace import (
        TraceRequest as TraceRequest,
        generate_azure_like as generate_azure_like,
        read_azure_csv as read_azure_csv,
        read_mooncake_jsonl as read_mooncake_jsonl,
        read_trace as read_trace,
    )
    from graphrt.report.histogram import (
        Histogram as Histogram,
        RunningHistogram as RunningHistogram,
    )
    from graphrt.report.metrics import (
        Metrics as Metrics,
        StepMetrics as StepMetrics,
    )
    from graphrt.report.page import (
        ReportPage as ReportPage,
        check_report_path as check_report_path,
        write_report as write_report,
    )
    from graphrt.report.summary import (
        PolicyRun as PolicyRun,
        summarize_runs as summarize_runs,
    )
    from graphrt.report.tables import (
        TextRow as TextRow,
        TextTable as TextTable,
        capture_table as capture_table,
        comparison_table as comparison_table,
        miss_table as miss_table,
    )
    from graphrt.runtime import (
        CapturedGraph as CapturedGraph,
        Example as Example,
        Runtime as Runtime,
        RuntimeReport as RuntimeReport,
    )
    from graphrt.verify import (
        Comparison as Comparison,
        Difference as Difference,
        HostState as HostState,
        Verification as Verification,
        check_padding_unread as check_padding_unread,
        check_replay as check_replay,
        compare as compare,
        explain as explain,
        find_unwritten as find_unwritten,
        forward_hooks as forward_hooks,
    )

_NAMES_OF_ROOM = {
    "batch": """
        BatchDescriptor CUDAGraphMode Decision MissReason RuntimeMode
    """,
    "config": """
        Adjustment AttentionSupport CompilationConfig CompilationLevel Facts ModeLimit Plan
        Resolved RuntimeConfig resolve
    """,
    "context": """
        ForwardContext get_forward_context
    """,
    "device": """
        make_device
    """,
    "device.base": """
        Device
    """,
    "device.simulated": """
        SimulatedDevice
    """,
    "dispatch": """
        BucketDispatcher BucketKey CUDAGraphDispatcher
    """,
    "errors": """
        AmbientError BatchError BreakError BreakOutputError CaptureError CaptureFuseError
        CaptureInProgressError CaptureOutsideScopeError CommandError ConfigError ConfigProblem
        ContextError DeviceReplayError EmptyCaptureError EscapedAllocationError
        ForbiddenOperationError ForkedProcessError FrozenBufferError GraphMemoryError GraphrtError
        InputMismatchError InvalidProgramError LateInitError LibraryClosedError LifetimeError
        MissError MissingExtraError MutatedInputError PaddingRequiredError ReplayError ReportError
        RetiredProgramError StaleInputError StaleOutputError StateAdvancedError StaticBufferError
        StreamRaceError SuspendedError TraceError UnjoinedStreamError UnkeyedValueError
        UnrecordedCodeError UnsupportedOperationError VerificationError
    """,
    "events": """
        CaptureFailed Captured Event Invalidated Observer RanEager Replayed Retired Verified
    """,
    "graphs": """
        BoundBuffers BoundOutputs BufferSet BufferSpec CUDAGraphOptions CUDAGraphWrapper
        CaptureJob CaptureReport CaptureScope EagerSegment External ExternalsReport FILL_ONCE
        FailureRecord Generation GraphBudget GraphLibrary GraphMemory GraphSegment KEEP OutputSpec
        Padding Program ProgramBuilder Resource SENTINEL StaleCheck StateGuard TensorStateGuard
        Workspace ZERO break_at break_call break_point forbid_in_capture no_breaks
    """,
    "interrupts": """
        interrupted_between_steps
    """,
    "planner.trace": """
        TraceRequest generate_azure_like read_azure_csv read_mooncake_jsonl read_trace
    """,
    "report.histogram": """
        Histogram RunningHistogram
    """,
    "report.metrics": """
        Metrics StepMetrics
    """,
    "report.page": """
        ReportPage check_report_path write_report
    """,
    "report.summary": """
        PolicyRun summarize_runs
    """,
    "report.tables": """
        TextRow TextTable capture_table comparison_table miss_table
    """,
    "runtime": """
        CapturedGraph Example Runtime RuntimeReport
    """,
    "verify": """
        Comparison Difference HostState Verification check_replay check_padding_unread
        compare explain find_unwritten forward_hooks
    """,
}
_ROOM_OF = {name: room for room, names in _NAMES_OF_ROOM.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'graphrt' has no attribute {name!r}")
    value = getattr(import_module(f"graphrt.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

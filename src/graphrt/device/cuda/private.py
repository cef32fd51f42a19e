"""Everything this device needs that torch and the driver do not promise, in one place.

Each function works with every supported torch, 2.11 to 2.13. What only some of them need says which
release ends it.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch

PoolId = tuple[int, int]

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: this thread alone is held to the rules of a capture.
_THREAD_LOCAL = 1
# CU_STREAM_CAPTURE_STATUS_ACTIVE: neither broken nor over.
_CAPTURES = 1


def supported(function: Callable[..., Any], **optional: Any) -> dict[str, Any]:
    """Those of ``optional`` that ``function`` has a parameter for, by its signature.

    For what is younger than torch 2.11: ``check_input_liveness``, ``include_traces``.
    """
    # A bound method is made anew at each access; what it is bound to is not.
    known = _parameters(getattr(function, "__func__", function))
    return {name: value for name, value in optional.items() if name in known}


@lru_cache(maxsize=16)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def bare_operator(operator: Any) -> Callable[..., Any]:
    """The builtin that a call of ``operator`` runs; itself where torch's call does more.

    It spares one Python frame for each observed operation.
    """
    plain = torch._ops.OpOverload
    is_plain = type(operator).__call__ is plain.__call__ and hasattr(operator, "_op")
    bare: Callable[..., Any] = operator._op if is_plain else operator
    return bare


def without_modes() -> AbstractContextManager[Any]:
    """While entered, no dispatch mode sees an operation.

    torch's own bookkeeping around a capture consists of operations too: it makes and fills the seed
    and the offset of every generator. If a mode of the caller's raises in one of them, the graph is
    half registered, and its destructor ends the process.
    """
    guard: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
    return guard


def is_stream_capturing() -> bool:
    """Whether the current stream captures, whatever ``report_capturing`` makes torch say.

    True for an invalidated capture that was not ended yet.
    """
    return bool(torch._C._cuda_isCurrentStreamCapturing())


def is_current_stream(handle: int, device_index: int) -> bool:
    """Whether the stream of this handle, and its device, are current."""
    is_device = torch.cuda.current_device() == device_index
    return is_device and torch._C._cuda_getCurrentRawStream(device_index) == handle


def clear_blas_workspaces() -> None:
    """Drop the scratch memory that torch keeps for cuBLAS per handle and stream.

    A graph contains the workspace's address. If graphs share one, it is freed with the first of
    them (PyTorch #193402), so each recording makes its own. Drop this when the oldest supported
    torch has that fixed.
    """
    torch._C._cuda_clearCublasWorkspaces()


def bytes_ever_reserved(device_index: int) -> int:
    """Bytes that the allocator has taken from the driver so far. It counts what it gave back too,
    so that no pool has grown while this stays."""
    held = torch.cuda.memory_stats_as_nested_dict(device_index)["reserved_bytes"]["all"]
    return int(held["allocated"])


def segments_of(pool: PoolId, device_index: int) -> list[dict[str, Any]]:
    """The allocator's segments that belong to ``pool``."""
    if snapshot_drops_references():
        _add_references(pool)
    optional = supported(torch.cuda.memory_snapshot, include_traces=False)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(mempool_id=pool, **optional)
    return [
        segment
        for segment in segments
        if segment["device"] == device_index and tuple(segment["segment_pool_id"]) == pool
    ]


@cache
def snapshot_drops_references() -> bool:
    """Whether a snapshot of one pool drops a reference to each number of its id that it never took.

    torch 2.11 does. Numbers above 256 are then freed while the id is in use, and the process dies
    in its next garbage collection. Drop this, and ``_add_references``, when the oldest supported
    torch has PyTorch #196366 (not merged in September 2026).
    """
    number = int("1234567890123")  # Of its own: a literal would be shared with the code object.
    probe = (0, number)
    _add_references(probe)
    before = sys.getrefcount(number)
    torch.cuda.memory_snapshot(mempool_id=probe)
    after = sys.getrefcount(number)
    return after < before


def _add_references(pool: PoolId) -> None:
    for number in pool:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))


def retain_pool(pool: PoolId, device_index: int) -> None:
    """Count one more user of ``pool``, as a ``MemPool`` object does for its own id."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool)
    torch._C._cuda_endAllocateToPool(device_index, pool)


def release_pool(pool: PoolId, device_index: int) -> None:
    """Count one user of ``pool`` less."""
    torch._C._cuda_releasePool(device_index, pool)


def stop_routing(pool: PoolId, device_index: int) -> None:
    """No longer route allocations into ``pool``, if they are."""
    with suppress(RuntimeError):  # "not currently recording to mempool_id"
        torch._C._cuda_endAllocateToPool(device_index, pool)


def begin_driver_capture(stream_handle: int) -> None:
    """Put a stream into capture mode without torch: see ``CUDARecording._unwind``."""
    _driver_call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream_handle), _THREAD_LOCAL)


def end_driver_capture(stream_handle: int) -> None:
    """Take a stream out of capture mode and drop what it recorded, whatever error it reports."""
    graph = ctypes.c_void_p()
    with suppress(OSError):
        _driver_call("cuStreamEndCapture", ctypes.c_void_p(stream_handle), ctypes.byref(graph))
    if graph.value:
        _driver_call("cuGraphDestroy", graph)


def captured_nodes(stream_handle: int) -> int | None:
    """Nodes that the open capture of a stream has recorded; None for one that is broken.

    torch says no more than that there are none, by a warning after the capture.
    """
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    found = map(ctypes.byref, (status, number, graph))
    num_nodes = ctypes.c_size_t()
    # An error is that of the capture itself, and its end says it.
    with suppress(OSError):
        _driver_call(
            "cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream_handle), *found, None, None
        )
        if status.value == _CAPTURES:
            _driver_call("cuGraphGetNodes", graph, None, ctypes.byref(num_nodes))
            return num_nodes.value
    return None


def _driver_call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise OSError(code, f"{name} failed with code {code}")


@cache
def _driver() -> Any:
    # The driver's own library: its name, unlike the runtime's, is the same for every toolkit.
    return ctypes.CDLL("libcuda.so.1")


def driver_version() -> str | None:
    """The version of the NVIDIA driver, from its management library; None where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    code = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return f"NVML error {code}" if code else text.value.decode()


def aliasing_storage(address: int, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over bytes that it does not own.

    torch's graph trees make theirs with the private constructor. Should a release drop that, the
    public CUDA array interface does the same: torch keeps the exporter alive, not the bytes.
    """
    construct = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if construct is not None:
        storage: torch.UntypedStorage = construct(address, device, num_bytes)
        return storage
    return torch.as_tensor(_Bytes(address, num_bytes), device=device).untyped_storage()


class _Bytes:
    """Exports a range of device memory as unsigned bytes."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def kernel_annotations() -> ModuleType | None:
    """torch's module that names kernels in profiler traces; None before torch 2.12.

    Where the driver or cuda-bindings are too old for it, it does nothing, and says so in its log.
    """
    try:
        from torch.cuda import _graph_annotations
    except ImportError:
        return None
    return _graph_annotations


class KernelLabels:
    """Labels in profiler traces for what this thread's current stream captures until ``close``.

    torch keeps labels by node of a graph, and ``torch.cuda._annotate_cuda_graph_trace`` merges them
    into an exported trace. To find the nodes it walks the graph: for debug devices only.
    """

    def __init__(self, annotations: Any, label: str) -> None:
        self._annotations = annotations
        # The switch is the process's, and read only when a scope begins.
        was_enabled = annotations._annotations_enabled
        annotations.enable_annotations()
        try:
            self._scope = annotations.mark_kernels(label)
            self._scope.__enter__()
        finally:
            if not was_enabled:
                annotations.disable_annotations()

    def close(self) -> None:
        """Label the nodes. The capture must still be open."""
        self._scope.__exit__(None, None, None)
        self._annotations.resolve_pending_annotations()

    def move_to_executable(self, graph: torch.cuda.CUDAGraph) -> None:
        """A trace knows the nodes by their numbers in the executable graph."""
        self._annotations.remap_to_exec_graph(graph)

"""Everything this device needs that torch and the driver do not promise, in one place.

Each function says what it stands on, and copes with the releases where that is missing.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache, lru_cache
from typing import Any

import torch

PoolId = tuple[int, int]

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: this thread alone is held to the rules of a capture.
_THREAD_LOCAL = 1


def supported(function: Callable[..., Any], **optional: Any) -> dict[str, Any]:
    """Those of ``optional`` that ``function`` has a parameter for, by its signature."""
    # A bound method is made anew at each access; what it is bound to is not.
    known = _parameters(getattr(function, "__func__", function))
    return {name: value for name, value in optional.items() if name in known}


@lru_cache(maxsize=16)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def bare_operator(operator: Any) -> Callable[..., Any]:
    """What a call of ``operator`` comes down to, or itself where torch does more than that."""
    plain = torch._ops.OpOverload
    is_plain = type(operator).__call__ is plain.__call__ and hasattr(operator, "_op")
    bare: Callable[..., Any] = operator._op if is_plain else operator
    return bare


def past_modes() -> AbstractContextManager[Any]:
    """While entered, no dispatch mode sees an operation.

    torch's own bookkeeping around a capture is made of operations too: it makes and fills the seed
    and the offset of every generator. A mode of the caller's that raised in one of them would leave
    a graph half registered, which its destructor does not survive: it ends the process.
    """
    guard: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
    return guard


def is_stream_capturing() -> bool:
    """Whether the current stream captures, past whatever ``answering_capture`` has put before it.

    True for an invalidated capture that nobody has ended yet.
    """
    return bool(torch._C._cuda_isCurrentStreamCapturing())


def clear_blas_workspaces() -> None:
    """Drop the scratch memory that torch keeps for cuBLAS per handle and stream.

    A graph bakes the workspace's address. One that is shared between recordings dies with the first
    of them (PyTorch #193402), so each recording makes its own.
    """
    torch._C._cuda_clearCublasWorkspaces()


def segments_of(pool: PoolId, device_index: int) -> list[dict[str, Any]]:
    """The allocator's segments that belong to ``pool``.

    The arguments of ``memory_snapshot`` grew over the releases; the filter makes all of them agree.
    """
    arguments = supported(torch.cuda.memory_snapshot, mempool_id=pool, include_traces=False)
    if "mempool_id" in arguments and snapshot_takes_references():
        _give_references(pool)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(**arguments)
    return [
        segment
        for segment in segments
        if segment["device"] == device_index and tuple(segment["segment_pool_id"]) == pool
    ]


@cache
def snapshot_takes_references() -> bool:
    """Whether a snapshot of one pool drops a reference of each number of its id that is not its.

    torch 2.11 does. Numbers above 256 are then freed under whoever holds the id, and the process
    dies in its next garbage collection.
    """
    number = int("1234567890123")  # Of its own: a literal would be shared with the code object.
    probe = (0, number)
    _give_references(probe)
    before = sys.getrefcount(number)
    torch.cuda.memory_snapshot(mempool_id=probe)
    after = sys.getrefcount(number)
    return after < before


def _give_references(pool: PoolId) -> None:
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
    """No longer route allocations into ``pool``; nothing happens if they are not."""
    with suppress(RuntimeError):  # "not currently recording to mempool_id"
        torch._C._cuda_endAllocateToPool(device_index, pool)


def begin_bare_capture(stream_handle: int) -> None:
    """Put a stream into capture mode behind torch's back: see ``recording.unwind``."""
    _driver_call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream_handle), _THREAD_LOCAL)


def end_bare_capture(stream_handle: int) -> None:
    """Take a stream out of capture mode and drop what it held. Its complaints are expected."""
    graph = ctypes.c_void_p()
    with suppress(OSError):
        _driver_call("cuStreamEndCapture", ctypes.c_void_p(stream_handle), ctypes.byref(graph))
    if graph.value:
        _driver_call("cuGraphDestroy", graph)


def _driver_call(name: str, *arguments: Any) -> None:
    # The driver's own library: its name, unlike the runtime's, is the same for every toolkit.
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise OSError(code, f"{name} failed with code {code}")


def aliasing_storage(address: int, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over bytes that it does not own.

    torch's graph trees build theirs with the private constructor. Where that is gone, the public
    CUDA array interface does the same: torch keeps the (empty) exporter alive, not the memory.
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


def count_nodes(raw_graph: int) -> int | None:
    """Nodes of a ``cudaGraph_t``; None without cuda-bindings."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    error, _, num_nodes = runtime.cudaGraphGetNodes(raw_graph, 0)
    return int(num_nodes) if int(error) == 0 else None

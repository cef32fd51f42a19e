"""The CUDA device, over torch 2.11 and later. ``torch.cuda`` is named here and in ``torch_modes``.

Importing it constructs nothing and works on a machine without a GPU; making a ``CUDADevice`` does
not. The other names are for those who need one part, such as the tests.
"""

from graphrt.device.cuda.device import CUDADevice, StreamTable
from graphrt.device.cuda.failures import error_code, replay_failure, translate
from graphrt.device.cuda.observe import Observer, UseTracker
from graphrt.device.cuda.pool import CUDAPool, PoolTable, storage_address
from graphrt.device.cuda.recording import CaptureState, CUDARecording

__all__ = [
    "CUDADevice",
    "CUDAPool",
    "CUDARecording",
    "CaptureState",
    "Observer",
    "PoolTable",
    "StreamTable",
    "UseTracker",
    "error_code",
    "replay_failure",
    "storage_address",
    "translate",
]

"""The CUDA device, over torch 2.11 and later. ``torch.cuda`` is named here and in ``torch_modes``.

Importing it constructs nothing and works on a machine without a GPU; making a ``CUDADevice`` does
not. The other names are for those who need one part, such as the tests.
"""

from graphrt.device.cuda.device import CUDADevice as CUDADevice, StreamTable as StreamTable
from graphrt.device.cuda.failures import (
    error_code as error_code,
    replay_failure as replay_failure,
    translate as translate,
)
from graphrt.device.cuda.observe import Observer as Observer, UseTracker as UseTracker
from graphrt.device.cuda.pool import (
    CUDAPool as CUDAPool,
    PoolTable as PoolTable,
    storage_address as storage_address,
)
from graphrt.device.cuda.recording import (
    CaptureState as CaptureState,
    CUDARecording as CUDARecording,
)

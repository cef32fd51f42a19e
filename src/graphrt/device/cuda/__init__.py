"""The CUDA device, over torch 2.11 and later. The only room that says ``torch.cuda``.

Importing it constructs nothing and works on a machine without a GPU; making a ``CUDADevice`` does
not.
"""

from graphrt.device.cuda.device import CUDADevice
from graphrt.device.cuda.pool import CUDAPool
from graphrt.device.cuda.recording import CUDADeviceGraph, CUDARecording
from graphrt.device.cuda.streams import CUDAMark, CUDAStream

__all__ = [
    "CUDADevice",
    "CUDADeviceGraph",
    "CUDAMark",
    "CUDAPool",
    "CUDARecording",
    "CUDAStream",
]

"""A CPU device with CUDA-graph semantics: what anyone tests on without a GPU."""

from __future__ import annotations

from graphrt.device.simulated.device import SimulatedDevice as SimulatedDevice
from graphrt.device.simulated.graph import Faults as Faults

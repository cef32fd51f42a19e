"""A CPU device with CUDA-graph semantics: what anyone tests on without a GPU."""

from __future__ import annotations

from graphrt.device.simulated.device import Faults, SimulatedDevice

__all__ = ["Faults", "SimulatedDevice"]

"""The device contract, held to by CUDA."""

from __future__ import annotations

from device_contract import DeviceContract


class TestCUDADevice(DeviceContract):
    pass

"""The device contract, held to by CUDA."""

from __future__ import annotations

import pytest

# Before its import, or a failing case would not show its values.
pytest.register_assert_rewrite("device_contract")

from device_contract import DeviceContract  # noqa: E402


class TestCUDADevice(DeviceContract):
    pass

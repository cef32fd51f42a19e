"""The device contract, held to by the simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphrt.device import make_device
from graphrt.device.base import Device

# Before its import, or a failing case would not show its values.
pytest.register_assert_rewrite("device_contract")

from device_contract import DeviceContract, StricterThanCUDA  # noqa: E402


@pytest.fixture
def device() -> Iterator[Device]:
    device = make_device("simulated")
    yield device
    device.close()


class TestSimulatedDevice(DeviceContract):
    pass


class TestSimulatedDeviceIsStricter(StricterThanCUDA):
    pass

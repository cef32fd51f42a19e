"""The interrupted captures that both devices share, on the simulated one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphrt import SimulatedDevice
from runtime_interrupts import RuntimeInterrupts


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


class TestRuntimeInterruptsSimulated(RuntimeInterrupts):
    num_rounds = 15
    num_recaptures = 10

"""The bug classes that both devices share, on the simulated one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bug_classes import BugClasses
from graphrt import SimulatedDevice


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


class TestBugClassesSimulated(BugClasses):
    pass

"""The bug classes that both devices share, on the simulated one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("bug_classes")

from bug_classes import BugClasses  # noqa: E402
from graphrt import SimulatedDevice  # noqa: E402


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


class TestBugClassesSimulated(BugClasses):
    pass

"""The CPU lane computes on one thread: its operators are too small to share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lab import Lab

# Before their first import, or a failing case would not show its values.
pytest.register_assert_rewrite("bug_classes", "device_contract", "runtime_interrupts")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab

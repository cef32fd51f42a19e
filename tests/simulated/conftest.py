"""The CPU lane: one thread, because its operators are too small to share, and a frozen heap."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from graphrt.device.simulated import SimulatedDevice
from graphrt.gc_pause import frozen_heap
from lab import Lab

# Before their first import, or a failing case would not show its values.
pytest.register_assert_rewrite("bug_classes", "device_contract", "runtime_interrupts")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    SimulatedDevice().close()  # It imports what modules below would each have to collect.
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _levels_of_loggers() -> Iterator[None]:
    """Programs of the documentation set them, as a user's do."""
    yield
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "graphrt" and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> Iterator[ExitStack]:
    """Each capture scope collects the heap: what torch and pytest made takes 0.2 s of that."""
    with ExitStack() as heap:
        heap.enter_context(frozen_heap())
        yield heap


@pytest.fixture
def usual_heap(_frozen_heap: ExitStack) -> Iterator[None]:
    _frozen_heap.close()
    yield
    _frozen_heap.enter_context(frozen_heap())


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab

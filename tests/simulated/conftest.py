"""The CPU lane: one thread, because its operators are too small to share.

Torch is imported by what runs: the process that hands out the tests of several would wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ranks_lab import launcher

if TYPE_CHECKING:
    from lab import Lab

# Before their first import, or a failing case would not show its values.
pytest.register_assert_rewrite("bug_classes", "device_contract", "runtime_interrupts")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    from graphrt import SimulatedDevice

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # pytest listens to each logger that does not propagate, and Dynamo writes a record of all that
    # it does where somebody listens: a tenth of the time of what compiles.
    logging.getLogger("torch.__trace").propagate = True
    SimulatedDevice().close()  # It imports what modules below would each have to collect.
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _launcher_ends() -> Iterator[None]:
    yield
    if launcher.cache_info().currsize:
        launcher().close()


@pytest.fixture(autouse=True)
def _levels_of_loggers() -> Iterator[None]:
    """Programs of the documentation set them, as a user's do."""
    yield
    for name, logger in logging.root.manager.loggerDict.items():
        # To set what is set visits all loggers, of which torch makes hundreds.
        if name.startswith("graphrt") and getattr(logger, "level", logging.NOTSET):
            logger.setLevel(logging.NOTSET)


@pytest.fixture
def lab() -> Iterator[Lab]:
    from lab import Lab

    with Lab() as lab:
        yield lab

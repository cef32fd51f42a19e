"""What every lane shares: where reference vectors and traces lie, and a Ctrl-C that arrives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference vectors and real traces beside the checkout.

    It is always there in CI, where its absence is a failure; elsewhere the test skips and says so.
    """
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        message = f"no folder 'shared' beside the checkout ({folder})"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture
def usual_heap() -> None:
    """For tests of the collector: no lane has frozen what it never collects."""


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> Iterator[None]:
    """A shell without job control starts what runs in the background with Ctrl-C ignored.

    Python then installs no handler of its own, and the tests that send themselves one wait for a
    ``KeyboardInterrupt`` in vain.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_IGN)

"""What every lane shares: where reference vectors and traces lie, a Ctrl-C that arrives, a heap."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from graphrt.gc_pause import frozen_heap, gc_paused

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All that is imported and collected lives on: visiting it again and again took 40 %."""
    with gc_paused(collects=False, ages=True):
        return (yield)


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


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> Iterator[ExitStack]:
    """Capture scopes and timers collect the heap: visiting what torch and pytest made takes 1 s."""
    with ExitStack() as heap:
        heap.enter_context(frozen_heap())
        yield heap


@pytest.fixture(autouse=True)
def _frozen_results(_frozen_heap: ExitStack) -> None:
    """What the tests before this one left, or imported, is not visited by its collections either.

    First what is garbage goes, which takes no time, because all else is frozen.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def usual_heap(_frozen_heap: ExitStack) -> Iterator[None]:
    """For tests of the collector: nothing is frozen."""
    _frozen_heap.close()
    yield
    _frozen_heap.enter_context(frozen_heap())


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

"""Ctrl-C between steps, also if a shell started the tests in the background."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from graphrt import interrupted_between_steps
from graphrt.interrupts import termination_noted


def test_first_interrupt_waits_for_the_check() -> None:
    with interrupted_between_steps() as check_interrupt:
        check_interrupt()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_noted_have_their_default_again_without_one() -> None:
    with interrupted_between_steps(), termination_noted() as has_arrived:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        signal.raise_signal(signal.SIGTERM)
        assert has_arrived()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


IN_THE_BACKGROUND = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.SIG_IGN)
status = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
sys.exit(status)
"""


def test_interrupts_arrive_in_a_suite_run_in_the_background() -> None:
    test = test_first_interrupt_waits_for_the_check.__name__
    ran = subprocess.run(
        [sys.executable, "-c", IN_THE_BACKGROUND, f"{__file__}::{test}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

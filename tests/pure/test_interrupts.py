"""Ctrl-C between steps, and that the tests of it run however the suite was started."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from graphrt.interrupts import interrupted_between_steps


def test_the_first_interrupt_waits_until_somebody_asks() -> None:
    with interrupted_between_steps() as check_interrupt:
        check_interrupt()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


IN_THE_BACKGROUND = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.SIG_IGN)
status = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
sys.exit(status)
"""


def test_interrupts_arrive_also_where_a_shell_started_the_suite_in_the_background() -> None:
    test = test_the_first_interrupt_waits_until_somebody_asks.__name__
    ran = subprocess.run(
        [sys.executable, "-c", IN_THE_BACKGROUND, f"{__file__}::{test}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

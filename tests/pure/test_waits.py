"""Calls that are waited for with a limit."""

from __future__ import annotations

import threading

import pytest

from graphrt.waits import within


def test_call_in_time_returns_or_raises() -> None:
    assert within(60, divmod, 7, 4) == [(1, 3)]
    with pytest.raises(ZeroDivisionError):
        within(60, divmod, 7, 0)


def test_call_that_takes_longer_is_left_behind() -> None:
    go, ended = threading.Event(), threading.Event()

    def call() -> None:
        assert go.wait(60)
        ended.set()

    assert within(0, call) == []
    go.set()
    assert ended.wait(60)

"""Whoever watches a capture: the bar on stderr, log lines, and the events of begin and end."""

from __future__ import annotations

import logging

import pytest
from tests.lab import RuntimeLab, Toy

from graphrt import LoggingObserver, Reason
from graphrt.events import CaptureBegan, CaptureEnded, KeysChanged


class FailsAt4(Toy):
    def forward(self, *, x, ids, lens):
        if x.shape[0] == 4:
            raise ValueError("no four")
        return super().forward(x=x, ids=ids, lens=lens)


def test_progress_true_draws_a_bar_on_stderr(capfd) -> None:
    with RuntimeLab() as lab:
        lab.runtime.capture(progress=True)
        drawn = capfd.readouterr()
        assert not drawn.out
        assert "model: capture" in drawn.err
        assert "10/10" in drawn.err  # Five keys, each captured and checked.


@pytest.mark.parametrize("progress", [None, False])
def test_capture_unasked_draws_nothing(capfd, progress) -> None:
    with RuntimeLab() as lab:
        lab.runtime.capture(progress=progress)
    assert capfd.readouterr() == ("", "")


def test_empty_list_that_can_be_called_is_told_of_progress() -> None:
    class Told(list):
        def __call__(self, *args) -> None:
            self.append(args)

    told = Told()
    with RuntimeLab() as lab:
        lab.runtime.capture(progress=told)
    assert [done for done, _, _ in told] == list(range(1, 11))


def test_capture_is_told_where_it_begins_and_ends() -> None:
    with RuntimeLab() as lab:
        lab.runtime.capture()
        [began], [ended] = lab.events_of(CaptureBegan), lab.events_of(CaptureEnded)
        assert began == ("model", 5)
        assert ended[:3] == ("model", 5, 5)
        assert 0 < ended.seconds <= lab.runtime.report().capture_seconds
    # Constructed, captured, closed.
    graphs = [event.num_graphs for event in lab.events_of(KeysChanged)]
    assert graphs == [0, 2 + 2 * 3, 0]


def test_capture_that_failed_is_told_to_have_ended() -> None:
    with RuntimeLab("PIECEWISE", model=FailsAt4()) as lab:
        with pytest.raises(ValueError, match="no four"):
            lab.runtime.capture()
        [ended] = lab.events_of(CaptureEnded)
        assert ended.num_served < 3
        missing = dict(lab.events_of(KeysChanged)[-1].missing)
        assert missing[Reason.CAPTURE_FAILED] == 1
        assert sum(missing.values()) == 3 - ended.num_served


def test_keys_that_serve_as_before_are_not_told_again() -> None:
    with RuntimeLab() as lab:
        lab.runtime.capture()
        num_told = len(lab.events_of(KeysChanged))
        lab.runtime.check_externals()
        lab.runtime.capture()
        assert len(lab.events_of(KeysChanged)) == num_told


def test_invalidated_keys_are_told_as_missing() -> None:
    with RuntimeLab() as lab:
        lab.runtime.capture()
        lab.runtime.library.invalidate()
        lab.runtime.check_externals()
        assert lab.events_of(KeysChanged)[-1].missing == ((Reason.INVALIDATED, 5),)


def test_logged_runtime_says_begin_end_and_steps(caplog) -> None:
    caplog.set_level(logging.DEBUG, logger="graphrt")
    with RuntimeLab() as lab:
        lab.runtime.capture()
        lab.step(3, 3, True)
        for event in lab.events:
            LoggingObserver()(event)
    text = caplog.text
    assert "model: capturing 5 keys" in text
    assert "graphs serve 5 keys" in text
    assert "3 tokens replayed FULL of 4 (PADDED)" in text

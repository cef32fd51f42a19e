"""Log lines: each event at its level, on the logger that was asked for; nothing is configured."""

from __future__ import annotations

import logging

import pytest
from report_events import captured, eager, full

from graphrt import BatchDescriptor, Event, LoggingObserver, Reason, RuntimeMode
from graphrt.batch import UBatchReason
from graphrt.events import (
    CacheMiss,
    CaptureBegan,
    CaptureEnded,
    CaptureFailed,
    Compiled,
    Invalidated,
    KeysChanged,
    PaddingVerified,
    Retired,
    Verified,
    Withdrawn,
)

FULL, KEY = RuntimeMode.FULL, BatchDescriptor(8)
EVENTS: list[tuple[Event, int, str]] = [
    (CaptureBegan("model", 4), logging.INFO, "model: capturing 4 keys"),
    (CaptureEnded("model", 4, 3, 1.25), logging.INFO, "after 1.25 s; graphs serve 3 keys"),
    (KeysChanged("m", 3, ((Reason.CAPTURE_FAILED, 1),)), logging.DEBUG, "1 CAPTURE_FAILED"),
    (KeysChanged("m", 3, ()), logging.DEBUG, "missing: none"),
    (captured(FULL, 8, graphs=1), logging.DEBUG, "captured FULL"),
    (CaptureFailed("m", FULL, KEY, "GraphMemoryError", "no room"), logging.WARNING, "no room"),
    (
        Compiled("piece 0", 1, 8, 2.5, CacheMiss.ABSENT),
        logging.DEBUG,
        "compiled (absent) in 2.50 s",
    ),
    (Compiled("piece 0", 1, 8, 0.1, None), logging.DEBUG, "1 to 8 tokens: loaded"),
    (Verified(FULL, KEY, True, 0.0), logging.DEBUG, "equals eager"),
    (Verified(FULL, KEY, False, 0.5), logging.WARNING, "DIFFERS by 0.5"),
    (PaddingVerified(FULL, KEY, True, 0.0, 0), logging.DEBUG, "equals the unpadded"),
    (PaddingVerified(FULL, KEY, False, 2.0, 0), logging.WARNING, "DIFFERS by 2"),
    (Invalidated("model", 2, ("weight",)), logging.WARNING, "replaced: weight"),
    (Withdrawn("model", 2, "other kernels"), logging.INFO, "2 programs withdrawn: other kernels"),
    (Retired(1, 2, 300), logging.INFO, "300 bytes"),
    (full(), logging.DEBUG, "3 tokens replayed FULL of 4 (PADDED) in 100.0 us"),
    (
        full()._replace(num_ubatches=2),
        logging.DEBUG,
        "3 tokens replayed FULL of 4 (PADDED, 2 micro-batches) in 100.0 us",
    ),
    (
        eager()._replace(ubatch_reason=UBatchReason.BELOW_THRESHOLD),
        logging.DEBUG,
        "6 tokens ran eager (MODE_NONE, not split: BELOW_THRESHOLD) in 200.0 us",
    ),
    (eager(), logging.DEBUG, "6 tokens ran eager (MODE_NONE)"),
]


@pytest.mark.parametrize(("event", "level", "text"), EVENTS)
def test_each_event_is_logged_at_its_level(
    event: Event, level: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    LoggingObserver()(event)
    [record] = caplog.records
    assert (record.name, record.levelno) == ("graphrt", level)
    assert text in record.getMessage()


def test_every_kind_of_event_is_in_the_list_above() -> None:
    assert {type(event) for event, *_ in EVENTS} == set(Event.__args__)  # type: ignore[attr-defined]


def test_logger_of_the_caller_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    LoggingObserver(logging.getLogger("engine.graphs"))(CaptureBegan("model", 1))
    LoggingObserver("engine")(full())
    assert [record.name for record in caplog.records] == ["engine.graphs"]

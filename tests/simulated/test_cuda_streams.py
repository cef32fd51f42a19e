"""Streams by name and by handle. torch's ring of streams is a small fake here."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.device.cuda.streams import NUM_RING_STREAMS, StreamTable

DEFAULT = SimpleNamespace(cuda_stream=0)


class Ring:
    """Streams as torch hands them out: of so many handles, again and again; one is current."""

    def __init__(self) -> None:
        self._handles = itertools.cycle(range(1, NUM_RING_STREAMS + 1))
        self.current: Any = DEFAULT

    def draw(self, device_index: int) -> Any:
        return SimpleNamespace(cuda_stream=next(self._handles))


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    ring = Ring()
    monkeypatch.setattr(torch.cuda, "Stream", ring.draw)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: DEFAULT)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: ring.current)
    return ring


def test_a_name_has_one_stream_that_no_other_name_has(ring: Ring) -> None:
    table = StreamTable(0)
    named = {str(number): table.named(str(number)) for number in range(NUM_RING_STREAMS)}
    assert None not in named.values()
    assert len({stream.torch_stream.cuda_stream for stream in named.values()}) == len(named)
    assert all(table.named(name) is stream for name, stream in named.items())
    assert table.named("one too many") is None


def test_the_current_stream_is_known_by_its_name_or_else_by_its_handle(ring: Ring) -> None:
    table = StreamTable(0)
    assert table.current().name == "default"
    assert table.is_default(table.current())
    side = table.named("side")
    ring.current = side.torch_stream
    assert table.current() is side
    assert not table.is_default(side)
    ring.current = SimpleNamespace(cuda_stream=0xABC)
    assert table.current().name == "stream-0xabc"
    assert table.current() is table.current()


def test_a_forgotten_stream_has_no_name_left_where_it_is_current(ring: Ring) -> None:
    table = StreamTable(0)
    gone = table.named("gone")
    ring.current = gone.torch_stream
    table.forget(gone)
    stranger = table.current()
    assert stranger is not gone
    assert stranger.name == f"stream-{gone.torch_stream.cuda_stream:#x}"


def test_a_forgotten_stream_s_handle_serves_the_next_name_alone(ring: Ring) -> None:
    table = StreamTable(0)
    streams = [table.named(str(number)) for number in range(NUM_RING_STREAMS)]
    gone = streams[5]
    table.forget(gone)
    heir = table.named("heir")
    assert heir.torch_stream.cuda_stream == gone.torch_stream.cuda_stream
    table.forget(gone)  # Again: what it had is another's now.
    ring.current = gone.torch_stream
    assert table.current() is table.named("heir") is heir


def test_a_stream_without_a_name_is_not_forgotten_by_its_handle(ring: Ring) -> None:
    table = StreamTable(0)
    default = table.current()
    table.forget(default)
    assert table.current() is default

"""Streams by name and by handle, over a fake of the fixed set of streams that torch has."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.device.cuda import StreamTable
from graphrt.errors import ConfigError

DEFAULT = SimpleNamespace(cuda_stream=0)
NUM_STREAMS = 32  # of torch, per device and priority


class Ring:
    """torch's streams: a new one has the next of 32 handles, in turn; one stream is current."""

    def __init__(self) -> None:
        self._handles = itertools.cycle(range(1, NUM_STREAMS + 1))
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


def test_each_name_has_a_stream_of_its_own(ring: Ring) -> None:
    table = StreamTable(0)
    named = {str(number): table.named(str(number)) for number in range(NUM_STREAMS)}
    assert len({stream.torch_stream.cuda_stream for stream in named.values()}) == len(named)
    assert all(table.named(name) is stream for name, stream in named.items())
    with pytest.raises(ConfigError, match="at most 32 named streams"):
        table.named("one too many")


def test_current_stream_has_its_name_or_else_its_handle(ring: Ring) -> None:
    table = StreamTable(0)
    assert table.current().name == "default"
    assert table.is_default(table.current())
    side = table.named("side")
    ring.current = side.torch_stream
    assert table.current() is side
    assert not table.is_default(side)
    ring.current = SimpleNamespace(cuda_stream=0xABC)
    assert table.current().name == "stream-0xabc"
    assert table.current() is table.of(SimpleNamespace(cuda_stream=0xABC))


def test_forgotten_stream_that_is_current_has_no_name(ring: Ring) -> None:
    table = StreamTable(0)
    gone = table.named("gone")
    ring.current = gone.torch_stream
    table.forget(gone)
    other = table.current()
    assert other is not gone
    assert other.name == f"stream-{gone.torch_stream.cuda_stream:#x}"


def test_handle_of_a_forgotten_stream_gets_the_next_name(ring: Ring) -> None:
    table = StreamTable(0)
    streams = [table.named(str(number)) for number in range(NUM_STREAMS)]
    gone = streams[5]
    table.forget(gone)
    heir = table.named("heir")
    assert heir.torch_stream.cuda_stream == gone.torch_stream.cuda_stream
    table.forget(gone)  # Again: its handle has another name by now.
    ring.current = gone.torch_stream
    assert table.current() is table.named("heir") is heir


def test_forgetting_an_unnamed_stream_does_nothing(ring: Ring) -> None:
    table = StreamTable(0)
    default = table.current()
    table.forget(default)
    assert table.current() is default

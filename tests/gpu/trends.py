"""What rounds of captures may leave behind in the driver: nothing that adds up."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.device.base import MemoryReading

# The allocator's own granule for small blocks; the driver hands memory out in no smaller pieces.
GRANULE_BYTES = 2 << 20


def check_no_trend(readings: Sequence[MemoryReading]) -> None:
    """One reading for each round. The first rounds load kernels."""
    late = readings[3:]
    assert {reading.reserved_bytes for reading in late} == {late[0].reserved_bytes}
    assert late[0].free_bytes - late[-1].free_bytes <= GRANULE_BYTES

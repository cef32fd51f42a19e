"""What rounds of captures may leave behind in the driver: nothing that adds up."""

from __future__ import annotations

from collections.abc import Callable

from graphrt import Device
from lab import require_no_loss


def check_no_trend(device: Device, one_round: Callable[[], None]) -> None:
    """Of twenty rounds, of which the first ones load kernels."""
    for _ in range(4):
        one_round()
    reserved = device.memory().reserved_bytes

    def rounds() -> None:
        for _ in range(16):
            one_round()
            assert device.memory().reserved_bytes == reserved

    require_no_loss(device, rounds)

"""How many multiprocessors communication and computation get while a split step is issued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class SMControl(Protocol):
    """What an engine implements over its communication library and its matrix products.

    Launch sizes are part of a captured graph: a replay calls none of this.
    """

    def max_comm_sms(self) -> int | None:
        """The most that communication can use; None: no limit."""

    def get(self) -> tuple[int, int]:
        """Multiprocessors of communication and of computation, as they are set now."""

    def set_comm(self, number: int) -> None: ...

    def set_compute(self, number: int) -> None: ...


def sm_pair(control: SMControl | None, num_comm_sms: int, num_sms: int) -> tuple[int, int] | None:
    """Multiprocessors of communication and of computation in a split step; None: as they are."""
    most = None if control is None else control.max_comm_sms()
    comm = num_comm_sms if most is None else min(num_comm_sms, most)
    return None if control is None or comm == 0 else (comm, num_sms - comm)


@contextmanager
def sm_budget(control: SMControl | None, num_comm_sms: int, num_sms: int) -> Iterator[None]:
    """While entered, communication has ``num_comm_sms`` of ``num_sms``, as far as it can use them,
    and computation the rest; then both what they had before."""
    pair = sm_pair(control, num_comm_sms, num_sms)
    if control is None or pair is None:
        yield
        return
    comm_before, compute_before = control.get()
    try:
        control.set_comm(pair[0])
        control.set_compute(pair[1])
        yield
    finally:
        try:
            control.set_comm(comm_before)
        finally:
            control.set_compute(compute_before)

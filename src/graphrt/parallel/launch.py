"""Starts the ranks of one machine, as torchrun would."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from time import monotonic, sleep

from graphrt.config import environment_of_rank
from graphrt.interrupts import termination_noted

LEAVE_S = 60.0
"""How long the others may take to notice that a rank has failed, or was interrupted."""


def launch_ranks(world: int, arguments: Sequence[str]) -> int:
    """Run ``python ARGUMENTS`` once for each rank on this machine; return the largest exit status.

    Their output is this process's. After the first failure the others have a minute to end by
    themselves. An interrupt reaches all of them from the terminal, and gives 130; SIGTERM ends them
    too, and gives 143.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    deadline: float | None = None
    status = 0
    with termination_noted() as is_terminated:
        try:
            for rank in range(world):
                environment = environment_of_rank(rank, world, port)
                ranks.append(subprocess.Popen([sys.executable, *arguments], env=environment))
            while any(started.poll() is None for started in ranks):
                try:
                    sleep(0.05)
                except KeyboardInterrupt:
                    status = 130
                if is_terminated():
                    status = 143
                    break
                if deadline is None and (status or any(started.poll() for started in ranks)):
                    deadline = monotonic() + LEAVE_S
                if deadline is not None and monotonic() > deadline:
                    break
        finally:
            for started in ranks:
                if started.poll() is None:
                    started.kill()
    # A negative one is the signal that ended it.
    return max([status, *(abs(started.wait()) for started in ranks)])

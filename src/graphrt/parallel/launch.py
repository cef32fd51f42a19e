"""Starts the ranks of one machine, as torchrun would."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from time import monotonic, sleep

from graphrt.config import environment_of_rank

LEAVE_S = 60.0
"""How long the others may take to notice that a rank has failed, or was interrupted."""


def launch_ranks(world: int, arguments: Sequence[str]) -> int:
    """Run ``python ARGUMENTS`` once for each rank on this machine; return the largest exit status.

    Their output is this process's. After the first failure the others have a minute to end by
    themselves. An interrupt reaches all of them from the terminal, and gives 130.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    ranks = [
        subprocess.Popen([sys.executable, *arguments], env=environment_of_rank(rank, world, port))
        for rank in range(world)
    ]
    deadline: float | None = None
    status = 0
    try:
        while any(rank.poll() is None for rank in ranks):
            try:
                sleep(0.05)
            except KeyboardInterrupt:
                status = 130
            if deadline is None and (status or any(rank.poll() for rank in ranks)):
                deadline = monotonic() + LEAVE_S
            if deadline is not None and monotonic() > deadline:
                break
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    # A negative one is the signal that ended it.
    return max([status, *(abs(rank.wait()) for rank in ranks)])

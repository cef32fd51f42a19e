"""Ranks of the tests: one process each, launched over gloo, with what they say collected."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Ended(NamedTuple):
    """One rank that has ended."""

    status: int
    said: list[Any]
    """What it printed as JSON, line by line."""
    stderr: str


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def launch(script: str, scenario: str, world: int = 2, timeout_s: float = 300) -> list[Ended]:
    """Run ``python script scenario seconds`` once for each rank, as torchrun would.

    ``timeout_s``: ends a test that hangs, on a busy machine too. The script is told an earlier end,
    at which it can say where it hangs.
    """
    port = str(free_port())
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *([known] if known else [])])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(ROOT / script), scenario, str(timeout_s - 10)],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(world),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    ended = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=timeout_s)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith(("{", "["))]
            ended.append(Ended(rank.returncode, lines, err))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()  # It closes the pipes, too.
    return ended


def all_said(ended: Sequence[Ended]) -> list[list[Any]]:
    """What each rank said; every one has ended with status 0."""
    assert [rank.status for rank in ended] == [0] * len(ended), "\n".join(e.stderr for e in ended)
    return [rank.said for rank in ended]

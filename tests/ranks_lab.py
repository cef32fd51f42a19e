"""Ranks of the tests: one process each, launched over gloo, with what they say collected."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Ended(NamedTuple):
    """One rank that has ended."""

    status: int
    said: list[Any]
    """What it printed as JSON, line by line."""
    stdout: str
    stderr: str


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    told = {"WORLD_SIZE": world, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in told.items()}}


def _command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", str(ROOT / script), *arguments]


def _inherited() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *([known] if known else [])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _said(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines() if line.startswith(("{", "["))]


def launch(script: str, scenario: str, world: int = 2, timeout_s: float = 300) -> list[Ended]:
    """Run ``python script scenario seconds`` once for each rank, as torchrun would.

    ``timeout_s``: ends a test that hangs, on a busy machine too. The script is told an earlier end,
    at which it can say where it hangs.
    """
    port = free_port()
    ranks = [
        subprocess.Popen(
            _command(script, scenario, str(timeout_s - 10)),
            env={**_inherited(), **_environment(rank, world, port)},
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
            ended.append(Ended(rank.returncode, _said(out), out, err))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()  # It closes the pipes, too.
    return ended


class Launcher:
    """Ranks as of ``launch``, forked from one process that has imported what takes them seconds.

    ``python script serve`` answers each line on stdin, by ``serve_ranks``, until stdin ends.
    """

    def __init__(self, script: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._server = subprocess.Popen(  # In a session of its own, to end all of it at once.
            _command(script, "serve"),
            env={**_inherited(), **_environment(0, 1, 0)},
            start_new_session=True,
            **pipes,  # type: ignore[call-overload]
        )

    def launch(self, scenario: str, world: int = 2, timeout_s: float = 300) -> list[Ended]:
        """As the function."""
        return self._launch(world, timeout_s, scenario, str(timeout_s - 10))

    def run(self, code: str, *words: str, world: int = 1, timeout_s: float = 300) -> list[Ended]:
        """Run ``python -c code words``, once for each rank."""
        return self._launch(world, timeout_s, "-c", code, *words)

    def _launch(self, world: int, timeout_s: float, *words: str) -> list[Ended]:
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            files = [[f"{folder}/{rank}.out", f"{folder}/{rank}.err"] for rank in range(world)]
            ranks = [
                {
                    "environment": _environment(rank, world, port),
                    "arguments": words,
                    "files": files[rank],
                }
                for rank in range(world)
            ]
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(f"{json.dumps(ranks)}\n".encode())
            if not select.select([self._server.stdout], [], [], timeout_s)[0]:
                self.close()
                raise TimeoutError(f"{words}: {[Path(err).read_text() for _, err in files]}")
            statuses = json.loads(self._server.stdout.readline())
            texts = [[Path(file).read_text() for file in of_rank] for of_rank in files]
            return [
                Ended(status, _said(out), out, err)
                for status, (out, err) in zip(statuses, texts, strict=True)
            ]

    def close(self) -> None:
        """End it and all ranks that are left. Idempotent."""
        with self._server:
            if self._server.poll() is None:
                os.killpg(self._server.pid, signal.SIGKILL)


@cache
def launcher() -> Launcher:
    """The one of this process, which ``simulated/conftest.py`` ends."""
    return Launcher("tests/ranks_script.py")


def serve_ranks() -> None:
    """Fork the ranks of each line on stdin and say how they ended; returns in each rank alone."""
    for line in sys.stdin:
        pids = []
        for rank in json.loads(line):
            pid = os.fork()
            if pid:
                pids.append(pid)
                continue
            os.environ.update(rank["environment"])
            sys.argv[1:] = rank["arguments"]
            for number, path in enumerate([os.devnull, *rank["files"]]):
                flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
                os.dup2(os.open(path, flags), number)
            return
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)
    sys.exit()


def all_said(ended: Sequence[Ended]) -> list[list[Any]]:
    """What each rank said; every one has ended with status 0."""
    assert [rank.status for rank in ended] == [0] * len(ended), "\n".join(e.stderr for e in ended)
    return [rank.said for rank in ended]

"""What the environment says: read here alone; the options of a plan once for each ``resolve``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from graphrt.errors import ConfigError


class Environment(NamedTuple):
    """Variables of the process that count beside the options.

    ``compile_disabled``: TORCH_COMPILE_DISABLE is 1: torch then compiles nothing.
    ``cache_dir``: Root of the cache of compiled code: GRAPHRT_CACHE_DIR, else ``graphrt`` in the
      user's cache folder; None where neither a variable nor a home directory tells.
    """

    compile_disabled: bool
    cache_dir: Path | None


def read_environment() -> Environment:
    """The environment as it is now."""
    return Environment(os.environ.get("TORCH_COMPILE_DISABLE") == "1", _cache_dir())


def _cache_dir() -> Path | None:
    own, user = os.environ.get("GRAPHRT_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own or user:
        return Path(own) if own else Path(user or "") / "graphrt"
    try:
        return Path.home() / ".cache" / "graphrt"
    except RuntimeError:
        return None


def environment_entries() -> dict[bytes, bytes]:
    """The variables of the process by their encoded names, as they are kept: never a copy."""
    entries: dict[bytes, bytes] = vars(os.environ)["_data"]
    return entries


class RankVariables(NamedTuple):
    """Which rank a process is, as torchrun tells it.

    ``rank``: Of all ranks.
    ``world``: How many there are.
    ``local_rank``: Of those on this machine: the number of its GPU.
    """

    rank: int
    world: int
    local_rank: int


def rank_variables() -> RankVariables | None:
    """Which rank this process was started as, by torchrun or ``launch_ranks``; None: as none.

    Errors: ``ConfigError`` for variables that are no such numbers.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if "WORLD_SIZE" not in given or "RANK" not in given:
        return None
    try:
        rank, world = int(given["RANK"]), int(given["WORLD_SIZE"])
        found = RankVariables(rank, world, int(given.get("LOCAL_RANK", rank)))
    except ValueError:
        found = RankVariables(-1, -1, -1)
    if not (0 <= found.rank < found.world and found.local_rank >= 0):
        raise ConfigError(
            "the rank variables",
            expected="0 <= RANK < WORLD_SIZE, and LOCAL_RANK >= 0",
            found=", ".join(f"{name}={value}" for name, value in given.items()),
            do="start with torchrun, or unset them",
        )
    return found


def environment_of_rank(rank: int, world: int, port: int) -> Mapping[str, str]:
    """This process's environment with the variables of one rank on this machine."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """While entered, ``name`` has ``value``, for a library that asks for it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

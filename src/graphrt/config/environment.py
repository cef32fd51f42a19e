"""What the environment says: read here alone, once for each ``resolve``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


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


def environment_entries() -> dict[bytes, bytes]:
    """The variables of the process by their encoded names, as they are kept: never a copy."""
    entries: dict[bytes, bytes] = vars(os.environ)["_data"]
    return entries

"""What ``graphrt cache`` tells: the entries of the cache of compiled code, and what was removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from graphrt.compile import CacheEntry, CompileCache
from graphrt.config.environment import read_environment
from graphrt.errors import ConfigError, shown

_NOTHING = "nothing there"


def run_cache(
    action: str, folder: str | None, older_than: float | None, max_bytes: float | None
) -> dict[str, Any]:
    """The answer as an object. ``older_than``: seconds.

    Errors: ``ConfigError`` for options that do not go together, and a folder that cannot be found
    or changed.
    """
    is_told = folder is not None
    place = folder if is_told else read_environment().cache_dir
    # Not ``is_dir``, which raises for a name that is too long.
    if place is not None and not os.path.isdir(place):
        why = _why_no_folder(place)
        if is_told or why != _NOTHING:
            raise ConfigError(
                f"graphrt cache: {shown(str(place))}",
                expected="a folder that exists",
                found=why,
                do="check the path" if is_told else "check GRAPHRT_CACHE_DIR",
            )
    if place is None:
        raise ConfigError(
            "graphrt cache",
            expected="--dir, because neither GRAPHRT_CACHE_DIR nor a home directory tells",
            found="none",
            do="name the folder",
        )
    limits = [name for name in (older_than, max_bytes) if name is not None]
    if bool(limits) is not (action == "prune"):
        raise ConfigError(
            f"graphrt cache {action}",
            expected="--older-than-days or --max-mib with prune, and only there",
            found="none of them" if action == "prune" else "one of them",
            do="say what to prune, or leave them out",
        )
    cache = CompileCache(Path(place))
    found: dict[str, Any] = {"action": action, "folder": str(place)}
    if action == "prune":
        try:
            removed = cache.prune(older_than=older_than, max_bytes=max_bytes)
        except OSError as error:
            raise ConfigError(
                f"graphrt cache: {place}",
                expected="a folder that can be changed",
                found=str(error),
                do="run it as the owner of the folder",
            ) from error
        found["removed"] = [_entry(entry) for entry in removed]
    entries = list(cache.entries())
    found["num_entries"] = len(entries)
    found["entry_bytes"] = sum(entry.num_bytes for entry in entries)
    found["inductor_bytes"] = cache.inductor_bytes()
    if action == "verify":
        found["bad"] = [_entry(entry) for entry in entries if not cache.is_good(entry)]
    if action == "list":
        found["entries"] = [_entry(entry) for entry in entries]
    return found


def _why_no_folder(place: str | Path) -> str:
    try:
        os.stat(place)
    except FileNotFoundError:
        return _NOTHING
    except OSError as error:
        return error.strerror or str(error)
    return "a file"


def _entry(entry: CacheEntry) -> dict[str, Any]:
    about = {name: entry.about.get(name) for name in ("piece", "sizes", "device")}
    return {
        "key": entry.path.stem,
        "bytes": entry.num_bytes,
        "modified": entry.modified,
        **about,
    }

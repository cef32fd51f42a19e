"""Compiled code on disk: found by a key of everything that it depends on, checked before use.

An entry is one file: a line of JSON, then what torch wrote. Writers put a whole file in place at
once, so that several processes need no lock. An entry that cannot be used is a miss with a reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from graphrt.config.checked import warn_user
from graphrt.errors import ConfigWarning
from graphrt.events import CacheMiss

SCHEMA = 7
_SUFFIX = ".bin"
_LONGEST_HEADER = 2**16
_UNFINISHED = "unfinished-"
_LEFT_BY_CRASHES = (f"{_UNFINISHED}*", "inductor-*", "objects/*/tmp*")
"""Folders that a process removes itself, unless it is killed or a compiler that it started still
writes there; the last where they were before."""
_LONGEST_USE_S = 24 * 3600
"""Of such a folder, by a process that lives."""


class CacheEntry(NamedTuple):
    """One file.

    ``path``: Where it is.
    ``num_bytes``: Its size.
    ``modified``: When it was written, in seconds of the epoch.
    ``about``: What it was made of, as its header says; empty if that cannot be read.
    """

    path: Path
    num_bytes: int
    modified: float
    about: Mapping[str, Any]


class CompileCache:
    """The entries below ``root``. Several processes may use one folder.

    ``torch`` and ``device``: of this process, in words; entries made by others are not used. They
    may be set later, before code is read: what tells them may itself be an entry.
    """

    def __init__(self, root: Path, torch: str = "", device: str = "") -> None:
        self.root = root
        self._folder = root / f"v{SCHEMA}"
        self.torch = torch
        self.device = device
        self._is_read_only = False

    @property
    def inductor_folder(self) -> Path:
        """Of Inductor's own caches, from which it loads what entries hold."""
        return self._folder / "inductor"

    def has(self, key: str) -> bool:
        """Whether there is an entry, good or not."""
        with suppress(OSError):
            return self._path(key).is_file()
        return False

    def read(self, key: str) -> bytes | CacheMiss:
        """The payload of an entry, or why it cannot be used. Raises nothing."""
        path = self._path(key)
        try:
            if self._is_foreign():
                return CacheMiss.LOAD_FAILED
            header, payload = _parts(path)
        except (FileNotFoundError, NotADirectoryError):
            return CacheMiss.ABSENT
        except OSError:
            return CacheMiss.LOAD_FAILED
        except ValueError:
            return CacheMiss.CORRUPT
        for name, expected, reason in (
            ("schema", SCHEMA, CacheMiss.FOREIGN_SCHEMA),
            ("torch", self.torch, CacheMiss.FOREIGN_TORCH),
            ("device", self.device, CacheMiss.FOREIGN_DEVICE),
        ):
            if header.get(name) != expected:
                return reason
        return payload

    def write(self, key: str, payload: bytes, about: Mapping[str, Any]) -> bool:
        """Put an entry in place at once. False, with one warning, where the folder takes none."""
        header = {
            "schema": SCHEMA,
            "torch": self.torch,
            "device": self.device,
            "key": key,
            "length": len(payload),
            "sha256": sha256(payload).hexdigest(),
            **about,
        }
        return self._put(self._path(key), json.dumps(header).encode() + b"\n" + payload)

    def write_index(self, place: str, keys: Sequence[Mapping[str, object]]) -> None:
        """Say at ``place`` which entries a plan uses. For people: nothing reads it."""
        path = self._folder / "plans" / place / "index.json"
        self._put(path, json.dumps(keys, indent=1).encode() + b"\n")

    def _put(self, path: Path, data: bytes) -> bool:
        if self._is_read_only:
            return False
        try:
            self.prepare()
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=_UNFINISHED) as folder:
                unfinished = Path(folder, path.name)
                unfinished.write_bytes(data)
                if path.is_dir():
                    _remove(path)
                unfinished.replace(path)
        except OSError as error:
            self._is_read_only = True
            text = f"compilation.cache_dir: nothing is written to {self.root}: {error}"
            warn_user(ConfigWarning, text)
            return False
        return True

    def prepare(self) -> None:
        """Make the folder, for its owner alone: what it holds is run. Raises ``OSError``."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._is_foreign():
            raise PermissionError(
                f"{self._folder} belongs to another user, or others may write to it"
            )

    @contextmanager
    def other_inductor_folder(self) -> Iterator[Path]:
        """An empty folder for Inductor's own caches. Its files take the place of those of their
        names in the one that other processes use, unless this raises, for then those were good."""
        with tempfile.TemporaryDirectory(
            dir=self._folder, prefix="inductor-", ignore_cleanup_errors=True
        ) as place:
            yield Path(place)
            for path in [*Path(place).rglob("*")]:
                name = path.relative_to(place)
                other = self.inductor_folder / name
                with suppress(OSError):  # What is not there is made again.
                    if path.is_dir():
                        other.mkdir(parents=True, exist_ok=True)
                    elif name.parts[0] == "triton":
                        other.unlink()  # Such files tell where they are; entries hold copies.
                    elif name.parts[0] != "locks":  # A process may hold the other one.
                        path.replace(other)

    def entries(self) -> Iterator[CacheEntry]:
        """Every entry, the newest first."""
        found = []
        for path in self._found(f"objects/*/*{_SUFFIX}"):
            about: Mapping[str, Any] = {}
            with suppress(FileNotFoundError):  # Another process prunes too.
                state = path.lstat()
                with suppress(OSError, ValueError), _opened(path) as file:
                    about = _header(file)
                found.append(CacheEntry(path, state.st_size, state.st_mtime, about))
        yield from sorted(found, key=lambda entry: -entry.modified)

    @staticmethod
    def is_good(entry: CacheEntry) -> bool:
        """Whether it is all there, as it was written."""
        try:
            _parts(entry.path)
        except (OSError, ValueError):
            return False
        return True

    def prune(
        self, *, older_than: float | None = None, max_bytes: float | None = None
    ) -> Sequence[CacheEntry]:
        """Remove entries written more than ``older_than`` seconds ago; then the oldest, until the
        rest has at most ``max_bytes``. Returns those removed. Raises ``OSError``.

        What processes that were killed have left goes too, after a day.
        """
        for place in _LEFT_BY_CRASHES:
            for folder in self._found(place):
                with suppress(FileNotFoundError):  # Another process finished, or prunes too.
                    if time.time() - folder.stat().st_mtime > _LONGEST_USE_S:
                        _remove(folder)
        removed, kept = [], 0
        for entry in self.entries():
            kept += entry.num_bytes
            is_old = older_than is not None and time.time() - entry.modified > older_than
            if is_old or (max_bytes is not None and kept > max_bytes):
                kept -= entry.num_bytes
                _remove(entry.path)
                removed.append(entry)
        if removed and not any(self.entries()):
            # Nothing needs it any more.
            for folder in self._found("inductor"):
                with tempfile.TemporaryDirectory(
                    dir=folder.parent, prefix="inductor-", ignore_cleanup_errors=True
                ) as place:  # Out of the way of who writes there.
                    folder.rename(Path(place, "old"))
        return removed

    def inductor_bytes(self) -> int:
        """What Inductor keeps beside the entries."""
        files = [path for path in self._found("inductor/**/*") if path.is_file()]
        return sum(path.stat().st_size for path in files)

    def _found(self, places: str) -> list[Path]:
        """What lies there, of any schema. Other folders are not this cache's."""
        folders = [one for one in self.root.glob("v*") if re.fullmatch(r"v\d+", one.name)]
        return [path for one in folders if (one / "objects").is_dir() for path in one.glob(places)]

    def _path(self, key: str) -> Path:
        return self._folder / "objects" / key[:2] / f"{key}{_SUFFIX}"

    def _is_foreign(self) -> bool:
        state = self._folder.stat()
        may_others_write = os.name == "posix" and state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return bool(_is_others(state) or may_others_write)


def _is_others(state: os.stat_result) -> bool:
    return hasattr(os, "getuid") and state.st_uid != os.getuid()


def key_of(factors: Mapping[str, object]) -> str:
    """SHA-256 of the factors, by name."""
    return sha256(json.dumps(factors, sort_keys=True, default=repr).encode()).hexdigest()


def _opened(path: Path) -> BinaryIO:
    """Errors: ``OSError`` for what is no file of this user: a pipe would wait for a writer, a
    device have no end, and a link may lead to either."""
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode) or _is_others(state):
        raise OSError(f"{path} is no file of this user")
    return path.open("rb")


def _remove(path: Path) -> None:
    """Whatever lies there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and payload. Errors: ``ValueError`` for a file that is not as it was written."""
    with _opened(path) as file:
        header = _header(file)
        length = os.fstat(file.fileno()).st_size - file.tell()
        if header.get("length") != length:  # It may be more than there is memory.
            raise ValueError("another length")
        payload = file.read()
    # The key too, or a file under another one's name would be the code of another piece.
    written = {"key": path.stem, "sha256": sha256(payload).hexdigest()}
    if not written.items() <= header.items():
        raise ValueError("another payload")
    return header, payload


def _header(file: BinaryIO) -> dict[str, Any]:
    try:
        return dict(json.loads(file.readline(_LONGEST_HEADER)))
    except (RecursionError, TypeError) as error:
        raise ValueError("no header") from error

"""Reading what others wrote: regular files, so many bytes and no more, and JSON said once.

It knows builtin errors only, because each reader has an error of its own for its user.
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NoReturn

MOST_NAMED = 50
"""Of many problems, so many are written out."""


def checked_path(name: str, value: Any, error: Callable[..., Exception]) -> Path:
    """``value`` as a path. Raises ``error``, with the parts of a message, for what is none."""
    try:
        path = os.fspath(value)
        is_path = isinstance(path, str) and b"\0" not in os.fsencode(path)
    except Exception:  # noqa: BLE001  Its ``__fspath__`` may raise anything.
        is_path = False
    if not is_path or not path:
        raise error(
            name,
            expected="a path: a Path, or text that is not empty and has no zero byte",
            found=reprlib.repr(value) if isinstance(value, str) else f"a {type(value).__name__}",
            do="pass the path of a file or directory",
        )
    return Path(path)


def open_regular(path: str | Path) -> IO[bytes]:
    """Open ``path`` for reading. Raises ``OSError`` for a directory, a pipe, a device or a socket.

    Asked before it is opened, because opening a pipe waits for whoever writes into it.
    """
    try:
        mode = Path(path).stat().st_mode
    except (TypeError, ValueError) as error:  # It is no path, or has a zero byte.
        raise OSError(errno.EINVAL, str(error), str(path)[:200]) from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a pipe, a device or a socket, not a file", str(path))
    # What is called a file may wait as well, /proc/kmsg: that has nothing to read then.
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | without_waiting))


def read_at_most(file: IO[bytes], most_bytes: int) -> bytes:
    """Return the rest of ``file``. Raises ``ValueError`` if it has more than ``most_bytes``."""
    data = file.read(most_bytes + 1) or b""
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    return data


def read_json(path: str | Path, most_bytes: int) -> Any:
    """Return the JSON value in a regular file. Raises ``OSError``; ``ValueError`` for other text.

    A key that an object has twice is an error too.
    """
    with open_regular(path) as file:
        value, repeated = parse_json(read_at_most(file, most_bytes).decode("utf-8-sig"))
    if repeated:
        raise ValueError(f"the same key twice: {', '.join(repeated)}")
    return value


def parse_json(text: str) -> tuple[Any, list[str]]:
    """Return the value, and the keys that an object in it repeats, of which JSON keeps the last.

    Raises ``ValueError`` for what is no JSON: ``Infinity`` and ``NaN``, which Python accepts,
    numbers that no float holds, and objects nested too deep.
    """
    repeated: list[str] = []

    def as_dict(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for name, item in pairs:
            if name in value and len(repeated) < MOST_NAMED:
                repeated.append(name[:60])
            value[name] = item
        return value

    try:
        value = json.loads(
            text, object_pairs_hook=as_dict, parse_constant=_no_number, parse_float=_finite
        )
    except RecursionError as error:
        raise ValueError("lists or objects nested too deep") from error
    return value, repeated


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _no_number(text[:60])
    return number


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no finite number")

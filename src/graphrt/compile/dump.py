"""What was traced, cut and compiled, written down for people; also where it then fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from torch import fx

from graphrt.compile.splitter import Piece
from graphrt.errors import ConfigError, text_of


class Dump:
    """A new folder below ``root``: ``rank_<rank>/model_<n>``. ``root`` None: nothing is written.

    Errors: ``ConfigError`` for a folder that cannot be written.
    """

    def __init__(self, root: Path | None, rank: int) -> None:
        self._root = root
        self._rank = rank
        self._folder: Path | None = None

    def write(self, name: str, text: Callable[[], str]) -> None:
        """``text``: asked only where something is written."""
        if self._root is None:
            return
        try:
            if self._folder is None:
                self._folder = _new_folder(self._root / f"rank_{self._rank}")
            (self._folder / name).write_text(text(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"compilation.debug_dump_path: {self._root}",
                expected="a folder that can be written",
                found=str(error),
                do="name another one, or leave it out",
            ) from error

    def graph(self, name: str, graph: fx.GraphModule) -> None:
        """The code of a graph, with the shape of each value."""
        self.write(name, lambda: graph.print_readable(print_output=False))

    def json(self, name: str, value: Callable[[], Any]) -> None:
        self.write(name, lambda: json.dumps(value(), indent=1, default=str) + "\n")

    def failed(self, error: Exception, asked: Sequence[object] = ()) -> None:
        """Why nothing more was compiled, and which keys were asked for in the cache until then."""
        self.json("cache.json", lambda: {"asked": asked})
        self.json("report.json", lambda: {"error": f"{type(error).__name__}: {text_of(error)}"})

    def pieces(self, pieces: Sequence[Piece]) -> None:
        """A line for each piece, and the code of each that is compiled, alike ones once."""
        told = [f"# {index} {piece.kind} {piece.name}\n" for index, piece in enumerate(pieces)]
        self.write("split.py", lambda: "".join(told))
        first = {piece.structure: index for index, piece in reversed([*enumerate(pieces)])}
        for index in sorted(first.values()):
            self.graph(f"piece_{index}.before.py", pieces[index].module)


def _new_folder(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in count():
        folder = parent / f"model_{number}"
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder

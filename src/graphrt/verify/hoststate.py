"""What a callable remembers on the host: attributes and closure variables that a warm-up set.

A value memoised from the inputs of a warm-up makes eager execution wrong in the same way as the
graph, so comparing the two shows nothing. A picture taken before the first warm-up lets the
eager side run as if it had never run before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any, NamedTuple

import torch

from graphrt.graphs.externals import modules_of

_ABSENT = object()

# Submodules and parameters are the model, not what it remembers; registered buffers are state,
# which a StateGuard keeps.
_THE_MODEL = frozenset({"_modules", "_parameters", "_buffers"})


class ForwardHook(NamedTuple):
    """A hook that runs at capture and at no replay: a replay runs no Python of the module."""

    module: str
    """Path of the module; empty for the outermost one."""
    hook: str


class _Value(NamedTuple):
    """A value by reference, and what it contained if it is a plain dict, list or set."""

    value: Any
    contents: Any

    def is_unchanged(self, now: _Value) -> bool:
        if self.value is not now.value:
            return False
        before, after = self.contents, now.contents
        if isinstance(before, dict):
            return before.keys() == after.keys() and all(before[k] is after[k] for k in before)
        if isinstance(before, list):
            return len(before) == len(after) and all(map(_is, before, after))
        return before is None or {id(item) for item in before} == {id(item) for item in after}

    def restore_contents(self) -> Any:
        """Put the contents back into the same container, and return it."""
        if isinstance(self.value, dict | set):
            if self.contents is not None:
                self.value.clear()
                self.value.update(self.contents)
        elif self.contents is not None:
            self.value[:] = self.contents
        return self.value


class HostState:
    """A picture of what a callable's modules, closure and own object hold now.

    Parameters and registered buffers are not in it, nor anything deeper than the entries of a
    dict, list or set. While it is kept, so is everything it refers to.
    """

    def __init__(self, runnable: object) -> None:
        self._owners = {path: vars(module) for path, module in modules_of(runnable).items()}
        self._owners.update(_own_object(runnable))
        self._attributes = {path: _read(own) for path, own in self._owners.items()}
        self._cells = dict(_cells(runnable))
        self._contents = {name: _contents(cell) for name, cell in self._cells.items()}

    def changed(self) -> tuple[str, ...]:
        """Name the attributes and closure variables that were set, replaced or removed since."""
        names = []
        for path, own in self._owners.items():
            before, now = self._attributes[path], _read(own)
            for attribute in dict.fromkeys([*before, *now]):
                gone = attribute not in before or attribute not in now
                if gone or not before[attribute].is_unchanged(now[attribute]):
                    names.append(".".join(part for part in (path, attribute) if part))
        for name, cell in self._cells.items():
            if not self._contents[name].is_unchanged(_contents(cell)):
                names.append(name)
        return tuple(names)

    @contextmanager
    def reinstated(self) -> Iterator[None]:
        """Put everything back as it was in the picture; on exit, as it was on entry.

        What the body sets meanwhile is dropped.
        """
        now = {path: _read(own) for path, own in self._owners.items()}
        cells = {name: _contents(cell) for name, cell in self._cells.items()}
        self._install(self._attributes, self._contents)
        try:
            yield
        finally:
            self._install(now, cells)

    def _install(
        self, attributes: dict[str, dict[str, _Value]], contents: dict[str, _Value]
    ) -> None:
        for path, own in self._owners.items():
            # Not through setattr: a module would register what is registered already.
            for name in _read(own).keys() - attributes[path].keys():
                del own[name]
            for name, value in attributes[path].items():
                own[name] = value.restore_contents()
        for name, cell in self._cells.items():
            value = contents[name]
            if value.value is not _ABSENT:
                cell.cell_contents = value.restore_contents()
            elif _contents(cell).value is not _ABSENT:
                del cell.cell_contents


def forward_hooks(runnable: object) -> tuple[ForwardHook, ...]:
    """List the forward hooks of a callable's modules; a replay runs none of them."""
    return tuple(
        ForwardHook(path, getattr(hook, "__qualname__", repr(hook)))
        for path, module in modules_of(runnable).items()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )


def _own_object(runnable: object) -> Iterable[tuple[str, dict[str, Any]]]:
    """The object whose method is called, or that is called itself, unless it is a module."""
    owner = getattr(runnable, "__self__", runnable)
    is_function = hasattr(runnable, "__code__") and owner is runnable
    if not is_function and not isinstance(owner, torch.nn.Module) and hasattr(owner, "__dict__"):
        yield "", vars(owner)


def _cells(runnable: object) -> Iterable[tuple[str, CellType]]:
    function = getattr(runnable, "__func__", runnable)
    code = getattr(function, "__code__", None)
    if code is not None:
        yield from zip(code.co_freevars, function.__closure__ or (), strict=True)  # type: ignore[attr-defined]  # a function, it has code


def _read(own: dict[str, Any]) -> dict[str, _Value]:
    return {name: _picture(value) for name, value in own.items() if name not in _THE_MODEL}


def _contents(cell: CellType) -> _Value:
    try:
        return _picture(cell.cell_contents)
    except ValueError:  # a variable that was not assigned yet
        return _Value(_ABSENT, None)


def _picture(value: Any) -> _Value:
    return _Value(value, value.copy() if type(value) in (dict, list, set) else None)


def _is(one: Any, other: Any) -> bool:
    return one is other

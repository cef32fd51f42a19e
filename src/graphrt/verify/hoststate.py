"""What a callable remembers on the host: attributes and closure variables that a warm-up set.

A value memoised from the inputs of a warm-up makes eager execution wrong in the same way as the
graph, so comparing the two shows nothing. A picture taken before the first warm-up lets the
eager side run as if it had never run before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
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
        return self.holds_the_same()

    def holds_the_same(self) -> bool:
        """Whether the container holds the same objects now; those of a dict or list in order."""
        before, after = self.contents, self.value
        if before is None or not (before or after):
            return True
        if len(before) != len(after):
            return False
        if isinstance(before, dict):
            return all(map(is_, before, after)) and all(map(is_, before.values(), after.values()))
        if isinstance(before, list):
            return all(map(is_, before, after))
        return set(map(id, before)) == set(map(id, after))

    def restore_contents(self) -> Any:
        """Put the contents back into the same container, and return it."""
        if isinstance(self.value, dict | set):
            if self.contents is not None:
                self.value.clear()
                self.value.update(self.contents)
        elif self.contents is not None:
            self.value[:] = self.contents
        return self.value


_NOTHING = _Value(_ABSENT, None)


class _Attributes(NamedTuple):
    """What one object's ``__dict__`` held, and the same in the form that is compared quickest."""

    own: dict[str, Any]
    before: dict[str, _Value]
    names: tuple[str, ...]
    objects: tuple[Any, ...]
    filled: tuple[_Value, ...]
    """The containers that held something."""
    empty: tuple[Any, ...]
    """The containers that held nothing: most of a module's."""

    @classmethod
    def of(cls, own: dict[str, Any]) -> _Attributes:
        before = _read(own)
        containers = [value for value in before.values() if value.contents is not None]
        filled = tuple(value for value in containers if value.contents)
        empty = tuple(value.value for value in containers if not value.contents)
        return cls(own, before, tuple(own), tuple(own.values()), filled, empty)

    def is_untouched(self) -> bool:
        """True only if nothing differs. It runs no Python for each attribute: there are many."""
        own = self.own
        return (
            tuple(own) == self.names
            and all(map(is_, own.values(), self.objects))
            and not any(self.empty)
            and all(value.holds_the_same() for value in self.filled)
        )

    def unlike(self) -> Iterator[tuple[str, _Value]]:
        """What there is now, by name, where it is not what was there before."""
        if self.is_untouched():
            return
        for name in self.own.keys() | self.before.keys():
            if name not in _THE_MODEL:
                value, before = self.own.get(name, _ABSENT), self.before.get(name, _NOTHING)
                if before.value is not value or not before.holds_the_same():
                    yield name, _picture(value)


class _Change(NamedTuple):
    """One place that is not as in the picture, and what is there instead."""

    owner: _Attributes | CellType
    name: str
    before: _Value
    now: _Value


class HostState:
    """A picture of what a callable's modules, closure and own object hold now.

    Parameters and registered buffers are not in it, nor anything deeper than the entries of a
    dict, list or set. While it is kept, so is everything it refers to.
    """

    def __init__(self, runnable: object) -> None:
        owners = {path: vars(module) for path, module in modules_of(runnable).items()}
        owners.update(_own_object(runnable))
        self._owners = {path: _Attributes.of(own) for path, own in owners.items()}
        self._cells = dict(_cells(runnable))
        self._contents = {name: _contents(cell) for name, cell in self._cells.items()}

    def changed(self) -> tuple[str, ...]:
        """Name the attributes and closure variables that were set, replaced or removed since."""
        names = []
        for path, owner in self._owners.items():
            before, now = owner.before, _read(owner.own)
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
        on_entry = self._changes()
        for change in on_entry:
            _put(change, change.before)
        try:
            yield
        finally:
            for change in self._changes():
                _put(change, change.before)
            for change in on_entry:
                _put(change, change.now)

    def _changes(self) -> list[_Change]:
        """Every place that is not as in the picture now. Reads all, keeps what differs."""
        changes = [
            _Change(owner, name, owner.before.get(name, _NOTHING), now)
            for owner in self._owners.values()
            for name, now in owner.unlike()
        ]
        for name, cell in self._cells.items():
            before, now = self._contents[name], _contents(cell)
            if before.value is not now.value or not before.holds_the_same():
                changes.append(_Change(cell, name, before, now))
        return changes


def _put(change: _Change, value: _Value) -> None:
    """Write ``value``, contents included, to the place that changed."""
    owner, name = change.owner, change.name
    is_gone = value.value is _ABSENT
    if isinstance(owner, CellType):
        if not is_gone:
            owner.cell_contents = value.restore_contents()
        elif _contents(owner).value is not _ABSENT:
            del owner.cell_contents
    # Not through setattr: a module would register what is registered already.
    elif is_gone:
        owner.own.pop(name, None)
    else:
        owner.own[name] = value.restore_contents()


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
        return _NOTHING


def _picture(value: Any) -> _Value:
    return _Value(value, value.copy() if type(value) in (dict, list, set) else None)

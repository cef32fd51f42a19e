"""What a callable remembers on the host: attributes and closure variables that a warm-up set.

A value memoised from the inputs of a warm-up makes eager execution wrong in the same way as the
graph, so comparing the two shows nothing. A snapshot taken before the first warm-up lets the
eager side run as if it had never run before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from types import CellType
from typing import Any, NamedTuple

import torch

from graphrt.graphs.held import modules_of

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

    @classmethod
    def of(cls, value: Any) -> _Value:
        return cls(value, value.copy() if type(value) in (dict, list, set) else None)

    @classmethod
    def of_cell(cls, cell: CellType) -> _Value:
        try:
            return cls.of(cell.cell_contents)
        except ValueError:  # a variable that was not assigned yet
            return _NOTHING

    def is_only_reordered(self) -> bool:
        """Whether a dict has the same entries as then, in whatever order."""
        before, after = self.contents, self.value
        return (
            isinstance(before, dict)
            and before.keys() == after.keys()
            and all(before[key] is after[key] for key in before)
        )

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
    """What one object's ``__dict__`` held, and the same in the form that is compared fastest."""

    path: str
    own: dict[str, Any]
    before: dict[str, _Value]
    names: tuple[str, ...]
    objects: tuple[Any, ...]
    filled: tuple[_Value, ...]
    """The containers that held something."""
    empty: tuple[Any, ...]
    """The containers that held nothing: most of a module's."""

    @classmethod
    def of(cls, path: str, own: dict[str, Any]) -> _Attributes:
        before = {name: _Value.of(value) for name, value in own.items() if name not in _THE_MODEL}
        containers = [value for value in before.values() if value.contents is not None]
        filled = tuple(value for value in containers if value.contents)
        empty = tuple(value.value for value in containers if not value.contents)
        return cls(path, own, before, tuple(own), tuple(own.values()), filled, empty)

    def is_untouched(self) -> bool:
        """True only if nothing differs. It runs no Python for each attribute: there are many."""
        own = self.own
        return (
            tuple(own) == self.names
            and all(map(is_, own.values(), self.objects))
            and not any(self.empty)
            and all(value.holds_the_same() for value in self.filled)
        )

    def changes(self) -> Iterator[_Change]:
        if self.is_untouched():
            return
        for name in dict.fromkeys([*self.before, *self.own]):
            if name not in _THE_MODEL:
                value, before = self.own.get(name, _ABSENT), self.before.get(name, _NOTHING)
                if before.value is not value or not before.holds_the_same():
                    yield _Change(self, name, before, _Value.of(value))


class _Change(NamedTuple):
    """One place that is not as in the snapshot, and what is there instead."""

    owner: _Attributes | CellType
    name: str
    before: _Value
    now: _Value

    @property
    def path(self) -> str:
        """The name, after the path of its module."""
        prefix = self.owner.path if isinstance(self.owner, _Attributes) else ""
        return f"{prefix}.{self.name}" if prefix else self.name

    def write(self, value: _Value) -> None:
        """Put ``value`` there, contents included."""
        owner, name = self.owner, self.name
        is_gone = value.value is _ABSENT
        if isinstance(owner, CellType):
            if not is_gone:
                owner.cell_contents = value.restore_contents()
            elif _Value.of_cell(owner).value is not _ABSENT:
                del owner.cell_contents
        # Not through setattr: a module would register what is registered already.
        elif is_gone:
            owner.own.pop(name, None)
        else:
            owner.own[name] = value.restore_contents()


class HostSnapshot:
    """A snapshot of what a callable's modules, closure and own object hold now.

    Parameters and registered buffers are not in it, nor anything deeper than the entries of a
    dict, list or set. While it is kept, so is everything it refers to.
    """

    def __init__(self, runnable: object) -> None:
        owners = {path: vars(module) for path, module in modules_of(runnable).items()}
        # The object whose method is called, or that is called itself.
        owner = getattr(runnable, "__self__", runnable)
        is_function = hasattr(runnable, "__code__") and owner is runnable
        is_plain = not is_function and not isinstance(owner, torch.nn.Module)
        if is_plain and hasattr(owner, "__dict__"):
            owners[""] = vars(owner)
        self._owners = [_Attributes.of(path, own) for path, own in owners.items()]
        function = getattr(runnable, "__func__", runnable)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = getattr(function, "__closure__", None) or ()
        self._cells = [
            (name, cell, _Value.of_cell(cell)) for name, cell in zip(names, cells, strict=True)
        ]

    def changed(self) -> tuple[str, ...]:
        """Name the attributes and closure variables that were set, replaced or removed since."""
        return tuple(
            change.path
            for change in self._changes()
            if change.before.value is not change.now.value or not change.before.is_only_reordered()
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything back as it was in the snapshot; on exit, as it was on entry.

        What the body sets meanwhile is dropped.
        """
        on_entry = self._changes()
        for change in on_entry:
            change.write(change.before)
        try:
            yield
        finally:
            for change in self._changes():
                change.write(change.before)
            for change in on_entry:
                change.write(change.now)

    def _changes(self) -> list[_Change]:
        """Every place that is not as in the snapshot now. Reads all, keeps what differs."""
        changes = [change for owner in self._owners for change in owner.changes()]
        for name, cell, before in self._cells:
            now = _Value.of_cell(cell)
            if before.value is not now.value or not before.holds_the_same():
                changes.append(_Change(cell, name, before, now))
        return changes


def forward_hooks(runnable: object) -> tuple[ForwardHook, ...]:
    """List the forward hooks of a callable's modules; a replay runs none of them."""
    return tuple(
        ForwardHook(path, getattr(hook, "__qualname__", repr(hook)))
        for path, module in modules_of(runnable).items()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )

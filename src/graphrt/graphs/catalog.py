"""The catalogue of a library: for every key of every owner, which program serves it, or why none.

Wrappers and runners look programs up here, dispatchers get their unavailable keys from here, and
the order of later captures and the report are read from it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from graphrt.batch import BatchDescriptor, Reason, RuntimeMode
from graphrt.errors import CaptureError, ConfigError, TooManyFailuresError, text_of
from graphrt.graphs.nesting import ReplayInProgress
from graphrt.graphs.program import Program

Key = tuple[RuntimeMode, BatchDescriptor]

MAX_FAILURES_IN_A_ROW = 3
_NO_KEY = object()


TimedPhase = Literal["warmup", "capture", "check"]


@dataclass(slots=True)
class KeySeconds:
    """What all captures of one key took so far, in seconds."""

    warmup: float = 0.0
    capture: float = 0.0
    check: float = 0.0
    """Of first replays, against eager execution."""
    recording: float = 0.0
    """Of the latest ``capture_program`` alone, a part of ``capture``."""

    @property
    def total(self) -> float:
        return self.warmup + self.capture + self.check

    def add(self, phase: TimedPhase, seconds: float) -> None:
        setattr(self, phase, getattr(self, phase) + seconds)


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of one key of one owner."""

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    reason: Reason = Reason.NOT_CAPTURED_YET
    """HIT: ``program`` may be dispatched to. Else why no program may."""
    program: Program | None = None
    """What a wrapper replays; its first replay may be unchecked, or it may be invalid."""
    staged: Program | None = None
    """Captured into a generation that takes the current one's place when its scope ends."""
    error: Exception | None = None
    """Why the capture or the verification failed: no traceback, no tensor."""
    misses: int = 0
    """Steps that wanted this key while it was not captured."""
    last_miss: int = 0
    """Number of the latest of these steps."""
    missed_sizes: Mapping[str, int] | None = None
    """The real sizes of the latest of these steps, where they are known."""
    padding: str = ""
    """How the first-replay check compared padded batches, in words."""
    seconds: KeySeconds = field(default_factory=KeySeconds)
    hits: int = 0
    """Runs that its programs served, counted by a runner."""
    inner: tuple[Program, ...] = ()
    """Of a job whose target calls wrappers: the programs that these captured."""

    @property
    def valid_program(self) -> Program | None:
        program = self.program
        return program if program is not None and program.is_valid else None


@dataclass(slots=True, eq=False)
class OwnerEntries:
    """The entries of one owner in one mode, by key: what a wrapper looks its step up in.

    ``memo_key`` and ``memo_program`` are those of the last look-up. Keys are compared by identity
    there, because a dispatcher hands out the same key object for the same batch shape.
    """

    owner: str
    mode: RuntimeMode
    replaying: ReplayInProgress
    by_key: dict[BatchDescriptor, Entry] = field(default_factory=dict)
    is_observed_always: bool = False
    """True once a recording touched a tensor that nothing names."""
    memo_key: object = _NO_KEY
    memo_program: Program = field(init=False)

    def find(self, key: BatchDescriptor | None) -> Program | None:
        """The program of ``key``, valid or not.

        Errors: ``NestedReplayError`` inside an eager segment of a program of the library.
        """
        entry = None if key is None else self.by_key.get(key)
        program = None if entry is None else entry.program
        if program is not None:
            if self.replaying.title is not None:
                raise self.replaying.refusal(program.title)
            self.memo_program = program
            self.memo_key = key
        return program

    def forget_memo(self) -> None:
        self.memo_key = _NO_KEY
        if hasattr(self, "memo_program"):
            del self.memo_program


class Programs(Mapping[BatchDescriptor, Program]):
    """The published programs of an owner, by key: a read-only view that follows the catalogue."""

    def __init__(self, entries: OwnerEntries) -> None:
        self._by_key = entries.by_key

    def __getitem__(self, key: BatchDescriptor) -> Program:
        entry = self._by_key.get(key)
        if entry is None or entry.program is None:
            raise KeyError(key)
        return entry.program

    def __iter__(self) -> Iterator[BatchDescriptor]:
        return (key for key, entry in self._by_key.items() if entry.program is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Catalog:
    """Every entry of a library. ``on_failure`` is called with each entry that fails anew."""

    def __init__(self, on_failure: Callable[[Entry], None], replaying: ReplayInProgress) -> None:
        self._replaying = replaying
        self._owners: dict[tuple[str, RuntimeMode], OwnerEntries] = {}
        self._on_failure = on_failure
        self._failures_in_a_row: dict[str, int] = {}
        self._num_misses = 0

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, by owner and mode in order of creation."""
        for owner in self._owners.values():
            yield from owner.by_key.values()

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every published program, valid or not."""
        return tuple(entry.program for entry in self if entry.program is not None)

    @property
    def failures(self) -> tuple[Entry, ...]:
        """The entries that failed; they are not tried again until they are forgotten."""
        return tuple(entry for entry in self if entry.error is not None)

    def add_owner(self, name: str | None, mode: RuntimeMode, default: str) -> OwnerEntries:
        """Add an owner. Names are unique per mode; without a ``name``, ``default`` is numbered.

        Errors: ``ConfigError`` for a ``name`` that is taken.
        """
        if name is not None and (name, mode) in self._owners:
            raise ConfigError(
                f"owner {name!r}",
                expected="a name no other wrapper or runner of this library and mode has",
                found=f"a second {mode.name} one",
                do="choose another name, or leave it out",
            )
        owner, number = name or default, 2
        while (owner, mode) in self._owners:
            owner, number = f"{default}#{number}", number + 1
        return self.of_owner(owner, mode)

    def entry(self, owner: str, mode: RuntimeMode, key: BatchDescriptor) -> Entry:
        """The entry of this key, made where there is none yet."""
        by_key = self.of_owner(owner, mode).by_key
        return by_key.get(key) or by_key.setdefault(key, Entry(owner, mode, key))

    def of_owner(self, owner: str, mode: RuntimeMode) -> OwnerEntries:
        """The entries of an owner, made where there are none yet."""
        entries = self._owners.get((owner, mode))
        if entries is None:
            entries = self._owners[owner, mode] = OwnerEntries(owner, mode, self._replaying)
        return entries

    def get(self, owner: str, mode: RuntimeMode, key: BatchDescriptor) -> Entry | None:
        """The entry of this key, if there is one."""
        entries = self._owners.get((owner, mode))
        return None if entries is None else entries.by_key.get(key)

    # -- programs

    def publish(self, program: Program) -> Entry:
        """Let wrappers and dispatchers find ``program``."""
        entry = self.entry(program.owner, program.mode, program.key)
        entry.program = program
        entry.reason = Reason.HIT
        owner = self.of_owner(program.owner, program.mode)
        owner.by_key[program.key] = owner.by_key.pop(program.key)  # Last: in order of capture.
        owner.forget_memo()
        return entry

    def withdraw(self, program: Program) -> None:
        """Remove ``program``, unless another one of its key has taken its place."""
        entries = self._owners[program.owner, program.mode]
        entry = entries.by_key[program.key]
        if entry.staged is program:
            entry.staged = None
        if entry.program is program:
            entry.program = None
            if entry.error is None:
                entry.reason = Reason.NOT_CAPTURED_YET
        entries.forget_memo()

    def mark_unchecked(self, entry: Entry) -> None:
        """Let nobody dispatch to the entry's new program before its first replay was right."""
        if entry.valid_program is not None and entry.staged is None:
            entry.reason = Reason.NOT_CAPTURED_YET

    def mark_ready(self, entry: Entry) -> None:
        """Let the entry's program be dispatched to."""
        entry.reason = Reason.HIT
        entry.error = None

    def invalidate(self, program: Program, names: Iterable[str] = ()) -> None:
        """Make a program refuse replays because ``names`` moved."""
        program.invalidate(tuple(names))
        entry = self.entry(program.owner, program.mode, program.key)
        if entry.program is program and entry.error is None:
            entry.reason = Reason.INVALIDATED

    def observe_always(self, owner: str, mode: RuntimeMode) -> None:
        """Let all later captures of an owner be observed; those that were not are invalid.

        They may touch the same tensor that nothing names, and nobody holds it for them.
        """
        entries = self.of_owner(owner, mode)
        entries.is_observed_always = True
        for entry in entries.by_key.values():
            for program in (entry.program, entry.staged):
                if program is not None and program.is_valid and not program.is_observed:
                    self.invalidate(program, ("a tensor that only an observed capture can find",))

    # -- failures

    def mark_failed(
        self, owner: str, mode: RuntimeMode, key: BatchDescriptor, error: Exception
    ) -> Entry:
        """Record that a warm-up or capture failed; the first error of a key stays."""
        entry = self.entry(owner, mode, key)
        if entry.error is None:
            self._failures_in_a_row[owner] = self._failures_in_a_row.get(owner, 0) + 1
            self._fail(entry, error)
        return entry

    def mark_wrong(self, entry: Entry, error: Exception) -> None:
        """Record that a replay of the entry's program was wrong: it never runs again."""
        if entry.program is not None:
            entry.program.invalidate()
        self._fail(entry, error)

    def _fail(self, entry: Entry, error: Exception) -> None:
        entry.error = detached(error)
        entry.reason = Reason.CAPTURE_FAILED
        self._on_failure(entry)

    def mark_captured(self, owner: str) -> None:
        """A capture of ``owner`` succeeded: its failures are not consecutive any more."""
        self._failures_in_a_row.pop(owner, None)

    def has_given_up(self, owner: str) -> bool:
        """True after three consecutive failures of ``owner``: no other key of it is tried."""
        return self._failures_in_a_row.get(owner, 0) >= MAX_FAILURES_IN_A_ROW

    def require_untried(self, owner: str, mode: RuntimeMode, key: BatchDescriptor) -> None:
        """Raise what ``key`` failed with, or ``TooManyFailuresError`` if its owner gave up."""
        entry = self.get(owner, mode, key)
        if entry is not None and entry.error is not None:
            # A copy: raising hangs a traceback, and with it frames and tensors, on the object.
            raise detached(entry.error)
        if self.has_given_up(owner):
            raise too_many_failures(owner, mode, key)

    def forget_failures(
        self, keys: Iterable[tuple[str, RuntimeMode, BatchDescriptor]] | None = None
    ) -> None:
        """Let failed keys be tried again, all of them or ``keys``, and their owners too where they
        gave up."""
        chosen = None if keys is None else frozenset(keys)
        for entry in self.failures:
            if chosen is None or (entry.owner, entry.mode, entry.key) in chosen:
                entry.error = None
                invalid = entry.program is not None and not entry.program.is_valid
                entry.reason = Reason.INVALIDATED if invalid else Reason.NOT_CAPTURED_YET
        for owner in list(self._failures_in_a_row) if chosen is None else {o for o, *_ in chosen}:
            self._failures_in_a_row.pop(owner, None)

    # -- what is missed

    def note_miss(self, entry: Entry, sizes: Mapping[str, int] | None = None) -> None:
        """Count a step, of these real sizes, that ran eager because this key is not captured."""
        entry.missed_sizes = sizes
        self._num_misses += 1
        entry.misses += 1
        entry.last_miss = self._num_misses


def too_many_failures(owner: str, mode: RuntimeMode, key: BatchDescriptor) -> TooManyFailuresError:
    error = TooManyFailuresError(
        expected="captures that succeed",
        found=f"{MAX_FAILURES_IN_A_ROW} consecutive failures; this key was not attempted",
        do="read library.failures for the first cause, then library.forget_failures()",
    )
    error.locate(owner=owner, mode=mode.name, key=str(key))
    return error


def detached(error: BaseException) -> Exception:
    """A copy of ``error`` without traceback: it keeps no frame, hence no tensor, alive."""
    try:
        alone = copy.copy(error)
    except Exception:  # noqa: BLE001  Its constructor may refuse its ``args``, as it likes.
        alone = None
    if not isinstance(alone, Exception):
        alone = CaptureError(f"{type(error).__name__}: {text_of(error)}")
    alone.__traceback__ = None
    alone.__context__ = None
    alone.__cause__ = None if error.__cause__ is None else detached(error.__cause__)
    return alone

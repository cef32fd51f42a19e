"""The keys of a runner: its modes, its axes, and what decides between them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from graphrt.batch import BatchDescriptor, CUDAGraphMode, Decision, Reason, RuntimeMode, is_key
from graphrt.config.checked import check_choice, check_count, check_type, checked_list
from graphrt.dispatch import BucketDispatcher, BucketKey, ordered_sizes
from graphrt.errors import (
    BatchError,
    ConfigError,
    GraphrtError,
    LibraryClosedError,
    MissError,
    shown,
)
from graphrt.events import KeysChanged
from graphrt.files import MOST_NAMED
from graphrt.graphs import BufferSpec, Catalog, Entry, Key, OutputSpec


class Dispatcher(Protocol):
    """Decides which key serves a call. Immutable: a change of the catalogue makes a new one."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every key with its mode, in capture order, as decisions carry them."""

    def dispatch(self, *args: Any, **kwargs: Any) -> Decision: ...


@dataclass(frozen=True)
class NoDispatcher:
    """Decides nothing: raises ``error()``."""

    error: Callable[[], GraphrtError]
    keys: tuple[Key, ...] = ()

    def dispatch(self, *_: Any, **__: Any) -> NoReturn:
        raise self.error()


def missing_text(missing: Iterable[Key]) -> str:
    """Which keys have no graph, alike on ranks where these are the same."""
    return "; ".join(f"{mode.name} {key!r}" for mode, key in missing)


def no_sizes_error() -> ConfigError:
    return ConfigError(
        "dispatch by sizes",
        expected="sizes={axis: [...]} where the runner is made",
        found="sizes=None: the keys are the caller's",
        do="run(values, key=runner.key(...)), or list the sizes",
    )


def no_examples_error() -> ConfigError:
    return ConfigError(
        "examples",
        expected="inputs to warm up, capture and check with",
        found="neither examples nor like",
        do="capture(like=batch) with one real batch, or pass examples(sizes, seed), a function "
        "that makes valid inputs of any real sizes, where the runtime or runner is made",
    )


def miss_error(reason: Reason, sizes: Mapping[str, int], by_how_much: str) -> MissError:
    return MissError(
        f"a step of {', '.join(f'{size} {axis}' for axis, size in sizes.items())}",
        expected="a captured graph for every step (on_miss='strict')",
        found=f"none serves it: {reason.name}{by_how_much and f' ({by_how_much})'}",
        do="capture a size that holds it, or set on_miss='eager'. The step did not run",
        reason=reason,
    )


def closed_error() -> LibraryClosedError:
    return LibraryClosedError(
        "runner", expected="an open runner", found="a use after close()", do="make a new one"
    )


class KeySpace(NamedTuple):
    """Which keys a runner may have, and what decides between them."""

    modes: tuple[RuntimeMode, ...]
    """Best first."""
    capacity: Mapping[str, int]
    """Axis -> the largest padded size, in the order of a key's sizes."""
    make_dispatcher: Callable[..., Dispatcher]
    """Of the keys that are ``unavailable``, each with the reason."""
    axis_sizes: Callable[[BatchDescriptor], Mapping[str, int]]
    """A key's padded sizes; it raises for what cannot be a key."""
    smaller_sizes: Callable[[RuntimeMode, BatchDescriptor], Iterable[Mapping[str, int]]]
    """Real sizes of batches that are padded to a key, which are compared with the batch itself."""
    may_grow: bool
    """True if the keys are the caller's."""


def key_space(
    modes: Sequence[str],
    sizes: Mapping[str, Sequence[int]] | None,
    capacity: Mapping[str, int] | None,
) -> KeySpace:
    """The keys of every combination of ``sizes``, or the caller's. Errors: ``ConfigError``."""
    served = check_modes(modes)
    mode = CUDAGraphMode["FULL_AND_PIECEWISE" if len(served) == 2 else served[0].name]
    listed = BucketDispatcher(sizes, mode).axes if sizes is not None else {}
    limits = check_capacity(listed, capacity)
    sizes_of = partial(sizes_of_key, limits)
    smaller_sizes = partial(smaller_by_axis, listed, sizes_of)
    if sizes is None:
        none = NoDispatcher(no_sizes_error)
        return KeySpace(served, limits, lambda unavailable: none, sizes_of, smaller_sizes, True)
    make_dispatcher = partial(BucketDispatcher, listed, mode)
    return KeySpace(served, limits, make_dispatcher, sizes_of, smaller_sizes, False)


class RunnerKeys:
    """The keys of a runner in capture order, each with what the catalogue says of it."""

    def __init__(self, catalog: Catalog, owner: str, space: KeySpace) -> None:
        self.owner, self._catalog, self._space = owner, catalog, space
        keys = space.make_dispatcher(unavailable={}).keys
        self.entries: dict[Key, Entry] = {key: catalog.entry(owner, *key) for key in keys}
        self._told: KeysChanged | None = None

    def select(self, keys: Iterable[Key | BatchDescriptor] | None) -> list[Entry]:
        """The entries of ``keys``, in capture order; of all without any.

        Errors: ``ConfigError`` for what is no key of this runner, ``BatchError`` for what cannot
                be one where the keys are the caller's.
        """
        if keys is None:
            return list(self.entries.values())
        chosen: dict[Key, None] = {}
        unknown: list[Any] = []
        expected = "a list of keys of this runner, each with its mode or alone"
        for item in checked_list("keys", keys, BatchDescriptor | tuple, expected):
            if isinstance(item, BatchDescriptor):
                chosen.update(((mode, item), None) for mode in self._space.modes)
            elif is_key(item):
                chosen[item] = None
            else:
                unknown.append(item)
        is_wrong = bool(unknown)
        unknown += [item for item in chosen if item not in self.entries]
        if is_wrong or (unknown and not self._space.may_grow):
            raise ConfigError(
                "keys to capture",
                expected="keys of this runner's plan, each with its mode",
                found=", ".join(map(shown, unknown[:MOST_NAMED])),
                do="take the pairs from `keys` or plan.capture_order",
            )
        for mode, key in unknown:
            check_choice("mode of a key to capture", mode, self._space.modes)
            self._space.axis_sizes(key)
        for item in unknown:
            self.entries[item] = self._catalog.entry(self.owner, *item)
        return [entry for item, entry in self.entries.items() if item in chosen]

    def is_padded(self, real: Mapping[str, int], found: Mapping[str, int]) -> bool:
        """True if ``found`` is ``real``, with axes padded to the sizes of one key."""
        return any(
            all(real[axis] <= padded[axis] for axis in padded)
            and all(size in (real[axis], padded.get(axis)) for axis, size in found.items())
            for padded in (self._space.axis_sizes(key) for _, key in self.entries)
        )

    def pending(self) -> list[Entry]:
        """What is not captured yet, in capture order."""
        return [e for e in self.entries.values() if e.reason is Reason.NOT_CAPTURED_YET]

    def by_misses(self) -> list[Entry]:
        """What is not captured yet: most missed first, the latest first among equals."""
        return sorted(self.pending(), key=lambda entry: (-entry.misses, -entry.last_miss))

    def missing(self) -> dict[Key, Reason]:
        """Why no program serves a key, for each key that none serves."""
        entries = self.entries.items()
        return {item: entry.reason for item, entry in entries if entry.reason is not Reason.HIT}

    def largest(self) -> dict[str, int]:
        """Axis -> its largest padded size."""
        largest: dict[str, int] = {}
        for _, key in self.entries:
            for axis, size in self._space.axis_sizes(key).items():
                largest[axis] = max(size, largest.get(axis, size))
        return largest

    def changed(self) -> KeysChanged | None:
        """What serves now, as an event; None if it is what the call before said."""
        programs = [entry.program for entry in self.entries.values()]
        now = KeysChanged(
            self.owner,
            sum(program.num_graphs for program in programs if program is not None),
            tuple(Counter(self.missing().values()).items()),
        )
        before, self._told = self._told, now
        return None if now == before else now

    def decide(self, key: BatchDescriptor, sizes: Mapping[str, int], *, is_exact: bool) -> Decision:
        """What serves a call whose caller has chosen the key. Counts a key not captured yet."""
        why = Reason.NO_KEY
        for mode in self._space.modes:
            entry = self.entries.get((mode, key))
            if entry is None:
                continue
            if entry.reason is Reason.HIT:
                return Decision(mode, entry.key, Reason.HIT if is_exact else Reason.PADDED)
            why = entry.reason
            if why is Reason.NOT_CAPTURED_YET:
                self._catalog.note_miss(entry, sizes)
        return Decision(RuntimeMode.NONE, key, why)


def make_key(sizes: Mapping[str, int], variant: object = None) -> BatchDescriptor:
    """The key of these padded sizes, in the order of the axes."""
    ordered = tuple(sizes.values())
    return BatchDescriptor(ordered[0], variant=BucketKey(ordered, variant))


def batch_key(key: BatchDescriptor, sizes: Mapping[str, int]) -> BatchDescriptor:
    """The descriptor of an eager run of ``sizes``, where padded it would run as ``key``."""
    if isinstance(key.variant, BucketKey):
        return make_key(sizes, key.variant.variant)
    first = next(iter(sizes.values()))
    return replace(key, num_tokens=first, num_reqs=None, uniform=False, num_ubatches=1)


def smaller_by_axis(
    sizes: Mapping[str, Sequence[int]],
    axis_sizes: Callable[[BatchDescriptor], Mapping[str, int]],
    mode: RuntimeMode,
    key: BatchDescriptor,
) -> list[dict[str, int]]:
    """For each axis, the batch that fills ``key`` but has one ``size_to_compare``."""
    padded = dict(axis_sizes(key))
    found = []
    for axis, size in padded.items():
        below = [other for other in sizes.get(axis, ()) if other < size]
        real = size_to_compare(max(below, default=0) + 1, size)
        if real < size:
            found.append({**padded, axis: real})
    return found


def size_to_compare(smallest: int, padded: int) -> int:
    """The size that is compared as padded to ``padded``, of those from ``smallest`` on: 1, which
    models treat apart, or the first that is even where ``padded`` is odd, and odd where it is even.

    Code that pairs rows, or takes 4 at once, reads no padding in a batch of an even size, and code
    that asks whether a size is even finds nothing where both are.
    """
    other = smallest + (padded - smallest + 1) % 2
    return other if smallest > 1 and other < padded else smallest


def require_decision(decision: object) -> None:
    """Errors: ``BatchError`` for what is no ``Decision``."""
    if not isinstance(decision, Decision) or not is_key(decision[:2]):
        raise BatchError(
            "decision",
            expected="what decide() or a dispatcher said",
            found=shown(decision),
            do="decide(sizes) first, or leave it out",
        )


def in_order(limits: Mapping[str, int], sizes: Mapping[str, int], what: str) -> dict[str, int]:
    """``sizes`` in the order of the axes of ``limits``, one for each.

    Errors: ``BatchError`` for a missing or unknown axis, or a size beyond its limit.
    """
    ordered = dict(zip(limits, ordered_sizes(sizes, limits), strict=True))
    for axis, limit in limits.items():
        if ordered[axis] > limit:
            raise BatchError(
                f"axis {axis!r}",
                expected=f"a {what} size of 0 to {limit}",
                found=str(ordered[axis]),
                do="name every axis once, with a size within its limit",
            )
    return ordered


def sizes_of_key(capacity: Mapping[str, int], key: BatchDescriptor) -> dict[str, int]:
    """The padded sizes of a key that ``make_key`` or a ``BucketDispatcher`` made.

    Errors: ``BatchError`` for another key, or a size beyond the capacity.
    """
    variant = getattr(key, "variant", None)
    if not isinstance(variant, BucketKey) or len(variant.sizes) != len(capacity):
        raise BatchError(
            shown(key),
            expected=f"a key with a size for each of {list(capacity)}",
            found="another key",
            do="make it with runner.key(...)",
        )
    return in_order(capacity, dict(zip(capacity, variant.sizes, strict=True)), "padded")


def check_modes(modes: Sequence[object]) -> tuple[RuntimeMode, ...]:
    """The runtime modes, best first. Errors: ``ConfigError`` for anything else."""
    given = (modes,) if isinstance(modes, RuntimeMode) else modes
    listed = checked_list("modes", given, str | RuntimeMode, "FULL, PIECEWISE, or both")
    found = {str(getattr(mode, "name", mode)).upper() for mode in listed}
    if not found or not found <= {"FULL", "PIECEWISE"}:
        raise ConfigError(
            "modes",
            expected="FULL, PIECEWISE, or both",
            found=shown(modes),
            do="name at least one of the two",
        )
    return tuple(sorted((RuntimeMode[name] for name in found), reverse=True))


BY_AXIS = "a dict by axis, such as sizes={'batch': [2, 4]}"


def check_capacity(
    sizes: Mapping[str, Sequence[int]], capacity: Mapping[str, int] | None
) -> dict[str, int]:
    """Axis -> largest padded size, by default the largest listed, in the order of ``sizes``.

    Errors: ``ConfigError``.
    """
    for axis, size in (capacity or {}).items():
        check_type("an axis of capacity", axis, str, "a name")
        check_count(f"capacity of axis {axis!r}", size, least=0)
    listed = {axis: each[-1] for axis, each in sizes.items()}
    limits = dict(listed if capacity is None else capacity)
    if listed and listed.keys() == limits.keys():
        limits = {axis: limits[axis] for axis in listed}
    elif listed:
        limits = {}
    if not limits or any(limits[axis] < size for axis, size in listed.items()):
        raise ConfigError(
            "capacity",
            expected="axis -> largest padded size, at least the largest of its sizes",
            found=f"capacity {capacity}, sizes up to {listed or None}",
            do="give each axis a capacity, or list sizes={axis: [...]} and leave it out",
        )
    return limits


def check_axes(outputs: OutputSpec, capacity: Mapping[str, int]) -> None:
    """Errors: ``ConfigError`` for an axis of ``outputs`` that no batch has."""
    for path, lengths in outputs.axes.items():
        for axis in lengths.values():
            if isinstance(axis, str) and axis not in capacity:
                raise ConfigError(
                    f"axis {shown(axis)} of output {shown(path)}",
                    expected=f"one of {', '.join(capacity)}, or a function of the sizes",
                    found=shown(axis),
                    do="name an axis of the batch",
                )


def check_specs(specs: object) -> tuple[BufferSpec, ...]:
    """``specs`` as a tuple. Errors: ``ConfigError`` for what is no sequence of specs."""
    do = "declare one BufferSpec for each input"
    return checked_list("inputs", specs, BufferSpec, "a list of BufferSpec", do)


def check_parameters(fn: Callable[..., Any], specs: Iterable[BufferSpec]) -> None:
    """Errors: ``ConfigError`` where ``fn`` certainly cannot be called with these inputs."""
    called: Callable[..., Any] = fn
    if isinstance(fn, torch.nn.Module):
        if type(fn).__call__ is not torch.nn.Module.__call__ or fn._forward_pre_hooks_with_kwargs:
            return  # Something stands between the call and ``forward``.
        called = fn.forward
    try:
        # What a decorator passes on is its own affair.
        parameters = inspect.signature(called, follow_wrapped=False).parameters.values()
    except Exception:  # noqa: BLE001  Not written in Python, or code of its own raises.
        return
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return
    taken = {
        item.name: item.default is item.empty
        for item in parameters
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    }
    given = [spec.name for spec in specs]
    unknown = [name for name in given if name not in taken]
    missing = [name for name, is_required in taken.items() if is_required and name not in given]
    if not unknown and not missing:
        return
    told = ["it takes no " + ", ".join(unknown)] * bool(unknown)
    told += ["it needs " + ", ".join(missing)] * bool(missing)
    raise ConfigError(
        f"inputs of {getattr(fn, '__qualname__', type(fn).__qualname__)}",
        expected=f"its parameters, by name: {', '.join(taken) or 'none'}",
        found=f"{', '.join(given) or 'none'}: {'; '.join(told)}",
        do="name a BufferSpec after each parameter, or wrap the callable in one that takes these",
    )


def check_written_rows(
    written_rows: Mapping[torch.Tensor, str], specs: Iterable[BufferSpec]
) -> None:
    """Errors: ``ConfigError`` for rows named by what is no staged input of integers."""
    names = [
        spec.name
        for spec in specs
        if spec.policy.kind != "fill_once"
        and not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool)
    ]
    for number, (tensor, name) in enumerate(written_rows.items()):
        if name not in names or tensor.dim() == 0:
            raise ConfigError(
                f"may_overwrite {number}, a tensor of shape {tuple(tensor.shape)}",
                expected="rows, and the input of integers that indexes them: one of "
                f"{', '.join(names) or 'none'}",
                found=repr(name),
                do="name the input that says which rows are written, or list the tensor alone",
            )

"""What a compared run may write: saved once, put back before each run, compared after it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch

from graphrt.errors import StateAdvancedError
from graphrt.externals.held import find_holder
from graphrt.externals.host_snapshot import HostSnapshot
from graphrt.graphs.resources import StateGuard, TensorStateGuard
from graphrt.values import as_bits, bytes_of, own_copy
from graphrt.verify.compare import Comparison, compare

_POISON, _LAST_POISON = 0xC1, 0x5E
"""Bytes of the rows before a run, and before the last one. Finite in every floating dtype, one
negative and one very large: a run that reads rows which it should only write (a sum, a maximum)
changes one of the two, where NaN would stay NaN and equal itself."""

_MAX_SHOWN = 4

NUM_REPEATS = 8
"""Runs of one call that are compared with each other, to learn whether its bits vary. A kernel that
gave other bits in a quarter of its runs is found in nine cases of ten."""

VARYING = (
    "runs of the same replay on the same inputs differ from each other: a kernel's bits vary from "
    "run to run, as those of cuDNN's attention for one query and of sums by atomics do, or random "
    "numbers come from a generator that the library was not given (generators=), or prepare() of a "
    "resource counts its calls, or an eager segment its runs, or a run reads what the one before "
    "wrote in a tensor of may_overwrite that is too large to be put back without its rows. Choose "
    "another kernel (torch.backends.cuda.enable_cudnn_sdp(False), "
    "torch.use_deterministic_algorithms(True)), or give a verify_tolerance"
)


class WrittenRows(NamedTuple):
    """The rows of one tensor that a run writes: ``tensor[rows]``, along dimension 0."""

    tensor: torch.Tensor
    rows: torch.Tensor
    """[n] int64, each within the tensor."""


class OtherRows:
    """What no run may write of the tensors over one storage: the rows beside those given by name,
    which are all that a run may write, those of padding too.

    ``is_guarded``: a guard keeps the storage, so that runs may write all of it.
    """

    def __init__(self, named: Mapping[str, WrittenRows], *, is_guarded: bool) -> None:
        self.named = named
        self.is_guarded = is_guarded
        tensors = [written.tensor for written in named.values()]
        bits = min(map(as_bits, tensors), key=lambda each: each.dtype.itemsize)
        self.memory = bytes_of(tensors).view(bits.dtype)
        """From the first to the last of the tensors, as integers of which elements consist."""

    def of(self, copy: torch.Tensor, name: str) -> torch.Tensor:
        """The part of a tensor in a ``copy`` of the memory: [*shape, integers of an element]."""
        tensor = self.named[name].tensor
        ratio = tensor.dtype.itemsize // self.memory.dtype.itemsize
        start = tensor.storage_offset() * ratio - self.memory.storage_offset()
        steps = *(step * ratio for step in tensor.stride()), 1
        return copy.as_strided((*tensor.shape, ratio), steps, start)

    def disturb(self) -> None:
        """Change the last bit of each float, so that a write of what was there is seen. Not of
        those of 8 bits, of which it says too much."""
        for tensor, _ in self.named.values():
            parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            if parts.is_floating_point() and parts.dtype.itemsize > 1:
                # Where it is finite: infinity would become NaN, which random choices refuse.
                as_bits(parts).bitwise_xor_((parts - parts) == 0)

    def differing(self, copy: torch.Tensor) -> dict[str, torch.Tensor]:
        """Where each tensor is not as in ``copy``, among what no run may write."""
        where = self.memory != copy
        found = {name: self.of(where, name) for name in self.named}
        for name, of_tensor in found.items():
            of_tensor.index_fill_(0, self.named[name].rows, value=False)
        return found


class SavedState(NamedTuple):
    """What a ``RunState`` was. ``compared`` holds what comparisons look at."""

    token: Any
    """Of the guard."""
    compared: dict[str, Any]
    generators: tuple[torch.Tensor, ...]
    scratch: Mapping[str, torch.Tensor]


class RunResult(NamedTuple):
    """What one compared run returned, and the state that it left."""

    outputs: Any
    left: SavedState


@dataclass(eq=False)
class RunState:
    """The guarded state of a callable, and whatever else its runs write.

    ``guard``: the user's. ``tensors``: written whole, by name. ``rows``: written in part, by name.
    ``generators``: where random numbers come from; each run starts from the same ones.
    ``scratch``: may hold anything between runs, by name; only ``unlike_scratch`` looks at it.
    ``poisons`` False: for a run whose outputs are handed out, because it may read those rows first.
    A tensor of a ``TensorStateGuard`` whose rows are given too may be read before it is written: of
    it these rows are compared, and not poisoned.
    ``others``: what no run may write; put back and compared with it, and disturbed meanwhile if
    this poisons.
    ``host``: what the callable remembers, which each run finds as it is now.
    ``wait``: until the device is done; for memory of the host among them, which is read and written
    at once, where the device may still write it.
    """

    guard: StateGuard | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[str, WrittenRows] = field(default_factory=dict)
    generators: Sequence[torch.Generator] = ()
    _: KW_ONLY
    scratch: Mapping[str, torch.Tensor] = field(default_factory=dict)
    others: Sequence[OtherRows] = ()
    poisons: bool = True
    host: HostSnapshot | None = None
    wait: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._started_with: list[torch.Tensor] = []
        """The memory of ``others`` before each run, while they are put back."""
        self._was: list[torch.Tensor] = []
        """The same before it was disturbed."""
        guard = self.guard
        self._guarded = guard.tensors if isinstance(guard, TensorStateGuard) else []
        self.poisoned = {
            name: written
            for name, written in self.rows.items()
            if self.poisons and not _is_among(written.tensor, self._guarded)
        }

    def save(self) -> SavedState:
        """Read everything. Its size is that of the guard's token, the tensors and the rows."""
        if self.wait is not None:
            self.wait()
        token: Any = None if self.guard is None else self.guard.save()
        compared: dict[str, Any] = {} if self.guard is None else {"state": token}
        if self._guarded and self.rows:
            in_rows = [written.tensor for written in self.rows.values()]
            compared["state"] = [
                clone
                for tensor, clone in zip(self._guarded, token, strict=True)
                if not _is_among(tensor, in_rows)
            ]
        for name, tensor in self.tensors.items():
            compared[name] = tensor.clone()
        for name, (tensor, index) in self.rows.items():
            compared[name] = tensor.index_select(0, index)
        compared |= self._rows_beside()
        generators = tuple(item.get_state() for item in self.generators)
        scratch = {name: tensor.clone() for name, tensor in self.scratch.items()}
        return SavedState(token, compared, generators, scratch)

    def restore(self, saved: SavedState, besides: Container[str] = ()) -> None:
        """Write everything back in place, ``besides`` some rows: graphs hold the addresses."""
        if self.wait is not None:
            self.wait()
        compared = saved.compared
        if self.host is not None:
            self.host.put_back()
        with torch.inference_mode():
            for other, copy in zip(self.others, self._started_with, strict=False):
                other.memory.copy_(copy)
        if self.guard is not None:
            self.guard.restore(saved.token)
        # State made in inference mode can be written in no other; other state in this one too.
        with torch.inference_mode():
            for name, tensor in self.tensors.items():
                tensor.copy_(compared[name])
            for name, tensor in self.scratch.items():
                tensor.copy_(saved.scratch[name])
            for name, (tensor, index) in self.rows.items():
                if name not in besides:
                    as_bits(tensor).index_copy_(0, index, as_bits(compared[name]))
        for generator, state in zip(self.generators, saved.generators, strict=True):
            generator.set_state(state)

    @contextmanager
    def put_back(self, *, on_error: bool = False) -> Iterator[SavedState]:
        """Write everything back at the end, or only ``on_error``; but always what is disturbed."""
        saved = self.save()
        with self._disturbed():
            try:
                yield saved
            except BaseException:
                self.restore(saved)
                raise
            if not on_error:
                self.restore(saved)

    @contextmanager
    def _disturbed(self) -> Iterator[None]:
        self._was = self._started_with = [other.memory.clone() for other in self.others]
        pairs = zip(self.others, self._was, strict=True)
        disturbed = [(other, was) for other, was in pairs if self._disturbs(other)]
        with torch.inference_mode():
            for other, _ in disturbed:
                other.disturb()
        if disturbed:
            self._started_with = [other.memory.clone() for other in self.others]
        try:
            yield
        finally:
            with torch.inference_mode():
                for other, was in disturbed:
                    other.memory.copy_(was)
            self._was = self._started_with = []

    def _disturbs(self, other: OtherRows) -> bool:
        return self.poisons and not other.is_guarded

    def _rows_beside(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The other rows that are not as they were at first: which, and what they hold now."""
        pairs = zip(self.others, self._started_with, strict=False)
        differing = {
            name: (other.named[name].tensor, where)
            for other, copy in pairs
            for name, where in other.differing(copy).items()
        }
        if not differing:
            return {}
        # Stacked, because each answer of a GPU is a wait.
        are_any = [where.any() for _, where in differing.values()]
        written = torch.stack([each.to(are_any[0].device) for each in are_any]).tolist()
        found = {}
        for (name, (tensor, where)), is_any in zip(differing.items(), written, strict=True):
            by_row = where.reshape(len(where), -1).any(1) if is_any else where.new_zeros(0)
            rows = by_row.nonzero().flatten()
            found[name] = rows, tensor.index_select(0, rows)
        return found

    def is_beside(self, name: str) -> bool:
        """True if some of the other rows of that name are not as they were at first."""
        return self._rows_beside()[name][0].numel() > 0

    def begin(self, saved: SavedState, *, is_last: bool = False) -> None:
        """Make everything as it was for another run, which finds the written rows poisoned."""
        self.restore(saved, besides=self.poisoned)
        self.poison(is_last=is_last)

    def poison(self, *, is_last: bool = False) -> None:
        """Make the written rows hold what no run wrote there, so that a row left out is seen."""
        with torch.inference_mode():
            for tensor, index in self.poisoned.values():
                bits = as_bits(tensor)
                byte = _LAST_POISON if is_last else _POISON
                bits.index_fill_(0, index, repeated(byte, bits.dtype))

    def settle(self, saved: SavedState, *runs: dict[str, Any]) -> None:
        """Put back what every run left poisoned: rows may be written in part, or on a condition.
        Of other rows, leave out what a run filled as before: a first one may, once for all.

        ``runs``: what each left, the last one at the end. Changed in place, as the tensors are.
        """
        with torch.inference_mode():
            for name, (tensor, index) in self.poisoned.items():
                *earlier, last = (as_bits(run[name]) for run in runs)
                untouched = last == repeated(_LAST_POISON, last.dtype)
                for bits in earlier:
                    untouched &= bits == repeated(_POISON, bits.dtype)
                before = as_bits(saved.compared[name])
                for bits in (*earlier, last):
                    bits.copy_(torch.where(untouched, before, bits))
                as_bits(tensor).index_copy_(0, index, last)
            for other, was in zip(self.others, self._was, strict=True):
                for name in other.named if self._disturbs(other) else ():
                    self._leave_out_fills(other.of(was, name), name, *runs)

    @staticmethod
    def _leave_out_fills(was: torch.Tensor, name: str, *runs: dict[str, Any]) -> None:
        for run in runs[:-1]:
            rows, values = run[name]
            if rows.numel():
                bits = as_bits(values).contiguous().view(was.dtype).reshape(len(rows), -1)
                is_other = (bits != was[rows].reshape(len(rows), -1)).any(1)
                kept = is_other | torch.isin(rows, runs[-1][name][0])
                run[name] = rows[kept], values[kept]

    def require_rows(
        self,
        subject: str,
        left: Mapping[str, Any],
        runnable: object,
        find_line: Callable[[str], str] = lambda name: "",
    ) -> None:
        """Refuse a run on an example that wrote another row than its input names: what it ``left``.

        ``find_line``: finds the user's line that writes the other rows of that name.
        Errors: ``StateAdvancedError``.
        """
        for other in self.others:
            for name, (tensor, _) in other.named.items():
                rows: list[int] = left[name][0].tolist()
                if not rows or other.is_guarded:
                    continue
                line, storage = find_line(name), tensor.untyped_storage()
                more = f" and {len(rows) - _MAX_SHOWN} more" if len(rows) > _MAX_SHOWN else ""
                path = find_holder(storage.data_ptr(), storage.nbytes(), runnable)
                raise StateAdvancedError(
                    f"{subject}: {path or 'a tensor'}, {name}",
                    expected="runs that write no row of it but those that its input names",
                    found=f"written: {', '.join(map(str, rows[:_MAX_SHOWN]))}{more}"
                    + (f", at {line}" if line else ""),
                    do="name the input that says which rows a run writes, and let its padding name "
                    "the row that padded rows are written to; or give the tensor to state=, which "
                    "puts it back, or to may_overwrite= without rows, if it may hold anything "
                    "after a capture",
                    source=line,
                )

    def varies(self, saved: SavedState, run: Callable[[], Any]) -> bool:
        """True if runs of one call, each from ``saved``, return or leave other bits."""
        first: Any = None
        try:
            for _ in range(NUM_REPEATS):
                self.restore(saved)
                found = own_copy(run()), self.save().compared
                if first is None:
                    first = found
                elif not compare(first, found).is_equal:
                    return True
        finally:
            self.restore(saved)
        return False

    def unlike_scratch(
        self, saved: SavedState, expected: SavedState, tolerance: Mapping[torch.dtype, float]
    ) -> dict[str, Comparison]:
        """Scratch that is not as one run left it, among the elements that this run wrote."""
        found = {}
        for name, tensor in self.scratch.items():
            before, left = saved.scratch[name], expected.scratch[name]
            is_written = as_bits(left) != as_bits(before)
            if tensor.is_complex():
                is_written = is_written.any(-1)
            outcome = compare(left[is_written], tensor[is_written], tolerance=tolerance)
            if not outcome.is_equal:
                found[name] = outcome
        return found

    def drew_random(self, saved: SavedState) -> bool:
        """True if a generator has advanced since."""
        return any(
            not torch.equal(item.get_state(), state)
            for item, state in zip(self.generators, saved.generators, strict=True)
        )


def random_state(generators: Iterable[torch.Generator]) -> Callable[[], None]:
    """What puts ``generators``, torch's own of the host, Python's and NumPy's back where they stand
    now. Not inside a recording."""
    of_torch = RunState(generators=tuple(dict.fromkeys((torch.default_generator, *generators))))
    saved, of_python = of_torch.save(), random.getstate()
    numpy_random = sys.modules.get("numpy.random")  # It is not imported for this.
    of_numpy = None if numpy_random is None else numpy_random.get_state(legacy=False)

    def put_back() -> None:
        random.setstate(of_python)
        if numpy_random is not None:
            numpy_random.set_state(of_numpy)
        if of_torch.drew_random(saved):
            of_torch.restore(saved)

    return put_back


def restored(before_warmup: HostSnapshot | None) -> AbstractContextManager[None]:
    """While entered, a callable remembers what it did then, if that is known."""
    return nullcontext() if before_warmup is None else before_warmup.restored()


def _is_among(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    return any(other is tensor for other in others)


def repeated(byte: int, dtype: torch.dtype) -> int:
    """The integer of ``dtype`` that consists of ``byte`` alone."""
    signed = dtype is not torch.uint8
    return int.from_bytes(bytes([byte]) * dtype.itemsize, "little", signed=signed)

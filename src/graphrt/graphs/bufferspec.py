"""A static buffer: its shape over named axes, its dtype, and what its padding holds.

Tracks which padded rows hold stale data and refills only those: no element is filled twice, and
nothing is filled while sizes do not shrink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from graphrt.config.checked import check_choice, check_flags, check_type
from graphrt.errors import PaddingRequiredError, StaticBufferError, shown

Box = tuple[int, ...]
"""The leading part of something: its extent in every dimension, or along every axis."""

_Fills = list[Callable[[], object]]

# What is cached by real size: two axes make many pairs.
_MAX_CACHED = 1024


@dataclass(frozen=True, slots=True)
class Padding:
    """What the rows from the real to the padded size hold.

    ``kind``: How the padding is filled.
    ``value``: What it is filled with, where it is.
    ``arbitrary``: True: any other valid value would do as well, so verification puts other values
      there.
    """

    kind: Literal["keep", "zero", "fill", "fill_once"]
    value: float | int | bool = 0
    arbitrary: bool = False

    def __post_init__(self) -> None:
        check_choice("kind of padding", self.kind, ("keep", "zero", "fill", "fill_once"))
        check_type("value of a padding", self.value, float | int, "a number, or a bool")
        check_flags("Padding", arbitrary=self.arbitrary)

    @classmethod
    def keep(cls) -> Padding:
        """Padded rows keep what earlier steps wrote: for inputs whose padding nothing reads."""
        return cls("keep", arbitrary=True)

    @classmethod
    def zero(cls, *, arbitrary: bool = False) -> Padding:
        """Padded rows hold 0. The default of floating and complex dtypes, then ``arbitrary``."""
        return cls("zero", arbitrary=arbitrary)

    @classmethod
    def fill(cls, value: float | int | bool, *, arbitrary: bool = False) -> Padding:
        """Padded rows hold ``value``: -1, or the index of a row reserved for padding.

        ``arbitrary``: no real row may depend on it (ids, positions; never cache rows, lengths).
        """
        return cls("fill", value, arbitrary)

    @classmethod
    def fill_once(cls, value: float | int | bool) -> Padding:
        """The whole buffer holds ``value`` from its allocation on and is never staged."""
        return cls("fill_once", value)

    def __repr__(self) -> str:
        told = [repr(self.value)] if "fill" in self.kind else []
        told += ["arbitrary=True"] if self.arbitrary and self.kind != "keep" else []
        return f"Padding.{self.kind}({', '.join(told)})"


_DEFAULT = Padding.zero(arbitrary=True)


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One static input: ``shape`` entries are numbers or names of axes that a batch pads.

    A value may be narrower than a number of ``shape`` (block tables as wide as the batch's longest
    request): the rest of its rows holds what ``padding`` says (``keep``: what it held). Not where
    the padding is the default, because a missing half of a hidden state is a mistake.

    An ``optional`` input may be left out of a step and then counts as 0 rows: the callable gets its
    padding, never None. A buffer that the graph itself writes must say ``written``, because every
    replay then dirties its padding.

    Errors: ``PaddingRequiredError`` for axes of an integer or bool dtype without ``padding`` (0 is
    a live index there: the padded rows of a batch would write into whatever row 0 belongs to;
    SGLang #10892, AReno #509); ``StaticBufferError`` for a padding value that the dtype cannot
    hold, and for fields of another type.

    ``rebase``: the axis along which its values are places in the batch (the request of each token,
    the last token of each request): a micro-batch counts them from its own first one.

    ``name``: The name of the parameter that gets it.
    ``dtype``: Of the buffer; a value that converts without changing kind is converted.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    padding: Padding | None = None
    _: KW_ONLY
    optional: bool = False
    written: bool = False
    rebase: Literal["tokens", "requests"] | None = None

    def __post_init__(self) -> None:
        kinds = {
            "name": (str, "the name of a parameter"),
            "shape": (list | tuple, "a shape, such as ('tokens', 8)"),
            "dtype": (torch.dtype, "a torch.dtype"),
            "padding": (Padding | None, "a Padding, such as Padding.fill(0)"),
            "optional": (bool, "True or False"),
            "written": (bool, "True or False"),
        }
        for name, (kind, expected) in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise self._wrong(expected, shown(value), "correct it", field=f"{name} of ")
        object.__setattr__(self, "shape", tuple(self.shape))
        check_choice(f"rebase of {self.name!r}", self.rebase, (None, "tokens", "requests"))
        for size in self.shape:
            if not (isinstance(size, str) or type(size) is int):
                expected, found = (
                    "a shape of integers and names of axes",
                    f"{size!r} in {self.shape}",
                )
                raise self._wrong(expected, found, "correct the shape")
        if self.padding is None:
            if not self._has_default:
                raise PaddingRequiredError(
                    f"static buffer {self.name!r}",
                    expected=f"an explicit padding, because 0 is a live value of {self.dtype}",
                    found="padding=None",
                    do="declare Padding.zero() or .fill(v), or .keep() if no padding is read",
                )
            object.__setattr__(self, "padding", _DEFAULT)
        if not _holds(self.dtype, self.policy.value):
            expected = f"a padding value that {self.dtype} can hold"
            raise self._wrong(expected, repr(self.policy), "choose another value or dtype")
        if self.policy.kind == "fill_once" and (self.written or self.optional):
            expected = "a Padding.fill_once() buffer is neither staged nor written"
            do = "use Padding.zero() or Padding.fill(v) for a buffer whose contents change"
            found = f"optional={self.optional}, written={self.written}"
            raise self._wrong(expected, found, do)
        if any(size < 0 for size in self.shape if isinstance(size, int)):
            raise self._wrong("sizes of 0 or more", f"shape {self.shape}", "correct the shape")

    def _wrong(self, expected: str, found: str, do: str, field: str = "") -> StaticBufferError:
        subject = f"{field}static buffer {shown(self.name)}"
        return StaticBufferError(subject, expected=expected, found=found, do=do)

    @property
    def policy(self) -> Padding:
        """The padding in force: the declared one, or the dtype's default."""
        assert self.padding is not None, "the default is filled in at declaration"
        return self.padding

    @property
    def pads_narrower(self) -> bool:
        """True if values may be narrower than the numbers of ``shape``."""
        return not (self._has_default and self.policy == _DEFAULT)

    @property
    def _has_default(self) -> bool:
        """True if padding need not be declared: 0 is harmless, or there is none without axes."""
        return self.dtype.is_floating_point or self.dtype.is_complex or not self.axes

    def is_narrower(self, shape: Sequence[int], whole: Sequence[int]) -> bool:
        """True for a shape that differs from ``whole`` only by what padding fills in."""
        return (
            self.pads_narrower
            and len(shape) == len(whole)
            and all(
                size == full or (isinstance(declared, int) and size < full)
                for size, full, declared in zip(shape, whole, self.shape, strict=True)
            )
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The named axes of the shape, in order."""
        return tuple(size for size in self.shape if isinstance(size, str))


def _holds(dtype: torch.dtype, value: float | int | bool) -> bool:
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    return not isinstance(value, float) and limits.min <= value <= limits.max


class Buffer:
    """One allocation and its cached views."""

    def __init__(self, spec: BufferSpec, capacity: Mapping[str, int], device: torch.device) -> None:
        self.spec = spec
        shape = self.box(capacity)
        try:
            self.tensor = torch.full(shape, spec.policy.value, dtype=spec.dtype, device=device)
        except (RuntimeError, TypeError) as error:  # Of TypeError: a size of more than 64 bits.
            raise StaticBufferError(
                f"static buffer {spec.name!r} of shape {shown(shape)}",
                expected=f"memory of {device} for as many {spec.dtype}",
                found=str(error).partition("\n")[0][:200],
                do="declare a smaller shape, sizes or capacity",
            ) from error
        self.views: dict[Box, torch.Tensor] = {}

    def box(self, sizes: Mapping[str, int]) -> Box:
        """The shape at these sizes."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.spec.shape)

    def view(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """The prefix at these sizes; the same object as long as it stays cached."""
        box = self.box(sizes)
        view = self.views.get(box)
        if view is None:
            view = self.tensor[tuple(slice(0, size) for size in box)]
            remember(self.views, box, view)
        return view

    def difference(self, dirty: Box, real: Box) -> list[torch.Tensor]:
        """Views of what lies in the box ``dirty`` and not in ``real``; no element twice."""
        views = []
        inside: list[slice] = []
        for dim, (was, now) in enumerate(zip(dirty, real, strict=True)):
            if was > now:
                rest = (slice(0, size) for size in dirty[dim + 1 :])
                views.append(self.tensor[(*inside, slice(now, was), *rest)])
            inside.append(slice(0, min(was, now)))
        return views


@dataclass(slots=True, eq=False)
class PaddingGroup:
    """Buffers whose real sizes always change together, and which of their rows hold stale data.

    ``dirty`` is a size for each of ``axes``: outside that box every buffer holds its pad value.
    None: they hold it everywhere. ``name``: the optional input that alone makes up the group.
    """

    axes: tuple[str, ...]
    name: str | None
    written: bool
    buffers: list[Buffer] = field(default_factory=list)
    dirty: Box | None = None
    fills: dict[tuple[Box, Box | None], _Fills] = field(default_factory=dict)
    """(dirty, real) -> what fills the difference. Empty while nothing shrinks."""

    def box(self, sizes: Mapping[str, int]) -> Box:
        """The sizes of this group's axes, in order."""
        return tuple(sizes[axis] for axis in self.axes)

    def mark_dirty(self, sizes: Mapping[str, int]) -> None:
        """Note that anything up to ``sizes`` may be written, beside what is dirty already."""
        box = self.box(sizes)
        self.dirty = box if self.dirty is None else tuple(map(max, self.dirty, box))

    def refill(self, dirty: Box, real: Box | None) -> None:
        """Write the pad value wherever ``dirty`` reaches beyond ``real``, and nowhere else."""
        fills = self.fills.get((dirty, real))
        if fills is None:
            fills = self._fills(dirty, real)
            remember(self.fills, (dirty, real), fills)
        for fill in fills:
            fill()

    def _fills(self, dirty: Box, real: Box | None) -> _Fills:
        """One fill for all zeros of a dtype, and one for each other view."""
        zeros: dict[torch.dtype, list[torch.Tensor]] = {}
        others: _Fills = []
        was = dict(zip(self.axes, dirty, strict=True))
        for buffer in self.buffers:
            if real is None:
                views = [buffer.view(was)]
            else:
                now = dict(zip(self.axes, real, strict=True))
                views = buffer.difference(buffer.box(was), buffer.box(now))
            if buffer.spec.policy.value == 0:
                zeros.setdefault(buffer.spec.dtype, []).extend(views)
            else:
                others += [partial(view.fill_, buffer.spec.policy.value) for view in views]
        grouped = [partial(torch._foreach_zero_, views) for views in zeros.values() if views]
        return [*grouped, *others]


def group_padding(buffers: Iterable[Buffer]) -> list[PaddingGroup]:
    """Group the padded buffers by what decides their real sizes: axes, absence, replays."""
    groups: dict[tuple[Any, ...], PaddingGroup] = {}
    for buffer in buffers:
        spec = buffer.spec
        if spec.policy.kind not in ("keep", "fill_once"):
            place = tuple(dict.fromkeys(spec.axes)), spec.name if spec.optional else None
            group = groups.setdefault((*place, spec.written), PaddingGroup(*place, spec.written))
            group.buffers.append(buffer)
    return list(groups.values())


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep ``value``; a full cache is emptied, because what it holds is cheap to make again."""
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value

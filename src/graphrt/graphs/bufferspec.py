"""What a static buffer is: its shape over named axes, its dtype, and what its padding holds."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

from graphrt.errors import PaddingRequiredError, StaticBufferError


@dataclass(frozen=True, slots=True)
class Padding:
    """What the rows from the real to the padded size hold. Made by the four names below."""

    kind: Literal["keep", "zero", "sentinel", "fill_once"]
    value: float | int | bool = 0

    def __repr__(self) -> str:
        name = self.kind.upper()
        return f"{name}({self.value!r})" if self.kind in ("sentinel", "fill_once") else name


KEEP = Padding("keep")
"""Left as they are: only for inputs whose tail is proven unread."""

ZERO = Padding("zero")
"""0, the default of floating and complex dtypes."""


def SENTINEL(value: float | int | bool) -> Padding:  # noqa: N802 - stands beside KEEP and ZERO
    """``value``: slot -1, or the index of a reserved sink."""
    return Padding("sentinel", value)


def FILL_ONCE(value: float | int | bool) -> Padding:  # noqa: N802 - stands beside KEEP and ZERO
    """The whole buffer holds ``value`` from its allocation on and is never staged."""
    return Padding("fill_once", value)


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One static input: ``shape`` entries are numbers or names of axes that a batch pads.

    An ``optional`` input may be left out of a step and then counts as 0 rows. A buffer that the
    graph itself writes must say ``written``, because every replay then dirties its padding.

    Errors: ``PaddingRequiredError`` for an integer or bool dtype without ``padding`` (0 is a live
    index there: the padded rows of a batch would write into whatever slot 0 belongs to; SGLang
    #10892, AReno #509); ``StaticBufferError`` for a padding value that the dtype cannot hold.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    padding: Padding | None = None
    _: KW_ONLY
    optional: bool = False
    written: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.padding is None:
            if not (self.dtype.is_floating_point or self.dtype.is_complex):
                raise PaddingRequiredError(
                    f"static buffer {self.name!r}",
                    expected=f"an explicit padding, because 0 is a live value of {self.dtype}",
                    found="padding=None",
                    do="declare ZERO or SENTINEL(v), or KEEP if nothing reads padded rows",
                )
            object.__setattr__(self, "padding", ZERO)
        if not _holds(self.dtype, self.policy.value):
            raise StaticBufferError(
                f"static buffer {self.name!r}",
                expected=f"a padding value that {self.dtype} can hold",
                found=repr(self.policy),
                do="choose another value or dtype",
            )
        if self.policy.kind == "fill_once" and (self.written or self.optional):
            raise StaticBufferError(
                f"static buffer {self.name!r}",
                expected="a FILL_ONCE buffer is neither staged nor written",
                found=f"optional={self.optional}, written={self.written}",
                do="use ZERO or SENTINEL(v) for a buffer whose contents change",
            )
        if any(size < 0 for size in self.shape if isinstance(size, int)):
            raise StaticBufferError(
                f"static buffer {self.name!r}",
                expected="sizes of 0 or more",
                found=f"shape {self.shape}",
                do="correct the shape",
            )

    @property
    def policy(self) -> Padding:
        """The padding in force: the declared one, or the dtype's default."""
        assert self.padding is not None, "the default is filled in at declaration"
        return self.padding

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

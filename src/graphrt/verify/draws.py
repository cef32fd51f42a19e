"""Lets a padded and an unpadded run of one callable draw the same random numbers for each row.

Generators give other numbers for another number of rows, so that nothing of two such runs could be
compared otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphrt.device.torch_modes import LookingMode, is_for_parts
from graphrt.values import tensors_of

_ENOUGH = 4096
"""Numbers that are skipped, so that few rows do not draw the same ones again."""
_aten = torch.ops.aten
_DRAW_ALIKE = (
    "rand randn randint randperm rand_like randn_like randint_like uniform uniform_ random random_ "
    "normal_ normal_functional exponential exponential_ geometric geometric_ cauchy cauchy_ "
    "log_normal log_normal_"
)
_PLAIN = frozenset(_DRAW_ALIKE.split())
"""Operators of ``aten`` that draw each element alike, whatever their tensors hold."""
_PLAIN_FORMS = (_aten.bernoulli.p, _aten.bernoulli_.float, _aten.normal.float_float)
"""Those of which other overloads look at what tensors hold."""


class SameDraws(LookingMode):
    """Gives the run that it is entered for next the random numbers of the one before, cut to it.

    Enter it for a padded run, then for unpadded ones. Numbers that follow from what tensors hold
    (dropout, a choice by probabilities) are computed from drawn noise in all of these runs.

    ``sizes``: each pair of a padded and a real size that dimensions of noise may have.
    ``generators``: where the callable draws from. ``number``: another one gives other numbers.
    ``unlike``: what made it impossible, in words; empty if nothing did. Runs go on all the same.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        generators: Sequence[torch.Generator],
        number: int,
    ) -> None:
        super().__init__()
        self.unlike = ""
        self._sizes, self._generators, self._number = {*sizes}, generators, number
        self._drawn: list[tuple[Any, torch.Tensor]] = []
        self._place: int | None = None
        """In ``_drawn``, of the next draw; None in the run that fills it."""
        self._stand: list[torch.Tensor] = []
        """Where the generators stand, as far as operators are known to have drawn."""

    def __enter__(self) -> SameDraws:
        for generator in self._number * [*self._generators]:
            torch.rand(_ENOUGH, generator=generator, device=generator.device)
        self._stand = self._states()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._require_known()
        if self._place is not None and self._place != len(self._drawn):
            self.unlike = self.unlike or "fewer draws in the unpadded batch"
        self._place = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if types and is_for_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self._require_known()
        form = _FORMS.get(func)
        if form is not None:
            result = form(self._noise, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
            name = func._schema.name.removeprefix("aten::")
            if func in _PLAIN_FORMS or (name in _PLAIN and "out" not in kwargs):
                self._share(func, [each for each in args if _is_number(each)], result)
            else:
                self._require_known(func._schema.name)
        self._stand = self._states()
        return result

    def _noise(self, of: torch.Tensor, *more: int) -> torch.Tensor:
        """Uniform numbers, in the shape ``of`` something and ``more`` dimensions in front."""
        found = torch.rand((*more, *of.shape), device=of.device)
        self._share("noise", more, found)
        return found

    def _share(self, what: object, numbers: Sequence[object], result: torch.Tensor) -> None:
        told = (what, *numbers)
        if self._place is None:
            self._drawn.append((told, result.clone()))
            return
        expected, drawn = self._drawn[self._place] if self._place < len(self._drawn) else ("", None)
        self._place += 1
        if drawn is None or expected != told or drawn.dim() != result.dim():
            self.unlike = self.unlike or f"other draws in the unpadded batch ({what})"
        elif all(
            whole == part or (whole, part) in self._sizes
            for whole, part in zip(drawn.shape, result.shape, strict=True)
        ):
            result.copy_(drawn[tuple(slice(size) for size in result.shape)])
        else:
            shapes = f"{tuple(drawn.shape)} padded, {tuple(result.shape)} unpadded"
            self.unlike = self.unlike or f"{what} draws {shapes}: which are of a row is not known"

    def _states(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self._generators]

    def _require_known(self, what: str = "code that no operator shows") -> None:
        for stood, stands in zip(self._stand, self._states(), strict=True):
            if not torch.equal(stood, stands):
                self.unlike = self.unlike or f"{what} draws"


def settle_choices(expected: Any, found: Any) -> None:
    """Take few other integers in ``found`` for those of ``expected``, in place: choices by chance
    between what rounding alone makes unequal. Below a quarter; a size changes more of them."""
    for one, other in zip(tensors_of(expected), tensors_of(found), strict=False):
        if one.shape == other.shape and one.dtype == other.dtype and not _is_inexact(one):
            num_other = int((one != other).sum())
            if 0 < num_other < one.numel() / 4:
                other.copy_(one)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


Noise = Callable[..., torch.Tensor]


def _dropout(noise: Noise, x: torch.Tensor, p: float, train: bool | None = True) -> Any:
    p = p if train or train is None else 0.0
    kept = noise(x) >= p
    scale = 1.0 / (1.0 - p) if p < 1.0 else 1.0
    return torch.where(kept, x * scale, torch.zeros_like(x)), kept


def _bernoulli(noise: Noise, p: torch.Tensor, **_: Any) -> torch.Tensor:
    return (noise(p) < p).to(p.dtype)


def _bernoulli_(noise: Noise, x: torch.Tensor, p: torch.Tensor, **_: Any) -> torch.Tensor:
    x.copy_(noise(x) < p)
    return x


def _multinomial(
    noise: Noise, p: torch.Tensor, num: int, replacement: bool = False, **_: Any
) -> torch.Tensor:
    if not replacement:
        found: torch.Tensor = torch.topk(p / -noise(p).log(), num, -1).indices
        return found
    chosen: torch.Tensor = (p / -noise(p, num).log()).argmax(-1)
    return chosen.movedim(0, -1)


def _normal(noise: Noise, mean: torch.Tensor, std: float = 1.0, **_: Any) -> torch.Tensor:
    # Quantiles, kept clear of 0 and 1, whose are infinite.
    found: torch.Tensor = mean + std * torch.special.ndtri(noise(mean).clamp(1e-7, 1 - 1e-7))
    return found.to(mean.dtype)


_FORMS: Mapping[Any, Callable[..., Any]] = {
    _aten.native_dropout.default: _dropout,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli_.Tensor: _bernoulli_,
    _aten.multinomial.default: _multinomial,
    _aten.normal.Tensor_float: _normal,
}
"""Operators that look at what tensors hold, computed from noise."""

"""Measures how far rounding alone may move the 16-bit results of a callable.

A tolerance by dtype has to admit deep models, which amplify roundings; in a shallow one it hides a
branch on the number of rows. So a difference between a padded run and the unpadded one is also
compared with what the unpadded run itself shows when every 16-bit operation rounds otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphrt.device.torch_modes import LookingMode, is_for_parts
from graphrt.values import storage_start, tensors_of
from graphrt.verify.compare import Comparison

_MARGIN = 4.0
"""How much further than other roundings moved a result other kernels may: these round sums in
their middle as well, which no operator shows."""
_NUM_UNITS = 2
"""Differences up to so many ``eps`` of the dtype are rounding: nothing is measured for them."""
_NUM_RUNS = 4
"""The most runs for one comparison: a choice between equals (an expert) falls otherwise in some."""


class Rounding:
    """What was measured of one callable: later keys are compared with it and need no run."""

    def __init__(self) -> None:
        self._share = 0.0

    def judge(
        self,
        compare: Callable[[Mapping[torch.dtype, float]], Comparison],
        tolerance: Mapping[torch.dtype, float],
        measure: Callable[[RoundedOtherwise], Comparison],
    ) -> Comparison:
        """``compare`` within ``tolerance``, in 16 bits within no more than rounding explains.

        ``measure``: compares an unpadded run inside the mode with one outside. It is called only
        for a difference that is larger than what was measured before explains.
        """
        for number in range(_NUM_RUNS):
            outcome = compare(self._limits(tolerance))
            if outcome.is_equal:
                return outcome
            mode = RoundedOtherwise(number)
            share = measure(mode).share_in_16_bits
            if math.isnan(share) or not mode.sees_roundings:
                share = math.inf
            self._share = max(self._share, share)
        return compare(self._limits(tolerance))

    def _limits(self, tolerance: Mapping[torch.dtype, float]) -> Mapping[torch.dtype, float]:
        return {dtype: self._limit(dtype, limit) for dtype, limit in tolerance.items()}

    def _limit(self, dtype: torch.dtype, limit: float) -> float:
        if not (dtype.is_floating_point and dtype.itemsize == 2):
            return limit
        return min(limit, max(_NUM_UNITS * torch.finfo(dtype).eps, _MARGIN * self._share))


class RoundedOtherwise(LookingMode):
    """Moves 16-bit floats that operators return by up to half a last bit, and rounds them again.

    Only in memory that was made meanwhile: weights and state stay as they are.

    ``sees_roundings``: False where nothing was moved, or an operator wrote into memory that none
    made, as in code that Inductor compiled: its kernels round where no operator shows it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._num_moved = 0
        self._made_elsewhere = False
        self._made: set[int] = set()
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def sees_roundings(self) -> bool:
        return self._num_moved > 0 and not self._made_elsewhere

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if types and is_for_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        before = {*map(storage_start, given)}
        written = map(storage_start, tensors_of(kwargs.get("out")))
        self._made_elsewhere |= any(start not in self._made for start in written)
        result = func(*args, **kwargs)
        returned = tensors_of(result)
        fresh = [tensor for tensor in returned if storage_start(tensor) not in before]
        self._made |= {*map(storage_start, fresh)}
        if func._schema.is_mutable:
            fresh += [tensor for tensor in given if storage_start(tensor) in self._made]
        for tensor in fresh:
            if tensor.is_floating_point() and tensor.dtype.itemsize == 2 and storage_start(tensor):
                self._move(tensor)
        return result

    def _move(self, tensor: torch.Tensor) -> None:
        generator = self._generators.get(tensor.device)
        if generator is None:  # Its own, so that no one else draws other numbers.
            generator = torch.Generator(tensor.device).manual_seed(self._seed)
            self._generators[tensor.device] = generator
        self._num_moved += 1
        moves = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        tensor.mul_(1 + torch.finfo(tensor.dtype).eps * (moves - 0.5))

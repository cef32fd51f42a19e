"""Launches Triton kernels for less host time.

Triton binds and specialises every argument at every call, which takes longer than most kernels of a
decode step run. A model asks for the same few variants all the time: they are looked up here.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton compiles a variant of its own for pointers that are not multiples of it."""

Grid = tuple[int, int, int]


class Launcher:
    """Launches ``kernel``, a ``triton.jit`` function: tensors first, then numbers, then constants.

    What Triton specialises on is in the look-up: dtypes, alignment, device, and the value of every
    number and constant. Its global knobs are not: they are read at a variant's first launch.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[int, ...],
        num_warps: int,
    ) -> None:
        """Launch on the current stream of the current device, where ``tensors`` lie."""
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        if addresses % ALIGNMENT:
            self._kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps)
            return
        dtypes = [tensor.dtype for tensor in tensors]
        variant = (numbers, constants, num_warps, tensors[0].device, *dtypes)
        compiled = self._variants.get(variant)
        if compiled is None:
            # Compiles, launches, and returns what was compiled.
            launched = self._kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps)
            self._variants[variant] = launched
        else:
            compiled[grid](*tensors, *numbers, *constants)

"""Launches Triton kernels in less host time.

Triton binds and specialises every argument at every call, which takes longer than most kernels of a
decode step run. A model launches the same few variants again and again: they are looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from copy import copy
from functools import cache, reduce
from importlib import import_module
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphrt_llm.background import Future, in_thread

ALIGNMENT = 16
"""Bytes. Triton compiles another variant for pointers that are not multiples of it."""

Grid = tuple[int, int, int]

EARLY = "EARLY"
"""The last parameter of a kernel that may start while the one before it still runs: if it is true,
the kernel waits (``gdc_wait``) before it writes anything, and before it reads what the one before
may write: it may begin with weights, and with inputs of the step."""


@cache
def power_of_2(length: int) -> int:
    """The next one. Triton's own function is for kernels too, and takes longer than a launch."""
    return 1 << (length - 1).bit_length()


@cache
def hash_triton() -> Future[object]:
    """Begin what Triton's first look into its cache of kernels needs: a hash of its own code, and
    the version of its assembler.

    That is a library of 400 MB, 0.4 s, and two runs of a process: nearly all of it is outside of
    the interpreter's lock.
    """
    from triton.compiler import compiler
    from triton.runtime import cache as of_triton, driver

    backend = in_thread(lambda: compiler.make_backend(driver.active.get_current_target()).hash())
    # A release that has the function elsewhere hashes in the first launch.
    triton_key = getattr(of_triton, "triton_key", lambda: None)
    hashed: Future[object] = in_thread(lambda: (triton_key(), backend.result()))
    with suppress(ImportError):  # What a first launch imports too, in releases that have it.
        import_module("triton.experimental.gluon.nvidia.hopper")
    return hashed


def starts_early(device: torch.device) -> bool:
    """Whether kernels can start so on ``device``, the current one: NVIDIA, capability 9 or more."""
    if device.type != "cuda":
        return False
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


# One call in C for all tensors of a launch.
_address_of = torch.Tensor.data_ptr
_dtype_of = attrgetter("dtype")


class _Variant(NamedTuple):
    """A compiled kernel, and how it is launched: grid, stream, ``before``, addresses, ``after``."""

    kernel: Any
    """Kept, because some releases unload the code from the device together with it."""
    launch: Callable[..., None]
    before: tuple[Any, ...]
    after: tuple[float, ...]


class Launcher:
    """Launches ``kernel``, a ``triton.jit`` function: tensors first, then numbers, then constants,
    then ``EARLY``, if it has that.

    Everything that Triton specialises on is in the look-up: dtypes, alignment, device, and the
    value of every number and constant. So numbers must be those of a model and not of a batch, or
    marked ``do_not_specialize`` and few, and each has one type at all calls. Triton reads its knobs
    and calls its launch hooks at a variant's first launch only.

    ``stream_of(device_index)``: the handle of a device's current stream. None: asks Triton.
    """

    def __init__(self, kernel: Any, stream_of: Callable[[int | None], int] | None = None) -> None:
        self._kernel = kernel
        self._stream_of = stream_of
        self._may_start_early = EARLY in getattr(kernel, "arg_names", ())
        self._variants: dict[Hashable, _Variant] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[int, ...],
        num_warps: int,
        early: bool = True,
    ) -> None:
        """Launch on the current stream of the current device, that of ``tensors``.

        ``early``: start while the kernel before still runs, where kernel and device can.
        """
        addresses = [*map(_address_of, tensors)]
        device = tensors[0].device
        variant = (numbers, constants, num_warps, early, device, *map(_dtype_of, tensors))
        compiled = self._variants.get(variant)
        if compiled is None or reduce(or_, addresses) % ALIGNMENT:
            self._launch_by_triton(variant, grid, addresses, tensors)
            return
        # Addresses, because of a tensor Triton asks ``data_ptr``, and the driver what it is.
        stream = self._stream_of(device.index)  # type: ignore[misc]  # set with the first variant
        compiled.launch(*grid, stream, *compiled.before, *addresses, *compiled.after)

    def _launch_by_triton(
        self, variant: Any, grid: Grid, addresses: list[int], tensors: tuple[Tensor, ...]
    ) -> None:
        """Compile if needed, launch, and keep the compiled variant if later launches may use it."""
        if tensors[0].is_cuda:
            hash_triton().result()
        numbers, constants, num_warps, early, *_ = variant
        options: dict[str, Any] = {"num_warps": num_warps}
        if self._may_start_early:
            early = early and starts_early(tensors[0].device)
            constants = (*constants, early)
            if early:
                options["launch_pdl"] = True  # Programmatic dependent launch.
        compiled = self._kernel[grid](*tensors, *numbers, *constants, **options)
        # Unaligned pointers are another variant; and Triton's interpreter compiles nothing.
        if compiled is None or reduce(or_, addresses) % ALIGNMENT:
            return
        if self._stream_of is None:
            from triton.runtime import driver

            self._stream_of = driver.active.get_current_stream
        launch = _launch_of(compiled.run, compiled.function, compiled.packed_metadata)
        self._variants[variant] = _Variant(compiled, *launch, (*numbers, *constants))


def _launch_of(
    run: Any, function: Any, metadata: Any
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What Triton's launcher ``run`` calls in the end, and what that takes between the stream and
    the addresses.

    The launcher looks for scratch memory at each launch, which takes longer than the rest and which
    few kernels have. What it passes on differs by release, so that a copy of it is asked. ``run``
    itself where that does not say.
    """
    before = (function, metadata, None, None, None)
    grid_and_stream = (1, 1, 1, 0)
    asked, passed = copy(run), list[tuple[Any, ...]]()
    if asked is run or not hasattr(run, "launch"):
        return run, before
    with suppress(Exception):  # Whatever another release says to that.
        asked.launch = lambda *args: passed.append(args)
        asked(*grid_and_stream, *before)
    for args in passed:
        added = args[5:-4]
        is_known = args == (*grid_and_stream, function, *added, *before[1:])
        if is_known and all(one is None or isinstance(one, int) for one in added):
            return run.launch, args[4:]
    return run, before

"""Products of few rows and a matrix in Triton, fused with what comes before or after them.

A program owns a few rows of the matrix and reads them once, for all rows of the input. Up to
``MAX_ROWS`` no tensor cores: they need at least 8 rows, and the time is that of reading the matrix.
"""

# Triton reads the annotations of a kernel and accepts only its own.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from graphrt_llm.kernels.launching import Launcher, power_of_2

MAX_ROWS = 4

MAX_ELEMENTS = {1: 2**62, 2: 2**26, 4: 2**22}
"""By rows of input: the largest matrix for which this is faster than cuBLAS and the launches around
it, as measured on an H200. Each further row costs arithmetic, of which tensor cores have plenty."""
MAX_ADDED_ROWS = 16
"""For a product that is added, on tensor cores, of at most ``NARROW`` outputs. Us on an H200 at 8
and at 16 rows, this and cuBLAS: 2048 x 1024 3.8 and 5.9, 3.4 and 5.5; 3072 x 1024 5.0 and 6.9, 4.1
and 7.0. With more outputs cuBLAS is faster: 14336 x 4096 35.6 and 32.7 at 16 rows."""
MAX_EARLY = 2**23
"""Elements of a matrix up to which it pays to begin while the kernel before runs. Us at 1 row on an
H200, 1024 x 4096, 2048 x 1024, 3072 x 1024: 4.2, 2.8, 3.7 instead of 4.7, 3.9, 4.4; 4096 x 6144:
17.6 instead of 15.5."""
GATED_SHARE = 8
"""A gated product has twice the arithmetic per output: from two rows on its limit is lower."""


def _fetch_block(weight, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:  # noqa: N803
    """Begin to read the first block of ``rows`` into the L2 cache.

    Weights do not change: they may be on their way while the kernel before still runs.
    """
    NUM_LINES: tl.constexpr = (BLOCK + 63) // 64  # noqa: N806 - of 128 bytes
    element = tl.minimum(tl.arange(0, NUM_LINES) * 64, WIDTH - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [(weight + rows[:, None] * WIDTH + element[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


_fetch = triton.jit(_fetch_block)


def _product(
    x,
    norm,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    x_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    NUM_STAGES: tl.constexpr,  # noqa: N803
    HAS_NORM: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    IS_GATED: tl.constexpr,  # noqa: N803
    ADDS: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    element = tl.arange(0, BLOCK)
    is_output = output < num_outputs
    is_row = row < num_rows
    # Outputs past the end repeat the last one, so that the loop needs no mask for them.
    last = tl.minimum(output, num_outputs - 1).to(tl.int64)
    matrix = weight + last[:, None] * WIDTH + element[None, :]
    gated = weight + (last + num_outputs)[:, None] * WIDTH + element[None, :]
    source = x + row[:, None].to(tl.int64) * x_stride + element[None, :]

    if EARLY:
        _fetch(weight, last, WIDTH, BLOCK)
        if IS_GATED:
            _fetch(weight, last + num_outputs, WIDTH, BLOCK)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((ROWS, OUTPUTS, BLOCK), tl.float32)
    other = tl.zeros((ROWS, OUTPUTS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=NUM_STAGES):
        if WIDTH % BLOCK == 0:
            values = tl.load(source + start, mask=is_row[:, None], other=0.0)
            part = tl.load(matrix + start)
            if IS_GATED:
                second = tl.load(gated + start)
            if HAS_NORM:
                factors = tl.load(norm + start + element)
        else:
            inside = start + element < WIDTH
            values = tl.load(source + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            part = tl.load(matrix + start, mask=inside[None, :], other=0.0)
            if IS_GATED:
                second = tl.load(gated + start, mask=inside[None, :], other=0.0)
            if HAS_NORM:
                factors = tl.load(norm + start + element, mask=inside, other=0.0)
        values = values.to(tl.float32)
        if HAS_NORM:
            # A whole row is divided by its root mean square: once, at the end.
            squares += values * values
            values *= factors.to(tl.float32)[None, :]
        total += values[:, None, :] * part.to(tl.float32)[None, :, :]
        if IS_GATED:
            other += values[:, None, :] * second.to(tl.float32)[None, :, :]

    result = tl.sum(total, 2)
    gate_up = tl.sum(other, 2)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[:, None]
        result *= scale
        gate_up *= scale
    if HAS_BIAS:
        result += tl.load(bias + last).to(tl.float32)[None, :]
        if IS_GATED:
            gate_up += tl.load(bias + num_outputs + last).to(tl.float32)[None, :]
    if IS_GATED:
        result = result * tl.sigmoid(result) * gate_up
    target = out + row[:, None].to(tl.int64) * out_stride + output[None, :]
    is_inside = is_row[:, None] & is_output[None, :]
    if ADDS:
        result += tl.load(target, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=is_inside)


def _add_product(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    x_stride,
    out_stride,
    WIDTH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    NUM_STAGES: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    element = tl.arange(0, BLOCK)
    last = tl.minimum(output, num_outputs - 1).to(tl.int64)
    if EARLY:
        _fetch(weight, last, WIDTH, BLOCK)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Rows past the end repeat the last one: nothing is stored of them.
    source = tl.minimum(row, num_rows - 1)[:, None].to(tl.int64) * x_stride + element[None, :]
    matrix = last[:, None] * WIDTH + element[None, :]
    # Each warp computes a part of the sums, so that few outputs keep several warps busy.
    total = tl.zeros((PARTS, ROWS, OUTPUTS), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=NUM_STAGES):
        if WIDTH % BLOCK == 0:
            values = tl.load(x + source + start)
            part = tl.load(weight + matrix + start)
        else:
            inside = (start + element < WIDTH)[None, :]
            values = tl.load(x + source + start, mask=inside, other=0.0)
            part = tl.load(weight + matrix + start, mask=inside, other=0.0)
        values = tl.permute(tl.reshape(values, (ROWS, PARTS, BLOCK // PARTS)), (1, 0, 2))
        part = tl.permute(tl.reshape(part, (OUTPUTS, PARTS, BLOCK // PARTS)), (1, 2, 0))
        total = tl.dot(values, part, total)

    result = tl.sum(total, 0)
    if HAS_BIAS:
        result += tl.load(bias + last).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * out_stride + output[None, :]
    is_inside = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    result += tl.load(target, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=is_inside)


# One compilation for every number of rows that a tile holds.
_launch_product = Launcher(triton.jit(_product, do_not_specialize=["num_rows"]))
_launch_add_product = Launcher(triton.jit(_add_product, do_not_specialize=["num_rows"]))


class Tiling(NamedTuple):
    """How a product is split among programs."""

    outputs: int
    """Rows of the matrix that a program owns; twice as many where it is gated."""
    block: int
    """Elements of each that it reads at a time."""
    num_warps: int


ADDED_OUTPUTS, ADDED_BLOCK, ADDED_PARTS, ADDED_STAGES = 8, 512, 4, 4
NUM_STAGES = 3
NARROW = 2048
"""Outputs up to which there are too few programs of the usual size to keep every SM reading."""

# By rows of input, the fastest found on an H200 over the shapes of Qwen3-0.6B, Llama-1B and -8B.
_GATED = {1: Tiling(2, 1024, 2), 2: Tiling(2, 512, 2), 4: Tiling(2, 256, 2)}
_NARROW = {1: Tiling(4, 1024, 4), 2: Tiling(4, 512, 4), 4: Tiling(4, 512, 4)}
_WIDE = {1: Tiling(8, 512, 2), 2: Tiling(8, 512, 4), 4: Tiling(4, 256, 2)}


def serves(x: Tensor, weight: Tensor, *, is_gated: bool = False) -> bool:
    """Whether this is the faster way to put ``x`` [rows, width] through ``weight``.

    False where ``weight`` has another layout than ``Kernels`` says, as a loaded one may have.
    """
    num_rows = x.shape[0]
    if not 0 < num_rows <= MAX_ROWS or weight.stride() != (1, weight.shape[0]):
        return False
    rows = power_of_2(num_rows)
    share = GATED_SHARE if is_gated and rows > 1 else 1
    return weight.numel() <= MAX_ELEMENTS[rows] // share


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    adds: bool = False,
) -> None:
    """Write to ``out`` [rows, outputs], or add to it, ``x`` [rows, width] through ``weight``.

    ``norm`` [width]: each row of ``x`` is first divided by its root mean square and multiplied by
    it. ``is_gated``: ``weight`` [width, 2 * outputs] holds gate, then up; the result is
    silu(gate) * up. At most ``MAX_ROWS`` rows. Matrices are as ``Kernels`` says; rows of ``x`` and
    ``out`` may be strided.
    """
    num_rows, width = x.shape
    num_outputs = out.shape[1]
    rows = power_of_2(num_rows)
    tiling = (_GATED if is_gated else _NARROW if num_outputs <= NARROW else _WIDE)[rows]
    _launch_product(
        (-(-num_outputs // tiling.outputs), 1, 1),
        # ``x`` is a placeholder pointer where there is no norm or bias: it is then never read.
        (x, x if norm is None else norm, weight, x if bias is None else bias, out),
        (num_rows, num_outputs, x.stride(0), out.stride(0), eps),
        (
            width,
            rows,
            tiling.outputs,
            min(tiling.block, power_of_2(width)),
            NUM_STAGES,
            norm is not None,
            bias is not None,
            is_gated,
            adds,
        ),
        tiling.num_warps,
        early=weight.numel() <= MAX_EARLY,
    )


def adds(x: Tensor, weight: Tensor) -> bool:
    """Whether ``add_product`` is faster for ``x`` [rows, width] than ``serves`` and cuBLAS."""
    is_stored_so = weight.stride() == (1, weight.shape[0])
    return is_stored_so and weight.shape[1] <= NARROW and MAX_ROWS < x.shape[0] <= MAX_ADDED_ROWS


def add_product(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Add to ``residual`` [rows, outputs] ``x`` [rows, width] through ``weight``, on tensor cores.

    At most ``MAX_ADDED_ROWS`` rows; all else as in ``product``.
    """
    num_rows, width = x.shape
    num_outputs = residual.shape[1]
    _launch_add_product(
        (-(-num_outputs // ADDED_OUTPUTS), 1, 1),
        (x, weight, x if bias is None else bias, residual),
        (num_rows, num_outputs, x.stride(0), residual.stride(0)),
        (
            width,
            MAX_ADDED_ROWS,
            ADDED_OUTPUTS,
            ADDED_BLOCK,
            ADDED_PARTS,
            ADDED_STAGES,
            bias is not None,
        ),
        ADDED_PARTS,
    )

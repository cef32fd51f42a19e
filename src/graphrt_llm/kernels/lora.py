"""Adapters of few tokens in one Triton launch: both products, norm before, gate behind.

A program owns some outputs of one token. It reads the token's ``A`` whole, from the GPU's cache,
because another launch would take longer than reading it in every program, and its own part of
``B``. A token without an adapter reads neither. Everything is computed in float32.

Source: Chen et al. 2023 (Punica), for products gathered by token.
"""

# Triton reads the annotations of a kernel and accepts only its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from graphrt_llm.kernels.launching import Launcher, power_of_2

MAX_CHUNK = 4096
"""Most elements of a row that a program reads at a time: all loads on their way at once are faster
than one after the other."""
RANKS = 16
"""Rows of ``A`` and ``B`` that it reads at a time; most adapters have as many."""
WIDE = 2048
"""Elements of a row above which a program needs 16 warps to hold them, and owns 256 outputs; else
128."""
FEW_TOKENS = 8
"""Up to which narrow rows take 8 warps, not 4: less time for one program, more for many.

Us of a launch in a graph, 1 / 4 / 16 / 32 tokens, between the products of a 0.6B layer (H200): qkv
5.2 / 3.6 / 6.1 / 8.1, attention out 5.7 / 4.0 / 4.5 / 5.6, gate and up 7.6 / 6.0 / 9.0 / 12.3, down
7.2 / 5.5 / 5.8 / 5.9. With chunks of 1024 and 8 warps attention out took 7.2 / 5.6 / 5.8 / 6.0 and
down 8.5 / 7.0 / 7.2 / 7.4."""


@triton.jit
def _product(
    x,
    norm,
    a,
    b,
    is_used,
    rank,
    eps,
    WIDTH: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    HAS_NORM: tl.constexpr,  # noqa: N803
):
    number = tl.arange(0, RANKS)
    element = tl.arange(0, CHUNK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rank, RANKS):
        is_row = (is_used & (first + number < rank))[:, None]
        # Loaded before it is needed, so that both matrices arrive together.
        up_rows = b + (first + number)[:, None] * OUTPUTS + tl.arange(0, BLOCK)[None, :]
        up = tl.load(up_rows, mask=is_row, other=0.0)
        down = tl.zeros((RANKS,), tl.float32)
        squares = tl.zeros((CHUNK,), tl.float32)
        for start in range(0, WIDTH, CHUNK):
            inside = start + element < WIDTH
            values = tl.load(x + start + element, mask=inside, other=0.0).to(tl.float32)
            down_rows = a + (first + number)[:, None] * WIDTH + (start + element)[None, :]
            factors = tl.load(down_rows, mask=is_row & inside[None, :], other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += values * values
                values *= tl.load(norm + start + element, mask=inside, other=0.0).to(tl.float32)
            down += tl.sum(values[None, :] * factors, 1)
        if HAS_NORM:
            down *= tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        total += tl.sum(down[:, None] * up.to(tl.float32), 0)
    return total


def _add(
    x,
    norm,
    a,
    b,
    slots,
    ranks,
    out,
    gated,
    x_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    MAX_RANK: tl.constexpr,  # noqa: N803
    NUM_PARTS: tl.constexpr,  # noqa: N803
    FIRST_END: tl.constexpr,  # noqa: N803
    SECOND_END: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    HAS_NORM: tl.constexpr,  # noqa: N803
    IS_GATED: tl.constexpr,  # noqa: N803
) -> None:
    token = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    slot = tl.load(slots + token)
    is_used = slot >= 0
    # Rows above an adapter's rank are zero: where all are read at once, its rank is not waited for.
    rank = MAX_RANK
    if MAX_RANK > RANKS:
        rank = tl.load(ranks + slot, mask=is_used, other=0)
    source = x + token * x_stride
    # A part of the outputs has rows of its own, at the same offset in both matrices.
    part = (begin >= FIRST_END).to(tl.int64) + (begin >= SECOND_END).to(tl.int64)
    row = (slot * NUM_PARTS + part) * MAX_RANK
    target = out + token * out_stride + begin + tl.arange(0, BLOCK)
    if IS_GATED:
        gate = tl.load(target).to(tl.float32)
        gate += _product(
            source, norm, a + row * WIDTH, b + row * OUTPUTS + begin,
            is_used, rank, eps, WIDTH, OUTPUTS, BLOCK, CHUNK, RANKS, HAS_NORM,
        )  # fmt: skip
        up = tl.load(target + FIRST_END).to(tl.float32)
        row += MAX_RANK
        up += _product(
            source, norm, a + row * WIDTH, b + row * OUTPUTS + begin + FIRST_END,
            is_used, rank, eps, WIDTH, OUTPUTS, BLOCK, CHUNK, RANKS, HAS_NORM,
        )  # fmt: skip
        place = gated + token * FIRST_END + begin + tl.arange(0, BLOCK)
        tl.store(place, (gate * tl.sigmoid(gate) * up).to(gated.dtype.element_ty))
    elif is_used:
        total = tl.load(target).to(tl.float32)
        total += _product(
            source, norm, a + row * WIDTH, b + row * OUTPUTS + begin,
            is_used, rank, eps, WIDTH, OUTPUTS, BLOCK, CHUNK, RANKS, HAS_NORM,
        )  # fmt: skip
        tl.store(target, total.to(out.dtype.element_ty))


_launch_add = Launcher(triton.jit(_add))


def add_lora(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    ranks: Tensor,
    parts: Sequence[int],
    out: Tensor,
    gated: Tensor | None = None,
) -> None:
    """See ``Kernels.add_lora``."""
    tokens, width = x.shape
    outputs = sum(parts)
    # Of a gated pair a program computes both: the grid covers the first.
    columns = outputs if gated is None else parts[0]
    common = gcd(*parts)
    chunk = min(MAX_CHUNK, power_of_2(width))
    is_wide = chunk > WIDE
    block = min(256 if is_wide else 128, common & -common)
    num_warps = 16 if is_wide else 8
    if chunk < WIDE and tokens > FEW_TOKENS:
        num_warps = 4
    ends = [*accumulate(parts)][:-1]
    first, second = [*ends, outputs, outputs][:2]
    _launch_add(
        (tokens, columns // block, 1),
        # Placeholder pointers where there is no norm or gate: they are never used.
        (x, x if norm is None else norm, a, b, slots, ranks, out, out if gated is None else gated),
        (x.stride(0), out.stride(0), eps),
        (
            width,
            outputs,
            a.shape[1] // len(parts),
            len(parts),
            first,
            second,
            block,
            chunk,
            RANKS,
            norm is not None,
            gated is not None,
        ),
        num_warps,
    )

"""The kernels in Triton, except products of many rows. See ``Kernels`` for what each does.

A product of few rows takes the time of reading the matrix once, so one launch computes it together
with norm, gate or residual at no extra cost. cuBLAS computes products of many rows, with separate
launches before and after. Everything is computed in float32.
"""

# Triton reads the annotations of a kernel and accepts only its own.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

import graphrt_llm.kernels.eager as eager
import graphrt_llm.kernels.few_rows as few_rows
from graphrt_llm.kernels.launching import Launcher, power_of_2

MAX_BLOCK = 1024
"""Elements that one program of ``_silu_mul`` computes."""

ARGMAX_BLOCK, ARGMAX_WARPS = 16384, 32
"""Of a row. Us of this and of torch's on an H200, 1, 16, 64 and 200 rows of 151,936 logits: 8.0 and
8.3, 11.6 and 12.7, 13.0 and 23.7, 25.6 and 48.0."""

HEADS_TOGETHER = 16
"""Of a token, in one program of ``_rotate_and_store`` where there are ``MANY_HEADS`` in all."""
MANY_HEADS = 4096
"""Several for each warp that fits an H200 at once."""


def _rms_norm(
    x,
    weight,
    out,
    x_stride,
    width,
    eps,
    BLOCK: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    # A weight: it is on its way while the kernel before still runs.
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = values * scale * factors
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)


def _silu_mul(
    gate_up,
    out,
    width,
    BLOCK: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=inside)


def _rotate_and_store(
    heads,
    qk_norm,
    rotation,
    slots,
    slot_mapping,
    eps,
    num_heads,
    num_kv_heads,
    HAS_NORM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    # A program is some heads of a token, loaded in halves, because the rotation mixes these.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    num_all = num_heads + 2 * num_kv_heads
    width = 2 * HALF
    element = tl.arange(0, BLOCK)[None, :]
    inside = (element < HALF) & (head < num_all)
    source = heads + (token * num_all + head) * width + element
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)

    if tl.program_id(1) * HEADS < num_heads + num_kv_heads:
        is_rotated = inside & (head < num_heads + num_kv_heads)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        if HAS_NORM:
            mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / width
            scale = tl.rsqrt(mean + eps)[:, None]
            factors = qk_norm + head * width + element
            a = a * scale * tl.load(factors, mask=is_rotated, other=0.0).to(tl.float32)
            b = b * scale * tl.load(factors + HALF, mask=is_rotated, other=0.0).to(tl.float32)
        # Cosines of both halves, then sines; those of the first half are negated in the table.
        angles = rotation + token * 2 * width + element
        is_angle = element < HALF
        cos_a = tl.load(angles, mask=is_angle, other=0.0).to(tl.float32)
        cos_b = tl.load(angles + HALF, mask=is_angle, other=0.0).to(tl.float32)
        sin_a = tl.load(angles + width, mask=is_angle, other=0.0).to(tl.float32)
        sin_b = tl.load(angles + width + HALF, mask=is_angle, other=0.0).to(tl.float32)
        first = tl.where(is_rotated, (a * cos_a + b * sin_a).to(first.dtype), first)
        second = tl.where(is_rotated, (b * cos_b + a * sin_b).to(second.dtype), second)
        tl.store(source, first, mask=is_rotated)
        tl.store(source + HALF, second, mask=is_rotated)

    if (tl.program_id(1) + 1) * HEADS > num_heads:
        # A slot has the layout of a token: all keys, then all values. Of what is not finite, also
        # once it has the dtype of the cache, nothing is stored: it would stay behind in the slot.
        is_stored = inside & (head >= num_heads)
        target = slots + (slot * 2 * num_kv_heads + head - num_heads) * width + element
        first = first.to(slots.dtype.element_ty)
        second = second.to(slots.dtype.element_ty)
        first = tl.where(tl.abs(first.to(tl.float32)) < float("inf"), first, 0.0)
        second = tl.where(tl.abs(second.to(tl.float32)) < float("inf"), second, 0.0)
        tl.store(target, first, mask=is_stored)
        tl.store(target + HALF, second, mask=is_stored)


def _argmax(
    logits,
    out,
    stride,
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = column
    for start in range(0, WIDTH, BLOCK):
        inside = start + column < WIDTH
        source = logits + row * stride + start + column
        values = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
        # As by torch, what is no number is larger than any, and stays.
        is_larger = ~(values <= best) & (best == best)
        best = tl.where(is_larger, values, best)
        place = tl.where(is_larger, start + column, place)
    is_nan = best != best
    numbers = tl.where(is_nan, float("-inf"), best)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    is_found = tl.where(has_nan, is_nan, best == tl.max(numbers, 0))
    found = tl.min(tl.where(is_found, place, WIDTH - 1), 0)
    tl.store(out + row, found.to(tl.int64))


_launch_rms_norm = Launcher(triton.jit(_rms_norm))
_launch_silu_mul = Launcher(triton.jit(_silu_mul))
_launch_rotate_and_store = Launcher(triton.jit(_rotate_and_store))
_launch_argmax = Launcher(triton.jit(_argmax))


def norm_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    normed: Tensor,
    out: Tensor,
) -> None:
    if few_rows.serves(x, weight):
        few_rows.product(x, weight, bias, out, norm=norm, eps=eps)
        return
    _norm(x, norm, eps, normed)
    eager.linear(normed, weight, bias, out)


def norm_gate(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    normed: Tensor,
    gate_up: Tensor,
    gated: Tensor,
) -> None:
    if few_rows.serves(x, weight, is_gated=True):
        few_rows.product(x, weight, bias, gated, norm=norm, eps=eps, is_gated=True)
        return
    _norm(x, norm, eps, normed)
    eager.linear(normed, weight, bias, gate_up)
    rows, width = gated.shape
    block = min(MAX_BLOCK, power_of_2(width))
    _launch_silu_mul((rows, -(-width // block), 1), (gate_up, gated), (width,), (block,), 4)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if few_rows.serves(x, weight):
        few_rows.product(x, weight, bias, residual, adds=True)
        return
    if few_rows.adds(x, weight):
        few_rows.add_product(residual, x, weight, bias)
        return
    eager.add_linear(residual, x, weight, bias)


def _norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    rows, width = x.shape
    numbers = (x.stride(0), width, eps)
    _launch_rms_norm((rows, 1, 1), (x, weight, out), numbers, (power_of_2(width),), _warps(width))


def rotate_and_store(
    heads: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rotation: Tensor,
    slots: Tensor,
    slot_mapping: Tensor,
) -> None:
    num_tokens, num_rows, width = heads.shape
    num_kv_heads = slots.shape[2]
    # One head a program is the fastest for few tokens; for many, programs this short are more work
    # to start than to run.
    is_many = num_tokens * num_rows >= MANY_HEADS
    together = min(HEADS_TOGETHER, power_of_2(num_rows)) if is_many else 1
    _launch_rotate_and_store(
        (num_tokens, -(-num_rows // together), 1),
        # A placeholder pointer where there is no norm: the kernel never reads it.
        (heads, heads if qk_norm is None else qk_norm, rotation, slots, slot_mapping),
        (eps, num_rows - 2 * num_kv_heads, num_kv_heads),
        (qk_norm is not None, width // 2, power_of_2(width // 2), together),
        4 if is_many else 1,
    )


def argmax(logits: Tensor) -> Tensor:
    rows = logits.flatten(0, -2)
    out = torch.empty(rows.shape[0], dtype=torch.int64, device=logits.device)
    if rows.shape[0]:
        width = rows.shape[1]
        block = min(ARGMAX_BLOCK, power_of_2(width))
        grid = (rows.shape[0], 1, 1)
        _launch_argmax(grid, (rows, out), (rows.stride(0),), (width, block), ARGMAX_WARPS)
    return out.view(logits.shape[:-1])


@cache
def _warps(width: int) -> int:
    """Warps of a program that holds a whole row: about 8 elements a thread."""
    return min(16, max(1, power_of_2(width) // 256))

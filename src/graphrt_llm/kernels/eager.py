"""The kernels as PyTorch operations: any device, any dtype. See ``Kernels`` for what each does."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from graphrt_llm.models.rotary import rotate


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def norm_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    normed: Tensor,
    out: Tensor,
) -> None:
    # PyTorch's norm makes its own result.
    linear(F.rms_norm(x, norm.shape, norm, eps), weight, bias, out)


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
    norm_linear(x, norm, eps, weight, bias, normed, gate_up)
    gate, up = gate_up.chunk(2, -1)
    torch.mul(F.silu(gate), up, out=gated)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    # The product adds to its own result: no addition is a launch of its own.
    residual.addmm_(x, weight)
    if bias is not None:
        residual.add_(bias)


def turn_and_store(
    heads: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rotation: Tensor,
    slots: Tensor,
    slot_mapping: Tensor,
) -> None:
    num_tokens, num_heads, width = heads.shape
    num_rotated = num_heads - slots.shape[2]
    rotated = heads[:, :num_rotated]
    if qk_norm is None:
        rotate(rotated, rotation, out=rotated)
    else:
        # Values too, for nothing: the kernel would first copy a part into contiguous memory.
        normed = F.rms_norm(heads, (width,), None, eps)
        rotate(normed[:, :num_rotated].mul_(qk_norm), rotation, out=rotated)
    kv = heads[:, num_rotated - slots.shape[2] :].view(num_tokens, 2, -1, width)
    slots.index_copy_(0, slot_mapping, kv)

"""The kernels as PyTorch operations: any device, any dtype. See ``Kernels`` for what each does."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from graphrt_llm.models.rotary import rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


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

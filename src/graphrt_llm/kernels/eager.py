"""The kernels as PyTorch operations: any device, any dtype. See ``Kernels`` for what each does."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """The product in ``out``, or in a new tensor."""
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)


def norm_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    normed: Tensor,
    out: Tensor,
) -> None:
    # ``normed`` stays unused: PyTorch's norm allocates its own result.
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
    apply_gate(gate_up, gated)


def apply_gate(gate_up: Tensor, gated: Tensor) -> None:
    gate, up = gate_up.chunk(2, -1)
    torch.mul(F.silu(gate), up, out=gated)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    # ``addmm_`` adds the product in place, so that the addition is no launch of its own.
    residual.addmm_(x, weight)
    if bias is not None:
        residual.add_(bias)


def rotate_and_store(
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
        # The values are normalised too and dropped: a part alone would first be copied.
        normed = F.rms_norm(heads, (width,), None, eps)
        rotate(normed[:, :num_rotated].mul_(qk_norm), rotation, out=rotated)
    kv = heads[:, num_rotated - slots.shape[2] :].view(num_tokens, 2, -1, width)
    slots.index_copy_(0, slot_mapping, kv.nan_to_num_(0.0, 0.0, 0.0))


def argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def rotate(heads: Tensor, rotation: Tensor, out: Tensor | None = None) -> Tensor:
    """The rotated ``heads`` [tokens, num_heads, head_dim] in ``out``, perhaps the same, or new."""
    cos, sin = rotation.unbind(1)
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return torch.mul(heads, cos, out=out).addcmul_(swapped, sin)

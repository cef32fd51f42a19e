"""The table of rotary position embedding, and the turn itself.

Source: Su et al. 2021 (RoPE), in the half-split form of the Llama checkpoints: element ``i`` of a
head is paired with element ``i + head_dim / 2``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphrt_llm.models.config import Llama3Scaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position turns each pair by, [head_dim / 2] float32 on the CPU.

    In float32 whatever the model computes in, because checkpoints were trained with these
    roundings: at position 100,000 an exact angle is another angle.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is None:
        return frequencies
    return _stretched(frequencies, config.rope_scaling)


def _stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    # 0 at the longest wavelengths, which are stretched, 1 at the shortest, which are left alone.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotary_table(config: ModelConfig) -> Tensor:
    """[max_position_embeddings, 2, 1, head_dim] float32 on the CPU: cosines, and signed sines.

    The first half of the sines is negated, so that a turn is ``x * cos + swap_halves(x) * sin``.
    The axis of 1 is for heads.
    """
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table[:, :, None]


def rotate(heads: Tensor, rotation: Tensor, out: Tensor) -> None:
    """Write ``heads`` [tokens, num_heads, head_dim], turned, to ``out``, which may be ``heads``.

    ``rotation``: the tokens' rows of the table, [tokens, 2, 1, head_dim].
    """
    cos, sin = rotation.unbind(1)
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    torch.mul(heads, cos, out=out).addcmul_(swapped, sin)

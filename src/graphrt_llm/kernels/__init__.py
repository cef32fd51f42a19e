"""What a decoder layer does between its matrix products, in one of two implementations.

``eager``: PyTorch's own operations, any device and dtype. ``triton``: the same in fewer launches,
for a GPU in half precision, where a decode step is as long as its list of kernels. They differ in
rounding only: Triton's compute in float32 and round once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graphrt_llm.kernels import eager


class Kernels(NamedTuple):
    """One implementation. A model picks it once, when it is made."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [rows, width], weight [width], eps) -> like x: each row over its root mean square."""
    silu_mul: Callable[[Tensor], Tensor]
    """(gate and up [rows, 2 * width]) -> silu(gate) * up [rows, width]."""
    turn_and_store: Callable[[Tensor, Tensor | None, float, Tensor, Tensor, Tensor], None]
    """(heads, qk_norm, eps, rotation, slots, slot_mapping): prepare the heads for attention.

    ``heads`` [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; queries and
    keys are normalised (where ``qk_norm`` [num_heads + num_kv_heads, head_dim] is given) and turned
    in place. ``rotation`` [tokens, 2, 1, head_dim]: the tokens' rows of the rotary table. Keys and
    values are copied to ``slots`` [num_slots, 2, num_kv_heads, head_dim] at ``slot_mapping``.
    """


EAGER = Kernels("eager", eager.rms_norm, eager.silu_mul, eager.turn_and_store)


def choose_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Triton's on a GPU in half precision, where it is installed; else PyTorch's."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not is_half or importlib.util.find_spec("triton") is None:
        return EAGER
    from graphrt_llm.kernels import fused

    return Kernels("triton", fused.rms_norm, fused.silu_mul, fused.turn_and_store)

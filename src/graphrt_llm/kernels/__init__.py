"""What a decoder layer computes beside attention, in one of two implementations.

``eager``: PyTorch's own operations, any device and dtype. ``triton``: the same in fewer launches,
for a GPU in half precision, where a decode step is as long as its list of kernels. They differ in
rounding only: Triton's compute in float32 and round less often.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graphrt_llm.kernels import eager


class Kernels(NamedTuple):
    """One implementation. A model picks it once, when it is made.

    Matrices are ``weight`` [in, out], in memory the transpose of that, so that what belongs to an
    output is contiguous; ``bias`` [out] or None. As a parameter of this shape a matrix needs no
    view of its own at each product. Rows of ``x`` and ``residual`` may be apart; all else is
    contiguous.
    """

    name: str
    norm_linear: Callable[[Tensor, Tensor, float, Tensor, Tensor | None, Tensor, Tensor], None]
    """(x [rows, in], norm [in], eps, weight, bias, normed, out [rows, out]).

    Each row over its root mean square, times ``norm``, through the matrix, goes to ``out``.
    ``normed`` [rows, in]: memory that may be written on the way."""
    norm_gate: Callable[
        [Tensor, Tensor, float, Tensor, Tensor | None, Tensor, Tensor, Tensor], None
    ]
    """(x [rows, in], norm [in], eps, weight [in, 2 * out], bias, normed, gate_up, gated).

    Gate and up are the halves of what ``norm_linear`` writes; silu(gate) * up goes to ``gated``
    [rows, out]. ``gate_up`` [rows, 2 * out], too, is memory that may be written on the way."""
    add_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
    """(residual [rows, out], x [rows, in], weight, bias): add to ``residual``, in place."""
    turn_and_store: Callable[[Tensor, Tensor | None, float, Tensor, Tensor, Tensor], None]
    """(heads, qk_norm, eps, rotation, slots, slot_mapping): prepare the heads for attention.

    ``heads`` [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; queries and
    keys are normalised (where ``qk_norm`` [num_heads + num_kv_heads, head_dim] is given) and turned
    in place. ``rotation`` [tokens, 2, 1, head_dim]: the tokens' rows of the rotary table. Keys and
    values are copied to ``slots`` [num_slots, 2, num_kv_heads, head_dim] at ``slot_mapping``.
    """


EAGER = Kernels("eager", eager.norm_linear, eager.norm_gate, eager.add_linear, eager.turn_and_store)


def choose_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Triton's on a GPU in half precision, where it is installed; else PyTorch's."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not is_half or importlib.util.find_spec("triton") is None:
        return EAGER
    from graphrt_llm.kernels import fused

    return Kernels(
        "triton", fused.norm_linear, fused.norm_gate, fused.add_linear, fused.turn_and_store
    )

"""What a decoder layer computes beside attention, in one of two implementations.

``eager``: PyTorch's operations, any device and dtype. ``triton``: the same in fewer launches, for a
GPU in half precision, where the number of kernels decides the time of a decode step. They differ in
rounding only: Triton's compute in float32 and round less often.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

import graphrt_llm.kernels.eager as eager


class AddLoRA(Protocol):
    """What adapters add to a projection, of few tokens."""

    def __call__(
        self,
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
        """Add to ``out`` what each token's adapter makes of ``x``, or of its normed rows.

        Shapes: ``x`` [tokens, in]; ``norm`` [in] or None; ``a`` [max_loras, rows, in] and ``b``
                [max_loras, rows, sum(parts)], of which each part has equally many rows, the first
                ``ranks`` [max_loras] int32 of them in use; ``slots`` [tokens] int64, -1 without an
                adapter; ``out`` [tokens, sum(parts)].
        ``gated`` [tokens, parts[0]]: gets silu(gate) * up instead, where gate and up are the halves
        of ``out`` with what adapters add to them; what is left in ``out`` has no meaning.
        """


class Kernels(NamedTuple):
    """One implementation; a model chooses it once, at construction.

    Matrices are ``weight`` [in, out], stored transposed, so that the weights of one output are
    contiguous and no product needs a transposed view; ``bias`` [out] or None. Rows of ``x`` and
    ``residual`` may be strided; all else is contiguous.
    """

    name: str
    norm_linear: Callable[[Tensor, Tensor, float, Tensor, Tensor | None, Tensor, Tensor], None]
    """(x [rows, in], norm [in], eps, weight, bias, normed, out [rows, out]).

    Each row over its root mean square, times ``norm``, through the matrix, goes to ``out``.
    ``normed`` [rows, in]: scratch memory."""
    norm_gate: Callable[
        [Tensor, Tensor, float, Tensor, Tensor | None, Tensor, Tensor, Tensor], None
    ]
    """(x [rows, in], norm [in], eps, weight [in, 2 * out], bias, normed, gate_up, gated).

    Gate and up are the halves of what ``norm_linear`` writes; silu(gate) * up goes to ``gated``
    [rows, out]. ``normed`` and ``gate_up`` [rows, 2 * out] are scratch memory."""
    add_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
    """(residual [rows, out], x [rows, in], weight, bias): add to ``residual``, in place."""
    rotate_and_store: Callable[[Tensor, Tensor | None, float, Tensor, Tensor, Tensor], None]
    """(heads, qk_norm, eps, rotation, slots, slot_mapping): prepare the heads for attention.

    ``heads`` [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values. Queries and
    keys are normalised (where ``qk_norm`` [num_heads + num_kv_heads, head_dim] is given) and
    rotated in place. ``rotation`` [tokens, 2, 1, head_dim]: the tokens' rows of the rotary table.
    Keys and values are copied to ``slots`` [num_slots, 2, num_kv_heads, head_dim] at
    ``slot_mapping``, with 0 for those that are not finite, because they would stay in the cache.
    """
    argmax: Callable[[Tensor], Tensor]
    """(logits [..., vocab_size]): where the largest is, the first of equals, [...] int64."""
    add_lora: AddLoRA | None = None
    """Adapters of few tokens in one launch; None: they are added by products of PyTorch."""


EAGER = Kernels(
    "eager",
    eager.norm_linear,
    eager.norm_gate,
    eager.add_linear,
    eager.rotate_and_store,
    eager.argmax,
)


def choose_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Triton's on a GPU in half precision, where it is installed; else PyTorch's."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not is_half or importlib.util.find_spec("triton") is None:
        return EAGER
    import graphrt_llm.kernels.launching as launching

    launching.hash_triton()  # While weights are loaded.
    import graphrt_llm.kernels.fused as fused
    import graphrt_llm.kernels.lora as lora

    return Kernels(
        "triton",
        fused.norm_linear,
        fused.norm_gate,
        fused.add_linear,
        fused.rotate_and_store,
        fused.argmax,
        lora.add_lora,
    )

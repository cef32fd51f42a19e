"""The kernels as a compiler traces them: plain torch, or operators that it keeps as they are.

Inductor fuses plain torch well around products that cuBLAS computes. Of few rows, one kernel of
this package computes product, norm, gate and residual together, and an operator calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import graphrt_llm.kernels.eager as eager
from graphrt import CustomOp
from graphrt_llm.kernels import Kernels

if TYPE_CHECKING:
    from graphrt.config import CompilePlan

MAX_ROWS = 4
"""Those that ``few_rows`` serves, which can be imported only where Triton is."""


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, out]: as ``Kernels.norm_linear``, in a new tensor."""
    return eager.linear(F.rms_norm(x, norm.shape, norm, eps), weight, bias)


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, out]: as ``Kernels.norm_gate``, in a new tensor."""
    gate, up = norm_linear(x, norm, eps, weight, bias).chunk(2, -1)
    return F.silu(gate) * up


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, out]: as ``Kernels.add_linear``, in a new tensor."""
    total = torch.addmm(residual, x, weight)
    return total if bias is None else total + bias


def rotate_and_store(
    heads: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rotation: Tensor,
    slots: Tensor,
    slot_mapping: Tensor,
) -> None:
    """As ``Kernels.rotate_and_store``."""
    num_tokens, num_heads, width = heads.shape
    num_rotated = num_heads - slots.shape[2]
    rotated = heads[:, :num_rotated]
    if qk_norm is not None:
        rotated = F.rms_norm(heads, (width,), None, eps)[:, :num_rotated] * qk_norm
    # All at once: a compiler then makes no copy of a part.
    heads.copy_(torch.cat((eager.rotate(rotated, rotation), heads[:, num_rotated:]), 1))
    kv = heads[:, num_rotated - slots.shape[2] :].view(num_tokens, 2, -1, width)
    slots.index_copy_(0, slot_mapping, kv.nan_to_num(0.0, 0.0, 0.0))


@CustomOp.register("norm_linear")
class NormLinear(CustomOp):
    """Norm and product in one kernel, of few rows."""

    operator = "graphrt_llm::norm_linear"
    largest_size = MAX_ROWS

    def forward_native(self, *args: Any) -> Tensor:
        return norm_linear(*args)


@CustomOp.register("norm_gate")
class NormGate(CustomOp):
    """Norm, product and gate in one kernel, of few rows."""

    operator = "graphrt_llm::norm_gate"
    largest_size = MAX_ROWS

    def forward_native(self, *args: Any) -> Tensor:
        return norm_gate(*args)


@CustomOp.register("add_linear")
class AddLinear(CustomOp):
    """Product and sum in one kernel, of few rows."""

    operator = "graphrt_llm::add_linear"
    largest_size = MAX_ROWS

    def forward_native(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        # The sum apart, for Inductor to fuse with the norm after it; in float32, because it puts a
        # plain one back into the product, with a copy of the residual before.
        total = residual.float() + torch.mm(x, weight)
        return (total if bias is None else total + bias).type_as(residual)


@CustomOp.register("rotate_and_store")
class RotateAndStore(CustomOp):
    """Norm of heads, rotation and the store to the cache in one kernel."""

    operator = "graphrt_llm::rotate_and_store"
    largest_size = MAX_ROWS

    def forward_native(self, *args: Any) -> None:
        rotate_and_store(*args)


class Operators(nn.Module):
    """What a decoder layer that is traced calls, by the rules of a plan.

    Where the model's kernels are Triton's, operations of two forms; else the plain functions.
    """

    def __init__(self, kernels: Kernels, plan: CompilePlan, device: torch.device) -> None:
        super().__init__()
        self.norm_linear: Callable[..., Tensor] = norm_linear
        self.norm_gate: Callable[..., Tensor] = norm_gate
        self.add_linear: Callable[..., Tensor] = add_linear
        self.rotate_and_store: Callable[..., None] = rotate_and_store
        if kernels.name == "triton":
            self.norm_linear = NormLinear(plan, device)
            self.norm_gate = NormGate(plan, device)
            self.add_linear = AddLinear(plan, device)
            self.rotate_and_store = RotateAndStore(plan, device)


def _register(
    kind: type[CustomOp],
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    written: Sequence[str] = (),
) -> None:
    torch.library.custom_op(kind.operator, mutates_args=written)(kernel).register_fake(fake)


def _norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    import graphrt_llm.kernels.fused as fused

    out = x.new_empty((x.shape[0], weight.shape[1]))
    fused.norm_linear(x, norm, eps, weight, bias, torch.empty_like(x), out)
    return out


def _norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    import graphrt_llm.kernels.fused as fused

    gate_up = x.new_empty((x.shape[0], weight.shape[1]))
    gated = x.new_empty((x.shape[0], weight.shape[1] // 2))
    fused.norm_gate(x, norm, eps, weight, bias, torch.empty_like(x), gate_up, gated)
    return gated


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    import graphrt_llm.kernels.few_rows as few_rows

    if not few_rows.serves(x, weight):
        return add_linear(residual, x, weight, bias)
    out = torch.empty_like(residual)
    few_rows.product(x, weight, bias, out, added=residual)
    return out


def _rotate_and_store(
    heads: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rotation: Tensor,
    slots: Tensor,
    slot_mapping: Tensor,
) -> None:
    import graphrt_llm.kernels.fused as fused

    fused.rotate_and_store(heads, qk_norm, eps, rotation, slots, slot_mapping)


_register(
    NormLinear,
    _norm_linear,
    lambda x, norm, eps, weight, bias: x.new_empty((x.shape[0], weight.shape[1])),
)
_register(
    NormGate,
    _norm_gate,
    lambda x, norm, eps, weight, bias: x.new_empty((x.shape[0], weight.shape[1] // 2)),
)
_register(AddLinear, _add_linear, lambda residual, x, weight, bias: torch.empty_like(residual))
_register(RotateAndStore, _rotate_and_store, lambda *args: None, ("heads", "slots"))

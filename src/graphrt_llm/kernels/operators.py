"""The kernels as a compiler traces them: plain torch, or operators that it keeps as they are.

Inductor fuses plain torch, but leaves products to cuBLAS and needs several kernels to prepare the
heads. A decode step of operators was faster at every number of requests that was measured.
"""

from __future__ import annotations

import sys
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

EVERY_SIZE = sys.maxsize
"""Measured on an H200, 0.6B shape: plain forms took 1.8 times as long at 1 request, 1.13 at 200.
The kernels of a prefill of 512, 2048 and 8192 tokens took 1.43, 1.58 and 1.58 times as long; with
plain norms and gates alone 1.09, 1.13 and 1.13."""


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, out]: as ``Kernels.norm_linear``, in a new tensor."""
    return eager.linear(F.rms_norm(x, norm.shape, norm, eps), weight, bias)


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, out]: as ``Kernels.norm_gate``, in a new tensor."""
    gate, up = norm_linear(x, norm, eps, weight, bias).chunk(2, -1)
    return F.silu(gate) * up


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
    """Norm and product, of few rows in one kernel."""

    operator = "graphrt_llm::norm_linear"
    largest_size = EVERY_SIZE

    def forward_native(self, *args: Any) -> Tensor:
        return norm_linear(*args)


@CustomOp.register("norm_gate")
class NormGate(CustomOp):
    """Norm, product and gate, of few rows in one kernel."""

    operator = "graphrt_llm::norm_gate"
    largest_size = EVERY_SIZE

    def forward_native(self, *args: Any) -> Tensor:
        return norm_gate(*args)


@CustomOp.register("add_linear")
class AddLinear(CustomOp):
    """Product and sum in one kernel."""

    operator = "graphrt_llm::add_linear"
    largest_size = EVERY_SIZE

    def forward_native(self, *args: Any) -> None:
        eager.add_linear(*args)


@CustomOp.register("rotate_and_store")
class RotateAndStore(CustomOp):
    """Norm of heads, rotation and the store to the cache in one kernel."""

    operator = "graphrt_llm::rotate_and_store"
    largest_size = EVERY_SIZE

    def forward_native(self, *args: Any) -> None:
        rotate_and_store(*args)


class Operators(nn.Module):
    """What a decoder layer that is traced calls, by the rules of a plan.

    Where the model's kernels are Triton's, operations of two forms; else the plain functions.
    """

    def __init__(self, kernels: Kernels, plan: CompilePlan, device: torch.device) -> None:
        super().__init__()
        ops: list[CustomOp] = []
        plain = (norm_linear, norm_gate, eager.add_linear, rotate_and_store)
        forms: Sequence[Callable[..., Any]] = plain
        if kernels.name == "triton":
            ops = [kind(plan, device) for kind in (NormLinear, NormGate, AddLinear, RotateAndStore)]
            forms = [op.form for op in ops]
        self.ops = nn.ModuleList(ops)
        self.norm_linear, self.norm_gate, self.add_linear, self.rotate_and_store = forms

    @property
    def are_all_kernels(self) -> bool:
        """Whether every one is the model's own kernel, so that a compiler has nothing to merge."""
        return len(self.ops) > 0 and all(op.is_optimized for op in self.ops)


_library = torch.library.Library("graphrt_llm", "FRAGMENT")


def _register(
    kind: type[CustomOp],
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    written: Sequence[str] = (),
) -> None:
    # Not by ``torch.library.custom_op``, whose calls take the host several times as long: steps
    # without a graph wait for it.
    name = kind.operator.partition("::")[2]
    schema = torch.library.infer_schema(kernel, mutates_args=written)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(kind.operator, fake, lib=_library)


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


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    import graphrt_llm.kernels.fused as fused

    fused.add_linear(residual, x, weight, bias)


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
_register(AddLinear, _add_linear, lambda *args: None, ("residual",))
_register(RotateAndStore, _rotate_and_store, lambda *args: None, ("heads", "slots"))

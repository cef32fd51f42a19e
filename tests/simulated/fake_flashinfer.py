"""Stands in for FlashInfer on a CPU: reads what the real one reads, computes it the slow way.

A wrapper made for CUDA graphs keeps the buffers that it was given, and reads them when it runs: so
do the kernels of a graph. The plan is whatever the latest call of ``plan`` said of the lengths.
"""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from graphrt_llm.attention import flashinfer


class _Event:
    def __init__(self, device: Any) -> None:
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last len(q) tokens of a sequence attend to everything up to themselves."""
    groups = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[-1])
    unseen = torch.ones(len(q), len(keys), dtype=torch.bool).triu(len(keys) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), values)


class _Wrapper:
    made: list[_Wrapper] = []  # noqa: RUF012 - emptied by install

    def __init__(self, workspace: Tensor, **options: Any) -> None:
        self.options = options
        self.is_static = options.get("use_cuda_graph", False)
        self.begins = options.get("paged_kv_indptr_buffer")
        self.last = options.get("paged_kv_last_page_len_buffer")
        self.blocks = options.get("paged_kv_indices_buffer")
        self.plans: list[str] = []
        self.made.append(self)

    def reset_workspace_buffer(self, workspace: Tensor, plan: Tensor) -> None:
        assert plan.dtype == torch.uint8

    def _keep(self, begins: Tensor, blocks: Tensor, last: Tensor) -> None:
        assert begins.dtype == blocks.dtype == last.dtype == torch.int32
        assert len(blocks) >= begins[-1]
        if self.is_static:
            assert len(last) == len(self.last), "a captured number of requests never changes"
        else:
            self.begins, self.blocks, self.last = begins.clone(), blocks.clone(), last.clone()

    def _run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor, ends: list[int]) -> None:
        assert ends[-1] == len(q) == len(out)
        assert out.is_contiguous()
        keys, values = kv
        size = keys.shape[1]
        begins = self.begins.tolist()
        for row, (begin, end) in enumerate(itertools.pairwise(begins)):
            length = (end - begin - 1) * size + int(self.last[row])
            blocks = self.blocks[begin:end].long()
            mine = slice(ends[row], ends[row + 1])
            out[mine] = _attend(
                q[mine], keys[blocks].flatten(0, 1)[:length], values[blocks].flatten(0, 1)[:length]
            )


class Decode(_Wrapper):
    def plan(
        self,
        begins: Tensor,
        blocks: Tensor,
        last: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
    ) -> None:
        self.plans.append("whole")
        self._keep(begins, blocks, last)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        self._run(q, kv, out, list(range(len(self.last) + 1)))


def fast_decode_plan(
    wrapper: Decode,
    begins: Tensor,
    blocks: Tensor,
    last: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    q_data_type: torch.dtype,
    global_override_indptr_cpu: Tensor,
) -> None:
    assert wrapper.plans, "a fast plan needs a whole one before it"
    wrapper.plans.append("fast")
    wrapper._keep(begins, blocks, last)


class Prefill(_Wrapper):
    def plan(
        self,
        ends: Tensor,
        begins: Tensor,
        blocks: Tensor,
        last: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        max_token_per_sequence: int,
    ) -> None:
        assert causal
        self.ends = ends.tolist()
        assert max_token_per_sequence == int(ends.diff().max())
        self._keep(begins, blocks, last)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        self._run(q, kv, out, self.ends)


def install(patch: pytest.MonkeyPatch) -> list[_Wrapper]:
    """Put the stand-in where ``import flashinfer`` finds it; returns the wrappers made from now."""
    decode, prefill = ModuleType("flashinfer.decode"), ModuleType("flashinfer.prefill")
    decode.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    decode.fast_decode_plan = fast_decode_plan  # type: ignore[attr-defined]
    prefill.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    package = ModuleType("flashinfer")
    package.decode, package.prefill = decode, prefill  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "flashinfer", package)
    patch.setattr(flashinfer, "obstacle", lambda cache: None)
    patch.setattr(torch, "Event", _Event)
    _Wrapper.made.clear()
    return _Wrapper.made

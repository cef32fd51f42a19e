"""FlashInfer's interface on a CPU: reads the memory that the real kernels read."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from llm_paged import dense
from torch import Tensor

from graphrt_llm.attention import flashinfer


class Wrapper:
    """A decode or prefill wrapper. One for CUDA graphs reads the buffers it was made with."""

    def __init__(self, workspace: Tensor, **options: Any) -> None:
        self.is_static = options.get("use_cuda_graph", False)
        # Named otherwise by the wrapper of chunks.
        kind = "buf" if "qo_indptr_buf" in options else "buffer"
        self.begins = options.get(f"paged_kv_indptr_{kind}")
        self.blocks = options.get(f"paged_kv_indices_{kind}")
        self.last = options.get(f"paged_kv_last_page_len_{kind}")
        self.plans: list[str] = []

    def reset_workspace_buffer(self, workspace: Tensor, plan: Tensor) -> None:
        assert plan.dtype == torch.uint8

    def plan(self, *args: Any, kind: str = "whole", **options: Any) -> None:
        """Prefill passes the ends of its chunks first; the last four are the model's shape."""
        *ends, begins, blocks, last = args[:-4]
        assert begins.dtype == blocks.dtype == last.dtype == torch.int32
        assert len(blocks) >= begins[-1]
        self.plans.append(kind)
        self.splits = not options.get("disable_split_kv", False)
        self.ends = ends[0].tolist() if ends else list(range(len(last) + 1))
        if ends:
            assert options["causal"]
            assert options["max_token_per_sequence"] == int(ends[0].diff().max())
        if self.is_static:
            assert len(last) == len(self.last), "a captured number of requests never changes"
        else:
            self.begins, self.blocks, self.last = begins.clone(), blocks.clone(), last.clone()

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        assert self.ends[-1] == len(q) == len(out)
        assert out.is_contiguous()
        size, begins = kv[0].shape[1], self.begins.tolist()
        for row in range(len(begins) - 1):
            blocks = self.blocks[begins[row] : begins[row + 1]].long()
            length = (len(blocks) - 1) * size + int(self.last[row])
            keys, values = (part[blocks].flatten(0, 1)[:length] for part in kv)
            tokens = slice(self.ends[row], self.ends[row + 1])
            out[tokens] = dense(q[tokens], keys, values)


def fast_decode_plan(
    wrapper: Wrapper, *args: Any, global_override_indptr_cpu: Tensor, **options: Any
) -> None:
    assert wrapper.plans, "a fast plan needs a whole one before it"
    assert wrapper.is_static, "another keeps what it is given, which is on the host here"
    wrapper.plan(*args, kind="fast")


def install(patch: pytest.MonkeyPatch) -> list[Wrapper]:
    """Put it where ``import flashinfer`` finds it; returns the wrappers that are made from now."""
    made: list[Wrapper] = []

    def make(*args: Any, **options: Any) -> Wrapper:
        made.append(Wrapper(*args, **options))
        return made[-1]

    package = ModuleType("flashinfer")
    package.decode = mock.Mock(  # type: ignore[attr-defined]
        BatchDecodeWithPagedKVCacheWrapper=make, fast_decode_plan=fast_decode_plan
    )
    package.prefill = mock.Mock(BatchPrefillWithPagedKVCacheWrapper=make)  # type: ignore[attr-defined]
    package.utils = mock.Mock(  # type: ignore[attr-defined]
        determine_attention_backend=lambda *args: "fa2"
    )
    patch.setitem(sys.modules, "flashinfer", package)
    # The fake uses no workspace, and hypothesis makes many backends.
    patch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    patch.setattr(flashinfer, "obstacle", lambda cache: None)
    patch.setattr(torch, "Event", mock.Mock())
    return made

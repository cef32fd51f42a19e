"""Attention by FlashInfer: decode inside FULL graphs, any batch in eager code. CUDA, 16 bits.

FlashInfer splits work over the GPU by a *plan*, made on the host from a batch's lengths before
every step. A graph's kernels read the plan from addresses that never change, so a FULL graph
replays with the plan of its step. The launch shape depends on the number of requests alone, so each
captured number has its own wrapper; they share all memory but their plans, because steps run one at
a time.

With speculative decoding a request brings several tokens, a small chunk: FULL graphs then hold the
kernels for chunks, which read its keys once for all of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphrt import AttentionSupport, BatchDescriptor
from graphrt_llm.attention.base import (
    AttentionInputs,
    AttentionMetadata,
    Decode,
    Obstacle,
    gpu_obstacle,
)
from graphrt_llm.blocks import NULL_BLOCK
from graphrt_llm.config import Limits
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache

WORKSPACE_BYTES = 128 * 2**20
"""For partial results of split work. The size that FlashInfer's documentation recommends."""

PLAN_BYTES = 2**20
"""For a decode plan: a dozen bytes for each block of threads that fits the GPU at once."""

CHUNK_TILE = 128
"""Rows, heads of a group times new tokens, that FlashInfer reserves for a request in a graph of
chunks, unless those of a whole batch fit half as many."""

MOST_BLOCKS = 320
"""Of threads, that FlashInfer plans for at the same time: two for each multiprocessor, of which the
largest GPUs have somewhat fewer than 160."""

HEAD_DIMS = (64, 128, 256)
DECODES_APART = 8
"""Decoding requests at the front of a batch with chunks from which they have a launch of their own.
In that of the chunks each of them takes the place of 128 tokens, about 3 us of an H200; a launch
takes 8."""


def obstacle(cache: KVCache) -> Obstacle | None:
    """Why FlashInfer cannot serve ``cache``; None if it can."""
    found = gpu_obstacle(cache, HEAD_DIMS)
    if found is not None:
        return found
    if "flashinfer" not in sys.modules and importlib.util.find_spec("flashinfer") is None:
        return Obstacle(
            "the package flashinfer-python",
            "it is not installed",
            "pip install 'graphrt[flashinfer]', or use 'sdpa'.",
        )
    return None


def chunk_kernels(cache: KVCache) -> str:
    """FlashInfer's name of its kernels for chunks: ``fa3`` on a Hopper GPU, else ``fa2``.

    Us a layer of both for 8192 tokens in chunks of the Azure trace, H200, 16 heads over 8 key
    heads: 117 and 170, with a context behind 212 and 357; 32 heads: 207 and 277, 370 and 596.
    """
    from flashinfer import utils

    device, dtype = cache.tensor.device, cache.tensor.dtype
    name: str = utils.determine_attention_backend(device, 0, False, False, dtype, dtype)
    return name


class _Staging:
    """What the kernels read of a batch, in one block of host memory and its copy on the device.

    For ``rows`` requests: where the blocks of each begin [rows + 1], tokens in its last block
    [rows], then the blocks themselves. One copy moves all of it.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        size = 2 * limits.max_num_seqs + 1 + limits.max_num_seqs * limits.max_blocks
        self._query_len = limits.query_len
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array: NDArray[np.int32] = self._host.numpy()
        self.memory = torch.zeros(size, dtype=torch.int32, device=device)

    def host(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where blocks begin, the blocks, tokens in the last block: as plans take them."""
        return _split(self._host[: 2 * rows + 1 + int(self._array[rows])], rows)

    def device(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same, on the device; the blocks to the end of the memory."""
        return _split(self.memory, rows)

    def stage(
        self, rows: int, seq_lens: NDArray[Any], tables: NDArray[Any], block_size: int
    ) -> None:
        """Fill and copy. Padding rows read as many tokens as a request brings, of the null block.

        With fewer, the first of them would see none.
        """
        num_reqs, padding = len(seq_lens), rows - len(seq_lens)
        num_blocks = -(-seq_lens // block_size)
        null_blocks = -(-self._query_len // block_size)
        begins = self._array[: rows + 1]
        np.cumsum(num_blocks, out=begins[1 : num_reqs + 1])
        begins[num_reqs + 1 :] = begins[num_reqs] + null_blocks * np.arange(1, padding + 1)
        last = self._array[rows + 1 : 2 * rows + 1]
        last[:num_reqs] = seq_lens - (num_blocks - 1) * block_size
        last[num_reqs:] = self._query_len - (null_blocks - 1) * block_size
        blocks = self._array[2 * rows + 1 :]
        used = tables[:, : num_blocks.max()]
        blocks[: begins[num_reqs]] = used[np.arange(used.shape[1]) < num_blocks[:, None]]
        blocks[begins[num_reqs] : begins[rows]] = NULL_BLOCK
        size = 2 * rows + 1 + int(begins[rows])
        self.memory[:size].copy_(self._host[:size], non_blocking=True)


def _split(memory: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return memory[: rows + 1], memory[2 * rows + 1 :], memory[rows + 1 : 2 * rows + 1]


class FlashInferAttention:
    """``limits`` bound the memory that is staged for a batch.

    FlashInfer itself is imported by the first ``prepare``: it takes a second or more.
    ``chunks``: FlashInfer's name of the kernels for chunks; None: ``chunk_kernels``. ``decode``:
    computes the requests that decode at the front of an eager batch, in place of FlashInfer, whose
    kernel needs a plan, and at the Azure trace's lengths 168 us a layer instead of 154 (H200).
    Errors: ``AttentionBackendError`` where ``obstacle`` finds one.
    """

    support: ClassVar[AttentionSupport] = AttentionSupport.UNIFORM_BATCH

    def __init__(
        self,
        cache: KVCache,
        limits: Limits | None,
        chunks: str | None = None,
        decode: Decode | None = None,
    ) -> None:
        found = obstacle(cache)
        if found is not None:
            raise AttentionBackendError("attention backend 'flashinfer'", **found._asdict())
        if limits is None:
            raise AttentionBackendError(
                "attention backend 'flashinfer'",
                expected="the limits of a batch: they bound the memory that is staged for it",
                found="None",
                do="pass limits to make_attention.",
            )
        self.cache = cache
        self._chunks = chunks
        self._query_len = limits.query_len
        config = cache.config
        self._shape = (config.num_heads, config.num_kv_heads, config.head_dim, cache.block_size)
        self._dtype = cache.tensor.dtype
        self._layers = [(kv[:, :, 0], kv[:, :, 1]) for kv in cache.layers]

        device = cache.tensor.device
        with torch.inference_mode(False):
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._staging = _Staging(limits, device)
        self._prefill: Any = None
        """Of chunks, as ``_decode`` is of decoding requests; None until the first preparation."""
        self._own_decode = decode
        self._static: dict[int, Any] = {}
        """By number of requests: the wrappers of FULL graphs."""
        self._planned: set[Any] = set()
        """Static wrappers that have had a whole plan, which compiles and loads their kernels."""

        self._wrapper: Any = None
        """The one that the layers of this step run; None before the first step."""
        self._num_tokens = 0
        self._num_apart = 0
        """Tokens at the front of the batch that are computed apart, and not by ``_wrapper``."""
        self._copied: Any = None
        """The event after the device has read the host memory of the latest plan."""

    @property
    def keep_alive(self) -> Sequence[Tensor]:
        # Plans of static wrappers are allocated later; the wrappers keep them.
        return self._workspace, self._staging.memory

    def _load(self) -> None:
        # Imported here, because an extra may be absent.
        from flashinfer import decode, prefill

        self._fast_decode_plan = decode.fast_decode_plan
        self._make_decode = decode.BatchDecodeWithPagedKVCacheWrapper
        self._make_prefill = prefill.BatchPrefillWithPagedKVCacheWrapper
        self._decode: Any = None
        if self._own_decode is None:
            self._decode = self._make_decode(self._workspace, use_tensor_cores=True)
        chunks = self._chunks or chunk_kernels(self.cache)
        self._prefill = self._make_prefill(self._workspace, backend=chunks)

    def prepare(self, key: BatchDescriptor, step_info: AttentionMetadata | None) -> None:
        if self._prefill is None:
            self._load()
        if step_info is None:
            self._prepare_without_batch(key)
            return
        if step_info.block_tables is None:
            raise AttentionBackendError(
                "attention backend 'flashinfer'",
                expected="AttentionMetadata.block_tables: the plan lists the blocks to read",
                found="None",
            )
        self._prepare(
            key,
            np.asarray(step_info.query_lens),
            np.asarray(step_info.seq_lens),
            step_info.block_tables,
        )

    def _prepare_without_batch(self, key: BatchDescriptor) -> None:
        """Plan for requests of equally many tokens, or one that has all, in the null block.

        A number of requests seen for the first time gets its wrapper here, and its kernels are
        compiled: before the warm-ups, hence before any recording.
        """
        if key.num_reqs is not None:
            if key.num_reqs * self._query_len != key.num_tokens:
                raise AttentionBackendError(
                    "attention backend 'flashinfer'",
                    expected=f"FULL graphs of decode batches, {self._query_len} tokens a request",
                    found=f"a key of {key.num_tokens} tokens of {key.num_reqs} requests",
                    do="let the runtime resolve the mode from the backend's support.",
                )
            if key.num_reqs not in self._static:
                self._static[key.num_reqs] = self._make_static(key.num_reqs)
        num_reqs = key.num_reqs or 1
        lengths = np.full(num_reqs, key.num_tokens // num_reqs)
        num_blocks = -(-int(lengths[0]) // self.cache.block_size)
        tables = np.full((num_reqs, num_blocks), NULL_BLOCK)
        self._prepare(key, lengths, lengths, tables)

    def begin(self, positions: Tensor, attn: AttentionInputs) -> tuple[Tensor, ...]:
        """Layers share nothing but the plan."""
        if self._wrapper is None:
            raise AttentionBackendError(
                "attention backend 'flashinfer'",
                expected="to be prepared for the key of this step",
                found="a forward pass before the first preparation",
                do="name the backend in the runtime's resources, or call prepare yourself.",
            )
        return ()

    def forward(
        self,
        layer_index: int,
        heads: Tensor,
        attn: AttentionInputs,
        shared: tuple[Tensor, ...],
        out: Tensor,
    ) -> None:
        count, q = self._num_tokens, heads[:, : self.cache.config.num_heads]
        first, layer = self._num_apart, self._layers[layer_index]
        if first and self._own_decode is not None:
            own = self.cache.layers[layer_index]
            self._own_decode(heads[:first], own, attn.block_tables, attn.seq_lens, out[:first])
        elif first:
            self._decode.run(q[:first], layer, out=out[:first])
        elif count == out.shape[0]:
            self._wrapper.run(q, layer, out=out)
            return
        self._wrapper.run(q[first:count], layer, out=out[first:count])
        # Padding rows of uninitialised memory, perhaps NaN, would spread through later layers.
        out[count:].zero_()

    def _prepare(
        self,
        key: BatchDescriptor,
        query_lens: NDArray[Any],
        seq_lens: NDArray[Any],
        tables: NDArray[Any],
    ) -> None:
        # Host memory is refilled below. In a loop that runs one step ahead, copies of the previous
        # step may be pending; the device makes them first, so this hardly ever waits.
        if self._copied is not None:
            self._copied.synchronize()
        static = None if key.num_reqs is None else self._static.get(key.num_reqs)
        rows = len(seq_lens) if static is None else key.num_tokens // self._query_len
        self._staging.stage(rows, seq_lens, tables, self.cache.block_size)
        self._num_apart = 0
        if static is not None:
            self._wrapper, self._num_tokens = static, key.num_tokens
            if self._query_len == 1:
                self._plan_decode(static, rows, rows)
            else:
                self._plan_chunks(static, np.full(rows, self._query_len), rows)
        else:
            self._num_tokens = int(query_lens.sum())
            own = self._own_decode is not None
            each = self._query_len if own else 1
            num_decodes = int((np.append(query_lens, 0) != each).argmax())
            if not own and (num_decodes == rows or num_decodes >= DECODES_APART):
                self._wrapper = self._decode
                self._plan_decode(self._decode, rows, num_decodes)
            if own or num_decodes < rows:
                self._wrapper = self._prefill
                apart = num_decodes if DECODES_APART <= num_decodes < rows else 0
                self._num_apart = apart * each
                self._plan_chunks(self._prefill, query_lens, rows, apart)
        if self._copied is None:
            self._copied = torch.Event(self.cache.tensor.device)
        self._copied.record()

    def _make_static(self, rows: int) -> Any:
        begins, blocks, last = self._staging.device(rows)
        if self._query_len == 1:
            wrapper = self._make_decode(
                self._workspace,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=begins,
                paged_kv_indices_buffer=blocks,
                paged_kv_last_page_len_buffer=last,
            )
        else:
            wrapper = self._make_prefill(
                self._workspace,
                backend="fa2",
                use_cuda_graph=True,
                qo_indptr_buf=begins.new_zeros(rows + 1),
                paged_kv_indptr_buf=begins,
                paged_kv_indices_buf=blocks,
                paged_kv_last_page_len_buf=last,
            )
        plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._workspace.device)
        wrapper.reset_workspace_buffer(self._workspace, plan)
        return wrapper

    def _plan_decode(self, wrapper: Any, rows: int, count: int) -> None:
        """Plan for the first ``count`` of ``rows`` requests."""
        begins, blocks, last = self._staging.host(rows)
        host = begins[: count + 1], blocks, last[:count]
        if wrapper in self._planned:
            # The same plan without copying what is staged already.
            self._fast_decode_plan(
                wrapper,
                *host,
                *self._shape,
                q_data_type=self._dtype,
                global_override_indptr_cpu=host[0],
            )
            return
        wrapper.plan(*host, *self._shape, q_data_type=self._dtype)
        if wrapper is not self._decode:
            self._planned.add(wrapper)

    def _plan_chunks(
        self, wrapper: Any, query_lens: NDArray[Any], rows: int, first: int = 0
    ) -> None:
        """Plan for all of ``rows`` requests but the ``first``."""
        lens = query_lens[first:]
        ends = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(lens, out=ends[1:])
        begins, blocks, last = self._staging.host(rows)
        skipped = int(begins[first])
        blocks = blocks[skipped:]
        options: dict[str, Any] = {}
        if wrapper is not self._prefill:
            # On the device they are in their place already; from the host the copy would wait.
            blocks = self._staging.device(rows)[1][: len(blocks)]
            if not self._fits_split(rows):
                options["disable_split_kv"] = True
        wrapper.plan(
            torch.from_numpy(ends),
            begins[first:] - skipped if first else begins,
            blocks,
            last[first:],
            *self._shape,
            causal=True,
            q_data_type=self._dtype,
            max_token_per_sequence=int(lens.max()),
            **options,
        )

    def _fits_split(self, num_reqs: int) -> bool:
        """Whether the workspace holds the parts of contexts that are split, in a graph of chunks.

        They are reserved for every tile of the launch. So many requests fill the GPU without.
        """
        num_heads, num_kv_heads, head_dim, _ = self._shape
        group, q = num_heads // num_kv_heads, self._query_len
        tile = CHUNK_TILE if group * (num_reqs * (q - 1) + 1) > CHUNK_TILE // 2 else CHUNK_TILE // 2
        tiles = -(-num_reqs * q * group // tile) + num_reqs - 1
        tiles = max(tiles, MOST_BLOCKS // num_kv_heads)
        return num_heads * tiles * tile * (head_dim + 1) * 4 <= WORKSPACE_BYTES - 2**16

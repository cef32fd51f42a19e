"""What a user asks of the engine, and the limits of its batches that follow from it.

Batch limits and graphs are asked for by the ``RuntimeConfig`` inside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from graphrt import RuntimeConfig
from graphrt.errors import shown
from graphrt_llm.blocks import blocks_for
from graphrt_llm.errors import EngineConfigError

DType = Literal["float64", "float32", "bfloat16", "float16"]
LoadFormat = Literal["safetensors", "dummy"]
DeviceName = Literal["auto", "cuda", "simulated"]
CaptureWhen = Literal["before_serving", "by_priority"]

# Checked before a cache or its list of free blocks is made.
MOST_MODEL_LEN = 2**28
MOST_BLOCK_SIZE = 2**16
MOST_BLOCKS = 2**22
MOST_LORA_RANK = 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options; None means "not asked for": the option's docstring says what is used then.

    Errors: ``EngineConfigError`` for a value that is never valid. What depends on the model is
    checked when the engine is made.

    ``runtime``: ``max_num_seqs`` and ``max_num_batched_tokens`` bound the scheduler too.
    ``max_model_len``: Tokens of prompt and output together. None: the model's longest context.
    ``block_size``: Tokens in a block of the cache.
    ``attention_backend``: ``auto``: on a GPU in half precision ``paged``, this package's kernel
      for decoding requests, with FlashInfer for all other batches where it is installed and serves
      dtype, heads and device, else with ``sdpa`` for them; elsewhere ``sdpa``. Of FlashInfer's
      kernels that are not built yet, those that take longest are built by other processes while
      others serve; ranks wait. With ``by_priority`` FlashInfer is imported after the first tokens,
      in one step of one to two seconds, and all of it is built while ``sdpa`` serves. Graphs whose
      kernels change then are captured anew, one a step (``Withdrawn`` tells the observer). The
      engine's ``attention`` says which was chosen, and why.
    ``overlap``: Prepare a step while the device runs the previous one: a step's tokens are then
      returned by the next call, and a request that stops at a token runs one step too many. None:
      on a GPU. Never with speculative decoding, because drafts depend on the tokens before them.
    ``capture``: ``before_serving``: only ``LLMEngine.capture`` captures. ``by_priority``: every
      step first captures at most one missing graph, that of its own batch before others, until
      none is missing; a batch without a graph runs eager. The tokens are the same.
    ``device``: ``auto``: a GPU if there is one, else the simulated device.
    ``seed``: Of random weights, and of requests that sample without a seed of their own.
    ``num_blocks``: Blocks of the cache, the null block included. None: enough for ``max_num_seqs``
      requests of full length, but no more than ``gpu_memory_utilization`` allows.
    ``gpu_memory_utilization``: Share of the device memory that is free once the weights are
      loaded, of which the cache gets all but 1 GiB for graphs (nothing for mode NONE); the rest of
      the memory is for activations and sampling. On the simulated device 2 GiB count as free.
      Unused if ``num_blocks`` is given.
    ``dtype``: What to compute in; a checkpoint of another floating dtype is cast while it is
      loaded. None: the checkpoint's; float32 if it names none.
    ``expert_parallel``: Of an engine of several ranks: each has a share of the experts of a
      Qwen3-MoE model, and rows travel to the ranks of their experts. Needs graphs without a
      compiler (level 0).
    ``tensor_parallel``: Of an engine of several ranks: each has a share of the heads and the MLP of
      every layer, and all serve the same requests. Needs a model without experts, no adapters, and
      graphs without a compiler (level 0).
    ``load_format``: ``dummy``: random weights, drawn on the device and seeded by ``seed``.
    ``max_lora_rank``: Largest rank of an adapter: with ``RuntimeConfig.max_loras`` it decides the
      memory of adapters, which is allocated once.
    """

    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    dtype: DType | None = None
    load_format: LoadFormat = "safetensors"
    attention_backend: str = "auto"
    overlap: bool | None = None
    capture: CaptureWhen = "before_serving"
    device: DeviceName = "auto"
    seed: int = 0
    max_lora_rank: int = 16
    expert_parallel: bool = False
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        def check(is_met: bool, name: str, expected: str) -> None:
            if not is_met:
                raise EngineConfigError(
                    f"EngineConfig.{name}", expected=expected, found=shown(getattr(self, name))
                )

        for name, most in (
            ("max_model_len", MOST_MODEL_LEN),
            ("block_size", MOST_BLOCK_SIZE),
            ("num_blocks", MOST_BLOCKS),
            ("max_lora_rank", MOST_LORA_RANK),
        ):
            value = getattr(self, name)
            is_default = value is None and name not in ("block_size", "max_lora_rank")
            is_met = is_default or (type(value) is int and 1 <= value <= most)
            check(is_met, name, f"an integer >= 1, at most {most}")
        check(type(self.seed) is int and 0 <= self.seed < 2**63, "seed", "an integer in [0, 2**63)")
        share = self.gpu_memory_utilization
        is_share = isinstance(share, int | float) and 0 < share <= 1
        check(is_share, "gpu_memory_utilization", "a share in (0, 1]")
        for name, kind in (("dtype", DType), ("load_format", LoadFormat), ("capture", CaptureWhen)):
            allowed = (*([None] if name == "dtype" else []), *get_args(kind))
            value = getattr(self, name)
            is_met = isinstance(value, str | None) and value in allowed
            check(is_met, name, f"one of {', '.join(map(str, allowed))}")
        check(isinstance(self.attention_backend, str), "attention_backend", "the name of one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What bounds every batch: counts of requests, tokens, blocks (the null block included).

    Errors: ``EngineConfigError`` where cache and context cannot hold the largest batch, because a
    graph for that batch could then neither be tried nor used.

    ``max_num_seqs``: Most requests in a batch.
    ``max_num_batched_tokens``: Most tokens in a batch.
    ``max_model_len``: Most tokens of one request, prompt and output together.
    ``block_size``: Tokens in a block.
    ``num_blocks``: Blocks of the cache.
    ``max_loras``: Most distinct adapters of running requests.
    ``query_len``: Tokens of a decoding request in a step: one, and those that are drafted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_loras: int = 0
    query_len: int = 1

    def __post_init__(self) -> None:
        q = self.query_len
        if self.max_num_seqs * q > self.max_num_batched_tokens:
            each = "one token" if q == 1 else f"{q} tokens, {q - 1} of them drafts"
            raise EngineConfigError(
                "max_num_batched_tokens",
                expected=f"at least {self.max_num_seqs * q}: each of max_num_seqs ="
                f" {self.max_num_seqs} requests may decode {each}",
                found=str(self.max_num_batched_tokens),
                do="raise it, or lower max_num_seqs or num_speculative_tokens.",
            )
        largest = self.largest_batch()
        fewest = self.room(self.max_num_seqs).min()
        if fewest < q or self.max_num_batched_tokens > largest:
            raise EngineConfigError(
                "engine limits",
                expected="a cache and a context that can hold the largest batch",
                found=f"{self.max_num_seqs} requests with {self.max_num_batched_tokens} tokens in a"
                f" step, where {self.num_blocks - 1} blocks of {self.block_size} and a context of"
                f" {self.max_model_len} hold at most {largest} tokens",
                do="give the engine more blocks, or lower max_num_seqs or max_num_batched_tokens.",
            )

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request, drafts after its last token included."""
        return blocks_for(self.max_model_len + self.query_len - 1, self.block_size)

    def room(self, num_reqs: int, num_blocks: int | None = None) -> NDArray[np.int64]:
        """New tokens that each of ``num_reqs`` requests has room for if they share blocks evenly.

        ``num_blocks``: how many they share; None: all but the null block.
        """
        usable = self.num_blocks - 1 if num_blocks is None else num_blocks
        blocks = usable // num_reqs + (np.arange(num_reqs) < usable % num_reqs)
        room: NDArray[np.int64] = np.minimum(blocks * self.block_size, self.max_model_len)
        return room

    def blocks_needed(self, num_tokens: int, num_reqs: int) -> int:
        """The fewest blocks in which ``num_reqs`` requests have room for ``num_tokens`` new tokens.

        Each has at least one token, in a block of its own. ``num_blocks`` where contexts are too
        short for so many.
        """
        if num_tokens > num_reqs * self.max_model_len:
            return self.num_blocks
        whole, rest = divmod(self.max_model_len, self.block_size)
        # A context's last block may hold fewer tokens; all get their whole blocks before it.
        most = num_reqs * whole * self.block_size
        if num_tokens <= most:
            return max(num_reqs, blocks_for(num_tokens, self.block_size))
        return max(num_reqs, num_reqs * whole + blocks_for(num_tokens - most, rest))

    def largest_batch(self) -> int:
        """Most tokens in one step of ``max_num_seqs`` requests: the case of equally many blocks."""
        return int(self.room(self.max_num_seqs).sum())

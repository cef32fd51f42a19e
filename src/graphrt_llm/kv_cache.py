"""The memory of the paged cache: keys and values of every token of the running requests.

A slot holds the keys and values of one token in one layer; slot ``block * block_size + offset``.
Block 0 is the null block: padding writes there, and its content has no meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphrt_llm.errors import EngineConfigError
from graphrt_llm.model_config import ModelConfig


class KVCache:
    """One tensor for all layers: [num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim].

    The axis of 2 is keys, values: side by side, so that one copy stores a token and one gather
    reads a block. Zero at first, and 0 is stored for what is not finite: a slot without a token of
    its request is masked out of the softmax, but a weight of 0 times such a value would be NaN.

    Errors: ``EngineConfigError`` for less than 1 block of 1 token beside the null block.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 2 or block_size < 1:
            raise EngineConfigError(
                "block cache",
                expected="at least 2 blocks, one of them the null block, of at least 1 token",
                found=f"{num_blocks} blocks of {block_size} tokens",
            )
        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
        # A tensor made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.tensor = torch.zeros(config.num_layers, *shape, dtype=dtype, device=device)
            self.layers: tuple[Tensor, ...] = self.tensor.unbind()
            """Per layer [num_blocks, block_size, 2, num_kv_heads, head_dim]; views."""
            self.slots: tuple[Tensor, ...] = self.tensor.flatten(1, 2).unbind()
            """Per layer [num_slots, 2, num_kv_heads, head_dim]; views of the same bytes."""
            self.all_slots = self.tensor.flatten(1, 2).transpose(0, 1)
            """[num_slots, num_layers, 2, num_kv_heads, head_dim], a view of the same bytes."""

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes in all layers together."""
        elements = config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim
        return elements * dtype.itemsize

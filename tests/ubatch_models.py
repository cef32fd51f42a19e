"""Models whose layers communicate, for tests of micro-batches."""

from __future__ import annotations

import torch

from graphrt import BatchDescriptor, ubatch

WIDTH = 4


class Layers(torch.nn.Module):
    """``depth`` times: compute, a transfer (here a copy), compute with what has arrived.

    ``without``: what is left out of a layer on purpose: ``"fork"`` and ``"join"`` are the waits of
    a transfer, ``"keep"`` allocates what it reads so that nothing keeps it.
    """

    def __init__(self, depth: int = 2, without: str = "", layer: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.depth, self.without, self.layer = depth, without, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(self.depth):
            send = torch.tanh(x @ self.weight)
            received = torch.empty_like(send)
            left_out = self.without if layer == self.layer else ""
            if left_out:
                ubatch.switch_to_comm(sync=left_out != "fork")
                received.copy_(send)
                mark_sync = left_out != "join"
                ubatch.yield_(f"layer{layer}")
                ubatch.switch_to_compute(sync=mark_sync)
            else:
                with ubatch.communication(f"layer{layer}", send):
                    received.copy_(send)
            x = received + send
        return x


def uniform_key(num_tokens: int, num_ubatches: int = 2) -> BatchDescriptor:
    return BatchDescriptor(num_tokens, num_tokens, True, num_ubatches=num_ubatches)

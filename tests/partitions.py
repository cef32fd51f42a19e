"""A model with attention that writes its own cache, for the cut that Inductor makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from graphrt import CompilationConfig, Facts

WIDTH = 16
NUM_LAYERS = 3
MAX_TOKENS = 64
ATTEND = "graphrt_tests::attend"

calls: list[int] = []
"""Of the operator's Python, the layer of each."""

library = torch.library.Library("graphrt_tests", "FRAGMENT")
library.define("attend(Tensor x, Tensor(a!) cache, Tensor(b!) out, int layer) -> ()")


def attend(x: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    calls.append(layer)
    rows = cache[layer, : x.shape[0]]
    rows.copy_(x)
    torch.cumsum(rows, 0, out=out)
    out.add_(cache[layer, MAX_TOKENS])


library.impl("attend", attend, "CompositeExplicitAutograd")
torch.library.register_fake(ATTEND, lambda x, cache, out, layer: None, lib=library)


class Decoder(torch.nn.Module):
    """Layers with ``attend`` between what is compiled, which writes a row that each one reads."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(NUM_LAYERS + 1, WIDTH, WIDTH, generator=generator)
        self.weights = torch.nn.Parameter(weights / WIDTH**0.5)
        self.register_buffer("live", torch.ones(WIDTH, dtype=torch.bool))
        self.register_buffer("cache", torch.zeros(NUM_LAYERS, MAX_TOKENS + 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(self.live & (x < 9.0), x, 9.0)
        self.cache[:, MAX_TOKENS] = x[0]
        for layer in range(NUM_LAYERS):
            hidden = torch.tanh(x @ self.weights[layer]) * 1.5
            out = torch.empty_like(hidden)
            torch.ops.graphrt_tests.attend(hidden, self.cache, out, layer)
            x = x + torch.sigmoid(out)
        return x @ self.weights[NUM_LAYERS]


def compilation(folder: Path, **options: Any) -> CompilationConfig:
    asked = {"level": 3, "use_inductor_graph_partition": True, "cache_dir": folder}
    return CompilationConfig(**asked | options)


def facts(**more: Any) -> Facts:
    asked = {"attention_ops": (ATTEND,), "attention_writes_cache": True, "device": "cuda"}
    return Facts(**asked | more)

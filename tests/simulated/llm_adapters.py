"""Adapters for the engine's tests: merged into weights by hand, and saved in PEFT's format."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from graphrt_llm import LLMEngine, LoRAAdapter
from graphrt_llm.lora import PARTS


def merge(engine: LLMEngine, adapter: LoRAAdapter) -> None:
    """Add ``scaling * B A`` to the weights of ``engine`` itself: what an adapter means."""
    model: Any = engine.runtime.runner.fn.model
    for number, layer in enumerate(model.layers):
        for projection, parts in PARTS.items():
            stacked = getattr(layer, projection)
            rows = stacked.weight.t().split(stacked.out_features)
            for part, weight in zip(parts, rows, strict=True):
                if (number, part) in adapter.factors:
                    a, b = adapter.factors[number, part]
                    weight += (adapter.scaling * (b.double() @ a.double())).to(weight.dtype)


def record_logits(engine: LLMEngine) -> dict[str, list[torch.Tensor]]:
    """By request: the logits of each of its output tokens, in every step from now on."""
    logits: dict[str, list[torch.Tensor]] = defaultdict(list)
    run = engine._runner.run

    def recorded(batch: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = run(batch, *args, **kwargs)
        for request, row, counts in zip(
            batch.requests, outputs.logits, batch.completes, strict=True
        ):
            if counts:
                logits[request.request_id].append(row.clone())
        return outputs

    engine._runner.run = recorded
    return logits


def save_peft(adapter: LoRAAdapter, directory: Path, **fields: Any) -> None:
    """``adapter`` as PEFT saves it, with ``fields`` of its description changed."""
    directory.mkdir(exist_ok=True)
    prefix = "base_model.model.model.layers"
    tensors = {}
    for (layer, part), (a, b) in adapter.factors.items():
        tensors[f"{prefix}.{layer}.{part}.lora_A.weight"] = a.clone()
        tensors[f"{prefix}.{layer}.{part}.lora_B.weight"] = b.clone()
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "base_model_name_or_path": "anything",
        "r": adapter.rank,
        "lora_alpha": adapter.scaling * adapter.rank,
        "target_modules": sorted({part.rpartition(".")[2] for _, part in adapter.factors}),
        "bias": "none",
        "lora_dropout": 0.1,
        **fields,
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))

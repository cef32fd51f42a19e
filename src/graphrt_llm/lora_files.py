"""Reads an adapter in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from graphrt.files import checked_path, read_json
from graphrt_llm.errors import AdapterError, AdapterModelError, MissingTensorError
from graphrt_llm.lora import PARTS, LoRAAdapter, linear_maps
from graphrt_llm.model_config import ModelConfig
from graphrt_llm.weights import open_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MOST_CONFIG_BYTES = 4 * 2**20

_PREFIX = "base_model.model."

# Fields of adapter_config.json that change what an adapter computes, with the only values that are
# computed here. Others are ignored.
_REQUIRED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_rslora": (True, False, None),
    "alora_invocation_tokens": (None,),
    # Others change the weights of the model as well.
    "init_lora_weights": ("gaussian", "orthogonal", "eva", True, False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


def load_lora(directory: str | Path, config: ModelConfig, *, max_rank: int = 64) -> LoRAAdapter:
    """Read an adapter in PEFT's format: ``adapter_config.json``, ``adapter_model.safetensors``.

    Errors: ``AdapterError`` for a file that is absent or unreadable, a rank above ``max_rank``, a
    kind of adapter that is not computed here, a tensor that is not finite; ``AdapterModelError``
    where it was made for another model than ``config`` describes; ``MissingTensorError``.
    """
    directory = checked_path("adapter", directory, AdapterError)
    rank, scaling, targets = _read_config(directory / CONFIG, max_rank)
    path = directory / WEIGHTS
    factors: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    with ExitStack() as files:
        stored = dict(open_safetensors(path, files))

        def read(name: str, shape: tuple[int, int]) -> Tensor:
            if name not in stored:
                raise MissingTensorError(
                    f"{path}, tensor {name!r}",
                    expected=f"shape {shape}",
                    found="no tensor of this name",
                    do=f"check that {CONFIG} and the weights belong together, and to this model.",
                )
            found = stored.pop(name)
            if found.shape != shape:
                raise AdapterModelError(
                    f"{path}, tensor {name!r}",
                    expected=f"shape {shape}, as this model and rank {rank} have",
                    found=f"shape {found.shape}",
                    do="load it into an engine of the model that it was made for.",
                )
            values: Tensor = found.handle.get_tensor(name)
            if not values.is_floating_point() or not values.isfinite().all():
                raise AdapterError(
                    f"{path}, tensor {name!r}",
                    expected="finite floating-point values",
                    found=f"{values.dtype}, with others",
                )
            return values

        for layer in range(config.num_layers):
            for part, in_features, out in linear_maps(config):
                if part.rpartition(".")[2] in targets:
                    name = f"{_PREFIX}model.layers.{layer}.{part}"
                    factors[layer, part] = (
                        read(f"{name}.lora_A.weight", (rank, in_features)),
                        read(f"{name}.lora_B.weight", (out, rank)),
                    )
        if stored:
            raise AdapterModelError(
                f"{path}, tensor {next(iter(stored))!r}",
                expected=f"tensors of the {config.num_layers} layers of this model",
                found=f"{len(stored)} tensors that it has no place for",
                do="load it into an engine of the model that it was made for.",
            )
    return LoRAAdapter(rank, scaling, factors)


def _read_config(path: Path, max_rank: int) -> tuple[int, float, frozenset[str]]:
    """Rank, scaling and the last names of the adapted maps. Errors: ``AdapterError``."""
    try:
        described = read_json(path, MOST_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise AdapterError(
            str(path),
            expected="a JSON object that describes a PEFT adapter",
            found=f"{type(error).__name__}: {error}",
            do="name the directory that PEFT's save_pretrained wrote.",
        ) from error
    if not isinstance(described, dict):
        raise AdapterError(str(path), expected="a JSON object", found=type(described).__name__)

    def check(is_met: bool, name: str, expected: str) -> Any:
        if not is_met:
            raise AdapterError(
                f"{path}, field {name!r}", expected=expected, found=repr(described.get(name))
            )
        return described.get(name)

    for name, accepted in _REQUIRED.items():
        told = " or ".join(map(repr, accepted))
        check(described.get(name, accepted[-1]) in accepted, name, told)
    rank: Any = described.get("r")
    check(type(rank) is int and rank >= 1, "r", "an integer >= 1")
    check(rank <= max_rank, "r", f"a rank of at most EngineConfig.max_lora_rank = {max_rank}")
    alpha: Any = described.get("lora_alpha", 8)
    # Compared, because an integer may be too large for a float.
    is_number = type(alpha) in (int, float) and abs(alpha) <= sys.float_info.max
    check(is_number, "lora_alpha", "a finite number")
    known = {part.rpartition(".")[2] for parts in PARTS.values() for part in parts}
    targets: Any = described.get("target_modules")
    if targets == "all-linear":
        targets = sorted(known)
    expected = f"a list of {', '.join(sorted(known))}, or 'all-linear'"
    is_list = isinstance(targets, list) and bool(targets)
    is_list = is_list and all(isinstance(t, str) and t in known for t in targets)
    check(is_list, "target_modules", expected)
    scaling = alpha / (math.sqrt(rank) if described.get("use_rslora") else rank)
    return rank, scaling, frozenset(targets)

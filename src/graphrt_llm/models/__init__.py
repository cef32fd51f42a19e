"""The models: what they are (``config``), how a checkpoint says so, and how they compute."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Resolved on first use, so that a configuration is read without loading torch.
_FILE_OF = {
    "CausalLM": "causal_lm",
    "Llama3Scaling": "config",
    "ModelConfig": "config",
}

__all__ = sorted(_FILE_OF)


def __getattr__(name: str) -> Any:
    file = _FILE_OF.get(name)
    if file is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{file}"), name)
    globals()[name] = value
    return value

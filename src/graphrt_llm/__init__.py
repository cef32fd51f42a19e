"""graphrt_llm: a small continuous-batching LLM engine, a client of graphrt like any other.

Public names are resolved on first use, so that scheduler and blocks load without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FILE_OF = {
    "BlockAllocator": "blocks",
    "EngineConfig": "config",
    "FinishReason": "request",
    "LLMEngine": "engine",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "Scheduler": "scheduler",
    "ServeResult": "serving",
    "ServeStep": "serving",
    "StepResult": "engine",
    "compare_tokens": "comparison",
    "fit_to_context": "serving",
    "serve": "serving",
}

__all__ = sorted(_FILE_OF)


def __getattr__(name: str) -> Any:
    file = _FILE_OF.get(name)
    if file is None:
        raise AttributeError(f"module 'graphrt_llm' has no attribute {name!r}")
    value = getattr(import_module(f"graphrt_llm.{file}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

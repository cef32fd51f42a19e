"""graphrt_llm: a small continuous-batching LLM engine, a client of graphrt like any other.

Public names are resolved on first use, so that scheduler and blocks load without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt_llm.comparison import (
        TokenComparison as TokenComparison,
        compare_tokens as compare_tokens,
    )
    from graphrt_llm.config import EngineConfig as EngineConfig
    from graphrt_llm.engine import LLMEngine as LLMEngine, StepResult as StepResult
    from graphrt_llm.request import (
        FinishReason as FinishReason,
        RequestOutput as RequestOutput,
        SamplingParams as SamplingParams,
    )
    from graphrt_llm.serving import (
        ServeResult as ServeResult,
        ServeStep as ServeStep,
        fit_to_context as fit_to_context,
        serve as serve,
    )

_FILE_OF = {
    "EngineConfig": "config",
    "FinishReason": "request",
    "LLMEngine": "engine",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "ServeResult": "serving",
    "ServeStep": "serving",
    "StepResult": "engine",
    "TokenComparison": "comparison",
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

"""graphrt_llm: a small continuous-batching LLM engine, a client of graphrt like any other.

Public names are resolved on first use, so that scheduler and blocks load without torch. Errors are
in ``graphrt_llm.errors``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt_llm.attention import (
        AttentionBackend as AttentionBackend,
        AttentionChoice as AttentionChoice,
        AttentionInputs as AttentionInputs,
        AttentionMetadata as AttentionMetadata,
        attend as attend,
        attention_backends as attention_backends,
        make_attention as make_attention,
        register_attention_backend as register_attention_backend,
    )
    from graphrt_llm.comparison import (
        TokenComparison as TokenComparison,
        compare_tokens as compare_tokens,
    )
    from graphrt_llm.config import EngineConfig as EngineConfig, Limits as Limits
    from graphrt_llm.engine import LLMEngine as LLMEngine, StepResult as StepResult
    from graphrt_llm.kv_cache import KVCache as KVCache
    from graphrt_llm.lora import LoRAAdapter as LoRAAdapter, random_lora as random_lora
    from graphrt_llm.lora_files import load_lora as load_lora
    from graphrt_llm.model_config import (
        Llama3Scaling as Llama3Scaling,
        ModelConfig as ModelConfig,
    )
    from graphrt_llm.models import CausalLM as CausalLM
    from graphrt_llm.request import (
        FinishReason as FinishReason,
        RequestOutput as RequestOutput,
        SamplingParams as SamplingParams,
    )
    from graphrt_llm.scheduler import DraftCounts as DraftCounts
    from graphrt_llm.serving import (
        ServeResult as ServeResult,
        ServeStep as ServeStep,
        fit_to_context as fit_to_context,
        serve as serve,
    )
    from graphrt_llm.weights import (
        load_safetensors as load_safetensors,
        random_weights as random_weights,
    )

_NAMES_OF_FILE = {
    "attention": """
        AttentionBackend AttentionChoice AttentionInputs AttentionMetadata attend
        attention_backends make_attention register_attention_backend
    """,
    "comparison": "TokenComparison compare_tokens",
    "config": "EngineConfig Limits",
    "engine": "LLMEngine StepResult",
    "kv_cache": "KVCache",
    "lora": "LoRAAdapter random_lora",
    "lora_files": "load_lora",
    "model_config": "Llama3Scaling ModelConfig",
    "models": "CausalLM",
    "request": "FinishReason RequestOutput SamplingParams",
    "scheduler": "DraftCounts",
    "serving": "ServeResult ServeStep fit_to_context serve",
    "weights": "load_safetensors random_weights",
}
_FILE_OF = {name: file for file, names in _NAMES_OF_FILE.items() for name in names.split()}

__all__ = sorted(_FILE_OF)


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("graphrt_llm.errors")
    file = _FILE_OF.get(name)
    if file is None:
        raise AttributeError(f"module 'graphrt_llm' has no attribute {name!r}")
    value = getattr(import_module(f"graphrt_llm.{file}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "errors"]

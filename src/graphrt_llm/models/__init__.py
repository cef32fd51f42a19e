"""The models: their description and the decoder that computes them."""

from graphrt_llm.model_config import Llama3Scaling, ModelConfig
from graphrt_llm.models.causal_lm import CausalLM, SplitLM

__all__ = ["CausalLM", "Llama3Scaling", "ModelConfig", "SplitLM"]

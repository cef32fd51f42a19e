"""What a model is: the numbers that fix its architecture, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from graphrt_llm.errors import ModelConfigError

Architecture = Literal["LlamaForCausalLM", "Qwen3ForCausalLM"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches rotary frequencies to a longer context.

    Source: Llama 3.1 (rope type "llama3"): wavelengths above ``original_context /
    low_freq_factor`` are stretched by ``factor``, those below ``original_context /
    high_freq_factor`` are left alone, those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A dense decoder of the Llama or Qwen3 family. Sizes are in elements, contexts in tokens.

    Errors: ``ModelConfigError`` for numbers that fit no model.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """The longest context: positions are below it."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    tie_word_embeddings: bool = False
    """The output projection is the embedding table."""
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = field(default=())
    """Any of them ends a text."""
    checkpoint_dtype: str | None = None
    """The dtype that the checkpoint's own description states, such as ``"bfloat16"``."""

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
        )
        for name in sizes:
            value = getattr(self, name)
            if value <= 0:
                raise ModelConfigError(
                    f"model field {name!r}", expected="a number above 0", found=repr(value)
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                "model field 'num_kv_heads'",
                expected=f"a divisor of the {self.num_heads} query heads",
                found=str(self.num_kv_heads),
            )
        if self.head_dim % 2:
            raise ModelConfigError(
                "model field 'head_dim'",
                expected="an even number: rotary embedding turns pairs of elements",
                found=str(self.head_dim),
            )

    @property
    def has_qk_norm(self) -> bool:
        """Queries and keys are normalised per head before they are rotated."""
        return self.architecture == "Qwen3ForCausalLM"

    @classmethod
    def tiny(cls) -> ModelConfig:
        """A model of 140 thousand parameters that a CPU runs in milliseconds."""
        return _NAMED["tiny"]

    @classmethod
    def named(cls, name: str) -> ModelConfig:
        """The shape known as ``name``: ``tiny``, or one that benchmarks use."""
        try:
            return _NAMED[name]
        except KeyError:
            raise ModelConfigError(
                f"model {name!r}", expected=f"one of {', '.join(_NAMED)}", found=repr(name)
            ) from None

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """What ``directory/config.json``, in the form of HF transformers, describes.

        Errors: ``ModelConfigError`` naming file and field.
        """
        from graphrt_llm.models.hf_config import read_hf_config

        return read_hf_config(Path(directory) / "config.json")


_NAMED = {
    "tiny": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    ),
    # The published shapes of Qwen3-0.6B and Llama-3-8B.
    "qwen3-0.6b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        eos_token_ids=(151_645,),
        checkpoint_dtype="bfloat16",
    ),
    "llama3-8b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        eos_token_ids=(128_001,),
        checkpoint_dtype="bfloat16",
    ),
}

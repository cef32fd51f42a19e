"""The description of a model: the numbers of its architecture, also read from ``config.json``.

Fields that change what a model computes, and that this engine does not compute, are errors: a model
that runs with one of them ignored gives wrong logits and no message. Other unknown fields are
ignored.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from graphrt.errors import shown
from graphrt.files import checked_path, read_json
from graphrt_llm.errors import ModelConfigError

MOST_CONFIG_BYTES = 4 * 2**20
MOST_ELEMENTS = 2**28
MOST_OF = {"num_layers": 2**12, "rms_norm_eps": 1.0, "rope_theta": 1e15}
"""Checked before a tensor is made: no model is that large."""

Architecture = Literal["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]


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
    """A decoder of the Llama or Qwen3 family, with experts or without.

    Sizes are in elements, contexts in tokens.

    Errors: ``ModelConfigError`` for numbers that fit no model.

    ``max_position_embeddings``: The longest context: positions are below it.
    ``tie_word_embeddings``: The output projection is the embedding table.
    ``eos_token_ids``: Any of them ends a text.
    ``checkpoint_dtype``: The dtype that the checkpoint's own description states, such as
      ``"bfloat16"``.
    ``architecture``: Its family.
    ``vocab_size``: Tokens that it knows.
    ``hidden_size``: Of the residual stream.
    ``intermediate_size``: Of the gated MLP.
    ``num_layers``: Decoder layers.
    ``num_heads``: Heads of queries.
    ``num_kv_heads``: Heads of keys and values; each serves `num_heads / num_kv_heads` heads of
      queries.
    ``head_dim``: Elements of one head.
    ``rms_norm_eps``: Added to the mean square before its root is taken.
    ``rope_theta``: Base of the rotary frequencies.
    ``rope_scaling``: Of Llama 3, or none.
    ``attention_bias``: Projections of queries, keys, values and outputs have a bias.
    ``mlp_bias``: Projections of the MLP have a bias.
    ``num_experts``: In place of one MLP in each layer; 0: none.
    ``num_experts_per_tok``: Of these, how many compute a token.
    ``moe_intermediate_size``: Of an expert.
    ``norm_topk_prob``: The weights of a token's experts add up to 1.
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
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    eos_token_ids: tuple[int, ...] = field(default=())
    checkpoint_dtype: str | None = None

    def __post_init__(self) -> None:
        architectures, dtype = get_args(Architecture), self.checkpoint_dtype
        if not isinstance(self.architecture, str) or self.architecture not in architectures:
            raise ModelConfigError(
                "model field 'architecture'",
                expected=f"one of {', '.join(architectures)}",
                found=shown(self.architecture),
            )
        if not isinstance(dtype, str | None):
            raise ModelConfigError(
                "model field 'checkpoint_dtype'", expected="a name, or None", found=shown(dtype)
            )
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
        of_any_kind = ("rms_norm_eps", "rope_theta")
        for name in sizes:
            value = getattr(self, name)
            most = MOST_OF.get(name, MOST_ELEMENTS)
            is_number = type(value) is int or (type(value) is float and name in of_any_kind)
            if not (is_number and 0 < value <= most and math.isfinite(value)):
                raise ModelConfigError(
                    f"model field {name!r}",
                    expected=f"a number above 0, at most {most}, an integer where it counts",
                    found=shown(value),
                )
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MOST_ELEMENTS:
                raise ModelConfigError(
                    f"model field {name!r}",
                    expected=f"an integer of 0 to {MOST_ELEMENTS}",
                    found=shown(value),
                )
        if (self.architecture == "Qwen3MoeForCausalLM") != (self.num_experts > 0) or (
            self.num_experts
            and not (
                1 <= self.num_experts_per_tok <= self.num_experts <= 2**16
                and 1 <= self.moe_intermediate_size <= MOST_ELEMENTS
            )
        ):
            raise ModelConfigError(
                "model field 'num_experts'",
                expected="for Qwen3-MoE alone: num_experts_per_tok of 1 to num_experts, and a"
                " moe_intermediate_size",
                found=f"{self.architecture}, {self.num_experts} experts,"
                f" {self.num_experts_per_tok} a token, of {self.moe_intermediate_size}",
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
        return self.architecture.startswith("Qwen3")

    def part(self, world: int) -> ModelConfig:
        """What one of ``world`` ranks has that share the heads and the MLP of each layer.

        Where there are fewer key heads than ranks, several ranks have the same one.
        Errors: ``ModelConfigError`` for what cannot be divided.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        are_divided = not kv_heads % world or not world % kv_heads
        if heads % world or self.intermediate_size % world or not are_divided:
            raise ModelConfigError(
                f"a share of 1 of {world} ranks in each layer",
                expected="heads and intermediate_size that the ranks divide, and as many key heads"
                " as divide the ranks, or are divided by them",
                found=f"{heads} heads, {kv_heads} key heads, an intermediate_size of"
                f" {self.intermediate_size}",
            )
        return replace(
            self,
            num_heads=heads // world,
            num_kv_heads=max(kv_heads // world, 1),
            intermediate_size=self.intermediate_size // world,
        )

    @classmethod
    def tiny(cls) -> ModelConfig:
        """A model of 140 thousand parameters that a CPU runs in milliseconds."""
        return _TINY

    @classmethod
    def named(cls, name: str) -> ModelConfig:
        """The shape known as ``name``: ``tiny``, or one that benchmarks use."""
        if not isinstance(name, str) or name not in _NAMED:
            raise ModelConfigError(
                f"model {shown(name)}", expected=f"one of {', '.join(_NAMED)}", found=shown(name)
            )
        return _NAMED[name]

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """What ``directory/config.json``, in the form of HF transformers, describes.

        Errors: ``ModelConfigError`` naming file and field.
        """
        folder = checked_path("model directory", directory, ModelConfigError)
        return _read_hf_config(folder / "config.json")


_TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
_NAMED = {
    "tiny": _TINY,
    "tiny-moe": replace(
        _TINY,
        architecture="Qwen3MoeForCausalLM",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
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


Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]


class _Part(BaseModel):
    # Strict: neither "64" nor true is a size. (An integer is a float, in strict mode too.)
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Rope(_Part):
    """``rope_parameters``, or the older ``rope_scaling``, which leaves theta outside."""

    rope_type: Literal["default", "llama3"] = "default"
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: Literal[1] = 1

    @model_validator(mode="before")
    @classmethod
    def _older_name_of_the_type(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "type" in fields:
            return {"rope_type": fields["type"], **fields}
        return fields

    def scaling(self, max_position_embeddings: int) -> Llama3Scaling | None:
        if self.rope_type == "default":
            return None
        if self.factor is None or self.low_freq_factor is None or self.high_freq_factor is None:
            raise ValueError(
                "rope type 'llama3' needs factor, low_freq_factor and high_freq_factor"
            )
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("rope type 'llama3' needs low_freq_factor below high_freq_factor")
        return Llama3Scaling(
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_context=self.original_max_position_embeddings or max_position_embeddings,
        )


class _HFConfig(_Part):
    """The fields that decide what is computed, with transformers' defaults."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: list[int] | None = Field(default=None, max_length=0)
    hidden_act: Literal["silu"] = "silu"
    partial_rotary_factor: Literal[1] = 1
    use_sliding_window: Literal[False] | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    quantization_config: None = None

    @model_validator(mode="after")
    def _heads_divide_the_hidden_size(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("without head_dim, num_attention_heads must divide hidden_size")
        return self

    def to_model_config(self, architecture: Architecture) -> ModelConfig:
        is_qwen3 = architecture.startswith("Qwen3")
        num_experts = self.num_local_experts or self.num_experts or 0
        if is_qwen3 and self.num_key_value_heads is None:
            raise ValueError("num_key_value_heads is missing")
        if is_qwen3 and self.mlp_bias:
            raise ValueError("mlp_bias: Qwen3 has none")
        rope = self.rope_parameters or self.rope_scaling or _Rope()
        eos = self.eos_token_id
        return ModelConfig(
            architecture=architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            # Qwen3 fixes the width of a head, Llama derives it.
            head_dim=self.head_dim
            or (128 if is_qwen3 else self.hidden_size // self.num_attention_heads),
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=rope.rope_theta or self.rope_theta or 10_000.0,
            rope_scaling=rope.scaling(self.max_position_embeddings),
            tie_word_embeddings=self.tie_word_embeddings,
            attention_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            num_experts=num_experts if architecture == "Qwen3MoeForCausalLM" else 0,
            num_experts_per_tok=self.num_experts_per_tok or 0,
            moe_intermediate_size=self.moe_intermediate_size or 0,
            norm_topk_prob=self.norm_topk_prob,
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            checkpoint_dtype=self.dtype or self.torch_dtype,
        )


def _read_hf_config(file: Path) -> ModelConfig:
    fields = _read_object(file)
    architecture = _architecture(file, fields)
    try:
        return _HFConfig.model_validate(fields).to_model_config(architecture)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise ModelConfigError(
            str(file),
            expected=f"a {architecture} of the form that this engine computes",
            found="; ".join(
                f"{'.'.join(map(str, p['loc'])) or 'fields'}: {p['msg']}"
                + (
                    ""
                    if p["type"] in ("missing", "value_error")
                    else f", not {reprlib.repr(p['input'])}"
                )
                for p in problems
            ),
            do="use another checkpoint, or correct the fields named above.",
        ) from error
    except (ValueError, ModelConfigError) as error:
        found = f"{error.subject}: {error.found}" if isinstance(error, ModelConfigError) else error
        raise ModelConfigError(
            str(file),
            expected=getattr(error, "expected", "") or f"a complete {architecture}",
            found=str(found),
        ) from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        fields = read_json(file, MOST_CONFIG_BYTES)
    except OSError as error:
        raise ModelConfigError(
            str(file),
            expected="a model directory with a config.json",
            found=error.strerror or str(error),
            do="name a directory that holds config.json and *.safetensors files.",
        ) from error
    except ValueError as error:
        raise ModelConfigError(
            str(file), expected=f"JSON of at most {MOST_CONFIG_BYTES} bytes", found=str(error)
        ) from error
    if not isinstance(fields, dict):
        raise ModelConfigError(
            str(file), expected="a JSON object", found=f"a {type(fields).__name__}"
        )
    return fields


def _architecture(file: Path, fields: dict[str, Any]) -> Architecture:
    named = fields.get("architectures")
    supported: tuple[Architecture, ...] = get_args(Architecture)
    for architecture in supported:
        if named == [architecture]:
            return architecture
    raise ModelConfigError(
        f"{file}, field 'architectures'",
        expected=f"a list with one of {', '.join(supported)}",
        found=reprlib.repr(named) if "architectures" in fields else "no such field",
        do="use a checkpoint of a supported family.",
    )

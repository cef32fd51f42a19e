"""A model's description: read from config.json, or refused by file and field."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt_llm.errors import ModelConfigError
from graphrt_llm.kernels import EAGER
from graphrt_llm.models import CausalLM, Llama3Scaling, ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4}


def write(directory: Path, fields: object) -> Path:
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_the_least_a_llama_must_say_is_the_tiny_model(tmp_path: Path) -> None:
    assert ModelConfig.from_directory(write(tmp_path, LLAMA)) == ModelConfig.tiny()


def test_everything_a_file_says_arrives(tmp_path: Path) -> None:
    fields = {
        **QWEN3,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "eos_token_id": [7, 9],
        "dtype": "bfloat16",
        "use_cache": True,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 2,
    }
    assert ModelConfig.from_directory(write(tmp_path, fields)) == replace(
        ModelConfig.tiny(),
        architecture="Qwen3ForCausalLM",
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        tie_word_embeddings=True,
        attention_bias=True,
        eos_token_ids=(7, 9),
        checkpoint_dtype="bfloat16",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
    ],
    ids=["rope_scaling", "older", "rope_parameters"],
)
@pytest.mark.parametrize("original", [None, 64])
def test_both_forms_of_rotary_scaling_are_read(
    tmp_path: Path, fields: dict[str, Any], original: int | None
) -> None:
    for part in fields.values():
        if isinstance(part, dict) and original:
            part["original_max_position_embeddings"] = original
        elif isinstance(part, dict):
            part.pop("original_max_position_embeddings", None)
    config = ModelConfig.from_directory(write(tmp_path, {**LLAMA, **fields}))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=original or 256
    )


def test_null_scaling_is_no_scaling(tmp_path: Path) -> None:
    fields = {**LLAMA, "rope_scaling": None, "rope_theta": 3e4}
    config = ModelConfig.from_directory(write(tmp_path, fields))
    assert (config.rope_scaling, config.rope_theta) == (None, 3e4)


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    fields = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    config = ModelConfig.from_directory(write(tmp_path, fields))
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert ModelConfig.from_directory(write(tmp_path, QWEN3)).head_dim == 128


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in LLAMA.items() if k != name}


@pytest.mark.parametrize(
    ("fields", "mentions"),
    [
        (without("architectures"), ["architectures", "no such field", "LlamaForCausalLM"]),
        ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({**LLAMA, "architectures": "LlamaForCausalLM"}, ["architectures"]),
        ({**LLAMA, "architectures": None}, ["architectures", "None"]),
        (without("hidden_size"), ["hidden_size"]),
        ({**LLAMA, "vocab_size": "512"}, ["vocab_size", "'512'"]),
        ({**LLAMA, "vocab_size": True}, ["vocab_size"]),
        ({**LLAMA, "num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        (
            {**LLAMA, "num_hidden_layers": -2, "vocab_size": 1.5},
            ["num_hidden_layers", "vocab_size"],
        ),
        ({**LLAMA, "num_key_value_heads": 3}, ["num_kv_heads", "divisor"]),
        ({**LLAMA, "head_dim": 15}, ["head_dim", "even"]),
        ({**LLAMA, "num_attention_heads": 6}, ["head_dim"]),
        ({**LLAMA, "rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({**LLAMA, "hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling", "yarn", "llama3"]),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3"}}, ["factor"]),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "low_freq_factor": 4}},
            ["low_freq_factor"],
        ),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({**QWEN3, "use_sliding_window": True}, ["use_sliding_window"]),
        ({**QWEN3, "layer_types": ["sliding_attention"]}, ["layer_types"]),
        ({**LLAMA, "quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({k: v for k, v in QWEN3.items() if k != "num_key_value_heads"}, ["num_key_value_heads"]),
        ({**QWEN3, "mlp_bias": True}, ["mlp_bias"]),
        (["a list"], ["object", "list"]),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, fields: object, mentions: list[str]
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_directory(write(tmp_path, fields))
    message = str(caught.value)
    for mention in [str(tmp_path / "config.json"), *mentions]:
        assert mention in message
    assert caught.value.expected


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_directory(tmp_path)
    assert caught.value.subject == str(tmp_path / "config.json")


def test_a_directory_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_directory(tmp_path / "absent")
    assert caught.value.subject == str(tmp_path / "absent" / "config.json")


def test_named_shapes() -> None:
    assert ModelConfig.named("tiny") is ModelConfig.tiny()
    assert ModelConfig.named("qwen3-0.6b").num_layers == 28
    assert ModelConfig.named("llama3-8b").hidden_size == 4096
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.named("gpt-5")
    assert "qwen3-0.6b" in caught.value.expected


def test_a_configuration_is_read_without_torch() -> None:
    read = "from graphrt_llm.model_config import ModelConfig; ModelConfig.tiny()"
    code = f"{read}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rotation_turns_each_pair_by_its_angle() -> None:
    config = replace(ModelConfig.tiny(), head_dim=6)
    generator = torch.Generator().manual_seed(0)
    # Two queries, a key and a value of each token.
    heads = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64)
    before = heads.clone()
    positions = torch.tensor([0, 1, 7, 100, 255])
    rotation = CausalLM(config, torch.float64).rotary[positions]
    slots = torch.zeros(9, 2, 1, 6, dtype=torch.float64)
    slot_mapping = torch.tensor([8, 2, 3, 5, 0])
    EAGER.rotate_and_store(heads, None, 1e-6, rotation, slots, slot_mapping)

    pairs = torch.complex(before[:, :3, :3], before[:, :3, 3:])
    angles = positions[:, None] / 10_000.0 ** (torch.arange(3, dtype=torch.float64) / 3)
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    # The table is made in float32: at position 255 its angles carry about 255 of its roundings.
    torch.testing.assert_close(
        heads[:, :3], torch.cat((rotated.real, rotated.imag), -1), rtol=0, atol=255 * 2**-23
    )
    assert torch.equal(heads[:, 3], before[:, 3])
    assert torch.equal(slots[slot_mapping], heads[:, 2:, None])

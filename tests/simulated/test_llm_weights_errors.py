"""A checkpoint that does not fit is refused by name, and the model stays as it was."""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from graphrt_llm import weights
from graphrt_llm.errors import (
    MissingTensorError,
    TensorDtypeError,
    TensorRangeError,
    TensorShapeError,
    UnexpectedTensorError,
    WeightsError,
    WeightsFileError,
)
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.weights import load_safetensors, random_weights

INDEX = "model.safetensors.index.json"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def tensors_of(model: CausalLM) -> dict[str, Tensor]:
    return {name: destination.clone() for name, _, destination, _ in model.checkpoint_tensors()}


def save_single(directory: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory / "model.safetensors"


def save_shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def model() -> CausalLM:
    model = CausalLM(ModelConfig.tiny())
    random_weights(model, seed=1)
    return model


@pytest.fixture
def other() -> dict[str, Tensor]:
    """The weights of another model of the same shape."""
    model = CausalLM(ModelConfig.tiny())
    random_weights(model, seed=2)
    return tensors_of(model)


def assert_refused(
    model: CausalLM, directory: Path, error: type[WeightsError], *mentions: str
) -> WeightsError:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(error) as caught:
        load_safetensors(model, directory)
    assert type(caught.value) is error
    for mention in mentions:
        assert mention in str(caught.value)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), f"{name} was written"
    return caught.value


def test_a_single_file_and_shards_load_the_same(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor]
) -> None:
    (tmp_path / "single").mkdir()
    (tmp_path / "shards").mkdir()
    save_single(tmp_path / "single", other)
    save_shards(tmp_path / "shards", other)
    for form in ("single", "shards"):
        random_weights(model, seed=1)
        load_safetensors(model, tmp_path / form)
        assert all(torch.equal(t, other[name]) for name, t in tensors_of(model).items())


def test_a_missing_tensor_is_named(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor]
) -> None:
    del other[K_PROJ]
    save_single(tmp_path, other)
    assert_refused(model, tmp_path, MissingTensorError, str(tmp_path), K_PROJ)


def test_a_shape_that_is_another_is_named(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor]
) -> None:
    # One row would broadcast to the whole part.
    other[K_PROJ] = other[K_PROJ][:1].clone()
    file = save_single(tmp_path, other)
    error = assert_refused(model, tmp_path, TensorShapeError, str(file), K_PROJ)
    assert "(32, 64)" in error.expected
    assert "(1, 64)" in error.found


def test_a_quantised_tensor_is_refused(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor]
) -> None:
    other[K_PROJ] = other[K_PROJ].to(torch.int8)
    file = save_single(tmp_path, other)
    error = assert_refused(model, tmp_path, TensorDtypeError, str(file), K_PROJ)
    assert error.found == "I8"


def test_a_value_beyond_the_models_dtype_is_refused(
    tmp_path: Path, other: dict[str, Tensor]
) -> None:
    other[K_PROJ][3, 5] = -70_000.0
    file = save_single(tmp_path, other)
    with pytest.raises(TensorRangeError) as caught:
        load_safetensors(CausalLM(ModelConfig.tiny(), torch.float16), tmp_path)
    assert str(file) in str(caught.value)
    assert K_PROJ in str(caught.value)
    assert caught.value.found == "70000"
    load_safetensors(CausalLM(ModelConfig.tiny(), torch.bfloat16), tmp_path)


def test_a_cast_holds_one_tensor_of_the_checkpoint_at_a_time(
    tmp_path: Path, other: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_single(tmp_path, other)
    read: list[weakref.ref[Tensor]] = []
    open_file = weights.safe_open

    class Watched:
        """A file that remembers the tensors it gave out."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = open_file(*args, **kwargs)

        def __enter__(self) -> Watched:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Tensor:
            assert all(tensor() is None for tensor in read), "an earlier tensor is in memory"
            tensor: Tensor = self.file.get_tensor(name)
            read.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(weights, "safe_open", Watched)
    load_safetensors(CausalLM(ModelConfig.tiny(), torch.bfloat16), tmp_path)
    assert len(read) == len(other)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "lm_head.bias"])
def test_a_tensor_without_a_place_is_refused(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor], name: str
) -> None:
    other[name] = torch.ones(4)
    file = save_single(tmp_path, other)
    assert_refused(model, tmp_path, UnexpectedTensorError, str(file), name)


def test_tables_that_follow_from_the_configuration_may_be_there(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor]
) -> None:
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_single(tmp_path, {**other, **inv_freq})
    load_safetensors(model, tmp_path)
    loaded = tensors_of(model)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in other.items())


def test_a_tied_model_ignores_a_second_copy_of_its_table(tmp_path: Path) -> None:
    tied = CausalLM(replace(ModelConfig.tiny(), tie_word_embeddings=True))
    random_weights(tied, seed=3)
    tensors = tensors_of(tied)
    assert "lm_head.weight" not in tensors
    save_single(tmp_path, {**tensors, "lm_head.weight": torch.ones(512, 64)})
    load_safetensors(tied, tmp_path)
    assert torch.equal(tied.lm_head, tensors["model.embed_tokens.weight"])


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


def drop_last_bytes(content: bytes) -> bytes:
    return content[:-16]


def add_bytes(content: bytes) -> bytes:
    return content + b"more"


def spoil_header(content: bytes) -> bytes:
    return content[:8] + b"[" + content[9:]


def claim_a_huge_header(content: bytes) -> bytes:
    return struct.pack("<Q", 2**62) + content[8:]


@pytest.mark.parametrize(
    "spoil",
    [cut(0), cut(5), cut(300), drop_last_bytes, add_bytes, spoil_header, claim_a_huge_header],
    ids=["empty", "length", "header", "data", "excess", "json", "huge"],
)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_a_file_that_is_not_whole_is_named(
    tmp_path: Path,
    model: CausalLM,
    other: dict[str, Tensor],
    spoil: Callable[[bytes], bytes],
    sharded: bool,
) -> None:
    if sharded:
        save_shards(tmp_path, other)
    else:
        save_single(tmp_path, other)
    # The last shard: the first is whole and could have been loaded already.
    file = tmp_path / ("b.safetensors" if sharded else "model.safetensors")
    file.write_bytes(spoil(file.read_bytes()))
    error = assert_refused(model, tmp_path, WeightsFileError, str(file))
    assert error.__cause__ is not None


def test_no_checkpoint_says_what_is_there(tmp_path: Path, model: CausalLM) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert_refused(model, tmp_path, WeightsFileError, str(tmp_path), "pytorch_model.bin")
    assert_refused(model, tmp_path / "absent", WeightsFileError, "no such directory")


def test_a_missing_shard_is_named(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor]
) -> None:
    save_shards(tmp_path, other)
    (tmp_path / "b.safetensors").unlink()
    assert_refused(model, tmp_path, WeightsFileError, "b.safetensors", "no such file")


def test_an_index_that_promises_too_much_is_refused(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor]
) -> None:
    save_shards(tmp_path, other)
    index = json.loads((tmp_path / INDEX).read_text())
    shard = index["weight_map"][K_PROJ]
    index["weight_map"][K_PROJ] = {"a.safetensors": "b.safetensors"}.get(shard, "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert_refused(model, tmp_path, MissingTensorError, K_PROJ)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_named(tmp_path: Path, model: CausalLM, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    assert_refused(model, tmp_path, WeightsFileError, INDEX)


def test_an_index_may_not_lead_out_of_its_directory(
    tmp_path: Path, model: CausalLM, other: dict[str, Tensor]
) -> None:
    save_single(tmp_path, other)
    inner = tmp_path / "inner"
    inner.mkdir()
    weight_map = dict.fromkeys(other, "../model.safetensors")
    (inner / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_refused(model, inner, WeightsFileError, "../model.safetensors")

"""Fills a model's weights: from a safetensors checkpoint, or seeded at random.

Both work on one tensor at a time, so that no second copy of the model is ever in memory. Names,
shapes and dtypes of a whole checkpoint are checked before the first byte of the model is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphrt.files import checked_path, open_regular, read_json
from graphrt_llm.errors import (
    MissingTensorError,
    TensorDtypeError,
    TensorRangeError,
    TensorShapeError,
    UnexpectedTensorError,
    WeightsFileError,
)
from graphrt_llm.models.causal_lm import CausalLM
from graphrt_llm.models.parameters import CheckpointTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_INDEX_BYTES = 64 * 2**20

# Names of the safetensors format. Other dtypes (quantised, integer) are not supported.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_QUERY_KEY_WEIGHTS = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")


class _Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    handle: Any
    shape: tuple[int, ...]
    dtype: str


def load_safetensors(model: CausalLM, directory: str | Path) -> None:
    """Fill ``model`` from the ``*.safetensors`` of ``directory``, one file or sharded by an index.

    A tensor of another floating dtype is cast to the model's while it is read.

    Errors: ``WeightsFileError``, ``MissingTensorError``, ``UnexpectedTensorError``,
    ``TensorShapeError``, ``TensorDtypeError`` (a quantised tensor), each naming file and tensor;
    the model is then as it was. ``TensorRangeError`` for a value that the model's dtype cannot
    hold: the tensors before it are written then.
    """
    directory = checked_path("checkpoint", directory, WeightsFileError)
    with ExitStack() as files:
        stored = _open_checkpoint(directory, files)
        wanted = list(model.checkpoint_tensors())
        for tensor in wanted:
            _check(tensor, stored.get(tensor.name), directory)
        _check_all_used(model, stored, wanted)
        with torch.no_grad():
            for name, _, destination, part in wanted:
                handle = stored[name].handle
                values = handle.get_slice(name)[part] if part else handle.get_tensor(name)
                _check_range(stored[name].file, name, values, model.dtype)
                destination.copy_(values)
                del values  # Before the next one is read.


def random_weights(model: CausalLM, seed: int) -> None:
    """Fill ``model`` with random weights, drawn on its device without a copy from the host.

    ``seed`` decides them: on one kind of device they are the same in every dtype, up to rounding.
    A CPU and a GPU draw different ones.

    Projections keep the scale of their input, and norms vary around 1. Embeddings are smaller than
    what the layers add: otherwise a token would repeat itself where the output projection is the
    embedding table. Queries and keys are large, so that attention selects a few tokens: an average
    would let the last token decide the next, and texts would soon repeat.
    """
    device = model.embedding.device
    generator = torch.Generator(device)
    with torch.no_grad():
        for name, shape, destination, part in model.checkpoint_tensors():
            # One seed for each tensor. Torch's CPU generator uses only 32 bits of a seed.
            generator.manual_seed(crc32(f"{seed} {name}".encode()))
            values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
            if len(shape) == 2:
                values.div_(math.sqrt(shape[1]))
            elif name.endswith("norm.weight"):
                values.mul_(0.1).add_(1)
            else:
                values.mul_(0.1)
            if name.endswith(_QUERY_KEY_WEIGHTS):
                values.mul_(2)
            destination.copy_(values[part])


def _open_checkpoint(directory: Path, files: ExitStack) -> Mapping[str, _Stored]:
    """Every tensor of the checkpoint by name; files stay open until ``files`` is left."""
    if (directory / INDEX).is_file():
        return _open_sharded(directory, files)
    if not (directory / SINGLE).is_file():
        present = sorted(path.name for path in directory.glob("*")) if directory.is_dir() else None
        raise WeightsFileError(
            str(directory),
            expected=f"{SINGLE}, or {INDEX} with its shards",
            found="no such directory" if present is None else ", ".join(present[:8]) or "no files",
            do="name the directory of a checkpoint in safetensors form.",
        )
    return dict(open_safetensors(directory / SINGLE, files))


def _open_sharded(directory: Path, files: ExitStack) -> Mapping[str, _Stored]:
    index = directory / INDEX
    try:
        weight_map = read_json(index, MOST_INDEX_BYTES)["weight_map"]
        shard_of = {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsFileError(
            str(index),
            expected='a JSON object with "weight_map": tensor name -> file name',
            found=f"{type(error).__name__}: {error}",
        ) from error
    opened: dict[str, dict[str, _Stored]] = {}
    for shard in sorted(set(shard_of.values())):
        if Path(shard).name != shard:
            raise WeightsFileError(
                str(index), expected="names of files beside the index", found=repr(shard)
            )
        opened[shard] = dict(open_safetensors(directory / shard, files))
    for name, shard in shard_of.items():
        if name not in opened[shard]:
            raise MissingTensorError(
                f"{directory / shard}, tensor {name!r}",
                expected=f"the tensor that {INDEX} places here",
                found="no tensor of this name",
            )
    return {name: opened[shard][name] for name, shard in shard_of.items()}


def open_safetensors(path: Path, files: ExitStack) -> Iterator[tuple[str, _Stored]]:
    """Every tensor of one file by name, unread; it stays open until ``files`` is left.

    Errors: ``WeightsFileError``.
    """
    try:
        # The reader of the format would wait for whoever writes into a pipe.
        open_regular(path).close()
        handle = files.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError, MemoryError) as error:
        raise WeightsFileError(
            str(path),
            expected="a complete safetensors file",
            found=f"{error} ({path.stat().st_size} bytes)" if path.is_file() else "no such file",
            do="fetch the file again; nothing was loaded.",
        ) from error
    for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
        part = handle.get_slice(name)
        yield name, _Stored(path, handle, tuple(part.get_shape()), part.get_dtype())


def _check(tensor: CheckpointTensor, stored: _Stored | None, directory: Path) -> None:
    if stored is None:
        raise MissingTensorError(
            f"{directory}, tensor {tensor.name!r}",
            expected=f"shape {tensor.shape}",
            found="no tensor of this name",
            do="check that config.json and the weights belong together.",
        )
    subject = f"{stored.file}, tensor {tensor.name!r}"
    if stored.shape != tensor.shape:
        raise TensorShapeError(
            subject,
            expected=f"shape {tensor.shape}",
            found=f"shape {stored.shape}",
            do="check that config.json and the weights belong together.",
        )
    if stored.dtype not in _DTYPES:
        raise TensorDtypeError(
            subject,
            expected=f"one of {', '.join(_DTYPES)}",
            found=stored.dtype,
            do="use a checkpoint that is not quantised.",
        )


def _check_range(file: Path, name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Errors: ``TensorRangeError`` if a cast to ``dtype`` would turn a number into infinity."""
    most = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max <= most:
        return
    largest = max(abs(value.item()) for value in values.aminmax())
    if most < largest < math.inf:
        raise TensorRangeError(
            f"{file}, tensor {name!r}",
            expected=f"values of at most {most:g}, the largest of {dtype}",
            found=f"{largest:g}",
            do="set EngineConfig.dtype to bfloat16 or float32.",
        )


def _check_all_used(
    model: CausalLM, stored: Mapping[str, _Stored], wanted: list[CheckpointTensor]
) -> None:
    """A tensor that the model does not use means another architecture, and wrong logits."""
    known = {tensor.name for tensor in wanted}
    if model.config.tie_word_embeddings:
        known.add("lm_head.weight")
    for name, tensor in stored.items():
        # Older checkpoints store the rotary table, which the configuration gives too.
        is_known = name in known or model.is_elsewhere(name)
        if not is_known and not name.endswith(".rotary_emb.inv_freq"):
            raise UnexpectedTensorError(
                f"{tensor.file}, tensor {name!r}",
                expected=f"tensors of {model.config.architecture} as config.json describes it",
                found="a tensor that this model has no place for",
                do="check that config.json and the weights belong together.",
            )

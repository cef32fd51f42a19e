"""What is no name, or no path: one typed error from each public function that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from graphrt import (
    BatchDescriptor,
    BufferSpec,
    CompilationConfig,
    CUDAGraphWrapper,
    CustomOp,
    GraphLibrary,
    LoggingObserver,
    RuntimeMode,
    Workspace,
    break_point,
    make_device,
)
from graphrt.errors import GraphrtError
from graphrt.planner import read_azure_csv, read_mooncake_jsonl, read_trace
from graphrt.report import check_report_path
from graphrt_llm import (
    CausalLM,
    EngineConfig,
    LLMEngine,
    ModelConfig,
    load_lora,
    load_safetensors,
    make_attention,
    register_attention_backend,
)
from lab import FULL, KEY, Lab


class Raising:
    def __fspath__(self) -> str:
        raise OSError("no path")


OTHERS = {
    "three": 3,
    "bytes": b"x",
    "no bytes": b"",
    "list": [],
    "dict": {},
    "array": numpy.array([1, 2]),
    "tensor": torch.ones(2),
    "object": Raising(),
}
"""What is neither a name nor a path."""
NO_PATHS = OTHERS | {"none": None, "empty": "", "zero": "a\0b", "half": "\ud800"}

TINY = ModelConfig.tiny()
TAKES_PATHS: dict[str, Callable[[Any], Any]] = {
    "read_trace": read_trace,
    "read_azure_csv": read_azure_csv,
    "read_mooncake_jsonl": read_mooncake_jsonl,
    "check_report_path": check_report_path,
    "ModelConfig.from_directory": ModelConfig.from_directory,
    "LLMEngine.from_model_dir": LLMEngine.from_model_dir,
    "load_lora": lambda value: load_lora(value, TINY),
    "load_safetensors": lambda value: load_safetensors(CausalLM(TINY), value),
}


def in_library(call: Callable[[GraphLibrary, Any], Any]) -> Callable[[Any], Any]:
    def called(value: Any) -> Any:
        with Lab().library as library:
            return call(library, value)

    return called


TAKES_NAMES: dict[str, Callable[[Any], Any]] = {
    "make_device": make_device,
    "GraphLibrary": lambda value: GraphLibrary(value),
    "program": in_library(lambda library, value: library.program(value, FULL, KEY)),
    "stream": in_library(lambda library, value: library.stream(value)),
    "invalidate": in_library(lambda library, value: library.invalidate(value)),
    "wrapper": in_library(
        lambda library, value: CUDAGraphWrapper(torch.relu, FULL, library, name=value)
    ),
    "CompilationConfig.from_json": CompilationConfig.from_json,
    "BufferSpec": lambda value: BufferSpec(value, ("n", 4), torch.float32),
    "Workspace": lambda value: Workspace(value),
    "break_point": lambda value: break_point(name=value),
    "break_point out": lambda value: break_point(out=value),
    "LoggingObserver": LoggingObserver,
    "CustomOp.register": lambda value: CustomOp.register(value)(CustomOp),
    "ModelConfig.named": ModelConfig.named,
    "architecture": lambda value: ModelConfig(**{**SHAPE, "architecture": value}),
    "checkpoint_dtype": lambda value: ModelConfig(**SHAPE, checkpoint_dtype=value),
    "attention_backend": lambda value: EngineConfig(attention_backend=value),
    "dtype": lambda value: EngineConfig(dtype=value),
    "load_format": lambda value: EngineConfig(load_format=value),
    "make_attention": lambda value: make_attention(value, None),  # type: ignore[arg-type]
    "register_attention_backend": lambda value: register_attention_backend(value, make_attention),
}
SHAPE: dict[str, Any] = {
    name: getattr(TINY, name)
    for name in (
        *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers"),
        *("num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"),
    )
}


@pytest.mark.parametrize("value", NO_PATHS.values(), ids=list(NO_PATHS))
@pytest.mark.parametrize("call", TAKES_PATHS.values(), ids=list(TAKES_PATHS))
def test_what_is_no_path_is_refused_with_what_was_expected(
    call: Callable[[Any], Any], value: object
) -> None:
    with pytest.raises(GraphrtError) as caught:
        call(value)
    assert "a path" in caught.value.expected
    assert caught.value.found
    assert caught.value.do


def test_path_likes_and_texts_are_paths(tmp_path: Path) -> None:
    class Place:
        def __fspath__(self) -> str:
            return str(tmp_path / "trace")

    (tmp_path / "trace").write_text('{"timestamp": 1, "input_length": 1, "output_length": 1}')
    assert len(read_trace(str(tmp_path / "trace"))) == 1
    assert len(read_trace(Place())) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_options_with_a_path_that_no_system_takes_are_refused(text: str) -> None:
    for name in ("cache_dir", "debug_dump_path"):
        with pytest.raises(GraphrtError, match=name):
            CompilationConfig(**{name: text})


@pytest.mark.parametrize("value", OTHERS.values(), ids=list(OTHERS))
@pytest.mark.parametrize("call", TAKES_NAMES.values(), ids=list(TAKES_NAMES))
def test_what_is_no_name_is_refused_with_what_was_expected(
    call: Callable[[Any], Any], value: object
) -> None:
    with pytest.raises(GraphrtError) as caught:
        call(value)
    assert caught.value.expected
    assert caught.value.found


@pytest.mark.parametrize("device", ["nowhere", [], "", 2.5])
def test_workspace_on_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(GraphrtError, match="device"):
        Workspace("scratch", device)


def test_library_asked_for_what_is_no_key_says_so() -> None:
    with Lab().library as library:
        for mode, key in (([], KEY), (FULL, []), (RuntimeMode.FULL, 4)):
            with pytest.raises(GraphrtError):
                library.program("model", mode, key)  # type: ignore[arg-type]
        assert library.program("model", FULL, BatchDescriptor(4)) is None

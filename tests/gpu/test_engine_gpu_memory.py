"""What an engine takes of a GPU's memory, and gives back."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from engines import QWEN, engine_config, greedy, make_engine, prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.device.cuda import CUDADevice
from graphrt_llm import CausalLM, LLMEngine, assembly, random_weights
from graphrt_llm.errors import EngineConfigError

pytestmark = pytest.mark.filterwarnings("ignore:::flashinfer.*")
SLACK = 2**20
"""Bytes that kernels of the first engine keep for all later ones."""


def test_a_closed_engine_gives_its_memory_back() -> None:
    def serve() -> None:
        with make_engine(QWEN, "FULL_AND_PIECEWISE") as engine:
            engine.generate(prompts(3, QWEN.vocab_size), greedy(8))
            assert torch.cuda.memory_allocated() > before + engine.attention_backend.cache.num_bytes

    before = torch.cuda.memory_allocated()
    serve()
    before = torch.cuda.memory_allocated()
    serve()
    assert torch.cuda.memory_allocated() <= before + SLACK


class OnlyOnGPU(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (*args, result):
            assert not isinstance(value, Tensor) or value.device.type == "cuda", func
        return result


def test_random_weights_are_drawn_on_the_gpu_and_by_their_seed() -> None:
    models = [CausalLM(QWEN, torch.bfloat16, "cuda") for _ in range(3)]
    with OnlyOnGPU():
        for model, seed in zip(models, (0, 0, 1), strict=True):
            random_weights(model, seed)
    first, again, other = (list(model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_share_too_small_for_one_request_is_refused() -> None:
    config = replace(engine_config("NONE"), gpu_memory_utilization=1e-9)
    with pytest.raises(EngineConfigError, match="MiB"):
        LLMEngine.with_random_weights(QWEN, config)


def test_no_thread_multiplies_while_a_start_drops_the_workspaces_of_cublas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are those of every thread: its product would read memory that is gone."""
    are_loaded, is_over = Event(), Event()
    trimmed_after: list[bool] = []
    load, load_kernels, trim = assembly._load, assembly._load_kernels, CUDADevice.trim

    def weights(*args: Any) -> Any:
        model = load(*args)
        are_loaded.set()
        return model

    def kernels(*args: Any) -> None:
        are_loaded.wait(60)
        load_kernels(*args)
        is_over.set()

    def trims(device: CUDADevice) -> None:
        trimmed_after.append(is_over.is_set())
        trim(device)

    monkeypatch.setattr(assembly, "_load", weights)
    monkeypatch.setattr(assembly, "_load_kernels", kernels)
    monkeypatch.setattr(CUDADevice, "trim", trims)
    config = replace(engine_config("NONE"), capture="by_priority")
    LLMEngine.with_random_weights(QWEN, config).close()
    assert trimmed_after
    assert all(trimmed_after)

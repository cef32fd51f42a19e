"""Adapters in PEFT's format: what they compute in HF's model, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_adapters import record_logits, save_peft
from llm_traffic import engine_config
from safetensors.torch import load_file, save_file
from test_llm_models_parity import make_hf_model

from graphrt_llm import LLMEngine, LoRAAdapter, ModelConfig, SamplingParams, load_lora, random_lora
from graphrt_llm.errors import (
    AdapterError,
    AdapterModelError,
    GraphrtError,
    MissingTensorError,
    WeightsFileError,
)

TINY = ModelConfig.tiny()


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_an_adapter_equals_the_one_merged_into_hf_llama(tmp_path, mode, use_rslora):
    """PEFT computes ``W x + lora_alpha / r * B A x`` (rsLoRA: over the root of r)."""
    hf = make_hf_model("Llama", {})
    hf.save_pretrained(tmp_path / "model")
    config = ModelConfig.from_directory(tmp_path / "model")
    drawn = random_lora(config, rank=4, seed=3)
    kept = {
        n: f for n, f in drawn.factors.items() if n[1].endswith(("q_proj", "v_proj", "down_proj"))
    }
    adapter = LoRAAdapter(rank=4, scaling=1.0, factors=kept)
    save_peft(adapter, tmp_path / "adapter", lora_alpha=6, use_rslora=use_rslora)
    scaling = 6 / (2 if use_rslora else 4)
    modules = dict(hf.named_modules())
    with torch.no_grad():
        for (layer, part), (a, b) in kept.items():
            modules[f"model.layers.{layer}.{part}"].weight.add_(scaling * b @ a)
        tokens = [5, 9, 60, 2]
        expected = []
        for _ in range(4):
            logits = hf(torch.tensor([tokens])).logits[0, -1]
            expected.append(logits)
            tokens.append(int(logits.argmax()))
    asked = replace(engine_config(mode, max_loras=1), dtype="float32")
    with LLMEngine.from_model_dir(tmp_path / "model", asked) as engine:
        engine.add_lora("a", tmp_path / "adapter")
        engine.capture()
        found = record_logits(engine)
        params = SamplingParams(max_tokens=4)
        assert engine.generate([5, 9, 60, 2], params, loras="a") == tokens[4:]
    torch.testing.assert_close(
        torch.stack(found["request-0"]), torch.stack(expected), rtol=0, atol=1e-4
    )


def change(**fields: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return edit


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "adapter_model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)

    return apply


def first(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if "lora_A" in name)


@pytest.mark.parametrize(
    ("break_it", "error", "named"),
    [
        (lambda d: (d / "adapter_config.json").unlink(), AdapterError, "adapter_config.json"),
        (lambda d: (d / "adapter_config.json").write_text("["), AdapterError, "JSON"),
        (lambda d: (d / "adapter_config.json").write_text("[]"), AdapterError, "list"),
        (change(r=32), AdapterError, "max_lora_rank = 16"),
        (change(r=0), AdapterError, "'r'"),
        (change(r=True), AdapterError, "'r'"),
        (change(lora_alpha="8"), AdapterError, "lora_alpha"),
        (change(lora_alpha=10**400), AdapterError, "lora_alpha"),
        (change(use_rslora="no"), AdapterError, "use_rslora"),
        (change(init_lora_weights="pissa"), AdapterError, "pissa"),
        (change(alora_invocation_tokens=[1]), AdapterError, "alora_invocation_tokens"),
        (change(target_modules=[["q_proj"]]), AdapterError, "target_modules"),
        (change(peft_type="IA3"), AdapterError, "IA3"),
        (change(use_dora=True), AdapterError, "use_dora"),
        (change(bias="all"), AdapterError, "bias"),
        (change(modules_to_save=["lm_head"]), AdapterError, "modules_to_save"),
        (change(target_modules=["embed_tokens"]), AdapterError, "embed_tokens"),
        (change(target_modules=".*"), AdapterError, "target_modules"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), WeightsFileError, "adapter_model"),
        (edit_tensors(lambda t: t.pop(first(t))), MissingTensorError, "lora_A"),
        (
            edit_tensors(lambda t: t.update({first(t): torch.zeros(8, 3)})),
            AdapterModelError,
            "(8, 3)",
        ),
        (
            edit_tensors(lambda t: t.update(other=torch.zeros(1))),
            AdapterModelError,
            "other",
        ),
        (
            edit_tensors(lambda t: t[first(t)].fill_(float("nan"))),
            AdapterError,
            "finite",
        ),
        (
            edit_tensors(lambda t: t.update({first(t): t[first(t)].int()})),
            AdapterError,
            "int32",
        ),
    ],
)
def test_a_broken_adapter_is_an_error_by_name(tmp_path, break_it, error, named):
    directory = tmp_path / "adapter"
    save_peft(random_lora(TINY, rank=8), directory)
    break_it(directory)
    with pytest.raises(error) as raised:
        load_lora(directory, TINY, max_rank=16)
    assert isinstance(raised.value, GraphrtError)
    assert named in str(raised.value)


@pytest.mark.filterwarnings("ignore")  # Of the library, about others.
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_that_peft_saved_gives_its_logits(tmp_path, use_rslora):
    peft = pytest.importorskip("peft", reason="needs the package peft")
    hf = make_hf_model("Llama", {})
    hf.save_pretrained(tmp_path / "model")
    described = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=use_rslora,
        target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        init_lora_weights=False,  # Else B is zero, and the adapter does nothing.
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(hf, described).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokens, expected = [5, 9, 60, 2], []
    with torch.no_grad():
        for _ in range(4):
            logits = adapted(torch.tensor([tokens])).logits[0, -1]
            expected.append(logits)
            tokens.append(int(logits.argmax()))
    asked = replace(engine_config("FULL_AND_PIECEWISE", max_loras=2), dtype="float32")
    with LLMEngine.from_model_dir(tmp_path / "model", asked) as engine:
        engine.add_lora("a", tmp_path / "adapter")
        engine.capture()
        found = record_logits(engine)
        params = SamplingParams(max_tokens=4)
        assert engine.generate([tokens[:4]] * 2, params, loras=["a", None])[0] == tokens[4:]
        torch.testing.assert_close(
            torch.stack(found["request-0"]), torch.stack(expected), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("field", ["num_layers", "hidden_size"])
def test_an_adapter_of_another_model_is_refused(tmp_path, field):
    other = replace(TINY, **{field: 2 * getattr(TINY, field)})
    save_peft(random_lora(other), tmp_path)
    with pytest.raises(AdapterModelError):
        load_lora(tmp_path, TINY)
    save_peft(random_lora(TINY), tmp_path)
    with pytest.raises((MissingTensorError, AdapterModelError)):
        load_lora(tmp_path, other)


def test_a_saved_adapter_is_read_as_it_was(tmp_path):
    adapter = random_lora(TINY, rank=3, seed=1)
    save_peft(adapter, tmp_path, target_modules="all-linear")
    read = load_lora(tmp_path, TINY)
    assert (read.rank, read.scaling) == (3, 1.0)
    assert read.factors.keys() == adapter.factors.keys()
    for name, factors in adapter.factors.items():
        assert all(map(torch.equal, factors, read.factors[name]))

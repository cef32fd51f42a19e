"""The engine's interface: requests, model directories, errors, closing."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_traffic import TRAFFIC, engine_config, prompt
from safetensors.torch import load_file, save_file

from graphrt import (
    CompilationConfig,
    InProcessExchange,
    RuntimeConfig,
    SimulatedDevice,
    StepMetrics,
)
from graphrt.errors import CaptureInProgressError, GraphrtError
from graphrt_llm import EngineConfig, FinishReason, LLMEngine, SamplingParams
from graphrt_llm.assembly import TINY_CONFIG
from graphrt_llm.errors import (
    AttentionBackendError,
    EngineConfigError,
    EngineStateError,
    PromptTooLongError,
    RequestError,
    UnknownAdapterError,
    UnknownRequestError,
)
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.weights import random_weights

FIRST = TRAFFIC[0]
"""A greedy request of 14 tokens."""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of requests 0 and 3, each served alone."""
    with LLMEngine.tiny(engine_config()) as engine:
        return [engine.generate([TRAFFIC[i].prompt], TRAFFIC[i].params)[0] for i in (0, 3)]


def test_a_request_can_be_aborted_between_any_two_steps(expected):
    with LLMEngine.tiny(engine_config()) as engine:
        for after in range(0, 12, 3):
            engine.add_request(FIRST.prompt, FIRST.params, "stays")
            engine.add_request(TRAFFIC[3].prompt, TRAFFIC[3].params, "goes")
            tokens = {"stays": [], "goes": []}
            for number in range(100):
                if number == after:
                    output = engine.abort("goes")
                    assert output == ("goes", (), FinishReason.ABORTED)
                for output in engine.step().outputs:
                    tokens[output.request_id] += output.new_token_ids
                if not engine.has_unfinished():
                    break
            assert tokens["stays"] == expected[0]
            assert tokens["goes"] == expected[1][: len(tokens["goes"])]
            with pytest.raises(UnknownRequestError):
                engine.abort("goes")


@pytest.mark.parametrize(
    ("seed", "num_different"), [(None, 3), (3, 1)], ids=["the engine's", "its own"]
)
def test_a_request_samples_by_its_seed_or_the_engines(seed, num_different):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)

    def draw(asks_margin: bool) -> list[list[int]]:
        with LLMEngine.tiny(engine_config()) as engine:
            if asks_margin:  # Which is a request too, but must not change a later one's seed.
                engine.top2_margin([5])
            return engine.generate([[1, 2, 3]] * 3, params)

    tokens = draw(asks_margin=False)
    assert len(set(map(tuple, tokens))) == num_different
    assert draw(asks_margin=True) == tokens


def test_the_models_end_token_ends_a_request_by_default(expected):
    end = expected[0][2]
    first = expected[0].index(end)
    model = replace(ModelConfig.tiny(), eos_token_ids=(end,))
    with LLMEngine.with_random_weights(model, engine_config()) as engine:
        assert engine.generate([FIRST.prompt], FIRST.params) == [expected[0][: first + 1]]
        params = replace(FIRST.params, ignore_eos=True)
        assert engine.generate([FIRST.prompt], params) == [expected[0]]


def save_tiny(directory: Path, dtype: torch.dtype = torch.float64) -> None:
    """The tiny model as a checkpoint, with the weights that an engine of seed 0 draws."""
    config = ModelConfig.tiny()
    model = CausalLM(config, dtype=torch.float64)
    random_weights(model, seed=0)
    tensors = {
        t.name: t.destination.detach().to(dtype).clone().contiguous()
        for t in model.checkpoint_tensors()
    }
    save_file(tensors, directory / "model.safetensors")
    described = {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps(described))


def test_a_model_directory_gives_an_engine_with_its_weights(tmp_path, expected):
    save_tiny(tmp_path)
    with LLMEngine.from_model_dir(tmp_path, replace(engine_config(), dtype=None)) as engine:
        assert engine.generate([FIRST.prompt], FIRST.params) == [expected[0]]
    (tmp_path / "model.safetensors").unlink()
    dummy = replace(engine_config(), load_format="dummy")
    with LLMEngine.from_model_dir(tmp_path, dummy) as engine:
        assert engine.generate([FIRST.prompt], FIRST.params) == [expected[0]]


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
        (lambda d: save_tiny(d, dtype=torch.int8), "i8"),
    ],
    ids=["no config", "no json", "no weights", "another dtype"],
)
def test_a_broken_model_directory_is_an_error_by_name(tmp_path, break_it, named):
    save_tiny(tmp_path)
    break_it(tmp_path)
    with pytest.raises(GraphrtError) as raised:
        LLMEngine.from_model_dir(tmp_path, engine_config())
    assert named in str(raised.value).lower()


DTYPES = ["float64", "float32", "bfloat16", "float16"]


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("asked", DTYPES)
def test_a_checkpoint_is_cast_to_the_dtype_asked_for(tmp_path, stored, asked):
    save_tiny(tmp_path, getattr(torch, stored))
    config = replace(engine_config("FULL_DECODE_ONLY"), dtype=asked)
    with LLMEngine.from_model_dir(tmp_path, config) as engine:
        engine.capture()
        assert len(engine.generate([1, 2, 3])) == 16
        model = engine.runtime.runner.fn.model
        read = load_file(tmp_path / "model.safetensors")
        for name, _, weight, _ in model.checkpoint_tensors():
            assert torch.equal(weight, read[name].to(getattr(torch, asked)))


def test_without_a_dtype_the_checkpoints_own_is_used(tmp_path):
    save_tiny(tmp_path, torch.bfloat16)
    with LLMEngine.from_model_dir(tmp_path, replace(engine_config(), dtype=None)) as engine:
        assert engine.attention_backend.cache.tensor.dtype == torch.bfloat16


def test_a_range_longer_than_any_prompt_is_not_listed():
    with LLMEngine.tiny(engine_config()) as engine:
        for add in (engine.generate, engine.add_request):
            with pytest.raises(RequestError):
                add(range(10**12))
        assert engine.generate(range(1, 4)) == engine.generate([1, 2, 3])


@pytest.mark.parametrize("name", [[], 3, None])
def test_a_name_of_another_kind_is_unknown(name):
    with LLMEngine.tiny(engine_config()) as engine, pytest.raises(UnknownRequestError):
        engine.abort(name)
    with pytest.raises((AttentionBackendError, EngineConfigError)):
        LLMEngine.tiny(replace(engine_config(), attention_backend=name))


def test_a_mapping_in_place_of_a_config_is_refused_by_name():
    with pytest.raises(EngineConfigError, match="an EngineConfig"):
        LLMEngine.tiny({"device": "simulated"})


def test_an_engine_that_fails_to_start_closes_its_device(monkeypatch):
    closed = []
    close = SimulatedDevice.close
    monkeypatch.setattr(SimulatedDevice, "close", lambda d: (closed.append(d), close(d)))
    with pytest.raises(EngineConfigError):
        LLMEngine.tiny(replace(engine_config(), num_blocks=3))
    assert len(closed) == 1
    LLMEngine.tiny(engine_config()).close()
    assert len(closed) == 2


def test_generate_serves_one_prompt_as_a_list_of_its_tokens(expected):
    with LLMEngine.tiny(engine_config()) as engine:
        prompt = FIRST.prompt
        for one in (prompt, tuple(prompt), np.array(prompt), torch.tensor(prompt)):
            assert engine.generate(one, FIRST.params) == expected[0]
        for several in ([prompt, prompt], np.array([prompt] * 2), torch.tensor([prompt] * 2)):
            assert engine.generate(several, FIRST.params) == [expected[0]] * 2


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        ("hello", "a str"),
        (["hello", "there"], "a list of str"),
        ([1, [2, 3]], "a list of int and list"),
        ([[1], "there"], "a list of list and str"),
        ([None], "a list of NoneType"),
        (3, "a int"),
        ({1: [2]}, "a dict"),
        (torch.tensor(3), "a Tensor"),
    ],
    ids=["text", "texts", "mixed", "with text", "none", "number", "dict", "scalar"],
)
def test_generate_says_what_is_no_prompt(prompts, found):
    with LLMEngine.tiny(engine_config()) as engine:
        with pytest.raises(RequestError) as raised:
            engine.generate(prompts)
        assert raised.value.found == found
        assert "[1, 2, 3]" in raised.value.expected
        assert not engine.has_unfinished()


def test_arguments_of_another_type_are_refused():
    with LLMEngine.tiny(engine_config()) as engine:
        with pytest.raises(RequestError, match="a string, or None"):
            engine.add_request([1], request_id=["a"])  # type: ignore[arg-type]
        with pytest.raises(UnknownAdapterError, match="adapter 5"):
            engine.generate([[1, 2]], loras=5)  # type: ignore[call-overload]
        with pytest.raises(RequestError, match="SamplingParams"):
            engine.generate([1], {"max_tokens": 3})
        assert not engine.has_unfinished()


def test_generate_keeps_the_order_of_its_prompts(expected):
    with LLMEngine.tiny(engine_config()) as engine:
        (_, long, long_params), (_, short, short_params) = TRAFFIC[3], FIRST
        got = engine.generate([long, short], [long_params, short_params])
        assert got == expected[::-1]
        assert engine.generate([]) == []


def test_a_step_without_requests_does_nothing():
    with LLMEngine.tiny(engine_config()) as engine:
        assert engine.step() == ((), 0, 0, False, None, 0, False)


def test_top2_margin_leaves_the_engine_as_it_was(expected):
    with LLMEngine.tiny(engine_config()) as engine:
        # A smaller margin would make the tests of tokens depend on luck.
        assert engine.top2_margin([*TRAFFIC[3].prompt, *expected[1][:2]]) > 1e-9
        assert not engine.has_unfinished()
        assert engine.generate([TRAFFIC[3].prompt], TRAFFIC[3].params) == [expected[1]]


@pytest.mark.parametrize(
    "tokens",
    [[], [512], [-1], [0.5], [[1, 2]], [[1], [2, 3]], ["a"], [True], [2**70]],
    ids=["empty", "above", "below", "fraction", "nested", "ragged", "text", "bool", "huge"],
)
def test_invalid_prompts_are_refused(tokens):
    with LLMEngine.tiny(engine_config()) as engine:
        with pytest.raises(RequestError):
            engine.add_request(tokens)
        assert not engine.has_unfinished()
        # Its number, from which seeds are derived, is that of the next one.
        assert engine.add_request([1]) == "request-0"


def test_generate_with_a_too_long_prompt_serves_no_prompt(expected):
    with LLMEngine.tiny(engine_config()) as engine:
        with pytest.raises(PromptTooLongError):
            engine.generate([FIRST.prompt, prompt(9, 48)], FIRST.params)
        assert not engine.has_unfinished()
        assert engine.generate([FIRST.prompt], FIRST.params) == [expected[0]]


def test_generate_refuses_params_that_do_not_match_prompts():
    with LLMEngine.tiny(engine_config()) as engine, pytest.raises(RequestError, match="2 prompts"):
        engine.generate([[1], [2]], [SamplingParams()])


def test_capture_and_generate_refuse_a_busy_engine():
    with LLMEngine.tiny(engine_config()) as engine:
        engine.add_request([1])
        with pytest.raises(EngineStateError, match="capture"):
            engine.capture()
        with pytest.raises(EngineStateError, match="generate"):
            engine.generate([[1]])


def test_a_closed_engine_refuses_work_and_closes_again():
    engine = LLMEngine.tiny(engine_config())
    engine.add_request([1])
    engine.close()
    engine.close()
    assert not engine.has_unfinished()
    for call in (
        engine.step,
        engine.capture,
        lambda: engine.add_request([1]),
        lambda: engine.generate([1]),
        lambda: engine.abort("request-0"),
        lambda: engine.top2_margin([1]),
        lambda: engine.runtime,
        lambda: engine.attention_backend,
    ):
        with pytest.raises(EngineStateError, match="closed"):
            call()


def test_a_closed_engine_gives_its_memory_back():
    engine = LLMEngine.tiny(engine_config("FULL_AND_PIECEWISE", overlap=True))
    engine.capture()
    engine.generate([1, 2, 3])
    engine.add_request([1])
    engine.step()
    device, model = engine.runtime.device, engine.runtime.runner.fn.model
    held = [weakref.ref(weight) for weight in model.parameters()]
    held.append(weakref.ref(engine.attention_backend.cache.tensor))
    before = device.memory()
    assert before.reserved_bytes
    del model
    gc.disable()  # No reference circle may keep memory until a collection.
    try:
        engine.close()
        assert not any(tensor() is not None for tensor in held)
    finally:
        gc.enable()
    after = device.memory()
    assert after.reserved_bytes == 0
    assert after.free_bytes == after.total_bytes > before.free_bytes


def test_an_engine_closed_inside_a_capture_scope_stays_open():
    engine = LLMEngine.tiny(engine_config("FULL"))
    with engine.runtime.library.capture_scope(), pytest.raises(CaptureInProgressError):
        engine.close()
    engine.capture()
    engine.close()


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 3},
        {"max_model_len": 257},
        {"max_model_len": 0},
        {"block_size": 0},
        {"dtype": "int8"},
        {"device": "tpu"},
        {"load_format": "pickle"},
        {"attention_backend": "magic"},
        {"capture": "sometimes"},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.1},
        {"gpu_memory_utilization": "most"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_invalid_configurations_are_refused(change):
    with pytest.raises(GraphrtError) as raised:
        LLMEngine.tiny(replace(engine_config(), **change))
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_says_idle_when_no_request_is_left(overlap: bool) -> None:
    """Also where requests wait for others, of which only tokens in flight are missing."""
    ranks = InProcessExchange(1).ranks[0]
    with LLMEngine.tiny(engine_config("NONE", overlap=overlap), ranks=ranks) as engine:
        tokens: dict[str, int] = {}
        for index in range(2 * engine.limits.max_num_seqs):
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            tokens[engine.add_request(prompt(index, 1), params)] = 0
        is_idle = False
        while not is_idle:
            result = engine.step()
            is_idle = result.all_idle
            for output in result.outputs:
                tokens[output.request_id] += len(output.new_token_ids)
        assert not engine.has_unfinished()
        assert set(tokens.values()) == {2}


def test_capture_sizes_above_512_serve_large_mixed_steps():
    def config(mode: str) -> EngineConfig:
        sizes = None if mode == "NONE" else (1, 8, 600, 1024)
        compilation = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
        runtime = RuntimeConfig(
            compilation=compilation, max_num_seqs=8, max_num_batched_tokens=1100
        )
        return replace(TINY_CONFIG, runtime=runtime)

    prompts = [prompt(index, 170) for index in range(8)]
    params = SamplingParams(max_tokens=3)
    with LLMEngine.tiny(config("NONE")) as engine:
        expected = engine.generate(prompts, params)
    metrics = StepMetrics()
    with LLMEngine.tiny(config("FULL_AND_PIECEWISE"), observer=metrics) as engine:
        engine.capture()
        assert engine.generate(prompts[:5], params) == expected[:5]
        assert engine.generate(prompts, params) == expected
    counted = metrics.snapshot().steps
    assert {kind.num_padded_tokens for kind in counted} >= {8, 1024}

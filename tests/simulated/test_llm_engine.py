"""The engine end to end on the simulated device: the same tokens in every mode."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from graphrt import CompilationConfig, CUDAGraphMode, GraphrtError, RuntimeConfig, RuntimeMode
from graphrt.device.simulated import SimulatedDevice
from graphrt_llm import EngineConfig, LLMEngine, SamplingParams
from graphrt_llm.errors import (
    EngineConfigError,
    EngineStateError,
    PromptTooLongError,
    RequestError,
    UnknownRequestError,
)
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.request import FinishReason
from graphrt_llm.runner import EVERY_GRAPH
from graphrt_llm.weights import random_weights

MODES = [mode.name for mode in CUDAGraphMode]
SIZES = [1, 2, 4, 12]


def engine_config(mode: str = "NONE", *, num_blocks: int | None = 17, seed: int = 0, **runtime):
    """Four requests at a time, chunks of at most 12 tokens, 16 blocks of 4 for all of them."""
    return EngineConfig(
        runtime=RuntimeConfig(
            compilation=CompilationConfig(
                cudagraph_mode=mode,
                cudagraph_capture_sizes=None if mode == "NONE" else SIZES,
            ),
            max_num_seqs=4,
            max_num_batched_tokens=12,
            **runtime,
        ),
        max_model_len=48,
        block_size=4,
        num_blocks=num_blocks,
        device="simulated",
        dtype="float64",
        seed=seed,
    )


@pytest.fixture(scope="module")
def every_engine():
    with ExitStack() as engines:
        made = {mode: engines.enter_context(LLMEngine.tiny(engine_config(mode))) for mode in MODES}
        for engine in made.values():
            engine.capture()
        yield made


@pytest.fixture(params=MODES)
def captured(request, every_engine):
    yield every_engine[request.param]
    every_engine[request.param].abort_all()


def prompt(index: int, length: int) -> list[int]:
    return random.Random(index).choices(range(512), k=length)


# Long and short, alone longer than a step, greedy and drawn, more than the cache holds at once.
TRAFFIC = [
    (prompt(0, 5), SamplingParams(max_tokens=14)),
    (prompt(1, 30), SamplingParams(max_tokens=9, temperature=1.0, seed=11)),
    (prompt(2, 1), SamplingParams(max_tokens=20, temperature=0.8, top_k=20, seed=2)),
    (prompt(3, 17), SamplingParams(max_tokens=12)),
    (prompt(4, 3), SamplingParams(max_tokens=16, temperature=1.3, top_p=0.9, seed=5)),
    (prompt(5, 24), SamplingParams(max_tokens=1)),
    (prompt(6, 2), SamplingParams(max_tokens=18)),
]


def serve_traffic(engine: LLMEngine) -> tuple[dict[str, list[int]], list]:
    """Two requests at first, then one more at every second step."""
    pending = list(enumerate(TRAFFIC))
    tokens: dict[str, list[int]] = {str(index): [] for index, _ in pending}
    steps = []
    while pending or engine.has_unfinished():
        for _ in range(2 if not steps else (len(steps) % 2)):
            if pending:
                index, (tokens_in, params) = pending.pop(0)
                engine.add_request(tokens_in, params, str(index))
        steps.append(engine.step())
        for output in steps[-1].outputs:
            tokens[output.request_id] += output.new_token_ids
    return tokens, steps


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What each request gets if nobody else is there: no batch, no preemption, no graph."""
    with LLMEngine.tiny(engine_config()) as engine:
        return {
            str(index): engine.generate([tokens_in], params)[0]
            for index, (tokens_in, params) in enumerate(TRAFFIC)
        }


def test_every_mode_gives_the_tokens_that_each_request_gets_alone(captured, alone):
    tokens, steps = serve_traffic(captured)
    assert tokens == alone
    assert sum(step.num_preempted for step in steps) > 0, "the cache was meant to be too small"
    assert any(not step.uniform for step in steps)
    assert any(step.uniform for step in steps)

    policy = captured.runtime.plan.cudagraph_mode
    for step in steps:
        routine = policy.decode_mode() if step.uniform else policy.mixed_mode()
        assert step.decision.mode is routine
        assert step.num_tokens <= 12
        assert step.num_reqs <= 4


def test_an_engine_that_captured_nothing_says_so_and_gives_the_same_tokens(alone):
    with LLMEngine.tiny(engine_config("FULL_AND_PIECEWISE")) as engine:
        tokens, steps = serve_traffic(engine)
    assert tokens == alone
    assert {step.decision.reason.name for step in steps} == {"NOT_CAPTURED_YET"}


def test_a_request_can_be_aborted_between_any_two_steps(alone):
    with LLMEngine.tiny(engine_config()) as engine:
        for after in range(0, 12, 3):
            engine.add_request(TRAFFIC[0][0], TRAFFIC[0][1], "stays")
            engine.add_request(TRAFFIC[3][0], TRAFFIC[3][1], "goes")
            tokens = {"stays": [], "goes": []}
            for number in range(100):
                if number == after:
                    output = engine.abort("goes")
                    assert output == ("goes", (), FinishReason.ABORTED)
                for output in engine.step().outputs:
                    tokens[output.request_id] += output.new_token_ids
                if not engine.has_unfinished():
                    break
            assert tokens["stays"] == alone["0"]
            assert tokens["goes"] == alone["3"][: len(tokens["goes"])]
            with pytest.raises(UnknownRequestError):
                engine.abort("goes")


def test_a_stop_token_ends_a_request_early(alone):
    greedy = TRAFFIC[0][1]
    stop = alone["0"][4]
    first = alone["0"].index(stop)
    with LLMEngine.tiny(engine_config()) as engine:
        [tokens] = engine.generate([TRAFFIC[0][0]], replace(greedy, stop_token_ids=(stop,)))
    assert tokens == alone["0"][: first + 1]


def test_the_engines_seed_decides_for_requests_without_one():
    params = SamplingParams(max_tokens=8, temperature=1.0)

    def draw(seed: int) -> list[list[int]]:
        with LLMEngine.tiny(engine_config(seed=seed)) as engine:
            # Weights are seeded too, so the prompt's logits differ; the draws of equal prompts in
            # one engine differ only by their seeds.
            return engine.generate([[1, 2, 3]] * 3, params)

    assert draw(0) == draw(0)
    assert len({tuple(tokens) for tokens in draw(0)}) == 3


def test_a_seed_of_its_own_makes_a_request_independent_of_its_arrival():
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    with LLMEngine.tiny(engine_config()) as engine:
        first, second = engine.generate([[1, 2, 3]] * 2, params)
        engine.top2_gap([5])
        [third] = engine.generate([[1, 2, 3]], params)
    assert first == second == third


def test_asking_for_a_gap_changes_no_later_draw():
    params = SamplingParams(max_tokens=8, temperature=1.0)

    def draw(asks: bool) -> list[list[int]]:
        with LLMEngine.tiny(engine_config()) as engine:
            if asks:
                engine.top2_gap([5])
            return engine.generate([[1, 2, 3]], params)

    assert draw(True) == draw(False)


def test_the_models_end_token_ends_a_request_unless_it_says_otherwise(alone):
    tokens_in, params = TRAFFIC[0]
    end = alone["0"][2]
    first = alone["0"].index(end)
    model = replace(ModelConfig.tiny(), eos_token_ids=(end,))
    with LLMEngine.with_random_weights(model, engine_config()) as engine:
        assert engine.generate([tokens_in], params) == [alone["0"][: first + 1]]
        assert engine.generate([tokens_in], replace(params, ignore_eos=True)) == [alone["0"]]


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


def test_a_model_directory_gives_the_engine_of_its_weights(tmp_path, alone):
    save_tiny(tmp_path)
    with LLMEngine.from_model_dir(tmp_path, replace(engine_config(), dtype=None)) as engine:
        assert engine.generate([TRAFFIC[0][0]], TRAFFIC[0][1]) == [alone["0"]]
    (tmp_path / "model.safetensors").unlink()
    dummy = replace(engine_config(), load_format="dummy")
    with LLMEngine.from_model_dir(tmp_path, dummy) as engine:
        assert engine.generate([TRAFFIC[0][0]], TRAFFIC[0][1]) == [alone["0"]]


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
        (lambda d: save_tiny(d, torch.float32), "float32"),
    ],
    ids=["no config", "no json", "no weights", "another dtype"],
)
def test_a_broken_model_directory_is_one_error_that_names_what_is_wrong(tmp_path, break_it, named):
    save_tiny(tmp_path)
    break_it(tmp_path)
    with pytest.raises(GraphrtError) as raised:
        LLMEngine.from_model_dir(tmp_path, engine_config())
    assert named in str(raised.value).lower().replace("f32", "float32")


def test_an_engine_that_cannot_be_made_closes_its_device(monkeypatch):
    closed = []
    close = SimulatedDevice.close
    monkeypatch.setattr(SimulatedDevice, "close", lambda d: (closed.append(d), close(d)))
    with pytest.raises(EngineConfigError):
        LLMEngine.tiny(replace(engine_config(), num_blocks=3))
    assert len(closed) == 1
    LLMEngine.tiny(engine_config()).close()
    assert len(closed) == 2


def test_what_the_engine_does_not_do_is_refused_and_not_ignored():
    for wish in ({"num_speculative_tokens": 2}, {"max_loras": 1}):
        with pytest.raises(EngineConfigError, match=next(iter(wish))):
            LLMEngine.tiny(engine_config(**wish))


def test_generate_keeps_the_order_of_its_prompts(alone):
    with LLMEngine.tiny(engine_config()) as engine:
        got = engine.generate([TRAFFIC[3][0], TRAFFIC[0][0]], [TRAFFIC[3][1], TRAFFIC[0][1]])
        assert got == [alone["3"], alone["0"]]
        assert engine.generate([]) == []


def test_a_step_without_requests_does_nothing():
    with LLMEngine.tiny(engine_config()) as engine:
        assert engine.step() == ((), 0, 0, False, None, 0)


def test_a_failing_step_leaves_the_requests_as_they_were(alone, monkeypatch):
    with LLMEngine.tiny(engine_config()) as engine:
        engine.add_request(*TRAFFIC[0], "0")
        tokens = []
        real_step = engine.runtime.step
        calls = 0

        def failing(*args, **kwargs):
            nonlocal calls
            calls += 1
            result = real_step(*args, **kwargs)
            if calls % 2:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(engine.runtime, "step", failing)
        while engine.has_unfinished():
            try:
                result = engine.step()
            except KeyboardInterrupt:
                continue
            tokens += [token for output in result.outputs for token in output.new_token_ids]
        assert tokens == alone["0"]
        assert calls > 20


def test_the_top_two_gap_is_that_of_the_greedy_choice(alone):
    tokens_in, _ = TRAFFIC[3]
    with LLMEngine.tiny(engine_config()) as engine:
        gap = engine.top2_gap([*tokens_in, *alone["3"][:2]])
        assert gap > 0
        # A gap that small would make the other tests of this file depend on luck.
        assert gap > 1e-9
        assert not engine.has_unfinished()
        assert engine.generate([tokens_in], TRAFFIC[3][1]) == [alone["3"]]


@pytest.mark.parametrize(
    "tokens",
    [[], [512], [-1], [0.5], [[1, 2]], [[1], [2, 3]], ["a"], [True], [2**70]],
    ids=["empty", "above", "below", "fraction", "nested", "ragged", "text", "bool", "huge"],
)
def test_prompts_that_are_no_prompts_are_refused(tokens):
    with LLMEngine.tiny(engine_config()) as engine:
        with pytest.raises(RequestError):
            engine.add_request(tokens)
        assert not engine.has_unfinished()


def test_a_prompt_that_cannot_fit_is_refused_and_others_go_on(alone):
    with LLMEngine.tiny(engine_config()) as engine:
        with pytest.raises(PromptTooLongError):
            engine.generate([TRAFFIC[0][0], prompt(9, 48)], TRAFFIC[0][1])
        assert not engine.has_unfinished()
        assert engine.generate([TRAFFIC[0][0]], TRAFFIC[0][1]) == [alone["0"]]


def test_generate_refuses_as_many_parameters_as_do_not_fit_the_prompts():
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
    for call in (engine.step, engine.capture, lambda: engine.add_request([1])):
        with pytest.raises(EngineStateError, match="closed"):
            call()


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
    ],
    ids=lambda change: next(iter(change)),
)
def test_configurations_that_cannot_be_honoured_are_refused(change):
    with pytest.raises(GraphrtError) as raised:
        LLMEngine.tiny(replace(engine_config(), **change))
    assert isinstance(raised.value, ValueError)


def test_excluded_graphs_are_not_used(captured):
    captured.add_request(prompt(1, 6), SamplingParams(max_tokens=2))
    batch = captured.scheduler.schedule()
    captured._runner.run(
        batch,
        captured.scheduler.seats,
        exclude=EVERY_GRAPH,
    )
    assert captured.runtime.last_decision.mode is RuntimeMode.NONE


sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([None, 5]),
    top_p=st.sampled_from([0.8, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=12, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 36), sampling_params), min_size=1, max_size=7),
    gaps=st.lists(st.integers(0, 4), min_size=7, max_size=7),
    goes=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 12)),
)
def test_any_traffic_gives_the_same_batches_and_tokens_in_every_mode(
    every_engine, requests, gaps, goes
):
    def serve_all(engine: LLMEngine) -> tuple[list, list]:
        """One request after each gap of steps; one of them may be aborted on the way."""
        tokens: list[list[int]] = [[] for _ in requests]
        shapes, num_added, due = [], 0, 0
        while num_added < len(requests) or engine.has_unfinished():
            if num_added < len(requests) and len(shapes) >= due:
                length, params = requests[num_added]
                engine.add_request(prompt(num_added, length), params, str(num_added))
                due += gaps[num_added]
                num_added += 1
            if goes is not None and goes[1] == len(shapes):
                with suppress(UnknownRequestError):
                    engine.abort(str(goes[0]))
            step = engine.step()
            shapes.append(step[1:4])
            for output in step.outputs:
                tokens[int(output.request_id)] += output.new_token_ids
        return tokens, shapes

    expected = serve_all(every_engine["NONE"])
    for mode, engine in every_engine.items():
        assert serve_all(engine) == expected, mode

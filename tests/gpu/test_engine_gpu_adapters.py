"""Adapters and speculative decoding on a GPU: the tokens of eager, and every replay compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import (
    BACKENDS,
    QWEN,
    compare,
    compare_tokens,
    engine_config,
    greedy,
    make_engine,
    prompts,
)

from graphrt import CUDAGraphMode, Event
from graphrt.events import PaddingVerified, RanEager, Replayed, Verified
from graphrt_llm import LLMEngine, ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore:::flashinfer.*")

SIZES = (6, 12, 24, 64)
GRAPH_MODES = [mode.name for mode in CUDAGraphMode if mode is not CUDAGraphMode.NONE]
OPTIONS = {
    "adapters": {"max_loras": 3},
    "drafts": {"num_speculative_tokens": 2},
    "both": {"max_loras": 3, "num_speculative_tokens": 2},
}


def make(model: ModelConfig, mode: str, observer=None, **options) -> LLMEngine:
    config = engine_config(mode, sizes=SIZES, **options)
    engine = LLMEngine.with_random_weights(model, config, observer=observer)
    for number in range(options.get("max_loras", -1) + 1):
        engine.add_lora(str(number), seed=number)
    engine.capture()
    return engine


def chosen(engine: LLMEngine, count: int) -> list[str | None]:
    names = [None, *engine.loras]
    return [names[n % len(names)] for n in range(count)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float64_with_adapters_and_drafts_gives_equal_tokens(options):
    asked = prompts(16, 512)
    plain = {name: value for name, value in options.items() if name == "max_loras"}
    with make(ModelConfig.tiny(), "NONE", dtype="float64", **plain) as engine:
        expected = engine.generate(asked, greedy(30), chosen(engine, 16))
    for mode in ["NONE", *GRAPH_MODES]:
        with make(ModelConfig.tiny(), mode, dtype="float64", **options) as engine:
            assert engine.generate(asked, greedy(30), chosen(engine, 16)) == expected, mode
            assert not engine.runtime.report().missing


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_replays_with_adapters_and_drafts_equal_eager(backend, options):
    asked = prompts(10, QWEN.vocab_size)
    seen: list[Event] = []
    with make(QWEN, "NONE", backend=backend, **options) as reference:
        names = chosen(reference, 10)
        expected = reference.generate(asked, greedy(24), names)
        with make(
            QWEN,
            "FULL_AND_PIECEWISE",
            observer=seen.append,
            backend=backend,
            verify_every=2,
            **options,
        ) as engine:
            seen.clear()
            before = (
                [memory.data_ptr() for memory in engine._lora.buffers()] if engine._lora else []
            )
            found = engine.generate(asked, greedy(24), names)
            if engine._lora:
                assert before == [memory.data_ptr() for memory in engine._lora.buffers()]
            assert engine.runtime.check_externals().is_unchanged

        def margin(index: int, position: int) -> float:
            return reference.top2_margin([*asked[index], *expected[index][:position]], names[index])

        told = compare_tokens(dict(enumerate(expected)), dict(enumerate(found)), margin, 0.25)
    assert told.identical, told.differences
    assert all(e.equal for e in seen if isinstance(e, Verified | PaddingVerified))
    assert any(isinstance(event, Replayed) for event in seen)


def test_float32_drafts_of_32_requests_give_equal_tokens():
    """What differs in half precision at so many requests is rounding: here nothing does."""
    asked, options = prompts(32, QWEN.vocab_size), {"dtype": "float32", "max_num_seqs": 32}
    sizes = (3, 24, 48, 96)
    with (
        make_engine(QWEN, "NONE", **options) as reference,
        make_engine(
            QWEN, "FULL_AND_PIECEWISE", sizes=sizes, num_speculative_tokens=2, **options
        ) as engine,
    ):
        expected = reference.generate(asked, greedy(40))
        told = compare(reference, asked, expected, engine.generate(asked, greedy(40)), "float32")
    assert told.identical, told.differences
    assert told.ties <= 1


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_are_verified_in_full_graphs(backend, mode, k):
    """Few and many requests, so that kernels of both sizes of batches run."""
    model = replace(QWEN, vocab_size=64)  # Texts repeat, so that drafts exist and are accepted.
    sizes = tuple((1 + k) * count for count in (1, 4, 18, 24))
    seen: list[Event] = []
    options = {"backend": backend, "dtype": "float16", "max_num_seqs": 24}
    with (
        make_engine(model, "NONE", **options) as reference,
        make_engine(
            model,
            mode,
            observer=seen.append,
            sizes=sizes,
            num_speculative_tokens=k,
            verify_every=3,
            **options,
        ) as engine,
    ):
        for count in (3, 20):
            asked = prompts(count, 64)
            expected = reference.generate(asked, greedy(40))
            seen.clear()
            told = compare(
                reference, asked, expected, engine.generate(asked, greedy(40)), "float16"
            )
            assert told.identical, told.differences
            steps = [e for e in seen if isinstance(e, Replayed | RanEager) and e.uniform]
            assert steps
            assert all(isinstance(step, Replayed) and step.mode.name == "FULL" for step in steps)
        assert all(e.equal for e in seen if isinstance(e, Verified | PaddingVerified))
        assert engine.drafts.accepted > 0
        assert not engine.runtime.report().missing

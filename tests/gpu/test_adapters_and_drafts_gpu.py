"""Adapters (LoRA) and speculative decoding on a GPU: graphs give the tokens of eager execution."""

from __future__ import annotations

import pytest
from engines import BACKENDS, QWEN, engine_config, greedy, prompts

from graphrt_llm import LLMEngine, compare_tokens
from graphrt_llm.demo.compare import TIE_TOLERANCE
from graphrt_llm.models import ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore:::flashinfer.*")

NAMES = [None, "a", "b", None, "c", "a", "b", "c"]


def with_adapters(model, mode, **options):
    engine = LLMEngine.with_random_weights(model, engine_config(mode, max_loras=4, **options))
    for seed, name in enumerate("abc"):
        engine.add_lora(name, seed=seed, rank=8)
    engine.capture()
    return engine


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_adapters_in_float64_give_equal_tokens_with_and_without_graphs(mode):
    asked = prompts(8, 512)
    found = {}
    for each in ("NONE", mode):
        with with_adapters(ModelConfig.tiny(), each, dtype="float64") as engine:
            found[each] = engine.generate(asked, greedy(24), NAMES)
            engine.remove_lora("c")
            engine.add_lora("c", seed=9, rank=8)
            swapped = engine.generate(asked, greedy(24), NAMES)
            assert swapped != found[each]
            found[each] += swapped
            assert engine.runtime.check_externals().is_unchanged
    assert found[mode] == found["NONE"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_in_bfloat16_give_equal_tokens_but_for_ties(backend):
    asked = prompts(8, QWEN.vocab_size)
    with with_adapters(QWEN, "FULL_AND_PIECEWISE", backend=backend) as engine:
        found = engine.generate(asked, greedy(24), "a")
        assert not engine.runtime.report().missing
    with with_adapters(QWEN, "NONE", backend=backend) as engine:
        expected = engine.generate(asked, greedy(24), "a")

        def margin(index, position):
            return engine.top2_margin([*asked[index], *expected[index][:position]], "a")

        comparison = compare_tokens(
            dict(enumerate(expected)), dict(enumerate(found)), margin, TIE_TOLERANCE["bfloat16"]
        )
    assert comparison.identical, comparison


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_drafts_in_float64_give_the_tokens_of_plain_decoding(mode, k):
    asked = [(each * 6)[:60] for each in prompts(8, 512, longest=12)]
    options = {"dtype": "float64", "backend": "sdpa"}
    with LLMEngine.with_random_weights(
        ModelConfig.tiny(), engine_config("NONE", **options)
    ) as engine:
        expected = engine.generate(asked, greedy(40))
    config = engine_config(mode, num_speculative_tokens=k, **options)
    with LLMEngine.with_random_weights(ModelConfig.tiny(), config) as engine:
        engine.capture()
        assert engine.generate(asked, greedy(40)) == expected

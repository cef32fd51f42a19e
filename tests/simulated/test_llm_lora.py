"""Adapters in the engine: equal to merged weights, served by the fitting count, swapped live."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings, strategies as st
from llm_adapters import merge, record_logits, save_peft
from llm_traffic import MODES, engine_config, prompt

from graphrt import CompilationConfig, Reason, RuntimeConfig
from graphrt.events import RanEager, Replayed
from graphrt_llm import (
    EngineConfig,
    FinishReason,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    lora as lora_module,
)
from graphrt_llm.config import Limits
from graphrt_llm.errors import AdapterError, AdapterInUseError, EngineConfigError, GraphrtError
from graphrt_llm.kernels import EAGER, eager
from graphrt_llm.lora import LoRAWeights, random_lora
from graphrt_llm.request import Request
from graphrt_llm.scheduler import AdapterSlots, Scheduler
from lab import Tally

MAX_LORAS = 3
NUM_ADAPTERS = 4
FOUR = SamplingParams(max_tokens=4)
LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=12,
    max_model_len=20,
    block_size=4,
    num_blocks=17,
    max_loras=1,
)


def lora_config(
    mode: str, policy: str = "powers_of_two", specialize: bool = True, **changes
) -> EngineConfig:
    config = engine_config(mode, max_loras=MAX_LORAS, lora_capture=policy)
    sizes = None if mode == "NONE" else [4, 12]
    compilation = replace(
        config.runtime.compilation,
        cudagraph_specialize_lora=specialize,
        cudagraph_capture_sizes=sizes,
    )
    runtime = replace(config.runtime, compilation=compilation)
    return replace(config, runtime=runtime, dtype="float32", **changes)


@cache
def reference(adapter: int | None, seed: int, length: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits [tokens, vocab] of one request alone, with the adapter in the weights."""
    with LLMEngine.tiny(replace(engine_config("NONE"), dtype="float32")) as engine:
        if adapter is not None:
            merge(engine, random_lora(ModelConfig.tiny(), seed=adapter))
        logits = record_logits(engine)
        tokens = engine.generate([prompt(seed, length)], FOUR)[0]
        return tokens, torch.stack(logits["request-0"])


requests = st.lists(
    st.tuples(st.none() | st.integers(0, NUM_ADAPTERS - 1), st.integers(0, 2), st.just(5)),
    min_size=1,
    max_size=6,
)
CASES = [
    case
    for case in product(MODES, ("each", "powers_of_two", "max_only"), (True, False))
    # Without count 0, where both kinds of FULL keys are met.
    if case == ("NONE", "each", True) or (case[0] != "NONE" and (case[2] or "FULL_" not in case[0]))
]


@pytest.fixture(scope="module")
def engines():
    made: dict[tuple[str, str, bool], LLMEngine] = {}

    def get(*case) -> LLMEngine:
        if case not in made:
            engine = made[case] = LLMEngine.tiny(lora_config(*case))
            for number in range(NUM_ADAPTERS):
                engine.add_lora(f"adapter {number}", seed=number)
            engine.capture()
        return made[case]

    yield get
    for engine in made.values():
        engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_mix_of_adapters_equals_merged_weights(case, engines):
    engine = engines(*case)
    logits = record_logits(engine)

    @settings(max_examples=3, deadline=None)
    @given(mix=requests)
    def check(mix):
        logits.clear()
        names = [
            engine.add_request(
                prompt(seed, length), FOUR, lora=None if which is None else f"adapter {which}"
            )
            for which, seed, length in mix
        ]
        tokens = {name: [] for name in names}
        while engine.has_unfinished():
            for output in engine.step().outputs:
                tokens[output.request_id] += output.new_token_ids
        for name, (which, seed, length) in zip(names, mix, strict=True):
            expected, expected_logits = reference(which, seed, length)
            assert tokens[name] == expected
            torch.testing.assert_close(
                torch.stack(logits[name]), expected_logits, rtol=0, atol=1e-4
            )

    check()


EIGHT = EngineConfig(
    runtime=RuntimeConfig(
        compilation=CompilationConfig(cudagraph_capture_sizes=[8, 16]),
        max_num_seqs=16,
        max_num_batched_tokens=16,
        max_loras=8,
    ),
    max_model_len=32,
    block_size=4,
    num_blocks=80,
    device="simulated",
    dtype="float64",
    overlap=False,
)


def test_eight_slots_serve_each_batch_by_the_next_count():
    events = []
    with LLMEngine.tiny(EIGHT, observer=events.append) as engine:
        assert engine.runtime.plan.lora_counts == (0, 1, 2, 4, 8)
        engine.capture()
        rng = random.Random(0)
        addresses = {name: b.data_ptr() for name, b in engine._lora.named_buffers()}
        for number in range(9):
            engine.add_lora(str(number), seed=number)
        load = []
        for index in range(60):
            which = rng.choice([None, *engine.loras])
            load.append((prompt(index, rng.randint(1, 3)), which))
        expected = alone(load)
        events.clear()
        found = engine.generate(
            [tokens for tokens, _ in load], FOUR, loras=[which for _, which in load]
        )
        assert found == expected
        steps = [event for event in events if isinstance(event, Replayed | RanEager)]
        live = {step.num_active_loras for step in steps}
        assert live >= {3, 5, 6, 7, 8}, live
        for step in steps:
            assert isinstance(step, Replayed), step
            fitting = min(n for n in (0, 1, 2, 4, 8) if n >= step.num_active_loras)
            assert step.num_captured_loras == fitting
        events.clear()
        for count in range(4):
            few = [(prompt(n, 2), str(n) if n < count else None) for n in range(4)]
            tokens, names = zip(*few, strict=True)
            assert engine.generate(list(tokens), FOUR, loras=names) == alone(few)
        steps = [event for event in events if isinstance(event, Replayed)]
        assert {(step.num_active_loras, step.num_captured_loras) for step in steps} == {
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 4),
        }
        assert addresses == {name: b.data_ptr() for name, b in engine._lora.named_buffers()}
        engine.runtime.check_externals()
        assert not engine.runtime.report().missing


@cache
def merged(which: int | None) -> LLMEngine:
    engine = LLMEngine.tiny(replace(EIGHT, runtime=replace(EIGHT.runtime, max_loras=0)))
    if which is not None:
        merge(engine, random_lora(ModelConfig.tiny(), seed=which))
    return engine


def alone(load) -> list[list[int]]:
    return [
        merged(None if which is None else int(which)).generate([tokens], FOUR)[0]
        for tokens, which in load
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_adapter_swapped_while_others_run_serves_its_tokens(overlap):
    long = SamplingParams(max_tokens=12)
    stays, changes = prompt(0, 4), prompt(1, 4)
    kept, old, new = (
        merged(n).generate([p], long)[0] for n, p in ((0, stays), (1, changes), (2, changes))
    )
    config = replace(EIGHT, runtime=replace(EIGHT.runtime, max_loras=2), overlap=overlap)
    with LLMEngine.tiny(config) as engine:
        engine.capture()
        addresses = [memory.data_ptr() for memory in engine._lora.buffers()]
        engine.add_lora("stays", seed=0)
        engine.add_lora("changes", seed=1)
        tokens = {"stays": [], "old": [], "new": []}
        engine.add_request(stays, long, "stays", lora="stays")
        engine.add_request(changes, SamplingParams(max_tokens=3), "old", lora="changes")
        while engine.has_unfinished():
            for output in engine.step().outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.request_id == "old" and output.finish_reason is FinishReason.LENGTH:
                    engine.remove_lora("changes")
                    engine.add_lora("changes", seed=2)
                    engine.add_request(changes, long, "new", lora="changes")
        assert tokens == {"stays": kept, "old": old[:3], "new": new}
        assert addresses == [memory.data_ptr() for memory in engine._lora.buffers()]
        assert engine.runtime.check_externals().is_unchanged


class ByToken:
    """What the kernel for few tokens computes, in shapes that a graph can hold."""

    def __init__(self) -> None:
        self.numbers_of_tokens = Tally()

    def __call__(self, x, norm, eps, a, b, slots, ranks, parts, out, gated=None):
        self.numbers_of_tokens.append(len(x))
        rows = x if norm is None else F.rms_norm(x, norm.shape, norm, eps)
        each = a.shape[1] // len(parts)
        is_used = torch.arange(a.shape[1]) % each < ranks[:, None]
        place = slots.clamp(min=0)
        down = torch.einsum("ti,tri->tr", rows, a[place]) * is_used[place]
        down *= (slots >= 0)[:, None]
        out += torch.einsum("tr,tro->to", down, b[place])
        if gated is not None:
            eager.apply_gate(out, gated)


def test_an_empty_slot_is_as_sparse_as_an_adapter():
    """Kernels read the block of each linear map alone: products of all of them must agree."""
    config = ModelConfig.tiny()
    weights = LoRAWeights(config, max_loras=2, max_rank=3, dtype=torch.float64, device="cpu")
    empty = {name: memory[:, 0].clone() for name, memory in weights.named_buffers() if "_" in name}
    weights.load(0, random_lora(config, rank=3))
    for name, before in empty.items():
        assert torch.equal(before != 0, getattr(weights, name)[:, 0] != 0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_step_applies_no_adapter_but_its_active_ones(count, monkeypatch):
    """The kernel as products do, because graphs of both kinds meet the same examples."""
    config = ModelConfig.tiny()
    slots, active = torch.tensor([0, 2, -1, 1, 2, 0]), torch.tensor([2, 0, 1])[:count]
    x = torch.randn(6, config.hidden_size, dtype=torch.float64)
    found = []
    for add_lora in (None, ByToken()):
        kernels = EAGER._replace(add_lora=add_lora)
        monkeypatch.setattr(lora_module, "choose_kernels", lambda *_, kernels=kernels: kernels)
        weights = LoRAWeights(config, max_loras=3, max_rank=8, dtype=torch.float64, device="cpu")
        for slot in range(3):
            weights.load(slot, random_lora(config, seed=slot))
        out = torch.zeros(6, 2 * config.intermediate_size, dtype=torch.float64)
        weights.begin(slots, active).add("gate_up", 0, x, out)
        found.append(out)
    torch.testing.assert_close(found[0], found[1])
    assert torch.equal(found[0].any(1), torch.isin(slots, active))


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_AND_PIECEWISE"])
def test_few_tokens_have_their_adapters_added_by_the_kernel(mode, monkeypatch):
    """Batches on both sides of the limit, and adapters of several ranks in one slot."""
    load = [([prompt(n, 3), prompt(n + 1, 5), prompt(n, 9)], (f"{n}", None, "2")) for n in range(3)]
    kernel, found = ByToken(), []
    for add_lora in (None, kernel):
        kernels = EAGER._replace(add_lora=add_lora)
        monkeypatch.setattr(lora_module, "choose_kernels", lambda *_, kernels=kernels: kernels)
        monkeypatch.setattr(lora_module, "MOST_TOKENS", 4)
        config = lora_config(mode)
        config = replace(config, dtype="float64", runtime=replace(config.runtime, max_loras=2))
        with LLMEngine.tiny(config) as engine:
            for number, rank in enumerate((8, 1, 5)):
                engine.add_lora(str(number), seed=number, rank=rank)
            engine.capture()
            kernel.numbers_of_tokens = Tally()
            found.append([engine.generate(asked, FOUR, loras=names) for asked, names in load])
            assert not engine.runtime.report().missing
            if add_lora is not None and mode == "NONE":
                assert 1 < max(kernel.numbers_of_tokens) <= 4
    assert found[0] == found[1]


@pytest.mark.parametrize("most", [1, 8])
def test_sizes_with_and_without_the_kernel_agree_at_capture(most, monkeypatch):
    """A graph of more tokens is verified by real sizes that the kernel serves."""
    kernels = EAGER._replace(add_lora=ByToken())
    monkeypatch.setattr(lora_module, "choose_kernels", lambda *_: kernels)
    monkeypatch.setattr(lora_module, "MOST_TOKENS", most)
    with LLMEngine.tiny(replace(lora_config("FULL"), dtype="float64")) as engine:
        engine.capture()
        assert not engine.runtime.report().missing


def test_captures_by_priority_reach_every_count():
    config = replace(EIGHT, runtime=replace(EIGHT.runtime, max_loras=2), capture="by_priority")
    with LLMEngine.tiny(config) as engine:
        for number in range(2):
            engine.add_lora(str(number), seed=number)
        load = [(prompt(n, 3), which) for n, which in enumerate([None, "0", "1", "1"])]
        for _ in range(5):
            prompts, loras = zip(*load, strict=True)
            assert engine.generate(list(prompts), FOUR, loras=loras) == alone(load)
        reasons = engine.runtime.report().misses
        assert set(reasons) <= {Reason.NOT_CAPTURED_YET}


def test_a_wrong_adapter_is_refused_and_the_engine_serves_on():
    with LLMEngine.tiny(lora_config("NONE")) as engine:
        engine.add_lora("a")
        engine.add_request([1, 2], FOUR, lora="a")
        for wrong, error in (
            (lambda: engine.add_lora("a"), AdapterError),
            (lambda: engine.add_lora("b", rank=17), AdapterError),
            (lambda: engine.add_lora("b", rank=2.5), AdapterError),
            (lambda: engine.add_lora("b", 5), AdapterError),
            (lambda: engine.add_lora("b", "/nowhere"), AdapterError),
            (lambda: engine.remove_lora("a"), AdapterInUseError),
            (lambda: engine.remove_lora("b"), KeyError),
            (lambda: engine.add_request([1], lora="b"), KeyError),
            (lambda: engine.add_request([1], lora=["a"]), KeyError),
        ):
            with pytest.raises(error) as raised:
                wrong()
            assert isinstance(raised.value, GraphrtError)
        assert engine.loras == ("a",)
        while engine.has_unfinished():
            engine.step()
        engine.remove_lora("a")
        assert engine.generate([prompt(0, 5)], FOUR) == [reference(None, 0, 5)[0]]
    with LLMEngine.tiny(engine_config()) as engine, pytest.raises(AdapterError):
        engine.add_lora("a")


def test_a_removed_adapter_leaves_host_memory():
    with LLMEngine.tiny(lora_config("NONE")) as engine:
        engine.add_lora("a")
        engine.generate([1, 2], FOUR, loras="a")
        [(held, _), *_] = engine._adapters["a"].factors.values()
        left = weakref.ref(held)
        del held
        engine.remove_lora("a")
        gc.collect()
        assert left() is None


def test_an_adapter_that_overflows_is_refused(tmp_path):
    save_peft(random_lora(ModelConfig.tiny()), tmp_path, lora_alpha=1e9)
    with LLMEngine.tiny(replace(lora_config("NONE"), dtype="float16")) as engine:
        with pytest.raises(AdapterError, match=r"finite in torch\.float16"):
            engine.add_lora("a", tmp_path)
        assert engine.loras == ()
    with LLMEngine.tiny(lora_config("NONE")) as engine:
        engine.add_lora("a", tmp_path)


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_values_that_overflow_stay_with_their_request(tmp_path, mode):
    """Also those left in cache blocks that another request gets."""
    save_peft(random_lora(ModelConfig.tiny()), tmp_path, lora_alpha=4e4)
    with LLMEngine.tiny(replace(lora_config(mode), dtype="float16")) as engine:
        engine.add_lora("a")
        engine.add_lora("large", tmp_path)
        engine.capture()
        prompts = [prompt(0, 3), prompt(1, 2), prompt(2, 9)]
        expected = engine.generate(prompts[:2], FOUR, loras=[None, "a"])
        logits = record_logits(engine)
        for _ in range(3):
            engine.generate([prompts[2]] * 4, FOUR, loras="large")
        assert not all(row.isfinite().all() for rows in logits.values() for row in rows)
        mixed = engine.generate(prompts, FOUR, loras=[None, "a", "large"])
        assert mixed[:2] == expected
        assert engine.generate(prompts[:2], FOUR, loras=[None, "a"]) == expected


def test_adapters_of_a_model_with_experts_are_refused() -> None:
    with pytest.raises(EngineConfigError, match="0 for a model with experts"):
        LLMEngine.with_random_weights(ModelConfig.named("tiny-moe"), lora_config("NONE"))


def test_adapters_at_level_3_are_refused():
    config = lora_config("FULL_AND_PIECEWISE")
    compilation = replace(config.runtime.compilation, level=3)
    with pytest.raises(EngineConfigError, match="max_loras"):
        LLMEngine.tiny(replace(config, runtime=replace(config.runtime, compilation=compilation)))


@given(st.integers(0, 3), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_slots_taken_and_given_back_keep_what_is_used(count, actions):
    slots, users = AdapterSlots(count), []
    for takes, number in actions:
        if takes and slots.has_room(number):
            users.append((number, slots.assign(number)))
        elif takes:
            assert len({name for name, _ in users}) == count
            assert number not in slots.adapters
        elif users:
            slots.give_back(users.pop(number % len(users))[1])
        assert all(slots.adapters[place] == name for name, place in users)
        held = [name for name in slots.adapters if name is not None]
        assert len(held) == len(set(held))


def test_a_request_waits_for_a_slot_in_order_of_arrival():
    scheduler = Scheduler(LIMITS)
    for name, adapter in (("0", "a"), ("1", "b"), ("2", None), ("3", "a")):
        params = SamplingParams(max_tokens=2 if name == "0" else 1)
        scheduler.add(Request(name, [1], params, seed=0, adapter=adapter))
    started = []
    while (batch := scheduler.schedule()) is not None:
        started.append([request.request_id for request in batch.requests])
        scheduler.update(batch, [7] * batch.num_reqs)
    assert started == [["0"], ["0"], ["1", "2"], ["3"]]

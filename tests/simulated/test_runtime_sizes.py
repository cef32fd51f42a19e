"""What a ``Runtime`` works out by itself: a config from few options, sizes from values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from graphrt import (
    BufferSpec,
    CompilationConfig,
    CUDAGraphMode,
    OutputSpec,
    Padding,
    Reason,
    Runtime,
    RuntimeConfig,
    resolve,
)
from graphrt.errors import BatchError, ConfigError, InputMismatchError, StaticBufferError
from graphrt.events import RanEager, Replayed
from lab import (
    FULL,
    INPUTS,
    MAX_REQS,
    NONE,
    PIECEWISE,
    WIDTH,
    RuntimeLab,
    assert_equal,
    values,
)

IDS = BufferSpec("ids", ("tokens",), torch.int64, Padding.fill(0))


def make(model=lambda ids: ids + 1, **options) -> Runtime:
    given = {"inputs": [IDS], "outputs": OutputSpec({"": "tokens"}), "device": "simulated"}
    return Runtime(model, **{**given, **options})


# -- flat options


@pytest.mark.parametrize("mode", ["full_decode_only", CUDAGraphMode.FULL_DECODE_ONLY])
@pytest.mark.parametrize("sizes", [[4, 1, 2], (1, 2, 4), range(1, 5)])
def test_flat_options_resolve_as_their_fields_do(mode, sizes):
    with make(mode=mode, sizes=sizes, max_num_seqs=3, max_num_batched_tokens=32) as runtime:
        assert runtime.config == RuntimeConfig(
            compilation={"cudagraph_mode": mode, "cudagraph_capture_sizes": list(sizes)},
            max_num_seqs=3,
            max_num_batched_tokens=32,
        )
        assert runtime.plan.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    with make() as runtime:
        assert runtime.config == RuntimeConfig()


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"mode": "FUL"}, "mode: 'FUL'"),
        ({"mode": 3}, "mode: 3"),
        ({"sizes": [1, 0]}, r"sizes\[1\]: 0"),
        ({"sizes": 8}, "sizes: 8"),
        ({"sizes": range(1, 10**12)}, "at most 65536 entries"),
        ({"sizes": [64], "max_num_batched_tokens": 8}, r"sizes: \[64\]"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens: 'many'"),
    ],
)
def test_flat_option_that_is_wrong_is_named_as_asked(option, named):
    with pytest.raises(ConfigError, match=named) as raised:
        make(**option)
    assert "cudagraph" not in str(raised.value)


@pytest.mark.parametrize("option", [{"mode": "FULL"}, {"sizes": [1]}, {"max_num_seqs": 4}])
def test_flat_option_beside_a_config_names_both(option):
    [name] = option
    with pytest.raises(ConfigError, match=rf"{name}=.* and config\."):
        make(config=RuntimeConfig(), **option)


@pytest.mark.parametrize(
    "wrong", [{"config": {}}, {"facts": {}}, {"inputs": None}, {"inputs": [3]}]
)
def test_argument_of_another_kind_is_refused_by_name(wrong):
    options = {"inputs": INPUTS, "outputs": OutputSpec({}), "device": "simulated", **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Runtime(lambda **values: None, **options)


@pytest.mark.parametrize("found", [None, [3], BufferSpec])
def test_inputs_by_key_that_are_no_specs_are_refused(found):
    runtime = make(inputs=lambda key: found)
    with runtime, pytest.raises(ConfigError, match="inputs"):
        runtime.capture(like={"x": torch.ones(4, 3)})


def test_input_over_another_axis_is_told_who_takes_it():
    with pytest.raises(StaticBufferError, match="CUDAGraphRunner") as raised:
        make(inputs=[BufferSpec("pixels", ("batch", 3), torch.float32)])
    assert "'tokens' or 'requests'" in raised.value.expected


# -- sizes of a step


@given(st.integers(1, 16), st.integers(1, MAX_REQS))
def test_step_reads_its_sizes_off_the_values(lab, num_tokens, num_reqs):
    num_reqs = min(num_tokens, num_reqs)
    batch = values(num_tokens, num_reqs)
    uniform = num_tokens == num_reqs
    expected = lab.step(num_tokens, num_reqs, uniform)
    decision = lab.runtime.last_decision
    given = {"num_tokens": num_tokens, "num_reqs": num_reqs, "uniform": uniform}
    for left_out in ([], ["uniform"], ["num_tokens"], ["num_reqs"], list(given)):
        said = {name: value for name, value in given.items() if name not in left_out}
        assert_equal(lab.runtime.step(batch, **said), expected)
        assert lab.runtime.last_decision is decision
        event = lab.step_events[-1]
        assert (event.num_tokens, event.num_reqs, event.uniform) == (num_tokens, num_reqs, uniform)


@pytest.fixture(scope="module")
def lab():
    with RuntimeLab(policy="clone") as lab:
        lab.runtime.capture()
        yield lab


@pytest.mark.parametrize("said", [{"num_tokens": 5}, {"num_reqs": 3}, {"num_tokens": "3"}])
def test_step_size_that_the_values_deny_is_refused(lab, said):
    [name] = said
    with pytest.raises(InputMismatchError, match=name):
        lab.runtime.step(values(3, 2), **said)


@pytest.mark.parametrize("wrong", [None, torch.arange(3), [torch.arange(3)], 3])
def test_step_of_values_without_names_is_refused(lab, wrong):
    for said in ({}, {"num_tokens": 3, "num_reqs": 3, "uniform": True}):
        with pytest.raises(InputMismatchError, match="by input name"):
            lab.runtime.step(wrong, **said)


def test_runtime_takes_inputs_from_a_generator_or_by_key():
    for inputs in ((spec for spec in [IDS]), lambda key: [IDS]):
        with make(inputs=inputs) as runtime:
            assert torch.equal(runtime.step({"ids": torch.arange(3)}), torch.arange(3) + 1)


def test_step_of_values_without_an_axis_is_refused(lab):
    with pytest.raises(InputMismatchError, match="requests"):
        lab.runtime.step({"x": torch.ones(3, WIDTH), "ids": torch.zeros(3, dtype=torch.int64)})


def test_model_without_requests_counts_each_row_as_one():
    events = []
    with make(
        max_num_seqs=4, sizes=[2, 4, 8], max_num_batched_tokens=16, observer=events.append
    ) as r:
        r.capture(like={"ids": torch.arange(3)})
        served = {}
        for n in (1, 4, 5, 9):
            assert torch.equal(r.step({"ids": torch.arange(n)}), torch.arange(n) + 1)
            served[n] = (r.last_decision.mode, events[-1].num_reqs, events[-1].uniform)
        for wrong in ("3", 2.5, -1):
            with pytest.raises(BatchError, match="num_tokens"):
                r.step({"ids": torch.arange(3)}, num_tokens=wrong)
        # Padded by the engine, which has only tokens to say.
        assert torch.equal(r.step({"ids": torch.arange(4)}, num_tokens=3), torch.arange(3) + 1)
        assert r.last_decision[::2] == (FULL, Reason.PADDED)
        assert served == {
            1: (FULL, 1, True),
            4: (FULL, 4, True),
            5: (PIECEWISE, 4, False),
            9: (NONE, 4, False),
        }


def test_model_without_tokens_has_to_be_told():
    lens = BufferSpec("ids", ("requests",), torch.int64, Padding.zero())
    with make(inputs=[lens], outputs=OutputSpec({"": "requests"})) as runtime:
        with pytest.raises(BatchError, match="num_tokens"):
            runtime.step({"ids": torch.arange(2)})
        assert torch.equal(
            runtime.step({"ids": torch.arange(2)}, num_tokens=5), torch.arange(2) + 1
        )


def test_step_with_speculation_is_uniform_only_if_said():
    config = RuntimeConfig(num_speculative_tokens=2, max_num_seqs=4)
    with make(config=config) as runtime:
        runtime.capture(like={"ids": torch.arange(3)})
        for said, mode in (({}, PIECEWISE), ({"uniform": True}, FULL)):
            for n in (3, 6):
                runtime.step({"ids": torch.arange(n)}, **said)
                assert runtime.last_decision.mode is mode
        with pytest.raises(BatchError, match="uniform"):
            runtime.step({"ids": torch.arange(4)}, uniform=True)


def test_steps_in_a_list_each_keep_their_own_output():
    with make(sizes=[1, 2], max_num_seqs=2) as runtime:
        runtime.capture(like={"ids": torch.arange(2)})
        for size in (1, 2, 3):  # Graphs of 1 and 2; eager.
            outputs = [runtime.step({"ids": torch.full((size,), n)}) for n in range(3)]
            assert [output[0].item() for output in outputs] == [1, 2, 3]


# -- an engine that pads by itself


def padded(batch, num_tokens, num_reqs):
    return {
        "x": torch.cat([batch["x"], torch.ones(num_tokens - len(batch["x"]), WIDTH)]),
        "ids": torch.cat([batch["ids"], torch.full((num_tokens - len(batch["ids"]),), -1)]),
        "lens": torch.cat(
            [batch["lens"], torch.zeros(num_reqs - len(batch["lens"]), dtype=torch.int64)]
        ),
    }


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize(
    ("batch", "size", "mode"),
    [
        ((3, 3, True), (4, 4), FULL),
        ((5, 2, False), (8, 4), PIECEWISE),
        ((5, 2, False), (8, 2), PIECEWISE),
    ],
)
def test_values_that_the_engine_padded_are_cut(batch, size, mode, every):
    with RuntimeLab(asked={"verify_every": every}) as lab:
        lab.runtime.capture()
        num_tokens, num_reqs, uniform = batch
        for seed in (1, 2, 3):
            alone = values(num_tokens, num_reqs, seed)
            for given in (padded(alone, *size), alone, padded(alone, *size)):
                outputs = lab.runtime.step(
                    given, num_tokens=num_tokens, num_reqs=num_reqs, uniform=uniform
                )
                assert lab.runtime.last_decision[::2] == (mode, Reason.PADDED)
                assert_equal(outputs, lab.eager(num_tokens, num_reqs, seed))
        event = lab.step_events[-1]
        assert type(event) is Replayed
        assert (event.num_tokens, event.num_padded_tokens, event.num_reqs) == (
            num_tokens,
            size[0],
            num_reqs,
        )


def test_values_that_the_engine_padded_run_eager_until_captured():
    seen = []

    class Resource:
        def prepare(self, key, step_info):
            seen.append(key.num_tokens)

    with RuntimeLab("FULL", resources=[Resource()]) as lab:
        outputs = lab.runtime.step(padded(values(3, 3), 4, 4), num_tokens=3, num_reqs=3)
        assert lab.runtime.last_decision[::2] == (NONE, Reason.NOT_CAPTURED_YET)
        assert_equal(outputs, lab.eager(3, 3))
        [event] = lab.step_events
        assert type(event) is RanEager
        assert event.num_tokens == 3
        assert seen == [4]  # What the model ran on.


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("size", [(5, 4), (8, 4), (2, 2), (4, 3)])
def test_values_padded_to_no_key_of_the_step_are_refused(captured, size):
    with RuntimeLab("FULL_DECODE_ONLY") as lab:
        if captured:
            lab.runtime.capture()
        calls = lab.model.num_calls
        batch = values(*size)
        with pytest.raises(InputMismatchError):
            lab.runtime.step(batch, num_tokens=3, num_reqs=2)
        with pytest.raises(InputMismatchError, match="say both"):
            lab.runtime.step(batch, num_tokens=3)
        assert lab.model.num_calls == calls


def test_padding_of_the_engine_is_replaced_in_the_next_step():
    def model(ids):  # The padding is read, so that the outputs show it.
        return ids.sum().expand(len(ids)) + ids

    with make(
        model,
        sizes=[4],
        max_num_seqs=4,
        max_num_batched_tokens=4,
        reads_padding="a sum over the whole batch",
    ) as runtime:
        runtime.capture(like={"ids": torch.arange(1, 3)})
        for _ in range(2):
            given = {"ids": torch.tensor([1, 2, 9, 9])}
            assert runtime.step(given, num_tokens=2, num_reqs=2).tolist() == [22, 23]
            assert runtime.step({"ids": torch.tensor([3, 4])}).tolist() == [10, 11]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("splitting_ops", None),
        ("inductor_passes", {"mine": "package.mine"}),
        ("pass_config", {"enable_fusion": True}),
        ("pass_config", {"enable_attn_fusion": True}),
        ("pass_config", {"fi_allreduce_fusion_max_token_num": 8}),
        ("pass_config", {"self_check": False}),
    ],
)
def test_compilation_that_a_runtime_lacks_is_refused(field, value):
    asked = {"level": 3, "splitting_ops": ["aten::sin"], field: value}
    if value == {"enable_attn_fusion": True}:
        del asked["splitting_ops"]
    config = RuntimeConfig(compilation=CompilationConfig(**asked), max_num_seqs=4)
    with pytest.raises(ConfigError) as caught:
        make(lambda ids: ids, config=config)
    [problem] = caught.value.problems
    assert problem.field.startswith(f"compilation.{field}")
    assert resolve(config).plan.level  # As a plan it is sound.


def test_comparison_of_ranks_that_decide_together_is_refused():
    config = RuntimeConfig(max_num_seqs=4, ranks={"check_every": 5})
    with pytest.raises(ConfigError, match="check_every"):
        make(lambda ids: ids, config=config)
    assert resolve(config).plan.capture_order

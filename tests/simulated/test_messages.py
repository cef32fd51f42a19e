"""Messages name things as the user does, say where, and give advice that works."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.lab import FULL, KEY, Lab, RuntimeLab, rows_runner, values

from graphrt import (
    BatchDescriptor,
    BufferSpec,
    CUDAGraphRunner,
    GraphBudget,
    GraphLibrary,
    OutputSpec,
    Padding,
    Runtime,
    SimulatedDevice,
    capture_program,
)
from graphrt.errors import (
    ConfigError,
    GraphMemoryError,
    InputMismatchError,
    MutatedInputError,
    StaleInputError,
    StateAdvancedError,
    StaticBufferError,
    VerificationError,
)

LINE = __file__.rpartition("/")[2]


class Layer:
    def __init__(self) -> None:
        self.cumulative_length = torch.zeros((), dtype=torch.int64)


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer()]


class Model(torch.nn.Module):
    def forward(self, x, past):
        past.layers[0].cumulative_length.add_(1)
        return x * 2


def swapped(past, x):
    past.layers[0].cumulative_length.add_(1)
    return x * 2


def in_a_closure(cache):
    model = Model()
    return lambda x: model(x, past=cache)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (in_a_closure, "cache.layers[0].cumulative_length"),
        (lambda cache: functools.partial(Model(), past=cache), "past.layers[0].cumulative_length"),
        (lambda cache: functools.partial(swapped, cache), "past.layers[0].cumulative_length"),
    ],
)
def test_state_written_is_named_by_its_path_and_line(make, path) -> None:
    with runner_of(make(Cache())) as runner:
        with pytest.raises(StateAdvancedError) as caught:
            runner.capture()
        assert caught.value.subject == path
        assert f"{path} is written at " in caught.value.found
        assert f"{LINE}:" in caught.value.source


@pytest.mark.parametrize("as_keyword", [True, False])
def test_state_of_an_argument_is_named_by_the_parameter(as_keyword) -> None:
    x, cache = torch.ones(4), Cache()
    args, kwargs = ((x,), {"past": cache}) if as_keyword else ((x, cache), {})
    with GraphLibrary(SimulatedDevice()) as library, torch.no_grad():
        with pytest.raises(StateAdvancedError) as caught:
            capture_program(library, "model", FULL, KEY, Model(), args, kwargs)
        assert caught.value.subject == "past.layers[0].cumulative_length"
        assert f"{LINE}:" in caught.value.source


def test_static_buffer_written_is_told_with_its_line() -> None:
    def model(x):
        return x.add_(1) * 2

    with runner_of(model) as runner:
        with pytest.raises(MutatedInputError, match="'x'") as caught:
            runner.capture()
        assert f"{LINE}:" in caught.value.source
        assert caught.value.source in caught.value.found


def test_changed_argument_is_named_by_its_parameter() -> None:
    with Lab() as lab:
        wrapper = lab.wrap(lambda hidden, scale: hidden * scale)
        lab.capture(wrapper, torch.ones(4), 2.0)
        with pytest.raises(StaleInputError, match=r": hidden\n"):
            lab.step(wrapper, torch.ones(4), 2.0)


def test_changed_keywords_are_all_named_with_the_way_out() -> None:
    with Lab() as lab:
        wrapper, one = lab.wrap(lambda x, **more: x * 2), torch.ones(4)
        lab.capture(wrapper, one, mask=one, bias=one)
        with pytest.raises(StaleInputError) as caught:
            lab.step(wrapper, one, mask=one, scale=one)
        assert caught.value.found == "missing: bias; new: scale"
        assert "`variant`" in caught.value.do
        key = BatchDescriptor(8, variant="scaled")
        lab.capture(wrapper, one, key=key, mask=one, scale=one)
        assert lab.step(wrapper, one, key=key, mask=one, scale=one).tolist() == [2.0] * 4


def runner_of(fn, *names: str) -> CUDAGraphRunner:
    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec(name, ("tokens",), torch.float32) for name in names or ("x",)],
        outputs=OutputSpec({"": "tokens"}),
        sizes={"tokens": [4]},
        examples=lambda sizes, seed: {"x": torch.arange(sizes["tokens"]) + 1.0 * seed},
        device="simulated",
    )


def test_model_that_takes_other_inputs_is_refused_with_both() -> None:
    with pytest.raises(ConfigError) as caught:
        runner_of(lambda x, positions: x, "x", "ids")
    assert "x, positions" in caught.value.expected
    assert caught.value.found == "x, ids: it takes no ids; it needs positions"
    with pytest.raises(ConfigError, match="it takes no lens"):
        RuntimeLab(model=lambda x, ids: x)


class Hooked(torch.nn.Module):
    def forward(self, x):
        return x


def renaming(module, args, kwargs):
    return args, {"x": kwargs["renamed"]}


def hooked() -> Hooked:
    module = Hooked()
    module.register_forward_pre_hook(renaming, with_kwargs=True)
    return module


@functools.wraps(Hooked.forward)
def decorated(*args, **kwargs):
    return kwargs["renamed"]


@pytest.mark.parametrize(
    "fn", [lambda **inputs: 0, lambda renamed, more=1: 0, decorated, hooked(), torch.relu]
)
def test_model_that_may_take_the_inputs_is_not_refused(fn) -> None:
    with runner_of(fn, "renamed") as runner:
        assert not runner.report().graphs


@pytest.mark.parametrize("right", [(8,), (2, 4, 8)])  # Wrong for a key; for a padded batch.
def test_example_of_a_wrong_size_says_what_examples_must_return(right) -> None:
    def fills_a_key(sizes, seed):
        num_tokens = sizes["tokens"] if sizes["tokens"] in right else 8
        return values(num_tokens, sizes["requests"], seed)

    with RuntimeLab("PIECEWISE", examples=fills_a_key) as lab:
        with pytest.raises(InputMismatchError, match="an example") as caught:
            lab.runtime.capture()
        assert "exactly the sizes it is asked for" in caught.value.do


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"padding": 0}, "padding"),
        ({"shape": "tokens"}, "shape"),
        ({"dtype": "float32"}, "dtype"),
        ({"name": 3}, "name"),
    ],
)
def test_spec_with_a_field_of_another_type_names_it(wrong, field) -> None:
    right = {"name": "x", "shape": ("tokens",), "dtype": torch.float32, "padding": None}
    with pytest.raises(StaticBufferError, match=f"{field} of static buffer") as caught:
        BufferSpec(**(right | wrong))
    assert caught.value.found == repr(wrong[field])


@pytest.mark.parametrize(
    "wrong", [{"sizes": [2, 4]}, {"capacity": 4}, {"verify_tolerance": "x"}, {"verify_every": 0}]
)
def test_runner_with_an_argument_of_another_type_names_it(wrong) -> None:
    right = {
        "inputs": [BufferSpec("input", ("batch", 8), torch.float32)],
        "outputs": OutputSpec({"": "batch"}),
        "sizes": {"batch": [2, 4]},
        "device": "simulated",
    }
    with pytest.raises(ConfigError) as caught:
        CUDAGraphRunner(torch.nn.Linear(8, 8), **(right | wrong))
    [name] = wrong
    assert (caught.value.subject, caught.value.found) == (name, repr(wrong[name]))


@pytest.mark.parametrize("wrong", [{"outputs": {"": "tokens"}}, {"observer": 3}])
def test_runtime_with_an_argument_of_another_type_names_it(wrong) -> None:
    right = {
        "inputs": [BufferSpec("input", ("tokens", 8), torch.float32)],
        "outputs": OutputSpec({"": "tokens"}),
        "device": "simulated",
    }
    with pytest.raises(ConfigError) as caught:
        Runtime(torch.nn.Linear(8, 8), **(right | wrong))
    [name] = wrong
    assert (caught.value.subject, caught.value.found) == (name, repr(wrong[name]))


def test_examples_that_return_nothing_are_a_config_error() -> None:
    with (
        RuntimeLab(examples=lambda sizes, seed: None) as lab,
        pytest.raises(ConfigError, match="values by input name"),
    ):
        lab.runtime.capture()


def test_examples_that_raise_are_named_with_the_sizes_that_were_asked() -> None:
    with (
        RuntimeLab(examples=lambda sizes: None) as lab,
        pytest.raises(TypeError) as raised,
    ):
        lab.runtime.capture()
    assert raised.value.__notes__[0].startswith("in examples({'tokens':")


@pytest.mark.parametrize("length", [lambda sizes: sizes["n"] + 1, lambda sizes: 2.0])
def test_length_of_an_output_that_is_none_names_its_function(length) -> None:
    with rows_runner(lambda x: x * 2, outputs=OutputSpec({"": length})) as runner:
        for run in (runner.capture, functools.partial(runner.run, {"x": torch.ones(2, 4)})):
            with pytest.raises(ConfigError) as raised:
                run()
            assert raised.value.do == "correct the function in OutputSpec"


def test_lengths_that_like_leaves_as_they_are_are_named_as_a_cause() -> None:
    """The batch is cut to fewer columns, of which ``length`` knows nothing."""

    def sums(x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (x * (torch.arange(x.shape[1]) < length[:, None])).sum(1)

    runner = CUDAGraphRunner(
        sums,
        inputs=[
            BufferSpec("x", ("rows", "columns"), torch.float32),
            BufferSpec("length", ("rows",), torch.int64, Padding.zero()),
        ],
        outputs=OutputSpec({"": "rows"}),
        sizes={"rows": [2], "columns": [4, 8]},
        device="simulated",
    )
    with runner, pytest.raises(VerificationError, match="an input holds lengths: examples"):
        runner.capture(like={"x": torch.randn(2, 8), "length": torch.tensor([8, 7])})


def test_full_budget_of_invalid_programs_advises_to_retire() -> None:
    one = torch.ones(4)
    with Lab(budget=GraphBudget(max_graphs=1)) as lab:
        lab.capture(lab.wrap(torch.relu), one)
        with pytest.raises(GraphMemoryError) as caught:
            lab.capture(lab.wrap(torch.relu), one)
        assert "retire()" not in caught.value.do
        lab.library.invalidate()
        wrapper = lab.wrap(torch.relu)
        with pytest.raises(GraphMemoryError) as caught:
            lab.capture(wrapper, one)
        assert caught.value.do.startswith("call library.retire() first: 1 invalid")
        lab.library.retire()
        lab.library.forget_failures()
        lab.capture(wrapper, one)
        assert lab.step(wrapper, one).tolist() == [1.0] * 4


def test_full_byte_budget_advises_to_retire_what_is_invalid() -> None:
    with RuntimeLab("FULL", asked={"max_graph_bytes": 30_000}) as lab:
        with pytest.raises(GraphMemoryError) as caught:
            lab.runtime.capture()
        assert caught.value.do.startswith("raise max_graph_bytes")

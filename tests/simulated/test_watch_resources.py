"""What resources own and graphs read: ``prepare`` may set it anew, but not somewhere else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from graphrt import BatchDescriptor, Example, OutputSpec, break_point
from graphrt.errors import InvalidProgramError, VerificationError
from lab import FULL, Lab, Tally, random_rows, rows_runner


class Meta(NamedTuple):
    scales: torch.Tensor


class Scales:
    """One number for each row, in a buffer that grows with the batch."""

    def __init__(self, held):
        self.buffer, self.held = torch.ones(4), held
        self.kept = held(self.buffer)

    def prepare(self, key, step_info):
        rows = key.num_tokens
        if rows > len(self.buffer):
            self.buffer = torch.ones(rows)
        if step_info is not None:
            self.buffer[: len(step_info)] = torch.tensor(step_info)
        self.kept = self.held(self.buffer[:rows])


class OfKey(Scales):
    """A buffer of its own for each key: other memory before each run, and right."""

    def __init__(self, held):
        self.by_key = {rows: torch.ones(rows) for rows in range(1, 10)}
        super().__init__(held)

    def prepare(self, key, step_info):
        self.buffer = self.by_key[key.num_tokens]
        super().prepare(key, step_info)


class Anew(Scales):
    """Another buffer in each run."""

    def prepare(self, key, step_info):
        self.buffer = torch.empty(9)
        super().prepare(key, step_info)


FORMS = {
    "tensor": (lambda scales: scales, lambda kept: kept),
    "object": (lambda scales: SimpleNamespace(scales=scales), lambda kept: kept.scales),
    "named tuple": (Meta, lambda kept: kept.scales),
    "dict in list": (lambda scales: [{"scales": scales}], lambda kept: kept[0]["scales"]),
}
forms = pytest.mark.parametrize("form", FORMS)


@break_point
def scaled_eagerly(x, resource, read):
    return x * read(resource.kept)[: len(x), None]


def examples(sizes, seed):
    values = random_rows(sizes, seed)
    return Example(values, step_info=[1.0 + seed + row for row in range(sizes["n"])])


def scaling(kind, form, sizes=(2, 4), *, is_eager=False, **options):
    held, read = FORMS[form]
    resource = kind(held)

    def scale(x):
        if is_eager:
            return scaled_eagerly(x + 0, resource, read) + 0
        return x * read(resource.kept)[: len(x), None]

    options = {"watch": "always"} | options
    options |= {"resources": [resource], "examples": examples}
    return rows_runner(scale, sizes, **options)


def is_right(runner, rows, first):
    info = [float(first + row) for row in range(rows)]
    found = runner.run({"x": torch.ones(rows, 4)}, step_info=info)
    return torch.equal(found, torch.tensor(info)[:, None].expand(rows, 4))


class Moved(Scales):
    """Another memory of the same tensor for a larger batch."""

    def prepare(self, key, step_info):
        if key.num_tokens > len(self.buffer):
            self.buffer.data = torch.ones(key.num_tokens)
            self.kept = self.held(self.buffer)
        if step_info is not None:
            self.buffer[: len(step_info)] = torch.tensor(step_info)


@forms
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("watch", ["always", "spread"])
def test_tensor_of_a_resource_that_gets_other_memory_ends_the_graph(form, mode, watch) -> None:
    with scaling(Moved, form, modes=(mode,), watch=watch) as runner:
        runner.capture()
        assert is_right(runner, 3, 2)
        assert is_right(runner, 6, 3)  # Eager, and the memory moves.
        with pytest.raises(InvalidProgramError, match=r"replaced by prepare\(\): resource\."):
            list(map(partial(is_right, runner, 3), range(runner.num_watched)))
        assert is_right(runner, 3, 4)
        assert runner.last_decision.reason.name == "INVALIDATED"


@forms
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_buffer_that_prepare_replaces_later_ends_the_graph_that_reads_it(form, mode) -> None:
    with scaling(Scales, form, modes=(mode,)) as runner:
        runner.capture()
        assert all(is_right(runner, rows, 2) for rows in (3, 2, 4))
        assert is_right(runner, 6, 3)  # Eager, and the buffer grows.
        with pytest.raises(InvalidProgramError, match=r"replaced by prepare\(\): resource.kept"):
            is_right(runner, 3, 4)
        assert is_right(runner, 3, 4)
        assert runner.last_decision.reason.name == "INVALIDATED"
        runner.capture()
        assert all(is_right(runner, rows, 5) for rows in (3, 2, 4))
        assert runner.last_decision.reason.name == "HIT"


@forms
def test_replaced_buffer_ends_graphs_of_captures_that_were_not_observed(form) -> None:
    """Those between the largest and the smallest key, as on CUDA."""
    with scaling(Scales, form, (1, 2, 3, 4), observe="ends") as runner:
        runner.capture()
        assert is_right(runner, 6, 3)
        for rows in (3, 2):
            with pytest.raises(InvalidProgramError):
                is_right(runner, rows, 4)
            assert is_right(runner, rows, 4)


@forms
@pytest.mark.parametrize("observe", ["always", "ends"])
def test_buffer_for_each_key_is_no_replacement(form, observe) -> None:
    with scaling(OfKey, form, (1, 2, 3, 4), observe=observe) as runner:
        runner.capture()
        for number, rows in enumerate((3, 2, 6, 4, 1, 3, 2)):
            assert is_right(runner, rows, number)
            assert runner.last_decision.mode.name == ("NONE" if rows == 6 else "FULL")


@forms
def test_eager_segment_may_read_another_buffer_in_each_run(form) -> None:
    with scaling(Anew, form, modes=("PIECEWISE",), is_eager=True) as runner:
        runner.capture()
        for number, rows in enumerate((3, 2, 6, 4)):
            assert is_right(runner, rows, number)
            assert runner.last_decision.mode.name == ("NONE" if rows == 6 else "PIECEWISE")


@forms
def test_graph_that_reads_another_buffer_in_each_run_is_refused_by_its_name(form) -> None:
    with scaling(Anew, form) as runner, pytest.raises(VerificationError) as raised:
        runner.capture()
    assert raised.value.do.startswith("moved since the capture: resource.kept")


def test_module_of_a_resource_that_is_replaced_is_noticed() -> None:
    resource = SimpleNamespace(prepare=lambda key, step_info: None, layer=torch.nn.Linear(4, 4))
    options = {"resources": [resource], "watch": "always"}
    with rows_runner(lambda x: resource.layer(x), **options) as runner:
        runner.capture()
        resource.layer = torch.nn.Linear(4, 4)
        x = torch.ones(2, 4)
        assert torch.equal(runner.run({"x": x}), resource.layer(x))
        assert runner.last_decision.reason.name == "INVALIDATED"


@dataclass
class Config:
    bias: float


@dataclass(slots=True)
class Slotted:
    inner: object


class Settings:
    """Settings of the model beside what ``prepare`` sets for each batch."""

    default = 1.0

    def __init__(self):
        self.scale, self.limits, self.config = 2.0, {"low": -1.0, "high": 9.0}, Config(1.0)
        self.space, self.shift = SimpleNamespace(shift=0.5), [0.0, 1.0]
        self.longest, self.lengths, self.counts = 0, [], {}

    def set_scale(self, scale):
        self.scale = scale

    def prepare(self, key, step_info):
        self.longest = key.num_tokens
        self.lengths[:] = range(key.num_tokens)
        self.note(key)

    def note(self, key):
        count(self.counts, key.num_tokens)

    def apply(self, x):
        if not self.longest or len(self.lengths) > 99 or self.counts.get("tokens") == 0:
            return x
        low, high = self.limits["low"], self.limits["high"]
        bias = self.config.bias + self.space.shift + self.shift[1] + self.default
        return (x * self.scale).clamp(low, high) + bias


def count(counts, number):
    counts["tokens"] = number


SETTINGS = {
    "number": lambda item: setattr(item, "scale", 5.0),
    "by a method": lambda item: item.set_scale(5.0),
    "entry": lambda item: item.limits.update(high=1.0),
    "another dict": lambda item: setattr(item, "limits", {"low": 0.0, "high": 1.0}),
    "item of a list": lambda item: item.shift.__setitem__(1, 3.0),
    "field": lambda item: setattr(item.config, "bias", 3.0),
    "another object": lambda item: setattr(item, "config", Config(3.0)),
    "of a namespace": lambda item: setattr(item.space, "shift", 3.0),
    "that hides one of the class": lambda item: setattr(item, "default", 3.0),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("watch", ["always", "spread"])
def test_setting_of_a_resource_that_prepare_does_not_set_is_noticed(name, watch) -> None:
    resource, x = Settings(), {"x": torch.ones(3, 4)}
    options = {"watch": watch, "resources": [resource]}
    with rows_runner(resource.apply, (2, 4), **options) as runner:
        runner.capture()
        runner.run(x)
        assert runner.last_decision.reason.name == "PADDED"
        SETTINGS[name](resource)
        for _ in range(runner.num_watched):
            found = runner.run(x)
        assert torch.equal(found, resource.apply(x["x"]))
        assert runner.last_decision.reason.name == "INVALIDATED"


def test_what_prepare_sets_for_each_batch_leaves_graphs_valid() -> None:
    resource = Settings()
    options = {"watch": "always", "resources": [resource]}
    with rows_runner(resource.apply, (2, 4), **options) as runner:
        runner.capture()
        for rows in (1, 3, 6, 2, 4):
            runner.run({"x": torch.ones(rows, 4)})
            assert runner.last_decision.mode.name == ("NONE" if rows == 6 else "FULL")
        assert runner.library.check_externals().is_unchanged


class Scaled:
    """Sets a number for each batch: from its ``step_info``, or from a setting."""

    def __init__(self, kind):
        self.kind, self.setting, self.meta = kind, 2.0, None
        self.space = SimpleNamespace(number=2.0)
        self.scale, self.scales, self.memory = 2.0, [2.0], np.array([2.0])

    def prepare(self, key, step_info):
        scale = self.setting if step_info is None else step_info
        if self.kind == "attribute":
            self.scale = scale
        elif self.kind == "entry":
            self.scales[0] = scale
        elif self.kind == "array":
            self.memory[:] = scale
        elif self.kind == "length":
            self.scales = [None] * int(scale)
        elif self.kind == "of a record":
            self.meta = SimpleNamespace(inner=Config(scale))
        elif self.kind == "of slots":
            self.meta = Slotted(Slotted(Config(scale)))
        elif self.kind == "of a mapping":
            self.meta = {"many": {"of": scale}}
        elif self.kind == "absent at first":
            if scale != 2.0:
                self.late = scale
        elif self.kind == "of an object in place":
            self.space.number = scale
            self.space = self.space
        else:
            self.meta = SimpleNamespace(number=scale)

    def read(self):
        if self.kind == "attribute":
            return self.scale
        if self.kind == "entry":
            return self.scales[0]
        if self.kind == "array":
            return float(self.memory[0])
        if self.kind == "length":
            return len(self.scales)
        if self.kind == "of a record":
            return self.meta.inner.bias
        if self.kind == "of slots":
            return self.meta.inner.inner.bias
        if self.kind == "of a mapping":
            return self.meta["many"]["of"]
        if self.kind == "absent at first":
            return getattr(self, "late", 2.0)
        return self.space.number if self.kind == "of an object in place" else self.meta.number


KINDS = (
    *("attribute", "entry", "array", "length", "of another object"),
    *("of a record", "of a mapping", "of an object in place", "absent at first", "of slots"),
)


def no_info(sizes, seed):
    return Example(random_rows(sizes, seed))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("from_setting", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_value_that_prepare_sets_and_no_example_had_is_compared_before_it_is_trusted(
    kind, from_setting, mode
) -> None:
    resource, x = Scaled(kind), torch.ones(3, 4)
    options = {"resources": [resource], "examples": no_info, "modes": (mode,)}
    with rows_runner(lambda x: x * resource.read(), (2, 4), **options) as runner:
        runner.capture()
        assert torch.equal(runner.run({"x": x}), x * 2)
        assert runner.last_decision.reason.name == "PADDED"
        resource.setting = 5.0
        info = None if from_setting else 5.0
        with pytest.raises(VerificationError, match="resource") as raised:
            runner.run({"x": x}, step_info=info)
        assert "moved since the capture: resource." in raised.value.do
        assert torch.equal(runner.run({"x": x}, step_info=info), x * 5)
        assert runner.last_decision.reason.name == "CAPTURE_FAILED"


@pytest.mark.parametrize("kind", KINDS)
def test_value_that_prepare_sets_and_changes_no_result_is_compared_once(kind) -> None:
    resource, num_runs = Scaled(kind), Tally()

    def limited(x):
        num_runs.append(len(x))
        return x * min(resource.read(), 2.0)  # As the longest length bounds the others.

    options = {"resources": [resource], "examples": no_info}
    with rows_runner(limited, (2, 4), **options) as runner:
        runner.capture()
        num_runs.clear()
        for info in (3.0, 4.0, 5.0):
            found = runner.run({"x": torch.ones(3, 4)}, step_info=info)
            assert torch.equal(found, torch.full((3, 4), 2.0))
            assert runner.last_decision.reason.name == "PADDED"
        assert list(num_runs) == [4]


@pytest.mark.parametrize("kind", KINDS)
def test_value_that_differs_between_examples_is_refused_by_its_name(kind) -> None:
    def other_info(sizes, seed):
        return Example(random_rows(sizes, seed), step_info=2.0 + seed)

    resource = Scaled(kind)
    options = {"resources": [resource], "examples": other_info}
    with (
        rows_runner(lambda x: x * resource.read(), **options) as runner,
        pytest.raises(VerificationError) as raised,
    ):
        runner.capture()
    assert "moved since the capture: resource." in raised.value.do


class Plan:
    """A number that others set."""

    def __init__(self):
        self.number = 2.0

    def plan(self, key, step_info):
        self.number = step_info or 2.0


class Underscored:
    """What a descriptor sets."""

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, owner, kind=None):
        return getattr(owner, self.name)

    def __set__(self, owner, value):
        setattr(owner, self.name, value)


class BySetters:
    other = Underscored()

    def __init__(self, name):
        self.name, self._number, self.other = name, 2.0, 2.0

    @property
    def number(self):
        return self._number

    @number.setter
    def number(self, value):
        self._number = value

    def prepare(self, key, step_info):
        if self.name == "number":
            self.number = step_info or 2.0
        else:
            self.other = step_info or 2.0


class Layer(torch.nn.Module):
    """A resource that is a module of the model."""

    number = 2.0

    def prepare(self, key, step_info):
        self.number = step_info or 2.0


class OfLayers(Plan):
    """Tells the layers of a model what it has planned. Many pages are free."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.free = layers, list(range(1000, 9000))

    def prepare(self, key, step_info):
        for layer in self.layers.children():
            layer.number = step_info or 2.0


class Pages(OfLayers):
    def __init__(self):
        super().__init__(None)
        self.deep = SimpleNamespace(inner=self.layers)

    def prepare(self, key, step_info):
        self.deep.inner = Config(step_info or 2.0)


def of_closure():
    kept = {"number": 2.0}

    def prepare(key, step_info):
        kept["number"] = step_info or 2.0

    return SimpleNamespace(prepare=prepare), lambda: kept["number"]


def of_variable():
    number = 2.0

    def prepare(key, step_info):
        nonlocal number
        number = step_info or 2.0

    return SimpleNamespace(prepare=prepare), lambda: number


def of_global():
    def prepare(key, step_info):
        global NUMBER
        NUMBER = step_info or 2.0

    return SimpleNamespace(prepare=prepare), lambda: NUMBER


def of_entry():
    def prepare(key, step_info):
        NUMBERS["number"] = step_info or 2.0

    return SimpleNamespace(prepare=prepare), lambda: NUMBERS["number"]


def of_list():
    def prepare(key, step_info):
        LENGTHS.clear()
        LENGTHS.extend([0] * int(step_info or 2))

    return SimpleNamespace(prepare=prepare), lambda: len(LENGTHS)


NUMBER, NUMBERS, LENGTHS = 2.0, {"number": 2.0}, [0, 0]


class ByKind(Plan):
    kind = "plan"

    def prepare(self, key, step_info):
        getattr(self, f"{self.kind}")(key, step_info)


def of_kind():
    resource = ByKind()
    return resource, lambda: resource.number


class OfEntries(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.entries = {"number": 2.0}

    def prepare(self, key, step_info):
        self.entries["number"] = step_info or 2.0


def of_entries():
    module = OfEntries()
    return module, lambda: module.entries["number"]


class OfLate:
    """Sets an attribute of its metadata only where a batch needs it."""

    def __init__(self):
        self.meta = SimpleNamespace(tokens=0)

    def prepare(self, key, step_info):
        if step_info is not None:
            self.meta.late = step_info


def of_late():
    resource = OfLate()
    return resource, lambda: getattr(resource.meta, "late", 2.0)


def of_method():
    plan = Plan()
    return SimpleNamespace(prepare=plan.plan), lambda: plan.number


def of_partial():
    plan = Plan()
    return SimpleNamespace(prepare=partial(Plan.plan, plan)), lambda: plan.number


def of_setter(name):
    resource = BySetters(name)
    return resource, lambda: getattr(resource, name)


def of_module():
    layer = Layer()
    return layer, lambda: layer.number


def of_layers():
    layers = torch.nn.ModuleList([Layer(), Layer()])
    return OfLayers(layers), lambda: layers[0].number


def of_pages():
    resource = Pages()
    return resource, lambda: resource.deep.inner.bias


ELSEWHERE = {
    "closure": of_closure,
    "variable of a closure": of_variable,
    "global variable": of_global,
    "entry of a global": of_entry,
    "length of a global": of_list,
    "method by a computed name": of_kind,
    "entry in a module": of_entries,
    "absent at first": of_late,
    "method of another": of_method,
    "partial": of_partial,
    "property": partial(of_setter, "number"),
    "descriptor": partial(of_setter, "other"),
    "module": of_module,
    "layers": of_layers,
    "beside many pages": of_pages,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_value_that_prepare_sets_outside_its_own_attributes_is_compared_once(name) -> None:
    (resource, read), num_runs = ELSEWHERE[name](), Tally()

    def limited(x):
        num_runs.append(len(x))
        return x * min(read(), 2.0)

    x, options = torch.ones(3, 4), {"watch": "always", "resources": [resource]}
    with rows_runner(limited, (2, 4), examples=no_info, **options) as runner:
        runner.capture()
        num_runs.clear()
        for info in (2.0, 3.0, 4.0, 5.0):
            assert torch.equal(runner.run({"x": x}, step_info=info), x * 2)
            assert runner.last_decision.reason.name == "PADDED"
        assert list(num_runs) == [4]
    with rows_runner(limited, (2, 4), examples=no_info, **options) as runner:
        runner.capture()
        with pytest.raises(VerificationError, match="moved since the capture"):
            runner.run({"x": x}, step_info=1.0)


@pytest.mark.parametrize("policy", ["view", "checked_view", "clone"])
def test_output_of_the_run_before_is_a_value_of_the_step_that_is_compared(policy) -> None:
    resource, x = Scaled("attribute"), torch.ones(3, 4)
    options = {"resources": [resource], "examples": no_info}
    outputs = OutputSpec({"": "n"}, policy)
    with rows_runner(
        lambda x: x * min(resource.read(), 2.0), (2, 4), outputs=outputs, **options
    ) as runner:
        runner.capture()
        for number, info in enumerate((2.0, 3.0, 4.0), start=1):
            x = runner.run({"x": x}, step_info=info)
            assert torch.equal(x, torch.full((3, 4), 2.0**number))


@pytest.mark.parametrize("matters", [False, True])
def test_value_that_prepare_sets_is_compared_without_another_prepare(matters) -> None:
    num_runs = Tally()

    class Turns:
        """Two buffers in turns: another ``prepare`` would set the first one again."""

        turn = 0

        def prepare(self, key, step_info):
            self.turn ^= 1

    def scale(x):
        num_runs.append(len(x))
        return x * (2 + resource.turn * matters)

    resource, x = Turns(), torch.ones(3, 4)
    with rows_runner(scale, (2, 4), resources=[resource], examples=no_info) as runner:
        runner.capture()
        num_runs.clear()
        if matters:
            with pytest.raises(VerificationError, match=r"moved .*: resource\.turn"):
                [runner.run({"x": x}) for _ in range(2)]
        else:
            for _ in range(6):
                assert torch.equal(runner.run({"x": x}), x * 2)
            assert list(num_runs) == [4]


def test_entries_for_each_request_are_compared_together() -> None:
    num_runs = Tally()

    class Requests:
        def __init__(self):
            self.lengths = {f"request {number}": 0 for number in range(20)}

        def prepare(self, key, step_info):
            self.lengths[f"request {step_info}"] = 1

    def scale(x):
        num_runs.append(len(x))
        return x * 2 if sum(resource.lengths.values()) < 100 else x

    resource, x = Requests(), torch.ones(3, 4)
    with rows_runner(scale, (2, 4), resources=[resource], examples=no_info) as runner:
        runner.capture()
        num_runs.clear()
        for number in range(6):
            assert torch.equal(runner.run({"x": x}, step_info=number), x * 2)
        assert list(num_runs) == [4]


class OfConfig:
    """Makes metadata anew, with the configuration of the model in it."""

    def __init__(self, config):
        self.meta, self.config = None, config

    def prepare(self, key, step_info):
        self.meta = Slotted(SimpleNamespace(number=step_info or 2.0, config=self.config))


def configured(config):
    space, resource = SimpleNamespace(config=config, other=Config(1.0)), OfConfig(config)

    def scale(x):
        meta = resource.meta.inner
        bias = meta.config.bias * space.config.bias * space.other.bias
        return x * min(meta.number, 2.0) * bias

    options = {"watch": "always", "resources": [resource], "examples": no_info}
    return space, rows_runner(scale, (2, 4), **options)


def test_equal_object_elsewhere_leaves_what_a_resource_makes_anew_valid() -> None:
    space, runner = configured(Config(1.0))
    x = torch.ones(3, 4)
    with runner:
        runner.capture()
        for info in (3.0, 4.0, 5.0):
            assert torch.equal(runner.run({"x": x}, step_info=info), x * 2)
            assert runner.last_decision.reason.name == "PADDED"
            space.other = Config(1.0)


def test_setting_that_the_model_shares_with_what_a_resource_makes_anew_is_noticed() -> None:
    space, runner = configured(Config(1.0))
    x = torch.ones(3, 4)
    with runner:
        runner.capture()
        runner.run({"x": x}, step_info=3.0)
        space.config.bias = 2.0
        assert torch.equal(runner.run({"x": x}, step_info=3.0), x * 8)
        assert runner.last_decision.reason.name == "INVALIDATED"


def test_tensor_that_a_resource_makes_anew_for_a_module_ends_the_graph() -> None:
    layer = Layer()

    class Anew:
        def prepare(self, key, step_info):
            layer.number = SimpleNamespace(scale=torch.full((8,), step_info or 2.0))

    x, options = torch.ones(3, 4), {"watch": "always", "resources": [Anew()], "examples": no_info}
    with rows_runner(lambda x: x * layer.number.scale[: len(x), None], (2, 4), **options) as runner:
        runner.capture()
        runner.run({"x": x}, step_info=2.0)
        with pytest.raises(InvalidProgramError, match=r"replaced by prepare\(\)"):
            runner.run({"x": x}, step_info=3.0)
        assert torch.equal(runner.run({"x": x}, step_info=3.0), x * 3)


@dataclass
class Planned:
    longest: float
    scale: float


class PlannedFields(NamedTuple):
    longest: float
    scale: float


@pytest.mark.parametrize("build", [Planned, PlannedFields, lambda *of: vars(Planned(*of))])
def test_field_that_differs_later_than_the_one_beside_it_is_compared_too(build) -> None:
    class Builder:
        meta = None

        def prepare(self, key, step_info):
            self.meta = build(*(step_info or (2.0, 2.0)))

        def scale(self, x):
            fields = self.meta
            if type(fields) is dict:
                return x * min(fields["longest"], 2.0) * fields["scale"]
            return x * min(fields.longest, 2.0) * fields.scale

    resource, x = Builder(), torch.ones(3, 4)
    with rows_runner(resource.scale, (2, 4), resources=[resource], examples=no_info) as runner:
        runner.capture()
        assert torch.equal(runner.run({"x": x}, step_info=(3.0, 2.0)), x * 4)
        with pytest.raises(VerificationError, match=r"moved since the capture: meta.*scale"):
            runner.run({"x": x}, step_info=(4.0, 3.0))


def test_value_that_prepare_sets_is_trusted_where_nothing_is_verified() -> None:
    resource, x = Scaled("attribute"), torch.ones(4, 4)
    options = {"resources": [resource], "examples": no_info, "verify": "off"}
    with rows_runner(lambda x: x * resource.read(), (2, 4), **options) as runner:
        runner.capture()
        assert torch.equal(runner.run({"x": x}, step_info=5.0), x * 2)


class ByName:
    """Sets attributes whose names it computes."""

    def __init__(self):
        self.first = self.second = 0

    def prepare(self, key, step_info):
        for number, name in enumerate(("first", "second")):
            setattr(self, name, key.num_tokens + number)


def test_attributes_that_prepare_sets_by_name_leave_graphs_valid() -> None:
    resource = ByName()
    options = {"watch": "always", "resources": [resource]}
    with rows_runner(lambda x: x * 2 if resource.first else x, (2, 4), **options) as runner:
        runner.capture()
        for rows in (1, 3, 2, 4):
            runner.run({"x": torch.ones(rows, 4)})
            assert runner.last_decision.mode.name == "FULL"


def test_tensor_that_a_resource_replaced_is_noticed_by_users_of_parts_that_ask(lab: Lab) -> None:
    resource = Scales(lambda scales: scales)
    wrapper = lab.wrap(lambda x: x * resource.kept[: len(x), None])
    x = torch.ones(2, 4)
    lab.capture(wrapper, x, scope={"resources": [resource]}, key=BatchDescriptor(2))
    resource.prepare(BatchDescriptor(2), [3.0, 4.0])
    assert torch.equal(lab.step(wrapper, x, key=BatchDescriptor(2))[:, 0], torch.tensor([3.0, 4.0]))
    resource.prepare(BatchDescriptor(6), None)  # The buffer grows.
    assert lab.library.check_externals().is_unchanged  # It may be that of another key.
    resource.prepare(BatchDescriptor(2), [5.0, 6.0])
    with pytest.raises(InvalidProgramError, match=r"replaced by prepare\(\): resource.kept"):
        lab.step(wrapper, x, key=BatchDescriptor(2))
    [program] = lab.library.programs
    assert (program.state, program.mode) == ("invalid", FULL)


def test_buffer_for_each_key_is_no_replacement_for_users_of_parts(lab: Lab) -> None:
    resource = OfKey(lambda scales: scales)
    wrapper = lab.wrap(lambda x: x * resource.kept[: len(x), None])
    x = torch.ones(2, 4)
    resource.prepare(BatchDescriptor(2), None)
    lab.capture(wrapper, x, scope={"resources": [resource]}, key=BatchDescriptor(2))
    resource.prepare(BatchDescriptor(4), None)
    lab.library.check_externals()
    resource.prepare(BatchDescriptor(2), [5.0, 6.0])
    assert torch.equal(lab.step(wrapper, x, key=BatchDescriptor(2))[:, 0], torch.tensor([5.0, 6.0]))


class Backend:
    """As attention back ends are: what ``prepare`` sets, ``forward`` reads in a break point."""

    def __init__(self):
        self.number = 1.0

    def prepare(self, key, step_info):
        self.number = 1.0 if step_info is None else step_info

    def begin(self, x):
        return x

    def forward(self, x):
        return x * self.number


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_value_that_only_an_eager_segment_reads_is_not_compared(mode) -> None:
    backend, calls = Backend(), Tally()

    @break_point
    def attend(x):
        calls.append(len(x))
        return backend.forward(x)

    options = {"resources": [backend], "examples": no_info, "modes": (mode,)}
    with rows_runner(lambda x: attend(backend.begin(x)) + 1, (4,), **options) as runner:
        runner.capture()
        x = torch.ones(4, 4)
        if mode == "FULL":
            with pytest.raises(VerificationError) as raised:
                runner.run({"x": x}, step_info=5.0)
            assert "moved since the capture: backend.number" in raised.value.do
            return
        calls.clear()
        assert torch.equal(runner.run({"x": x}, step_info=5.0), x * 5 + 1)
        assert list(calls) == [4]  # Compared, it would run twice.
        assert runner.last_decision.reason.name == "HIT"


def test_number_that_the_forward_of_an_autograd_function_reads_is_watched() -> None:
    scale = SimpleNamespace(number=2.0)

    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * scale.number

    with rows_runner(lambda x: Scaling.apply(x), (4,), watch="always") as runner:
        runner.capture()
        scale.number = 3.0
        x = torch.ones(4, 4)
        assert torch.equal(runner.run({"x": x}), x * 3)
        assert runner.last_decision.reason.name == "INVALIDATED"


def test_number_that_a_forward_reads_inside_an_operator_is_watched() -> None:
    backend = Backend()
    library = torch.library.Library("graphrt_watch_resources", "FRAGMENT")
    library.define("forward(Tensor x) -> Tensor")
    library.impl("forward", backend.forward, "CPU")
    library.impl("forward", torch.empty_like, "Meta")
    forward = torch.ops.graphrt_watch_resources.forward
    with rows_runner(lambda x: forward(backend.begin(x)), (4,), watch="always") as runner:
        runner.capture()
        backend.number = 3.0
        x = torch.ones(4, 4)
        assert torch.equal(runner.run({"x": x}), x * 3)
        assert runner.last_decision.reason.name == "INVALIDATED"

"""What graphs read besides their inputs is noticed when it is replaced, wherever it is kept."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import math
import operator
import os
import sys
import threading
from array import array
from collections import ChainMap, UserDict, namedtuple
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_module

import lab as laboratory
from graphrt import (
    BatchDescriptor,
    BufferSpec,
    CaptureJob,
    CUDAGraphRunner,
    GraphLibrary,
    OutputSpec,
    Reason,
    RuntimeMode,
    SimulatedDevice,
    TensorStateGuard,
    break_point,
    capture_program,
)
from graphrt.errors import InvalidProgramError, MissError, VerificationError
from graphrt.events import Invalidated
from graphrt.externals.reachable import Walk
from graphrt.gc_pause import frozen_heap
from lab import KEY, Lab

FULL = RuntimeMode.FULL
Pair = namedtuple("Pair", "left right")
SCALE = 2.0
TABLE = torch.arange(4.0)


@pytest.fixture(autouse=True)
def quick_collections():
    with frozen_heap():
        yield


def example(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(sizes["n"], 4, generator=generator, dtype=torch.float32)}


def make(fn, sizes=(2,), **options):
    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("x", ("n", 4), torch.float32)],
        outputs=OutputSpec({"": "n"}),
        sizes={"n": list(sizes)},
        examples=example,
        device="simulated",
        **options,
    )


def run(runner, n=2, seed=5):
    return runner.run(example({"n": n}, seed))


def laps(runner):
    """Graph runs within which every place was looked at."""
    return math.ceil(runner.num_watched / 4)


def linear():
    return torch.nn.Linear(4, 4, bias=False)


def weight():
    return torch.randn(4, 4)


class Net(torch.nn.Module):
    offset = 1.0

    def __init__(self):
        super().__init__()
        self.inner = linear()
        self.layers = torch.nn.ModuleList([linear(), linear()])
        self.norm = torch.nn.LayerNorm(4)
        self.act = torch.nn.ReLU()
        self.table = torch.ones(4)
        self.register_buffer("mask", torch.ones(4))
        self.scale = 2.0
        self.cfg = {"eps": 0.5, "dtype": torch.float32, "w": torch.ones(4)}
        self.steps = [1, 2.0]
        self.helper = SimpleNamespace(bias=3.0, shift=torch.ones(4), pair=Pair(linear(), 2.0))
        self.unused = linear()
        self.note = "never read"

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = self.act(self.norm(self.inner(x) * self.mask + self.table)) * self.scale + self.offset
        x = x + self.cfg["eps"] * self.cfg["w"] + self.helper.bias + self.helper.shift
        return self.pair_of(x) * self.steps[1] + getattr(self, "extra", 0.0)

    def pair_of(self, x):
        return self.helper.pair.left(x) * self.helper.pair.right


class Slots:
    __slots__ = ("weight",)

    def __init__(self):
        self.weight = weight()


class Engine:
    """A plain object; some of its attributes must not be touched."""

    def __init__(self):
        self.model = linear()
        self.slots = Slots()
        self.factor = 2.0
        self.num_steps = 0

    def __getattr__(self, name):
        raise RuntimeError(f"nobody may ask for {name}")

    @property
    def broken(self):
        raise RuntimeError("nobody may run this")

    def forward(self, x):
        return self.model(x) @ self.slots.weight * self.factor


@dataclass
class Box:
    weight: torch.Tensor
    scale: float


def helper_with_a_global(x):
    return x * SCALE + TABLE


def set_global(name, value):
    globals()[name] = value


NET_CHANGES = {
    "parameter_data": lambda m: setattr(m.inner.weight, "data", weight()),
    "parameter_transposed": lambda m: setattr(m.inner.weight, "data", m.inner.weight.data.t()),
    "parameter": lambda m: setattr(m.inner, "weight", torch.nn.Parameter(weight())),
    "parameter_set_": lambda m: m.inner.weight.set_(weight()),
    "parameter_in_register": lambda m: m.inner._parameters.update(
        weight=torch.nn.Parameter(weight())
    ),
    "swap_tensors": lambda m: torch.utils.swap_tensors(
        m.inner.weight, torch.nn.Parameter(weight())
    ),
    "assign": lambda m: m.inner.load_state_dict({"weight": weight()}, assign=True),
    "buffer": lambda m: setattr(m, "mask", torch.zeros(4)),
    "plain_attribute": lambda m: setattr(m, "table", torch.zeros(4)),
    "attribute_to_parameter": lambda m: setattr(m, "table", torch.nn.Parameter(torch.zeros(4))),
    "submodule": lambda m: setattr(m, "inner", linear()),
    "submodule_in_register": lambda m: m._modules.update(inner=linear()),
    "submodule_without_tensors": lambda m: setattr(m, "act", torch.nn.GELU()),
    "layer": lambda m: m.layers.__setitem__(1, linear()),
    "one_layer_more": lambda m: m.layers.append(linear()),
    "one_layer_less": lambda m: m.layers.__delitem__(1),
    "host_attribute": lambda m: setattr(m, "scale", 5.0),
    "host_attribute_of_torch": lambda m: setattr(m.norm, "eps", 10.0),
    "class_attribute_hidden": lambda m: setattr(m, "offset", 7.0),
    "absent_attribute": lambda m: setattr(m, "extra", 7.0),
    "dict_entry": lambda m: m.cfg.update(eps=7.0),
    "dict": lambda m: setattr(m, "cfg", {**m.cfg, "eps": 7.0}),
    "tensor_in_dict": lambda m: m.cfg.update(w=torch.zeros(4)),
    "list_item": lambda m: m.steps.__setitem__(1, 7.0),
    "object_attribute": lambda m: setattr(m.helper, "bias", 7.0),
    "object_tensor": lambda m: setattr(m.helper, "shift", torch.zeros(4)),
    "object": lambda m: setattr(m, "helper", SimpleNamespace(**{**vars(m.helper), "bias": 7.0})),
    "named_tuple": lambda m: setattr(m.helper, "pair", Pair(linear(), 2.0)),
    "module_in_named_tuple": lambda m: setattr(m.helper.pair.left.weight, "data", weight()),
    "float_to_int": lambda m: setattr(m, "scale", 2),
    "method": lambda m: setattr(m, "pair_of", lambda x: x),
}


@pytest.mark.parametrize("change", NET_CHANGES.values(), ids=NET_CHANGES.keys())
def test_change_of_a_module_is_noticed_unasked(change) -> None:
    model, events = Net(), []
    with make(model, observer=events.append) as runner, torch.no_grad():
        runner.capture()
        for _ in range(2 * laps(runner)):
            run(runner)
            assert runner.last_decision.reason is Reason.HIT
        change(model)
        for _ in range(laps(runner)):
            out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, model(**example({"n": 2}, 5)))
        [event] = [event for event in events if isinstance(event, Invalidated)]
        assert event.names
        assert all(name in runner.explain() for name in event.names)
        runner.capture()
        for _ in range(laps(runner)):
            out = run(runner)
            assert runner.last_decision.reason is Reason.HIT
        assert torch.equal(out, model(**example({"n": 2}, 5)))


@pytest.mark.parametrize("change", NET_CHANGES.values(), ids=NET_CHANGES.keys())
def test_change_of_a_module_is_seen_when_asked(change) -> None:
    model = Net()
    with make(model, watch="off") as runner, torch.no_grad():
        runner.capture()
        assert runner.check_externals().is_unchanged
        change(model)
        assert runner.check_externals().moved
        out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, model(**example({"n": 2}, 5)))


def closure_cell():
    factor = 2.0

    def fn(x):
        return x * factor

    def change():
        nonlocal factor
        factor = 3.0

    return fn, change


def closure_tensor():
    table = torch.ones(4)

    def fn(x):
        return x * table

    def change():
        nonlocal table
        table = torch.zeros(4)

    return fn, change


def of_engine(change):
    def make_case():
        engine = Engine()
        return engine.forward, lambda: change(engine)

    return make_case


def module_of_engine():
    engine = Engine()
    return lambda x: engine.forward(x), lambda: setattr(engine, "model", linear())


def dataclass_field():
    box = Box(weight(), 2.0)
    return lambda x: x @ box.weight * box.scale, lambda: setattr(box, "scale", 3.0)


def global_of_a_helper():
    return (lambda x: helper_with_a_global(x)), lambda: set_global("SCALE", SCALE + 1)


def global_tensor():
    return (lambda x: helper_with_a_global(x)), lambda: set_global("TABLE", torch.randn(4))


def partial_keyword():
    def scaled(x, table):
        return x * table["w"]

    table = {"w": torch.ones(4)}
    return functools.partial(scaled, table=table), lambda: table.update(w=torch.zeros(4))


def default_argument():
    holder = SimpleNamespace(scale=2.0)

    def fn(x, holder=holder):
        return x * holder.scale

    return fn, lambda: setattr(holder, "scale", 3.0)


def defaults_replaced(name, new):
    def case():
        def scaled(x, by=2.0, shift=1.0, *, less=0.5):
            return x * by + shift - less

        return (lambda x: scaled(x)), replaced(scaled, name, new)

    return case


def list_of_modules():
    layers = [linear(), linear()]

    def fn(x):
        for layer in layers:
            x = layer(x)
        return x

    return fn, lambda: layers.append(linear())


def dict_of_modules():
    nets = {"net": linear()}
    return lambda x: nets["net"](x), lambda: nets.update(net=linear())


def set_of_modules():
    nets = {linear()}

    def fn(x):
        for net in nets:
            x = net(x)
        return x

    def change():
        nets.pop()
        nets.add(linear())

    return fn, change


def function_rebound():
    def activation(x):
        return x.relu()

    def other(x):
        return x.tanh()

    def fn(x):
        return activation(x)

    def change():
        nonlocal activation
        activation = other

    return fn, change


def inside_a_break_point():
    box = Box(weight(), 2.0)

    @break_point
    def attend(x):
        return x @ box.weight * box.scale

    return lambda x: attend(x), lambda: setattr(box, "scale", 3.0)


OTHER_CASES = [
    closure_cell,
    closure_tensor,
    module_of_engine,
    dataclass_field,
    global_of_a_helper,
    global_tensor,
    partial_keyword,
    default_argument,
    list_of_modules,
    dict_of_modules,
    set_of_modules,
    function_rebound,
    inside_a_break_point,
    pytest.param(of_engine(lambda e: setattr(e, "model", linear())), id="engine_model"),
    pytest.param(of_engine(lambda e: setattr(e, "factor", 3.0)), id="engine_host_value"),
    pytest.param(defaults_replaced("__defaults__", (3.0, 1.0)), id="first_default"),
    pytest.param(defaults_replaced("__defaults__", (2.0, 3.0)), id="last_default"),
    pytest.param(defaults_replaced("__defaults__", (9.0, 2.0, 3.0)), id="another_default"),
    pytest.param(defaults_replaced("__kwdefaults__", {"less": 0.0}), id="keyword_default"),
    pytest.param(of_engine(lambda e: setattr(e.slots, "weight", weight())), id="engine_slot"),
]


@pytest.mark.parametrize("case", OTHER_CASES)
@pytest.mark.parametrize("watch", ["spread", "always"])
def test_change_outside_modules_is_noticed(case, watch) -> None:
    fn, change = case()
    with make(fn, watch=watch) as runner, torch.no_grad():
        runner.capture()
        for _ in range(laps(runner)):
            run(runner)
            assert runner.last_decision.reason is Reason.HIT
        change()
        for _ in range(1 if watch == "always" else laps(runner)):
            out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, fn(**example({"n": 2}, 5)))


class Indirect:
    """Read by operators, ``with``, loops and ``vars``, never by the name of its attribute."""

    def __init__(self):
        self.scale, self.items = 2.0, [2.0]

    def __matmul__(self, x):
        return x * self.scale

    def __iter__(self):
        return iter(self.items)

    def __enter__(self):
        return self.scale

    def __exit__(self, *_):
        return None


class Setting:
    def __get__(self, owner, kind=None):
        return owner.hidden


class Answering:
    def __init__(self):
        object.__setattr__(self, "kept", 2.0)

    def __getattribute__(self, name):
        return object.__getattribute__(self, "kept" if name == "scale" else name)


class WithSetting:
    offset, setting = 2.0, Setting()

    def __init__(self):
        self.hidden = 2.0

    @property
    def twice(self):
        return self.hidden * 2

    @classmethod
    def add(cls, x):
        return x + cls.offset


def indirect_case(name):
    """A callable, and how what it reads is changed."""
    box, table, own = Indirect(), {"first": 2.0}, type("Own", (WithSetting,), {})
    item = own()

    def read_with(x):
        with box as scale:
            return x * scale

    def tagged(x):
        return x * tagged.scale

    def late(x):
        try:
            return x * LATE_SCALE
        except NameError:
            return x * 1

    tagged.scale = 2.0
    hooked, wide = linear(), SimpleNamespace(all=tuple(range(20)))
    guarded, counted = Answering(), type("Counted", (type,), {"unit": 2.0})("Class", (), {})()
    lazy, lazy_values = ModuleType("lazy_module"), {"scale": 2.0}
    lazy.__getattr__ = lambda name: lazy_values[name]

    def scaled(x, first, second=1.0):
        return x * first * second

    cases = {
        "operator": (lambda x: box @ x, lambda: setattr(box, "scale", 3.0)),
        "loop": (lambda x: x * sum(box), lambda: box.items.append(3.0)),
        "with": (read_with, lambda: setattr(box, "scale", 3.0)),
        "vars": (lambda x: x * vars(box)["scale"], lambda: setattr(box, "scale", 3.0)),
        "getattr": (lambda x: x * getattr(box, "late", 1.0), lambda: setattr(box, "late", 3.0)),
        "get": (lambda x: x * table.get("late", 1.0), lambda: table.update(late=3.0)),
        "entries": (lambda x: x * sum(table.values()), lambda: table.update(more=3.0)),
        "descriptor": (lambda x: x * item.setting, lambda: setattr(item, "hidden", 3.0)),
        "property": (lambda x: x * item.twice, lambda: setattr(item, "hidden", 3.0)),
        "class_method": (lambda x: own.add(x), lambda: setattr(own, "offset", 3.0)),
        "function_attribute": (tagged, lambda: setattr(tagged, "scale", 3.0)),
        "late_global": (late, lambda: set_global("LATE_SCALE", 3.0)),
        "hook": (
            lambda x: hooked(x),
            lambda: hooked.register_forward_hook(lambda module, args, out: out * 3),
        ),
        "long_tuple": (lambda x: x * wide.all[3], lambda: setattr(wide, "all", (1,) * 20)),
        "getattribute": (lambda x: x * guarded.scale, lambda: setattr(guarded, "kept", 3.0)),
        "metaclass": (
            lambda x: x * type(counted).unit,
            lambda: setattr(type(type(counted)), "unit", 3.0),
        ),
        "module_getattr": (lambda x: x * lazy.scale, lambda: lazy_values.update(scale=3.0)),
        "keywords": (lambda x: scaled(x, **table), lambda: table.update(second=3.0)),
    }
    return cases if name is None else cases[name]


@pytest.mark.parametrize("name", indirect_case(None))
def test_value_read_in_a_roundabout_way_is_noticed(name) -> None:
    fn, change = indirect_case(name)
    with make(fn) as runner, torch.no_grad():
        runner.capture()
        for _ in range(laps(runner)):
            run(runner)
            assert runner.last_decision.reason is Reason.HIT
        try:
            change()
            for _ in range(laps(runner)):
                run(runner)
            assert runner.last_decision.reason is Reason.INVALIDATED
        finally:
            globals().pop("LATE_SCALE", None)


HOST_VALUES = [
    (Decimal(2), Decimal(3)),
    (Fraction(1, 2), Fraction(1, 3)),
    (np.float32(2), np.float32(3)),
    (np.bool_(True), np.bool_(False)),
]


@pytest.mark.parametrize(
    ("of", "before", "after"),
    [
        (np.dtype, "f4", "f8"),
        (torch.finfo, torch.float32, torch.float16),
        (torch.iinfo, torch.int32, torch.int64),
        (lambda item: list[item], int, float),
        (lambda item: int | item, str, float),
        (lambda item: item, NotImplemented, 1),
    ],
)
def test_description_of_a_type_is_noticed(of, before, after) -> None:
    box = SimpleNamespace(value=of(before))
    with make(lambda x: x * len(repr(box.value))) as runner:
        runner.capture()
        box.value = of(before)
        assert runner.check_externals().is_unchanged
        box.value = of(after)
        for _ in range(laps(runner)):
            run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED


@pytest.mark.parametrize(("before", "after"), HOST_VALUES)
def test_host_value_of_any_type_is_noticed(before, after) -> None:
    box = SimpleNamespace(value=before)
    with make(lambda x: x * float(box.value)) as runner:
        runner.capture()
        box.value = type(before)(before)
        assert runner.check_externals().is_unchanged
        box.value = after
        for _ in range(laps(runner)):
            run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED


class Counted(np.ndarray):
    """A subclass whose own code nobody may run."""

    @property
    def flat(self):
        raise AssertionError("read by its own code")


def within(value, read, change):
    """Something that holds more than its name says, how it is read, and how it is changed."""
    return lambda: ((lambda x: x * read(value)), lambda: change(value))


def replaced(owner, name, value):
    return lambda: setattr(owner, name, value)


def of_one_class():
    class Own:
        def scaled(self, x):
            return x * 2

    item = Own()
    return (lambda x: item.scaled(x)), item, Own


def replaced_class():
    fn, item, _ = of_one_class()
    return fn, replaced(item, "__class__", type("Other", (), {"scaled": lambda self, x: x * 3}))


def replaced_method():
    fn, _, kind = of_one_class()
    return fn, replaced(kind, "scaled", lambda self, x: x * 3)


def replaced_code():
    def scaled(x):
        return x * 2

    def other(x):
        return x * 3

    return (lambda x: scaled(x)), replaced(scaled, "__code__", other.__code__)


def replaced_dict():
    box = SimpleNamespace(weight=weight(), scale=2.0)
    holder = Engine()
    holder.box = box
    holder.forward = lambda x: x @ holder.box.weight
    return (lambda x: holder.forward(x)), lambda: vars(holder).update(
        box=SimpleNamespace(weight=weight(), scale=2.0)
    )


class Bag:
    def __init__(self):
        self.weight, self.scale = weight(), 2.0

    def forward(self, x):
        return x @ self.weight * self.scale


def whole_dict():
    bag = Bag()
    return bag.forward, replaced(bag, "__dict__", {"weight": weight(), "scale": 2.0})


def whole_register():
    model = linear()
    parameters = {"weight": torch.nn.Parameter(weight()), "bias": None}
    return (lambda x: model(x)), lambda: vars(model).update(_parameters=parameters)


def imported_late():
    module = sys.modules["late_settings"] = ModuleType("late_settings")
    module.scale, module.offset = 2.0, 1.0

    def fn(x):
        import late_settings
        from late_settings import offset

        return x * late_settings.scale + offset

    return fn, replaced(module, "offset", 3.0)


def computed_attribute():
    holder, number = SimpleNamespace(scale0=2.0), 0
    return (lambda x: x * getattr(holder, f"scale{number}")), replaced(holder, "scale0", 3.0)


def asked_by(get):
    def case():
        holder, number = SimpleNamespace(scale0=2.0), 0
        return (lambda x: x * get(holder, number)), replaced(holder, "scale0", 3.0)

    return case


def attribute_getter():
    holder, get = SimpleNamespace(scale0=2.0), operator.attrgetter("scale0")
    return (lambda x: x * get(holder)), replaced(holder, "scale0", 3.0)


def matched_class():
    bag = Bag()

    def fn(x):
        match bag:
            case Bag(scale=scale):
                return x * scale

    return fn, replaced(bag, "scale", 3.0)


def attribute_of_a_tensor():
    table = torch.ones(4)
    table.scale = 2.0
    return (lambda x: x * table * table.scale), replaced(table, "scale", 3.0)


def member_of_an_enum():
    class Option(Enum):
        SCALED = SimpleNamespace(scale=2.0)

    option = SimpleNamespace(now=Option.SCALED)
    return (lambda x: x * option.now.value.scale), replaced(Option.SCALED.value, "scale", 3.0)


def context_variable():
    scale = ContextVar("scale", default=2.0)
    return (lambda x: x * scale.get()), lambda: scale.set(3.0)


def weight_of_a_thread():
    own = threading.local()
    own.weight = weight()
    return (lambda x: x @ own.weight), replaced(own, "weight", weight())


def default_dtype():
    return (lambda x: x + torch.ones(4)), lambda: torch.set_default_dtype(torch.float64)


def hook_of_all_modules():
    model, register = linear(), torch_module.register_module_forward_hook
    return (lambda x: model(x)), lambda: register(lambda module, args, out: out * 3)


def variable_of_the_environment():
    return (lambda x: x * float(os.getenv("SCALE_OF_A_TEST", "2"))), lambda: os.environ.update(
        SCALE_OF_A_TEST="3"
    )


def static_method_without_arguments():
    class Own(torch.nn.Module):
        @staticmethod
        def factor():
            return 2.0

        def forward(self, x):
            return x * self.factor()

    return Own(), replaced(Own, "factor", staticmethod(lambda: 3.0))


def import_that_no_package_has():
    box = SimpleNamespace(scale=2.0)

    def fn(x):
        try:
            from . import late_settings  # noqa: F401
        except ImportError:
            return x * box.scale

    return fn, replaced(box, "scale", 3.0)


def library_beside_a_value():
    library, number = ctypes.CDLL(None), ctypes.c_int(2)
    return (lambda x: x * float(library.abs(number))), replaced(number, "value", 3)


def structure_of_c():
    class Settings(ctypes.Structure):
        _fields_ = [("scale", ctypes.c_double)]

    item = Settings(2.0)
    return (lambda x: x * item.scale), replaced(item, "scale", 3.0)


def view_that_is_released():
    view, released = memoryview(bytearray(b"\2")), memoryview(b"")
    released.release()
    return (lambda x: x * view[0] * (released is not None)), lambda: set_first(view)


def list_called_like_a_local():
    def copied(values):
        factors = []
        factors.extend(values)
        return factors

    owner = SimpleNamespace(factors=[2.0, 3.0])
    return (lambda x: x * math.prod(copied(owner.factors))), lambda: owner.factors.append(4.0)


def set_first(value):
    memoryview(value)[0] = 3


DEEP_CASES = {
    case.__name__: case
    for case in (
        replaced_class,
        replaced_method,
        replaced_code,
        replaced_dict,
        whole_dict,
        whole_register,
        imported_late,
        computed_attribute,
        attribute_getter,
        matched_class,
        attribute_of_a_tensor,
        member_of_an_enum,
        context_variable,
        weight_of_a_thread,
        default_dtype,
        hook_of_all_modules,
        variable_of_the_environment,
        static_method_without_arguments,
        import_that_no_package_has,
        library_beside_a_value,
        structure_of_c,
        view_that_is_released,
        list_called_like_a_local,
    )
} | {
    "bytearray": within(bytearray(b"\2"), lambda value: value[0], set_first),
    "array": within(array("q", [2]), lambda value: value[0], set_first),
    "numpy": within(
        np.full(4, 2.0), lambda value: float(value[0]), lambda value: value.put(0, 3.0)
    ),
    "numpy_strided": within(np.full((4, 4), 2.0)[::2, ::2], np.sum, lambda value: value.fill(3.0)),
    "numpy_0d": within(np.array(2.0), float, lambda value: value.fill(3.0)),
    "numpy_record": within(
        np.full(2, 2, [("a", "f4")]),
        lambda value: float(value["a"][0]),
        lambda value: value["a"].fill(3.0),
    ),
    "numpy_objects": within(
        np.array([2.0, None]), lambda value: value[0], lambda value: value.put(0, 3.0)
    ),
    "joined_name": asked_by(lambda holder, number: getattr(holder, "scale" + str(number))),
    "joined_or_default": asked_by(lambda holder, n: getattr(holder, "scale" + str(n), max(1, n))),
    "made_name": asked_by(lambda holder, number: getattr(holder, "_scale0"[1 + number :])),
    "name_in_a_list": asked_by(lambda holder, n: getattr(holder, ("scale0", "scale1")[n])),
    "one_of_two_names": asked_by(lambda holder, n: getattr(holder, "scale" + ("1" if n else "0"))),
    "numpy_strings": within(
        np.array(["2", "x" * 50], dtype=np.dtypes.StringDType()),
        lambda value: float(value[0]),
        lambda value: value.__setitem__(0, "3"),
    ),
    "numpy_subclass": within(
        np.full(4, 2.0).view(Counted),
        lambda value: float(np.ndarray.sum(value)),
        lambda value: value.fill(3.0),
    ),
    "long_list": within(
        [2.0] * 5000, lambda value: value[4000], lambda value: value.__setitem__(4000, 3.0)
    ),
    "long_dict": within(
        dict.fromkeys(range(5000), 2.0),
        lambda value: value[7],
        lambda value: value.update({7: 3.0}),
    ),
    "membership": within(
        {}, lambda value: 3 if "flag" in value else 2, lambda value: value.update(flag=1)
    ),
    "truth": within({}, lambda value: 3 if value else 2, lambda value: value.update(flag=1)),
    "length": within({"a": 1}, lambda value: len(value), lambda value: value.update(b=1)),
    "order": within(
        {"a": 1.0, "b": 2.0},
        lambda value: functools.reduce(lambda a, b: a * 2 + b, value.values()),
        lambda value: value.update(a=value.pop("a")),
    ),
    "user_dict": within(
        UserDict(a=2.0), lambda value: value["a"], lambda value: value.update(a=3.0)
    ),
    "chain": within(
        ChainMap({"a": 2.0}, {}), lambda value: value["a"], lambda value: value.update(a=3.0)
    ),
    "proxy": within(
        SimpleNamespace(of={"a": 2.0}),
        lambda value: MappingProxyType(value.of)["a"],
        lambda value: value.of.update(a=3.0),
    ),
}


@pytest.fixture
def process_as_it_was():
    yield
    torch.set_default_dtype(torch.float32)
    torch_module._global_forward_hooks.clear()
    os.environ.pop("SCALE_OF_A_TEST", None)
    sys.modules.pop("late_settings", None)


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize("name", DEEP_CASES)
def test_change_below_any_name_is_noticed(name) -> None:
    fn, change = DEEP_CASES[name]()
    with make(fn) as runner, torch.no_grad():
        runner.capture()
        for _ in range(laps(runner)):
            run(runner)
            assert runner.last_decision.reason is Reason.HIT
        change()
        for _ in range(laps(runner)):
            out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, fn(**example({"n": 2}, 5)))


@given(
    num_parts=st.integers(1, 200),
    where=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from((list, np.zeros, bytearray)),
)
@settings(max_examples=20, deadline=None)
def test_long_contents_are_looked_at_in_turns(num_parts, where, kind) -> None:
    length = num_parts * {list: 256, np.zeros: 512, bytearray: 4096}[kind] + 1
    values = [0] * length if kind is list else kind(length)
    if kind is list and length <= 4096:
        values += [0] * 4096
    with make(lambda x: x * float(values[1])) as runner, torch.no_grad():
        runner.capture()
        rounds = laps(runner) * math.ceil((num_parts + 18) / 64)
        run(runner)
        values[int(where * length)] = 1
        for _ in range(rounds):
            run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED


# -- no false alarms


def own_scratch():
    scratch, table, number, sizes = np.zeros(8), np.zeros((2, 2)), np.zeros(()), set()

    def fn(x):
        if len(x) > 4:
            scratch[0] += 1
            sizes.add(len(x))
        table[0, 1] = number[()] = len(x)
        return x * 2

    return fn, lambda: (scratch.fill(7), table.fill(7), number.fill(7), sizes.add(99))


def equal_array():
    box = SimpleNamespace(table=np.full(4, 2.0))
    return (lambda x: x * float(box.table[0])), replaced(box, "table", np.full(4, 2.0))


def equal_dict():
    bag = Bag()
    return bag.forward, lambda: replaced(bag, "__dict__", dict(vars(bag)))()


def beside_computed_names():
    model = Net()
    model.scale0, model.count, number = 2.0, 0, 0

    def fn(x):
        return x * getattr(model, f"scale{number}") * getattr(model, "scale" + str(number))

    return fn, replaced(model, "count", 7)


def other_variable():
    return (lambda x: x * len(os.getenv("HOME", ""))), lambda: os.environ.update(
        SCALE_OF_A_TEST="3"
    )


def context_of_another_thread():
    own, scale = threading.local(), ContextVar("scale", default=2.0)
    own.scale = 2.0

    def change():
        own.scale = 3.0
        scale.set(3.0)

    def elsewhere():
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()

    return (lambda x: x * own.scale * scale.get()), elsewhere


QUIET = (
    own_scratch,
    equal_array,
    equal_dict,
    beside_computed_names,
    other_variable,
    context_of_another_thread,
)


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize("case", QUIET)
def test_change_below_a_name_that_tells_nothing_is_a_hit(case) -> None:
    fn, change = case()
    with make(fn) as runner:
        runner.capture()
        change()
        for _ in range(2 * laps(runner)):
            run(runner, 8)  # eager: no key is that large
            run(runner)
            assert runner.last_decision.reason is Reason.HIT


CONTROLS = {
    "copy_into_a_weight": lambda m: m.inner.weight.copy_(weight()),
    "unused_weight": lambda m: setattr(m.unused.weight, "data", weight()),
    "unused_module": lambda m: setattr(m, "unused", torch.nn.Identity()),
    "unread_attribute": lambda m: setattr(m, "note", "another"),
    "new_attribute": lambda m: setattr(m, "unheard", 3),
    "equal_number": lambda m: setattr(m, "scale", float("2.0")),
    "equal_objects": lambda m: setattr(m, "helper", SimpleNamespace(**vars(m.helper))),
    "same_storage": lambda m: setattr(m.inner, "weight", torch.nn.Parameter(m.inner.weight.data)),
}


@pytest.mark.parametrize("change", CONTROLS.values(), ids=CONTROLS.keys())
def test_harmless_change_stays_a_hit(change) -> None:
    model = Net()
    with make(model) as runner, torch.no_grad():
        runner.capture()
        change(model)
        assert runner.check_externals().is_unchanged
        for _ in range(2 * laps(runner)):
            out = run(runner)
            assert runner.last_decision.reason is Reason.HIT
        assert torch.equal(out, model(**example({"n": 2}, 5)))


class Late(type):
    """A metaclass that code asks for an attribute."""


class Owner(metaclass=Late):
    @classmethod
    def scaled(cls, x):
        return x * getattr(cls, "scale", 1.0)

    def of_its_class(self, x):
        return x * getattr(type(self), "scale", 1.0)

    def own(self, x):
        return x * (3 if hasattr(self, "scale") else 1)


def helper():
    """Has no attributes."""


LATER = {
    "class": (Owner, lambda x: x * getattr(Owner, "scale", 1.0)),
    "class method": (Owner, Owner.scaled),
    "class of an object": (Owner, Owner().of_its_class),
    "object of a step": (Owner, lambda x: Owner().own(x)),
    "dict of a class": (Owner, lambda x: x * (3 if "scale" in Owner.__dict__ else 1)),
    "vars of a class": (Owner, lambda x: x * vars(Owner).get("scale", 1.0)),
    "metaclass": (Late, lambda x: x * getattr(type(Owner), "scale", 1.0)),
    "function": (helper, lambda x: x * getattr(helper, "scale", 1.0)),
    "module": (laboratory, lambda x: x * getattr(laboratory, "scale", 1.0)),
    "module of torch": (torch, lambda x: x * (3 if hasattr(torch, "scale") else 1)),
    "globals": (sys.modules[__name__], lambda x: x * globals().get("scale", 1.0)),
}


@pytest.mark.parametrize("name", LATER)
def test_attribute_that_is_set_where_none_was_is_noticed(name, monkeypatch) -> None:
    owner, fn = LATER[name]
    with make(fn) as runner:
        runner.capture()
        for _ in range(laps(runner)):
            run(runner)
            assert runner.last_decision.reason is Reason.HIT
        monkeypatch.setattr(owner, "scale", 3.0, raising=False)
        for _ in range(laps(runner)):
            out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, example({"n": 2}, 5)["x"] * 3)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2


def gain(layer):
    return getattr(layer, "gain", 1.0)


class Gains(torch.nn.Module):
    """Asks its layers for what they need not have, and goes through them as ``how`` says."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second = Doubled(), Doubled()
        self.how = how

    def forward(self, x):
        return self.how(self, x)


def in_a_loop(model, x):
    for layer in (model.first, model.second):
        x = x * layer.gain if hasattr(layer, "gain") else x * 1
    return x


def in_a_helper(model, x):
    return x * gain(model.first)


def in_a_comprehension(model, x):
    return x * math.prod([getattr(layer, "gain", 1.0) for layer in (model.first, model.second)])


@pytest.mark.parametrize("how", [in_a_loop, in_a_helper, in_a_comprehension])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_attribute_asked_of_any_layer_is_noticed_when_it_is_set(how, is_buffer) -> None:
    model = Gains(how)
    with make(model) as runner, torch.no_grad():
        runner.capture()
        run(runner)
        if is_buffer:
            model.first.register_buffer("gain", torch.tensor(3.0))
        else:
            model.first.gain = 3.0
        for _ in range(laps(runner)):
            out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        runner.capture()
        assert torch.equal(run(runner), out)
        assert torch.equal(out, example({"n": 2}, 5)["x"] * 3)


def through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


THROUGH = {
    "children": lambda model, x: through(model.children(), x),
    "named_children": lambda model, x: through([m for _, m in model.named_children()], x),
    "modules": lambda model, x: through([m for m in model.modules() if m is not model], x),
    "_modules": lambda model, x: through(model._modules.values(), x),
    "parameters": lambda model, x: x * (1 + sum(p.sum() for p in model.parameters())),
    "buffers": lambda model, x: x * (1 + sum(b.sum() for b in model.buffers())),
}


@pytest.mark.parametrize("name", THROUGH)
@pytest.mark.parametrize("is_inside", [False, True])
def test_registration_under_a_new_name_is_noticed_where_code_goes_through_all(
    name, is_inside
) -> None:
    model = Gains(THROUGH[name])
    model.first.inner = Doubled()
    with make(model, on_miss="strict") as runner, torch.no_grad():
        runner.capture()
        run(runner)
        owner = model.first if is_inside else model
        if name == "parameters":
            owner.third = torch.nn.Parameter(torch.ones(1))
        elif name == "buffers":
            owner.register_buffer("third", torch.ones(1))
        else:
            owner.third = Doubled()
        with pytest.raises(MissError, match="INVALIDATED"):
            run(runner)
        runner.capture()
        assert torch.equal(run(runner), model(**example({"n": 2}, 5)))


def sets(owner: Any, name: str) -> Any:
    return lambda value: setattr(owner, name, value)


MATMUL, CUDNN, CUDA = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
FLAGS_SET = {
    "torch.backends.cuda.matmul.fp32_precision": (
        torch.set_float32_matmul_precision,
        ("high", "highest"),
    ),
    "torch.backends.cudnn.conv.fp32_precision": (sets(CUDNN, "allow_tf32"), (False, True)),
    "torch.backends.cudnn.rnn.fp32_precision": (
        sets(CUDNN.rnn, "fp32_precision"),
        ("ieee", "tf32"),
    ),
    "torch.backends.cudnn.benchmark": (sets(CUDNN, "benchmark"), (True, False)),
    "torch.backends.cudnn.deterministic": (sets(CUDNN, "deterministic"), (True, False)),
    "torch.backends.cudnn.enabled": (sets(CUDNN, "enabled"), (False, True)),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        sets(MATMUL, "allow_bf16_reduced_precision_reduction"),
        (False, True),
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": (
        sets(MATMUL, "allow_fp16_accumulation"),
        (True, False),
    ),
    "torch.backends.cuda.flash_sdp_enabled()": (CUDA.enable_flash_sdp, (False, True)),
    "torch.backends.cuda.math_sdp_enabled()": (CUDA.enable_math_sdp, (False, True)),
    "torch.nn.attention.sdpa_kernel(set_priority=True)": (
        torch._C._set_sdp_priority_order,
        ([0, 1, 2, 3, 4], torch._C._get_sdp_priority_order()),
    ),
    "torch.are_deterministic_algorithms_enabled()": (
        torch.use_deterministic_algorithms,
        (True, False),
    ),
}
"""Of each flag of torch's: what sets it, to another value and back."""


@pytest.fixture
def _usual_precision() -> Iterator[None]:
    """``set_float32_matmul_precision`` sets two flags, and cannot set them to what they were."""
    products = (MATMUL, torch.backends.mkldnn.matmul)
    before = [kind.fp32_precision for kind in products]
    yield
    for kind, precision in zip(products, before, strict=True):
        kind.fp32_precision = precision


@pytest.mark.usefixtures("_usual_precision")
@pytest.mark.parametrize("name", FLAGS_SET)
def test_flag_of_torch_is_noticed_and_named(name) -> None:
    set_to, (other, usual) = FLAGS_SET[name]
    with make(lambda x: x * 2) as runner:
        runner.capture()
        set_to(other)
        set_to(usual)
        for _ in range(2 * laps(runner)):
            run(runner)
            assert runner.last_decision.reason is Reason.HIT, "it is as it was"
        set_to(other)
        try:
            for _ in range(laps(runner)):
                run(runner)
            assert runner.last_decision.reason is Reason.INVALIDATED
            assert name in runner.explain()
        finally:
            set_to(usual)
        runner.capture()
        run(runner)
        assert runner.last_decision.reason is Reason.HIT


@pytest.mark.usefixtures("_usual_precision")
def test_flag_that_the_callable_sets_for_itself_is_a_hit() -> None:
    def fn(x):
        with sdpa_kernel(SDPBackend.MATH):
            precision = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            out = x * 2
            torch.set_float32_matmul_precision(precision)
            return out

    with make(fn, sizes=(2, 4)) as runner:
        runner.capture()
        for _ in range(2 * laps(runner)):
            run(runner)
            fn(torch.ones(1))
            assert runner.last_decision.reason is Reason.HIT


class Counting(torch.nn.Module):
    """Advances a counter, sets a flag and keeps its last input at each eager call."""

    def __init__(self):
        super().__init__()
        self.calls, self.is_ready, self.last_shape = 0, False, None
        self.history: list[Any] = []

    def forward(self, x):
        self.calls += 1
        self.is_ready = self.is_ready or self.calls > 0
        self.history.append(self.last_shape)
        self.last_shape = tuple(x.shape)
        return x * 2


@pytest.mark.parametrize("verify", ["first", "off"])
def test_value_the_callable_changes_itself_is_not_watched(verify) -> None:
    model = Counting()
    with make(model, sizes=(2, 4), verify=verify) as runner:
        runner.capture()
        for _ in range(2 * laps(runner) + 2):
            run(runner, 8)  # eager: no key is that large
            run(runner)
            assert runner.last_decision.reason is Reason.HIT


class Prepared:
    """A resource that sets attributes before each run."""

    def __init__(self):
        self.num_rows = 0
        self.scratch = torch.zeros(1)

    def reserve(self, max_key) -> None: ...

    def prepare(self, key, step_info) -> None:
        self.num_rows += 1

    def freeze(self) -> None: ...


def test_value_a_resource_prepares_is_not_watched() -> None:
    plan = Prepared()

    def fn(x):
        return x * 2 if plan.num_rows else x + x

    with make(fn, resources=[plan]) as runner:
        runner.capture()
        for _ in range(2 * laps(runner)):
            run(runner)
            assert runner.last_decision.reason is Reason.HIT


def test_lazy_proxy_among_globals_is_not_asked() -> None:
    class Proxy:
        def __getattribute__(self, name):
            raise RuntimeError("not loaded")

    proxy = Proxy()

    def fn(x):
        return x * 2 if proxy is not None else x

    with make(fn) as runner:
        runner.capture()
        assert runner.check_externals().is_unchanged


class Overridden(torch.nn.Module):
    """Finds what it reads under computed keys, and keeps a memo for each size."""

    def __init__(self, of_layers):
        super().__init__()
        self.scales, self.offsets, self.known = {}, {"always": 0.0}, {}
        self.layers = range(2)
        self.of_layers = of_layers

    def forward(self, x):
        scales = self.scales
        for number in self.layers:
            x = x + self.of_layers(self, scales, f"layer{number}")
        if len(x) not in self.known:
            self.known[len(x)] = len(x)
        return x


def by_subscript(model, scales, key):
    if key not in model.offsets:
        return 0.0
    return model.offsets[key]


def by_get(model, scales, key):
    return model.offsets.get("always") + scales.get(key, 0.0)


@pytest.mark.parametrize(("find", "name"), [(by_subscript, "offsets"), (by_get, "scales")])
def test_entry_added_under_a_computed_key_is_noticed(find, name) -> None:
    model = Overridden(find)
    with make(model, sizes=(2, 4)) as runner:
        runner.capture()
        for _ in range(laps(runner)):
            runner.run(example({"n": 7}, 5))  # Eager, with a memo of its own.
            run(runner)
            assert runner.last_decision.reason is Reason.HIT
        getattr(model, name)["layer1"] = 5.0
        for _ in range(laps(runner)):
            out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, model(example({"n": 2}, 5)["x"]))


class Kernels:
    """Compiles by kind of size: asks in one method, and keeps in another."""

    def __init__(self) -> None:
        self.found: dict[bool, int] = {}

    def __call__(self, rows: int) -> int:
        kind = rows > 4
        factor = self.found.get(kind)
        return self.compile(kind) if factor is None else factor

    def compile(self, kind: bool) -> int:
        self.found[kind] = 2
        return 2


def test_memo_that_eager_runs_fill_elsewhere_stays_a_hit() -> None:
    kernels = Kernels()
    with make(lambda x: x * kernels(len(x)), watch="always") as runner:
        runner.capture()
        runner.run(example({"n": 7}, 5))  # Eager, with a kernel of its own.
        assert kernels.found == {False: 2, True: 2}
        runner.run(example({"n": 2}, 6))
        assert runner.last_decision.reason is Reason.HIT
        kernels.found[False] = 3
        runner.run(example({"n": 2}, 6))
        assert runner.last_decision.reason is Reason.INVALIDATED


@pytest.mark.parametrize("watch", ["spread", "always"])
def test_module_assigned_in_place_of_a_none_is_noticed(watch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.adapter = None

        def forward(self, x):
            return x * 2 if self.adapter is None else self.adapter(x)

    model = Model()
    with make(model, watch=watch) as runner:
        runner.capture()
        model.adapter = linear()
        for _ in range(laps(runner)):
            found = run(runner)
        with torch.no_grad():
            assert torch.equal(found, model(example({"n": 2}, 5)["x"]))
        assert runner.last_decision.reason is Reason.INVALIDATED


def test_default_set_between_two_captures_is_read_anew() -> None:
    def scaled(x, by=2.0):
        return x * by

    with make(lambda x: scaled(x), sizes=(2, 4)) as runner:
        runner.capture_next()
        scaled.__defaults__ = (3.0,)
        runner.capture_next()
        for _ in range(laps(runner) + 1):
            out = run(runner, n=1)
        assert runner.last_decision.reason in (Reason.HIT, Reason.PADDED)
        assert torch.equal(out, example({"n": 1}, 5)["x"] * 3)
        scaled.__defaults__ = (5.0,)
        for _ in range(laps(runner)):
            run(runner, n=1)
        assert runner.last_decision.reason is Reason.INVALIDATED


class Named(torch.nn.Module):
    __factors__ = (2.0,)

    def forward(self, x):
        return x * self.__factors__[0]


def test_programs_of_one_callable_share_what_they_read() -> None:
    watched = []
    for sizes in [(2,), (2, 4)]:
        with make(Named(), sizes=sizes) as runner:
            runner.capture()
            watched.append(runner.num_watched)
            Named.__factors__ = (3.0,)
            assert not runner.check_externals().is_unchanged
            Named.__factors__ = (2.0,)
    assert watched[0] == watched[1]


def test_modes_of_a_callable_without_break_points_share_what_they_read(monkeypatch) -> None:
    watched = []
    for modes in [("FULL",), ("FULL", "PIECEWISE")]:
        with make(Named(), modes=modes) as runner:
            runner.capture()
            watched.append(runner.num_watched)
            with monkeypatch.context() as patch:
                patch.setattr(Named, "__factors__", (3.0,))
                assert len(runner.check_externals().invalidated) == len(modes)
    assert watched[0] == watched[1]


def test_value_behind_a_break_point_is_read_afresh_beside_a_full_graph(monkeypatch) -> None:
    with make(lambda x: inner(x) + 1, modes=("FULL", "PIECEWISE")) as runner:
        runner.capture()
        monkeypatch.setitem(INNER, "scale", 3.0)
        assert {mode for _, mode, _ in runner.check_externals().invalidated} == {FULL}


# -- hooks


def registration_hooks():
    return [
        hook
        for hooks in (
            torch_module._global_parameter_registration_hooks,
            torch_module._global_buffer_registration_hooks,
            torch_module._global_module_registration_hooks,
        )
        for hook in hooks.values()
    ]


LIBRARY = """
class Registry:
    def __init__(self):
        self.known = {number: [number] for number in range(500)}
        self.factor = 3.0

REGISTRY = Registry()

def scale(x, registry=REGISTRY):
    return x * registry.factor * len(registry.known) * REGISTRY.known[0][0]
"""


@pytest.mark.parametrize("is_installed", [True, False])
def test_code_of_installed_packages_is_not_entered(tmp_path, monkeypatch, is_installed) -> None:
    """There may be very much of it; what lies beside the model is the model's own."""
    name = f"library_{is_installed}".lower()
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(LIBRARY)
    if is_installed:
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    library = importlib.import_module(name)

    class Model(torch.nn.Module):
        def forward(self, x):
            return library.scale(x)

    with make(Model()) as runner:
        runner.capture()
        assert (runner.num_watched > 500) is not is_installed


def test_hooks_stay_as_they_are_whatever_runners_there_are() -> None:
    before = registration_hooks()
    with make(Net()), make(Net(), watch="off"), make(Net(), watch="always") as third:
        assert registration_hooks() == before
        third.close()
    assert registration_hooks() == before


class Keeps(torch.nn.Module):
    """Registers a buffer and a module in what Dynamo traces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x):
        self.sums = x.sum(0)
        return torch.nn.Sequential(self.linear, torch.nn.ReLU())(x)


def test_runners_do_not_make_dynamo_compile_other_models_again() -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    other, x = torch.compile(Keeps(), backend=backend), torch.ones(2, 4)
    with torch.no_grad():
        other(x)
        with make(Net()) as runner:
            runner.capture()
            other(x)
        other(x)
    assert len(graphs) == 1


def test_registration_is_noticed_while_another_thread_compiles(monkeypatch) -> None:
    model = Net()
    with make(model, on_miss="strict") as runner, torch.no_grad():
        runner.capture()
        run(runner)
        # torch's, of the process: set while any thread compiles.
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        NET_CHANGES["parameter"](model)
        with pytest.raises(MissError, match="INVALIDATED"):
            run(runner)


HOOKED = ("parameter", "assign", "buffer", "submodule", "submodule_without_tensors", "layer")


@pytest.mark.parametrize("name", [*HOOKED, "one_layer_more"])
def test_registration_is_noticed_by_the_next_run(name) -> None:
    model = Net()
    with make(model, on_miss="strict") as runner, torch.no_grad():
        runner.capture()
        run(runner)
        NET_CHANGES[name](model)
        with pytest.raises(MissError, match="INVALIDATED"):
            run(runner)
        with pytest.raises(MissError, match="INVALIDATED"):
            run(runner)


@pytest.mark.parametrize("name", HOOKED)
def test_wrapper_without_a_runner_hears_registrations(lab: Lab, name) -> None:
    model, x = Net(), torch.randn(2, 4)
    wrapper, other = lab.wrap(model, name="model"), lab.wrap(torch.relu, name="other")
    for each in (wrapper, other):
        lab.capture(each, x)
        lab.step(each, x)
    NET_CHANGES[name](model)
    with pytest.raises(InvalidProgramError):
        lab.step(wrapper, x)
    assert torch.equal(lab.step(other, x), torch.relu(x))
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), model(x))


# -- when everything is asked


def test_resume_asks_everything_before_the_next_run() -> None:
    model = Net()
    device = SimulatedDevice()
    with (
        GraphLibrary(device, pool=device.new_pool().handle) as library,
        make_in(library, model) as runner,
        torch.no_grad(),
    ):
        runner.capture()
        library.suspend(keep_programs=True)
        model.cfg["eps"] = 7.0
        library.resume()
        out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, model(**example({"n": 2}, 5)))


def make_in(library, fn, **options):
    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("x", ("n", 4), torch.float32)],
        outputs=OutputSpec({"": "n"}),
        sizes={"n": [2]},
        examples=example,
        library=library,
        **options,
    )


def test_failed_verification_asks_everything() -> None:
    box, table = {"bias": 0.0}, [1.0, 2.0, *[0.0] * 100]
    hidden = itertools.repeat(box)  # No walk looks into it.

    def fn(x):
        return x * table[1] + next(hidden)["bias"]

    with make(fn, sizes=(2, 4), verify_every=2) as runner:
        runner.capture()
        box["bias"] = 1.0
        run(runner)
        with pytest.raises(VerificationError):
            run(runner)
        table[1] = 5.0
        run(runner, 4)
        assert runner.last_decision.reason is Reason.INVALIDATED


def test_guarded_state_is_no_change() -> None:
    count = torch.zeros(4)

    def fn(x):
        count.add_(1)
        return x + count

    with make(fn, state=TensorStateGuard([count])) as runner:
        runner.capture()
        for step in range(2 * laps(runner)):
            assert torch.equal(run(runner), example({"n": 2}, 5)["x"] + (step + 1))
            assert runner.last_decision.reason is Reason.HIT


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.data())
def test_bound_of_the_spread_holds_for_any_number_of_places(count, data) -> None:
    box = [float(i) for i in range(count + 1)]

    def fn(x):
        return x * sum(box)

    with make(fn) as runner:
        runner.capture()
        assert runner.num_watched >= count + 1
        for _ in range(data.draw(st.integers(0, 9))):
            run(runner)
        box[data.draw(st.integers(0, count))] = -1.0
        for _ in range(laps(runner)):
            out = run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, fn(**example({"n": 2}, 5)))


@pytest.mark.parametrize("is_registered", [True, False])
def test_place_replaced_before_capture_next_is_noticed(is_registered) -> None:
    model = Net()
    with make(model, sizes=range(1, 9)) as runner, torch.no_grad():
        runner.capture([runner.key(n=2)])
        if is_registered:
            model.inner.weight = torch.nn.Parameter(-model.inner.weight)
        else:
            model.helper.bias = 9.0
        expected = model(example({"n": 2}, 5)["x"])
        for num_runs in itertools.count(1):
            # A part of a capture before each step: it must not start the turns anew.
            runner.capture_next()
            found = run(runner)
            if runner.last_decision.reason is Reason.INVALIDATED:
                break
            assert not is_registered
            assert num_runs < laps(runner)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("replaced", [0, 6, 11])
def test_captures_between_runs_keep_the_turns(replaced) -> None:
    box = [float(i) for i in range(12)]

    def fn(x):
        return x * sum(box)

    with make(fn, sizes=range(1, 16)) as runner:
        runner.capture([runner.key(n=2)])
        box[replaced] = -1.0
        for _ in range(laps(runner)):
            assert runner.capture_next()
            run(runner)
        assert runner.last_decision.reason is Reason.INVALIDATED


@pytest.mark.parametrize("sizes", [(2,), (1, 4)])
def test_place_where_the_callable_keeps_its_input_is_no_external(sizes) -> None:
    """A context that attention reads: others use it for their own batches between two runs."""
    context, scale = SimpleNamespace(x=None), SimpleNamespace(of=torch.ones(4))

    def attend():
        return context.x * scale.of

    def fn(x):
        context.x = x
        return attend()

    with make(fn, sizes, watch="always") as runner:
        runner.capture()
        for n in (*sizes, *sizes):
            context.x = torch.zeros(7, 4)  # A prefill that runs elsewhere.
            assert torch.equal(run(runner, n), example({"n": n}, 5)["x"])
            assert runner.last_decision.reason is Reason.HIT
        scale.of = torch.zeros(4)
        assert run(runner, sizes[0]).eq(0).all()
        assert runner.last_decision.reason is Reason.INVALIDATED


# -- one walk tells what a callable reads and what it remembers


def test_weight_moved_between_captures_is_held_where_it_is(lab: Lab) -> None:
    model, key = linear(), BatchDescriptor(3)
    capture_program(lab.library, "alone", FULL, KEY, model, (torch.ones(2, 4),))
    model.weight.data = torch.ones(4, 4)
    program = capture_program(lab.library, "alone", FULL, key, model, (torch.ones(3, 4),))
    assert not program.find_moved()
    (held,) = [item for item in program.externals if item.name == "weight"]
    assert held.storage is model.weight.untyped_storage()


@pytest.mark.parametrize("change", [{"scale": 5.0}, {"shift": torch.zeros(4)}])
def test_object_set_between_captures_is_watched(lab: Lab, change) -> None:
    model = SimpleNamespace(adapter=None)

    def step(x):
        return x * model.adapter.scale + model.adapter.shift if model.adapter else x + 1

    capture_program(lab.library, "alone", FULL, KEY, step, (torch.ones(2, 4),))
    model.adapter = SimpleNamespace(scale=2.0, shift=torch.ones(4))
    args = (torch.ones(3, 4),)
    program = capture_program(lab.library, "alone", FULL, BatchDescriptor(3), step, args)
    assert not program.find_moved()
    vars(model.adapter).update(change)
    assert program.find_moved() == [f"model.adapter.{name}" for name in change]


def tripled(module, x):
    return module.inner(x) * OUTER["scale"]


def doubled(module, x):
    return module.inner(x) * 2


WAYS = {
    "function": lambda fn, net: lambda x: fn(net, x),
    "method": MethodType,
    "partial": functools.partial,
}


@pytest.mark.parametrize("way", WAYS)
def test_forward_set_on_a_module_is_watched_until_removed(lab: Lab, monkeypatch, way) -> None:
    net, x = Net(), torch.ones(2, 4)
    model = torch.nn.Sequential(net)

    def capture():
        program = capture_program(lab.library, "alone", FULL, KEY, model, (x,))
        assert not program.find_moved()
        return program

    net.forward = WAYS[way](tripled, net)
    program = capture()
    net.forward = WAYS[way](tripled, net)
    assert not program.find_moved(), "the same code"
    with monkeypatch.context() as patch:
        patch.setitem(OUTER, "scale", 2.0)
        assert program.find_moved()
    if way != "function":
        program = capture()
        net.forward = WAYS[way](doubled, net)
        assert "0.forward" in program.find_moved()
    program = capture()
    del net.forward
    assert "0.forward" in program.find_moved()


def test_one_of_two_places_of_a_module_is_watched(lab: Lab) -> None:
    first = torch.nn.Sequential(linear())
    for place in range(2):
        model = torch.nn.ModuleList([first, first])

        def step(x, model=model):
            return model[1](model[0](x))

        args = (torch.ones(2, 4),)
        program = capture_program(lab.library, f"alone {place}", FULL, KEY, step, args)
        assert not program.find_moved()
        model[place] = torch.nn.Sequential(linear())
        assert program.find_moved()


def test_value_that_a_recording_changes_is_not_watched(lab: Lab) -> None:
    model = SimpleNamespace(count=0, scale=2.0)

    def step(x):
        model.count += 1
        return x * model.scale

    capture_program(lab.library, "alone", FULL, KEY, step, (torch.ones(2),))
    model.count += 1
    assert lab.library.check_externals().is_unchanged
    model.scale = 3.0
    assert not lab.library.check_externals().is_unchanged


def test_entry_added_between_captures_is_held_by_name(lab: Lab) -> None:
    parts = {"a": torch.ones(2)}

    def step(x):
        return x * sum(parts.values())

    capture_program(lab.library, "alone", FULL, KEY, step, (torch.ones(2),))
    parts["b"] = torch.ones(2)
    key = BatchDescriptor(3)
    program = capture_program(lab.library, "alone", FULL, key, step, (torch.ones(2),))
    assert {"parts['a']", "parts['b']"} <= {item.name for item in program.externals}


OUTER, INNER = {"scale": 1.0}, {"scale": 1.0}


def test_hook_added_by_the_inputs_is_read_as_it_is(lab: Lab, monkeypatch) -> None:
    """What the snapshot of the host does not look at is looked at before its walk is used."""
    model, x, hooks = linear(), torch.ones(2, 4), list[Any]()

    def scale(module, args):
        return (args[0] * OUTER["scale"],)

    def make_inputs():
        if not hooks:
            hooks.append(model.register_forward_pre_hook(scale))
        return (x,), {}

    lab.capture_all(CaptureJob(lab.wrap(model), FULL, KEY, make_inputs), warmups=1)
    assert lab.library.check_externals().is_unchanged
    monkeypatch.setitem(OUTER, "scale", 2.0)
    assert not lab.library.check_externals().is_unchanged


def test_one_program_is_captured_by_one_walk(lab: Lab, monkeypatch) -> None:
    model, x = torch.nn.Sequential(linear(), linear()), torch.ones(2, 4)
    calls = []
    follow = Walk.follow
    monkeypatch.setattr(
        Walk, "follow", lambda walk, *args: calls.append(args) or follow(walk, *args)
    )
    for mode in (FULL, RuntimeMode.PIECEWISE):
        capture_program(lab.library, "alone", mode, KEY, model, (x,))
        assert [args[0] for args in calls] == [model]
        calls.clear()


@break_point
def inner(x):
    return x * INNER["scale"]


@break_point
def outer(x):
    return inner(x) * OUTER["scale"]


@pytest.mark.parametrize("scale", [OUTER, INNER])
def test_what_break_points_in_break_points_read_is_noticed(lab: Lab, monkeypatch, scale) -> None:
    def step(x):
        return outer(x) + 1

    for mode in (FULL, RuntimeMode.PIECEWISE):
        capture_program(lab.library, mode.name, mode, KEY, step, (torch.ones(2),))
    monkeypatch.setitem(scale, "scale", 2.0)
    # Eager segments read it afresh at each replay.
    assert {owner for owner, *_ in lab.library.check_externals().invalidated} == {"FULL"}


# -- objects that answer for others


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = linear(), 2.0

    def forward(self, x):
        return self.layer(x)


class Adapted(torch.nn.Module):
    """As PEFT wraps a model: what it does not have itself, its base has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Inner()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x):
        return self.base(x) * self.scale * getattr(self, "extra", 1.0)


class Proxy:
    def __init__(self, of) -> None:
        self.of = of

    def __getattr__(self, name):
        return getattr(self.of, name)


class OfProxy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = Proxy(Proxy(Inner()))

    def forward(self, x):
        return self.base.layer(x) * self.base.scale * getattr(self.base, "extra", 1.0)


BEHIND_A_CLASS = SimpleNamespace(scale=2.0)


class AnsweringClass(type):
    def __getattr__(cls, name):
        return getattr(BEHIND_A_CLASS, name)


class OfClass(torch.nn.Module, metaclass=AnsweringClass):
    @classmethod
    def scaled(cls, x):
        return x * cls.scale

    def forward(self, x):
        return self.scaled(x)


class Computing(Adapted):
    def forward(self, x):
        return self.base(x) * getattr(self, f"sc{'ale'}")


PROXY_CHANGES = [
    (OfClass, lambda model: setattr(BEHIND_A_CLASS, "scale", BEHIND_A_CLASS.scale + 1)),
    (Computing, lambda model: setattr(model.base, "scale", 5.0)),
    (Adapted, lambda model: setattr(model.base, "scale", 5.0)),
    (Adapted, lambda model: setattr(model, "scale", 5.0)),
    (Adapted, lambda model: setattr(model.base, "extra", 5.0)),
    (Adapted, lambda model: setattr(model, "extra", 5.0)),
    (OfProxy, lambda model: setattr(model.base.of.of, "scale", 5.0)),
    (OfProxy, lambda model: setattr(model.base.of, "scale", 5.0)),
    (OfProxy, lambda model: setattr(model.base, "scale", 5.0)),
    (OfProxy, lambda model: setattr(model.base, "layer", torch.nn.Identity())),
    (OfProxy, lambda model: setattr(model.base.of.of, "extra", 5.0)),
    (OfProxy, lambda model: setattr(model.base.of, "extra", 5.0)),
    (OfProxy, lambda model: setattr(model.base, "extra", 5.0)),
]


@pytest.mark.parametrize(("kind", "change"), PROXY_CHANGES)
def test_attribute_found_through_a_proxy_is_noticed(kind, change) -> None:
    model, x = kind(), torch.randn(2, 4)
    with laboratory.rows_runner(model, watch="always") as runner:
        runner.capture()
        assert not runner.report().unwatched
        runner.run({"x": x})
        assert runner.last_decision.mode is FULL
        change(model)
        found = runner.run({"x": x})
        assert runner.last_decision.reason is Reason.INVALIDATED
        with torch.no_grad():
            assert torch.equal(found, model(x))


def test_proxy_that_changes_the_name_is_told() -> None:
    class Renaming(Proxy):
        def __getattr__(self, name):
            name = f"{name}_of_mine"
            inner = self.__dict__["of"]
            return getattr(inner, name)

    of = SimpleNamespace(scale_of_mine=2.0)
    renaming = Renaming(of)
    with laboratory.rows_runner(lambda x: x * renaming.scale) as runner:
        runner.capture()
        (told,) = runner.report().unwatched
        assert told.path == "getattr(inner, ...)"

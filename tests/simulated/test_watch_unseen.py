"""What a callable reads is compared, or the report names it: nothing is passed over in silence."""

from __future__ import annotations

import collections
import configparser
import contextvars
import ctypes
import decimal
import functools
import io
import itertools
import logging
import math
import operator
import os
import queue
import random
import sys
import weakref
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from graphrt import BufferSpec, CUDAGraphRunner, OutputSpec, Padding, Reason, break_point
from graphrt.gc_pause import frozen_heap
from lab import random_rows, rows_runner

load_array, variable_of = np.load, os.getenv


class Settings:
    scale = 2.0


KEPT = Settings()
KEPT.scale = 2.0
VARIABLE = "SCALE_OF_AN_UNSEEN_TEST"


@pytest.fixture(autouse=True)
def process_as_it_was():
    os.environ[VARIABLE] = "2"
    with frozen_heap():
        yield
    os.environ.pop(VARIABLE)
    sys.modules.pop("unseen_settings", None)
    KEPT.scale = 2.0


def text_in_memory():
    kept = io.StringIO("2")

    def fn(x):
        kept.seek(0)
        return x * float(kept.read())

    return fn, lambda: (kept.seek(0), kept.write("3"))


def bytes_in_memory():
    kept = io.BytesIO(b"2")
    return (lambda x: x * float(kept.getvalue())), lambda: (kept.seek(0), kept.write(b"3"))


def state_of_a_partial():
    call = functools.partial(lambda scale, x: x * scale, 2.0)
    other = ((lambda scale, x: x * scale), (3.0,), {}, {})
    return (lambda x: call(x)), lambda: call.__setstate__(other)


def default_of_a_dict():
    kept = collections.defaultdict(lambda: KEPT.scale)

    def fn(x):
        kept.clear()
        return x * kept["a"]

    return fn, lambda: setattr(KEPT, "scale", 3.0)


def other_default_of_a_dict():
    kept = collections.defaultdict(lambda: 2.0)

    def fn(x):
        kept.clear()
        return x * kept["a"]

    return fn, lambda: setattr(kept, "default_factory", lambda: 3.0)


def getter_of_an_attribute():
    return (lambda x: x * operator.attrgetter("scale")(KEPT)), lambda: setattr(KEPT, "scale", 3.0)


def order_of_modules():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
    return (lambda x: model(x)), lambda: model._modules.update(a=model._modules.pop("0"))


def weak_reference():
    found = weakref.ref(KEPT)
    return (lambda x: x * found().scale), lambda: setattr(KEPT, "scale", 3.0)


def weak_dict():
    owner, kept = torch.nn.Identity(), weakref.WeakKeyDictionary()
    kept[owner] = 2.0
    return (lambda x: x * kept[owner]), lambda: kept.update({owner: 3.0})


def queued():
    kept = queue.Queue()
    kept.put(2.0)
    return (lambda x: x * kept.queue[0]), lambda: kept.queue.__setitem__(0, 3.0)


def parsed_settings():
    kept = configparser.ConfigParser()
    kept["a"] = {"scale": "2"}
    return (lambda x: x * kept.getfloat("a", "scale")), lambda: kept["a"].update(scale="3")


def level_of_a_logger():
    logger = logging.getLogger("graphrt.unseen")
    logger.setLevel(10)
    return (lambda x: x * (2 if logger.isEnabledFor(10) else 3)), lambda: logger.setLevel(20)


def cleared_cache():
    holder = SimpleNamespace(weight=torch.ones(4))

    @functools.lru_cache
    def doubled():
        return holder.weight * 2

    def change():
        holder.weight = torch.zeros(4)
        doubled.cache_clear()

    return (lambda x: x * doubled()), change


def result_of_a_cache():
    @functools.cache
    def settings():
        return SimpleNamespace(scale=2.0)

    settings()
    return (lambda x: x * settings().scale), lambda: setattr(settings(), "scale", 3.0)


def registered_later():
    @functools.singledispatch
    def scaled(x):
        return x * 2

    return (lambda x: scaled(x)), lambda: scaled.register(torch.Tensor, lambda x: x * 3)


def member_of_a_metaclass():
    class Meta(type):
        scale = 2.0

    class Own(metaclass=Meta):
        pass

    return (lambda x: x * Own.scale), lambda: setattr(Meta, "scale", 3.0)


def module_by_name():
    module = sys.modules["unseen_settings"] = ModuleType("unseen_settings")
    module.scale = 2.0
    return (lambda x: x * sys.modules["unseen_settings"].scale), lambda: setattr(
        module, "scale", 3.0
    )


def variable_by_name():
    return (lambda x: x * float(os.environ[VARIABLE])), lambda: os.environ.update({VARIABLE: "3"})


def variable_asked_by_name():
    return (lambda x: x * float(os.getenv(VARIABLE))), lambda: os.environ.update({VARIABLE: "3"})


def name_of_a_descriptor():
    class Kept:
        def __set_name__(self, owner, name):
            self.name = "_" + name

        def __get__(self, item, kind=None):
            return self if item is None else item.__dict__[self.name]

    class Own:
        scale = Kept()

        def forward(self, x):
            return x * self.scale

    own = Own()
    own._scale = 2.0
    return own.forward, lambda: setattr(own, "_scale", 3.0)


def asked_by(get):
    def case():
        own, number = SimpleNamespace(scale0=2.0), 0
        return (lambda x: x * get(own, number)), lambda: setattr(own, "scale0", 3.0)

    return case


def parameter_of_a_distribution():
    normal = torch.distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=False)
    return (lambda x: normal.log_prob(x)), lambda: setattr(normal, "loc", torch.ones(4))


READ = {
    case.__name__: case
    for case in (
        text_in_memory,
        bytes_in_memory,
        state_of_a_partial,
        weak_reference,
        weak_dict,
        queued,
        parsed_settings,
        level_of_a_logger,
        cleared_cache,
        result_of_a_cache,
        registered_later,
        member_of_a_metaclass,
        default_of_a_dict,
        other_default_of_a_dict,
        getter_of_an_attribute,
        order_of_modules,
        module_by_name,
        variable_by_name,
        variable_asked_by_name,
        name_of_a_descriptor,
        parameter_of_a_distribution,
    )
} | {
    "vars": asked_by(lambda own, number: vars(own)["scale" + str(number)]),
    "dict": asked_by(lambda own, number: own.__dict__[f"scale{number}"]),
    "dict_get": asked_by(lambda own, number: own.__dict__.get(f"scale{number}")),
}


@pytest.mark.parametrize("name", READ)
def test_what_standard_objects_hold_is_noticed(name) -> None:
    fn, change = READ[name]()
    with rows_runner(fn) as runner, torch.no_grad():
        runner.capture()
        assert not runner.report().unwatched
        laps = math.ceil(runner.num_watched / 4)
        for _ in range(laps):
            runner.run(random_rows({"n": 2}, 5))
            assert runner.last_decision.reason is Reason.HIT
        change()
        for _ in range(laps):
            out = runner.run(random_rows({"n": 2}, 5))
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, fn(**random_rows({"n": 2}, 5)))


def file_that_is_read(folder):
    path = folder / "scale"
    path.write_text("2")

    def fn(x):
        with open(path) as file:
            return x * float(file.read())

    return fn


def computed_variable(_):
    names = {"a": VARIABLE}
    return lambda x: x * float(os.environ[names["a"]])


def variable_of_a_local_name(_):
    def fn(x):
        for name in (VARIABLE, "HOME"):
            return x * float(os.getenv(name))

    return fn


def pointer(_):
    found = ctypes.pointer(ctypes.c_double(2.0))
    return lambda x: x * found.contents.value


def iterated(_):
    numbers = itertools.count()

    def fn(x):
        next(numbers)
        return x * 2

    return fn


def proxy(_):
    found = weakref.proxy(KEPT)
    return lambda x: x * found.scale


def weak_dict_of_others(_):
    kept = weakref.WeakKeyDictionary({KEPT: 2.0})
    return lambda x: x * sum(kept.values())


def generator(_):
    numbers = (number for number in range(10_000))

    def fn(x):
        next(numbers)
        return x * 2

    return fn


def object_in_a_context(_):
    variable = contextvars.ContextVar("settings")
    variable.set(SimpleNamespace(scale=2.0))
    return lambda x: x * variable.get().scale


def objects_in_a_long_list(_):
    values = [SimpleNamespace(scale=2.0)] * 5000
    return lambda x: x * values[4000].scale


def own_random(_):
    numbers = random.Random(0)

    def fn(x):
        numbers.random()
        return x * 2

    return fn


def simple_queue(_):
    kept = queue.SimpleQueue()
    return lambda x: x * (3 if kept.qsize() else 2)


def array_in_a_file(folder):
    path = folder / "scale.npy"
    np.save(path, 2.0)
    return lambda x: x * float(np.load(path))


def array_by_another_name(folder):
    path = folder / "scale.npy"
    np.save(path, 2.0)
    return lambda x: x * float(load_array(path))


def tensor_in_a_file(folder):
    path = folder / "scale.pt"
    torch.save(2.0, path)
    return lambda x: x * torch.load(path)


def file_that_exists(folder):
    path = folder / "flag"
    return lambda x: x * (3 if path.exists() else 2)


class Dequantised(torch.nn.Module):
    """Keeps what it makes of a tensor, until ``fact`` says that this is another."""

    _version = 1

    def __init__(self, fact):
        super().__init__()
        self.quantised, self.fact = torch.ones(4), fact
        self.known, self.weight = fact(self), self.quantised * self._version

    def forward(self, x):
        if self.fact(self) != self.known:
            self.known, self.weight = self.fact(self), self.quantised * self._version
        return x * self.weight


def memo_by_writes(_):
    return Dequantised(lambda model: model.quantised._version)


def memo_by_address(_):
    return Dequantised(lambda model: model.quantised.data_ptr())


NAMED = {
    memo_by_writes: ("_version", "how often a tensor was written is not compared"),
    memo_by_address: (
        "data_ptr",
        "where a tensor lies is compared only if a graph reads the tensor",
    ),
    array_in_a_file: ("load()", "files are not compared"),
    array_by_another_name: ("load_array()", "files are not compared"),
    tensor_in_a_file: ("load()", "files are not compared"),
    file_that_exists: ("exists()", "files are not compared"),
    (lambda _: lambda x: x * float(variable_of(VARIABLE))): (
        "variable_of()",
        "it has another name here",
    ),
    file_that_is_read: ("open()", "files are not compared"),
    computed_variable: ("os.environ", "the name of the variable is computed"),
    variable_of_a_local_name: ("os.getenv", "the name of the variable is computed"),
    pointer: ("found", "what it points at is not compared"),
    iterated: ("numbers", "each read advances it"),
    generator: ("numbers", "each read advances it"),
    own_random: ("numbers", "each read advances it"),
    proxy: ("found", "what it stands for is kept by others alone"),
    weak_dict_of_others: ("kept", "other threads and later steps find other objects in it"),
    object_in_a_context: ("variable", "other threads and later steps find other objects in it"),
    objects_in_a_long_list: ("values", "of more than 4096 elements, none is followed"),
    simple_queue: ("kept", "its contents cannot be read"),
    (lambda _: lambda x: x * eval("KEPT.scale")): ("eval()", "what it names is in a string"),
    (lambda _: lambda x: x * len(os.getcwd())): ("getcwd()", "it is state of the process"),
    (lambda _: lambda x: x * torch.get_num_threads()): (
        "get_num_threads()",
        "it is state of the process",
    ),
    (lambda _: lambda x: x * len(np.geterr())): ("geterr()", "it is state of the process"),
    (lambda _: lambda x: x * sys.getrecursionlimit()): (
        "getrecursionlimit()",
        "it is state of the process",
    ),
    (lambda folder: lambda x: x * (1 + len(list(folder.glob("*"))))): (
        "glob()",
        "files are not compared",
    ),
    (lambda _: lambda x: x * (decimal.getcontext().prec > 1)): (
        "getcontext()",
        "it is state of the interpreter",
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_cannot_be_compared_is_named_once(case, tmp_path) -> None:
    path, because = NAMED[case]
    with rows_runner(case(tmp_path)) as runner, torch.no_grad():
        runner.capture()
        report = runner.report()
        (item,) = report.unwatched
        assert (item.path, item.because) == (path, because)
        assert item.source.file == __file__
        assert str(item) in str(report)
        program = runner.library.programs[0]
        assert f"not watched: {item}" in runner.explain(program)
        runner.run(random_rows({"n": 2}, 5))
        assert runner.last_decision.reason is Reason.HIT


def test_what_holds_no_data_is_not_named() -> None:
    logger, lock = logging.getLogger("graphrt.unseen"), __import__("threading").Lock()

    def fn(x):
        logger.debug("a step of %s", x.shape)
        with lock:
            return torch.nn.functional.relu(x) * math.pi

    with rows_runner(fn) as runner, torch.no_grad():
        runner.capture()
        assert not runner.report().unwatched


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "head"), [("Llama", "ForCausalLM"), ("Qwen3", "ForCausalLM"), ("Bert", "Model")]
)
def test_models_of_transformers_have_nothing_that_cannot_be_watched(family, head) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**SMALL, use_cache=False)
    model = getattr(transformers, f"{family}{head}")(config).eval()

    def fn(ids, mask):
        return model(input_ids=ids, attention_mask=mask)[0]

    def masked(sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.ones(sizes["n"], 8, dtype=torch.int64)
        mask[:, : 1 + seed % 3] = 0
        return {"ids": torch.randint(0, 64, (sizes["n"], 8), generator=generator), "mask": mask}

    runner = CUDAGraphRunner(
        fn,
        inputs=[
            BufferSpec("ids", ("n", 8), torch.int64, Padding.fill(0, arbitrary=True)),
            BufferSpec("mask", ("n", 8), torch.int64, Padding.fill(1)),
        ],
        outputs=OutputSpec({"": "n"}),
        sizes={"n": [2]},
        examples=masked,
        device="simulated",
    )
    with runner, torch.no_grad():
        runner.capture()
        assert not runner.report().unwatched


def test_weak_reference_keeps_nothing_alive() -> None:
    class Own:
        scale = 2.0

    own = Own()
    found, ended = weakref.ref(own), []
    weakref.finalize(own, ended.append, True)
    with (
        rows_runner(lambda x: x * (2 if found() is None else found().scale)) as runner,
        torch.no_grad(),
    ):
        runner.capture()
        del own
        assert ended
        for _ in range(math.ceil(runner.num_watched / 4)):
            runner.run(random_rows({"n": 2}, 5))
        assert runner.last_decision.reason is Reason.INVALIDATED


class SetsAside(torch.nn.Module):
    """Each run keeps a part of the weight apart, which a capture puts back."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.kept_apart = None

    @break_point
    def part(self, weight):
        self.kept_apart = weight

    def forward(self, x):
        self.part(self.weight[0])
        return x @ self.weight


def test_tensor_that_was_put_back_to_none_is_told_by_its_name():
    with rows_runner(SetsAside(), modes=["PIECEWISE"]) as runner:
        runner.capture()
        for _ in range(3):
            x = torch.ones(2, 4)
            assert torch.equal(runner.run({"x": x}), x * 4)
            assert runner.last_decision.reason is Reason.INVALIDATED
        assert "kept_apart" in runner.explain()

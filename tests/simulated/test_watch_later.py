"""What comes later to where a callable looks is noticed: entries of dicts, attributes that hide
what was found, functions of objects that took a place; also in packages that are installed."""

from __future__ import annotations

import functools
import importlib
import io
import math
import operator
import os
import sys
from collections import ChainMap, UserDict
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from graphrt import BufferSpec, Padding, Reason
from graphrt.gc_pause import frozen_heap
from lab import random_rows, rows_runner


@pytest.fixture(autouse=True)
def quick_collections():
    with frozen_heap():
        yield


def rounds(runner, values=None):
    """As many runs as look at every place once, or until a change is noticed. The last result."""
    for _ in range(math.ceil(runner.num_watched / 4)):
        out = runner.run(values or random_rows({"n": 2}, 5))
        if runner.last_decision.reason is Reason.INVALIDATED:
            break
    return out


def require_noticed(fn, change, **options) -> None:
    """A hit before the change, the right rows and INVALIDATED after it."""
    values = options.pop("values", random_rows)({"n": 2}, 5)
    with rows_runner(fn, **options) as runner, torch.no_grad():
        runner.capture()
        assert not runner.report().unwatched
        runner.run(values)
        assert runner.last_decision.reason is Reason.HIT
        change()
        assert torch.equal(rounds(runner, values), fn(**values))
        assert runner.last_decision.reason is Reason.INVALIDATED


def require_hit(fn, change) -> None:
    with rows_runner(fn) as runner, torch.no_grad():
        runner.capture()
        assert not runner.report().unwatched
        change()
        assert torch.equal(rounds(runner), fn(**random_rows({"n": 2}, 5)))
        assert runner.last_decision.reason is Reason.HIT


# -- objects that answer for attributes out of a dict


class Entries:
    def __init__(self, **entries) -> None:
        self.__dict__["own"] = entries

    def __getattr__(self, name):
        try:
            return self.__dict__["own"][name]
        except KeyError:
            raise AttributeError(name) from None


class Layers:
    def __init__(self, **entries) -> None:
        self.over, self.own = {}, entries

    def __getattr__(self, name):
        for entries in (self.__dict__["over"], self.__dict__["own"]):
            if name in entries:
                return entries[name]
        raise AttributeError(name)


class First:
    def __init__(self, **entries) -> None:
        self.own = entries

    def __getattribute__(self, name):
        entries = object.__getattribute__(self, "__dict__")["own"]
        return entries[name] if name in entries else object.__getattribute__(self, name)


class Asked(torch.nn.Module):
    def __init__(self, **entries) -> None:
        super().__init__()
        self.own = entries

    def __getattr__(self, name):
        own = super().__getattribute__("__dict__").get("own", {})
        return own[name] if name in own else super().__getattr__(name)


class Dict(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class PlainDict(dict):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


def entries_of(found):
    return found if isinstance(found, dict) else object.__getattribute__(found, "__dict__")["own"]


ENTRY_CHANGES = {
    "replaced": lambda found: entries_of(found).update(scale=5.0),
    "added": lambda found: entries_of(found).update(extra=5.0),
    "hidden": lambda found: object.__setattr__(found, "scale", 5.0),
    "hidden_added": lambda found: object.__setattr__(found, "extra", 5.0),
}


ANSWERING = [
    (kind, change)
    for kind in (Entries, Layers, First, Asked, Dict, PlainDict)
    for change in ENTRY_CHANGES
    if not (kind is First and change.startswith("hidden"))  # Its entries come first.
]


@pytest.mark.parametrize(("kind", "change"), ANSWERING)
def test_entry_that_an_object_answers_with_is_noticed(kind, change) -> None:
    found = kind(scale=2.0)

    def fn(x):
        return x * found.scale * (getattr(found, "extra", 1.0) or 1.0)

    require_noticed(fn, lambda: ENTRY_CHANGES[change](found))


@pytest.mark.parametrize("num_others", [0, 300])
def test_attribute_that_takes_the_place_of_another_is_noticed(num_others) -> None:
    """As many as before."""
    found = Entries(scale=2.0)
    for number in range(num_others):
        setattr(found, f"other{number}", number)
    found.unread = 1.0

    def change():
        if not num_others:
            del found.unread
        found.scale = 5.0

    require_noticed(lambda x: x * found.scale, change)


@pytest.mark.parametrize("way", ["entry", "dict", "class"])
def test_entry_that_hides_another_is_noticed(way) -> None:
    found = type("Own", (Layers,), {})(scale=2.0)
    changes = {
        "entry": lambda: found.over.update(scale=5.0),
        "dict": lambda: setattr(found, "over", {"scale": 5.0}),
        "class": lambda: setattr(type(found), "scale", 5.0),
    }
    require_noticed(lambda x: x * found.scale, changes[way])


def test_entry_that_a_module_asks_itself_for_is_noticed() -> None:
    class Own(Asked):
        def forward(self, x):
            return x * self.scale

        def __getattr__(self, name):
            for entries in (self.__dict__["over"], self.__dict__["own"]):
                if name in entries:
                    return entries[name]
            return super().__getattr__(name)

    model = Own(scale=2.0)
    model.__dict__["over"] = {}
    require_noticed(lambda x: model(x), lambda: model.__dict__["over"].update(scale=5.0))


@pytest.mark.parametrize("register", ["attribute", "parameter", "buffer"])
def test_what_is_registered_before_an_answer_is_noticed(register) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = SimpleNamespace(scale=torch.tensor(2.0))

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.__dict__["base"], name)

    model, other = Outer(), torch.tensor(5.0)
    changes = {
        "attribute": lambda: model.__dict__.update(scale=other),
        "parameter": lambda: model._parameters.update(scale=torch.nn.Parameter(other)),
        "buffer": lambda: model._buffers.update(scale=other),
    }
    require_noticed(lambda x: x * model.scale, changes[register])


def test_object_that_keeps_its_answers_stays_a_hit() -> None:
    class Keeping:
        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            setattr(self, name, 2.0)
            return 2.0

    kept = Keeping()

    def fn(x):
        return x * kept.late if x.shape[0] > 2 else x * kept.scale

    require_hit(fn, lambda: fn(torch.ones(3, 4)))


# -- entries of dicts, by whatever name the code asks


def by_variable(s, x):
    found = s.flat
    return x * found.get("extra", 1.0)


def by_parameter(s, x):
    def ask(settings):
        return settings.get("extra", 1.0)

    return x * ask(s.flat)


def below_a_dict(s, x):
    return x * s.nested["a"].get("extra", 1.0)


def contained_below(s, x):
    return x * (s.nested["a"]["extra"] if "extra" in s.nested["a"] else s.flat["scale"])


def in_a_list(s, x):
    for found in s.listed:
        if "scale" in found:
            return x * found["scale"]
    return x * 1


def in_a_generator(s, x):
    return x * next((found["scale"] for found in s.listed if "scale" in found), 1.0)


def by_a_key_that_is_read(s, x):
    for found in s.nested.values():
        if s.key in found:
            x = x * found[s.key]
    return x * 1


def of_two(s, x):
    for found in (s.empty, s.flat):
        if "scale" in found:
            return x * found["scale"]
    return x * 1


ENTRIES = {
    by_variable: lambda s: s.flat.update(extra=5.0),
    by_parameter: lambda s: s.flat.update(extra=5.0),
    below_a_dict: lambda s: s.nested["a"].update(extra=5.0),
    contained_below: lambda s: s.nested["a"].update(extra=5.0),
    in_a_list: lambda s: s.listed[0].update(scale=5.0),
    in_a_generator: lambda s: s.listed[0].update(scale=5.0),
    by_a_key_that_is_read: lambda s: s.nested["a"].update(extra=5.0),
    of_two: lambda s: s.empty.update(scale=5.0),
    (lambda s, x: x * s.empty.get(3, 1.0)): lambda s: s.empty.update({3: 5.0}),
    (lambda s, x: x * s.empty.get((1, 2), 1.0)): lambda s: s.empty.update({(1, 2): 5.0}),
    (lambda s, x: x * s.chain["scale"]): lambda s: s.chain.update(scale=5.0),
    (lambda s, x: x * s.user.get("extra", 1.0)): lambda s: s.user.update(extra=5.0),
    (lambda s, x: x * ChainMap(s.empty, s.flat)["scale"]): lambda s: s.empty.update(scale=5.0),
    (lambda s, x: x * vars(s).get("empty").get("extra", 1.0)): lambda s: s.empty.update(extra=5.0),
}


def settings():
    return SimpleNamespace(
        flat={"scale": 2.0},
        nested={"a": {"b": 1.0}},
        listed=[{"b": 1.0}, {"scale": 2.0}],
        empty={},
        chain=ChainMap({}, {"scale": 2.0}),
        user=UserDict(scale=2.0),
        key="extra",
    )


@pytest.mark.parametrize("read", ENTRIES)
def test_entry_that_comes_under_a_constant_of_the_code_is_noticed(read) -> None:
    found = settings()
    require_noticed(lambda x: read(found, x), lambda: ENTRIES[read](found))


def test_entry_under_a_text_that_no_code_has_is_a_hit() -> None:
    found = settings()
    require_hit(lambda x: by_variable(found, x), lambda: found.flat.update(unrelated=5.0))


def test_memo_that_the_code_fills_under_a_text_is_a_hit() -> None:
    memo = {}

    def fn(x):
        key = "large" if x.shape[0] > 2 else "small"
        memo[key] = 2.0
        return x * 2

    require_hit(fn, lambda: fn(torch.ones(3, 4)))


# -- containers that code fills and empties


def merged(s, x):
    if x.shape[0] > 100:
        s.merged.pop()
    return x * 2 if bool(s.merged) else x * 3


def test_container_that_is_filled_is_noticed() -> None:
    found = SimpleNamespace(merged=[])
    require_noticed(lambda x: merged(found, x), lambda: found.merged.append("default"))


def test_container_that_gets_more_is_a_hit_where_code_changes_it() -> None:
    found = SimpleNamespace(merged=["default"])
    require_hit(lambda x: merged(found, x), lambda: found.merged.append("other"))


# -- what another object took the place of


class Calls:
    def __init__(self, call) -> None:
        self.call = call

    def __call__(self, x):
        return self.call(x)


class CallsInModule(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


class Scales:
    def double(self, x):
        return x * 2

    def triple(self, x):
        return x * 3


def doubled(x):
    return x * 2


def tripled(x):
    return x * 3


SCALES = Scales()
OTHER_CALLS = {
    "functions": (doubled, tripled),
    "builtin": (torch.sigmoid, torch.relu),
    "methods": (SCALES.double, SCALES.triple),
    "partials": (functools.partial(torch.mul, other=2), functools.partial(torch.add, other=2)),
    "objects": (Calls(doubled), Calls(tripled)),
    "classes": (Calls(doubled), SimpleNamespace(call=tripled)),
}


@pytest.mark.parametrize("kind", [Calls, CallsInModule])
@pytest.mark.parametrize("name", OTHER_CALLS)
def test_function_of_an_object_that_took_a_place_is_noticed(kind, name) -> None:
    before, after = OTHER_CALLS[name]
    if name == "classes":
        before, after = kind(doubled), type("Other", (Calls,), {"__call__": lambda s, x: x * 3})(0)
    owner = SimpleNamespace(call=kind(before))
    require_noticed(lambda x: owner.call(x), lambda: setattr(owner, "call", kind(after)))


def test_object_with_the_same_function_may_take_a_place() -> None:
    owner = SimpleNamespace(call=Calls(doubled))
    require_hit(lambda x: owner.call(x), lambda: setattr(owner, "call", Calls(doubled)))


def test_attribute_that_hides_a_called_method_is_noticed() -> None:
    owner = Scales()
    require_noticed(lambda x: owner.double(x), lambda: setattr(owner, "double", tripled))


def getter():
    found = [operator.itemgetter(0)]
    return (lambda x: x * found[0]((2.0, 3.0))), lambda: found.__setitem__(
        0, operator.itemgetter(1)
    )


def ufunc():
    found = SimpleNamespace(call=np.add)
    return (lambda x: x * float(found.call(2.0, 3.0))), lambda: setattr(found, "call", np.multiply)


def ufunc_of_python():
    found = SimpleNamespace(call=np.frompyfunc(doubled, 1, 1))
    other = np.frompyfunc(tripled, 1, 1)
    return (lambda x: x * float(found.call(2.0))), lambda: setattr(found, "call", other)


def vectorized():
    found = SimpleNamespace(call=np.vectorize(doubled))
    other = np.vectorize(tripled)
    return (lambda x: x * float(found.call(2.0))), lambda: setattr(found, "call", other)


def vectorized_function():
    found = np.vectorize(doubled)
    return (lambda x: x * float(found(2.0))), lambda: setattr(found, "pyfunc", tripled)


def mask():
    found = np.ma.array([1.0, 2.0], mask=[False, False])
    return (lambda x: x * float(found.sum())), lambda: found.mask.__setitem__(0, True)


def caught():
    found = SimpleNamespace()

    def fn(x):
        try:
            return x * found.scale
        except AttributeError:
            return x * 1

    return fn, lambda: setattr(found, "scale", 5.0)


def suppressed():
    found = SimpleNamespace()

    def fn(x):
        with suppress(AttributeError):
            return x * found.scale
        return x * 1

    return fn, lambda: setattr(found, "scale", 5.0)


IN_C = [getter, ufunc, ufunc_of_python, vectorized, vectorized_function, mask]


@pytest.mark.parametrize("case", [*IN_C, caught, suppressed])
def test_value_that_code_in_c_or_a_handler_hides_is_noticed(case) -> None:
    require_noticed(*case())


def test_equal_getter_may_take_a_place() -> None:
    found = [operator.itemgetter(0)]
    require_hit(
        lambda x: x * found[0]((2.0, 3.0)), lambda: found.__setitem__(0, operator.itemgetter(0))
    )


# -- installed packages


PACKAGE = """
import functools
import torch
from types import SimpleNamespace

class Schedule:
    order = 1
    def __init__(self):
        self.sigma, self.table, self.count = 2.0, torch.arange(4.0), 0
        self.names, self._config = {"a": 1.0}, SimpleNamespace(shift=1.0)
        self.inner = torch.nn.Linear(4, 4)
    @property
    def config(self):
        return self._config
    def step(self, x):
        if x.shape[0] > 100:
            self.count += 1
        x = self.scaled(self.inner(x)) + self.table + self.config.shift
        return x + self.names.get("b", 0.0)
    def scaled(self, x):
        return x * self.sigma * self.order

class Hook:
    scale = 2.0
    def after(self, out):
        return out * self.scale

class Called:
    scale = 2.0
    def __call__(self, x):
        return self.forward(x)
    def forward(self, x):
        return x * self.scale

def hooked(module, *args, **kwargs):
    return module.hook.after(module.before(*args, **kwargs))

def add_hook(module):
    module.hook, module.before = Hook(), module.forward
    call = functools.partial(hooked, module)
    module.forward = functools.update_wrapper(call, module.before)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "a_package_apart").mkdir()
    (tmp_path / "a_package_apart" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "a_package_apart-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("a_package_apart")
    sys.modules.pop("a_package_apart")


SCHEDULE_CHANGES = {
    "value": lambda s: setattr(s, "sigma", 5.0),
    "tensor": lambda s: setattr(s, "table", torch.ones(4)),
    "below": lambda s: setattr(s._config, "shift", 5.0),
    "object": lambda s: setattr(s, "_config", SimpleNamespace(shift=5.0)),
    "member": lambda s: setattr(s, "order", 5),
    "entry": lambda s: s.names.update(b=5.0),
    "method": lambda s: setattr(s, "scaled", tripled),
    "called": lambda s: setattr(s, "step", tripled),
    "weight": lambda s: setattr(s.inner, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "module": lambda s: setattr(s, "inner", torch.nn.Identity()),
}


@pytest.mark.parametrize("change", SCHEDULE_CHANGES)
def test_object_of_an_installed_package_is_watched(package, change) -> None:
    found = package.Schedule()
    require_noticed(lambda x: found.step(x), lambda: SCHEDULE_CHANGES[change](found))


@pytest.mark.parametrize("is_own", [True, False])
def test_method_that_a_call_of_an_installed_class_runs_is_read(package, is_own) -> None:
    class Own(package.Called):
        bias = 1.0

        def forward(self, x):
            return x * self.scale + self.bias

    found = Own() if is_own else package.Called()
    name = "bias" if is_own else "scale"
    require_noticed(lambda x: found(x), lambda: setattr(found, name, 5.0))


def test_count_of_an_installed_package_stays_a_hit(package) -> None:
    found = package.Schedule()
    require_hit(lambda x: found.step(x), lambda: setattr(found, "count", 100))


def test_code_that_modules_are_made_to_call_is_read(package) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    package.add_hook(model[1])
    require_noticed(lambda x: model(x), lambda: setattr(model[1].hook, "scale", 5.0))


# -- libraries that people use


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def with_adapters():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SMALL, use_cache=False)
    described = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), described)
    model.add_adapter("other", described)
    return model.eval()


def adapted_layer(model):
    return model.base_model.model.model.layers[0].self_attn.q_proj


ADAPTER_CHANGES = {
    "switched": lambda model: model.set_adapter("other"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "scaled": lambda model: adapted_layer(model).scaling.update(default=7.0),
    "hook": lambda model: adapted_layer(model).register_forward_hook(lambda *of: of[2] * 2),
}


def token_rows(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, 64, (sizes["n"], 8), generator=generator)}


@pytest.mark.filterwarnings("ignore")  # Of the library, about others.
@pytest.mark.parametrize("change", ADAPTER_CHANGES)
def test_change_of_adapters_is_noticed_and_nothing_is_named(change) -> None:
    model = with_adapters()
    require_noticed(
        lambda ids: model(input_ids=ids)[0],
        lambda: ADAPTER_CHANGES[change](model),
        inputs=[BufferSpec("ids", ("n", 8), torch.int64, Padding.fill(0, arbitrary=True))],
        examples=token_rows,
        values=token_rows,
    )


def hooks_of_accelerate():
    hooks = pytest.importorskip("accelerate.hooks")

    class Scaling(hooks.ModelHook):
        scale = 2.0

        def post_forward(self, module, output):
            return output * self.scale

    return hooks, Scaling()


@pytest.mark.parametrize("change", ["value", "another", "removed"])
def test_hook_of_accelerate_is_watched(change) -> None:
    hooks, hook = hooks_of_accelerate()
    layer = torch.nn.Linear(4, 4)
    hooks.add_hook_to_module(layer, hook)
    changes = {
        "value": lambda: setattr(hook, "scale", 5.0),
        "another": lambda: hooks.add_hook_to_module(layer, type(hook)(), append=True),
        "removed": lambda: hooks.remove_hook_from_module(layer),
    }
    require_noticed(lambda x: layer(x), changes[change])


# -- what is only written to


def test_file_that_is_only_written_is_not_named() -> None:
    with open(os.devnull, "w") as text, open(os.devnull, "wb") as raw:

        def fn(x):
            for out in (text, sys.stderr, sys.stdout):
                out.write("")
            raw.write(b"")
            if sys.stderr is None:
                sys.stderr = text
            return x * 2

        require_hit(fn, lambda: None)


def test_file_that_is_read_and_written_is_named(tmp_path) -> None:
    path = tmp_path / "scale"
    path.write_text("2")
    for kept in (path.open("r+"), path.open("r+b"), io.TextIOWrapper(path.open("r+b"))):
        with kept, rows_runner(lambda x, kept=kept: x * (1 + kept.tell())) as runner:
            runner.capture()
            (item,) = runner.report().unwatched
            assert item.path == "kept"
